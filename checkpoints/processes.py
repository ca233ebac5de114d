"""Processes: a name that no other process ever has, and whether the process of a name has ended."""

from __future__ import annotations

import os
from pathlib import Path


def identity(pid: int) -> str | None:
    """Names a process for good: boot of the machine, pid namespace, pid and start time.

    None where the system does not tell (no /proc, or a hidden one); a lease is then judged by its
    heartbeat alone.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/pid").readlink()
        # The name before the last bracket may hold anything; the state follows it, and the start is field 22 of all.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    started = "ended" if fields[0] in {"Z", "X"} else fields[19]
    return f"{boot} {namespace} {pid} {started}"


def has_ended(process: str | None) -> bool:
    """Whether a process of this machine and pid namespace is known to have ended; of others nothing is known."""
    mine = identity(os.getpid())
    if process is None or mine is None or process.split()[:2] != mine.split()[:2]:
        return False
    pid = int(process.split()[2])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # it lives, under another user
    found = identity(pid)
    return found is not None and found != process  # the pid may have passed to another process
