"""Quarantine: finds the queries whose data make a stage fail, so that the others can go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import pyarrow as pa

from checkpoints.run import replay_of
from contracts.errors import ContractError, DartflowError, ModelError, RefusedError, StageError, TransientError
from contracts.manifest import DeadLetter, RunPlan

T = TypeVar("T")

_LONGEST_REASON = 500

_WITHOUT = {"embedding", "query_id", "occurrences"}


def is_fault_of_data(error: BaseException) -> bool:
    """Whether other data might not have met this error.

    A broken contract, an answer that a model cannot give, and what code raises on its own are. A service
    that is down or refuses, a store, a setting, memory or a disk are not: they never quarantine a query.
    """
    if isinstance(error, DartflowError):
        unusable = isinstance(error, ModelError) and not isinstance(error, TransientError | RefusedError)
        return unusable or isinstance(error, ContractError)
    return isinstance(error, Exception) and not isinstance(error, MemoryError | OSError | ImportError)


def without_faults(
    run: Callable[[Sequence[str]], T],
    query_ids: Sequence[str],
    *,
    where: str,
    room: Callable[[], int] | None,
    next_step: str,
) -> tuple[T, dict[str, Exception]]:
    """Runs a shard; where queries make it fail by their data, runs it without these and gives them back.

    Args:
        run: the stage for some of the queries.
        query_ids: all of the shard.
        where: names stage and shard in errors.
        room: how many queries may still be taken out; None where a shard stands or falls as a whole.
        next_step: what to do after the fix.

    Returns:
        What `run` gave for the queries without a fault, and the error of each of the others.

    Raises:
        StageError: the shard fails as a whole, or more queries fail than there is room for.
        DartflowError: a fault that is none of the data.
    """
    try:
        return run(query_ids), {}
    except Exception as error:  # noqa: BLE001 - whatever it is, the next lines decide whose fault it is
        fault = error
    if room is None or not query_ids or not is_fault_of_data(fault):
        raise stopped_by(fault, where, next_step)
    most = max(0, room())
    faults = faulty_queries(run, query_ids, fault, most=most)
    if len(faults) > most:
        first, reason = next(iter(faults.items()))
        raise StageError(
            where, "more queries fail than the error budget allows",
            got=f"{len(faults)} so far, the first {first}: {type(reason).__name__}: {reason}", want=f"at most {most}",
            next_step=next_step,
        ) from fault  # fmt: skip
    try:
        return run([query_id for query_id in query_ids if query_id not in faults]), faults
    except Exception as error:  # noqa: BLE001 - likewise
        fault = error
    raise stopped_by(fault, where, next_step)


def stopped_by(error: Exception, where: str, next_step: str) -> DartflowError:
    """The error that stops a run: dartflow's own as it is, any other as a StageError."""
    if isinstance(error, DartflowError):
        return error
    stopped = StageError(
        where, "stopped", got=f"{type(error).__name__}: {error}", next_step=f"See the runbook. {next_step}"
    )
    stopped.__cause__ = error
    return stopped


def faulty_queries(
    attempt: Callable[[Sequence[str]], object], query_ids: Sequence[str], fault: Exception, *, most: int
) -> dict[str, Exception]:
    """The queries that fail by themselves, found by halving: about 2 log2(n) attempts for each.

    Args:
        attempt: runs the stage for some of the queries.
        query_ids: all of a shard; together they have failed.
        fault: how they failed together.
        most: the search ends when more than so many are found.

    Returns:
        Query id to its error; empty when queries fail only together.
    """
    if len(query_ids) == 1:
        return {query_ids[0]: fault}
    found: dict[str, Exception] = {}
    middle = len(query_ids) // 2
    for half in (query_ids[:middle], query_ids[middle:]):
        if half and len(found) <= most:
            try:
                attempt(half)
            except Exception as error:
                if not is_fault_of_data(error):
                    raise
                found |= faulty_queries(attempt, half, error, most=most - len(found))
    return found


def _in_words(fault: Exception) -> str:
    """The error in one line of text that can be written down, whatever it quotes."""
    text = f"{type(fault).__name__}: {fault}"
    return " ".join(text.encode("utf-8", "backslashreplace").decode("utf-8").split())[:_LONGEST_REASON]


def letters_for(
    plan: RunPlan,
    stage: str,
    part: int,
    rows_of: Callable[[Sequence[str]], pa.Table],
    faults: Mapping[str, Exception],
) -> list[DeadLetter]:
    """Dead letters of queries, in the order of `faults`, which is that of the shard, each with its row as JSON.

    Args:
        plan: of the run.
        stage: that took them out.
        part: of the stage.
        rows_of: gives the rows of some queries in their order; asked only where there are any.
        faults: by query id.
    """
    if not faults:
        return []
    replay = replay_of(plan, part)
    return [
        DeadLetter(
            run_id=plan.run_id,
            stage=stage,
            shard=part,
            reason=_in_words(faults[row["query_id"]]),
            attempt=1 if replay is None else replay.attempt,
            line_number=None,
            query_id=row["query_id"],
            log_lines=row["occurrences"],
            original=json.dumps({name: row[name] for name in row if name not in _WITHOUT}, ensure_ascii=False),
        )
        for row in rows_of(list(faults)).to_pylist()
    ]
