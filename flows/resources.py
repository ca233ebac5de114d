"""Resources: what stages need from outside, opened once a run and handed to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from checkpoints.corpora import load_snapshot, snapshot_folder
from checkpoints.digests import canonical_json, sha256
from checkpoints.pair_scores import PairScores
from checkpoints.store import Store
from contracts.corpus import CorpusSnapshot
from contracts.errors import ConfigurationError
from contracts.evidence import EvidencePlan
from corpus.corpus import Corpus
from corpus.files import open_corpus
from flows.settings import Settings
from models.cross_encoder import CachedCrossEncoder, CrossEncoder, model_id_of, open_cross_encoder
from models.embedder import embedder_model_id
from stages.family_rescue import check_plan_patterns


def open_snapshot(store: Store, snapshot_id: str, settings: Settings) -> Corpus:
    """A corpus snapshot from the store, its files compared with the manifest."""
    snapshot = load_snapshot(store, snapshot_id)
    folder = store.local_folder(snapshot_folder(snapshot_id))
    return open_corpus(folder, snapshot, settings.corpus.collapse_identical_texts)


def open_resources(store: Store, settings: Settings, snapshot_id: str) -> dict[str, Any]:
    """Everything that a stage may name in `needs`."""
    corpus = open_snapshot(store, snapshot_id, settings)
    bm25 = settings.sparse_search
    return {
        "corpus": corpus,
        "keyword_search": corpus.keyword_search(bm25.k1, bm25.b, bm25.epsilon),
        "cross_encoder": _open_cross_encoder(store, settings),
        "plan": load_evidence_plan(settings),
    }


def _open_cross_encoder(store: Store, settings: Settings) -> CrossEncoder | None:
    encoder = open_cross_encoder(settings.cross_encoder)
    return None if encoder is None else CachedCrossEncoder(encoder, PairScores(store, encoder.model_id))


def load_evidence_plan(settings: Settings) -> EvidencePlan | None:
    """The evidence plan that the configuration names, or None.

    Raises:
        ConfigurationError: a file that is not there or no plan, a pattern that does not compile, or more
            required families than places in the selection.
    """
    if settings.family_rescue.plan is None:
        return None
    path = Path(settings.family_rescue.plan)
    try:
        plan = EvidencePlan.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(
            str(path), "the evidence plan cannot be read", got=str(error), next_step="Correct `family_rescue.plan`."
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(
            f"{path}, {place}", "is no evidence plan", got=repr(first.get("input")), want=first["msg"],
            next_step="Correct the plan; examples/evidence_plan.yaml shows its form.",
        ) from error  # fmt: skip
    check_plan_patterns(plan)
    for shape in plan.shapes:
        if len(shape.families) > settings.blended_rerank.top_k:
            raise ConfigurationError(
                f"{path}, shape {shape.name}",
                "needs more families than blended_rerank.top_k has places",
                got=len(shape.families),
                want=f"at most {settings.blended_rerank.top_k}",
                next_step="Raise blended_rerank.top_k or split the shape.",
            )
    return plan


def plan_digest(settings: Settings) -> str:
    """A digest of the evidence plan's content; `none` without a plan."""
    plan = load_evidence_plan(settings)
    return "none" if plan is None else sha256(canonical_json(plan.model_dump(mode="json")))[:16]


def cross_encoder_id(settings: Settings) -> str:
    """The id of the configured cross-encoder, without loading it; `none` when there is none."""
    return model_id_of(settings.cross_encoder)


def embedder_id(settings: Settings, snapshot: CorpusSnapshot) -> str:
    """The id of the model that embeds the queries.

    Raises:
        ConfigurationError: another model than the one that embedded the corpus.
    """
    mine = embedder_model_id(settings.embedder)
    if mine != snapshot.embedding_model:
        raise ConfigurationError(
            "setting embedder.provider",
            "queries and corpus must be embedded by the same model",
            got=mine,
            want=f"{snapshot.embedding_model}, as snapshot {snapshot.snapshot_id} has it",
            next_step="Correct the setting, or ingest the corpus again.",
        )
    return mine
