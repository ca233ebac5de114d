"""context: families that come back, the token budget, and what every passage cites."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from contracts.candidates import Candidates, FusedRanking, KeywordRanking, Selection
from contracts.evidence import GradedSelection, RerankedRanking, RescuedRanking
from contracts.table import Row, check_table, schema
from corpus.corpus import Corpus
from corpus.strips import cut_into_strips, first_characters, kept_spans, recomposed
from corpus.tokeniser import Tokeniser, TokeniserParams
from corpus.tokens import count_tokens, cut_text
from stages.context import STAGE, Params, admit_within_budget, restore_families
from stages.stage import StageOutput
from tests.corpora import make_corpus, make_queries


def graded(chunk_id: str, grade: str, *families: str, kept: bool | None = None, **rest: Any) -> dict[str, Any]:
    """A graded passage; unless told, it is kept when not incorrect."""
    score = {"correct": 0.9, "ambiguous": 0.3, "incorrect": 0.0312}[grade]
    kept = grade != "incorrect" if kept is None else kept
    defaults = {"score": score, "origin": "selected", "graded_by": "score"}
    return {"chunk_id": chunk_id, "grade": grade, "kept": kept, "families": list(families), **defaults, **rest}


def table_of(model: type[Row], rows: Sequence[Mapping[str, Any]], name: str) -> pa.Table:
    """A checked input table; query ids and the ranks of candidates are filled in."""
    made = [
        {
            "query_id": f"q-{number:04d}",
            **row,
            "candidates": [{**one, "rank": rank} for rank, one in enumerate(row["candidates"], start=1)],
        }
        for number, row in enumerate(rows)
    ]
    table = pa.Table.from_pylist(made, schema=schema(model))
    check_table(table, model, name)
    return table


def make_inputs(rows: Sequence[Mapping[str, Any]]) -> dict[str, pa.Table]:
    """Every table that the stage reads; a row names `graded` and may name `required`, `slots` and stage lists."""
    outcomes = {"greedy_selection_outcome": "ok", "sparse_search_outcome": "ok", "best_possible": 1.0}
    blended = {
        "rerank_status": "cross_encoder",
        "max_per_document": None,
        "near_duplicate": None,
        "spread": False,
        "lexical_weight": 0.3,
    }
    crag = {"action_before": "ambiguous", "corrective_query": None, "corrective_outcome": "not_needed"}
    return {
        "queries": make_queries([{"text": row.get("text", f"question {n}")} for n, row in enumerate(rows)]),
        "oversample": table_of(Candidates, [{"candidates": row.get("oversample", [])} for row in rows], "oversample"),
        "greedy_selection": table_of(
            Selection,
            [{"candidates": row.get("greedy_selection", []), "shortfall": 0} for row in rows],
            "greedy_selection",
        ),
        "sparse_search": table_of(
            KeywordRanking,
            [{"candidates": row.get("sparse_search", []), "outcome": "ok"} for row in rows],
            "sparse_search",
        ),
        "rrf_merge": table_of(
            FusedRanking, [{"candidates": row.get("rrf_merge", []), **outcomes} for row in rows], "rrf_merge"
        ),
        "family_rescue": table_of(
            RescuedRanking,
            [
                {"candidates": row.get("family_rescue", []), "shape": row.get("shape"), "coverage": []}
                for row in rows
            ],
            "family_rescue",
        ),
        "blended_rerank": table_of(
            RerankedRanking,
            [
                {
                    "candidates": row.get("blended_rerank", []),
                    "required": row.get("required", []),
                    "slots": row.get("slots", 5),
                    **blended,
                }
                for row in rows
            ],
            "blended_rerank",
        ),
        "crag_grading": table_of(
            GradedSelection,
            [{"candidates": row["graded"], "action": row.get("action", "correct"), **crag} for row in rows],
            "crag_grading",
        ),
    }  # fmt: skip


def run(corpus: Corpus, rows: Sequence[Mapping[str, Any]], **settings_of: Any) -> StageOutput:
    """Runs the stage with all its checks."""
    return STAGE.checked_run(make_inputs(rows), {"corpus": corpus}, Params(**settings_of))


def letters(count: int = 6) -> Corpus:
    """Chunks a, b, c ... of four tokens each."""
    return make_corpus([{"chunk_id": name, "text": f"passage {name} of text"} for name in "abcdefghij"[:count]])


def ids(output: StageOutput, query: int = 0) -> list[str]:
    return [one["chunk_id"] for one in output.table.column("candidates")[query].as_py()]


def test_an_incorrect_passage_is_not_in_the_context() -> None:
    row = {"graded": [graded("b", "correct"), graded("a", "incorrect"), graded("c", "ambiguous")], "action": "correct"}
    output = run(letters(), [row])
    assert ids(output) == ["b", "c"]
    assert output.table.column("tokens").to_pylist() == [8]
    assert output.table.column("action").to_pylist() == ["correct"]
    assert output.account.model_dump() == {
        "candidates_in": 3, "added": {}, "removed": {"incorrect": 1}, "candidates_out": 2,
    }  # fmt: skip


def test_the_last_passage_of_a_required_family_comes_back_and_says_so() -> None:
    row = {
        "required": ["policy", "approval"],
        "graded": [
            graded("a", "incorrect", "approval", score=0.031),
            graded("b", "correct", "policy"),
            graded("c", "incorrect", "approval", score=0.02),
        ],
    }
    output = run(letters(), [row])
    assert ids(output) == ["a", "b"], "the better-ranked of the two, in its place by rank"
    back, stayed = output.table.column("candidates")[0].as_py()
    assert (back["restored"], back["grade"], back["crag_grading_score"]) == (True, "incorrect", 0.031)
    assert back["restored_because"] == (
        "No other passage serves the required family approval; graded incorrect with score 0.031."
    )
    assert (stayed["restored"], stayed["restored_because"]) == (False, None)
    assert output.table.column("covered").to_pylist() == [["policy", "approval"]]
    assert output.table.column("evidence_family_recall").to_pylist() == [1.0]


def test_a_family_with_a_kept_passage_brings_nothing_back() -> None:
    row = {
        "required": ["policy"],
        "graded": [graded("a", "incorrect", "policy"), graded("b", "ambiguous", "policy", origin="corrective")],
    }
    assert ids(run(letters(), [row])) == ["b"]


def test_only_what_was_selected_comes_back() -> None:
    row = {
        "required": ["policy"],
        "graded": [
            graded("a", "correct"),
            graded("b", "incorrect", "policy", origin="next_ranked"),
            graded("c", "incorrect", "policy", origin="corrective"),
        ],
    }
    output = run(letters(), [row])
    assert ids(output) == ["a"]
    assert output.table.column("missing").to_pylist() == [["policy"]]


def test_two_of_three_families_are_a_recall_of_two_thirds() -> None:
    row = {
        "required": ["policy", "procedure", "approval"],
        "graded": [graded("a", "correct", "approval", "policy"), graded("b", "correct", "other")],
    }
    result = run(letters(), [row, {"graded": []}]).table.to_pylist()
    assert result[0]["required"] == ["policy", "procedure", "approval"]
    assert (result[0]["covered"], result[0]["missing"]) == (["policy", "approval"], ["procedure"])
    assert result[0]["evidence_family_recall"] == pytest.approx(0.67, abs=0.005)
    assert (result[1]["covered"], result[1]["missing"]) == ([], [])
    assert result[1]["evidence_family_recall"] is None, "nothing required is not a recall of 0 or 1"


def test_the_lowest_ranked_passage_that_no_family_needs_makes_place() -> None:
    row = {
        "slots": 3,
        "required": ["policy", "approval"],
        "graded": [
            graded("a", "correct"),
            graded("b", "incorrect", "approval"),
            graded("c", "ambiguous", origin="next_ranked"),
            graded("d", "correct", "policy", origin="next_ranked"),
        ],
    }
    output = run(letters(), [row])
    assert ids(output) == ["a", "b", "d"], "d is the only policy, so c makes place although it ranks higher"
    assert output.account.removed == {"made_place": 1}


def test_a_passage_becomes_dispensable_when_the_one_that_comes_back_serves_its_family_too() -> None:
    row = {
        "slots": 1,
        "required": ["policy", "approval"],
        "graded": [graded("a", "correct", "policy"), graded("b", "incorrect", "approval", "policy")],
    }
    output = run(letters(), [row])
    assert ids(output) == ["b"]
    assert output.table.column("missing").to_pylist() == [[]]


def test_a_passage_that_came_back_in_vain_makes_place_before_a_kept_one() -> None:
    row = {
        "slots": 2,
        "required": ["policy", "approval"],
        "graded": [
            graded("a", "incorrect", "policy"),
            graded("b", "correct"),
            graded("c", "correct"),
            graded("d", "incorrect", "policy", "approval"),
        ],
    }
    output = run(letters(), [row])
    assert ids(output) == ["b", "d"], "a came back for policy and c made place; then d served both families"
    assert [one["restored"] for one in output.table.column("candidates")[0].as_py()] == [False, True]
    assert output.account.removed == {"incorrect": 1, "made_place": 1}


def test_with_fewer_slots_than_families_the_slots_win() -> None:
    row = {
        "slots": 1,
        "required": ["policy", "approval"],
        "graded": [graded("a", "correct", "policy"), graded("b", "incorrect", "approval")],
    }
    output = run(letters(), [row])
    assert ids(output) == ["a"]
    assert output.table.column("missing").to_pylist() == [["approval"]]


def test_a_passage_without_a_slot_is_counted_apart_from_an_incorrect_one() -> None:
    row = {
        "slots": 1,
        "graded": [graded("a", "ambiguous"), graded("b", "correct", kept=False, origin="corrective")],
    }
    output = run(letters(), [row])
    assert ids(output) == ["a"]
    assert output.account.removed == {"no_slot": 1}


def test_kept_passages_of_a_grading_that_was_switched_off_stay_whatever_their_grade() -> None:
    row = {"required": ["policy"], "graded": [graded("a", "incorrect", "policy", kept=True)]}
    passage = run(letters(), [row]).table.column("candidates")[0].as_py()[0]
    assert (passage["chunk_id"], passage["restored"]) == ("a", False)


def test_what_does_not_fit_the_budget_is_left_out_and_later_ones_may_fit() -> None:
    chunks = {"a": "one two three four", "b": "one two three four five", "c": "one two"}
    corpus = make_corpus([{"chunk_id": name, "text": text} for name, text in chunks.items()])
    row = {"graded": [graded(name, "correct") for name in chunks]}
    output = run(corpus, [row], token_budget=6)
    assert ids(output) == ["a", "c"]
    assert [one["rank"] for one in output.table.column("candidates")[0].as_py()] == [1, 2]
    assert output.table.column("tokens").to_pylist() == [6]
    assert output.account.removed == {"over_budget": 1}


def test_the_budget_admits_a_passage_of_each_required_family_first() -> None:
    row = {
        "required": ["policy"],
        "graded": [graded("a", "correct"), graded("b", "correct", "policy"), graded("c", "correct", "policy")],
    }
    assert ids(run(letters(), [row], token_budget=4)) == ["b"]
    assert ids(run(letters(), [row], token_budget=8)) == ["a", "b"]


def test_long_passages_of_required_families_are_cut_so_that_none_is_lost() -> None:
    chunks = {"a": "1 2 3 4 5 6 7 8 9", "b": "1 2", "c": "1 2 3 4 5 6 7", "d": "1"}
    corpus = make_corpus([{"chunk_id": name, "text": text} for name, text in chunks.items()])
    families = {"a": "policy", "b": "procedure", "c": "approval"}
    row = {
        "required": list(families.values()),
        "graded": [graded(name, "correct", *filter(None, [families.get(name)])) for name in chunks],
        "slots": 4,
    }

    def shown(budget: int) -> dict[str, str]:
        (found,) = run(corpus, [row], token_budget=budget).table.column("candidates").to_pylist()
        return {one["chunk_id"]: one["text"] for one in found}

    assert shown(18) == {name: chunks[name] for name in "abc"}
    assert shown(11) == {"a": "1 2 3 4", "b": "1 2", "c": "1 2 3 4 5"}
    assert shown(3) == {"a": "1", "b": "1", "c": "1"}
    assert shown(2) == {"b": "1", "c": "1"}
    assert run(corpus, [row], token_budget=2).table.column("missing").to_pylist() == [["policy"]]


def test_a_first_passage_beyond_the_budget_is_cut_on_a_token_border() -> None:
    corpus = make_corpus(
        [{"chunk_id": "a", "text": " Żółw's  shell, 3.5 kg"}, {"chunk_id": "b", "text": "tiny"}], language="none"
    )
    output = run(corpus, [{"graded": [graded("a", "correct"), graded("b", "correct")]}], token_budget=3)
    (passage,) = output.table.column("candidates")[0].as_py()
    assert (passage["text"], passage["span_start"], passage["span_end"]) == (" Żółw's", 0, 7)
    assert output.table.column("tokens").to_pylist() == [3]


def test_an_uncut_passage_spans_its_whole_text() -> None:
    corpus = make_corpus([{"chunk_id": "a", "text": "Żółw 日本 🙂\n"}])
    (passage,) = run(corpus, [{"graded": [graded("a", "correct")]}]).table.column("candidates")[0].as_py()
    assert (passage["text"], passage["span_start"], passage["span_end"]) == ("Żółw 日本 🙂\n", 0, 10)


def test_tokens_are_runs_of_word_characters_and_single_other_characters() -> None:
    texts = ["", "it's 3.5 €!", "snake_case\u00a0x\n\ty", "हिन्दी भाषा", "e\u0301a", "!!"]
    assert count_tokens(pa.array(texts)).tolist() == [0, 8, 3, 2, 1, 2]
    assert cut_text("it's 3.5", 2) == "it'"
    assert cut_text("one two", 5) == "one two"


def full_citations() -> dict[str, Any]:
    """Two queries whose passages every stage has seen, at different ranks and scores."""
    first = {
        "text": "first", "shape": "refund", "required": ["policy"], "slots": 3, "action": "ambiguous",
        "graded": [graded("c", "correct", "policy", score=0.7), graded("a", "ambiguous", score=0.2)],
        "oversample": [{"chunk_id": "a", "score": 0.75}, {"chunk_id": "c", "score": 0.5}],
        "greedy_selection": [{"chunk_id": "c", "score": 1.5}, {"chunk_id": "a", "score": None}],
        "sparse_search": [
            {"chunk_id": "b", "score": 9.0}, {"chunk_id": "c", "score": 8.0}, {"chunk_id": "a", "score": -1.0},
        ],
        "rrf_merge": [
            {"chunk_id": one, "score": score, "greedy_selection_rank": None, "sparse_search_rank": 1}
            for one, score in (("c", 0.03), ("b", 0.02), ("a", 0.01))
        ],
        "family_rescue": [
            {"chunk_id": "a", "score": 0.01, "families": [], "family_ranks": [], "rescued": False},
            {"chunk_id": "c", "score": 0.0, "families": ["policy"], "family_ranks": [1], "rescued": True},
        ],
        "blended_rerank": [
            {
                "chunk_id": one, "score": score, "cross_encoder": None, "retrieval": 0.0, "lexical": 0.0,
                "exact_bonus": 0.0, "absolute_score": score, "families": [], "rescued": False, "selected_rank": None,
            }
            for one, score in (("b", 0.9), ("a", 0.8), ("c", 0.7))
        ],
    }  # fmt: skip
    second = {"graded": [graded("a", "correct", origin="corrective")]}
    return {"rows": [first, second]}


def test_every_passage_cites_its_source_and_rank_and_score_of_every_stage() -> None:
    chunks = [
        {"chunk_id": name, "text": f"text {name}", "source": f"policies/{name}.md", "document_id": f"doc-{name}",
         "title": f"Title {name}", "version": "v2", "authority_tier": 1}
        for name in "abc"
    ]  # fmt: skip
    result = run(make_corpus(chunks), **full_citations()).table.to_pylist()
    assert [result[0][name] for name in ("text", "shape", "action")] == ["first", "refund", "ambiguous"]
    assert result[0]["candidates"] == [
        {
            "rank": 1, "chunk_id": "c", "source": "policies/c.md", "document_id": "doc-c", "title": "Title c",
            "version": "v2", "authority_tier": 1, "text": "text c", "span_start": 0, "span_end": 6,
            "spans": [{"start": 0, "end": 6}], "families": ["policy"], "origin": "selected", "grade": "correct",
            "graded_by": "score", "restored": False,
            "restored_because": None, "oversample_rank": 2, "oversample_score": 0.5, "greedy_selection_rank": 1,
            "greedy_selection_score": 1.5, "sparse_search_rank": 2, "sparse_search_score": 8.0,
            "rrf_merge_rank": 1, "rrf_merge_score": 0.03, "rescued": True, "blended_rerank_rank": 3,
            "blended_rerank_score": 0.7, "crag_grading_rank": 1, "crag_grading_score": 0.7,
        },
        {
            "rank": 2, "chunk_id": "a", "source": "policies/a.md", "document_id": "doc-a", "title": "Title a",
            "version": "v2", "authority_tier": 1, "text": "text a", "span_start": 0, "span_end": 6,
            "spans": [{"start": 0, "end": 6}], "families": [], "origin": "selected", "grade": "ambiguous",
            "graded_by": "score", "restored": False,
            "restored_because": None, "oversample_rank": 1, "oversample_score": 0.75, "greedy_selection_rank": 2,
            "greedy_selection_score": None, "sparse_search_rank": 3, "sparse_search_score": -1.0,
            "rrf_merge_rank": 3, "rrf_merge_score": 0.01, "rescued": False, "blended_rerank_rank": 2,
            "blended_rerank_score": 0.8, "crag_grading_rank": 2, "crag_grading_score": 0.2,
        },
    ]  # fmt: skip
    stranger = result[1]["candidates"][0]
    stages = ("oversample", "greedy_selection", "sparse_search", "rrf_merge", "blended_rerank")
    assert [stranger[f"{stage}_{field}"] for stage in stages for field in ("rank", "score")] == [None] * 10
    assert stranger["rescued"] is False, "the same chunk under another query cites nothing of the first"


def test_no_queries_and_no_passages_give_empty_contexts() -> None:
    assert len(run(letters(), []).table) == 0
    row = run(letters(), [{"graded": [], "required": ["policy"]}]).table.to_pylist()[0]
    assert (row["candidates"], row["tokens"], row["missing"]) == ([], 0, ["policy"])
    assert row["evidence_family_recall"] == 0.0


def test_a_slice_of_larger_tables_reads_like_the_tables_of_its_rows() -> None:
    rows = [
        {"graded": [graded("a", "correct", "x")], "required": ["x"]},
        {"graded": [graded("b", "incorrect", "y", "z"), graded("c", "correct")], "required": ["y"]},
        *full_citations()["rows"],
    ]
    inputs, resources = make_inputs(rows), {"corpus": letters()}
    whole = STAGE.checked_run(inputs, resources, Params()).table
    part = STAGE.checked_run({name: table.slice(1, 2) for name, table in inputs.items()}, resources, Params()).table
    assert part.to_pylist() == whole.slice(1, 2).to_pylist()


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValidationError):
        Params(token_budget=0)


def test_the_kernels_work_by_hand() -> None:
    offsets, yes = np.array([0, 3]), np.array([True])
    serves = np.array([[True, False], [False, True], [False, False]])
    present, restored_for = restore_families(
        offsets, np.array([2]), serves, np.array([False, True, True]), np.array([True, False, False]), np.array([2])
    )
    assert present.tolist() == [True, True, False]
    assert restored_for.tolist() == [0, -1, -1]
    serves = np.array([[True, False], [False, False], [True, True]])
    present, restored_for = restore_families(
        offsets, np.array([2]), serves, np.array([False, True, False]), np.array([True, False, True]), np.array([2])
    )
    assert present.tolist() == [False, True, True], "the first came back for family 0 until the third served both"
    assert restored_for.tolist() == [-1, -1, 1]
    tokens = np.array([5, 3, 2])
    assert admit_within_budget(offsets, np.array([False, False, False]), tokens, 7).tolist() == [5, -1, 2]
    assert admit_within_budget(offsets, np.array([False, True, False]), tokens, 7).tolist() == [-1, 3, 2]
    assert admit_within_budget(offsets, np.repeat(~yes, 3), tokens, 4).tolist() == [4, -1, -1]
    assert admit_within_budget(offsets, np.repeat(yes, 3), tokens, 4).tolist() == [1, 1, 2]


FAMILIES = ["policy", "procedure", "approval"]
NAMES = "abcdefgh"


@st.composite
def gradings(draw: st.DrawFn) -> list[dict[str, Any]]:
    """What grading may leave of a few queries: never more selected than slots, nor more kept."""
    rows = []
    for _ in range(draw(st.integers(0, 3))):
        slots, passages, kept = draw(st.integers(1, 5)), [], 0
        count = draw(st.integers(0, 8))
        origins = sorted(draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
        for place, (name, origin) in enumerate(zip(draw(st.permutations(NAMES)), origins, strict=False)):
            families = draw(st.lists(st.sampled_from([*FAMILIES, "other"]), unique=True, max_size=2))
            grade = draw(st.sampled_from(["correct", "ambiguous", "incorrect", "incorrect"]))
            keep = grade != "incorrect" and kept < slots
            kept += keep
            origin_name = ["selected", "next_ranked", "corrective"][max(origin, int(place >= slots))]
            passages.append(graded(name, grade, *families, kept=keep, origin=origin_name))
        required = draw(st.lists(st.sampled_from(FAMILIES), unique=True))
        rows.append({"slots": slots, "graded": passages, "required": required})
    return rows


LENGTHS = dict(zip(NAMES, (3, 7, 2, 12, 4, 4, 1, 9), strict=True))


def worded() -> Corpus:
    """Chunks of different lengths, some with punctuation."""
    texts = {
        name: " ".join([name, *["w."] * ((length - 1) // 2), *["w"] * ((length - 1) % 2)])
        for name, length in LENGTHS.items()
    }
    return make_corpus([{"chunk_id": name, "text": text} for name, text in texts.items()])


WORDED = worded()


def built_slowly(row: Mapping[str, Any], budget: int) -> list[tuple[str, bool, int]]:
    """(chunk, restored, tokens) of the context of one query, one step after the other."""
    listed, required = row["graded"], row["required"]
    present = [one for one in listed if one["kept"]]
    restored: list[str] = []

    def alone(one: Mapping[str, Any]) -> bool:
        mine = [name for name in one["families"] if name in required]
        return any(not any(name in other["families"] for other in present if other is not one) for name in mine)

    for family in required:
        if any(family in one["families"] for one in present):
            continue
        lost = [one for one in listed if one["origin"] == "selected" and not one["kept"]]
        back = next((one for one in lost if one["grade"] == "incorrect" and family in one["families"]), None)
        if back is None:
            continue
        present.append(back)
        if len(present) > row["slots"]:
            leavers = [one for one in listed if one in present and not alone(one)]
            leavers.sort(key=lambda one: not one["kept"])  # stable: restored ones last, lowest rank last
            present.remove(leavers[-1] if leavers else back)
        restored = [one["chunk_id"] for one in present if not one["kept"]]
    present.sort(key=listed.index)

    best = {family: next((one for one in present if family in one["families"]), None) for family in required}
    leading = [one["chunk_id"] for one in present if one in best.values()]
    admitted = dict.fromkeys(leading, 0)
    while sum(admitted.values()) < budget:  # token by token, the shortest first
        hungry = sorted((name for name in leading if admitted[name] < LENGTHS[name]), key=lambda name: admitted[name])
        if not hungry:
            break
        level = [name for name in hungry if admitted[name] == admitted[hungry[0]]]
        admitted[min(level, key=lambda name: (LENGTHS[name], leading.index(name)))] += 1
    admitted = {name: tokens for name, tokens in admitted.items() if tokens}
    for one in (one for one in present if one["chunk_id"] not in leading):
        tokens = LENGTHS[one["chunk_id"]]
        if tokens <= budget - sum(admitted.values()):
            admitted[one["chunk_id"]] = tokens
        elif not admitted:
            admitted[one["chunk_id"]] = budget
    order = [one["chunk_id"] for one in present if one["chunk_id"] in admitted]
    return [(name, name in restored, admitted[name]) for name in order]


def test_the_worded_corpus_has_the_lengths_that_the_oracle_counts_on() -> None:
    assert dict(zip(NAMES, count_tokens(WORDED.column("text")).tolist(), strict=True)) == LENGTHS


@settings(max_examples=50, deadline=None)
@given(gradings(), st.integers(1, 30))
def test_the_stage_agrees_with_the_slow_oracle(rows: list[dict[str, Any]], budget: int) -> None:
    result = run(WORDED, rows, token_budget=budget).table.to_pylist()
    for got, row in zip(result, rows, strict=True):
        found = [
            (one["chunk_id"], one["restored"], count_tokens(pa.array([one["text"]])).tolist()[0])
            for one in got["candidates"]
        ]
        assert found == built_slowly(row, budget)
        assert got["tokens"] == sum(tokens for *_, tokens in found)


@settings(max_examples=50, deadline=None)
@given(gradings())
def test_a_required_family_with_a_selected_passage_is_always_covered(rows: list[dict[str, Any]]) -> None:
    rows = [{**row, "slots": max(row["slots"], len(row["required"]))} for row in rows]
    for got, row in zip(run(WORDED, rows, token_budget=1000).table.to_pylist(), rows, strict=True):
        selected = [one for one in row["graded"] if one["origin"] == "selected"]
        assert {name for one in selected for name in one["families"] if name in row["required"]} <= set(got["covered"])
        assert [name for name in row["required"] if name not in got["covered"]] == got["missing"]


@settings(max_examples=50, deadline=None)
@given(gradings(), st.integers(1, 30))
def test_ids_slots_budget_spans_and_account_hold(rows: list[dict[str, Any]], budget: int) -> None:
    output = run(WORDED, rows, token_budget=budget)
    texts = {chunk["chunk_id"]: chunk["text"] for chunk in WORDED.chunks.to_pylist()}
    for got, row in zip(output.table.to_pylist(), rows, strict=True):
        found = got["candidates"]
        assert len({one["chunk_id"] for one in found}) == len(found) <= row["slots"]
        assert got["tokens"] <= budget
        ranks = [one["crag_grading_rank"] for one in found]
        assert ranks == sorted(ranks)
        for one in found:
            assert one["text"] == texts[one["chunk_id"]][one["span_start"] : one["span_end"]]
            assert one["restored"] == (one["grade"] == "incorrect") == (one["restored_because"] is not None)
    assert output.account.balanced
    assert output.account.candidates_in == sum(len(row["graded"]) for row in rows)
    assert output.account.candidates_out == sum(len(got["candidates"]) for got in output.table.to_pylist())


def tokens_slowly(text: str) -> list[str]:
    """Tokens by Unicode category, one character at a time."""
    found, word = [], False
    for character in text:
        category = unicodedata.category(character)
        if category[0] in "LMN" or character == "_":
            found = [*found[:-1], found[-1] + character] if word else [*found, character]
            word = True
        else:
            word = False
            if category[0] != "Z" and category != "Cc":
                found.append(character)
    return found


# Characters that both Unicode tables, Python's and RE2's, know in the same category.
CHARACTERS = st.sampled_from("aż日ि\u03013_ .,'\n\t\u00a0\u2028€🙂-\u200d\x00")


@settings(max_examples=100, deadline=None)
@given(st.text(CHARACTERS, max_size=12), st.integers(1, 12))
def test_counting_and_cutting_agree_with_a_walk_over_the_characters(text: str, budget: int) -> None:
    tokens = tokens_slowly(text)
    assert count_tokens(pa.array([text])).tolist() == [len(tokens)]
    cut = cut_text(text, budget)
    assert text.startswith(cut)
    assert tokens_slowly(cut) == tokens[:budget]
    assert cut.endswith(tokens[:budget][-1]) if tokens else cut == "", "nothing trails the last token"


PLAIN = Tokeniser(TokeniserParams(language="none", stop_words="none"))
STORY = "Refunds take 3.5 days. Ask e.g. the desk!  Who pays? \n\n- a form\n- a parcel\nIt is late."


def strips_of(text: str, sentences: int) -> list[str]:
    return [text[start:end] for start, end in cut_into_strips(text, sentences)]


def test_a_text_is_cut_behind_its_sentences_and_lines() -> None:
    assert strips_of(STORY, 1) == [
        "Refunds take 3.5 days. ", "Ask e.g. ", "the desk!  ", "Who pays? \n\n", "- a form\n", "- a parcel\n",
        "It is late.",
    ]  # fmt: skip
    assert strips_of(STORY, 3)[1:] == ["Who pays? \n\n- a form\n- a parcel\n", "It is late."]
    assert strips_of(STORY, 99) == [STORY]
    assert strips_of("He said “no.” She left… and 日本。東京。", 1) == [
        "He said “no.” ",
        "She left… ",
        "and 日本。",
        "東京。",
    ]
    assert strips_of("  \n one", 1) == ["  \n one"], "space alone is no sentence"


def test_strips_with_enough_of_the_question_stay_in_their_order() -> None:
    def left(question: str, sentences: int = 1, overlap: float = 0.5) -> list[str]:
        return [STORY[start:end] for start, end in kept_spans(question, STORY, PLAIN, sentences, overlap)]

    assert left("parcel refunds") == ["Refunds take 3.5 days.", "- a parcel"]
    assert left("a form parcel") == ["- a form\n- a parcel"], "neighbours are one span"
    assert left("late zebra lion", overlap=0.9) == ["It is late."], "the best stays although it has too little"
    assert left("zebra") == ["Refunds take 3.5 days."], "of equal ones the first"
    assert left("zebra", overlap=0.0) == [STORY], "of which all is left is left as it is"
    assert left("?!") == [STORY], "a question without terms tells nothing"


def test_strips_cite_the_spans_that_are_shown() -> None:
    text = "The weather is fine. Refunds take days. Nobody knows. A refund needs a form. The end."
    corpus = make_corpus([{"chunk_id": "a", "text": text}], language="english")
    settings_of = {"strips": True, "strip_sentences": 1, "strip_overlap": 0.5}
    row = {"text": "refund", "graded": [graded("a", "correct")]}
    output = run(corpus, [row], **settings_of)
    (passage,) = output.table.column("candidates")[0].as_py()
    assert passage["text"] == "Refunds take days.\nA refund needs a form."
    assert passage["spans"] == [{"start": 21, "end": 39}, {"start": 54, "end": 76}]
    assert (passage["span_start"], passage["span_end"]) == (21, 76)
    assert output.table.column("tokens").to_pylist() == [10]
    # A budget cuts what is shown, and the spans with it.
    (cut,) = run(corpus, [row], token_budget=6, **settings_of).table.column("candidates")[0].as_py()
    assert (cut["text"], cut["spans"]) == (
        "Refunds take days.\nA refund", [{"start": 21, "end": 39}, {"start": 54, "end": 62}],
    )  # fmt: skip
    (cut,) = run(corpus, [row], token_budget=2, **settings_of).table.column("candidates")[0].as_py()
    assert (cut["text"], cut["spans"], cut["span_end"]) == ("Refunds take", [{"start": 21, "end": 33}], 33)


def test_a_restored_passage_says_who_graded_it() -> None:
    def reason(by: str) -> Any:
        row = {"required": ["policy"], "graded": [graded("a", "incorrect", "policy", graded_by=by)]}
        (passage,) = run(letters(), [row]).table.column("candidates")[0].as_py()
        return passage["graded_by"], passage["restored_because"].rpartition("; ")[2]

    assert reason("score") == ("score", "graded incorrect with score 0.0312.")
    assert reason("llm") == ("llm", "graded incorrect by the llm, with score 0.0312.")
    assert reason("file") == ("file", "graded incorrect by the file of grades, with score 0.0312.")


TEXTS = st.text(st.sampled_from("ab. \n!é日。"), min_size=1, max_size=30).filter(str.strip)


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.sets(st.sampled_from(["a", "b", "ab", "é", "日"])), st.integers(1, 3), st.integers(0, 4))
def test_what_strips_show_is_in_the_chunk_and_in_order(
    text: str, words: set[str], sentences: int, quarter: int
) -> None:
    strips = cut_into_strips(text, sentences)
    assert "".join(text[start:end] for start, end in strips) == text
    assert all(text[start:end].strip() for start, end in strips)
    spans = kept_spans(" ".join(sorted(words)), text, PLAIN, sentences, quarter / 4)
    assert spans
    flat = [border for span in spans for border in span]
    assert flat == sorted(flat)
    assert flat[-1] <= len(text)
    shown = recomposed(text, spans)
    assert shown.split("\n") == "\n".join(text[start:end] for start, end in spans).split("\n")
    for length in range(1, len(shown) + 1):
        cut = first_characters(spans, length)
        assert recomposed(text, cut) == shown[:length].removesuffix("\n") or shown[length - 1] == "\n"
    # What is left out shares too little: no strip with enough of the question is lost.
    for start, end in strips:
        share = len(words & set(PLAIN.tokens(text[start:end]))) / len(words) if words else 1.0
        inside = any(first <= start + 1 and start < last for first, last in spans) or any(
            first < end and start < last for first, last in spans
        )
        assert inside or share < quarter / 4
