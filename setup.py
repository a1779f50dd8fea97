"""Builds hoverlens: the repository root is the package, CMake builds its native extension.

Everything declarative lives in pyproject.toml; this file holds what has to be computed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
FOLDERS = ("kernels", "runtime", "calibration", "export", "benchmarks")
DATA_PATTERNS = (
    "*.yaml",
    "*.txt",
    "*.jinja",
    "*.gbnf",
    "*.pyi",
    "py.typed",
    "prompts/*",
    "prompts/*/*",
)


def find_packages() -> list[str]:
    """Dotted names of the package and of every folder below it that has an `__init__.py`."""
    names = ["hoverlens"]
    for folder in FOLDERS:
        for init in sorted((ROOT / folder).rglob("__init__.py")):
            names.append(".".join(("hoverlens", *init.parent.relative_to(ROOT).parts)))
    return names


def package_data(packages: list[str]) -> dict[str, list[str]]:
    """Data files by package; the root folder is also the checkout, so it lists its own."""
    data = {name: list(DATA_PATTERNS) for name in packages if name != "hoverlens"}
    data["hoverlens"] = ["py.typed"]
    return data


class BuildModules(build_py):
    """Keeps setup.py, a neighbour of the package's own modules, out of the wheel."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        modules = super().find_package_modules(package, package_dir)
        return [m for m in modules if not (m[0] == "hoverlens" and m[1] in ("setup", "conftest"))]


class BuildNative(build_ext):
    """Builds extensions with CMake, straight into the wheel or, when editable, the checkout."""

    def build_extension(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build = Path(self.build_temp).resolve() / "cmake"
        build.mkdir(parents=True, exist_ok=True)
        cmake = _tool("cmake", "CMAKE_BIN_DIR")
        configure = [
            cmake,
            # A build folder kept from an isolated build names tools that are gone.
            "--fresh",
            "-S",
            str(ROOT),
            "-B",
            str(build),
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DHOVERLENS_OUTPUT_DIR={output}",
        ]
        ninja = _tool("ninja", "BIN_DIR")
        if ninja:
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        configure += os.environ.get("CMAKE_ARGS_HOVERLENS", "").split()
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", str(build), "--parallel"], check=True)


def _tool(name: str, folder_attribute: str) -> str:
    """Path of a build tool: the Python package's copy, else the one on PATH, else ''.

    Without build isolation the virtual environment's bin folder need not be on PATH.
    """
    try:
        module = __import__(name)
    except ImportError:
        return shutil.which(name) or ("cmake" if name == "cmake" else "")
    return str(Path(getattr(module, folder_attribute)) / name)


PACKAGES = find_packages()
setup(
    packages=PACKAGES,
    package_dir={"hoverlens": "."},
    package_data=package_data(PACKAGES),
    ext_modules=[Extension("hoverlens.kernels._native", sources=[])],
    cmdclass={"build_ext": BuildNative, "build_py": BuildModules},
)
