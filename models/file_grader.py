"""FileGrader: grades that were written down beforehand, by people or by another tool, pair by pair."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal, cast, get_args

from contracts.errors import InputError
from models.grader import Grade, Grader, Pair
from models.outcomes import Spending, counted_grader

# Query id and chunk id to grade.
Decisions = Mapping[tuple[str, str], Grade]
Form = Literal["jsonl", "csv"]

_NAMED = ("query_id", "chunk_id", "decision")
_MOST_PROBLEMS = 5
# A text in a CSV file may be as long as a chunk; the csv module stops at 131,072 characters.
_LONGEST_FIELD = 2**31 - 1


@dataclass(frozen=True)
class Decision:
    """One line of a file of decisions that holds one."""

    line: int
    query_id: str
    chunk_id: str
    grade: Grade


class FileGrader:
    """Gives the grades of a list, and leaves all other pairs to the grader behind it, or to the score.

    Args:
        decisions: the list.
        behind: who grades what the list does not name; None leaves it to the score.
    """

    def __init__(self, decisions: Decisions, behind: Grader | None = None) -> None:
        self._decisions = decisions
        self._behind = behind

    @property
    def model_id(self) -> str:
        """The list by its content, and the grader behind it."""
        return model_id_with(decisions_digest(self._decisions), None if self._behind is None else self._behind.model_id)

    def decided(self, query_ids: Sequence[str], chunk_ids: Sequence[str]) -> list[Grade | None]:
        """The grades of the list, None for a pair that it does not name."""
        return [self._decisions.get(pair) for pair in zip(query_ids, chunk_ids, strict=True)]

    def grade(self, pairs: Sequence[Pair]) -> list[Grade | None]:
        """The grades of the list, and for all other pairs, in one call, those of the grader behind it."""
        grades = self.decided([pair.query_id for pair in pairs], [pair.chunk_id for pair in pairs])
        others = [place for place, grade in enumerate(grades) if grade is None]
        if self._behind is not None and others:
            for place, grade in zip(others, self._behind.grade([pairs[place] for place in others]), strict=True):
                grades[place] = grade
        return grades

    def counting(self, spending: Spending) -> FileGrader:
        """The same list before the same grader, whose calls are noted in `spending`."""
        return FileGrader(self._decisions, counted_grader(self._behind, spending))


def model_id_with(digest: str, behind: str | None) -> str:
    """The id of a list of decisions before a grader."""
    return f"decisions-{digest}" + ("" if behind is None else f" before {behind}")


def decisions_digest(decisions: Decisions) -> str:
    """32 hexadecimal digits that stand for the content of a list, whatever file and order it came in."""
    rows = sorted([query_id, chunk_id, grade] for (query_id, chunk_id), grade in decisions.items())
    return hashlib.sha256(json.dumps(rows, ensure_ascii=True, separators=(",", ":")).encode()).hexdigest()[:32]


def form_of(path: str) -> Form:
    """The form of a file of decisions, by its ending.

    Raises:
        InputError: another ending than .jsonl or .csv.
    """
    ending = PurePath(path).suffix.lower().removeprefix(".")
    if ending not in get_args(Form):
        raise InputError(
            path, "is no file of decisions", got=ending or "no ending", want=".jsonl or .csv",
            next_step="Name the file by what it holds.",
        )  # fmt: skip
    return cast(Form, ending)


def read_decisions(data: bytes, path: str) -> list[Decision]:
    """The decisions of a JSONL or CSV file, which names `query_id`, `chunk_id` and `decision`; the rest is for people.

    A line whose decision is empty or null decides nothing, and is passed over. Case and spaces around a decision
    do not matter.

    Raises:
        InputError: no such form, not in UTF-8, or lines that are no decisions or that decide a pair in two ways;
            it names them.
    """
    form = form_of(path)
    try:
        text = data.decode("utf-8-sig")  # spreadsheets put a mark at the beginning
    except UnicodeDecodeError as error:
        raise InputError(
            path, "is not in UTF-8", got=f"byte {data[error.start]:#04x} at {error.start}",
            next_step="Save the file in UTF-8.",
        ) from error  # fmt: skip
    found: dict[tuple[str, str], Decision] = {}
    problems: list[str] = []
    for line, row in _csv_rows(text, path) if form == "csv" else _json_rows(text):
        decision = _decision(line, row)
        if isinstance(decision, Decision):
            first = found.setdefault((decision.query_id, decision.chunk_id), decision)
            if first.grade != decision.grade:
                problems.append(f"line {line}: {decision.grade}, but line {first.line} says {first.grade}")
        elif decision is not None:
            problems.append(decision)
    refuse(problems, path, f"query_id, chunk_id and a decision: {', '.join(get_args(Grade))}, or nothing")
    return list(found.values())


def refuse(problems: Sequence[str], path: str, want: str) -> None:
    """Stops at problems, each with its line.

    Raises:
        InputError: there is one; names the first few.
    """
    if problems:
        more = [f"and {len(problems) - _MOST_PROBLEMS} more"] if len(problems) > _MOST_PROBLEMS else []
        raise InputError(
            path, "has lines that cannot be used", got="; ".join([*problems[:_MOST_PROBLEMS], *more]), want=want,
            next_step="Correct these lines; nothing was taken over.",
        )  # fmt: skip


def _decision(line: int, row: object) -> Decision | str | None:
    """What a line decides, None for nothing, or what is wrong with it."""
    if not isinstance(row, dict):
        return f"line {line}: no object with named values"
    missing = [name for name in _NAMED if name not in row]
    if missing:
        return f"line {line}: no {' and no '.join(missing)}"
    query_id, chunk_id, decision = (row[name] for name in _NAMED)
    if not all(isinstance(one, str) and one for one in (query_id, chunk_id)):
        return f"line {line}: query_id {query_id!r} and chunk_id {chunk_id!r}"
    grade = decision.strip().casefold() if isinstance(decision, str) else decision
    if grade is None or grade == "":
        return None
    if grade in get_args(Grade):
        return Decision(line, query_id, chunk_id, cast(Grade, grade))
    return f"line {line}: decision {decision!r}"


def _json_rows(text: str) -> Iterator[tuple[int, Any]]:
    """Line number and value of each line; a line that is no JSON has none."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError:
                yield number, None


def _csv_rows(text: str, path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and values of each record, by the names of the first line; a text may go over several lines."""
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    names: list[str] | None = None
    first = 1
    try:
        for values in reader:
            if names is None:
                names = values
            elif values:
                yield first, dict(zip(names, values, strict=False))
            first = reader.line_num + 1
    except csv.Error as error:
        raise InputError(
            f"{path}, line {reader.line_num}", "is no CSV", got=str(error), want="values with commas between them",
            next_step="Save the file as CSV in UTF-8, with commas.",
        ) from error  # fmt: skip
