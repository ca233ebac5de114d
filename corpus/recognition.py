"""recognition: which shape of an evidence plan a question has, and by what it was recognised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import re2

from contracts.errors import ConfigurationError
from contracts.evidence import Combination, EvidencePlan, Shape


@dataclass(frozen=True)
class ShapeRecogniser:
    """The compiled recognisers of one shape.

    Attributes:
        shape: the shape.
        concepts: the patterns of each of its concepts, compiled.
        patterns: its patterns, compiled, by their text.
    """

    shape: Shape
    concepts: dict[str, list[Any]]
    patterns: dict[str, Any]

    @classmethod
    def of(cls, shape: Shape, where: str = "evidence plan") -> ShapeRecogniser:
        """Compiles the patterns of a shape, without regard to case.

        Raises:
            ConfigurationError: one that does not compile.
        """
        place = f"{where}, shape {shape.name}"
        concepts = {
            name: [compiled(f"(?i){text}", text, f"{place}, concept {name}") for text in texts]
            for name, texts in shape.concepts.items()
        }
        texts = [entry for entry in shape.recognise if isinstance(entry, str)]
        patterns = {text: compiled(f"(?i){text}", text, f"{place}, recognise") for text in texts}
        return cls(shape, concepts, patterns)

    def reason(self, text: str) -> str | None:
        """What was found of the first recogniser that holds, as in `rights "permission", account "run as"`; or None."""
        return next((reason for entry in self.shape.recognise if (reason := self.reason_of(entry, text))), None)

    def reason_of(self, entry: str | Combination, text: str) -> str | None:
        """The same for one recogniser of the shape."""
        if isinstance(entry, str):
            hit = self.patterns[entry].search(text)
            return f'"{hit.group(0)}" by {entry}' if hit else None
        words = {name: self.word_of(name, text) for name in entry.of}
        touched = [f'{name} "{word}"' for name, word in words.items() if word is not None]
        return ", ".join(touched) if len(touched) >= (entry.at_least or len(entry.of)) else None

    def word_of(self, concept: str, text: str) -> str | None:
        """What a concept finds in a text, by the first of its patterns that does; or None."""
        hits = (pattern.search(text) for pattern in self.concepts[concept])
        return next((hit.group(0) for hit in hits if hit), None)


def recognise(texts: Sequence[str], shapes: Sequence[Shape]) -> tuple[list[int], list[str | None]]:
    """For each text the place of the first shape that is recognised, -1 for none, and by what it was recognised."""
    recognisers = [ShapeRecogniser.of(shape) for shape in shapes]
    known: dict[str, tuple[int, str | None]] = {}
    for text in texts:
        if text not in known:
            reasons = ((place, one.reason(text)) for place, one in enumerate(recognisers))
            known[text] = next((found for found in reasons if found[1] is not None), (-1, None))
    return [known[text][0] for text in texts], [known[text][1] for text in texts]


def check_plan_patterns(plan: EvidencePlan) -> None:
    """Compiles every pattern of a plan; RE2 has no look-around and no back-references.

    Raises:
        ConfigurationError: names the shape, the family or concept if it is one's, and the pattern.
    """
    where = f"evidence plan {plan.name}"
    for shape in plan.shapes:
        ShapeRecogniser.of(shape, where)
        for family in shape.families:
            if family.source is not None:
                place = f"{where}, shape {shape.name}, family {family.name}, source"
                compiled(family.source, family.source, place)


def compiled(expression: str, pattern: str, where: str) -> Any:
    """An RE2 pattern.

    Raises:
        ConfigurationError: it does not compile; the error shows `pattern`, as it stands in the plan.
    """
    options = re2.Options()
    options.log_errors = False  # the error below says it
    try:
        return re2.compile(expression, options)
    except re2.error as error:
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else str(error)
        raise ConfigurationError(
            where,
            f"the pattern does not compile ({reason})",
            got=repr(pattern),
            want="an RE2 pattern (linear time, so no look-around and no back-references)",
            next_step="Correct the pattern in the plan.",
        ) from error
