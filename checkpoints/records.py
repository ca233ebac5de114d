"""Records: small JSON files that end in a digest of everything above it, so that no byte changes unseen."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from checkpoints.digests import sha256
from contracts.errors import CorruptArtifactError

Model = TypeVar("Model", bound=BaseModel)

_SEAL = b',\n "sha256_of_the_above": "'
_END = b'"\n}\n'


def sealed(record: BaseModel) -> bytes:
    """A record as JSON for people and programs; its last field is the SHA-256 of all the bytes before that field."""
    content = record.model_dump_json(indent=1).encode().removesuffix(b"\n}")
    return content + _SEAL + sha256(content).encode() + _END


def unsealed(data: bytes, model: type[Model], path: str, *, next_step: str) -> Model:
    """The record in a file.

    Raises:
        CorruptArtifactError: the bytes are not those that were written, or are no record of this model.
    """
    content, _, seal = data.rpartition(_SEAL)
    if seal != sha256(content).encode() + _END:
        got = f"SHA-256 {sha256(content)}" if content else f"{len(data)} bytes without a digest at their end"
        raise CorruptArtifactError(
            path, "is not what was written", got=got, want=seal[:64].decode(errors="replace"), next_step=next_step
        )
    try:
        return model.model_validate_json(content + b"\n}")
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CorruptArtifactError(
            path, f"is no {model.__name__}", got=f"{place}: {first['msg']}", next_step=next_step
        ) from error
