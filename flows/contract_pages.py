"""Contract pages: a stage's contract in words, as `dartflow contracts` prints it."""

from __future__ import annotations

from contracts.table import schema
from stages.stage import Stage


def contract_page(stage: Stage) -> str:
    """One page of text: summary, tables, settings, success checks, and what to do when it fails."""
    once = "once over all queries" if stage.shared is None and "query_id" not in schema(stage.writes).names else ""
    lines = [
        f"{stage.name}: {stage.summary}",
        f"  owner: {stage.owner}",
        f"  reads: {', '.join(stage.reads)}" + (f" ({once})" if once else ""),
        *(f"    {name}: {', '.join(columns)}" for name, columns in stage.reads.items()),
        f"  needs: {', '.join(stage.needs) or 'nothing from outside'}",
        f"  writes: {stage.writes.__name__}",
        *(f"    {line}" for line in _schema_lines(stage)),
        f"  rules: {', '.join(repr(rule) for rule in stage.writes.rules) or 'none beyond the types'}",
        f"  settings: {stage.params().model_dump()}",
        f"  success: {'; '.join(check.sentence for check in stage.success) or 'the contract of the table'}",
        f"  on partial failure: {stage.on_partial_failure}",
        f"  known failure: {stage.known_failure}",
        f"  roll back: {stage.roll_back}",
    ]
    return "\n".join(lines) + "\n"


def _schema_lines(stage: Stage) -> list[str]:
    return [
        f"{field.name}: {field.type}" + ("" if not field.nullable else " or null") for field in schema(stage.writes)
    ]
