"""Settings that endpoints share: an address, and the place of API keys; what is refused may itself be a secret."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

# What a name of a variable looks like, and how a path must begin: a key that was pasted in looks like neither.
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_PATH = re.compile(r"(/|\./|\.\./|~/).*", re.DOTALL)
_ADDRESS = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[^/?#@:\[\]\s]+)(:[0-9]+)?(/[^?#@\s]*)?")


def _address(base_url: str) -> str:
    if not _ADDRESS.fullmatch(base_url):
        raise ValueError("http:// or https://, a host and a path; no user, query or fragment")
    urlsplit(base_url).port  # noqa: B018 - raises ValueError where it is none
    return base_url


def _key_place(keys: str) -> str:
    if not (_VARIABLE.fullmatch(keys) or is_path(keys)):
        raise ValueError("the name of an environment variable in capitals, or a path that begins with / or ./")
    return keys


def is_path(keys: str) -> bool:
    """Whether the place of keys is a path; else it is the name of an environment variable."""
    return _PATH.fullmatch(keys) is not None


# What stands before the last part of an address.
Address = Annotated[str, AfterValidator(_address)]
# Where API keys are: the name of an environment variable, or a path.
KeyPlace = Annotated[str, AfterValidator(_key_place)]
