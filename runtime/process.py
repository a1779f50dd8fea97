"""What the operating system says of this process."""

from __future__ import annotations

import resource
import sys


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
