"""One row of a corpus file: the chunk that it is, or why it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from loading.identity import is_blank
from loading.values import RefusedRowError, identifier, integer, is_missing, names, scalar_text, shown

DefaultAccess = Literal["error", "public", "deny"]

_WANTED_ID = "a string that is not empty, or a whole number"


@dataclass(frozen=True)
class ChunkReader:
    """How rows of one corpus file are read.

    Attributes:
        columns: our name to the file's.
        present: which of ours the file has.
        metadata_columns: the file's further columns, sorted.
        file_format: in CSV, an access list is a `;`-separated text or a list in JSON.
        default_access: who may see a chunk with a null access list.
    """

    columns: Mapping[str, str]
    present: frozenset[str]
    metadata_columns: tuple[str, ...]
    file_format: str
    default_access: DefaultAccess

    def chunk_id(self, row: Mapping[str, Any]) -> str | None:
        """The chunk's id as text, None where it has none that can be used."""
        return identifier(row.get(self.columns["chunk_id"]))

    def read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The chunk as a row of `contracts.corpus.Chunk`, without its text_id.

        Raises:
            RefusedRowError: `invalid`, `empty_text` or `no_access_list`.
        """
        chunk_id = self.chunk_id(row)
        if chunk_id is None:
            got = shown(row.get(self.columns["chunk_id"]))
            raise RefusedRowError("invalid", "has no usable chunk_id", got=got, want=_WANTED_ID)
        return {
            "chunk_id": chunk_id,
            "text": self._text(row.get(self.columns["text"])),
            "source": self._required_id(row, "source"),
            "document_id": self._required_id(row, "document_id"),
            "chunk_index": self._chunk_index(row),
            "title": self._optional(row, "title"),
            "evidence_family": self._optional_id(row, "evidence_family"),
            "authority_tier": self._authority_tier(row.get(self.columns["authority_tier"])),
            "version": self._optional(row, "version"),
            "acl": self._acl(row.get(self.columns["acl"])),
            "metadata": [
                {"key": name, "value": text}
                for name in self.metadata_columns
                if (text := scalar_text(row.get(name))) is not None
            ],
        }

    def _text(self, value: Any) -> str:
        if not is_missing(value) and not isinstance(value, str):
            raise RefusedRowError("invalid", "its text is no string", got=shown(value), want="a string")
        if is_missing(value) or is_blank(value):
            raise RefusedRowError("empty_text", "its text is empty", got=shown(value), want="a character that is seen")
        return str(value)

    def _required_id(self, row: Mapping[str, Any], name: str) -> str:
        text = self._optional_id(row, name)
        if text is None:
            got = shown(row.get(self.columns[name]))
            raise RefusedRowError("invalid", f"has no {name}", got=got, want=_WANTED_ID)
        return text

    def _optional_id(self, row: Mapping[str, Any], name: str) -> str | None:
        value = row.get(self.columns[name])
        text = self._optional(row, name)
        if text is not None and identifier(value) is None:
            raise RefusedRowError("invalid", f"its {name} is not usable", got=shown(value), want=_WANTED_ID)
        return text

    def _optional(self, row: Mapping[str, Any], name: str) -> str | None:
        value = row.get(self.columns[name])
        text = scalar_text(value)
        if text is None and not is_missing(value):
            raise RefusedRowError("invalid", f"its {name} is no single value", got=shown(value), want="a string")
        return text if text and not text.isspace() else None

    def _chunk_index(self, row: Mapping[str, Any]) -> int:
        if "chunk_index" not in self.present:
            return 0
        value = row.get(self.columns["chunk_index"])
        number = integer(value)
        if number is None or number < 0:
            raise RefusedRowError(
                "invalid", "its chunk_index is not usable", got=shown(value), want="a whole number from 0"
            )
        return number

    def _authority_tier(self, value: Any) -> int | None:
        if is_missing(value):
            return None
        number = integer(value)
        if number is None:
            raise RefusedRowError(
                "invalid", "its authority_tier is not usable", got=shown(value), want="a whole number or null"
            )
        return number

    def _acl(self, value: Any) -> list[str] | None:
        if "acl" not in self.present:
            return None
        if is_missing(value):
            if self.default_access == "error":
                raise RefusedRowError(
                    "no_access_list",
                    "its acl is null, and corpus.default_access does not say what that means",
                    got="null",
                    want="a list of groups, or default_access public or deny",
                )
            return None if self.default_access == "public" else []
        groups = names(value, self.file_format)
        if groups is None:
            raise RefusedRowError("invalid", "its acl is not usable", got=shown(value), want="a list of group names")
        return list(groups)
