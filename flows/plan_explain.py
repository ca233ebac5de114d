"""plan_explain: what an evidence plan makes of one question, and what the corpus has for it."""

from __future__ import annotations

from typing import Any

from contracts.evidence import Combination, EvidencePlan, Family
from corpus.corpus import Corpus, KeywordSearch
from corpus.recognition import ShapeRecogniser
from corpus.scope import Scope
from flows.plan_check import supply_of
from loading.identity import normalised

_MOST_HITS = 5


def explain(
    plan: EvidencePlan, question: str, corpus: Corpus, keyword_search: KeywordSearch, scope: Scope
) -> dict[str, Any]:
    """The shape of a question and by what it was recognised, and for each family what the corpus has.

    Returns:
        `shape` and `recognised_by` (None without one), `also` the later shapes that recognise it too, `near` for
        each other shape with concepts what the question touches and what it lacks, and `families` in order.
    """
    text = normalised(question)
    recognisers = [ShapeRecogniser.of(shape) for shape in plan.shapes]
    reasons = [(one.shape, reason) for one in recognisers if (reason := one.reason(text)) is not None]
    shape, because = reasons[0] if reasons else (None, None)
    near = [_near(one, text) for one in recognisers if one.shape not in [found for found, _ in reasons]]
    return {
        "plan": plan.name,
        "version": plan.version,
        "question": text,
        "shape": None if shape is None else shape.name,
        "recognised_by": because,
        "also": [{"shape": found.name, "recognised_by": reason} for found, reason in reasons[1:]],
        "near": [one for one in near if one["touched"]],
        "families": [
            _family(family, corpus, keyword_search, scope) for family in ([] if shape is None else shape.families)
        ],
    }


def _near(recogniser: ShapeRecogniser, text: str) -> dict[str, Any]:
    """What a question touches of a shape that does not recognise it: of the combination that holds most."""
    best: dict[str, Any] = {"shape": recogniser.shape.name, "touched": {}, "lacks": [], "at_least": None}
    for entry in recogniser.shape.recognise:
        if isinstance(entry, Combination):
            words = {name: recogniser.word_of(name, text) for name in entry.of}
            touched = {name: word for name, word in words.items() if word is not None}
            if len(touched) > len(best["touched"]):
                lacks = [name for name in entry.of if name not in touched]
                best |= {"touched": touched, "lacks": lacks, "at_least": entry.at_least or len(entry.of)}
    return best


def _family(family: Family, corpus: Corpus, keyword_search: KeywordSearch, scope: Scope) -> dict[str, Any]:
    supply = supply_of(family, corpus, keyword_search, scope)
    ids, titles = corpus.column("chunk_id"), corpus.column("title")
    hits = [
        {"rank": rank, "chunk_id": ids[row].as_py(), "title": titles[row].as_py(), "score": score}
        for rank, row, score in supply.hits[:_MOST_HITS]
    ]
    return {
        **family.model_dump(mode="json"),
        "chunks": supply.chunks,
        "documents": supply.documents,
        "tiers": supply.tiers,
        "found": len(supply.hits),
        "hits": hits,
    }
