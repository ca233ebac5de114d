"""Commit records: the manifest of an artifact, the plan of a run, and the verdict over it."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import BaseModel, ConfigDict

VerdictName = Literal["running", "complete", "partial", "failed", "interrupted"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Account(_Record):
    """Candidates of one artifact: in + added = out + removed, each with its reason."""

    candidates_in: Annotated[int, Ge(0)]
    added: dict[str, int]
    removed: dict[str, int]
    candidates_out: Annotated[int, Ge(0)]

    @property
    def balanced(self) -> bool:
        """Whether nothing came or went without a reason."""
        return self.candidates_in + sum(self.added.values()) == self.candidates_out + sum(self.removed.values())


class Manifest(_Record):
    """The commit record of one artifact; the artifact exists when, and only when, this file does.

    `key` is derived from `key_parts`: everything that can change the result, and nothing else.
    `logical_digest` is of the Arrow data, `sha256` of the Parquet file. `borrowed_from` names the
    run that computed the file when it is not this one.
    """

    run_id: str
    stage: str
    shard: Annotated[int, Ge(0)]
    file: str
    sha256: str
    bytes: int
    rows: int
    logical_digest: str
    key: str
    key_parts: dict[str, object]
    account: Account | None
    borrowed_from: str | None
    started_at: str
    seconds: float


class StagePlan(_Record):
    """One stage of a run's plan: its number in the pipeline, its artifacts, and where they come from.

    `inputs` are the parts of the keys that are known before anything is computed; `rows` is how many rows
    all parts must have together, None where only the stage itself can know.
    """

    number: int
    stage: str
    parts: int
    rows: int | None
    inputs: dict[str, object]
    borrowed_from: str | None
    because: str


class RunPlan(_Record):
    """run.json: the whole planned work, written down before the first stage runs."""

    run_id: str
    created_at: str
    query_log: str
    query_log_sha256: str
    snapshot_id: str
    log_lines: int
    distinct_queries: int
    dead_letters: int
    dead_letters_allowed: int
    shards: int
    access_control: bool
    stages: list[StagePlan]
    settings: dict[str, object]
    packages: dict[str, str]
    lock_sha256: str
    parent_run_id: str | None


class StageStatus(_Record):
    """A row of `dartflow status`: queries in and out, and shards computed and borrowed."""

    stage: str
    rows_in: int
    rows_out: int
    dead_letters: int
    computed: int
    borrowed: int
    missing: int
    seconds: float


class Verdict(_Record):
    """What is true of a run, read from its plan, manifests, dead letters and lease.

    `because` says why it is not complete.
    """

    run_id: str
    verdict: VerdictName
    because: str | None
    stages: list[StageStatus]
    log_lines: int
    distinct_queries: int
    dead_letters: int
    snapshot_id: str
    access_control: bool
    results: str


class DeadLetter(_Record):
    """A log line or query taken out of the run, with the original row, to be replayed later."""

    run_id: str
    stage: str
    reason: str
    attempt: int
    line_number: int | None
    query_id: str | None
    original: str
