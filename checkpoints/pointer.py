"""Pointers: what is current, who made it so, when and why; published runs and corpus snapshots have one each.

A move adds a record to the history, created once, and then swaps `current.json`, a single file. The pointer
alone is the truth: a record whose pointer was never swapped, since its process was killed in between, was not
carried out, and no rollback goes back to it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import BaseModel, ConfigDict

from checkpoints.records import unsealed
from checkpoints.store import Store
from contracts.errors import CorruptArtifactError, MissingArtifactError

Action = Literal["publish", "rollback", "ingest", "use"]

_NAME = re.compile(r"([0-9]{6}|[1-9][0-9]{6,})\.json")


class PointerRecord(BaseModel):
    """One move of a pointer: it made `target` current.

    `generation` rises with every record. `replaced` is the generation that was current until then, `previous`
    the one that a rollback goes back to; None where there was none. A rollback takes over the `previous` of
    the generation that it brings back, so that the next rollback goes further back. `details` are what readers
    of the pointer need to know of the target.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    generation: Annotated[int, Ge(1)]
    target: str
    action: Action
    at: str
    by: str
    why: str | None
    previous: int | None
    replaced: int | None
    details: dict[str, object]


@dataclass(frozen=True)
class HistoryEntry:
    """A record of the history as it is found.

    Attributes:
        generation: its number.
        record: None when it cannot be read.
        carried_out: whether the pointer was swapped to it; None when that is not known, since the pointer
            or a younger record is damaged.
        problem: why it cannot be read.
    """

    generation: int
    record: PointerRecord | None
    carried_out: bool | None
    problem: str | None


@dataclass(frozen=True)
class Pointer:
    """What is current in a folder of the store, and how it came about; reading needs no lease.

    Attributes:
        store: where the folder lies.
        folder: it holds `current.json` and `history`.
        what: how errors name the pointer.
        empty: what is wrong with a store that has none.
        first_step: what makes the first record.
        way_out: what to do when the pointer or its history is damaged.
    """

    store: Store
    folder: str
    what: str
    empty: str
    first_step: str
    way_out: str

    @property
    def path(self) -> str:
        """Where the pointer lies."""
        return f"{self.folder}/current.json"

    def read(self) -> PointerRecord | None:
        """The current record; None when there is no pointer.

        Raises:
            CorruptArtifactError: a pointer that is not what was written.
        """
        data = self.store.read_if_there(self.path)
        return None if data is None else unsealed(data, PointerRecord, self.path, next_step=self.way_out)

    def current(self) -> PointerRecord:
        """The current record.

        Raises:
            MissingArtifactError: there is no pointer.
            CorruptArtifactError: a pointer that is not what was written.
        """
        record = self.read()
        if record is not None:
            return record
        records = len(self.generations())
        if records:
            raise MissingArtifactError(
                self.path, "is not there", got=f"its history alone, of {records} records", next_step=self.way_out
            )
        raise MissingArtifactError(f"store {self.store.uri}", self.empty, next_step=self.first_step)

    def record(self, generation: int) -> PointerRecord:
        """A record of the history.

        Raises:
            CorruptArtifactError: it is gone, or not what was written.
        """
        path = self.history_path(generation)
        data = self.store.read_if_there(path)
        if data is None:
            raise CorruptArtifactError(path, "is missing", got="no file", next_step=self.way_out)
        record = unsealed(data, PointerRecord, path, next_step=self.way_out)
        if record.generation != generation:
            raise CorruptArtifactError(
                path, "belongs to another generation", got=record.generation, want=generation, next_step=self.way_out
            )
        return record

    def history(self) -> list[HistoryEntry]:
        """All records, the youngest first."""
        try:
            current = self.read()
            due, sure = (None if current is None else current.generation), True
        except CorruptArtifactError:
            due, sure = None, False
        entries = []
        for generation in reversed(self.generations()):
            carried_out = generation == due if sure else None
            try:
                record = self.record(generation)
            except CorruptArtifactError as error:
                entries.append(HistoryEntry(generation, None, carried_out, str(error)))
                sure = carried_out is False
            else:
                entries.append(HistoryEntry(generation, record, carried_out, None))
                # Whatever became of this record, what it would replace had been current.
                due, sure = record.replaced, True
        return entries

    def standing(self) -> dict[str, tuple[PointerRecord, str]]:
        """The targets that must stay, and why: the one that a rollback would bring back, and the current one.

        Raises:
            CorruptArtifactError: the pointer, or the record that a rollback would bring back, is damaged.
        """
        record, because = self.read(), "current"
        if record is None:
            generations = self.generations()
            if not generations:
                return {}
            record, because = self.record(generations[-1]), "perhaps current: the pointer is lost"
        found = {record.target: (record, because)}
        if record.previous is not None:
            earlier = self.record(record.previous)
            found.setdefault(earlier.target, (earlier, "rollback target"))
        return found

    def history_path(self, generation: int) -> str:
        """Where a record of the history lies."""
        return f"{self.folder}/history/{generation:06d}.json"

    def generations(self) -> list[int]:
        """The numbers of all records, ascending."""
        names = (path.rsplit("/", 1)[-1] for path in self.store.files(f"{self.folder}/history"))
        return sorted(int(found[1]) for found in map(_NAME.fullmatch, names) if found is not None)
