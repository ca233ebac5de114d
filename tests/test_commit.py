"""Commit: what is read is what was committed, and any other byte is refused by the name of its file."""

from __future__ import annotations

import io
import json
import random
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from checkpoints.commit import (
    borrow,
    commit,
    manifest_path,
    parquet_bytes,
    read_manifest,
    read_table,
    stage_folder,
    verified_bytes,
    verify_artifact,
)
from checkpoints.digests import key_of, logical_digest, sha256
from checkpoints.records import sealed, unsealed
from checkpoints.store import Store
from contracts.candidates import Candidates
from contracts.errors import CheckpointError, CorruptArtifactError
from contracts.manifest import Account, Manifest
from contracts.table import schema
from tests.test_digests import tables


def make_table(name: str, rows: int = 40) -> pa.Table:
    """Rankings that do not compress to nothing."""
    chance = random.Random(name)
    made = [
        {
            "query_id": f"{name}-{row}",
            "candidates": [
                {"rank": rank, "chunk_id": f"c{chance.getrandbits(40):x}", "score": 1 / (rank + row)}
                for rank in range(1, 4)
            ],
        }
        for row in range(rows)
    ]
    return pa.Table.from_pylist(made, schema=schema(Candidates))


def commit_part(store: Store, table: pa.Table, *, run_id="run-a", shard=0, number=1, stage="oversample", **more):
    parts = {"stage": stage, "params": {"k": 5, "sigma": 0.1}, "part": shard, "parents": {}}
    given_parts = {
        "key_parts": parts,
        "account": Account(candidates_in=0, added={"found": 120}, removed={}, candidates_out=120),
        "started_at": "2026-11-30T02:15:00+00:00",
        "seconds": 1.25,
    }
    return commit(store, table, run_id=run_id, number=number, stage=stage, shard=shard, **{**given_parts, **more})


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path))


def refused(call, path: str) -> CorruptArtifactError:
    """Makes sure that a call refuses a file by name, and says what to do."""
    with pytest.raises(CorruptArtifactError) as caught:
        call()
    assert caught.value.where == path
    assert caught.value.next_step
    return caught.value


def read_back(store: Store, run_id="run-a", shard=0, number=1, stage="oversample"):
    manifest = read_manifest(store, run_id, number, stage, shard)
    return read_table(store, manifest)


def test_what_is_committed_is_read_back(store):
    table = make_table("a")
    manifest = commit_part(store, table)
    assert read_manifest(store, "run-a", 1, "oversample", 0) == manifest
    assert read_back(store).equals(table)
    assert manifest.file == f"runs/run-a/01-oversample/part-00000.{manifest.key}.parquet"
    assert manifest.sha256 == sha256(store.read(manifest.file))
    assert (manifest.bytes, manifest.rows) == (len(store.read(manifest.file)), 40)
    assert manifest.logical_digest == logical_digest(table)
    assert manifest.key == key_of(manifest.key_parts)
    assert manifest.borrowed_from is None
    assert store.files("runs") == sorted([manifest_path("run-a", 1, "oversample", 0), manifest.file])


@given(table=tables())
@settings(max_examples=25, deadline=None)
def test_any_table_is_read_back_with_its_schema_and_values(table, tmp_path_factory):
    store = Store(str(tmp_path_factory.mktemp("any")))
    manifest = commit_part(store, table)
    assert read_back(store).schema == table.schema
    verify_artifact(store, manifest)


def test_a_table_without_rows_is_an_artifact(store):
    commit_part(store, make_table("a", rows=0))
    assert read_back(store).num_rows == 0


def test_what_was_never_committed_is_none(store):
    commit_part(store, make_table("a"))
    assert read_manifest(store, "run-a", 1, "oversample", 1) is None
    assert read_manifest(store, "run-b", 1, "oversample", 0) is None
    assert read_manifest(store, "run-a", 2, "oversample", 0) is None


@given(table=tables(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_equal_data_gives_equal_parquet_bytes_however_it_is_chunked(table, data):
    borders = sorted(data.draw(st.lists(st.integers(0, table.num_rows), max_size=4)))
    chunked = pa.concat_tables(
        [table.slice(a, b - a) for a, b in zip([0, *borders], [*borders, table.num_rows], strict=True)]
    )
    around = pa.concat_tables([table, chunked, table]).slice(table.num_rows, table.num_rows)
    assert parquet_bytes(chunked) == parquet_bytes(table) == parquet_bytes(around)


def test_parquet_bytes_do_not_depend_on_chunks_that_fill_many_pages():
    table = make_table("a", rows=30_000)
    chunked = pa.concat_tables([table.slice(start, 1_000) for start in range(0, 30_000, 1_000)])
    assert parquet_bytes(chunked) == parquet_bytes(table)


def test_any_flipped_byte_of_the_parquet_file_is_refused_before_it_is_parsed(store, tmp_path):
    manifest = commit_part(store, make_table("a"))
    file = tmp_path / manifest.file
    good = file.read_bytes()
    chance = random.Random(1)
    for place in {0, len(good) - 1, *(chance.randrange(len(good)) for _ in range(300))}:
        bad = bytearray(good)
        bad[place] ^= 1 << chance.randrange(8)
        file.write_bytes(bad)
        assert refused(lambda: read_back(store), manifest.file).problem == "is not what was committed"
    file.write_bytes(good)
    assert read_back(store).num_rows == 40


def test_any_truncation_or_extension_of_the_parquet_file_is_refused(store, tmp_path):
    manifest = commit_part(store, make_table("a"))
    file = tmp_path / manifest.file
    good = file.read_bytes()
    for length in {0, 1, len(good) - 1, *random.Random(2).sample(range(len(good)), 60)}:
        file.write_bytes(good[:length])
        refused(lambda: read_back(store), manifest.file)
    for more in (b"\0", b"PAR1", good):
        file.write_bytes(good + more)
        refused(lambda: read_back(store), manifest.file)


def test_a_removed_parquet_file_is_refused(store):
    manifest = commit_part(store, make_table("a"))
    store.delete(manifest.file)
    error = refused(lambda: read_back(store), manifest.file)
    assert error.problem == "is missing"
    assert error.want == f"{manifest.bytes} bytes"


def test_two_swapped_parquet_files_are_both_refused(store):
    first = commit_part(store, make_table("a"))
    second = commit_part(store, make_table("b"), shard=1)
    one, other = store.read(first.file), store.read(second.file)
    store.write(first.file, other)
    store.write(second.file, one)
    refused(lambda: read_back(store), first.file)
    refused(lambda: read_back(store, shard=1), second.file)


def test_an_older_parquet_file_put_back_is_refused(tmp_path):
    older = Store(str(tmp_path / "older"))
    store = Store(str(tmp_path / "store"))
    before = commit_part(older, make_table("a"))
    manifest = commit_part(store, make_table("a").slice(1))
    assert manifest.file == before.file
    store.write(manifest.file, older.read(before.file))
    refused(lambda: read_back(store), manifest.file)


def test_a_file_of_the_right_bytes_that_is_no_parquet_is_refused(store):
    manifest = commit_part(store, make_table("a"))
    store.write(manifest.file, b"PAR1 no more")
    forged = manifest.model_copy(update={"sha256": sha256(b"PAR1 no more")})
    assert "cannot be read" not in refused(lambda: read_table(store, manifest), manifest.file).problem
    assert "can be read" in refused(lambda: read_table(store, forged), manifest.file).problem


def test_rows_and_data_are_held_against_the_manifest_too(store):
    manifest = commit_part(store, make_table("a"))
    rows = manifest.model_copy(update={"rows": 41})
    assert refused(lambda: read_table(store, rows), manifest.file).want == 41
    digest = manifest.model_copy(update={"logical_digest": "0" * 64})
    assert refused(lambda: verify_artifact(store, digest), manifest.file).problem == "holds other data"
    verify_artifact(store, manifest)


def test_every_flipped_byte_of_a_manifest_is_refused(store, tmp_path):
    commit_part(store, make_table("a"))
    path = manifest_path("run-a", 1, "oversample", 0)
    good = (tmp_path / path).read_bytes()
    chance = random.Random(3)
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << chance.randrange(8)
        (tmp_path / path).write_bytes(bad)
        refused(lambda: read_manifest(store, "run-a", 1, "oversample", 0), path)


def test_any_truncation_or_extension_of_a_manifest_is_refused(store, tmp_path):
    commit_part(store, make_table("a"))
    path = manifest_path("run-a", 1, "oversample", 0)
    good = (tmp_path / path).read_bytes()
    lengths = {0, 1, len(good) - 1, *random.Random(5).sample(range(len(good)), 100)}
    damaged = [good[:length] for length in lengths] + [
        good + b" ",
        good + good,
        b"\n" + good,
        b"null",
        b"\xff",
    ]
    for bad in damaged:
        (tmp_path / path).write_bytes(bad)
        refused(lambda: read_manifest(store, "run-a", 1, "oversample", 0), path)


@pytest.mark.parametrize("field", Manifest.model_fields)
def test_a_manifest_with_any_field_rewritten_is_refused(store, field):
    commit_part(store, make_table("a"))
    path = manifest_path("run-a", 1, "oversample", 0)
    content = json.loads(store.read(path))
    others = {"borrowed_from": "run-z", "account": None, "key_parts": {"stage": "oversample"}}
    value = content[field]
    content[field] = others.get(field, value + 1 if isinstance(value, (int, float)) else f"{value}x")
    store.write(path, json.dumps(content, indent=1).encode())
    refused(lambda: read_manifest(store, "run-a", 1, "oversample", 0), path)


class Other(BaseModel):
    run_id: str = "run-a"
    rows: str = "many"


def test_a_record_that_is_no_manifest_is_refused_even_with_a_right_digest(store):
    commit_part(store, make_table("a"))
    path = manifest_path("run-a", 1, "oversample", 0)
    store.write(path, sealed(Other()))
    assert refused(lambda: read_manifest(store, "run-a", 1, "oversample", 0), path).problem == "is no Manifest"


def test_a_manifest_of_another_run_stage_or_shard_is_refused(store):
    commit_part(store, make_table("a"))
    commit_part(store, make_table("b"), shard=1)
    commit_part(store, make_table("c"), stage="rrf_merge", number=2)
    data = store.read(manifest_path("run-a", 1, "oversample", 0))
    for place in [("run-b", 1, "oversample", 0), ("run-a", 2, "rrf_merge", 0), ("run-a", 1, "oversample", 1)]:
        store.write(manifest_path(*place), data)
        error = refused(lambda place=place: read_manifest(store, *place), manifest_path(*place))
        assert error.problem == "belongs to another artifact"
        assert error.got == "run-a/oversample/0"


def test_a_key_that_its_parts_do_not_give_is_refused(store):
    manifest = commit_part(store, make_table("a"))
    path = manifest_path("run-a", 1, "oversample", 0)
    store.write(path, sealed(manifest.model_copy(update={"key_parts": {"stage": "another"}})))
    assert "key" in refused(lambda: read_manifest(store, "run-a", 1, "oversample", 0), path).problem


def test_random_damage_anywhere_is_refused_by_the_name_of_a_damaged_file(store, tmp_path):
    manifests = [commit_part(store, make_table(f"t{shard}"), shard=shard) for shard in range(3)]
    paths = [manifest.file for manifest in manifests] + [
        manifest_path("run-a", 1, "oversample", shard) for shard in range(3)
    ]
    good = {path: (tmp_path / path).read_bytes() for path in paths}
    chance = random.Random(4)
    for _ in range(300):
        path, other = chance.sample(paths, 2)
        data = good[path]
        place = chance.randrange(len(data))
        bad = chance.choice(
            [
                data[:place],
                data[:place] + data[place + 1 :],
                data[:place] + bytes([chance.randrange(256)]) + data[place:],
                data[:place] + bytes(64) + data[place + 64 :],
                good[other],
            ]
        )
        if bad == data:
            continue
        (tmp_path / path).write_bytes(bad)
        with pytest.raises(CorruptArtifactError) as caught:
            [read_back(store, shard=shard) for shard in range(3)]
        assert caught.value.where == path
        (tmp_path / path).write_bytes(good[path])
    assert [read_back(store, shard=shard).num_rows for shard in range(3)] == [40, 40, 40]


def test_no_manifest_is_left_when_the_parquet_file_cannot_be_written(store, tmp_path):
    table = make_table("a")
    parts = {"stage": "oversample"}
    blocked = f"{stage_folder('run-a', 1, 'oversample')}/part-00000.{key_of(parts)}.parquet"
    (tmp_path / blocked / "in-the-way").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=re.escape(blocked)):
        commit_part(store, table, key_parts=parts)
    assert read_manifest(store, "run-a", 1, "oversample", 0) is None
    (tmp_path / blocked / "in-the-way").rmdir()
    (tmp_path / blocked).rmdir()
    commit_part(store, table, key_parts=parts)
    assert read_back(store).equals(table)


def test_no_manifest_is_left_when_its_own_write_fails(store, tmp_path):
    path = tmp_path / manifest_path("run-a", 1, "oversample", 0)
    (path / "in-the-way").mkdir(parents=True)
    with pytest.raises(CheckpointError):
        commit_part(store, make_table("a"))
    assert read_manifest(store, "run-a", 1, "oversample", 0) is None


def test_the_same_data_committed_again_change_nothing(store):
    first = commit_part(store, make_table("a"), seconds=1.0)
    before = {path: store.read(path) for path in store.files("runs")}
    assert commit_part(store, make_table("a"), seconds=2.0) == first
    assert {path: store.read(path) for path in store.files("runs")} == before


def test_other_data_never_replace_what_is_committed(store):
    commit_part(store, make_table("a"))
    before = {path: store.read(path) for path in store.files("runs")}
    for other in ({"table": make_table("b")}, {"table": make_table("a"), "key_parts": {"stage": "oversample"}}):
        with pytest.raises(CheckpointError, match="is committed already, with other data") as caught:
            commit_part(store, **other)
        assert caught.value.where == manifest_path("run-a", 1, "oversample", 0)
        assert {path: store.read(path) for path in store.files("runs")} == before


def test_nothing_is_committed_over_a_damaged_manifest(store):
    commit_part(store, make_table("a"))
    path = manifest_path("run-a", 1, "oversample", 0)
    store.write(path, store.read(path).replace(b"run-a", b"run-b"))
    refused(lambda: commit_part(store, make_table("a")), path)


def test_a_borrowed_artifact_is_read_from_the_file_of_its_run(store):
    table = make_table("a")
    manifest = commit_part(store, table)
    files = len(store.files("runs"))
    borrowed = borrow(store, manifest, run_id="run-b", number=3)
    assert borrowed == manifest.model_copy(update={"run_id": "run-b", "borrowed_from": "run-a"})
    assert read_manifest(store, "run-b", 3, "oversample", 0) == borrowed
    assert read_back(store, run_id="run-b", number=3).equals(table)
    assert len(store.files("runs")) == files + 1


def test_borrowed_of_borrowed_names_the_run_that_computed_it(store):
    manifest = commit_part(store, make_table("a"))
    for run_id in ("run-b", "run-c", "run-d"):
        manifest = borrow(store, manifest, run_id=run_id, number=1)
        assert manifest.borrowed_from == "run-a"
        assert manifest.file.startswith("runs/run-a/")
        assert read_back(store, run_id=run_id).num_rows == 40


def test_borrow_verifies_before_it_writes(store):
    manifest = commit_part(store, make_table("a"))
    data = store.read(manifest.file)
    for damage in (lambda: store.write(manifest.file, data[:-1] + b"x"), lambda: store.delete(manifest.file)):
        damage()
        refused(lambda: borrow(store, manifest, run_id="run-b", number=1), manifest.file)
        assert store.files("runs/run-b") == []


def test_to_borrow_again_changes_nothing_and_other_data_are_refused(store):
    manifest = commit_part(store, make_table("a"))
    borrowed = borrow(store, manifest, run_id="run-b", number=1)
    assert borrow(store, manifest, run_id="run-b", number=1) == borrowed
    other = commit_part(store, make_table("b"), run_id="run-c")
    with pytest.raises(CheckpointError, match="is committed already, with other data"):
        borrow(store, other, run_id="run-b", number=1)
    assert read_manifest(store, "run-b", 1, "oversample", 0) == borrowed


def test_a_damaged_source_shows_in_every_run_that_borrowed_it(store):
    manifest = commit_part(store, make_table("a"))
    borrow(store, manifest, run_id="run-b", number=1)
    store.write(manifest.file, b"")
    refused(lambda: read_back(store, run_id="run-b"), manifest.file)
    refused(lambda: verified_bytes(store, manifest), manifest.file)


def test_page_checksums_are_written():
    data = parquet_bytes(make_table("a", rows=2_000))
    bad = bytearray(data)
    bad[len(data) // 3] ^= 1
    with pytest.raises(OSError, match=r"(?i)crc|checksum"):
        pq.read_table(io.BytesIO(bytes(bad)), page_checksum_verification=True)


class Record(BaseModel):
    text: str
    numbers: list[float]
    inner: dict[str, object]


@given(
    text=st.text(max_size=20),
    numbers=st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    inner=st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none(), max_size=3),
)
@settings(max_examples=100, deadline=None)
def test_a_record_is_read_as_it_was_written_and_is_plain_json(text, numbers, inner):
    record = Record(text=text, numbers=numbers, inner={**inner, "sha256_of_the_above": "x"})
    data = sealed(record)
    assert unsealed(data, Record, "here", next_step="Go on.") == record
    content = json.loads(data)
    assert len(content.pop("sha256_of_the_above")) == 64
    assert content == json.loads(record.model_dump_json())


def test_a_store_folder_can_be_moved(store, tmp_path):
    table = make_table("a")
    commit_part(store, table)
    moved = Path(f"{tmp_path}-moved")
    tmp_path.rename(moved)
    assert read_back(Store(str(moved))).equals(table)
