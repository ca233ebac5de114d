"""Pointers: one file says what is current, the history says how it came about, and a rollback never toggles."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import moves
from checkpoints.lease import hold
from checkpoints.local_files import LocalFiles
from checkpoints.moves import moving, user_and_host
from checkpoints.pointer import Pointer, PointerRecord
from checkpoints.records import sealed, unsealed
from checkpoints.store import Store
from contracts.corpus import SnapshotFile
from contracts.errors import CheckpointError, CorruptArtifactError, MissingArtifactError, RunHeldError
from tests.s3 import s3_bucket

ROOT = Path(__file__).resolve().parents[1]


def pointer_of(store: Store) -> Pointer:
    return Pointer(
        store, "things", what="the pointer", empty="has no thing", first_step="Make one.", way_out="Use a thing again."
    )


def to(pointer: Pointer, target: str, **more) -> PointerRecord:
    given_parts = {"action": "use", "by": "ann@here", "why": None, "details": {"of": target}, **more}
    with moving(pointer) as move:
        return move.to(target, **given_parts)


def back(pointer: Pointer) -> PointerRecord:
    with moving(pointer) as move:
        return move.back(move.earlier(), by="bob@there", why="worse")


class Stops(LocalFiles):
    """A disk on which the swap of the pointer fails, as if the process had been killed right before it."""

    stopped = False

    def rename(self, source, target):
        if self.stopped and target.name == "current.json":
            raise KeyboardInterrupt
        super().rename(source, target)


@pytest.fixture
def pointer(tmp_path):
    return pointer_of(Store(str(tmp_path)))


@pytest.fixture
def abc(pointer):
    """A pointer that went from a to b to c."""
    for target in "abc":
        to(pointer, target)
    return pointer


def states(pointer: Pointer) -> list[tuple[int, str | None, bool | None]]:
    return [
        (entry.generation, None if entry.record is None else entry.record.target, entry.carried_out)
        for entry in pointer.history()
    ]


def test_a_store_without_a_pointer_says_what_to_do(pointer):
    assert pointer.read() is None
    assert (pointer.history(), pointer.standing()) == ([], {})
    with pytest.raises(MissingArtifactError, match=r"store .*: has no thing\. Make one\."):
        pointer.current()
    with pytest.raises(MissingArtifactError, match="has no thing"):
        back(pointer)


def test_a_move_is_current_with_who_when_and_why(pointer):
    made = to(pointer, "a", why="it is good")
    assert pointer.current() == made
    assert (made.generation, made.target, made.action, made.by, made.why) == (1, "a", "use", "ann@here", "it is good")
    assert (made.previous, made.replaced, made.details) == (None, None, {"of": "a"})
    assert made.at.endswith("+00:00")
    assert states(pointer) == [(1, "a", True)]


def test_the_pointer_and_its_record_in_the_history_are_the_same_sealed_bytes(abc):
    data = abc.store.read("things/current.json")
    assert data == abc.store.read("things/history/000003.json")
    assert unsealed(data, PointerRecord, "here", next_step="Go.").generation == 3


def test_repeated_rollbacks_go_further_back_and_never_toggle(abc):
    first, second = back(abc), back(abc)
    assert [(one.generation, one.target, one.previous, one.replaced) for one in (first, second)] == [
        (4, "b", 1, 3), (5, "a", None, 4),
    ]  # fmt: skip
    assert (first.action, first.by, first.why, first.details) == ("rollback", "bob@there", "worse", {"of": "b"})
    with pytest.raises(MissingArtifactError, match="the pointer: cannot go back: got nothing before a"):
        back(abc)
    assert abc.current() == second
    to(abc, "d")
    assert [back(abc).target, abc.current().previous] == ["a", None]


def test_the_history_keeps_every_move_and_changes_none(abc):
    before = {path: abc.store.read(path) for path in abc.store.files("things/history")}
    back(abc)
    assert {path: abc.store.read(path) for path in before} == before
    assert states(abc) == [(4, "b", True), (3, "c", True), (2, "b", True), (1, "a", True)]


def test_what_stands_is_the_current_target_and_the_one_a_rollback_brings_back(abc):
    def standing() -> dict[str, str]:
        return {target: because for target, (_, because) in abc.standing().items()}

    assert standing() == {"c": "current", "b": "rollback target"}
    back(abc)
    assert standing() == {"b": "current", "a": "rollback target"}
    back(abc)
    assert standing() == {"a": "current"}


@given(steps=st.lists(st.sampled_from([*"abcd", "back", "killed"]), max_size=12))
@settings(max_examples=25, deadline=None)
def test_moves_are_a_stack_whatever_is_killed_between(steps, tmp_path_factory):
    """The oracle: `to` pushes, `back` pops; a process that is killed before the swap changes nothing."""
    store = Store(str(tmp_path_factory.mktemp("store")), files=Stops)
    pointer, stack, last = pointer_of(store), [], 0
    for step in steps:
        store._local.stopped = step == "killed"
        if step == "killed":
            with pytest.raises(KeyboardInterrupt):
                to(pointer, "x")
            last += 1
        elif step == "back" and len(stack) < 2:
            with pytest.raises(MissingArtifactError):
                back(pointer)
        else:
            made = back(pointer) if step == "back" else to(pointer, step)
            stack = stack[:-1] if step == "back" else [*stack, step]
            last += 1
            assert (made.generation, made.target) == (last, stack[-1])
        record = pointer.read()
        assert (None if record is None else record.target) == (stack[-1] if stack else None)
    for entry in pointer.history():
        assert entry.carried_out is (entry.record.target != "x")


def test_a_process_killed_before_the_swap_leaves_the_pointer_and_the_next_move_works(tmp_path):
    """Really killed: no handler runs, and its lease is not released."""
    script = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from checkpoints.local_files import LocalFiles
from checkpoints.store import Store
from tests.test_pointer import pointer_of, to

class Dies(LocalFiles):
    def rename(self, source, target):
        if target.name == "current.json":
            os._exit(9)
        super().rename(source, target)

to(pointer_of(Store(sys.argv[1], files=Dies)), "killed")
"""
    pointer = pointer_of(Store(str(tmp_path)))
    to(pointer, "a")
    before = pointer.store.read("things/current.json")
    died = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, check=False, capture_output=True)
    assert died.returncode == 9, died.stderr.decode()
    assert pointer.store.read("things/current.json") == before
    assert states(pointer) == [(2, "killed", False), (1, "a", True)]
    made = to(pointer, "b")
    assert (made.generation, made.previous, made.replaced) == (3, 1, 1)
    assert states(pointer) == [(3, "b", True), (2, "killed", False), (1, "a", True)]
    assert back(pointer).target == "a"


def test_a_first_move_that_was_not_carried_out_leaves_a_store_without_a_pointer(tmp_path):
    store = Store(str(tmp_path), files=Stops)
    pointer = pointer_of(store)
    store._local.stopped = True
    with pytest.raises(KeyboardInterrupt):
        to(pointer, "x")
    store._local.stopped = False
    with pytest.raises(
        MissingArtifactError, match=r"things/current\.json: is not there: got its history alone, of 1 records\. Use a"
    ):
        pointer.current()
    assert states(pointer) == [(1, "x", False)]
    assert list(pointer.standing()) == ["x"]  # nobody can tell, so it must stay
    with pytest.raises(MissingArtifactError):
        back(pointer)
    made = to(pointer, "a")
    assert (made.generation, made.previous, made.replaced) == (2, None, None)
    assert states(pointer) == [(2, "a", True), (1, "x", False)]


def damaged(data: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data))
    flipped = data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :]
    return chance.choice([flipped, data[:place], json.dumps(json.loads(data)).encode()])


def test_any_damage_to_the_pointer_is_refused_by_name_with_the_way_out(abc):
    good, chance = abc.store.read("things/current.json"), random.Random(0)
    for _ in range(60):
        abc.store.write("things/current.json", damaged(good, chance))
        for call in (abc.current, abc.read, abc.standing):
            with pytest.raises(CorruptArtifactError, match=r"(?s)^things/current\.json: .*Use a thing again\.$"):
                call()
        assert states(abc) == [(3, "c", None), (2, "b", True), (1, "a", True)]


def test_a_record_of_another_kind_is_no_pointer(abc):
    abc.store.write("things/current.json", sealed(SnapshotFile(name="a", sha256="b", bytes=1)))
    with pytest.raises(CorruptArtifactError, match=r"things/current\.json: is no PointerRecord"):
        abc.current()


def test_a_damaged_pointer_is_replaced_by_the_next_move(abc):
    abc.store.write("things/current.json", b"?")
    made = to(abc, "c")
    # Whether c was current nobody knows any more; b was, before it.
    assert (made.generation, made.target, made.previous, made.replaced) == (4, "c", 2, 3)
    assert abc.current() == made
    assert back(abc).target == "b"


def test_a_rollback_from_a_damaged_pointer_goes_to_what_was_surely_current_before(abc):
    abc.store.write("things/current.json", b"?")
    made = back(abc)
    assert (made.generation, made.target, made.previous) == (4, "b", 1)
    assert states(abc) == [(4, "b", True), (3, "c", True), (2, "b", True), (1, "a", True)]


def test_a_rollback_from_a_damaged_pointer_does_not_return_to_what_was_rolled_back(abc):
    back(abc)  # c was bad
    abc.store.write("things/current.json", b"?")
    assert back(abc).target == "a"


def test_after_a_damaged_pointer_a_rollback_goes_to_another_target(abc):
    abc.store.write("things/current.json", b"?")
    assert to(abc, "b").previous == 1  # not 2, which is b as well
    assert back(abc).target == "a"


def test_a_damaged_pointer_and_a_damaged_history_do_not_stand_in_the_way_of_a_move(abc):
    for path in ("current.json", "history/000002.json", "history/000003.json"):
        abc.store.write(f"things/{path}", b"?")
    assert to(abc, "b").generation == 4
    assert abc.current().target == "b"


def test_a_lost_pointer_is_named_and_replaced_by_the_next_move(abc):
    abc.store.delete("things/current.json")
    with pytest.raises(MissingArtifactError, match="got its history alone, of 3 records"):
        abc.current()
    assert set(abc.standing()) == {"c", "b"}
    assert (to(abc, "d").previous, back(abc).target) == (2, "b")


def test_a_damaged_history_is_shown_and_only_what_needs_it_is_refused(abc):
    abc.store.write("things/history/000002.json", b"?")
    assert states(abc) == [(3, "c", True), (2, None, True), (1, "a", None)]
    assert "things/history/000002.json: is not what was written" in abc.history()[1].problem
    assert abc.current().target == "c"
    with pytest.raises(CorruptArtifactError, match=r"things/history/000002\.json"):
        back(abc)
    with pytest.raises(CorruptArtifactError, match=r"things/history/000002\.json"):
        abc.standing()
    assert to(abc, "d").previous == 3
    assert back(abc).target == "c"


def test_a_record_that_is_gone_or_swapped_is_refused_by_name(abc):
    store = abc.store
    store.write("things/history/000002.json", store.read("things/history/000001.json"))
    with pytest.raises(CorruptArtifactError, match="belongs to another generation: got 1, want 2"):
        back(abc)
    store.delete("things/history/000002.json")
    with pytest.raises(CorruptArtifactError, match=r"000002\.json: is missing"):
        back(abc)
    assert abc.current().target == "c"


def test_numbers_go_on_where_the_history_was_removed(abc):
    for path in abc.store.files("things/history"):
        abc.store.delete(path)
    assert to(abc, "d").generation == 4


def test_a_number_is_used_once_whatever_it_takes(abc, monkeypatch):
    """As when a process lost its lease without noticing, and another has made the record in the meantime."""
    monkeypatch.setattr(Pointer, "generations", lambda _: [1, 2])
    abc.store.write("things/current.json", abc.store.read("things/history/000002.json"))
    before = abc.store.read("things/history/000003.json")
    with pytest.raises(CheckpointError, match=r"already has the file: got things/history/000003\.json"):
        to(abc, "d")
    assert abc.store.read("things/history/000003.json") == before
    assert abc.current().target == "b"


def test_who_comes_second_waits_for_a_move(pointer):
    entered, made = threading.Event(), []

    def hold_for_a_moment():
        with hold(pointer.store, pointer.folder, pointer.what):
            entered.set()
            threading.Event().wait(0.5)
            made.append("first")

    thread = threading.Thread(target=hold_for_a_moment)
    thread.start()
    entered.wait()
    to(pointer, "a")
    made.append("second")
    thread.join()
    assert made == ["first", "second"]


def test_who_waits_too_long_is_told_who_holds_the_pointer(pointer, monkeypatch):
    monkeypatch.setattr(moves, "PATIENCE_SECONDS", 0.3)
    with (
        hold(pointer.store, pointer.folder, pointer.what),
        pytest.raises(RunHeldError, match="the pointer: is held by another process"),
    ):
        to(pointer, "a")
    assert pointer.read() is None


class Loses(LocalFiles):
    """A disk on which something happens right after a record came into the history."""

    happens = None

    def link(self, source, target):
        super().link(source, target)
        if target.parent.name == "history" and self.happens is not None:
            self.happens()


@pytest.mark.parametrize("late", [False, True])
def test_a_mover_that_lost_its_lease_does_not_swap(tmp_path, late):
    pointer = pointer_of(Store(str(tmp_path), files=Loses))
    to(pointer, "a")

    def lose_and_move():
        with moving(pointer) as move:

            def lose():
                for path in pointer.store.files("things/lease"):
                    pointer.store.delete(path)
                move._lease._renew()

            pointer.store._local.happens = lose if late else None
            if not late:
                lose()
            move.to("b", action="use", by="me", why=None, details={})

    with pytest.raises(RunHeldError, match="the pointer: is no longer held by this process"):
        lose_and_move()
    assert pointer.current().target == "a"
    assert states(pointer) == [*([(2, "b", False)] if late else []), (1, "a", True)]


def test_many_movers_at_once_leave_one_chain(pointer):
    threads = [threading.Thread(target=to, args=(pointer, f"t{number}")) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = pointer.history()
    assert [entry.generation for entry in found] == [6, 5, 4, 3, 2, 1]
    assert all(entry.carried_out for entry in found)
    assert {entry.record.target for entry in found} == {f"t{number}" for number in range(6)}


def test_a_pointer_works_in_a_bucket():
    with s3_bucket() as uri:
        pointer = pointer_of(Store(uri))
        for target in "ab":
            to(pointer, target)
        assert [back(pointer).target, pointer.current().generation] == ["a", 3]
        assert states(pointer) == [(3, "a", True), (2, "b", True), (1, "a", True)]


def test_the_default_author_is_user_and_host(monkeypatch):
    monkeypatch.setenv("LOGNAME", "ann")
    assert user_and_host().startswith("ann@")


def test_a_user_without_a_name_is_a_number(monkeypatch):
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 123_456_789)
    assert user_and_host().startswith("123456789@")
