"""grading: the grades of passages as codes in arrays, and who gives them: the score, people, or a grader."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from contracts.columns import Array, IntArray
from corpus.corpus import Corpus
from models.grader import Grade, Grader, Pair, decided_grades, given_grades

# A grade is an int8 code, its place here: the strongest grade of a query is the largest code.
GRADES = np.array(["incorrect", "ambiguous", "correct"])
INCORRECT, CORRECT = 0, 2
_CODES: dict[Grade, int] = {"incorrect": 0, "ambiguous": 1, "correct": 2}
# Who gave a grade, as codes of the same kind.
GRADERS = np.array(["score", "llm", "file"])
_SCORE, _LLM, _FILE = 0, 1, 2


@dataclass(frozen=True)
class PassageGrader:
    """A grader that is asked by the numbers of queries and the rows of chunks.

    Attributes:
        grader: None leaves every grade to the score.
        query_ids, texts: (queries,) of a shard.
        corpus: has the chunks.
    """

    grader: Grader | None
    query_ids: list[str]
    texts: list[str]
    corpus: Corpus

    def decided(self, queries: IntArray, rows: IntArray, by_score: Array) -> tuple[Array, Array]:
        """Grades that cost nothing, and who gave each: people where they have decided, else the score.

        Args:
            queries, rows: (passages,) int64.
            by_score: (passages,) int8, the grades of the score.

        Returns:
            (passages,) int8 grades and (passages,) int8 graders.
        """
        grades, graders = by_score.copy(), np.full(len(rows), _SCORE, dtype=np.int8)
        if self.grader is not None:
            for place, grade in enumerate(decided_grades(self.grader, *self._ids(queries, rows))):
                if grade is not None:
                    grades[place], graders[place] = _CODES[grade], _FILE
        return grades, graders

    def ask(self, queries: IntArray, rows: IntArray, wanted: Array, grades: Array, graders: Array) -> None:
        """Puts in the grader's grades for the wanted passages that nobody has decided, where it has a say: one call."""
        places = np.flatnonzero(wanted & (graders == _SCORE))
        if self.grader is None or not len(places):
            return
        query_ids, chunk_ids = self._ids(queries[places], rows[places])
        asked = [self.texts[query] for query in queries[places]]
        passages = self.corpus.passage_texts(rows[places])
        pairs = [Pair(*parts) for parts in zip(query_ids, chunk_ids, asked, passages, strict=True)]
        for place, grade in zip(places, given_grades(self.grader, pairs), strict=True):
            if grade is not None:
                grades[place], graders[place] = _CODES[grade], _LLM

    def _ids(self, queries: IntArray, rows: IntArray) -> tuple[list[str], list[str]]:
        """The query ids and the chunk ids of passages."""
        return [self.query_ids[query] for query in queries], self.corpus.ids(rows).to_pylist()
