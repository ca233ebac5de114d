"""Scratch: stores below a store for work that nobody keeps, and what killed processes left of them."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from checkpoints.store import Store

_FOLDER = "scratch"
_STARTED = "%Y%m%d-%H%M%S"
_NAME = re.compile(r"(\d{8}-\d{6})-[0-9a-f]{8}")


@contextmanager
def scratch_store(store: Store) -> Iterator[Store]:
    """An empty store below another one, on the same disk or in the same bucket, which is gone when the block ends.

    Only a process that is killed leaves it behind, for `sweep_scratch`.
    """
    name = f"{_FOLDER}/{datetime.now(UTC):{_STARTED}}-{secrets.token_hex(4)}"
    scratch = Store(f"{store.uri.rstrip('/')}/{name}" if store.root is None else str(store.root / name))
    try:
        yield scratch
    finally:
        _remove(store, name)


def sweep_scratch(store: Store, older_than_seconds: float) -> int:
    """Removes scratch stores that killed processes left behind, and says how many files that were.

    Args:
        store: below which they lie.
        older_than_seconds: since they were begun; younger ones are left, since they may be at work still.
    """
    before, removed = datetime.now(UTC) - timedelta(seconds=older_than_seconds), 0
    for folder in store.folders(_FOLDER):
        named = _NAME.fullmatch(folder)
        if named is not None and datetime.strptime(named[1], _STARTED).replace(tzinfo=UTC) < before:
            removed += _remove(store, f"{_FOLDER}/{folder}")
    return removed


def _remove(store: Store, folder: str) -> int:
    """Removes a folder with all that is in it; gives back how many files that were."""
    files = store.files(folder)
    if store.root is not None:
        shutil.rmtree(store.root / folder, ignore_errors=True)  # need not outlive a power cut: it is swept again
    else:
        for path in files:
            store.delete(path)
    return len(files)
