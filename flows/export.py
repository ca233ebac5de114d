"""Export: the results of a run as JSON lines, any ranking of it as a TREC run file, or one row of one stage."""

from __future__ import annotations

import json
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import pyarrow as pa
import pyarrow.compute as pc

from checkpoints.commit import read_table
from checkpoints.run import stage_entries, stage_manifests
from checkpoints.store import Store
from contracts.errors import ConfigurationError, MissingArtifactError
from contracts.manifest import RunPlan
from contracts.table import schema
from stages.pipeline import LOADED, numbered_stages


@dataclass(frozen=True)
class LoggedIds:
    """The ids that the log gives its lines; dead letters have none here.

    Attributes:
        of_query: query id to the ids of all its lines, in the order of the log.
        query_of: id to the query that answers it: a log may repeat an id, then its first line counts.
        repeated: lines whose id an earlier line has already given to another query.
    """

    of_query: Mapping[str, list[str]]
    query_of: Mapping[str, str]
    repeated: int

    def answered_by(self, query_id: str) -> list[str]:
        """The ids that a query answers, each once, in the order of the log."""
        return [one for one in dict.fromkeys(self.of_query.get(query_id, ())) if self.query_of[one] == query_id]


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Attributes:
        lines: lines of the file.
        repeated_ids: see `LoggedIds.repeated`. TREC leaves these lines out, since its ids must name one query;
            JSON lines have them, under each of their queries.
    """

    lines: int
    repeated_ids: int


def stage_tables(store: Store, plan: RunPlan, stage: str) -> Iterator[pa.Table]:
    """The tables of a stage, shard by shard, each verified.

    Raises:
        ConfigurationError: no such stage.
        MissingArtifactError: a shard that was never committed.
    """
    for manifest in stage_manifests(store, plan, stage):
        yield read_table(store, manifest)


def read_logged_ids(store: Store, plan: RunPlan) -> LoggedIds:
    """The ids of the log's lines and the queries that these became."""
    of_query: dict[str, list[str]] = defaultdict(list)
    query_of: dict[str, str] = {}
    repeated = 0
    for table in stage_tables(store, plan, "log_lines"):
        for line in table.select(["logged_id", "query_id"]).to_pylist():
            logged_id, query_id = line["logged_id"], line["query_id"]
            if query_id is not None:
                of_query[query_id].append(logged_id)
                repeated += query_of.setdefault(logged_id, query_id) != query_id
    return LoggedIds(dict(of_query), query_of, repeated)


def repeated_ids(store: Store, plan: RunPlan) -> int:
    """How many lines have an id that an earlier line has given to another query; their ids count for the earlier."""
    return read_logged_ids(store, plan).repeated


def row_of_query(store: Store, plan: RunPlan, stage: str, query_id: str) -> dict[str, Any]:
    """What a stage wrote for one query.

    Args:
        store: of the run.
        plan: of the run.
        stage: any stage with a row a query. `log_lines` has a row a line: a query's first, or the line of an id.
        query_id: a query id, or the id of a log line; an id that the log repeats is that of its first line.

    Raises:
        ConfigurationError: no such stage, or one without rows of queries.
        MissingArtifactError: no such query, or a shard that was never committed.
    """
    stage_entries(plan, stage)
    ids = read_logged_ids(store, plan)
    column, wanted = "query_id", query_id
    if query_id not in ids.of_query:
        if stage == "log_lines":
            column = "logged_id"
        else:
            wanted = ids.query_of.get(query_id, query_id)
    for table in stage_tables(store, plan, stage):
        if column not in table.column_names:
            raise ConfigurationError(
                f"stage {stage}", "has no rows of queries", want=f"one of {', '.join(_stages_with_queries())}",
                next_step=f"`dartflow export {plan.run_id} --stage {stage} OUT` writes its rows.",
            )  # fmt: skip
        found = table.filter(pc.equal(table[column], wanted))
        if found.num_rows:
            row: dict[str, Any] = found.slice(0, 1).to_pylist()[0]
            return row
    raise MissingArtifactError(
        f"run {plan.run_id}, stage {stage}", "has no such query", got=query_id,
        next_step=f"`dartflow export {plan.run_id} OUT` lists all queries, "
        f"`dartflow inspect {plan.run_id} log_lines ID` tells why a line is none.",
    )  # fmt: skip


def write_export(store: Store, plan: RunPlan, stage: str, format_: Literal["jsonl", "trec"], out: Path) -> Exported:
    """Writes a stage of a run to a file, which shows whole or not at all.

    Args:
        store: of the run.
        plan: of the run.
        stage: for `trec` a ranking, for `jsonl` any stage.
        format_: one JSON object a row, or a TREC run.
        out: the file, replaced if it is there; a pipe or device is written as it comes.

    Raises:
        ConfigurationError: a file that cannot be written, no such stage, or a stage or an id that the format
            cannot hold.
        MissingArtifactError: a shard that was never committed.
    """
    ids = read_logged_ids(store, plan)
    lines = trec_lines(store, plan, stage, ids) if format_ == "trec" else jsonl_lines(store, plan, stage, ids)
    written = 0
    with whole_file(out) as file:
        for line in lines:
            file.write(line)
            written += 1
    return Exported(written, ids.repeated)


def jsonl_lines(store: Store, plan: RunPlan, stage: str, ids: LoggedIds) -> Iterator[str]:
    """One JSON object a row: of a query with the ids of all its log lines, of anything else as it stands."""
    for table in stage_tables(store, plan, stage):
        of_queries = "query_id" in table.column_names
        for row in table.to_pylist():
            named = {"logged_ids": ids.of_query.get(row["query_id"], []), **row} if of_queries else row
            yield json.dumps(named, ensure_ascii=False) + "\n"


def trec_lines(store: Store, plan: RunPlan, stage: str, ids: LoggedIds) -> Iterator[str]:
    """A TREC run: one line a log line's id and passage; ids that the log repeats stand once, for their first line.

    The score is 1 / rank: it falls strictly, so that every tool keeps dartflow's order.

    Raises:
        ConfigurationError: a stage without a ranking of queries, or an id with white space.
    """
    stage_entries(plan, stage)
    rankings = _ranking_stages()
    if stage not in rankings:
        raise ConfigurationError(
            f"export of {stage}", "is no ranking of queries", want=f"one of {', '.join(rankings)}",
            next_step="Choose another --stage, or --format jsonl.",
        )  # fmt: skip
    for table in stage_tables(store, plan, stage):
        for row in table.select(["query_id", "candidates"]).to_pylist():
            for logged_id in ids.answered_by(row["query_id"]):
                yield from _trec_rows(logged_id, row["candidates"], plan.run_id)


def _trec_rows(logged_id: str, candidates: list[dict[str, Any]], run_id: str) -> Iterator[str]:
    for candidate in candidates:
        rank, chunk_id = candidate["rank"], _word(candidate["chunk_id"], "chunk")
        yield f"{_word(logged_id, 'log line')} Q0 {chunk_id} {rank} {1 / rank:.9f} {run_id}\n"


def _word(name: str, kind: str) -> str:
    """An id as a TREC column; these are split at white space, and with another sign two ids could become one."""
    if name.split() != [name]:
        raise ConfigurationError(
            f"export of {kind} {name!r}", "TREC cannot hold an id with white space", want="--format jsonl",
            next_step="Choose --format jsonl, or correct the id.",
        )  # fmt: skip
    return name


def _ranking_stages() -> list[str]:
    found = []
    for _, stage in numbered_stages():
        columns = schema(stage.writes)
        if {"query_id", "candidates"} <= set(columns.names):
            one = columns.field("candidates").type.value_type
            if {"rank", "chunk_id"} <= {one.field(place).name for place in range(one.num_fields)}:
                found.append(stage.name)
    return found


def _stages_with_queries() -> list[str]:
    return [*LOADED, *(stage.name for _, stage in numbered_stages() if "query_id" in stage.writes.model_fields)]


@contextmanager
def whole_file(out: Path) -> Iterator[TextIO]:
    """A file to write that takes the place of `out` at the end, and leaves nothing when the block fails."""
    try:
        if out.exists() and not out.is_file() and not out.is_dir():
            # A pipe or /dev/stdout: there is nothing to put in its place.
            with out.open("w", encoding="utf-8") as file:
                yield file
            return
        target = out.resolve()  # a link stays a link
        unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}.unfinished")
        try:
            with unfinished.open("x", encoding="utf-8") as file:
                yield file
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(
            str(out), "cannot be written", got=error.strerror, want="a file in a folder that is there and writable",
            next_step="Check the path and the space on the disk.",
        ) from error  # fmt: skip
