"""Poison: a query that a stage cannot take lands in dead letters, the rest goes on, and a replay brings it back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flows.engine
import flows.log_shards
from checkpoints.run import create_run, load_plan, open_letters, run_ids, stage_manifests
from checkpoints.store import Store
from checkpoints.verdict import account_problems, committed, verdict
from checkpoints.verify import verify
from contracts.errors import (
    ChangedRunError,
    DartflowError,
    ModelError,
    RefusedError,
    RunHeldError,
    StageError,
    TimedOutError,
    TransientError,
)
from contracts.manifest import RunPlan, Verdict
from flows import cli
from flows.export import stage_tables
from flows.replay import plan_replay
from flows.settings import validated
from loading.query_log import embed_queries
from stages.pipeline import RUNS_ONCE, find_stage, numbered_stages
from tests.small import planned, session_of, small_store

# Where a query can be taken out: every stage with a row a query.
STAGES = ["queries", *(stage.name for _, stage in numbered_stages() if stage.name not in RUNS_ONCE)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("poison")


@pytest.fixture(scope="module")
def store(folder) -> Store:
    return small_store(folder)


@pytest.fixture(scope="module")
def undisturbed(store, folder) -> RunPlan:
    plan = planned(store, folder, "undisturbed")
    assert session_of(store, plan).execute().verdict == "partial"  # the log has a bad line
    return plan


@pytest.fixture(scope="module")
def query_ids(store, undisturbed) -> list[str]:
    return [one for table in stage_tables(store, undisturbed, "queries") for one in table["query_id"].to_pylist()]


@pytest.fixture
def poisoned(monkeypatch):
    """Makes stages fail for some queries: called with stage to ids, and again with nothing for the fix."""

    def poison(faults: Mapping[str, Iterable[str]], error=None):
        error = error or ValueError("cannot be read")

        def find(name):
            stage = find_stage(name)

            def run(**tables):
                read = [table for table in tables.values() if "query_id" in getattr(table, "column_names", ())]
                if any(set(faults.get(name, ())) & set(table["query_id"].to_pylist()) for table in read):
                    raise error
                return stage.run(**tables)

            return dataclasses.replace(stage, run=run)

        def embed(queries, vectors, embedder):
            if set(faults.get("queries", ())) & set(queries["query_id"].to_pylist()):
                raise error
            return embed_queries(queries, vectors, embedder)

        monkeypatch.setattr(flows.engine, "find_stage", find)
        monkeypatch.setattr(flows.log_shards, "embed_queries", embed)

    return poison


def rows(store: Store, plan: RunPlan, stage: str) -> dict[str, dict]:
    """Query id to row over all parts; a query that stood twice would be lost in the comparison of counts."""
    found = [row for table in stage_tables(store, plan, stage) for row in table.to_pylist()]
    by_id = {row["query_id"]: row for row in found}
    assert len(by_id) == len(found)
    return by_id


def replayed(store: Store, parent: RunPlan) -> tuple[RunPlan, Verdict]:
    plan = plan_replay(store, parent, validated(parent.settings))
    assert plan is not None
    if plan.run_id not in run_ids(store):
        create_run(store, plan)
    plan = load_plan(store, plan.run_id)
    return plan, session_of(store, plan).execute()


def is_sound(store: Store, plan: RunPlan) -> None:
    assert account_problems(plan, committed(store, plan)) == []
    assert [finding for finding in verify(store, plan) if finding[1] != "ok"] == []


@pytest.mark.parametrize("stage", STAGES)
def test_a_poisoned_query_is_taken_out_and_a_replay_brings_it_back(
    store, folder, undisturbed, query_ids, poisoned, stage
):
    poison = query_ids[7]
    plan = planned(store, folder, f"poison-{stage}")
    poisoned({stage: [poison]})
    result = session_of(store, plan).execute()
    assert (result.verdict, result.dead_letters, result.lost_log_lines) == ("partial", 2, 3)
    letter = open_letters(store, plan)[-1]
    assert (letter.stage, letter.query_id, letter.attempt, letter.log_lines) == (stage, poison, 1, 2)
    assert letter.reason == "ValueError: cannot be read"
    assert "option 7" in letter.original
    after = STAGES[STAGES.index(stage) :]
    for name in STAGES:
        expected = rows(store, undisturbed, name)
        if name in after:
            del expected[poison]
        assert rows(store, plan, name) == expected, name
    is_sound(store, plan)

    poisoned({})
    again, result = replayed(store, plan)
    assert (result.verdict, result.dead_letters, result.lost_log_lines) == ("partial", 1, 1)  # the bad line
    for name in STAGES:
        assert rows(store, again, name) == rows(store, undisturbed, name), name
    is_sound(store, again)
    computed = {one.stage: one.computed for one in result.stages}
    searches = STAGES.index(stage) <= STAGES.index("family_rescue")  # these are made for the replayed queries too
    after = {*after, "family_searches"} if searches else after
    assert computed == {one.stage: int(one.stage in after) for one in result.stages}

    before = {path: store.read(path) for path in store.files("runs") if "/lease/" not in path}
    twice, result = replayed(store, plan)
    assert (twice.run_id, result.verdict) == (again.run_id, "partial")
    assert plan_replay(store, again, validated(again.settings)) is None  # nothing is left to replay
    assert {path: store.read(path) for path in store.files("runs") if "/lease/" not in path} == before


def test_what_fails_again_is_a_dead_letter_again_and_can_be_replayed_from_there(
    store, folder, undisturbed, query_ids, poisoned
):
    first, second = query_ids[2], query_ids[5]
    plan = planned(store, folder, "twice-poisoned")
    poisoned({"log_normal": [first], "rrf_merge": [second]})
    session_of(store, plan).execute()
    poisoned({"log_normal": [first], "context": [second]})
    once, result = replayed(store, plan)
    assert result.dead_letters == 3
    assert [(letter.stage, letter.query_id, letter.attempt) for letter in open_letters(store, once)[1:]] == [
        ("log_normal", first, 2), ("context", second, 2),
    ]  # fmt: skip
    is_sound(store, once)
    poisoned({})
    again, result = replayed(store, once)
    assert result.dead_letters == 1
    for name in STAGES:
        assert rows(store, again, name) == rows(store, undisturbed, name), name
    is_sound(store, again)


def test_a_rerun_after_the_fix_takes_the_queries_up_in_their_shards(store, folder, undisturbed, query_ids, poisoned):
    from flows.planning import plan_rerun

    plan = planned(store, folder, "rerun-poisoned")
    poisoned({"greedy_selection": query_ids[3:5]})
    session_of(store, plan).execute()
    poisoned({})
    for run_id, parent in (("rerun-fixed", plan), ("rerun-of-replay", replayed(store, plan)[0])):
        again = plan_rerun(store, parent, validated(plan.settings), from_stage="greedy_selection", run_id=run_id)
        create_run(store, again)
        assert session_of(store, again).execute().dead_letters == 1
        assert again.replays == []
        for name in STAGES:
            assert rows(store, again, name) == rows(store, undisturbed, name), name
        is_sound(store, again)


def test_a_query_that_fails_in_a_rerun_is_left_out_of_what_the_rerun_borrows_too(
    store, folder, undisturbed, query_ids, poisoned
):
    from flows.planning import plan_rerun

    again = plan_rerun(
        store, undisturbed, validated(undisturbed.settings), from_stage="greedy_selection", run_id="fails-in-rerun"
    )
    create_run(store, again)
    poisoned({"greedy_selection": [query_ids[6]]})
    result = session_of(store, again).execute()
    assert (result.verdict, result.dead_letters) == ("partial", 2)
    stages = {one.stage: (one.computed, one.borrowed) for one in result.stages}
    assert stages["sparse_search"] == (1, 2)  # the shard of that query is computed without it
    assert stages["oversample"] == (0, 3)
    is_sound(store, again)
    poisoned({})
    whole, result = replayed(store, again)
    assert result.dead_letters == 1
    for name in STAGES:
        assert rows(store, whole, name) == rows(store, undisturbed, name), name
    is_sound(store, whole)


def test_queries_of_a_shape_that_nobody_else_asks_get_their_searches_in_the_replay(
    store, folder, undisturbed, query_ids, poisoned
):
    plan = planned(store, folder, "only-of-their-shape")
    poisoned({"queries": query_ids[0::3]})  # all that ask how and why
    session_of(store, plan).execute()
    poisoned({})
    again, result = replayed(store, plan)
    assert result.dead_letters == 1
    for name in STAGES:
        assert rows(store, again, name) == rows(store, undisturbed, name), name
    is_sound(store, again)


def test_a_replay_with_other_settings_is_refused(store, folder, query_ids, poisoned):
    plan = planned(store, folder, "other-settings")
    poisoned({"rrf_merge": query_ids[:1]})
    session_of(store, plan).execute()
    other = validated({**plan.settings, "log_normal": {"sigma": 0.7}})
    with pytest.raises(ChangedRunError, match=r"stage log_normal: has other settings now: got sigma: 0\.1 -> 0\.7"):
        plan_replay(store, plan, other)


def test_an_interrupted_stage_remembers_what_it_has_lost(store, folder, query_ids, poisoned, monkeypatch):
    plan = planned(store, folder, "remembers", "run.dead_letter_count=3", "executor.workers=1")
    poisoned({"rrf_merge": [query_ids[0], query_ids[1], query_ids[4], query_ids[5]]})
    with pytest.raises(StageError, match="error budget"):
        session_of(store, plan).execute()
    with pytest.raises(StageError, match="error budget"):
        session_of(store, plan).execute()
    assert verdict(store, plan).lost_log_lines <= 3


def test_any_error_leaves_a_note_so_that_the_run_reads_as_failed(store, folder, monkeypatch):
    plan = planned(store, folder, "noted")

    def no_memory(*_given, **_more):
        raise MemoryError("no room")

    monkeypatch.setattr(flows.engine, "commit", no_memory)
    with pytest.raises(StageError, match="MemoryError: no room"):
        session_of(store, plan).execute()
    result = verdict(store, plan)
    assert (result.verdict, "MemoryError" in str(result.because)) == ("failed", True)


def test_a_thread_that_outlives_its_run_commits_nothing(store, folder):
    plan = planned(store, folder, "outlived")
    session = session_of(store, plan)
    session.execute()
    with pytest.raises(RunHeldError, match="was let go by this process"):
        session._commit(plan.stages[2], 0, None, 0.0)


def test_sparse_search_is_computed_again_when_it_left_out_what_an_earlier_stage_lets_pass_now(
    store, folder, query_ids, poisoned
):
    from flows.planning import plan_rerun

    plan = planned(store, folder, "left-out")
    poisoned({"oversample": query_ids[:1]})
    session_of(store, plan).execute()
    poisoned({})
    again = plan_rerun(store, plan, validated(plan.settings), from_stage="oversample", run_id="left-out-again")
    because = {entry.stage: entry.because for entry in again.stages}
    assert because["sparse_search"] == "left out queries that greedy_selection may let pass now"
    assert because["family_searches"] == "nothing it depends on has changed"


def test_a_run_over_its_error_budget_fails_and_says_so(store, folder, query_ids, poisoned):
    plan = planned(store, folder, "over-budget", "run.dead_letter_count=3")
    poisoned({"rrf_merge": query_ids[:3]})
    with pytest.raises(StageError, match="more queries fail than the error budget allows") as stopped:
        session_of(store, plan).execute()
    assert "ValueError: cannot be read" in str(stopped.value)
    result = verdict(store, plan)
    assert result.verdict == "failed"
    assert "error budget" in str(result.because)
    poisoned({})
    assert session_of(store, plan).execute().verdict == "partial"


def test_the_lines_of_a_query_count_against_the_budget(store, folder, query_ids, poisoned):
    plan = planned(store, folder, "many-lines", "run.dead_letter_count=2")
    poisoned({"rrf_merge": [query_ids[7]]})  # one query, two lines; and the log has a bad line
    with pytest.raises(StageError, match="has more dead letters than its error budget: got 3 log lines lost"):
        session_of(store, plan).execute()
    assert verdict(store, plan).verdict == "failed"


@pytest.mark.parametrize(
    ("error", "tries"), [(TransientError, 4), (TimedOutError, 4), (RefusedError, 1), (OSError, 1), (MemoryError, 1)]
)
def test_a_service_that_is_down_is_retried_then_fails_the_shard_and_quarantines_nothing(
    store, folder, monkeypatch, error, tries
):
    plan = planned(store, folder, f"down-{error.__name__.lower()}", "executor.workers=1")
    fault = error("service", "is down", next_step="Wait.") if issubclass(error, DartflowError) else error("no")
    asked = []

    def find(name):
        stage = find_stage(name)

        def run(**tables):
            asked.append(tables["queries"]["query_id"][0].as_py())
            raise fault

        return dataclasses.replace(stage, run=run) if name == "blended_rerank" else stage

    monkeypatch.setattr(flows.engine, "find_stage", find)
    with pytest.raises(DartflowError):
        session_of(store, plan).execute()
    assert asked.count(asked[0]) == tries
    assert verdict(store, plan).verdict == "failed"
    assert [letter.stage for letter in open_letters(store, plan)] == ["log_lines"]
    monkeypatch.undo()
    assert session_of(store, plan).execute().verdict == "partial"


def test_a_model_that_gives_no_usable_answer_for_one_query_takes_that_query_out(store, folder, query_ids, poisoned):
    plan = planned(store, folder, "no-answer")
    poisoned({"crag_grading": [query_ids[1]]}, ModelError("grader", "gave no answer", next_step="See the model."))
    session_of(store, plan).execute()
    assert open_letters(store, plan)[-1].reason.startswith("ModelError: grader: gave no answer")


def test_a_shard_whose_queries_fail_only_together_fails_as_a_whole(store, folder, monkeypatch):
    plan = planned(store, folder, "together")

    def find(name):
        stage = find_stage(name)

        def run(**tables):
            if tables["oversample"].num_rows > 1:
                raise ValueError("too many at once")
            return stage.run(**tables)

        return dataclasses.replace(stage, run=run) if name == "distance_matrices" else stage

    monkeypatch.setattr(flows.engine, "find_stage", find)
    with pytest.raises(
        StageError, match=r"stage distance_matrices, shard \d: stopped: got ValueError: too many at once"
    ):
        session_of(store, plan).execute()
    assert [letter.stage for letter in open_letters(store, plan)] == ["log_lines"]


def test_a_stage_that_takes_every_candidate_away_is_seen(store, folder):
    nothing_is_good = (
        "crag_grading.lower=0.99",
        "crag_grading.upper=1.0",
        "blended_rerank.exact_token_bonus=0",
        "family_rescue.enabled=false",
    )
    plan = planned(store, folder, "emptied", *nothing_is_good)
    with pytest.raises(StageError, match=r"has left no candidate for any query: .* incorrect"):
        session_of(store, plan).execute()
    assert verdict(store, plan).verdict == "failed"
    plan = planned(store, folder, "may-be-empty", *nothing_is_good, "run.allow_emptied_stages=true")
    result = session_of(store, plan).execute()
    assert result.verdict == "partial"
    assert any("has left no candidate" in note for note in result.notes)


def test_every_manifest_says_how_searches_ended(store, undisturbed):
    (dense,) = {tuple(one.calls["dense_search"].items()) for one in stage_manifests(store, undisturbed, "oversample")
                if one.rows == 4}  # fmt: skip
    assert dense == (("ok", 4),)
    assert all(one.calls for one in stage_manifests(store, undisturbed, "sparse_search"))


def test_the_commands_tell_the_dead_letters_and_replay_them(store, folder, query_ids, poisoned, capsys, monkeypatch):
    plan = planned(store, folder, "by-command")
    poisoned({"rrf_merge": [query_ids[7]]})
    session_of(store, plan).execute()

    def dartflow(*words):
        monkeypatch.setattr("sys.argv", ["dartflow", *words, "--store", str(folder / "store")])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, capsys.readouterr().out

    status, out = dartflow("dead-letters", "by-command")
    assert status == 0
    assert "2 dead letters take out 3 lines of the log" in out
    assert "ValueError: cannot be read" in out
    poisoned({})
    status, out = dartflow("replay", "by-command", "--without-prefect")
    assert status == 3
    assert "verdict: partial (1 dead letters)" in out
    (child,) = [run_id for run_id in run_ids(store) if run_id.startswith("by-command-replay-")]
    status, out = dartflow("replay", child, "--without-prefect")
    assert status == 3
    assert len([run_id for run_id in run_ids(store) if run_id.startswith("by-command")]) == 2


@given(
    faults=st.dictionaries(st.sampled_from(STAGES), st.sets(st.integers(0, 9), max_size=3), max_size=4),
    share=st.sampled_from([0.1, 0.5, 1.0]),
    fixed=st.booleans(),
)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_in_equals_out_whatever_fails(store, folder, undisturbed, query_ids, poisoned, faults, share, fixed):
    number = sum(run_id.startswith("random-") for run_id in run_ids(store))
    plan = planned(store, folder, f"random-{number}", f"run.dead_letter_share={share}")
    poisoned({stage: [query_ids[one] for one in some] for stage, some in faults.items()})
    try:
        result = session_of(store, plan).execute()
    except StageError:
        result = verdict(store, plan)
        assert result.verdict == "failed"
    found = committed(store, plan)
    assert account_problems(plan, found) == []
    if result.verdict != "partial":
        return
    # A query is taken out once, by the first stage that cannot take it.
    first = {one: stage for stage in reversed(STAGES) for one in faults.get(stage, ())}
    letters = [letter for letter in open_letters(store, plan) if letter.query_id is not None]
    assert {letter.query_id: letter.stage for letter in letters} == {query_ids[one]: s for one, s in first.items()}
    is_sound(store, plan)
    if letters:
        poisoned({} if fixed else {stage: [query_ids[one] for one in some] for stage, some in faults.items()})
        again, result = replayed(store, plan)
        assert result.dead_letters == (1 if fixed else 1 + len(letters))
        is_sound(store, again)
