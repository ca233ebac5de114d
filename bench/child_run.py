"""One whole run in a process of its own, for its peak memory: `python -m bench.child_run FOLDER QUERIES WARM_UP`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from bench.child import output_of
from bench.stores import Prepared, forget, whole_run

_KIB_A_MIB = 1024


def peak_mib() -> float:
    """The most memory that this process has held so far, as Linux counts it.

    Not `ru_maxrss`: that of a child starts with what its parent held when it started the child.
    """
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / _KIB_A_MIB


def child_run(found: Prepared, queries: Path, warm_up: Path) -> dict[str, Any]:
    """Runs a log in a new process.

    Returns:
        `seconds` of the run alone, `start_mib` and `peak_mib` of memory before it and at its peak, and `stages`:
        thread seconds by stage.
    """
    printed = output_of(["-m", "bench.child_run", found.folder, queries, warm_up])
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return result


def main() -> None:
    """Runs the small log once, so that kernels are loaded, then the log that is measured."""
    folder, queries, warm_up = (Path(word) for word in sys.argv[1:])
    found = Prepared(folder)
    plan, _ = whole_run(found, warm_up)
    forget(found, plan)
    before, started = peak_mib(), time.perf_counter()
    plan, verdict = whole_run(found, queries)
    seconds = time.perf_counter() - started
    stages = {stage.stage: stage.seconds for stage in verdict.stages}
    print(json.dumps({"seconds": seconds, "start_mib": before, "peak_mib": peak_mib(), "stages": stages}))
    forget(found, plan)


if __name__ == "__main__":
    main()
