"""The machine that a comparison ran on, in words that another reader can compare with theirs."""

from __future__ import annotations

import os
import platform
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

_GIB = 2**30


def description() -> dict[str, Any]:
    """Processor, cores, memory, system and the versions of all packages."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB, 1),
        "system": f"{platform.system()} {platform.release()}, {platform.libc_ver()[0]} {platform.libc_ver()[1]}",
        "python": platform.python_version(),
        "packages": dict(sorted((str(one.metadata["Name"]).lower(), one.version) for one in distributions())),
    }


def _processor() -> str:
    """The name of the processor as Linux tells it, else the kind of machine."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text("utf-8").splitlines() if listed.exists() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
