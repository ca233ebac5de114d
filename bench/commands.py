"""Commands that only look, from process start to end, on a run of 1,000 shards: `python -m bench.commands`."""

from __future__ import annotations

import json
from pathlib import Path

from bench.child import output_of
from bench.results import Check, Comparison, claim_of
from bench.stores import forget, prepared, whole_run
from bench.terminal import run
from bench.timing import Work, in_turn
from bench.topics import Sizes

LIBRARIES = 'python -c "import pyarrow, pydantic"'


def compare(small: bool, work: Path) -> Comparison:  # noqa: FBT001 - every comparison is called alike
    """Times `status --json` and `rerun --dry-run` beside the import of two libraries that they stand on."""
    shards = 8 if small else 1_000
    found = prepared(work, Sizes(chunks=600, queries=shards, dimension=32))
    plan, _ = whole_run(found, found.queries, "run.shard_size=1")
    at = [plan.run_id, "--store", str(found.folder / "store")]
    lines = {
        "status --json": ["-m", "flows.cli", "status", *at, "--json"],
        "rerun --dry-run": ["-m", "flows.cli", "rerun", *at, "--dry-run", "--json"],
        LIBRARIES: ["-c", "import pyarrow, pydantic"],
    }

    printed: dict[str, str] = {}

    def work_of(name: str) -> Work:
        def work(_number: int) -> int:
            printed[name] = output_of(lines[name])
            return 1

        return work

    times = in_turn({name: work_of(name) for name in lines}, rounds=1 if small else 5, unit="ms")
    status, dry_run = json.loads(printed["status --json"]), json.loads(printed["rerun --dry-run"])
    told = status["verdict"] == "complete" and status["stages"][-1]["computed"] == shards
    again = [stage["stage"] for stage in dry_run["stages"] if stage["computed"]]
    forget(found, plan)
    return Comparison(
        name="commands",
        title="Commands that only look",
        settings={"shards": shards, "time": "from the start of the process to its end"},
        claims=[claim_of(times, name, LIBRARIES, 3, "at most") for name in lines if name != LIBRARIES],
        checks=[
            Check(what="status tells a complete run of all shards", share=float(told), compared=1),
            Check(what=f"rerun --dry-run computes again: {', '.join(again) or 'nothing'}", share=float(not again),
                  compared=1),
        ],
    )  # fmt: skip


if __name__ == "__main__":
    run(compare)
