"""Corpora and query logs made by rule: `python -m bench.generate --chunks N --queries M --dimension 384 --out FOLDER`.

The same seed and sizes give the same data, block by block, so that memory holds one block and a few bytes a
query, whatever the size. Chunks lie in clusters of topics; each topic has words of its own, drawn by the law
of Zipf and Mandelbrot beside words that all topics share; some chunks are near copies of others. Queries ask
for a chunk in some of its words, from near its vector, and the lines of a log repeat them by Zipf's law.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.topics import WORDS, Array, Block, Sizes, blocks, drawn, unit, zipf

_LINES = 8192  # of the log, written at once
_ASKED = (5, 10)  # words of a query, from and below
_IDENTIFIER_SHARE = 0.1  # queries that name the identifier of their document
_DOCUMENT = 5  # chunks of one
_KINDS = ("guide", "reference", "note")


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
        "embedding": _lists(unit(block.vectors[asked] + noise)),
    }
    if sizes.groups:
        documents = [block.chunks[place] // _DOCUMENT for place in asked.tolist()]
        columns["groups"] = [[f"g{document % sizes.groups}"] for document in documents]
    return pa.table(columns)


def log_order(sizes: Sizes) -> Array:
    """(queries,) int32: the distinct query of each line: every one at least once, repeats by Zipf's law."""
    random = np.random.default_rng([sizes.seed, 2])
    distinct = sizes.distinct_queries
    repeats = drawn(zipf(distinct, shift=0.0), random, sizes.queries - distinct)
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
            for start in range(0, len(lines), _LINES):
                part = queries.take(pa.array(lines[start : start + _LINES]))
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
