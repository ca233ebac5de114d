"""Decision files: what the setting `grader.file` names, in the store or on this disk."""

from __future__ import annotations

from pathlib import Path

from checkpoints.decisions import digest_in, load_decisions
from checkpoints.store import Store
from contracts.errors import InputError
from models.file_grader import Decisions, decisions_digest, read_decisions


def open_decisions(store: Store, file: str) -> Decisions:
    """The decisions of the store under this name, or those of a JSONL or CSV file.

    Raises:
        InputError: a file that cannot be read, or holds no decisions.
        CheckpointError: what the store holds under the name is not there, or not what was kept.
    """
    return _decisions_on_disk(file) if digest_in(file) is None else load_decisions(store, file)


def file_digest(file: str) -> str:
    """A digest of the content; of decisions in the store it is their name, and nothing is read.

    Raises:
        InputError: as `open_decisions`.
    """
    digest = digest_in(file)
    return decisions_digest(_decisions_on_disk(file)) if digest is None else digest


def read_file(path: str) -> bytes:
    """The bytes of a file of decisions.

    Raises:
        InputError: no such file.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputError(path, "cannot be read", got=error.strerror, next_step="Check the path.") from error


def _decisions_on_disk(file: str) -> Decisions:
    return {(one.query_id, one.chunk_id): one.grade for one in read_decisions(read_file(file), file)}
