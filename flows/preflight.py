"""Preflight: what a run cannot keep is refused before anything is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoints.decisions import digest_in
from contracts.corpus import CorpusSnapshot
from contracts.errors import CheckpointError, ConfigurationError
from contracts.evidence import EvidencePlan
from flows.settings import Settings, validated
from models.api_keys import read_keys
from models.endpoint_settings import is_path

# Of the section `corpus` this alone is a choice of the reader; the rest is fixed when a snapshot is made.
_READERS_CHOICE = frozenset({"collapse_identical_texts"})


def ingest_settings(settings: Settings) -> dict[str, Any]:
    """The settings that are fixed when a snapshot is made; they are recorded with it."""
    return settings.corpus.model_dump(mode="json", exclude=set(_READERS_CHOICE))


def settings_of_run(settings: Settings, snapshot: CorpusSnapshot) -> Settings:
    """The settings of a run over a snapshot: what ingest fixed is the snapshot's, paths are absolute.

    Raises:
        ConfigurationError: a setting of ingest was given that the snapshot was not made with, or the only
            weight of the blended score belongs to a cross-encoder that is not there.
        CheckpointError: a snapshot that another version of dartflow made.
    """
    made_with = _made_with(settings, snapshot)
    given = settings.corpus.model_dump(mode="json")
    for name in settings.corpus.model_fields_set - _READERS_CHOICE:
        if given[name] != made_with[name]:
            raise ConfigurationError(
                f"setting corpus.{name}", f"is fixed in snapshot {snapshot.snapshot_id}", got=given[name],
                want=made_with[name], next_step="Ingest the corpus again with this setting, then run.",
            )  # fmt: skip
    blend = settings.blended_rerank
    if (
        settings.cross_encoder.provider == "none"
        and blend.enabled
        and not (blend.retrieval_weight or blend.lexical_weight)
    ):
        raise ConfigurationError(
            "setting blended_rerank.cross_encoder_weight", "is the only weight, but there is no cross-encoder",
            next_step="Configure a cross-encoder, or raise retrieval_weight or lexical_weight.",
        )  # fmt: skip
    tree = settings.model_dump(mode="json")
    tree["corpus"] |= made_with
    tree["family_rescue"]["plan"] = _absolute(settings.family_rescue.plan)
    tree["cross_encoder"]["folder"] = _absolute(settings.cross_encoder.folder)
    tree["cross_encoder"]["column"]["file"] = _absolute(settings.cross_encoder.column.file)
    tree["cross_encoder"]["http"]["keys"] = _absolute_place(settings.cross_encoder.http.keys)
    tree["grader"]["keys"] = _absolute_place(settings.grader.keys)
    file = settings.grader.file
    tree["grader"]["file"] = _absolute(file) if file is not None and digest_in(file) is None else file
    return validated(tree)


def check_keys(settings: Settings) -> None:
    """Makes sure that the API keys are there which the last stages of a run would need.

    Raises:
        ConfigurationError: they are not.
    """
    if settings.grader.provider == "llm":
        read_keys("grader", settings.grader.keys)
    if settings.cross_encoder.provider == "http":
        read_keys("cross_encoder.http", settings.cross_encoder.http.keys)


def _made_with(settings: Settings, snapshot: CorpusSnapshot) -> dict[str, Any]:
    """The settings of ingest that a snapshot was made with."""
    made_with = snapshot.settings.get("ingest")
    known = ingest_settings(settings).keys()
    if not isinstance(made_with, dict) or made_with.keys() != known:
        got = ", ".join(sorted(made_with)) if isinstance(made_with, dict) else "none"
        raise CheckpointError(
            f"corpus snapshot {snapshot.snapshot_id}", "has other settings of ingest than this version knows", got=got,
            want=", ".join(sorted(known)), next_step="Ingest the corpus again.",
        )  # fmt: skip
    return made_with


def check_plan_keys(plan: EvidencePlan | None, snapshot: CorpusSnapshot) -> None:
    """Makes sure that families name only metadata which the snapshot has.

    Raises:
        ConfigurationError: names shape, family and key.
    """
    for shape in () if plan is None else plan.shapes:
        for family in shape.families:
            for key in family.metadata:
                if key not in snapshot.filter_keys:
                    raise ConfigurationError(
                        f"evidence plan, shape {shape.name}, family {family.name}",
                        f"names metadata that snapshot {snapshot.snapshot_id} does not have", got=key,
                        want=f"one of {', '.join(snapshot.filter_keys)}",
                        next_step="Correct the plan, or ingest the column.",
                    )  # fmt: skip


def _absolute(path: str | None) -> str | None:
    """A path that means the same from every working directory, now and at the next rerun."""
    return None if path is None else str(Path(path).expanduser().resolve())


def _absolute_place(keys: str | None) -> str | None:
    """The place of API keys; a path is made to mean the same from everywhere."""
    return _absolute(keys) if keys is not None and is_path(keys) else keys
