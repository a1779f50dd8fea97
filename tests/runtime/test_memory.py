"""The memory plan: what a bundle takes, and what there is."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hoverlens.runtime.errors import BadInput, HoverlensError
from hoverlens.runtime.memory import MemoryPlan, available_bytes, check_plan, plan_memory

GB = 1_000_000_000


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(path: Path, values: Mapping[str, Any], size: int = 5000) -> Path:
    """A file with metadata only, padded to ``size`` bytes."""
    body = b""
    for key, value in values.items():
        body += text(key)
        if isinstance(value, str):
            body += struct.pack("<I", 8) + text(value)
        elif isinstance(value, list):
            kind = 8 if isinstance(value[0], str) else 4
            body += struct.pack("<IIQ", 9, kind, len(value))
            body += b"".join(text(v) if kind == 8 else struct.pack("<I", v) for v in value)
        elif isinstance(value, float):
            body += struct.pack("<If", 6, value)
        else:
            body += struct.pack("<II", 4, value)
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + body
    path.write_bytes(data.ljust(size, b"\0"))
    return path


MODEL = {
    "general.architecture": "qwen3vl",
    "qwen3vl.context_length": 4096,
    "qwen3vl.block_count": 28,
    "qwen3vl.embedding_length": 2048,
    "qwen3vl.feed_forward_length": 6144,
    "qwen3vl.attention.head_count": 16,
    "qwen3vl.attention.head_count_kv": 8,
    "qwen3vl.attention.key_length": 128,
    "qwen3vl.attention.value_length": 128,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
}
PROJECTOR = {
    "general.architecture": "clip",
    "clip.vision.attention.head_count": 16,
    "clip.vision.embedding_length": 1024,
    "clip.vision.feed_forward_length": 4096,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return gguf(tmp_path / "mllm.gguf", MODEL)


@pytest.fixture
def projector(tmp_path: Path) -> Path:
    return gguf(tmp_path / "mmproj.gguf", PROJECTOR, 3000)


def test_keys_and_values_take_two_bytes_each(model: Path) -> None:
    """28 layers x 8 heads x (128 + 128) x 2 bytes = 114,688 bytes a token, as Qwen3-VL-2B has it."""
    assert plan_memory(model, None, 2048, 512).kv == 2048 * 114_688


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("key", ["context_length", "embedding_length", "attention.head_count"])
def test_a_size_that_is_no_number_is_refused(tmp_path: Path, key: str, value: float) -> None:
    path = gguf(tmp_path / "bad.gguf", {**MODEL, f"qwen3vl.{key}": value})
    with pytest.raises(BadInput, match=f"{key} is"):
        plan_memory(path, None, 2048, 512)


def test_no_more_context_is_planned_than_the_model_has(model: Path) -> None:
    assert plan_memory(model, None, 100_000, 512).kv == 4096 * 114_688


def test_a_context_is_rounded_up_as_it_will_be(model: Path) -> None:
    assert plan_memory(model, None, 257, 512).kv == 512 * 114_688


def test_layers_may_differ_in_their_heads(tmp_path: Path) -> None:
    values = {**MODEL, "qwen3vl.attention.head_count_kv": [2, 8, 4]}
    assert plan_memory(gguf(tmp_path / "m.gguf", values), None, 256, 1).kv == 256 * 114_688


def test_weights_are_the_files(model: Path, projector: Path, tmp_path: Path) -> None:
    assert plan_memory(model, None, 256, 1).weights == 5000
    assert plan_memory(model, projector, 256, 1).weights == 8000


def test_perception_takes_its_files_twice_and_room_to_run(model: Path, tmp_path: Path) -> None:
    def taken(*sizes: int | None) -> int:
        files: list[Path | None] = []
        for i, size in enumerate(sizes):
            files.append(None if size is None else tmp_path / f"{i}.onnx")
            if size is not None:
                (tmp_path / f"{i}.onnx").write_bytes(b"x" * size)
        return plan_memory(model, None, 256, 1, tuple(files)).perception

    assert taken(None, None) == 0
    one, two = taken(700, None), taken(700, 100)
    assert one > 100_000_000  # ONNX Runtime itself
    assert 0 < two - one < one
    assert taken(900, None) - one == 400


def test_more_of_anything_takes_more(model: Path, projector: Path) -> None:
    base = plan_memory(model, projector, 1024, 128, image_max_tokens=256)
    assert plan_memory(model, projector, 2048, 128, image_max_tokens=256).total > base.total
    assert plan_memory(model, projector, 1024, 256, image_max_tokens=256).total > base.total
    assert plan_memory(model, projector, 1024, 128, image_max_tokens=512).vision > base.vision > 0
    assert plan_memory(model, None, 1024, 128).vision == 0


def test_logits_are_planned_for_one_token_of_each_sequence(model: Path) -> None:
    """Not for a whole batch, which takes 311 MB with Qwen's vocabulary; three tokens here, each kept twice."""
    assert plan_memory(model, None, 1024, 512).outputs == 64 * 3 * 4 * 2
    assert plan_memory(model, None, 1024, 512, n_sequences=200).outputs == 200 * 3 * 4 * 2


def test_each_token_of_a_pass_has_a_score_for_every_head_and_cell(model: Path) -> None:
    short, long = (plan_memory(model, None, n_ctx, 512).activations for n_ctx in (2048, 4096))
    # In 32 bits, once more in 16 as a matrix product's side, and a row of the mask.
    assert long - short == 2048 * 512 * (16 * 6 + 4)


def test_a_pass_has_a_token_for_each_sequence(model: Path) -> None:
    assert plan_memory(model, None, 1024, 1, n_sequences=64) == plan_memory(model, None, 1024, 64, n_sequences=64)


def test_without_a_limit_an_image_is_as_large_as_the_model_lets_it(model: Path, projector: Path) -> None:
    assert plan_memory(model, projector, 256, 1) == plan_memory(model, projector, 256, 1, image_max_tokens=4096)


def test_the_vision_encoder_grows_with_the_image_not_with_its_square(model: Path, projector: Path) -> None:
    one, two, three = (plan_memory(model, projector, 256, 1, image_max_tokens=n).vision for n in (500, 1000, 1500))
    assert three - two == two - one > 0


def test_kept_images_have_a_limit(tmp_path: Path, projector: Path) -> None:
    deep = gguf(tmp_path / "deep.gguf", {**MODEL, "qwen3vl.n_deepstack_layers": 3})

    def kept(tokens: int) -> int:
        return plan_memory(deep, projector, 256, 1, image_max_tokens=tokens).features

    assert kept(100) == 8 * 100 * 4 * 2048 * 4
    assert kept(4096) == 256 * 2**20
    # One that is larger than that is in use all the same.
    assert kept(16384) == 16384 * 4 * 2048 * 4


def test_the_total_is_the_sum_of_its_parts(model: Path, projector: Path) -> None:
    plan = plan_memory(model, projector, 1024, 128)
    parts = plan.to_dict()
    assert parts.pop("total") == sum(parts.values()) == plan.total
    assert all(isinstance(v, int) and v >= 0 for v in parts.values())


def test_a_file_that_is_no_model_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_text("not a model")
    with pytest.raises(BadInput):
        plan_memory(tmp_path / "x.gguf", None, 256, 1)


PLAN = MemoryPlan(
    weights=4 * GB, kv=2 * GB, outputs=0, activations=GB // 2, vision=GB, perception=1000, runtime=GB // 5
)


def test_what_fits_or_cannot_be_known_passes() -> None:
    check_plan(PLAN, PLAN.total, {"n_ctx": 8192})
    check_plan(PLAN, None, {"n_ctx": 8192})


def test_what_does_not_fit_is_said_in_one_line_with_the_cure() -> None:
    with pytest.raises(HoverlensError) as error:
        check_plan(PLAN, PLAN.total - 1, {"n_ctx": 8192, "n_batch": 512})
    message = str(error.value)
    assert message == (
        "needs 7700 MB (weights 4000, kv 2000, vision 1000, activations 500, runtime 200) but 7700 MB are "
        "available; lower n_ctx (now 8192) or n_batch (now 512), or use a smaller bundle"
    )


def machine(tmp_path: Path, files: Mapping[str, str]) -> tuple[Path, str]:
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path / "proc", str(tmp_path / "cgroup")


MEMINFO = "MemTotal:       8000000 kB\nMemFree:  100 kB\nMemAvailable:   5000000 kB\nSwapTotal: 0 kB\n"
STAT = "anon 1000\nfile 300000\ninactive_file 200000\nactive_file 50000\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/meminfo": "MemFree: 1 kB\n"}, None),
        ({"proc/meminfo": "MemAvailable: many kB\n"}, None),
        ({"proc/meminfo": "MemAvailable:\n"}, None),
        ({"proc/meminfo": MEMINFO}, 5_120_000_000),
        (
            {
                "proc/meminfo": MEMINFO,
                "cgroup/memory.max": "max\n",
                "cgroup/memory.current": "1",
                "cgroup/memory.stat": STAT,
            },
            5_120_000_000,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "cgroup/memory.max": "1000000\n",
                "cgroup/memory.current": "600000\n",
                "cgroup/memory.stat": STAT,
            },
            650_000,
        ),
        (
            {"cgroup/memory.max": "1000", "cgroup/memory.current": "5000", "cgroup/memory.stat": "inactive_file 10\n"},
            0,
        ),
        ({"cgroup/memory.max": "1000", "cgroup/memory.current": "10", "cgroup/memory.stat": STAT}, 1000),
        (
            {
                "proc/meminfo": MEMINFO,
                "cgroup/memory/memory.limit_in_bytes": "900000",
                "cgroup/memory/memory.usage_in_bytes": "800000",
                "cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 100000\ntotal_active_file 0\n",
            },
            200_000,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/system.slice/drone.service\n",
                "cgroup/system.slice/memory.max": "max",
                "cgroup/system.slice/drone.service/memory.max": "400000",
                "cgroup/system.slice/drone.service/memory.current": "300000",
                "cgroup/system.slice/drone.service/memory.stat": "anon 1\n",
            },
            100_000,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/a/b\n",
                "cgroup/a/memory.max": "500000",
                "cgroup/a/memory.current": "480000",
                "cgroup/a/memory.stat": "anon 1\n",
            },
            20_000,
        ),
        ({"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/../outside\n", "outside/memory.max": "1"}, 5_120_000_000),
    ],
    ids=[
        "nothing",
        "old-kernel",
        "no-number",
        "cut",
        "host",
        "no-limit",
        "limit-without-files",
        "over-the-limit",
        "files-only",
        "version-1",
        "a-service",
        "the-group-around",
        "outside",
    ],
)
def test_available_memory_is_what_the_kernel_and_the_container_leave(
    tmp_path: Path, files: Mapping[str, str], expected: int | None
) -> None:
    assert available_bytes(*machine(tmp_path, files)) == expected


def test_this_machine_has_memory() -> None:
    found = available_bytes()
    assert found is None or found > 10_000_000
