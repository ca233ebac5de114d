"""The corpus: its chunks, and the manifest of an immutable snapshot of them."""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Ge
from pydantic import BaseModel, ConfigDict

from contracts.query import Pair, Text
from contracts.rules import Rule, Unique
from contracts.table import Row


class Chunk(Row):
    """One passage of the corpus as a snapshot keeps it, in ascending order of `chunk_id`.

    `authority_tier` 1 is the highest authority; null ranks below every tier. `acl` null means that
    everybody may see the chunk, an empty list that nobody may. `text_id` is equal for chunks whose
    normalised texts are equal. `metadata` holds every further column of the source file as text.
    """

    rules: ClassVar[tuple[Rule, ...]] = (Unique("chunk_id"),)

    chunk_id: Text
    text: Text
    source: Text
    document_id: Text
    chunk_index: Annotated[int, Ge(0)]
    title: str | None
    evidence_family: str | None
    authority_tier: int | None
    version: str | None
    acl: list[str] | None
    metadata: list[Pair]
    text_id: Annotated[int, Ge(0)]


class SnapshotFile(BaseModel):
    """One file of a snapshot, by its hash."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    sha256: str
    bytes: int


class CorpusSnapshot(BaseModel):
    """The manifest of a corpus snapshot, written last: no manifest, no snapshot.

    `snapshot_id` is derived from the content, so that the same corpus under the same settings is
    the same snapshot. `settings` are those of ingest; `filter_keys` are what queries may filter on;
    `quarantined` counts chunks left out by name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    snapshot_id: str
    chunks: int
    documents: int
    quarantined: int
    dimension: int
    embedding_model: str
    access_control: bool
    filter_keys: list[str]
    settings: dict[str, object]
    files: list[SnapshotFile]
    source_file: str
    created_at: str
    seconds: float
