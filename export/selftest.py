"""Compares an exported MLLM with its source: the same prompts through llama.cpp and through torch.

torch runs in a process of its own. The source continues each prompt greedily; the exported model is given those
same tokens, and at every one of them both say what they would have written.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import HoverlensError
from ..runtime.gguf import Array, GGUFHeader, read_gguf_header
from ..runtime.memory import available_bytes
from ..runtime.mllm.chat import ChatFormat
from ..runtime.mllm.llama_native import Context, Model, Projector
from ..runtime.paths import make_cache_dir
from .checkpoint import Checkpoint

#: Of F16 features, at the worst token; what is left is the order of additions and half precision.
LEAST_COSINE = 0.999

#: Share of tokens on which an unquantised model must agree with its source.
LEAST_AGREEMENT = 0.9

#: Encoders whose patches are cut here; the features of others are not compared.
_PATCHED = ("qwen3vl_merger",)

#: Width and height of the test pictures: whole patches, so that neither side resizes; not square on purpose.
SIZE = (320, 256)

QUESTIONS = (
    "How many vehicles are in the image?",
    "Describe what the drone sees.",
    "Is the road free of obstacles? Answer yes or no.",
    "Where is the nearest building?",
)
_SYSTEM = "You look at aerial images taken by a drone and answer questions about them."
N_TOKENS = 16
_KEPT_REFERENCES = 4

Note = Callable[[str], None]


@dataclass(frozen=True)
class SelfTest:
    """What a self-test found.

    Attributes:
        token_agreement: Share of positions at which both would write the same token.
        logit_error: Root mean square of the logits' differences, over the standard deviation of the source's.
        kl: Mean Kullback-Leibler divergence of the exported from the source's distribution, nats.
        widest_gap: Largest difference of the source's two best logits where the two disagree; 0 without any.
        cosine: Least cosine of a visual token's features with the source's; None if not compared.
        tokens_equal: Both tokenizers cut the prompts alike.
        positions: Number of tokens compared.
        note: What was left out, and why.
    """

    token_agreement: float
    logit_error: float
    kl: float
    widest_gap: float
    cosine: float | None
    tokens_equal: bool
    positions: int
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As the sidecar holds it."""
        return {k: round(v, 6) if isinstance(v, float) else v for k, v in vars(self).items() if v != ""}


def why_not(checkpoint: Checkpoint, mllm_bytes: int) -> str | None:
    """Why the self-test cannot run here, or None."""
    # Single precision, and the largest tensor once more while it loads.
    needed = int(4.4 * checkpoint.n_params + 1.2 * mllm_bytes + 5e8)
    free = available_bytes()
    if free is not None and needed > free:
        return f"needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are available"
    return None


def run_selftest(
    checkpoint: Checkpoint,
    source: Path,
    key: str,
    mllm: Path,
    mmproj: Path,
    *,
    threads: int = 1,
    note: Note = lambda _: None,
) -> SelfTest:
    """Runs it.

    Args:
        checkpoint: The source.
        source: Folder to load it from; the checkpoint's own, or links to its data files.
        key: Stands for the source's content; torch's part is kept by it for the next quantisation.
        mllm: The exported text model.
        mmproj: Its projector.
        threads: CPU threads of either side.
        note: Called with what is going on.

    Raises:
        HoverlensError: Either side failed to run.
    """
    header = read_gguf_header(mmproj)
    model = Model(mllm, 0)
    projector = context = None
    try:
        projector = Projector(mmproj, model, threads, None, None)
        plan = _plan(checkpoint, model, projector, header)
        reference = _reference(plan, source, key, threads, note)
        note("self-test: the exported model")
        context = Context(model, 2048, 2, 256, threads, False)
        return _compare(plan, reference, model, projector, context)
    finally:
        for handle in (context, projector, model):
            if handle is not None:
                handle.close()


def verdict(result: SelfTest, quant: str, mmproj_quant: str) -> str | None:
    """What is wrong with a result, or None. Of quantised types only the tokens' cutting is judged: how much they
    lose is the user's choice, and the figures are recorded."""
    plain = ("F32", "F16", "BF16")
    if not result.tokens_equal:
        return "llama.cpp and the source cut the prompts into different tokens"
    if mmproj_quant in plain and result.cosine is not None and result.cosine < LEAST_COSINE:
        return f"the visual features are off: cosine {result.cosine:.4f}, needed {LEAST_COSINE}"
    if quant in plain and mmproj_quant in plain and result.token_agreement < LEAST_AGREEMENT:
        return f"the {quant} model agrees on {result.token_agreement:.0%} of tokens, needed {LEAST_AGREEMENT:.0%}"
    return None


# -- prompts -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Prompt:
    before: tuple[int, ...]
    image: NDArray[np.uint8] | None
    after: tuple[int, ...]
    ids: tuple[int, ...]
    grid: tuple[int, int, int] | None
    pixels: NDArray[np.float32] | None


@dataclass(frozen=True)
class _Plan:
    prompts: tuple[_Prompt, ...]
    texts: tuple[str, ...]
    text_ids: tuple[tuple[int, ...], ...]
    note: str


def _plan(checkpoint: Checkpoint, model: Model, projector: Projector, header: GGUFHeader) -> _Plan:
    chat = ChatFormat.from_template(model.meta("tokenizer.chat_template"))
    kind = header.get("clip.projector_type") or header.get("clip.vision.projector_type")
    sees = kind in _PATCHED
    image_token = checkpoint.config.get("image_token_id")
    note = "" if sees else f"pictures not compared: patches of {kind} are not cut here"
    prompts, texts = [], []
    for i, question in enumerate(QUESTIONS):
        head = chat.before_system + _SYSTEM + chat.before_user
        tail = f"\nQuestion: {question}\n" + chat.after_user
        before, after = model.tokenize(head, True), model.tokenize(tail, True)
        if model.add_bos and (not before or before[0] != model.bos):
            before = (model.bos, *before)
        texts += [head, tail]
        if not sees:
            prompts.append(_Prompt(before, None, after, before + after, None, None))
            continue
        picture = _picture(i)
        middle: list[int] = []
        for chunk in projector.tokenize(picture):
            middle += chunk.tokens if chunk.tokens is not None else [int(image_token or 0)] * chunk.n_tokens
        pixels, grid = _patches(picture, header)
        ids = (*before, *middle, *after)
        prompts.append(_Prompt(before, picture, after, ids, grid, pixels))
    return _Plan(tuple(prompts), tuple(texts), tuple(model.tokenize(t, True) for t in texts), note)


def _picture(seed: int) -> NDArray[np.uint8]:
    """Ground with a slope of light, fields and vehicles: smooth areas and edges, as a photo has."""
    generator = np.random.Generator(np.random.PCG64(seed))
    width, height = SIZE
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    picture = np.stack([90 + 60 * x / width, 110 + 50 * y / height, 70 + 30 * (x + y) / (width + height)], -1)
    for _ in range(12):
        w, h = generator.integers(12, 90, 2)
        left, top = int(generator.integers(0, width - w)), int(generator.integers(0, height - h))
        picture[top : top + h, left : left + w] = generator.integers(0, 256, 3)
    return np.ascontiguousarray(picture.astype(np.uint8))


def _patches(rgb: NDArray[np.uint8], header: GGUFHeader) -> tuple[NDArray[np.float32], tuple[int, int, int]]:
    """Patches as Qwen's processor orders them, float32 (n, channels * frames * patch * patch): groups that are merged
    into one token stand together; a still picture is two equal frames."""
    mean, std = (_floats(header, f"clip.vision.image_{k}") for k in ("mean", "std"))
    patch = int(header.get("clip.vision.patch_size"))
    merge = int(header.get("clip.vision.spatial_merge_size", 2))
    image = ((rgb.astype(np.float32) / 255.0 - mean) / std).transpose(2, 0, 1)
    rows, columns = image.shape[1] // patch, image.shape[2] // patch
    frames = np.stack([image, image])
    cut = frames.reshape(2, 3, rows // merge, merge, patch, columns // merge, merge, patch)
    cut = cut.transpose(2, 5, 3, 6, 1, 0, 4, 7)
    return np.ascontiguousarray(cut.reshape(rows * columns, -1), dtype=np.float32), (1, rows, columns)


def _floats(header: GGUFHeader, key: str) -> NDArray[np.float32]:
    value = header.get(key)
    return np.array(value.first if isinstance(value, Array) else [0.5] * 3, np.float32)


# -- torch ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reference:
    logits: NDArray[np.float32]
    features: NDArray[np.float32] | None
    tokens: tuple[tuple[int, ...], ...]
    text_ids: tuple[tuple[int, ...], ...]


def _reference(plan: _Plan, source: Path, key: str, threads: int, note: Note) -> _Reference:
    request: dict[str, Any] = {
        "prompts": [{"ids": list(p.ids), "grid": list(p.grid) if p.grid else None} for p in plan.prompts],
        "texts": list(plan.texts),
        "n_tokens": N_TOKENS,
        "version": 1,
    }
    name = hashlib.sha256(f"{key}|{json.dumps(request, sort_keys=True)}".encode()).hexdigest()[:32]
    base = make_cache_dir("selftest")
    kept = base / name
    if not (kept / "reference.json").is_file():
        note("self-test: the source in torch")
        with tempfile.TemporaryDirectory(prefix=".torch-", dir=base) as scratch:
            work = Path(scratch) / "work"
            work.mkdir()
            for i, prompt in enumerate(plan.prompts):
                if prompt.pixels is not None:
                    np.save(work / f"pixels{i}.npy", prompt.pixels, allow_pickle=False)
            request |= {"checkpoint": str(source.resolve()), "threads": threads}
            (work / "request.json").write_text(json.dumps(request), encoding="utf-8")
            _run_torch(work, threads)
            shutil.rmtree(kept, ignore_errors=True)
            os.replace(work, kept)
    os.utime(kept)
    document = json.loads((kept / "reference.json").read_text(encoding="utf-8"))
    features = kept / "features.npy"
    found = _Reference(
        np.load(kept / "logits.npy", allow_pickle=False),
        np.load(features, allow_pickle=False) if features.is_file() else None,
        tuple(map(tuple, document["tokens"])),
        tuple(map(tuple, document["texts"])),
    )
    for old in sorted(base.glob("[0-9a-f]*"), key=lambda p: -p.stat().st_mtime)[_KEPT_REFERENCES:]:
        shutil.rmtree(old, ignore_errors=True)
    return found


def _run_torch(work: Path, threads: int) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environment.pop("PYTHONPATH", None)
    entry = Path(__file__).with_name("_selftest_entry.py")
    done = subprocess.run(
        [sys.executable, str(entry), str(work)],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode != 0:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        raise HoverlensError(
            f"the self-test cannot run the source in torch: {lines[-1][:300] if lines else done.returncode}; leave it "
            "out with --no-self-test"
        )


# -- llama.cpp -----------------------------------------------------------------------------------------


def _compare(plan: _Plan, reference: _Reference, model: Model, projector: Projector, context: Context) -> SelfTest:
    agree, errors, divergences, gaps, cosines = [], [], [], [0.0], []
    for i, prompt in enumerate(plan.prompts):
        raw, features = _logits(prompt, reference.tokens[i], model, projector, context)
        n = min(raw.shape[1], reference.logits.shape[2])  # the converter pads vocabularies
        ours, theirs = raw[:, :n].astype(np.float64), reference.logits[i][:, :n].astype(np.float64)
        same = ours.argmax(1) == theirs.argmax(1)
        best = np.sort(theirs, axis=1)[:, -2:]
        agree.append(same)
        gaps += list((best[:, 1] - best[:, 0])[~same])
        centred = (ours - ours.mean(1, keepdims=True)) - (theirs - theirs.mean(1, keepdims=True))
        errors.append(np.sqrt((centred**2).mean(1)) / theirs.std(1))
        p, q = _log_softmax(theirs), _log_softmax(ours)
        divergences.append((np.exp(p) * (p - q)).sum(1))
        if features is not None and reference.features is not None and features.shape == reference.features[i].shape:
            cosines.append(_least_cosine(features, reference.features[i], model))
    note = plan.note
    if reference.features is not None and not cosines:
        note = "features not compared: llama.cpp and the source give another number of visual tokens"
    return SelfTest(
        token_agreement=float(np.concatenate(agree).mean()),
        logit_error=float(np.concatenate(errors).mean()),
        kl=float(np.concatenate(divergences).mean()),
        widest_gap=float(max(gaps)),
        cosine=min(cosines) if cosines else None,
        tokens_equal=plan.text_ids == reference.text_ids,
        positions=int(np.concatenate(agree).size),
        note=note,
    )


def _logits(
    prompt: _Prompt, tokens: tuple[int, ...], model: Model, projector: Projector, context: Context
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """float32 (len(tokens), n_vocab): what follows the prompt and each token but the last; and the features."""
    context.drop(0)
    position = 0
    features = None

    def read(run: tuple[int, ...], wanted: int = 0) -> list[NDArray[np.float32]]:
        nonlocal position
        out: list[NDArray[np.float32]] = []
        for start in range(0, len(run), 32):
            part = run[start : start + 32]
            want = [len(run) - start - j <= wanted for j in range(len(part))]
            positions = list(range(position, position + len(part)))
            if context.decode(part, positions, [0] * len(part), want, None) != 0:
                raise HoverlensError("llama.cpp cannot evaluate the self-test's prompt; see 'hoverlens doctor'")
            out += [context.logits(j) for j, w in enumerate(want) if w]
            position += len(part)
        return out

    read(prompt.before)
    if prompt.image is not None:
        for chunk in projector.tokenize(prompt.image):
            if chunk.tokens is not None:
                read(chunk.tokens)
                continue
            features = chunk.embedding = projector.encode_chunk(chunk)
            if projector.decode_chunk(context, chunk, 0, position, None) != 0:
                raise HoverlensError("llama.cpp cannot evaluate the self-test's picture; see 'hoverlens doctor'")
            position += chunk.n_positions
    read(prompt.after[:-1])
    return np.stack(read((prompt.after[-1], *tokens[:-1]), wanted=len(tokens))), features


def _least_cosine(ours: NDArray[np.float32], theirs: NDArray[np.float32], model: Model) -> float:
    """Over tokens and deepstack parts. Parts are told apart because their sizes differ."""
    width = int(model.meta(f"{model.meta('general.architecture')}.embedding_length") or ours.shape[1])
    a = ours.reshape(len(ours), -1, width).astype(np.float64)
    b = theirs.reshape(len(theirs), -1, width).astype(np.float64)
    cosine = (a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1) + 1e-12)
    return float(cosine.min())


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(1, keepdims=True)
    out: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return out
