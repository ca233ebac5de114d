"""Runs: the plan is kept, the verdict says what is true, and verify finds every damaged artifact."""

from __future__ import annotations

import random
import time

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.commit import borrow, commit, manifest_path, read_manifest
from checkpoints.lease import hold
from checkpoints.records import sealed
from checkpoints.run import (
    check_run_id,
    clear_failure,
    create_run,
    load_plan,
    manifests,
    read_dead_letters,
    record_failure,
    run_ids,
    stage_entry,
    verdict,
    verify,
    write_dead_letters,
)
from checkpoints.store import Store
from contracts.errors import (
    CheckpointError,
    ConfigurationError,
    CorruptArtifactError,
    MissingArtifactError,
    StageError,
)
from contracts.manifest import DeadLetter, RunPlan, StagePlan

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
STAGES = [(0, "log_lines", 1), (0, "queries", 2), (1, "oversample", 2), (2, "rescue_searches", 1)]
ROWS = {"log_lines": [7], "queries": [3, 2], "oversample": [3, 2], "rescue_searches": [4]}


def make_plan(run_id="run-a", **more) -> RunPlan:
    inputs = {"lock": "abc", "params": {"sigma": 0.1, "groups": ("a", "b")}}
    stages = [
        StagePlan(
            number=number, stage=stage, parts=parts, rows=None, inputs={"stage": stage, **inputs}, borrowed_from=None,
            because="a new run",
        )
        for number, stage, parts in STAGES
    ]  # fmt: skip
    given_parts = {
        "run_id": run_id, "created_at": "2026-11-30T02:15:00+00:00", "query_log": "queries.jsonl",
        "query_log_sha256": "0" * 64, "snapshot_id": "corpus-1", "log_lines": 7, "distinct_queries": 5,
        "dead_letters": 0, "dead_letters_allowed": 2, "shards": 2, "access_control": False, "stages": stages,
        "settings": {"store": "here"}, "packages": {"pyarrow": "1"}, "lock_sha256": "abc", "parent_run_id": None,
    }  # fmt: skip
    return RunPlan(**{**given_parts, **more})


def commit_all(store: Store, plan: RunPlan, *, but: tuple[tuple[str, int], ...] = ()) -> None:
    for entry in plan.stages:
        for part in range(entry.parts):
            if (entry.stage, part) not in but:
                rows = ROWS[entry.stage][part]
                commit(
                    store,
                    pa.table({"query_id": [f"{entry.stage}-{part}-{row}" for row in range(rows)]}),
                    run_id=plan.run_id, number=entry.number, stage=entry.stage, shard=part,
                    key_parts={**entry.inputs, "part": part, "parents": {}}, account=None, started_at="now",
                    seconds=0.5,
                )  # fmt: skip


def make_letter(number: int, original="?") -> DeadLetter:
    return DeadLetter(
        run_id="run-a", stage="log_lines", reason="empty", attempt=1, line_number=number, query_id=None,
        original=original,
    )  # fmt: skip


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path))


@pytest.fixture
def finished(store):
    """A run of which every artifact is committed."""
    plan = make_plan()
    create_run(store, plan)
    commit_all(store, plan)
    return plan


@pytest.mark.parametrize("run_id", ["a", "0", "20261130-021500-1f2e", "a.b_c-d", "x" * 64, "nightly."])
def test_plain_run_ids_are_allowed(store, run_id):
    assert check_run_id(run_id) == run_id


@pytest.mark.parametrize(
    "run_id",
    [
        "", ".", "..", "a..b", "../a", "a/b", "/a", "-a", "_a", ".a", "A", "a b", "a\n", "\na", "ä", "a\0", "x" * 65,
        "a\\b", "²",
    ],
)  # fmt: skip
def test_other_run_ids_are_refused(store, run_id):
    for call in (check_run_id, lambda name: load_plan(store, name), lambda name: create_run(store, make_plan(name))):
        with pytest.raises(ConfigurationError, match="run id: is not allowed") as caught:
            call(run_id)
        assert caught.value.got == repr(run_id)
    assert store.files("runs") == []


@given(run_id=st.text(alphabet="aZ09.-_/\\ \n\0~ä", max_size=5) | st.text(max_size=70))
@settings(max_examples=300, deadline=None)
def test_a_run_id_is_allowed_exactly_when_it_is_a_plain_folder_name(run_id):
    plain = (
        0 < len(run_id) <= 64
        and all(letter in LETTERS + "._-" for letter in run_id)
        and run_id[0] in LETTERS
        and ".." not in run_id
    )
    try:
        assert check_run_id(run_id) == run_id
        assert plain
    except ConfigurationError:
        assert not plain


@given(run_id=st.from_regex(r"[a-z0-9][a-z0-9._-]{0,63}", fullmatch=True).filter(lambda name: ".." not in name))
@settings(max_examples=30, deadline=None)
def test_every_allowed_run_id_can_be_used(run_id, tmp_path_factory):
    store = Store(str(tmp_path_factory.mktemp("ids")))
    create_run(store, make_plan(run_id))
    assert load_plan(store, run_id).run_id == run_id
    assert run_ids(store) == [run_id]


def test_a_plan_is_read_back_as_it_was_made(store):
    plan = make_plan()
    create_run(store, plan)
    assert load_plan(store, "run-a").model_dump(mode="json") == plan.model_dump(mode="json")


def test_a_run_id_is_used_once(store):
    create_run(store, make_plan())
    with pytest.raises(CheckpointError, match=r"already has the file: got runs/run-a/run\.json"):
        create_run(store, make_plan(log_lines=9))
    assert load_plan(store, "run-a").log_lines == 7


def test_a_missing_run_is_named_beside_those_that_are_there(store):
    with pytest.raises(MissingArtifactError, match="has no such run: got run-z, want no run yet"):
        load_plan(store, "run-z")
    create_run(store, make_plan())
    with pytest.raises(MissingArtifactError, match="got run-z, want run-a"):
        load_plan(store, "run-z")


def test_any_damage_to_a_plan_is_refused_by_name(store):
    create_run(store, make_plan())
    path = "runs/run-a/run.json"
    good = store.read(path)
    chance = random.Random(0)
    for _ in range(100):
        place = chance.randrange(len(good))
        flipped = good[:place] + bytes([good[place] ^ (1 << chance.randrange(8))]) + good[place + 1 :]
        store.write(path, chance.choice([flipped, good[:place], good + b"\n"]))
        with pytest.raises(CorruptArtifactError) as caught:
            load_plan(store, "run-a")
        assert caught.value.where == path


def test_a_plan_of_another_run_is_refused(store):
    create_run(store, make_plan())
    store.write("runs/run-b/run.json", store.read("runs/run-a/run.json"))
    with pytest.raises(CorruptArtifactError, match="belongs to another run: got run-a, want run-b"):
        load_plan(store, "run-b")


def test_runs_are_listed_the_youngest_first_and_damaged_ones_last(store):
    for run_id, day in (("b", 1), ("c", 3), ("a", 2), ("d", 2)):
        create_run(store, make_plan(run_id, created_at=f"2026-11-0{day}T00:00:00+00:00"))
    store.write("runs/y/run.json", b"{")
    store.write("runs/z/01-oversample/part-00000.json", b"no plan")
    store.write("runs/Not-Ours/run.json", b"{}")
    assert run_ids(store) == ["c", "d", "a", "b", "y"]


def test_a_stage_is_found_by_name_or_the_names_are_told():
    plan = make_plan()
    assert stage_entry(plan, "oversample").number == 1
    with pytest.raises(ConfigurationError, match="want one of log_lines, queries, oversample, rescue_searches"):
        stage_entry(plan, "over_sample")


def test_manifests_are_one_a_part_and_none_where_nothing_is_committed(store):
    plan = make_plan()
    commit_all(store, plan, but=(("queries", 0),))
    assert [found and found.shard for found in manifests(store, plan, plan.stages[1])] == [None, 1]
    assert [found.rows for found in manifests(store, plan, plan.stages[2])] == [3, 2]


def test_leftovers_of_a_deleted_run_of_the_same_name_are_refused(store, finished):
    store.delete("runs/run-a/run.json")
    changed = [
        entry.model_copy(update={"inputs": {**entry.inputs, "params": {"sigma": 0.2}}}) if entry.number else entry
        for entry in finished.stages
    ]
    plan = make_plan(stages=changed)
    create_run(store, plan)
    assert len(manifests(store, plan, plan.stages[0])) == 1
    path = manifest_path("run-a", 1, "oversample", 0)
    with pytest.raises(
        CorruptArtifactError, match="was made under another plan than the run's: got another params"
    ) as caught:
        manifests(store, plan, plan.stages[2])
    assert caught.value.where == path
    with pytest.raises(CorruptArtifactError):
        verdict(store, plan)
    assert [finding == "ok" for _, finding in verify(store, plan)] == [True, True, True, False, False, False]


def test_a_run_with_nothing_committed_is_interrupted(store):
    create_run(store, make_plan())
    found = verdict(store, make_plan())
    assert found.verdict == "interrupted"
    assert [stage.missing for stage in found.stages] == [1, 2, 2, 1]


def test_a_run_with_everything_committed_is_complete(store, finished):
    found = verdict(store, finished)
    assert found.verdict == "complete"
    assert [(stage.stage, stage.rows_in, stage.rows_out) for stage in found.stages] == [
        ("log_lines", 7, 7), ("queries", 5, 5), ("oversample", 5, 5), ("rescue_searches", 5, 4),
    ]  # fmt: skip
    assert [(stage.computed, stage.borrowed, stage.missing, stage.seconds) for stage in found.stages] == [
        (1, 0, 0, 0.5), (2, 0, 0, 1.0), (2, 0, 0, 1.0), (1, 0, 0, 0.5),
    ]  # fmt: skip
    assert (found.run_id, found.log_lines, found.distinct_queries, found.dead_letters) == ("run-a", 7, 5, 0)
    assert (found.snapshot_id, found.access_control) == ("corpus-1", False)
    assert found.results == f"{store.uri}/runs/run-a/02-rescue_searches"


@pytest.mark.parametrize("missing", [(stage, part) for _, stage, parts in STAGES for part in range(parts)])
def test_a_run_that_misses_any_artifact_is_interrupted(store, missing):
    plan = make_plan()
    create_run(store, plan)
    commit_all(store, plan, but=(missing,))
    assert verdict(store, plan).verdict == "interrupted"
    assert {stage.stage: stage.missing for stage in verdict(store, plan).stages if stage.missing} == {missing[0]: 1}


def test_a_parquet_file_without_a_manifest_is_not_committed(store, finished):
    store.delete(manifest_path("run-a", 1, "oversample", 1))
    assert verdict(store, finished).verdict == "interrupted"


def test_a_held_run_is_running_whatever_else_is_true(store, finished):
    with hold(store, "run-a"):
        assert verdict(store, finished).verdict == "running"
        store.delete(manifest_path("run-a", 1, "oversample", 1))
        record_failure(store, "run-a", StageError("here", "broke", next_step="Go."))
        assert verdict(store, finished).verdict == "running"
    assert verdict(store, finished).verdict == "failed"


def test_a_stale_lease_is_not_a_running_run(store, finished):
    entry = b'{"holder": "gone:1", "beat_at": %d}'
    store.write("runs/run-a/lease.json", entry % (time.time() - 3600))
    assert verdict(store, finished).verdict == "complete"
    store.write("runs/run-a/lease.json", entry % time.time())
    assert verdict(store, finished).verdict == "running"


def test_a_run_that_was_stopped_by_an_error_is_failed_until_the_note_is_cleared(store):
    plan = make_plan()
    commit_all(store, plan, but=(("oversample", 1),))
    record_failure(store, "run-a", StageError("stage oversample", "stopped", next_step="Go."))
    assert verdict(store, plan).verdict == "failed"
    assert b"stage oversample: stopped. Go." in store.read("runs/run-a/failure.json")
    clear_failure(store, "run-a")
    clear_failure(store, "run-a")
    assert verdict(store, plan).verdict == "interrupted"


@pytest.mark.parametrize(("letters", "want"), [(0, "complete"), (1, "partial"), (2, "partial"), (3, "failed")])
def test_dead_letters_make_a_run_partial_and_above_the_budget_failed(store, letters, want):
    plan = make_plan(dead_letters=letters)
    commit_all(store, plan)
    write_dead_letters(store, "run-a", "log_lines", [make_letter(number) for number in range(letters)])
    found = verdict(store, plan)
    assert (found.verdict, found.dead_letters, found.stages[0].dead_letters) == (want, letters, letters)
    assert verify(store, plan)[-1] == ("rescue_searches/part-00000", "ok")


def test_a_lost_file_of_dead_letters_does_not_make_a_run_complete(store):
    plan = make_plan(dead_letters=2)
    commit_all(store, plan)
    write_dead_letters(store, "run-a", "log_lines", [make_letter(1)])
    assert verdict(store, plan).verdict == "partial"
    assert verify(store, plan)[-1][0] == "dead_letters"
    assert "got 1, want 2" in verify(store, plan)[-1][1]
    store.delete("runs/run-a/dead_letters/log_lines.jsonl")
    assert verdict(store, plan).dead_letters == 2


def test_borrowed_parts_are_counted_apart_and_take_no_time(store, finished):
    plan = make_plan("run-b")
    create_run(store, plan)
    commit_all(store, plan, but=(("queries", 0), ("queries", 1), ("oversample", 0)))
    for number, stage, part in ((0, "queries", 0), (0, "queries", 1), (1, "oversample", 0)):
        borrow(store, read_manifest(store, "run-a", number, stage, part), run_id="run-b", number=number)
    found = verdict(store, plan)
    assert found.verdict == "complete"
    assert [(stage.computed, stage.borrowed, stage.seconds) for stage in found.stages] == [
        (1, 0, 0.5), (0, 2, 0.0), (1, 1, 0.5), (1, 0, 0.5),
    ]  # fmt: skip
    assert all(finding == "ok" for _, finding in verify(store, plan))


def test_dead_letters_are_read_in_the_order_they_were_written_stage_by_stage(store):
    assert read_dead_letters(store, "run-a") == []
    later, first = [make_letter(9)], [make_letter(3), make_letter(1), make_letter(2)]
    write_dead_letters(store, "run-a", "oversample", later)
    write_dead_letters(store, "run-a", "log_lines", first)
    assert read_dead_letters(store, "run-a") == first + later
    write_dead_letters(store, "run-a", "log_lines", [])
    assert read_dead_letters(store, "run-a") == later


LINE_ENDS = st.sampled_from("\n\r\v\f\x1c\x85\u2028\u2029")
ANY_TEXT = st.lists(LINE_ENDS | st.characters(exclude_categories=["Cs"]), max_size=8).map("".join)


@given(originals=st.lists(ANY_TEXT, max_size=4))
@settings(max_examples=60, deadline=None)
def test_any_original_comes_back_from_a_dead_letter(originals, tmp_path_factory):
    store = Store(str(tmp_path_factory.mktemp("letters")))
    letters = [make_letter(number, original) for number, original in enumerate(originals)]
    write_dead_letters(store, "run-a", "log_lines", letters)
    assert read_dead_letters(store, "run-a") == letters


def test_a_damaged_dead_letter_is_refused_by_file_and_line(store):
    write_dead_letters(store, "run-a", "log_lines", [make_letter(1), make_letter(2)])
    path = "runs/run-a/dead_letters/log_lines.jsonl"
    good = store.read(path)
    for bad, line in ((good.replace(b'"line_number":2', b'"line_number":x'), 2), (b"\n" + good, 1), (good[:-9], 2)):
        store.write(path, bad)
        with pytest.raises(CorruptArtifactError) as caught:
            read_dead_letters(store, "run-a")
        assert caught.value.where == f"{path}, line {line}"


def test_verify_names_every_planned_part_in_order(store, finished):
    names = [
        "log_lines/part-00000", "queries/part-00000", "queries/part-00001", "oversample/part-00000",
        "oversample/part-00001", "rescue_searches/part-00000",
    ]  # fmt: skip
    assert verify(store, finished) == [(name, "ok") for name in names]


def test_verify_finds_each_damaged_artifact_by_name(store, finished):
    places = [(number, stage, part) for number, stage, parts in STAGES for part in range(parts)]
    chance = random.Random(0)
    for number, stage, part in places:
        manifest = read_manifest(store, "run-a", number, stage, part)
        for path in (manifest.file, manifest_path("run-a", number, stage, part)):
            good = store.read(path)
            place = chance.randrange(len(good))
            flipped = good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
            for bad in (flipped, good[:place], None):
                if bad is None:
                    store.delete(path)
                else:
                    store.write(path, bad)
                findings = dict(verify(store, finished))
                wrong = {name: finding for name, finding in findings.items() if finding != "ok"}
                assert list(wrong) == [f"{stage}/part-{part:05d}"]
                (finding,) = wrong.values()
                assert finding.startswith(path) or (finding == "not committed" and path.endswith(".json"))
            store.write(path, good)
    assert {finding for _, finding in verify(store, finished)} == {"ok"}


def test_verify_finds_two_swapped_files(store, finished):
    files = [manifests(store, finished, finished.stages[2])[part].file for part in (0, 1)]
    data = [store.read(file) for file in files]
    store.write(files[0], data[1])
    store.write(files[1], data[0])
    wrong = {name: finding for name, finding in verify(store, finished) if finding != "ok"}
    assert list(wrong) == ["oversample/part-00000", "oversample/part-00001"]
    assert [finding.startswith(file) for finding, file in zip(wrong.values(), files, strict=True)] == [True, True]


def test_verify_looks_into_the_data_and_not_only_at_the_bytes(store, finished):
    path = manifest_path("run-a", 1, "oversample", 0)
    manifest = read_manifest(store, "run-a", 1, "oversample", 0)
    store.write(path, sealed(manifest.model_copy(update={"logical_digest": "0" * 64})))
    assert "holds other data" in dict(verify(store, finished))["oversample/part-00000"]


def test_verify_tells_what_is_not_committed(store):
    plan = make_plan()
    commit_all(store, plan, but=(("oversample", 1),))
    assert dict(verify(store, plan))["oversample/part-00001"] == "not committed"
