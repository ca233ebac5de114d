"""Passage texts: what retrievers and models read of a chunk."""

from __future__ import annotations

from typing import Literal

import pyarrow as pa

SearchedText = Literal["text", "title_and_text"]


def passage_texts(chunks: pa.Table, searched_text: SearchedText) -> list[str]:
    """One text a row: title and text on two lines, or the text alone.

    Args:
        chunks: a table with the columns `title` and `text`.
        searched_text: which of the two; a chunk without a title is its text in any case.
    """
    texts: list[str] = chunks.column("text").to_pylist()
    if searched_text == "text":
        return texts
    titles = chunks.column("title").to_pylist()
    return [text if title is None else f"{title}\n{text}" for title, text in zip(titles, texts, strict=True)]
