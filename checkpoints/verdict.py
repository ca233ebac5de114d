"""Verdicts: what is true of a run, from its plan, its manifests and its lease, never from what a process said last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from checkpoints.dead_letters import replayed_queries
from checkpoints.lease import holder_of
from checkpoints.manifests import stage_folder
from checkpoints.run import failure_of, stage_entries, stage_names
from checkpoints.store import Store
from checkpoints.summary import Summary, added_up, calls_added_up, read_summary
from contracts.manifest import RunPlan, StagePlan, StageStatus, Verdict, VerdictName

# What the manifests of each stage say, a summary for each of its entries in the plan.
Found = Mapping[str, Sequence[Summary]]


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
    """What is committed of a run, by stage.

    Raises:
        CorruptArtifactError: a manifest that cannot be trusted.
    """
    return {stage: committed_of(store, plan, stage) for stage in stage_names(plan)}


def committed_of(store: Store, plan: RunPlan, stage: str) -> list[Summary]:
    """What is committed of one stage.

    Raises:
        CorruptArtifactError: a manifest that cannot be trusted.
    """
    return [read_summary(store, plan, entry) for entry in stage_entries(plan, stage)]


def stage_status(plan: RunPlan, stage: str, found: Sequence[Summary]) -> StageStatus:
    """Rows, shards, dead letters and time of one stage."""
    entries = stage_entries(plan, stage)
    planned = sum(entry.rows for entry in entries if entry.rows is not None)
    planned = planned or plan.distinct_queries  # a step that runs once reads them all
    missing = sum(len(summary.missing) for summary in found)
    computed = sum(summary.computed for summary in found)
    # A dead letter counts until it is replayed, and only from the moment that its part is there.
    replayed = sum(_holds(found, shard) for name, shard, _ in replayed_queries(plan) if name == stage)
    letters = sum(file.letters for summary in found for file in summary.letters.values())
    return StageStatus(
        stage=stage,
        rows_in=planned - sum(sum(summary.left_out.values()) for summary in found) - replayed,
        rows_out=sum(summary.rows for summary in found),
        # A file of dead letters that was lost must not make a run look complete.
        dead_letters=plan.dead_letters if stage == "log_lines" else letters - replayed,
        computed=computed,
        borrowed=sum(entry.parts for entry in entries) - missing - computed,
        missing=missing,
        seconds=round(sum(summary.seconds for summary in found), 3),
    )


def _holds(found: Sequence[Summary], part: int) -> bool:
    """Whether a part of a stage is committed."""
    return any(summary.holds(part) for summary in found)


def lost_log_lines(plan: RunPlan, found: Found) -> int:
    """How many lines of the log have no answer: bad lines, and the lines of queries taken out and not replayed."""
    letters = [
        file
        for stage, summaries in found.items()
        if stage != "log_lines"
        for summary in summaries
        for file in summary.letters.values()
    ]
    replayed = sum(
        query.log_lines
        for replay in plan.replays
        for query in replay.queries
        if _holds(found[replay.from_stage], query.shard)
    )
    return plan.dead_letters + sum(letter.log_lines for letter in letters) - replayed


def emptied(stage: str, found: Sequence[Summary]) -> str | None:
    """Says so when a stage had candidates and has left none for any query."""
    had = sum(summary.candidates_in + sum(summary.added.values()) for summary in found)
    if had == 0 or any(summary.candidates_out > 0 for summary in found):
        return None
    removed = added_up(summary.removed for summary in found)
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(removed.items()))
    return f"{stage} has left no candidate for any query: {reasons}"


def account_problems(plan: RunPlan, found: Found) -> list[str]:
    """What does not add up: lines, queries and candidates that came or went without a reason.

    For each part: planned queries = rows + dead letters of the stage + queries left out, which are the
    dead letters of the stages before it; candidates in + added = out + removed. A part is compared with
    the stages before it where they are committed.
    """
    problems: list[str] = []
    # Of the stages so far: dead letters by part, and the parts that one of them misses.
    letters, unknown = Counter[int](), set[int]()
    for stage, summaries in found.items():
        entries = list(zip(stage_entries(plan, stage), summaries, strict=True))
        for entry, summary in entries:
            problems += _entry_problems(entry, summary, letters, unknown)
        for entry, summary in entries:
            if _leaves_queries_out(entry):
                letters.update({part: file.letters for part, file in summary.letters.items()})
                unknown.update(summary.missing)
    return problems


def _leaves_queries_out(entry: StagePlan) -> bool:
    """Whether each part of a stage is planned for some queries, less those that the stages before it took out."""
    return entry.stage != "log_lines" and entry.rows is not None


def _entry_problems(
    entry: StagePlan, summary: Summary, letters: Mapping[int, int], unknown: Collection[int]
) -> Iterator[str]:
    """What does not add up in the parts of an entry, and which leave out other queries than were taken out before."""
    for part in sorted({*summary.problems, *summary.left_out, *letters}):
        if not summary.holds(part):
            continue
        where = f"{entry.stage}, part {part}"
        yield from (f"{where}: {problem}" for problem in summary.problems.get(part, ()))
        left_out, before = summary.left_out.get(part, 0), letters.get(part, 0)
        if _leaves_queries_out(entry) and part not in unknown and left_out != before:
            yield f"{where}: {left_out} queries left out, but the stages before it have {before} dead letters"


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
    for stage, summaries in found.items():
        problem = emptied(stage, summaries)
        if problem is not None:
            yield problem


def _notes(found: Found) -> Iterator[str]:
    """What is no fault, but worth a look: silent searches, calls that needed another try, and who graded."""
    calls = calls_added_up(summary.calls for summaries in found.values() for summary in summaries)
    for service, ended in calls.items():
        if ended["no_match"] and not ended["ok"]:
            yield f"{service} found nothing for any of {ended['no_match']} queries"
        for outcome in ("failed", "refused", "timed_out"):
            if ended[outcome]:
                yield f"{service}: {ended[outcome]} calls {outcome.replace('_', ' ')} and were made again"
    graded = added_up(summary.graded_by for summaries in found.values() for summary in summaries)
    if graded:
        yield f"passages graded by {', '.join(f'{by} {count}' for by, count in sorted(graded.items()))}"
    yield from _emptied_stages(found)
