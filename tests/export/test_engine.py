"""Engines are really compiled, ahead of time, where TensorRT for RTX is installed; no GPU is needed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from hoverlens.cli import cli
from hoverlens.export.engine import Profile, build_engine, resolve_target
from hoverlens.runtime.engines.compat import Here, check_engine, installed_version, read_sidecar
from hoverlens.runtime.engines.device import Device
from hoverlens.runtime.errors import BadInput, Cancelled, HoverlensError

TARGET = "rtx-sm86"


@pytest.fixture
def rtx() -> str:
    version = installed_version("rtx")
    if version is None:
        pytest.skip("TensorRT for RTX is not installed: pip install 'hoverlens[tensorrt]' (x86_64 Linux)")
    return version


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOVERLENS_CACHE", str(tmp_path / "cache"))


def write_model(
    path: Path,
    last: Sequence[Any] = (),
    output: tuple[str, int, list[Any]] | None = None,
    batch: int | str = 1,
    as_input: bool = False,
) -> Path:
    """A convolution, then what a test wants; ``as_input`` lists the weights as an input too."""
    weights = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
    name, kind, shape = output or ("c", TensorProto.FLOAT, [batch, 4, 6, 6])
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 3, 8, 8])]
    if as_input:
        inputs.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 3, 3, 3]))
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["c"]), *last],
        "g",
        inputs,
        [helper.make_tensor_value_info(name, kind, shape)],
        [numpy_helper.from_array(weights, "w")],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ours", 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    made.metadata_props.add(key="names", value="{0: 'car'}")
    onnx.save(made, path)
    return path


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("name", ["yolox_nano", "yolov5su_visdrone_640"])
def test_real_detectors_compile(rtx: str, shared_data: Path, tmp_path: Path, name: str, precision: str) -> None:
    source = shared_data / "models" / f"{name}.onnx"
    made = build_engine(source, tmp_path / "out", precision, target=TARGET)
    path = Path(made["path"])
    shape = "x".join(map(str, made["inputs"][0]["shape"]))
    assert path.name == f"{name}_{shape}_{precision}_rtx{rtx}_sm86.engine"
    assert left(tmp_path / "out") == [path.name, f"{path.stem}.json"]
    assert path.stat().st_size == made["engine"]["bytes"] > 0.4 * source.stat().st_size
    if precision == "fp16":
        assert path.stat().st_size < source.stat().st_size
        assert made["check"]["relative_error"] < 0.01
    # Whoever feeds the model need not know its precision.
    assert {t["dtype"] for t in (*made["inputs"], *made["outputs"])} == {"float32"}
    with pytest.raises(HoverlensError, match=f"found TensorRT for RTX {rtx} for sm86, needed sm120"):
        check_engine(path, Here({"rtx": rtx}, Device("RTX 5090", 120, integrated=False)))


def test_the_description_says_what_the_engine_is(rtx: str, tmp_path: Path) -> None:
    made = build_engine(write_model(tmp_path / "m.onnx"), tmp_path / "out", target=TARGET)
    read = read_sidecar(made["path"])
    assert (read["flavour"], read["version"], read["sm"], read["precision"]) == ("rtx", rtx, 86, "fp16")
    assert read["metadata"] == {"names": "{0: 'car'}"}
    assert read["inputs"] == [
        {"name": "x", "dtype": "float32", "shape": [1, 3, 8, 8]} | {k: [1, 3, 8, 8] for k in ("min", "opt", "max")}
    ]
    assert read["outputs"] == [{"name": "c", "dtype": "float32", "shape": [1, 4, 6, 6]}]
    assert len(read["source"]["sha256"]) == 64
    assert read["tools"]["onnx"] == onnx.__version__


def test_a_second_build_finds_it_up_to_date_and_says_why_it_builds(rtx: str, tmp_path: Path) -> None:
    source, out = write_model(tmp_path / "m.onnx"), tmp_path / "out"
    first = build_engine(source, out, target=TARGET)
    path = Path(first["path"])
    assert (first["up_to_date"], first["why"]) == (False, "there is none yet")
    stamp = path.stat().st_mtime_ns
    assert build_engine(source, out, target=TARGET)["up_to_date"]
    assert path.stat().st_mtime_ns == stamp
    assert build_engine(source, out, target=TARGET, force=True)["why"] == "asked to"
    assert build_engine(source, out, target=TARGET, workspace_mb=64)["why"] == "options changed"
    path.write_bytes(path.read_bytes()[:-1])
    assert build_engine(source, out, target=TARGET, workspace_mb=64)["why"] == "the engine is damaged"
    path.with_suffix(".json").write_text("{")
    assert build_engine(source, out, target=TARGET)["why"] == "what is there is incomplete"
    write_model(source, [helper.make_node("Relu", ["c"], ["r"])], ("r", TensorProto.FLOAT, [1, 4, 6, 6]))
    assert build_engine(source, out, target=TARGET)["why"] == "the model has changed"


def test_a_dynamic_batch_takes_a_profile(rtx: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "m.onnx", batch="n")
    with pytest.raises(BadInput, match="dynamic shape nx3x8x8; say its sizes, as in --profile x=1x3x8x8"):
        build_engine(source, tmp_path / "out", target=TARGET)
    made = build_engine(source, tmp_path / "out", profiles=["x=1x3x8x8,2x3x8x8,4x3x8x8"], target=TARGET)
    assert "m_1-4x3x8x8_fp16_" in made["path"]
    assert made["inputs"][0]["shape"] == [None, 3, 8, 8]
    assert [made["inputs"][0][k][0] for k in ("min", "opt", "max")] == [1, 2, 4]
    assert made["profiles"] == ["x=1x3x8x8,2x3x8x8,4x3x8x8"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "needed NAME=min,opt,max"),
        ("=1x2", "needed NAME=min,opt,max"),
        ("x=1x2,1x2", "needed NAME=min,opt,max"),
        ("x=1xa", "numbers joined by x"),
        ("x=2x2,1x2,3x2", "min <= opt <= max"),
        ("x=1x2,1x2,1x2x3", "min <= opt <= max"),
        ("x=0x2", "above 0"),
        ("x=1x3x8x9", "keep its rank and its fixed sizes"),
        ("x=1x3x8", "keep its rank and its fixed sizes"),
        ("y=1x3x8x8", "no such input; the model has x"),
    ],
)
def test_a_bad_profile_is_bad_input(rtx: str, tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        build_engine(write_model(tmp_path / "m.onnx"), tmp_path / "out", profiles=[text], target=TARGET)


def test_a_profile_reads_back() -> None:
    assert str(Profile.parse("a=b=1X2")) == "a=b=1x2"
    assert Profile.parse("x=1x2,2x2,3x2").largest == (3, 2)


def test_unsupported_operators_are_listed_in_one_line(rtx: str, tmp_path: Path) -> None:
    last = [
        helper.make_node("Unique", ["c"], ["u"], name="un"),
        helper.make_node("Ours", ["u"], ["o"], name="mine", domain="ours"),
    ]
    source = write_model(tmp_path / "m.onnx", last, ("o", TensorProto.FLOAT, [None]))
    with pytest.raises(BadInput) as e:
        build_engine(source, tmp_path / "out", "fp32", target=TARGET)
    assert "unsupported Unique (un), Ours (mine)" in str(e.value)
    assert "\n" not in str(e.value)
    assert left(tmp_path / "out") == []


def test_int64_outputs_and_weights_listed_as_inputs_are_fine(rtx: str, tmp_path: Path) -> None:
    last = [helper.make_node("ArgMax", ["c"], ["k"], axis=1)]
    source = write_model(tmp_path / "m.onnx", last, ("k", TensorProto.INT64, [1, 1, 6, 6]), as_input=True)
    made = build_engine(source, tmp_path / "out", target=TARGET)
    assert [i["name"] for i in made["inputs"]] == ["x"]
    assert made["outputs"][0]["dtype"] == "int64"


def test_a_size_that_depends_on_what_is_seen_is_refused(rtx: str, tmp_path: Path) -> None:
    last = [helper.make_node("NonZero", ["c"], ["n"], name="nz")]
    source = write_model(tmp_path / "m.onnx", last, ("n", TensorProto.INT64, [4, None]))
    with pytest.raises(BadInput, match=r"NonZero|depends on what is seen"):
        build_engine(source, tmp_path / "out", target=TARGET)


def test_files_that_are_no_models_are_bad_input(rtx: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(BadInput, match="no such file"):
        build_engine(tmp_path / "none.onnx", out, target=TARGET)
    with pytest.raises(BadInput, match="is a folder"):
        build_engine(tmp_path, out, target=TARGET)
    whole = write_model(tmp_path / "m.onnx").read_bytes()
    for data in (b"", b"\x00" * 64, b"hello", whole[: len(whole) // 2]):
        (tmp_path / "bad.onnx").write_bytes(data)
        with pytest.raises(BadInput):
            build_engine(tmp_path / "bad.onnx", out, target=TARGET)
    assert left(out) == []


def test_missing_separate_weights_are_named(rtx: str, tmp_path: Path) -> None:
    model = onnx.load(write_model(tmp_path / "m.onnx"))
    onnx.save(model, tmp_path / "e.onnx", save_as_external_data=True, location="e.data", size_threshold=0)
    assert build_engine(tmp_path / "e.onnx", tmp_path / "out", target=TARGET)["outputs"][0]["name"] == "c"
    (tmp_path / "e.data").unlink()
    with pytest.raises(BadInput, match=r"its weights are in e\.data, which is not there"):
        build_engine(tmp_path / "e.onnx", tmp_path / "other", target=TARGET)


def test_quantised_models_need_their_own_precision(rtx: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "m.onnx")
    with pytest.raises(BadInput, match=r"no INT8 Q/DQ pairs.*hoverlens calibrate int8"):
        build_engine(source, tmp_path / "out", "int8", target=TARGET)
    with pytest.raises(BadInput, match="no FP8 Q/DQ pairs"):
        build_engine(source, tmp_path / "out", "fp8", target="rtx-sm89")


def test_no_room_is_seen_before_the_build(rtx: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "m.onnx")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 30, 1 << 30, 1 << 20))
    with pytest.raises(HoverlensError, match="found 1 MB free"):
        build_engine(source, tmp_path / "out", target=TARGET)


def test_folders_that_cannot_be_written_are_said(rtx: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "m.onnx")
    with pytest.raises(BadInput, match="is a file"):
        build_engine(source, source, target=TARGET)
    with pytest.raises(BadInput, match="choose another folder"):
        build_engine(source, source / "deeper", target=TARGET)
    monkeypatch.setenv("HOVERLENS_CACHE", str(source / "cache"))
    with pytest.raises(HoverlensError, match=r"cache folder .* is not writable"):
        build_engine(source, tmp_path / "out", target=TARGET)
    assert left(tmp_path / "out") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_said(rtx: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o500)
    with pytest.raises(BadInput, match="choose another folder"):
        build_engine(write_model(tmp_path / "m.onnx"), tmp_path / "out", target=TARGET)


@pytest.mark.parametrize("after", [0, 1, 5, 40])
def test_an_interrupted_build_leaves_nothing(rtx: str, tmp_path: Path, after: int) -> None:
    source, out = write_model(tmp_path / "m.onnx"), tmp_path / "out"
    steps = 0

    def count(stage: str, done: int, total: int) -> None:
        nonlocal steps
        steps += 1

    with pytest.raises(Cancelled):
        build_engine(source, out, target=TARGET, progress=count, cancelled=lambda: steps > after)
    assert left(out) == []
    assert not build_engine(source, out, target=TARGET)["up_to_date"]


def test_what_a_killed_build_left_goes_with_the_next(rtx: str, tmp_path: Path) -> None:
    source, out = write_model(tmp_path / "m.onnx"), tmp_path / "out"
    path = Path(build_engine(source, out, target=TARGET)["path"])
    path.with_suffix(".json").unlink()
    (out / f".{path.name}.abc123.part").write_bytes(b"half")
    (out / ".other.engine.abc123.part").write_bytes(b"somebody else's")
    build_engine(source, out, target=TARGET)
    assert left(out) == [".other.engine.abc123.part", path.name, f"{path.stem}.json"]


def test_progress_names_the_compilers_stages(rtx: str, tmp_path: Path) -> None:
    stages: list[str] = []
    source = write_model(tmp_path / "m.onnx")
    build_engine(source, tmp_path / "out", target=TARGET, progress=lambda stage, done, total: stages.append(stage))
    assert stages[0] == "reading"
    assert {"half precision", "parsing", "building", "Building engine"} <= set(stages)


def test_targets_that_are_not_here_name_those_that_are(rtx: str) -> None:
    nothing = Here({"rtx": rtx}, None)
    with pytest.raises(BadInput, match=r"no NVIDIA GPU here; --target may be rtx-sm75, .*rtx-sm86"):
        resolve_target(None, nothing)
    with pytest.raises(BadInput, match="rtx-sm87 here; --target may be"):
        resolve_target("rtx-sm87", nothing)
    with pytest.raises(BadInput, match="needed board or rtx-smNN"):
        resolve_target("orin", nothing)
    assert resolve_target("rtx-sm86", nothing).sm == 86


def test_on_a_board_the_board_is_the_target() -> None:
    here = Here({"trt": "10.3.0"}, Device("Orin", 87, integrated=True))
    target = resolve_target(None, here)
    assert (target.flavour, target.version, target.sm, target.device) == ("trt", "10.3.0", 87, "Orin")


def test_without_tensorrt_the_cure_is_said() -> None:
    with pytest.raises(BadInput, match=r"pip install 'hoverlens\[tensorrt\]'"):
        resolve_target(None, Here({}, None))


def test_the_verb_prints_json_alone(rtx: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "m.onnx")
    args = ["export", "engine", str(source), "--precision", "fp16", "--target", TARGET, "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(cli, [*args, "--json"])
    assert done.exit_code == 0
    assert Path(json.loads(done.stdout)["path"]).is_file()
    again = CliRunner().invoke(cli, args)
    assert again.exit_code == 0
    assert again.stdout.splitlines()[-1] == "up to date"
