"""Stage: one named step of the pipeline with its contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from contracts.columns import IntArray
from contracts.errors import ContractError
from contracts.manifest import Account
from contracts.params import Params
from contracts.table import Row, check_table


@dataclass(frozen=True)
class StageOutput:
    """What a stage gives back: its table, where its candidates came from and went, and how its searches ended.

    `calls` counts outcomes (`ok`, `no_match`) by service (`dense_search`, `keyword_search` ...), `graded_by` the
    passages by who graded them.
    """

    table: pa.Table
    account: Account
    calls: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    graded_by: Mapping[str, int] = field(default_factory=dict)


def search_outcomes(lengths: IntArray) -> dict[str, int]:
    """How searches ended, from the (searches,) lengths of their result lists."""
    found = int(np.count_nonzero(lengths))
    return {name: count for name, count in (("ok", found), ("no_match", len(lengths) - found)) if count}


@dataclass(frozen=True)
class SuccessCheck:
    """A sentence about a stage's output that must hold before it is committed.

    `problem` takes the input tables by name and the output, and gives None or what is wrong.
    """

    sentence: str
    problem: Callable[[Mapping[str, pa.Table], pa.Table], str | None]


def _other_queries(inputs: Mapping[str, pa.Table], output: pa.Table) -> str | None:
    for name, table in inputs.items():
        if "query_id" in table.column_names and not table.column("query_id").equals(output.column("query_id")):
            return f"the query ids differ from those of {name}"
    return None


SAME_QUERIES = SuccessCheck("the same queries in the same order as every input", _other_queries)


@dataclass(frozen=True)
class Stage:
    """One step: a pure function from tables to a table, and everything an operator asks about it.

    Attributes:
        name: unique; also the name of the table it writes and of its settings.
        summary: one sentence.
        owner: who answers for it.
        reads: tables it takes, earlier stages or `queries`, and of each the columns: `candidates.chunk_id` is one
            field of a list of structs, `candidates` all of them. A stage is given no more than these from a store.
        writes: the row model of its table.
        params: its settings class.
        needs: what is handed to it from outside (`corpus`, `keyword_search`, `cross_encoder`, `plan`).
        run: called with every read table, every need and `params` as keyword arguments.
        success: checks beyond the contract of the table.
        on_partial_failure: the rule for a shard or query that fails.
        known_failure: one failure that has been seen, and how it shows.
        roll_back: how to undo the stage's effect.
        shared: a stage that runs once over all queries before the shards; its table is read too.
    """

    name: str
    summary: str
    owner: str
    reads: Mapping[str, tuple[str, ...]]
    writes: type[Row]
    params: type[Params]
    run: Callable[..., StageOutput]
    on_partial_failure: str
    known_failure: str
    roll_back: str
    needs: tuple[str, ...] = ()
    success: tuple[SuccessCheck, ...] = field(default=(SAME_QUERIES,))
    shared: Stage | None = None

    def checked_run(
        self, inputs: Mapping[str, pa.Table], resources: Mapping[str, object], params: Params
    ) -> StageOutput:
        """Runs the stage and holds its output against the contract.

        Raises:
            ContractError: the output breaks its row model, a success check or the account of candidates.
        """
        output = self.run(**inputs, **{need: resources[need] for need in self.needs}, params=params)
        check_table(output.table, self.writes, self.name)
        for check in self.success:
            problem = check.problem(inputs, output.table)
            if problem is not None:
                raise ContractError(stage=self.name, column="query_id", row=None, value=problem, want=check.sentence)
        if not output.account.balanced:
            raise ContractError(
                stage=self.name,
                column="candidates",
                row=None,
                value=output.account.model_dump(),
                want="candidates in + added = out + removed",
            )
        return output
