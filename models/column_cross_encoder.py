"""ColumnCrossEncoder: the scores of pairs that were read elsewhere, from a Parquet file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from contracts.columns import as_numpy
from contracts.errors import ModelError
from models.cross_encoder import CorpusTexts, Logits, logits_of, pair_key
from models.cross_encoder_settings import ColumnParams

_COLUMNS = {"query": pa.string(), "chunk_id": pa.string(), "score": pa.float64()}
_WANTED = "columns query, chunk_id (text) and score (a number), without nulls"


class ColumnCrossEncoder:
    """Looks pairs up by their texts, as any cross-encoder is asked; chunks with equal texts share a score.

    Args:
        params: the file.
        corpus: what its chunk ids and queries stand for; None knows no chunk.

    Raises:
        ModelError: the file is not there or has other columns, a score is none, or a pair has two.
    """

    def __init__(self, params: ColumnParams, corpus: CorpusTexts | None) -> None:
        self.model_id = column_model_id(params)
        self._where = f"cross_encoder.column.file {params.file}"
        table = self._table(params)
        logits = logits_of(as_numpy(table["score"].combine_chunks()), params.scores)
        wrong = np.flatnonzero(np.isnan(logits))
        if len(wrong):
            raise self._unusable(
                "has scores that are none", got=f"{table['score'][wrong[0]]} in row {wrong[0]}, {len(wrong)} in all",
                want=f"a {params.scores}",
            )  # fmt: skip
        self._scores: dict[bytes, float] = {}
        self._unknown_chunks = 0
        self._remember(table, logits, corpus)

    def _table(self, params: ColumnParams) -> pa.Table:
        try:
            table = pq.read_table(str(params.file), columns=list(_COLUMNS)).cast(pa.schema(list(_COLUMNS.items())))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._unusable("cannot be read", got=f"{type(error).__name__}: {error}", want=_WANTED) from error
        if any(table[name].null_count for name in _COLUMNS):
            raise self._unusable("has nulls", got=None, want=_WANTED)
        return table

    def _remember(self, table: pa.Table, logits: Logits, corpus: CorpusTexts | None) -> None:
        queries, chunks = (table[name].combine_chunks().dictionary_encode() for name in ("query", "chunk_id"))
        ids = chunks.dictionary.to_pylist()
        passages = [None] * len(ids) if corpus is None else corpus.passages(ids)
        texts = [text if corpus is None else corpus.query(text) for text in queries.dictionary.to_pylist()]
        rows = zip(queries.indices.to_pylist(), chunks.indices.to_pylist(), logits.tolist(), strict=True)
        for query, chunk, score in rows:
            passage = passages[chunk]
            if passage is None:
                self._unknown_chunks += 1
                continue
            key = pair_key(self.model_id, texts[query], passage)
            if self._scores.setdefault(key, score) != score:
                raise self._unusable(
                    "gives two scores to one pair of texts", got=f"query {texts[query]!r}, chunk {ids[chunk]}",
                    want="one score for a query and a text; chunks with equal texts need but one row",
                )  # fmt: skip

    def _unusable(self, problem: str, *, got: str | None, want: str) -> ModelError:
        return ModelError(self._where, problem, got=got, want=want, next_step="Correct the file or the setting.")

    def score(self, queries: Sequence[str], passages: Sequence[str]) -> Logits:
        """(pairs,) float32 logits.

        Raises:
            ModelError: the file lacks pairs: nothing stands in for what was never scored.
        """
        pairs = list(zip(queries, passages, strict=True))
        scores = [self._scores.get(pair_key(self.model_id, query, passage)) for query, passage in pairs]
        lacking = [pair for pair, score in zip(pairs, scores, strict=True) if score is None]
        if lacking:
            unknown = f"; {self._unknown_chunks} of its rows name chunks that the corpus does not hold"
            raise ModelError(
                self._where, "lacks pairs that are to be ranked",
                got=f"{len(lacking)} of {len(pairs)} without a score, the first of query {lacking[0][0][:80]!r} and "
                f"passage {lacking[0][1][:80]!r}{unknown if self._unknown_chunks else ''}",
                next_step="Score them too: `dartflow export RUN OUT --stage family_rescue` lists candidates; "
                "only the corrective search of crag_grading asks for others.",
            )  # fmt: skip
        return np.array(scores, dtype=np.float32)


def column_model_id(params: ColumnParams) -> str:
    """An id of the file's content and of what its scores are.

    Raises:
        ModelError: it cannot be read.
    """
    try:
        with Path(str(params.file)).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(
            f"cross_encoder.column.file {params.file}", "cannot be read", got=error.strerror,
            next_step="Check the path.",
        ) from error  # fmt: skip
    return f"column-{digest[:16]}-{params.scores}"
