"""Transcripts: calls of a chat model that were charged for, kept by request across shards, runs and nights.

They lie at `transcripts/<model>/<run>/<hash of the request>-<attempt>.<outcome>.json`.
"""

from __future__ import annotations

import re
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from checkpoints.digests import model_folder
from checkpoints.records import sealed, unsealed
from checkpoints.store import Store
from contracts.errors import CheckpointError
from models.transcript import Transcript

_ROOT = "transcripts"
_NAME = re.compile(r"(?P<request>[0-9a-f]{32})-(?P<attempt>[1-9][0-9]*)\.(?P<outcome>ok|invalid|unanswered)\.json")
_READERS = 8  # of small files; a bucket takes tens of milliseconds for each


class Transcripts:
    """Transcripts of one model, listed once; those of one run are added to. Safe for threads.

    Args:
        store: where they are kept.
        model_id: those of different models lie apart.
        run_id: the run that pays for new calls.
    """

    def __init__(self, store: Store, model_id: str, run_id: str) -> None:
        self._store = store
        self._folder = f"{_ROOT}/{model_folder(model_id)}"
        self._run_id = run_id
        self._lock = threading.Lock()
        self._answered: defaultdict[str, list[str]] = defaultdict(list)
        self._attempts = Counter[str]()
        for path in store.files(self._folder):
            self._note(path)

    def _note(self, path: str) -> None:
        run_id, _, name = path.removeprefix(f"{self._folder}/").partition("/")
        found = _NAME.fullmatch(name)
        if found is None:
            return
        if found["outcome"] == "ok":
            self._answered[found["request"]].append(path)
        if run_id == self._run_id:
            self._attempts[found["request"]] = max(self._attempts[found["request"]], int(found["attempt"]))

    @property
    def run_id(self) -> str:
        """The run that pays for new calls."""
        return self._run_id

    def spent(self) -> int:
        """Tokens that the run was charged for so far, by whatever model."""
        return sum(call.tokens for call in paid_calls(self._store, self._run_id))

    def answered(self, request_hash: str) -> Iterator[Transcript]:
        """What any run was answered to a request, where it was an answer.

        A file that cannot be read, or holds another request than its name says, is passed over: it costs a call.
        """
        with self._lock:
            paths = list(self._answered.get(request_hash, ()))
        for path in paths:
            transcript = _read(self._store, path)
            if transcript is not None and transcript.request_hash == request_hash and transcript.outcome == "ok":
                yield transcript

    def attempts(self, request_hash: str) -> int:
        """How often the run has made a request."""
        with self._lock:
            return self._attempts[request_hash]

    def keep(self, transcript: Transcript) -> None:
        """Writes a transcript of the run down, for good when this returns.

        Raises:
            CheckpointError: a store that cannot be written.
        """
        name = f"{transcript.request_hash}-{transcript.attempt}.{transcript.outcome}.json"
        path = f"{self._folder}/{transcript.run_id}/{name}"
        self._store.write(path, sealed(transcript))
        with self._lock:
            self._note(path)


@dataclass(frozen=True)
class PaidCall:
    """A call that a run was, or may have been, charged for.

    Attributes:
        outcome: as the name of its file says.
        bytes: of the file.
        transcript: None where the file cannot be read; its bytes then stand for the tokens, since a request and
            its answer have no more tokens than bytes.
    """

    outcome: str
    bytes: int
    transcript: Transcript | None

    @property
    def tokens(self) -> int:
        """What it was charged for, at most."""
        return self.bytes if self.transcript is None else self.transcript.usage.tokens


def paid_calls(store: Store, run_id: str) -> list[PaidCall]:
    """All calls that a run was charged for, of whatever model, in the order of their paths."""
    found = [
        (path, bytes_, name["outcome"])
        for folder in store.folders(_ROOT)
        for path, bytes_ in sorted(store.sizes(f"{_ROOT}/{folder}/{run_id}").items())
        if (name := _NAME.fullmatch(path.rsplit("/", 1)[-1])) is not None
    ]
    with ThreadPoolExecutor(_READERS, "transcripts") as pool:
        read = pool.map(lambda one: _read(store, one[0]), found)
        return [
            PaidCall(outcome, bytes_, transcript) for (_, bytes_, outcome), transcript in zip(found, read, strict=True)
        ]


def _read(store: Store, path: str) -> Transcript | None:
    try:
        return unsealed(store.read(path), Transcript, path, next_step="Remove the file: its request is made again.")
    except CheckpointError:
        return None
