"""Identity of texts: what counts as the same text, for chunks and for queries."""

from __future__ import annotations

import unicodedata

# Separators, control and format characters, as Unicode calls them.
_UNSEEN = ("Z", "Cc", "Cf")


def is_blank(text: str) -> bool:
    """Whether the text has no character that is seen: spaces, control characters, zero-width spaces alone."""
    return all(unicodedata.category(character).startswith(_UNSEEN) for character in text)


def normalised(text: str) -> str:
    """The text in NFKC, with single spaces, stripped: what two texts must share to be the same."""
    return " ".join(unicodedata.normalize("NFKC", text).split())
