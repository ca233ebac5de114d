"""Dead letters: what was taken out of a run, with its reason, in files that the manifests vouch for."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from checkpoints.digests import sha256
from checkpoints.store import Store
from contracts.errors import CorruptArtifactError, MissingArtifactError
from contracts.manifest import DeadLetter, DeadLetterFile, Manifest, RunPlan

_NEXT_STEP = "Restore the file, or rerun from the stage that wrote it."


def write_letters(store: Store, prefix: str, letters: Sequence[DeadLetter]) -> DeadLetterFile | None:
    """Keeps dead letters, one JSON object a line, in their order; None when there are none.

    They count from the moment that a manifest names them. The file's name carries its content, so that no
    other process can write over letters that are committed.
    """
    if not letters:
        return None
    data = "".join(letter.model_dump_json() + "\n" for letter in letters).encode()
    digest = sha256(data)
    path = f"{prefix}.{digest[:32]}.jsonl"
    store.write(path, data)
    return DeadLetterFile(
        file=path, sha256=digest, letters=len(letters), log_lines=sum(letter.log_lines for letter in letters)
    )


def letters_of(store: Store, manifest: Manifest) -> list[DeadLetter]:
    """The dead letters of one artifact.

    Raises:
        CorruptArtifactError: the file is gone, or is not what was committed.
    """
    return [] if manifest.dead_letters is None else read_letters(store, manifest.dead_letters)


def read_letters(store: Store, named: DeadLetterFile) -> list[DeadLetter]:
    """The dead letters in a file that a manifest names.

    Raises:
        CorruptArtifactError: as `letters_of`.
    """
    try:
        data = store.read(named.file)
    except MissingArtifactError as error:
        raise CorruptArtifactError(
            named.file, "is missing", got="no file", want=f"{named.letters} dead letters", next_step=_NEXT_STEP
        ) from error
    got = sha256(data)
    if got != named.sha256:
        raise CorruptArtifactError(
            named.file, "is not what was committed", got=f"SHA-256 {got}", want=named.sha256, next_step=_NEXT_STEP
        )
    # Only \n ends a line here: an original may hold other characters that str.splitlines takes for line ends.
    try:
        letters = [DeadLetter.model_validate_json(line) for line in data.removesuffix(b"\n").split(b"\n")]
    except ValidationError as error:
        raise CorruptArtifactError(
            named.file, "holds a line that is no dead letter", got=error.errors()[0]["msg"], next_step=_NEXT_STEP
        ) from error
    counted = f"{len(letters)} of {sum(letter.log_lines for letter in letters)} log lines"
    wanted = f"{named.letters} of {named.log_lines} log lines"
    if counted != wanted:
        raise CorruptArtifactError(
            named.file, "holds other dead letters than its manifest says", got=counted, want=wanted,
            next_step=_NEXT_STEP,
        )  # fmt: skip
    return letters


def replayed_queries(plan: RunPlan) -> set[tuple[str, int, str]]:
    """The (stage, shard, query id) of every dead letter that a later shard of the run has taken up again."""
    return {(replay.from_stage, query.shard, query.query_id) for replay in plan.replays for query in replay.queries}
