"""Moves: a pointer is moved by one process at a time, forward to a target or back to what was current before."""

from __future__ import annotations

import getpass
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime

from checkpoints.lease import Lease, hold
from checkpoints.pointer import Action, Pointer, PointerRecord
from checkpoints.records import sealed
from contracts.errors import CheckpointError, CorruptArtifactError, MissingArtifactError, RunHeldError

# A move takes a moment. Who comes second waits for it: what led to the move may have taken hours.
PATIENCE_SECONDS = 30.0
_PAUSE_SECONDS = 0.2


class Move:
    """A pointer that this process holds, and may move.

    Args:
        pointer: what is moved.
        lease: held.
        found: the current record; None where there is none that can be read.
        damaged: whether there is a pointer that cannot be read; a move puts a new one in its place.
    """

    def __init__(self, pointer: Pointer, lease: Lease, found: PointerRecord | None, *, damaged: bool) -> None:
        self.found = found
        self._pointer = pointer
        self._lease = lease
        self._damaged = damaged

    def to(self, target: str, *, action: Action, by: str, why: str | None, details: dict[str, object]) -> PointerRecord:
        """Makes a target current."""
        if self.found is not None:
            previous: int | None = self.found.generation
        else:
            previous = self._goes_back_to()
            records = {entry.generation: entry.record for entry in self._pointer.history()}
            earlier = None if previous is None else records.get(previous)
            if earlier is not None and earlier.target == target:
                previous = earlier.previous  # going back to the same would be no rollback
        return self._swap(target=target, action=action, by=by, why=why, previous=previous, details=details)

    def back(self, record: PointerRecord, *, by: str, why: str | None) -> PointerRecord:
        """Makes the target of an earlier record current again, the one that `earlier` gave."""
        return self._swap(
            target=record.target, action="rollback", by=by, why=why, previous=record.previous, details=record.details
        )

    def earlier(self) -> PointerRecord:
        """The record that a rollback goes back to.

        Raises:
            MissingArtifactError: there is nothing before.
            CorruptArtifactError: that record is damaged.
        """
        generation = self._goes_back_to()
        if generation is not None:
            return self._pointer.record(generation)
        if self.found is None and not self._damaged:
            self._pointer.current()  # raises what there is not
        raise MissingArtifactError(
            self._pointer.what,
            "cannot go back",
            got="nothing" + ("" if self.found is None else f" before {self.found.target}"),
            want="something that was current before",
            next_step="Make another one current instead.",
        )

    def _goes_back_to(self) -> int | None:
        """The generation that a rollback goes back to.

        Without a pointer nobody knows whether the youngest record was carried out; the one before it was.
        """
        standing = self._youngest() if self.found is None else self.found
        return None if standing is None else standing.previous

    def _replaces(self) -> int | None:
        """The generation that a move takes the place of; the likeliest one where the pointer is damaged."""
        standing = self._youngest() if self.found is None else self.found
        if standing is None:
            return None
        return standing.replaced if self.found is None and not self._damaged else standing.generation

    def _youngest(self) -> PointerRecord | None:
        """The youngest record of the history that can be read."""
        return next((entry.record for entry in self._pointer.history() if entry.record is not None), None)

    def _swap(self, **made: object) -> PointerRecord:
        """Adds the record to the history, then swaps the pointer."""
        generation = 1 + max([0 if self.found is None else self.found.generation, *self._pointer.generations()])
        at = datetime.now(UTC).isoformat(timespec="seconds")
        record = PointerRecord.model_validate(
            {"generation": generation, "at": at, "replaced": self._replaces(), **made}
        )
        store, path, data = self._pointer.store, self._pointer.history_path(generation), sealed(record)
        self._lease.check()
        try:
            store.create(path, data)
        except CheckpointError:
            # A service may have taken the file and lost its answer; then it is ours.
            if store.read_if_there(path) != data:
                raise
        self._lease.check()
        store.write(self._pointer.path, data)
        self.found = record
        return record


@contextmanager
def moving(pointer: Pointer) -> Iterator[Move]:
    """Holds a pointer while the block moves it.

    Raises:
        RunHeldError: another process holds it, for longer than a move takes.
    """
    with ExitStack() as stack:
        lease = _held(pointer, stack)
        try:
            move = Move(pointer, lease, pointer.read(), damaged=False)
        except CorruptArtifactError:
            move = Move(pointer, lease, None, damaged=True)
        yield move


def _held(pointer: Pointer, stack: ExitStack) -> Lease:
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return stack.enter_context(hold(pointer.store, pointer.folder, pointer.what))
        except RunHeldError:
            if time.monotonic() > until:
                raise
            time.sleep(_PAUSE_SECONDS)


def user_and_host() -> str:
    """Who is at work, as `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
