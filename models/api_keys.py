"""API keys: read from the environment or a secrets folder, used in turn, and shown nowhere."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from contracts.errors import ConfigurationError, RefusedError, TransientError
from models.grader_settings import is_path

# A service that wants us to wait longer than this is told off for now; the shard may be tried again.
_LONGEST_WAIT_SECONDS = 300.0
# Where a service does not say how long to wait: 2 s, doubled with each refusal in a row.
_COOL_DOWN_SECONDS, _LONGEST_COOL_DOWN_SECONDS = 2.0, 60.0
# Shorter ones are stand-ins for services that want none, and might be any word of an answer.
_SHORTEST_SECRET = 8


def read_keys(keys: str | None, environment: Mapping[str, str] = os.environ) -> list[str]:
    """The keys that the setting `grader.keys` names, in the order of files and lines; [""] where none is sent.

    Raises:
        ConfigurationError: nothing is there, or something that is no key. What was found is not shown.
    """
    if keys is None:
        return [""]
    text = _text_of(Path(keys).expanduser()) if is_path(keys) else environment.get(keys, "")
    found = list(dict.fromkeys(text.replace(",", "\n").split()))
    if not found or not all(key.isascii() and key.isprintable() for key in found):
        raise ConfigurationError(
            "setting grader.keys", "names no API keys", got=keys, want="one key a line, of printable ASCII characters",
            next_step="Set the environment variable, or mount the secret.",
        )  # fmt: skip
    return found


def _text_of(path: Path) -> str:
    try:
        # A mounted folder of secrets has hidden entries beside the files that it shows.
        files = [path] if not path.is_dir() else sorted(one for one in path.iterdir() if not one.name.startswith("."))
        return "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file() or file == path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            "setting grader.keys", "cannot be read", got=f"{path} ({type(error).__name__})",
            want="a file with one key a line, or a folder of such files", next_step="Mount the secret.",
        ) from None  # fmt: skip


@dataclass
class _State:
    """What is known of one key: when it was used last, until when it cools, refusals in a row, whether it is out."""

    used: int = 0
    free_at: float = 0.0
    refusals: int = 0
    out: bool = False


class ApiKeys:
    """Keys in rotation; each is known by its number, from 0. Safe for threads.

    Args:
        keys: at least one; "" sends none.
        where: names the service in errors.
    """

    def __init__(self, keys: Sequence[str], where: str) -> None:
        self._keys = list(keys)
        self._where = where
        self._states = [_State() for _ in keys]
        self._uses = 0
        self._changed = threading.Condition()

    def next(self) -> int:
        """The number of the key that has rested longest; waits while all of them cool down.

        Raises:
            RefusedError: no key is left.
            TransientError: all of them cool down for minutes.
        """
        with self._changed:
            while True:
                left = [number for number, state in enumerate(self._states) if not state.out]
                if not left:
                    raise RefusedError(
                        self._where, "refuses every API key", got=f"{len(self._keys)} keys",
                        next_step="Correct the keys that `grader.keys` names, and `dartflow resume` the run.",
                    )  # fmt: skip
                wait = min(self._states[number].free_at for number in left) - time.monotonic()
                if wait <= 0:
                    break
                if wait > _LONGEST_WAIT_SECONDS:
                    raise TransientError(
                        self._where, "wants to be asked later", got=f"in {wait:.0f} s",
                        want=f"at most {_LONGEST_WAIT_SECONDS:.0f} s", next_step="Try again then, or add a key.",
                    )  # fmt: skip
                self._changed.wait(wait)
            free = [number for number in left if self._states[number].free_at <= time.monotonic()]
            chosen = min(free, key=lambda number: self._states[number].used)
            self._uses += 1
            self._states[chosen].used = self._uses
            return chosen

    def text(self, number: int) -> str:
        """The key itself, for the header of a request alone."""
        return self._keys[number]

    def take_out(self, number: int) -> None:
        """Uses a key no more."""
        with self._changed:
            self._states[number].out = True
            self._changed.notify_all()

    def cool_down(self, number: int, seconds: float | None) -> None:
        """Lets a key rest: as long as the service says, or for a time that doubles where it does not (None)."""
        with self._changed:
            state = self._states[number]
            rest = min(_COOL_DOWN_SECONDS * 2**state.refusals, _LONGEST_COOL_DOWN_SECONDS)
            state.refusals += 1
            state.free_at = max(state.free_at, time.monotonic() + (rest if seconds is None else seconds))

    def accepted(self, number: int) -> None:
        """Notes that the service took a call with this key."""
        with self._changed:
            self._states[number].refusals = 0

    def redacted(self, text: str) -> str:
        """A text from the service without the keys that it may quote."""
        for number, key in enumerate(self._keys):
            if len(key) >= _SHORTEST_SECRET:
                text = text.replace(key, f"[key {number}]")
        return text
