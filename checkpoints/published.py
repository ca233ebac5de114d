"""Published runs: one pointer tells consumers which run to read, and every file of it with its hash."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, ValidationError

from checkpoints.digests import sha256
from checkpoints.moves import moving, user_and_host
from checkpoints.pointer import Pointer, PointerRecord
from checkpoints.run import stage_manifests
from checkpoints.store import Store
from contracts.errors import CorruptArtifactError
from contracts.manifest import RunPlan, Verdict, VerdictName


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Gate(_Record):
    """One thing that an audit asks of a run: what it found and what it wanted."""

    gate: str
    value: float | str
    want: str
    passed: bool


class ResultFile(_Record):
    """One Parquet file of the results, by its path in the store and its hash."""

    file: str
    sha256: str
    rows: int


class PublishedRun(_Record):
    """What a consumer needs to know of a published run.

    `artifacts` are the files of each stage that is read, shard by shard; a file may lie in the folder of an
    earlier run. `approved_by` names the person who approved it.
    """

    run_id: str
    snapshot_id: str
    artifacts: dict[str, list[ResultFile]]
    verdict: VerdictName
    counts: dict[str, int]
    gates: list[Gate]
    approved_by: str | None


def published_pointer(store: Store) -> Pointer:
    """Which run consumers read."""
    return Pointer(
        store,
        "published",
        what="the published pointer",
        empty="has no published run",
        first_step="Run `dartflow publish RUN` first.",
        way_out="See `dartflow published`, then run `dartflow publish RUN` again, "
        "or `dartflow rollback` to go back to the run before it.",
    )


def described_run(
    store: Store,
    plan: RunPlan,
    verdict: Verdict,
    stages: Iterable[str],
    gates: Iterable[Gate],
    *,
    approved_by: str | None,
) -> PublishedRun:
    """A run as it is published.

    Args:
        store: where it lies.
        plan: of the run.
        verdict: what is true of it.
        stages: those that consumers read.
        gates: of its audit.
        approved_by: the person who approved it.

    Raises:
        MissingArtifactError: a part that was never committed.
        CorruptArtifactError: a manifest that cannot be trusted.
    """
    return PublishedRun(
        run_id=plan.run_id,
        snapshot_id=plan.snapshot_id,
        artifacts={
            stage: [
                ResultFile(file=manifest.file, sha256=manifest.sha256, rows=manifest.rows)
                for manifest in stage_manifests(store, plan, stage)
            ]
            for stage in stages
        },
        verdict=verdict.verdict,
        counts={
            "log_lines": verdict.log_lines,
            "distinct_queries": verdict.distinct_queries,
            "dead_letters": verdict.dead_letters,
            "lost_log_lines": verdict.lost_log_lines,
        },
        gates=list(gates),
        approved_by=approved_by,
    )


def publish(store: Store, run: PublishedRun, *, by: str | None = None, why: str | None) -> PointerRecord | None:
    """Makes a run the published one; None when it is so already.

    Its files are verified under the pointer's lease, so that none can be removed before the pointer names them.

    Raises:
        CorruptArtifactError: a file is gone, or not what was committed.
        RunHeldError: another process moves the pointer, or removes runs.
    """
    with moving(published_pointer(store)) as move:
        if move.found is not None and move.found.target == run.run_id:
            return None
        check_files(store, run)
        details = run.model_dump(mode="json")
        return move.to(run.run_id, action="publish", by=by or user_and_host(), why=why, details=details)


def roll_back(store: Store, *, by: str | None = None, why: str | None) -> PointerRecord:
    """Publishes the run again that was published before, after its files were verified.

    Raises:
        MissingArtifactError: there is nothing before.
        CorruptArtifactError: a file of that run, or the record of it, is gone or not what was written.
        RunHeldError: another process moves the pointer.
    """
    with moving(published_pointer(store)) as move:
        record = move.earlier()
        check_files(store, published_run(record))
        return move.back(record, by=by or user_and_host(), why=why)


def published_run(record: PointerRecord) -> PublishedRun:
    """The run that a record of the pointer names.

    Raises:
        CorruptArtifactError: a record of another kind.
    """
    try:
        return PublishedRun.model_validate(record.details)
    except ValidationError as error:
        first = error.errors()[0]
        raise CorruptArtifactError(
            f"published generation {record.generation}",
            "does not describe a run",
            got=f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}",
            next_step="Publish the run again with this version.",
        ) from error


def check_files(store: Store, run: PublishedRun) -> None:
    """Compares every file that consumers read with its hash.

    Raises:
        CorruptArtifactError: the first that is gone, or not what was published.
    """
    for files in run.artifacts.values():
        for file in files:
            data = store.read_if_there(file.file)
            got = "no file" if data is None else f"SHA-256 {sha256(data)}"
            if got != f"SHA-256 {file.sha256}":
                raise CorruptArtifactError(
                    file.file,
                    f"is not what run {run.run_id} was published with",
                    got=got,
                    want=file.sha256,
                    next_step="Publish another run; `dartflow verify RUN` tells whether it is whole.",
                )
