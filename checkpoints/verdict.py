"""Verdicts: what is true of a run, from its plan, its manifests and its lease, never from what a process said last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from checkpoints.commit import manifests, stage_folder
from checkpoints.dead_letters import replayed_queries
from checkpoints.lease import holder_of
from checkpoints.run import failure_of, planned_rows, stage_names
from checkpoints.store import Store
from contracts.manifest import Manifest, RunPlan, StagePlan, StageStatus, Verdict, VerdictName

# A stage's manifests by part; parts that are not committed are left out.
Found = Mapping[str, Mapping[int, Manifest]]


def verdict(store: Store, plan: RunPlan) -> Verdict:
    """What is true of a run.

    Raises:
        CorruptArtifactError: a manifest that cannot be trusted.
    """
    found = committed(store, plan)
    stages = [stage_status(plan, stage, found[stage]) for stage in stage_names(plan)]
    letters = sum(stage.dead_letters for stage in stages)
    lost = lost_log_lines(plan, found)
    name, because = _judged(store, plan, found, stages, letters, lost)
    return Verdict(
        run_id=plan.run_id,
        verdict=name,
        because=because,
        stages=stages,
        log_lines=plan.log_lines,
        distinct_queries=plan.distinct_queries,
        dead_letters=letters,
        lost_log_lines=lost,
        notes=list(_notes(found)),
        snapshot_id=plan.snapshot_id,
        access_control=plan.access_control,
        results=f"{store.uri.rstrip('/')}/{stage_folder(plan.run_id, plan.stages[-1].number, plan.stages[-1].stage)}",
    )


def committed(store: Store, plan: RunPlan) -> Found:
    """All manifests of a run, by stage and part."""
    found: dict[str, dict[int, Manifest]] = {stage: {} for stage in stage_names(plan)}
    for entry in plan.stages:
        for part, manifest in zip(entry.shards, manifests(store, plan, entry), strict=True):
            if manifest is not None:
                found[entry.stage][part] = manifest
    return found


def stage_status(plan: RunPlan, stage: str, found: Mapping[int, Manifest]) -> StageStatus:
    """Rows, shards, dead letters and time of one stage, from its manifests."""
    entries = [entry for entry in plan.stages if entry.stage == stage]
    loaded = stage == "log_lines"
    # A dead letter counts until it is replayed, and only from the moment that its part is there.
    replayed = sum(shard in found for name, shard, _ in replayed_queries(plan) if name == stage)
    letters = sum(manifest.dead_letters.letters for manifest in found.values() if manifest.dead_letters is not None)
    computed = [manifest for manifest in found.values() if manifest.borrowed_from is None]
    planned = sum(plan.distinct_queries if entry.rows is None else entry.rows for entry in entries)
    return StageStatus(
        stage=stage,
        rows_in=planned - sum(manifest.left_out for manifest in found.values()) - replayed,
        rows_out=sum(manifest.rows for manifest in found.values()),
        # A file of dead letters that was lost must not make a run look complete.
        dead_letters=plan.dead_letters if loaded else letters - replayed,
        computed=len(computed),
        borrowed=len(found) - len(computed),
        missing=sum(entry.parts for entry in entries) - len(found),
        seconds=round(sum(manifest.seconds for manifest in computed), 3),
    )


def lost_log_lines(plan: RunPlan, found: Found) -> int:
    """How many lines of the log have no answer: bad lines, and the lines of queries taken out and not replayed."""
    letters = [
        manifest.dead_letters
        for stage, parts in found.items()
        if stage != "log_lines"
        for manifest in parts.values()
        if manifest.dead_letters is not None
    ]
    replayed = sum(
        query.log_lines
        for replay in plan.replays
        for query in replay.queries
        if query.shard in found[replay.from_stage]
    )
    return plan.dead_letters + sum(letter.log_lines for letter in letters) - replayed


def emptied(stage: str, found: Mapping[int, Manifest]) -> str | None:
    """Says so when a stage had candidates and has left none for any query."""
    accounts = [manifest.account for manifest in found.values() if manifest.account is not None]
    had = sum(account.candidates_in + sum(account.added.values()) for account in accounts)
    if had == 0 or any(account.candidates_out > 0 for account in accounts):
        return None
    removed: Counter[str] = Counter()
    for account in accounts:
        removed.update(account.removed)
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(removed.items()))
    return f"{stage} has left no candidate for any query: {reasons}"


def account_problems(plan: RunPlan, found: Found) -> list[str]:
    """What does not add up: lines, queries and candidates that came or went without a reason.

    For each part: planned queries = rows + dead letters of the stage + queries left out, which are the
    dead letters of the stages before it; candidates in + added = out + removed. A part is compared with
    the stages before it where they are committed.
    """
    problems = []
    for entry in plan.stages:
        for part in entry.shards:
            manifest = found[entry.stage].get(part)
            if manifest is not None:
                where = f"{entry.stage}, part {part}"
                problems += [f"{where}: {problem}" for problem in _part_problems(plan, found, entry, manifest)]
    return problems


def _part_problems(plan: RunPlan, found: Found, entry: StagePlan, manifest: Manifest) -> Iterator[str]:
    if manifest.account is not None and not manifest.account.balanced:
        yield f"candidates do not add up: {manifest.account.model_dump()}"
    letters = 0 if manifest.dead_letters is None else manifest.dead_letters.letters
    planned = planned_rows(plan, entry, manifest.shard)
    if planned is None:
        return
    if entry.stage == "log_lines":
        if (manifest.rows, letters) != (planned, plan.dead_letters):
            yield f"{planned} lines with {plan.dead_letters} dead letters planned, {manifest.rows} with {letters} there"
        return
    if manifest.rows + letters + manifest.left_out != planned:
        yield (
            f"{planned} queries planned, but {manifest.rows} rows + {letters} dead letters + "
            f"{manifest.left_out} left out"
        )
    before = _letters_before(plan, found, entry, manifest.shard)
    if before is not None and before != manifest.left_out:
        yield f"{manifest.left_out} queries left out, but the stages before it have {before} dead letters"


def _letters_before(plan: RunPlan, found: Found, entry: StagePlan, part: int) -> int | None:
    """Dead letters of one part in all stages before this one; None where one of them is not committed."""
    letters = 0
    for earlier in plan.stages:
        if earlier.stage == entry.stage:
            return letters
        if earlier.stage != "log_lines" and earlier.rows is not None and part in earlier.shards:
            manifest = found[earlier.stage].get(part)
            if manifest is None:
                return None
            letters += 0 if manifest.dead_letters is None else manifest.dead_letters.letters
    return letters


def _judged(
    store: Store, plan: RunPlan, found: Found, stages: Sequence[StageStatus], letters: int, lost: int
) -> tuple[VerdictName, str | None]:
    """The verdict, and why it is not complete."""
    finished: tuple[VerdictName, str | None] = ("partial", f"{letters} dead letters") if letters else ("complete", None)
    return next(_unfinished(store, plan, found, stages, lost), finished)


def _unfinished(
    store: Store, plan: RunPlan, found: Found, stages: Sequence[StageStatus], lost: int
) -> Iterator[tuple[VerdictName, str]]:
    """Everything that keeps a run from being finished, the weightiest first."""
    holder = holder_of(store, f"runs/{plan.run_id}")
    if holder is not None:
        yield "running", f"{holder[0]} is at it, last heard of {holder[1]:.0f} s ago"
    failure = failure_of(store, plan.run_id)
    if failure is not None:
        yield "failed", failure
    if lost > plan.dead_letters_allowed:
        yield "failed", f"dead letters take out {lost} log lines, the error budget allows {plan.dead_letters_allowed}"
    for problem in account_problems(plan, found):
        yield "failed", problem
    missing = [f"{stage.stage} ({stage.missing})" for stage in stages if stage.missing]
    if missing:
        yield "interrupted", f"missing parts: {', '.join(missing)}"
    if not plan.allow_emptied_stages:
        for problem in _emptied_stages(found):
            yield "failed", problem


def _emptied_stages(found: Found) -> Iterator[str]:
    for stage, parts in found.items():
        problem = emptied(stage, parts)
        if problem is not None:
            yield problem


def _notes(found: Found) -> Iterator[str]:
    """What is no fault, but worth a look: searches without any match, and calls that needed another try."""
    calls: dict[str, Counter[str]] = {}
    for parts in found.values():
        for manifest in parts.values():
            for service, counts in manifest.calls.items():
                calls.setdefault(service, Counter()).update(counts)
    for service, ended in calls.items():
        if ended["no_match"] and not ended["ok"]:
            yield f"{service} found nothing for any of {ended['no_match']} queries"
        for outcome in ("failed", "refused", "timed_out"):
            if ended[outcome]:
                yield f"{service}: {ended[outcome]} calls {outcome.replace('_', ' ')} and were made again"
    yield from _emptied_stages(found)
