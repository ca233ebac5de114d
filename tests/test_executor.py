"""Shards run side by side, and nothing of a result depends on it."""

from __future__ import annotations

import threading
import time

import faiss
import pytest
from threadpoolctl import threadpool_info

from flows.executor import map_shards
from flows.settings import ExecutorParams
from tests.example import QUERIES, manifests_of


def test_every_shard_runs_once_and_is_reported():
    seen, reported = [], []
    map_shards(seen.append, range(20), ExecutorParams(workers=4), reported.append)
    assert sorted(seen) == list(range(20))
    assert reported == list(range(1, 21))


def test_no_shards_are_no_work():
    map_shards(lambda _: 1 / 0, [], ExecutorParams(workers=2), lambda _: 1 / 0)


def test_the_first_error_drops_what_has_not_started_and_keeps_what_has():
    started, finished, gate = [], [], threading.Event()

    def work(shard: int) -> None:
        started.append(shard)
        if shard == 1:
            gate.set()
            raise KeyError(shard)
        gate.wait(10)
        time.sleep(0.05)
        finished.append(shard)

    with pytest.raises(KeyError):
        map_shards(work, range(50), ExecutorParams(workers=2), lambda _: None)
    assert len(started) < 10
    assert sorted([*finished, 1]) == sorted(started)


def test_workers_keep_blas_and_faiss_to_one_thread():
    found = []

    def work(_: int) -> None:
        blas = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
        found.append((faiss.omp_get_max_threads(), set(blas)))

    map_shards(work, range(4), ExecutorParams(workers=2), lambda _: None)
    assert all(threads == 1 and blas == {1} for threads, blas in found)


def test_the_number_of_workers_changes_no_byte(dartflow):
    words = ("run", QUERIES, "--without-prefect", "--set", "run.shard_size=8", "--set", "cross_encoder.provider=none")
    for workers in (1, 4):
        assert dartflow(*words, "--run-id", f"by-{workers}", "--set", f"executor.workers={workers}")[0] == 3
    for stage in ("queries", "oversample", "greedy_selection", "rrf_merge", "crag_grading", "context"):
        alone, together = (manifests_of(dartflow.store, f"by-{workers}", stage) for workers in (1, 4))
        assert [m.sha256 for m in alone] == [m.sha256 for m in together]
        assert [m.key for m in alone] == [m.key for m in together]
        assert len(alone) == 12
