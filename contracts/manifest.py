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


class DeadLetterFile(_Record):
    """Where the dead letters of one artifact lie; `log_lines` is how many lines of the log they take out."""

    file: str
    sha256: str
    letters: Annotated[int, Ge(1)]
    log_lines: Annotated[int, Ge(1)]


class Manifest(_Record):
    """The commit record of one artifact; the artifact exists when, and only when, this file does.

    `key` is derived from `key_parts`: everything that can change the result, and nothing else.
    `logical_digest` is of the Arrow data, `sha256` of the Parquet file. `borrowed_from` names the
    run that computed the file when it is not this one. `plan` is the digest of the run's plan: a
    manifest of an earlier run of the same name is none of this run. `left_out` counts the queries
    that an earlier stage took out, `dead_letters` says what this one took out. `calls` counts, for
    each service that was called or searched, how the calls ended; `tokens` and `cost` are what the calls
    were charged for, the cost by the prices in the settings. `graded_by` counts the passages by who graded
    them, where a grader took part.
    """

    run_id: str
    plan: str
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
    left_out: Annotated[int, Ge(0)] = 0
    dead_letters: DeadLetterFile | None = None
    calls: dict[str, dict[str, int]] = {}
    tokens: Annotated[int, Ge(0)] = 0
    cost: Annotated[float, Ge(0)] = 0.0
    graded_by: dict[str, int] = {}
    borrowed_from: str | None
    started_at: str
    seconds: float


class StagePlan(_Record):
    """One stage of a run's plan: its number in the pipeline, its artifacts, and where they come from.

    A run that replays dead letters has a second entry for the stages that the replayed queries go
    through. `inputs` are the parts of the keys that are known before anything is computed; `rows` is
    how many queries (of `log_lines`, lines) all its parts are planned for, None where only the stage
    itself can know.
    """

    number: int
    stage: str
    first_part: int = 0
    parts: int
    rows: int | None
    inputs: dict[str, object]
    borrowed_from: str | None
    because: str

    @property
    def shards(self) -> range:
        """The numbers of its parts."""
        return range(self.first_part, self.first_part + self.parts)


class ReplayedQuery(_Record):
    """A query that a dead letter took out of shard `shard`, and the lines of the log that wait for it."""

    query_id: str
    shard: int
    log_lines: int


class Replay(_Record):
    """A shard of queries that were dead letters of `from_stage`: they go on from there, for the `attempt`-th time."""

    shard: int
    from_stage: str
    attempt: int
    queries: list[ReplayedQuery]


class RunPlan(_Record):
    """run.json: the whole planned work, written down before the first stage runs.

    `dead_letters` are those of the log itself; `dead_letters_allowed` is the error budget, in lines of the log.
    """

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
    shard_size: int
    allow_emptied_stages: bool
    access_control: bool
    stages: list[StagePlan]
    replays: list[Replay] = []
    settings: dict[str, object]
    packages: dict[str, str]
    lock_sha256: str
    parent_run_id: str | None


class StageStatus(_Record):
    """A row of `dartflow status`: queries in and out, those taken out here, and shards computed and borrowed."""

    stage: str
    rows_in: int
    rows_out: int
    dead_letters: int
    computed: int
    borrowed: int
    missing: int
    seconds: float


class Verdict(_Record):
    """What is true of a run, read from its plan, manifests and lease.

    `because` says why it is not complete. `lost_log_lines` are the lines of the log that its dead letters
    take out: one each, or all the lines of a query. `notes` say what is no fault but worth a look.
    """

    run_id: str
    verdict: VerdictName
    because: str | None
    stages: list[StageStatus]
    log_lines: int
    distinct_queries: int
    dead_letters: int
    lost_log_lines: int
    notes: list[str]
    snapshot_id: str
    access_control: bool
    results: str


class DeadLetter(_Record):
    """A log line or query taken out of the run, with the original row, to be replayed later.

    `run_id` and `shard` say where it happened; `log_lines` is how many lines of the log wait for it.
    """

    run_id: str
    stage: str
    shard: int
    reason: str
    attempt: int
    line_number: int | None
    query_id: str | None
    log_lines: int
    original: str
