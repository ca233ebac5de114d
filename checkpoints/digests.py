"""Digests: of files for integrity, and the keys of artifacts; `checkpoints.logical_digest` has that of Arrow data."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


def sha256(data: bytes) -> str:
    """SHA-256 as hex."""
    return hashlib.sha256(data).hexdigest()


def canonical_json(value: Mapping[str, Any]) -> bytes:
    """JSON with sorted keys and no spaces: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def key_of(parts: Mapping[str, Any]) -> str:
    """The key of an artifact: a digest of everything that can change its result."""
    return sha256(canonical_json(parts))[:32]


def model_folder(model_id: str) -> str:
    """A model's own folder: readable, and never that of another model or a part of it."""
    readable = _NOT_IN_A_NAME.sub("-", model_id)[:40].strip("-.")
    return f"{readable or 'model'}-{sha256(model_id.encode())[:16]}"
