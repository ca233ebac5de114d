"""context: puts required families back that grading removed, and builds the cited context within a token budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from contracts.columns import Array, IntArray, Ragged, as_numpy, column, offsets_from_lengths, ragged
from contracts.evidence import Context, Share
from contracts.manifest import Account
from contracts.params import Count
from contracts.params import Params as BaseParams
from contracts.table import build_table
from corpus.compiled import kernel
from corpus.corpus import Corpus
from corpus.strips import Span, first_characters, kept_spans, recomposed
from corpus.tokens import count_tokens, cut_text
from stages.stage import SAME_QUERIES, Stage, StageOutput, SuccessCheck

# What is cited of a stage's ranking.
_CITED = ("query_id", "candidates.rank", "candidates.chunk_id", "candidates.score")

# How the reason of a restored passage names who graded it.
_BECAUSE_OF = {"score": "with score", "llm": "by the llm, with score", "file": "by the file of grades, with score"}


class Params(BaseParams):
    """Settings of context.

    Attributes:
        token_budget: how many tokens the texts of one context may have together, >= 1. A token is a
            run of word characters (letters, marks, digits, underscore) or a single other character
            that is not a space, so that a model's own tokeniser counts more, and far more in scripts
            without spaces. At 1 the context is a single word; small budgets cut the passages of the
            required families to keep something of each; beyond the length of all passages the budget does
            nothing.
        strips: whether passages are cut into strips, of which those without enough of the question are left
            out before the budget is spent; `spans` then says what is shown. Off: a passage is shown whole,
            since an answer may share no word with its question (docs/decisions/016-strips-are-off.md).
        strip_sentences: of a strip, >= 1. At 1 a strip easily loses what its pronouns stand for; beyond the
            length of a passage nothing is left out.
        strip_overlap: the share of the question's terms that a strip must have to stay, in [0, 1]. At 0
            nothing is left out; at 1 nearly always all but the best strip, which every passage keeps.
    """

    token_budget: Count = 4000
    strips: bool = False
    strip_sentences: Count = 3
    strip_overlap: Share = 0.2


@kernel
def _dispensable(serves: Array, present: Array, kept: Array, start: int, end: int) -> int:
    """The lowest-ranked passage that no family needs, restored ones before kept ones; -1 for none.

    No family needs a passage when each that it serves is served by another.
    """
    served = (serves[start:end] & present[start:end].reshape(-1, 1)).sum(axis=0)
    for stayed in (False, True):
        for place in range(end - 1, start - 1, -1):
            candidate = present[place] and kept[place] == stayed
            if candidate and not (serves[place] & (served < 2)).any():  # noqa: PLR2004 - itself and another
                return place
    return -1


@kernel
def restore_families(
    offsets: Array, required: Array, serves: Array, kept: Array, restorable: Array, slots: Array
) -> tuple[Array, Array]:
    """Brings back, for each required family without a passage, the best-ranked one that grading removed.

    Families come in plan order. Where every slot is taken the lowest-ranked passage makes place that is
    not the only one of a required family: one that came back for a family that is served again goes
    before a kept one. With at least as many slots as required families there is always one that can,
    since each of the others stands for a family of its own.

    Args:
        offsets: (queries + 1,) int64, the passages of each query, in rank order.
        required: (queries,) int64, how many families each query requires.
        serves: (passages, families) bool, column f for the f-th required family of the passage's query.
        kept: (passages,) bool.
        restorable: (passages,) bool, none of them kept.
        slots: (queries,) int64; never exceeded if no more are kept.

    Returns:
        present: (passages,) bool, kept or restored and not displaced.
        restored_for: (passages,) int64, the family that a passage came back for, -1 for the others.
    """
    present = kept.copy()
    restored_for = np.full(len(kept), -1, np.int64)
    for query in range(len(offsets) - 1):
        start, end = offsets[query], offsets[query + 1]
        room = slots[query] - kept[start:end].sum()
        for family in range(required[query]):
            if (present[start:end] & serves[start:end, family]).any():
                continue
            candidates = np.flatnonzero(restorable[start:end] & serves[start:end, family])
            if not len(candidates):
                continue
            back = start + candidates[0]
            present[back] = True
            if room > 0:
                room -= 1
            else:
                leaver = _dispensable(serves, present, kept, start, end)
                if leaver < 0:
                    present[back] = False
                    continue
                present[leaver] = False
                restored_for[leaver] = -1
            restored_for[back] = family
    return present, restored_for


@kernel
def admit_within_budget(offsets: Array, leads: Array, tokens: Array, budget: int) -> Array:
    """How many tokens of each passage enter the context, -1 for one that is left out.

    Passages that lead a family go first. Where they do not fit together the longest are cut to one length, or to
    one token less, so that each family keeps as much as the others leave it (max-min fair shares): shorter ones
    are served first, of equal length the better-ranked; a family is lost only where there are more of them than
    tokens. Then the others are asked in rank order: one that does not fit is left out and later ones may still
    fit. Where no passage leads, the very first is cut if it does not fit.

    Args:
        offsets: (queries + 1,) int64, the passages of each query, in rank order.
        leads: (passages,) bool, the best-ranked passage of a required family.
        tokens: (passages,) int64.
        budget: tokens of one query, >= 1.

    Returns:
        (passages,) int64.
    """
    admitted = np.full(len(tokens), -1, np.int64)
    for query in range(len(offsets) - 1):
        left, places = budget, np.arange(offsets[query], offsets[query + 1])
        leading = places[leads[places]]
        leading = leading[np.argsort(tokens[leading], kind="mergesort")]  # stable: equal lengths stay in rank order
        for served, place in enumerate(leading):
            waiting = len(leading) - served
            share = min(tokens[place], (left + waiting - 1) // waiting)
            if share > 0 or tokens[place] == 0:
                admitted[place] = share
                left -= share
        first = len(leading) == 0
        for place in places[~leads[places]]:
            if first or tokens[place] <= left:
                admitted[place] = min(tokens[place], left)
                left -= admitted[place]
                first = False
    return admitted


@dataclass(frozen=True)
class _Passages:
    """Passages of a shard, laid end to end by query, in rank order.

    `places` are theirs among the graded candidates; `serves` is (passages, families), column f for
    the f-th required family of the passage's query.
    """

    queries: IntArray
    rows: IntArray
    places: IntArray
    serves: Array

    def take(self, chosen: Array) -> _Passages:
        """Some of the passages, in the same order."""
        return _Passages(self.queries[chosen], self.rows[chosen], self.places[chosen], self.serves[chosen])

    def offsets(self, count: int) -> IntArray:
        """(count + 1,) int64: where the passages of each of `count` queries start."""
        return offsets_from_lengths(np.bincount(self.queries, minlength=count))

    def leads(self) -> Array:
        """(passages,) bool: the best-ranked passage of each required family of each query."""
        leads = np.zeros(len(self.rows), dtype=bool)
        for served in self.serves.T:
            members = np.flatnonzero(served)
            leads[members[np.unique(self.queries[members], return_index=True)[1]]] = True
        return leads


def context_table(
    *,
    queries: pa.Table,
    oversample: pa.Table,
    greedy_selection: pa.Table,
    sparse_search: pa.Table,
    rrf_merge: pa.Table,
    family_rescue: pa.Table,
    blended_rerank: pa.Table,
    crag_grading: pa.Table,
    corpus: Corpus,
    params: Params,
) -> StageOutput:
    """Restores families, admits passages within the budget, and cites what every stage said of them."""
    graded = ragged(crag_grading, "candidates")
    required = ragged(blended_rerank, "required")
    kept = graded.numpy("kept").astype(bool)
    passages = _Passages(
        graded.rows, corpus.rows(graded.values["chunk_id"]), np.arange(len(kept)), _serves(graded, required)
    )
    incorrect = as_numpy(pc.equal(graded.values["grade"], "incorrect")).astype(bool)
    selected = as_numpy(pc.equal(graded.values["origin"], "selected")).astype(bool)
    slots = as_numpy(column(blended_rerank, "slots")).astype(np.int64)
    restorable = ~kept & incorrect & selected
    present, restored_for = restore_families(graded.offsets, required.lengths, passages.serves, kept, restorable, slots)
    offered = passages.take(present)
    texts, strips = _refined(offered, queries, corpus, params)
    tokens = count_tokens(texts)
    admitted = admit_within_budget(offered.offsets(len(queries)), offered.leads(), tokens, params.token_budget)

    fits = admitted >= 0
    final = offered.take(fits)
    stages = {
        "oversample": oversample,
        "greedy_selection": greedy_selection,
        "sparse_search": sparse_search,
        "rrf_merge": rrf_merge,
        "blended_rerank": blended_rerank,
    }
    values = {
        **_source_fields(final.rows, corpus),
        **_text_fields(
            texts.filter(pa.array(fits)),
            None if strips is None else list(compress(strips, fits)),
            admitted[fits] < tokens[fits],
            admitted[fits],
        ),
        **_grading_fields(final, graded, required, restored_for),
        "rescued": _cited(family_rescue, ("rescued",), final, corpus)["rescued"].fill_null(False),
    }
    for name, stage in stages.items():
        cited = _cited(stage, ("rank", "score"), final, corpus)
        values |= {f"{name}_{field}": array for field, array in cited.items()}
    lists = Ragged(final.offsets(len(queries)), final.rows)
    used = np.bincount(final.queries, weights=admitted[fits], minlength=len(queries)).astype(np.int64)
    table = build_table(
        Context,
        {
            "query_id": queries.column("query_id"),
            "text": queries.column("text"),
            "shape": family_rescue.column("shape"),
            "action": crag_grading.column("action"),
            **_coverage(final, required),
            "tokens": used,
            "candidates": Ragged(lists.offsets, {"rank": lists.positions + 1, **values}),
        },
    )
    return StageOutput(table, _account(kept, incorrect, present, admitted))


def _serves(graded: Ragged, required: Ragged) -> Array:
    """(passages, families) bool: column f says whether a passage serves the f-th required family of its query."""
    lists = graded.values["families"]
    families = Ragged(offsets_from_lengths(as_numpy(pc.list_value_length(lists))), lists.flatten())
    names = pa.chunked_array([required.values, families.values], pa.string()).combine_chunks().dictionary_encode()
    codes = as_numpy(names.indices).astype(np.int64)
    wanted, offered = codes[: len(required.rows)], codes[len(required.rows) :]
    base = len(names.dictionary)
    asked = pa.array(required.rows * base + wanted)
    found = pc.index_in(pa.array(graded.rows[families.rows] * base + offered), value_set=asked)
    served = as_numpy(found.is_valid())
    serves = np.zeros((len(graded.rows), int(required.lengths.max(initial=0))), dtype=bool)
    serves[families.rows[served], required.positions[as_numpy(found.drop_null())]] = True
    return serves


def _refined(
    offered: _Passages, queries: pa.Table, corpus: Corpus, params: Params
) -> tuple[pa.Array, list[list[Span]] | None]:
    """The text of each offered passage, and the spans of its chunk that it consists of; None for whole chunks."""
    texts = corpus.column("text").take(pa.array(offered.rows, pa.int64()))
    if not params.strips:
        return texts, None
    # The raw text of whichever line came first: its terms are those of the normalised text.
    questions, whole = queries.column("text").to_pylist(), texts.to_pylist()
    spans = [
        kept_spans(questions[query], text, corpus.tokeniser, params.strip_sentences, params.strip_overlap)
        for query, text in zip(offered.queries, whole, strict=True)
    ]
    shown = [recomposed(text, kept) for text, kept in zip(whole, spans, strict=True)]
    return pa.array(shown, pa.string()), spans


def _text_fields(texts: pa.Array, strips: list[list[Span]] | None, cut: Array, admitted: IntArray) -> dict[str, Any]:
    """The texts with their spans, those admitted in part cut on a token border; without strips each has one span."""
    places = np.flatnonzero(cut)
    parts = [cut_text(texts[int(place)].as_py(), int(admitted[place])) for place in places]
    shown = pc.replace_with_mask(texts, pa.array(cut), pa.array(parts, pa.string()))
    if strips is None:
        offsets, ends = np.arange(len(texts) + 1), as_numpy(pc.utf8_length(shown))
        borders = np.stack([np.zeros_like(ends), ends], axis=1)
    else:
        for place, part in zip(places, parts, strict=True):
            strips[place] = first_characters(strips[place], len(part))
        offsets = offsets_from_lengths(np.array([len(some) for some in strips], dtype=np.int64))
        borders = np.array([border for some in strips for border in some], dtype=np.int32).reshape(-1, 2)
    return {
        "text": shown,
        "span_start": borders[offsets[:-1], 0],
        "span_end": borders[offsets[1:] - 1, 1],
        "spans": Ragged(offsets, {"start": borders[:, 0], "end": borders[:, 1]}),
    }


def _source_fields(rows: IntArray, corpus: Corpus) -> dict[str, Any]:
    """Where each passage comes from."""
    places = pa.array(rows, pa.int64())
    names = ("chunk_id", "source", "document_id", "title", "version", "authority_tier")
    return {name: corpus.column(name).take(places) for name in names}


def _grading_fields(final: _Passages, graded: Ragged, required: Ragged, restored_for: IntArray) -> dict[str, Any]:
    """What grading said of each passage, and why it came back if it did."""
    places = pa.array(final.places, pa.int64())
    names = ("rank", "score", "grade", "graded_by", "origin", "families")
    fields = {name: graded.values[name].take(places) for name in names}
    family = restored_for[final.places]
    because: list[str | None] = [None] * len(final.rows)
    for place in np.flatnonzero(family >= 0):
        name = required.values[int(required.offsets[final.queries[place]] + family[place])].as_py()
        score, by = fields["score"][int(place)].as_py(), _BECAUSE_OF[fields["graded_by"][int(place)].as_py()]
        because[place] = f"No other passage serves the required family {name}; graded incorrect {by} {score:.3g}."
    return {
        "grade": fields["grade"],
        "graded_by": fields["graded_by"],
        "origin": fields["origin"],
        "families": fields["families"],
        "crag_grading_rank": fields["rank"],
        "crag_grading_score": fields["score"],
        "restored": family >= 0,
        "restored_because": because,
    }


def _cited(table: pa.Table, fields: tuple[str, ...], final: _Passages, corpus: Corpus) -> dict[str, pa.Array]:
    """(passages,) fields of a stage's candidates, null where the stage did not list the passage."""
    listed = ragged(table, "candidates")
    ids = corpus.ids(final.rows).dictionary_encode()
    # The few ids of the passages are looked for among the many of the candidates, not all in the whole corpus.
    codes = pc.index_in(listed.values["chunk_id"], value_set=ids.dictionary)
    known = np.flatnonzero(as_numpy(codes.is_valid()))
    keys = listed.rows[known] * len(ids.dictionary) + as_numpy(codes.drop_null())
    wanted = final.queries * len(ids.dictionary) + as_numpy(ids.indices)
    places = pa.array(known).take(pc.index_in(pa.array(wanted), value_set=pa.array(keys)))
    return {field: listed.values[field].take(places) for field in fields}


def _coverage(final: _Passages, required: Ragged) -> dict[str, Any]:
    """The required families with and without a passage in the context, in plan order, and the share covered."""
    count = len(required.lengths)
    served = np.zeros((count, final.serves.shape[1]), dtype=bool)
    np.logical_or.at(served, final.queries, final.serves)
    covered = served[required.rows, required.positions]
    lengths = np.bincount(required.rows[covered], minlength=count)
    recall = np.divide(lengths, required.lengths, out=np.zeros(count), where=required.lengths > 0)
    names = required.values
    return {
        "required": required,
        "covered": Ragged(offsets_from_lengths(lengths), names.filter(pa.array(covered))),
        "missing": Ragged(offsets_from_lengths(required.lengths - lengths), names.filter(pa.array(~covered))),
        "evidence_family_recall": pa.array(recall, mask=required.lengths == 0),
    }


def _account(kept: Array, incorrect: Array, present: Array, admitted: Array) -> Account:
    removed = {
        "incorrect": int((~kept & ~present & incorrect).sum()),
        "no_slot": int((~kept & ~present & ~incorrect).sum()),
        "made_place": int((kept & ~present).sum()),
        "over_budget": int((admitted < 0).sum()),
    }
    return Account(
        candidates_in=len(kept),
        added={},
        removed={reason: number for reason, number in removed.items() if number},
        candidates_out=int((admitted >= 0).sum()),
    )


def _over_full(inputs: Mapping[str, pa.Table], output: pa.Table) -> str | None:
    """The success check: which query has more passages than slots."""
    counts, slots = ragged(output, "candidates").lengths, as_numpy(column(inputs["blended_rerank"], "slots"))
    over = np.flatnonzero(counts > slots)
    if not len(over):
        return None
    return f"query {output.column('query_id')[int(over[0])].as_py()} has {counts[over[0]]} passages"


def _lost(inputs: Mapping[str, pa.Table], output: pa.Table) -> str | None:
    """The success check: which query lost everything that grading kept."""
    graded = ragged(inputs["crag_grading"], "candidates")
    kept = np.bincount(graded.rows[graded.numpy("kept").astype(bool)], minlength=len(output))
    lost = np.flatnonzero((kept > 0) & (ragged(output, "candidates").lengths == 0))
    return f"query {output.column('query_id')[int(lost[0])].as_py()} has an empty context" if len(lost) else None


STAGE = Stage(
    name="context",
    summary="Restores required families that grading removed, and builds the cited context within the token budget.",
    owner="answer quality",
    reads={
        "queries": ("query_id", "text"),
        "oversample": _CITED,
        "greedy_selection": _CITED,
        "sparse_search": _CITED,
        "rrf_merge": _CITED,
        "family_rescue": ("query_id", "shape", "candidates.chunk_id", "candidates.rescued"),
        "blended_rerank": (*_CITED, "required", "slots"),
        "crag_grading": ("query_id", "action", "candidates"),
    },
    writes=Context,
    params=Params,
    run=context_table,
    needs=("corpus",),
    success=(
        SAME_QUERIES,
        SuccessCheck("no query has more passages than slots", _over_full),
        SuccessCheck("a query with kept passages has a context", _lost),
    ),
    on_partial_failure="Joins and arithmetic: a shard that fails is a defect or a foreign snapshot; it fails whole.",
    known_failure=(
        "A budget smaller than the passages of the required families cuts them, maybe before what answers: the cited "
        "spans end before their chunks do."
    ),
    roll_back="Rerun from context with the earlier token_budget; no earlier stage depends on it.",
)
