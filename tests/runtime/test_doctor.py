"""The doctor sees what a machine lacks, on machines that these tests make of plain files."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hoverlens.runtime import doctor
from hoverlens.runtime.doctor import Board, Check, Host, Probe, look_at_board, report, report_text, run_doctor

CPU_LLAMA = {"version": "0.3.36", "system": "CPU : NEON = 1 | ARM_FMA = 1 | SVE = 0 | ", "gpu": False}
GPU_LLAMA = CPU_LLAMA | {"gpu": True}
CPU_ONNX = {"version": "1.20", "providers": ["CPUExecutionProvider"]}
GPU_ONNX = {"version": "1.20", "providers": ["CUDAExecutionProvider", "CPUExecutionProvider"]}
OPENCV = {"version": "4.10", "ffmpeg": True, "gstreamer": False, "v4l2": True}

ORIN = {
    "proc/device-tree/model": "NVIDIA Jetson AGX Orin Developer Kit\0",
    "etc/nv_tegra_release": (
        "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: Wed Jan  8\n"
    ),
    "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 22.04.5 LTS"\n',
    "proc/cpuinfo": "".join(
        f"processor\t: {i}\nFeatures\t: fp asimd fphp asimdhp asimddp crc32\n\n" for i in range(12)
    ),
    "proc/meminfo": "MemTotal: 64349000 kB\nMemAvailable: 50000000 kB\nSwapTotal: 32000000 kB\n",
    "proc/sys/net/core/rmem_max": "212992\n",
    "var/lib/nvpmodel/status": "pmode:0002 fmode:fanNull\n",
    "sys/class/thermal/thermal_zone0/temp": "51250\n",
    "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
    "sys/class/thermal/thermal_zone1/temp": "-256000\n",
    "sys/class/thermal/thermal_zone1/type": "cv0-thermal\n",
    "sys/class/hwmon/hwmon3/oc1_event_cnt": "0\n",
    "sys/class/hwmon/hwmon3/oc2_event_cnt": "0\n",
    "sys/class/hwmon/hwmon3/oc3_event_cnt": "77\n",
    "usr/lib/aarch64-linux-gnu/nvidia/libcuda.so.1": "",
    "usr/local/cuda-12.6/targets/aarch64-linux/lib/libcudart.so.12": "",
    "usr/local/cuda-12.6/bin/nvcc": "",
    "dev/nvmap": "",
    "dev/nvhost-gpu": "",
    "opt/ros/humble/setup.bash": "",
}


@dataclass(frozen=True)
class FakeHost(Host):
    """A machine whose libraries are what a test says."""

    libraries: Mapping[str, Any] = field(default_factory=dict)
    distributions: Mapping[str, str] = field(default_factory=dict)
    programs: Mapping[str, str] = field(default_factory=dict)

    def python(self, code: str, timeout_s: float = 120) -> Probe:
        for name, value in self.libraries.items():
            if name in code:
                return value if isinstance(value, Probe) else Probe(value)
        return Probe(None, "ModuleNotFoundError: No module named 'x'")

    def version(self, distribution: str) -> str | None:
        return self.distributions.get(distribution)

    def run(self, command: Sequence[str], timeout_s: float = 10) -> str | None:
        return self.programs.get(command[0])


def make_host(root: Path, files: Mapping[str, str], machine: str = "aarch64", **more: Any) -> FakeHost:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    more.setdefault(
        "libraries",
        {"llama_cpp": CPU_LLAMA, "onnxruntime": CPU_ONNX, "cv2": OPENCV, "kernels": {"functions": ["nms"]}},
    )
    return FakeHost(root=root, environ=more.pop("environ", {}), machine=machine, **more)


def find(checks: Sequence[Check], name: str) -> Check:
    return next(c for c in checks if c.name == name)


def test_an_orin_is_recognised_without_nvml(tmp_path: Path) -> None:
    board = look_at_board(make_host(tmp_path, ORIN))
    assert board.jetson == "NVIDIA Jetson AGX Orin Developer Kit"
    assert board.l4t == (36, "4.3")
    assert board.cuda_architecture == "87"


@pytest.mark.parametrize(
    ("model", "release", "architecture", "jetpack"),
    [
        ("NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super", 36, "87", "6"),
        ("NVIDIA Jetson AGX Thor Developer Kit", 38, "110", "7"),
        ("NVIDIA Jetson AGX Thor Developer Kit", 39, "110", "7"),
        ("Jetson-AGX Xavier", 35, "72", "5"),
        ("NVIDIA Jetson Next", 50, None, None),
    ],
)
def test_boards_and_their_jetpack(
    tmp_path: Path, model: str, release: int, architecture: str | None, jetpack: str | None
) -> None:
    files = ORIN | {
        "proc/device-tree/model": model + "\0",
        "etc/nv_tegra_release": f"# R{release} (release), REVISION: 2.0, GCID: 1\n",
    }
    host = make_host(tmp_path, files)
    board = look_at_board(host)
    assert board.cuda_architecture == architecture
    check = next(iter(doctor.check_board(host, board)))
    assert check.data["jetpack"] == jetpack
    assert (check.status == "ok") == (release >= 36)


def test_a_cpu_build_of_llama_on_an_orin_is_bad_and_says_how_to_build(tmp_path: Path) -> None:
    checks = run_doctor(make_host(tmp_path, ORIN), extra=[])
    check = find(checks, "llama.cpp")
    assert check.status == "bad"
    assert "CPU only" in check.found
    assert "NEON" in check.found
    assert "SVE" not in check.found
    assert check.cure is not None
    assert check.cure.startswith(
        'CMAKE_ARGS="-DGGML_CUDA=on -DGGML_CUDA_NO_VMM=ON -DCMAKE_CUDA_ARCHITECTURES=87" pip install'
    )
    assert "--no-binary llama-cpp-python" in check.cure
    assert report(checks)["status"] == "bad"


def test_a_gpu_build_of_llama_is_good(tmp_path: Path) -> None:
    host = make_host(tmp_path, ORIN, libraries={"llama_cpp": GPU_LLAMA, "onnxruntime": GPU_ONNX})
    checks = run_doctor(host, extra=[])
    assert find(checks, "llama.cpp").status == "ok"
    assert find(checks, "onnxruntime").status == "ok"
    assert find(checks, "accelerators").status == "ok"
    assert find(checks, "board").data["power_mode"] == 2


def test_a_desktop_gpu_with_cpu_libraries_is_a_warning(tmp_path: Path) -> None:
    host = make_host(
        tmp_path,
        {"usr/lib/x86_64-linux-gnu/libcuda.so.1": "", "dev/nvidia0": "", "usr/local/cuda/bin/nvcc": ""},
        machine="x86_64",
        programs={"nvidia-smi": "NVIDIA RTX A4000, 8.6"},
    )
    checks = run_doctor(host, extra=[])
    llama, onnx = find(checks, "llama.cpp"), find(checks, "onnxruntime")
    assert llama.status == onnx.status == "warn"
    assert "-DCMAKE_CUDA_ARCHITECTURES=86" in str(llama.cure)
    assert "NO_VMM" not in str(llama.cure)
    assert "onnxruntime-gpu" in str(onnx.cure)


def test_a_wheel_of_another_cpu_is_told_from_a_missing_one(tmp_path: Path) -> None:
    crash = Probe(None, "killed by signal 4", illegal_instruction=True)
    check = find(run_doctor(make_host(tmp_path, {}, libraries={"llama_cpp": crash}), extra=[]), "llama.cpp")
    assert check.status == "bad"
    assert "another CPU" in check.found
    assert "--no-binary" in str(check.cure)


def test_an_empty_machine_gets_a_whole_report(tmp_path: Path) -> None:
    checks = run_doctor(make_host(tmp_path, {}, libraries={}), extra=[])
    assert {"python", "board", "llama.cpp", "onnxruntime", "opencv", "memory"} <= {c.name for c in checks}
    assert all(c.cure for c in checks if c.status != "ok")
    assert not any("check itself failed" in c.found for c in checks)
    text = report_text(checks)
    assert text.count("cure:") == sum(c.cure is not None for c in checks)


def test_a_check_that_fails_does_not_take_the_others_along(tmp_path: Path) -> None:
    def check_moon(host: Host, board: Board) -> list[Check]:
        raise RuntimeError("eclipse")

    def check_sun(host: Host, board: Board) -> list[Check]:
        return [Check("sun", "ok", "shines")]

    checks = run_doctor(make_host(tmp_path, {}), extra=[check_moon, check_sun])
    assert find(checks, "moon").status == "warn"
    assert "eclipse" in find(checks, "moon").found
    assert find(checks, "sun").found == "shines"


def test_both_onnxruntimes_at_once_are_reported(tmp_path: Path) -> None:
    host = make_host(tmp_path, {}, distributions={"onnxruntime": "1.20", "onnxruntime-gpu": "1.19"})
    assert "overwrite each other" in str(find(run_doctor(host, extra=[]), "onnxruntime").cure)


def test_over_current_events_that_matter_are_told_from_those_that_do_not(tmp_path: Path) -> None:
    host = make_host(tmp_path, ORIN)
    assert find(run_doctor(host, extra=[]), "heat").status == "ok"
    (tmp_path / "sys/class/hwmon/hwmon3/oc1_event_cnt").write_text("3\n")
    check = find(run_doctor(host, extra=[]), "heat")
    assert check.status == "warn"
    assert "oc1 3" in check.found


def test_heat(tmp_path: Path) -> None:
    host = make_host(tmp_path, ORIN | {"sys/class/thermal/thermal_zone0/temp": "97000"})
    check = find(run_doctor(host, extra=[]), "heat")
    assert check.status == "warn"
    assert "97 C (cpu-thermal)" in check.found


def test_small_socket_buffers_matter_where_ros_is(tmp_path: Path) -> None:
    with_ros = run_doctor(make_host(tmp_path / "a", ORIN), extra=[])
    assert find(with_ros, "socket buffers").status == "warn"
    assert "sysctl -w net.core.rmem_max" in str(find(with_ros, "socket buffers").cure)
    without = {k: v for k, v in ORIN.items() if not k.startswith("opt/ros")}
    assert find(run_doctor(make_host(tmp_path / "b", without), extra=[]), "socket buffers").status == "ok"


def test_sourced_ros_is_named(tmp_path: Path) -> None:
    host = make_host(tmp_path, ORIN, environ={"ROS_DISTRO": "humble"})
    assert find(run_doctor(host, extra=[]), "ros").found == "humble (sourced)"


def test_low_memory_and_container_limits(tmp_path: Path) -> None:
    files = ORIN | {
        "proc/meminfo": "MemTotal: 7800000 kB\nMemAvailable: 500000 kB\nSwapTotal: 0 kB\n",
        "sys/fs/cgroup/memory.max": "4000000000\n",
    }
    check = find(run_doctor(make_host(tmp_path, files), extra=[]), "memory")
    assert check.status == "warn"
    assert check.data["container_limit"] == 4_000_000_000
    assert "isolate multi-user.target" in str(check.cure)


def test_a_jetson_container_without_the_driver_is_bad(tmp_path: Path) -> None:
    files = {k: v for k, v in ORIN.items() if not k.startswith(("dev/", "usr/lib"))}
    check = find(run_doctor(make_host(tmp_path, files), extra=[]), "accelerators")
    assert check.status == "bad"
    assert "--runtime nvidia" in str(check.cure)


def test_system_tensorrt_outside_a_virtual_environment_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.setattr(sys, "prefix", "/home/x/.venv")
    files = ORIN | {"usr/lib/python3.10/dist-packages/tensorrt/__init__.py": ""}
    check = find(run_doctor(make_host(tmp_path, files), extra=[]), "engine libraries")
    assert check.status == "warn"
    assert "echo /usr/lib/python3.10/dist-packages > " in str(check.cure)


def test_a_cache_that_cannot_be_made_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("HOVERLENS_CACHE", str(blocker / "cache"))
    check = find(run_doctor(make_host(tmp_path, {}), extra=[]), "cache")
    assert check.status == "bad"
    assert "HOVERLENS_CACHE" in str(check.cure)


def test_probes_of_this_machine_run_in_processes_of_their_own() -> None:
    host = Host()
    assert host.python("import json; print('noise'); print(json.dumps({'a': 1}))").value == {"a": 1}
    assert "No module named" in str(host.python("import no_such_module").error)
    assert host.python("import os, signal; os.kill(os.getpid(), signal.SIGILL)").illegal_instruction
    assert host.python("").value is None
    assert host.run(["no-such-program"]) is None
