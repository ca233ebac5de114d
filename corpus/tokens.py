"""Tokens: how long a text is for a token budget, and where it is cut."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import re2

from contracts.columns import Array, IntArray, as_numpy, offsets_from_lengths
from corpus.compiled import kernel

# RE2's own \w and \s know ASCII alone.
_WORD = r"[\p{L}\p{M}\p{N}_]"
_ALONE = r"[^\p{L}\p{M}\p{N}_\p{Z}\p{Cc}]"
_TOKEN = re2.compile(f"{_WORD}+|{_ALONE}")

_SPACE, _IN_WORD, _BY_ITSELF = 0, 1, 2  # kinds of characters
_CHARACTERS = 0x110000
_BLOCK = 512  # texts at a time, whose characters take four bytes each


@kernel
def _characters_there(characters: Array) -> Array:
    """(0x110000,) bool: which characters occur."""
    there = np.zeros(_CHARACTERS, np.bool_)
    for character in characters:
        there[character] = True
    return there


@kernel
def _count(characters: Array, offsets: Array, kinds: Array) -> Array:
    """(texts,) int64: runs of characters of words, and characters that are a token each."""
    counts = np.zeros(len(offsets) - 1, np.int64)
    for text in range(len(counts)):
        before = _SPACE
        for place in range(offsets[text], offsets[text + 1]):
            kind = kinds[characters[place]]
            counts[text] += kind == _BY_ITSELF or (kind == _IN_WORD and before != _IN_WORD)
            before = kind
    return counts


def count_tokens(texts: pa.Array) -> IntArray:
    """(texts,) int64: runs of word characters (letters, marks, digits, underscore) and single others but spaces.

    What a character is, RE2 says, once for each that occurs; to let it find the tokens themselves takes six times
    as long. A text that stands there twice is counted once.
    """
    distinct = texts.dictionary_encode()
    blocks = [distinct.dictionary[start : start + _BLOCK] for start in range(0, len(distinct.dictionary), _BLOCK)]
    counts = np.concatenate([np.zeros(0, np.int64), *(_count_block(block) for block in blocks)])
    return counts[as_numpy(distinct.indices)]


def _count_block(texts: pa.Array) -> IntArray:
    characters = np.frombuffer("".join(texts.to_pylist()).encode("utf-32-le"), np.dtype("<u4"))
    there = np.flatnonzero(_characters_there(characters))
    letters = pa.array([chr(character) for character in there], pa.string())
    kinds = np.full(_CHARACTERS, _SPACE, np.uint8)
    for kind, pattern in ((_IN_WORD, _WORD), (_BY_ITSELF, _ALONE)):
        kinds[there[as_numpy(pc.match_substring_regex(letters, pattern))]] = kind
    counts: IntArray = _count(characters, offsets_from_lengths(as_numpy(pc.utf8_length(texts))), kinds)
    return counts


def cut_text(text: str, tokens: int) -> str:
    """The text up to the end of its `tokens`-th token."""
    end = 0
    for _, token in zip(range(tokens), _TOKEN.finditer(text), strict=False):
        end = token.end()
    return text[:end]
