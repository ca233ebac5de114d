"""Gc: what is old goes, and what anything kept stands on stays; a gc that is killed is finished by the next."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.commit import borrow
from checkpoints.corpora import load_snapshot, save_snapshot, snapshot_ids, use_snapshot
from checkpoints.gc import collect
from checkpoints.lease import hold, holder_of
from checkpoints.local_files import LocalFiles
from checkpoints.manifests import read_manifest
from checkpoints.published import described_run, publish, published_pointer, roll_back
from checkpoints.run import create_run, load_plan, run_ids
from checkpoints.store import Store
from checkpoints.survey import Bounds
from checkpoints.verdict import verdict
from checkpoints.verify import verify
from contracts.errors import CheckpointError, CorruptArtifactError
from contracts.manifest import RunPlan
from flows.planning import plan_rerun
from tests.runs import (
    CORPUS_FILES,
    STAGES,
    borrow_all,
    commit_all,
    commit_part,
    make_plan,
    manifest_of,
    path_of,
    plan_with,
    save_corpus,
)
from tests.s3 import s3_bucket
from tests.small import planned, session_of, small_settings, small_store

ROOT = Path(__file__).resolve().parents[1]
NOW = datetime(2027, 1, 1, tzinfo=UTC)
TAKEN = {("oversample", 0): ["q2"], ("context", 1): ["q4"]}
NAMES = [stage for _, stage, _ in STAGES]


class Fast(LocalFiles):
    """A disk that is not waited for; `left` deletions work, and `meanwhile` happens at the first of them."""

    left = None
    meanwhile = None

    def sync_file(self, file):
        pass

    def sync_folder(self, folder):
        pass

    def unlink(self, file):
        if "runs" in file.parts and "lease" not in file.parts:
            if self.meanwhile is not None:
                self.meanwhile, happens = None, self.meanwhile
                happens()
            if self.left is not None:
                if self.left == 0:
                    raise KeyboardInterrupt
                self.left -= 1
        super().unlink(file)


@pytest.fixture
def store(tmp_path):
    opened = Store(str(tmp_path / "store"), files=Fast)
    save_corpus(opened)
    return opened


def bounds(keep: int | None = None, days: float | None = None) -> Bounds:
    return Bounds(keep, days, NOW)


def days_ago(days: float) -> str:
    return (NOW - timedelta(days=days)).isoformat(timespec="seconds")


def finished(store: Store, run_id: str, days: float, **more) -> RunPlan:
    plan = make_plan(run_id, bad_lines=1, created_at=days_ago(days), **more)
    create_run(store, plan)
    commit_all(store, plan, taken=TAKEN)
    return plan


def child(store: Store, parent: RunPlan, run_id: str, days: float, borrowed: list[str] = NAMES) -> RunPlan:
    """A run that borrows some stages, with all of them done."""
    plan = plan_child(store, parent, run_id, days, borrowed)
    for entry in plan.stages:
        for part in entry.shards:
            if entry.borrowed_from is not None:
                borrow(store, read_manifest(store, parent, entry, part), plan=plan, entry=entry)
    commit_all(store, plan, taken=TAKEN)
    return plan


def plan_child(store: Store, parent: RunPlan, run_id: str, days: float, borrowed: list[str] = NAMES) -> RunPlan:
    stages = [
        entry.model_copy(update={"borrowed_from": parent.run_id if entry.stage in borrowed else None})
        for entry in parent.stages
    ]
    plan = parent.model_copy(update={"run_id": run_id, "created_at": days_ago(days), "stages": stages})
    create_run(store, plan)
    return plan


def publish_run(store: Store, plan: RunPlan) -> None:
    stages = ("context", "queries", "log_lines")
    publish(store, described_run(store, plan, verdict(store, plan), stages, [], approved_by=None), why=None)


def tree(store: Store) -> dict[str, bytes]:
    return {str(path.relative_to(store.root)): path.read_bytes() for path in store.root.rglob("*") if path.is_file()}


def gone(result) -> list[str]:
    return [item.name for item in result.items if not item.kept]


def because(result, name: str) -> str:
    return "; ".join(next(item for item in result.items if item.name == name).kept)


def is_whole(store: Store, plan: RunPlan) -> bool:
    return all(finding == "ok" for _, finding in verify(store, plan))


def test_a_run_goes_only_when_it_is_neither_young_nor_among_the_youngest(store):
    for days in range(1, 7):
        finished(store, f"run-{days}", days)
    assert gone(collect(store, bounds(keep=2), dry_run=True)) == ["run-3", "run-4", "run-5", "run-6"]
    assert gone(collect(store, bounds(days=4.5), dry_run=True)) == ["run-5", "run-6"]
    assert gone(collect(store, bounds(keep=5, days=2), dry_run=True)) == ["run-6"]
    result = collect(store, bounds(keep=2, days=4.5))
    assert gone(result) == ["run-5", "run-6"]
    assert because(result, "run-1") == "among the 2 youngest; younger than 4.5 days"
    assert run_ids(store) == ["run-1", "run-2", "run-3", "run-4"]


def test_nothing_of_a_removed_run_is_left(store):
    plan = finished(store, "old", 9)
    with hold(store, "runs/old", "run old"):
        pass
    store.write("runs/old/failure.json", b"{}")
    store.write("runs/old/09-grading/transcripts/part-0.jsonl", b"{}")
    assert len(store.files("runs/old")) > 20
    result = collect(store, bounds(days=1))
    item = next(item for item in result.items if item.name == "old")
    assert (item.stays, item.bytes > 1000) == (0, True)
    assert store.files("runs") == []
    assert not (store.root / "runs" / "old").exists()
    create_run(store, plan)
    commit_all(store, plan, taken=TAKEN)
    assert is_whole(store, plan)


def test_a_dry_run_says_what_would_go_and_changes_nothing(store):
    parent = finished(store, "old", 9)
    child(store, parent, "new", 1, ["log_lines", "oversample"])
    store.write("runs/new/01-oversample/part-00007.0123abcd.parquet", b"left")
    before = tree(store)
    would = collect(store, bounds(days=5), dry_run=True)
    assert tree(store) == before
    did = collect(store, bounds(days=5))
    assert did.items == would.items
    item = would.items[-2]
    assert (item.name, item.stays, item.bytes) == ("old", 5, sum(len(before[path]) for path in item.goes))
    removed = {path for path in set(before) - set(tree(store)) if "/lease/" not in path}
    assert removed == {path for item in would.items for path in item.goes}


def test_files_that_a_kept_run_borrows_stay_and_exactly_these(store):
    oldest = finished(store, "oldest", 9)
    middle = child(store, oldest, "middle", 8, ["log_lines", "queries", "oversample"])
    youngest = child(store, middle, "youngest", 1, ["log_lines", "oversample", "context"])
    named = {
        file
        for stage in NAMES
        for part in (0, 1)
        if (manifest := manifest_or_none(store, youngest, stage, part)) is not None
        for file in [manifest.file, *([manifest.dead_letters.file] if manifest.dead_letters else [])]
    }
    result = collect(store, bounds(keep=1))
    assert gone(result) == ["middle", "oldest"]
    assert is_whole(store, youngest)
    left = {path for path in store.files("runs") if not path.startswith("runs/youngest/")}
    assert left == {path for path in named if not path.startswith("runs/youngest/")}
    assert {path.split("/")[1] for path in left} == {"oldest", "middle"}
    assert run_ids(store) == ["youngest"]

    again = collect(store, bounds(keep=1))
    assert [(item.kind, item.name, item.kept) for item in again.items if item.kind == "remains"] == [
        ("remains", "middle", ["kept runs borrow from it"]), ("remains", "oldest", ["kept runs borrow from it"]),
    ]  # fmt: skip
    assert not any(item.goes for item in again.items)


def manifest_or_none(store, plan, stage, part):
    return (
        manifest_of(store, plan, stage, part)
        if (stage, part) in {(s, p) for _, s, n in STAGES for p in range(n)}
        else None
    )


def test_what_is_borrowed_from_remains_goes_with_its_last_borrower(store):
    parent = finished(store, "old", 9)
    child(store, parent, "borrower", 5)
    collect(store, bounds(days=7))
    assert run_ids(store) == ["borrower"]
    kept = finished(store, "new", 1)
    result = collect(store, bounds(days=3))
    assert [(item.kind, item.name) for item in result.items if not item.kept] == [
        ("run", "borrower"), ("remains", "old"),
    ]  # fmt: skip
    assert {path.split("/")[1] for path in store.files("runs")} == {"new"}
    assert sorted(path.name for path in (store.root / "runs").iterdir()) == ["new"]
    assert is_whole(store, kept)


def test_a_published_run_and_the_one_a_rollback_goes_back_to_stay(store):
    plans = {name: finished(store, name, days) for name, days in (("a", 9), ("b", 8), ("c", 7), ("d", 6))}
    for name in "abc":
        publish_run(store, plans[name])
    result = collect(store, bounds(days=1), dry_run=True)
    assert gone(result) == ["d", "a"]
    assert (because(result, "c"), because(result, "b")) == ("published: current", "published: rollback target")
    roll_back(store, why=None)
    result = collect(store, bounds(days=1))
    assert gone(result) == ["d", "c"]
    assert (because(result, "b"), because(result, "a")) == ("published: current", "published: rollback target")
    assert roll_back(store, why=None).target == "a"


def test_where_the_pointer_is_lost_what_it_may_have_named_stays(store):
    for name, days in (("a", 9), ("b", 8), ("c", 7)):
        publish_run(store, finished(store, name, days))
    store.delete("published/current.json")
    result = collect(store, bounds(days=1))
    assert gone(result) == ["a"]
    assert because(result, "c") == "published: perhaps current: the pointer is lost"


def test_a_run_that_is_held_stays_whole_with_its_leftovers(store):
    finished(store, "busy", 9)
    finished(store, "idle", 9)
    store.write("runs/busy/01-oversample/part-00007.0123abcd.parquet", b"not committed yet")
    with hold(store, "runs/busy", "run busy"):
        holder = holder_of(store, "runs/busy")[0]
        before = {path: data for path, data in tree(store).items() if path.startswith("runs/busy")}
        result = collect(store, bounds(days=1))
        assert {path: data for path, data in tree(store).items() if path.startswith("runs/busy")} == before
    assert (gone(result), because(result, "busy")) == (["idle"], f"{holder} is at work on it")


def test_a_run_that_an_unfinished_run_has_still_to_borrow_from_stays_whole(store):
    """And so does what that one needs."""
    first = finished(store, "first", 9)
    second = plan_child(store, first, "second", 8, ["log_lines", "queries"])
    commit_all(store, second, taken=TAKEN)
    third = plan_child(store, second, "third", 1, ["log_lines", "oversample"])
    before = tree(store)
    result = collect(store, bounds(days=5))
    assert gone(result) == []
    assert because(result, "second") == "run third has still to borrow from it"
    assert because(result, "first") == "run second has still to borrow from it"
    assert {path for path in before if "/lease/" not in path} <= set(tree(store))
    for lender, plan in ((first, second), (second, third)):
        borrow_some(store, lender, plan)
        commit_all(store, plan, taken=TAKEN)
        assert is_whole(store, plan)
    assert gone(collect(store, bounds(days=5))) == ["second", "first"]
    assert is_whole(store, third)


def borrow_some(store, lender, plan):
    for entry in plan.stages:
        for part in entry.shards if entry.borrowed_from else ():
            borrow(store, read_manifest(store, lender, entry, part), plan=plan, entry=entry)


def test_replayed_runs_keep_what_they_borrow(store):
    from checkpoints.run import open_letters
    from tests.runs import make_replay

    parent = finished(store, "run-a", 9)
    letters = [letter for letter in open_letters(store, parent) if letter.query_id == "q2"]
    plan = plan_with(parent, make_replay(2, "oversample", *letters), run_id="replayed")
    plan = plan.model_copy(update={"created_at": days_ago(1)})
    create_run(store, plan)
    borrow_all(store, parent, plan)
    commit_all(store, plan)
    assert is_whole(store, plan)
    assert gone(collect(store, bounds(days=5))) == ["run-a"]
    assert is_whole(store, plan)


def test_files_that_no_manifest_names_are_swept_from_kept_runs_and_others_are_left(store):
    plan = finished(store, "kept", 1)
    leftovers = [
        "runs/kept/01-oversample/part-00001.0123456789abcdef.parquet",
        "runs/kept/dead_letters/oversample-part-00001.0123456789abcdef.jsonl",
    ]
    others = ["runs/kept/notes.txt", "runs/kept/01-oversample/plot.png", "runs/kept/09-grading/transcripts/a.jsonl"]
    for path in [*leftovers, *others]:
        store.write(path, b"123")
    before = set(store.files("runs"))
    result = collect(store, bounds(days=5))
    assert sorted(result.items[0].goes) == sorted(leftovers)
    assert (result.items[0].bytes, gone(result)) == (6, [])
    assert before - set(store.files("runs")) == set(leftovers)
    assert is_whole(store, plan)


def test_a_file_that_was_committed_since_the_survey_is_not_swept(store):
    """A run is resumed and done with before gc comes to its leftovers."""
    finished(store, "old", 9)
    plan = make_plan("kept", created_at=days_ago(1))
    create_run(store, plan)
    manifest = commit_part(store, plan, plan.stages[1], 0)
    path = path_of(plan, "queries", 0)
    data = store.read(path)
    store.delete(path)
    store._local.meanwhile = lambda: store.write(path, data)
    (item,) = (item for item in collect(store, bounds(days=5)).items if item.name == "kept")
    assert item.goes == [manifest.file]
    assert manifest.file in store.files("runs/kept")


@pytest.mark.parametrize("damage", ["manifest", "plan", "pointer", "record"])
def test_a_damaged_record_of_what_must_stay_is_refused_by_name_and_nothing_is_removed(store, damage):
    old, kept = finished(store, "old", 9), finished(store, "kept", 1)
    for plan in (old, kept):
        publish_run(store, plan)
    finished(store, "older", 10)
    path = {
        "manifest": path_of(kept, "oversample", 1), "plan": "runs/kept/run.json", "pointer": "published/current.json",
        "record": "published/history/000001.json",
    }[damage]  # fmt: skip
    store.write(path, store.read(path).replace(b'"', b"'", 1))
    before = {path: data for path, data in tree(store).items() if "/lease/" not in path}
    for dry_run in (True, False):
        with pytest.raises(CorruptArtifactError) as caught:
            collect(store, bounds(days=5), dry_run=dry_run)
        assert caught.value.where == path
    assert {path: data for path, data in tree(store).items() if "/lease/" not in path} == before
    if damage in {"manifest", "plan"}:
        assert "Nothing was removed. Restore the file, or remove it" in str(caught.value)
        store.delete(path)
        assert "older" in gone(collect(store, bounds(days=5)))


def test_a_damaged_manifest_of_a_run_that_goes_is_no_obstacle(store):
    old = finished(store, "old", 9)
    store.write(path_of(old, "oversample", 1), b"?")
    assert gone(collect(store, bounds(days=5))) == ["old"]


def test_a_run_that_was_planned_meanwhile_on_what_goes_stops_gc_before_any_table_is_removed(store):
    old = finished(store, "old", 9)
    store._local.meanwhile = lambda: plan_child(store, old, "newcomer", 0)
    tables = [path for path in store.files("runs/old") if path.endswith((".parquet", ".jsonl"))]
    with pytest.raises(CheckpointError, match="run newcomer: was planned on what is being removed: got old"):
        collect(store, bounds(days=5))
    assert set(tables) <= set(store.files("runs/old"))
    result = collect(store, bounds(days=5))
    assert because(result, "old") == "run newcomer has still to borrow from it"


def test_a_run_that_was_planned_meanwhile_on_its_own_is_no_obstacle(store):
    finished(store, "old", 9)
    store._local.meanwhile = lambda: finished(store, "newcomer", 0)
    collect(store, bounds(days=5))
    assert run_ids(store) == ["newcomer"]
    assert is_whole(store, load_plan(store, "newcomer"))


def test_unfinished_files_go_after_an_hour(store):
    folder = store.root / ".unfinished"
    for name, age in (("old", 7200), ("young", 60)):
        (folder / name).write_bytes(b"half")
        os.utime(folder / name, (time.time() - age,) * 2)
    assert collect(store, bounds(keep=1), dry_run=True).unfinished == 0
    assert collect(store, bounds(keep=1)).unfinished == 1
    assert [path.name for path in folder.iterdir()] == ["young"]


def test_scratch_stores_of_killed_estimates_go_after_a_day(store):
    now = datetime.now(UTC)
    names = [f"{now - timedelta(hours=hours):%Y%m%d-%H%M%S}-0123abcd" for hours in (25, 23)]
    for name in (*names, "20200101-000000-of-mine"):
        store.write(f"scratch/{name}/runs/one/run.json", b"half")
    assert collect(store, bounds(keep=1), dry_run=True).unfinished == 0
    assert collect(store, bounds(keep=1)).unfinished == 1
    assert store.folders("scratch") == sorted((names[1], "20200101-000000-of-mine"))


def save_old_snapshot(store: Store, snapshot_id: str, days: float) -> None:
    made = load_snapshot(store, "corpus-1")
    save_snapshot(
        store, made.model_copy(update={"snapshot_id": snapshot_id, "created_at": days_ago(days)}), CORPUS_FILES
    )


def test_a_snapshot_goes_when_it_is_old_and_nothing_uses_it(store):
    finished(store, "kept", 1, snapshot_id="corpus-used")
    finished(store, "old", 9, snapshot_id="corpus-unused")
    publish_run(store, finished(store, "published", 9, snapshot_id="corpus-published"))
    days = {"used": 20, "unused": 20, "published": 20, "young": 2, "previous": 20, "current": 20}
    for name, age in days.items():
        save_old_snapshot(store, f"corpus-{name}", age)
    assert gone(collect(store, bounds(keep=1))) == ["old"]  # snapshots go by age alone
    result = collect(store, bounds(days=5))
    assert sorted(gone(result)) == ["corpus-1", "corpus-unused"]
    assert because(result, "corpus-used") == "run kept uses it"
    assert because(result, "corpus-published") == "run published uses it"
    assert because(result, "corpus-young") == "younger than 5 days"
    assert because(result, "corpus-previous") == "rollback target"
    assert because(result, "corpus-current") == "current"
    assert sorted(snapshot_ids(store)) == sorted(f"corpus-{name}" for name in days if name != "unused")
    assert not (store.root / "corpora" / "corpus-unused").exists()
    for name in days:
        if name != "unused":
            load_snapshot(store, f"corpus-{name}")


def test_files_of_an_ingest_that_was_killed_go_and_damaged_snapshots_stay(store):
    save_old_snapshot(store, "corpus-damaged", 20)
    save_old_snapshot(store, "corpus-2", 20)
    use_snapshot(store, "corpus-1", why=None)
    use_snapshot(store, "corpus-2", why=None)
    store.write("corpora/corpus-damaged/snapshot.json", b"?")
    store.write("corpora/corpus-half/chunks.parquet", b"chunks")
    result = collect(store, bounds(days=5))
    assert gone(result) == ["corpus-half"]
    assert "corpora/corpus-damaged/snapshot.json: is not what was written" in because(result, "corpus-damaged")


def test_a_gc_that_is_really_killed_is_finished_by_the_next(store, tmp_path):
    script = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from checkpoints.gc import collect
from checkpoints.local_files import LocalFiles
from checkpoints.store import Store
from tests.test_gc import bounds

class Dies(LocalFiles):
    left = int(sys.argv[2])

    def unlink(self, file):
        if "runs" in file.parts and "lease" not in file.parts:
            Dies.left -= 1
            if Dies.left < 0:
                os._exit(9)
        super().unlink(file)

collect(Store(sys.argv[1], files=Dies), bounds(days=5))
"""
    parent = finished(store, "old", 9)
    kept = child(store, parent, "new", 1, ["log_lines", "oversample"])
    for left in (3, 7):
        died = subprocess.run(
            [sys.executable, "-c", script, str(store.root), str(left)], cwd=ROOT, check=False, capture_output=True
        )
        assert died.returncode == 9, died.stderr.decode()
        assert run_ids(store) == ["new", "old"]
        assert is_whole(store, kept)
    collect(store, bounds(days=5))
    assert run_ids(store) == ["new"]
    assert is_whole(store, kept)
    assert {path.split("/")[2] for path in store.files("runs/old")} == {"00-log_lines", "01-oversample", "dead_letters"}


def test_gc_works_in_a_bucket():
    with s3_bucket() as uri:
        bucket = Store(uri)
        save_corpus(bucket)
        parent = finished(bucket, "old", 9)
        kept = child(bucket, parent, "new", 1, ["log_lines", "oversample"])
        would = collect(bucket, bounds(days=5), dry_run=True)
        did = collect(bucket, bounds(days=5))
        assert did.items == would.items
        assert (gone(did), did.unfinished, did.items[1].bytes > 1000) == (["old"], 0, True)
        assert run_ids(bucket) == ["new"]
        assert is_whole(bucket, kept)
        collect(bucket, Bounds(None, 1, NOW + timedelta(days=9)))
        assert bucket.files("runs") == []


def test_an_unfinished_run_is_resumed_when_its_lender_is_gone(tmp_path):
    small = small_store(tmp_path)
    parent = planned(small, tmp_path, "parent")
    session_of(small, parent).execute()
    plan = plan_rerun(small, parent, small_settings(tmp_path, "log_normal.sigma=0.2"), from_stage=None, run_id="child")
    plan = plan.model_copy(update={"created_at": "2099-01-01T00:00:00+00:00"})
    create_run(small, plan)
    session_of(small, plan).execute()
    small.delete(path_of(plan, "context", 1))
    assert verdict(small, plan).verdict == "interrupted"
    assert gone(collect(small, bounds(keep=1))) == ["parent"]
    assert session_of(small, plan).execute().verdict == "partial"
    assert is_whole(small, plan)


# What a run borrows from an earlier one (by number, modulo), and what of it is not there yet.
RUNS = st.lists(
    st.tuples(
        st.none() | st.integers(0, 9),
        st.sets(st.sampled_from(NAMES)),
        st.sets(st.tuples(st.sampled_from(NAMES), st.integers(0, 1)), max_size=2),
        st.integers(0, 6),
    ),
    min_size=1,
    max_size=6,
)
MOVES = st.lists(st.integers(0, 9) | st.just("back"), max_size=4)


def build(store: Store, runs, moves) -> dict[str, RunPlan]:
    """The runs of a borrow graph, with all that they can have, and the published ones."""
    plans: list[RunPlan] = []
    for number, (lender, borrowed, missing, days) in enumerate(runs):
        if lender is None or not plans:
            plan = make_plan(f"run-{number}", bad_lines=1, created_at=days_ago(days))
            create_run(store, plan)
        else:
            parent = plans[lender % len(plans)]
            plan = plan_child(store, parent, f"run-{number}", days, sorted(borrowed))
        fill(store, plan, {one.run_id: one for one in plans}, missing)
        plans.append(plan)
    done = [plan for plan in plans if is_whole(store, plan)]
    for move in moves:
        if move == "back":
            pointer = published_pointer(store).read()
            if pointer is not None and pointer.previous is not None:
                roll_back(store, why=None)
        elif done:
            publish_run(store, done[move % len(done)])
    return {plan.run_id: plan for plan in plans}


def fill(store: Store, plan: RunPlan, plans: dict[str, RunPlan], missing=()) -> None:
    """Borrows and computes all that a run may have and has not."""
    for entry in plan.stages:
        for part in entry.shards:
            if (entry.stage, part) in missing or read_manifest(store, plan, entry, part) is not None:
                continue
            if entry.borrowed_from is None:
                commit_part(store, plan, entry, part, TAKEN)
                continue
            found = read_manifest(store, plans[entry.borrowed_from], entry, part)
            if found is not None:
                borrow(store, found, plan=plan, entry=entry)


def should_stay(store: Store, plans: dict[str, RunPlan], keep: int | None, days: int | None) -> set[str]:
    """The oracle, by the plain words of the rule."""
    by_age = sorted(plans.values(), key=lambda plan: (plan.created_at, plan.run_id), reverse=True)
    stay = {plan.run_id for plan in by_age[: keep or 0]}
    if days is not None:
        stay |= {plan.run_id for plan in by_age if plan.created_at > days_ago(days)}
    pointer = published_pointer(store).read()
    if pointer is not None:
        stay.add(pointer.target)
        if pointer.previous is not None:
            stay.add(published_pointer(store).record(pointer.previous).target)
    while True:
        lenders = {
            entry.borrowed_from
            for run_id in stay
            for entry in plans[run_id].stages
            if entry.borrowed_from is not None
            and any(read_manifest(store, plans[run_id], entry, part) is None for part in entry.shards)
        }
        if lenders <= stay:
            return stay
        stay |= lenders


@given(
    runs=RUNS,
    moves=MOVES,
    keep=st.none() | st.integers(1, 4),
    days=st.none() | st.integers(0, 6),
    left=st.integers(0, 60),
)
@settings(max_examples=15, deadline=None)
def test_whatever_borrows_from_whatever_kept_runs_stay_whole_and_the_rest_goes(
    runs, moves, keep, days, left, tmp_path_factory
):
    if keep is None and days is None:
        keep = 1
    folder = tmp_path_factory.mktemp("graph")
    store = Store(str(folder / "store"), files=Fast)
    save_corpus(store)
    plans = build(store, runs, moves)
    stay = should_stay(store, plans, keep, days)
    before = {run_id: verify(store, plans[run_id]) for run_id in stay}

    # The same store once more, for a gc that is killed somewhere.
    shutil.copytree(store.root, folder / "killed")
    killed = Store(str(folder / "killed"), files=Fast)
    killed._local.left = left
    try:
        collect(killed, bounds(keep, days))
    except KeyboardInterrupt:
        for run_id in stay:
            assert verify(killed, plans[run_id]) == before[run_id]
    killed._local.left = None

    for one in (store, killed):
        collect(one, bounds(keep, days))
        assert set(run_ids(one)) == stay
        for run_id in stay:
            assert verify(one, plans[run_id]) == before[run_id]
        named = {file for run_id in stay for file in named_by(one, plans[run_id])}
        files = {path for path in one.files("runs") if "/lease/" not in path}
        assert {path for path in files if path.endswith((".parquet", ".jsonl"))} == named
        assert {path.split("/")[1] for path in files - named} == stay
        assert not any(
            item.goes for item in collect(one, bounds(keep, days), dry_run=True).items if item.kind != "snapshot"
        )
        # Whatever a kept run has still to borrow and compute, it can.
        for run_id in sorted(stay):
            fill(one, plans[run_id], plans)
        for run_id in sorted(stay):
            fill(one, plans[run_id], plans)
            assert is_whole(one, plans[run_id])


def named_by(store: Store, plan: RunPlan) -> set[str]:
    found = set()
    for entry in plan.stages:
        for part in entry.shards:
            manifest = read_manifest(store, plan, entry, part)
            if manifest is not None:
                found |= {manifest.file} | ({manifest.dead_letters.file} if manifest.dead_letters else set())
    return found
