"""Graders: who says whether a passage answers a query, apart from the score of its ranking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

from contracts.errors import ModelError

Grade = Literal["correct", "ambiguous", "incorrect"]


@dataclass(frozen=True)
class Pair:
    """A passage to be graded for a query; the texts are what a model reads, the ids what a person's list names."""

    query_id: str
    chunk_id: str
    query: str
    passage: str


class Grader(Protocol):
    """What crag_grading asks of a grader."""

    @property
    def model_id(self) -> str:
        """Changes whenever the grades may."""
        ...

    def grade(self, pairs: Sequence[Pair]) -> list[Grade | None]:
        """A grade for each pair, in order; None where the grader has no say, and the score decides.

        Raises:
            TransientError: it did not answer; the shard may be tried again.
            RefusedError: it will not answer, as without a valid key or with its budget spent.
            ModelError: it answered what is no grade.
        """
        ...


@runtime_checkable
class DecidedGrader(Grader, Protocol):
    """A grader that knows some grades beforehand, as people have written them down: they cost nothing."""

    def decided(self, query_ids: Sequence[str], chunk_ids: Sequence[str]) -> list[Grade | None]:
        """What people have decided of each pair, in order; None where they have not."""
        ...


def decided_grades(grader: Grader, query_ids: Sequence[str], chunk_ids: Sequence[str]) -> list[Grade | None]:
    """What people have decided of each pair, None for all of them where the grader knows of no decisions."""
    return grader.decided(query_ids, chunk_ids) if isinstance(grader, DecidedGrader) else [None] * len(query_ids)


def given_grades(grader: Grader, pairs: Sequence[Pair]) -> list[Grade | None]:
    """The grader's grades, in one call; none is made for no pairs.

    Raises:
        ModelError: it did not give one grade a pair, or what its protocol names.
    """
    grades = grader.grade(pairs) if pairs else []
    if len(grades) != len(pairs) or not {*grades} <= {None, *get_args(Grade)}:
        raise ModelError(
            f"grader {grader.model_id}",
            "gave no usable grades",
            got=f"{len(grades)} grades: {', '.join(sorted(map(str, {*grades})))}",
            want=f"one of {', '.join(get_args(Grade))} a pair, {len(pairs)} in all",
            next_step="Look at the grader; set grader.provider to score to grade without it.",
        )
    return grades
