"""Tokeniser: text to keyword terms, the same for corpus, queries and lexical overlap."""

from __future__ import annotations

import re
import threading
import unicodedata
from collections.abc import Iterable
from functools import cache
from itertools import chain
from typing import Literal

import Stemmer

from contracts.params import Params

Language = Literal[
    "none", "arabic", "armenian", "basque", "catalan", "czech", "danish", "dutch", "english", "esperanto", "estonian",
    "finnish", "french", "german", "greek", "hindi", "hungarian", "indonesian", "irish", "italian", "lithuanian",
    "nepali", "norwegian", "persian", "polish", "portuguese", "romanian", "russian", "serbian", "sesotho", "spanish",
    "swedish", "tamil", "turkish", "yiddish",
]  # fmt: skip

# The short list that Lucene made customary: articles, prepositions and forms of "be".
ENGLISH_STOP_WORDS = frozenset([
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no", "not", "of",
    "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was", "will", "with",
])  # fmt: skip


def _ranges(code_points: Iterable[int]) -> str:
    """Code points in ascending order as the inside of a character class."""
    spans: list[list[int]] = []
    for code_point in code_points:
        if spans and spans[-1][1] == code_point - 1:
            spans[-1][1] = code_point
        else:
            spans.append([code_point, code_point])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in spans)


@cache
def _word() -> re.Pattern[str]:
    """A word in any script; made when first asked for, since it takes a look at every mark of Unicode."""
    # Python counts no combining mark to `\w`, which would cut Hindi or Tamil words at every vowel sign. Marks
    # stand in these two stretches of Unicode.
    marks = _ranges(
        code_point
        for code_point in chain(range(0x300, 0x20000), range(0xE0100, 0xE01F0))
        if unicodedata.category(chr(code_point)).startswith("M")
    )
    return re.compile(rf"\w[\w{marks}]*")


_ASCII_WORD = re.compile(r"[a-z0-9_]+")
# Han (with its repeat marks) and Hiragana, written without spaces: each character is a word of its own.
_SINGLE = re.compile(
    "[\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003fffd"
    "\u3041-\u3096\u309d-\u309f\U0001b001-\U0001b11f\U0001b132\U0001b150-\U0001b152]"
)
# Signs within a word that a reader does not see: soft hyphen, zero-width joiners, word joiner, byte order mark.
_INVISIBLE = re.compile("[\u00ad\u200c\u200d\u2060\ufeff]")


class TokeniserParams(Params):
    """How text becomes terms.

    Attributes:
        language: the Snowball stemmer; `none` keeps words whole. Stemming one language leaves words of
            another mostly alone.
        stop_words: words dropped before stemming; `english` is a list of 33, `none` drops nothing. A query
            of stop words alone has no terms and matches nothing.
    """

    language: Language = "english"
    stop_words: Literal["english", "none"] = "english"


class _Stemming(threading.local):
    """A stemmer for each thread, since a Snowball stemmer keeps state between words."""

    def __init__(self, language: str) -> None:
        self.words = Stemmer.Stemmer(language).stemWords


class Tokeniser:
    """Splits text into terms: case folded under NFKC, runs of word characters, stop words out, stemmed.

    Word characters are letters, digits, the underscore and, within a word, combining marks. Han and
    Hiragana characters are words one by one.

    Source: UAX #29 (word boundaries) for marks, invisible signs, Han and Hiragana. What differs: every
    punctuation sign ends a word (so `k8s.io`, `3.14` and `don't` are two each), and Thai, Lao, Khmer and
    Burmese, which need a dictionary, are cut at spaces only.
    """

    def __init__(self, params: TokeniserParams) -> None:
        self._stop_words = ENGLISH_STOP_WORDS if params.stop_words == "english" else frozenset()
        self._stemming = None if params.language == "none" else _Stemming(params.language)

    def tokens(self, text: str) -> list[str]:
        """The terms of a text in order, repeats kept."""
        kept = [word for word in words(text) if word not in self._stop_words]
        return kept if self._stemming is None else list(self._stemming.words(kept))


def words(text: str) -> list[str]:
    """The words of a text in order, folded but not stemmed: each is one term, or a stop word."""
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    # Case folding can take a composed letter apart, hence the second NFKC.
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return _word().findall(_SINGLE.sub(r" \g<0> ", _INVISIBLE.sub("", folded)))
