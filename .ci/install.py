"""Sets up the virtual environment behind `make venv`; run by the Python it is made from.

Needs only the standard library. Does nothing when an earlier run finished from the same inputs,
which are told by their contents: a fresh clone's file times say nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
EXTRAS = "export,dev,tensorrt"
SUPPORTED = ((3, 10), (3, 12))
REPORT_EVERY_S = 20.0

# What llama.cpp says it was compiled for -> the CPU flag that this needs.
CPU_FLAGS = {
    "SSE3": "pni",
    "SSSE3": "ssse3",
    "AVX": "avx",
    "AVX_VNNI": "avx_vnni",
    "AVX2": "avx2",
    "F16C": "f16c",
    "FMA": "fma",
    "BMI2": "bmi2",
    "AVX512": "avx512f",
    "AVX512_VBMI": "avx512vbmi",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "AMX_INT8": "amx_int8",
}


class SetupError(Exception):
    """Ends the set-up with one message."""


def say(text: str) -> None:
    print(f"venv: {text}", flush=True)


def check_machine() -> None:
    """Raises SetupError naming everything that is missing and the command that brings it."""
    version = sys.version_info[:2]
    if not SUPPORTED[0] <= version <= SUPPORTED[1]:
        raise SetupError(
            f"{sys.executable} is Python {version[0]}.{version[1]}, needed 3.10 to 3.12: "
            "make venv PYTHON=/path/to/python3.11"
        )
    prefix = f"python{version[0]}.{version[1]}"
    missing: dict[str, str] = {}
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        missing["the venv module"] = f"{prefix}-venv"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        missing["Python's C headers"] = f"{prefix}-dev"
    compiler = os.environ.get("CXX", "").split()
    candidates = compiler[:1] or ["c++", "g++", "clang++"]
    if not any(shutil.which(c) for c in candidates) or not any(shutil.which(c) for c in ("cc", "gcc", "clang")):
        missing["a C++ compiler"] = "build-essential"
    if missing and not bring(missing):
        raise SetupError(f"missing: {', '.join(missing)}; run: sudo apt-get install -y " + " ".join(missing.values()))


def bring(missing: dict[str, str]) -> bool:
    """Installs Debian packages where this user may; False where it may not or it failed."""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return False
    say(f"installing {', '.join(missing)} with apt-get")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", *missing.values()]):
        done = subprocess.run(["apt-get", *arguments], env=environment, stdout=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            return False
    return True


def digest(*parts: str | Path) -> str:
    """Hash of texts and of files (names and contents; folders with all they hold)."""
    state = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            state.update(f"text {part}\n".encode())
            continue
        files = sorted(p for p in part.rglob("*") if p.is_file()) if part.is_dir() else [part]
        for file in files:
            content = file.read_bytes()
            state.update(f"file {file.relative_to(ROOT)} {len(content)}\n".encode() + content)
    return state.hexdigest()


def cpu_identity() -> tuple[str, set[str]]:
    """A short hash of the CPU model and its features, and the features themselves."""
    lines = set()
    flags: set[str] = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "flags", "Features", "CPU part"):
                lines.add(" ".join(sorted(value.split())))
            if name.strip() in ("flags", "Features"):
                flags |= set(value.split())
    return digest(platform.machine(), *sorted(lines))[:16], flags


class Venv:
    """The environment being set up; everything pip says goes to its log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.python = path / "bin" / "python"
        self.log = path / "install.log"

    def works(self) -> bool:
        """Whether it exists and runs the Python version of this process."""
        probe = "import sys, pip; print(*sys.version_info[:2])"
        try:
            done = subprocess.run([self.python, "-c", probe], capture_output=True, text=True)
        except OSError:
            return False
        want = f"{sys.version_info[0]} {sys.version_info[1]}"
        return done.returncode == 0 and done.stdout.strip() == want

    def create(self) -> None:
        if self.works():
            return
        if self.path.exists():
            say(f"{self.path.name} is broken or of another Python, making it anew")
        say(f"creating {self.path} with Python {platform.python_version()}")
        done = subprocess.run(
            [sys.executable, "-m", "venv", "--clear", str(self.path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            raise SetupError(f"python -m venv failed: {_last_line(done.stderr)}")

    def runs(self, code: str) -> subprocess.CompletedProcess[str]:
        # From another folder, so that only what is installed can be imported.
        return subprocess.run([self.python, "-c", code], capture_output=True, text=True, cwd=self.path)

    def stamp(self, name: str) -> Path:
        return self.path / f".hoverlens-{name}"

    def is_done(self, name: str, key: str) -> bool:
        stamp = self.stamp(name)
        return stamp.exists() and stamp.read_text().strip() == key

    def mark_done(self, name: str, key: str) -> None:
        part = self.stamp(name).with_suffix(".part")
        part.write_text(key + "\n")
        os.replace(part, self.stamp(name))

    def pip(self, title: str, *arguments: str | Path, env: dict[str, str] | None = None) -> None:
        """Runs pip into the log, with a line on the terminal every REPORT_EVERY_S seconds.

        Raises:
            SetupError: with the last lines of the log and what to do.
        """
        command = [self.python, "-m", "pip", "--disable-pip-version-check", *arguments]
        with self.log.open("ab") as log:
            log.write(f"\n== {title}: pip {' '.join(map(str, arguments))}\n".encode())
            log.flush()
            start = log.tell()
            began = reported = time.monotonic()
            process = subprocess.Popen(
                [str(c) for c in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                cwd=ROOT,
            )
            try:
                while process.poll() is None:
                    time.sleep(0.2)
                    if time.monotonic() - reported >= REPORT_EVERY_S:
                        reported = time.monotonic()
                        elapsed = int(reported - began)
                        say(f"{title}: {elapsed // 60}:{elapsed % 60:02d} {self._progress(start)}")
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        if process.returncode:
            tail = "\n".join(f"  | {line}" for line in self._written(start)[-15:])
            raise SetupError(
                f"{title} failed; the end of {self.log}:\n{tail}\n"
                "Check network, disk space and memory (a compiler needs 2 GB a core: "
                "CMAKE_BUILD_PARALLEL_LEVEL=1 lowers that), then run the same make again."
            )

    def _written(self, start: int) -> list[str]:
        with self.log.open("rb") as log:
            log.seek(start)
            text = log.read().decode(errors="replace")
        return [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]

    def _progress(self, start: int) -> str:
        lines = self._written(start)
        for line in reversed(lines):
            if match := re.search(r"\[(\d+)/(\d+)\]", line):
                return f"compiled {match[1]} of {match[2]}"
            if line.startswith(("Downloading", "Collecting", "Building", "Installing")):
                return line[:80]
        return lines[-1][:80] if lines else ""


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no output"


def pinned(name: str) -> str:
    """The version that constraints.txt pins for a package."""
    match = re.search(rf"^{re.escape(name)}==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE)
    if not match:
        raise SetupError(f"{CONSTRAINTS} pins no version of {name}")
    return match[1]


def llama_misfit(venv: Venv, flags: set[str]) -> str | None:
    """Why the installed llama.cpp does not fit this CPU, so that only a build can help, or None.

    Raises:
        SetupError: it fails for another reason, which a build would not cure.
    """
    done = venv.runs("import llama_cpp; print(llama_cpp.llama_print_system_info().decode())")
    if done.returncode < 0:
        return "it crashes when loaded"
    if done.returncode:
        reason = _last_line(done.stderr)
        # Its shared libraries are loaded at import: missing ones, or a libc that is too old.
        if "shared" in reason.lower() or "GLIBC" in reason:
            return reason
        raise SetupError(f"llama-cpp-python does not import: {reason}; see {venv.log}")
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    built_for = re.findall(r"(\w+) = 1", done.stdout)
    lacking = sorted(f for f in built_for if f in CPU_FLAGS and CPU_FLAGS[f] not in flags)
    return f"it was built for a CPU with {', '.join(lacking)}" if lacking else None


def install_llama(venv: Venv, cache: Path) -> None:
    """Installs llama-cpp-python, from the cache of wheels built for this very CPU if it can.

    There are no binary wheels; the build optimises for the CPU it runs on.
    """
    version = pinned("llama-cpp-python")
    cpu, flags = cpu_identity()
    build_arguments = os.environ.get("CMAKE_ARGS", "")
    if build_arguments:
        cpu += "-" + digest(build_arguments)[:8]
    wheels = cache / "wheels" / cpu

    installed = venv.runs("import importlib.metadata as m; print(m.version('llama-cpp-python'))")
    if installed.stdout.strip() == version and llama_misfit(venv, flags) is None:
        return

    # pip keeps wheels it built without knowing the CPU or CMAKE_ARGS they were built for. One
    # that comes from there is checked, and built again without pip's cache if it does not fit.
    sources: list[list[str] | None] = [["--no-cache-dir"]]
    if not build_arguments:
        sources.insert(0, [])
    if find_wheel(wheels, version):
        sources.insert(0, None)
    misfit = None
    for options in sources:
        if options is None:
            say(f"llama.cpp: taking the wheel in {wheels}")
        else:
            build_llama(venv, wheels, version, options)
        wheel = find_wheel(wheels, version)
        if wheel is None:
            raise SetupError(f"llama.cpp: no wheel came out of the build; see {venv.log}")
        venv.pip("llama.cpp", "install", "-c", CONSTRAINTS, "--force-reinstall", "--no-deps", wheel)
        # Again, now with what it depends on and without touching what is there.
        venv.pip("llama.cpp", "install", "-c", CONSTRAINTS, f"llama-cpp-python=={version}")
        misfit = llama_misfit(venv, flags)
        if misfit is None:
            return
        wheel.unlink()
        say(f"llama.cpp: {wheel.name} does not fit this machine: {misfit}")
    raise SetupError(f"llama.cpp does not load after a fresh build: {misfit}; see {venv.log}")


def find_wheel(folder: Path, version: str) -> Path | None:
    # The libraries are loaded by ctypes, so one wheel (py3-none) serves every Python version.
    return next(iter(sorted(folder.glob(f"llama_cpp_python-{version}-*.whl"))), None)


def build_llama(venv: Venv, wheels: Path, version: str, options: list[str]) -> None:
    cores = len(os.sched_getaffinity(0))
    say(
        f"llama.cpp: building for this CPU on {cores} core(s): about {max(1, 10 // cores)} to "
        f"{max(3, 30 // cores)} minutes, "
        f"once; seconds if pip kept an earlier build. Details: {venv.log}"
    )
    staging = wheels.with_name(f"{wheels.name}.{os.getpid()}")
    staging.mkdir(parents=True, exist_ok=True)
    try:
        venv.pip(
            "llama.cpp",
            "wheel",
            "-v",
            "--no-deps",
            *options,
            "-w",
            staging,
            f"llama-cpp-python=={version}",
            env={"CMAKE_BUILD_PARALLEL_LEVEL": _parallel(cores)},
        )
        wheels.mkdir(parents=True, exist_ok=True)
        for wheel in staging.glob("*.whl"):
            os.replace(wheel, wheels / wheel.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _parallel(cores: int) -> str:
    return os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(cores)


def install_everything(venv: Venv, cache: Path, torch_index: str) -> None:
    """Installs what demo, tests and benchmarks need, hoverlens itself last and editable."""
    say("pip and build tools")
    venv.pip("pip", "install", "--upgrade", "pip", "wheel")
    install_llama(venv, cache)
    say("torch (a large download the first time)")
    index = ["--index-url", torch_index] if torch_index else []
    venv.pip("torch", "install", "-c", CONSTRAINTS, *index, "torch")
    say("hoverlens and its dependencies")
    venv.pip("hoverlens", "install", "-c", CONSTRAINTS, "-e", f".[{EXTRAS}]")


def rebuild_native(venv: Venv) -> None:
    say("building the native kernels again, their sources changed")
    # The build tools are in the environment by now, so this needs no network.
    options = ("--no-deps", "--no-build-isolation")
    venv.pip("kernels", "install", *options, "-e", ".")


@contextlib.contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Makes a second set-up of the same environment wait for the first."""
    lock = path.with_name(path.name + ".lock")
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another set-up of this environment")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def default_cache() -> Path:
    given = os.environ.get("HOVERLENS_CACHE")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hoverlens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--torch-index", default="", help="package index to take torch from")
    options = parser.parse_args()
    venv = Venv(options.venv.absolute())

    began = time.monotonic()
    with only_one(venv.path):
        packages = digest(
            str(venv.path),
            str(ROOT),
            platform.python_version(),
            ROOT / "pyproject.toml",
            ROOT / "setup.py",
            CONSTRAINTS,
        )
        kernels = ROOT / "kernels"
        native = digest(packages, ROOT / "CMakeLists.txt", kernels / "include", kernels / "src")
        usable = venv.works()
        fresh = not (usable and venv.is_done("packages", packages))
        if not fresh and venv.is_done("native", native):
            if venv.runs("import hoverlens.kernels, llama_cpp").returncode == 0:
                return
            fresh = True
        check_machine()
        if fresh:
            venv.create()
            install_everything(venv, default_cache(), options.torch_index)
            venv.mark_done("packages", packages)
        else:
            rebuild_native(venv)
        done = venv.runs("import hoverlens.kernels")
        if done.returncode:
            raise SetupError(f"hoverlens does not import: {_last_line(done.stderr)}")
        venv.mark_done("native", native)
    say(f"ready after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"venv: {error}")
    except KeyboardInterrupt:
        sys.exit("venv: interrupted; run the same command again to go on")
