"""Columns: how ragged lists go into Arrow tables and come out of them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.columns import Ragged, as_numpy, build_array, column, offsets_from_lengths, ragged, ragged_lists
from contracts.errors import StageError

STRICT_LIST = pa.list_(pa.field("item", pa.int32(), nullable=False))
STRICT_STRUCT = pa.struct([pa.field("rank", pa.int32(), nullable=False), pa.field("id", pa.string())])


def lists_of(ragged_: Ragged) -> list[list[object]]:
    """A slow, plain reading of ragged values."""
    values = ragged_.values.to_pylist() if isinstance(ragged_.values, pa.Array) else list(ragged_.values)
    return [values[start:end] for start, end in pairwise(ragged_.offsets)]


def test_offsets_are_running_sums_of_the_lengths():
    assert offsets_from_lengths(np.array([2, 0, 3], dtype=np.int32)).tolist() == [0, 2, 2, 5]
    assert offsets_from_lengths(np.zeros(0, dtype=np.int64)).tolist() == [0]
    assert offsets_from_lengths(np.array([1], dtype=np.int32)).dtype == np.int64


def test_offsets_do_not_overflow_int32():
    lengths = np.full(3, 2**30, dtype=np.int32)

    assert offsets_from_lengths(lengths)[-1] == 3 * 2**30


def test_rows_and_positions_follow_the_lists():
    lists = Ragged(np.array([0, 2, 2, 5]), np.arange(5))

    assert lists.lengths.tolist() == [2, 0, 3]
    assert lists.rows.tolist() == [0, 0, 2, 2, 2]
    assert lists.positions.tolist() == [0, 1, 0, 1, 2]


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_empty_lists_have_no_rows_and_no_positions(rows):
    lists = Ragged(np.zeros(rows + 1, dtype=np.int64), np.zeros(0))

    assert lists.lengths.tolist() == [0] * rows
    assert lists.rows.tolist() == []
    assert lists.positions.tolist() == []
    assert lists.rows.dtype == lists.positions.dtype == np.int64


def test_a_layout_without_values_has_rows_and_positions():
    layout = Ragged(np.array([0, 1, 3]), None)

    assert layout.rows.tolist() == [0, 1, 1]
    assert layout.positions.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("offsets", "values"),
    [
        ([1, 3], np.arange(3)),
        ([0, 2, 1, 3], np.arange(3)),
        ([0, 4], np.arange(3)),
        ([0, 2], np.arange(3)),
        ([], np.arange(0)),
        ([0, 2], {"a": np.arange(2), "b": np.arange(3)}),
        ([0, 2], {"a": Ragged(np.array([0, 1]), np.arange(1))}),
        ([0, 2], pa.array([1])),
    ],
)
def test_offsets_that_do_not_fit_their_values_are_refused(offsets, values):
    with pytest.raises(StageError, match="offsets and values do not fit together: got offsets"):
        Ragged(np.array(offsets, dtype=np.int64), values)


def test_a_list_of_structs_is_read_field_by_field():
    table = pa.table({"c": [[{"rank": 1, "id": "a"}, {"rank": 2, "id": "b"}], [], [{"rank": 1, "id": None}]]})

    lists = ragged(table, "c")

    assert lists.offsets.tolist() == [0, 2, 2, 3]
    assert lists.numpy("rank").tolist() == [1, 2, 1]
    assert lists.values["id"].to_pylist() == ["a", "b", None]


def test_a_null_list_has_no_values_even_where_some_lie_behind_it():
    hidden = pa.ListArray.from_arrays(pa.array([0, 2, 3]), pa.array([7, 8, 9]), mask=pa.array([True, False]))

    lists = ragged(pa.table({"c": hidden}), "c")

    assert lists.offsets.tolist() == [0, 0, 1]
    assert lists.numpy_values().tolist() == [9]


def test_a_null_struct_hides_what_lies_behind_it():
    structs = pa.StructArray.from_arrays([pa.array([1.0, 2.0])], names=["score"], mask=pa.array([True, False]))

    lists = ragged_lists(pa.ListArray.from_arrays(pa.array([0, 2]), structs))

    assert np.isnan(lists.numpy("score")).tolist() == [True, False]


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.none() | st.lists(st.integers(-5, 5), max_size=4), max_size=8),
    cuts=st.lists(st.integers(0, 8), max_size=3),
    before=st.integers(0, 2),
)
def test_ragged_reads_every_layout_of_the_same_lists_alike(rows, cuts, before):
    plain = pa.array([*[[9, 9]] * before, *rows, [9]], pa.list_(pa.int64())).slice(before, len(rows))
    edges = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    chunked = pa.chunked_array([plain.slice(start, end - start) for start, end in pairwise(edges)], plain.type)

    for layout in (pa.chunked_array([plain]), chunked, pa.chunked_array([chunked.combine_chunks()])):
        assert lists_of(ragged(pa.table({"c": layout}), "c")) == [row or [] for row in rows]


def test_a_column_without_chunks_is_an_empty_array():
    table = pa.table({"c": pa.chunked_array([], pa.list_(pa.int32()))})

    assert len(column(table, "c")) == 0
    assert ragged(table, "c").offsets.tolist() == [0]
    assert as_numpy(table.column("c")).tolist() == []


def test_chunks_too_large_for_one_array_are_refused_and_not_cut_off():
    # Nulls of no type take no memory, however many.
    large = pa.ListArray.from_arrays(pa.array([0, 2**30]), pa.nulls(2**30))
    table = pa.table({"scores": pa.chunked_array([large, large, large])})

    with pytest.raises(StageError, match=r"column scores: is too large for one Arrow array: got .* bytes in 3 chunks"):
        column(table, "scores")


def test_as_numpy_takes_what_it_is_given():
    given_ = np.arange(3)

    assert as_numpy(given_) is given_
    assert as_numpy(pa.array([True, False])).tolist() == [True, False]
    assert as_numpy(pa.chunked_array([[1], [2, 3]])).tolist() == [1, 2, 3]
    assert np.isnan(as_numpy(pa.array([1, None]))).tolist() == [False, True]


def test_as_numpy_does_not_copy_numbers():
    array = pa.array([1.0, 2.0])

    assert as_numpy(array).__array_interface__["data"][0] == array.buffers()[1].address


def test_lists_of_structs_with_lists_are_built_inside_out():
    arrow_type = pa.list_(pa.struct([("rank", pa.int32()), ("families", pa.list_(pa.string()))]))
    families = Ragged(np.array([0, 2, 2, 3]), np.array(["a", "b", "c"]))

    built = build_array(arrow_type, Ragged(np.array([0, 1, 1, 3]), {"rank": np.array([1, 1, 2]), "families": families}))

    assert built.type == arrow_type
    assert built.to_pylist() == [
        [{"rank": 1, "families": ["a", "b"]}],
        [],
        [{"rank": 1, "families": []}, {"rank": 2, "families": ["c"]}],
    ]


def test_lists_of_lists_are_built_inside_out():
    built = build_array(pa.list_(STRICT_LIST), Ragged(np.array([0, 2, 2]), Ragged(np.array([0, 1, 3]), np.arange(3))))

    assert built.to_pylist() == [[[0], [1, 2]], []]
    assert built.type == pa.list_(STRICT_LIST)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.lists(st.integers(-9, 9), max_size=3), max_size=3), max_size=5))
def test_what_is_built_from_ragged_lists_is_read_as_them(nested):
    inner = [one for row in nested for one in row]
    values = Ragged(
        offsets_from_lengths(np.array([len(one) for one in inner], dtype=np.int64)),
        np.array([value for one in inner for value in one], dtype=np.int64),
    )
    built = build_array(
        pa.list_(STRICT_LIST), Ragged(offsets_from_lengths(np.array([len(row) for row in nested], np.int64)), values)
    )

    assert built.to_pylist() == nested
    outer = ragged_lists(built)
    again = ragged_lists(outer.values)
    assert outer.lengths.tolist() == [len(row) for row in nested]
    assert (again.offsets.tolist(), again.numpy_values().tolist()) == (values.offsets.tolist(), values.values.tolist())


def test_an_empty_ragged_builds_empty_lists():
    assert build_array(STRICT_LIST, Ragged(np.zeros(3, np.int64), np.zeros(0))).to_pylist() == [[], []]
    assert build_array(STRICT_LIST, Ragged(np.zeros(1, np.int64), np.zeros(0))).to_pylist() == []


def test_numbers_become_the_wanted_numbers():
    built = build_array(STRICT_LIST, Ragged(np.array([0, 2]), np.array([1, 2], dtype=np.int64)))

    assert built.type == STRICT_LIST
    assert build_array(pa.float32(), pa.array([0.1])).type == pa.float32()
    assert build_array(pa.int32(), pa.chunked_array([[1], [2]])).to_pylist() == [1, 2]


def test_text_may_come_in_other_encodings():
    for text in (pa.array(["a", "b"], pa.large_string()), pa.array(["a", "b"]).dictionary_encode()):
        assert build_array(pa.string(), text).equals(pa.array(["a", "b"]))


def test_a_column_of_nulls_becomes_nulls_of_any_type():
    assert build_array(pa.string(), pa.nulls(2)).equals(pa.array([None, None], pa.string()))
    assert build_array(pa.list_(pa.string()), pa.nulls(1)).to_pylist() == [None]


def test_nested_arrays_take_the_wanted_nullable_flags_and_keep_their_nulls():
    loose = pa.array([[{"id": "a", "rank": 1}], None, [None, {"id": None, "rank": 2}]])
    wanted = pa.list_(STRICT_STRUCT)

    built = build_array(wanted, loose.slice(1))

    assert built.type == wanted
    assert built.to_pylist() == [None, [None, {"rank": 2, "id": None}]]


def test_a_struct_is_built_from_a_mapping_and_further_entries_are_left_out():
    built = build_array(STRICT_STRUCT, {"id": np.array(["a"]), "rank": np.array([1]), "note": np.array(["x"])})

    assert built.to_pylist() == [{"rank": 1, "id": "a"}]


@pytest.mark.parametrize(
    ("arrow_type", "data", "sentence"),
    [
        (pa.string(), pa.array([1, 2]), "column chunk_id: is built from other data .*: got int64, want string"),
        (pa.string(), np.array([1, 2]), "column chunk_id: is built from other data than its type: got"),
        (pa.int32(), pa.array(["1"]), "got string, want int32"),
        (pa.int32(), pa.array([2**31]), "got Integer value 2147483648 not in range"),
        (pa.int32(), np.array([1.5]), "column chunk_id"),
        (pa.bool_(), pa.array([1]), "got int64, want bool"),
        (pa.int32(), Ragged(np.array([0]), np.zeros(0)), "got lists, want int32"),
        (pa.int32(), {"a": np.zeros(0)}, "got a mapping of fields, want int32"),
        (STRICT_STRUCT, {"rank": np.array([1])}, "got the fields rank, want also id"),
        (STRICT_STRUCT, {"rank": np.array([1]), "id": pa.array([1])}, "column chunk_id.id: .* got int64, want string"),
    ],
)  # fmt: skip
def test_data_of_another_kind_is_refused_by_the_name_of_the_column(arrow_type, data, sentence):
    with pytest.raises(StageError, match=sentence):
        build_array(arrow_type, data, "chunk_id")


def test_more_values_than_int32_offsets_can_count_are_refused():
    # One byte shown 2^31 times: the values exist without taking the memory.
    values = np.broadcast_to(np.zeros(1, dtype=np.int8), (2**31,))

    with pytest.raises(StageError, match="column scores: is too large for one Arrow array: got 2,147,483,648 list val"):
        build_array(pa.list_(pa.int8()), Ragged(np.array([0, 2**31]), values), "scores")
