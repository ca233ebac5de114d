"""Corpus: one snapshot in memory, with the searches that stages ask of it.

Chunks lie in ascending order of `chunk_id`, so a tie broken by row is a tie broken by chunk id. Every
search takes scopes and looks at eligible chunks alone: those the scope may see, and of equal texts
among them one representative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import re2
from scipy.sparse import csc_array, csr_array

from contracts.columns import IntArray, Ragged, as_numpy, column, offsets_from_lengths
from contracts.corpus import CorpusSnapshot
from contracts.errors import ConfigurationError, MissingArtifactError
from contracts.evidence import Family
from corpus.keyword_index import KeywordIndex, bm25_top, ragged_hits
from corpus.scope import Scope, Scopes
from corpus.tokeniser import Tokeniser

Array = np.ndarray[Any, np.dtype[Any]]

SearchedText = Literal["text", "title_and_text"]

# FAISS may round neighbours into another order than the exact scores have: look a little deeper, then sort.
_MARGIN = 16
# A null authority tier ranks below every tier.
_NO_TIER = np.iinfo(np.int64).max


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

    filterable_columns = ("chunk_id", "source", "document_id", "title", "evidence_family", "authority_tier", "version")

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
        if key in self.filterable_columns:
            return self.column(key).cast(pa.string())
        values = pc.map_lookup(_as_map(self.column("metadata")), pa.scalar(key), "first")
        if values.null_count == len(values) and len(values):
            raise ConfigurationError(
                f"snapshot {self.snapshot.snapshot_id}",
                "no chunk has the metadata key",
                got=key,
                want=f"one of {', '.join(self.filter_keys())}",
                next_step="Correct the filter or the evidence plan, or ingest the column.",
            )
        return values

    def filter_keys(self) -> list[str]:
        """Every key that filters and families may name, sorted."""
        own = pc.unique(pc.list_flatten(self.column("metadata")).field("key")).to_pylist()
        return sorted({*self.filterable_columns, *own})

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

    def dense_search(self, vectors: Array, scopes: Scopes, depth: int) -> Ragged:
        """The `depth` nearest eligible chunks of each query, as lists of {row, score}.

        Scores are inner products summed in float64 and rounded to float32, so that they do not depend
        on how FAISS batches; order (-score, row).

        Args:
            vectors: (queries, dimension) float32, rows of length 1.
            scopes: of the same queries.
            depth: >= 1; fewer hits where fewer chunks are eligible.
        """
        found: list[Array] = [np.zeros(0, dtype=np.int64)] * len(vectors)
        for code, scope in enumerate(scopes.distinct):
            queries = np.flatnonzero(scopes.codes == code)
            mask = self.eligible(scope)
            allowed = int(mask.sum())
            if not len(queries) or not allowed:
                continue
            width = min(depth + _MARGIN, allowed)
            parameters = None
            if allowed < len(self.chunks):
                parameters = faiss.SearchParameters(sel=faiss.IDSelectorBitmap(np.packbits(mask, bitorder="little")))
            _, rows = self.index.search(np.ascontiguousarray(vectors[queries]), width, params=parameters)
            for query, hits in zip(queries, rows, strict=True):
                found[query] = hits[hits >= 0]
        hits = Ragged(
            offsets_from_lengths(np.array([len(h) for h in found], dtype=np.int64)),
            np.concatenate(found or [np.zeros(0, np.int64)]),
        )
        return self._exact_order(vectors, hits, depth)

    def _exact_order(self, vectors: Array, hits: Ragged, depth: int) -> Ragged:
        scores = self.similarity(vectors, hits.rows, hits.values)
        order = np.lexsort((hits.values, -scores, hits.rows))
        kept = order[hits.positions < depth]  # lexsort keeps queries together, so places within a query stand
        counts = np.minimum(hits.lengths, depth)
        return Ragged(offsets_from_lengths(counts), {"row": hits.values[kept], "score": scores[kept]})

    def similarity(self, vectors: Array, queries: IntArray, rows: IntArray) -> Array:
        """(pairs,) float32: cosine of vectors[queries[i]] and chunk rows[i], in [-1, 1]."""
        result = np.empty(len(rows), dtype=np.float32)
        block = 8192
        for start in range(0, len(rows), block):
            part = slice(start, start + block)
            left = vectors[queries[part]].astype(np.float64)
            result[part] = np.einsum("id,id->i", left, self.embeddings[rows[part]])
        return np.clip(result, -1, 1)

    def term_ids(self, texts: Sequence[str]) -> Ragged:
        """The corpus terms of each text in order, repeats kept, as lists of term numbers."""
        lists = [self.keywords.term_ids(self.tokeniser.tokens(text)) for text in texts]
        lengths = np.array([len(one) for one in lists], dtype=np.int64)
        return Ragged(offsets_from_lengths(lengths), np.array([t for one in lists for t in one], dtype=np.int64))

    def lexical_overlap(self, texts: Sequence[str], queries: IntArray, rows: IntArray) -> Array:
        """(pairs,) float64 in [0, 1]: the share of the distinct terms of texts[queries[i]] that chunk rows[i] has.

        Terms that no chunk has count too; 0 for a text without terms.
        """
        distinct = [sorted(set(self.tokeniser.tokens(text))) for text in texts]
        known = [self.keywords.term_ids(tokens) for tokens in distinct]
        lengths = np.array([len(one) for one in known], dtype=np.int64)
        terms = np.array([term for one in known for term in one], dtype=np.int64)
        asked = csr_array(
            (np.ones(len(terms)), terms, offsets_from_lengths(lengths)), shape=(len(texts), len(self.keywords.terms))
        )
        shared = np.asarray(asked[queries].multiply(self._term_presence[rows]).sum(axis=1)).ravel()
        totals = np.array([len(one) for one in distinct], dtype=np.float64)[queries]
        return np.divide(shared, totals, out=np.zeros(len(rows)), where=totals > 0)

    @cached_property
    def _term_presence(self) -> csr_array:
        """(chunks, terms): 1 where the chunk has the term."""
        index = self.keywords
        shape = (len(self.chunks), len(index.terms))
        return csc_array((np.ones(len(index.rows)), index.rows, index.offsets), shape=shape).tocsr()

    def passage_texts(self, rows: IntArray) -> list[str]:
        """What retrievers and models read of each chunk: its title and text, or its text alone."""
        texts: list[str] = self.column("text").take(pa.array(rows, pa.int64())).to_pylist()
        if self.searched_text == "text":
            return texts
        titles = self.column("title").take(pa.array(rows, pa.int64())).to_pylist()
        return [text if title is None else f"{title}\n{text}" for title, text in zip(titles, texts, strict=True)]

    def _keyword_search(self, k1: float, b: float, epsilon: float) -> KeywordSearch:
        """BM25 Okapi search with these parameters over this corpus."""
        return KeywordSearch(self, self.keywords.okapi_scores(k1, b, epsilon))


@dataclass(frozen=True)
class _Membership:
    """The part of a Family that decides membership, hashable."""

    source: str | None
    metadata: tuple[tuple[str, str], ...]
    authority: tuple[int, ...] | None


@dataclass(frozen=True, eq=False)
class KeywordSearch:
    """BM25 over a corpus: `scores` (postings,) float64 says what each posting adds."""

    corpus: Corpus
    scores: Array

    def search(self, texts: Sequence[str], scopes: Scopes, depth: int) -> Ragged:
        """The `depth` best eligible chunks that share a term with each text, as lists of {row, score}.

        Order (-score, row), score float64; an empty list where no eligible chunk shares a term.
        """
        terms = self.corpus.term_ids(texts)
        index = self.corpus.keywords
        counts = np.zeros(len(texts), dtype=np.int64)
        rows = np.zeros((len(texts), depth), dtype=np.int64)
        scores = np.zeros((len(texts), depth))
        for code, scope in enumerate(scopes.distinct):
            queries = np.flatnonzero(scopes.codes == code)
            if not len(queries):
                continue
            lengths = terms.lengths[queries]
            picked = np.isin(terms.rows, queries)
            counts[queries], rows[queries], scores[queries] = bm25_top(
                offsets_from_lengths(lengths),
                terms.values[picked],
                index.offsets,
                index.rows,
                self.scores,
                self.corpus.eligible(scope),
                depth,
                len(index.lengths),
            )
        return ragged_hits(counts, rows, scores)


def _as_map(pairs: pa.Array) -> pa.Array:
    """A column of lists of {key, value} as an Arrow map."""
    lists = pc.if_else(pairs.is_null(), pa.scalar([], pairs.type), pairs) if pairs.null_count else pairs
    values = pc.list_flatten(lists)
    offsets = offsets_from_lengths(as_numpy(pc.list_value_length(lists)))
    return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), values.field("key"), values.field("value"))
