"""Exports show whole or not at all, name one query by an id, and refuse what their format cannot hold."""

from __future__ import annotations

import json
import os
import shutil
import threading

import pytest

from checkpoints.corpora import current_snapshot_id
from checkpoints.run import create_run, load_plan
from checkpoints.store import Store
from contracts.errors import ConfigurationError, MissingArtifactError
from flows.engine import Session
from flows.evaluate import evaluate_run
from flows.export import Exported, read_logged_ids, repeated_ids, row_of_query, stage_tables, write_export
from flows.planning import plan_run
from flows.settings import load_settings
from tests.example import ROOT, RUN, row_of, table_of

# Two queries; the ids `a` and `b` are given to both, `c` twice to the same. The first `b` is a dead letter.
CODE, RETURN = "ERR-1103", "How do I return a faulty unit?"
LOG = [
    ("b", ""), ("a", CODE), ("b", RETURN), ("a", RETURN), ("b", CODE), ("c", RETURN), ("c", RETURN), ("a", RETURN),
]  # fmt: skip


def _run(folder, example_store, rows):
    """A run over a small log, in a copy of the example's store."""
    shutil.copytree(example_store, folder / "store")
    log = folder / "log.jsonl"
    log.write_text(
        "".join(json.dumps({"query_id": name, "text": text, "groups": ["public"]}) + "\n" for name, text in rows)
    )
    settings = load_settings(
        ROOT / "config" / "example.yaml",
        environment={},
        assignments=[f"store={folder / 'store'}", "run.dead_letter_share=1.0"],
    )
    store = Store(settings.store)
    plan = plan_run(store, settings, log, "small", current_snapshot_id(store))
    create_run(store, plan)
    Session(store, plan, settings).execute()
    return store, load_plan(store, "small")


@pytest.fixture(scope="module")
def repeated(example_store, tmp_path_factory):
    return _run(tmp_path_factory.mktemp("repeated"), example_store, LOG)


@pytest.fixture(scope="module")
def spaced(example_store, tmp_path_factory):
    return _run(tmp_path_factory.mktemp("spaced"), example_store, [("a b", CODE), ("a_b", RETURN)])


@pytest.fixture
def example(example_store):
    store = Store(str(example_store))
    return store, load_plan(store, RUN)


def _chunks(store, plan, stage):
    """Text of a query to its chunks."""
    texts = {
        row["query_id"]: row["text"] for table in stage_tables(store, plan, "queries") for row in table.to_pylist()
    }
    return {
        texts[row["query_id"]]: [one["chunk_id"] for one in row["candidates"]]
        for table in stage_tables(store, plan, stage)
        for row in table.to_pylist()
    }


def test_a_repeated_id_is_that_of_its_first_line(repeated):
    store, plan = repeated
    ids = read_logged_ids(store, plan)
    code, back = ids.query_of["a"], ids.query_of["b"]
    assert ids.query_of == {"a": code, "b": back, "c": back}
    assert ids.of_query == {code: ["a", "b"], back: ["b", "a", "c", "c", "a"]}
    assert (ids.answered_by(code), ids.answered_by(back), ids.answered_by("other")) == (["a"], ["b", "c"], [])
    assert ids.repeated == repeated_ids(store, plan) == 3


def test_trec_and_evaluate_take_the_same_line_of_a_repeated_id(repeated, tmp_path):
    store, plan = repeated
    chunks = _chunks(store, plan, "sparse_search")
    assert chunks[CODE][0] != chunks[RETURN][0]
    expected = {"a": chunks[CODE], "b": chunks[RETURN], "c": chunks[RETURN]}
    out = tmp_path / "run.trec"
    exported = write_export(store, plan, "sparse_search", "trec", out)
    lines = [line.split(" ") for line in out.read_text().splitlines()]
    assert exported == Exported(lines=len(lines), repeated_ids=3)
    assert lines == [
        [name, "Q0", chunk, str(rank), f"{1 / rank:.9f}", "small"]
        for name in expected
        for rank, chunk in enumerate(expected[name], start=1)
    ]
    best = {name: {ranked[0]: 1} for name, ranked in expected.items()}
    rankings, _ = evaluate_run(store, plan, best)
    assert rankings["sparse_search"]["RR@10"] == 1.0


def test_json_lines_name_every_line_of_the_log(repeated, tmp_path):
    store, plan = repeated
    out = tmp_path / "out.jsonl"
    assert write_export(store, plan, "context", "jsonl", out) == Exported(lines=2, repeated_ids=3)
    rows = {row["text"]: row["logged_ids"] for row in map(json.loads, out.read_text().splitlines())}
    assert rows == {CODE: ["a", "b"], RETURN: ["b", "a", "c", "c", "a"]}


def test_an_id_with_white_space_is_refused_by_trec_and_stands_in_json_lines(spaced, tmp_path):
    store, plan = spaced
    with pytest.raises(ConfigurationError, match=r"export of log line 'a b': TREC cannot hold an id with white space"):
        write_export(store, plan, "rrf_merge", "trec", tmp_path / "run.trec")
    assert list(tmp_path.iterdir()) == [], "nothing half-written"
    write_export(store, plan, "rrf_merge", "jsonl", tmp_path / "run.jsonl")
    rows = [json.loads(line)["logged_ids"] for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert rows == [["a b"], ["a_b"]]


@pytest.mark.parametrize("place", ["nodir/x.trec", "file/x.trec", "folder", "x" * 300])
def test_a_file_that_cannot_be_written_is_one_clear_error(example, tmp_path, place):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigurationError, match=r"cannot be written: got .+, want a file in a folder that is there"):
        write_export(*example, "rrf_merge", "trec", tmp_path / place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_that_may_not_be_written_is_one_clear_error(example, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigurationError, match="cannot be written: got Permission denied"):
        write_export(*example, "rrf_merge", "trec", tmp_path / "x.trec")


def test_an_export_that_fails_half_way_leaves_the_file_of_before(dartflow, tmp_path):
    store = Store(str(dartflow.store))
    out = tmp_path / "out.jsonl"
    out.write_text("before")
    (dartflow.store / "runs" / RUN / "10-context" / "part-00002.json").unlink()
    with pytest.raises(MissingArtifactError, match="is not finished: got no part 2"):
        write_export(store, load_plan(store, RUN), "context", "jsonl", out)
    assert out.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["out.jsonl"]


def test_an_export_replaces_the_file_behind_a_link_and_keeps_the_link(example, tmp_path):
    (tmp_path / "real").write_text("before")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    exported = write_export(*example, "queries", "jsonl", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert len((tmp_path / "real").read_text().splitlines()) == exported.lines == 89
    assert len(list(tmp_path.iterdir())) == 2


def test_a_pipe_is_written_and_stays_a_pipe(example, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    exported = write_export(*example, "rrf_merge", "trec", pipe)
    reader.join(timeout=10)
    assert read[0].count("\n") == exported.lines
    assert pipe.is_fifo()


@pytest.mark.parametrize("stage", ["family_searches", "queries", "log_lines", "log_normal", "distance_matrices"])
def test_trec_is_refused_for_a_stage_that_ranks_nothing_for_queries(example, tmp_path, stage):
    rankings = (
        "oversample, greedy_selection, sparse_search, rrf_merge, family_rescue, blended_rerank, crag_grading, context"
    )
    with pytest.raises(ConfigurationError, match=f"{stage}: is no ranking of queries: want one of {rankings}\\."):
        write_export(*example, stage, "trec", tmp_path / "x.trec")
    assert list(tmp_path.iterdir()) == []


def test_every_ranking_has_a_trec_export(example, tmp_path):
    for stage in ("oversample", "greedy_selection", "sparse_search", "rrf_merge", "family_rescue", "blended_rerank",
                  "crag_grading", "context"):  # fmt: skip
        assert write_export(*example, stage, "trec", tmp_path / "x.trec").lines > 195


def test_every_stage_has_an_export_in_json_lines(example, tmp_path):
    store, plan = example
    for entry in plan.stages:
        write_export(store, plan, entry.stage, "jsonl", tmp_path / "x.jsonl")
        rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
        plain = [{name: row[name] for name in row if name != "logged_ids"} for row in rows]
        assert plain == [row for table in stage_tables(store, plan, entry.stage) for row in table.to_pylist()]
        assert all(("logged_ids" in row) == ("query_id" in row) for row in rows)


def test_an_unknown_stage_is_refused(example, tmp_path):
    for format_ in ("trec", "jsonl"):
        with pytest.raises(ConfigurationError, match="nowhere"):
            write_export(*example, "nowhere", format_, tmp_path / "x")
    with pytest.raises(ConfigurationError, match="nowhere"):
        row_of_query(*example, "nowhere", "log-0017")
    assert list(tmp_path.iterdir()) == []


def test_a_row_is_found_by_query_id_and_by_the_id_of_any_line(example, example_store):
    expected = row_of(example_store, RUN, "rrf_merge", "log-0017")
    assert row_of_query(*example, "rrf_merge", "log-0017") == expected
    assert row_of_query(*example, "rrf_merge", expected["query_id"]) == expected


def test_the_row_of_a_repeated_id_is_that_of_its_first_line(repeated):
    assert [row_of_query(*repeated, "queries", name)["text"] for name in "abc"] == [CODE, RETURN, RETURN]


def test_log_lines_show_the_line_of_an_id_and_why_it_is_no_query(example, example_store):
    lines = table_of(example_store, RUN, "log_lines").to_pylist()
    bad, good = lines[22], lines[16]
    assert bad["reason"] == "empty"
    for line in (bad, good):
        assert row_of_query(*example, "log_lines", line["logged_id"]) == line
    assert row_of_query(*example, "log_lines", good["query_id"])["query_id"] == good["query_id"]
    with pytest.raises(MissingArtifactError, match=f"has no such query: got {bad['logged_id']}"):
        row_of_query(*example, "context", bad["logged_id"])


def test_a_row_that_is_not_there_is_a_clear_error(example):
    with pytest.raises(MissingArtifactError, match="stage context: has no such query: got nobody"):
        row_of_query(*example, "context", "nobody")
    with pytest.raises(
        ConfigurationError, match=r"stage family_searches: has no rows of queries: want one of log_lines, queries, over"
    ):
        row_of_query(*example, "family_searches", "log-0017")
