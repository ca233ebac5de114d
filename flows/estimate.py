"""Estimate: what a run will take on this machine, from a short calibration with the real stages.

The time is that of the run alone: from its planning to its verdict. The start of the process, and a Prefect
server that must be started first, come on top.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from checkpoints.corpora import current_snapshot_id, load_snapshot, manifest_path
from checkpoints.digests import sha256
from checkpoints.scratch import scratch_store
from checkpoints.store import Store
from contracts.estimate import CalibrationFacts, ContextTokens, Estimate, ModelPairs, StageEstimate
from contracts.manifest import RunPlan
from flows.executor import worker_count
from flows.extrapolation import line_through, sample_size, shard_queries, wall_of
from flows.planning import allowed_dead_letters, open_query_log, read_query_log_bytes, shard_count
from flows.preflight import settings_of_run
from flows.progress import Progress, no_progress
from flows.resources import cross_encoder_id
from flows.sample_passes import (
    MeasuredResources,
    Pass,
    sample_settings,
    timed_log_lines,
    timed_pairs,
    timed_pass,
    write_sample,
)
from flows.settings import Settings
from loading.query_log import QueryLog
from stages.pipeline import RUNS_ONCE

# Queries of a shard of the first two passes: what they take is what a shard costs before it holds much.
_FEW = 16
# A key and a score in the pair scores, with their share of the files around them.
_BYTES_A_PAIR = 22


def estimate(
    store: Store, settings: Settings, queries: Path, *, sample: int | None = None, progress: Progress = no_progress
) -> Estimate:
    """Says what a run of a query log will take, before it.

    The log is read as the run reads it. Evenly spaced distinct queries then go through the real stages, in a
    scratch store on the disk (or in the bucket) of the real one: twice a few of them, so that what is paid
    once and what a shard costs in itself are known, then the sample. From both sizes a line is drawn for each
    stage, through seconds and through bytes. Of the cross-encoder's pairs all of the sample's are counted and a
    few tens are read. An embedder embeds the sample's queries; an LLM grader is not called.

    Where it can be wrong:
        * Another load on the machine than later: on shared cores, two runs of the same differ as much. The
          same holds for a store whose speed changes, as a disk that slows down once its cache is full.
        * Queries that come in another mix in the log than in an even sample; a sample as long as the log is
          exact but for times.
        * With a cross-encoder, the pairs of crag_grading are likely too low and the tokens of contexts too
          high, since nobody knows the scores that are not kept: every passage is taken to be ambiguous, and so
          to stay. Each query whose passages leave reads up to `crag_grading.corrective_limit` pairs more.
        * Retries of services that do not answer, and dead letters, are not foreseen.

    Args:
        store: where the current snapshot and the pair scores lie; nothing stays behind in it.
        settings: of the run.
        queries: the query log.
        sample: how many distinct queries are run; None chooses, see `sample_size`.
        progress: told what is done of the calibration.

    Raises:
        InputError: the query log cannot be used.
        ConfigurationError: a setting that cannot be met.
        DartflowError: what stopped the calibration, and would stop the run.
    """
    started = time.perf_counter()
    snapshot = load_snapshot(store, current_snapshot_id(store))
    settings = settings_of_run(settings, snapshot)
    sha256(read_query_log_bytes(queries))
    log = open_query_log(queries, settings, snapshot)
    reading = time.perf_counter() - started
    measured = _calibrated(store, settings, log, snapshot.snapshot_id, sample, progress)
    return _extrapolated(queries, settings, log, reading, measured, time.perf_counter() - started)


@dataclass(frozen=True)
class _Measured:
    """What the calibration found: its passes, the lines of the whole log, and the reading of pairs."""

    plan: RunPlan
    first: Pass
    few: Pass
    many: Pass
    lines_seconds: float
    lines_bytes: int
    model_opening: float
    seconds_a_pair: float
    pairs_read: int


def _calibrated(
    store: Store, settings: Settings, log: QueryLog, snapshot_id: str, asked: int | None, progress: Progress
) -> _Measured:
    distinct, size = log.queries.num_rows, settings.run.shard_size
    side_by_side = _side_by_side(settings, distinct)
    count = sample_size(distinct, size, side_by_side, asked)
    shard = size if count == distinct else min(size, -(-count // side_by_side))
    few = min(count, _FEW * side_by_side)
    resources, passes = MeasuredResources(store, sample_settings(settings, shard), snapshot_id), []
    with tempfile.TemporaryDirectory(prefix="dartflow-") as folder, scratch_store(store) as scratch:
        # Its plans name the snapshot; the files of it are read where they lie.
        scratch.write(manifest_path(snapshot_id), store.read(manifest_path(snapshot_id)))
        for number, (queries, part) in enumerate([(few, min(_FEW, shard)), (few, min(_FEW, shard)), (count, shard)]):
            progress("calibration", number, 4)
            path = Path(folder) / f"{number}.parquet"
            write_sample(log, queries, path)
            one, plan = timed_pass(scratch, resources, sample_settings(settings, part), path, snapshot_id)
            passes.append(one)
        progress("calibration", 3, 4)
        lines_seconds, lines_bytes = timed_log_lines(scratch, plan, log)
    drawn = [] if resources.counter is None else resources.counter.drawn
    model_opening, seconds_a_pair = timed_pairs(settings, drawn)
    progress("calibration", 4, 4)
    first, again, many = passes
    return _Measured(plan, first, again, many, lines_seconds, lines_bytes, model_opening, seconds_a_pair, len(drawn))


def _side_by_side(settings: Settings, distinct: int) -> int:
    """How many shards of the run are at work at once."""
    return min(worker_count(settings.executor), shard_count(distinct, settings.run.shard_size))


def _extrapolated(
    queries: Path, settings: Settings, log: QueryLog, reading: float, measured: _Measured, seconds: float
) -> Estimate:
    distinct, many = log.queries.num_rows, measured.many
    stages = [_stage(entry.stage, settings, distinct, reading, measured) for entry in measured.plan.stages]
    shards_alone = sum(wall_of(taken, worker_count(settings.executor)) for taken in measured.few.seconds.values())
    opening = max(0.0, measured.first.wall_seconds - shards_alone) + measured.model_opening
    to_read = sum(stage.pairs - stage.kept_pairs for stage in stages)
    tokens_a_query = many.context_tokens / max(many.queries, 1)
    return Estimate(
        query_log=str(queries),
        snapshot_id=measured.plan.snapshot_id,
        log_lines=log.lines.num_rows,
        distinct_queries=distinct,
        dead_letters=len(log.dead_letters),
        shards=len(shard_queries("queries", distinct, settings.run.shard_size)),
        workers=worker_count(settings.executor),
        reading_seconds=round(reading, 3),
        opening_seconds=round(opening, 3),
        stages=stages,
        wall_seconds=round(reading + opening + sum(stage.wall_seconds for stage in stages), 3),
        disk_bytes=many.run_bytes + sum(stage.disk_bytes for stage in stages) + _BYTES_A_PAIR * to_read,
        model_pairs=ModelPairs(
            cross_encoder=cross_encoder_id(settings),
            pairs=sum(stage.pairs for stage in stages),
            kept=sum(stage.kept_pairs for stage in stages),
            to_read=to_read,
            seconds_a_pair=round(measured.seconds_a_pair, 6) if measured.pairs_read else None,
        ),
        context_tokens=ContextTokens(
            queries=distinct, tokens_a_query=round(tokens_a_query, 2), tokens=round(tokens_a_query * distinct)
        ),
        calibration=CalibrationFacts(
            queries=many.queries, shards=many.shards, pairs_read=measured.pairs_read, seconds=round(seconds, 3)
        ),
        notes=_notes(settings, log, many),
    )


def _stage(name: str, settings: Settings, distinct: int, reading: float, measured: _Measured) -> StageEstimate:
    """One stage of the run."""
    few, many = measured.few, measured.many
    if name == "log_lines":
        alone = round(reading + measured.lines_seconds, 3)
        return StageEstimate(
            stage=name, shards=1, thread_seconds=alone, wall_seconds=alone, disk_bytes=measured.lines_bytes
        )
    shards = shard_queries(name, distinct, settings.run.shard_size)
    taken = line_through(_a_shard(few, name, sum(few.seconds[name])), _a_shard(many, name, sum(many.seconds[name])))
    size = line_through(_a_shard(few, name, few.disk_bytes[name]), _a_shard(many, name, many.disk_bytes[name]))
    seconds = [taken.of(one) for one in shards]
    share = distinct / max(many.queries, 1)
    pairs, kept = (round(counted.get(name, 0) * share) for counted in (many.pairs, many.kept_pairs))
    # Workers wait for the model together: it reads as many pairs at once as it has threads, over all shards.
    waiting = (pairs - kept) * measured.seconds_a_pair
    return StageEstimate(
        stage=name,
        shards=len(shards),
        thread_seconds=round(sum(seconds) + waiting * min(worker_count(settings.executor), len(shards)), 3),
        wall_seconds=round(wall_of(seconds, worker_count(settings.executor)) + waiting, 3),
        disk_bytes=round(sum(size.of(one) for one in shards)),
        pairs=pairs,
        kept_pairs=kept,
    )


def _a_shard(one: Pass, stage: str, total: float) -> tuple[float, float]:
    """The queries of a shard of a stage, and its part of a total."""
    shards = 1 if stage in RUNS_ONCE else one.shards
    return one.queries / shards, total / shards


def _notes(settings: Settings, log: QueryLog, many: Pass) -> list[str]:
    """What is worth a look before the run is started."""
    notes = []
    allowed = allowed_dead_letters(settings, log.lines.num_rows)
    if len(log.dead_letters) > allowed:
        notes.append(
            f"the run will stop after log_lines: {len(log.dead_letters)} lines of the log are dead letters, "
            f"run.dead_letter_share and run.dead_letter_count allow {allowed}"
        )
    if many.dead_letters:
        notes.append(f"{many.dead_letters} of the {many.queries} queries that were run became dead letters")
    if sum(many.pairs.values()) > sum(many.kept_pairs.values()):
        notes.append(
            "pairs of crag_grading are likely too low, and context tokens too high: without scores, every passage is "
            "taken to be ambiguous, and so to stay"
        )
    if settings.grader.provider == "llm":
        notes.append("the calls of the LLM grader are in none of the times: it takes as long as its service takes")
    return notes
