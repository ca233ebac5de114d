"""Store: bytes by path, whole or not at all, and nothing outside its root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.store import Store
from contracts.errors import CheckpointError, ConfigurationError, MissingArtifactError

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = [
    "../x", "a/../../x", "a/..", "..", ".", "", "/", "/etc/passwd", "a//b", "a/", "./a", "a\\..\\b", "a\0b", "a\nb",
    ".hidden", "a/.hidden", "~/x", "-rf", "C:/x", "a b", "%2e%2e/x", "x#1",
]  # fmt: skip


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    """A local folder, and obstore's store in memory, which answers as object storage does."""
    return Store(str(tmp_path / "store") if request.param == "local" else "memory://")


def test_what_is_written_is_read(store):
    store.write("runs/a/run.json", b"one")
    assert store.read("runs/a/run.json") == b"one"
    assert store.read_if_there("runs/a/run.json") == b"one"


def test_an_empty_file_is_a_file(store):
    store.write("a", b"")
    assert store.read_if_there("a") == b""
    assert store.files("a") == [] or store.root is None


def test_write_replaces(store):
    store.write("a/b", b"a longer first content")
    store.write("a/b", b"second")
    assert store.read("a/b") == b"second"


def test_create_refuses_a_path_that_exists_and_leaves_it(store):
    store.create("a/b", b"first")
    with pytest.raises(CheckpointError, match="already has the file: got a/b"):
        store.create("a/b", b"second")
    assert store.read("a/b") == b"first"


def test_create_lets_one_of_many_threads_win(store):
    barrier, won = threading.Barrier(8), []

    def attempt(number: int) -> None:
        barrier.wait()
        try:
            store.create("a/b", b"%d" % number)
        except CheckpointError:
            return
        won.append(b"%d" % number)

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [store.read("a/b")]


def test_a_missing_file_is_named(store):
    store.write("a/c", b"")
    with pytest.raises(MissingArtifactError, match="has no such file: got a/b"):
        store.read("a/b")
    assert store.read_if_there("a/b") is None


def test_delete_removes_and_forgives(store):
    store.write("a/b", b"x")
    store.delete("a/b")
    store.delete("a/b")
    assert store.read_if_there("a/b") is None


def test_files_are_all_paths_below_a_folder_sorted(store):
    for path in ("a/z", "a/b/c", "a/b/B", "a/10", "a/9", "ab/c", "b/a"):
        store.write(path, b"")
    assert store.files("a") == ["a/10", "a/9", "a/b/B", "a/b/c", "a/z"]
    assert store.files("nothing/here") == []


def test_folders_are_the_names_right_below_sorted(store):
    for path in ("runs/b/x", "runs/a/deep/x", "runs/file", "runsx/c/x"):
        store.write(path, b"")
    assert store.folders("runs") == ["a", "b"]
    assert store.folders("nothing") == []


@pytest.mark.parametrize("path", OUTSIDE)
def test_paths_that_could_leave_the_store_are_refused_by_every_call(store, path):
    calls = [
        store.read, store.read_if_there, store.delete, store.files, store.folders,
        lambda path: store.write(path, b"x"), lambda path: store.create(path, b"x"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(CheckpointError, match="does not take such a path") as caught:
            call(path)
        assert caught.value.got == repr(path)
        assert not isinstance(caught.value, MissingArtifactError)


@given(path=st.text(alphabet="ab./\\~-_ 0\n", max_size=8))
@settings(max_examples=200, deadline=None)
def test_a_path_is_refused_or_stays_below_the_root(path, tmp_path_factory):
    root = tmp_path_factory.getbasetemp() / "below"
    store = Store(str(root))
    try:
        folder = store.local_folder(path)
    except CheckpointError:
        assert any(not part or not (part[0].isalnum() or part[0] == "_") for part in path.split("/")) or any(
            letter in path for letter in "\\~ \n"
        )
    else:
        assert Path(os.path.normpath(folder)) == folder
        assert root.resolve() in folder.parents


def test_readers_never_see_a_part_of_a_file(tmp_path):
    store = Store(str(tmp_path))
    contents = [bytes([letter]) * (300_000 + letter) for letter in b"abcd"]
    store.write("a/b", contents[0])
    done, wrong, reads = threading.Event(), [], []

    def read() -> None:
        while not done.is_set():
            data = store.read("a/b")
            reads.append(1)
            if data not in contents:
                wrong.append(data[:10])

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(60):
        store.write("a/b", contents[number % 4])
    done.set()
    for reader in readers:
        reader.join()
    assert len(reads) > 10
    assert wrong == []


def test_writers_of_one_path_leave_one_whole_content(tmp_path):
    store = Store(str(tmp_path))
    contents = [bytes([letter]) * 200_000 for letter in b"abcdef"]
    threads = [threading.Thread(target=store.write, args=("a/b", content)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.read("a/b") in contents


def test_a_writer_killed_at_any_moment_leaves_whole_files_alone(tmp_path):
    script = (
        "import sys; from checkpoints.store import Store; store = Store(sys.argv[1])\n"
        "for n in range(10**6):\n"
        "    store.write('a/b', bytes([97 + n % 26]) * 2_000_000)\n"
        "    store.create(f'a/{n}', bytes([97 + n % 26]) * 100_000)\n"
        "    print(n, flush=True)\n"
    )
    store = Store(str(tmp_path))
    for stop_after in (1, 2, 4):
        for path in store.files("a"):
            store.delete(path)
        with subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
        ) as process:
            for _ in range(stop_after):
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        sizes = {path: len(store.read(path)) for path in store.files("a")}
        assert len(sizes) > stop_after
        assert set(sizes.values()) <= {2_000_000, 100_000}
        assert len(set(store.read("a/b"))) == 1


def test_a_file_is_on_the_disk_before_its_name_shows_and_so_is_the_name_after(tmp_path, monkeypatch):
    seen = []
    fsync, replace, link = os.fsync, Path.replace, os.link

    def note(word: str, number: int) -> None:
        seen.append((word, number))

    monkeypatch.setattr(os, "fsync", lambda file: (note("sync", os.fstat(file).st_ino), fsync(file)))
    monkeypatch.setattr(Path, "replace", lambda old, new: (note("show", old.stat().st_ino), replace(old, new)))
    monkeypatch.setattr(os, "link", lambda old, new: (note("show", old.stat().st_ino), link(old, new)))
    store = Store(str(tmp_path))
    for call, path in ((store.write, "new/deep/a"), (store.create, "new/deep/b"), (store.write, "new/deep/a")):
        seen.clear()
        call(path, b"x")
        file, folder = (tmp_path / path).stat().st_ino, (tmp_path / "new" / "deep").stat().st_ino
        assert seen[-3:] == [("sync", file), ("show", file), ("sync", folder)]


def test_new_folders_are_on_the_disk_too(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file).st_ino), fsync(file)))
    Store(str(tmp_path)).write("new/deep/a", b"x")
    assert {folder.stat().st_ino for folder in (tmp_path, tmp_path / "new", tmp_path / "new" / "deep")} <= set(synced)


def test_a_write_that_fails_leaves_the_old_file_and_no_rest(tmp_path):
    store = Store(str(tmp_path))
    (tmp_path / "a" / "b").mkdir(parents=True)
    for call in (store.write, store.create):
        with pytest.raises(CheckpointError, match=r"a/b"):
            call("a/b", b"x")
    assert store.read_if_there("a/b") is None
    assert list((tmp_path / ".unfinished").iterdir()) == []
    store.write("file", b"x")
    with pytest.raises(CheckpointError, match="could not do what was asked"):
        store.write("file/below", b"x")
    assert store.read("file") == b"x"


def test_what_a_crash_left_unfinished_is_never_listed(tmp_path):
    store = Store(str(tmp_path))
    store.write("a/b", b"x")
    (tmp_path / ".unfinished" / "rest").write_bytes(b"half")
    assert store.files("a") == ["a/b"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["b"]


def test_files_can_be_read_by_whom_the_umask_allows(tmp_path):
    mask = os.umask(0o027)
    try:
        Store(str(tmp_path)).write("a/b", b"x")
    finally:
        os.umask(mask)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o640


def test_a_folder_and_its_file_uri_are_the_same_store(tmp_path):
    folder = tmp_path / "with space"
    Store(str(folder)).write("a", b"x")
    assert Store(folder.as_uri()).read("a") == b"x"
    assert Store(folder.as_uri()).local_folder("a") == folder.resolve() / "a"


def test_object_storage_has_no_local_folder():
    with pytest.raises(ConfigurationError, match="cannot be memory-mapped"):
        Store("memory://").local_folder("a")


@pytest.mark.parametrize("uri", ["ftp://host/x", "s4://bucket", "http://", "://"])
def test_an_unknown_uri_is_refused_by_name(uri):
    with pytest.raises(ConfigurationError, match="cannot be opened") as caught:
        Store(uri)
    assert caught.value.got == uri


def test_a_root_that_cannot_be_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="cannot be opened"):
        Store(str(tmp_path / "file"))
