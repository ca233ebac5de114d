"""What a run will take, told before it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StageEstimate(_Result):
    """What one stage of a run will take.

    `thread_seconds` are those of all shards together, from reading what they need to having committed their
    tables; `status` counts without the commit. `wall_seconds` are with as many shards side by side as there
    are workers. `pairs` are what it will ask the cross-encoder for, `kept_pairs` those whose score is kept.
    """

    stage: str
    shards: int
    thread_seconds: float
    wall_seconds: float
    disk_bytes: int
    pairs: int = 0
    kept_pairs: int = 0


class ModelPairs(_Result):
    """The pairs of query and passage that the cross-encoder will be asked for.

    `seconds_a_pair` is None where none is to be read; the model reads several pairs at once, so that it is
    not what a single pair takes.
    """

    cross_encoder: str
    pairs: int
    kept: int
    to_read: int
    seconds_a_pair: float | None


class ContextTokens(_Result):
    """What a model that reads the contexts has to read, in tokens as the stage context counts them."""

    queries: int
    tokens_a_query: float
    tokens: int


class CalibrationFacts(_Result):
    """What was run and timed: distinct queries, the shards that they made, and how long all of it took."""

    queries: int
    shards: int
    pairs_read: int
    seconds: float


class Estimate(_Result):
    """What a run of a query log over the current snapshot will take.

    `reading_seconds` are of the log, before the first stage (log_lines reads it again, which its own seconds
    hold); `opening_seconds` of all that a process does once: it plans, checks and opens the corpus, loads
    kernels and models. `wall_seconds` are the sum of these and of the stages, one after the other.
    `disk_bytes` are what the run will have in the store, its records and new pair scores with it.
    """

    query_log: str
    snapshot_id: str
    log_lines: int
    distinct_queries: int
    dead_letters: int
    shards: int
    workers: int
    reading_seconds: float
    opening_seconds: float
    stages: list[StageEstimate]
    wall_seconds: float
    disk_bytes: int
    model_pairs: ModelPairs
    context_tokens: ContextTokens
    calibration: CalibrationFacts
    notes: list[str]
