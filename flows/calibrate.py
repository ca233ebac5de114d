"""Calibrate: the limits of crag_grading from judged queries, and what they are worth on queries not looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from checkpoints.store import Store
from contracts.errors import InputError
from contracts.manifest import RunPlan
from evaluation.bands import Band, Labelled, Limits, choose_limits, measured_bands
from evaluation.measures import Qrels
from flows.export import read_logged_ids, stage_tables
from flows.settings import validated


@dataclass(frozen=True)
class Calibration:
    """Limits and what they are worth.

    Attributes:
        limits: chosen on one half.
        reached: whether the precision that was asked for was met there.
        now: the limits of the run.
        chosen_on, held_out: how many labels each half has.
        proposed_bands, bands_now: the bands on the held-out half.
    """

    limits: Limits
    reached: bool
    now: Limits
    chosen_on: Mapping[str, int]
    held_out: Mapping[str, int]
    proposed_bands: Mapping[str, Band]
    bands_now: Mapping[str, Band]

    @property
    def assignments(self) -> str:
        """The words that give a rerun these limits."""
        return f"--set crag_grading.upper={self.limits.upper!r} --set crag_grading.lower={self.limits.lower!r}"

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {**asdict(self), "set": self.assignments}


def calibrate_run(
    store: Store, plan: RunPlan, qrels: Qrels, *, precision: float, recall: float, complete: bool
) -> Calibration:
    """Chooses `crag_grading.upper` and `lower` from the judged passages of a run.

    Method: the passages that crag_grading graded are labelled by the judgements, relevance > 0 is relevant. A passage
    that the judgements do not name is not a negative: it is left out, unless `complete` says that the judgements name
    every relevant passage. Queries fall into two halves by a hash of their id, the same in every run. On the first,
    `upper` is the lowest score from which on `precision` of the labelled passages are relevant, and `lower` the highest
    one that `recall` of the relevant ones reach. On the other half each band is measured: how many of its labelled
    passages are relevant (precision) and which share of all relevant ones it holds (recall), with 95 % intervals.

    The labels are of passages that came up for the context; relevant ones that no ranking found are not among them. It
    is always the score that is calibrated, whoever gave the grade.

    Args:
        store: of the run.
        plan: of the run.
        qrels: judgements by the ids of log lines; one that several lines of a query differ on counts as relevant.
        precision: wanted of the passages that are correct, in [0, 1].
        recall: the share of relevant passages that must not be incorrect, in [0, 1].
        complete: whether the judgements of a query name all that is relevant.

    Raises:
        InputError: a half without a relevant passage, or without one that is not.
        MissingArtifactError: a shard that was never committed.
    """
    labelled = labelled_passages(store, plan, qrels, complete=complete)
    chosen_on, held_out = labelled.half(0), labelled.half(1)
    _refuse_one_sided(plan, chosen_on, held_out)
    limits, reached = choose_limits(chosen_on, precision, recall)
    params = validated(plan.settings).crag_grading
    now = Limits(params.upper, params.lower)
    return Calibration(
        limits=limits,
        reached=reached,
        now=now,
        chosen_on=chosen_on.counts(),
        held_out=held_out.counts(),
        proposed_bands=measured_bands(held_out, limits),
        bands_now=measured_bands(held_out, now),
    )


def labelled_passages(store: Store, plan: RunPlan, qrels: Qrels, *, complete: bool) -> Labelled:
    """The graded passages of a run that the judgements label, see `calibrate_run`."""
    ids = read_logged_ids(store, plan)
    queries: list[str] = []
    scores: list[float] = []
    relevant: list[bool] = []
    for table in stage_tables(store, plan, "crag_grading"):
        for row in table.select(["query_id", "candidates"]).to_pylist():
            judged = [qrels[logged] for logged in ids.answered_by(row["query_id"]) if logged in qrels]
            for one in row["candidates"] if judged else ():
                said = [labels[one["chunk_id"]] > 0 for labels in judged if one["chunk_id"] in labels]
                if said or complete:
                    queries.append(row["query_id"])
                    scores.append(one["score"])
                    relevant.append(any(said))
    return Labelled(np.array(queries, dtype=str), np.array(scores, dtype=np.float64), np.array(relevant, dtype=bool))


def _refuse_one_sided(plan: RunPlan, *halves: Labelled) -> None:
    counts = [half.counts() for half in halves]
    if all(one["relevant"] and one["not_relevant"] for one in counts):
        return
    got = " and ".join(
        f"{one['relevant']} relevant and {one['not_relevant']} other of {one['queries']} queries" for one in counts
    )
    raise InputError(
        f"judgements of run {plan.run_id}",
        "are too few to choose limits and to measure them",
        got=f"{got} in the two halves",
        want="relevant passages and others in both",
        next_step="Judge more passages (relevance 0 is not relevant), or say --complete if the judgements name "
        "every relevant passage.",
    )
