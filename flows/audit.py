"""Audit: what a run must be before it is published, gate by gate."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from checkpoints.published import Gate
from checkpoints.store import Store
from checkpoints.verdict import verdict
from checkpoints.verify import verify
from contracts.columns import column
from contracts.errors import ConfigurationError
from contracts.manifest import RunPlan, Verdict
from evaluation.measures import RANKING_MEASURES, context_measures
from flows.evaluate import RANKINGS, evaluate_run, load_qrels
from flows.export import stage_tables
from flows.settings import PublishParams
from loading.identity import normalised

_FUSED, _INPUTS, _MEASURE = "rrf_merge", ("greedy_selection", "sparse_search"), "nDCG@10"
# Shares and measures that differ by the rounding of floats alone are equal.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Audit:
    """What was found of a run.

    Attributes:
        verdict: what is true of it.
        gates: what was asked of it; they end at the first that leaves nothing to measure.
    """

    verdict: Verdict
    gates: list[Gate]

    @property
    def passed(self) -> bool:
        """Whether it passed every gate."""
        return all(gate.passed for gate in self.gates)


def audit(store: Store, plan: RunPlan, params: PublishParams, *, approved_by: str | None = None) -> Audit:
    """Everything that is asked of a run, and what was found.

    A run that is not finished, or not what was committed, is not measured: its gates end there.

    Args:
        store: where the run lies.
        plan: of the run.
        params: which gates there are, and what they want.
        approved_by: the person who approves the run.

    Raises:
        ConfigurationError: a metric that is not measured.
        InputError: judgements that cannot be read, or that judge no query of the run.
        CorruptArtifactError: a manifest that cannot be trusted.
    """
    _check_metrics(params)
    qrels = None if params.qrels is None else load_qrels(Path(params.qrels))
    found = verdict(store, plan)
    gates = [_verdict_gate(found, params)]
    if gates[-1].passed:
        gates.append(_verify_gate(store, plan))
    if gates[-1].passed:
        gates += _share_gates(store, plan, found, params)
        if qrels is not None:
            gates += _judged_gates(evaluate_run(store, plan, qrels)[0], params)
        if params.approval_required:
            value = approved_by or "nobody"
            gates.append(Gate(gate="approval", value=value, want="a person, by --approve", passed=bool(approved_by)))
    return Audit(found, gates)


def _check_metrics(params: PublishParams) -> None:
    known = {f"{stage}.{measure}".lower(): f"{stage}.{measure}" for stage in RANKINGS for measure in RANKING_MEASURES}
    for name in params.min_metrics:
        if name not in known.values():
            near = difflib.get_close_matches(name.lower(), known, n=1)
            raise ConfigurationError(
                "setting publish.min_metrics", "names a metric that is not measured", got=name,
                want=f"one of {', '.join(RANKINGS)} with one of {', '.join(RANKING_MEASURES)}",
                next_step=f"Did you mean {known[near[0]]!r}?" if near else "Write, say, {context.nDCG@10: 0.6}.",
            )  # fmt: skip


def _verdict_gate(found: Verdict, params: PublishParams) -> Gate:
    allowed = ("complete", "partial") if params.allow_partial else ("complete",)
    value = found.verdict if found.because is None else f"{found.verdict} ({found.because})"
    return Gate(gate="verdict", value=value, want=" or ".join(allowed), passed=found.verdict in allowed)


def _verify_gate(store: Store, plan: RunPlan) -> Gate:
    findings = verify(store, plan)
    bad = [f"{artifact}: {finding}" for artifact, finding in findings if finding != "ok"]
    value = f"{len(findings) - len(bad)} of {len(findings)}" + (f"; {bad[0]}" if bad else "")
    return Gate(gate="verify", value=value, want="all as they were committed", passed=not bad)


def _share_gates(store: Store, plan: RunPlan, found: Verdict, params: PublishParams) -> Iterator[Gate]:
    """What was lost, what repeats, what is empty, and which families are missing."""
    lost = found.lost_log_lines / found.log_lines if found.log_lines else 0.0
    shares = context_shares(stage_tables(store, plan, "context"))
    recalls = [table.select(["evidence_family_recall"]) for table in stage_tables(store, plan, "context")]
    families = context_measures(pa.concat_tables(recalls))
    for name, value, most in (
        ("lost_line_share", lost, params.max_lost_line_share),
        ("duplicate_share", shares.duplicates, params.max_duplicate_share),
        ("empty_context_share", shares.empty, params.max_empty_context_share),
    ):
        if most is not None:
            yield _at_most(name, value, most)
    for name, least in (
        ("evidence_family_recall", params.min_family_recall),
        ("all_families_rate", params.min_all_families_rate),
    ):
        if least is not None:
            yield _at_least(name, families[name], least)


@dataclass(frozen=True)
class ContextShares:
    """What is wrong with contexts, as shares; 0 where there is nothing to share.

    Attributes:
        duplicates: passages whose text an earlier passage of the same context has, of all passages. Texts are
            compared as everywhere: in NFKC, whatever their spaces.
        empty: queries without a passage, of all queries.
    """

    duplicates: float
    empty: float


def context_shares(contexts: Iterable[pa.Table]) -> ContextShares:
    """The shares over tables of `context`, read one at a time."""
    queries = empty = passages = repeated = 0
    for table in contexts:
        candidates = column(table, "candidates")
        texts = [normalised(text) for text in pc.struct_field(candidates.flatten(), "text").to_pylist()]
        rows = pc.list_parent_indices(candidates).to_pylist()
        queries += len(candidates)
        empty += len(candidates) - len(set(rows))
        passages += len(texts)
        repeated += len(texts) - len(set(zip(rows, texts, strict=True)))
    return ContextShares(repeated / passages if passages else 0.0, empty / queries if queries else 0.0)


def _judged_gates(rankings: Mapping[str, Mapping[str, float]], params: PublishParams) -> Iterator[Gate]:
    """How good the rankings are on the judgements."""
    for name, least in params.min_metrics.items():
        stage, _, measure = name.partition(".")
        yield _at_least(name, rankings[stage][measure], least)
    if params.fused_tolerance is not None:
        yield _fused_gate(rankings, params.fused_tolerance)


def _fused_gate(rankings: Mapping[str, Mapping[str, float]], tolerance: float) -> Gate:
    better = max(_INPUTS, key=lambda stage: rankings[stage][_MEASURE])
    gate = _at_most("fused_loss", rankings[better][_MEASURE] - rankings[_FUSED][_MEASURE], tolerance)
    return gate.model_copy(update={"want": f"{gate.want} {_MEASURE} below {better}"})


def _at_most(name: str, value: float, most: float) -> Gate:
    return Gate(gate=name, value=round(value, 6), want=f"at most {most:g}", passed=value <= most + _ROUNDING)


def _at_least(name: str, value: float | None, least: float) -> Gate:
    """What cannot be measured has not passed."""
    if value is None:
        return Gate(gate=name, value="no query needs families", want=f"at least {least:g}", passed=False)
    return Gate(gate=name, value=round(value, 6), want=f"at least {least:g}", passed=value >= least - _ROUNDING)
