"""Strips: a passage cut into runs of sentences, of which those that share words with the question are kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import re2

from corpus.tokeniser import Tokeniser

# A sentence ends at its mark and the space behind it, at a mark of a script without spaces, or with its line.
_QUOTES, _IDEOGRAPHIC = r"\x{2019}\x{201D}", r"\x{3002}\x{FF01}\x{FF1F}"
_END = re2.compile(rf"""[.!?…]+["'{_QUOTES})\]]*[\p{{Z}}\s]+|[{_IDEOGRAPHIC}]+|[\p{{Z}}\t]*[\r\n][\p{{Z}}\s]*""")

Span = tuple[int, int]


def cut_into_strips(text: str, sentences: int) -> list[Span]:
    """The (start, end) of runs of `sentences` sentences; together they are the whole text, without gaps."""
    borders, last = [0], len(text.rstrip())
    for found in _END.finditer(text):
        if found.end() < last and text[borders[-1] : found.end()].strip():
            borders.append(found.end())
    starts = borders[::sentences]
    return list(pairwise([*starts, len(text)]))


def kept_spans(question: str, text: str, tokeniser: Tokeniser, sentences: int, overlap: float) -> list[Span]:
    """The spans of a text that are left when strips with too little of the question are taken out, in their order.

    Neighbours are one span, without the space around it; a text of which all is left is left as it is. A text
    keeps at least its best strip, the first of equal ones, and all of it when the question has no terms.

    Args:
        question: its distinct terms are looked for.
        text: cut by `cut_into_strips`.
        tokeniser: makes terms of both.
        sentences: of a strip, >= 1.
        overlap: the share of the question's terms that a strip must have to be kept, 0 to 1.

    Source: CRAG (Yan et al. 2024), section 4.4, decompose then recompose. There the evaluator scores each strip
    and the best five above a threshold are kept; here shared terms decide, and all above the threshold stay.
    """
    strips, terms = cut_into_strips(text, sentences), set(tokeniser.tokens(question))
    if not terms:
        return [(0, len(text))]
    shares = [len(terms.intersection(tokeniser.tokens(text[start:end]))) / len(terms) for start, end in strips]
    kept = [strip for strip, share in zip(strips, shares, strict=True) if share >= overlap]
    kept = kept or [strips[shares.index(max(shares))]]
    return [(0, len(text))] if len(kept) == len(strips) else _joined(text, kept)


def _joined(text: str, kept: Sequence[Span]) -> list[Span]:
    """Spans with neighbours put together, and without the space at their ends."""
    spans: list[Span] = []
    for start, end in kept:
        if spans and spans[-1][1] == start:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    trimmed = []
    for start, end in spans:
        part = text[start:end]
        trimmed.append((start + len(part) - len(part.lstrip()), end - len(part) + len(part.rstrip())))
    return trimmed


def recomposed(text: str, spans: Sequence[Span]) -> str:
    """The spans of a text in their order, with a line break between them."""
    return "\n".join(text[start:end] for start, end in spans)


def first_characters(spans: Sequence[Span], length: int) -> list[Span]:
    """The spans of which the first `length` characters of their recomposed text consist."""
    shown: list[Span] = []
    for start, end in spans:
        if length <= 0:
            break
        shown.append((start, min(end, start + length)))
        length -= end - start + 1
    return shown
