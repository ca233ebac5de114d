"""Resources: what stages need from outside, opened once a run and handed to them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import yaml
from pydantic import ValidationError

from checkpoints.corpora import load_snapshot
from checkpoints.digests import canonical_json, sha256
from checkpoints.pair_scores import PairScores
from checkpoints.snapshot_copy import cache_folder, local_snapshot
from checkpoints.store import Store
from checkpoints.transcripts import Transcripts
from contracts.columns import as_numpy
from contracts.corpus import CorpusSnapshot
from contracts.errors import ConfigurationError
from contracts.evidence import EvidencePlan
from corpus.corpus import Corpus, KeywordSearch
from corpus.files import open_corpus
from corpus.recognition import check_plan_patterns
from flows.decision_files import file_digest, open_decisions
from flows.settings import Settings
from loading.identity import normalised
from models.api_keys import read_keys
from models.cross_encoder import CachedCrossEncoder, CorpusTexts, CrossEncoder, model_id_of, open_cross_encoder
from models.embedder import embedder_model_id
from models.file_grader import FileGrader, model_id_with
from models.grader import Grader
from models.grader_settings import llm_model_id
from stages.stage import Stage


class Resources:
    """What a run's stages may name in `needs`; each is opened when a stage first needs it.

    Args:
        store: where snapshot, pair scores and transcripts lie.
        settings: of the run.
        snapshot_id: the corpus snapshot of the run.
        run_id: which run pays for calls; what belongs to none has a name of its own.
    """

    def __init__(self, store: Store, settings: Settings, snapshot_id: str, run_id: str = "no_run") -> None:
        self._store = store
        self._settings = settings
        self._snapshot_id = snapshot_id
        self._run_id = run_id

    def of(self, stage: Stage) -> dict[str, object]:
        """What this stage needs, by name."""
        return {need: getattr(self, need) for need in stage.needs}

    @cached_property
    def corpus(self) -> Corpus:
        """The snapshot, its files compared with the manifest."""
        snapshot = load_snapshot(self._store, self._snapshot_id)
        folder = local_snapshot(self._store, snapshot, cache_folder(self._settings.executor.cache))
        return open_corpus(folder, snapshot, self._settings.corpus.collapse_identical_texts)

    @cached_property
    def keyword_search(self) -> KeywordSearch:
        """BM25 over the snapshot with the settings of sparse_search."""
        bm25 = self._settings.sparse_search
        return self.corpus.keyword_search(bm25.k1, bm25.b, bm25.epsilon)

    @cached_property
    def cross_encoder(self) -> CrossEncoder | None:
        """The configured cross-encoder, which asks the kept pair scores first, unless a file has them anyway."""
        params = self._settings.cross_encoder
        encoder = open_cross_encoder(params, CorpusTexts(self._passages, normalised))
        if encoder is None or params.provider == "column":
            return encoder
        return CachedCrossEncoder(encoder, PairScores(self._store, encoder.model_id))

    def _passages(self, chunk_ids: Sequence[str]) -> list[str | None]:
        """What a model reads of each chunk; None for one that the corpus does not hold."""
        places = pc.index_in(pa.array(chunk_ids, pa.string()), value_set=self.corpus.column("chunk_id"))
        known = places.drop_null()
        texts = dict(zip(known.to_pylist(), self.corpus.passage_texts(as_numpy(known)), strict=True))
        return [texts.get(place) for place in places.to_pylist()]

    @cached_property
    def grader(self) -> Grader | None:
        """The configured grader, people's decisions before it; None where the score grades."""
        file = self._settings.grader.file
        return self._provider if file is None else FileGrader(open_decisions(self._store, file), self._provider)

    @cached_property
    def _provider(self) -> Grader | None:
        params = self._settings.grader
        if params.provider == "score":
            return None
        from models.llm_grader import LlmGrader  # noqa: PLC0415 - only who asks a service needs a client of it

        transcripts = Transcripts(self._store, llm_model_id(params), self._run_id)
        return LlmGrader(params, transcripts, read_keys("grader", params.keys))

    @cached_property
    def plan(self) -> EvidencePlan | None:
        """The evidence plan, or None."""
        return load_evidence_plan(self._settings)


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
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
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


def plan_digest(plan: EvidencePlan | None) -> str:
    """A digest of the evidence plan's content; `none` without a plan."""
    return "none" if plan is None else sha256(canonical_json(plan.model_dump(mode="json")))[:16]


def cross_encoder_id(settings: Settings) -> str:
    """The id of the configured cross-encoder, without loading it; `none` when there is none."""
    return model_id_of(settings.cross_encoder)


def grader_id(settings: Settings) -> str:
    """The id of the configured grader, without opening it; `score` when the score grades."""
    provider = llm_model_id(settings.grader) if settings.grader.provider == "llm" else None
    file = settings.grader.file
    return (provider or "score") if file is None else model_id_with(file_digest(file), provider)


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
