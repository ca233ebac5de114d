"""Summaries: what all manifests of one stage say together, kept beside them so that nobody reads a thousand files.

A summary is a copy and never the truth: it carries a fingerprint of the manifests that it was made of, and is
passed over when the folder does not hold exactly these any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from checkpoints.commit import manifests, run_digest, stage_folder
from checkpoints.digests import canonical_json, sha256
from checkpoints.records import sealed, unsealed
from checkpoints.run import planned_rows
from checkpoints.store import Store
from contracts.errors import CorruptArtifactError
from contracts.manifest import DeadLetterFile, Manifest, RunPlan, StagePlan


class Summary(BaseModel):
    """The sums over the committed parts of one entry of a plan.

    `missing` are the parts that are not committed. `left_out` and `letters` have only the parts of which
    an earlier stage, or this one, took queries out. `problems` are sentences about parts whose numbers do
    not add up in themselves. `accounts` counts the parts that have candidates to account for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: str
    stage: str
    first_part: int
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
    problems: list[str]


def summary_of(plan: RunPlan, entry: StagePlan, found: Sequence[Manifest | None], fingerprint: str = "") -> Summary:
    """Adds up the manifests of an entry, one a planned part, None where nothing is committed."""
    there = [manifest for manifest in found if manifest is not None]
    computed = [manifest for manifest in there if manifest.borrowed_from is None]
    accounts = [manifest.account for manifest in there if manifest.account is not None]
    added, removed = Counter[str](), Counter[str]()
    calls: dict[str, Counter[str]] = {}
    for account in accounts:
        added.update(account.added)
        removed.update(account.removed)
    for manifest in there:
        for service, ended in manifest.calls.items():
            calls.setdefault(service, Counter()).update(ended)
    return Summary(
        plan=run_digest(plan),
        stage=entry.stage,
        first_part=entry.first_part,
        fingerprint=fingerprint,
        missing=[part for part, manifest in zip(entry.shards, found, strict=True) if manifest is None],
        rows=sum(manifest.rows for manifest in there),
        computed=len(computed),
        seconds=round(sum(manifest.seconds for manifest in computed), 3),
        left_out={manifest.shard: manifest.left_out for manifest in there if manifest.left_out},
        letters={manifest.shard: manifest.dead_letters for manifest in there if manifest.dead_letters is not None},
        candidates_in=sum(account.candidates_in for account in accounts),
        added=dict(added),
        removed=dict(removed),
        candidates_out=sum(account.candidates_out for account in accounts),
        calls={service: dict(ended) for service, ended in calls.items()},
        problems=[problem for manifest in there for problem in _part_problems(plan, entry, manifest)],
    )


def read_summary(store: Store, plan: RunPlan, entry: StagePlan) -> Summary:
    """What the manifests of an entry say: from the kept summary while it holds, else from the manifests themselves.

    Raises:
        CorruptArtifactError: a manifest that cannot be trusted.
    """
    path = _path(plan, entry)
    data = store.read_if_there(path)
    if data is not None:
        try:
            kept = unsealed(data, Summary, path, next_step="Remove the file: it is made again.")
        except CorruptArtifactError:
            kept = None
        if kept is not None and kept.plan == run_digest(plan) and kept.fingerprint == _fingerprint(store, plan, entry):
            return kept
    return summary_of(plan, entry, manifests(store, plan, entry))


def keep_summary(store: Store, plan: RunPlan, entry: StagePlan) -> Summary:
    """Makes the summary of an entry, and keeps it when every part is committed."""
    fingerprint = _fingerprint(store, plan, entry)  # before the reading: what changes later makes it invalid
    summary = summary_of(plan, entry, manifests(store, plan, entry), fingerprint)
    if not summary.missing:
        store.write(_path(plan, entry), sealed(summary))
    return summary


def _path(plan: RunPlan, entry: StagePlan) -> str:
    return f"{stage_folder(plan.run_id, entry.number, entry.stage)}/summary-{entry.first_part:05d}.json"


def _fingerprint(store: Store, plan: RunPlan, entry: StagePlan) -> str:
    """Stands for the manifests of an entry as files: their names, and what the store knows of their content."""
    tags = store.tags(stage_folder(plan.run_id, entry.number, entry.stage))
    names = {f"part-{part:05d}.json" for part in entry.shards}
    return sha256(canonical_json({name: tag for name, tag in tags.items() if name in names}))


def _part_problems(plan: RunPlan, entry: StagePlan, manifest: Manifest) -> list[str]:
    """What does not add up in one part: its candidates, its lines or its queries."""
    where = f"{entry.stage}, part {manifest.shard}"
    problems = []
    if manifest.account is not None and not manifest.account.balanced:
        problems.append(f"{where}: candidates do not add up: {manifest.account.model_dump()}")
    letters = 0 if manifest.dead_letters is None else manifest.dead_letters.letters
    planned = planned_rows(plan, entry, manifest.shard)
    if planned is None:
        return problems
    if entry.stage == "log_lines":
        if (manifest.rows, letters) != (planned, plan.dead_letters):
            problems.append(
                f"{where}: {planned} lines with {plan.dead_letters} dead letters planned, "
                f"{manifest.rows} with {letters} there"
            )
    elif manifest.rows + letters + manifest.left_out != planned:
        problems.append(
            f"{where}: {planned} queries planned, but {manifest.rows} rows + {letters} dead letters + "
            f"{manifest.left_out} left out"
        )
    return problems
