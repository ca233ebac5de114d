"""Estimates: what is said before a run is what the run then takes, and saying it leaves nothing behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from checkpoints.run import stage_entries, stage_manifests
from checkpoints.store import Store
from contracts.columns import as_numpy, ragged
from contracts.errors import ConfigurationError, DartflowError, InputError, MissingArtifactError
from flows import cli
from flows.estimate import estimate
from flows.export import stage_tables
from flows.extrapolation import Line, line_through, sample_size, shard_queries, wall_of
from flows.pair_counter import PairCounter
from flows.planning import new_run_id
from flows.sample_passes import write_sample
from flows.settings import validated
from loading.query_log import load_query_log
from models.cross_encoder import pair_key
from tests.s3 import s3_bucket
from tests.small import planned, session_of, small_settings, small_store

# Few pairs, so that the real cross-encoder reads them in seconds.
READ = (
    "cross_encoder.provider=onnx",
    "blended_rerank.cross_encoder_depth=1",
    "blended_rerank.top_k=2",
    "crag_grading.corrective_limit=1",
)


@pytest.fixture
def store(tmp_path):
    return small_store(tmp_path)


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    """A run of the small log, and what an estimate of the whole log said before it."""
    folder = tmp_path_factory.mktemp("beside")
    store = small_store(folder)
    told = estimate(store, small_settings(folder), folder / "queries.jsonl")
    return store, run_of(store, folder), told


def contents(store: Store) -> dict[str, bytes]:
    return {str(path.relative_to(store.root)): path.read_bytes() for path in store.root.rglob("*") if path.is_file()}


def run_of(store: Store, folder, *assignments: str):
    plan = planned(store, folder, new_run_id(), *assignments)  # ids are as long as those that an estimate makes
    assert session_of(store, plan).execute().verdict == "partial"
    return plan


def bytes_of(store: Store, plan, stage: str) -> int:
    return sum(manifest.bytes for manifest in stage_manifests(store, plan, stage))


# What is computed from measured figures, by hand.


def test_a_line_goes_through_two_sizes_of_a_shard():
    assert line_through((10, 3.0), (100, 12.0)) == Line(fixed=2.0, each=0.1)
    assert Line(fixed=2.0, each=0.1).of(1000) == 102.0


@pytest.mark.parametrize(
    ("few", "many", "line"),
    [
        ((16, 1.0), (20, 2.0), Line(0.0, 0.1)),  # too near each other for a line
        ((10, 5.0), (100, 4.0), Line(4.0, 0.0)),  # a small shard that took longer
        ((10, 0.1), (100, 4.0), Line(0.0, 0.04)),  # nothing costs less than nothing
        ((0, 0.3), (0, 0.2), Line(0.2, 0.0)),  # no query at all
    ],
)
def test_noise_bends_no_line(few, many, line):
    found = line_through(few, many)

    assert (found.fixed, found.each) == pytest.approx((line.fixed, line.each))
    assert found.of(many[0]) == pytest.approx(many[1])


def test_shards_go_to_the_first_free_worker():
    assert wall_of([3.0, 1.0, 1.0, 1.0], 2) == 3.0
    assert wall_of([1.0, 1.0, 1.0], 2) == 2.0
    assert wall_of([1.0, 2.0], 1) == 3.0
    assert wall_of([], 4) == 0.0


def test_the_last_shard_holds_what_is_left():
    assert shard_queries("oversample", 10, 4) == [4, 4, 2]
    assert shard_queries("family_searches", 10, 4) == [10]  # runs once, over all
    assert shard_queries("oversample", 0, 4) == [0]


def test_a_sample_is_a_shard_for_each_worker_and_at_most_a_tenth_of_a_long_log():
    assert sample_size(1_000_000, 1024, 2, None) == 2048
    assert sample_size(20_000, 1024, 2, None) == 2000
    assert sample_size(6_000, 1024, 2, None) == 1024
    assert sample_size(300, 1024, 1, None) == 300
    assert sample_size(6_000, 4, 2, None) == 1024  # small shards: more of them
    assert (sample_size(300, 1024, 1, 50), sample_size(300, 1024, 1, 500)) == (50, 300)


def test_a_sample_is_spaced_evenly_and_keeps_the_identity_of_its_queries(store, tmp_path):
    settings = small_settings(tmp_path)
    log = load_query_log(tmp_path / "queries.jsonl", settings.query_log)
    write_sample(log, 4, tmp_path / "sample.parquet")
    sample = load_query_log(tmp_path / "sample.parquet", settings.query_log)

    assert sample.queries["query_id"].to_pylist() == [log.queries["query_id"][row].as_py() for row in (0, 2, 5, 7)]
    got, want = sample.embeddings(np.arange(4)), log.embeddings(np.array([0, 2, 5, 7]))
    assert got == pytest.approx(want, abs=1e-6)


def test_groups_and_filters_go_with_a_sample(tmp_path):
    line = {"text": "Ho\ufb01ng  to?", "groups": ["b", "a"], "filters": {"version": "v1"}}
    (tmp_path / "log.jsonl").write_text(json.dumps(line) + "\n" + json.dumps({**line, "groups": []}) + "\n")
    params = small_settings(tmp_path).query_log
    log = load_query_log(tmp_path / "log.jsonl", params)
    write_sample(log, 2, tmp_path / "sample.parquet")

    assert load_query_log(tmp_path / "sample.parquet", params).queries.equals(log.queries)


# Beside the run.


def test_an_estimate_of_a_whole_log_has_the_bytes_and_counts_of_the_run(beside):
    store, plan, told = beside
    taken = store.sizes(f"runs/{plan.run_id}")

    assert (told.log_lines, told.distinct_queries, told.dead_letters) == (12, 10, 1)
    assert (told.shards, told.workers, told.snapshot_id) == (3, 2, plan.snapshot_id)
    assert [(stage.stage, stage.shards) for stage in told.stages] == [(one.stage, one.parts) for one in plan.stages]
    assert (told.calibration.queries, told.calibration.shards) == (10, 3)
    # Records differ by the run's id and by digits of times.
    assert told.disk_bytes == pytest.approx(sum(taken.values()), rel=0.02)
    for stage in told.stages:
        entry = stage_entries(plan, stage.stage)[0]
        folders = (f"/{entry.number:02d}-{stage.stage}/", f"/dead_letters/{stage.stage}-")
        found = sum(size for path, size in taken.items() if any(folder in path for folder in folders))
        assert stage.disk_bytes == pytest.approx(found, rel=0.02), stage.stage
        assert stage.disk_bytes > bytes_of(store, plan, stage.stage)
    contexts = list(stage_tables(store, plan, "context"))
    tokens = sum(pc.sum(table["tokens"]).as_py() for table in contexts)
    assert (told.context_tokens.queries, told.context_tokens.tokens) == (10, tokens)


def test_times_add_up(beside):
    told = beside[2]
    stages = sum(stage.wall_seconds for stage in told.stages)

    assert told.wall_seconds == pytest.approx(told.reading_seconds + told.opening_seconds + stages, abs=0.01)
    assert all(0 < stage.wall_seconds <= stage.thread_seconds for stage in told.stages)
    assert told.opening_seconds > 0


def test_without_a_cross_encoder_no_pair_is_read(beside):
    told = beside[2]

    assert told.model_pairs.model_dump() == {
        "cross_encoder": "none", "pairs": 0, "kept": 0, "to_read": 0, "seconds_a_pair": None,
    }  # fmt: skip
    assert told.calibration.pairs_read == 0
    assert told.notes == []


def test_a_sample_tells_of_the_whole_log(beside):
    store, plan, _ = beside
    told = estimate(store, validated(plan.settings), Path(plan.query_log), sample=4)

    assert (told.calibration.queries, told.calibration.shards) == (4, 2)
    assert [stage.shards for stage in told.stages] == [entry.parts for entry in plan.stages]
    # Two shards of two stand for three of four, most of whose bytes are records: no more than near.
    assert 0.7 < told.disk_bytes / sum(store.sizes(f"runs/{plan.run_id}").values()) < 1.7


def test_pairs_are_those_of_the_run_and_kept_ones_are_not_read_again(store, tmp_path):
    settings, queries = small_settings(tmp_path, *READ), tmp_path / "queries.jsonl"
    before = contents(store)
    told = estimate(store, settings, queries)
    assert contents(store) == before

    plan = run_of(store, tmp_path, *READ)
    ranked = [ragged(table, "candidates").values for table in stage_tables(store, plan, "blended_rerank")]
    asked = sum(int(as_numpy(candidates["cross_encoder"].is_valid()).sum()) for candidates in ranked)
    pairs = {stage.stage: stage.pairs for stage in told.stages if stage.pairs}
    again = estimate(store, settings, queries)

    assert pairs["blended_rerank"] == asked > 0
    assert set(pairs) <= {"blended_rerank", "crag_grading"}
    assert told.model_pairs.to_read == told.model_pairs.pairs == sum(pairs.values())
    assert told.model_pairs.seconds_a_pair > 0
    assert told.calibration.pairs_read == min(44, told.model_pairs.pairs)
    assert [note for note in told.notes if "likely too low" in note]
    # The scores that the run kept are all that the same run would ask for, and no made-up one stands in.
    kept = sum(pq.read_table(path).num_rows for path in store.root.glob("pair_scores/*/*.parquet"))
    assert again.model_pairs.pairs == again.model_pairs.kept == kept
    assert (again.model_pairs.to_read, again.model_pairs.seconds_a_pair, again.notes) == (0, None, [])
    assert {stage.stage: stage.kept_pairs for stage in again.stages}["blended_rerank"] == asked


class Kept:
    """Pair scores of one pair."""

    def __init__(self, key: bytes, score: float) -> None:
        self._score = {key: score}

    def get(self, keys):
        return np.array([self._score.get(key, np.nan) for key in keys], dtype=np.float32)


def test_the_counter_counts_a_pair_once_and_gives_kept_scores():
    counter = PairCounter("model", Kept(pair_key("model", "q", "b"), 2.5), 0.2, 0.8)
    counter.stage = "blended_rerank"
    first = counter.score(["q", "q", "q"], ["a", "b", "a"])
    counter.stage = "crag_grading"
    second = counter.score(["q", "q"], ["a", "c"])
    chances = 1 / (1 + 2.718281828 ** -first[[0, 2]])

    assert (counter.pairs, counter.kept_pairs) == (
        {"blended_rerank": 2, "crag_grading": 1},
        {"blended_rerank": 1, "crag_grading": 0},
    )
    assert first[1] == 2.5
    assert first[0] == first[2] == second[0] != second[1]
    assert ((chances > 0.2) & (chances < 0.8)).all()
    assert sorted(counter.drawn) == [("q", "a"), ("q", "c")]
    counter.forget()
    assert (counter.pairs, counter.drawn) == ({}, [])


# What it leaves, and what it refuses.


def test_nothing_is_left_in_the_store(store, tmp_path):
    before = contents(store)
    estimate(store, small_settings(tmp_path), tmp_path / "queries.jsonl")

    assert contents(store) == before
    assert list((store.root / "scratch").iterdir()) == []


def test_nothing_is_left_when_it_fails(store, tmp_path):
    def interrupted(*_) -> None:
        assert store.files("scratch")
        raise KeyboardInterrupt

    before = contents(store)
    with pytest.raises(KeyboardInterrupt):
        estimate(store, small_settings(tmp_path), tmp_path / "queries.jsonl", progress=interrupted)

    assert contents(store) == before
    assert list((store.root / "scratch").iterdir()) == []


def test_a_bucket_is_estimated_in_the_bucket_and_left_as_it_was(tmp_path):
    with s3_bucket() as bucket:
        store = small_store(tmp_path, bucket)
        before = store.sizes("corpora")
        settings = small_settings(tmp_path, f"store={bucket}", f"executor.cache={tmp_path / 'cache'}")
        told = estimate(store, settings, tmp_path / "queries.jsonl", sample=4)

        assert store.sizes("corpora") == before
        assert [name for name in store.folders("runs") if name.startswith("estimate")] == []
        assert told.disk_bytes > 0


def test_a_log_over_its_error_budget_is_told(store, tmp_path):
    told = estimate(store, small_settings(tmp_path, "run.dead_letter_count=0"), tmp_path / "queries.jsonl")

    assert len(told.notes) == 1
    assert "will stop after log_lines: 1 lines of the log are dead letters" in told.notes[0]


def test_an_llm_grader_is_not_called(store, tmp_path):
    # Nobody listens there: a single call would fail the estimate.
    grader = ("grader.provider=llm", "grader.base_url=http://127.0.0.1:9/v1", "grader.model=judge")
    told = estimate(store, small_settings(tmp_path, *grader), tmp_path / "queries.jsonl", sample=4)

    assert told.notes == ["the calls of the LLM grader are in none of the times: it takes as long as its service takes"]
    assert told.context_tokens.tokens > 0


def test_an_empty_log_that_may_be_empty_is_estimated(store, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    settings = small_settings(tmp_path, "query_log.allow_empty=true")
    told = estimate(store, settings, tmp_path / "empty.jsonl")

    assert (told.distinct_queries, told.shards, told.context_tokens.tokens) == (0, 1, 0)
    with pytest.raises(InputError, match="the query log is empty"):
        estimate(store, small_settings(tmp_path), tmp_path / "empty.jsonl")


def test_what_a_run_refuses_an_estimate_refuses(store, tmp_path):
    queries, before = tmp_path / "queries.jsonl", contents(store)
    with pytest.raises(InputError, match="cannot be read"):
        estimate(store, small_settings(tmp_path), tmp_path / "none.jsonl")
    with pytest.raises(ConfigurationError, match="must be embedded by the same model"):
        estimate(store, small_settings(tmp_path, "embedder.name=other"), queries)
    (tmp_path / "plan.yaml").unlink()
    with pytest.raises(ConfigurationError, match="the evidence plan cannot be read"):
        estimate(store, small_settings(tmp_path), queries)
    with pytest.raises(MissingArtifactError, match="holds no corpus"):
        estimate(Store(str(tmp_path / "other")), small_settings(tmp_path), queries)

    assert contents(store) == before


def test_a_log_without_the_vectors_that_a_run_needs_is_refused(store, tmp_path):
    (tmp_path / "log.jsonl").write_text('{"text": "how to set backup"}\n')
    with pytest.raises(DartflowError, match="the query log has no column of embeddings"):
        estimate(store, small_settings(tmp_path), tmp_path / "log.jsonl")


# The command.


def command(capsys, monkeypatch, store, folder, *words: str) -> tuple[int, str, str]:
    fixed = ["embedder.provider=precomputed", "cross_encoder.provider=none", "run.shard_size=4", "executor.workers=2"]
    options = [word for one in fixed for word in ("--set", one)]
    monkeypatch.setattr(sys, "argv", ["dartflow", "estimate", *words, "--store", str(store.root), *options])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_the_command_prints_one_json_object(store, tmp_path, capsys, monkeypatch):
    status, out, _ = command(capsys, monkeypatch, store, tmp_path, str(tmp_path / "queries.jsonl"), "--json")
    told = json.loads(out)

    assert status == 0
    assert list(told) == [
        "query_log", "snapshot_id", "log_lines", "distinct_queries", "dead_letters", "shards", "workers",
        "reading_seconds", "opening_seconds", "stages", "wall_seconds", "disk_bytes", "model_pairs", "context_tokens",
        "calibration", "notes",
    ]  # fmt: skip
    assert list(told["stages"][0]) == [
        "stage", "shards", "thread_seconds", "wall_seconds", "disk_bytes", "pairs", "kept_pairs",
    ]  # fmt: skip
    assert list(told["model_pairs"]) == ["cross_encoder", "pairs", "kept", "to_read", "seconds_a_pair"]
    assert list(told["context_tokens"]) == ["queries", "tokens_a_query", "tokens"]
    assert list(told["calibration"]) == ["queries", "shards", "pairs_read", "seconds"]


def test_the_command_shows_stages_and_sums(store, tmp_path, capsys, monkeypatch):
    log = str(tmp_path / "queries.jsonl")
    status, out, err = command(capsys, monkeypatch, store, tmp_path, log, "--sample", "4")

    assert status == 0
    assert "calibration" in err
    for said in (
        "crag_grading", "wall seconds", "12 log lines, 10 distinct queries, 1 dead letters", "time: ", "disk: ",
        "model pairs: 0 to be read, 0 of 0 kept; cross-encoder none", "context tokens: ",
        "measured: 4 queries in 2 shards, 0 model pairs, in ",
        "note: the run will stop after log_lines",  # of the small log 1 line of 12 is bad: more than 5 %
    ):  # fmt: skip
        assert said in out, said


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["none.jsonl"], 1, "cannot be read"),
        (["queries.jsonl", "--set", "oversample.kk=3"], 2, "unknown setting"),
        (["queries.jsonl", "--sample", "0"], 2, "--sample"),
        ([], 2, "QUERIES"),
    ],
)
def test_the_command_refuses_in_one_sentence(store, tmp_path, capsys, monkeypatch, words, status, said):
    monkeypatch.chdir(tmp_path)
    got, out, err = command(capsys, monkeypatch, store, tmp_path, *words)

    assert got == status, err
    assert said in err
    assert "Traceback" not in out + err


def test_the_command_makes_no_store(tmp_path, capsys, monkeypatch):
    store = Store(str(tmp_path / "made"))
    store.root.rmdir()
    got, _, err = command(capsys, monkeypatch, store, tmp_path, str(tmp_path / "queries.jsonl"))

    assert got == 2
    assert "a folder that is there" in " ".join(err.split())
    assert not store.root.exists()
