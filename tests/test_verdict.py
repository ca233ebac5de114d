"""Verdicts: the weightiest truth of a run, and every line, query or candidate that came or went without a reason."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.commit import borrow
from checkpoints.lease import LeaseRecord, hold
from checkpoints.manifests import run_digest
from checkpoints.records import sealed, unsealed
from checkpoints.run import clear_failure, create_run, open_letters, record_failure
from checkpoints.store import Store
from checkpoints.summary import Summary, summary_of
from checkpoints.verdict import account_problems, committed, emptied, lost_log_lines, stage_status, verdict
from contracts.errors import CorruptArtifactError, StageError
from contracts.manifest import Account, DeadLetterFile, Manifest, RunPlan
from tests.runs import (
    PARTS,
    borrow_all,
    commit_all,
    commit_part,
    entry_of,
    make_plan,
    make_replay,
    manifest_of,
    path_of,
    plan_with,
    rewrite,
)

# Every stage takes queries out; q2 and q0 stand for two lines of the log each.
TAKEN = {("queries", 1): ["q3"], ("oversample", 0): ["q2"], ("context", 0): ["q0"]}
NOTHING_LEFT = Account(candidates_in=9, added={"found": 1}, removed={"cut": 7, "below": 3}, candidates_out=0)


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


def hold_run(store):
    return hold(store, "runs/run-a", "run run-a")


def test_a_run_with_nothing_committed_is_interrupted(store):
    create_run(store, make_plan())
    found = verdict(store, make_plan())
    assert found.verdict == "interrupted"
    assert found.because == (
        "missing parts: log_lines (1), queries (2), oversample (2), rescue_searches (1), context (2)"
    )
    assert [stage.missing for stage in found.stages] == [1, 2, 2, 1, 2]


def test_a_run_with_everything_committed_is_complete(store, finished):
    found = verdict(store, finished)
    assert (found.verdict, found.because, found.notes) == ("complete", None, [])
    assert [(stage.stage, stage.rows_in, stage.rows_out, stage.dead_letters) for stage in found.stages] == [
        ("log_lines", 7, 7, 0), ("queries", 5, 5, 0), ("oversample", 5, 5, 0), ("rescue_searches", 5, 2, 0),
        ("context", 5, 5, 0),
    ]  # fmt: skip
    assert [(stage.computed, stage.borrowed, stage.missing, stage.seconds) for stage in found.stages] == [
        (1, 0, 0, 0.5), (2, 0, 0, 1.0), (2, 0, 0, 1.0), (1, 0, 0, 0.5), (2, 0, 0, 1.0),
    ]  # fmt: skip
    assert (found.run_id, found.log_lines, found.distinct_queries) == ("run-a", 7, 5)
    assert (found.dead_letters, found.lost_log_lines) == (0, 0)
    assert (found.snapshot_id, found.access_control) == ("corpus-1", False)
    assert found.results == f"{store.uri}/runs/run-a/03-context"


@pytest.mark.parametrize("missing", PARTS)
def test_a_run_that_misses_any_artifact_is_interrupted(store, missing):
    plan = make_plan()
    create_run(store, plan)
    commit_all(store, plan, but=(missing,))
    found = verdict(store, plan)
    assert (found.verdict, found.because) == ("interrupted", f"missing parts: {missing[0]} (1)")
    assert {stage.stage: stage.missing for stage in found.stages if stage.missing} == {missing[0]: 1}


def test_a_parquet_file_without_a_manifest_is_not_committed(store, finished):
    store.delete(path_of(finished, "oversample", 1))
    assert verdict(store, finished).verdict == "interrupted"


def test_a_held_run_is_running_whatever_else_is_true(store, finished):
    with hold_run(store):
        found = verdict(store, finished)
        assert found.verdict == "running"
        assert " is at it, last heard of " in found.because
        store.delete(path_of(finished, "oversample", 1))
        record_failure(store, "run-a", StageError("here", "broke", next_step="Go."))
        assert verdict(store, finished).verdict == "running"
    assert verdict(store, finished).verdict == "failed"


def test_a_lease_that_is_silent_for_long_is_no_running_run(store, finished):
    with hold_run(store):
        (path,) = store.files("runs/run-a/lease")
        data = store.read(path)
        record = unsealed(data, LeaseRecord, path, next_step="Go.")
        silent = record.model_copy(update={"beat_at": time.time() - 3600, "process": None})
        store.write(path, sealed(silent))
        assert verdict(store, finished).verdict == "complete"
        store.write(path, data)
        assert verdict(store, finished).verdict == "running"


def test_a_run_whose_process_was_killed_is_interrupted_at_once(store):
    plan = make_plan()
    commit_all(store, plan, but=[("context", 1)])
    held = (
        "import sys, time; from checkpoints.lease import hold; from checkpoints.store import Store\n"
        "with hold(Store(sys.argv[1]), 'runs/run-a', 'run'): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", held, store.uri], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        assert verdict(store, plan).verdict == "running"
        process.send_signal(signal.SIGKILL)
    assert verdict(store, plan).verdict == "interrupted"


def test_a_run_that_was_stopped_by_an_error_is_failed_until_the_note_is_cleared(store):
    plan = make_plan()
    commit_all(store, plan, but=(("oversample", 1),))
    record_failure(store, "run-a", StageError("stage oversample", "stopped", next_step="Go."))
    found = verdict(store, plan)
    assert (found.verdict, found.because) == ("failed", "stage oversample: stopped. Go.")
    clear_failure(store, "run-a")
    assert verdict(store, plan).verdict == "interrupted"


# What can be true of a run beside its dead letters, the weightiest first, with the verdict and its beginning.
CAUSES = {
    "held": ("running", ""),
    "stopped": ("failed", "stage context: stopped"),
    "over budget": ("failed", "dead letters take out 5 log lines, the error budget allows 4"),
    "unbalanced": ("failed", "oversample, part 1: candidates do not add up"),
    "unfinished": ("interrupted", "missing parts: context (1)"),
    "emptied": ("failed", "oversample has left no candidate for any query"),
    "dead letters": ("partial", "3 dead letters"),
}


@pytest.mark.parametrize(
    "causes",
    [causes for size in (0, 1, 2, len(CAUSES)) for causes in combinations(CAUSES, size)],
    ids=lambda causes: ", ".join(causes) or "nothing",
)
def test_the_weightiest_of_all_that_is_true_is_the_verdict(store, causes):
    allowed = 4 if "over budget" in causes else 5
    lost = bool({"over budget", "dead letters"} & {*causes})
    plan = make_plan(dead_letters_allowed=allowed)
    commit_all(store, plan, but=[("context", 1)] if "unfinished" in causes else [], taken=TAKEN if lost else {})
    if "emptied" in causes:
        for part in (0, 1):
            rewrite(store, plan, "oversample", part, account=NOTHING_LEFT)
    if "unbalanced" in causes:
        account = manifest_of(store, plan, "oversample", 1).account
        rewrite(store, plan, "oversample", 1, account=account.model_copy(update={"candidates_in": 1}))
    if "stopped" in causes:
        record_failure(store, "run-a", StageError("stage context", "stopped", next_step="Go."))
    with ExitStack() as stack:
        if "held" in causes:
            stack.enter_context(hold_run(store))
        found = verdict(store, plan)
    name, because = CAUSES[causes[0]] if causes else ("complete", None)
    assert found.verdict == name
    assert (found.because is None) if because is None else found.because.startswith(because)
    assert (found.dead_letters, found.lost_log_lines) == ((3, 5) if lost else (0, 0))


@pytest.mark.parametrize(("bad_lines", "want"), [(0, "complete"), (1, "partial"), (2, "partial"), (3, "failed")])
def test_bad_lines_make_a_run_partial_and_above_the_budget_failed(store, bad_lines, want):
    plan = make_plan(bad_lines=bad_lines, dead_letters_allowed=2)
    commit_all(store, plan)
    found = verdict(store, plan)
    assert (found.verdict, found.dead_letters, found.lost_log_lines) == (want, bad_lines, bad_lines)
    assert found.stages[0].dead_letters == bad_lines


def test_the_bad_lines_of_the_log_count_before_anything_is_committed(store):
    found = verdict(store, make_plan(bad_lines=5))
    assert (found.verdict, found.dead_letters, found.lost_log_lines) == ("failed", 5, 5)


@pytest.mark.parametrize(("allowed", "want"), [(0, "failed"), (5, "failed"), (6, "partial"), (7, "partial")])
def test_a_query_that_is_taken_out_costs_all_its_lines_of_the_log(store, allowed, want):
    plan = make_plan(bad_lines=1, dead_letters_allowed=allowed)
    commit_all(store, plan, taken=TAKEN)
    found = verdict(store, plan)
    assert (found.verdict, found.dead_letters, found.lost_log_lines) == (want, 4, 6)
    assert [(stage.stage, stage.rows_out, stage.dead_letters) for stage in found.stages] == [
        ("log_lines", 8, 1), ("queries", 4, 1), ("oversample", 3, 1), ("rescue_searches", 2, 0), ("context", 2, 1),
    ]  # fmt: skip


def test_borrowed_parts_are_counted_apart_and_take_no_time(store, finished):
    plan = make_plan("run-b")
    create_run(store, plan)
    places = [("queries", 0), ("queries", 1), ("oversample", 0)]
    commit_all(store, plan, but=places)
    for stage, part in places:
        borrow(store, manifest_of(store, finished, stage, part), plan=plan, entry=entry_of(plan, stage))
    found = verdict(store, plan)
    assert found.verdict == "complete"
    assert [(stage.computed, stage.borrowed, stage.seconds) for stage in found.stages] == [
        (1, 0, 0.5), (0, 2, 0.0), (1, 1, 0.5), (1, 0, 0.5), (2, 0, 1.0),
    ]  # fmt: skip


def test_what_an_earlier_run_of_the_same_name_left_behind_is_no_part_of_a_verdict(store, finished):
    with pytest.raises(CorruptArtifactError, match="was made under another plan than the run's") as caught:
        verdict(store, make_plan(created_at="2026-12-01T02:15:00+00:00"))
    assert caught.value.where == path_of(finished, "log_lines")


def letter_file(letters: int) -> DeadLetterFile | None:
    return DeadLetterFile(file="x", sha256="x", letters=letters, log_lines=letters) if letters else None


UNBALANCED = Account(candidates_in=1, added={"found": 2}, removed={"cut": 1}, candidates_out=1)
PROBLEMS = [
    ("log_lines", 0, {"rows": 7}, "8 lines with 1 dead letters planned, 7 with 1 there"),
    ("log_lines", 0, {"dead_letters": None}, "8 lines with 1 dead letters planned, 8 with 0 there"),
    ("log_lines", 0, {"dead_letters": letter_file(2)}, "8 lines with 1 dead letters planned, 8 with 2 there"),
    ("queries", 0, {"rows": 2}, "3 queries planned, but 2 rows + 0 dead letters + 0 left out"),
    ("queries", 1, {"rows": 2}, "2 queries planned, but 2 rows + 1 dead letters + 0 left out"),
    ("queries", 0, {"dead_letters": letter_file(1)}, "3 queries planned, but 3 rows + 1 dead letters + 0 left out"),
    ("queries", 0, {"left_out": 1, "rows": 2}, "1 queries left out, but the stages before it have 0 dead letters"),
    ("oversample", 0, {"rows": 3}, "3 queries planned, but 3 rows + 1 dead letters + 0 left out"),
    ("oversample", 1, {"rows": 0}, "2 queries planned, but 0 rows + 0 dead letters + 1 left out"),
    ("oversample", 0, {"dead_letters": None}, "3 queries planned, but 2 rows + 0 dead letters + 0 left out"),
    ("oversample", 0, {"dead_letters": letter_file(2)}, "3 queries planned, but 2 rows + 2 dead letters + 0 left out"),
    ("oversample", 1, {"left_out": 0, "rows": 2}, "0 queries left out, but the stages before it have 1 dead letters"),
    ("context", 0, {"rows": 2}, "3 queries planned, but 2 rows + 1 dead letters + 1 left out"),
    (
        "context", 0, {"left_out": 2, "dead_letters": None},
        "2 queries left out, but the stages before it have 1 dead letters",
    ),
    ("context", 1, {"left_out": 0, "rows": 2}, "0 queries left out, but the stages before it have 1 dead letters"),
    ("oversample", 0, {"account": UNBALANCED}, f"candidates do not add up: {UNBALANCED.model_dump()}"),
    ("rescue_searches", 0, {"account": UNBALANCED}, f"candidates do not add up: {UNBALANCED.model_dump()}"),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "part", "changes", "problem"), PROBLEMS)
def test_a_number_that_does_not_add_up_fails_the_run_by_name(store, stage, part, changes, problem):
    plan = make_plan(bad_lines=1, dead_letters_allowed=9)
    commit_all(store, plan, taken=TAKEN)
    assert account_problems(plan, committed(store, plan)) == []
    assert verdict(store, plan).verdict == "partial"
    rewrite(store, plan, stage, part, **changes)
    found = verdict(store, plan)
    assert (found.verdict, found.because) == ("failed", f"{stage}, part {part}: {problem}")
    assert account_problems(plan, committed(store, plan))[0] == found.because


def test_dead_letters_that_a_stage_hides_are_missed_by_every_stage_after_it(store):
    plan = make_plan(dead_letters_allowed=9)
    commit_all(store, plan, taken=TAKEN)
    rewrite(store, plan, "queries", 1, dead_letters=None, rows=2)
    assert account_problems(plan, committed(store, plan)) == [
        f"{stage}, part 1: 1 queries left out, but the stages before it have 0 dead letters"
        for stage in ("oversample", "context")
    ]


def test_a_part_is_held_against_earlier_stages_only_where_they_are_there(store):
    plan = make_plan()
    commit_all(store, plan, taken=TAKEN)
    rewrite(store, plan, "context", 1, left_out=2, rows=0)
    (problem,) = account_problems(plan, committed(store, plan))
    assert problem == "context, part 1: 2 queries left out, but the stages before it have 1 dead letters"
    store.delete(path_of(plan, "queries", 1))
    assert account_problems(plan, committed(store, plan)) == []
    assert verdict(store, plan).verdict == "interrupted"


def test_rows_that_only_the_stage_can_know_are_not_held_against_the_plan(store, finished):
    rewrite(store, finished, "rescue_searches", rows=40)
    assert verdict(store, finished).verdict == "complete"


NAMES = ("queries", "oversample", "context")


@st.composite
def splits(draw):
    """Planned queries split into rows, letters and left out, stage by stage; a few numbers may be off by one."""
    plan = make_plan(shards=3, distinct_queries=8)
    stages = [
        entry.model_copy(update={"rows": 8, "parts": 3}) if entry.stage in NAMES else entry for entry in plan.stages
    ]
    plan = plan.model_copy(update={"stages": stages})
    numbers = {}
    for part, planned in enumerate((3, 3, 2)):
        gone = 0
        for stage in NAMES:
            letters = draw(st.integers(0, planned - gone))
            numbers[stage, part] = [planned - gone - letters, letters, gone]
            gone += letters
    for place in draw(st.lists(st.sampled_from(sorted(numbers)), max_size=3)):
        column = draw(st.integers(0, 2))
        numbers[place][column] = max(0, numbers[place][column] + draw(st.sampled_from([-1, 1])))
    return plan, numbers


def counted(plan: RunPlan, stage: str, part: int, rows: int, letters: int, left_out: int, **more) -> Manifest:
    """A manifest that was never written, with these numbers."""
    given_parts = {
        "run_id": plan.run_id, "plan": run_digest(plan), "stage": stage, "shard": part, "file": "x", "sha256": "x",
        "bytes": 1, "rows": rows, "logical_digest": "x", "key": "x", "key_parts": {}, "account": None,
        "left_out": left_out, "dead_letters": letter_file(letters), "borrowed_from": None, "started_at": "now",
        "seconds": 0.0,
    }  # fmt: skip
    return Manifest(**{**given_parts, **more})


def kept_in(plan: RunPlan, numbers, **more) -> dict[str, list[Summary]]:
    manifests = {place: counted(plan, *place, *counts, **more) for place, counts in numbers.items()}
    return {
        entry.stage: [summary_of(plan, entry, [manifests.get((entry.stage, part)) for part in entry.shards])]
        for entry in plan.stages
    }


@given(split=splits())
@settings(max_examples=300, deadline=None)
def test_queries_are_balanced_exactly_when_they_add_up(split):
    plan, numbers = split
    wrong = set()
    for part, planned in enumerate((3, 3, 2)):
        gone = 0
        for stage in NAMES:
            rows, letters, left_out = numbers[stage, part]
            if rows + letters + left_out != planned or left_out != gone:
                wrong.add(f"{stage}, part {part}")
            gone += letters
    assert {problem.split(":")[0] for problem in account_problems(plan, kept_in(plan, numbers))} == wrong


@given(split=splits(), missing=st.sets(st.tuples(st.sampled_from(NAMES), st.integers(0, 2)), max_size=4))
@settings(max_examples=100, deadline=None)
def test_parts_that_are_not_there_yet_are_no_problem(split, missing):
    plan, numbers = split
    before = set(account_problems(plan, kept_in(plan, numbers)))
    some = {place: counts for place, counts in numbers.items() if place not in missing}
    assert set(account_problems(plan, kept_in(plan, some))) <= before


COUNTS = st.dictionaries(st.sampled_from(["found", "rescued", "cut", "below"]), st.integers(0, 3), max_size=2)


@given(candidates_in=st.integers(0, 5), added=COUNTS, removed=COUNTS, candidates_out=st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_candidates_are_balanced_exactly_when_they_add_up(candidates_in, added, removed, candidates_out):
    account = Account(candidates_in=candidates_in, added=added, removed=removed, candidates_out=candidates_out)
    plan = make_plan()
    found = kept_in(plan, {("oversample", 0): (3, 0, 0)}, account=account)
    adds_up = candidates_in + sum(added.values()) - sum(removed.values()) - candidates_out == 0
    assert (account_problems(plan, found) == []) is adds_up


def test_a_stage_that_leaves_no_candidate_for_any_query_fails_the_run(store, finished):
    for part in (0, 1):
        assert verdict(store, finished).verdict == "complete"
        rewrite(store, finished, "oversample", part, account=NOTHING_LEFT)
    found = verdict(store, finished)
    said = "oversample has left no candidate for any query: 6 below, 14 cut"
    assert (found.verdict, found.because, found.notes) == ("failed", said, [said])


def test_an_emptied_stage_is_only_noted_where_the_plan_allows_it(store):
    plan = make_plan(allow_emptied_stages=True)
    commit_all(store, plan)
    for stage in ("oversample", "context"):
        for part in (0, 1):
            rewrite(store, plan, stage, part, account=NOTHING_LEFT)
    found = verdict(store, plan)
    assert (found.verdict, found.because) == ("complete", None)
    assert found.notes == [
        f"{stage} has left no candidate for any query: 6 below, 14 cut" for stage in ("oversample", "context")
    ]


def test_a_stage_that_never_had_a_candidate_has_emptied_nothing(store, finished):
    nothing = Account(candidates_in=0, added={}, removed={}, candidates_out=0)
    for stage in ("oversample", "context"):
        for part in (0, 1):
            rewrite(store, finished, stage, part, account=nothing)
    found = verdict(store, finished)
    assert (found.verdict, found.notes) == ("complete", [])


ACCOUNTS = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)).filter(lambda one: sum(one[:2]) >= one[2])


@given(accounts=st.lists(st.none() | ACCOUNTS, max_size=4))
@settings(max_examples=200, deadline=None)
def test_a_stage_is_emptied_exactly_when_it_had_candidates_and_has_none(accounts):
    plan, found = make_plan(), []
    for part, numbers in enumerate(accounts):
        account = None
        if numbers is not None:
            had, added, out = numbers
            account = Account(
                candidates_in=had, added={"found": added}, removed={"cut": had + added - out}, candidates_out=out
            )
        found.append(counted(plan, "oversample", part, 3, 0, 0, account=account))
    known = [numbers for numbers in accounts if numbers is not None]
    had, out = sum(one[0] + one[1] for one in known), sum(one[2] for one in known)
    said = f"oversample has left no candidate for any query: {had} cut"
    entry = entry_of(plan, "oversample").model_copy(update={"parts": len(found)})
    assert emptied("oversample", [summary_of(plan, entry, found)]) == (said if had and not out else None)


def note_of(store, *calls) -> list[str]:
    """The notes on a run whose two context shards ended their calls so."""
    plan = make_plan()
    commit_all(store, plan, but=[("context", 0), ("context", 1)])
    for part, counts in enumerate(calls):
        commit_part(store, plan, entry_of(plan, "context"), part, calls=counts)
    found = verdict(store, plan)
    assert found.verdict == "complete"
    return found.notes


@pytest.mark.parametrize(
    ("first", "second", "notes"),
    [
        ({"no_match": 3}, {"no_match": 2}, ["keyword_search found nothing for any of 5 queries"]),
        ({"no_match": 3}, {"no_match": 1, "ok": 1}, []),
        ({"ok": 3}, {"ok": 2}, []),
        ({"ok": 3, "failed": 2}, {"failed": 1, "ok": 2}, ["keyword_search: 3 calls failed and were made again"]),
        ({"ok": 3, "timed_out": 1}, {"ok": 2}, ["keyword_search: 1 calls timed out and were made again"]),
        ({"ok": 3}, {"ok": 2, "refused": 4}, ["keyword_search: 4 calls refused and were made again"]),
        (
            {"no_match": 3, "failed": 1}, {"timed_out": 2, "no_match": 2},
            [
                "keyword_search found nothing for any of 5 queries",
                "keyword_search: 1 calls failed and were made again",
                "keyword_search: 2 calls timed out and were made again",
            ],
        ),
    ],
)  # fmt: skip
def test_searches_and_calls_worth_a_look_are_noted_over_all_shards(store, first, second, notes):
    assert note_of(store, {"keyword_search": first}, {"keyword_search": second}) == notes


def test_services_are_noted_apart(store):
    assert note_of(
        store, {"dense_search": {"no_match": 3}, "cross_encoder": {"ok": 1}},
        {"dense_search": {"no_match": 2}, "keyword_search": {"ok": 2}, "cross_encoder": {"ok": 1, "failed": 1}},
    ) == [
        "dense_search found nothing for any of 5 queries",
        "cross_encoder: 1 calls failed and were made again",
    ]  # fmt: skip


@pytest.fixture
def replay(store):
    """A run with five lost lines, and the plan of a run that replays its dead letters in two shards."""
    parent = make_plan(bad_lines=1, dead_letters_allowed=9)
    commit_all(store, parent, taken=TAKEN)
    one, two, three = [letter for letter in open_letters(store, parent) if letter.query_id is not None]
    replays = [make_replay(2, "queries", one), make_replay(3, "oversample", two), make_replay(4, "context", three)]
    plan = plan_with(parent, *replays)
    create_run(store, plan)
    return parent, plan


def letters_by_stage(found) -> dict[str, int]:
    return {stage.stage: stage.dead_letters for stage in found.stages if stage.dead_letters}


def test_a_replay_that_has_taken_nothing_over_yet_has_no_dead_letters_but_bad_lines(store, replay):
    parent, plan = replay
    found = verdict(store, plan)
    assert found.verdict == "interrupted"
    assert (letters_by_stage(found), found.dead_letters, found.lost_log_lines) == ({"log_lines": 1}, 1, 1)
    assert letters_by_stage(verdict(store, parent)) == {"log_lines": 1, "queries": 1, "oversample": 1, "context": 1}
    for entry in plan.stages:  # nor while it takes over part by part
        if entry.borrowed_from is not None:
            for part in entry.shards:
                manifest = manifest_of(store, parent, entry.stage, part)
                borrow(store, manifest, plan=plan, entry=entry)
                found = verdict(store, plan)
                assert (found.dead_letters, found.lost_log_lines) == (1, 1)


def test_a_replay_is_interrupted_until_every_replayed_query_is_through(store, replay):
    parent, plan = replay
    borrow_all(store, parent, plan)
    found = verdict(store, plan)
    assert (found.verdict, found.because) == (
        "interrupted", "missing parts: queries (1), oversample (2), context (3)",
    )  # fmt: skip
    commit_all(store, plan, but=[("context", 3)])
    found = verdict(store, plan)
    assert (found.verdict, found.because) == ("interrupted", "missing parts: context (1)")
    assert [(stage.computed, stage.borrowed, stage.missing) for stage in found.stages] == [
        (0, 1, 0), (1, 2, 0), (2, 2, 0), (0, 1, 0), (2, 2, 1),
    ]  # fmt: skip


def test_a_replay_that_succeeds_loses_the_bad_lines_alone(store, replay):
    parent, plan = replay
    borrow_all(store, parent, plan)
    commit_all(store, plan)
    found = verdict(store, plan)
    assert (found.verdict, found.dead_letters, found.lost_log_lines) == ("partial", 1, 1)
    assert [(stage.stage, stage.rows_out) for stage in found.stages] == [
        ("log_lines", 8), ("queries", 5), ("oversample", 5), ("rescue_searches", 2), ("context", 5),
    ]  # fmt: skip
    assert letters_by_stage(found) == {"log_lines": 1}
    assert found.results == f"{store.uri}/runs/run-b/03-context"


def test_a_query_that_fails_again_counts_once_and_where_it_fails_now(store, replay):
    parent, plan = replay
    borrow_all(store, parent, plan)
    commit_all(store, plan, taken={("oversample", 2): ["q3"], ("oversample", 3): ["q2"]})
    found = verdict(store, plan)
    assert (found.verdict, found.dead_letters, found.lost_log_lines) == ("partial", 3, 4)
    assert letters_by_stage(found) == {"log_lines": 1, "oversample": 2}


def test_a_replay_of_a_replay_counts_what_is_lost_in_the_end(store, replay):
    parent, plan = replay
    borrow_all(store, parent, plan)
    commit_all(store, plan, taken={("oversample", 2): ["q3"], ("oversample", 3): ["q2"]})
    _, *letters = open_letters(store, plan)
    last = plan_with(plan, make_replay(5, "oversample", *letters), run_id="run-c")
    borrow_all(store, plan, last)
    commit_all(store, last, taken={("context", 5): ["q2"]})
    found = verdict(store, last)
    assert (found.verdict, found.dead_letters, found.lost_log_lines) == ("partial", 2, 3)
    assert letters_by_stage(found) == {"log_lines": 1, "context": 1}
    assert lost_log_lines(last, committed(store, last)) == 3


REPLAY_PROBLEMS = [
    ("queries", 2, {"rows": 0}, "1 queries planned, but 0 rows + 0 dead letters + 0 left out"),
    ("oversample", 3, {"dead_letters": letter_file(1)}, "1 queries planned, but 1 rows + 1 dead letters + 0 left out"),
    (
        "context", 4, {"rows": 0, "left_out": 1},
        "1 queries left out, but the stages before it have 0 dead letters",
    ),
    ("context", 2, {"rows": 2}, "1 queries planned, but 2 rows + 0 dead letters + 0 left out"),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "part", "changes", "problem"), REPLAY_PROBLEMS)
def test_the_shards_of_a_replay_are_held_to_the_queries_they_replay(store, replay, stage, part, changes, problem):
    parent, plan = replay
    borrow_all(store, parent, plan)
    commit_all(store, plan)
    rewrite(store, plan, stage, part, **changes)
    found = verdict(store, plan)
    assert (found.verdict, found.because) == ("failed", f"{stage}, part {part}: {problem}")


def test_a_replay_above_the_error_budget_is_failed(store):
    parent = make_plan(dead_letters_allowed=9)
    commit_all(store, parent, taken=TAKEN)
    letters = [letter for letter in open_letters(store, parent) if letter.stage == "oversample"]
    plan = plan_with(parent, make_replay(2, "oversample", *letters)).model_copy(update={"dead_letters_allowed": 2})
    borrow_all(store, parent, plan)
    commit_all(store, plan)
    found = verdict(store, plan)
    assert (found.verdict, found.because) == (
        "failed", "dead letters take out 3 log lines, the error budget allows 2",
    )  # fmt: skip


def test_the_row_of_a_stage_is_made_of_its_manifests_alone():
    plan = make_plan()
    found = [
        counted(plan, "oversample", 0, 2, 1, 0, seconds=1.2345),
        counted(plan, "oversample", 1, 2, 0, 0, borrowed_from="run-z", seconds=9),
    ]
    status = stage_status(plan, "oversample", [summary_of(plan, entry_of(plan, "oversample"), found)])
    assert status.model_dump() == {
        "stage": "oversample", "rows_in": 5, "rows_out": 4, "dead_letters": 1, "computed": 1, "borrowed": 1,
        "missing": 0, "seconds": 1.234,
    }  # fmt: skip
