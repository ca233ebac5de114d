"""Topics: the random numbers behind generated corpora, block by block; see `bench.generate`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_BLOCK = 8192
_MOST_TOPICS = 2048
_VOCABULARY, _SHARED_WORDS, _TOPIC_WORDS = 60_000, 2_000, 4_000
_SHARED_SHARE = 0.3
_SHORTEST, _LONGEST = 30, 90  # words of a chunk
_CHANGED = 0.05  # words of a near copy
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprtvz" for vowel in "aeiou"]


@dataclass(frozen=True)
class Sizes:
    """What is made.

    Attributes:
        chunks: of the corpus, >= 1.
        queries: lines of the log, >= 1.
        dimension: of the vectors, >= 1.
        distinct_share: distinct queries by lines, in (0, 1]; 1 repeats nothing.
        near_copies: share of the chunks that are near copies of another, in [0, 1].
        groups: access groups; 0 makes a corpus without access control.
        seed: of all random numbers.
    """

    chunks: int
    queries: int
    dimension: int = 384
    distinct_share: float = 1.0
    near_copies: float = 0.1
    groups: int = 0
    seed: int = 7

    @property
    def distinct_queries(self) -> int:
        """Distinct queries of the log."""
        return max(1, round(self.queries * self.distinct_share))

    @property
    def blocks(self) -> int:
        """Blocks in which the corpus is made."""
        return -(-self.chunks // _BLOCK)

    def block(self, number: int) -> range:
        """The chunks of one block."""
        return range(number * _BLOCK, min((number + 1) * _BLOCK, self.chunks))

    def asked_of(self, number: int) -> range:
        """The distinct queries that ask for chunks of one block."""
        ends = [self.distinct_queries * self.block(one).stop // self.chunks for one in (number - 1, number)]
        return range(ends[0] if number else 0, ends[1])


@dataclass(frozen=True)
class Block:
    """Some chunks: their numbers, the words of each as codes, their vectors, and a generator for what follows."""

    chunks: range
    words: list[Array]
    vectors: Array
    random: np.random.Generator


def zipf(count: int, shift: float = 10.0) -> Array:
    """(count,) float64: cumulative probabilities of the ranks 1 to count, each as 1 / (rank + shift).

    Source: Zipf's law with Mandelbrot's shift, which holds the first words down as removed stop words do.
    """
    weights = 1.0 / (np.arange(1, count + 1) + shift)
    cumulated: Array = np.cumsum(weights) / weights.sum()
    return cumulated


def word(code: int) -> str:
    """The word of a code, three syllables; codes that are neighbours share none."""
    base = len(_SYLLABLES)
    scattered = (code * 7919 + 13) % base**3
    return "".join(_SYLLABLES[scattered // base**place % base] for place in range(3))


WORDS = np.array([word(code) for code in range(_VOCABULARY)], dtype=object)


def blocks(sizes: Sizes) -> Iterator[Block]:
    """The corpus block by block, each from random numbers of its own."""
    topics = max(4, min(_MOST_TOPICS, sizes.chunks // 100))
    centres = np.random.default_rng([sizes.seed, 0]).normal(size=(topics, sizes.dimension)).astype(np.float32)
    shared, own = zipf(_SHARED_WORDS), zipf(_TOPIC_WORDS)
    for number in range(sizes.blocks):
        random, chunks = np.random.default_rng([sizes.seed, 1, number]), sizes.block(number)
        topic = random.integers(topics, size=len(chunks))
        lengths = random.integers(_SHORTEST, _LONGEST + 1, size=len(chunks))
        owners = np.repeat(topic, lengths)
        common = random.random(len(owners)) < _SHARED_SHARE
        ranks = np.where(common, drawn(shared, random, len(owners)), drawn(own, random, len(owners)))
        # Each topic starts at another place of the vocabulary, and steps through it.
        theirs = _SHARED_WORDS + (owners * 6007 + ranks * 13) % (_VOCABULARY - _SHARED_WORDS)
        words = np.split(np.where(common, ranks, theirs), np.cumsum(lengths)[:-1])
        vectors = centres[topic] + random.normal(scale=0.8, size=(len(chunks), sizes.dimension)).astype(np.float32)
        _copy_some(words, vectors, sizes.near_copies, random)
        yield Block(chunks, words, unit(vectors), random)


def drawn(cumulated: Array, random: np.random.Generator, count: int) -> Array:
    """(count,) int64 ranks from 0, by cumulative probabilities as `zipf` gives them."""
    return np.searchsorted(cumulated, random.random(count), side="right")


def _copy_some(words: list[Array], vectors: Array, share: float, random: np.random.Generator) -> None:
    """Makes some chunks near copies of others: some words differ, and the vector by some hundredths."""
    copies = np.flatnonzero(random.random(len(words)) < share)
    for copy, original in zip(copies, random.integers(len(words), size=len(copies)), strict=True):
        text = words[original].copy()
        changed = random.random(len(text)) < _CHANGED
        changed[random.integers(len(text))] = True  # no text twice
        text[changed] = random.integers(_VOCABULARY, size=int(changed.sum()))
        words[copy] = text
        vectors[copy] = vectors[original] + random.normal(scale=0.15, size=vectors.shape[1]).astype(np.float32)


def unit(vectors: Array) -> Array:
    """Rows scaled to length 1, float32."""
    scaled: Array = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return scaled.astype(np.float32)
