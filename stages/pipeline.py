"""PIPELINE: the order of the stages, on one screen."""

from __future__ import annotations

from collections.abc import Iterator

from contracts.errors import ConfigurationError
from stages import (
    blended_rerank,
    context,
    crag_grading,
    distance_matrices,
    family_rescue,
    greedy_selection,
    log_normal,
    oversample,
    rrf_merge,
    sparse_search,
)
from stages.stage import Stage

PIPELINE: tuple[Stage, ...] = (
    oversample.STAGE,  # dense candidates, k times oversampling
    distance_matrices.STAGE,  # query and document distances of the candidates
    log_normal.STAGE,  # distances to log densities
    greedy_selection.STAGE,  # Dartboard: relevant and different
    sparse_search.STAGE,  # keyword candidates
    rrf_merge.STAGE,  # one ranking of both
    family_rescue.STAGE,  # required kinds of evidence that are missing
    blended_rerank.STAGE,  # cross-encoder, fusion and words; selection under coverage
    crag_grading.STAGE,  # correct, ambiguous or incorrect; one corrective search
    context.STAGE,  # the cited passages that reach the model
)

# What is loaded before the first stage: the map of log lines, and the distinct queries.
LOADED = ("log_lines", "queries")

# Steps that run once over all queries; every shard reads their one table.
RUNS_ONCE = frozenset(stage.shared.name for stage in PIPELINE if stage.shared is not None)


def numbered_stages() -> Iterator[tuple[int, Stage]]:
    """Every stage with its number from 1; a stage's shared step comes right before it, under its number."""
    for number, stage in enumerate(PIPELINE, start=1):
        if stage.shared is not None:
            yield number, stage.shared
        yield number, stage


def find_stage(name: str) -> Stage:
    """A stage of the pipeline by name.

    Raises:
        ConfigurationError: names the stages that there are.
    """
    for _, stage in numbered_stages():
        if stage.name == name:
            return stage
    raise ConfigurationError(
        "pipeline",
        "has no such stage",
        got=name,
        want=f"one of {', '.join(stage.name for stage in PIPELINE)}",
        next_step="Correct the stage name.",
    )


def check_wiring(stages: tuple[Stage, ...] = PIPELINE) -> None:
    """Makes sure, before any data move, that each stage reads what something before it writes.

    Raises:
        ConfigurationError: names the reader and the table that nobody before it writes.
    """
    written = set(LOADED)
    for stage in stages:
        for step in (stage.shared, stage):
            if step is None:
                continue
            for name in step.reads:
                if name not in written:
                    raise ConfigurationError(
                        f"stage {step.name}",
                        "reads a table that no earlier stage writes",
                        got=name,
                        want=f"one of {', '.join(sorted(written))}",
                        next_step="Correct `reads` or the order of PIPELINE.",
                    )
            written.add(step.name)
