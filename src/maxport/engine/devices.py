"""Which devices MAX can use on this machine, and where MAX and others keep their caches."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Device:
    """One device as MAX sees it.

    Attributes:
        kind: `cpu` or `gpu`.
        name: Label with the accelerator's architecture, for example `gpu:0 (sm_90a)`.
    """

    kind: str
    name: str


def devices() -> list[Device]:
    """The CPU and all accelerators that MAX's driver finds."""
    from max import driver

    found = [Device("cpu", f"cpu ({os.cpu_count()} cores)")]
    count = 0 if driver.is_virtual_device_mode() else driver.accelerator_count()
    for index in range(count):
        found.append(Device("gpu", f"gpu:{index} ({driver.accelerator_architecture_name()})"))
    return found


def max_cache() -> Path:
    """Folder where MAX keeps compiled models (max._core: MODULAR_CACHE_DIR, XDG_CACHE_HOME)."""
    named = os.environ.get("MODULAR_CACHE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modular"


def memory_free() -> int:
    """Bytes a new process can use: the machine's free memory, or what its control group leaves."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")
        )
    except (OSError, StopIteration, ValueError):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, int(limit) - used)
