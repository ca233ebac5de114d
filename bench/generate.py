"""Corpora and query logs made by rule: `python -m bench.generate --chunks N --queries M --dimension 384 --out FOLDER`.

The same seed and sizes give the same data, block by block, so that memory holds one block and a few bytes a
query, whatever the size. Chunks lie in clusters of topics; each topic has words of its own, drawn by the law
of Zipf and Mandelbrot beside words that all topics share; some chunks are near copies of others. Queries ask
for a chunk in some of its words, from near its vector, and the lines of a log repeat them by Zipf's law.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Array = np.ndarray[Any, np.dtype[Any]]

_BLOCK = 8192
_MOST_TOPICS = 2048
_VOCABULARY, _SHARED_WORDS, _TOPIC_WORDS = 60_000, 2_000, 4_000
_SHARED_SHARE = 0.3
_SHORTEST, _LONGEST = 30, 90  # words of a chunk
_ASKED = (5, 10)  # words of a query, from and below
_IDENTIFIER_SHARE = 0.1  # queries that name the identifier of their document
_DOCUMENT = 5  # chunks of one
_CHANGED = 0.05  # words of a near copy
_KINDS = ("guide", "reference", "note")
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
    cumulated: Array = np.cumsum(weights)
    return cumulated / cumulated[-1]


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
        ranks = np.where(common, _drawn(shared, random, len(owners)), _drawn(own, random, len(owners)))
        # Each topic starts at another place of the vocabulary, and steps through it.
        theirs = _SHARED_WORDS + (owners * 6007 + ranks * 13) % (_VOCABULARY - _SHARED_WORDS)
        words = np.split(np.where(common, ranks, theirs), np.cumsum(lengths)[:-1])
        vectors = centres[topic] + random.normal(scale=0.8, size=(len(chunks), sizes.dimension)).astype(np.float32)
        _copy_some(words, vectors, sizes.near_copies, random)
        yield Block(chunks, words, _unit(vectors), random)


def _drawn(cumulated: Array, random: np.random.Generator, count: int) -> Array:
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


def _unit(vectors: Array) -> Array:
    scaled: Array = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return scaled.astype(np.float32)


def chunk_table(block: Block, sizes: Sizes) -> pa.Table:
    """The chunks of a block as a corpus file has them."""
    documents = [number // _DOCUMENT for number in block.chunks]
    columns: dict[str, Any] = {
        "chunk_id": [f"c-{number:09d}" for number in block.chunks],
        "text": [
            f"{' '.join(WORDS[codes])} {identifier(document)}"
            for codes, document in zip(block.words, documents, strict=True)
        ],
        "source": [f"{_KINDS[document % len(_KINDS)]}/{document}.md" for document in documents],
        "document_id": [f"d-{document:09d}" for document in documents],
        "chunk_index": [number % _DOCUMENT for number in block.chunks],
        "version": [f"v{1 + document % 3}" for document in documents],
        "embedding": _lists(block.vectors),
    }
    if sizes.groups:
        columns["acl"] = [
            sorted({f"g{document % sizes.groups}", f"g{document // 7 % sizes.groups}"}) for document in documents
        ]
    return pa.table(columns)


def identifier(document: int) -> str:
    """What a document is called by, as an error code or a part number is."""
    return f"REF-{document:07d}"


def _lists(vectors: Array) -> pa.Array:
    """Vectors as lists of a fixed size whose elements are never null, which Parquet reads fastest."""
    kind = pa.list_(pa.field("element", pa.float32(), nullable=False), vectors.shape[1])
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), type=kind)


def query_table(block: Block, numbers: range, sizes: Sizes) -> pa.Table:
    """Distinct queries for chunks of a block: words of the chunk in any order, and a vector near its own."""
    random = block.random
    asked = random.integers(len(block.chunks), size=len(numbers))
    counts = random.integers(*_ASKED, size=len(numbers))
    named = random.random(len(numbers)) < _IDENTIFIER_SHARE
    texts = []
    for place, count, by_name in zip(asked.tolist(), counts.tolist(), named.tolist(), strict=True):
        some = WORDS[random.choice(block.words[place], size=count, replace=False)]
        document = block.chunks[place] // _DOCUMENT
        texts.append(" ".join([*some, identifier(document)] if by_name else some))
    noise = random.normal(scale=0.6 / sizes.dimension**0.5, size=(len(numbers), sizes.dimension))
    columns: dict[str, Any] = {
        "query_id": [f"q-{number:09d}" for number in numbers],
        "text": texts,
        "embedding": _lists(_unit(block.vectors[asked] + noise)),
    }
    if sizes.groups:
        documents = [block.chunks[place] // _DOCUMENT for place in asked.tolist()]
        columns["groups"] = [[f"g{document % sizes.groups}"] for document in documents]
    return pa.table(columns)


def log_order(sizes: Sizes) -> Array:
    """(queries,) int32: the distinct query of each line: every one at least once, repeats by Zipf's law."""
    random = np.random.default_rng([sizes.seed, 2])
    distinct = sizes.distinct_queries
    repeats = _drawn(zipf(distinct, shift=0.0), random, sizes.queries - distinct)
    popular = random.permutation(distinct)
    lines = np.concatenate([np.arange(distinct), popular[repeats]]).astype(np.int32)
    random.shuffle(lines)
    return lines


def write(sizes: Sizes, folder: Path) -> None:
    """Writes corpus.parquet and queries.parquet."""
    folder.mkdir(parents=True, exist_ok=True)
    distinct = folder / "distinct_queries.arrow"
    writers: dict[Path, Any] = {}
    for number, block in enumerate(blocks(sizes)):
        corpus, asked = chunk_table(block, sizes), query_table(block, sizes.asked_of(number), sizes)
        if not writers:
            writers[folder / "corpus.parquet"] = pq.ParquetWriter(folder / "corpus.parquet", corpus.schema)
            writers[distinct] = pa.ipc.new_file(distinct, asked.schema)
        for path, table in ((folder / "corpus.parquet", corpus), (distinct, asked)):
            writers[path].write_table(table)
    for writer in writers.values():
        writer.close()
    _write_log(sizes, distinct, folder / "queries.parquet")
    distinct.unlink()


def _write_log(sizes: Sizes, distinct: Path, path: Path) -> None:
    """The lines of the log, from distinct queries that stay on the disk."""
    lines = log_order(sizes)
    with pa.memory_map(str(distinct)) as file:
        queries = pa.ipc.open_file(file).read_all()
        with pq.ParquetWriter(path, queries.schema) as writer:
            for start in range(0, len(lines), _BLOCK):
                part = queries.take(pa.array(lines[start : start + _BLOCK]))
                ids = pa.array([f"line-{number:09d}" for number in range(start, start + len(part))])
                writer.write_table(part.set_column(0, "query_id", ids))


def main() -> None:
    """Writes what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Sizes(chunks=1, queries=1)
    parser.add_argument("--chunks", type=int, required=True)
    parser.add_argument("--queries", type=int, required=True, help="lines of the log")
    parser.add_argument("--dimension", type=int, default=defaults.dimension)
    parser.add_argument("--distinct-share", type=float, default=defaults.distinct_share, help="in (0, 1]")
    parser.add_argument("--near-copies", type=float, default=defaults.near_copies, help="share of the chunks")
    parser.add_argument("--groups", type=int, default=defaults.groups, help="access groups; 0 for none")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--out", type=Path, required=True)
    words = vars(parser.parse_args())
    folder = words.pop("out")
    write(Sizes(**words), folder)
    print(f"{folder}/corpus.parquet and {folder}/queries.parquet")


if __name__ == "__main__":
    main()
