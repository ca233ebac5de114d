"""Bad input gives one clear error or a counted dead letter, never a traceback or a whole-looking half."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.example import CORPUS, QUERIES, RUN, table_of

GOOD = {"chunk_id": "a#0", "text": "reset your password", "source": "a.md", "document_id": "a", "chunk_index": 0}


def _corpus(tmp_path: Path, *chunks: dict) -> str:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(chunk) + "\n" for chunk in chunks))
    return str(path)


def _without(key: str) -> dict:
    return {name: value for name, value in GOOD.items() if name != key}


def _refused(result: tuple[int, str, str], status: int, *parts: str) -> str:
    """One error in the house's form, and nothing that looks like a traceback."""
    got, out, err = result
    assert got == status, err
    assert "Traceback" not in out + err
    error = " ".join(err.split())
    for part in parts:
        assert part in error, error
    assert re.search(r"error: \w+Error .+: .+\. .+[.?]$", error), error
    return error


def _snapshots(dartflow) -> list[str]:
    return sorted(path.name for path in (dartflow.store / "corpora").iterdir())


EMBEDDED = ("--set", "embedder.provider=precomputed")


@pytest.mark.parametrize(
    ("chunks", "words", "parts"),
    [
        ([_without("text")], (), ("corpus.jsonl", "text")),
        ([GOOD, GOOD], (), ("a#0", "twice")),
        ([{**GOOD, "text": "  "}], (), ("a#0", "text")),
        (
            [{**GOOD, "embedding": [1.0, 0.0]}, {**GOOD, "chunk_id": "b", "embedding": [1.0]}],
            EMBEDDED,
            ("its vector has another width: got 2, want 1",),
        ),
        ([{**GOOD, "embedding": [1.0, float("nan")]}], EMBEDDED, ("a#0", "its vector holds a NaN")),
        ([{**GOOD, "embedding": [0.0, 0.0]}], EMBEDDED, ("a#0", "zero")),
        ([{**GOOD, "acl": None}, {**GOOD, "chunk_id": "b", "acl": ["x"]}], (), ("a#0", "acl", "default_access")),
    ],
    ids=["missing column", "duplicate id", "empty text", "wrong width", "NaN vector", "zero vector", "null acl"],
)
def test_a_bad_corpus_is_refused_and_leaves_no_snapshot(dartflow, tmp_path, chunks, words, parts):
    before = _snapshots(dartflow)
    _refused(dartflow("ingest", _corpus(tmp_path, *chunks), "--without-prefect", *words), 1, *parts)
    assert _snapshots(dartflow) == before


def test_a_missing_corpus_file_is_refused(dartflow):
    _refused(dartflow("ingest", "nowhere.jsonl", "--without-prefect"), 1, "nowhere.jsonl")


def test_an_unknown_setting_suggests_the_nearest_known_one(dartflow):
    words = ("run", QUERIES, "--without-prefect", "--set")
    _refused(dartflow(*words, "log_normal.sgima=0.2"), 2, "--set log_normal.sgima=0.2", "Did you mean 'sigma'?")
    _refused(dartflow(*words, "lognormal.sigma=0.2"), 2, "Did you mean 'log_normal'?")
    _refused(dartflow(*words, "log_normal.sigma=0"), 2, "setting log_normal.sigma", "got 0")
    _refused(dartflow(*words, "rrf_merge.rank_constant=true"), 2, "setting rrf_merge.rank_constant", "got True")
    _refused(dartflow(*words, "rrf_merge.rank_constant=60.0"), 2, "setting rrf_merge.rank_constant", "got 60.0")
    _refused(dartflow(*words, "rrf_merge"), 2, "is not an assignment")


def test_an_unknown_setting_in_the_environment_is_refused(dartflow, monkeypatch):
    monkeypatch.setenv("DARTFLOW_LOG_NORMAL__SIGM", "0.2")
    _refused(dartflow("run", QUERIES, "--without-prefect"), 2, "DARTFLOW_LOG_NORMAL__SIGM", "Did you mean 'sigma'?")


def test_an_unknown_stage_name_lists_the_known_ones(dartflow):
    _refused(dartflow("rerun", RUN, "--from", "rerank", "--without-prefect"), 2, "got rerank", "blended_rerank")
    _refused(dartflow("inspect", RUN, "rerank", "log-0001"), 2, "got rerank", "blended_rerank")


def test_an_unknown_run_names_the_ones_there_are(dartflow):
    for command in (("status",), ("resume", "--without-prefect"), ("verify",), ("rerun", "--dry-run")):
        _refused(dartflow(command[0], "nightly", *command[1:]), 1, "has no such run", "got nightly", "want example")


def test_a_store_that_is_not_there_is_refused_by_readers_and_not_made(dartflow, tmp_path):
    dartflow.store = tmp_path / "nowhere"
    _refused(dartflow("status"), 2, "store: cannot be opened", "want a folder that is there")
    assert not dartflow.store.exists()


@pytest.mark.parametrize("run_id", ["../x", "A", "a/b", "", "a..b", "x" * 65])
def test_a_run_id_that_is_no_folder_name_is_refused(dartflow, run_id):
    _refused(dartflow("run", QUERIES, "--run-id", run_id, "--without-prefect"), 2, "run id: is not allowed")


def test_a_run_id_is_used_once(dartflow):
    _refused(dartflow("run", QUERIES, "--run-id", RUN, "--without-prefect"), 1, "already has the file", "run.json")


def test_a_plan_file_that_is_not_there_is_refused(dartflow):
    words = ("--set", "family_rescue.plan=nowhere.yaml", "--without-prefect")
    _refused(dartflow("run", QUERIES, *words), 2, "nowhere.yaml", "the evidence plan cannot be read")


def test_queries_of_another_model_than_the_corpus_are_refused(dartflow):
    _refused(dartflow("run", QUERIES, *EMBEDDED, "--without-prefect"), 2, "embedded by the same model")


def test_bad_log_lines_become_dead_letters_with_their_original(dartflow):
    status = dartflow.json("status", RUN)
    assert (status["verdict"], status["log_lines"], status["distinct_queries"], status["dead_letters"]) == (
        "partial",
        200,
        89,
        5,
    )
    letters = dartflow.json("dead-letters", RUN)["dead_letters"]
    assert [(letter["line_number"], letter["reason"]) for letter in letters] == [
        (23, "empty"), (71, "empty"), (118, "over_long"), (152, "invalid"), (187, "undecodable"),
    ]  # fmt: skip
    assert all(letter["original"] for letter in letters)
    lines = table_of(dartflow.store, RUN, "log_lines").to_pylist()
    assert len(lines) == 200
    assert [line["line_number"] for line in lines if line["query_id"] is None] == [23, 71, 118, 152, 187]


def test_an_empty_log_is_refused_unless_it_is_allowed(dartflow, tmp_path):
    log = tmp_path / "empty.jsonl"
    log.write_text("")
    _refused(dartflow("run", str(log), "--without-prefect"), 1, "empty.jsonl", "allow_empty")
    words = ("--set", "query_log.allow_empty=true", "--run-id", "nobody-asked", "--without-prefect")
    assert dartflow("run", str(log), *words)[0] == 0
    assert dartflow.json("status", "nobody-asked")["verdict"] == "complete"


def test_too_many_dead_letters_fail_the_run(dartflow):
    words = ("run", QUERIES, "--set", "run.dead_letter_count=4", "--run-id", "strict", "--without-prefect")
    _refused(
        dartflow(*words), 1, "has more dead letters than its error budget: got 5 log lines lost, want at most 4 of 200."
    )
    status = dartflow.json("status", "strict")
    assert status["verdict"] == "failed"
    assert "error budget" in status["because"]
    # The letters are kept, and nothing costly was computed.
    assert len(dartflow.json("dead-letters", "strict")["dead_letters"]) == 5
    assert [stage["stage"] for stage in status["stages"] if stage["computed"]] == ["log_lines"]


def test_a_plan_that_names_unknown_metadata_is_refused_before_the_run(dartflow, tmp_path):
    family = "{name: x, metadata: {colour: red}, rescue_query: red}"
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"name: p\nversion: '1'\nshapes: [{{name: s, recognise: [hub], families: [{family}]}}]\n")
    words = ("run", QUERIES, "--run-id", "red", "--set", f"family_rescue.plan={plan}", "--without-prefect")
    _refused(dartflow(*words), 2, "evidence plan, shape s, family x", "got colour", "want one of authority_tier")
    assert not (dartflow.store / "runs" / "red").exists()


def test_a_blend_without_any_part_is_refused_before_the_run(dartflow):
    parts = ("blended_rerank.retrieval_weight=0", "blended_rerank.lexical_weight=0", "cross_encoder.provider=none")
    words = [word for part in parts for word in ("--set", part)]
    _refused(dartflow("run", QUERIES, *words, "--without-prefect"), 2, "is the only weight, but there is no cross")


@pytest.mark.parametrize("words", [("--config",), ("--set", "family_rescue.plan=")], ids=["configuration", "plan"])
def test_a_file_that_is_not_utf_8_is_refused(dartflow, tmp_path, words):
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"name: caf\xe9\n")
    given = (*words, str(path)) if words == ("--config",) else (words[0], f"{words[1]}{path}")
    _refused(dartflow("run", QUERIES, *given, "--without-prefect"), 2, "latin.yaml", "cannot be read")


def test_a_defect_is_one_sentence_and_a_file(dartflow, monkeypatch):
    monkeypatch.setattr("flows.commands.runs.load_plan", lambda *_: 1 / 0)
    status, out, err = dartflow("status", RUN)
    assert status == 1
    assert "Traceback" not in out + err
    log = Path(err.split("Report it with ")[1].strip().removesuffix("."))
    assert "ZeroDivisionError: division by zero" in log.read_text()
    log.unlink()


def test_every_command_has_help_with_an_example(dartflow, capsys):
    from flows.cli import app

    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert names >= {"demo", "ingest", "run", "status", "resume", "rerun", "verify", "inspect", "export", "contracts"}
    for command in app.registered_commands:
        assert "Example: `dartflow" in command.callback.__doc__, command.callback.__name__


def test_the_corpus_path_is_named_in_the_snapshot(dartflow):
    manifest = json.loads(next((dartflow.store / "corpora").glob("corpus-*/snapshot.json")).read_text())
    assert manifest["source_file"].endswith(Path(CORPUS).name)
