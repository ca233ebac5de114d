"""Printing: what commands tell programs; `flows.screens` is what people see, and brings a library for it along."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from contracts.manifest import RunPlan


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on standard output, and nothing else; what has no number is None, since JSON knows no NaN."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False))  # noqa: T201 - Rich would wrap and colour it


def plan_rows(plan: RunPlan) -> list[dict[str, Any]]:
    """One row a stage: how many shards would be computed and borrowed, and why."""
    return [
        {
            "stage": entry.stage,
            "computed": 0 if entry.borrowed_from else entry.parts,
            "borrowed": entry.parts if entry.borrowed_from else 0,
            "because": entry.because,
        }
        for entry in plan.stages
    ]
