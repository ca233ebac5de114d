"""Cross-encoders: read a query and a passage together and say how well the passage answers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from contracts.columns import Array
from contracts.errors import ModelError
from models.cross_encoder_settings import CrossEncoderParams, Scores, http_model_id

Logits = np.ndarray[Any, np.dtype[np.float32]]

# New scores are handed over in blocks, so that a crash loses no more than one.
_BLOCK = 512
# How close to 0 or 1 a probability may come that is given to us.
_END = 1e-9


class CrossEncoder(Protocol):
    """What stages ask of a cross-encoder."""

    @property
    def model_id(self) -> str:
        """Changes whenever the scores may."""
        ...

    def score(self, queries: Sequence[str], passages: Sequence[str]) -> Logits:
        """(pairs,) float32 logits of the pairs (queries[i], passages[i]); a sigmoid makes them probabilities."""
        ...


@dataclass(frozen=True)
class CorpusTexts:
    """What the ids and queries of a file of scores stand for.

    Attributes:
        passages: chunk ids to what a model reads of each; None for a chunk that the corpus does not hold.
        query: the text of a query as the log has it, to the one that a model reads.
    """

    passages: Callable[[Sequence[str]], list[str | None]]
    query: Callable[[str], str]


def probabilities(encoder: CrossEncoder, queries: Sequence[str], passages: Sequence[str]) -> Array:
    """(pairs,) float64 in [0, 1]: the sigmoid of the encoder's logits, in one call.

    Raises:
        ModelError: it did not give one finite logit a pair.
    """
    logits = np.asarray(encoder.score(queries, passages), dtype=np.float64)
    if logits.shape != (len(queries),) or not np.isfinite(logits).all():
        raise ModelError(
            "cross-encoder",
            "gave no usable logits",
            got=f"shape {logits.shape}, {int(np.isfinite(logits).sum())} finite",
            want=f"{len(queries)} finite numbers, one a pair",
            next_step="Look at the model or service; set it to none to rank without it.",
        )
    from scipy.special import expit  # noqa: PLC0415 - a fifth of a second, for commands that score nothing

    chances: Array = expit(logits)
    return chances


def logits_of(scores: Array, kind: Scores) -> Logits:
    """(pairs,) float32 logits of scores that were made elsewhere; NaN where a score is not of its kind.

    A probability p becomes ln(p / (1 - p)). One of 0 or 1 has no finite logit: those within 1e-9 of either
    end count as 1e-9 away from it, so that order is lost among them alone.
    """
    if kind == "logit":
        return np.where(np.abs(scores) <= np.finfo(np.float32).max, scores, np.nan).astype(np.float32)
    inside = np.where((scores >= 0) & (scores <= 1), scores, np.nan)
    clipped = np.clip(inside, _END, 1 - _END)
    logits: Logits = (np.log(clipped) - np.log1p(-clipped)).astype(np.float32)
    return logits


def open_cross_encoder(params: CrossEncoderParams, corpus: CorpusTexts | None = None) -> CrossEncoder | None:
    """The cross-encoder that the settings name, None for `none`.

    Args:
        params: which one.
        corpus: for `column`, what the ids and queries of the file stand for; without it all its pairs are lacking.

    Raises:
        ModelError: it is not there, or unusable.
        ConfigurationError: its API key is not there.
    """
    # Each kind is imported where it is opened: the runtimes are heavy, and none needs that of another.
    if params.provider == "none":
        return None
    if params.provider == "http":
        from models.http_cross_encoder import HttpCrossEncoder  # noqa: PLC0415 - as above

        return HttpCrossEncoder(params.http, params.threads)
    if params.provider == "column":
        from models.column_cross_encoder import ColumnCrossEncoder  # noqa: PLC0415 - as above

        return ColumnCrossEncoder(params.column, corpus)
    from models.onnx_cross_encoder import OnnxCrossEncoder  # noqa: PLC0415 - as above

    return OnnxCrossEncoder(_folder(params), params.threads)


def model_id_of(params: CrossEncoderParams) -> str:
    """The id of the cross-encoder that the settings name, without opening it; `none` where there is none.

    Raises:
        ModelError: its files are not there.
    """
    if params.provider == "none":
        return "none"
    if params.provider == "http":
        return http_model_id(params.http)
    if params.provider == "column":
        from models.column_cross_encoder import column_model_id  # noqa: PLC0415 - as above

        return column_model_id(params.column)
    from models.onnx_cross_encoder import folder_model_id  # noqa: PLC0415 - as above

    return folder_model_id(_folder(params))


def _folder(params: CrossEncoderParams) -> Path:
    from models.onnx_cross_encoder import embedded_model_folder  # noqa: PLC0415 - as above

    return embedded_model_folder() if params.folder is None else Path(params.folder)


class PairScores(Protocol):
    """Where scores are kept, by key."""

    def get(self, keys: list[bytes]) -> Logits:
        """(keys,) float32 scores, NaN for a key that is not known."""
        ...

    def put(self, keys: list[bytes], scores: Logits) -> None:
        """Keeps the scores of new keys."""
        ...


class CachedCrossEncoder:
    """A cross-encoder that asks `pair_scores` first; a pair that stands twice in a call is scored once."""

    def __init__(self, encoder: CrossEncoder, pair_scores: PairScores) -> None:
        self._encoder = encoder
        self._pair_scores = pair_scores

    @property
    def model_id(self) -> str:
        """That of the encoder: what is remembered is what it said."""
        return self._encoder.model_id

    def score(self, queries: Sequence[str], passages: Sequence[str]) -> Logits:
        """(pairs,) float32 logits, the same as the encoder's own."""
        keys = [pair_key(self.model_id, query, passage) for query, passage in zip(queries, passages, strict=True)]
        first: dict[bytes, int] = {}
        for place, key in enumerate(keys):
            first.setdefault(key, place)
        distinct = list(first)
        scores = np.array(self._pair_scores.get(distinct), dtype=np.float32)
        unknown = np.flatnonzero(np.isnan(scores))
        for start, end in blocks([queries[first[distinct[number]]] for number in unknown], _BLOCK):
            block = unknown[start:end]
            places = [first[distinct[number]] for number in block]
            scores[block] = self._encoder.score([queries[p] for p in places], [passages[p] for p in places])
            self._pair_scores.put([distinct[number] for number in block], scores[block])
        number_of = {key: number for number, key in enumerate(distinct)}
        return scores[np.array([number_of[key] for key in keys], dtype=np.int64)]


def blocks(queries: Sequence[str], most: int) -> Iterator[tuple[int, int]]:
    """The pairs in blocks of at most `most` that end where a query does; a query with more is cut from its start on.

    So what an encoder is given of a query does not depend on the queries before it.
    """
    start = border = 0
    for place in range(1, len(queries)):
        if queries[place] != queries[place - 1]:
            border = place
        if place - start == most:
            end = border if border > start else place
            yield start, end
            start = end
    if start < len(queries):
        yield start, len(queries)


def pair_key(model_id: str, query: str, passage: str) -> bytes:
    """16 bytes that stand for a model and a pair; lengths go in too, so that no two triples run together."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (model_id, query, passage):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()
