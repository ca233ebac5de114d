"""Calibration: a sample of a query log goes through the real stages, in a store of its own; every shard is timed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from checkpoints.commit import commit, read_table
from checkpoints.manifests import stage_folder
from checkpoints.pair_scores import PairScores
from checkpoints.run import create_run, stage_manifests
from checkpoints.store import Store
from checkpoints.summary import keep_summary
from contracts.manifest import RunPlan, StagePlan
from contracts.query import LogLine
from contracts.table import check_table
from flows.engine import Session
from flows.pair_counter import PairCounter
from flows.planning import new_run_id, now, plan_run
from flows.resources import Resources, cross_encoder_id
from flows.settings import Settings, validated
from loading.query_log import QueryLog
from models.cross_encoder import open_cross_encoder

# Of the pairs that the cross-encoder reads to be timed, these come first and do not count.
_WARM_UP_PAIRS = 4


@dataclass(frozen=True)
class Pass:
    """What one run of a sample took.

    Attributes:
        queries: distinct queries.
        shards: of them, all of one size but for the last.
        wall_seconds: of planning, opening and all stages.
        seconds: by stage, of each shard, from reading what it needs to having committed its table.
        disk_bytes: by stage, of its folder: artifacts with their records.
        run_bytes: what a run has besides these, its plan above all.
        dead_letters: queries that stages took out.
        context_tokens: of all contexts.
        pairs: by stage, the distinct pairs that it asked the cross-encoder for and no earlier stage had.
        kept_pairs: those of them whose score is kept already.
    """

    queries: int
    shards: int
    wall_seconds: float
    seconds: Mapping[str, Sequence[float]]
    disk_bytes: Mapping[str, int]
    run_bytes: int
    dead_letters: int
    context_tokens: int
    pairs: Mapping[str, int]
    kept_pairs: Mapping[str, int]


class MeasuredResources(Resources):
    """The resources of a run, opened once for all passes, with a `PairCounter` in the place of the cross-encoder.

    Args:
        store: where snapshot and pair scores lie; nothing is written to it.
        settings: of the run.
        snapshot_id: the corpus snapshot of the run.
    """

    counter: PairCounter | None = None

    @cached_property
    def cross_encoder(self) -> PairCounter | None:
        """What counts in its place; None where there is none."""
        model_id, grading = cross_encoder_id(self._settings), self._settings.crag_grading
        if model_id != "none":
            kept = PairScores(self._store, model_id)
            self.counter = PairCounter(model_id, kept, grading.lower, grading.upper)
        return self.counter


class _MeasuredSession(Session):
    """A session that keeps how long every shard took, commit included."""

    def __init__(self, store: Store, plan: RunPlan, resources: MeasuredResources) -> None:
        super().__init__(store, plan, validated(plan.settings))
        self._resources = self._measured = resources
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def _loader(self, entry: StagePlan) -> Callable[[int], None]:
        return self._timed(entry, super()._loader(entry))

    def _runner(self, entry: StagePlan) -> Callable[[int], None]:
        work = super()._runner(entry)
        if self._measured.counter is not None:
            self._measured.counter.stage = entry.stage
        return self._timed(entry, work)

    def _timed(self, entry: StagePlan, work: Callable[[int], None]) -> Callable[[int], None]:
        def timed(part: int) -> None:
            started = time.perf_counter()
            work(part)
            self.seconds[entry.stage].append(time.perf_counter() - started)

        return timed


def write_sample(log: QueryLog, count: int, path: Path) -> None:
    """Writes `count` of the distinct queries, evenly spaced in the order of the log, as a log of their own."""
    rows = np.arange(count, dtype=np.int64) * log.queries.num_rows // max(count, 1)
    table = log.queries.select(["text", "groups", "filters"]).take(pa.array(rows))
    vectors = log.embeddings(rows)
    if vectors is not None:
        kind = pa.list_(pa.field("element", pa.float32(), nullable=False), vectors.shape[1])
        table = table.append_column(
            "embedding", pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), type=kind)
        )
    pq.write_table(table, path)


def sample_settings(settings: Settings, shard_size: int) -> Settings:
    """The settings of a run as a sample of it runs: in other shards, stopped by no budget, and graded by the score.

    An LLM grader is paid for, and nobody who asks for an estimate wants to have paid for it.
    """
    tree = settings.model_dump(mode="json")
    tree["query_log"] |= {"columns": {}, "allow_empty": True}  # the sample is written under our own names
    tree["grader"]["provider"] = "score"
    tree["run"] = {"shard_size": shard_size, "dead_letter_share": 1.0, "allow_emptied_stages": True}
    return validated(tree)


def timed_pass(
    scratch: Store, resources: MeasuredResources, settings: Settings, sample: Path, snapshot_id: str
) -> tuple[Pass, RunPlan]:
    """Plans and runs a sample in the scratch store, with what was opened before.

    Raises:
        DartflowError: what would stop the run itself too.
    """
    if resources.counter is not None:
        resources.counter.forget()
    started = time.perf_counter()
    plan = plan_run(scratch, settings, sample, new_run_id(), snapshot_id)
    create_run(scratch, plan)
    session = _MeasuredSession(scratch, plan, resources)
    verdict = session.execute()
    wall_seconds = time.perf_counter() - started
    sizes = {
        entry.stage: _bytes(scratch, stage_folder(plan.run_id, entry.number, entry.stage)) for entry in plan.stages
    }
    contexts = [read_table(scratch, manifest) for manifest in stage_manifests(scratch, plan, "context")]
    counter = resources.counter
    taken = Pass(
        queries=plan.distinct_queries,
        shards=plan.shards,
        wall_seconds=wall_seconds,
        seconds=session.seconds,
        disk_bytes=sizes,
        run_bytes=_bytes(scratch, f"runs/{plan.run_id}") - sum(sizes.values()),
        dead_letters=verdict.dead_letters,
        context_tokens=sum(pc.sum(table.column("tokens")).as_py() or 0 for table in contexts),
        pairs={} if counter is None else counter.pairs,
        kept_pairs={} if counter is None else counter.kept_pairs,
    )
    return taken, plan


def timed_log_lines(scratch: Store, plan: RunPlan, log: QueryLog) -> tuple[float, int]:
    """Commits the lines of the whole log, and those that are dead letters, as a run does; seconds and bytes.

    Args:
        scratch: where to.
        plan: of a sample; its entry of `log_lines` serves.
        log: the whole log.
    """
    run_id, lines = new_run_id(), log.lines.num_rows
    entry = plan.stages[0].model_copy(update={"rows": lines})
    whole = plan.model_copy(update={"run_id": run_id, "log_lines": lines, "dead_letters": len(log.dead_letters)})
    started = time.perf_counter()
    check_table(log.lines, LogLine, entry.stage)
    letters = [letter.model_copy(update={"run_id": run_id}) for letter in log.dead_letters]
    commit(
        scratch, log.lines, plan=whole, entry=entry, part=0, key_parts={**entry.inputs, "part": 0}, letters=letters,
        account=None, started_at=now(), seconds=0.0,
    )  # fmt: skip
    keep_summary(scratch, whole, entry)
    return time.perf_counter() - started, _bytes(scratch, f"runs/{run_id}")


def timed_pairs(settings: Settings, pairs: Sequence[tuple[str, str]]) -> tuple[float, float]:
    """Opens the cross-encoder and lets it read some pairs; the seconds of opening, and a pair.

    A pair's seconds are of the whole process, which reads several at once. Scores from a file take none.
    """
    if settings.cross_encoder.provider == "column":
        return 0.0, 0.0
    started = time.perf_counter()
    encoder = open_cross_encoder(settings.cross_encoder)
    if encoder is None or not pairs:
        return 0.0, 0.0
    warm_up, timed = pairs[:_WARM_UP_PAIRS], pairs[_WARM_UP_PAIRS:] or pairs
    encoder.score(*map(list, zip(*warm_up, strict=True)))
    opened = time.perf_counter()
    encoder.score(*map(list, zip(*timed, strict=True)))
    return opened - started, (time.perf_counter() - opened) / len(timed)


def _bytes(store: Store, folder: str) -> int:
    return sum(store.sizes(folder).values())
