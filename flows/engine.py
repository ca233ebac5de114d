"""Engine: carries out a planned run, stage by stage; the same with Prefect and without it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from checkpoints.commit import borrow, commit, read_manifest, read_table
from checkpoints.corpora import load_snapshot
from checkpoints.digests import sha256
from checkpoints.lease import Lease, hold
from checkpoints.run import (
    clear_failure,
    load_plan,
    manifests,
    record_failure,
    stage_entry,
    verdict,
    write_dead_letters,
)
from checkpoints.store import Store
from contracts.errors import CheckpointError, DartflowError, InputError, MissingArtifactError, RunHeldError, StageError
from contracts.manifest import Account, Manifest, RunPlan, StagePlan, Verdict
from contracts.query import DistinctQuery, LogLine
from contracts.table import check_table
from flows.executor import Progress, map_shards, no_progress
from flows.fingerprint import params_of
from flows.planning import now, open_query_log, read_query_log_bytes
from flows.resources import open_resources
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
    _resources: dict[str, Any] = field(default_factory=dict)
    _lease: Lease = field(init=False)

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
                    if entry.borrowed_from is None and self._missing(entry):
                        step(entry.stage, lambda entry=entry: self._run_stage(entry))  # type: ignore[misc]
            except RunHeldError:
                raise  # the run is another process's now: no note of ours belongs into it
            except DartflowError as error:
                record_failure(self.store, self.plan.run_id, error)
                raise
        return verdict(self.store, self.plan)

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
                self._copy_dead_letters(parent.run_id)

    def _copy_dead_letters(self, parent_id: str) -> None:
        path = "dead_letters/log_lines.jsonl"
        self.store.write(f"runs/{self.plan.run_id}/{path}", self.store.read(f"runs/{parent_id}/{path}"))

    def _loader(self, entry: StagePlan) -> Callable[[int], None]:
        """Loads the query log, and gives the work that commits one part of `log_lines` or `queries`."""
        log = self._load_log()
        if entry.stage == "log_lines":
            letters = [letter.model_copy(update={"run_id": self.plan.run_id}) for letter in log.dead_letters]
            write_dead_letters(self.store, self.plan.run_id, "log_lines", letters)
            return lambda part: self._commit(entry, part, log.lines, None, time.perf_counter(), LogLine)
        embedder = open_embedder(self.settings.embedder)
        size = self.settings.run.shard_size

        def load_shard(part: int) -> None:
            started = time.perf_counter()
            table = embed_queries(log.queries.slice(part * size, size), log.embeddings(part * size, size), embedder)
            self._commit(entry, part, table, None, started, DistinctQuery)

        return load_shard

    def _load_log(self) -> QueryLog:
        path = Path(self.plan.query_log)
        got = sha256(read_query_log_bytes(path))
        if got != self.plan.query_log_sha256:
            raise InputError(
                str(path), "the query log has changed since the run was planned", got=f"SHA-256 {got}",
                want=self.plan.query_log_sha256, next_step="Start a new run.",
            )  # fmt: skip
        return open_query_log(path, self.settings, load_snapshot(self.store, self.plan.snapshot_id))

    def _runner(self, entry: StagePlan) -> Callable[[int], None]:
        """The work that computes and commits one part of a stage."""
        if not self._resources:
            self._resources.update(open_resources(self.store, self.settings, self.plan.snapshot_id))
        stage = find_stage(entry.stage)
        return lambda part: self._run_part(entry, stage, part)

    def _run_part(self, entry: StagePlan, stage: Stage, part: int) -> None:
        started = time.perf_counter()
        parents = {name: self._parents(name, None if stage.name in RUNS_ONCE else part) for name in stage.reads}
        inputs = {name: self._tables(found) for name, found in parents.items()}
        try:
            output = stage.checked_run(inputs, self._resources, params_of(self.settings, stage))
        except DartflowError:
            raise
        except Exception as error:
            raise StageError(
                f"stage {stage.name}, shard {part}", "stopped", got=f"{type(error).__name__}: {error}",
                next_step=f"See the runbook; after the fix, `dartflow rerun {self.plan.run_id}`.",
            ) from error  # fmt: skip
        lineage = {name: [manifest.logical_digest for manifest in found] for name, found in parents.items()}
        self._commit(entry, part, output.table, output.account, started, None, lineage)

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
        model: type[DistinctQuery | LogLine] | None,
        lineage: dict[str, list[str]] | None = None,
    ) -> None:
        if model is not None:
            check_table(table, model, entry.stage)
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
