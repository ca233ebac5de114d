"""Runs the console blocks of README and runbook; `python -m tests.documentation` writes their outputs anew."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flows import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "runbook.md")
_BLOCK = re.compile(r"(?<=```console\n).*?(?=```)", re.DOTALL)
_MASKS = (
    (re.compile(r"corpus-[0-9a-f]{12}"), "corpus-*"),
    (re.compile(r"\.[0-9a-f]{32}\.parquet"), ".*.parquet"),
    (re.compile(r"SHA-256 [0-9a-f]{64}|[0-9a-f]{64}"), "SHA"),
    (re.compile(r"(?<=\s)\d+\.\d{2}\s*$", re.MULTILINE), "*"),  # seconds
    (re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{3})?\+00:00"), "TIME"),
    (re.compile(r"[\w.-]+@[\w.-]+"), "SOMEBODY"),
    (re.compile(r"\d+\.\d [kM]B"), "SIZE"),
)
# Commands of the reader's own corpus are for reading, not for running.
_READ_ONLY = ("/data/dartflow", "make ")


def blocks(page: str) -> list[list[tuple[str, str]]]:
    """The console blocks of a page that can be run: (command, output below it) pairs."""
    found = []
    for text in _BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        if any(word in text for word in _READ_ONLY):
            continue
        parts = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
        found.append([tuple(part.split("\n", 1)) for part in parts])
    return found


def masked(output: str) -> str:
    """An output without what differs from machine to machine: times, digests of floats, widths of columns."""
    for pattern, name in _MASKS:
        output = pattern.sub(name, output)
    # Columns are as wide as their widest value, and seconds differ.
    lines = (re.sub(r" {2,}|─+", " ", line).strip() for line in output.splitlines())
    return "\n".join(line for line in lines if line)


def run_command(command: str, *, without_prefect: bool = True) -> str:
    """What a command prints: dartflow in this process, anything else in a shell."""
    if not command.startswith("dartflow "):
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path}
        return subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, check=True, env=environment
        ).stdout
    words = shlex.split(command)
    if without_prefect and words[1] in {"ingest", "run", "rerun", "resume", "replay"} and "--dry-run" not in words:
        words += [] if "--without-prefect" in words else ["--without-prefect"]
    sys.argv = words
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        cli.main()
    _, error, sentence = err.getvalue().partition("error:")  # what comes before it is progress
    return out.getvalue() + error + sentence


@contextlib.contextmanager
def reader(folder: Path) -> Iterator[None]:
    """A folder as a reader of the pages has it: the checkout's examples and settings, and a store of its own."""
    before = Path.cwd()
    for name in ("examples", "config"):
        (folder / name).symlink_to(ROOT / name)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def main() -> None:
    """Runs every block in order and writes what it printed below its commands."""
    with tempfile.TemporaryDirectory() as folder, reader(Path(folder)):
        for page in PAGES:
            text = (ROOT / page).read_text(encoding="utf-8")
            for block in blocks(page):
                before = "".join(f"$ {command}\n{output}" for command, output in block)
                after = "".join(f"$ {command}\n{_tidy(run_command(command))}" for command, _ in block)
                text = text.replace(before, after)
            (ROOT / page).write_text(text, encoding="utf-8")


def _tidy(output: str) -> str:
    lines = [line.rstrip() for line in output.splitlines()]
    return "".join(f"{line}\n" for line in lines if line)


if __name__ == "__main__":
    main()
