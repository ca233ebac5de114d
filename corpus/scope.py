"""Scope: what a query may see, and how the queries of a table share few distinct scopes."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from contracts.columns import IntArray


@dataclass(frozen=True)
class Scope:
    """Access groups and metadata equalities of a query, both sorted; equal scopes see the same chunks."""

    groups: tuple[str, ...] = ()
    filters: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Scopes:
    """The distinct scopes of a table of queries.

    Attributes:
        distinct: each scope once, sorted.
        codes: (queries,) int64, the place of each query's scope in `distinct`.
    """

    distinct: tuple[Scope, ...]
    codes: IntArray

    @classmethod
    def of(cls, queries: pa.Table) -> Scopes:
        """Reads the columns `groups` and `filters` of a table of distinct queries."""
        pairs = zip(queries.column("groups").to_pylist(), queries.column("filters").to_pylist(), strict=True)
        keys = [(tuple(groups), tuple((one["key"], one["value"]) for one in filters)) for groups, filters in pairs]
        distinct = sorted(set(keys), key=json.dumps)
        place = {key: number for number, key in enumerate(distinct)}
        return cls(tuple(Scope(*key) for key in distinct), np.array([place[key] for key in keys], dtype=np.int64))

    @classmethod
    def single(cls, scope: Scope, queries: int) -> Scopes:
        """All of `queries` queries under one scope."""
        return cls((scope,), np.zeros(queries, dtype=np.int64))

    def take(self, rows: IntArray) -> Scopes:
        """The scopes of some of the queries."""
        return Scopes(self.distinct, self.codes[rows])
