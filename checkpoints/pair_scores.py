"""PairScores: what the cross-encoder said of a (model, query, passage), kept across shards, runs and nights."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from checkpoints.digests import model_folder, sha256
from checkpoints.store import Store
from contracts.errors import CheckpointError

_SCHEMA = pa.schema([pa.field("key", pa.binary(16), nullable=False), pa.field("score", pa.float32(), nullable=False)])


class PairScores:
    """Scores by key, read once from the store; new ones are written as files named by their own hash.

    A file that cannot be read, or whose content is not what its name says, is passed over: a lost
    score costs a model call, never a wrong result. Safe for threads.

    Args:
        store: where they are kept.
        model_id: scores of different models lie apart; any text, such as a path or the address of a service.
    """

    def __init__(self, store: Store, model_id: str) -> None:
        self._store = store
        self._folder = f"pair_scores/{model_folder(model_id)}"
        self._lock = threading.Lock()
        self._scores: dict[bytes, float] = {}
        for path in store.files(self._folder):
            self._scores.update(self._load(path))

    def _load(self, path: str) -> dict[bytes, float]:
        try:
            data = self._store.read(path)
            if f"{self._folder}/{_name(data)}" != path:
                return {}
            table = pq.read_table(io.BytesIO(data))
        except (CheckpointError, pa.ArrowException):
            return {}
        if not table.schema.equals(_SCHEMA):
            return {}
        return dict(zip(table.column("key").to_pylist(), table.column("score").to_pylist(), strict=True))

    def get(self, keys: Sequence[bytes]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """(keys,) float32 scores; NaN where none is kept."""
        with self._lock:
            return np.array([self._scores.get(key, np.nan) for key in keys], dtype=np.float32)

    def put(self, keys: Sequence[bytes], scores: np.ndarray[tuple[int], np.dtype[np.float32]]) -> None:
        """Keeps new scores, in memory and in the store.

        Args:
            keys: 16 bytes each.
            scores: (keys,) float32.
        """
        if not len(keys):
            return
        pairs = sorted(zip(keys, scores.tolist(), strict=True))
        table = pa.Table.from_arrays(
            [pa.array([key for key, _ in pairs], pa.binary(16)), pa.array([score for _, score in pairs], pa.float32())],
            schema=_SCHEMA,
        )
        sink = io.BytesIO()
        pq.write_table(table, sink, compression="zstd")
        data = sink.getvalue()
        self._store.write(f"{self._folder}/{_name(data)}", data)
        with self._lock:
            self._scores.update(pairs)


def _name(data: bytes) -> str:
    return f"{sha256(data)[:32]}.parquet"
