"""Summaries: what all manifests of one stage say together, kept beside them so that nobody reads a thousand files.

A summary is a copy and never the truth: it carries a fingerprint of the manifests that it was made of, as files,
and is passed over when the folder does not hold exactly these any more. What no file system tells, as bits that rot
on the disk, is seen by what reads the manifests themselves: `resume`, `verify`, and everything that reads a table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from pydantic import BaseModel, ConfigDict

from checkpoints.digests import canonical_json, sha256
from checkpoints.manifests import manifests, run_digest, stage_folder
from checkpoints.records import sealed, unsealed
from checkpoints.run import planned_rows
from checkpoints.store import Store
from contracts.errors import CheckpointError, CorruptArtifactError
from contracts.manifest import DeadLetterFile, Manifest, RunPlan, StagePlan


class Summary(BaseModel):
    """The sums over the committed parts of one entry of a plan.

    `missing` are the parts that are not committed. `left_out`, `letters` and `problems` have only the parts of
    which an earlier stage, or this one, took queries out, or whose numbers do not add up in themselves; by part.
    `plan` is the digest of the run's plan, `fingerprint` stands for the manifests as files; empty where the
    summary is not to be kept.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: str
    stage: str
    first_part: int
    parts: int
    fingerprint: str
    missing: list[int]
    rows: int
    computed: int
    seconds: float
    left_out: dict[int, int]
    letters: dict[int, DeadLetterFile]
    candidates_in: int
    added: dict[str, int]
    removed: dict[str, int]
    candidates_out: int
    calls: dict[str, dict[str, int]]
    graded_by: dict[str, int]
    problems: dict[int, list[str]]

    def holds(self, part: int) -> bool:
        """Whether a part is one of the entry's, and committed."""
        return 0 <= part - self.first_part < self.parts and part not in self.missing


def summary_of(plan: RunPlan, entry: StagePlan, found: Sequence[Manifest | None], fingerprint: str = "") -> Summary:
    """Adds up the manifests of an entry, one a planned part, None where nothing is committed."""
    there = [manifest for manifest in found if manifest is not None]
    computed = [manifest for manifest in there if manifest.borrowed_from is None]
    accounts = [manifest.account for manifest in there if manifest.account is not None]
    problems = {manifest.shard: _problems(plan, entry, manifest) for manifest in there}
    return Summary(
        plan=run_digest(plan),
        stage=entry.stage,
        first_part=entry.first_part,
        parts=entry.parts,
        fingerprint=fingerprint,
        missing=[part for part, manifest in zip(entry.shards, found, strict=True) if manifest is None],
        rows=sum(manifest.rows for manifest in there),
        computed=len(computed),
        seconds=sum(manifest.seconds for manifest in computed),
        left_out={manifest.shard: manifest.left_out for manifest in there if manifest.left_out},
        letters={manifest.shard: manifest.dead_letters for manifest in there if manifest.dead_letters is not None},
        candidates_in=sum(account.candidates_in for account in accounts),
        added=added_up(account.added for account in accounts),
        removed=added_up(account.removed for account in accounts),
        candidates_out=sum(account.candidates_out for account in accounts),
        calls=dict(calls_added_up(manifest.calls for manifest in there)),
        graded_by=added_up(manifest.graded_by for manifest in there),
        problems={part: said for part, said in problems.items() if said},
    )


def added_up(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    """The sums by name, in the order in which the names first come."""
    total = Counter[str]()
    for some in counts:
        total.update(some)
    return total


def calls_added_up(calls: Iterable[Mapping[str, Mapping[str, int]]]) -> Mapping[str, Counter[str]]:
    """How the calls of each service ended, over several parts."""
    total: dict[str, Counter[str]] = {}
    for some in calls:
        for service, ended in some.items():
            total.setdefault(service, Counter()).update(ended)
    return total


def read_summary(store: Store, plan: RunPlan, entry: StagePlan) -> Summary:
    """What the manifests of an entry say: from the kept summary while it holds, else from the manifests themselves.

    Raises:
        CorruptArtifactError: a manifest that cannot be trusted.
    """
    kept = _kept(store, plan, entry)
    if kept is not None and kept.fingerprint == _fingerprint(store, plan, entry):
        return kept
    return summary_of(plan, entry, manifests(store, plan, entry))


def keep_summary(store: Store, plan: RunPlan, entry: StagePlan) -> Summary:
    """Makes the summary of an entry from its manifests, and keeps it when every part is committed.

    What is kept already and says the same is not written again. A store that does not take it is no error:
    all that counts is committed, and who finds no summary reads the manifests.

    Raises:
        CorruptArtifactError: a manifest that cannot be trusted.
    """
    fingerprint = _fingerprint(store, plan, entry)  # before they are read: what changes from here on shows
    summary = summary_of(plan, entry, manifests(store, plan, entry), fingerprint)
    if not summary.missing:
        path, data = _path(plan, entry), sealed(summary)
        with suppress(CheckpointError):
            if store.read_if_there(path) != data:
                store.write(path, data)
    return summary


def _kept(store: Store, plan: RunPlan, entry: StagePlan) -> Summary | None:
    """The summary that lies beside the manifests; None where there is none, or one that is damaged or of another."""
    path = _path(plan, entry)
    data = store.read_if_there(path)
    if data is None:
        return None
    try:
        kept = unsealed(data, Summary, path, next_step="Remove the file: it is made again.")
    except CorruptArtifactError:
        return None
    mine = (run_digest(plan), entry.stage, entry.first_part)
    return kept if (kept.plan, kept.stage, kept.first_part) == mine else None


def _path(plan: RunPlan, entry: StagePlan) -> str:
    return f"{stage_folder(plan.run_id, entry.number, entry.stage)}/summary-{entry.first_part:05d}.json"


def _fingerprint(store: Store, plan: RunPlan, entry: StagePlan) -> str:
    """Stands for the manifests of an entry as files: their names, and what the store knows of their content."""
    tags = store.tags(stage_folder(plan.run_id, entry.number, entry.stage), ".json")
    names = (f"part-{part:05d}.json" for part in entry.shards)
    return sha256(canonical_json({name: tags.get(name) for name in names}))


def _problems(plan: RunPlan, entry: StagePlan, manifest: Manifest) -> list[str]:
    """What does not add up in one part: its candidates, its lines or its queries."""
    problems = []
    if manifest.account is not None and not manifest.account.balanced:
        problems.append(f"candidates do not add up: {manifest.account.model_dump()}")
    letters = 0 if manifest.dead_letters is None else manifest.dead_letters.letters
    planned = planned_rows(plan, entry, manifest.shard)
    if planned is None:
        return problems
    if entry.stage == "log_lines":
        if (manifest.rows, letters) != (planned, plan.dead_letters):
            problems.append(
                f"{planned} lines with {plan.dead_letters} dead letters planned, {manifest.rows} with {letters} there"
            )
    elif manifest.rows + letters + manifest.left_out != planned:
        problems.append(
            f"{planned} queries planned, but {manifest.rows} rows + {letters} dead letters + "
            f"{manifest.left_out} left out"
        )
    return problems
