"""What this machine has for hoverlens, what it lacks, and the command that cures it.

Every probe works when the library or the file that it looks for is missing. Libraries with native
code are imported in a process of their own: a wheel built for another CPU kills its process.
"""

from __future__ import annotations

import glob
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .errors import HoverlensError

if TYPE_CHECKING:
    from .bundle import Bundle

Status = Literal["ok", "warn", "bad"]

MIN_PYTHON, MAX_PYTHON = (3, 10), (3, 12)
LOW_MEMORY = 1 * 10**9
"""Bytes. The smallest bundle, the libraries and a full-HD photo take about half of it."""
LOW_DISK = 2 * 10**9
HOT_CELSIUS = 85.0
RMEM_WANTED = 8 * 2**20
"""Bytes of socket buffer that hold one raw full-HD image (6.2 MB) whole."""

JETPACK_OF_L4T = {35: "5", 36: "6", 38: "7", 39: "7"}
CUDA_ARCHITECTURES = (("thor", "110"), ("orin", "87"), ("xavier", "72"))
LIBRARY_FOLDERS = (
    "usr/lib/*-linux-gnu",
    "usr/lib/aarch64-linux-gnu/nvidia",
    "usr/lib/aarch64-linux-gnu/tegra",
    "usr/lib64",
    "usr/local/lib",
    "usr/local/cuda*/lib64",
    "usr/local/cuda*/targets/*/lib",
)


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: What was looked at.
        status: ``ok``, ``warn`` (works, with a drawback) or ``bad`` (something will not work).
        found: What is there, in words.
        cure: What to do about it, a command where one exists; set for every ``warn`` and ``bad``.
        data: The same as plain values, for ``--json``.
    """

    name: str
    status: Status
    found: str
    cure: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "status": self.status,
            "found": self.found,
            "cure": self.cure,
            "data": dict(self.data),
        }


@dataclass(frozen=True)
class Probe:
    """The result of running Python code in a process of its own."""

    value: dict[str, Any] | None
    error: str | None = None
    illegal_instruction: bool = False


@dataclass(frozen=True)
class Host:
    """The machine as the probes see it. Tests give a fake tree of files and fake libraries.

    Attributes:
        root: Stands for ``/``.
        environ: Environment variables.
        machine: ``x86_64``, ``aarch64``.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    machine: str = field(default_factory=platform.machine)

    def path(self, absolute: str) -> Path:
        return self.root / absolute.lstrip("/")

    def read(self, absolute: str) -> str | None:
        """The text of a file without trailing NULs and blanks, or None."""
        try:
            return self.path(absolute).read_bytes().decode("utf-8", "replace").rstrip("\0\n ")
        except OSError:
            return None

    def glob(self, pattern: str) -> list[str]:
        """Absolute paths, as on the machine itself, that match a pattern."""
        found = glob.glob(str(self.path(pattern)))
        return sorted("/" + os.path.relpath(p, self.root) for p in found)

    def version(self, distribution: str) -> str | None:
        """The version of an installed Python distribution; nothing is imported."""
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return None

    def run(self, command: Sequence[str], timeout_s: float = 10) -> str | None:
        """What a program prints, or None where it is absent or fails."""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    def python(self, code: str, timeout_s: float = 120) -> Probe:
        """Runs code that prints one JSON object as its last line."""
        try:
            done = subprocess.run(
                [sys.executable, "-c", code],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            return Probe(None, f"{type(e).__name__}: {e}")
        lines = done.stdout.strip().splitlines()
        if done.returncode == 0 and lines:
            return Probe(json.loads(lines[-1]))
        if done.returncode < 0:
            return Probe(None, f"killed by signal {-done.returncode}", done.returncode == -4)
        errors = done.stderr.strip().splitlines()
        return Probe(None, errors[-1] if errors else f"exit status {done.returncode}")


@dataclass(frozen=True)
class Board:
    """What the cures depend on.

    Attributes:
        jetson: The board's name, or None.
        l4t: (major, "minor.patch") of Jetson Linux, or None.
        gpus: Names of NVIDIA GPUs.
        cuda_architecture: For ``CMAKE_CUDA_ARCHITECTURES``, or None where unknown.
    """

    jetson: str | None
    l4t: tuple[int, str] | None
    gpus: tuple[str, ...]
    cuda_architecture: str | None

    @property
    def nvidia(self) -> bool:
        return self.jetson is not None or bool(self.gpus)


def look_at_board(host: Host) -> Board:
    """Recognises a Jetson by its device tree; NVML is never needed, Orin has none."""
    model = host.read("/proc/device-tree/model") or host.read("/sys/firmware/devicetree/base/model")
    release = host.read("/etc/nv_tegra_release") or ""
    found = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", release)
    l4t = (int(found[1]), found[2]) if found else None
    jetson = None
    if model and ("jetson" in model.lower() or "tegra" in model.lower()):
        jetson = model
    elif l4t:
        jetson = model or "Jetson (no device tree; a container?)"
    gpus: list[str] = []
    architecture = None
    if jetson:
        architecture = next((a for word, a in CUDA_ARCHITECTURES if word in jetson.lower()), None)
    else:
        listed = host.run(["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"])
        for line in (listed or "").splitlines():
            name, _, capability = line.rpartition(",")
            gpus.append(name.strip())
            architecture = architecture or capability.strip().replace(".", "") or None
        if not gpus and host.glob("/dev/nvidia[0-9]*"):
            gpus.append("NVIDIA GPU (nvidia-smi gave nothing)")
    return Board(jetson, l4t, tuple(gpus), architecture)


CheckFunction = Callable[[Host, Board], Iterable[Check]]

EXTRA_CHECKS: list[CheckFunction] = []
"""Checks of other modules; each yields lines as the ones here do."""


def run_doctor(
    host: Host | None = None,
    bundle: str | None = None,
    extra: Sequence[CheckFunction] | None = None,
) -> list[Check]:
    """Runs every check.

    Args:
        host: The machine to look at; by default this one.
        bundle: The bundle to verify; by default the one that ``hoverlens ask`` would take.
        extra: Checks after the built-in ones; by default :data:`EXTRA_CHECKS`.
    """
    host = host or Host()
    board = look_at_board(host)
    checks: list[Check] = []

    def check_this_bundle(host: Host, board: Board) -> Iterable[Check]:
        return check_bundle(host, bundle)

    for probe in (*BUILT_IN, check_this_bundle, *(EXTRA_CHECKS if extra is None else extra)):
        try:
            checks.extend(probe(host, board))
        except Exception as e:
            name = probe.__name__.removeprefix("check_").replace("_", " ")
            checks.append(
                Check(
                    name,
                    "warn",
                    f"the check itself failed: {type(e).__name__}: {e}",
                    "report this line with the output of `hoverlens doctor --json`",
                )
            )
    return checks


def report(checks: Sequence[Check]) -> dict[str, Any]:
    """The JSON of ``hoverlens doctor``."""
    worst = max((c.status for c in checks), key=("ok", "warn", "bad").index, default="ok")
    return {"status": worst, "checks": [c.to_dict() for c in checks]}


def report_text(checks: Sequence[Check]) -> str:
    """The report for people: one line a check, its cure below."""
    width = max((len(c.name) for c in checks), default=0)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<5} {check.name:<{width}}  {check.found}")
        if check.cure:
            lines.append(f"      {'cure:':>{width}}  {check.cure}")
    counts = {s: sum(c.status == s for c in checks) for s in ("ok", "warn", "bad")}
    lines.append(", ".join(f"{n} {s}" for s, n in counts.items()))
    return "\n".join(lines)


def check_python(host: Host, board: Board) -> Iterable[Check]:
    version = sys.version_info
    bits = struct.calcsize("P") * 8
    abi = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    found = f"{platform.python_version()} ({abi}, {bits} bit) at {sys.prefix}"
    data = {"version": platform.python_version(), "abi": abi, "bits": bits, "prefix": sys.prefix}
    needed = f"{MIN_PYTHON[0]}.{MIN_PYTHON[1]} to {MAX_PYTHON[0]}.{MAX_PYTHON[1]}"
    if version < MIN_PYTHON or bits != 64:
        cure = f"make a virtual environment with a 64-bit Python {needed} and install again"
        yield Check("python", "bad", found, cure, data)
    elif version[:2] > MAX_PYTHON:
        cure = f"newer than tested: make a virtual environment with Python {needed}"
        yield Check("python", "warn", found, cure, data)
    else:
        yield Check("python", "ok", found, None, data)


def check_platform(host: Host, board: Board) -> Iterable[Check]:
    system = re.search(r'^PRETTY_NAME="?([^"\n]+)', host.read("/etc/os-release") or "", re.M)
    name = system[1] if system else platform.system()
    libc = " ".join(platform.libc_ver())
    found = f"{name}, kernel {platform.release()}, {host.machine}, {libc or 'unknown C library'}"
    data = {"system": name, "kernel": platform.release(), "machine": host.machine, "libc": libc}
    yield Check("platform", "ok", found, None, data)


def check_board(host: Host, board: Board) -> Iterable[Check]:
    if board.jetson is None:
        yield Check("board", "ok", "not a Jetson", None, {"jetson": False})
        return
    data: dict[str, Any] = {"jetson": True, "model": board.jetson}
    found = board.jetson
    status: Status = "ok"
    cure = None
    if board.l4t:
        major, revision = board.l4t
        jetpack = JETPACK_OF_L4T.get(major)
        data |= {"l4t": f"{major}.{revision}", "jetpack": jetpack}
        found += f", Jetson Linux {major}.{revision}"
        found += f" (JetPack {jetpack})" if jetpack else " (JetPack unknown)"
        if major < 36:
            status, cure = "warn", "flash JetPack 6 or later; older ones are not tested"
    else:
        status = "warn"
        found += ", Jetson Linux version unknown (no /etc/nv_tegra_release)"
        cure = "mount it into the container: -v /etc/nv_tegra_release:/etc/nv_tegra_release:ro"
    mode = re.search(r"pmode:(\d+)", host.read("/var/lib/nvpmodel/status") or "")
    if mode:
        data["power_mode"] = int(mode[1])
        found += f", power mode {int(mode[1])}"
    yield Check("board", status, found, cure, data)


def check_heat(host: Host, board: Board) -> Iterable[Check]:
    readings: dict[str, float] = {}
    for zone in host.glob("/sys/class/thermal/thermal_zone*"):
        text = host.read(f"{zone}/temp") or ""
        if re.fullmatch(r"-?\d+", text) and int(text) > 0:
            readings[host.read(f"{zone}/type") or zone] = int(text) / 1000
    # The third counter, instantaneous over-current, rises on healthy boards; these two do not.
    events = {}
    for path in host.glob("/sys/class/hwmon/hwmon*/oc[12]_event_cnt"):
        text = host.read(path) or ""
        if text.isdigit():
            events[os.path.basename(path).removesuffix("_event_cnt")] = int(text)
    if not readings and not events:
        return
    parts = []
    if readings:
        hottest = max(readings, key=lambda k: readings[k])
        parts.append(f"hottest {readings[hottest]:.0f} C ({hottest})")
    if events:
        parts.append("power events " + ", ".join(f"{k} {v}" for k, v in sorted(events.items())))
    found = "; ".join(parts)
    data = {"celsius": readings, "power_events": events}
    if readings and max(readings.values()) > HOT_CELSIUS:
        yield Check("heat", "warn", found, "cool the board; it slows down when hot", data)
    elif any(events.values()):
        cure = "the supply was too weak since boot: check it, or lower the power mode (nvpmodel)"
        yield Check("heat", "warn", found, cure, data)
    else:
        yield Check("heat", "ok", found, None, data)


def check_cpu(host: Host, board: Board) -> Iterable[Check]:
    info = host.read("/proc/cpuinfo") or ""
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", info, re.M)
    present = set(flags[1].split()) if flags else set()
    model = re.search(r"^(?:model name|Model)\s*:\s*(.*)$", info, re.M)
    wanted = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "amx_int8")
    if host.machine == "aarch64":
        wanted = ("asimd", "fphp", "asimdhp", "asimddp", "i8mm", "sve")
    has = [f for f in wanted if f in present]
    listed = len(re.findall(r"^processor\s*:", info, re.M)) or os.cpu_count() or 1
    usable = listed
    if host.root == Path("/") and hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    found = f"{model[1] if model else host.machine}, {usable} of {listed} cores"
    found += f", {' '.join(has) or 'no vector extensions known here'}"
    data = {"cores": listed, "usable_cores": usable, "flags": has}
    if host.machine == "x86_64" and present and "avx2" not in present:
        cure = "expect slow answers: this CPU lacks AVX2; use another machine"
        yield Check("cpu", "warn", found, cure, data)
    else:
        yield Check("cpu", "ok", found, None, data)


def memory_bytes(host: Host) -> dict[str, int]:
    """``/proc/meminfo`` in bytes; empty where there is none."""
    text = host.read("/proc/meminfo") or ""
    return {k: int(v) * 1024 for k, v in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}


def check_memory(host: Host, board: Board) -> Iterable[Check]:
    info = memory_bytes(host)
    if "MemTotal" not in info:
        yield Check("memory", "warn", "unknown: no /proc/meminfo", "run on Linux with /proc mounted")
        return
    total, available = info["MemTotal"], info.get("MemAvailable", info.get("MemFree", 0))
    limit = _container_limit(host)
    found = f"{available / 1e9:.1f} of {total / 1e9:.1f} GB available"
    if limit is not None and limit < total:
        found += f", container limit {limit / 1e9:.1f} GB"
    found += f", swap {info.get('SwapTotal', 0) / 1e9:.1f} GB"
    data = {
        "total": total,
        "available": available,
        "swap": info.get("SwapTotal", 0),
        "container_limit": limit,
    }
    if available < LOW_MEMORY:
        cure = "close other programs"
        if board.jetson:
            cure += ", stop the desktop (sudo systemctl isolate multi-user.target)"
        yield Check("memory", "warn", found, f"{cure} or take a smaller bundle", data)
    else:
        yield Check("memory", "ok", found, None, data)


def _container_limit(host: Host) -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = host.read(path) or ""
        if text.isdigit():
            return int(text)
    return None


def find_library(host: Host, name: str) -> str | None:
    """Path of a shared library, without loading it."""
    folders = [*LIBRARY_FOLDERS, *host.environ.get("LD_LIBRARY_PATH", "").split(":")]
    for folder in filter(None, folders):
        found = host.glob(f"{folder}/{name}.so*")
        if found:
            return found[0]
    return None


def check_accelerators(host: Host, board: Board) -> Iterable[Check]:
    libraries = {
        name: find_library(host, name) for name in ("libcuda", "libcudart", "libcublas", "libcudnn", "libnvinfer")
    }
    patterns = (
        "/dev/nvidia[0-9]*",
        "/dev/nvidiactl",
        "/dev/nvhost-gpu",
        "/dev/nvgpu*",
        "/dev/nvmap",
    )
    devices = [path for pattern in patterns for path in host.glob(pattern)]
    nvcc = host.glob("/usr/local/cuda*/bin/nvcc")
    data = {
        "gpus": list(board.gpus),
        "libraries": libraries,
        "devices": devices,
        "nvcc": nvcc[0] if nvcc else None,
        "cuda_architecture": board.cuda_architecture,
    }
    have = ", ".join(n for n, p in libraries.items() if p) or "no CUDA libraries"
    if not board.nvidia:
        yield Check("accelerators", "ok", f"no NVIDIA GPU; runs on the CPU ({have})", None, data)
        return
    name = ", ".join(board.gpus) or f"integrated GPU of {board.jetson}"
    found = f"{name}, {have}, {len(devices)} device files"
    if libraries["libcuda"] is None:
        cure = "the driver's libcuda is missing: sudo apt install nvidia-jetpack"
        if not board.jetson:
            cure = "the driver's libcuda is missing: install the NVIDIA driver"
        cure += "; in a container start it with --runtime nvidia"
        yield Check("accelerators", "bad", found, cure, data)
    elif not devices:
        cure = "no device files: start the container with --runtime nvidia, or load the driver"
        yield Check("accelerators", "bad", found, cure, data)
    else:
        yield Check("accelerators", "ok", found, None, data)


ONNXRUNTIME_CODE = """
import json, onnxruntime as o
print(json.dumps({"version": o.__version__, "providers": o.get_available_providers()}))
"""
LLAMA_CODE = """
import json, llama_cpp as l
from llama_cpp import mtmd_cpp
print(json.dumps({
    "version": l.__version__,
    "system": l.llama_print_system_info().decode(),
    "gpu": bool(l.llama_supports_gpu_offload()),
    "max_sequences": int(l.llama_max_parallel_sequences())
    if hasattr(l, "llama_max_parallel_sequences") else None,
}))
"""
OPENCV_CODE = """
import json, re, cv2
info = cv2.getBuildInformation()
has = lambda key: bool(re.search(key + r"[^\\n]*:\\s*YES", info, re.I))
print(json.dumps({"version": cv2.__version__, "ffmpeg": has("FFMPEG"),
                  "gstreamer": has("GStreamer"), "v4l2": has("v4l")}))
"""
KERNELS_CODE = """
import json
from hoverlens import kernels
print(json.dumps({"functions": list(kernels.__all__)}))
"""


def check_onnxruntime(host: Host, board: Board) -> Iterable[Check]:
    install = "pip install --force-reinstall onnxruntime"
    probe = host.python(ONNXRUNTIME_CODE)
    if probe.value is None:
        yield Check("onnxruntime", "bad", f"cannot be imported: {probe.error}", install)
        return
    providers = probe.value["providers"]
    found = f"{probe.value['version']}, providers {', '.join(providers)}"
    data = dict(probe.value)
    if host.version("onnxruntime") and host.version("onnxruntime-gpu"):
        cure = "both onnxruntime and onnxruntime-gpu are installed and overwrite each other: "
        cure += "pip uninstall -y onnxruntime onnxruntime-gpu, then install one of them"
        yield Check("onnxruntime", "warn", found, cure, data)
    elif board.nvidia and "CUDAExecutionProvider" not in providers:
        cure = "runs on the CPU: pip uninstall -y onnxruntime && pip install onnxruntime-gpu"
        if board.jetson:
            cure += "; for a Jetson from NVIDIA's wheels (Jetson AI Lab's index for your JetPack)"
        yield Check("onnxruntime", "warn", found, cure, data)
    else:
        yield Check("onnxruntime", "ok", found, None, data)


def llama_build_command(board: Board | None = None) -> str:
    """The command that builds llama-cpp-python for this machine."""
    flags = []
    if board is not None and board.nvidia:
        flags = ["-DGGML_CUDA=on"]
        if board.jetson:
            # llama.cpp's virtual memory pool fails on Tegra.
            flags.append("-DGGML_CUDA_NO_VMM=ON")
        if board.cuda_architecture:
            flags.append(f"-DCMAKE_CUDA_ARCHITECTURES={board.cuda_architecture}")
    prefix = f'CMAKE_ARGS="{" ".join(flags)}" ' if flags else ""
    return f"{prefix}pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python"


def check_llama(host: Host, board: Board) -> Iterable[Check]:
    probe = host.python(LLAMA_CODE)
    if probe.value is None:
        found = f"llama-cpp-python cannot be imported: {probe.error}"
        if probe.illegal_instruction:
            found = "llama-cpp-python was built for another CPU (illegal instruction)"
        yield Check("llama.cpp", "bad", found, llama_build_command(board))
        return
    value = probe.value
    flags = [
        re.sub(r"\s*=\s*1$", "", part.strip())
        for part in re.split(r"[|:]", value["system"])
        if re.search(r"=\s*1\s*$", part)
    ]
    kind = "GPU offload" if value["gpu"] else "CPU only"
    found = f"llama-cpp-python {value['version']}, {kind}, built with {' '.join(flags) or 'no flags'}"
    if not board.nvidia or value["gpu"]:
        yield Check("llama.cpp", "ok", found, None, value)
        return
    cure = llama_build_command(board)
    if not host.glob("/usr/local/cuda*/bin/nvcc") and host.root == Path("/"):
        nvcc = shutil.which("nvcc")
        if nvcc is None:
            toolkit = "sudo apt install nvidia-jetpack" if board.jetson else "install the CUDA toolkit"
            cure = f"{toolkit}, then {cure}"
    # On a board the MLLM on the CPU is too slow to be useful in flight; a desktop may have reasons.
    yield Check("llama.cpp", "bad" if board.jetson else "warn", found, cure, value)


def check_engine_libraries(host: Host, board: Board) -> Iterable[Check]:
    names = {
        "TensorRT": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
        "TensorRT for RTX": ("tensorrt-rtx-cu13", "tensorrt-rtx-cu12", "tensorrt-rtx"),
        "TensorRT Edge-LLM": ("tensorrt-edgellm",),
        "PyCUDA": ("pycuda",),
        "cuda-python": ("cuda-python",),
        "torch": ("torch",),
        "transformers": ("transformers",),
        "onnx": ("onnx",),
    }
    versions = {
        label: next((v for d in distributions if (v := host.version(d))), None)
        for label, distributions in names.items()
    }
    present = [f"{label} {version}" for label, version in versions.items() if version]
    absent = [label for label, version in versions.items() if not version]
    found = ", ".join(present) or "none installed"
    found += f" (optional, absent: {', '.join(absent)})" if absent else ""
    outside = host.glob("/usr/lib/python3*/dist-packages/tensorrt")
    if versions["TensorRT"] is None and outside and sys.prefix != sys.base_prefix:
        cure = f"TensorRT of the system is not visible here: echo {os.path.dirname(outside[0])} > "
        cure += f"{sysconfig.get_path('purelib')}/system-tensorrt.pth"
        yield Check("engine libraries", "warn", found, cure, versions)
    else:
        yield Check("engine libraries", "ok", found, None, versions)


def check_opencv(host: Host, board: Board) -> Iterable[Check]:
    probe = host.python(OPENCV_CODE)
    if probe.value is None:
        cure = "pip install --force-reinstall opencv-python-headless"
        yield Check("opencv", "bad", f"cannot be imported: {probe.error}", cure)
        return
    value = probe.value
    backends = [b for b in ("ffmpeg", "gstreamer", "v4l2") if value[b]]
    found = f"{value['version']}, video backends {', '.join(backends) or 'none'}"
    if not value["ffmpeg"] and not value["gstreamer"]:
        cure = "no video files or streams: pip install --force-reinstall opencv-python-headless"
        yield Check("opencv", "warn", found, cure, value)
    else:
        yield Check("opencv", "ok", found, None, value)


def check_kernels(host: Host, board: Board) -> Iterable[Check]:
    probe = host.python(KERNELS_CODE)
    if probe.value is None:
        cure = "make venv in a checkout, or pip install --force-reinstall --no-deps ."
        yield Check("native kernels", "bad", f"cannot be imported: {probe.error}", cure)
    else:
        yield Check("native kernels", "ok", ", ".join(probe.value["functions"]), None, probe.value)


def check_cache(host: Host, board: Board) -> Iterable[Check]:
    from .paths import cache_dir

    folder = Path(cache_dir())
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    cure = "export HOVERLENS_CACHE=/a/writable/folder"
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as e:
        found = f"{folder} cannot be written ({e.strerror})"
        yield Check("cache", "bad", found, cure, {"path": str(folder), "writable": False})
        return
    free = shutil.disk_usage(nearest).free
    found = f"{folder} is writable, {free / 1e9:.1f} GB free"
    data = {"path": str(folder), "writable": True, "free": free}
    if free < LOW_DISK:
        yield Check("cache", "warn", found, f"free some space, or {cure}", data)
    else:
        yield Check("cache", "ok", found, None, data)


def check_ros(host: Host, board: Board) -> Iterable[Check]:
    installed = [os.path.basename(p) for p in host.glob("/opt/ros/*")]
    sourced = host.environ.get("ROS_DISTRO")
    data = {
        "sourced": sourced,
        "installed": installed,
        "rmw": host.environ.get("RMW_IMPLEMENTATION"),
    }
    if sourced:
        yield Check("ros", "ok", f"{sourced} (sourced)", None, data)
    elif installed:
        cure = f"source /opt/ros/{installed[0]}/setup.bash before the ROS nodes"
        yield Check("ros", "ok", f"{', '.join(installed)} installed, none sourced; {cure}", None, data)
    else:
        yield Check("ros", "ok", "not installed (only the ROS nodes need it)", None, data)
    text = host.read("/proc/sys/net/core/rmem_max")
    if text is None or not text.isdigit():
        return
    size = int(text)
    found = f"net.core.rmem_max {size}"
    buffer = {"rmem_max": size}
    if size >= RMEM_WANTED:
        yield Check("socket buffers", "ok", found, None, buffer)
    elif sourced or installed:
        cure = f"large images get lost: sudo sysctl -w net.core.rmem_max={RMEM_WANTED}"
        yield Check("socket buffers", "warn", found, cure, buffer)
    else:
        found += f" (for large images over ROS 2: {RMEM_WANTED})"
        yield Check("socket buffers", "ok", found, None, buffer)


def check_bundle(host: Host, path: str | None) -> Iterable[Check]:
    from .bundle import find_bundle

    try:
        bundle = find_bundle(path, verify=False)
    except HoverlensError as e:
        status: Status = "bad" if path or host.environ.get("HOVERLENS_BUNDLE") else "warn"
        cure = "make venv in a checkout makes a demonstration bundle; or hoverlens bundle assemble"
        yield Check("bundle", status, str(e), cure)
        return
    size = sum(entry.size for entry in bundle.manifest.files.values())
    data: dict[str, Any] = {
        "name": bundle.name,
        "path": str(bundle.path),
        "sha256": bundle.sha256,
        "bytes": size,
    }
    try:
        bundle.verify()
    except HoverlensError as e:
        cure = f"hoverlens bundle verify {bundle.path}; copy or assemble the bundle again"
        yield Check("bundle", "bad", str(e), cure, data)
        return
    found = f"{bundle.name} at {bundle.path}, {size / 1e6:.0f} MB, verified"
    available = memory_bytes(host).get("MemAvailable")
    if bundle.random_roles:
        found += f"; the weights of {', '.join(bundle.random_roles)} are random, answers mean nothing"
        cure = "hoverlens bundle assemble with real models"
        yield Check("bundle", "warn", found, cure, data)
    elif available is not None and available < 1.3 * size:
        cure = f"{available / 1e9:.1f} GB of memory are free: take a smaller bundle or free memory"
        yield Check("bundle", "warn", found, cure, data)
    else:
        yield Check("bundle", "ok", found, None, data)


BUILT_IN: tuple[CheckFunction, ...] = (
    check_python,
    check_platform,
    check_board,
    check_heat,
    check_cpu,
    check_memory,
    check_accelerators,
    check_onnxruntime,
    check_llama,
    check_engine_libraries,
    check_opencv,
    check_kernels,
    check_cache,
    check_ros,
)


SMALL_BUNDLE = 500_000_000
"""Bytes of a language model that ``doctor`` loads without being asked to."""


def cache_law_check(bundle: str | None, deep: bool) -> CheckFunction:
    """A check that cached states give the answers of full prompts, on this device with this bundle.

    Args:
        bundle: As for :func:`run_doctor`.
        deep: Also where the model is large, so that loading it takes time.
    """

    def check_cached_states(host: Host, board: Board) -> Iterable[Check]:
        from .bundle import find_bundle

        try:
            found = find_bundle(bundle)
            mllm, mmproj = found.file("mllm"), found.file("mmproj")
        except HoverlensError:
            return  # the bundle's own line says why
        if mllm is None or mmproj is None:
            return
        if mllm.stat().st_size > SMALL_BUNDLE and not deep:
            size = f"{mllm.stat().st_size / 1e9:.1f} GB"
            yield Check("cached states", "ok", f"not checked: the language model has {size}; hoverlens doctor --deep")
            return
        yield _cached_states(found, mllm, mmproj)

    return check_cached_states


def _cached_states(bundle: Bundle, mllm: Path, mmproj: Path) -> Check:
    from .mllm.chat import ChatFormat
    from .mllm.files import check_pair
    from .mllm.llamacpp import LlamaCppBackend, LlamaOptions
    from .mllm.selfcheck import TOLERANCE, check_cache_law
    from .mllm.trial import try_load

    files = bundle.manifest.files
    options = LlamaOptions(n_ctx=4096, image_max_tokens=bundle.manifest.image_max_tokens)
    try:
        check_pair(mllm, mmproj)
        try_load(mllm, mmproj, files["mllm"].sha256, files["mmproj"].sha256)
        backend = LlamaCppBackend(mllm, mmproj, options, identity=bundle.sha256)
        with backend:
            result = check_cache_law(backend, ChatFormat.from_template(backend.info.chat_template))
    except HoverlensError as e:
        cure = f"hoverlens bundle verify {bundle.path}; hoverlens inspect {mllm}"
        return Check("cached states", "bad", str(e), cure)
    data = {"difference": result.difference, "pictures": result.swapped, "tokens_equal": result.tokens_equal}
    if result.holds:
        found = f"forked and full prompts agree within {result.difference:.4f} (needed {TOLERANCE})"
        return Check("cached states", "ok", found, data=data)
    return Check(
        "cached states",
        "bad",
        f"forked and full prompts differ by {result.difference:.3f} (needed {TOLERANCE}): answers would be wrong here",
        "hoverlens ask --no-share evaluates every prompt in full; report this line with hoverlens doctor --json",
        data,
    )
