"""PairScores: scores outlive the process, stay with their model, and damage costs a score, never a wrong one."""

from __future__ import annotations

import io
import random
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.digests import sha256
from checkpoints.pair_scores import PairScores
from checkpoints.store import Store


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def floats(*numbers: float) -> np.ndarray:
    return np.array(numbers, dtype=np.float32)


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path))


def the_file(store: Store) -> str:
    (path,) = store.files("pair_scores")
    return path


def test_unknown_pairs_are_nan(store):
    got = PairScores(store, "model").get([key(1), key(2)])
    assert got.dtype == np.float32
    assert np.isnan(got).tolist() == [True, True]
    assert PairScores(store, "model").get([]).shape == (0,)


def test_scores_are_given_back_in_the_order_asked(store):
    scores = PairScores(store, "model")
    scores.put([key(2), key(1)], floats(0.2, -11.25))
    np.testing.assert_array_equal(scores.get([key(1), key(3), key(2), key(1)]), floats(-11.25, np.nan, 0.2, -11.25))


def test_scores_survive_reopening_to_the_last_bit(store):
    numbers = np.random.default_rng(0).normal(size=300).astype(np.float32)
    PairScores(store, "model").put([key(i) for i in range(300)], numbers)
    got = PairScores(Store(store.uri), "model").get([key(i) for i in range(300)])
    assert got.tobytes() == numbers.tobytes()


@given(
    puts=st.lists(
        st.dictionaries(st.binary(min_size=16, max_size=16), st.floats(width=32, allow_nan=False), max_size=5),
        max_size=4,
    )
)
@settings(max_examples=30, deadline=None)
def test_every_score_that_was_put_is_there_before_and_after_reopening(puts, tmp_path_factory):
    store = Store(str(tmp_path_factory.mktemp("pairs")))
    scores = PairScores(store, "model")
    known: dict[bytes, float] = {}
    for pairs in puts:
        fresh = {name: score for name, score in pairs.items() if name not in known}
        scores.put(list(fresh), floats(*fresh.values()))
        known.update(fresh)
    for opened in (scores, PairScores(store, "model")):
        np.testing.assert_array_equal(opened.get(list(known)), floats(*known.values()))


def test_nothing_to_put_writes_nothing(store):
    PairScores(store, "model").put([], floats())
    assert store.files("pair_scores") == []


def test_the_same_scores_are_one_file_whatever_their_order(store):
    scores = PairScores(store, "model")
    scores.put([key(1), key(2)], floats(0.5, 1.5))
    scores.put([key(2), key(1)], floats(1.5, 0.5))
    PairScores(store, "model").put([key(1), key(2)], floats(0.5, 1.5))
    assert the_file(store).endswith(f"{sha256(store.read(the_file(store)))[:32]}.parquet")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("model", "model-2"), ("org", "org/model"), ("org/model", "org-model"), ("Model", "model"), ("a:b", "a/b"),
        ("../../x", "x"), ("", " "), ("é", "è"), ("http://host:80/rerank?model=a", "http://host:80/rerank?model=b"),
        ("m" * 300, "m" * 301),
    ],
)  # fmt: skip
def test_scores_of_another_model_lie_apart(store, one, other):
    PairScores(store, one).put([key(1)], floats(1.0))
    PairScores(store, other).put([key(1)], floats(2.0))
    assert PairScores(store, one).get([key(1)]).tolist() == [1.0]
    assert PairScores(store, other).get([key(1)]).tolist() == [2.0]
    assert len(store.files("pair_scores")) == 2
    assert all(path.count("/") == 2 for path in store.files("pair_scores"))


def test_the_folder_of_a_model_can_be_recognised(store):
    PairScores(store, "cross-encoder/ms-marco MiniLM").put([key(1)], floats(1.0))
    assert the_file(store).startswith("pair_scores/cross-encoder-ms-marco-MiniLM-")


def test_a_damaged_file_is_passed_over_and_the_others_are_read(store, tmp_path):
    scores = PairScores(store, "model")
    scores.put([key(i) for i in range(50)], np.arange(50, dtype=np.float32))
    path = tmp_path / the_file(store)
    scores.put([key(100)], floats(100.0))
    good = path.read_bytes()
    chance = random.Random(0)
    for _ in range(100):
        bad = bytearray(good)
        bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
        path.write_bytes(chance.choice([bytes(bad), good[: chance.randrange(len(good))], good + b"\0"]))
        got = PairScores(store, "model").get([key(0), key(49), key(100)])
        np.testing.assert_array_equal(got, floats(np.nan, np.nan, 100.0))


@pytest.mark.parametrize("kind", ["no parquet", "other columns", "other types", "named otherwise", "odd name"])
def test_a_foreign_file_is_passed_over(store, tmp_path, kind):
    scores = PairScores(store, "model")
    scores.put([key(1)], floats(1.0))
    folder, good = the_file(store).rpartition("/")[0], store.read(the_file(store))
    contents = {
        "no parquet": b"hello",
        "other columns": _parquet({"a": [1]}),
        "other types": _parquet({"key": [key(2)], "score": ["high"]}),
    }
    data = contents.get(kind, good)
    names = {"named otherwise": "0" * 32 + ".parquet", "odd name": "a copy (2).parquet"}
    (tmp_path / folder / names.get(kind, f"{sha256(data)[:32]}.parquet")).write_bytes(data)
    np.testing.assert_array_equal(PairScores(store, "model").get([key(1), key(2)]), floats(1.0, np.nan))
    assert len(store.files("pair_scores")) == 2


def test_threads_read_and_write_at_once(store):
    scores, failures = PairScores(store, "model"), []

    def work(number: int) -> None:
        try:
            for turn in range(5):
                keys = [key(number * 1000 + turn * 10 + i) for i in range(10)]
                scores.put(keys, np.full(10, number, dtype=np.float32))
                got = scores.get([*keys, key(999_999)])
                assert got[:10].tolist() == [number] * 10
                assert np.isnan(got[10])
        except BaseException as error:  # noqa: BLE001 - a thread's failure must reach the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    everything = [key(number * 1000 + turn * 10 + i) for number in range(8) for turn in range(5) for i in range(10)]
    want = np.repeat(np.arange(8, dtype=np.float32), 50)
    np.testing.assert_array_equal(PairScores(store, "model").get(everything), want)


def _parquet(columns: dict) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()
