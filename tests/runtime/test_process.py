"""What the operating system says of this process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from hoverlens.runtime.process import default_threads, peak_rss_bytes, rss_bytes

SIBLINGS = {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 2: "2-3", 3: "2-3"}


def machine(tmp_path: Path, siblings: Mapping[int, str], cgroup: Mapping[str, str] | None = None) -> dict[str, Path]:
    for cpu, text in siblings.items():
        folder = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    for name, text in (cgroup or {}).items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text)
    return {"sys_cpus": tmp_path / "cpu", "cgroup": tmp_path / "cgroup"}


@pytest.mark.parametrize(
    ("cpus", "expected"), [(range(6), 3), ([0], 1), ([0, 4], 1), ([0, 1], 2), ([4, 5, 3], 3), ([], 1)]
)
def test_a_core_counts_once(tmp_path: Path, cpus: list[int], expected: int) -> None:
    assert default_threads(cpus, **machine(tmp_path, SIBLINGS)) == expected


def test_cores_of_two_clusters_are_different_cores(tmp_path: Path) -> None:
    """Where the kernel numbers cores anew in each cluster, only the list of siblings tells them apart."""
    assert default_threads(range(8), **machine(tmp_path, {i: str(i) for i in range(8)})) == 8


def test_without_topology_every_cpu_is_a_core(tmp_path: Path) -> None:
    assert default_threads([3, 5, 7], **machine(tmp_path, {})) == 3


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "1000 100000\n"}, 1),
        ({"cpu.max": "1600000 100000\n"}, 8),
        ({"cpu.max": "nonsense"}, 8),
        ({"cpu.max": ""}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n"}, 8),
    ],
)
def test_no_more_threads_than_a_containers_share(tmp_path: Path, cgroup: Mapping[str, str], expected: int) -> None:
    assert default_threads(range(8), **machine(tmp_path, {i: str(i) for i in range(8)}, cgroup)) == expected


def test_this_machine_has_a_core() -> None:
    assert default_threads() >= 1


def test_the_peak_is_at_least_what_is_resident() -> None:
    block = np.ones(50_000_000, np.uint8)
    assert 50_000_000 < rss_bytes() <= 1.02 * peak_rss_bytes()
    del block


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the operating system tells less")
def test_the_peak_of_a_process_is_its_own() -> None:
    """A process started by one of 200 MB did not take 200 MB."""
    block = np.ones(200_000_000, np.uint8)
    code = "from hoverlens.runtime.process import peak_rss_bytes; print(peak_rss_bytes())"
    found = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert 1_000_000 < found < 150_000_000 < len(block)
