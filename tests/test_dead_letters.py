"""Dead letters: each comes back as it was written, and a lost or changed file of them is refused by its name."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.dead_letters import letters_of, replayed_queries, write_letters
from checkpoints.digests import sha256
from checkpoints.manifests import manifests
from checkpoints.run import create_run, open_letters
from checkpoints.store import Store
from checkpoints.verdict import verdict
from checkpoints.verify import verify
from contracts.errors import CorruptArtifactError
from contracts.manifest import DeadLetterFile
from tests.runs import commit_all, commit_part, entry_of, make_letter, make_plan, make_replay, manifest_of, save_corpus

PATH = "runs/run-a/dead_letters/oversample.jsonl"
TAKEN = {("oversample", 0): ["q0", "q2"], ("context", 1): ["q4"]}


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path))


@pytest.fixture
def finished(store):
    """A run with a bad line, and three queries taken out by two stages: seven of the eight lines are lost."""
    plan = make_plan(bad_lines=1, dead_letters_allowed=6)
    save_corpus(store)
    create_run(store, plan)
    commit_all(store, plan, taken=TAKEN)
    return plan


def manifest_with(store, letters, data=None):
    """The manifest of a part with dead letters, or with other bytes that pass for them."""
    plan = make_plan()
    manifest = commit_part(store, plan, entry_of(plan, "oversample"), 0, letters=letters)
    if data is None:
        return manifest
    store.write(PATH, data)
    named = DeadLetterFile(file=PATH, sha256=sha256(data), letters=2, log_lines=3)
    return manifest.model_copy(update={"dead_letters": named})


LINE_ENDS = st.sampled_from("\n\r\v\f\x1c\x85\u2028\u2029")
ANY_TEXT = st.lists(LINE_ENDS | st.characters(exclude_categories=["Cs"]), max_size=8).map("".join)


@given(texts=st.lists(st.tuples(ANY_TEXT, ANY_TEXT, st.integers(1, 9)), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_any_dead_letter_comes_back_as_it_was_written(texts, tmp_path_factory):
    store = Store(str(tmp_path_factory.mktemp("letters")))
    letters = [
        make_letter(f"q{number}", original=original, reason=reason, log_lines=lines)
        for number, (original, reason, lines) in enumerate(texts)
    ]
    manifest = manifest_with(store, letters)
    assert letters_of(store, manifest) == letters
    assert (manifest.dead_letters.letters, manifest.dead_letters.log_lines) == (
        len(letters), sum(letter.log_lines for letter in letters),
    )  # fmt: skip


def test_no_dead_letters_make_no_file(store):
    assert write_letters(store, PATH, []) is None
    assert store.files("runs") == []
    assert letters_of(store, manifest_with(store, [])) == []


def test_dead_letters_are_one_json_object_a_line_in_their_order(store):
    letters = [make_letter(query, original="a\nb") for query in ("q2", "q0", "q1")]
    named = write_letters(store, "runs/run-a/dead_letters/oversample", letters)
    data = store.read(named.file)
    lines = data.decode().splitlines()
    assert [line.startswith("{") and line.endswith("}") for line in lines] == [True, True, True]
    assert [f'"query_id":"{letter.query_id}"' in line for letter, line in zip(letters, lines, strict=True)] == [
        True
    ] * 3
    assert named.file == f"runs/run-a/dead_letters/oversample.{sha256(data)[:32]}.jsonl"
    assert (named.letters, named.log_lines) == (3, 5)


def test_any_damage_to_a_file_of_dead_letters_is_refused_by_name(store, tmp_path):
    manifest = manifest_with(store, [make_letter("q0"), make_letter("q1")])
    path = manifest.dead_letters.file
    good = store.read(path)
    chance = random.Random(6)
    for place in {0, len(good) - 1, *(chance.randrange(len(good)) for _ in range(100))}:
        flipped = good[:place] + bytes([good[place] ^ (1 << chance.randrange(8))]) + good[place + 1 :]
        for bad in (flipped, good[:place], good + good[place:]):
            (tmp_path / path).write_bytes(bad)
            with pytest.raises(CorruptArtifactError, match="is not what was committed") as caught:
                letters_of(store, manifest)
            assert caught.value.where == path
    store.delete(path)
    with pytest.raises(CorruptArtifactError, match="is missing: got no file, want 2 dead letters") as caught:
        letters_of(store, manifest)
    assert caught.value.where == path


def test_a_line_that_is_no_dead_letter_is_refused_even_with_a_right_digest(store):
    lines = [make_letter("q0").model_dump_json(), make_letter("q1").model_dump_json()]
    for wrong in ("", "{}", "null", lines[0][:-9], lines[0].replace('"shard":0', '"shard":"x"')):
        data = "".join(line + "\n" for line in (lines[0], wrong)).encode()
        with pytest.raises(CorruptArtifactError, match="holds a line that is no dead letter") as caught:
            letters_of(store, manifest_with(store, [], data))
        assert caught.value.where == PATH


@pytest.mark.parametrize("queries", [["q0"], ["q1", "q3"], ["q0", "q2"], ["q0", "q1", "q1"]])
def test_letters_are_held_against_the_numbers_of_the_manifest(store, queries):
    right, wrong = ["q0", "q1"], queries
    for given_queries, fits in ((right, True), (wrong, False)):
        letters = [make_letter(query) for query in given_queries]
        data = "".join(letter.model_dump_json() + "\n" for letter in letters).encode()
        manifest = manifest_with(store, [], data)
        if fits:
            assert letters_of(store, manifest) == letters
            continue
        with pytest.raises(CorruptArtifactError, match="want 2 of 3 log lines") as caught:
            letters_of(store, manifest)
        assert caught.value.where == PATH
        assert caught.value.got == f"{len(letters)} of {sum(letter.log_lines for letter in letters)} log lines"


@pytest.mark.parametrize("damage", ["lost", "changed", "emptied"])
@pytest.mark.parametrize(("stage", "part"), [("log_lines", 0), ("oversample", 0), ("context", 1)])
def test_damaged_dead_letters_never_make_a_run_look_better(store, finished, stage, part, damage):
    before = verdict(store, finished)
    assert (before.verdict, before.dead_letters, before.lost_log_lines) == ("partial", 4, 6)
    path = manifest_of(store, finished, stage, part).dead_letters.file
    if damage == "lost":
        store.delete(path)
    else:
        store.write(path, b"" if damage == "emptied" else store.read(path).replace(b'"log_lines":', b'"log_lines":1'))
    assert verdict(store, finished) == before
    wrong = [(name, finding) for name, finding in verify(store, finished) if finding != "ok"]
    assert [name for name, _ in wrong] == [f"{stage}/part-{part:05d}"]
    assert wrong[0][1].startswith(f"{path}: is {'missing' if damage == 'lost' else 'not what was committed'}")
    with pytest.raises(CorruptArtifactError) as caught:
        open_letters(store, finished)
    assert caught.value.where == path


def test_a_run_whose_dead_letters_were_all_thrown_away_is_not_complete(store, finished):
    for path in store.files("runs/run-a/dead_letters"):
        store.delete(path)
    assert verdict(store, finished).verdict == "partial"
    assert [name for name, finding in verify(store, finished) if finding != "ok"] == [
        "log_lines/part-00000", "oversample/part-00000", "context/part-00001",
    ]  # fmt: skip


def test_a_file_of_dead_letters_that_no_manifest_names_counts_for_nothing(store, finished):
    before = verdict(store, finished)
    write_letters(store, PATH, [make_letter("q3", shard=1)])
    assert verdict(store, finished) == before
    assert [letter.query_id for letter in open_letters(store, finished)] == [None, "q0", "q2", "q4"]
    assert {finding for _, finding in verify(store, finished)} == {"ok"}


def test_every_dead_letter_stands_in_the_manifest_of_the_part_that_it_left(store, finished):
    found = {
        (manifest.stage, manifest.shard): [letter.query_id for letter in letters_of(store, manifest)]
        for entry in finished.stages
        for manifest in manifests(store, finished, entry)
        if manifest.dead_letters is not None
    }
    assert found == {("log_lines", 0): [None], **TAKEN}


def test_a_replayed_query_is_told_by_the_stage_and_the_shard_that_it_left():
    first = make_replay(2, "oversample", make_letter("q0"), make_letter("q2"))
    again = make_replay(3, "context", make_letter("q2", "context", shard=2, attempt=2))
    assert replayed_queries(make_plan()) == set()
    assert replayed_queries(make_plan(replays=[first, again])) == {
        ("oversample", 0, "q0"), ("oversample", 0, "q2"), ("context", 2, "q2"),
    }  # fmt: skip
    assert (first.attempt, again.attempt) == (2, 3)
