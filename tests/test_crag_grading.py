"""crag_grading: grades, who leaves, who fills the slots, and the one corrective search."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from contracts.columns import read_only
from contracts.errors import ConfigurationError, ModelError, RefusedError, TransientError
from contracts.evidence import EvidencePlan, Family, RerankedRanking, RescuedRanking, Shape
from contracts.table import check_table, schema
from corpus.corpus import Corpus
from corpus.query_rewriting import rewrite_queries
from corpus.scope import Scope, Scopes
from corpus.selection import fill_slots
from flows.quarantine import is_fault_of_data
from models.file_grader import FileGrader
from models.grader import Pair
from stages.crag_grading import STAGE, Params, grade_scores, query_actions
from stages.stage import StageOutput
from tests.corpora import make_corpus, make_queries

PLAN = EvidencePlan(
    name="test",
    version="1",
    shapes=[
        Shape(
            name="refund",
            recognise=["refund"],
            families=[
                Family(name="policy", source="^policies/", rescue_query="policy"),
                Family(name="approval", source="^approvals/", rescue_query="approval"),
            ],
        )
    ],
)


# The bands that the cases below are worked out with.
BANDS = {"upper": 0.5, "lower": 0.05}


def logit(probability: float) -> float:
    """The logit that a sigmoid turns into this probability."""
    return math.log(probability / (1 - probability))


class ReadByHand:
    """A cross-encoder whose probabilities were written down by hand; it keeps what it was asked."""

    model_id = "by-hand"

    def __init__(self, probabilities: Mapping[tuple[str, str], float]) -> None:
        self.probabilities = probabilities
        self.calls: list[list[tuple[str, str]]] = []

    def score(self, queries: Sequence[str], passages: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        pairs = list(zip(queries, passages, strict=True))
        self.calls.append(pairs)
        return np.array([logit(self.probabilities[pair]) for pair in pairs], dtype=np.float32)


class HashedModel:
    """A cross-encoder whose logits depend on the pair alone, spread over a coarse grid."""

    model_id = "hashed"

    def score(self, queries: Sequence[str], passages: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        pairs = zip(queries, passages, strict=True)
        return np.array([zlib.crc32(f"{q}|{p}".encode()) % 9 - 4 for q, p in pairs], dtype=np.float32)


class HashedGrader:
    """A grader whose grades depend on the pair alone; of some it has none."""

    model_id = "hashed"

    def grade(self, pairs: Sequence[Pair]) -> list[Any]:
        return [self.of(pair.query, pair.passage) for pair in pairs]

    def of(self, query: str, passage: str) -> Any:
        return [None, "correct", "ambiguous", "incorrect"][zlib.crc32(f"{passage}|{query}".encode()) % 4]


def candidate(chunk_id: str, score: float, *, model: float | None = None, place: int | None = None, **rest: Any) -> Any:
    """A blended candidate; its rank is given by its place in the list."""
    defaults = {"retrieval": 0.0, "lexical": 0.0, "exact_bonus": 0.0, "families": [], "rescued": False}
    return {
        "chunk_id": chunk_id, "score": score, "cross_encoder": model, "selected_rank": place, **defaults, **rest,
    }  # fmt: skip


def reranked(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Blended rankings from rows that name at least their candidates."""
    defaults = {
        "rerank_status": "cross_encoder", "required": [], "slots": 2, "max_per_document": None, "near_duplicate": None,
        "lexical_weight": 1.0, "spread": False,
    }  # fmt: skip
    made = []
    for number, row in enumerate(rows):
        given = {"query_id": f"q-{number:04d}", **defaults, **row}
        graded = "cross_encoder" if given["rerank_status"] == "cross_encoder" else "score"
        candidates = [
            {"absolute_score": one[graded], **one, "rank": rank} for rank, one in enumerate(row["candidates"], start=1)
        ]
        made.append({**given, "candidates": candidates})
    table = pa.Table.from_pylist(made, schema=schema(RerankedRanking))
    check_table(table, RerankedRanking, "blended_rerank")
    return table


def rescued(shapes: Sequence[str | None]) -> pa.Table:
    rows = [{"query_id": f"q-{n:04d}", "shape": s, "coverage": [], "candidates": []} for n, s in enumerate(shapes)]
    return pa.Table.from_pylist(rows, schema=schema(RescuedRanking))


def grade(
    corpus: Corpus,
    texts: Sequence[str | Mapping[str, Any]],
    rankings: Sequence[Mapping[str, Any]],
    *,
    model: Any = None,
    grader: Any = None,
    shapes: Sequence[str | None] | None = None,
    plan: EvidencePlan | None = None,
    **settings_of: Any,
) -> StageOutput:
    """Runs the stage with all its checks."""
    inputs = {
        "queries": make_queries([text if isinstance(text, Mapping) else {"text": text} for text in texts]),
        "family_rescue": rescued(shapes or [None] * len(texts)),
        "blended_rerank": reranked(rankings),
    }
    keyword_search = corpus.keyword_search(1.5, 0.75, 0.25)
    resources = {
        "corpus": corpus, "keyword_search": keyword_search, "cross_encoder": model, "grader": grader, "plan": plan,
    }  # fmt: skip
    return STAGE.checked_run(inputs, resources, Params(**(BANDS | settings_of)))


def passages(output: StageOutput, query: int = 0) -> list[tuple[str, str, bool, str]]:
    """(chunk, grade, kept, origin) of each recorded passage of a query."""
    found = output.table.column("candidates")[query].as_py()
    return [(one["chunk_id"], one["grade"], one["kept"], one["origin"]) for one in found]


REFUND = ReadByHand({("refund", "refund"): 0.9})


def simple_corpus() -> Corpus:
    return make_corpus([{"chunk_id": f"c{n}", "text": f"text number{n}"} for n in range(6)])


def test_both_limits_belong_to_the_better_grade() -> None:
    scores = np.array([0.0, 0.049, 0.05, 0.499, 0.5, 1.0])
    assert grade_scores(scores, 0.05, 0.5).tolist() == [0, 0, 1, 1, 2, 2]
    assert grade_scores(scores, 0.5, 0.5).tolist() == [0, 0, 0, 0, 2, 2], "equal limits leave nothing ambiguous"
    assert grade_scores(scores, 0.0, 1.0).tolist() == [1, 1, 1, 1, 1, 2]


def test_the_action_is_the_strongest_grade_and_incorrect_without_passages() -> None:
    queries, grades = np.array([0, 0, 1, 1, 3]), np.array([0, 2, 0, 1, 0], dtype=np.int8)
    assert query_actions(queries, grades, 4).tolist() == [2, 1, 0, 0]


LEFT, KEPT, UNUSABLE, USABLE = range(4)


def come_up(passages_of: Sequence[Sequence[tuple[int, int, int, int]]], **bounds: Any) -> list[bool]:
    """What comes up for queries whose passages are (state, text, document, degrees of the vector's angle)."""
    flat = np.array([one for passages in passages_of for one in passages], dtype=np.int64).reshape(-1, 4)
    angles = np.deg2rad(np.arange(181))
    count = len(passages_of)
    return fill_slots(
        np.cumsum([0, *map(len, passages_of)]),
        flat[:, 0],
        flat[:, 1],
        flat[:, 2],
        flat[:, 3],
        read_only(np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)),
        np.array(bounds.get("room", [9] * count)),
        bounds.get("limit", 9),
        np.array(bounds.get("max_per_document", [9] * count)),
        np.array(bounds.get("near_duplicate", [np.inf] * count)),
    ).tolist()


def test_options_come_up_until_the_slots_are_full() -> None:
    queries = [
        [(UNUSABLE, 0, 0, 0), (USABLE, 1, 0, 0), (USABLE, 2, 0, 0), (USABLE, 3, 0, 0)],
        [(USABLE, 4, 0, 0), (UNUSABLE, 5, 0, 0)],
        [(USABLE, 6, 0, 0)],
    ]
    # Query 0 looks at the wrong one and fills both slots; query 1 is full after its first; query 2 has none.
    assert come_up(queries, room=[2, 1, 0]) == [True, True, True, False, True, False, False]
    assert come_up(queries, room=[2, 1, 1], limit=1) == [True, False, False, False, True, False, True]


def test_only_the_first_of_equal_texts_comes_up_and_none_that_was_seen() -> None:
    passages_of = [(KEPT, 0, 0, 0), (LEFT, 1, 1, 0), (USABLE, 1, 2, 0), (USABLE, 2, 3, 0), (USABLE, 2, 4, 0)]
    assert come_up([passages_of]) == [False, False, False, True, False]


def test_a_document_takes_no_more_fills_than_its_bound_less_what_is_kept() -> None:
    passages_of = [
        (KEPT, 0, 7, 0), (LEFT, 1, 8, 0),
        (USABLE, 2, 7, 0), (UNUSABLE, 3, 8, 0), (USABLE, 4, 8, 0), (USABLE, 5, 8, 0), (USABLE, 6, 9, 0),
    ]  # fmt: skip
    # Document 7 is full, 8 is not: its passage left, its unusable option takes no slot, its next one does.
    assert come_up([passages_of], max_per_document=[1]) == [False, False, False, True, True, False, True]
    assert come_up([passages_of], max_per_document=[2])[2:] == [True] * 5
    # A text that the bound held back has not been seen: its copy in another document may come up.
    copies = [(KEPT, 0, 7, 0), (USABLE, 1, 7, 0), (USABLE, 1, 8, 0)]
    assert come_up([copies], max_per_document=[1]) == [False, False, True]


def test_no_near_copy_of_what_is_kept_comes_up() -> None:
    passages_of = [
        (KEPT, 0, 0, 0), (LEFT, 1, 1, 90),
        (USABLE, 2, 2, 59), (USABLE, 3, 3, 91), (USABLE, 4, 4, 140), (USABLE, 5, 5, 60), (UNUSABLE, 6, 6, 160),
    ]  # fmt: skip
    # Cosine 0.5 is 60 degrees. 59 is near the kept 0; 91 is near the one at 90 alone, which left, and fills a
    # slot; 140 is near that fill, and so is 60; 160 is 69 away from it.
    assert come_up([passages_of], near_duplicate=[0.5]) == [False, False, False, True, False, False, True]
    # The bound itself is near, in spite of rounding; each query has its own.
    border = [(KEPT, 0, 0, 0), (USABLE, 1, 1, 60)]
    other = [(KEPT, 2, 0, 0), (USABLE, 3, 1, 60)]
    assert come_up([border, other], near_duplicate=[0.5, 0.51]) == [False, False, False, True]


def test_an_incorrect_passage_leaves_and_the_next_ranked_takes_its_slot() -> None:
    ranking = {
        "candidates": [
            candidate("c0", 0.9, model=0.8, place=1),
            candidate("c1", 0.8, model=0.01, place=2),
            candidate("c2", 0.7, model=0.02),
            candidate("c3", 0.6, model=0.3),
            candidate("c4", 0.5, model=0.9),
        ]
    }
    output = grade(simple_corpus(), ["question"], [ranking], model=ReadByHand({}))
    assert passages(output) == [
        ("c0", "correct", True, "selected"),
        ("c1", "incorrect", False, "selected"),
        ("c2", "incorrect", False, "next_ranked"),
        ("c3", "ambiguous", True, "next_ranked"),
    ], "c2 is read and refused, c3 fills the slot, c4 is never looked at"
    row = output.table.to_pylist()[0]
    assert (row["action_before"], row["action"]) == ("correct", "correct")
    assert (row["corrective_query"], row["corrective_outcome"]) == (None, "not_needed")
    assert output.account.model_dump() == {
        "candidates_in": 5, "added": {}, "removed": {"not_selected": 1}, "candidates_out": 4,
    }  # fmt: skip


def test_the_selection_keeps_its_own_order() -> None:
    ranking = {
        "slots": 3,
        "candidates": [
            candidate("c0", 0.9, model=0.8, place=2),
            candidate("c1", 0.8, model=0.7, place=3),
            candidate("c2", 0.7, model=0.6, place=1, families=["policy"]),
        ],
    }
    output = grade(simple_corpus(), ["question"], [ranking], model=ReadByHand({}))
    assert [one[0] for one in passages(output)] == ["c2", "c0", "c1"]
    assert [one["families"] for one in output.table.column("candidates")[0].as_py()] == [["policy"], [], []]


def test_selected_passages_that_the_model_has_not_read_are_read_in_one_call() -> None:
    corpus = make_corpus([{"chunk_id": "c0", "text": "body", "title": "Head"}, {"chunk_id": "c1", "text": "other"}])
    model = ReadByHand({("first", "Head\nbody"): 0.75, ("second", "other"): 0.25})
    rankings = [
        {"candidates": [candidate("c0", 0.9, place=1)], "slots": 1},
        {"candidates": [candidate("c1", 0.9, place=1)], "slots": 1},
    ]
    output = grade(corpus, ["first", "second"], rankings, model=model)
    assert model.calls == [[("first", "Head\nbody"), ("second", "other")]]
    scores = [one[0]["score"] for one in output.table.column("candidates").to_pylist()]
    assert scores == pytest.approx([0.75, 0.25], abs=1e-7)


def test_the_next_ranked_never_cost_a_call_of_the_model() -> None:
    ranking = {
        "candidates": [
            candidate("c0", 0.9, model=0.01, place=1),
            candidate("c1", 0.8),
            candidate("c2", 0.7, model=0.6),
        ]
    }
    model = ReadByHand({})
    output = grade(simple_corpus(), ["unheard"], [ranking], model=model)
    assert [one[0] for one in passages(output)] == ["c0", "c2"]
    assert model.calls == []


@pytest.mark.parametrize("status", ["no_cross_encoder", "disabled"])
def test_without_a_cross_encoder_the_blended_score_is_graded(status: str) -> None:
    ranking = {
        "rerank_status": status,
        "candidates": [candidate("c0", 0.6, place=1), candidate("c1", 0.4, place=2), candidate("c2", 0.3)],
    }
    output = grade(simple_corpus(), ["question"], [ranking])
    assert passages(output) == [("c0", "correct", True, "selected"), ("c1", "ambiguous", True, "selected")]


def test_no_text_comes_in_twice() -> None:
    chunks = [{"chunk_id": "c0", "text": "same"}, {"chunk_id": "c1", "text": "same"}, {"chunk_id": "c2", "text": "new"}]
    corpus = make_corpus(chunks, collapse_identical_texts=False)
    ranking = {
        "slots": 3,
        "candidates": [
            candidate("c0", 0.9, model=0.9, place=1),
            candidate("c1", 0.8, model=0.9),
            candidate("c2", 0.7, model=0.9),
        ],
    }
    output = grade(corpus, ["question"], [ranking], model=ReadByHand({}))
    assert [one[0] for one in passages(output)] == ["c0", "c2"]


def bounded_corpus() -> Corpus:
    """Chunks of two documents at given angles; those with `refund` are found by the corrective search."""
    angles = np.deg2rad([0, 90, 5, 180, 85, 270, 275, 3])
    texts = ["a", "b", "c", "d", "refund e", "refund f f", "refund g g g", "refund h h h h"]
    return make_corpus(
        [
            {"chunk_id": f"c{n}", "text": text, "document_id": "even" if n % 2 == 0 else "odd"}
            for n, text in enumerate(texts)
        ],
        np.stack([np.cos(angles), np.sin(angles)], axis=1),
    )


def bounded_ranking(**bounds: Any) -> dict[str, Any]:
    """c0 is kept and c1, at 90 degrees in the document `odd`, leaves; c2 and c3 stand behind them."""
    return {
        "slots": 4,
        "candidates": [
            candidate("c0", 0.9, model=0.4, place=1),
            candidate("c1", 0.8, model=0.01, place=2),
            candidate("c2", 0.7, model=0.3),
            candidate("c3", 0.6, model=0.3),
        ],
        **bounds,
    }


REFUNDS = ReadByHand({("refund", f"refund {letters}"): 0.2 for letters in ("e", "f f", "g g g", "h h h h")})


def test_no_fill_takes_a_document_beyond_its_bound() -> None:
    output = grade(bounded_corpus(), ["refund"], [bounded_ranking(max_per_document=1)], model=REFUNDS)
    # c0 has used up `even`; `odd` is free, since c1 left, until c3 takes it. So every hit is passed over unread.
    assert passages(output) == [
        ("c0", "ambiguous", True, "selected"),
        ("c1", "incorrect", False, "selected"),
        ("c3", "ambiguous", True, "next_ranked"),
    ]
    assert output.table.column("corrective_outcome").to_pylist() == ["ok"]
    ranking = bounded_ranking(max_per_document=2)
    wider = grade(bounded_corpus(), ["refund"], [{**ranking, "candidates": ranking["candidates"][:2]}], model=REFUNDS)
    # c4 and c5 fill up `even` to two and `odd` to one; c6 was read by then, and `odd` has a place for c7.
    assert passages(wider)[2:] == [
        ("c4", "ambiguous", True, "corrective"),
        ("c5", "ambiguous", True, "corrective"),
        ("c6", "ambiguous", False, "corrective"),
        ("c7", "ambiguous", True, "corrective"),
    ]
    assert output.account.removed == {"not_selected": 1}


def test_no_fill_is_a_near_copy_of_what_is_kept() -> None:
    model = ReadByHand(REFUNDS.probabilities)
    output = grade(bounded_corpus(), ["refund"], [bounded_ranking(near_duplicate=0.9, slots=5)], model=model)
    # c2 is near c0. c4 is near c1 alone, which left. c6 is near c5, which fills a slot; c7 is near c0 and not read.
    assert passages(output)[2:] == [
        ("c3", "ambiguous", True, "next_ranked"),
        ("c4", "ambiguous", True, "corrective"),
        ("c5", "ambiguous", True, "corrective"),
        ("c6", "ambiguous", False, "corrective"),
    ]
    assert model.calls == [[("refund", "refund e"), ("refund", "refund f f"), ("refund", "refund g g g")]]
    # What is passed over unread does not count towards the limit, and a slot stays empty rather than near.
    unbounded = grade(bounded_corpus(), ["refund"], [bounded_ranking(slots=5)], model=model)
    assert [one[0] for one in passages(unbounded) if one[2]] == ["c0", "c2", "c3", "c4", "c5"]


def test_the_largest_settings_work_on_a_small_corpus() -> None:
    most = 2**31 - 1
    rankings = [{"candidates": [], "slots": most, "max_per_document": most, "rerank_status": "no_cross_encoder"}]
    numbers = {"corrective_depth": most, "corrective_terms": most, "corrective_limit": most}
    output = grade(simple_corpus(), ["text number3"], rankings, **numbers)
    assert sorted(one[0] for one in passages(output)) == ["c0", "c1", "c2", "c3", "c4", "c5"]


def test_the_corrective_search_fills_what_the_ranking_leaves_free() -> None:
    corpus = make_corpus(
        [
            {"chunk_id": "c0", "text": "the weather"},
            {"chunk_id": "c1", "text": "the refund of a parcel", "source": "policies/a.md"},
            {"chunk_id": "c2", "text": "refund refund", "source": "approvals/b.md"},
            {"chunk_id": "c3", "text": "parcel refund form", "source": "other/c.md"},
        ]
    )
    text = "the refund of my parcel"
    model = ReadByHand(
        {(text, "the refund of a parcel"): 0.9, (text, "refund refund"): 0.02, (text, "parcel refund form"): 0.2}
    )
    ranking = {"slots": 3, "required": ["policy", "approval"], "candidates": [candidate("c0", 0.2, model=0.2, place=1)]}
    output = grade(corpus, [text], [ranking], model=model, shapes=["refund"], plan=PLAN, corrective_terms=2)
    row = output.table.to_pylist()[0]
    # In the corpus: the 2, refund 3, of 1, parcel 2 chunks; my is unknown. Two rarest: of, then the (before parcel).
    assert row["corrective_query"] == "of the"
    assert row["corrective_outcome"] == "ok"
    assert passages(output) == [("c0", "ambiguous", True, "selected"), ("c1", "correct", True, "corrective")]
    assert [one["families"] for one in row["candidates"]] == [[], ["policy"]]
    assert (row["action_before"], row["action"]) == ("ambiguous", "correct")
    assert output.account.added == {"corrective": 1}

    wider = grade(corpus, [text], [ranking], model=model, shapes=["refund"], plan=PLAN, corrective_terms=6)
    assert wider.table.to_pylist()[0]["corrective_query"] == "of the parcel refund"
    assert sorted(passages(wider)[1:]) == [
        ("c1", "correct", True, "corrective"),
        ("c2", "incorrect", False, "corrective"),
        ("c3", "ambiguous", True, "corrective"),
    ]
    families = {one["chunk_id"]: one["families"] for one in wider.table.column("candidates")[0].as_py()}
    assert families == {"c0": [], "c1": ["policy"], "c2": ["approval"], "c3": []}


def test_without_a_free_slot_nothing_is_searched_and_no_model_is_asked() -> None:
    corpus = make_corpus([{"chunk_id": "c0", "text": "weather"}, {"chunk_id": "c1", "text": "refund"}])
    ranking = {"slots": 1, "candidates": [candidate("c0", 0.2, model=0.2, place=1)]}
    output = grade(corpus, ["refund"] * 2, [ranking, {**ranking, "slots": 2}], model=REFUND)
    assert passages(output) == [("c0", "ambiguous", True, "selected")]
    assert passages(output, 1) == [("c0", "ambiguous", True, "selected"), ("c1", "correct", True, "corrective")]
    assert output.table.column("corrective_outcome").to_pylist() == ["no_room", "ok"]
    assert output.table.column("corrective_query").to_pylist() == [None, "refund"]
    assert output.calls == {"corrective_search": {"ok": 1}}
    # Slots that the next-ranked have filled are full too.
    behind = {"candidates": [candidate(f"c{n}", 0.9, model=chance, place=n + 1) for n, chance in ((0, 0.01), (1, 0.2))]}
    behind["candidates"].append(candidate("c2", 0.8, model=0.2))
    assert grade(simple_corpus(), ["text"], [behind], model=ReadByHand({})).table.column(
        "corrective_outcome"
    ).to_pylist() == ["no_room"]


def test_a_corrective_hit_that_finds_the_slots_taken_is_graded_but_not_kept() -> None:
    corpus = make_corpus([{"chunk_id": "c0", "text": "refund"}, {"chunk_id": "c1", "text": "refund refund"}])
    model = ReadByHand({("refund", "refund"): 0.2, ("refund", "refund refund"): 0.9})
    output = grade(corpus, ["refund"], [{"slots": 1, "candidates": []}], model=model)
    assert passages(output) == [("c0", "ambiguous", True, "corrective"), ("c1", "correct", False, "corrective")]
    # The action is over what stays: a correct passage that found no room helps nobody.
    assert output.table.column("action").to_pylist() == ["ambiguous"]


class Judge:
    """A grader whose grades are written down by chunk; None for the others. It keeps what it was asked."""

    model_id = "judge"

    def __init__(self, grades: Mapping[str, Any]) -> None:
        self.grades = grades
        self.calls: list[list[str]] = []

    def grade(self, pairs: Sequence[Pair]) -> list[Any]:
        self.calls.append([pair.chunk_id for pair in pairs])
        return [self.grades.get(pair.chunk_id) for pair in pairs]


def by_whom(output: StageOutput, query: int = 0) -> list[tuple[str, str, str]]:
    """(chunk, grade, graded by) of each recorded passage of a query."""
    found = output.table.column("candidates")[query].as_py()
    return [(one["chunk_id"], one["grade"], one["graded_by"]) for one in found]


def selection(*chances: float, slots: int | None = None) -> dict[str, Any]:
    """Selected candidates c0, c1 ... whom the model gives these probabilities."""
    chosen = [candidate(f"c{n}", 0.9 - n / 100, model=chance, place=n + 1) for n, chance in enumerate(chances)]
    return {"slots": slots or len(chances), "candidates": chosen}


def test_the_grader_overrules_the_score_where_it_has_a_say() -> None:
    judge = Judge({"c0": "incorrect", "c1": "correct"})
    output = grade(
        simple_corpus(), ["text"], [selection(0.9, 0.01, 0.3)], model=ReadByHand({}), grader=judge, corrective_limit=1
    )
    assert by_whom(output)[:3] == [("c0", "incorrect", "llm"), ("c1", "correct", "llm"), ("c2", "ambiguous", "score")]
    row = output.table.to_pylist()[0]
    assert [one["score"] for one in row["candidates"]] == [0.9, 0.01, 0.3], "the score stays the model's"
    assert [one["kept"] for one in row["candidates"]] == [False, True, True]
    assert (row["action_before"], row["action"]) == ("correct", "correct")
    assert judge.calls == [["c0", "c1", "c2"]]
    assert (output.calls, output.graded_by) == ({}, {"llm": 2, "score": 1})


def test_the_grader_reads_what_the_model_reads() -> None:
    class Reader(Judge):
        def grade(self, pairs: Sequence[Pair]) -> list[Any]:
            self.read = list(pairs)
            return [None] * len(pairs)

    corpus = make_corpus([{"chunk_id": "c0", "text": "body", "title": "Head"}])
    reader = Reader({})
    query = {"text": "Why  ME", "normalised_text": "why me"}
    grade(corpus, [query], [selection(0.9)], model=ReadByHand({}), grader=reader)
    assert reader.read == [Pair("q-0000", "c0", "why me", "Head\nbody")]


def test_the_next_ranked_are_asked_in_one_batch_of_those_that_come_up_for_a_slot_by_their_score() -> None:
    ranking = selection(0.9, 0.01, 0.01, slots=3)
    ranking["candidates"] += [
        candidate("c3", 0.7, model=0.02), candidate("c4", 0.6, model=0.2), candidate("c5", 0.5, model=0.9),
    ]  # fmt: skip
    # Two slots come free. c3 is incorrect by its score and not asked; c4 is refused, and no third one is asked.
    judge = Judge({"c1": "incorrect", "c2": "incorrect", "c4": "incorrect", "c5": "correct"})
    corpus = make_corpus([{"chunk_id": f"c{n}", "text": f"number{n}"} for n in range(7)])
    ranking["candidates"].append(candidate("c6", 0.4, model=0.9))
    output = grade(corpus, ["zebra"], [ranking], model=ReadByHand({}), grader=judge)
    assert judge.calls == [["c0", "c1", "c2"], ["c4", "c5"]]
    assert by_whom(output)[3:] == [("c3", "incorrect", "score"), ("c4", "incorrect", "llm"), ("c5", "correct", "llm")]
    assert [one[0] for one in passages(output) if one[2]] == ["c0", "c5"]


def test_corrective_hits_that_pass_by_their_score_are_asked_in_one_batch() -> None:
    refunds = [{"chunk_id": f"c{n}", "text": f"refund {'x ' * n}"} for n in range(4)]
    corpus = make_corpus([*refunds, *({"chunk_id": f"d{n}", "text": f"weather {n}"} for n in range(9))])
    texts = corpus.column("text").to_pylist()
    model = ReadByHand({("refund", texts[n]): chance for n, chance in enumerate([0.2, 0.01, 0.9, 0.3])})
    judge = Judge({"c0": "incorrect", "c1": "correct", "c2": "ambiguous"})
    output = grade(corpus, ["refund"], [{"slots": 2, "candidates": []}], model=model, grader=judge)
    assert judge.calls == [["c0", "c2", "c3"]]
    assert by_whom(output) == [
        ("c0", "incorrect", "llm"), ("c1", "incorrect", "score"), ("c2", "ambiguous", "llm"),
        ("c3", "ambiguous", "score"),
    ]  # fmt: skip
    assert [one[0] for one in passages(output) if one[2]] == ["c2", "c3"]


def test_decisions_of_people_come_before_the_grader_and_before_the_score() -> None:
    ranking = selection(0.9, 0.01, slots=2)
    ranking["candidates"] += [candidate("c2", 0.7, model=0.02), candidate("c3", 0.6, model=0.9)]
    judge = Judge({"c0": "correct", "c1": "correct"})
    decided = FileGrader(
        {("q-0000", "c1"): "incorrect", ("q-0000", "c2"): "correct", ("q-0001", "c0"): "correct"}, judge
    )
    output = grade(simple_corpus(), ["text"], [ranking], model=ReadByHand({}), grader=decided)
    # c2 is incorrect by its score, but somebody has read it: it takes the slot, and c3 never comes up.
    assert by_whom(output) == [("c0", "correct", "llm"), ("c1", "incorrect", "file"), ("c2", "correct", "file")]
    assert judge.calls == [["c0"]], "what people have decided is not asked again"
    assert (output.calls, output.graded_by) == ({}, {"llm": 1, "file": 2})
    alone = FileGrader({("q-0000", "c0"): "incorrect"})
    output = grade(simple_corpus(), ["zebra"], [selection(0.9, 0.9)], model=ReadByHand({}), grader=alone)
    assert by_whom(output) == [("c0", "incorrect", "file"), ("c1", "correct", "score")]


def test_switched_off_no_grader_is_asked() -> None:
    judge = FileGrader({("q-0000", "c0"): "incorrect"}, Judge({"c1": "incorrect"}))
    output = grade(simple_corpus(), ["text"], [selection(0.9, 0.2)], model=ReadByHand({}), grader=judge, enabled=False)
    assert by_whom(output) == [("c0", "correct", "score"), ("c1", "ambiguous", "score")]


def test_a_shard_without_passages_asks_no_grader() -> None:
    judge = Judge({})
    grade(simple_corpus(), ["zebra"], [{"candidates": []}], model=ReadByHand({}), grader=judge)
    assert judge.calls == []


@pytest.mark.parametrize(
    "answer", [[], ["correct"] * 2, ["true"], [True], ["Correct"]], ids=["none", "two", "word", "bool", "capital"]
)
def test_what_is_no_grade_is_an_error_and_never_correct(answer: list[Any]) -> None:
    class Broken(Judge):
        def grade(self, pairs: Sequence[Pair]) -> list[Any]:
            return answer

    with pytest.raises(ModelError, match="grader judge: gave no usable grades") as refused:
        grade(simple_corpus(), ["text"], [selection(0.3)], model=ReadByHand({}), grader=Broken({}))
    assert is_fault_of_data(refused.value), "the query becomes a dead letter, and its neighbours go on"


@pytest.mark.parametrize("kind", [ModelError, TransientError, RefusedError])
def test_an_error_of_the_grader_stops_the_shard_as_it_is(kind: type[ModelError]) -> None:
    class Failing(Judge):
        def grade(self, pairs: Sequence[Pair]) -> list[Any]:
            raise kind("grader", "did not answer", next_step="Wait.")

    with pytest.raises(kind, match="did not answer"):
        grade(simple_corpus(), ["text"], [selection(0.9)], model=ReadByHand({}), grader=Failing({}))


def test_the_limit_counts_new_hits_and_passes_over_considered_ones() -> None:
    refunds = [{"chunk_id": f"c{n}", "text": f"refund {'x ' * n}"} for n in range(5)]
    corpus = make_corpus([*refunds, *({"chunk_id": f"d{n}", "text": f"weather {n}"} for n in range(9))])
    text = "refund"
    model = ReadByHand({(text, chunk): 0.2 for chunk in corpus.column("text").to_pylist()})
    ranking = {"slots": 5, "candidates": [candidate("c0", 0.2, model=0.2, place=1)]}
    output = grade(corpus, [text], [ranking], model=model, corrective_limit=2)
    assert [one[0] for one in passages(output)] == ["c0", "c1", "c2"], "shorter chunks score higher; c0 is not new"
    shallow = grade(corpus, [text], [ranking], model=model, corrective_limit=2, corrective_depth=2)
    assert [one[0] for one in passages(shallow)] == ["c0", "c1"], "the second hit is the last one looked at"


def test_a_ranked_candidate_that_comes_back_through_the_search_is_not_counted_as_added() -> None:
    corpus = make_corpus([{"chunk_id": "c0", "text": "weather"}, {"chunk_id": "c1", "text": "refund"}])
    ranking = {"candidates": [candidate("c0", 0.2, model=0.2, place=1), candidate("c1", 0.1)]}
    output = grade(corpus, ["refund"], [ranking], model=ReadByHand({("refund", "refund"): 0.9}))
    assert passages(output)[1] == ("c1", "correct", True, "corrective")
    assert output.account.model_dump() == {"candidates_in": 2, "added": {}, "removed": {}, "candidates_out": 2}


def test_without_a_cross_encoder_corrective_hits_are_graded_by_their_share_of_the_query_words() -> None:
    corpus = make_corpus([{"chunk_id": "c0", "text": "weather"}, {"chunk_id": "c1", "text": "refund of parcels"}])
    ranking = {"rerank_status": "no_cross_encoder", "candidates": []}
    output = grade(corpus, ["refund for my parcels"], [ranking])
    found = output.table.column("candidates")[0].as_py()
    assert [(one["chunk_id"], one["score"]) for one in found] == [("c1", 0.5)], "refund and parcels, of four words"


def test_the_corrective_search_sees_what_the_query_may_see() -> None:
    corpus = make_corpus(
        [
            {"chunk_id": "c0", "text": "refund secret", "acl": ["board"]},
            {"chunk_id": "c1", "text": "refund open", "acl": None},
        ]
    )
    rankings = [{"rerank_status": "no_cross_encoder", "candidates": []}] * 2
    output = grade(corpus, [{"text": "refund"}, {"text": "refund", "groups": ["board"]}], rankings)
    assert [sorted(one[0] for one in passages(output, query)) for query in (0, 1)] == [["c1"], ["c0", "c1"]]


def test_a_search_without_hits_says_no_match() -> None:
    ranking = {"candidates": [candidate("c0", 0.2, model=0.01, place=1)]}
    output = grade(simple_corpus(), ["zebra"], [ranking], model=ReadByHand({}))
    row = output.table.to_pylist()[0]
    assert (row["corrective_query"], row["corrective_outcome"], row["action"]) == ("", "no_match", "incorrect")
    assert passages(output) == [("c0", "incorrect", False, "selected")]


def test_switched_off_it_grades_and_keeps_the_whole_selection() -> None:
    ranking = {
        "candidates": [
            candidate("c0", 0.9, model=0.01, place=1),
            candidate("c1", 0.8, model=0.2, place=2),
            candidate("c2", 0.7, model=0.9),
        ]
    }
    output = grade(simple_corpus(), ["number2"], [ranking], model=ReadByHand({}), enabled=False)
    assert passages(output) == [("c0", "incorrect", True, "selected"), ("c1", "ambiguous", True, "selected")]
    row = output.table.to_pylist()[0]
    assert (row["action_before"], row["action"]) == ("ambiguous", "ambiguous")
    assert (row["corrective_query"], row["corrective_outcome"]) == (None, "disabled")
    assert output.account.removed == {"not_selected": 1}


def test_a_missing_model_is_an_error_and_not_a_grade() -> None:
    ranking = {"candidates": [candidate("c0", 0.9, place=1)]}
    with pytest.raises(ConfigurationError, match="no cross-encoder"):
        grade(simple_corpus(), ["question"], [ranking], model=None)


def test_rewriting_keeps_whole_words_of_the_rarest_stems_in_order_of_rarity() -> None:
    chunks = ["refund", "refunding parcel", "parcels refunded abroad", "the refund"]
    corpus = make_corpus([{"chunk_id": f"c{n}", "text": text} for n, text in enumerate(chunks)], language="english")
    # Stems: refund in 4 chunks, parcel in 2, abroad in 1, the in 1; zebra unknown. "Refunds" and "refunded" are one.
    query = "Are Refunds refunded ABROAD for the zebra Parcels?"
    assert rewrite_queries([query, "zebra", ""], corpus, 3) == ["abroad the parcels", "", ""]
    assert rewrite_queries([query], corpus, 9) == ["abroad the parcels refunds"]
    stems = corpus.tokeniser.tokens("abroad the parcels refunds")
    assert stems == ["abroad", "the", "parcel", "refund"], "a search reads the rewritten text as the same terms"


def test_lower_above_upper_is_refused() -> None:
    with pytest.raises(ValidationError, match="lower must not exceed upper"):
        Params(lower=0.6, upper=0.5)
    assert Params(lower=0.5, upper=0.5).lower == 0.5


def test_no_queries_and_no_candidates_give_empty_tables() -> None:
    assert len(grade(simple_corpus(), [], []).table) == 0
    empty = grade(simple_corpus(), ["zebra"], [{"candidates": []}], model=ReadByHand({}))
    row = empty.table.to_pylist()[0]
    assert (row["action_before"], row["action"], row["candidates"]) == ("incorrect", "incorrect", [])


def test_a_slice_of_a_larger_table_reads_like_the_table_of_its_rows() -> None:
    rankings = [
        {"candidates": [candidate("c0", 0.9, model=0.9, place=1, families=["a"])]},
        {"candidates": [candidate("c1", 0.9, model=0.9, place=1, families=["b", "c"])]},
        {"candidates": [candidate("c2", 0.9, model=0.9, place=1, families=[])]},
    ]
    corpus, queries = simple_corpus(), make_queries([{"text": f"number{n}"} for n in range(3)])
    resources = {
        "corpus": corpus, "keyword_search": corpus.keyword_search(1.5, 0.75, 0.25),
        "cross_encoder": ReadByHand({}), "grader": None, "plan": None,
    }  # fmt: skip
    inputs = {"queries": queries, "family_rescue": rescued([None] * 3), "blended_rerank": reranked(rankings)}
    whole = STAGE.checked_run(inputs, resources, Params()).table
    part = STAGE.checked_run({name: table.slice(1, 2) for name, table in inputs.items()}, resources, Params()).table
    assert part.to_pylist() == whole.slice(1, 2).to_pylist()


GRADE_NAMES = ["correct", "ambiguous", "incorrect"]
WORDS = ["refund", "parcel", "form", "abroad", "late"]
GRID = st.integers(0, 10).map(lambda tenth: tenth / 10)


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    """A small corpus, queries and their rankings."""
    chunks = [
        {
            "chunk_id": f"c{number:02d}",
            "text": " ".join(draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=3))),
            "source": draw(st.sampled_from(["policies/a", "approvals/b", "other"])),
            "document_id": draw(st.sampled_from(["d0", "d1", "d2"])),
        }
        for number in range(draw(st.integers(1, 8)))
    ]
    angles = np.array([draw(st.sampled_from([0.0, 0.3, 0.8, 1.6, 3.0])) for _ in chunks])
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    corpus = make_corpus(chunks, vectors, collapse_identical_texts=draw(st.booleans()))
    texts, rankings, shapes = [], [], []
    for _ in range(draw(st.integers(0, 4))):
        texts.append(" ".join(draw(st.lists(st.sampled_from([*WORDS, "zebra"]), min_size=1, max_size=4))))
        shapes.append(draw(st.sampled_from([None, "refund"])))
        ids = draw(st.lists(st.sampled_from([c["chunk_id"] for c in chunks]), unique=True))
        ranked = sorted(((draw(GRID), one) for one in ids), key=lambda pair: (-pair[0], pair[1]))
        slots = draw(st.integers(1, 4))
        by_text = {next(c["text"] for c in chunks if c["chunk_id"] == one): one for one in ids}
        selected = draw(st.permutations(sorted(by_text.values())))[: draw(st.integers(0, slots))]
        status = draw(st.sampled_from(["cross_encoder", "no_cross_encoder", "disabled"]))
        candidates = [
            candidate(
                one,
                score,
                model=draw(st.none() | GRID) if status == "cross_encoder" else None,
                place=selected.index(one) + 1 if one in selected else None,
                families=draw(st.lists(st.sampled_from(["policy", "approval"]), unique=True)),
            )
            for score, one in ranked
        ]
        bounds = {
            "max_per_document": draw(st.none() | st.integers(1, 2)),
            "near_duplicate": draw(st.none() | st.sampled_from([0.5, 0.9, 1.0])),
            "lexical_weight": draw(st.sampled_from([0.0, 0.5, 1.0])),
        }
        rankings.append({"rerank_status": status, "slots": slots, "candidates": candidates, **bounds})
    limits = sorted(draw(st.tuples(GRID, GRID)))
    asked = [(f"q-{query:04d}", chunk["chunk_id"]) for query in range(len(texts)) for chunk in chunks]
    decisions = {pair: draw(st.none() | st.sampled_from(GRADE_NAMES)) for pair in asked} if draw(st.booleans()) else {}
    behind = draw(st.sampled_from([None, HashedGrader()]))
    return {
        "decisions": {pair: one for pair, one in decisions.items() if one is not None}, "behind": behind,
        "corpus": corpus, "texts": texts, "rankings": rankings, "shapes": shapes,
        "settings": {
            "enabled": draw(st.integers(0, 9)) > 0, "lower": limits[0], "upper": limits[1],
            "corrective_depth": draw(st.integers(1, 8)), "corrective_terms": draw(st.integers(1, 3)),
            "corrective_limit": draw(st.integers(1, 4)),
        },
    }  # fmt: skip


class SlowQuery:
    """One query graded plainly, one passage after the other."""

    def __init__(self, world: Mapping[str, Any], query: int) -> None:
        self.corpus, self.text, self.ranking = world["corpus"], world["texts"][query], world["rankings"][query]
        self.params, self.shape = Params(**world["settings"]), world["shapes"][query]
        self.chunks = {chunk["chunk_id"]: chunk for chunk in self.corpus.chunks.to_pylist()}
        self.by_model = self.ranking["rerank_status"] == "cross_encoder"
        self.query_id, self.decisions, self.behind = f"q-{query:04d}", world["decisions"], world["behind"]
        self.records: list[dict[str, Any]] = []

    def grade_of(self, score: float) -> str:
        lower, upper = self.params.lower, self.params.upper
        return "correct" if score >= upper else "incorrect" if score < lower else "ambiguous"

    def beforehand(self, chunk_id: str, score: float) -> tuple[str, str]:
        """The grade that costs nothing, and whose it is."""
        decided = self.decisions.get((self.query_id, chunk_id)) if self.params.enabled else None
        return (self.grade_of(score), "score") if decided is None else (decided, "file")

    def told(self, chunk_id: str, score: float) -> tuple[str, str]:
        """The grade when the grader is asked."""
        grade, by = self.beforehand(chunk_id, score)
        if by == "score" and self.behind is not None and self.params.enabled:
            said = self.behind.of(self.text, self.chunks[chunk_id]["text"])
            return (grade, by) if said is None else (said, "llm")
        return grade, by

    def known(self, one: Mapping[str, Any]) -> float | None:
        return one["cross_encoder"] if self.by_model else one["score"]

    def read(self, chunk_id: str) -> float:
        passage = self.chunks[chunk_id]["text"]
        if self.by_model:
            return 1 / (1 + math.exp(-float(HashedModel().score([self.text], [passage])[0])))
        words = set(self.text.split())
        return float(self.ranking["lexical_weight"]) * (len(words & set(passage.split())) / len(words))

    def action(self, *, kept: bool = False) -> str:
        grades = {record["grade"] for record in self.records if record["kept"] or not kept}
        return next((name for name in ("correct", "ambiguous") if name in grades), "incorrect")

    def free(self) -> int:
        return int(self.ranking["slots"]) - sum(one["kept"] for one in self.records)

    def has_text(self, chunk_id: str) -> bool:
        return self.chunks[chunk_id]["text"] in {self.chunks[one["chunk_id"]]["text"] for one in self.records}

    def breaks_bound(self, chunk_id: str) -> bool:
        """Whether a fill would be one too many of its document or near what is kept now."""
        kept = [one["chunk_id"] for one in self.records if one["kept"]]
        bound, near = self.ranking["max_per_document"], self.ranking["near_duplicate"]
        place = {one: row for row, one in enumerate(self.chunks)}
        vectors = self.corpus.embeddings.astype(np.float64)
        document = self.chunks[chunk_id]["document_id"]
        too_many = bound is not None and [self.chunks[one]["document_id"] for one in kept].count(document) >= bound
        cosines = [float(vectors[place[one]] @ vectors[place[chunk_id]]) for one in kept]
        return too_many or (near is not None and any(cosine >= near - 1e-6 for cosine in cosines))

    def record(self, chunk_id: str, score: float, origin: str, families: list[str]) -> None:
        spared = origin == "selected" and not self.params.enabled
        fits = origin == "selected" or (self.free() > 0 and not self.breaks_bound(chunk_id))
        passes = origin == "selected" or self.beforehand(chunk_id, score)[0] != "incorrect"
        grade, by = (self.told if passes else self.beforehand)(chunk_id, score)
        kept = spared or (grade != "incorrect" and fits)
        self.records.append(
            {
                "chunk_id": chunk_id, "score": score, "grade": grade, "graded_by": by, "kept": kept,
                "origin": origin, "families": families,
            }
        )  # fmt: skip

    def select(self) -> None:
        selection = [one for one in self.ranking["candidates"] if one["selected_rank"] is not None]
        for one in sorted(selection, key=lambda one: one["selected_rank"]):
            known = self.known(one)
            score = self.read(one["chunk_id"]) if known is None else known
            self.record(one["chunk_id"], score, "selected", one["families"])

    def refill(self) -> None:
        """As if nobody refused what passes by its score; who is refused leaves the slot free."""
        refused = []
        for one in self.ranking["candidates"]:
            known = self.known(one)
            if (
                one["selected_rank"] is None
                and known is not None
                and self.free()
                and not self.has_text(one["chunk_id"])
                and not self.breaks_bound(one["chunk_id"])
            ):
                self.record(one["chunk_id"], known, "next_ranked", one["families"])
                if self.beforehand(one["chunk_id"], known)[0] != "incorrect" and not self.records[-1]["kept"]:
                    self.records[-1]["kept"] = True
                    refused.append(self.records[-1])
        for one in refused:
            one["kept"] = False

    def correct(self) -> dict[str, str]:
        holders = {word: sum(word in chunk["text"].split() for chunk in self.chunks.values()) for word in WORDS}
        words = [word for word in dict.fromkeys(self.text.split()) if holders.get(word)]
        rewritten = " ".join(sorted(words, key=lambda word: holders[word])[: self.params.corrective_terms])
        search = self.corpus.keyword_search(1.5, 0.75, 0.25)
        hits = search.search([rewritten], Scopes.single(Scope(), 1), self.params.corrective_depth)
        found_ids = self.corpus.ids(hits.values["row"]).to_pylist()
        for chunk_id in [one for one in found_ids if not self.breaks_bound(one)]:
            found = sum(one["origin"] == "corrective" for one in self.records)
            if found < self.params.corrective_limit and not self.has_text(chunk_id):
                serves = {"policies/a": ["policy"], "approvals/b": ["approval"], "other": []}
                families = serves[self.chunks[chunk_id]["source"]] if self.shape else []
                self.record(chunk_id, self.read(chunk_id), "corrective", families)
        outcome = "ok" if len(hits.values["row"]) else "no_match"
        return {"corrective_query": rewritten, "corrective_outcome": outcome}

    def result(self) -> dict[str, Any]:
        self.select()
        outcome = "not_needed" if self.params.enabled else "disabled"
        answer = {"action_before": self.action(), "corrective_query": None, "corrective_outcome": outcome}
        if self.params.enabled:
            self.refill()
            if answer["action_before"] != "correct":
                answer |= self.correct() if self.free() else {"corrective_outcome": "no_room"}
        return {**answer, "action": self.action(kept=True)}


def grader_of(world: Mapping[str, Any]) -> Any:
    """The grader of a world: none, decisions, an llm, or both."""
    return FileGrader(world["decisions"], world["behind"]) if world["decisions"] else world["behind"]


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_the_stage_agrees_with_the_slow_oracle(world: dict[str, Any]) -> None:
    output = grade(
        world["corpus"], world["texts"], world["rankings"], model=HashedModel(), shapes=world["shapes"], plan=PLAN,
        grader=grader_of(world), **world["settings"],
    )  # fmt: skip
    for query, row in enumerate(output.table.to_pylist()):
        slow = SlowQuery(world, query)
        want = slow.result()
        assert {name: row[name] for name in want} == want
        got = row["candidates"]
        assert [one["score"] for one in got] == pytest.approx([one["score"] for one in slow.records], abs=1e-12)
        plain = [{name: one[name] for name in one if name not in {"rank", "score"}} for one in got]
        assert plain == [{name: one[name] for name in one if name != "score"} for one in slow.records]


@settings(max_examples=50, deadline=None)
@given(worlds())
def test_slots_texts_and_the_account_hold_in_every_world(world: dict[str, Any]) -> None:
    output = grade(
        world["corpus"], world["texts"], world["rankings"], model=HashedModel(), shapes=world["shapes"], plan=PLAN,
        grader=grader_of(world), **world["settings"],
    )  # fmt: skip
    chunks = world["corpus"].chunks.to_pylist()
    texts = {chunk["chunk_id"]: chunk["text"] for chunk in chunks}
    documents = {chunk["chunk_id"]: chunk["document_id"] for chunk in chunks}
    vectors = dict(zip(texts, world["corpus"].embeddings.astype(np.float64), strict=True))
    for row, ranking in zip(output.table.to_pylist(), world["rankings"], strict=True):
        recorded = row["candidates"]
        assert sum(one["kept"] for one in recorded) <= ranking["slots"]
        read = [texts[one["chunk_id"]] for one in recorded]
        assert len(set(read)) == len(read), "no text is graded twice for a query"
        if world["settings"]["enabled"]:
            assert all(one["grade"] != "incorrect" for one in recorded if one["kept"])
        kept = [one["chunk_id"] for one in recorded if one["kept"]]
        fills = [one["chunk_id"] for one in recorded if one["kept"] and one["origin"] != "selected"]
        for fill in fills:
            same = sum(documents[one] == documents[fill] for one in kept)
            assert same <= (ranking["max_per_document"] or same)
            near = ranking["near_duplicate"] or math.inf
            assert all(float(vectors[one] @ vectors[fill]) < near for one in kept if one != fill)
        listed = {one["chunk_id"] for one in ranking["candidates"]}
        strangers = [one for one in recorded if one["chunk_id"] not in listed]
        assert all(one["origin"] == "corrective" for one in strangers)
    assert output.account.candidates_in == sum(len(ranking["candidates"]) for ranking in world["rankings"])
    assert output.account.candidates_out == sum(len(row["candidates"]) for row in output.table.to_pylist())


def test_a_rewritten_query_keeps_marks_and_cuts_han_into_words() -> None:
    corpus = make_corpus(
        [
            {"chunk_id": "a", "text": "हिन्दी किताब"},
            {"chunk_id": "b", "text": "東京都の天気は"},
            {"chunk_id": "c", "text": "天気"},
        ]
    )
    assert rewrite_queries(["हिन्दी किताब"], corpus, 6) == ["हिन्दी किताब"]
    assert rewrite_queries(["東京都の天気は"], corpus, 2) == ["東 京"]
    for text in ("हिन्दी किताब", "東京都の天気は"):
        (again,) = rewrite_queries([text], corpus, 9)
        assert sorted(corpus.tokeniser.tokens(again)) == sorted(set(corpus.tokeniser.tokens(text)))


@pytest.mark.parametrize("wrong", [[math.nan], [math.inf], [], [1.0, 2.0]], ids=["NaN", "infinite", "none", "two"])
def test_logits_that_grade_nothing_stop_the_shard(wrong: list[float]) -> None:
    class Broken:
        model_id = "broken"

        def score(self, queries: Sequence[str], passages: Sequence[str]) -> np.ndarray:
            return np.array(wrong, dtype=np.float32)

    corpus = make_corpus([{"chunk_id": "c0", "text": "refund"}])
    ranking = {"slots": 1, "candidates": [candidate("c0", 0.2, place=1)]}
    with pytest.raises(ModelError, match="gave no usable logits"):
        grade(corpus, ["refund"], [ranking], model=Broken())
