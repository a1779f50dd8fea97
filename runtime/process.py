"""What the operating system says of this process."""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Iterable
from pathlib import Path


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far, in bytes."""
    try:
        # The resource module also counts what the process that started this one had when it did.
        with open("/proc/self/status", encoding="ascii") as f:
            for line in f:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except (OSError, IndexError, ValueError):
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rss_bytes() -> int:
    """Resident memory of this process now, in bytes; 0 where /proc is absent."""
    try:
        with open("/proc/self/statm", encoding="ascii") as f:
            pages = int(f.read().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * resource.getpagesize()


def default_threads(
    cpus: Iterable[int] | None = None,
    sys_cpus: str | os.PathLike[str] = "/sys/devices/system/cpu",
    cgroup: str | os.PathLike[str] = "/sys/fs/cgroup",
) -> int:
    """How many threads compute best: one for each core that this process may use.

    Hyper-threads of one core count once where Linux tells, and a container's share of processor time is a limit:
    threads beyond it only wait for each other.

    Args:
        cpus: Numbers of the CPUs; by default those that this process may run on.
        sys_cpus: Where Linux describes them.
        cgroup: Where it keeps the container's limits.
    """
    if cpus is None:
        known = hasattr(os, "sched_getaffinity")
        cpus = os.sched_getaffinity(0) if known else range(os.cpu_count() or 1)
    cores = set()
    for cpu in cpus:
        try:
            # Numbers of cores will not do: on ARM they begin again in each cluster.
            text = Path(sys_cpus, f"cpu{cpu}", "topology", "thread_siblings_list").read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            text = ""
        cores.add(text or str(cpu))
    share = _cpu_share(Path(cgroup))
    return max(1, len(cores) if share is None else min(len(cores), math.ceil(share)))


def _cpu_share(cgroup: Path) -> float | None:
    """CPUs' worth of time that the container may take, or None without a limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = [word for name in names for word in (cgroup / name).read_text(encoding="ascii").split()]
            quota, period = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):  # "max" is no number: no limit
            continue
        if quota > 0 and period > 0:
            return quota / period
    return None
