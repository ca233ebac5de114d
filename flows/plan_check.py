"""plan_check: an evidence plan held against a corpus and a query log, before any run depends on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow.compute as pc
import yaml
from pydantic import ValidationError

from contracts.errors import ConfigurationError
from contracts.evidence import Combination, EvidencePlan, Family, Shape
from corpus.corpus import Corpus, KeywordSearch
from corpus.recognition import ShapeRecogniser, check_plan_patterns
from corpus.scope import Scope, Scopes
from stages.family_rescue import own_copies

_MOST_SHOWN = 60


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a plan (`error`), or looks so (`warning`), at a place in it."""

    severity: Literal["error", "warning"]
    where: str
    problem: str


@dataclass(frozen=True)
class FamilySupply:
    """What a corpus has for a family.

    Attributes:
        chunks, documents: that may serve it.
        tiers: how many chunks of each authority tier, "none" for those without.
        hits: the members that the rescue search finds within its depth, best first, as (rank, chunk row, score).
    """

    chunks: int
    documents: int
    tiers: dict[str, int]
    hits: list[tuple[int, int, float]]


def read_plan(path: Path) -> tuple[EvidencePlan | None, list[Finding]]:
    """The plan of a file, or everything that keeps it from being one.

    Raises:
        ConfigurationError: the file cannot be read, or is no YAML.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(
            str(path), "the evidence plan cannot be read", got=str(error), next_step="Correct the file."
        ) from error
    try:
        plan = EvidencePlan.model_validate(tree)
    except ValidationError as error:
        return None, [
            Finding("error", ".".join(map(str, one["loc"])) or "plan", f"{one['msg']}, got {_short(one.get('input'))}")
            for one in error.errors()
        ]
    try:
        check_plan_patterns(plan)
    except ConfigurationError as error:
        return None, [Finding("error", error.where, f"{error.problem}: got {error.got}, want {error.want}")]
    return plan, []


def check_plan(
    plan: EvidencePlan, corpus: Corpus, keyword_search: KeywordSearch, queries: Sequence[str] | None, slots: int
) -> list[Finding]:
    """Everything that is wrong with a plan for a corpus, in the order of the plan, errors and warnings.

    Args:
        plan: one whose patterns compile.
        corpus: the snapshot; an operator's view, past all access groups.
        keyword_search: over it.
        queries: normalised texts of a query log, or None.
        slots: `blended_rerank.top_k`.
    """
    findings: list[Finding] = []
    scope = everything(corpus)
    for shape in plan.shapes:
        findings += _shape_findings(shape, slots)
        for family in shape.families:
            findings += _family_findings(shape, family, corpus, keyword_search, scope)
    if queries is not None:
        findings += _query_findings(plan, queries)
    return findings


def everything(corpus: Corpus) -> Scope:
    """A scope that sees every chunk that any group may see."""
    groups = pc.unique(pc.list_flatten(corpus.column("acl"))).to_pylist() if corpus.snapshot.access_control else []
    return Scope(groups=tuple(sorted(groups)))


def supply_of(family: Family, corpus: Corpus, keyword_search: KeywordSearch, scope: Scope) -> FamilySupply:
    """What the corpus has for a family under a scope.

    Raises:
        ConfigurationError: metadata that no chunk has.
    """
    rows = np.flatnonzero(corpus.members(family) & corpus.visible(scope))
    documents = corpus.column("document_id").take(rows)
    tiers = Counter(
        "none" if tier is None else str(tier) for tier in corpus.column("authority_tier").take(rows).to_pylist()
    )
    hits = keyword_search.search([family.rescue_query], Scopes.single(scope, 1), family.depth)
    own = own_copies(hits.values["row"], family, scope, corpus)
    found = [
        (rank, int(row), float(score))
        for rank, (row, score) in enumerate(zip(own, hits.values["score"], strict=True), start=1)
        if row >= 0
    ]
    return FamilySupply(len(rows), len(pc.unique(documents)), dict(sorted(tiers.items())), found)


def _shape_findings(shape: Shape, slots: int) -> Iterator[Finding]:
    where = f"shape {shape.name}"
    if len(shape.families) > slots:
        problem = f"needs {len(shape.families)} families, and a selection has {slots} slots (blended_rerank.top_k)"
        yield Finding("error", where, problem)
    recogniser = ShapeRecogniser.of(shape)
    if recogniser.reason("") is not None:
        yield Finding("error", f"{where}, recognise", "recognises every question: a pattern is found in an empty text")
    named = {name for entry in shape.recognise if isinstance(entry, Combination) for name in entry.of}
    for name in shape.concepts:
        if name not in named:
            yield Finding("warning", f"{where}, concept {name}", "no combination names it")


def _family_findings(
    shape: Shape, family: Family, corpus: Corpus, keyword_search: KeywordSearch, scope: Scope
) -> Iterator[Finding]:
    where = f"shape {shape.name}, family {family.name}"
    try:
        supply = supply_of(family, corpus, keyword_search, scope)
    except ConfigurationError as error:
        yield Finding("error", f"{where}, metadata", f"{error.problem}: got {error.got}, want {error.want}")
        return
    anywhere = int(corpus.members(family.model_copy(update={"authority": None})).sum())
    if family.source is not None:
        matched = int(corpus.members(Family(name="any", source=family.source, rescue_query="any")).sum())
        if not matched:
            yield Finding("error", f"{where}, source", f"matches no chunk of the corpus: {family.source}")
        elif matched == len(corpus.chunks) and not family.metadata:
            yield Finding("warning", f"{where}, source", f"matches every chunk of the corpus: {family.source}")
    if not supply.chunks and anywhere:
        problem = f"none of its {anywhere} chunks has an authority of {family.authority}"
        yield Finding("error", f"{where}, authority", problem)
    elif not supply.chunks:
        yield Finding("error", where, "no chunk of the corpus serves it")
    elif not supply.hits:
        problem = f"finds none of its {supply.chunks} chunks among the best {family.depth}: {family.rescue_query}"
        yield Finding("error", f"{where}, rescue_query", problem)
    elif len(supply.hits) < min(family.wanted, supply.chunks):
        problem = f"finds {len(supply.hits)} of {family.wanted} wanted chunks among the best {family.depth}"
        yield Finding("warning", f"{where}, rescue_query", problem)


def _query_findings(plan: EvidencePlan, queries: Sequence[str]) -> Iterator[Finding]:
    """What a log says of the recognisers: those that never or always hold, and questions of two shapes."""
    recognisers = [ShapeRecogniser.of(shape) for shape in plan.shapes]
    shapes_of: dict[tuple[str, ...], list[str]] = {}
    for text in queries:
        names = tuple(one.shape.name for one in recognisers if one.reason(text) is not None)
        shapes_of.setdefault(names, []).append(text)
    for one in recognisers:
        where = f"shape {one.shape.name}, recognise"
        for place, entry in enumerate(one.shape.recognise):
            hits = sum(one.reason_of(entry, text) is not None for text in queries)
            what = entry if isinstance(entry, str) else f"{entry.at_least or 'all'} of {', '.join(entry.of)}"
            if hits == 0:
                yield Finding("warning", f"{where}.{place}", f"holds for none of {len(queries)} queries: {what}")
            elif hits == len(queries) > 1:
                yield Finding("error", f"{where}.{place}", f"holds for all of {len(queries)} queries: {what}")
    for names, texts in shapes_of.items():
        if len(names) > 1:
            problem = f"recognise the same {len(texts)} queries, and {names[0]} takes them, as in: {_short(texts[0])}"
            yield Finding("warning", f"shapes {', '.join(names)}", problem)


def recognised_counts(plan: EvidencePlan, queries: Sequence[str]) -> dict[str, int]:
    """How many queries each shape takes."""
    recognisers = [ShapeRecogniser.of(shape) for shape in plan.shapes]
    taken = (next((one.shape.name for one in recognisers if one.reason(text) is not None), None) for text in queries)
    counts = Counter(name for name in taken if name is not None)
    return {shape.name: counts[shape.name] for shape in plan.shapes}


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
