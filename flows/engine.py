"""Engine: carries out a planned run, stage by stage; the same with Prefect and without it."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from threading import Lock
from typing import Any, TypeVar

import pyarrow as pa

from checkpoints.commit import borrow, commit, verify_files
from checkpoints.dead_letters import letters_of, read_letters
from checkpoints.lease import Lease, hold
from checkpoints.manifests import manifests
from checkpoints.run import clear_failure, load_plan, record_failure, replay_of, stage_entries
from checkpoints.store import Store
from checkpoints.summary import keep_summary
from checkpoints.verdict import emptied, verdict
from contracts.errors import CheckpointError, MissingArtifactError, RunHeldError, StageError
from contracts.manifest import Account, DeadLetter, Manifest, RunPlan, StagePlan, Verdict
from flows.executor import map_artifacts, map_shards, retrying
from flows.fingerprint import params_of
from flows.log_shards import LogShards
from flows.planning import now
from flows.progress import Progress, no_progress
from flows.quarantine import letters_for, stopped_by, without_faults
from flows.resources import Resources
from flows.settings import Settings
from flows.shard_inputs import query_rows, shard_inputs
from models.outcomes import CountedCrossEncoder, Spending, counted_grader
from stages.pipeline import LOADED, RUNS_ONCE, check_wiring, find_stage
from stages.stage import Stage, StageOutput

T = TypeVar("T")

# How a step is run: called with its name and its body. Prefect wraps the body in a task.
Step = Callable[[str, Callable[[], None]], None]


def plain_step(name: str, body: Callable[[], None]) -> None:  # noqa: ARG001 - the name is for other steps
    """Runs a step here and now."""
    body()


@dataclass
class Session:
    """One process at work on one run.

    Attributes:
        store: where the run lies.
        plan: what is to be done.
        settings: the configuration that the run was planned with.
        progress: told (stage, parts done, parts in all).
    """

    store: Store
    plan: RunPlan
    settings: Settings
    progress: Progress = no_progress
    _resources: Resources = field(init=False)
    _lease: Lease = field(init=False)
    # Queries taken out so far by shard, and lines of the log lost so far by stage and shard.
    _dead: dict[int, set[str]] = field(init=False)
    _lost: dict[tuple[str, int], int] = field(init=False)
    _noting: Lock = field(init=False, default_factory=Lock)

    def __post_init__(self) -> None:
        self._resources = Resources(self.store, self.settings, self.plan.snapshot_id, self.plan.run_id)
        self._dead = defaultdict(set)
        replayed = {("replayed", one.shard): -sum(q.log_lines for q in one.queries) for one in self.plan.replays}
        self._lost = {("log_lines", 0): self.plan.dead_letters, **replayed}

    def execute(self, step: Step = plain_step) -> Verdict:
        """Does all that the plan asks for and that is not committed yet, and reads the verdict.

        Raises:
            RunHeldError: another process is at it.
            DartflowError: what stopped the run; it is noted with the run.
        """
        check_wiring()
        with hold(self.store, f"runs/{self.plan.run_id}", f"run {self.plan.run_id}") as self._lease:
            clear_failure(self.store, self.plan.run_id)
            try:
                kept = [one for entry in self.plan.stages for one in self._found(entry) if one is not None]
                if kept:
                    step("verify", lambda: self._verify(kept))
                # What was taken over before needs its lender no more, which may be gone.
                borrowed = [entry for entry in self.plan.stages if entry.borrowed_from and self._missing(entry)]
                if borrowed:
                    step("borrow", lambda: self._borrow(borrowed))
                for entry in self.plan.stages:
                    if entry.stage != "log_lines":
                        self._keep_error_budget()
                    if entry.stage not in LOADED:
                        self.__dict__.pop("_log", None)  # it is large
                    missing = self._missing(entry)
                    if missing:
                        step(entry.stage, lambda entry=entry, missing=missing: self._run_stage(entry, missing))  # type: ignore[misc]
                    self._close_stage(entry)
            except RunHeldError:
                raise  # the run is another process's now: no note of ours belongs into it
            except Exception as error:  # noqa: BLE001 - whatever it is, the run must say that it failed
                stopped = stopped_by(error, f"run {self.plan.run_id}", "See the runbook.")
                with suppress(CheckpointError):  # a store that is down must not stand in front of the cause
                    record_failure(self.store, self.plan.run_id, stopped)
                raise stopped from stopped.__cause__
        return verdict(self.store, self.plan)

    def _verify(self, kept: list[Manifest]) -> None:
        """Compares what an interrupted run has with what was committed: nothing unproven is built upon."""
        map_artifacts(
            lambda manifest: verify_files(self.store, manifest),
            kept,
            lambda done: self.progress("verify", done, len(kept)),
        )

    def _keep_error_budget(self) -> None:
        """Stops a run that has lost more than it may."""
        lost = sum(self._lost.values())
        if lost > self.plan.dead_letters_allowed:
            at = [stage for (stage, _), lines in self._lost.items() if lines > 0 and stage != "log_lines"]
            mend = f"after the fix, `dartflow rerun {self.plan.run_id} --from {at[0]}`" if at else "correct the log"
            raise StageError(
                f"run {self.plan.run_id}", "has more dead letters than its error budget", got=f"{lost} log lines lost",
                want=f"at most {self.plan.dead_letters_allowed} of {self.plan.log_lines}",
                next_step=f"See `dartflow dead-letters {self.plan.run_id}`; {mend}, or raise run.dead_letter_share.",
            )  # fmt: skip

    def _close_stage(self, entry: StagePlan) -> None:
        """Sums a stage up, notes the queries that it took out, and stops the run when it took out every candidate."""
        summary = keep_summary(self.store, self.plan, entry)
        if entry.stage != "log_lines":
            for part, file in summary.letters.items():
                self._take_out(entry.stage, part, read_letters(self.store, file))
        problem = None if self.plan.allow_emptied_stages else emptied(entry.stage, [summary])
        if problem is not None and entry.first_part == 0:
            raise StageError(
                f"run {self.plan.run_id}", problem, next_step="Correct the settings of the stage and rerun, or set "
                "run.allow_emptied_stages if this log has no answers.",
            )  # fmt: skip

    def _take_out(self, stage: str, part: int, letters: Sequence[DeadLetter]) -> None:
        """Notes the queries that a stage took out of a part; nothing changes when they are noted already."""
        if letters:
            with self._noting:
                self._dead[part] |= {str(letter.query_id) for letter in letters}
                self._lost[stage, part] = sum(letter.log_lines for letter in letters)

    def _run_stage(self, entry: StagePlan, missing: list[int]) -> None:
        """Computes and commits the parts of one stage that are not there yet."""
        if entry.stage != "log_lines":
            for manifest in self._found(entry):
                if manifest is not None:  # of an interrupted stage: what it lost counts from the start
                    self._take_out(entry.stage, manifest.shard, letters_of(self.store, manifest))
        if entry.borrowed_from is not None:
            missing = self._borrow_late(entry, missing)
        self.progress(entry.stage, entry.parts - len(missing), entry.parts)
        if not missing:
            return  # all borrowed: no corpus and no model need be opened
        work = self._loader(entry) if entry.stage in LOADED else self._runner(entry)
        already = entry.parts - len(missing)

        def report(done: int) -> None:
            self._lease.check()
            self._keep_error_budget()
            self.progress(entry.stage, already + done, entry.parts)

        map_shards(work, missing, self.settings.executor, report)

    def _missing(self, entry: StagePlan) -> list[int]:
        return [part for part, manifest in zip(entry.shards, self._found(entry), strict=True) if manifest is None]

    def _found(self, entry: StagePlan) -> list[Manifest | None]:
        """The manifests themselves, not their summary: work is built upon what was read."""
        return manifests(self.store, self.plan, entry)

    def _borrow(self, entries: list[StagePlan]) -> None:
        """Verifies every artifact that the plan borrows, before anything is computed, and takes it over.

        A stage behind one that is computed waits for its turn: other queries than in the parent may be taken out.
        """
        order = [entry.borrowed_from is None for entry in self.plan.stages]
        first_computed = order.index(True) if True in order else len(order)
        for entry in entries:
            early = self.plan.stages.index(entry) < first_computed
            prove: Callable[[Manifest], object] = partial(verify_files, self.store)
            take: Callable[[Manifest], object] = partial(borrow, self.store, plan=self.plan, entry=entry)
            report = partial(self._report, entry)
            map_artifacts(take if early else prove, list(self._lent(entry)), report)

    def _report(self, entry: StagePlan, done: int) -> None:
        self.progress(entry.stage, done, entry.parts)

    def _lent(self, entry: StagePlan) -> Iterator[Manifest]:
        """What a stage borrows, part by part.

        Raises:
            MissingArtifactError: the parent has not committed a part.
        """
        parent = load_plan(self.store, str(entry.borrowed_from))
        source = next(one for one in stage_entries(parent, entry.stage) if one.first_part == entry.first_part)
        for part, manifest in zip(source.shards, manifests(self.store, parent, source), strict=True):
            if manifest is None:
                raise MissingArtifactError(
                    f"run {parent.run_id}", "has no artifact to borrow", got=f"{entry.stage}, part {part}",
                    next_step=f"Rerun from {entry.stage}.",
                )  # fmt: skip
            yield manifest

    def _borrow_late(self, entry: StagePlan, missing: list[int]) -> list[int]:
        """Takes over the parts that leave out just the queries that are out here too; gives back the others."""
        others = []
        for manifest in self._lent(entry):
            if manifest.shard in missing:
                dead = set() if entry.stage in RUNS_ONCE else self._dead[manifest.shard]
                if set(manifest.key_parts.get("left_out", ())) == dead:  # type: ignore[call-overload]
                    borrow(self.store, manifest, plan=self.plan, entry=entry)
                else:
                    others.append(manifest.shard)
        return others

    def _loader(self, entry: StagePlan) -> Callable[[int], None]:
        """The work that loads and commits one part of `log_lines` or `queries`."""
        log = self._log

        def load_lines(part: int) -> None:
            started = time.perf_counter()
            lines, letters = log.lines()
            self._commit(entry, part, lines, started, letters=letters)

        def load_queries(part: int) -> None:
            started = time.perf_counter()
            query_ids = log.query_ids(part)
            table, faults = self._without_faults(entry.stage, part, log.embedded, query_ids)
            letters = letters_for(self.plan, entry.stage, part, log.rows, faults)
            self._commit(entry, part, table, started, letters=letters)

        if entry.stage == "log_lines":
            return load_lines
        log.open()
        return load_queries

    @cached_property
    def _log(self) -> LogShards:
        """The query log, read once a session; dropped when what was read of it is committed."""
        return LogShards(self.store, self.plan, self.settings)

    def _runner(self, entry: StagePlan) -> Callable[[int], None]:
        """The work that computes and commits one part of a stage."""
        stage = find_stage(entry.stage)
        needs = self._resources.of(stage)  # opened here, not by several shards at once
        return lambda part: self._run_part(entry, stage, needs, part)

    def _run_part(self, entry: StagePlan, stage: Stage, needs: Mapping[str, object], part: int) -> None:
        started = time.perf_counter()
        dead = () if stage.name in RUNS_ONCE and replay_of(self.plan, part) is None else self._dead[part]
        given = shard_inputs(self.store, self.plan, stage, part, dead)
        calls: Counter[str] = Counter()
        counted = dict(needs)
        if counted.get("cross_encoder") is not None:
            counted["cross_encoder"] = CountedCrossEncoder(counted["cross_encoder"], calls)  # type: ignore[arg-type]
        spending = Spending()
        counted["grader"] = counted_grader(counted.get("grader"), spending)  # type: ignore[arg-type]
        params = params_of(self.settings, stage)

        def run(query_ids: Sequence[str]) -> StageOutput:
            return stage.checked_run(given.of(query_ids), counted, params)

        output, faults = self._without_faults(stage.name, part, run, given.query_ids)
        rows_of = partial(query_rows, self.store, self.plan, part)
        letters = letters_for(self.plan, stage.name, part, rows_of, faults)
        key_parts: dict[str, Any] = {"parents": given.lineage, "left_out": given.left_out}
        replay = replay_of(self.plan, part)
        if replay is not None:
            key_parts["replayed"] = [query.query_id for query in replay.queries]
        called = {name: ends for name, ends in (("cross_encoder", calls), ("grader", spending.calls)) if ends}
        self._commit(
            entry, part, output.table, started, key_parts=key_parts, letters=letters, account=output.account,
            left_out=len(given.left_out), calls={**output.calls, **called},
            tokens=spending.tokens, cost=spending.cost, graded_by=output.graded_by,
        )  # fmt: skip

    def _without_faults(
        self, stage: str, part: int, run: Callable[[Sequence[str]], T], query_ids: Sequence[str]
    ) -> tuple[T, dict[str, Exception]]:
        """Runs a shard, again after transient faults, and without queries that make it fail, which are given back."""

        def room() -> int:
            return self.plan.dead_letters_allowed - sum(self._lost.values())

        return without_faults(
            retrying(run, self.settings.executor, self._lease.check),
            query_ids,
            where=f"stage {stage}, shard {part}",
            room=None if stage in RUNS_ONCE else room,
            next_step=f"After the fix, `dartflow rerun {self.plan.run_id}`.",
        )

    def _commit(
        self,
        entry: StagePlan,
        part: int,
        table: pa.Table,
        started: float,
        *,
        key_parts: Mapping[str, Any] | None = None,
        letters: Sequence[DeadLetter] = (),
        left_out: int = 0,
        account: Account | None = None,
        calls: Mapping[str, Mapping[str, int]] | None = None,
        tokens: int = 0,
        cost: float = 0.0,
        graded_by: Mapping[str, int] | None = None,
    ) -> None:
        self._lease.check()
        commit(
            self.store,
            table,
            plan=self.plan,
            entry=entry,
            part=part,
            key_parts={**entry.inputs, "part": part, **(key_parts or {})},
            letters=letters,
            left_out=left_out,
            account=account,
            calls=calls,
            tokens=tokens,
            cost=cost,
            graded_by=graded_by,
            started_at=now(),
            seconds=round(time.perf_counter() - started, 6),
        )
        if entry.stage != "log_lines":
            self._take_out(entry.stage, part, letters)
