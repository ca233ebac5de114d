"""Rules: order, uniqueness and lengths, on one row and on a whole table alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.rules import Ranked, Rule, Sorted, Triangle, Unique, UniqueWithin, Violation
from contracts.table import Float32, Int32, Row, rows_to_table


class Item(Row):
    rank: Int32
    chunk_id: str
    score: float
    similarity: Float32
    count: int


class Lists(Row):
    query_id: str | None
    number: int
    candidates: list[Item] | None
    diagonal: list[float] | None
    pairs: list[float] | None


def item(rank: int = 1, chunk_id: str = "a", score: float = 0.0, similarity: float = 0.0, count: int = 0) -> Item:
    return Item(rank=rank, chunk_id=chunk_id, score=score, similarity=similarity, count=count)


def row(*candidates: Item, query_id: str | None = "q", number: int = 0, diagonal: int = 0, pairs: int = 0) -> Lists:
    return Lists(
        query_id=query_id,
        number=number,
        candidates=list(candidates),
        diagonal=[0.0] * diagonal,
        pairs=[0.0] * pairs,
    )


def verdict_by_rows(rule: Rule, rows: list[Lists]) -> Violation | None:
    """The rule's own row-by-row half."""
    for number, one in enumerate(rows):
        found = rule.check_row(one)
        if found is not None:
            return Violation(found.column, number, found.value, found.want)
    return rule.check_rows(rows)


def check(rule: Rule, *rows: Lists) -> Violation | None:
    """Both halves of a rule, which must agree in every field."""
    by_table = rule.check_table(rows_to_table(Lists, rows))
    assert verdict_by_rows(rule, list(rows)) == by_table
    return by_table


def test_unique_names_the_second_row_of_a_repeated_value():
    rows = [row(query_id="a"), row(query_id="b"), row(query_id="c"), row(query_id="b"), row(query_id="a")]

    assert check(Unique("query_id"), *rows) == Violation("query_id", 3, "b", "each value once")
    assert check(Unique("query_id"), *rows[:3]) is None


def test_unique_knows_integers_and_takes_null_for_a_value():
    assert check(Unique("number"), row(number=7), row(number=8), row(number=7)).row == 2
    assert check(Unique("query_id"), row(query_id=None), row(query_id="a")) is None
    assert check(Unique("query_id"), row(query_id=None), row(query_id="a"), row(query_id=None)) == Violation(
        "query_id", 2, None, "each value once"
    )


def test_unique_within_looks_at_each_list_alone():
    once = row(item(chunk_id="a"), item(chunk_id="b"))
    twice = row(item(chunk_id="c"), item(chunk_id="a"), item(chunk_id="c"), item(chunk_id="a"))

    assert check(UniqueWithin("candidates", "chunk_id"), once, once) is None
    assert check(UniqueWithin("candidates", "chunk_id"), once, row(), twice) == Violation(
        "candidates.chunk_id", 2, "c", "each value once in a list"
    )


def test_ranks_count_from_one_in_the_order_they_stand():
    assert check(Ranked("candidates"), row(item(rank=1), item(rank=2)), row(), row(item(rank=1))) is None
    assert check(Ranked("candidates"), row(item(rank=1)), row(item(rank=1), item(rank=3))) == Violation(
        "candidates.rank", 1, 3, "1, 2, 3 ... in the order they stand"
    )
    assert check(Ranked("candidates"), row(item(rank=0))).value == 0


def test_sorted_falls_by_score_and_rises_by_id_on_ties():
    rule = Sorted("candidates", "score")
    sound = row(item(chunk_id="b", score=2.0), item(chunk_id="a", score=1.0), item(chunk_id="c", score=1.0))

    assert check(rule, sound, row(), sound) is None
    assert check(rule, sound, row(item(score=1.0), item(score=1.5))) == Violation(
        "candidates.score", 1, 1.5, "falling score, ties by ascending chunk_id"
    )
    assert check(rule, row(item(chunk_id="b", score=1.0), item(chunk_id="a", score=1.0))).value == 1.0


def test_sorted_does_not_compare_across_lists():
    low, high = row(item(chunk_id="z", score=-1.0)), row(item(chunk_id="a", score=5.0))

    assert check(Sorted("candidates", "score"), low, high, low) is None


def test_sorted_ties_are_ties_of_the_column_not_of_python():
    # The second score is larger in float64; in the float32 column both are the same number.
    rising = row(item(chunk_id="a", similarity=0.1), item(chunk_id="b", similarity=0.1 + 1e-10))

    assert check(Sorted("candidates", "similarity"), rising) is None


def test_sorted_takes_minus_zero_for_zero_and_orders_large_integers_exactly():
    zeros = row(item(chunk_id="a", score=-0.0), item(chunk_id="b", score=0.0), item(chunk_id="c", score=-0.0))
    large = row(item(chunk_id="a", count=2**60), item(chunk_id="b", count=2**60 + 1))

    assert check(Sorted("candidates", "score"), zeros) is None
    assert check(Sorted("candidates", "count"), large).value == 2**60 + 1


def test_ties_are_broken_by_code_point():
    # In UTF-16 the order of these two would be the other way round.
    ids = ["\ufb01", "\U0001f600"]

    assert check(Sorted("candidates", "score"), row(*[item(chunk_id=text) for text in ids])) is None
    assert check(Sorted("candidates", "score"), row(*[item(chunk_id=text) for text in reversed(ids)])) is not None


@pytest.mark.parametrize(("count", "pairs"), [(0, 0), (1, 0), (2, 1), (3, 3), (15, 105)])
def test_a_triangle_has_half_of_n_times_n_less_one_values(count, pairs):
    rule = Triangle("diagonal", "pairs")
    sound = row(diagonal=count, pairs=pairs)

    assert check(rule, sound) is None
    assert check(rule, sound, row(diagonal=count, pairs=pairs + 1)) == Violation(
        "pairs", 1, f"{pairs + 1} values", f"{pairs} values, n(n-1)/2 of diagonal"
    )


EVERY_RULE: list[Rule] = [
    Unique("query_id"),
    Unique("number"),
    UniqueWithin("candidates", "chunk_id"),
    Ranked("candidates"),
    Sorted("candidates", "score"),
    Sorted("candidates", "similarity"),
    Sorted("candidates", "count"),
    Triangle("diagonal", "pairs"),
]


@pytest.mark.parametrize("rule", EVERY_RULE, ids=repr)
def test_a_table_without_rows_and_lists_without_items_break_no_rule(rule):
    assert check(rule) is None
    assert check(rule, row()) is None
    assert rule.check_table(rows_to_table(Lists, [row(item())]).slice(1)) is None


@pytest.mark.parametrize("rule", EVERY_RULE, ids=repr)
def test_a_null_list_counts_as_an_empty_one(rule):
    nothing = Lists(query_id="a", number=1, candidates=None, diagonal=None, pairs=None)

    assert check(rule, nothing, row(query_id="b")) is None


def oracle(rule: Rule, row_: Lists) -> bool:
    """Whether a row is sound by the plainest reading of a rule."""
    items = row_.candidates or []
    if isinstance(rule, UniqueWithin):
        return len({one.chunk_id for one in items}) == len(items)
    if isinstance(rule, Ranked):
        return [one.rank for one in items] == [place + 1 for place in range(len(items))]
    if isinstance(rule, Sorted):
        return items == sorted(items, key=lambda one: (-getattr(one, rule.field), one.chunk_id))
    if isinstance(rule, Triangle):
        count = len(row_.diagonal or [])
        return len(row_.pairs or []) == sum(range(count))
    return True


few_numbers = st.sampled_from([-1.0, -0.0, 0.0, 0.1, 0.1 + 1e-10, 2.5])
any_item = st.builds(
    Item,
    rank=st.integers(0, 3),
    chunk_id=st.sampled_from(["a", "b", "ä", "\ufb01", "\U0001f600"]),
    score=few_numbers,
    similarity=few_numbers,
    count=st.integers(-1, 1),
)
any_row = st.builds(
    Lists,
    query_id=st.none() | st.sampled_from("abcdef"),
    number=st.integers(0, 20),
    candidates=st.none()
    | st.lists(any_item, max_size=4)
    | st.lists(any_item, max_size=3).map(lambda items: sorted(items, key=lambda one: (-one.score, one.chunk_id))),
    diagonal=st.none() | st.lists(st.just(0.0), max_size=3),
    pairs=st.none() | st.lists(st.just(0.0), max_size=3),
)


@pytest.mark.parametrize("rule", EVERY_RULE, ids=repr)
@settings(max_examples=60, deadline=None)
@given(rows=st.lists(any_row, max_size=6), before=st.integers(0, 2))
def test_a_rule_finds_the_first_row_that_the_oracle_finds(rule, rows, before):
    table = rows_to_table(Lists, [row(item(rank=9), item(rank=9))] * before + rows).slice(before)

    found = rule.check_table(table)

    assert found == verdict_by_rows(rule, rows)
    if isinstance(rule, Unique):
        values: list[Any] = [getattr(one, rule.name) for one in rows]
        bad = [number for number, value in enumerate(values) if value in values[:number]]
    else:
        bad = [number for number, one in enumerate(rows) if not oracle(rule, one)]
    assert (None if found is None else found.row) == (bad[0] if bad else None)


def test_a_repeat_far_down_a_long_table_is_found():
    rows = 200_000
    ids = np.char.add("q", np.arange(rows).astype(str))
    ids[-1] = ids[17]

    found = Unique("id").check_table(pa.table({"id": ids}))

    assert found == Violation("id", rows - 1, "q17", "each value once")
