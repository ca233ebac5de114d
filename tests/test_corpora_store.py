"""Corpus snapshots in the store: whole, provable, and made current last."""

from __future__ import annotations

import json
import random

import pytest

from checkpoints.corpora import (
    corpus_pointer,
    current_snapshot_id,
    load_snapshot,
    roll_back_corpus,
    save_snapshot,
    snapshot_folder,
    stored_snapshots,
    use_snapshot,
)
from checkpoints.digests import sha256
from checkpoints.records import sealed
from checkpoints.store import Store
from contracts.corpus import CorpusSnapshot, SnapshotFile
from contracts.errors import CheckpointError, CorruptArtifactError, MissingArtifactError

FILES = {"chunks.parquet": b"chunks" * 100, "embeddings.npy": b"", "index.faiss": bytes(range(256))}


def make_snapshot(snapshot_id="corpus-1", files=FILES, **more) -> CorpusSnapshot:
    given = {
        "snapshot_id": snapshot_id, "chunks": 3, "documents": 2, "quarantined": 0, "dimension": 8,
        "embedding_model": "test", "access_control": False, "filter_keys": ["version"],
        "settings": {"language": "english", "b": 0.75},
        "files": [SnapshotFile(name=name, sha256=sha256(data), bytes=len(data)) for name, data in files.items()],
        "source_file": "corpus.jsonl", "created_at": "2026-11-30T02:15:00+00:00", "seconds": 1.5,
    }  # fmt: skip
    return CorpusSnapshot(**{**given, **more})


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path))


def test_a_store_without_a_corpus_says_what_to_do(store):
    with pytest.raises(MissingArtifactError, match=r"holds no corpus. Run `dartflow ingest CORPUS` first"):
        current_snapshot_id(store)


def test_a_saved_snapshot_is_current_and_read_back(store):
    snapshot = make_snapshot()
    save_snapshot(store, snapshot, FILES)
    assert current_snapshot_id(store) == "corpus-1"
    assert load_snapshot(store, "corpus-1") == snapshot
    assert {name: store.read(f"{snapshot_folder('corpus-1')}/{name}") for name in FILES} == FILES


def test_the_snapshot_saved_last_is_current_and_earlier_ones_stay(store):
    save_snapshot(store, make_snapshot("corpus-1"), FILES)
    save_snapshot(store, make_snapshot("corpus-2"), FILES)
    assert current_snapshot_id(store) == "corpus-2"
    assert load_snapshot(store, "corpus-1").snapshot_id == "corpus-1"
    save_snapshot(store, make_snapshot("corpus-1"), FILES)
    assert current_snapshot_id(store) == "corpus-1"


def test_a_snapshot_that_is_there_is_left_as_it_is(store, tmp_path):
    save_snapshot(store, make_snapshot(seconds=1.0), FILES)
    before = {path: (tmp_path / path).stat().st_mtime_ns for path in store.files("corpora/corpus-1")}
    save_snapshot(store, make_snapshot(seconds=2.0), FILES)
    assert {path: (tmp_path / path).stat().st_mtime_ns for path in store.files("corpora/corpus-1")} == before
    assert load_snapshot(store, "corpus-1").seconds == 1.0


@pytest.mark.parametrize("name", ["snapshot.json", *FILES])
@pytest.mark.parametrize("damage", ["removed", "changed"])
def test_a_damaged_snapshot_is_mended_by_ingesting_again(store, name, damage):
    save_snapshot(store, make_snapshot(), FILES)
    path = f"corpora/corpus-1/{name}"
    if damage == "removed":
        store.delete(path)
    else:
        store.write(path, store.read(path) + b" ")
    save_snapshot(store, make_snapshot(), FILES)
    assert load_snapshot(store, "corpus-1") == make_snapshot()
    assert {name: store.read(f"corpora/corpus-1/{name}") for name in FILES} == FILES


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({**FILES, "index.faiss": b"other"}, "index.faiss"),
        ({"chunks.parquet": FILES["chunks.parquet"], "embeddings.npy": b""}, "index.faiss"),
        ({**FILES, "more": b""}, "more"),
        ({}, "chunks.parquet, embeddings.npy, index.faiss"),
    ],
)
def test_files_that_are_not_those_of_the_manifest_are_refused_before_anything_is_written(store, files, named):
    with pytest.raises(CheckpointError, match="not those of its manifest") as caught:
        save_snapshot(store, make_snapshot(), files)
    assert caught.value.got == named
    assert store.files("corpora") == []


def test_a_snapshot_that_cannot_be_written_whole_is_not_current(store, tmp_path):
    save_snapshot(store, make_snapshot("corpus-1"), FILES)
    blocked = tmp_path / "corpora" / "corpus-2" / "index.faiss"
    blocked.mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"index\.faiss"):
        save_snapshot(store, make_snapshot("corpus-2"), FILES)
    assert current_snapshot_id(store) == "corpus-1"
    with pytest.raises(MissingArtifactError):
        load_snapshot(store, "corpus-2")


def test_an_unknown_snapshot_is_named_beside_those_that_are_there(store):
    save_snapshot(store, make_snapshot("corpus-1"), FILES)
    with pytest.raises(MissingArtifactError, match=r"got corpus-9, no file corpora/corpus-9/snapshot\.json") as caught:
        load_snapshot(store, "corpus-9")
    assert caught.value.want == "corpus-1"


@pytest.mark.parametrize("snapshot_id", ["..", "../runs", "a/../b", "/etc", ""])
def test_a_snapshot_id_cannot_leave_the_store(store, snapshot_id):
    for call in (load_snapshot, lambda store, name: save_snapshot(store, make_snapshot(name), FILES)):
        with pytest.raises(CheckpointError, match="does not take such a path"):
            call(store, snapshot_id)


def test_a_file_name_cannot_leave_its_snapshot(store):
    files = {"../../escaped": b"x"}
    with pytest.raises(CheckpointError, match="does not take such a path"):
        save_snapshot(store, make_snapshot(files=files), files)


def test_a_manifest_of_another_snapshot_is_refused(store):
    save_snapshot(store, make_snapshot("corpus-1"), FILES)
    store.write("corpora/corpus-2/snapshot.json", store.read("corpora/corpus-1/snapshot.json"))
    with pytest.raises(CorruptArtifactError, match="belongs to another snapshot: got corpus-1, want corpus-2"):
        load_snapshot(store, "corpus-2")


@pytest.mark.parametrize("name", ["corpora/current.json", "corpora/corpus-1/snapshot.json"])
def test_any_damage_to_a_record_is_refused_by_name(store, name):
    save_snapshot(store, make_snapshot(), FILES)
    good = store.read(name)
    chance = random.Random(0)
    for _ in range(60):
        place = chance.randrange(len(good))
        flipped = good[:place] + bytes([good[place] ^ (1 << chance.randrange(8))]) + good[place + 1 :]
        store.write(name, chance.choice([flipped, good[:place], json.dumps(json.loads(good)).encode()]))
        with pytest.raises(CorruptArtifactError) as caught:
            load_snapshot(store, current_snapshot_id(store))
        assert caught.value.where == name


def test_a_record_that_is_no_snapshot_is_refused_even_with_a_right_digest(store):
    store.write("corpora/corpus-1/snapshot.json", sealed(SnapshotFile(name="a", sha256="b", bytes=1)))
    with pytest.raises(CorruptArtifactError, match="is no CorpusSnapshot"):
        load_snapshot(store, "corpus-1")


@pytest.fixture
def three(store):
    """Three snapshots, ingested one after the other."""
    for number in (1, 2, 3):
        save_snapshot(
            store, make_snapshot(f"corpus-{number}", created_at=f"2026-11-{number:02d}T00:00:00+00:00"), FILES
        )
    return store


def moves_of(store: Store) -> list[tuple[int, str, str]]:
    history = [entry.record for entry in corpus_pointer(store).history()]
    return [(record.generation, record.action, record.target) for record in history]


def test_every_ingest_of_another_snapshot_is_a_move_with_its_author(store):
    save_snapshot(store, make_snapshot(), FILES, by="ann@here")
    record = corpus_pointer(store).current()
    assert (record.generation, record.action, record.by, record.why) == (1, "ingest", "ann@here", None)
    assert record.details == {"chunks": 3, "source_file": "corpus.jsonl"}


def test_ingest_of_the_current_snapshot_adds_nothing_to_the_history(three):
    save_snapshot(three, make_snapshot("corpus-3"), FILES)
    assert moves_of(three) == [(3, "ingest", "corpus-3"), (2, "ingest", "corpus-2"), (1, "ingest", "corpus-1")]
    save_snapshot(three, make_snapshot("corpus-1"), FILES)
    assert moves_of(three)[0] == (4, "ingest", "corpus-1")


def test_a_rollback_brings_back_the_snapshot_before_and_then_the_one_before_that(three):
    assert roll_back_corpus(three, by="ann", why="bad chunks").target == "corpus-2"
    assert current_snapshot_id(three) == "corpus-2"
    assert roll_back_corpus(three, why=None).target == "corpus-1"
    with pytest.raises(MissingArtifactError, match="the corpus pointer: cannot go back: got nothing before corpus-1"):
        roll_back_corpus(three, why=None)
    assert current_snapshot_id(three) == "corpus-1"
    assert corpus_pointer(three).record(4).why == "bad chunks"


def test_any_snapshot_can_be_used_by_its_id(three):
    record = use_snapshot(three, "corpus-1", by="ann", why="compare")
    assert (record.action, record.target, record.why, record.previous) == ("use", "corpus-1", "compare", 3)
    assert use_snapshot(three, "corpus-1", why=None) is None
    assert len(moves_of(three)) == 4
    with pytest.raises(MissingArtifactError, match="want corpus-1, corpus-2, corpus-3"):
        use_snapshot(three, "corpus-9", why=None)


@pytest.mark.parametrize("name", ["snapshot.json", *FILES])
@pytest.mark.parametrize("damage", ["removed", "changed"])
def test_a_damaged_snapshot_is_neither_used_nor_brought_back(three, name, damage):
    path, before = f"corpora/corpus-2/{name}", three.read("corpora/current.json")
    if damage == "removed":
        three.delete(path)
    else:
        three.write(path, three.read(path) + b" ")
    for move in (lambda: use_snapshot(three, "corpus-2", why=None), lambda: roll_back_corpus(three, why=None)):
        with pytest.raises((CorruptArtifactError, MissingArtifactError), match=path):
            move()
        assert three.read("corpora/current.json") == before


def test_a_damaged_pointer_says_what_to_do_and_is_mended_by_using_a_snapshot(three):
    three.write("corpora/current.json", b"{}")
    with pytest.raises(CorruptArtifactError, match=r"corpora/current\.json: .*Run `dartflow corpus use ID`"):
        current_snapshot_id(three)
    assert use_snapshot(three, "corpus-3", why=None).generation == 4
    assert current_snapshot_id(three) == "corpus-3"
    assert roll_back_corpus(three, why=None).target == "corpus-2"


def test_a_damaged_pointer_is_mended_by_an_ingest(three):
    three.write("corpora/current.json", b"{}")
    save_snapshot(three, make_snapshot("corpus-3"), FILES)
    assert current_snapshot_id(three) == "corpus-3"


def test_snapshots_are_listed_youngest_first_and_damaged_ones_by_what_is_wrong(three):
    three.write("corpora/corpus-2/snapshot.json", b"{}")
    three.write("corpora/corpus-4/chunks.parquet", b"half")
    found = stored_snapshots(three)
    assert [one.snapshot_id for one in found[:2]] == ["corpus-3", "corpus-1"]
    assert {one.snapshot_id: one.problem.split(": ")[1] for one in found[2:]} == {
        "corpus-2": "is not what was written", "corpus-4": "has no such corpus snapshot",
    }  # fmt: skip


def test_a_snapshot_of_another_version_gets_its_settings_from_the_next_ingest(store):
    """The content is the same, so the id is; but what this version records was not recorded then."""
    save_snapshot(store, make_snapshot(settings={"language": "english"}), FILES)
    now = make_snapshot(settings={"language": "english", "ingest": {"default_access": "public"}})
    save_snapshot(store, now, FILES)
    assert load_snapshot(store, "corpus-1") == now
    other = make_snapshot(settings={"language": "polish", "ingest": {"default_access": "deny"}})
    save_snapshot(store, other, FILES)
    assert load_snapshot(store, "corpus-1") == now  # the same names: left as it is
    assert len(moves_of(store)) == 1
