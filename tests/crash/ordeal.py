"""Ordeal: a scenario that is killed, as often as one likes, and finished; every step is held against what was promised.

After a kill, or a power cut, a fresh process must see the old state or the new, never a mix. In the end the store
must be what an undisturbed pass leaves, and nothing that was committed may have been computed again.
"""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from checkpoints.store import Store
from stages.pipeline import RUNS_ONCE
from tests.crash.acts import Scenario
from tests.crash.disk import Disk
from tests.crash.files import Orders, lines_of
from tests.crash.process import Job, current, start

_LOG = logging.getLogger(__name__)  # shown when a test fails

_UNSTABLE = {"started_at", "seconds", "created_at", "at", "generation", "fingerprint", "sha256_of_the_above"}


class Ordeal:
    """One scenario under way.

    Args:
        scenario: what is begun.
        folder: for stores and notes.
        forgets: a step of the protocol that is left out, to see the ordeal fail.
    """

    def __init__(self, scenario: Scenario, folder: Path, forgets: str | None = None) -> None:
        self._scenario = scenario
        self._folder = folder
        self._forgets = forgets
        self._processes = 0
        self._states = [_tree(scenario.before), _tree(scenario.after)]
        self._store = folder / "store-0"
        shutil.copytree(scenario.before, self._store)

    def kill(self, point: str, *, power_cut: bool = False, chance: random.Random | None = None) -> None:
        """Lets a fresh process go on until a point, and looks at what is left.

        Args:
            point: one of the scenario's, still to come.
            power_cut: what was not synced is lost, and not what the kernel still has.
            chance: of what was not synced, each step survives with probability 1/2.
        """
        _LOG.warning("%s %s", "power cut" if power_cut else "killed", point)
        committed, wanted = self._committed(), self._wanted_verdict()
        job = self._job(point, self._scenario.mischief if self._processes == 0 else None, journal=power_cut)
        if power_cut:
            shutil.copytree(self._store, job.notes / "before")
        status = start(job)
        assert status == -signal.SIGKILL, f"never came to {point}: exit status {status}, {job.noted('error')}"
        if power_cut:
            self._cut_power(job, chance)
        self._check_sight(job.noted("saw"), wanted)
        self._check(job, committed)

    def finish(self, mischief: str | None = None) -> None:
        """Lets a fresh process go on to the end, and compares with what an undisturbed pass leaves."""
        committed, wanted = self._committed(), self._wanted_verdict()
        job = self._job(None, mischief, journal=False)
        status = start(job)
        assert status == 0, f"exit status {status}, {job.noted('error')}"
        self._check_sight(job.noted("saw"), wanted)
        self._check_sight(job.noted("end"), None if self._scenario.plan is None else "partial")
        self._check(job, committed)
        left, undisturbed = _tree(self._store), self._states[1]
        assert sorted(left) == sorted(undisturbed)
        differing = [path for path in left if stable(path, left[path]) != stable(path, undisturbed[path])]
        assert not differing, f"other than undisturbed: {differing}"
        for name, target in job.noted("end")["current"].items():
            if target is not None:
                pointer = left[f"{name}/current.json"]
                record = self._store / f"{name}/history/{json.loads(pointer)['generation']:06d}.json"
                assert record.read_bytes() == pointer

    def kill_on_the_way(self, chance: random.Random) -> None:
        """Kills a process, or cuts its power, somewhere in the nearer half of the artifacts that are not committed."""
        ahead = self._points_ahead()
        self.kill(chance.choice(ahead[: len(ahead) // 2]), power_cut=chance.random() < 0.5, chance=chance)

    def _points_ahead(self) -> list[str]:
        """Points of artifacts that are not committed yet, stage by stage: a process that goes on will come to each."""
        there = {path.removesuffix(".json") for path in self._committed()}
        ahead = [(unit, point) for point in self._scenario.points if (unit := _unit(point)) and unit not in there]
        return [point for _, point in sorted(ahead)]

    def _job(self, point: str | None, mischief: str | None, *, journal: bool) -> Job:
        self._processes += 1
        notes = self._folder / f"notes-{self._processes}"
        notes.mkdir()
        orders = Orders(kill_at=point, journal=notes / "journal" if journal else None, forgets=self._forgets)
        return Job(self._scenario, self._store, notes, orders, mischief)

    def _cut_power(self, job: Job, chance: random.Random | None) -> None:
        assert job.orders.journal is not None
        disk = Disk.after(job.notes / "before", job.orders.journal)
        broken = disk.broken_promises()
        assert not broken, f"lost, though put or deleted for good: {broken}"
        self._store = self._folder / f"store-{self._processes}"
        disk.write_to(self._store, chance)

    def _committed(self) -> dict[str, bytes]:
        return {path: data for path, data in _tree(self._store).items() if is_manifest(path)}

    def _wanted_verdict(self) -> str | None:
        """What must be said of the run as it lies there; None where there is none."""
        plan = self._scenario.plan
        if plan is None or not (self._store / f"runs/{plan.run_id}/run.json").exists():
            return None
        if (self._store / f"runs/{plan.run_id}/failure.json").exists():
            return "failed"
        mine = [path for path in self._committed() if path.startswith(f"runs/{plan.run_id}/")]
        return "interrupted" if len(mine) < sum(entry.parts for entry in plan.stages) else "partial"

    def _check_sight(self, saw: dict[str, Any], wanted: str | None) -> None:
        """What a process saw of the run is what lies there; what is committed and what is current can be trusted."""
        assert saw["verdict"] == wanted, f"saw {saw}, where the run is {wanted}"
        accepted = {"ok", "not committed"} if wanted in {"interrupted", "failed"} else {"ok"}
        bad = {name: finding for name, finding in saw["findings"].items() if finding not in accepted}
        assert not bad, f"verify finds {bad}"
        states = [_current(self._scenario.before), _current(self._scenario.after)]
        assert saw["current"] in states, f"{saw['current']} is current, where it should be one of {states}"

    def _check(self, job: Job, committed: dict[str, bytes]) -> None:
        """What was committed is untouched and was not begun again; every file is the old one or the new, whole."""
        found = _tree(self._store)
        stays = self._states[1]  # gc removes what is committed, the other acts do not
        changed = [path for path, data in committed.items() if path in stays and found.get(path) != data]
        assert not changed, f"changed, though committed: {changed}"
        again = _units_of(committed, self._scenario) & _begun(job)
        assert not again, f"computed again, though committed: {again}"
        mixed = [path for path, data in found.items() if not self._is_old_or_new(path, data)]
        assert not mixed, f"neither as before nor as after: {mixed}"

    def _is_old_or_new(self, path: str, data: bytes) -> bool:
        if path.endswith("/failure.json"):  # in neither state, and whole
            return "error" in json.loads(data)
        return any(path in state and stable(path, data) == stable(path, state[path]) for state in self._states)


@cache
def _current(store: Path) -> dict[str, str | None]:
    return current(Store(str(store), create=False))


def is_manifest(path: str) -> bool:
    """Whether a path is that of a manifest."""
    return path.startswith("runs/") and "/part-" in path and path.endswith(".json")


def is_summary(path: str) -> bool:
    """Whether a path is that of a summary."""
    return path.startswith("runs/") and "/summary-" in path


def stable(path: str, data: bytes) -> Any:
    """A file without what differs from pass to pass: times in records, fingerprints of files, and digests over them."""
    if not is_manifest(path) and not is_summary(path) and not path.endswith(("/snapshot.json", "/current.json")):
        return data
    try:
        return {name: value for name, value in json.loads(data).items() if name not in _UNSTABLE}
    except ValueError:
        return data  # torn


def _tree(store: Path) -> dict[str, bytes]:
    """Every file of a store by path, apart from leases, moves that were not carried out and what was never finished."""
    found = {str(path.relative_to(store)): path.read_bytes() for path in store.rglob("*") if path.is_file()}
    aside = re.compile(r"\.unfinished/|.*/lease/|[a-z]*/history/")
    return {path: data for path, data in found.items() if not aside.match(path)}


def _unit(point: str) -> str | None:
    """The artifact that a point belongs to, as `runs/r/06-rrf_merge/part-00001`; None when it is of none."""
    path = point.rpartition(" ")[2]
    return path.partition(".")[0] if "/part-" in path else None


def _units_of(committed: dict[str, bytes], scenario: Scenario) -> set[tuple[str, int]]:
    """(stage, part) of the manifests of the scenario's run."""
    run = "" if scenario.plan is None else f"runs/{scenario.plan.run_id}/"
    mine = [path.removeprefix(run) for path in committed if path.startswith(run)]
    return {(path[3:].partition("/")[0], int(path[-10:-5])) for path in mine}


def _begun(job: Job) -> set[tuple[str, int]]:
    """(stage, part) of what the process began, by its log."""
    if job.scenario.plan is None:
        return set()
    plan = job.scenario.plan
    parts = _parts_of_queries(job.scenario.after, plan.run_id)
    replayed = {query.query_id: replay.shard for replay in plan.replays for query in replay.queries}

    def part(stage: str, query_id: str) -> int:
        if query_id in replayed:
            return replayed[query_id]
        return 0 if stage in RUNS_ONCE else parts[query_id]

    return {(stage, part(stage, query_id)) for stage, query_id in (line.split() for line in lines_of(job.units))}


@cache
def _parts_of_queries(store: Path, run_id: str) -> dict[str, int]:
    """Query id to the part that it is in from the beginning."""
    found: dict[str, int] = {}
    for manifest in sorted(store.glob(f"runs/{run_id}/00-queries/part-*.json")):
        record = json.loads(manifest.read_bytes())
        table = pq.read_table(store / record["file"], columns=["query_id"])
        found |= dict.fromkeys(table.column(0).to_pylist(), record["shard"])
    return found
