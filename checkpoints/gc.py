"""Gc: removes old runs and snapshots, and keeps every file that something kept stands on.

A run goes in four steps: its manifests, so that nobody borrows from it any more; the files that no kept run
names; run.json; and its lease. Whatever step gc is killed in, the next one finds the rest and goes on.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from checkpoints.corpora import corpus_pointer
from checkpoints.lease import Lease, hold
from checkpoints.manifests import manifests
from checkpoints.published import published_pointer
from checkpoints.run import load_plan, run_ids
from checkpoints.scratch import sweep_scratch
from checkpoints.store import Store
from checkpoints.survey import MANIFEST, Bounds, Item, Survey, files_of, look_at_runs, survey
from contracts.errors import CheckpointError, RunHeldError

_AN_HOUR = 3600.0  # no write takes as long
_A_DAY = 86400.0  # no estimate takes as long


@dataclass(frozen=True)
class Collected:
    """What gc has removed, or would remove.

    Attributes:
        items: every run, every remains of a run and every snapshot, with what goes of it.
        unfinished: how many files of killed writers and estimates were removed.
    """

    items: list[Item]
    unfinished: int


def collect(store: Store, bounds: Bounds, *, dry_run: bool = False) -> Collected:
    """Removes what is old, and what nothing stands on any more.

    Args:
        store: where.
        bounds: what is old.
        dry_run: only tells what would go; nothing is written, not even a lease.

    Raises:
        CorruptArtifactError: a record that says what must stay is damaged; nothing was removed.
        RunHeldError: another process publishes or ingests; nothing was removed.
        CheckpointError: meanwhile a run was planned on one that goes; no table was removed.
    """
    if dry_run:
        return Collected(survey(store, bounds).items, 0)
    with ExitStack() as stack:
        guards = [
            stack.enter_context(hold(store, pointer.folder, pointer.what))
            for pointer in (published_pointer(store), corpus_pointer(store))
        ]
        leases = _hold_old_runs(store, bounds, stack)
        found = survey(store, bounds, leases)
        gone = [item for item in found.items if not item.kept and item.kind == "run"]
        _remove_runs(store, found, gone, leases, guards)
        for item in found.items:
            if item.kind == "snapshot":
                # The manifest last: by it the next gc sees how old the snapshot is.
                _delete(store, sorted(item.goes, key=lambda path: path.endswith("/snapshot.json")), guards)
    for item in gone:
        _remove_lease(store, item.name, leases[item.name].number)
    for item in found.items:
        if item.goes and item.kind != "snapshot" and item not in gone:
            _sweep(store, item, found.named)
    for item in found.items:
        if not item.kept:
            _remove_empty_folders(store, f"{'corpora' if item.kind == 'snapshot' else 'runs'}/{item.name}")
    return Collected(found.items, store.sweep_unfinished(_AN_HOUR) + sweep_scratch(store, _A_DAY))


def _hold_old_runs(store: Store, bounds: Bounds, stack: ExitStack) -> dict[str, Lease]:
    """Holds the runs that may go, so that nobody takes one up again; one that another process holds stays."""
    published = published_pointer(store).standing()
    leases = {}
    for run_id, reasons in look_at_runs(store, bounds, published).kept.items():
        if not reasons:
            with suppress(RunHeldError):
                leases[run_id] = stack.enter_context(hold(store, f"runs/{run_id}", f"run {run_id}"))
    return leases


def _remove_runs(
    store: Store, found: Survey, gone: Iterable[Item], leases: Mapping[str, Lease], guards: Collection[Lease]
) -> None:
    """Removes runs that this process holds, all but their leases."""
    steps: tuple[dict[str, list[str]], ...] = ({}, {}, {})
    for item in gone:
        for path in item.goes:
            inside = path.removeprefix(f"runs/{item.name}/")
            place = 0 if MANIFEST.fullmatch(inside) else 2 if inside == "run.json" else 1
            steps[place].setdefault(item.name, []).append(path)
    for place, step in enumerate(steps):
        if place < len(steps) - 1:
            _check_newcomers(store, found)
        for run_id, paths in step.items():
            _delete(store, paths, [leases[run_id], *guards])


def _check_newcomers(store: Store, found: Survey) -> None:
    """Makes sure that no run was planned on what goes since the survey; once the manifests are gone, none can be."""
    going = {item.name for item in found.items if not item.kept}
    for run_id in run_ids(store):
        if run_id not in found.plans:
            plan = load_plan(store, run_id)
            used = {plan.snapshot_id, *(entry.borrowed_from for entry in plan.stages)} & going
            if used:
                raise CheckpointError(
                    f"run {run_id}",
                    "was planned on what is being removed",
                    got=", ".join(sorted(map(str, used))),
                    next_step=f"Run gc again; `dartflow rerun {run_id}` if the run stops.",
                )


def _sweep(store: Store, item: Item, named: Collection[str]) -> None:
    """Removes the leftovers of a kept run, or what remains of a removed one, unless a process is at work there."""
    folder = f"runs/{item.name}"
    with ExitStack() as stack:
        try:
            lease = stack.enter_context(hold(store, folder, f"run {item.name}"))
        except RunHeldError:
            return
        planned = store.read_if_there(f"{folder}/run.json") is not None
        if planned != (item.kind == "run"):
            return  # a new run has the name of a removed one
        by_now = _named_by(store, item.name) if planned else set()
        goes = [path for path in item.goes if path not in named and path not in by_now]
        _delete(store, [path for path in goes if not path.startswith(f"{folder}/lease/")], [lease])
    if not planned:
        _remove_lease(store, item.name, lease.number)


def _named_by(store: Store, run_id: str) -> set[str]:
    """The files that a run names now."""
    plan = load_plan(store, run_id)
    committed = (manifest for entry in plan.stages for manifest in manifests(store, plan, entry))
    return {file for manifest in committed if manifest is not None for file in files_of(manifest)}


def _remove_lease(store: Store, run_id: str, number: int) -> None:
    """Removes the lease of a run that is gone; a new run of the same name would have a higher number."""
    for path in store.files(f"runs/{run_id}/lease"):
        name = path.rsplit("/", 1)[-1].removesuffix(".json")
        if name.isdecimal() and int(name) <= number:
            store.delete(path)


def _delete(store: Store, paths: Iterable[str], leases: Collection[Lease]) -> None:
    for path in paths:
        for lease in leases:
            lease.check()
        store.delete(path)


def _remove_empty_folders(store: Store, folder: str) -> None:
    """Removes the folders that are left on this disk when their files are gone, so that `ls` shows what there is."""
    if store.root is not None:
        for path, _, _ in os.walk(store.root / folder, topdown=False):
            with suppress(OSError):  # it holds a file, which somebody may have just put there
                Path(path).rmdir()
