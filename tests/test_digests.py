"""Digests: equal for equal data however they lie in memory or on disk, different for any other data."""

from __future__ import annotations

import hashlib
import io
import math
import struct

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from checkpoints.commit import parquet_bytes
from checkpoints.digests import canonical_json, key_of, sha256
from checkpoints.logical_digest import logical_digest
from contracts.candidates import Candidates, Distances, FusedRanking, LogProbabilities, Selection
from contracts.corpus import Chunk
from contracts.errors import CheckpointError
from contracts.evidence import Context, GradedSelection, RerankedRanking, RescuedRanking, RescueSearch
from contracts.query import DistinctQuery, LogLine
from contracts.table import schema

MODELS = [
    Candidates, Distances, LogProbabilities, Selection, FusedRanking, Chunk, RescueSearch, RescuedRanking,
    RerankedRanking, GradedSelection, Context, DistinctQuery, LogLine,
]  # fmt: skip


def values(kind: pa.DataType, *, nullable: bool) -> st.SearchStrategy:
    """Any value of an Arrow type, whatever the bounds and rules of its row model."""
    if pa.types.is_list(kind):
        found = st.lists(values(kind.value_type, nullable=kind.value_field.nullable), max_size=3)
    elif pa.types.is_struct(kind):
        found = st.fixed_dictionaries({field.name: values(field.type, nullable=field.nullable) for field in kind})
    elif pa.types.is_string(kind):
        found = st.text(max_size=3)
    elif pa.types.is_boolean(kind):
        found = st.booleans()
    elif pa.types.is_floating(kind):
        found = st.floats(width=kind.bit_width)
    else:
        found = st.integers(-(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1) - 1)
    return st.none() | found if nullable else found


def tables(max_rows: int = 4, models: list | None = None) -> st.SearchStrategy:
    """Tables of the project's row models."""

    def of(model) -> st.SearchStrategy:
        wanted = schema(model)
        rows = st.lists(values(pa.struct(list(wanted)), nullable=False), max_size=max_rows)
        return rows.map(lambda found: pa.Table.from_pylist(found, schema=wanted))

    return st.sampled_from(models or MODELS).flatmap(of)


def plain(value):
    """The slow oracle: a value as nested tuples that are equal when, and only when, the data are."""
    if isinstance(value, float):
        return struct.pack("<d", math.nan if math.isnan(value) else value + 0.0)
    if isinstance(value, dict):
        return tuple((name, plain(part)) for name, part in sorted(value.items()))
    return tuple(plain(part) for part in value) if isinstance(value, list) else value


def retyped(kind: pa.DataType, change) -> pa.DataType:
    """A type with `change` applied to its leaves and lists, every nullable flag set and list items renamed."""
    if pa.types.is_list(kind):
        return change(pa.list_(pa.field("element", retyped(kind.value_type, change))))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, retyped(field.type, change)) for field in kind])
    return change(kind)


def as_other_types(table: pa.Table, change) -> pa.Table:
    kinds = pa.schema([pa.field(field.name, retyped(field.type, change)) for field in table.schema])
    return pa.Table.from_pylist(table.to_pylist(), schema=kinds)


def large(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string(kind):
        return pa.large_string()
    return pa.large_list(kind.value_field) if pa.types.is_list(kind) else kind


def test_a_digest_worked_by_hand():
    table = pa.table({"n": pa.array([1, None, -1], pa.int32()), "t": pa.array([["ä", ""], [], None])})
    by_hand = hashlib.sha256()
    by_hand.update(b'{"columns":[["n","int32"],["t",["list","string"]]],"rows":3}')
    none, one, two, three = (bytes([number]) + b"\0\0\0\0\0\0\0" for number in range(4))
    by_hand.update(three + one + b"\xa0" + b"\1\0\0\0\xff\xff\xff\xff")  # three, one null, bits 101, then 1 and -1
    by_hand.update(three + one + b"\xc0" + two + none)  # three lists, one null, bits 110, of lengths 2 and 0
    by_hand.update(two + none + two + none + "ä".encode())  # two texts, none null, of 2 bytes and none
    assert logical_digest(table) == by_hand.hexdigest()


@given(table=tables(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_equal_data_has_one_digest_however_it_is_chunked_and_sliced(table, data):
    digest = logical_digest(table)
    borders = sorted(data.draw(st.lists(st.integers(0, table.num_rows), max_size=4)))
    chunked = pa.concat_tables(
        [table.slice(a, b - a) for a, b in zip([0, *borders], [*borders, table.num_rows], strict=True)]
    )
    assert logical_digest(chunked) == digest
    around = pa.concat_tables([table, chunked, table]).combine_chunks()
    assert logical_digest(around.slice(table.num_rows, table.num_rows)) == digest
    assert logical_digest(table.filter(pa.array([True] * table.num_rows, pa.bool_()))) == digest


@given(table=tables())
@settings(max_examples=60, deadline=None)
def test_nullable_flags_and_encodings_do_not_count(table):
    digest = logical_digest(table)
    assert logical_digest(as_other_types(table, lambda kind: kind)) == digest
    assert logical_digest(as_other_types(table, large)) == digest
    as_dictionary = pa.dictionary(pa.int32(), pa.string())
    flat = {field.name: as_dictionary for field in table.schema if pa.types.is_string(field.type)}
    encoded = table.cast(
        pa.schema([pa.field(field.name, flat.get(field.name, field.type), field.nullable) for field in table.schema])
    )
    assert logical_digest(encoded) == digest


@given(table=tables())
@settings(max_examples=60, deadline=None)
def test_a_file_gives_back_the_same_digest(table):
    assert logical_digest(pq.read_table(io.BytesIO(parquet_bytes(table)))) == logical_digest(table)
    plainly = io.BytesIO()
    pq.write_table(table, plainly, compression="none", use_dictionary=False, row_group_size=2, store_schema=False)
    assert logical_digest(pq.read_table(plainly)) == logical_digest(table)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=1)
    assert logical_digest(pa.ipc.open_stream(sink.getvalue()).read_all()) == logical_digest(table)


def places(value, kind: pa.DataType, path=()):
    """Every place inside a value, with its type and whether null may stand there."""
    if pa.types.is_struct(kind):
        for field in kind:
            yield (*path, field.name), field.type, field.nullable
            if value[field.name] is not None:
                yield from places(value[field.name], field.type, (*path, field.name))
    elif pa.types.is_list(kind):
        for number, item in enumerate(value):
            yield (*path, number), kind.value_type, kind.value_field.nullable
            yield from places(item, kind.value_type, (*path, number))


def put(value, path, new):
    """The value with another one at a place."""
    if not path:
        return new
    first, *rest = path
    copied = value.copy()
    copied[first] = put(value[first], rest, new)
    return copied


@given(table=tables(), data=st.data())
@settings(max_examples=120, deadline=None)
def test_a_digest_differs_exactly_when_one_place_differs(table, data):
    rows = table.to_pylist()
    found = list(places(rows, pa.list_(pa.field("row", pa.struct(list(table.schema)), nullable=False))))
    assume(found)
    path, kind, nullable = data.draw(st.sampled_from(found))
    new = put(rows, path, data.draw(values(kind, nullable=nullable)))
    changed = pa.Table.from_pylist(new, schema=table.schema)
    assert (logical_digest(changed) == logical_digest(table)) == (plain(new) == plain(rows))


@given(one=tables(max_rows=1, models=[Selection, LogLine]), other=tables(max_rows=1, models=[Selection, LogLine]))
@settings(max_examples=100, deadline=None)
def test_two_tables_have_one_digest_exactly_when_they_are_equal(one, other):
    equal = one.schema == other.schema and plain(one.to_pylist()) == plain(other.to_pylist())
    assert (logical_digest(one) == logical_digest(other)) == equal


@given(lists=st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=2, max_size=4), data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_moved_list_border_changes_the_digest(lists, data):
    donors = [row for row in range(1, len(lists)) if lists[row]]
    assume(donors)
    row = data.draw(st.sampled_from(donors))
    moved = [list(items) for items in lists]
    moved[row - 1].append(moved[row].pop(0))
    assert logical_digest(pa.table({"a": pa.array(lists)})) != logical_digest(pa.table({"a": pa.array(moved)}))
    assert logical_digest(pa.table({"a": pa.array([lists])})) != logical_digest(pa.table({"a": pa.array([moved])}))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array([None], pa.string()), pa.array([""])),
        (pa.array([None], pa.list_(pa.string())), pa.array([[]], pa.list_(pa.string()))),
        (pa.array([[None]], pa.list_(pa.string())), pa.array([[]], pa.list_(pa.string()))),
        (pa.array([None], pa.struct([("a", pa.int64())])), pa.array([{"a": None}], pa.struct([("a", pa.int64())]))),
        (pa.array([None], pa.float64()), pa.array([math.nan])),
        (pa.array([1], pa.int32()), pa.array([1], pa.int64())),
        (pa.array([1.0], pa.float32()), pa.array([1.0], pa.float64())),
        (pa.array([], pa.int32()), pa.array([], pa.int64())),
        (pa.array(["ab", "c"]), pa.array(["a", "bc"])),
        (pa.array([True]), pa.array([True, False])),
        (pa.array([None, 1]), pa.array([1, None])),
        (pa.array([1.0]), pa.array([math.nextafter(1.0, 2.0)])),
        (pa.array([{"a": 1, "b": 2}]), pa.array([{"b": 2, "a": 1}])),
        (pa.array([{"a": 1, "b": 2}]), pa.array([{"a": 2, "b": 1}])),
        (pa.nulls(1), pa.nulls(2)),
    ],
)
def test_data_that_only_look_alike_have_their_own_digests(one, other):
    assert logical_digest(pa.table({"a": one})) != logical_digest(pa.table({"a": other}))


def test_swapped_and_renamed_columns_change_the_digest():
    a, b = pa.array([1, 2]), pa.array([2, 1])
    tables = [{"a": a, "b": b}, {"a": b, "b": a}, {"b": b, "a": a}, {"a": a}, {"a": a, "c": b}, {"a": a, "b": b[:2:]}]
    digests = [logical_digest(pa.table(columns)) for columns in tables]
    assert len(set(digests)) == 5
    assert digests[0] == digests[5]


def test_a_name_cannot_pass_for_a_type_or_another_column():
    kinds = [
        pa.struct([("a:int64,b", pa.int64())]), pa.struct([("a", pa.int64()), ("b", pa.int64())]),
        pa.struct([('a","int64"],["b', pa.int64())]),
    ]  # fmt: skip
    assert len({logical_digest(pa.table({"x": pa.nulls(0, kind)})) for kind in kinds}) == 3


def test_zeros_of_both_signs_are_one_and_so_are_all_nans():
    other_nan = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_0001))[0]
    for kind in (pa.float64(), pa.float32(), pa.list_(pa.float32())):
        wrap = [[0.0, math.nan]] if pa.types.is_list(kind) else [0.0, math.nan]
        twin = [[-0.0, other_nan]] if pa.types.is_list(kind) else [-0.0, other_nan]
        assert logical_digest(pa.table({"a": pa.array(wrap, kind)})) == logical_digest(
            pa.table({"a": pa.array(twin, kind)})
        )


def test_what_lies_under_a_null_does_not_count():
    hidden = pa.ListArray.from_arrays(pa.array([0, 2, 3]), pa.array([1, 2, 3]), mask=pa.array([True, False]))
    assert logical_digest(pa.table({"a": hidden})) == logical_digest(pa.table({"a": pa.array([None, [3]])}))
    children = [pa.array([7, 8]), pa.array(["x", "y"])]
    masked = pa.StructArray.from_arrays(children, names=["a", "b"], mask=pa.array([True, False]))
    assert logical_digest(pa.table({"a": masked})) == logical_digest(
        pa.table({"a": pa.array([None, {"a": 8, "b": "y"}])})
    )


def test_a_dictionary_is_what_it_decodes_to():
    hidden = pa.DictionaryArray.from_arrays(pa.array([0, 1, None], pa.int8()), pa.array(["a", None]))
    assert logical_digest(pa.table({"a": hidden})) == logical_digest(pa.table({"a": pa.array(["a", None, None])}))
    chunks = [pa.array(texts).dictionary_encode() for texts in (["a", "b", "a"], ["b", "c"])]
    assert logical_digest(pa.table({"a": pa.chunked_array(chunks)})) == logical_digest(
        pa.table({"a": pa.array(["a", "b", "a", "b", "c"])})
    )


@pytest.mark.parametrize(
    "column",
    [
        pa.array([b"a"]), pa.array([1], pa.timestamp("s")), pa.array([1], pa.date32()),
        pa.array([[1]], pa.list_(pa.int8(), 1)),
        pa.array([{"inner": [b"a"]}]), pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
    ],
)  # fmt: skip
def test_a_type_that_takes_no_digest_is_refused_by_name(column):
    with pytest.raises(CheckpointError, match="column odd") as caught:
        logical_digest(pa.table({"fine": [1], "odd": column}))
    assert caught.value.problem == "has a type that takes no digest"


def test_sha256_of_abc_is_the_published_one():
    assert sha256(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_key_does_not_depend_on_the_order_of_its_parts():
    assert (
        canonical_json({"b": [1, 2.5], "a": {"d": None, "c": "ä"}}) == '{"a":{"c":"ä","d":null},"b":[1,2.5]}'.encode()
    )
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1}) == sha256(b'{"a":1,"b":2}')[:32]
    assert len({key_of({"a": value}) for value in (1, 1.0, "1", True, None, [1], [[1]])}) == 7
