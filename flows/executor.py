"""Executor: where shards run: threads of this process, since the kernels release the interpreter lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

import faiss
import stamina
from threadpoolctl import threadpool_limits

from contracts.errors import TransientError
from flows.settings import ExecutorParams

Given = TypeVar("Given")
Result = TypeVar("Result")

# Threads that wait for a disk to sync or for a bucket to answer: a store takes many writes in the time of one.
_WAITING = 16


def worker_count(params: ExecutorParams) -> int:
    """How many shards run side by side: as many as is set, else one a processor that this process may use."""
    return params.workers or len(os.sched_getaffinity(0))


def map_shards(
    work: Callable[[int], None], shards: Sequence[int], params: ExecutorParams, report: Callable[[int], None]
) -> None:
    """Runs `work` for each shard, as many side by side as there are workers; see `_side_by_side`.

    Args:
        work: takes a shard number.
        shards: the numbers.
        params: how many workers.
        report: told how many shards are done, after each; what it raises counts as an error of the shard.
    """
    # Shards are the parallel unit: threads of BLAS and FAISS inside them would only fight for the same cores.
    # FAISS keeps its number by thread, so that each worker has to say it.
    with (
        threadpool_limits(1, user_api="blas"),
        ThreadPoolExecutor(worker_count(params), "shard", initializer=faiss.omp_set_num_threads, initargs=(1,)) as pool,
    ):
        _side_by_side(pool, work, shards, report)


def map_artifacts(work: Callable[[Given], object], artifacts: Sequence[Given], report: Callable[[int], None]) -> None:
    """Runs `work` for each artifact, which waits for the store and computes next to nothing; see `_side_by_side`.

    Args:
        work: takes an artifact.
        artifacts: what it takes.
        report: told how many are done, after each; what it raises counts as an error of the artifact.
    """
    with ThreadPoolExecutor(_WAITING, "artifact") as pool:
        _side_by_side(pool, work, artifacts, report)


def _side_by_side(
    pool: ThreadPoolExecutor, work: Callable[[Given], object], given: Sequence[Given], report: Callable[[int], None]
) -> None:
    """Runs work in the threads of a pool.

    At the first error what has not started is dropped; it is raised after all that had started is done, so
    that what it commits is kept. Results do not depend on the number of threads.
    """
    futures = [pool.submit(work, one) for one in given]
    try:
        for done, future in enumerate(as_completed(futures), start=1):
            future.result()
            report(done)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def retrying(
    work: Callable[[Given], Result], params: ExecutorParams, before_each: Callable[[], None]
) -> Callable[[Given], Result]:
    """Work that is done again when a transient fault stopped it, after pauses that double, with jitter.

    Args:
        work: what is tried.
        params: how often, and how long the first pause is.
        before_each: called before every try; what it raises ends the trying.
    """

    def tried(given: Given) -> Result:
        for attempt in stamina.retry_context(
            on=TransientError,
            attempts=1 + params.retries,
            timeout=None,
            wait_initial=params.retry_seconds,
            wait_jitter=params.retry_seconds,
            wait_max=60 * params.retry_seconds,
        ):
            with attempt:
                before_each()
                return work(given)
        raise AssertionError  # never: the last attempt returns or raises

    return tried
