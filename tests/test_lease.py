"""Lease: one process at a time works on a run, and one that is gone does not stand in the way."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from checkpoints import lease
from checkpoints.lease import LeaseRecord, hold, holder_of
from checkpoints.local_files import LocalFiles
from checkpoints.processes import identity
from checkpoints.records import sealed
from checkpoints.store import Store
from contracts.errors import CheckpointError, CorruptArtifactError, RunHeldError
from tests.s3 import s3_bucket

ROOT = Path(__file__).resolve().parents[1]
RUN = "runs/run-a"
FIRST, SECOND = f"{RUN}/lease/000001.json", f"{RUN}/lease/000002.json"
ME = f"{socket.gethostname()}:{os.getpid()}"


@pytest.fixture(scope="module")
def bucket():
    with s3_bucket() as uri:
        yield uri


@pytest.fixture(params=["disk", "s3"])
def store(request, tmp_path):
    """The same store on local disk and in a bucket."""
    if request.param == "disk":
        return Store(str(tmp_path))
    return Store(f"{request.getfixturevalue('bucket')}/{tmp_path.name}")


@pytest.fixture
def disk(tmp_path):
    return Store(str(tmp_path))


@pytest.fixture
def quick(monkeypatch):
    """A heartbeat of 20 ms, and a lease that is stale after a second."""
    monkeypatch.setattr(lease, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(lease, "STALE_SECONDS", 1.0)


def hold_run(store: Store, folder: str = RUN):
    return hold(store, folder, f"run {folder.removeprefix('runs/')}")


def write_lease(store: Store, number: int = 1, *, age: float, folder: str = RUN, **more: object) -> None:
    given = {"holder": "other-host:42", "token": "another", "process": None, "released": False, **more}
    store.write(f"{folder}/lease/{number:06d}.json", sealed(LeaseRecord(beat_at=time.time() - age, **given)))


def record(store: Store, path: str = FIRST) -> dict[str, object]:
    return json.loads(store.read(path))


def wait_until(condition) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("waited five seconds in vain")


def lost(held: lease.Lease) -> str | None:
    """Why a lease is lost; None while it is held."""
    try:
        held.check()
    except RunHeldError as error:
        return f"{error.problem}: {error.got}"
    return None


def test_a_run_that_nobody_works_on_has_no_holder(store):
    assert holder_of(store, RUN) is None


def test_the_holder_is_named_while_the_block_runs_and_gone_after_it(store):
    with hold_run(store):
        holder, age = holder_of(store, RUN)
        assert holder == ME
        assert 0 <= age < 5
        assert holder_of(store, "runs/run-b") is None
        assert record(store)["released"] is False
    assert holder_of(store, RUN) is None
    assert store.files("runs") == [FIRST]
    assert record(store)["released"] is True


def test_a_second_holder_is_refused_with_name_and_age(store):
    write_lease(store, age=7.3)
    with pytest.raises(RunHeldError, match="other-host:42, last heard of 7 s ago") as caught, hold_run(store):
        pytest.fail("held twice")
    assert caught.value.where == "run run-a"
    assert holder_of(store, RUN)[0] == "other-host:42"


def test_the_first_holder_keeps_the_run_when_a_second_is_refused(store):
    with hold_run(store) as first:
        with pytest.raises(RunHeldError, match=re.escape(ME)), hold_run(store):
            pytest.fail("held twice")
        first.check()
        assert holder_of(store, RUN)[0] == ME


def test_different_folders_are_held_side_by_side_and_named_in_errors(store):
    with hold_run(store), hold_run(store, "runs/run-b"), hold(store, "published", "what is published"):
        assert {holder_of(store, folder)[0] for folder in (RUN, "runs/run-b", "published")} == {ME}
        with (
            pytest.raises(RunHeldError, match=r"^what is published: is held"),
            hold(store, "published", "what is published"),
        ):
            pytest.fail("held twice")


def test_a_run_whose_name_begins_like_anothers_is_held_apart(store):
    write_lease(store, 5, age=0, folder="runs/run-ab")
    with hold_run(store) as held:
        assert held.number == 1


def test_numbers_rise_with_every_holder_and_only_the_last_file_stays(store):
    for number in (1, 2, 3):
        with hold_run(store) as held:
            assert held.number == number
            assert store.files(RUN) == [f"{RUN}/lease/{number:06d}.json"]
    assert store.files(RUN) == [f"{RUN}/lease/000003.json"]


def test_numbers_count_on_beyond_six_digits(store):
    write_lease(store, 999_998, age=1000)
    for number in (999_999, 1_000_000, 1_000_001):
        with hold_run(store) as held:
            assert held.number == number
            assert holder_of(store, RUN)[0] == ME


def test_only_lease_files_count(store):
    write_lease(store, 3, age=1000)
    for name in ("note.txt", "0000009.json", "000009.json.bak", "9.json", "deep/000009.json"):
        store.write(f"{RUN}/lease/{name}", b"not a lease")
    with hold_run(store) as held:
        assert held.number == 4
        assert f"{RUN}/lease/note.txt" in store.files(RUN)


@pytest.mark.parametrize("before", ["nobody", "a stale lease", "a released lease"])
def test_one_of_many_that_try_at_once_holds_the_run(store, before):
    for number in range(3):
        folder = f"runs/run-{number}"
        if before != "nobody":
            write_lease(
                store, age=1000 if before == "a stale lease" else 0, released=before != "a stale lease", folder=folder
            )
        entered, refusals = race_of_threads(store, folder)
        assert (entered, len(refusals)) == ([1 if before == "nobody" else 2], 7)
        assert {error.got.partition(",")[0] for error in refusals} == {ME}
        assert len(store.files(folder)) == 1


def race_of_threads(store: Store, folder: str) -> tuple[list[int], list[RunHeldError]]:
    """Lets eight threads try at once; gives the numbers of those who held the folder, and why others did not."""
    barrier, leave = threading.Barrier(8), threading.Event()
    entered, refusals = [], []

    def attempt() -> None:
        barrier.wait()
        try:
            with hold_run(store, folder) as held:
                entered.append(held.number)
                leave.wait(5)
                held.check()
        except RunHeldError as error:
            refusals.append(error)

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(entered) + len(refusals) == 8)
    leave.set()
    for thread in threads:
        thread.join()
    return entered, refusals


ROUNDS = 60


def race(uri: str, barrier, won) -> None:
    """Races for the lease of each round; a winner holds it until the other was refused."""
    store = Store(uri)
    for number in range(ROUNDS):
        barrier.wait(30)
        try:
            with hold_run(store, f"runs/run-{number}") as held:
                won.put((number, os.getpid(), held.number))
                barrier.wait(30)
                held.check()
        except RunHeldError:
            barrier.wait(30)


def test_of_two_processes_that_race_for_a_stale_lease_exactly_one_wins_each_time(disk):
    for number in range(ROUNDS):
        write_lease(disk, 4, age=1000, folder=f"runs/run-{number}", released=bool(number % 2))
    spawn = multiprocessing.get_context("spawn")
    barrier, won = spawn.Barrier(2), spawn.Queue()
    processes = [spawn.Process(target=race, args=(disk.uri, barrier, won)) for _ in range(2)]
    for process in processes:
        process.start()
    wins = [won.get(timeout=30) for _ in range(ROUNDS)]
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
    assert won.empty()
    assert [(number, lease_number) for number, _, lease_number in sorted(wins)] == [(n, 5) for n in range(ROUNDS)]
    for number in range(ROUNDS):
        assert disk.files(f"runs/run-{number}") == [f"runs/run-{number}/lease/000005.json"]


class Interrupted(Store):
    """A store where something happens just before the next `create`."""

    happens = staticmethod(lambda: None)

    def create(self, path: str, data: bytes) -> None:
        happens, self.happens = self.happens, lambda: None
        happens()
        super().create(path, data)


def test_of_two_that_saw_the_same_stale_lease_the_second_is_refused(store):
    write_lease(store, age=1000)
    slow = Interrupted(store.uri)
    first = hold_run(store)
    slow.happens = first.__enter__
    with pytest.raises(RunHeldError, match=re.escape(f"{ME}, last heard of 0 s ago")), hold_run(slow):
        pytest.fail("held twice")
    assert store.files(RUN) == [SECOND]
    first.__exit__(None, None, None)


def test_one_that_was_paused_while_others_came_and_went_does_not_win_with_a_number_of_theirs(store):
    write_lease(store, age=1000)
    slow, last = Interrupted(store.uri), hold_run(store)
    taken = []

    def meanwhile() -> None:
        with hold_run(store):
            pass  # number 2, which the next one removes
        taken.append(last.__enter__())

    slow.happens = meanwhile
    with pytest.raises(RunHeldError, match=re.escape(ME)), hold_run(slow):
        pytest.fail("held twice")
    assert SECOND in store.files(RUN), "the number was free, and a lower one does not count"
    assert taken[0].number == 3
    assert lost(taken[0]) is None
    last.__exit__(None, None, None)
    with hold_run(store) as held:
        assert held.number == 4
        assert store.files(RUN) == [f"{RUN}/lease/000004.json"]


class Silent(Store):
    """A store that does what it is asked, and does not answer."""

    def create(self, path: str, data: bytes) -> None:
        super().create(path, data)
        raise CheckpointError(path, "no answer", next_step="None.")


def test_a_lease_that_was_created_without_an_answer_is_held(store):
    with hold_run(Silent(store.uri)) as held:
        assert holder_of(store, RUN)[0] == ME
        held.check()
    assert record(store)["released"] is True


def test_a_stale_lease_is_taken_over(store):
    write_lease(store, age=lease.STALE_SECONDS - 5)
    assert holder_of(store, RUN) is not None
    write_lease(store, age=lease.STALE_SECONDS + 1)
    assert holder_of(store, RUN) is None
    with hold_run(store) as held:
        assert held.number == 2
        assert holder_of(store, RUN)[0] == ME
    assert store.files("runs") == [SECOND]


def test_a_released_lease_is_free_at_once(store):
    write_lease(store, age=0)
    assert holder_of(store, RUN) is not None
    write_lease(store, age=0, released=True)
    assert holder_of(store, RUN) is None


def test_a_clock_that_is_a_little_ahead_holds_and_one_far_ahead_does_not_hold_for_ever(store):
    write_lease(store, age=-5)
    assert holder_of(store, RUN) == ("other-host:42", 0.0)
    write_lease(store, age=-lease.STALE_SECONDS - 10)
    assert holder_of(store, RUN) is None


def test_the_lease_is_released_when_the_block_fails(store):
    with pytest.raises(KeyError, match="mine"), hold_run(store):
        raise KeyError("mine")
    assert holder_of(store, RUN) is None
    assert record(store)["released"] is True
    assert [thread for thread in threading.enumerate() if thread.name == "lease heartbeat"] == []


def test_the_heartbeat_keeps_a_long_block_from_going_stale(store, quick):
    with hold_run(store) as held:
        first = record(store)["beat_at"]
        end = time.monotonic() + 1.7
        while time.monotonic() < end:
            assert holder_of(store, RUN) is not None
            held.check()
            time.sleep(0.05)
        assert record(store)["beat_at"] > first + 0.6
    assert store.files(RUN) == [FIRST]


def test_a_lease_that_was_removed_by_hand_is_lost(store, quick):
    def work() -> None:
        with hold_run(store) as held:
            wait_until(lambda: store.delete(FIRST) or lost(held))  # a beat may just be writing it
            held.check()

    with pytest.raises(RunHeldError, match=f"got no file {FIRST} any more. Leave it to its holder, or start again"):
        work()
    assert store.files(RUN) == []


def test_a_removed_lease_shows_at_the_end_even_without_a_beat(store):
    with pytest.raises(RunHeldError, match=f"no file {FIRST} any more"), hold_run(store):
        store.delete(FIRST)
    assert store.files(RUN) == []


def test_a_holder_that_was_taken_over_says_so_and_leaves_the_others_lease(store, quick):
    def work() -> None:
        with hold_run(store) as held:
            held.check()
            write_lease(store, 2, age=0)
            wait_until(lambda: lost(held))
            store.delete(FIRST)
            time.sleep(0.1)
            held.check()

    with pytest.raises(RunHeldError, match="got other-host:42, last heard of 0 s ago"):
        work()
    assert record(store, SECOND)["token"] == "another"
    assert store.files(RUN) == [SECOND]


def test_a_lease_of_the_same_number_that_is_anothers_is_left_to_it(store, quick):
    def work() -> None:
        with hold_run(store) as held:
            # All leases were removed by hand, and another process began with 1 again.
            wait_until(lambda: write_lease(store, 1, age=0) or lost(held))

    with pytest.raises(RunHeldError, match="got other-host:42"):
        work()
    assert record(store)["token"] == "another"


def test_a_take_over_shows_at_the_end_even_without_a_beat(store):
    with pytest.raises(RunHeldError, match="is no longer held by this process"), hold_run(store):
        write_lease(store, 2, age=0)
    assert record(store, SECOND)["token"] == "another"


def test_a_take_over_does_not_hide_what_failed(store):
    def work() -> None:
        with hold_run(store):
            write_lease(store, 2, age=0)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        work()


@pytest.fixture
def broken(disk, tmp_path):
    """Breaks the local store, and mends it again: `runs` leads to a folder, or to a file below which nothing can be."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")

    def switch(*, broken: bool) -> None:
        (tmp_path / "next").symlink_to(tmp_path / ("file" if broken else "folder"))
        (tmp_path / "next").replace(tmp_path / "runs")

    switch(broken=False)
    return switch


def test_the_heartbeat_outlives_a_store_that_fails_for_a_while(disk, quick, broken):
    with hold_run(disk) as held:
        broken(broken=True)
        time.sleep(0.2)
        held.check()
        broken(broken=False)
        before = record(disk)["beat_at"]
        wait_until(lambda: record(disk)["beat_at"] > before)
        held.check()
    assert record(disk)["released"] is True


def test_a_lease_that_could_not_be_renewed_for_too_long_is_lost(disk, quick, broken):
    def work() -> None:
        with hold_run(disk) as held:
            broken(broken=True)
            started = time.monotonic()
            wait_until(lambda: lost(held))
            assert 0.8 < time.monotonic() - started < 4
            broken(broken=False)
            held.check()

    with pytest.raises(RunHeldError, match=r"got no heartbeat that reached the store for \d+ s"):
        work()
    assert record(disk)["released"] is True, "nobody had taken it, so it was still there to be released"


def test_a_store_that_fails_at_the_end_leaves_the_lease_to_go_stale(disk, broken):
    with hold_run(disk):
        broken(broken=True)
    broken(broken=False)
    assert record(disk)["released"] is False
    assert holder_of(disk, RUN)[0] == ME


def test_a_store_that_fails_at_the_end_does_not_hide_what_failed(disk, broken):
    def work() -> None:
        with hold_run(disk):
            broken(broken=True)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        work()


HOLDER = """
import sys, time
from checkpoints import lease
from checkpoints.store import Store
from contracts.errors import RunHeldError
lease.HEARTBEAT_SECONDS, lease.STALE_SECONDS = float(sys.argv[2]), float(sys.argv[3])
try:
    with lease.hold(Store(sys.argv[1]), "runs/run-a", "run run-a") as held:
        print("held", held.number, flush=True)
        for _ in range(600):
            time.sleep(0.1)
            held.check()
except RunHeldError as error:
    print("lost", error.got, flush=True)
"""


def start_holder(store: Store, heartbeat: float, stale: float) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, store.uri, str(heartbeat), str(stale)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_the_lease_of_a_killed_process_is_taken_over_at_once(store):
    if identity(os.getpid()) is None:
        pytest.skip("this system does not tell when a process started")
    with start_holder(store, 10, 60) as process:
        assert process.stdout.readline() == "held 1\n"
        with pytest.raises(RunHeldError, match=f":{process.pid}, last heard"), hold_run(store):
            pytest.fail("held twice")
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: holder_of(store, RUN) is None)  # not waited for yet, so it is still a zombie
    assert FIRST in store.files("runs")
    assert holder_of(store, RUN) is None
    with hold_run(store) as held:
        assert held.number == 2
        assert holder_of(store, RUN)[0] == ME


def test_a_process_that_was_paused_too_long_finds_its_lease_lost(store, monkeypatch):
    monkeypatch.setattr(lease, "STALE_SECONDS", 2.0)
    with start_holder(store, 0.1, 2.0) as process:
        assert process.stdout.readline() == "held 1\n"
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(RunHeldError), hold_run(store):
            pytest.fail("held twice")
        wait_until(lambda: holder_of(store, RUN) is None)
        with hold_run(store) as held:
            process.send_signal(signal.SIGCONT)
            assert process.stdout.readline().startswith("lost ")
            assert process.wait(10) == 0
            assert holder_of(store, RUN)[0] == ME
            assert held.number == 2
            held._renew()
            held.check()
    assert record(store, SECOND)["released"] is True


def test_a_pid_that_passed_to_another_process_does_not_hold_the_run(disk):
    mine = identity(os.getpid())
    if mine is None:
        pytest.skip("this system does not tell when a process started")
    write_lease(disk, age=1, process=mine)
    assert holder_of(disk, RUN) is not None
    write_lease(disk, age=1, process=f"{mine.rpartition(' ')[0]} 1")
    assert holder_of(disk, RUN) is None


def test_of_processes_elsewhere_only_the_heartbeat_counts(disk):
    _, namespace, pid, started = (identity(os.getpid()) or "boot pid:[1] 1 1").split()
    for process in (f"another-boot {namespace} {pid} {started}", "another", None):
        write_lease(disk, age=1, process=process)
        assert holder_of(disk, RUN) is not None


WHOLE = sealed(LeaseRecord(holder="a", token="b", process=None, beat_at=1.0, released=False))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"null", b"[]", b"{}", b"\xff\xfe", WHOLE[:-5], WHOLE.replace(b"false", b"true"),
        WHOLE.replace(b'"a"', b'"c"'),
    ],
)  # fmt: skip
def test_a_damaged_lease_is_refused_by_name_and_left(store, data):
    store.write(SECOND, data)
    write_lease(store, 1, age=1000)
    with pytest.raises(CorruptArtifactError, match="is not what was written") as caught:
        holder_of(store, RUN)
    assert caught.value.where == SECOND
    assert "remove the file" in caught.value.next_step
    with pytest.raises(CorruptArtifactError), hold_run(store):
        pytest.fail("held on a damaged lease")
    assert store.read(SECOND) == data


def test_a_lease_damaged_while_it_is_held_is_mended_and_released(store, quick):
    with hold_run(store) as held:
        store.write(FIRST, b"{")
        wait_until(lambda: store.read(FIRST) != b"{")
        assert holder_of(store, RUN)[0] == ME
        held.check()
        store.write(FIRST, b"{")
    assert record(store)["released"] is True


def test_a_later_lease_that_cannot_be_read_is_still_another_holders(store, quick):
    def work() -> None:
        with hold_run(store) as held:
            store.write(SECOND, b"{")
            wait_until(lambda: lost(held))

    with pytest.raises(RunHeldError, match=f"got another lease, {SECOND}, that cannot be read"):
        work()
    assert store.read(SECOND) == b"{"


def test_a_store_that_cannot_be_written_says_so(disk, tmp_path):
    (tmp_path / "runs").write_bytes(b"")
    with pytest.raises(CheckpointError, match="could not do what was asked"), hold_run(disk):
        pytest.fail("held without a lease")


class FullDisk(LocalFiles):
    def write(self, file: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_is_not_taken_for_another_holder(disk, tmp_path):
    write_lease(disk, age=1000)
    full = Store(str(tmp_path), files=FullDisk)
    with pytest.raises(CheckpointError, match="No space left on device") as caught, hold_run(full):
        pytest.fail("held without a lease")
    assert not isinstance(caught.value, RunHeldError)
    assert disk.files(RUN) == [FIRST]
