"""API keys: read from the environment or a secrets folder, used in turn, and shown nowhere."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from contracts.errors import ConfigurationError, RefusedError, TransientError
from models.endpoint_settings import is_path

# Where a service does not say how long to wait: 2 s, doubled with each refusal in a row.
_COOL_DOWN_SECONDS, _LONGEST_COOL_DOWN_SECONDS = 2.0, 60.0
# Shorter ones are stand-ins for services that want none, and might be any word of an answer.
_SHORTEST_SECRET = 8


def read_keys(section: str, keys: str | None, environment: Mapping[str, str] = os.environ) -> list[str]:
    """The keys that a setting names, in the order of files and lines; [""] where none is sent.

    Args:
        section: the settings that have it, for errors, as in `grader`.
        keys: the setting: a variable, a file or a folder.
        environment: where variables are.

    Raises:
        ConfigurationError: nothing is there, or something that is no key. What was found is not shown.
    """
    if keys is None:
        return [""]
    text = _text_of(section, Path(keys).expanduser()) if is_path(keys) else environment.get(keys, "")
    found = list(dict.fromkeys(text.replace(",", "\n").split()))
    if not found or not all(key.isascii() and key.isprintable() for key in found):
        raise ConfigurationError(
            f"setting {section}.keys", "names no API keys", got=keys,
            want="one key a line, of printable ASCII characters",
            next_step="Set the environment variable, or mount the secret.",
        )  # fmt: skip
    return found


def _text_of(section: str, path: Path) -> str:
    try:
        # A mounted folder of secrets has hidden entries beside the files that it shows.
        files = [path] if not path.is_dir() else sorted(one for one in path.iterdir() if not one.name.startswith("."))
        return "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file() or file == path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"setting {section}.keys", "cannot be read", got=f"{path} ({type(error).__name__})",
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
        setting: names the setting that they are from.
    """

    def __init__(self, keys: Sequence[str], where: str, setting: str) -> None:
        self._keys = list(keys)
        self._where = where
        self._setting = setting
        self._refusal = ""
        self._states = [_State() for _ in keys]
        self._uses = 0
        self._changed = threading.Condition()

    def next(self, until: float) -> int:
        """The number of the key that has rested longest; waits while all of them cool down.

        Args:
            until: when waiting ends, on the monotonic clock.

        Raises:
            RefusedError: no key is left.
            TransientError: all of them cool down for longer.
        """
        with self._changed:
            while (rest := self.rest_seconds()) > 0:
                patience = max(0.0, until - time.monotonic())
                if rest > patience:
                    raise TransientError(
                        self._where, "wants to be asked later", got=f"in {rest:.0f} s",
                        want=f"at most {patience:.0f} s", next_step="Try again then, or add a key.",
                    )  # fmt: skip
                self._changed.wait(rest)
            now = time.monotonic()
            free = [number for number, state in enumerate(self._states) if not state.out and state.free_at <= now]
            if not free:
                raise RefusedError(
                    self._where, "refuses every API key", got=f"{len(self._keys)} keys, the last with {self._refusal}",
                    next_step=f"Correct `{self._setting}`, and `dartflow resume` the run.",
                )  # fmt: skip
            chosen = min(free, key=lambda number: self._states[number].used)
            self._uses += 1
            self._states[chosen].used = self._uses
            return chosen

    def rest_seconds(self) -> float:
        """How long all keys that are left still cool down; 0 where one is free, or none is left."""
        with self._changed:
            at = min((state.free_at for state in self._states if not state.out), default=0.0)
        return max(0.0, at - time.monotonic())

    def text(self, number: int) -> str:
        """The key itself, for the header of a request alone."""
        return self._keys[number]

    def take_out(self, number: int, said: str) -> None:
        """Uses a key no more, since the service said this."""
        with self._changed:
            self._refusal = said
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
