"""Commit: what is read is what was committed, and any other byte is refused by the name of its file."""

from __future__ import annotations

import io
import json
import random
import re
from collections import Counter
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from checkpoints.commit import borrow, commit, parquet_bytes, read_table, verified_bytes, verify_artifact
from checkpoints.dead_letters import letters_of
from checkpoints.digests import key_of, sha256
from checkpoints.logical_digest import logical_digest
from checkpoints.manifests import manifest_path, manifests, read_manifest, run_digest, stage_folder
from checkpoints.records import sealed, unsealed
from checkpoints.run import create_run, load_plan
from checkpoints.store import Store
from contracts.candidates import Candidates
from contracts.errors import CheckpointError, CorruptArtifactError
from contracts.manifest import Account, Manifest, RunPlan, StagePlan
from contracts.table import schema
from tests.runs import entry_of, make_letter, make_plan, make_replay, path_of
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


def planned(run_id="run-a", stage="oversample", *, first=1) -> tuple[RunPlan, StagePlan]:
    """A plan of two stages with three parts each, and the entry of one of them; `first` is the number of the first."""
    stages = [
        StagePlan(number=number, stage=name, parts=3, rows=120, inputs={}, borrowed_from=None, because="a new run")
        for number, name in enumerate(("oversample", "rrf_merge"), start=first)
    ]
    plan = make_plan(run_id, stages=stages)
    return plan, entry_of(plan, stage)


def commit_part(store: Store, table: pa.Table, *, run_id="run-a", shard=0, stage="oversample", **more):
    plan, entry = planned(run_id, stage)
    parts = {"stage": stage, "params": {"k": 5, "sigma": 0.1}, "part": shard, "parents": {}}
    given_parts = {
        "key_parts": parts,
        "account": Account(candidates_in=0, added={"found": 120}, removed={}, candidates_out=120),
        "started_at": "2026-11-30T02:15:00+00:00",
        "seconds": 1.25,
    }
    return commit(store, table, plan=plan, entry=entry, part=shard, **{**given_parts, **more})


def read_part(store: Store, run_id="run-a", shard=0, stage="oversample", first=1):
    plan, entry = planned(run_id, stage, first=first)
    return read_manifest(store, plan, entry, shard)


def borrow_part(store: Store, manifest: Manifest, run_id: str, first=1):
    plan, entry = planned(run_id, manifest.stage, first=first)
    return borrow(store, manifest, plan=plan, entry=entry)


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


def read_back(store: Store, **place):
    return read_table(store, read_part(store, **place))


def test_what_is_committed_is_read_back(store):
    table = make_table("a")
    manifest = commit_part(store, table)
    assert read_part(store) == manifest
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
    assert read_part(store, shard=1) is None
    assert read_part(store, run_id="run-b") is None
    assert read_part(store, stage="rrf_merge") is None


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


def test_manifests_are_one_a_part_and_none_where_nothing_is_committed(store):
    commit_part(store, make_table("a", rows=3))
    commit_part(store, make_table("b", rows=2), shard=2)
    found = manifests(store, *planned())
    assert [manifest and (manifest.shard, manifest.rows) for manifest in found] == [(0, 3), None, (2, 2)]
    assert manifests(store, *planned(stage="rrf_merge")) == [None, None, None]


def test_manifests_of_an_entry_are_those_of_its_own_shards(store):
    plan, entry = planned()
    added = entry.model_copy(update={"first_part": 2, "parts": 1})
    for shard in (0, 2):
        commit_part(store, make_table(f"t{shard}"), shard=shard)
    assert [found.shard for found in manifests(store, plan, added)] == [2]


def test_how_calls_ended_and_who_was_left_out_is_kept(store):
    calls = {"dense_search": Counter(ok=38, no_match=2), "cross_encoder": {"ok": 1, "timed_out": 3}}
    commit_part(store, make_table("a"), left_out=2, calls=calls)
    found = read_part(store)
    assert (found.left_out, found.calls) == (2, calls)


ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@given(settings=st.dictionaries(st.text("abcä", max_size=3), ANY_VALUE, max_size=3))
@settings(max_examples=50, deadline=None)
def test_a_plan_has_one_digest_as_made_as_read_and_with_fields_that_come_later(settings, tmp_path_factory):
    store = Store(str(tmp_path_factory.mktemp("plan")))
    plan = make_plan(settings=settings)
    create_run(store, plan)
    assert run_digest(plan) == run_digest(load_plan(store, "run-a"))

    class LaterPlan(RunPlan):
        approved: bool = False

    later = LaterPlan(**plan.model_dump())
    assert run_digest(later) == run_digest(plan) != run_digest(later.model_copy(update={"approved": True}))


@pytest.mark.parametrize(
    "changed",
    [
        {"created_at": "2026-12-01T02:15:00+00:00"},
        {"settings": {"store": "there"}},
        {"dead_letters_allowed": 5},
        {"packages": {"pyarrow": "2"}},
        {"replays": [make_replay(3, "oversample", make_letter("q1"))]},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_a_deleted_run_of_the_same_name_left_behind_is_refused(store, changed):
    commit_part(store, make_table("a"))
    before = {path: store.read(path) for path in store.files("runs")}
    plan, entry = planned()
    other = plan.model_copy(update=changed)
    path = path_of(plan, "oversample")
    foreign = commit_part(store, make_table("a"), run_id="run-z")
    calls = [
        lambda: read_manifest(store, other, entry, 0),
        lambda: manifests(store, other, entry),
        lambda: borrow(store, foreign, plan=other, entry=entry),
        lambda: commit(
            store,
            make_table("a"),
            plan=other,
            entry=entry,
            part=0,
            key_parts={},
            account=None,
            started_at="",
            seconds=0,
        ),
    ]
    for call in calls:
        error = refused(call, path)
        assert error.problem == "was made under another plan than the run's"
        assert (error.got, error.want) == (run_digest(plan), run_digest(other))
        assert "under another run id" in error.next_step
    assert {path: store.read(path) for path in store.files("runs/run-a")} == before
    assert read_manifest(store, other, entry, 1) is None


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
        refused(lambda: read_part(store), path)


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
        refused(lambda: read_part(store), path)


@pytest.mark.parametrize("field", Manifest.model_fields)
def test_a_manifest_with_any_field_rewritten_is_refused(store, field):
    commit_part(store, make_table("a"))
    path = manifest_path("run-a", 1, "oversample", 0)
    content = json.loads(store.read(path))
    others = {"borrowed_from": "run-z", "account": None, "key_parts": {"stage": "oversample"}}
    value = content[field]
    content[field] = others.get(field, value + 1 if isinstance(value, (int, float)) else f"{value}x")
    store.write(path, json.dumps(content, indent=1).encode())
    refused(lambda: read_part(store), path)


class Other(BaseModel):
    run_id: str = "run-a"
    rows: str = "many"


def test_a_record_that_is_no_manifest_is_refused_even_with_a_right_digest(store):
    commit_part(store, make_table("a"))
    path = manifest_path("run-a", 1, "oversample", 0)
    store.write(path, sealed(Other()))
    assert refused(lambda: read_part(store), path).problem == "is no Manifest"


def test_a_manifest_of_another_run_stage_or_shard_is_refused(store):
    commit_part(store, make_table("a"))
    commit_part(store, make_table("b"), shard=1)
    commit_part(store, make_table("c"), stage="rrf_merge")
    data = store.read(manifest_path("run-a", 1, "oversample", 0))
    for run_id, number, stage, shard in [
        ("run-b", 1, "oversample", 0), ("run-a", 2, "rrf_merge", 0), ("run-a", 1, "oversample", 1),
    ]:  # fmt: skip
        path = manifest_path(run_id, number, stage, shard)
        store.write(path, data)
        error = refused(partial(read_part, store, run_id, shard, stage), path)
        assert error.problem == "belongs to another artifact"
        assert error.got == "run-a/oversample/0"


def test_a_key_that_its_parts_do_not_give_is_refused(store):
    manifest = commit_part(store, make_table("a"))
    path = manifest_path("run-a", 1, "oversample", 0)
    store.write(path, sealed(manifest.model_copy(update={"key_parts": {"stage": "another"}})))
    assert "key" in refused(lambda: read_part(store), path).problem


def test_random_damage_anywhere_is_refused_by_the_name_of_a_damaged_file(store, tmp_path):
    committed = [commit_part(store, make_table(f"t{shard}"), shard=shard) for shard in range(3)]
    paths = [manifest.file for manifest in committed] + [
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
    assert read_part(store) is None
    (tmp_path / blocked / "in-the-way").rmdir()
    (tmp_path / blocked).rmdir()
    commit_part(store, table, key_parts=parts)
    assert read_back(store).equals(table)


def test_no_manifest_is_left_when_its_own_write_fails(store, tmp_path):
    path = tmp_path / manifest_path("run-a", 1, "oversample", 0)
    (path / "in-the-way").mkdir(parents=True)
    with pytest.raises(CheckpointError):
        commit_part(store, make_table("a"))
    assert read_part(store) is None


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
    borrowed = borrow_part(store, manifest, "run-b", first=3)
    plan, _ = planned("run-b", first=3)
    wanted = {"run_id": "run-b", "plan": run_digest(plan), "borrowed_from": "run-a"}
    assert borrowed == manifest.model_copy(update=wanted)
    assert read_part(store, "run-b", first=3) == borrowed
    assert read_back(store, run_id="run-b", first=3).equals(table)
    assert store.files("runs/run-b") == [manifest_path("run-b", 3, "oversample", 0)]
    assert len(store.files("runs")) == files + 1


def test_borrowed_of_borrowed_names_the_run_that_computed_it(store):
    manifest = commit_part(store, make_table("a"))
    for run_id in ("run-b", "run-c", "run-d"):
        manifest = borrow_part(store, manifest, run_id)
        assert manifest.borrowed_from == "run-a"
        assert manifest.file.startswith("runs/run-a/")
        assert read_back(store, run_id=run_id).num_rows == 40


def test_borrow_verifies_before_it_writes(store):
    manifest = commit_part(store, make_table("a"))
    data = store.read(manifest.file)
    for damage in (lambda: store.write(manifest.file, data[:-1] + b"x"), lambda: store.delete(manifest.file)):
        damage()
        refused(lambda: borrow_part(store, manifest, "run-b"), manifest.file)
        assert store.files("runs/run-b") == []


def test_to_borrow_again_changes_nothing_and_other_data_are_refused(store):
    manifest = commit_part(store, make_table("a"))
    borrowed = borrow_part(store, manifest, "run-b")
    assert borrow_part(store, manifest, "run-b") == borrowed
    other = commit_part(store, make_table("b"), run_id="run-c")
    with pytest.raises(CheckpointError, match="is committed already, with other data"):
        borrow_part(store, other, "run-b")
    assert read_part(store, "run-b") == borrowed


def test_a_damaged_source_shows_in_every_run_that_borrowed_it(store):
    manifest = commit_part(store, make_table("a"))
    borrow_part(store, manifest, "run-b")
    store.write(manifest.file, b"")
    refused(lambda: read_back(store, run_id="run-b"), manifest.file)
    refused(lambda: verified_bytes(store, manifest), manifest.file)


LETTERS = [make_letter("a-1", log_lines=3), make_letter("a-7"), make_letter("a-9", log_lines=2)]


def test_dead_letters_are_committed_with_the_manifest(store):
    manifest = commit_part(store, make_table("a"), letters=LETTERS)
    named = manifest.dead_letters
    assert named.file == f"runs/run-a/dead_letters/oversample-part-00000.{named.sha256[:32]}.jsonl"
    assert (named.letters, named.log_lines, named.sha256) == (3, 6, sha256(store.read(named.file)))
    assert read_part(store).dead_letters == named
    assert letters_of(store, manifest) == LETTERS
    verify_artifact(store, manifest)


def test_a_part_without_dead_letters_has_no_file_of_them(store):
    assert commit_part(store, make_table("a")).dead_letters is None
    assert not [path for path in store.files("runs") if "dead_letters" in path]


def test_no_manifest_is_left_when_the_dead_letters_cannot_be_written(store, tmp_path):
    parts = {"stage": "oversample"}
    data = "".join(f"{letter.model_dump_json()}\n" for letter in LETTERS)
    blocked = f"runs/run-a/dead_letters/oversample-part-00000.{sha256(data.encode())[:32]}.jsonl"
    (tmp_path / blocked / "in-the-way").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=re.escape(blocked)):
        commit_part(store, make_table("a"), key_parts=parts, letters=LETTERS)
    assert read_part(store) is None
    (tmp_path / blocked / "in-the-way").rmdir()
    (tmp_path / blocked).rmdir()
    assert letters_of(store, commit_part(store, make_table("a"), key_parts=parts, letters=LETTERS)) == LETTERS


def test_dead_letters_that_are_committed_are_never_written_again(store):
    first = commit_part(store, make_table("a"), letters=LETTERS)
    again = [letter.model_copy(update={"reason": "ModelError: in other words"}) for letter in LETTERS]
    for letters in (again, LETTERS[:1], []):
        assert commit_part(store, make_table("a"), letters=letters) == first
        assert letters_of(store, read_part(store)) == LETTERS


def test_a_part_is_borrowed_with_its_dead_letters(store):
    manifest = commit_part(store, make_table("a"), letters=LETTERS, left_out=2)
    files = store.files("runs/run-a")
    for run_id in ("run-b", "run-c"):
        borrowed = borrow_part(store, manifest, run_id)
        assert (borrowed.dead_letters, borrowed.left_out) == (manifest.dead_letters, 2)
        assert letters_of(store, read_part(store, run_id)) == LETTERS
        assert store.files(f"runs/{run_id}") == [manifest_path(run_id, 1, "oversample", 0)]
        manifest = borrowed
    assert store.files("runs/run-a") == files


@pytest.mark.parametrize("damage", ["changed", "cut", "emptied", "lost", "swapped"])
def test_a_part_with_damaged_dead_letters_is_neither_borrowed_nor_verified(store, damage):
    manifest = commit_part(store, make_table("a"), letters=LETTERS)
    other = commit_part(store, make_table("b"), letters=LETTERS[:2], shard=1)
    path = manifest.dead_letters.file
    good = store.read(path)
    bad = {
        "changed": good.replace(b"no answer", b"an answer", 1), "cut": good[: good.index(b"\n") + 1], "emptied": b"",
        "swapped": store.read(other.dead_letters.file),
    }.get(damage)  # fmt: skip
    if bad is None:
        store.delete(path)
    else:
        store.write(path, bad)
    refused(lambda: borrow_part(store, manifest, "run-b"), path)
    refused(lambda: verify_artifact(store, manifest), path)
    assert store.files("runs/run-b") == []
    assert read_back(store).num_rows == 40
    store.write(path, good)
    assert letters_of(store, borrow_part(store, manifest, "run-b")) == LETTERS


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
