"""Log shards: the lines and the distinct queries of a run's query log, as its first two artifacts hold them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from checkpoints.corpora import load_snapshot
from checkpoints.run import replay_of
from checkpoints.store import Store
from contracts.manifest import DeadLetter, RunPlan
from contracts.query import DistinctQuery, LogLine
from contracts.table import check_table
from flows.planning import reopen_query_log
from flows.settings import Settings
from loading.query_log import QueryLog, embed_queries
from models.embedder import Embedder, open_embedder


class LogShards:
    """The query log of a run, read when it is first asked for.

    Args:
        store: of the run.
        plan: of the run; it says which log, and how it is cut.
        settings: how the log is read and its queries are embedded.
    """

    def __init__(self, store: Store, plan: RunPlan, settings: Settings) -> None:
        self._store = store
        self._plan = plan
        self._settings = settings

    def open(self) -> None:
        """Reads the log and loads the embedder, here and not in several shards at once."""
        _ = self._query_ids, self._embedder

    def lines(self) -> tuple[pa.Table, list[DeadLetter]]:
        """The lines with the query that each asks, and the lines that are dead letters."""
        check_table(self._log.lines, LogLine, "log_lines")
        named = {"run_id": self._plan.run_id}
        return self._log.lines, [letter.model_copy(update=named) for letter in self._log.dead_letters]

    def query_ids(self, part: int) -> list[str]:
        """The queries of a shard: a slice of the distinct queries, or those that it replays."""
        replay = replay_of(self._plan, part)
        if replay is not None:
            return [query.query_id for query in replay.queries]
        found: list[str] = self._query_ids.slice(part * self._plan.shard_size, self._plan.shard_size).to_pylist()
        return found

    def rows(self, query_ids: Sequence[str]) -> pa.Table:
        """The rows of some queries in the order given, without embeddings."""
        return self._log.queries.take(self._places(query_ids))

    def embedded(self, query_ids: Sequence[str]) -> pa.Table:
        """The rows of some queries in the order given, with embeddings: as the artifact `queries` has them."""
        vectors = self._log.embeddings(self._places(query_ids).to_numpy())
        table = embed_queries(self.rows(query_ids), vectors, self._embedder)
        check_table(table, DistinctQuery, "queries")
        return table

    def _places(self, query_ids: Sequence[str]) -> pa.Array:
        return pc.index_in(pa.array(query_ids, pa.string()), self._query_ids)

    @cached_property
    def _log(self) -> QueryLog:
        return reopen_query_log(self._plan, self._settings, load_snapshot(self._store, self._plan.snapshot_id))

    @cached_property
    def _query_ids(self) -> pa.Array:
        return self._log.queries.column("query_id").combine_chunks()

    @cached_property
    def _embedder(self) -> Embedder | None:
        return open_embedder(self._settings.embedder)
