"""Store: bytes by path, whole or not at all, and nothing outside its root."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partialmethod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.local_files import LocalFiles
from checkpoints.store import Store
from contracts.errors import CheckpointError, ConfigurationError, MissingArtifactError
from tests.s3 import s3_bucket

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = [
    "../x", "a/../../x", "a/..", "..", ".", "", "/", "/etc/passwd", "a//b", "a/", "./a", "a\\..\\b", "a\0b", "a\nb",
    ".hidden", "a/.hidden", "~/x", "-rf", "C:/x", "a b", "%2e%2e/x", "x#1",
]  # fmt: skip


@pytest.fixture(scope="module")
def bucket():
    with s3_bucket() as uri:
        yield uri


@pytest.fixture(params=["disk", "s3"])
def store(request, tmp_path):
    """The same store on local disk and in a bucket."""
    if request.param == "disk":
        return Store(str(tmp_path / "store"))
    return Store(f"{request.getfixturevalue('bucket')}/{tmp_path.name}")


class KilledError(BaseException):
    """The process is no more."""


class Durable:
    """What a power cut would leave of a folder: the names and contents that were synced."""

    def __init__(self) -> None:
        self.contents: dict[int, bytes] = {}
        self.names: dict[int, dict[str, tuple[int, bool]]] = {}

    def restore(self, folder: Path, target: Path) -> None:
        target.mkdir()
        for name, (inode, is_folder) in self.names.get(folder.stat().st_ino, {}).items():
            if is_folder:
                self.restore(folder / name, target / name)
            else:
                (target / name).write_bytes(self.contents.get(inode, b"torn"))


class Disk(LocalFiles):
    """A disk that notes its steps, may be killed or fail before any of them, and knows what a power cut would leave."""

    def __init__(self, root: Path, durable: Durable, kept: Path) -> None:
        super().__init__(root)
        self.durable, self.steps, self.last = durable, [], None
        self.kept_inodes = kept  # second names, so that no inode is used twice
        self.error: BaseException = KilledError()

    def _step(self, name: str, path: Path, *more) -> None:
        if self.last is not None and len(self.steps) >= self.last:
            if not isinstance(self.error, KilledError):
                self.last = None  # a disk that fails once
            raise self.error
        self.steps.append((name, more[0] if name in ("rename", "link") else path))
        getattr(LocalFiles, name)(self, path, *more)
        if name == "write":
            os.link(path, self.kept_inodes / path.name)
        elif name == "sync_file":
            self.durable.contents[path.stat().st_ino] = path.read_bytes()
        elif name == "sync_folder":
            entries = {entry.name: (entry.stat().st_ino, entry.is_dir()) for entry in path.iterdir()}
            self.durable.names[path.stat().st_ino] = entries

    write = partialmethod(_step, "write")
    sync_file = partialmethod(_step, "sync_file")
    rename = partialmethod(_step, "rename")
    link = partialmethod(_step, "link")
    unlink = partialmethod(_step, "unlink")
    make_folder = partialmethod(_step, "make_folder")
    sync_folder = partialmethod(_step, "sync_folder")


@pytest.fixture
def disks(tmp_path):
    """Makes (store, disk) pairs: fresh ones, or another process at the disk of an earlier one."""
    numbers = itertools.count()

    def make(of: Disk | None = None) -> tuple[Store, Disk]:
        number = next(numbers)
        (tmp_path / f"kept-{number}").mkdir()
        root = tmp_path / f"store-{number}" if of is None else of.root
        root.mkdir(exist_ok=True)
        made = []

        def files(root: Path) -> Disk:
            made.append(Disk(root, Durable() if of is None else of.durable, tmp_path / f"kept-{number}"))
            return made[0]

        return Store(str(root), files=files), made[0]

    return make


def after_a_power_cut(disk: Disk) -> Store:
    target = Path(f"{disk.root}-after-{len(list(disk.root.parent.iterdir()))}")
    disk.durable.restore(disk.root, target)
    return Store(str(target))


def test_what_is_written_is_read(store):
    store.write("runs/a/run.json", b"one")
    assert store.read("runs/a/run.json") == b"one"
    assert store.read_if_there("runs/a/run.json") == b"one"


def test_an_empty_file_is_a_file(store):
    store.write("a", b"")
    assert store.read_if_there("a") == b""
    assert store.files("a") == []


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
    assert store.files("a/b") == ["a/b/B", "a/b/c"]
    assert store.files("a/1") == store.files("nothing/here") == []


def test_files_are_listed_however_many_there_are(store):
    paths = [f"a/{number:04d}" for number in range(1001)]  # S3 lists 1000 at a time
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda path: store.write(path, b""), paths))
    assert store.files("a") == paths


def test_a_tag_stands_for_the_content_of_a_file_until_it_is_written(store):
    for path in ("a/b/x.json", "a/b/y.json", "a/b/y.parquet", "a/b/c/z.json", "a/bc/x.json"):
        store.write(path, path.encode())
    before = store.tags("a/b")
    assert set(before) == {"x.json", "y.json", "y.parquet"}
    tags = store.tags("a/b", ".json")
    assert tags == {name: before[name] for name in ("x.json", "y.json")}
    assert len(set(tags.values())) == 2
    store.read("a/b/x.json")
    store.write("a/b/z.json", b"")
    store.delete("a/b/y.json")
    assert store.tags("a/b", "x.json") == {"x.json": before["x.json"]}
    store.write("a/b/x.json", b"a/b/y.json")
    assert store.tags("a/b", "x.json") != {"x.json": before["x.json"]}
    assert store.tags("a/none") == store.tags("b", ".json") == {}


def test_folders_are_the_names_right_below_sorted(store):
    for path in ("runs/b/x", "runs/a/deep/x", "runs/file", "runsx/c/x"):
        store.write(path, b"")
    assert store.folders("runs") == ["a", "b"]
    assert store.folders("runs/a") == ["deep"]
    assert store.folders("nothing") == store.folders("runs/file") == []


def test_a_folder_is_gone_with_its_last_file(store):
    store.write("runs/a/deep/x", b"")
    store.delete("runs/a/deep/x")
    assert store.folders("runs") == []
    store.write("runs/a/deep/x", b"again")
    assert store.folders("runs") == ["a"]


@pytest.mark.parametrize("path", OUTSIDE)
def test_paths_that_could_leave_the_store_are_refused_by_every_call(store, path):
    calls = [
        store.read, store.read_if_there, store.delete, store.files, store.folders, store.tags,
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
    put = []

    class Noting(LocalFiles):
        def put(self, path: str, data: bytes, *, replace: bool) -> None:
            put.append(self.root / path)

    root = tmp_path_factory.getbasetemp() / "below"
    try:
        Store(str(root), files=Noting).write(path, b"x")
    except CheckpointError:
        assert put == []
        assert any(not part or not (part[0].isalnum() or part[0] == "_") for part in path.split("/")) or any(
            letter in path for letter in "\\~ \n"
        )
    else:
        assert Path(os.path.normpath(put[0])) == put[0]
        assert root.resolve() in put[0].parents


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
        left = list((tmp_path / ".unfinished").iterdir())
        assert store.sweep_unfinished(0) == len(left)
        assert list((tmp_path / ".unfinished").iterdir()) == []
        assert {path: len(store.read(path)) for path in store.files("a")} == sizes


WORK = {
    "write a new file": lambda store: store.write("new/deep/file", b"new"),
    "write over a file": lambda store: store.write("old/file", b"new"),
    "create a file": lambda store: store.create("old/other", b"new"),
    "create a file in a new folder": lambda store: store.create("old/deep/er/file", b"new"),
    "delete a file": lambda store: store.delete("old/file"),
}
BEFORE = {"old/file": b"old"}
AFTER = {
    "write a new file": {"old/file": b"old", "new/deep/file": b"new"},
    "write over a file": {"old/file": b"new"},
    "create a file": {"old/file": b"old", "old/other": b"new"},
    "create a file in a new folder": {"old/file": b"old", "old/deep/er/file": b"new"},
    "delete a file": {},
}


def content_of(store: Store) -> dict[str, bytes]:
    return {path: store.read(path) for folder in ("old", "new") for path in store.files(folder)}


@pytest.mark.parametrize("work", WORK)
def test_a_process_killed_at_any_step_and_a_power_cut_then_leave_the_old_or_the_new(disks, work):
    for last in range(30):
        store, disk = disks()
        store.write("old/file", b"old")
        disk.steps.clear()
        disk.last = last
        try:
            WORK[work](store)
        except KilledError:
            finished = False
        else:
            finished = True
        left = Store(str(disk.root))
        assert content_of(left) in ([AFTER[work]] if finished else [BEFORE, AFTER[work]])
        assert content_of(after_a_power_cut(disk)) in ([AFTER[work]] if finished else [BEFORE, AFTER[work]])
        assert left.sweep_unfinished(0) <= 1
        if finished:
            assert last >= 2, "the work has no steps to be killed at"
            return
    pytest.fail("the work never ended")


@pytest.mark.parametrize("work", WORK)
def test_work_that_is_done_again_after_a_kill_outlives_a_power_cut(disks, work):
    for last in range(30):
        _, killed = made = disks()
        made[0].write("old/file", b"old")
        killed.steps.clear()
        killed.last = last
        try:
            WORK[work](made[0])
        except KilledError:
            store, disk = disks(killed)
            if content_of(store) == BEFORE or "create" not in work:  # what is created already is not created again
                WORK[work](store)
                assert content_of(after_a_power_cut(disk)) == AFTER[work]
        else:
            return
    pytest.fail("the work never ended")


@pytest.mark.parametrize("work", WORK)
def test_a_disk_that_fails_at_any_step_is_an_error_and_leaves_the_old_or_the_new(disks, work):
    for last in range(30):
        store, disk = disks()
        store.write("old/file", b"old")
        disk.steps.clear()
        disk.last, disk.error = last, OSError(errno.ENOSPC, "No space left on device")
        try:
            WORK[work](store)
        except CheckpointError as error:
            said = str(error)
        else:
            assert disk.last is not None, "the error was swallowed"
            assert content_of(store) == AFTER[work]
            return
        assert "No space left on device" in said
        assert content_of(store) in (BEFORE, AFTER[work])
    pytest.fail("the work never ended")


def test_a_file_is_on_the_disk_before_its_name_shows_and_so_is_the_name_after(disks):
    store, disk = disks()
    store.write("a/file", b"old")
    for call, path, show in ((store.write, "a/file", "rename"), (store.create, "a/new", "link")):
        disk.steps.clear()
        call(path, b"x")
        (_, unfinished), *_ = disk.steps
        assert unfinished.parent == disk.root / ".unfinished"
        assert disk.steps == [
            ("write", unfinished), ("sync_file", unfinished), (show, disk.root / path),
            ("sync_folder", disk.root / "a"), ("unlink", unfinished),
        ]  # fmt: skip


def test_what_is_synced_is_synced_by_the_system(tmp_path, monkeypatch):
    synced, fsync = Counter(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.update([os.fstat(file).st_ino]), fsync(file)))
    store = Store(str(tmp_path / "made" / "store"))
    store.write("new/deep/a", b"x")
    folder = store.root / "new" / "deep"
    for path in (tmp_path, tmp_path / "made", store.root, store.root / "new", folder, folder / "a"):
        assert synced[path.stat().st_ino] > 0, path
    before = synced[folder.stat().st_ino]
    store.delete("new/deep/a")
    assert synced[folder.stat().st_ino] == before + 1


def test_a_folder_removed_by_hand_is_made_again(tmp_path):
    store = Store(str(tmp_path))
    store.write("a/deep/b", b"x")
    (tmp_path / "a" / "deep" / "b").unlink()
    (tmp_path / "a" / "deep").rmdir()
    store.delete("a/deep/b")
    store.write("a/deep/b", b"y")
    assert store.read("a/deep/b") == b"y"


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


def test_sweeping_removes_old_rests_alone_and_counts_them(tmp_path):
    store = Store(str(tmp_path))
    assert store.sweep_unfinished(0) == 0
    store.write("a/b", b"x")
    for name, age in (("young", 50), ("old", 70), ("older", 10_000)):
        (tmp_path / ".unfinished" / name).write_bytes(b"half")
        then = (tmp_path / ".unfinished" / name).stat().st_mtime - age
        os.utime(tmp_path / ".unfinished" / name, (then, then))
    assert store.sweep_unfinished(60) == 2
    assert [file.name for file in (tmp_path / ".unfinished").iterdir()] == ["young"]
    assert store.read("a/b") == b"x"


def test_a_killed_create_leaves_a_rest_that_is_swept_and_the_file_that_stays(disks):
    store, disk = disks()
    store.write("a/b", b"x")
    disk.steps.clear()
    disk.last = 4  # write, sync, link, sync folder, and killed before the rest is unlinked
    with pytest.raises(KilledError):
        store.create("a/c", b"y")
    after = Store(str(disk.root))
    assert after.sweep_unfinished(0) == 1
    assert after.read("a/c") == b"y"
    assert after.sweep_unfinished(0) == 0


def test_object_storage_has_no_unfinished_files(bucket):
    store = Store(f"{bucket}/unfinished")
    store.write("a", b"x")
    assert store.sweep_unfinished(0) == 0
    assert store.read("a") == b"x"


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
    assert Store(folder.as_uri()).root == Store(str(folder)).root == folder.resolve()


def test_a_reader_makes_no_folder(tmp_path):
    with pytest.raises(ConfigurationError, match="a folder that is there"):
        Store(str(tmp_path / "none"), create=False)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("uri", ["ftp://host/x", "s4://bucket", "http://", "://"])
def test_an_unknown_uri_is_refused_by_name(uri):
    with pytest.raises(ConfigurationError, match="cannot be opened") as caught:
        Store(uri)
    assert caught.value.got.startswith(f"{uri} (")


def test_a_root_that_cannot_be_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="cannot be opened"):
        Store(str(tmp_path / "file"))
