"""Cross-encoders: read a query and a passage together and say how well the passage answers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from annotated_types import Ge

from contracts.columns import Array
from contracts.errors import ModelError
from contracts.params import Params

Logits = np.ndarray[Any, np.dtype[np.float32]]

# New scores are handed over in blocks, so that a crash loses no more than one.
_BLOCK = 512


class CrossEncoder(Protocol):
    """What stages ask of a cross-encoder."""

    @property
    def model_id(self) -> str:
        """Changes whenever the scores may."""
        ...

    def score(self, queries: Sequence[str], passages: Sequence[str]) -> Logits:
        """(pairs,) float32 logits of the pairs (queries[i], passages[i]); a sigmoid makes them probabilities."""
        ...


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


class CrossEncoderParams(Params):
    """Which cross-encoder reads the candidates.

    Attributes:
        provider: `onnx` reads a model from a folder; `none` has no cross-encoder, and the other parts of
            the blended score then carry its weight.
        folder: for `onnx`, a folder with model.onnx and tokenizer.json; null takes the embedded model
            (ms-marco-MiniLM-L-12-v2, English, about 6 passages a second and core).
        threads: how many pairs are read at once, over all shards of the process; null means one a core.
            More is faster up to the cores there are. Scores do not depend on it.
    """

    provider: Literal["none", "onnx"] = "onnx"
    folder: str | None = None
    threads: Annotated[int, Ge(1)] | None = None


def open_cross_encoder(params: CrossEncoderParams) -> CrossEncoder | None:
    """The cross-encoder that the settings name, None for `none`.

    Raises:
        ModelError: it is not there, or unusable.
    """
    if params.provider == "none":
        return None
    from models.onnx_cross_encoder import OnnxCrossEncoder  # noqa: PLC0415 - the runtime is heavy, and optional here

    return OnnxCrossEncoder(_folder(params), params.threads)


def model_id_of(params: CrossEncoderParams) -> str:
    """The id of the cross-encoder that the settings name, without loading it; `none` where there is none.

    Raises:
        ModelError: its files are not there.
    """
    if params.provider == "none":
        return "none"
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
        for start in range(0, len(unknown), _BLOCK):
            block = unknown[start : start + _BLOCK]
            places = [first[distinct[number]] for number in block]
            scores[block] = self._encoder.score([queries[p] for p in places], [passages[p] for p in places])
            self._pair_scores.put([distinct[number] for number in block], scores[block])
        number_of = {key: number for number, key in enumerate(distinct)}
        return scores[np.array([number_of[key] for key in keys], dtype=np.int64)]


def pair_key(model_id: str, query: str, passage: str) -> bytes:
    """16 bytes that stand for a model and a pair; lengths go in too, so that no two triples run together."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (model_id, query, passage):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()
