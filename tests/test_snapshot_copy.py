"""Snapshot copies: a corpus in a bucket is a folder on this disk when it is opened, and the right one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from checkpoints.corpora import save_snapshot, snapshot_folder
from checkpoints.snapshot_copy import cache_folder, local_snapshot
from checkpoints.store import Store
from contracts.corpus import CorpusSnapshot
from contracts.errors import CheckpointError, ConfigurationError, CorruptArtifactError, MissingArtifactError
from corpus.files import described_snapshot, snapshot_files
from flows.resources import Resources
from flows.settings import Settings, load_settings
from tests.corpora import make_corpus
from tests.s3 import s3_bucket

ROOT = Path(__file__).resolve().parents[1]
CORPUS = make_corpus([{"chunk_id": f"c{n:02d}", "text": f"word{n} of chunk {n}"} for n in range(20)])
FILES = snapshot_files(CORPUS)
SNAPSHOT = described_snapshot(CORPUS.snapshot, FILES, source_file="c.jsonl", created_at="2026-06-01", seconds=1.0)
FOLDER = snapshot_folder(SNAPSHOT.snapshot_id)


@pytest.fixture(scope="module")
def bucket():
    with s3_bucket() as uri:
        yield uri


@pytest.fixture
def store(bucket, tmp_path):
    """A store in a bucket that holds the snapshot."""
    opened = Store(f"{bucket}/{tmp_path.name}")
    save_snapshot(opened, SNAPSHOT, FILES)
    return opened


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache" / "dartflow"


def content_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_snapshot_on_this_disk_is_its_own_folder(tmp_path, cache):
    store = Store(str(tmp_path / "store"))
    save_snapshot(store, SNAPSHOT, FILES)
    assert local_snapshot(store, SNAPSHOT, cache) == store.root / "corpora" / SNAPSHOT.snapshot_id
    assert not cache.exists()


def test_a_snapshot_in_a_bucket_is_copied_whole(store, cache):
    folder = local_snapshot(store, SNAPSHOT, cache)
    assert folder == cache / SNAPSHOT.snapshot_id
    assert content_of(folder) == FILES
    assert list((cache / ".unfinished").iterdir()) == []


def test_a_copy_that_is_whole_is_not_downloaded_again(store, cache):
    local_snapshot(store, SNAPSHOT, cache)
    for name in FILES:
        store.delete(f"{FOLDER}/{name}")
    assert content_of(local_snapshot(store, SNAPSHOT, cache)) == FILES


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "longer", "missing"])
def test_a_damaged_file_of_a_copy_is_downloaded_again_and_no_other(store, cache, damage):
    folder = local_snapshot(store, SNAPSHOT, cache)
    times = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    damaged, whole = folder / "embeddings.npy", FILES["embeddings.npy"]
    match damage:
        case "flip":
            damaged.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
        case "cut":
            damaged.write_bytes(whole[:-1])
        case "empty":
            damaged.write_bytes(b"")
        case "longer":
            damaged.write_bytes(whole + b"\0")
        case "missing":
            damaged.unlink()
    local_snapshot(store, SNAPSHOT, cache)
    assert content_of(folder) == FILES
    assert {name for name in FILES if (folder / name).stat().st_mtime_ns != times[name]} == {"embeddings.npy"}


def test_a_file_that_a_process_has_mapped_stays_as_it_was_for_it(store, cache):
    folder = local_snapshot(store, SNAPSHOT, cache)
    other = np.full((50, 8), 7, dtype=np.float32)
    np.save(folder / "embeddings.npy", other)  # damaged, but mapped before that is found out
    mapped = np.load(folder / "embeddings.npy", mmap_mode="r")
    local_snapshot(store, SNAPSHOT, cache)
    assert np.array_equal(mapped, other)
    assert np.array_equal(np.load(folder / "embeddings.npy"), CORPUS.embeddings)


def test_bytes_in_the_bucket_that_are_not_the_manifests_are_refused_by_name(store, cache):
    store.write(f"{FOLDER}/index.faiss", FILES["index.faiss"][:-1] + b"?")
    with pytest.raises(CorruptArtifactError, match="the file is not what was committed") as caught:
        local_snapshot(store, SNAPSHOT, cache)
    assert caught.value.where == f"snapshot {SNAPSHOT.snapshot_id}, {FOLDER}/index.faiss"
    assert not (cache / SNAPSHOT.snapshot_id / "index.faiss").exists()


def test_a_file_that_the_bucket_lost_is_named(store, cache):
    store.delete(f"{FOLDER}/index.faiss")
    with pytest.raises(MissingArtifactError, match=f"{FOLDER}/index.faiss"):
        local_snapshot(store, SNAPSHOT, cache)


def test_a_manifest_cannot_name_files_outside_the_copy(store, cache):
    evil = SNAPSHOT.model_copy(update={"files": [SNAPSHOT.files[0].model_copy(update={"name": "../../evil"})]})
    with pytest.raises(CheckpointError, match="does not take such a path"):
        local_snapshot(store, evil, cache)


COPY = """
import sys
from pathlib import Path
from checkpoints.corpora import load_snapshot
from checkpoints.snapshot_copy import local_snapshot
from checkpoints.store import Store
store = Store(sys.argv[1])
snapshot = load_snapshot(store, sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
print(local_snapshot(store, snapshot, Path(sys.argv[3])), flush=True)
"""


def test_several_processes_copy_at_once(store, cache):
    command = [sys.executable, "-c", COPY, store.uri, SNAPSHOT.snapshot_id, str(cache)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate(timeout=30)[0].strip() for process in processes]
    assert said == [str(cache / SNAPSHOT.snapshot_id)] * 4
    assert [process.returncode for process in processes] == [0] * 4
    assert content_of(cache / SNAPSHOT.snapshot_id) == FILES
    assert list((cache / ".unfinished").iterdir()) == []


def test_rests_of_downloads_killed_long_ago_are_removed(store, cache):
    local_snapshot(store, SNAPSHOT, cache)
    for name, hours in (("old", 25), ("young", 23)):
        rest = cache / ".unfinished" / name
        rest.write_bytes(b"half")
        then = rest.stat().st_mtime - 3600 * hours
        os.utime(rest, (then, then))
    local_snapshot(store, SNAPSHOT, cache)
    assert [file.name for file in (cache / ".unfinished").iterdir()] == ["young"]


def test_a_cache_that_cannot_be_written_says_which_setting_to_change(store, cache):
    cache.parent.mkdir()
    cache.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"set executor\.cache to another folder") as caught:
        local_snapshot(store, SNAPSHOT, cache)
    assert caught.value.where == f"cache {cache}"
    assert str(sum(map(len, FILES.values()))) in caught.value.want


def test_the_cache_is_the_setting_or_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder("/given") == Path("/given")
    assert cache_folder("~/given") == tmp_path / "given"
    assert cache_folder(None) == Path("/xdg/dartflow")
    for ignored in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder(None) == tmp_path / ".cache" / "dartflow"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder(None) == tmp_path / ".cache" / "dartflow"


def test_a_user_without_a_home_folder_is_told_to_set_the_cache():
    script = (
        "import os, pwd\n"
        "pwd.getpwuid = lambda uid: {}[uid]\n"  # as in a container under a number without a name
        "from checkpoints.snapshot_copy import cache_folder\n"
        "cache_folder(None)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env={}, capture_output=True, text=True, check=False)
    assert ConfigurationError.__name__ in done.stderr
    assert "Set executor.cache or XDG_CACHE_HOME." in done.stderr


def test_the_cache_is_a_setting_of_the_executor():
    assert load_settings(environment={}, assignments=["executor.cache=/given"]).executor.cache == "/given"
    assert Settings().executor.cache is None


def test_a_run_opens_the_corpus_of_a_bucket_from_its_copy(store, cache):
    settings = load_settings(environment={}, assignments=[f"executor.cache={cache}"])
    corpus = Resources(store, settings, SNAPSHOT.snapshot_id).corpus
    assert np.array_equal(corpus.embeddings, CORPUS.embeddings)
    assert Path(corpus.embeddings.filename).parent == cache / SNAPSHOT.snapshot_id
    assert corpus.chunks.equals(CORPUS.chunks)
    assert isinstance(corpus.snapshot, CorpusSnapshot)
