"""FAISS indexes: built the same from the same vectors, and searched with parameters that fit their kind."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np

from contracts.columns import Ragged, offsets_from_lengths
from contracts.errors import ConfigurationError
from corpus.exact_search import Eligible
from corpus.scope import Scopes

Array = np.ndarray[Any, np.dtype[Any]]

# An approximate index may round neighbours into another order: look a little deeper, then sort.
_MARGIN = 16


def index_candidates(index: faiss.Index, vectors: Array, scopes: Scopes, eligible: Eligible, depth: int) -> Ragged:
    """For each query what an approximate index finds among the eligible rows, without its ids of -1.

    Args:
        index: over all chunks, inner product.
        vectors, scopes, eligible, depth: as in `exact_candidates`.
    """
    found = [np.zeros(0, dtype=np.int64)] * len(vectors)
    for code, scope in enumerate(scopes.distinct):
        queries = np.flatnonzero(scopes.codes == code)
        mask = eligible(scope)
        width = min(depth + _MARGIN, int(mask.sum()))
        if not len(queries) or not width:
            continue
        selector = None if mask.all() else faiss.IDSelectorBitmap(np.packbits(mask, bitorder="little"))
        parameters = search_parameters(index, selector, width)
        _, rows = index.search(np.ascontiguousarray(vectors[queries]), width, params=parameters)
        for query, hits in zip(queries, rows, strict=True):
            found[query] = hits[hits >= 0]
    lengths = np.array([len(hits) for hits in found], dtype=np.int64)
    return Ragged(offsets_from_lengths(lengths), np.concatenate([*found, np.zeros(0, np.int64)]))


def search_parameters(index: faiss.Index, selector: faiss.IDSelector | None, width: int) -> faiss.SearchParameters:
    """Search parameters of the kind that this index takes, with its own settings and the selector."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        return faiss.SearchParametersPreTransform(index_params=search_parameters(index.index, selector, width))
    if isinstance(index, faiss.IndexRefine):
        base = search_parameters(index.base_index, selector, int(width * index.k_factor))
        return faiss.IndexRefineSearchParameters(k_factor=index.k_factor, base_index_params=base)
    if isinstance(index, faiss.IndexIVF):
        return faiss.SearchParametersIVF(sel=selector, nprobe=index.nprobe)
    if isinstance(index, faiss.IndexHNSW):
        return faiss.SearchParametersHNSW(sel=selector, efSearch=max(index.hnsw.efSearch, width))
    return faiss.SearchParameters(sel=selector)


def is_exact(index: faiss.Index) -> bool:
    """Whether the index compares a query with every vector as it is."""
    return isinstance(faiss.downcast_index(index), faiss.IndexFlat)


def build_index(vectors: Array, index_factory: str) -> faiss.Index:
    """A FAISS index over the vectors, inner product; the same vectors give the same index.

    An IVF index searches as many lists as the square root of their number (FAISS by itself: one).

    Raises:
        ConfigurationError: FAISS does not know the string, cannot train on so few vectors, or cannot
            search the index under access rules.
    """
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)  # the links of HNSW depend on the order in which threads add
    try:
        index = faiss.index_factory(vectors.shape[1], index_factory, faiss.METRIC_INNER_PRODUCT)
        if not index.is_trained:
            index.train(vectors)
        index.add(vectors)
        inverted = faiss.try_extract_index_ivf(index)
        if inverted is not None:
            inverted.nprobe = max(1, round(inverted.nlist**0.5))
        if len(vectors):
            everybody = faiss.IDSelectorAll()
            index.search(vectors[:1], 1, params=search_parameters(index, everybody, 1))
    except RuntimeError as error:
        raise ConfigurationError(
            "setting corpus.index_factory",
            "FAISS cannot build or search this index",
            got=f"{index_factory} over {len(vectors)} vectors of {vectors.shape[1]}: {_last_line(error)}",
            want="a factory string such as Flat, HNSW32 or IVF256,Flat",
            next_step="Flat is exact, and right up to some hundred thousand chunks.",
        ) from error
    finally:
        faiss.omp_set_num_threads(threads)
    return index


def _last_line(error: Exception) -> str:
    return str(error).strip().rsplit("\n", 1)[-1][:200]
