"""Publishing: write, audit, publish; a run is finished, then audited, and only then do consumers see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checkpoints.pointer import PointerRecord
from checkpoints.published import Gate, described_run, publish, published_pointer
from checkpoints.store import Store
from contracts.errors import CorruptArtifactError
from contracts.manifest import RunPlan
from flows.audit import audit
from flows.settings import PublishParams

# What consumers read: the contexts, the queries that they answer, and the lines of the log that ask these.
PUBLISHED_STAGES = ("context", "queries", "log_lines")


@dataclass(frozen=True)
class Publication:
    """How an attempt to publish a run ended.

    Attributes:
        record: what is published now; None when nothing is.
        gates: of the audit; none when the run was published already.
        moved: whether this attempt made the run the published one.
    """

    record: PointerRecord | None
    gates: Sequence[Gate]
    moved: bool

    @property
    def failed(self) -> list[str]:
        """The gates that the run did not pass."""
        return [gate.gate for gate in self.gates if not gate.passed]


def publish_run(
    store: Store,
    plan: RunPlan,
    params: PublishParams,
    *,
    by: str | None = None,
    why: str | None = None,
    approved_by: str | None = None,
) -> Publication:
    """Audits a run, and makes it the published one when it passes every gate.

    Args:
        store: where the run lies.
        plan: of the run.
        params: the gates.
        by: who publishes; the user of this process when None.
        why: a sentence for the history.
        approved_by: the person who approves it.

    Raises:
        ConfigurationError: gates that cannot be measured.
        InputError: judgements that cannot be used.
        CorruptArtifactError: a manifest or result file that is not what was committed.
        RunHeldError: another process moves the pointer, or removes runs.
    """
    standing = _standing(store)
    if standing is not None and standing.target == plan.run_id:
        return Publication(standing, [], moved=False)
    found = audit(store, plan, params, approved_by=approved_by)
    if not found.passed:
        return Publication(standing, found.gates, moved=False)
    run = described_run(store, plan, found.verdict, PUBLISHED_STAGES, found.gates, approved_by=approved_by)
    record = publish(store, run, by=by, why=why)
    return Publication(record or _standing(store), found.gates, moved=record is not None)


def _standing(store: Store) -> PointerRecord | None:
    """What is published; a damaged pointer counts as none, since publishing puts a new one in its place."""
    try:
        return published_pointer(store).read()
    except CorruptArtifactError:
        return None
