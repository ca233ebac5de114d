"""Lease: one process at a time works on a run, and one that is gone does not stand in the way."""

from __future__ import annotations

import json
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
from checkpoints.lease import hold, holder_of
from checkpoints.store import Store
from contracts.errors import CheckpointError, CorruptArtifactError, RunHeldError

ROOT = Path(__file__).resolve().parents[1]
PATH = "runs/run-a/lease.json"
ME = f"{socket.gethostname()}:{os.getpid()}"


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path))


@pytest.fixture
def quick(monkeypatch):
    """A heartbeat of 20 ms, and a lease that is stale after half a second."""
    monkeypatch.setattr(lease, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.5)


def write_lease(store: Store, *, age: float, holder: str = "other-host:42", **more: object) -> None:
    store.write(PATH, json.dumps({"holder": holder, "beat_at": time.time() - age, **more}).encode())


def wait_until(condition) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("waited five seconds in vain")


def test_a_run_that_nobody_works_on_has_no_holder(store):
    assert holder_of(store, "run-a") is None


def test_the_holder_is_named_while_the_block_runs_and_gone_after_it(store):
    with hold(store, "run-a"):
        holder, age = holder_of(store, "run-a")
        assert holder == ME
        assert 0 <= age < 5
        assert holder_of(store, "run-b") is None
    assert holder_of(store, "run-a") is None
    assert store.files("runs") == []


def test_a_second_holder_is_refused_with_name_and_age(store):
    write_lease(store, age=7.3)
    with pytest.raises(RunHeldError, match="other-host:42, last heard of 7 s ago") as caught, hold(store, "run-a"):
        pytest.fail("held twice")
    assert caught.value.where == "run run-a"
    assert holder_of(store, "run-a")[0] == "other-host:42"


def test_the_first_holder_keeps_the_run_when_a_second_is_refused(store):
    with hold(store, "run-a") as first:
        with pytest.raises(RunHeldError, match=re.escape(ME)), hold(store, "run-a"):
            pytest.fail("held twice")
        first.check()
        assert holder_of(store, "run-a")[0] == ME


def test_different_runs_are_held_side_by_side(store):
    with hold(store, "run-a"), hold(store, "run-b"):
        assert holder_of(store, "run-a")[0] == holder_of(store, "run-b")[0] == ME


def test_one_of_many_that_try_at_once_holds_the_run(store):
    barrier, entered, refusals = threading.Barrier(8), [], []
    leave = threading.Event()

    def attempt() -> None:
        barrier.wait()
        try:
            with hold(store, "run-a"):
                entered.append(1)
                leave.wait(5)
        except RunHeldError as error:
            refusals.append(error)

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(entered) + len(refusals) == 8)
    leave.set()
    for thread in threads:
        thread.join()
    assert (len(entered), len(refusals)) == (1, 7)
    assert store.files("runs") == []


def test_a_stale_lease_is_taken_over(store):
    write_lease(store, age=lease.STALE_SECONDS - 5)
    assert holder_of(store, "run-a") is not None
    write_lease(store, age=lease.STALE_SECONDS + 1)
    assert holder_of(store, "run-a") is None
    with hold(store, "run-a"):
        assert holder_of(store, "run-a")[0] == ME
    assert store.files("runs") == []


def test_a_clock_that_is_a_little_ahead_holds_and_one_far_ahead_does_not_hold_for_ever(store):
    write_lease(store, age=-5)
    assert holder_of(store, "run-a") == ("other-host:42", 0.0)
    write_lease(store, age=-lease.STALE_SECONDS - 10)
    assert holder_of(store, "run-a") is None


def test_the_lease_is_released_when_the_block_fails(store):
    with pytest.raises(KeyError, match="mine"), hold(store, "run-a"):
        raise KeyError("mine")
    assert store.files("runs") == []
    assert [thread for thread in threading.enumerate() if thread.name == "lease heartbeat"] == []


def test_the_heartbeat_keeps_a_long_block_from_going_stale(store, quick):
    with hold(store, "run-a") as held:
        first = json.loads(store.read(PATH))["beat_at"]
        end = time.monotonic() + 1.2
        while time.monotonic() < end:
            assert holder_of(store, "run-a") is not None
            time.sleep(0.05)
        assert json.loads(store.read(PATH))["beat_at"] > first + 0.6
        held.check()


def test_a_lease_that_was_removed_by_hand_comes_back_with_the_next_beat(store, quick):
    with hold(store, "run-a"):
        store.delete(PATH)
        wait_until(lambda: holder_of(store, "run-a") is not None)
    assert store.files("runs") == []


def test_a_holder_that_was_taken_over_says_so_and_leaves_the_others_lease(store, quick):
    def work() -> None:
        with hold(store, "run-a") as held:
            held.check()
            wait_until(lambda: write_lease(store, age=0, token="another") or _is_lost(held))

    with pytest.raises(RunHeldError, match="was taken over by another process"):
        work()
    assert json.loads(store.read(PATH))["token"] == "another"


def test_a_take_over_shows_at_the_end_even_without_a_beat(store):
    with pytest.raises(RunHeldError, match="was taken over"), hold(store, "run-a"):
        write_lease(store, age=0, token="another")
    assert json.loads(store.read(PATH))["token"] == "another"


def test_a_take_over_does_not_hide_what_failed(store):
    def work() -> None:
        with hold(store, "run-a"):
            write_lease(store, age=0, token="another")
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        work()


def test_the_heartbeat_outlives_a_store_that_fails_for_a_while(store, quick, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    link_to("folder", tmp_path)
    with hold(store, "run-a") as held:
        link_to("file", tmp_path)  # below a file nothing can be read or written
        time.sleep(0.2)
        link_to("folder", tmp_path)
        before = json.loads(store.read(PATH))["beat_at"]
        wait_until(lambda: json.loads(store.read(PATH))["beat_at"] > before)
        held.check()
    assert store.read_if_there(PATH) is None


def test_the_lease_of_a_killed_process_is_taken_over_at_once(store, tmp_path):
    if lease._identity(os.getpid()) is None:
        pytest.skip("this system does not tell when a process started")
    script = (
        "import sys, time; from checkpoints.lease import hold; from checkpoints.store import Store\n"
        "with hold(Store(sys.argv[1]), 'run-a'):\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(RunHeldError, match=f":{process.pid}, last heard"), hold(store, "run-a"):
            pytest.fail("held twice")
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: holder_of(store, "run-a") is None)  # not waited for yet, so it is still a zombie
    assert PATH in store.files("runs")
    assert holder_of(store, "run-a") is None
    with hold(store, "run-a"):
        assert holder_of(store, "run-a")[0] == ME


def test_a_pid_that_passed_to_another_process_does_not_hold_the_run(store):
    identity = lease._identity(os.getpid())
    if identity is None:
        pytest.skip("this system does not tell when a process started")
    write_lease(store, age=1, process=identity)
    assert holder_of(store, "run-a") is not None
    write_lease(store, age=1, process=f"{identity.rpartition(' ')[0]} 1")
    assert holder_of(store, "run-a") is None


def test_of_processes_elsewhere_only_the_heartbeat_counts(store):
    identity = lease._identity(os.getpid()) or "boot pid:[1] 1 1"
    _, namespace, pid, started = identity.split()
    for process in (f"another-boot {namespace} {pid} {started}", "another", None):
        write_lease(store, age=1, process=process)
        assert holder_of(store, "run-a") is not None


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"null", b"[]", b"{}", b'{"holder": "a"}', b'{"holder": 1, "beat_at": 1}',
        b'{"holder": "a", "beat_at": "now"}', b'{"holder": "a", "beat_at": NaN}', b"\xff\xfe",
    ],
)  # fmt: skip
def test_a_damaged_lease_is_refused_by_name_and_left(store, data):
    store.write(PATH, data)
    with pytest.raises(CorruptArtifactError, match="is no lease") as caught:
        holder_of(store, "run-a")
    assert caught.value.where == PATH
    assert "remove the file" in caught.value.next_step
    with pytest.raises(CorruptArtifactError), hold(store, "run-a"):
        pytest.fail("held on a damaged lease")
    assert store.read(PATH) == data


def test_a_lease_damaged_while_it_is_held_is_mended_and_released(store, quick):
    with hold(store, "run-a"):
        store.write(PATH, b"{")
        wait_until(lambda: store.read_if_there(PATH) not in (b"{", None))
        assert holder_of(store, "run-a")[0] == ME
        store.write(PATH, b"{")
    assert store.files("runs") == []


def test_a_store_that_cannot_be_written_says_so(store, tmp_path):
    (tmp_path / "runs").write_bytes(b"")
    with pytest.raises(CheckpointError, match="could not do what was asked"), hold(store, "run-a"):
        pytest.fail("held without a lease")


def link_to(name: str, folder: Path) -> None:
    """Makes `runs` lead elsewhere, in one step."""
    (folder / "next").symlink_to(folder / name)
    (folder / "next").replace(folder / "runs")


def _is_lost(held) -> bool:
    try:
        held.check()
    except RunHeldError:
        return True
    return False
