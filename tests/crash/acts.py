"""Acts: what is begun on a store and killed, and what is done again after a crash until it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import flows.snapshots
from checkpoints.gc import collect
from checkpoints.published import published_pointer, roll_back
from checkpoints.run import create_run, load_plan
from checkpoints.store import Store
from checkpoints.survey import Bounds
from contracts.errors import MissingArtifactError
from contracts.manifest import RunPlan
from flows.engine import Session, plain_step
from flows.planning import check_unchanged
from flows.progress import no_progress
from flows.publishing import publish_run
from flows.settings import validated
from flows.snapshots import make_snapshot
from tests.crash.files import CrashFiles, Orders
from tests.crash.inputs import crash_settings


@dataclass(frozen=True)
class Scenario:
    """A store as it is before, and what is begun on it.

    Attributes:
        name: for people.
        act: what a process does, and does again after a crash, see `ACTS`.
        inputs: the folder of corpus, log and evidence plan.
        before: the store before.
        after: the store that an undisturbed pass leaves.
        plan: of the run that is looked at; None for none.
        target: the run that is published.
        mischief: what is wrong with the process that is killed, see `tests.crash.process`.
        poisoned: whether one query makes a stage fail.
        points: where it can be killed, by name.
    """

    name: str
    act: str
    inputs: Path
    before: Path
    after: Path
    plan: RunPlan | None = None
    target: str = ""
    mischief: str | None = None
    poisoned: bool = True
    points: tuple[str, ...] = ()


def _ingest(scenario: Scenario, store: Path, orders: Orders) -> None:
    # make_snapshot opens the store by itself.
    flows.snapshots.Store = partial(Store, files=partial(CrashFiles, orders=orders))  # type: ignore[misc]
    settings = crash_settings(scenario.inputs).model_copy(update={"store": str(store)})
    make_snapshot(scenario.inputs / "corpus.jsonl", settings, plain_step, no_progress)


def _run(scenario: Scenario, store: Path, orders: Orders) -> None:
    """Resumes the run, or begins it where there is none yet."""
    opened = Store(str(store), files=partial(CrashFiles, orders=orders))
    assert scenario.plan is not None
    try:
        plan = load_plan(opened, scenario.plan.run_id)
    except MissingArtifactError:
        plan = scenario.plan
        create_run(opened, plan)
    settings = check_unchanged(opened, plan, validated(plan.settings))
    Session(opened, plan, settings).execute()


def _publish(scenario: Scenario, store: Path, orders: Orders) -> None:
    opened = Store(str(store), files=partial(CrashFiles, orders=orders))
    publication = publish_run(opened, load_plan(opened, scenario.target), crash_settings(scenario.inputs).publish)
    assert not publication.failed, publication.failed


def _roll_back(scenario: Scenario, store: Path, orders: Orders) -> None:
    """Goes back to the run that is wanted; after a crash an operator looks first whether it is there already."""
    opened = Store(str(store), files=partial(CrashFiles, orders=orders))
    if published_pointer(opened).current().target != scenario.target:
        roll_back(opened, why=None)


def _collect(scenario: Scenario, store: Path, orders: Orders) -> None:
    """Removes every run that is not published; what was borrowed of it stays."""
    opened = Store(str(store), files=partial(CrashFiles, orders=orders))
    collect(opened, Bounds(keep=0, older_than_days=None, now=datetime.now(UTC)))


ACTS: dict[str, Callable[[Scenario, Path, Orders], None]] = {
    "ingest": _ingest,
    "run": _run,
    "publish": _publish,
    "roll back": _roll_back,
    "gc": _collect,
}
