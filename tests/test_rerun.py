"""A rerun computes what changed and what depends on it, borrows the rest, and trusts nothing unproven."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints.manifests import manifest_path
from checkpoints.records import sealed
from checkpoints.run import load_plan, stage_entries
from checkpoints.store import Store
from stages.pipeline import LOADED, numbered_stages
from tests.example import QUERIES, RUN, manifests_of, table_of
from tests.small import planned, small_store

STAGES = [*LOADED, *(stage.name for _, stage in numbered_stages())]
BEHIND_LOG_NORMAL = {
    "log_normal", "greedy_selection", "rrf_merge", "family_rescue", "blended_rerank", "crag_grading", "context",
}  # fmt: skip
BEHIND_RRF_MERGE = {"rrf_merge", "family_rescue", "blended_rerank", "crag_grading", "context"}


def _computed(dry_run: dict) -> set[str]:
    return {row["stage"] for row in dry_run["stages"] if row["computed"]}


def _check_against_manifests(store: Path, run: str, computed: set[str]) -> None:
    for stage in STAGES:
        found = manifests_of(store, run, stage)
        assert found, stage
        for manifest, before in zip(found, manifests_of(store, RUN, stage), strict=True):
            if stage in computed:
                assert manifest.borrowed_from is None
                assert manifest.file.startswith(f"runs/{run}/")
            else:
                assert manifest.borrowed_from == RUN
                assert (manifest.file, manifest.sha256) == (before.file, before.sha256)


def test_a_changed_setting_recomputes_its_stage_and_what_depends_on_it(dartflow):
    planned = dartflow.json("rerun", RUN, "--set", "log_normal.sigma=0.2", "--dry-run")
    assert [row["stage"] for row in planned["stages"]] == STAGES
    assert _computed(planned) == BEHIND_LOG_NORMAL
    because = {row["stage"]: row["because"] for row in planned["stages"]}
    assert because["log_normal"] == "changed: sigma: 0.1 -> 0.2"
    assert because["greedy_selection"] == "reads log_normal, computed again"
    shards = {row["computed"] + row["borrowed"] for row in planned["stages"] if row["stage"] == "context"}
    assert shards == {3}

    status, _, _ = dartflow("rerun", RUN, "--set", "log_normal.sigma=0.2", "--run-id", "wider", "--without-prefect")
    assert status == 3
    _check_against_manifests(dartflow.store, "wider", BEHIND_LOG_NORMAL)


def test_from_a_stage_recomputes_it_and_what_depends_on_it(dartflow):
    planned = dartflow.json("rerun", RUN, "--from", "rrf_merge", "--dry-run")
    assert _computed(planned) == BEHIND_RRF_MERGE
    status, _, _ = dartflow("rerun", RUN, "--from", "rrf_merge", "--run-id", "again", "--without-prefect")
    assert status == 3
    _check_against_manifests(dartflow.store, "again", BEHIND_RRF_MERGE)
    for stage in STAGES:
        before, after = manifests_of(dartflow.store, RUN, stage), manifests_of(dartflow.store, "again", stage)
        assert [m.sha256 for m in before] == [m.sha256 for m in after], "nothing changed, so the bytes are the same"
        assert [m.key for m in before] == [m.key for m in after]


def test_nothing_changed_means_nothing_is_computed(dartflow):
    assert _computed(dartflow.json("rerun", RUN, "--dry-run")) == set()


def test_execution_settings_change_nothing(dartflow):
    words = ("--set", "executor.workers=1", "--set", "cross_encoder.threads=1")
    assert _computed(dartflow.json("rerun", RUN, *words, "--dry-run")) == set()


def test_a_rerun_of_a_rerun_names_the_run_that_computed(dartflow):
    dartflow("rerun", RUN, "--from", "context", "--run-id", "second", "--without-prefect")
    dartflow("rerun", "second", "--from", "context", "--run-id", "third", "--without-prefect")
    assert {m.borrowed_from for m in manifests_of(dartflow.store, "third", "oversample")} == {RUN}


@pytest.mark.parametrize("stage", ["queries", "sparse_search", "family_searches"])
def test_one_flipped_byte_in_a_borrowed_file_is_refused_by_name(dartflow, stage):
    file = manifests_of(dartflow.store, RUN, stage)[0].file
    path = dartflow.store / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    status, out, err = dartflow("rerun", RUN, "--from", "rrf_merge", "--run-id", "refused", "--without-prefect")
    assert status == 1
    assert f"{file}: is not what was committed" in err
    assert "Traceback" not in out + err
    assert list((dartflow.store / "runs" / "refused").glob("06-rrf_merge/*")) == []
    assert dartflow.json("status", "refused")["verdict"] == "failed"

    status, out, _ = dartflow("verify", RUN)
    assert status == 1
    assert f"{stage}/part-00000: {file}: is not what was committed" in out


def test_resume_keeps_what_is_finished_and_computes_the_rest(dartflow):
    kept = manifests_of(dartflow.store, RUN, "rrf_merge")
    whole = [m.sha256 for m in manifests_of(dartflow.store, RUN, "context")]
    for folder in ("08-blended_rerank", "10-context"):
        (dartflow.store / "runs" / RUN / folder / "part-00001.json").unlink()
    assert dartflow.json("status", RUN)["verdict"] == "interrupted"
    status, _, _ = dartflow("resume", RUN, "--without-prefect")
    assert status == 3
    assert manifests_of(dartflow.store, RUN, "rrf_merge") == kept
    assert [m.sha256 for m in manifests_of(dartflow.store, RUN, "context")] == whole


def _change_plan(store: Path, **update: object) -> None:
    """Writes run.json anew with other fields, sealed as the product seals it."""
    plan = load_plan(Store(str(store)), RUN)
    (store / "runs" / RUN / "run.json").write_bytes(sealed(plan.model_copy(update=update)))


def test_resume_refuses_when_what_stands_behind_the_run_has_changed(dartflow):
    stages = [
        entry.model_copy(update={"inputs": entry.inputs | {"code": "0123456789abcdef"}})
        if entry.stage == "rrf_merge"
        else entry
        for entry in load_plan(Store(str(dartflow.store)), RUN).stages
    ]
    _change_plan(dartflow.store, stages=stages)
    status, _, err = dartflow("resume", RUN, "--without-prefect")
    assert status == 1
    assert "stage rrf_merge: has changed since the run was planned: got code: 0123456789abcdef -> " in err
    assert f"dartflow rerun {RUN}" in err


def test_resume_refuses_a_query_log_that_changed(dartflow, tmp_path):
    planned(small_store(tmp_path), tmp_path, "small")
    dartflow.store = tmp_path / "store"
    (tmp_path / "queries.jsonl").write_text('{"query_id": "1", "text": "other"}\n')
    status, _, err = dartflow("resume", "small", "--without-prefect")
    assert status == 1
    assert "the query log has changed since the run was planned" in err


def _read_again(dartflow, first: str, then: str) -> dict:
    """A run that reads the log one way, and a rerun that reads it another way; no cross-encoder, for speed."""
    quick = ("--set", "cross_encoder.provider=none", "--set", "run.dead_letter_share=1.0", "--set", "run.shard_size=16")
    words = ("run", QUERIES, "--run-id", "short", "--without-prefect", *quick)
    assert dartflow(*words, "--set", f"query_log.max_characters={first}")[0] == 3
    words = ("rerun", "short", "--run-id", "long", "--without-prefect")
    assert dartflow(*words, "--set", f"query_log.max_characters={then}")[0] == 3
    return dartflow.json("status", "long")


@pytest.mark.parametrize(("first", "then", "queries", "letters"), [(30, 4000, 89, 5), (4000, 30, 52, 75)])
def test_a_rerun_that_reads_the_log_anew_counts_it_anew(dartflow, first, then, queries, letters):
    status = _read_again(dartflow, first, then)
    assert (status["verdict"], status["distinct_queries"], status["dead_letters"]) == ("partial", queries, letters)
    assert {s["rows_out"] for s in status["stages"] if s["stage"] not in {"log_lines", "family_searches"}} == {queries}
    assert len(table_of(dartflow.store, "long", "context")) == queries


def test_a_rerun_keeps_its_own_error_budget(dartflow):
    words = ("rerun", RUN, "--set", "run.dead_letter_share=0.0", "--run-id", "strict", "--without-prefect")
    status, _, err = dartflow(*words)
    assert status == 1
    assert "more dead letters than its error budget: got 5 log lines lost, want at most 0 of 200" in " ".join(
        err.split()
    )
    assert dartflow.json("status", "strict")["verdict"] == "failed"


def test_borrowed_dead_letters_are_told_by_the_new_run_and_name_the_run_they_come_from(dartflow):
    dartflow("rerun", RUN, "--from", "context", "--run-id", "mine", "--without-prefect")
    letters = dartflow.json("dead-letters", "mine")["dead_letters"]
    assert [letter["run_id"] for letter in letters] == [RUN] * 5


def test_a_rerun_works_from_another_folder(dartflow, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert _computed(dartflow.json("rerun", RUN, "--dry-run")) == set()


def test_a_setting_that_ingest_fixed_is_refused(dartflow):
    for words in (("rerun", RUN), ("run", QUERIES)):
        status, _, err = dartflow(*words, "--set", "corpus.searched_text=text", "--without-prefect")
        assert status == 2
        assert "setting corpus.searched_text: is fixed in snapshot corpus-" in " ".join(err.split())
        assert "Ingest the corpus again" in err


def test_only_what_can_change_a_line_is_in_the_key_of_the_lines(dartflow):
    assert _computed(dartflow.json("rerun", RUN, "--set", "query_log.allow_empty=true", "--dry-run")) == set()
    name = "embedder.name=use-multilingual-0.2.1"
    vectors = dartflow.json("rerun", RUN, "--set", "embedder.provider=precomputed", "--set", name, "--dry-run")
    assert {"log_lines", "queries", "context"} <= _computed(vectors)


def test_resume_refuses_other_settings_but_not_other_threads(dartflow, monkeypatch):
    (dartflow.store / "runs" / RUN / "10-context" / "part-00001.json").unlink()
    monkeypatch.setenv("DARTFLOW_LOG_NORMAL__SIGMA", "0.2")
    status, _, err = dartflow("resume", RUN, "--without-prefect")
    assert status == 1
    assert "stage log_normal: has changed since the run was planned: got sigma: 0.1 -> 0.2" in " ".join(err.split())
    monkeypatch.delenv("DARTFLOW_LOG_NORMAL__SIGMA")
    monkeypatch.setenv("DARTFLOW_EXECUTOR__WORKERS", "1")
    assert dartflow("resume", RUN, "--without-prefect")[0] == 3


def test_a_stage_that_loses_rows_fails_the_run(dartflow):
    opened = Store(str(dartflow.store))
    plan = load_plan(opened, RUN)
    (entry,) = stage_entries(plan, "context")
    (short,) = [m for m in manifests_of(dartflow.store, RUN, "context") if m.shard == 2]
    path = dartflow.store / manifest_path(RUN, entry.number, "context", 2)
    path.write_bytes(sealed(short.model_copy(update={"rows": short.rows - 1})))
    status = dartflow.json("status", RUN)
    assert status["verdict"] == "failed"
    assert status["because"].startswith("context, part 2: ")
