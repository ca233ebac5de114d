"""Lease: one process at a time works on a run, and says so with a heartbeat."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from checkpoints.store import Store
from contracts.errors import RunHeldError

HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 60.0


def _path(run_id: str) -> str:
    return f"runs/{run_id}/lease.json"


def holder_of(store: Store, run_id: str) -> tuple[str, float] | None:
    """Who holds the run and how many seconds ago it last said so; None when nobody does or the lease is stale."""
    data = store.read_if_there(_path(run_id))
    if data is None:
        return None
    lease = json.loads(data)
    age = time.time() - float(lease["beat_at"])
    return None if age > STALE_SECONDS else (str(lease["holder"]), age)


@contextmanager
def hold(store: Store, run_id: str) -> Iterator[None]:
    """Holds the run's lease while the block runs, with a heartbeat from a thread of its own.

    Raises:
        RunHeldError: another process holds it; a stale lease is taken over.
    """
    held = holder_of(store, run_id)
    if held is not None:
        holder, age = held
        raise RunHeldError(
            f"run {run_id}",
            "is held by another process",
            got=f"{holder}, last heard of {age:.0f} s ago",
            want="nobody",
            next_step=f"Wait for it; a lease that is silent for {STALE_SECONDS:.0f} s can be taken over.",
        )
    holder = f"{socket.gethostname()}:{os.getpid()}"
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(HEARTBEAT_SECONDS):
            store.write(_path(run_id), _lease(holder))

    store.write(_path(run_id), _lease(holder))
    thread = threading.Thread(target=beat, name="lease heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        store.delete(_path(run_id))


def _lease(holder: str) -> bytes:
    return json.dumps({"holder": holder, "beat_at": time.time()}).encode()
