"""Verify: everything that a run stands on is read again, and whatever is not as it was written is named."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.commit import borrow
from checkpoints.manifests import manifests
from checkpoints.run import create_run, open_letters
from checkpoints.store import Store
from checkpoints.verdict import verdict
from checkpoints.verify import verify
from tests.runs import (
    ASKED,
    CORPUS_FILES,
    LINES_OF,
    PARTS,
    QUERIES,
    borrow_all,
    commit_all,
    commit_part,
    entry_of,
    make_letter,
    make_plan,
    make_replay,
    manifest_of,
    path_of,
    plan_with,
    rewrite,
    save_corpus,
    table_of,
)
from tests.small import planned, session_of, small_store

TAKEN = {("oversample", 0): ["q2"], ("context", 1): ["q4"]}
CORPUS_NAMES = [f"corpus-1/{name}" for name in CORPUS_FILES]
PART_NAMES = [f"{stage}/part-{part:05d}" for stage, part in PARTS]


@pytest.fixture
def store(tmp_path):
    opened = Store(str(tmp_path))
    save_corpus(opened)
    return opened


@pytest.fixture
def finished(store):
    """A run of which every artifact is committed, with a bad line and two queries taken out."""
    plan = make_plan(bad_lines=1)
    create_run(store, plan)
    commit_all(store, plan, taken=TAKEN)
    return plan


def wrong_in(store, plan) -> dict[str, str]:
    return {name: finding for name, finding in verify(store, plan) if finding != "ok"}


def account_of(store, plan) -> str:
    """What the accounts say when every artifact is as it was committed."""
    *artifacts, (name, finding) = verify(store, plan)
    assert name == "accounts"
    assert {found for _, found in artifacts} == {"ok"}
    return finding


def test_verify_names_every_file_of_the_snapshot_every_planned_part_and_the_accounts(store, finished):
    assert verify(store, finished) == [(name, "ok") for name in [*CORPUS_NAMES, *PART_NAMES, "accounts"]]


def test_verify_finds_each_damaged_artifact_by_name(store, finished):
    chance = random.Random(0)
    for stage, part in PARTS:
        manifest = manifest_of(store, finished, stage, part)
        letters = [] if manifest.dead_letters is None else [manifest.dead_letters.file]
        for path in (manifest.file, path_of(finished, stage, part), *letters):
            good = store.read(path)
            place = chance.randrange(len(good))
            flipped = good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
            for bad in (flipped, good[:place], None):
                if bad is None:
                    store.delete(path)
                else:
                    store.write(path, bad)
                wrong = wrong_in(store, finished)
                assert list(wrong) == [f"{stage}/part-{part:05d}"]
                (finding,) = wrong.values()
                assert finding.startswith(path) or (finding == "not committed" and path.endswith(".json"))
                assert verify(store, finished)[-1][0] != "accounts"
            store.write(path, good)
    assert wrong_in(store, finished) == {}


@pytest.mark.parametrize("name", CORPUS_FILES)
def test_verify_finds_each_damaged_file_of_the_snapshot_by_name(store, finished, name):
    path = f"corpora/corpus-1/{name}"
    good = store.read(path)
    for bad in (good[:-1], good + b"x", b"", bytes([good[0] ^ 1]) + good[1:], None):
        if bad is None:
            store.delete(path)
        else:
            store.write(path, bad)
        wrong = wrong_in(store, finished)
        assert list(wrong) == [f"corpus-1/{name}"]
        problem = "has no such file" if bad is None else "is not what was written: got SHA-256"
        assert problem in wrong[f"corpus-1/{name}"]
        assert verify(store, finished)[-1][0] != "accounts"


def test_verify_finds_two_swapped_files_of_the_snapshot(store, finished):
    first, second = (f"corpora/{name}" for name in CORPUS_NAMES)
    one, other = store.read(first), store.read(second)
    store.write(first, other)
    store.write(second, one)
    assert list(wrong_in(store, finished)) == CORPUS_NAMES


def test_a_snapshot_without_a_manifest_that_can_be_trusted_is_one_finding(store, finished):
    path = "corpora/corpus-1/snapshot.json"
    good = store.read(path)
    store.write(path, good.replace(b'"chunks": 3', b'"chunks": 4'))
    assert list(wrong_in(store, finished)) == ["corpus-1"]
    assert wrong_in(store, finished)["corpus-1"].startswith(f"{path}: is not what was written")
    store.delete(path)
    assert "has no such corpus snapshot" in wrong_in(store, finished)["corpus-1"]
    assert [name for name, _ in verify(store, finished)] == ["corpus-1", *PART_NAMES]


def test_verify_finds_two_swapped_files(store, finished):
    files = [manifest.file for manifest in manifests(store, finished, entry_of(finished, "oversample"))]
    data = [store.read(file) for file in files]
    store.write(files[0], data[1])
    store.write(files[1], data[0])
    wrong = wrong_in(store, finished)
    assert list(wrong) == ["oversample/part-00000", "oversample/part-00001"]
    assert [finding.startswith(file) for finding, file in zip(wrong.values(), files, strict=True)] == [True, True]


def test_verify_looks_into_the_data_and_not_only_at_the_bytes(store, finished):
    rewrite(store, finished, "oversample", 0, logical_digest="0" * 64)
    assert "holds other data" in wrong_in(store, finished)["oversample/part-00000"]


def test_verify_tells_what_is_not_committed(store):
    plan = make_plan()
    commit_all(store, plan, but=(("oversample", 1),))
    assert wrong_in(store, plan) == {"oversample/part-00001": "not committed"}


def test_verify_tells_what_an_earlier_run_of_the_same_name_left_behind(store, finished):
    plan = make_plan(bad_lines=1, created_at="2026-12-01T02:15:00+00:00")
    store.delete(path_of(plan, "queries", 1))
    commit_part(store, plan, entry_of(plan, "queries", 1), 1)
    wrong = wrong_in(store, plan)
    assert list(wrong) == [name for name in PART_NAMES if name != "queries/part-00001"]
    assert all("was made under another plan than the run's" in finding for finding in wrong.values())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"left_out": 0}, "3 queries planned, but 2 rows + 0 dead letters + 0 left out"),
        ({"left_out": 2}, "3 queries planned, but 2 rows + 0 dead letters + 2 left out"),
        ({"account": None}, "ok"),
    ],
)
def test_the_accounts_are_held_against_the_plan(store, finished, changes, problem):
    rewrite(store, finished, "context", 0, **changes)
    assert account_of(store, finished) == (problem if problem == "ok" else f"context, part 0: {problem}")
    assert (verdict(store, finished).verdict == "failed") is (problem != "ok")


def test_candidates_that_do_not_add_up_are_told(store, finished):
    account = manifest_of(store, finished, "oversample", 1).account
    rewrite(store, finished, "oversample", 1, account=account.model_copy(update={"candidates_out": 5}))
    assert account_of(store, finished).startswith("oversample, part 1: candidates do not add up: {'candidates_in': 6")


def answered_instead(store, *query_ids, **more):
    """A run whose first part of answers is of these queries, though every number adds up."""
    plan = make_plan(**more)
    commit_all(store, plan, but=[("context", 0)], taken=TAKEN)
    left_out = 3 - len(query_ids)
    table = table_of(query_ids, "context-0")
    commit_part(store, plan, entry_of(plan, "context"), 0, TAKEN, table=table, left_out=left_out)
    assert verdict(store, plan).verdict == "partial"
    return plan


def test_a_query_that_is_neither_answered_nor_a_dead_letter_is_named(store):
    for plan in (answered_instead(store, "q0", "q9"), answered_instead(store, "q0", "q0", run_id="run-b")):
        assert account_of(store, plan) == "query q1 of the log is neither answered nor a dead letter"


def test_a_dead_letter_that_is_answered_hides_no_lost_query(store):
    plan = answered_instead(store, "q0", "q2")
    assert account_of(store, plan) == "query q1 of the log is neither answered nor a dead letter"


def with_log(store, *lines, **more):
    """A run whose log has these lines instead, though every number adds up."""
    plan = make_plan(**more)
    commit_all(store, plan, but=[("log_lines", 0)], taken=TAKEN)
    commit_part(store, plan, entry_of(plan, "log_lines"), 0, table=table_of(lines, "log_lines"))
    assert verdict(store, plan).verdict == "partial"
    return plan


def test_an_answer_to_no_query_of_the_log_is_named(store):
    plan = with_log(store, *["q0" if query == "q1" else query for query in ASKED])
    assert account_of(store, plan) == "query q1 is answered, but is a dead letter or no query of the log"


def test_an_answer_to_a_dead_letter_is_named(store):
    plan = with_log(store, *["q2" if query == "q1" else query for query in ASKED])
    store.delete(path_of(plan, "context", 0))
    table = table_of(["q0", "q2"], "context-0")
    commit_part(store, plan, entry_of(plan, "context"), 0, TAKEN, table=table)
    assert account_of(store, plan) == "query q2 is answered, but is a dead letter or no query of the log"


def test_lines_that_ask_nothing_are_the_bad_lines_of_the_plan(store):
    plan = with_log(store, *ASKED, "q0", bad_lines=1)
    assert account_of(store, plan) == "0 lines of the log are dead letters, 1 were planned"
    plan = with_log(store, *ASKED[1:], None, None, bad_lines=1, run_id="run-b")
    assert account_of(store, plan) == "2 lines of the log are dead letters, 1 were planned"


def test_dead_letters_stand_for_all_the_lines_that_wait_for_them(store):
    plan = make_plan()
    commit_all(store, plan, but=[("context", 1)], taken=TAKEN)
    letters = [make_letter("q4", "context", 1, log_lines=2)]
    commit_part(store, plan, entry_of(plan, "context", 1), 1, TAKEN, letters=letters)
    assert verdict(store, plan).lost_log_lines == 4
    assert account_of(store, plan) == "3 lines of the log have no answer, but the dead letters tell of 4"


def test_borrowed_artifacts_are_verified_where_they_lie(store, finished):
    plan = make_plan("run-b", bad_lines=1)
    places = [("log_lines", 0), ("oversample", 0), ("oversample", 1)]
    commit_all(store, plan, but=places, taken=TAKEN)
    for stage, part in places:
        borrow(store, manifest_of(store, finished, stage, part), plan=plan, entry=entry_of(plan, stage))
    assert wrong_in(store, plan) == {}
    source = manifest_of(store, finished, "oversample", 0)
    for path in (source.file, source.dead_letters.file):
        good = store.read(path)
        store.delete(path)
        assert list(wrong_in(store, plan)) == ["oversample/part-00000"]
        assert wrong_in(store, plan)["oversample/part-00000"].startswith(f"{path}: is missing")
        store.write(path, good)


def test_a_replay_is_verified_with_what_it_borrowed(store, finished):
    letters = [letter for letter in open_letters(store, finished) if letter.query_id is not None]
    replays = [
        make_replay(number, letter.stage, letter) for number, letter in zip((2, 3), letters, strict=True)
    ]  # fmt: skip
    plan = plan_with(finished, *replays)
    borrow_all(store, finished, plan)
    commit_all(store, plan)
    assert [name for name, _ in verify(store, plan)] == [
        *CORPUS_NAMES, "log_lines/part-00000", "queries/part-00000", "queries/part-00001", "oversample/part-00000",
        "oversample/part-00001", "oversample/part-00002", "rescue_searches/part-00000", "context/part-00000",
        "context/part-00001", "context/part-00002", "context/part-00003", "accounts",
    ]  # fmt: skip
    assert wrong_in(store, plan) == {}
    store.delete(path_of(plan, "context", 3))
    table = table_of(["q0"], "context-3")
    commit_part(store, plan, entry_of(plan, "context", 3), 3, table=table)
    assert account_of(store, plan) == "query q4 of the log is neither answered nor a dead letter"
    store.delete(path_of(plan, "context", 3))
    commit_part(store, plan, entry_of(plan, "context", 3), 3, {("context", 3): ["q4"]})
    assert wrong_in(store, plan) == {}
    assert verdict(store, plan).lost_log_lines == 2


@given(
    fates=st.lists(st.sampled_from(["answered", "queries", "oversample", "context"]), min_size=5, max_size=5),
    bad_lines=st.integers(0, 2),
    forgotten=st.none() | st.sampled_from(QUERIES),
)
@settings(max_examples=20, deadline=None)
def test_every_line_is_accounted_for_whatever_becomes_of_its_query(fates, bad_lines, forgotten, tmp_path_factory):
    store = Store(str(tmp_path_factory.mktemp("fates")))
    save_corpus(store)
    plan = make_plan(bad_lines=bad_lines, dead_letters_allowed=9)
    taken = {}
    for number, (query, fate) in enumerate(zip(QUERIES, fates, strict=True)):
        if fate != "answered":
            taken.setdefault((fate, number // plan.shard_size), []).append(query)
    commit_all(store, plan, taken=taken)
    assert wrong_in(store, plan) == {}
    lost = bad_lines + sum(LINES_OF[query] for query, fate in zip(QUERIES, fates, strict=True) if fate != "answered")
    assert verdict(store, plan).lost_log_lines == lost
    if forgotten is None or fates[QUERIES.index(forgotten)] != "answered":
        return
    part = QUERIES.index(forgotten) // plan.shard_size
    store.delete(path_of(plan, "context", part))
    gone = {query for queries in taken.values() for query in queries}
    rows = ["q9" if query == forgotten else query for query in QUERIES[part * 3 : part * 3 + 3] if query not in gone]
    entry, table = entry_of(plan, "context", part), table_of(rows, "again")
    commit_part(store, plan, entry, part, taken, table=table)
    assert account_of(store, plan) == f"query {forgotten} of the log is neither answered nor a dead letter"


def test_no_file_of_a_real_run_changes_unseen(tmp_path):
    store = small_store(tmp_path)
    plan = planned(store, tmp_path, "run-a")
    assert session_of(store, plan).execute().verdict == "partial"
    assert wrong_in(store, plan) == {}
    corpus = [path for path in store.files(f"corpora/{plan.snapshot_id}") if "/lease/" not in path]
    parts = [path for path in store.files("runs/run-a") if "/part-" in path or "/dead_letters/" in path]
    assert (len(corpus), len(parts)) == (5, 1 + 2 * sum(entry.parts for entry in plan.stages))
    chance = random.Random(7)
    for path in [*corpus, *chance.sample(parts, 25)]:
        good = store.read(path)
        place = chance.randrange(len(good))
        store.write(path, good[:place] + bytes([good[place] ^ 1 << chance.randrange(8)]) + good[place + 1 :])
        ((name, finding),) = wrong_in(store, plan).items()
        if path.endswith("/snapshot.json"):
            assert name == plan.snapshot_id
        if path in corpus:
            assert path.startswith(f"corpora/{name}")
        else:
            assert finding.startswith(path)
        store.write(path, good)
    assert wrong_in(store, plan) == {}
