"""Corpus: one snapshot in memory, with the searches that stages ask of it.

Chunks lie in ascending order of `chunk_id`, so a tie broken by row is a tie broken by chunk id. Every
search takes scopes and looks at eligible chunks alone: those the scope may see, and of equal texts
among them one representative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import re2

from contracts.columns import IntArray, Ragged, as_numpy, column, offsets_from_lengths, ragged
from contracts.corpus import CorpusSnapshot
from contracts.errors import ConfigurationError, MissingArtifactError
from contracts.evidence import Family
from corpus.exact_search import cosines, exact_candidates
from corpus.keyword_index import KeywordIndex
from corpus.keyword_search import KeywordSearch, lexical_overlap, term_ids
from corpus.passages import SearchedText, passage_texts
from corpus.scope import Scope, Scopes
from corpus.tokeniser import Tokeniser

if TYPE_CHECKING:
    import faiss

__all__ = ["Corpus", "KeywordSearch", "SearchedText"]

Array = np.ndarray[Any, np.dtype[Any]]

# A null authority tier ranks below every tier.
_NO_TIER = np.iinfo(np.int64).max


FILTERABLE_COLUMNS = ("chunk_id", "source", "document_id", "title", "evidence_family", "authority_tier", "version")


def filter_keys(chunks: pa.Table) -> list[str]:
    """Every key that filters and families may name, sorted: columns that hold anything, and the keys of metadata."""
    own = pc.unique(pc.list_flatten(column(chunks, "metadata")).field("key")).to_pylist()
    given = [name for name in FILTERABLE_COLUMNS if chunks.column(name).null_count < len(chunks)]
    return sorted({*given, *own})


class Corpus:
    """A corpus snapshot, ready to be searched.

    Attributes:
        snapshot: its manifest.
        chunks: table of `contracts.corpus.Chunk`, ascending chunk_id.
        embeddings: (chunks, dimension) float32, rows of length 1; may be a memory map.
        index: FAISS index over the embeddings, inner product.
        keywords: the keyword index.
        tokeniser: the one that the keyword index was built with.
        searched_text: what retrievers and models read of a chunk.
        collapse_identical_texts: of equal visible texts let one through (True), or all (False, ablation only).
    """

    def __init__(
        self,
        *,
        snapshot: CorpusSnapshot,
        chunks: pa.Table,
        embeddings: Array,
        index: faiss.Index,
        keywords: KeywordIndex,
        tokeniser: Tokeniser,
        searched_text: SearchedText = "title_and_text",
        collapse_identical_texts: bool = True,
    ) -> None:
        self.snapshot = snapshot
        self.chunks = chunks
        self.embeddings = embeddings
        self.index = index
        self.keywords = keywords
        self.tokeniser = tokeniser
        self.searched_text = searched_text
        self.collapse_identical_texts = collapse_identical_texts
        # Caches of this corpus alone, which go when it goes.
        self.eligible = lru_cache(maxsize=256)(self._eligible)
        self._members_of = lru_cache(maxsize=256)(self._members)
        self.keyword_search = lru_cache(maxsize=8)(self._keyword_search)

    def column(self, name: str) -> pa.Array:
        """A column of the chunks as one array, in row order."""
        return column(self.chunks, name)

    def ids(self, rows: IntArray) -> pa.Array:
        """Chunk rows to chunk ids."""
        return self.column("chunk_id").take(pa.array(rows, pa.int64()))

    def rows(self, chunk_ids: pa.Array) -> IntArray:
        """Chunk ids to chunk rows.

        Raises:
            MissingArtifactError: an id that this snapshot does not hold.
        """
        places = pc.index_in(chunk_ids, value_set=self.column("chunk_id"))
        if places.null_count:
            unknown = chunk_ids.filter(places.is_null())[0].as_py()
            raise MissingArtifactError(
                f"snapshot {self.snapshot.snapshot_id}",
                "does not hold the chunk",
                got=repr(unknown),
                next_step="Use the snapshot that the run was planned with.",
            )
        return as_numpy(places).astype(np.int64)

    def metadata(self, key: str) -> pa.Array:
        """One value a chunk of a column or of a further metadata key, as text; null where there is none.

        Raises:
            ConfigurationError: neither a column nor a metadata key of any chunk.
        """
        if key in FILTERABLE_COLUMNS:
            return self.column(key).cast(pa.string())
        values = pc.map_lookup(_as_map(self.column("metadata")), pa.scalar(key), "first")
        if values.null_count == len(values) and len(values):
            raise ConfigurationError(
                f"snapshot {self.snapshot.snapshot_id}",
                "no chunk has the metadata key",
                got=key,
                want=f"one of {', '.join(filter_keys(self.chunks))}",
                next_step="Correct the filter or the evidence plan, or ingest the column.",
            )
        return values

    def visible(self, scope: Scope) -> Array:
        """(chunks,) bool: what a scope may see: a shared group (a null acl is public) and every filter."""
        mask = np.ones(len(self.chunks), dtype=bool)
        if self.snapshot.access_control:
            lists = self.column("acl")
            member = pc.is_in(pc.list_flatten(lists), value_set=pa.array(scope.groups, pa.string()))
            mask = as_numpy(lists.is_null()).copy()
            mask[as_numpy(pc.list_parent_indices(lists))[as_numpy(member)]] = True
        for key, value in scope.filters:
            mask &= as_numpy(pc.fill_null(pc.equal(self.metadata(key), value), False))
        return mask

    def _eligible(self, scope: Scope) -> Array:
        """(chunks,) bool: what a search under this scope may return.

        Of chunks with equal texts that the scope sees, the one with the highest authority (lowest
        tier, null last) stands for all, then the lowest chunk id.
        """
        mask = self.visible(scope)
        if not self.collapse_identical_texts:
            return mask
        rows = np.flatnonzero(mask)
        tiers = as_numpy(pc.fill_null(self.column("authority_tier"), _NO_TIER))[rows]
        texts = as_numpy(self.column("text_id"))[rows]
        order = np.lexsort((rows, tiers, texts))
        first = np.ones(len(order), dtype=bool)
        first[1:] = np.diff(texts[order]) != 0
        representatives = np.zeros(len(mask), dtype=bool)
        representatives[rows[order[first]]] = True
        return representatives

    @cached_property
    def documents(self) -> IntArray:
        """(chunks,) int64: a number for each document, the same for its chunks."""
        return as_numpy(self.column("document_id").dictionary_encode().indices).astype(np.int64)

    def _members(self, family: _Membership) -> Array:
        mask = np.ones(len(self.chunks), dtype=bool)
        if family.source is not None:
            sources = self.column("source").dictionary_encode()
            pattern = re2.compile(family.source)
            hit = np.array([bool(pattern.search(text)) for text in sources.dictionary.to_pylist()], dtype=bool)
            mask &= hit[as_numpy(sources.indices)] if len(hit) else mask
        for key, value in family.metadata:
            mask &= as_numpy(pc.fill_null(pc.equal(self.metadata(key), value), False))
        if family.authority is not None:
            tiers = self.column("authority_tier")
            mask &= as_numpy(pc.is_in(tiers, value_set=pa.array(family.authority, pa.int64())))
        return mask

    def members(self, family: Family) -> Array:
        """(chunks,) bool: which chunks may serve an evidence family, by source, metadata and authority."""
        authority = None if family.authority is None else tuple(family.authority)
        return self._members_of(_Membership(family.source, tuple(sorted(family.metadata.items())), authority))

    def query_vectors(self, queries: pa.Table) -> Array:
        """(queries, dimension) float32: the embeddings of a table of distinct queries.

        Raises:
            ConfigurationError: a query has an embedding of another width than the corpus.
        """
        vectors = ragged(queries, "embedding")
        want = self.snapshot.dimension
        wrong = np.flatnonzero(vectors.lengths != want)
        if len(wrong):
            raise ConfigurationError(
                f"query {column(queries, 'query_id')[int(wrong[0])].as_py()}",
                f"its embedding has another width than corpus snapshot {self.snapshot.snapshot_id}",
                got=f"{vectors.lengths[wrong[0]]} dimensions ({len(wrong)} of {len(queries)} queries differ)",
                want=f"{want} (embedding model {self.snapshot.embedding_model})",
                next_step="Embed queries and corpus with the same model.",
            )
        return vectors.numpy_values().reshape(len(queries), want)

    def dense_search(self, vectors: Array, scopes: Scopes, depth: int) -> Ragged:
        """The `depth` nearest eligible chunks of each query, as lists of {row, score}.

        Scores are inner products summed in float64 and rounded to float32, so that they do not depend
        on how FAISS batches; order (-score, row).

        Args:
            vectors: (queries, dimension) float32, rows of length 1.
            scopes: of the same queries.
            depth: >= 1; fewer hits where fewer chunks are eligible.
        """
        from corpus.vectors import index_candidates, is_exact  # noqa: PLC0415 - as in corpus.files

        depth = min(depth, max(len(self.chunks), 1))
        if is_exact(self.index):
            hits = exact_candidates(self.embeddings, vectors, scopes, self.eligible, depth)
        else:
            hits = index_candidates(self.index, vectors, scopes, self.eligible, depth)
            hits = self._fill_up(vectors, scopes, hits, depth)
        scores = self.similarity(vectors, hits.rows, hits.values)
        order = np.lexsort((hits.values, -scores, hits.rows))
        kept = order[hits.positions < depth]  # lexsort keeps queries together, so places within a query stand
        counts = np.minimum(hits.lengths, depth)
        return Ragged(offsets_from_lengths(counts), {"row": hits.values[kept], "score": scores[kept]})

    def _fill_up(self, vectors: Array, scopes: Scopes, hits: Ragged, depth: int) -> Ragged:
        """Searches exactly for the queries to which an approximate index gave fewer rows than they may have."""
        allowed = np.array([self.eligible(scope).sum() for scope in scopes.distinct], dtype=np.int64)
        short = np.flatnonzero(hits.lengths < np.minimum(depth, allowed[scopes.codes]))
        if not len(short):
            return hits
        exact = exact_candidates(self.embeddings, vectors[short], scopes.take(short), self.eligible, depth)
        whole = ~np.isin(hits.rows, short)
        owners = np.concatenate([hits.rows[whole], short[exact.rows]])
        rows = np.concatenate([hits.values[whole], exact.values])
        lengths = np.bincount(owners, minlength=len(vectors))
        return Ragged(offsets_from_lengths(lengths), rows[np.argsort(owners, kind="stable")])

    def similarity(self, vectors: Array, queries: IntArray, rows: IntArray) -> Array:
        """(pairs,) float32: cosine of vectors[queries[i]] and chunk rows[i], in [-1, 1]."""
        return cosines(vectors, queries, self.embeddings, rows)

    def term_ids(self, texts: Sequence[str]) -> Ragged:
        """The corpus terms of each text in order, repeats kept, as lists of term numbers."""
        return term_ids(self.keywords, self.tokeniser, texts)

    def lexical_overlap(self, texts: Sequence[str], queries: IntArray, rows: IntArray) -> Array:
        """(pairs,) float64 in [0, 1]: the share of the distinct terms of texts[queries[i]] that chunk rows[i] has.

        Terms that no chunk has count too; 0 for a text without terms.
        """
        return lexical_overlap(self.keywords, self.tokeniser, texts, queries, rows)

    def passage_texts(self, rows: IntArray) -> list[str]:
        """What retrievers and models read of each chunk: its title and text, or its text alone."""
        return passage_texts(self.chunks.select(["title", "text"]).take(pa.array(rows, pa.int64())), self.searched_text)

    def _keyword_search(self, k1: float, b: float, epsilon: float) -> KeywordSearch:
        """BM25 Okapi search with these parameters over this corpus."""
        return KeywordSearch(self.keywords, self.tokeniser, self.eligible, self.keywords.okapi_scores(k1, b, epsilon))


@dataclass(frozen=True)
class _Membership:
    """The part of a Family that decides membership, hashable."""

    source: str | None
    metadata: tuple[tuple[str, str], ...]
    authority: tuple[int, ...] | None


def _as_map(pairs: pa.Array) -> pa.Array:
    """A column of lists of {key, value} as an Arrow map."""
    lists = pc.if_else(pairs.is_null(), pa.scalar([], pairs.type), pairs) if pairs.null_count else pairs
    values = pc.list_flatten(lists)
    offsets = offsets_from_lengths(as_numpy(pc.list_value_length(lists)))
    return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), values.field("key"), values.field("value"))
