"""Runs: the plan is kept as it was made and says what each part is planned for; replays are parts of it."""

from __future__ import annotations

import json
import random
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from checkpoints.run import (
    check_run_id,
    clear_failure,
    create_run,
    failure_of,
    load_plan,
    open_letters,
    planned_rows,
    record_failure,
    replay_of,
    run_ids,
    stage_entries,
    stage_manifests,
    stage_names,
)
from checkpoints.store import Store
from contracts.errors import (
    CheckpointError,
    ConfigurationError,
    CorruptArtifactError,
    MissingArtifactError,
    StageError,
)
from contracts.manifest import Replay, ReplayedQuery
from flows.planning import even_shard_size
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
)

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
TAKEN = {("oversample", 0): ["q1", "q2"], ("context", 1): ["q4"]}


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path))


def with_dead_letters(store):
    """A run of which everything is committed, with a bad line and three queries taken out."""
    plan = make_plan(bad_lines=1)
    create_run(store, plan)
    commit_all(store, plan, taken=TAKEN)
    return plan


def replay_everything(store, plan):
    """The plan of a replay of every query that is a dead letter, its artifacts borrowed."""
    first, second, third = [letter for letter in open_letters(store, plan) if letter.query_id is not None]
    replay = plan_with(plan, make_replay(2, "oversample", first, second), make_replay(3, "context", third))
    create_run(store, replay)
    borrow_all(store, plan, replay)
    return replay


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


def test_the_stages_of_a_plan_stand_in_their_order_each_once():
    plan = make_plan()
    names = [name for _, name, _ in STAGES]
    assert stage_names(plan) == names
    replay = plan_with(plan, make_replay(2, "oversample", make_letter("q1")))
    assert [entry.stage for entry in replay.stages] == [
        "log_lines", "queries", "oversample", "oversample", "rescue_searches", "context", "context",
    ]  # fmt: skip
    assert stage_names(replay) == names


def test_a_stage_is_found_by_name_or_the_names_are_told():
    plan = plan_with(make_plan(), make_replay(2, "context", make_letter("q1", "context")))
    assert [entry.number for entry in stage_entries(plan, "oversample")] == [1]
    assert [(entry.number, entry.shards) for entry in stage_entries(plan, "context")] == [
        (3, range(2)), (3, range(2, 3)),
    ]  # fmt: skip
    with pytest.raises(
        ConfigurationError,
        match="got over_sample, want one of log_lines, queries, oversample, rescue_searches, context",
    ):
        stage_entries(plan, "over_sample")


@given(queries=st.integers(0, 5000), most=st.integers(1, 1100))
@example(queries=1109, most=1024)
def test_shards_are_as_few_as_can_be_and_as_equal(queries, most):
    size = even_shard_size(queries, most)
    shards = max(1, -(-queries // most))

    assert 1 <= size <= most
    assert max(1, -(-queries // size)) == shards
    assert queries == 0 or (size - 1) * shards < queries


@given(queries=st.integers(0, 200), shard_size=st.integers(1, 60))
@settings(max_examples=200, deadline=None)
def test_shards_are_full_but_for_the_last_and_hold_all_queries(queries, shard_size):
    shards = max(1, -(-queries // shard_size))
    plan = make_plan(shards=shards, shard_size=shard_size)
    entry = entry_of(plan, "oversample").model_copy(update={"rows": queries, "parts": shards})
    rows = [planned_rows(plan, entry, part) for part in entry.shards]
    assert sum(rows) == queries
    assert all(row == shard_size for row in rows[:-1])
    assert 0 <= rows[-1] <= shard_size


def test_lines_are_one_part_and_what_only_the_stage_can_know_is_not_planned():
    plan = make_plan(bad_lines=2)
    assert planned_rows(plan, entry_of(plan, "log_lines"), 0) == 9
    assert [planned_rows(plan, entry_of(plan, "queries"), part) for part in (0, 1)] == [3, 2]
    assert planned_rows(plan, entry_of(plan, "rescue_searches"), 0) is None


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    stages=st.lists(st.sampled_from(["queries", "oversample", "context"]), min_size=5, max_size=5),
)
@settings(max_examples=100, deadline=None)
def test_a_shard_that_replays_is_planned_for_the_queries_it_replays(sizes, stages):
    chosen = sorted(stages[: len(sizes)], key=["queries", "oversample", "context"].index)
    replays = [
        Replay(
            shard=shard, from_stage=stage, attempt=2,
            queries=[ReplayedQuery(query_id=f"q{n}", shard=0, log_lines=1) for n in range(size)],
        )
        for shard, (size, stage) in enumerate(zip(sizes, chosen, strict=True), start=2)
    ]  # fmt: skip
    plan = plan_with(make_plan(), *replays)
    for name in ("queries", "oversample", "context"):
        first, *added = stage_entries(plan, name)
        assert [planned_rows(plan, first, part) for part in first.shards] == [3, 2]
        planned = {part: planned_rows(plan, entry, part) for entry in added for part in entry.shards}
        order = ["queries", "oversample", "context"]
        wanted = {
            replay.shard: len(replay.queries)
            for replay in replays
            if order.index(replay.from_stage) <= order.index(name)
        }
        assert planned == wanted
        assert sum(planned.values()) == sum(entry.rows for entry in added)


def test_a_shard_of_the_first_pass_replays_nothing():
    replay = make_replay(2, "oversample", make_letter("q1"))
    plan = plan_with(make_plan(), replay)
    assert [replay_of(plan, part) for part in range(4)] == [None, None, replay, None]
    assert replay_of(make_plan(), 2) is None


def test_the_manifests_of_a_stage_are_those_of_its_shards_and_of_its_replays(store):
    plan = replay_everything(store, with_dead_letters(store))
    commit_all(store, plan)
    places = {name: [manifest.shard for manifest in stage_manifests(store, plan, name)] for name in stage_names(plan)}
    assert places == {
        "log_lines": [0], "queries": [0, 1], "oversample": [0, 1, 2], "rescue_searches": [0], "context": [0, 1, 2, 3],
    }  # fmt: skip


def test_a_part_of_a_stage_that_is_not_there_is_named(store):
    plan = make_plan()
    commit_all(store, plan, but=[("context", 1)])
    with pytest.raises(MissingArtifactError) as caught:
        list(stage_manifests(store, plan, "context"))
    assert str(caught.value) == (
        "run run-a, stage context: is not finished: got no part 1. Run `dartflow resume run-a`."
    )
    with pytest.raises(ConfigurationError, match="has no such stage"):
        list(stage_manifests(store, plan, "rerank"))


def test_dead_letters_are_told_in_the_order_of_stages_and_parts(store):
    plan = make_plan(bad_lines=2)
    assert open_letters(store, plan) == []
    taken = {("queries", 1): ["q3"], ("oversample", 0): ["q2", "q0"], ("oversample", 1): ["q4"]}
    commit_all(store, plan, taken=taken)
    letters = open_letters(store, plan)
    assert [(letter.stage, letter.shard, letter.query_id or letter.line_number) for letter in letters] == [
        ("log_lines", 0, 0), ("log_lines", 0, 1), ("queries", 1, "q3"), ("oversample", 0, "q2"),
        ("oversample", 0, "q0"), ("oversample", 1, "q4"),
    ]  # fmt: skip
    assert [letter.log_lines for letter in letters] == [1, 1, 1, 2, 2, 1]


def test_what_was_replayed_is_no_open_dead_letter_any_more(store):
    parent = with_dead_letters(store)
    assert [letter.query_id for letter in open_letters(store, parent)] == [None, "q1", "q2", "q4"]
    plan = replay_everything(store, parent)
    assert [letter.query_id for letter in open_letters(store, plan)] == [None]
    assert [letter.query_id for letter in open_letters(store, parent)] == [None, "q1", "q2", "q4"]


def test_a_query_that_fails_again_is_a_dead_letter_of_its_replay(store):
    plan = replay_everything(store, with_dead_letters(store))
    commit_all(store, plan, taken={("oversample", 2): ["q2"], ("context", 2): ["q1"]})
    _, *letters = open_letters(store, plan)
    assert [(letter.run_id, letter.stage, letter.shard, letter.query_id, letter.attempt) for letter in letters] == [
        ("run-b", "oversample", 2, "q2", 2), ("run-b", "context", 2, "q1", 2),
    ]  # fmt: skip
    last = plan_with(plan, make_replay(4, "oversample", letters[0]), make_replay(5, "context", letters[1]), run_id="c")
    borrow_all(store, plan, last)
    commit_all(store, last)
    assert [letter.query_id for letter in open_letters(store, last)] == [None]


def test_the_same_query_of_another_shard_or_stage_stays_a_dead_letter(store):
    parent = with_dead_letters(store)
    _, first, *_ = open_letters(store, parent)
    for elsewhere in ({"shard": 1}, {"query_id": "q0"}):
        other = make_replay(2, "oversample", first.model_copy(update=elsewhere))
        plan = parent.model_copy(update={"run_id": "run-b", "replays": [other]})
        commit_all(store, plan, taken=TAKEN)
        assert first.query_id in [letter.query_id for letter in open_letters(store, plan)]
        for path in store.files("runs/run-b"):
            store.delete(path)
    plan = parent.model_copy(update={"run_id": "run-b", "replays": [make_replay(2, "context", first)]})
    commit_all(store, plan, taken=TAKEN)
    assert first.query_id in [letter.query_id for letter in open_letters(store, plan)]


def test_very_many_replayed_dead_letters_are_told_apart_quickly(store):
    plan = make_plan(log_lines=10_000)
    letters = [make_letter(f"q{number}", original="?") for number in range(10_000)]
    plan = plan.model_copy(update={"replays": [make_replay(2, "oversample", *letters[:-1])]})
    commit_all(store, plan, but=[("oversample", 0)])
    entry = entry_of(plan, "oversample")
    commit_part(store, plan, entry, 0, letters=letters)
    started = time.perf_counter()
    assert open_letters(store, plan) == letters[-1:]
    assert time.perf_counter() - started < 10


def test_a_damaged_manifest_is_refused_before_its_dead_letters_are_read(store):
    plan = with_dead_letters(store)
    rewrite(store, plan, "oversample", 0, shard=1)
    with pytest.raises(CorruptArtifactError, match="belongs to another artifact") as caught:
        open_letters(store, plan)
    assert caught.value.where == path_of(plan, "oversample")


def test_what_stopped_a_run_is_noted_until_the_note_is_cleared(store):
    assert failure_of(store, "run-a") is None
    clear_failure(store, "run-a")
    error = StageError("stage oversample", "stopped \ud83d", next_step="Go.")
    error.__cause__ = KeyError("chunk")
    record_failure(store, "run-a", error)
    assert failure_of(store, "run-a") == "stage oversample: stopped \ud83d. Go."
    note = json.loads(store.read("runs/run-a/failure.json"))
    assert note["kind"] == "StageError"
    assert "KeyError: 'chunk'" in "".join(note["traceback"])
    clear_failure(store, "run-a")
    clear_failure(store, "run-a")
    assert failure_of(store, "run-a") is None


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"null", b"[]", b"{}", b'"error"', b'{"kind": "StageError"}'])
def test_a_note_that_cannot_be_read_is_still_a_failure(store, data):
    store.write("runs/run-a/failure.json", data)
    assert failure_of(store, "run-a") == "a failure whose note cannot be read: runs/run-a/failure.json"
