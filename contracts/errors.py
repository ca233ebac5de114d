"""The exception tree: everything that dartflow raises on purpose.

DartflowError
├── ConfigurationError        an unknown or impossible setting, plan, preset or command word (exit status 2)
├── InputError                a corpus or query log that is refused as a whole
├── ContractError             a table that breaks its contract: stage, column, row, value
├── CheckpointError           what the store holds cannot be used
│   ├── MissingArtifactError  a run, snapshot or artifact that is not there
│   ├── CorruptArtifactError  bytes that are not the bytes that were committed
│   ├── ChangedRunError       resume after code or configuration changed
│   └── RunHeldError          another process holds the lease of the run
├── ModelError                a model or service gave no usable answer; alone, it is a fault of the data
│   ├── InvalidAnswerError    ... it answered, but not with what was asked for
│   ├── RefusedError          ... since it refuses us: credentials, quota, a setting
│   └── TransientError        ... but may do so on the next try; the only kind that is retried
│       └── TimedOutError     ... it did not answer in time
└── StageError                a stage stopped: which stage, which shard, why
"""

from __future__ import annotations

_LONGEST_VALUE = 200


class DartflowError(Exception):
    """Base of all errors: reads `where: what is wrong: got X, want Y. Next step.` and carries the parts.

    Args:
        where: the file, setting, stage or artifact that is meant.
        problem: what is wrong, in a few words.
        got: what was found; left out of the sentence when None.
        want: what would have been right; left out of the sentence when None.
        next_step: what the reader can do about it.
    """

    exit_status = 1

    def __init__(
        self,
        where: str,
        problem: str,
        *,
        got: object = None,
        want: object = None,
        next_step: str,
    ) -> None:
        self.where = where
        self.problem = problem
        self.got = got
        self.want = want
        self.next_step = next_step
        found = ", ".join(f"{word} {value}" for word, value in (("got", got), ("want", want)) if value is not None)
        super().__init__(f"{where}: {problem}{': ' + found if found else ''}. {next_step}")

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.__dict__.copy()))


def _rebuild(kind: type[DartflowError], fields: dict[str, object]) -> DartflowError:
    """Makes an error again after it crossed a process border; Exception alone forgets keyword arguments."""
    error = kind.__new__(kind)
    message_parts = {name: fields[name] for name in ("where", "problem", "got", "want", "next_step")}
    DartflowError.__init__(error, **message_parts)  # type: ignore[arg-type]
    error.__dict__.update(fields)
    return error


class ConfigurationError(DartflowError):
    """A setting, plan, preset or command word that is unknown or impossible."""

    exit_status = 2


class InputError(DartflowError):
    """A corpus or query log that is refused as a whole."""


class ContractError(DartflowError):
    """A table that breaks its contract.

    Args:
        stage: the stage whose input or output was refused.
        column: the column, with dots into nested lists (`candidates.score`).
        row: the row number in the table, from 0; None when the column as a whole is wrong.
        value: the offending value.
        want: what the contract asks for.
    """

    def __init__(self, *, stage: str, column: str, row: int | None, value: object, want: str) -> None:
        self.stage = stage
        self.column = column
        self.row = row
        self.value = value
        place = f"column {column}" + ("" if row is None else f", row {row}")
        super().__init__(
            f"stage {stage}, {place}",
            "breaks the contract",
            got=_shortened(repr(value)),
            want=want,
            next_step=f"Run `dartflow contracts {stage}` to see the contract.",
        )


def _shortened(text: str) -> str:
    """A value may be a whole passage: its beginning is enough for a sentence, the field carries all of it."""
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


class CheckpointError(DartflowError):
    """What the store holds cannot be used."""


class MissingArtifactError(CheckpointError):
    """A run, snapshot or artifact that is not there."""


class CorruptArtifactError(CheckpointError):
    """Bytes that are not the bytes that were committed."""


class ChangedRunError(CheckpointError):
    """A resume of a run whose code or configuration has changed since."""


class RunHeldError(CheckpointError):
    """Another process holds the lease of the run."""


class ModelError(DartflowError):
    """A model or service gave no usable answer."""


class TransientError(ModelError):
    """A model or service failed in a way that may pass: the only kind of error that is retried."""


class TimedOutError(TransientError):
    """A model or service did not answer in time."""


class RefusedError(ModelError):
    """A model or service refuses us (credentials, quota, a setting): neither a retry nor another query helps."""


class InvalidAnswerError(ModelError):
    """A model or service answered, as often as it was asked, what is no answer to the question."""


class StageError(DartflowError):
    """A stage stopped; `__cause__` holds what stopped it."""
