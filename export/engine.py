"""TensorRT engines of ONNX models: on the board with TensorRT, or ahead of time with TensorRT for RTX.

Both modules have one API. Networks are strongly typed: the precision is in the graph (:mod:`.half`, Q/DQ pairs)
and not in flags, which later versions no longer have. What a version can do is seen from its attributes.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..calibration.onnx_source import load_source, metadata_of, quantised_as, shape_of
from ..runtime.digest import sha256_file
from ..runtime.engines.compat import FORMAT, MODULES, PRODUCTS, Here, read_sidecar, sidecar_path
from ..runtime.errors import BadInput, Cancelled, HoverlensError
from ..runtime.files import atomic_write_bytes, write_json
from ..runtime.locks import path_lock
from ..runtime.paths import make_cache_dir
from .half import compare, to_half

PRECISIONS = ("fp16", "int8", "fp8", "fp32")
FP8_FROM_SM = 89
SPARE_BYTES = 64 << 20
GROWTH = 4
"""An engine was never seen to be more than this many times its source plus :data:`SPARE_BYTES`."""
PIXEL_RANGES = (1.0, 255.0)
RELATIVE_ERROR_LIMIT = 0.05
"""Of a model in half precision. Detectors and depth models measured 0.0001 to 0.006."""

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, steps done and steps in all."""


@dataclass(frozen=True)
class Target:
    """What an engine is built for.

    Attributes:
        name: As given: ``board`` or ``rtx-sm86``.
        flavour: ``trt`` or ``rtx``, a key of :data:`~hoverlens.runtime.engines.compat.MODULES`.
        version: Of the module that builds.
        sm: Compute capability: 87 is 8.7.
        device: The GPU's name if it is here.
    """

    name: str
    flavour: str
    version: str
    sm: int
    device: str | None = None


@dataclass(frozen=True)
class Profile:
    """The sizes one input may have: smallest, the one to optimise for, largest."""

    name: str
    smallest: tuple[int, ...]
    best: tuple[int, ...]
    largest: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Profile:
        """Reads ``NAME=1x3x640x640,4x3x640x640,8x3x640x640``; one shape stands for all three.

        Raises:
            BadInput: It has another form, or the shapes do not grow.
        """
        name, equals, shapes = text.rpartition("=")
        parts = shapes.split(",")
        if not equals or not name or len(parts) not in (1, 3):
            raise BadInput(
                f"--profile {text!r}: needed NAME=min,opt,max, as in images=1x3x640x640,4x3x640x640,8x3x640x640"
            )
        try:
            read = [tuple(int(n) for n in part.lower().split("x")) for part in parts]
        except ValueError:
            raise BadInput(f"--profile {text!r}: shapes are numbers joined by x, as in 1x3x640x640") from None
        low, best, high = read * 3 if len(read) == 1 else read
        grow = len(low) == len(best) == len(high) and all(
            0 < a <= b <= c for a, b, c in zip(low, best, high, strict=True)
        )
        if not grow:
            raise BadInput(f"--profile {text!r}: needed min <= opt <= max on every axis, all of one rank and above 0")
        return cls(name, low, best, high)

    def __str__(self) -> str:
        shapes = ["x".join(map(str, s)) for s in (self.smallest, self.best, self.largest)]
        return f"{self.name}={shapes[0] if len(set(shapes)) == 1 else ','.join(shapes)}"


def ahead_of_time_targets() -> list[str]:
    """The targets that the installed TensorRT for RTX compiles for without their GPU."""
    trt = _module("rtx")
    found = getattr(trt, "ComputeCapability", None)
    names = [n for n in getattr(found, "__members__", ()) if re.fullmatch(r"SM\d+", n)]
    return [f"rtx-{n.lower()}" for n in sorted(names, key=lambda n: int(n[2:]))]


def resolve_target(text: str | None = None, here: Here | None = None) -> Target:
    """Finds what to build with and for.

    Args:
        text: ``board`` (the default) or ``rtx-smNN``.
        here: This machine by default.

    Raises:
        BadInput: There is no such target here; the message names those that exist.
    """
    here = here or Here.look()
    text = text or "board"
    ahead = ahead_of_time_targets() if "rtx" in here.versions else []
    if text == "board":
        if here.device is not None and "trt" in here.versions:
            return Target("board", "trt", here.versions["trt"], here.device.sm, here.device.name)
        lacking = "no NVIDIA GPU" if here.device is None else "no tensorrt module"
        raise BadInput(f"cannot build for --target board: {lacking} here; {_targets_text(ahead)}")
    match = re.fullmatch(r"rtx-sm(\d+)", text)
    if match is None:
        raise BadInput(f"unknown --target {text!r}; needed board or rtx-smNN; {_targets_text(ahead)}")
    if text not in ahead:
        raise BadInput(f"cannot build for --target {text} here; {_targets_text(ahead)}")
    return Target(text, "rtx", here.versions["rtx"], int(match[1]))


def _targets_text(ahead: Sequence[str]) -> str:
    if ahead:
        return f"--target may be {', '.join(ahead)}"
    return "for rtx-smNN targets: pip install 'hoverlens[tensorrt]' (x86_64 Linux)"


def build_engine(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    precision: str = "fp16",
    profiles: Sequence[str] = (),
    target: str | None = None,
    force: bool = False,
    workspace_mb: int | None = None,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Compiles an ONNX model.

    Args:
        source: The ONNX model; for ``int8`` and ``fp8`` one with Q/DQ pairs.
        output: Folder for the engine and the file that describes it; made if missing.
        precision: One of :data:`PRECISIONS`. What has no Q/DQ pairs runs in half precision, except with ``fp32``.
        profiles: :meth:`Profile.parse` texts, for inputs of dynamic shape.
        target: See :func:`resolve_target`.
        force: Build although an engine of the same source and options is there.
        workspace_mb: Most scratch memory of a kernel; by default all there is.
        progress: Told how far the build is.
        cancelled: Asked between steps whether to stop.

    Returns:
        What the file beside the engine holds, plus ``path``, ``up_to_date`` and ``why`` it was built.

    Raises:
        BadInput: The model, a profile or the target cannot be used.
        HoverlensError: The build failed, or there is no room for it.
        Cancelled: ``cancelled`` said so; nothing is left behind.
    """
    if precision not in PRECISIONS:
        raise BadInput(f"unknown precision {precision!r}; needed one of {', '.join(PRECISIONS)}")
    tell = progress or (lambda stage, done, total: None)
    asked = cancelled or (lambda: False)
    wanted = {p.name: p for p in map(Profile.parse, profiles)}
    tell("reading", 0, 1)
    model = load_source(source)
    chosen = resolve_target(target)
    _check_precision(source, model, precision, chosen)
    shapes = _shapes(model, wanted)
    folder = _output_folder(output)
    size = Path(source).stat().st_size
    make_cache_dir("tensorrt")
    _check_space(folder, SPARE_BYTES + GROWTH * max(size, model.ByteSize()))
    path = folder / f"{_name(source, model, shapes, precision, chosen)}.engine"
    record: dict[str, Any] = {
        "format": FORMAT,
        "source": {"file": str(source), "bytes": size, "sha256": sha256_file(source)},
        "precision": precision,
        "profiles": [str(p) for p in wanted.values()],
        "flavour": chosen.flavour,
        "version": chosen.version,
        "sm": chosen.sm,
        "target": chosen.name,
        "device": chosen.device,
        "options": {"strongly_typed": True, "workspace_mb": workspace_mb},
    }
    with path_lock(path):
        _sweep(path)
        why = "asked to" if force else _why(path, record)
        if why is None:
            return {**read_sidecar(path), "path": str(path), "up_to_date": True, "why": None}
        start = time.monotonic()
        if precision != "fp32":
            tell("half precision", 0, 1)
            half = to_half(model)
            record["check"] = _check_half(model, half, shapes)
            data = half.SerializeToString()
        else:
            data = model.SerializeToString()
        if asked():
            raise Cancelled("interrupted")
        plan, tensors = _compile(Path(source), data, shapes, chosen, workspace_mb, tell, asked)
        record.update(tensors)
        record["metadata"] = metadata_of(model)
        record["tools"] = _tools()
        _check_space(folder, len(plan) + (1 << 20))
        # The old description goes first: it must never stand beside another engine.
        sidecar_path(path).unlink(missing_ok=True)
        atomic_write_bytes(path, plan)
        record["engine"] = {"file": path.name, "bytes": len(plan), "sha256": sha256_file(path)}
        record["build_s"] = round(time.monotonic() - start, 2)
        write_json(sidecar_path(path), record)
    return {**record, "path": str(path), "up_to_date": False, "why": why}


def _module(flavour: str) -> Any:
    try:
        return importlib.import_module(MODULES[flavour])
    except (ImportError, OSError) as e:
        raise HoverlensError(
            f"{PRODUCTS[flavour]} does not load ({e}); pip install 'hoverlens[tensorrt]' (x86_64 Linux), "
            "or use the board's own"
        ) from None


def _check_precision(source: str | os.PathLike[str], model: Any, precision: str, target: Target) -> None:
    found = quantised_as(model)
    if precision in ("int8", "fp8") and precision not in found:
        how = (
            f"make them with 'hoverlens calibrate int8 {source} --images DIR -o OUT.onnx'"
            if precision == "int8"
            else "export them with a quantiser for FP8"
        )
        raise BadInput(f"{source} has no {precision.upper()} Q/DQ pairs, needed for --precision {precision}; {how}")
    if precision in ("fp16", "fp32") and found:
        kind = sorted(found)[0]
        raise BadInput(f"{source} is quantised ({kind}), needed a float model for {precision}; use --precision {kind}")
    if precision == "fp8" and target.sm < FP8_FROM_SM:
        raise BadInput(f"FP8 needs sm{FP8_FROM_SM} or later, and the target is sm{target.sm}; use --precision int8")


def _shapes(model: Any, wanted: Mapping[str, Profile]) -> dict[str, Profile]:
    """The sizes of every input.

    Raises:
        BadInput: A dynamic input has no profile, or a profile does not fit its input.
    """
    inputs = {i.name: shape_of(i) for i in model.graph.input}
    unknown = sorted(set(wanted) - set(inputs))
    if unknown:
        raise BadInput(f"--profile {unknown[0]}: no such input; the model has {', '.join(inputs)}")
    out = {}
    for name, shape in inputs.items():
        text = "x".join("?" if s is None else str(s) for s in shape)
        fixed = [s if isinstance(s, int) and s > 0 else None for s in shape]
        if name not in wanted:
            if None in fixed:
                example = "x".join(str(s or 1) for s in fixed)
                raise BadInput(
                    f"input {name} has the dynamic shape {text}; say its sizes, as in --profile {name}={example}"
                )
            sizes = tuple(s for s in fixed if s is not None)
            out[name] = Profile(name, sizes, sizes, sizes)
            continue
        given = wanted[name]
        fits = len(given.best) == len(fixed) and all(
            s is None or s == a == c for s, a, c in zip(fixed, given.smallest, given.largest, strict=True)
        )
        if not fits:
            raise BadInput(f"--profile {given}: input {name} is {text}; keep its rank and its fixed sizes")
        out[name] = given
    return out


def _output_folder(output: str | os.PathLike[str]) -> Path:
    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"cannot write the engine to {folder}: it is a file; name a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".hoverlens-{os.getpid()}.part"
        # Not os.access, which says yes to root on a file system mounted read-only.
        probe.touch()
        probe.unlink()
    except OSError as e:
        raise BadInput(f"cannot write the engine to {folder}: {e.strerror}; choose another folder") from None
    return folder


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise HoverlensError(
            f"no room for the engine: found {free >> 20} MB free in {folder}, needed {(needed >> 20) + 1} MB; "
            "free some space or choose another folder"
        )


def _name(
    source: str | os.PathLike[str], model: Any, shapes: Mapping[str, Profile], precision: str, target: Target
) -> str:
    first = next(iter(shapes.values()))
    sizes = [str(a) if a == c else f"{a}-{c}" for a, c in zip(first.smallest, first.largest, strict=True)]
    version = re.sub(r"[^0-9A-Za-z.]+", ".", target.version)
    stem = re.sub(r"[^0-9A-Za-z.+-]+", "_", Path(source).stem)
    return f"{stem}_{'x'.join(sizes) or 'scalar'}_{precision}_{target.flavour}{version}_sm{target.sm}"


def _sweep(path: Path) -> None:
    """Removes what a build of this engine left when it was killed; its lock is held."""
    for name in (path.name, sidecar_path(path).name):
        for debris in path.parent.glob(f".{name}.*.part"):
            debris.unlink(missing_ok=True)


def _why(path: Path, record: Mapping[str, Any]) -> str | None:
    """Why an engine has to be built; None if the one that is there will do."""
    if not path.exists():
        return "there is none yet"
    try:
        old = read_sidecar(path)
    except BadInput:
        return "what is there is incomplete"
    if (old.get("source") or {}).get("sha256") != record["source"]["sha256"]:
        return "the model has changed"
    changed = [k for k in ("profiles", "options", "version", "sm", "device") if old.get(k) != record[k]]
    if changed:
        return f"{', '.join(changed)} changed"
    if old["engine"]["bytes"] != path.stat().st_size or old["engine"]["sha256"] != sha256_file(path):
        return "the engine is damaged"
    return None


def _check_half(model: Any, half: Any, shapes: Mapping[str, Profile]) -> dict[str, Any]:
    """Compares the model in half precision with its source, here on the CPU."""
    import onnx

    types = {i.name: onnx.helper.tensor_dtype_to_np_dtype(i.type.tensor_type.elem_type) for i in model.graph.input}
    tried: list[dict[str, float]] = []
    refusal: HoverlensError | None = None
    # Which range its pixels have, a model does not say; in the wrong one its outputs are mostly rounding.
    for top in PIXEL_RANGES:
        try:
            tried.append(
                compare(model, half, {name: _sample(p.smallest, types[name], top) for name, p in shapes.items()})
            )
        except HoverlensError as e:
            refusal = e
        except Exception as e:
            # Operators that only TensorRT has, or sizes that random numbers do not satisfy.
            return {"against": "source on ONNX Runtime", "skipped": f"{type(e).__name__}: {str(e)[:200]}"}
    if not tried:
        assert refusal is not None
        raise refusal
    errors = min(tried, key=lambda e: e["relative_error"])
    # The last bit decides which INT8 step a number goes to, so quantised models differ much on noise.
    if errors["relative_error"] > RELATIVE_ERROR_LIMIT and not quantised_as(model):
        raise HoverlensError(
            f"in half precision the outputs differ from the source's by {errors['relative_error']:.3f} of their norm, "
            f"needed at most {RELATIVE_ERROR_LIMIT}; take --precision fp32"
        )
    return {"against": "source on ONNX Runtime", **{k: float(f"{v:.3g}") for k, v in errors.items()}}


def _sample(shape: tuple[int, ...], dtype: Any, top: float) -> NDArray[Any]:
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return (top * np.random.default_rng(0).random(shape)).astype(kind)
    return np.ones(shape, kind)


def _compile(
    source: Path,
    data: bytes,
    shapes: Mapping[str, Profile],
    target: Target,
    workspace_mb: int | None,
    tell: Progress,
    cancelled: Callable[[], bool],
) -> tuple[bytes, dict[str, Any]]:
    """Runs the compiler; returns the engine and its tensors."""
    trt = _module(target.flavour)
    logger, errors = _logger(trt)
    builder = trt.Builder(logger)
    if builder is None:
        raise HoverlensError(f"{PRODUCTS[target.flavour]} does not start: {_last(errors)}; see 'hoverlens doctor'")
    typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    # Absent where every network is strongly typed.
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    parser = trt.OnnxParser(network, logger)
    tell("parsing", 0, 1)
    if not parser.parse(data):
        raise _parse_error(source, parser, target)
    _check_outputs(source, network, shapes)
    config = builder.create_builder_config()
    if workspace_mb is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace_mb << 20)
    if target.flavour == "rtx":
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{target.sm}"), 0)
    if any(p.smallest != p.largest for p in shapes.values()) or any(
        -1 in tuple(network.get_input(i).shape) for i in range(network.num_inputs)
    ):
        profile = builder.create_optimization_profile()
        for name, p in shapes.items():
            profile.set_shape(name, p.smallest, p.best, p.largest)
        config.add_optimization_profile(profile)
    monitor = _monitor(trt, tell, cancelled)
    if monitor is not None and hasattr(config, "progress_monitor"):
        config.progress_monitor = monitor
    tell("building", 0, 1)
    with _timing_cache(config, target):
        plan = builder.build_serialized_network(network, config)
    if cancelled():
        raise Cancelled("interrupted")
    if plan is None:
        raise HoverlensError(
            f"{PRODUCTS[target.flavour]} {target.version} could not build {source.name}: {_last(errors)}; "
            "take another precision, or a smaller shape if memory ran out"
        )
    tensors = {
        "inputs": [
            {
                **_tensor(trt, network.get_input(i)),
                "min": list(shapes[network.get_input(i).name].smallest),
                "opt": list(shapes[network.get_input(i).name].best),
                "max": list(shapes[network.get_input(i).name].largest),
            }
            for i in range(network.num_inputs)
        ],
        "outputs": [_tensor(trt, network.get_output(i)) for i in range(network.num_outputs)],
    }
    return bytes(plan), tensors


def _tensor(trt: Any, tensor: Any) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": np.dtype(trt.nptype(tensor.dtype)).name,
        "shape": [None if n < 0 else int(n) for n in tuple(tensor.shape)],
    }


def _logger(trt: Any) -> tuple[Any, list[str]]:
    """A logger that keeps errors for the message and prints nothing."""
    errors: list[str] = []
    worst = {str(trt.ILogger.ERROR), str(trt.ILogger.INTERNAL_ERROR)}

    class Quiet(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if str(severity) in worst:
                errors.append(message)

    return Quiet(), errors


def _last(errors: Sequence[str]) -> str:
    return " ".join(errors[-1].split())[:240] if errors else "it gave no reason"


def _monitor(trt: Any, tell: Progress, cancelled: Callable[[], bool]) -> Any:
    if not hasattr(trt, "IProgressMonitor"):
        return None

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Told of nested phases, from several threads; an exception would end the process."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.phases: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.phases[phase_name] = num_steps
            with contextlib.suppress(Exception):
                tell(phase_name, 0, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            with contextlib.suppress(Exception):
                tell(phase_name, step + 1, self.phases.get(phase_name, 0))
                return not cancelled()
            return True

        def phase_finish(self, phase_name: str) -> None:
            self.phases.pop(phase_name, None)

    return Monitor()


@contextlib.contextmanager
def _timing_cache(config: Any, target: Target) -> Iterator[None]:
    """Lets the build start from kernel timings of earlier ones, and keeps its own. Only time is lost without."""
    file = make_cache_dir("tensorrt") / f"{target.flavour}{target.version}_sm{target.sm}.timing"
    with warnings.catch_warnings(), path_lock(file):
        # In TensorRT for RTX these calls exist, do nothing and warn.
        warnings.simplefilter("ignore", DeprecationWarning)
        cache = None
        with contextlib.suppress(AttributeError, RuntimeError, TypeError):
            try:
                known = file.read_bytes()
            except OSError:
                known = b""
            cache = config.create_timing_cache(known) or config.create_timing_cache(b"")
            config.set_timing_cache(cache, False)
        yield
        if cache is not None:
            with contextlib.suppress(AttributeError, RuntimeError, TypeError, HoverlensError):
                atomic_write_bytes(file, bytes(config.get_timing_cache().serialize()))


def _parse_error(source: Path, parser: Any, target: Target) -> BadInput:
    unsupported, others = [], []
    for i in range(parser.num_errors):
        error = parser.get_error(i)
        # Older versions do not say which node it was.
        op, node = (_call(error, name) for name in ("node_operator", "node_name"))
        text = f"{op} ({node})" if op and node else op
        code = str(_call(error, "code"))
        description = " ".join((_call(error, "desc") or "").split())
        if op and ("UNSUPPORTED" in code or "plugin" in description.lower()):
            unsupported.append(text)
        else:
            others.append(f"{text}: {description}" if text else description)
    product = f"{PRODUCTS[target.flavour]} {target.version}"
    if unsupported:
        shown = ", ".join(unsupported[:6]) + (f" and {len(unsupported) - 6} more" if len(unsupported) > 6 else "")
        return BadInput(
            f"{product} cannot compile {source.name}: unsupported {shown}; replace them, or cut the graph before them"
        )
    reason = (others or ["it gave no reason"])[0][:300]
    return BadInput(f"{product} cannot read {source.name}: {reason}; export it again, or simplify it")


def _call(error: Any, name: str) -> Any:
    method = getattr(error, name, None)
    return method() if callable(method) else None


def _check_outputs(source: Path, network: Any, shapes: Mapping[str, Profile]) -> None:
    """Refuses outputs whose size depends on the picture: nobody could reserve memory for them."""
    if any(-1 in tuple(network.get_input(i).shape) for i in range(network.num_inputs)):
        return
    for i in range(network.num_outputs):
        output = network.get_output(i)
        if -1 in tuple(output.shape):
            raise BadInput(
                f"output {output.name} of {source.name} has a size that depends on what is seen "
                f"({'x'.join('?' if n < 0 else str(n) for n in tuple(output.shape))}); cut the graph before its "
                "suppression: hoverlens does that itself"
            )


def _tools() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("hoverlens", "onnx", "onnxruntime", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
