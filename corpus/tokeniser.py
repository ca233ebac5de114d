"""Tokeniser: text to keyword terms, the same for corpus, queries and lexical overlap."""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

import Stemmer

from contracts.params import Params

Language = Literal["none", "english", "spanish", "polish", "german", "french", "italian", "portuguese", "dutch"]

_WORD = re.compile(r"\w+")

# The short list that Lucene made customary: articles, prepositions and forms of "be".
ENGLISH_STOP_WORDS = frozenset(
    [
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "but",
        "by",
        "for",
        "if",
        "in",
        "into",
        "is",
        "it",
        "no",
        "not",
        "of",
        "on",
        "or",
        "such",
        "that",
        "the",
        "their",
        "then",
        "there",
        "these",
        "they",
        "this",
        "to",
        "was",
        "will",
        "with",
    ]
)


class TokeniserParams(Params):
    """How text becomes terms.

    Attributes:
        language: the Snowball stemmer; `none` keeps words whole. Stemming one language leaves words of
            another mostly alone.
        stop_words: words dropped before stemming; `english` is a list of 33, `none` drops nothing.
    """

    language: Language = "english"
    stop_words: Literal["english", "none"] = "english"


class Tokeniser:
    """Splits text into terms: NFKC, case folded, runs of Unicode word characters, stop words out, stemmed."""

    def __init__(self, params: TokeniserParams) -> None:
        self._stop_words = ENGLISH_STOP_WORDS if params.stop_words == "english" else frozenset()
        self._stem = None if params.language == "none" else Stemmer.Stemmer(params.language).stemWords

    def tokens(self, text: str) -> list[str]:
        """The terms of a text in order, repeats kept."""
        words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
        kept = [word for word in words if word not in self._stop_words]
        return kept if self._stem is None else list(self._stem(kept))
