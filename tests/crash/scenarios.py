"""Scenarios: what is begun and killed, each passed through once undisturbed, which tells its points and its end."""

from __future__ import annotations

import dataclasses
import re
import shutil
import signal
from pathlib import Path

from checkpoints.corpora import current_snapshot_id
from checkpoints.store import Store
from flows.planning import plan_rerun, plan_run
from flows.replay import plan_replay
from tests.crash.acts import Scenario
from tests.crash.files import Orders, lines_of
from tests.crash.inputs import crash_settings, write_inputs
from tests.crash.process import FAILING_STAGE, Job, start

RUN = "r"


def make_scenarios(folder: Path) -> dict[str, Scenario]:
    """Every scenario by name.

    `ingest`; `run`; `failing`, a run that is taken over from a dead process and stops in a stage; `failed`,
    one that goes on after that; `beating`, whose lease is renewed all the time; `rerun`, most of which is
    borrowed; `replay`, which takes up a dead letter; `first publish`, `publish` and `rollback`;
    `gc`, which removes a run that the published one has borrowed from.
    """
    inputs, empty, half = folder / "inputs", folder / "empty", folder / "half"
    inputs.mkdir()
    empty.mkdir()
    write_inputs(inputs)
    settings = crash_settings(inputs)
    ingest = _pass(folder, Scenario("ingest", "ingest", inputs, before=empty, after=empty))
    store = Store(str(ingest.after))
    plan = plan_run(store, settings, inputs / "queries.jsonl", RUN, current_snapshot_id(store))
    run = _pass(folder, Scenario("run", "run", inputs, before=ingest.after, after=ingest.after, plan=plan))
    _begin(run, half, f"{FAILING_STAGE}/$")

    def derived(name: str, *, points: str, after: Path | None = run.after, **changes: object) -> Scenario:
        passed = _pass(folder, dataclasses.replace(run, name=name, **changes))  # type: ignore[arg-type]
        own = tuple(point for point in passed.points if re.search(points, point))
        return dataclasses.replace(passed, after=after or passed.after, points=own)

    done = Store(str(run.after))
    again = plan_rerun(done, plan, settings, from_stage="crag_grading", run_id="again")
    replayed = plan_replay(done, plan, settings)
    # Of what is borrowed one part a stage; what is computed is committed as in `run`.
    rerun = derived("rerun", before=run.after, after=None, plan=again, points=r"run\.json|/0[0-8]-[a-z_]*/part-00001")
    # A run is published, then another one in its place, then the first again.
    first = derived("first publish", act="publish", before=rerun.after, after=None, plan=None, target=RUN, points=".")
    second = derived("publish", act="publish", before=first.after, after=None, plan=None, target="again", points=".")
    kept = derived("keep", act="publish", before=rerun.after, after=None, plan=None, target="again", points=".")
    return {
        "ingest": ingest,
        "run": run,
        "failing": derived("failing", before=half, mischief="fail", points=r"lease|failure\.json"),
        "failed": derived("failed", before=folder / "after-failing", points=r"lease|failure\.json"),
        "beating": derived("beating", before=half, mischief="beat", points=r"again .*lease/"),
        "rerun": rerun,
        "replay": derived(
            "replay",
            before=run.after,
            after=None,
            plan=replayed,
            poisoned=False,
            points=r"run\.json|(part|summary)-0000[2-9]",
        ),
        "first publish": first,
        "publish": second,
        "rollback": derived(
            "rollback", act="roll back", before=second.after, after=None, plan=None, target=RUN, points="."
        ),
        "gc": derived("gc", act="gc", before=kept.after, after=None, plan=again, points="."),
    }


def _pass(folder: Path, scenario: Scenario) -> Scenario:
    """A scenario with the store and the points of its undisturbed pass."""
    after, notes = folder / f"after-{scenario.name}", folder / f"notes-{scenario.name}"
    shutil.copytree(scenario.before, after)
    notes.mkdir()
    job = Job(scenario, after, notes, Orders(points=notes / "points"), scenario.mischief)
    status = start(job)
    assert status == (1 if scenario.mischief == "fail" else 0), f"exit status {status}, {job.noted('error')}"
    return dataclasses.replace(scenario, after=after, points=tuple(sorted(set(lines_of(notes / "points")))))


def _begin(run: Scenario, store: Path, pattern: str) -> None:
    """Lets the process of a run get as far as the first point of a pattern, and kills it."""
    shutil.copytree(run.before, store)
    notes = store.parent / "notes-half"
    notes.mkdir()
    point = next(point for point in run.points if re.search(pattern, point))
    job = Job(run, store, notes, Orders(kill_at=point))
    status = start(job)
    assert status == -signal.SIGKILL, f"exit status {status}, {job.noted('error')}"
