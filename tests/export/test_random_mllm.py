"""The random-weight model: made whole or not at all, the same every time, and really Qwen3-VL."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hoverlens.export import random_mllm
from hoverlens.export.random_mllm import make_random_bundle, write_checkpoint
from hoverlens.export.random_weights import write_safetensors
from hoverlens.runtime.bundle import Bundle, verify_bundle
from hoverlens.runtime.errors import BadInput
from hoverlens.runtime.gguf import read_gguf_header
from hoverlens.runtime.mllm.files import check_pair
from hoverlens.runtime.mllm.llama_native import libraries

PROMPT = "<|im_start|>user\n{image}How many cars are there?<|im_end|>\n<|im_start|>assistant\n"


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def run_module(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hoverlens.export.random_mllm", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_same_seed_gives_the_same_bytes(tiny_bundle: Bundle, tmp_path: Path) -> None:
    again, made = make_random_bundle(tmp_path / "again", preset="tiny")
    assert made
    assert files_of(again.path) == files_of(tiny_bundle.path)
    assert again.sha256 == tiny_bundle.sha256


def test_each_recipe_has_its_own_place_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOVERLENS_CACHE", str(tmp_path))
    places = [("10m", 0, "f16"), ("2b", 0, "f16"), ("10m", 7, "f16"), ("tiny", 0, "q8_0")]
    names = [random_mllm._place(*place).name for place in places]
    assert names == ["random", "random-2b", "random-seed7", "random-tiny-q8_0"]


def test_another_seed_gives_another_model(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_safetensors(tmp_path / str(seed), {"a.weight": (8, 8)}, seed)
    assert (tmp_path / "0").read_bytes() != (tmp_path / "1").read_bytes()


def test_frozen_weights_change_only_on_purpose(tmp_path: Path) -> None:
    """The same on every machine, Python and numpy."""
    write_safetensors(tmp_path / "w", {"model.language_model.layers.0.mlp.up_proj.weight": (2, 4)}, 0)
    length = int.from_bytes((tmp_path / "w").read_bytes()[:8], "little")
    assert (tmp_path / "w").read_bytes()[8 + length :].hex() == "00b9bb399d2862b985365daa66b5ebb8"


def test_making_it_again_does_nothing(tiny_bundle: Bundle) -> None:
    before = (tiny_bundle.path / "mllm.gguf").stat().st_mtime_ns
    bundle, made = make_random_bundle(tiny_bundle.path, preset="tiny")
    assert not made
    assert bundle.sha256 == tiny_bundle.sha256
    assert (tiny_bundle.path / "mllm.gguf").stat().st_mtime_ns == before


def test_a_changed_file_is_made_again(tiny_bundle: Bundle, tmp_path: Path) -> None:
    shutil.copytree(tiny_bundle.path, tmp_path / "b")
    weights = tmp_path / "b" / "mmproj.gguf"
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1
    weights.write_bytes(data)
    again, made = make_random_bundle(tmp_path / "b", preset="tiny")
    assert made
    assert verify_bundle(again.path) == []


def test_two_at_once_make_one_whole_bundle(tiny_bundle: Bundle, tmp_path: Path) -> None:
    started = [run_module("--preset", "tiny", "-o", str(tmp_path / "b")) for _ in range(2)]
    said = [p.communicate(timeout=120)[0].split(":")[0].split(" /")[0] for p in started]
    assert [p.returncode for p in started] == [0, 0]
    assert sorted(said) == ["made", "up to date"]
    assert verify_bundle(tmp_path / "b") == []
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_half_bundle(tiny_bundle: Bundle, tmp_path: Path, how: signal.Signals) -> None:
    process = run_module("--preset", "tiny", "-o", str(tmp_path / "b"))
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".b.*.part")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert not (tmp_path / "b").exists()
    make_random_bundle(tmp_path / "b", preset="tiny")
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_what_is_no_bundle_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("dear")
    with pytest.raises(BadInput, match="is no bundle, so it is left alone"):
        make_random_bundle(tmp_path, preset="tiny")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_command_line_says_what_it_did(tiny_bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert random_mllm.main(["--preset", "tiny", "-o", str(tiny_bundle.path)]) == 0
    assert capsys.readouterr().out == f"up to date: {tiny_bundle.path}\n"
    assert random_mllm.main(["--preset", "tiny", "-o", "/dev/null"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_manifest_says_that_the_weights_are_random(tiny_bundle: Bundle) -> None:
    assert tiny_bundle.random_roles == ("mllm", "mmproj")
    assert "RANDOM" in tiny_bundle.manifest.note
    assert tiny_bundle.manifest.created is None


def test_the_files_carry_qwen3vls_metadata(tiny_bundle: Bundle) -> None:
    text, vision = check_pair(tiny_bundle.need("mllm"), tiny_bundle.need("mmproj"))
    assert text.architecture == "qwen3vl"
    assert text.get("qwen3vl.n_deepstack_layers") == 3
    assert text.get("tokenizer.ggml.pre") == "qwen2"
    assert "<|im_start|>" in text.get("tokenizer.chat_template")
    assert vision.get("clip.projector_type") == "qwen3vl_merger"


@pytest.mark.parametrize(("outtype", "precision"), [("q8_0", "Q8_0"), ("f32", "F32")])
def test_other_precisions(tmp_path: Path, tiny_bundle: Bundle, outtype: str, precision: str) -> None:
    bundle, _ = make_random_bundle(tmp_path / "b", preset="tiny", outtype=outtype)
    assert read_gguf_header(bundle.need("mllm")).quantisation == precision
    wanted, other = Llama(tiny_bundle), Llama(bundle)
    try:
        picture = photo(0)
        first, second = wanted.logits(picture), other.logits(picture)
    finally:
        wanted.close()
        other.close()
    assert np.corrcoef(first, second)[0, 1] > 0.99


class Llama:
    """The shortest way from an image and a prompt to logits in llama.cpp."""

    def __init__(self, bundle: Bundle) -> None:
        # Log callbacks are the process's own: one that ends with a test is called by whoever comes after it.
        llama_cpp, mtmd = libraries()
        self.c, self.m = llama_cpp, mtmd
        model_file, projector = os.fsencode(bundle.need("mllm")), os.fsencode(bundle.need("mmproj"))
        self.model = llama_cpp.llama_model_load_from_file(model_file, llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = 1024
        params.n_threads = params.n_threads_batch = 1
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        settings = mtmd.mtmd_context_params_default()
        settings.use_gpu, settings.n_threads, settings.warmup, settings.print_timings = False, 1, False, False
        self.projector = mtmd.mtmd_init_from_file(projector, self.model, settings)
        assert self.model
        assert self.context
        assert self.projector
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.size = llama_cpp.llama_vocab_n_tokens(self.vocab)

    def logits(self, rgb: NDArray[np.uint8]) -> NDArray[np.float32]:
        c, m = self.c, self.m
        c.llama_memory_clear(c.llama_get_memory(self.context), True)
        rgb = np.ascontiguousarray(rgb)
        pixels = rgb.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        bitmap = m.mtmd_bitmap_init(rgb.shape[1], rgb.shape[0], pixels)
        chunks = m.mtmd_input_chunks_init()
        marker = m.mtmd_get_marker(self.projector).decode()
        text = PROMPT.format(image=marker).encode()
        given = m.mtmd_input_text(text=text, text_len=len(text), add_special=False, parse_special=True)
        bitmaps = (m.mtmd_bitmap_p_ctypes * 1)(bitmap)
        assert m.mtmd_tokenize(self.projector, chunks, ctypes.byref(given), bitmaps, 1) == 0
        past = c.llama_pos(0)
        arguments = (self.projector, self.context, chunks, 0, 0, 1024, True, ctypes.byref(past))
        assert m.mtmd_helper_eval_chunks(*arguments) == 0
        out = np.ctypeslib.as_array(c.llama_get_logits_ith(self.context, -1), (self.size,)).copy()
        m.mtmd_input_chunks_free(chunks)
        m.mtmd_bitmap_free(bitmap)
        return np.asarray(out, np.float32)

    def tokens(self, text: str) -> list[int]:
        data = text.encode()
        room = len(data) + 8
        ids = (self.c.llama_token * room)()
        n = self.c.llama_tokenize(self.vocab, data, len(data), ids, room, False, True)
        return list(ids[:n])

    def close(self) -> None:
        self.m.mtmd_free(self.projector)
        self.c.llama_free(self.context)
        self.c.llama_model_free(self.model)


@pytest.fixture(scope="module")
def llama(random_bundle: Bundle) -> Iterator[Llama]:
    pytest.importorskip("llama_cpp")
    loaded = Llama(random_bundle)
    yield loaded
    loaded.close()


def photo(seed: int, height: int = 192, width: int = 256) -> NDArray[np.uint8]:
    """Soft random blobs: like a photo, neighbours are alike."""
    import cv2

    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return np.asarray(cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC), np.uint8)


def test_different_images_give_clearly_different_logits(llama: Llama) -> None:
    rows = np.array([llama.logits(photo(seed)) for seed in range(5)])
    # Spread over the vocabulary, and spread of one token's logit over the images.
    assert 1.5 < rows.std(axis=1).mean() < 4
    assert rows.std(axis=0).mean() > 0.5
    correlation = np.corrcoef(rows)[np.triu_indices(5, 1)]
    assert correlation.max() < 0.97


def test_the_same_image_gives_the_same_logits(llama: Llama) -> None:
    first = llama.logits(photo(0))
    llama.logits(photo(1))
    assert np.array_equal(llama.logits(photo(0)), first)


TEXTS = [
    'How many cars are there? x1=0.123, {"tool": 1}\n\n  two  spaces\tand tabs\r\n',
    "it's I'LL We've 12345 3.14 ------ ??? <|im_end|><|image_pad|> <think>a</think>",
    "naïve café 你好 мир שלום 🚁🚗 \u200d zero",
    "\n \n\n \n\n\n \t \t\t trailing   ",
]

PARITY = """
import json, sys
import numpy as np, torch
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
torch.set_num_threads(1)
folder, prompt, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model, report = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
assert not any(report.values()), report
tokenizer = AutoTokenizer.from_pretrained(folder)
image = torch.tensor(np.load("image.npy")).permute(2, 0, 1).float() / 127.5 - 1
h, w = image.shape[1] // 16, image.shape[2] // 16
x = image[None].repeat(2, 1, 1, 1).reshape(1, 2, 3, h // 2, 2, 16, w // 2, 2, 16)
x = x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(h * w, -1)
pad = model.config.image_token_id
ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
at = ids.index(pad)
ids = torch.tensor([ids[:at] + [pad] * (h * w // 4) + ids[at + 1 :]])
with torch.no_grad():
    out = model(
        input_ids=ids,
        pixel_values=x,
        image_grid_thw=torch.tensor([[1, h, w]]),
        mm_token_type_ids=(ids == pad).int(),
    )
np.save("logits.npy", out.logits[0, -1].numpy())
print(json.dumps([tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts]))
"""


def test_llama_cpp_and_transformers_agree(llama: Llama, tmp_path: Path) -> None:
    """Vision encoder, deepstack, M-RoPE and text model of both give the same logits for the same weights.

    The tolerance is llama.cpp's half-precision KV cache and lookup table for GELU; the spread is 2.5.
    """
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    write_checkpoint(tmp_path / "model", "10m", 0)
    picture = photo(3)
    np.save(tmp_path / "image.npy", picture)
    prompt = PROMPT.format(image="<|vision_start|><|image_pad|><|vision_end|>")
    done = subprocess.run(
        [sys.executable, "-c", PARITY, "model", prompt, json.dumps(TEXTS)],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs: Any = np.load(tmp_path / "logits.npy")
    ours = llama.logits(picture)
    assert np.abs(ours - theirs).max() < 0.1
    assert np.corrcoef(ours, theirs)[0, 1] > 0.9999
    assert [llama.tokens(t) for t in TEXTS] == json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_qwens_own_vocabulary_has_its_known_ids(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from hoverlens.export import vocabulary

    text = vocabulary.qwen_tokenizer()
    ids = vocabulary.token_ids(text)
    assert ids["<|endoftext|>"] == 151643
    assert ids["<|image_pad|>"] == 151655
    assert ids["</think>"] == 151668
    tokenizer = tokenizers.Tokenizer.from_str(text)
    assert tokenizer.encode("user\n").ids == [872, 198]
    assert tokenizer.encode("Hello world").ids == [9707, 1879]
