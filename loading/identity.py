"""Identity of texts: what counts as the same text, for chunks and for queries."""

from __future__ import annotations

import unicodedata


def normalised(text: str) -> str:
    """The text in NFKC, with single spaces, stripped: what two texts must share to be the same."""
    return " ".join(unicodedata.normalize("NFKC", text).split())
