"""Published runs: consumers read one pointer, and what it names is there, whole and of one run."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from checkpoints.local_files import LocalFiles
from checkpoints.published import (
    Gate,
    PublishedRun,
    check_files,
    described_run,
    publish,
    published_pointer,
    published_run,
    roll_back,
)
from checkpoints.run import create_run
from checkpoints.store import Store
from checkpoints.verdict import verdict
from contracts.errors import CorruptArtifactError, MissingArtifactError
from tests.runs import ASKED, QUERIES, borrow_all, commit_all, make_plan, manifest_of, plan_with, save_corpus

STAGES = ("context", "queries", "log_lines")
GATES = [Gate(gate="duplicate_share", value=0.0, want="at most 0", passed=True)]

# A consumer of its own, which knows nothing but the layout of the store.
READER = """
import hashlib, json, sys
from pathlib import Path

store, generations, targets = Path(sys.argv[1]), set(), set()
print("reading", flush=True)
while not (store / "stop").exists():
    record = json.loads((store / "published" / "current.json").read_bytes())
    details = record["details"]
    assert record["target"] == details["run_id"], record
    for stage in ("context", "queries", "log_lines"):
        assert details["artifacts"][stage]
        for named in details["artifacts"][stage]:
            assert named["file"].startswith(f"runs/{record['target']}/"), record
            found = hashlib.sha256((store / named["file"]).read_bytes()).hexdigest()
            assert found == named["sha256"], named
    assert record["generation"] >= max(generations, default=0)
    generations.add(record["generation"])
    targets.add(record["target"])
print(len(generations), *sorted(targets), flush=True)
"""


class Stops(LocalFiles):
    """A disk on which the swap of the pointer fails, as if the process had been killed right before it."""

    stopped = False

    def rename(self, source, target):
        if self.stopped and target.name == "current.json":
            raise KeyboardInterrupt
        super().rename(source, target)


@pytest.fixture
def store(tmp_path):
    opened = Store(str(tmp_path), files=Stops)
    save_corpus(opened)
    return opened


@pytest.fixture
def runs(store):
    """Three finished runs, with other data each."""
    return [finished(store, f"run-{name}") for name in "abc"]


def finished(store: Store, run_id: str) -> PublishedRun:
    plan = make_plan(run_id, bad_lines=1, settings={"store": run_id})
    create_run(store, plan)
    commit_all(store, plan, started_at=run_id)
    return described(store, plan)


def described(store: Store, plan, approved_by: str | None = None) -> PublishedRun:
    return described_run(store, plan, verdict(store, plan), STAGES, GATES, approved_by=approved_by)


def current(store: Store) -> str:
    return published_pointer(store).current().target


def test_a_store_without_a_published_run_says_what_to_do(store):
    with pytest.raises(MissingArtifactError, match=r"has no published run\. Run `dartflow publish RUN` first"):
        current(store)
    with pytest.raises(MissingArtifactError, match="has no published run"):
        roll_back(store, why=None)


def test_a_record_names_everything_that_a_consumer_needs(store):
    plan = make_plan(bad_lines=1)
    create_run(store, plan)
    commit_all(store, plan)
    run = described(store, plan, approved_by="Ann Lee")
    record = publish(store, run, by="nightly", why="as every night")
    assert (record.action, record.by, record.why, record.target) == ("publish", "nightly", "as every night", "run-a")
    assert published_run(published_pointer(store).current()) == run
    assert (run.run_id, run.snapshot_id, run.verdict, run.approved_by) == ("run-a", "corpus-1", "partial", "Ann Lee")
    assert run.counts == {
        "log_lines": len(ASKED) + 1, "distinct_queries": len(QUERIES), "dead_letters": 1, "lost_log_lines": 1,
    }  # fmt: skip
    assert run.gates == GATES
    assert {stage: [file.rows for file in files] for stage, files in run.artifacts.items()} == {
        "context": [3, 2], "queries": [3, 2], "log_lines": [len(ASKED) + 1],
    }  # fmt: skip
    first = manifest_of(store, plan, "context", 0)
    assert (run.artifacts["context"][0].file, run.artifacts["context"][0].sha256) == (first.file, first.sha256)


def test_files_of_a_run_that_borrows_are_named_where_they_lie(store):
    parent = make_plan()
    create_run(store, parent)
    commit_all(store, parent)
    plan = plan_with(parent)
    create_run(store, plan)
    borrow_all(store, parent, plan)
    run = described(store, plan)
    assert {file.file.split("/")[1] for files in run.artifacts.values() for file in files} == {"run-a"}
    assert publish(store, run, why=None).target == "run-b"


def test_a_run_that_is_not_finished_cannot_be_described(store):
    plan = make_plan()
    create_run(store, plan)
    commit_all(store, plan, but=[("context", 1)])
    with pytest.raises(MissingArtifactError, match="stage context: is not finished: got no part 1"):
        described(store, plan)


def test_a_run_that_is_published_already_adds_nothing_to_the_history(store, runs):
    publish(store, runs[0], why=None)
    before = store.read("published/current.json")
    assert publish(store, runs[0], why="again") is None
    assert store.read("published/current.json") == before
    assert len(published_pointer(store).history()) == 1


def test_rollbacks_go_further_back_until_there_is_nothing_before(store, runs):
    for run in runs:
        publish(store, run, why=None)
    assert [roll_back(store, why="bad").target, roll_back(store, why="bad too").target] == ["run-b", "run-a"]
    assert published_run(published_pointer(store).current()) == runs[0]
    with pytest.raises(MissingArtifactError, match="cannot go back: got nothing before run-a"):
        roll_back(store, why=None)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("damage", ["removed", "changed"])
def test_what_is_damaged_is_neither_published_nor_brought_back(store, runs, stage, damage):
    publish(store, runs[0], why=None)
    publish(store, runs[1], why=None)
    before = store.read("published/current.json")
    for run, move in (
        (runs[2], lambda: publish(store, runs[2], why=None)),
        (runs[0], lambda: roll_back(store, why=None)),
    ):
        path = run.artifacts[stage][-1].file
        good = store.read(path)
        store.delete(path) if damage == "removed" else store.write(path, good + b" ")
        with pytest.raises(CorruptArtifactError, match=f"is not what run {run.run_id} was published with") as caught:
            move()
        assert caught.value.where == path
        assert store.read("published/current.json") == before
        store.write(path, good)
    assert roll_back(store, why=None).target == "run-a"


def test_a_process_killed_between_history_and_pointer_leaves_the_old_run_readable(store, runs):
    publish(store, runs[0], why=None)
    before = store.read("published/current.json")
    store._local.stopped = True
    for move in (lambda: publish(store, runs[1], why=None), lambda: publish(store, runs[2], why=None)):
        with pytest.raises(KeyboardInterrupt):
            move()
    store._local.stopped = False
    assert store.read("published/current.json") == before
    check_files(store, published_run(published_pointer(store).current()))
    assert [entry.carried_out for entry in published_pointer(store).history()] == [False, False, True]
    assert publish(store, runs[2], why=None).generation == 4
    assert roll_back(store, why=None).target == "run-a"


def test_details_of_another_kind_are_refused_by_name(store):
    from checkpoints.moves import moving

    with moving(published_pointer(store)) as move:
        move.to("run-a", action="publish", by="me", why=None, details={"run_id": "run-a"})
    with pytest.raises(CorruptArtifactError, match="published generation 1: does not describe a run: got snapshot_id"):
        published_run(published_pointer(store).current())


def test_a_consumer_never_sees_a_missing_or_mixed_run(store, runs):
    """Another process reads the pointer and every file that it names while this one moves it a hundred times."""
    publish(store, runs[0], why=None)
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(store.root)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert reader.stdout.readline() == "reading\n"
        for number in range(100):
            if number % 4 == 3:
                roll_back(store, why=None)
            else:
                other = [run for run in runs if run.run_id != current(store)]
                assert publish(store, other[number % 2], why=None) is not None
            time.sleep(0.005)
    finally:
        Path(store.root, "stop").touch()
        out, err = reader.communicate(timeout=30)
    assert reader.returncode == 0, err
    seen, *targets = out.split()
    assert published_pointer(store).current().generation == 101
    assert int(seen) > 20
    assert targets == ["run-a", "run-b", "run-c"]
