"""Tables: the vectorised check and row-by-row validation accept and refuse the same ones, and say the same."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args, get_origin

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from contracts import candidates, checks, corpus, evidence, query
from contracts.annotations import field_annotations, is_row, unwrap
from contracts.candidates import Candidates, Distances, Selection
from contracts.columns import Ragged, offsets_from_lengths
from contracts.corpus import Chunk
from contracts.errors import ContractError, StageError
from contracts.evidence import RerankedRanking
from contracts.query import DistinctQuery, LogLine
from contracts.rules import Ranked, Sorted, Triangle, Unique, UniqueWithin
from contracts.table import Float32, Int32, Row, build_table, check_rows, check_table, rows_to_table, schema

TABLES: list[type[Row]] = [
    query.DistinctQuery, query.LogLine, corpus.Chunk,
    candidates.Candidates, candidates.Distances, candidates.LogProbabilities, candidates.Selection,
    candidates.KeywordRanking, candidates.FusedRanking,
    evidence.RescueSearch, evidence.RescuedRanking, evidence.RerankedRanking, evidence.GradedSelection,
    evidence.Context,
]  # fmt: skip

every_table = pytest.mark.parametrize("model", TABLES, ids=lambda model: model.__name__)

# --- valid tables ---------------------------------------------------------------------------------

words = st.sampled_from(["", "a", "b", "c-1", "d", "ä", "\ufb01", "\U0001f600 x"])


def number_strategy(base: type, bounds: list[Any], arrow_type: pa.DataType | None) -> st.SearchStrategy[Any]:
    low = max(
        (bound.ge if isinstance(bound, Ge) else bound.gt for bound in bounds if isinstance(bound, Ge | Gt)),
        default=None,
    )
    high = min(
        (bound.le if isinstance(bound, Le) else bound.lt for bound in bounds if isinstance(bound, Le | Lt)),
        default=None,
    )
    if base is int:
        return st.integers(-(2**63) if low is None else low, 2**63 - 1 if high is None else high)
    open_low = any(isinstance(bound, Gt) and bound.gt == low for bound in bounds)
    width = 32 if arrow_type == pa.float32() else 64
    free = {"allow_nan": False, "allow_infinity": False, "width": width}
    return st.floats(low, high, exclude_min=open_low, **free)


def strategy_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Plain Python values of a field, as `to_pylist` would give them."""
    base, bounds, nullable, arrow_type = unwrap(annotation)
    shortest = max((bound.min_length for bound in bounds if isinstance(bound, MinLen)), default=0)
    if get_origin(base) is list:
        values = st.lists(strategy_of(get_args(base)[0]), min_size=shortest, max_size=3)
    elif is_row(base):
        values = st.fixed_dictionaries({name: strategy_of(inner) for name, inner in field_annotations(base).items()})
    elif get_origin(base) is Literal:
        values = st.sampled_from(get_args(base))
    elif base is str:
        values = words.filter(lambda text: len(text) >= shortest)
    elif base is bool:
        values = st.booleans()
    else:
        values = number_strategy(base, bounds, arrow_type)
    return st.none() | values if nullable else values


def once(items: list[dict[str, Any]], field: str) -> list[dict[str, Any]]:
    return list({item[field]: item for item in items}.values())


def obey(model: type[Row], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bends rows of sound fields until the rules of the model hold."""
    order = {Unique: 0, UniqueWithin: 1, Sorted: 2, Ranked: 3, Triangle: 4}
    for rule in sorted(model.rules, key=lambda rule: order[type(rule)]):
        if isinstance(rule, Unique):
            rows = once(rows, rule.name)
        for row in rows:
            if isinstance(rule, UniqueWithin):
                row[rule.name] = once(row[rule.name], rule.field)
            elif isinstance(rule, Sorted):
                row[rule.name].sort(key=lambda item: (-item[rule.field], item[rule.tie]))
            elif isinstance(rule, Ranked):
                for rank, item in enumerate(row[rule.name], start=1):
                    item["rank"] = rank
            elif isinstance(rule, Triangle):
                count = len(row[rule.items])
                row[rule.pairs] = (row[rule.pairs] + [0.5] * 6)[: count * (count - 1) // 2]
    return rows


@cache
def valid_rows(model: type[Row], fewest: int = 0) -> st.SearchStrategy[list[dict[str, Any]]]:
    row = st.fixed_dictionaries({name: strategy_of(inner) for name, inner in field_annotations(model).items()})
    return st.lists(row, min_size=fewest, max_size=3).map(lambda rows: obey(model, rows))


def loose(arrow_type: pa.DataType) -> pa.DataType:
    """The type with nulls allowed everywhere, so that Arrow itself refuses no corrupted row."""
    if pa.types.is_list(arrow_type):
        return pa.list_(loose(arrow_type.value_type))
    if pa.types.is_struct(arrow_type):
        return pa.struct([(field.name, loose(field.type)) for field in arrow_type])
    return arrow_type


def table_of(model: type[Row], rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=pa.schema([(field.name, loose(field.type)) for field in schema(model)]))


@st.composite
def laid_out(draw: st.DrawFn, table: pa.Table) -> pa.Table:
    """The same rows in one piece, in chunks, or as a slice of something longer."""
    layout = draw(st.sampled_from(["plain", "chunked", "sliced", "sliced and chunked"]))
    event(layout)
    rows = len(table)
    if "sliced" in layout:
        table = pa.concat_tables([table, table, table]).combine_chunks().slice(rows, rows)
    if "chunked" in layout:
        cuts = sorted(draw(st.lists(st.integers(0, rows), max_size=3)))
        table = pa.concat_tables([table.slice(start, end - start) for start, end in pairwise([0, *cuts, rows])])
    return table


# --- corruptions ----------------------------------------------------------------------------------


@dataclass
class Slot:
    """A place in a table's rows that can be written."""

    holder: Any
    key: Any
    annotation: Any
    alike: list[Any]  # what stands at the same place in all rows

    def write(self, value: Any) -> None:
        self.holder[self.key] = value


def slots(model: type[Row], rows: list[dict[str, Any]]) -> st.SearchStrategy[Slot]:
    """Any place in the rows, at every depth; each column and field as likely as the others."""
    found: dict[str, list[Slot]] = {}

    def visit(path: str, holder: Any, key: Any, annotation: Any) -> None:
        found.setdefault(path, []).append(Slot(holder, key, annotation, []))
        base, value = unwrap(annotation).base, holder[key]
        if get_origin(base) is list:
            for place in range(len(value or [])):
                visit(f"{path}.*", value, place, get_args(base)[0])
        elif is_row(base) and value is not None:
            for name, inner in field_annotations(base).items():
                visit(f"{path}.{name}", value, name, inner)

    for row in rows:
        for name, annotation in field_annotations(model).items():
            visit(name, row, name, annotation)
    for group in found.values():
        alike = [slot.holder[slot.key] for slot in group]
        for slot in group:
            slot.alike = alike
    return st.sampled_from(list(found.values())).flatmap(st.sampled_from)


def near(limit: float, *, float32: bool) -> list[float]:
    step = np.float32 if float32 else np.float64
    return [
        float(limit),
        float(np.nextafter(step(limit), step(math.inf))),
        float(np.nextafter(step(limit), step(-math.inf))),
    ]


@st.composite
def other_value(draw: st.DrawFn, slot: Slot) -> Any:
    """Something else for a slot: often wrong, sometimes still right."""
    base, bounds, _, arrow_type = unwrap(slot.annotation)
    value = slot.holder[slot.key]
    limits = [getattr(bound, name) for bound in bounds for name in ("ge", "gt", "le", "lt") if hasattr(bound, name)]
    options: list[Any] = [None, *slot.alike]
    if get_origin(base) is list and value:
        options += [
            [],
            value[:-1],
            [*value, value[0]],
            value[::-1],
            [value[-1], *value[:-1]],
            [None, *value],
            value * 2,
        ]
    elif get_origin(base) is Literal or base is str:
        options += ["", "other", "\x00"]
    elif base is bool:
        options += [not value]
    elif base is float:
        options += [math.nan, math.inf, -math.inf, 0.0, -0.0, -1e-30, 1e30, 1.0, -1.0]
        options += [number for limit in limits for number in near(limit, float32=arrow_type == pa.float32())]
    elif base is int:
        largest = 2**31 - 1 if arrow_type == pa.int32() else 2**63 - 1
        options += [0, 1, 2, -1, largest, -largest - 1]
        options += [number for limit in limits for number in (limit - 1, limit + 1) if abs(number) < largest]
    return copy.deepcopy(draw(st.sampled_from(options)))


def other_type(array: pa.Array) -> pa.Array:
    """The same values as another type, which a person would see in the rows too."""
    if pa.types.is_list(array.type) and not pa.types.is_nested(array.type.value_type):
        return relisted(array, other_type(array.values))
    if pa.types.is_nested(array.type):
        return pa.array([None if value is None else "x" for value in array.to_pylist()], pa.string())
    if pa.types.is_string(array.type):
        return pc.utf8_length(array)
    return array.cast(pa.int64()) if pa.types.is_boolean(array.type) else array.cast(pa.string())


def relisted(array: pa.Array, values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(array.offsets, values, mask=array.is_null())


@st.composite
def other_columns(draw: st.DrawFn, table: pa.Table, name: str) -> pa.Table:
    """The table without a column, with one more, or with one of another type; or the same for a nested field."""
    place = table.column_names.index(name)
    array = table.column(name).combine_chunks()
    nested = pa.types.is_list(array.type) and pa.types.is_struct(array.type.value_type)
    if nested and draw(st.booleans()):
        values = array.values
        assume(values.null_count < len(values))
        inner = pa.table({field.name: child for field, child in zip(values.type, values.flatten(), strict=True)})
        inner = draw(other_columns(inner, draw(st.sampled_from(inner.column_names))))
        children = [column.combine_chunks() for column in inner.columns]
        structs = pa.StructArray.from_arrays(children, names=inner.column_names, mask=values.is_null())
        return table.set_column(place, name, relisted(array, structs))
    change = draw(st.sampled_from(["missing", "extra", "type"]))
    event(change)
    if change == "missing":
        assume(table.num_columns > 1)
        return table.remove_column(place)
    if change == "extra":
        return table.append_column(f"{name}_2", array)
    # Rows show the type of values; where there are none, there is nothing to see.
    visible = array.drop_null()
    assume(
        len(visible) > 0 and (not pa.types.is_list(visible.type) or nested or len(visible.flatten().drop_null()) > 0)
    )
    return table.set_column(place, name, other_type(array))


# --- the promise ----------------------------------------------------------------------------------


def refusal(check: Callable[..., None], table: Any, model: type[Row]) -> ContractError | None:
    try:
        check(table, model, "some_stage")
    except ContractError as error:
        return error
    return None


def both(table: pa.Table, model: type[Row]) -> tuple[ContractError | None, ContractError | None]:
    """The verdicts of the vectorised check and of its slow twin."""
    return refusal(check_table, table, model), refusal(check_rows, table.to_pylist(), model)


def place(error: ContractError | None) -> tuple[str, int | None, str] | None:
    """Where and what an error complains of; by repr, since NaN equals nothing."""
    return None if error is None else (error.column, error.row, repr(error.value))


@every_table
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_both_checks_accept_valid_tables(model, data):
    table = data.draw(laid_out(table_of(model, data.draw(valid_rows(model)))))

    assert both(table, model) == (None, None)


@every_table
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_both_checks_give_the_same_verdict_on_corrupted_values(model, data):
    rows = data.draw(valid_rows(model, fewest=1))
    slot = data.draw(slots(model, rows))
    slot.write(data.draw(other_value(slot)))

    by_table, by_rows = both(data.draw(laid_out(table_of(model, rows))), model)

    event("refused" if by_rows else "accepted")
    assert place(by_table) == place(by_rows)
    assert by_table is None or (by_table.row is not None and by_table.stage == "some_stage")


@every_table
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_both_checks_give_the_same_verdict_on_many_corruptions(model, data):
    rows = data.draw(valid_rows(model, fewest=1))
    for _ in range(data.draw(st.integers(2, 4))):
        slot = data.draw(slots(model, rows))
        slot.write(data.draw(other_value(slot)))

    by_table, by_rows = both(data.draw(laid_out(table_of(model, rows))), model)

    # Which of several faults is named first differs by design: by column here, by row there.
    assert (by_table is None) == (by_rows is None)


@every_table
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_both_checks_refuse_other_columns_and_types(model, data):
    table = table_of(model, data.draw(valid_rows(model, fewest=1)))
    changed = data.draw(other_columns(table, data.draw(st.sampled_from(table.column_names))))

    by_table, by_rows = both(data.draw(laid_out(changed)), model)

    assert by_table is not None
    assert by_rows is not None
    assert by_table.column == by_rows.column
    assert by_table.row is None


@every_table
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_rows_become_tables_and_rows_again(model, data):
    rows = data.draw(valid_rows(model))

    table = rows_to_table(model, [model.model_validate(row) for row in rows])

    assert table.schema.equals(schema(model))
    assert table.to_pylist() == rows


# --- what the two checks rest on ------------------------------------------------------------------


def row_models(kind: type[Row] = Row) -> Iterator[type[Row]]:
    for model in kind.__subclasses__():
        if model.__module__.startswith("contracts."):
            yield model
            yield from row_models(model)


def inside(annotation: Any) -> Iterator[type[Row]]:
    base = unwrap(annotation).base
    if get_origin(base) is list:
        yield from inside(get_args(base)[0])
    elif is_row(base):
        yield base
        for inner in field_annotations(base).values():
            yield from inside(inner)


def test_every_row_model_of_the_contracts_is_compared():
    structs = {one for model in TABLES for inner in field_annotations(model).values() for one in inside(inner)}

    assert {*TABLES, *structs} == set(row_models())


@pytest.mark.parametrize("model", sorted(row_models(), key=lambda model: model.__name__), ids=lambda m: m.__name__)
def test_row_models_say_nothing_that_a_table_cannot(model):
    fields = model.model_fields.values()
    assert all(field.is_required() and field.alias is None and field.validation_alias is None for field in fields)
    decorators = model.__pydantic_decorators__
    assert not decorators.field_validators
    assert not decorators.root_validators
    assert list(decorators.model_validators) == ["_obey_rules"]
    assert {key: model.model_config[key] for key in ("strict", "extra", "allow_inf_nan")} == {
        "strict": True, "extra": "forbid", "allow_inf_nan": False,
    }  # fmt: skip


@every_table
def test_rules_name_fields_that_are_there_and_never_null(model):
    fields = schema(model)
    for rule in model.rules:
        for name in rule.columns:
            assert not fields.field(name).nullable
        named = {"rank"} if isinstance(rule, Ranked) else {getattr(rule, "field", None), getattr(rule, "tie", None)}
        for name in named - {None}:
            assert not fields.field(rule.name).type.value_type.field(name).nullable


# --- by hand --------------------------------------------------------------------------------------


def candidate(rank: int, chunk_id: str, score: float) -> dict[str, Any]:
    return {"rank": rank, "chunk_id": chunk_id, "score": score}


def three_queries() -> list[dict[str, Any]]:
    return [
        {"query_id": "q1", "candidates": [candidate(1, "b", 0.5), candidate(2, "a", 0.25)]},
        {"query_id": "q2", "candidates": []},
        {"query_id": "q3", "candidates": [candidate(1, "a", 1.0), candidate(2, "c", 0.5), candidate(3, "d", 0.5)]},
    ]


def corrupt_query(change: Callable[[list[dict[str, Any]]], None]) -> pa.Table:
    rows = three_queries()
    change(rows)
    return table_of(Candidates, rows)


def write(row: int, item: int, **values: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda rows: rows[row]["candidates"][item].update(values)


@pytest.mark.parametrize(
    ("change", "column", "row", "value", "want"),
    [
        (write(2, 1, score=1.5), "candidates.score", 2, 1.5, "<= 1"),
        (write(2, 0, score=math.nan), "candidates.score", 2, math.nan, "a finite number"),
        (write(0, 1, score=-math.inf), "candidates.score", 0, -math.inf, "a finite number"),
        (write(2, 2, score=0.75), "candidates.score", 2, 0.75, "falling score, ties by ascending chunk_id"),
        (write(2, 1, chunk_id="e"), "candidates.score", 2, 0.5, "falling score, ties by ascending chunk_id"),
        (write(2, 2, chunk_id="a"), "candidates.chunk_id", 2, "a", "each value once in a list"),
        (write(2, 1, chunk_id=""), "candidates.chunk_id", 2, "", "at least 1 long"),
        (write(2, 1, chunk_id=None), "candidates.chunk_id", 2, None, "a value (not null)"),
        (write(0, 0, rank=0), "candidates.rank", 0, 0, ">= 1"),
        (write(2, 1, rank=3), "candidates.rank", 2, 3, "1, 2, 3 ... in the order they stand"),
        (lambda rows: rows[2]["candidates"].insert(1, None), "candidates", 2, None, "a value (not null)"),
        (lambda rows: rows[1].update(candidates=None), "candidates", 1, None, "a value (not null)"),
        (lambda rows: rows[1].update(query_id=None), "query_id", 1, None, "a value (not null)"),
        (lambda rows: rows[2].update(query_id="q1"), "query_id", 2, "q1", "each value once"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", ["plain", "sliced", "chunked", "tiny chunks"])
def test_a_refused_table_names_stage_column_row_and_value(change, column, row, value, want, layout):
    table = corrupt_query(change)
    if layout == "sliced":
        table = pa.concat_tables([table_of(Candidates, three_queries()), table]).combine_chunks().slice(3)
    if layout == "chunked":
        table = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    if layout == "tiny chunks":
        table = pa.concat_tables([table.slice(0, 0), *[table.slice(number, 1) for number in range(3)]])

    with pytest.raises(ContractError) as caught:
        check_table(table, Candidates, "oversample")

    error = caught.value
    assert (error.stage, error.column, error.row, repr(error.value), error.want) == (
        "oversample", column, row, repr(value), want,
    )  # fmt: skip
    assert str(error) == (
        f"stage oversample, column {column}, row {row}: breaks the contract: got {value!r}, want {want}. "
        "Run `dartflow contracts oversample` to see the contract."
    )


def chunk(chunk_id: str, acl: Any) -> dict[str, Any]:
    return {
        "chunk_id": chunk_id, "text": "t", "source": "s", "document_id": "d", "chunk_index": 0, "title": None,
        "evidence_family": None, "authority_tier": None, "version": None, "acl": acl, "metadata": [], "text_id": 0,
    }  # fmt: skip


def test_row_numbers_stay_right_behind_null_and_empty_lists():
    acls = [["x"], None, [], None, ["y", "z"], ["y", None, "z"]]
    table = table_of(Chunk, [chunk(str(number), acl) for number, acl in enumerate(acls)])

    assert place(refusal(check_table, table, Chunk)) == ("acl", 5, "None")
    assert place(refusal(check_table, table.slice(3), Chunk)) == ("acl", 2, "None")
    assert refusal(check_table, table.slice(0, 5), Chunk) is None


def test_values_behind_a_null_list_or_struct_are_not_checked():
    hidden = pa.ListArray.from_arrays(pa.array([0, 2, 3]), pa.array([None, None, "y"]), mask=pa.array([True, False]))
    table = table_of(Chunk, [chunk("a", None), chunk("b", None)])

    check_table(table.set_column(table.column_names.index("acl"), "acl", hidden), Chunk, "ingest")


def test_a_list_of_the_wrong_length_is_named_with_both_lengths():
    rows = [
        {"query_id": "a", "query_distances": [0.5], "document_distances": []},
        {"query_id": "b", "query_distances": [0.5] * 3, "document_distances": [0.1, 0.2]},
    ]

    assert place(refusal(check_table, table_of(Distances, rows), Distances)) == ("document_distances", 1, "'2 values'")


def test_an_empty_list_where_one_value_is_needed_is_refused():
    row = {
        "query_id": "a", "text": "t", "normalised_text": "t", "groups": [], "filters": [], "occurrences": 1,
        "embedding": [],
    }  # fmt: skip

    assert place(refusal(check_table, table_of(DistinctQuery, [row]), DistinctQuery)) == ("embedding", 0, "[]")


# --- the order of the checks ----------------------------------------------------------------------


class Ordered(Row):
    rules = (Unique("first"), Ranked("items"))

    first: Annotated[int, Ge(0), Le(9)]
    second: str
    items: list[candidates.DenseCandidate]


def ordered(first: Any = 1, second: Any = "x", rank: Any = 1, score: Any = 0.5) -> dict[str, Any]:
    return {"first": first, "second": second, "items": [candidate(rank, "a", score)]}


def test_types_are_checked_before_values_and_values_before_rules():
    broken = [ordered(rank=5), ordered(rank=5, score=math.nan), ordered(first=-1)]
    table = table_of(Ordered, broken)

    assert refusal(check_table, table.drop(["second"]), Ordered).column == "second"
    assert refusal(check_table, table.append_column("third", table.column("second")), Ordered).column == "third"
    assert place(refusal(check_table, table, Ordered)) == ("first", 2, "-1")
    assert place(refusal(check_table, table.slice(0, 2), Ordered)) == ("items.score", 1, "nan")
    assert place(refusal(check_table, table.slice(0, 1), Ordered)) == ("items.rank", 0, "5")
    twice = table_of(Ordered, [ordered(rank=5), ordered()])
    assert place(refusal(check_table, twice, Ordered)) == ("first", 1, "1")


@pytest.mark.parametrize("rows_a_chunk", [1, 2, 5])
def test_of_a_column_the_lowest_row_is_named_however_it_is_chunked(rows_a_chunk):
    firsts = [1, 99, -1, None, 3]
    table = table_of(Ordered, [ordered(first=first) for first in firsts])
    table = pa.concat_tables([table.slice(start, rows_a_chunk) for start in range(0, 5, rows_a_chunk)])

    assert place(refusal(check_table, table, Ordered)) == ("first", 1, "99")


def test_large_chunks_are_checked_one_by_one_with_the_right_row(monkeypatch):
    monkeypatch.setattr(checks, "_PIECE_BYTES", 64)
    table = table_of(Ordered, [ordered(first=number % 10) for number in range(100)])
    bad = table_of(Ordered, [ordered(second=None)])
    table = pa.concat_tables([table.slice(start, 7) for start in range(0, 100, 7)] + [bad])

    assert place(refusal(check_table, table, Ordered)) == ("second", 100, "None")


def test_small_chunks_are_joined_up_to_a_size(monkeypatch):
    monkeypatch.setattr(checks, "_PIECE_BYTES", 3 * 8)
    column = pa.chunked_array([[1], [2], [3], [4, 5, 6, 7], [], [8]])

    assert [piece.to_pylist() for piece in checks._pieces(column)] == [[1, 2, 3], [4, 5, 6, 7], [8]]


def test_rules_are_not_asked_about_unsound_lists():
    """A null rank, a null item and a null list would each break the arithmetic of `Ranked`."""
    for row in (ordered(rank=None), {**ordered(), "items": [None]}, {**ordered(), "items": None}):
        error = refusal(check_table, table_of(Ordered, [ordered(first=0), row]), Ordered)
        assert (error.row, error.want) == (1, "a value (not null)")


# --- what rows cannot show ------------------------------------------------------------------------


@every_table
def test_an_empty_table_is_valid_in_every_form(model):
    empty = schema(model).empty_table()
    check_table(empty, model, "some_stage")
    check_table(pa.Table.from_batches([], schema=schema(model)), model, "some_stage")
    check_table(pa.concat_tables([empty, empty]), model, "some_stage")
    check_rows([], model, "some_stage")


@every_table
def test_an_empty_table_must_have_every_column(model):
    empty = schema(model).empty_table()
    for name in empty.column_names:
        error = refusal(check_table, empty.drop([name]), model)
        assert (error.column, error.row, error.value) == (name, None, "no such column")
    error = refusal(check_table, empty.append_column("note", pa.array([], pa.string())), model)
    assert (error.column, error.value) == ("note", "unknown column")


def with_type(table: pa.Table, name: str, array: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, array)


def test_text_in_another_encoding_is_refused_by_the_name_of_its_type():
    table = table_of(Candidates, three_queries())
    ids = table.column("query_id").combine_chunks()
    for array, got in (
        (ids.cast(pa.large_string()), "large_string"),
        (ids.cast(pa.string_view()), "string_view"),
        (ids.dictionary_encode(), "dictionary<values=string, indices=int32, ordered=0>"),
        (pa.nulls(3), "null"),
    ):
        error = refusal(check_table, with_type(table, "query_id", array), Candidates)
        assert (error.column, error.row, error.value, error.want) == ("query_id", None, got, "string")


def test_a_wrong_type_deep_inside_is_named_by_its_field_alone():
    table = table_of(Candidates, three_queries())
    lists = table.column("candidates").combine_chunks()
    wider = lists.cast(pa.list_(pa.struct([("rank", pa.int32()), ("chunk_id", pa.string()), ("score", pa.float64())])))

    error = refusal(check_table, with_type(table, "candidates", wider), Candidates)

    assert (error.column, error.value, error.want) == ("candidates.score", "double", "float")


@pytest.mark.parametrize(
    "list_type", [pa.large_list(pa.float32()), pa.list_(pa.float32(), 1), pa.list_view(pa.float32()), pa.float32()]
)
def test_other_kinds_of_lists_are_refused(list_type):
    row = [None] if pa.types.is_fixed_size_list(list_type) else None
    table = pa.table(
        {
            "query_id": ["a"],
            "query_distances": pa.array([row], list_type),
            "document_distances": pa.array([[]], pa.list_(pa.float32())),
        }
    )

    error = refusal(check_table, table, Distances)

    assert (error.column, error.value) == ("query_distances", str(list_type))


def test_a_column_that_stands_twice_is_refused():
    table = table_of(Ordered, [ordered()])
    twice = table.append_column("second", table.column("second"))

    error = refusal(check_table, twice, Ordered)

    assert (error.column, error.value, error.want) == ("second", "2 columns of this name", "one")


def test_bytes_that_are_no_text_are_refused_in_their_row():
    raw = [b"q1", b"q2", b"\xff\xfe", b"q4", b"\xc3"]
    table = pa.table({"line_number": range(1, 6), "logged_id": ["x"] * 5, "query_id": [None] * 5, "reason": ["r"] * 5})
    broken = pa.Array.from_buffers(pa.string(), 5, pa.array(raw, pa.binary()).buffers())
    table = with_type(table, "query_id", broken)

    error = refusal(check_table, table, LogLine)

    assert (error.column, error.row, error.value, error.want) == ("query_id", 2, b"\xff\xfe", "text in UTF-8")
    assert place(refusal(check_table, table.slice(3), LogLine)) == ("query_id", 1, repr(b"\xc3"))
    check_table(table.slice(0, 2), LogLine, "load")


def test_the_order_of_columns_and_fields_is_free():
    table = table_of(Candidates, three_queries())
    turned = pa.table(
        {
            "candidates": table.column("candidates").cast(
                pa.list_(pa.struct([("score", pa.float32()), ("rank", pa.int32()), ("chunk_id", pa.string())]))
            ),
            "query_id": table.column("query_id"),
        }
    )

    check_table(turned, Candidates, "oversample")
    rebuilt = build_table(Candidates, {name: turned.column(name) for name in turned.column_names})
    assert rebuilt.to_pylist() == three_queries()


def test_a_table_is_still_valid_after_parquet(tmp_path):
    table = rows_to_table(Candidates, [Candidates.model_validate(row) for row in three_queries()])
    pq.write_table(table, tmp_path / "part.parquet", row_group_size=1)

    read = pq.read_table(tmp_path / "part.parquet")

    check_table(read, Candidates, "oversample")
    assert read.to_pylist() == three_queries()


# --- numbers --------------------------------------------------------------------------------------


class Narrow(Row):
    low: Annotated[Float32, Ge(0.1)]
    high: Annotated[Float32, Le(0.1)]
    above: Annotated[Float32, Gt(0.3)]
    below: Annotated[Float32, Lt(0.3)]
    whole: Int32


def narrow(**values: Any) -> dict[str, Any]:
    return {"low": 1.0, "high": 0.0, "above": 1.0, "below": 0.0, "whole": 0, **values}


def test_a_float32_is_compared_with_its_bound_as_the_number_it_is():
    # In float32, 0.1 is 0.100000001 and 0.3 is 0.300000012: both above the float64 of the bound.
    for values, column in (
        ({"low": 0.1}, None), ({"high": 0.1}, "high"), ({"above": 0.3}, None), ({"below": 0.3}, "below"),
    ):  # fmt: skip
        by_table, by_rows = both(table_of(Narrow, [narrow(**values)]), Narrow)
        assert place(by_table) == place(by_rows)
        assert (by_table and by_table.column) == column


class Edges(Row):
    at_least: Annotated[float, Ge(2)]
    above: Annotated[float, Gt(2)]
    at_most: Annotated[int, Le(2)]
    below: Annotated[int, Lt(2)]


@pytest.mark.parametrize(
    ("values", "column", "want"),
    [
        ({"at_least": 2.0}, None, None),
        ({"at_least": math.nextafter(2, 0)}, "at_least", ">= 2"),
        ({"above": 2.0}, "above", "> 2"),
        ({"above": math.nextafter(2, 3)}, None, None),
        ({"at_most": 2}, None, None),
        ({"at_most": 3}, "at_most", "<= 2"),
        ({"below": 2}, "below", "< 2"),
        ({"below": 1}, None, None),
    ],
)
def test_bounds_are_exact_at_their_edge(values, column, want):
    table = table_of(Edges, [{"at_least": 3.0, "above": 3.0, "at_most": 1, "below": 1, **values}])

    by_table, by_rows = both(table, Edges)

    assert place(by_table) == place(by_rows)
    assert ((by_table.column, by_table.want) if by_table else (None, None)) == (column, want)


def test_a_row_holds_the_float32_that_its_table_holds():
    row = Narrow(**narrow(low=0.1))

    assert row.low == float(np.float32(0.1))
    assert rows_to_table(Narrow, [row]).column("low")[0].as_py() == row.low
    with pytest.raises(ValidationError, match=r"less than or equal to 0\.1"):
        Narrow(**narrow(high=0.1))


@pytest.mark.parametrize("values", [{"low": 1e39}, {"low": math.inf}, {"whole": 2**31}, {"whole": -(2**31) - 1}])
def test_a_row_refuses_numbers_that_its_columns_cannot_hold(values):
    with pytest.raises(ContractError) as caught:
        check_rows([narrow(**values)], Narrow, "some_stage")

    assert (caught.value.column, caught.value.row) == (next(iter(values)), 0)


def test_the_extremes_of_a_column_are_valid():
    extremes = [
        narrow(low=float(np.finfo(np.float32).max), whole=2**31 - 1),
        narrow(low=1.0, below=float(np.finfo(np.float32).min), whole=-(2**31)),
    ]

    assert both(table_of(Narrow, extremes), Narrow) == (None, None)


def test_a_bool_is_no_number():
    with pytest.raises(ContractError, match="column whole, row 0: breaks the contract: got True, want a valid integer"):
        check_rows([narrow(whole=True)], Narrow, "some_stage")


# --- building -------------------------------------------------------------------------------------


def test_the_schema_follows_the_model():
    assert schema(Selection).equals(
        pa.schema(
            [
                pa.field("query_id", pa.string(), nullable=False),
                pa.field(
                    "candidates",
                    pa.list_(
                        pa.field(
                            "item",
                            pa.struct(
                                [
                                    pa.field("rank", pa.int32(), nullable=False),
                                    pa.field("chunk_id", pa.string(), nullable=False),
                                    pa.field("score", pa.float64(), nullable=True),
                                ]
                            ),
                            nullable=False,
                        )
                    ),
                    nullable=False,
                ),
                pa.field("shortfall", pa.int32(), nullable=False),
            ]
        )
    )


def nested_lists() -> dict[str, Any]:
    families = Ragged(np.array([0, 2, 2]), pa.array(["guide", "reference"]))
    parts = {name: np.array([0.5, 0.25]) for name in ("score", "retrieval", "lexical", "exact_bonus")}
    return {
        "query_id": np.array(["q1", "q2"]),
        "rerank_status": pa.array(["disabled", "disabled"]).dictionary_encode(),
        "required": Ragged(np.array([0, 0, 1]), np.array(["guide"])),
        "slots": np.array([5, 5], dtype=np.int64),
        "max_per_document": [None, 1],
        "near_duplicate": np.array([0.5, 1.0]),
        "spread": np.array([False, True]),
        "lexical_weight": np.array([0.0, 0.5]),
        "candidates": Ragged(
            np.array([0, 2, 2]),
            {
                "rank": np.array([1, 2]),
                "chunk_id": pa.chunked_array([["a"], ["b"]]),
                "cross_encoder": pa.array([None, 0.5]),
                "absolute_score": pa.array([None, 0.5]),
                "families": families,
                "rescued": np.array([False, True]),
                "selected_rank": pa.array([1, None], pa.int64()),
                "drawn_in_by": pa.array([None, "a"]),
                **parts,
            },
        ),
    }


def test_a_table_is_built_from_ragged_lists_of_structs_with_lists():
    table = build_table(RerankedRanking, nested_lists())

    assert table.schema.equals(schema(RerankedRanking))
    check_table(table, RerankedRanking, "blended_rerank")
    first = table.to_pylist()[0]["candidates"][0]
    assert (first["families"], first["cross_encoder"], first["selected_rank"]) == (["guide", "reference"], None, 1)
    assert table.column("candidates").to_pylist()[1] == []


def test_a_table_is_not_built_without_every_column():
    columns = nested_lists()
    del columns["slots"], columns["required"]

    with pytest.raises(
        StageError, match=r"table of RerankedRanking: columns are missing: got .*, want required, slots"
    ):
        build_table(RerankedRanking, columns)


def test_a_table_is_not_built_from_columns_of_different_lengths():
    with pytest.raises(StageError, match=r"columns differ in length: got query_id 1, .* slots 2"):
        build_table(RerankedRanking, {**nested_lists(), "query_id": np.array(["q1"])})


def test_an_empty_table_is_built_from_empty_arrays():
    nothing = np.zeros(0)
    columns = {"query_id": nothing.astype(str), "query_distances": Ragged(np.array([0]), nothing)}
    table = build_table(Distances, {**columns, "document_distances": Ragged(np.array([0]), nothing)})

    assert table.num_rows == 0
    check_table(table, Distances, "distance_matrices")


def test_row_numbers_in_place_of_chunk_ids_are_refused():
    columns = {"rank": np.array([1]), "chunk_id": pa.array([17]), "score": np.array([0.5])}

    with pytest.raises(StageError, match=r"column candidates.chunk_id: .* got int64, want string"):
        build_table(Candidates, {"query_id": np.array(["q"]), "candidates": Ragged(np.array([0, 1]), columns)})


# --- models that would promise what the table check cannot see ------------------------------------


@pytest.mark.parametrize(
    "annotation",
    [
        dict[str, int],
        int | str,
        Literal[1, 2],
        bytes,
        Annotated[str, MaxLen(3)],
        list[Annotated[str, MaxLen(3)]],
        list[Ordered],
    ],
)
def test_a_model_that_the_table_check_cannot_see_through_is_refused(annotation):
    model = type("Odd", (Row,), {"__annotations__": {"odd": annotation}, "__module__": __name__})

    with pytest.raises(TypeError):
        schema(model)


def test_a_row_object_that_breaks_a_rule_says_so():
    with pytest.raises(ValidationError, match=r"items.rank: got 2, want 1, 2, 3 ... in the order they stand"):
        Ordered.model_validate(ordered(rank=2))


# --- size -----------------------------------------------------------------------------------------


def test_a_fault_near_the_end_of_a_million_rows_is_found():
    rows, each = 1_000_000, 2
    scores = np.tile(np.array([0.5, 0.25], dtype=np.float32), rows)
    chunk_ids = pa.array(["b", "a"]).take(pa.array(np.tile([0, 1], rows)))
    columns = {"rank": np.tile([1, 2], rows), "chunk_id": chunk_ids, "score": scores}
    lists = Ragged(offsets_from_lengths(np.full(rows, each)), columns)
    table = build_table(Candidates, {"query_id": pa.array(np.arange(rows)).cast(pa.string()), "candidates": lists})
    check_table(table, Candidates, "oversample")

    scores[-3] = 0.75
    lists = Ragged(lists.offsets, {**columns, "score": scores})
    table = build_table(Candidates, {"query_id": table.column("query_id"), "candidates": lists})

    assert place(refusal(check_table, table, Candidates)) == ("candidates.score", rows - 2, "0.75")
