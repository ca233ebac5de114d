"""Processes of their own, for what one process would blur: memory, start time, settings that are read once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from bench.results import ROOT


def output_of(words: Sequence[object]) -> str:
    """What a Python process with these words prints on standard output.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    line = [sys.executable, *(str(word) for word in words)]
    # Where bytecode is not kept, every start would compile this checkout, though not the libraries beside it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)  # noqa: S603 - our own words
    if done.returncode:
        raise RuntimeError(f"{' '.join(line)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout
