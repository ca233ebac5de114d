"""Survey: what of a store is old and goes, what stays, and why."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Literal

from checkpoints.corpora import corpus_pointer, load_snapshot, snapshot_folder, snapshot_ids
from checkpoints.lease import holder_of
from checkpoints.manifests import manifests
from checkpoints.pointer import PointerRecord
from checkpoints.published import published_pointer, published_run
from checkpoints.run import check_run_id, load_plan, run_ids
from checkpoints.store import Store
from contracts.errors import ConfigurationError, CorruptArtifactError, MissingArtifactError
from contracts.manifest import Manifest, RunPlan

# What a run's folder holds, below it. Whatever else lies there is somebody's, and goes only with the whole run.
MANIFEST = re.compile(r"[0-9]+-\w+/part-[0-9]+\.json")
_TABLE_OR_LETTERS = re.compile(r"[0-9]+-\w+/part-[0-9]+\.[0-9a-f]+\.parquet|dead_letters/[^/]+\.jsonl")
_ASIDE = r"[0-9]+-\w+/summary-[0-9]+\.json|failure\.json|lease/[0-9]+\.json"
_OWN = re.compile(rf"{MANIFEST.pattern}|{_TABLE_OR_LETTERS.pattern}|{_ASIDE}")


@dataclass(frozen=True)
class Bounds:
    """Which runs are old: all that are neither among the youngest nor younger than some days.

    Attributes:
        keep: how many of the youngest runs stay; None leaves it to their age.
        older_than_days: younger runs and snapshots stay; None leaves it to `keep`, and every snapshot stays.
        now: the time that ages are counted from.
    """

    keep: int | None
    older_than_days: float | None
    now: datetime

    def is_young(self, created_at: str) -> bool:
        """Whether something is younger than the days that are asked for."""
        if self.older_than_days is None:
            return False
        return datetime.fromisoformat(created_at) > self.now - timedelta(days=self.older_than_days)


@dataclass(frozen=True)
class Item:
    """A run, the remains of one that was removed, or a snapshot.

    Attributes:
        kind: which of these.
        name: its id.
        kept: why it stays; empty when it goes.
        goes: its files that go, of a kept run those that nothing names.
        stays: how many of its files stay only since a kept run names them.
        bytes: of the files that go.
    """

    kind: Literal["run", "remains", "snapshot"]
    name: str
    kept: list[str]
    goes: list[str]
    stays: int
    bytes: int


@dataclass
class Survey:
    """What was found.

    Attributes:
        plans: all runs, the youngest first.
        kept: why each of them stays; empty for those that go.
        named: the files that kept runs, and published ones, stand on.
        items: everything, one by one.
    """

    plans: dict[str, RunPlan]
    kept: dict[str, list[str]]
    named: set[str] = field(default_factory=set)
    items: list[Item] = field(default_factory=list)


def survey(store: Store, bounds: Bounds, held: Collection[str] | None = None) -> Survey:
    """Looks through the whole store, and changes nothing.

    Args:
        store: it.
        bounds: what is old.
        held: the runs that this process holds, and which alone may go; None asks nobody.

    Raises:
        CorruptArtifactError: a record that says what must stay is damaged; it is named.
    """
    published, corpora = published_pointer(store).standing(), corpus_pointer(store).standing()
    found = look_at_runs(store, bounds, published, held)
    for run_id, reasons in found.kept.items():
        if held is not None and run_id not in held and not reasons:
            reasons.append("another process was at work on it")
    _follow_borrowers(store, found)
    for record, _ in published.values():
        found.named.update(file.file for files in published_run(record).artifacts.values() for file in files)
    found.items += _runs(store, found, held or ())
    found.items += _snapshots(store, bounds, _used_snapshots(found, published, corpora))
    return found


def look_at_runs(
    store: Store,
    bounds: Bounds,
    published: Mapping[str, tuple[PointerRecord, str]],
    held: Collection[str] | None = None,
) -> Survey:
    """All runs, and what keeps them by itself: their age, the published pointer, or a process at work on them."""
    found = Survey({}, {})
    for place, run_id in enumerate(run_ids(store)):
        with _or_refused("then its folder counts as what remains of a removed run"):
            plan = found.plans[run_id] = load_plan(store, run_id)
        reasons = found.kept[run_id] = []
        if bounds.keep is not None and place < bounds.keep:
            reasons.append(f"among the {bounds.keep} youngest")
        if bounds.is_young(plan.created_at):
            reasons.append(f"younger than {bounds.older_than_days:g} days")
        if run_id in published:
            reasons.append(f"published: {published[run_id][1]}")
        holder = None if run_id in (held or ()) else holder_of(store, f"runs/{run_id}")
        if holder is not None:
            reasons.append(f"{holder[0]} is at work on it")
    return found


def _follow_borrowers(store: Store, found: Survey) -> None:
    """Notes every file that a kept run names, and keeps the runs that it has still to borrow from."""
    waiting = [run_id for run_id, reasons in found.kept.items() if reasons]
    while waiting:
        plan = found.plans[waiting.pop()]
        for entry in plan.stages:
            with _or_refused("then the part counts as not committed"):
                committed = manifests(store, plan, entry)
            found.named.update(file for manifest in committed if manifest is not None for file in files_of(manifest))
            lender = entry.borrowed_from
            if lender not in found.plans or None not in committed:
                continue
            reasons, reason = found.kept[lender], f"run {plan.run_id} has still to borrow from it"
            if not reasons:
                waiting.append(lender)
            if reason not in reasons:
                reasons.append(reason)


def files_of(manifest: Manifest) -> list[str]:
    """The files that a manifest names."""
    return [manifest.file] + ([] if manifest.dead_letters is None else [manifest.dead_letters.file])


def _runs(store: Store, found: Survey, held: Collection[str]) -> Iterator[Item]:
    """Every run, and what is left of removed ones: files that kept runs borrow, or that a killed gc did not get to."""
    sizes = store.sizes("runs")
    folders: dict[str, list[str]] = {run_id: [] for run_id in found.plans}
    for path in sorted(sizes):
        if path.count("/") > 1:
            folders.setdefault(path.split("/")[1], []).append(path)
    for name, files in folders.items():
        reasons = found.kept.get(name)
        if reasons is None:
            own = [path for path in files if _OWN.fullmatch(_inside(path))]
            if own and _is_run_id(name):
                item = _item("remains", name, [], own, found.named, sizes)
                yield replace(item, kept=["kept runs borrow from it"] if item.stays else [])
        elif reasons:
            at_work = name not in held and holder_of(store, f"runs/{name}") is not None
            leftovers = [path for path in files if _TABLE_OR_LETTERS.fullmatch(_inside(path)) and not at_work]
            yield replace(_item("run", name, reasons, leftovers, found.named, sizes), stays=0)
        else:
            without_lease = [path for path in files if not _inside(path).startswith("lease/")]  # which gc takes itself
            yield _item("run", name, [], without_lease, found.named, sizes)


def _used_snapshots(
    found: Survey,
    published: Mapping[str, tuple[PointerRecord, str]],
    corpora: Mapping[str, tuple[PointerRecord, str]],
) -> dict[str, list[str]]:
    used = {snapshot_id: [because] for snapshot_id, (_, because) in corpora.items()}
    users = {run_id: found.plans[run_id].snapshot_id for run_id, reasons in found.kept.items() if reasons}
    users |= {record.target: published_run(record).snapshot_id for record, _ in published.values()}
    for snapshot_id in set(users.values()):
        mine = [run_id for run_id, uses in users.items() if uses == snapshot_id]
        said = f"run {mine[0]} uses it" if len(mine) == 1 else f"{len(mine)} runs use it"
        used.setdefault(snapshot_id, []).append(said)
    return used


def _snapshots(store: Store, bounds: Bounds, used: Mapping[str, list[str]]) -> Iterator[Item]:
    for snapshot_id in snapshot_ids(store):
        sizes = store.sizes(snapshot_folder(snapshot_id))
        reasons = list(used.get(snapshot_id, []))
        try:
            snapshot = load_snapshot(store, snapshot_id)
        except MissingArtifactError:
            pass  # an ingest was killed before its manifest was written
        except CorruptArtifactError as error:
            reasons.append(str(error))
        else:
            if bounds.older_than_days is None:
                reasons.append("snapshots go by their age alone")
            elif bounds.is_young(snapshot.created_at):
                reasons.append(f"younger than {bounds.older_than_days:g} days")
        yield _item("snapshot", snapshot_id, reasons, [] if reasons else sizes, (), sizes)


def _item(
    kind: Literal["run", "remains", "snapshot"],
    name: str,
    kept: list[str],
    files: Iterable[str],
    named: Collection[str],
    sizes: Mapping[str, int],
) -> Item:
    files = list(files)
    goes = [path for path in files if path not in named]
    return Item(kind, name, kept, goes, len(files) - len(goes), sum(sizes[path] for path in goes))


def _inside(path: str) -> str:
    """A path within the folder of its run."""
    return path.split("/", 2)[2]


def _is_run_id(name: str) -> bool:
    try:
        check_run_id(name)
    except ConfigurationError:
        return False
    return True


@contextmanager
def _or_refused(consequence: str) -> Iterator[None]:
    """Says of a damaged record what an operator can do; what it borrows is not known, so nothing may go."""
    try:
        yield
    except CorruptArtifactError as error:
        raise CorruptArtifactError(
            error.where,
            f"{error.problem}, so that nobody knows what must stay",
            got=error.got,
            want=error.want,
            next_step=f"Nothing was removed. Restore the file, or remove it: {consequence}.",
        ) from error
