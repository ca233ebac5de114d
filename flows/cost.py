"""Cost: what the calls of a run came to, by model and outcome, read from its transcripts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from checkpoints.store import Store
from checkpoints.transcripts import PaidCall, paid_calls

_UNREADABLE = "(unreadable)"


@dataclass(frozen=True)
class CostRow:
    """Calls that ended in one way.

    Attributes:
        model: its name, endpoint and length of answers; transcripts that cannot be read have a row of their own.
        outcome: `ok`, `invalid`, or `unanswered`: sent, but no answer came, so that it may have been charged for.
        calls: how many.
        tokens: that they were charged for; where the service did not say, an upper bound.
        estimated_tokens: how many of them are such bounds.
        cost: of the tokens, by the prices in the settings of the time.
    """

    model: str
    outcome: str
    calls: int
    tokens: int
    estimated_tokens: int
    cost: float


def cost_rows(store: Store, run_id: str) -> list[CostRow]:
    """What a run was charged for itself; what it reused cost it nothing."""
    calls = sorted(paid_calls(store, run_id), key=_kind)
    return [_row(*kind, list(some)) for kind, some in groupby(calls, key=_kind)]


def totals(rows: Iterable[CostRow]) -> dict[str, float]:
    """Calls, tokens and cost of all rows."""
    rows = list(rows)
    return {
        "calls": sum(row.calls for row in rows),
        "tokens": sum(row.tokens for row in rows),
        "cost": sum(row.cost for row in rows),
    }


def _kind(call: PaidCall) -> tuple[str, str]:
    return (_UNREADABLE if call.transcript is None else call.transcript.model_id, call.outcome)


def _row(model: str, outcome: str, calls: list[PaidCall]) -> CostRow:
    read = [call.transcript for call in calls if call.transcript is not None]
    known = sum(transcript.usage.tokens for transcript in read if not transcript.usage.estimated)
    tokens = sum(call.tokens for call in calls)
    return CostRow(model, outcome, len(calls), tokens, tokens - known, sum(transcript.cost for transcript in read))
