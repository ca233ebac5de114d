"""Progress: how long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

# Told the stage, how many of its parts are done, and how many there are.
Progress = Callable[[str, int, int], None]


def no_progress(stage: str, done: int, total: int) -> None:
    """Shows nothing."""
