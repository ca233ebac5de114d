"""Engine: carries out a planned run, stage by stage; the same with Prefect and without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa

from checkpoints.commit import borrow, commit, read_manifest, read_table
from checkpoints.corpora import load_snapshot
from checkpoints.lease import Lease, hold
from checkpoints.run import (
    clear_failure,
    load_plan,
    manifests,
    read_dead_letters,
    record_failure,
    stage_entry,
    verdict,
    write_dead_letters,
)
from checkpoints.store import Store
from contracts.errors import (
    CheckpointError,
    CorruptArtifactError,
    DartflowError,
    MissingArtifactError,
    RunHeldError,
    StageError,
)
from contracts.manifest import Account, DeadLetter, Manifest, RunPlan, StagePlan, Verdict
from contracts.query import DistinctQuery, LogLine
from contracts.table import check_table
from flows.executor import Progress, map_shards, no_progress
from flows.fingerprint import params_of
from flows.planning import now, reopen_query_log
from flows.resources import Resources
from flows.settings import Settings
from loading.query_log import QueryLog, embed_queries
from models.embedder import open_embedder
from stages.pipeline import LOADED, RUNS_ONCE, check_wiring, find_stage
from stages.stage import Stage

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

    def __post_init__(self) -> None:
        self._resources = Resources(self.store, self.settings, self.plan.snapshot_id)

    def execute(self, step: Step = plain_step) -> Verdict:
        """Does all that the plan asks for and that is not committed yet, and reads the verdict.

        Raises:
            RunHeldError: another process is at it.
            DartflowError: what stopped the run; it is noted with the run.
        """
        check_wiring()
        with hold(self.store, self.plan.run_id) as self._lease:
            clear_failure(self.store, self.plan.run_id)
            try:
                borrowed = [entry for entry in self.plan.stages if entry.borrowed_from is not None]
                if borrowed:
                    step("borrow", lambda: self._borrow(borrowed))
                for entry in self.plan.stages:
                    self._keep_error_budget(entry)
                    if entry.borrowed_from is None and self._missing(entry):
                        step(entry.stage, lambda entry=entry: self._run_stage(entry))  # type: ignore[misc]
            except RunHeldError:
                raise  # the run is another process's now: no note of ours belongs into it
            except DartflowError as error:
                record_failure(self.store, self.plan.run_id, error)
                raise
        return verdict(self.store, self.plan)

    def _keep_error_budget(self, entry: StagePlan) -> None:
        """Stops a run that is known to have failed before its first costly stage, once its dead letters are kept."""
        if entry.stage != "log_lines" and self.plan.dead_letters > self.plan.dead_letters_allowed:
            raise StageError(
                f"run {self.plan.run_id}", "has more dead letters than its error budget", got=self.plan.dead_letters,
                want=f"at most {self.plan.dead_letters_allowed} of {self.plan.log_lines} lines",
                next_step="Correct the log, or raise run.dead_letter_share.",
            )  # fmt: skip

    def _run_stage(self, entry: StagePlan) -> None:
        """Computes and commits the parts of one stage that are not there yet."""
        missing = self._missing(entry)
        self.progress(entry.stage, entry.parts - len(missing), entry.parts)
        work = self._loader(entry) if entry.stage in LOADED else self._runner(entry)
        already = entry.parts - len(missing)

        def report(done: int) -> None:
            self._lease.check()
            self.progress(entry.stage, already + done, entry.parts)

        map_shards(work, missing, self.settings.executor, report)

    def _missing(self, entry: StagePlan) -> list[int]:
        found = manifests(self.store, self.plan, entry)
        return [part for part, manifest in enumerate(found) if manifest is None]

    def _borrow(self, entries: list[StagePlan]) -> None:
        """Verifies and takes over every artifact of the parent that the plan borrows, before anything is computed."""
        for entry in entries:
            parent = load_plan(self.store, str(entry.borrowed_from))
            source = stage_entry(parent, entry.stage)
            for part in range(entry.parts):
                manifest = read_manifest(self.store, parent.run_id, source.number, entry.stage, part)
                if manifest is None:
                    raise MissingArtifactError(
                        f"run {parent.run_id}", "has no artifact to borrow", got=f"{entry.stage}, part {part}",
                        next_step=f"Rerun from {entry.stage}.",
                    )  # fmt: skip
                borrow(self.store, manifest, run_id=self.plan.run_id, number=entry.number)
                self.progress(entry.stage, part + 1, entry.parts)
            if entry.stage == "log_lines":
                self._take_dead_letters(parent)

    def _take_dead_letters(self, parent: RunPlan) -> None:
        """Borrows the dead letters of the log; they now belong to this run."""
        letters = read_dead_letters(self.store, parent.run_id)
        if len(letters) != self.plan.dead_letters:
            raise CorruptArtifactError(
                f"runs/{parent.run_id}/dead_letters", "letters are missing", got=len(letters),
                want=self.plan.dead_letters, next_step="Rerun from log_lines.",
            )  # fmt: skip
        self._write_dead_letters(letters)

    def _write_dead_letters(self, letters: list[DeadLetter]) -> None:
        mine = [letter.model_copy(update={"run_id": self.plan.run_id}) for letter in letters]
        write_dead_letters(self.store, self.plan.run_id, "log_lines", mine)

    def _loader(self, entry: StagePlan) -> Callable[[int], None]:
        """The work that loads and commits one part of `log_lines` or `queries`."""
        return self._load_lines(entry) if entry.stage == "log_lines" else self._load_queries(entry)

    def _load_lines(self, entry: StagePlan) -> Callable[[int], None]:
        def load(part: int) -> None:
            started = time.perf_counter()
            self._write_dead_letters(self._log.dead_letters)
            check_table(self._log.lines, LogLine, entry.stage)
            self._commit(entry, part, self._log.lines, None, started)

        return load

    def _load_queries(self, entry: StagePlan) -> Callable[[int], None]:
        log, embedder, size = self._log, open_embedder(self.settings.embedder), self.settings.run.shard_size

        def load(part: int) -> None:
            started = time.perf_counter()
            table = embed_queries(log.queries.slice(part * size, size), log.embeddings(part * size, size), embedder)
            check_table(table, DistinctQuery, entry.stage)
            self._commit(entry, part, table, None, started)

        return load

    @cached_property
    def _log(self) -> QueryLog:
        """The query log, read once a session."""
        return reopen_query_log(self.plan, self.settings, load_snapshot(self.store, self.plan.snapshot_id))

    def _runner(self, entry: StagePlan) -> Callable[[int], None]:
        """The work that computes and commits one part of a stage."""
        stage = find_stage(entry.stage)
        needs = self._resources.of(stage)  # opened here, not by several shards at once
        return lambda part: self._run_part(entry, stage, needs, part)

    def _run_part(self, entry: StagePlan, stage: Stage, needs: Mapping[str, object], part: int) -> None:
        started = time.perf_counter()
        parents = {name: self._parents(name, None if stage.name in RUNS_ONCE else part) for name in stage.reads}
        inputs = {name: self._tables(found) for name, found in parents.items()}
        try:
            output = stage.checked_run(inputs, needs, params_of(self.settings, stage))
        except DartflowError:
            raise
        except Exception as error:
            raise StageError(
                f"stage {stage.name}, shard {part}", "stopped", got=f"{type(error).__name__}: {error}",
                next_step=f"See the runbook; after the fix, `dartflow rerun {self.plan.run_id}`.",
            ) from error  # fmt: skip
        lineage = {name: [manifest.logical_digest for manifest in found] for name, found in parents.items()}
        self._commit(entry, part, output.table, output.account, started, lineage)

    def _parents(self, name: str, part: int | None) -> list[Manifest]:
        """The manifests of one read table: this part's, or all of them (None) for a step that runs once."""
        entry = stage_entry(self.plan, name)
        wanted = [0 if name in RUNS_ONCE else part] if part is not None else list(range(entry.parts))
        found = []
        for number in wanted:
            manifest = read_manifest(self.store, self.plan.run_id, entry.number, name, number)
            if manifest is None:
                raise CheckpointError(
                    f"run {self.plan.run_id}", "misses an artifact that it needs", got=f"{name}, part {number}",
                    next_step=f"Run `dartflow resume {self.plan.run_id}`.",
                )  # fmt: skip
            found.append(manifest)
        return found

    def _tables(self, found: list[Manifest]) -> pa.Table:
        return pa.concat_tables([read_table(self.store, manifest) for manifest in found])

    def _commit(
        self,
        entry: StagePlan,
        part: int,
        table: pa.Table,
        account: Account | None,
        started: float,
        lineage: dict[str, list[str]] | None = None,
    ) -> None:
        commit(
            self.store,
            table,
            run_id=self.plan.run_id,
            number=entry.number,
            stage=entry.stage,
            shard=part,
            key_parts={**entry.inputs, "part": part, "parents": lineage or {}},
            account=account,
            started_at=now(),
            seconds=round(time.perf_counter() - started, 6),
        )
