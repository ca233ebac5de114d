"""The commands publish, rollback, published, corpus and gc, on the bundled example."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoints.corpora import load_snapshot, manifest_path
from checkpoints.records import sealed
from checkpoints.run import load_plan
from checkpoints.store import Store
from tests.example import CORPUS, ROOT, RUN, manifests_of

QRELS = str(ROOT / "examples" / "qrels.tsv")


@pytest.fixture
def second(dartflow):
    """A second run, which borrows all but its contexts from the first."""
    words = ("rerun", RUN, "--from", "context", "--run-id", "second", "--without-prefect")
    assert dartflow(*words)[0] == 3
    return "second"


def pointer(dartflow) -> bytes:
    return (dartflow.store / "published" / "current.json").read_bytes()


def test_a_run_that_passes_its_gates_is_published(dartflow):
    status, out, _ = dartflow("publish", RUN, "--why", "the first night", "--by", "ann")
    assert status == 0
    for gate in ("verdict", "verify", "lost_line_share", "duplicate_share", "empty_context_share"):
        assert gate in out
    assert f"run {RUN} is published, as generation 1; there is nothing to go back to" in out
    found = dartflow.json("published")
    current = found["current"]
    assert (current["target"], current["by"], current["why"]) == (RUN, "ann", "the first night")
    assert [entry["carried_out"] for entry in found["history"]] == [True]
    files = {file["file"]: file["sha256"] for file in current["details"]["artifacts"]["context"]}
    assert files == {manifest.file: manifest.sha256 for manifest in manifests_of(dartflow.store, RUN, "context")}
    assert current["details"]["counts"]["log_lines"] == 200
    assert sum(file["rows"] for file in current["details"]["artifacts"]["log_lines"]) == 200


def test_a_run_that_is_published_already_is_said_so(dartflow):
    dartflow("publish", RUN)
    before = pointer(dartflow)
    status, out, _ = dartflow("publish", RUN, "--why", "again")
    assert (status, out.strip()) == (
        0, f"run {RUN} is published already, as generation 1; there is nothing to go back to",
    )  # fmt: skip
    assert pointer(dartflow) == before
    assert len(dartflow.json("published")["history"]) == 1


def test_a_failed_gate_leaves_the_pointer_byte_for_byte(dartflow, second):
    dartflow("publish", RUN)
    before = {path: path.read_bytes() for path in (dartflow.store / "published").rglob("*.json") if path.is_file()}
    status, out, _ = dartflow("publish", second, "--set", "publish.max_empty_context_share=0")
    assert status == 1
    assert f"run second is not published, run {RUN} still is: failed empty_context_share" in out
    assert "at most 0 " in out
    after = {path: path.read_bytes() for path in (dartflow.store / "published").rglob("*.json") if path.is_file()}
    assert after == before


def test_gates_come_from_the_configuration(dartflow, tmp_path):
    config = tmp_path / "gates.yaml"
    config.write_text(
        f"publish:\n  qrels: {QRELS}\n  min_metrics: {{context.nDCG@10: 0.99}}\n  approval_required: true\n"
    )
    found = dartflow.json("publish", RUN, "--config", str(config))
    assert (found["published"], found["changed"], found["current"]) == (False, False, None)
    assert found["failed"] == ["context.nDCG@10", "approval"]
    words = ("publish", RUN, "--config", str(config), "--approve", "Ann Lee", "--set")
    found = dartflow.json(*words, "publish.min_metrics={context.nDCG@10: 0.5}")
    assert (found["published"], found["changed"], found["failed"]) == (True, True, [])
    assert found["current"]["details"]["approved_by"] == "Ann Lee"
    assert {gate["gate"] for gate in found["gates"]} >= {"fused_loss", "approval", "context.nDCG@10"}


def test_a_run_that_is_not_finished_is_not_published(dartflow):
    (dartflow.store / "runs" / RUN / "10-context" / "part-00001.json").unlink()
    status, out, _ = dartflow("publish", RUN)
    assert status == 1
    assert "interrupted (missing parts: context (1))" in out
    assert f"run {RUN} is not published, nothing is: failed verdict" in out
    assert not (dartflow.store / "published").exists()


def test_a_rollback_publishes_the_run_before_and_says_when_there_is_none(dartflow, second):
    status, _, err = dartflow("rollback")
    assert status == 1
    assert "has no published run" in err
    dartflow("publish", RUN)
    dartflow("publish", second)
    status, out, _ = dartflow("rollback", "--why", "empty contexts", "--by", "bob")
    assert status == 0
    assert f"run {RUN} is published again, as generation 3; there is nothing to go back to" in out
    status, _, err = dartflow("rollback")
    assert status == 1
    assert f"cannot go back: got nothing before {RUN}" in " ".join(err.split())
    status, out, _ = dartflow("published")
    assert status == 0
    assert f"run {RUN} is published since" in out
    rows = [line.split()[:3] for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert [" ".join(row) for row in rows if row[0] in {"1", "2", "3"}][-3:] == [
        f"3 {RUN} rollback", f"2 {second} publish", f"1 {RUN} publish",
    ]  # fmt: skip
    assert "empty contexts" in out


def test_a_rollback_to_a_damaged_run_is_refused(dartflow, second):
    dartflow("publish", RUN)
    dartflow("publish", second)
    before = pointer(dartflow)
    file = dartflow.store / manifests_of(dartflow.store, RUN, "context")[0].file
    file.write_bytes(file.read_bytes() + b"x")
    status, _, err = dartflow("rollback")
    assert status == 1
    assert f"is not what run {RUN} was published with" in " ".join(err.split())
    assert pointer(dartflow) == before


def test_a_damaged_pointer_still_shows_the_history_and_the_way_out(dartflow):
    dartflow("publish", RUN)
    (dartflow.store / "published" / "current.json").write_text("{}")
    status, out, err = dartflow("published")
    assert status == 1
    assert "not known" in out
    assert "published/current.json: is not what was written" in " ".join(err.split())
    assert "dartflow publish RUN" in err
    status, out, _ = dartflow("publish", RUN)
    assert status == 0
    assert f"run {RUN} is published, as generation 2" in out


def test_snapshots_are_listed_used_and_rolled_back(dartflow, tmp_path):
    (first,) = dartflow.json("corpus", "list")["snapshots"]
    assert (first["current"], first["state"], first["chunks"], first["documents"]) == (True, "current", 245, 97)
    folder = dartflow.store / "corpora" / first["snapshot_id"]
    sizes = sum(path.stat().st_size for path in folder.iterdir() if path.name != "snapshot.json")
    assert first["bytes"] == sizes
    small = tmp_path / "small.jsonl"
    lines = Path(CORPUS).read_text(encoding="utf-8").splitlines(keepends=True)
    small.write_text("".join(lines[:9]), encoding="utf-8")
    assert dartflow("ingest", str(small), "--without-prefect")[0] == 0
    found = dartflow.json("corpus", "list")
    assert found["current"] != first["snapshot_id"]
    assert {one["snapshot_id"]: one["state"] for one in found["snapshots"]} == {
        found["current"]: "current", first["snapshot_id"]: "rollback target",
    }  # fmt: skip
    status, out, _ = dartflow("corpus", "rollback", "--why", "too few chunks")
    assert status == 0
    assert f"snapshot {first['snapshot_id']} is current again, as generation 3; there is nothing to go back to" in out
    status, out, _ = dartflow("corpus", "use", found["current"])
    assert status == 0
    assert f"snapshot {found['current']} is current, as generation 4; a rollback goes back to generation 3" in out
    assert "is current already" in dartflow("corpus", "use", found["current"])[1]
    status, out, _ = dartflow("corpus", "list")
    assert status == 0
    assert "use-multilingual" in out
    status, _, err = dartflow("corpus", "use", "corpus-none")
    assert status == 1
    assert "has no such corpus snapshot: got corpus-none" in " ".join(err.split())


def test_a_snapshot_of_another_version_asks_to_ingest_again_and_that_helps(dartflow):
    store = Store(str(dartflow.store))
    snapshot = load_snapshot(store, load_plan(store, RUN).snapshot_id)
    settings = {name: value for name, value in snapshot.settings.items() if name != "ingest"}
    store.write(manifest_path(snapshot.snapshot_id), sealed(snapshot.model_copy(update={"settings": settings})))
    status, _, err = dartflow("rerun", RUN, "--dry-run")
    assert status == 1
    error = " ".join(err.split())
    assert f"corpus snapshot {snapshot.snapshot_id}: has other settings of ingest than this version knows" in error
    assert error.endswith("Ingest the corpus again.")
    assert dartflow("ingest", CORPUS, "--without-prefect")[0] == 0
    assert dartflow("rerun", RUN, "--dry-run")[0] == 0


def test_gc_must_be_told_what_is_old(dartflow):
    status, _, err = dartflow("gc")
    assert status == 2
    assert "want --keep N, --older-than DAYS or both" in err
    assert dartflow("gc", "--keep", "0")[0] == 2


def test_gc_removes_an_old_run_and_keeps_what_a_kept_one_borrows(dartflow, second):
    store = Store(str(dartflow.store))
    before = set(store.files("runs"))
    would = dartflow.json("gc", "--keep", "1", "--dry-run")
    assert set(store.files("runs")) == before
    rows = {row["name"]: row for row in would["items"]}
    assert (rows[second]["kept"], rows[RUN]["kept"]) == (["among the 1 youngest"], [])
    status, out, _ = dartflow("gc", "--keep", "1")
    assert status == 0
    assert f"{rows[RUN]['stays']} of its files, which kept runs borrow" in out
    assert before - set(store.files("runs")) >= set(rows[RUN]["goes"])
    assert dartflow("verify", second)[0] == 0
    assert dartflow.json("status")["run_id"] == second
    assert "has no such run: got example, want second" in " ".join(dartflow("status", RUN)[2].split())
    # Another context can still be made of what was borrowed.
    assert dartflow("rerun", second, "--from", "context", "--run-id", "third", "--without-prefect")[0] == 3
    assert dartflow("verify", "third")[0] == 0


def test_gc_says_that_a_published_run_stays(dartflow, second):
    dartflow("publish", RUN)
    dartflow("publish", second)
    status, out, _ = dartflow("gc", "--older-than", "0", "--dry-run")
    assert status == 0
    assert "published: current" in out
    assert "published: rollback target" in out
    assert "0 files, 0.0 kB: nothing is removed in a dry run" in out


def test_gc_stops_at_a_damaged_manifest_of_a_run_that_stays(dartflow, second):
    manifest = dartflow.store / "runs" / second / "10-context" / "part-00001.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text())))
    status, _, err = dartflow("gc", "--keep", "1")
    assert status == 1
    assert "10-context/part-00001.json: is not what was written, so that nobody knows what must stay" in err
    assert dartflow.json("status", RUN)["verdict"] == "partial"


def test_every_command_of_the_corpus_has_help_with_an_example(dartflow):
    from flows.commands.corpora import app

    assert {command.name for command in app.registered_commands} == {"list", "use", "rollback"}
    for command in app.registered_commands:
        assert "Example: `dartflow corpus" in command.callback.__doc__
