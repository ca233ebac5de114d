"""The whole configuration: one model tree, composed from the Params of the stages.

Sources, later ones win: the defaults of the Params, one YAML file, environment variables
(`DARTFLOW_LOG_NORMAL__SIGMA`), and `--set log_normal.sigma=0.2`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from annotated_types import Ge, Le
from pydantic import Field, ValidationError, model_validator

from contracts.errors import ConfigurationError
from contracts.params import Params
from flows.defaults import DEFAULT_STORE, PREFIX
from loading.corpus_file import CorpusParams
from loading.query_log import QueryLogParams
from models.cross_encoder_settings import CrossEncoderParams
from models.embedder import EmbedderParams
from models.grader_settings import GraderParams
from stages.blended_rerank import Params as BlendedRerankParams
from stages.context import Params as ContextParams
from stages.crag_grading import Params as CragGradingParams
from stages.distance_matrices import Params as DistanceMatricesParams
from stages.family_rescue import Params as FamilyRescueParams
from stages.greedy_selection import Params as GreedySelectionParams
from stages.log_normal import Params as LogNormalParams
from stages.oversample import Params as OversampleParams
from stages.rrf_merge import Params as RrfMergeParams
from stages.sparse_search import Params as SparseSearchParams

Share = Annotated[float, Ge(0), Le(1)]

# Settings that say where a secret is: what is refused may be the secret itself.
_SECRETS = frozenset({
    "grader.keys", "grader.base_url", "cross_encoder.http.keys", "cross_encoder.http.base_url",
})  # fmt: skip

_FLOAT_TAG = "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):
    """YAML 1.1, but 1e-3 and 1.5e3 are numbers, as in YAML 1.2 and everywhere else."""


_Loader.add_implicit_resolver(
    _FLOAT_TAG, re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


class RunParams(Params):
    """How a run is cut and how much it may lose.

    Attributes:
        shard_size: distinct queries a shard at the most, >= 1; shards are as equal as can be. Small ones
            lose less in a crash; large ones spend less on files.
        dead_letter_share: log lines that dead letters may take out of a run that still counts as
            partial, as a share of all; 0 allows none, 1 allows all. A query that is a dead letter takes
            out all its lines.
        dead_letter_count: the same as a number of lines; None leaves it to the share alone.
        allow_emptied_stages: whether a run may go on, and be complete, when a stage has taken every
            candidate of every query away; false stops it there.
    """

    shard_size: Annotated[int, Ge(1)] = 1024
    dead_letter_share: Annotated[float, Ge(0), Le(1)] = 0.05
    dead_letter_count: Annotated[int, Ge(0)] | None = None
    allow_emptied_stages: bool = False


class ExecutorParams(Params):
    """Where shards run; nothing here changes a result.

    Attributes:
        workers: threads that run shards side by side, >= 1; None takes one a processor.
        retries: how often a shard is tried again when a model or service did not answer, >= 0. 0 gives
            up at once; many bridge long outages, and keep the run waiting.
        retry_seconds: the first pause before that, >= 0; it doubles each time, with as much jitter.
        cache: a folder for copies of corpus snapshots when the store is a bucket; None is `dartflow` in
            XDG_CACHE_HOME or ~/.cache. A copy is as large as the snapshot, and is kept until you remove it.
    """

    workers: Annotated[int, Ge(1)] | None = None
    retries: Annotated[int, Ge(0)] = 3
    retry_seconds: Annotated[float, Ge(0)] = 1.0
    cache: str | None = None


class PublishParams(Params):
    """What `dartflow publish` asks of a run before it makes it the published one.

    Attributes:
        allow_partial: whether a run that lost some lines of the log to dead letters may be published.
        max_lost_line_share: lines of the log without an answer, as a share of all, 0 to 1. 0 allows none, 1
            all; None does not ask.
        max_duplicate_share: passages that repeat a text of the same context, as a share of all passages, 0 to
            1. 0 allows none; None does not ask.
        max_empty_context_share: distinct queries that have no passage, as a share of all, 0 to 1. 0 asks a
            passage for every query; None does not ask.
        min_family_recall: mean evidence-family recall over the queries that need families, 0 to 1; a run
            without such queries fails. None does not ask.
        min_all_families_rate: share of these queries that have all their families, 0 to 1; likewise.
        qrels: TREC judgements by the ids of log lines, as `dartflow evaluate` reads them; None measures no
            ranking.
        min_metrics: what rankings must reach on the judgements, as in {context.nDCG@10: 0.6}: any stage and
            measure of `dartflow evaluate`, 0 to 1. Empty asks nothing.
        fused_tolerance: how far nDCG@10 of rrf_merge may lie below the better of its two inputs on the
            judgements, 0 to 1. 0 wants fusion to lose nothing; None does not ask.
        approval_required: whether a person must approve, by `dartflow publish RUN --approve NAME`.
    """

    allow_partial: bool = True
    max_lost_line_share: Share | None = 0.05
    max_duplicate_share: Share | None = 0.0
    max_empty_context_share: Share | None = 0.1
    min_family_recall: Share | None = None
    min_all_families_rate: Share | None = None
    qrels: str | None = None
    min_metrics: dict[str, Share] = Field(default_factory=dict)
    fused_tolerance: Share | None = 0.02
    approval_required: bool = False

    @model_validator(mode="after")
    def _metrics_have_judgements(self) -> PublishParams:
        if self.min_metrics and self.qrels is None:
            raise ValueError("min_metrics: measured on judgements, but publish.qrels names none")
        return self


class Settings(Params):
    """The configuration tree; each stage's part is the `Params` of its file."""

    store: str = DEFAULT_STORE
    corpus: CorpusParams = Field(default_factory=CorpusParams)
    query_log: QueryLogParams = Field(default_factory=QueryLogParams)
    embedder: EmbedderParams = Field(default_factory=EmbedderParams)
    cross_encoder: CrossEncoderParams = Field(default_factory=CrossEncoderParams)
    grader: GraderParams = Field(default_factory=GraderParams)
    run: RunParams = Field(default_factory=RunParams)
    executor: ExecutorParams = Field(default_factory=ExecutorParams)
    oversample: OversampleParams = Field(default_factory=OversampleParams)
    distance_matrices: DistanceMatricesParams = Field(default_factory=DistanceMatricesParams)
    log_normal: LogNormalParams = Field(default_factory=LogNormalParams)
    greedy_selection: GreedySelectionParams = Field(default_factory=GreedySelectionParams)
    sparse_search: SparseSearchParams = Field(default_factory=SparseSearchParams)
    rrf_merge: RrfMergeParams = Field(default_factory=RrfMergeParams)
    family_rescue: FamilyRescueParams = Field(default_factory=FamilyRescueParams)
    blended_rerank: BlendedRerankParams = Field(default_factory=BlendedRerankParams)
    crag_grading: CragGradingParams = Field(default_factory=CragGradingParams)
    context: ContextParams = Field(default_factory=ContextParams)
    publish: PublishParams = Field(default_factory=PublishParams)


def load_settings(
    config: Path | None = None,
    *,
    assignments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    base: Mapping[str, Any] | None = None,
) -> Settings:
    """Puts the configuration together.

    Args:
        config: a YAML file; None uses the defaults alone.
        assignments: `a.b=value` with the value in YAML, the strongest source.
        environment: where `DARTFLOW_...` variables are read; the process environment when None.
        base: settings of an earlier run in the place of the defaults, for rerun.

    Raises:
        ConfigurationError: an unknown key (with the nearest known one) or an impossible value.
    """
    tree: dict[str, Any] = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in (base or {}).items()
    }
    if config is not None:
        _merge(tree, _read_yaml(config), str(config))
    for name, text in sorted((os.environ if environment is None else environment).items()):
        if name.startswith(PREFIX):
            keys = name.removeprefix(PREFIX).lower().split("__")
            _merge(tree, _nested(keys, _yaml_value(text, name)), name)
    for assignment in assignments:
        path, separator, text = assignment.partition("=")
        where = f"--set {assignment}"
        if not separator or not path:
            raise ConfigurationError(
                where, "is not an assignment", want="stage.setting=value", next_step="Write, say, log_normal.sigma=0.2."
            )
        _merge(tree, _nested(path.strip().split("."), _yaml_value(text, where)), where)
    return validated(tree)


def validated(tree: Mapping[str, Any]) -> Settings:
    """Settings from a tree of plain values.

    Raises:
        ConfigurationError: the first setting that is unknown or impossible.
    """
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"]) or "settings"
        raise ConfigurationError(
            f"setting {path}",
            "is not possible",
            got="something else, which is not shown" if path in _SECRETS else repr(first.get("input")),
            want=first["msg"],
            next_step="Correct the value; config/dartflow.yaml lists every setting.",
        ) from error


def _merge(tree: dict[str, Any], update: Mapping[str, Any], where: str, model: type[Params] = Settings) -> None:
    """Puts `update` over `tree`, refusing names that the model does not have."""
    for key, value in update.items():
        if key not in model.model_fields:
            near = difflib.get_close_matches(str(key), model.model_fields, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(model.model_fields)}."
            known = f"a setting of {model.__module__.split('.')[-1]}" if model is not Settings else "a known section"
            raise ConfigurationError(where, "unknown setting", got=key, want=known, next_step=hint)
        inner = model.model_fields[key].annotation
        if isinstance(inner, type) and issubclass(inner, Params):
            if not isinstance(value, Mapping):
                raise ConfigurationError(
                    where, f"{key} is a section", got=repr(value), want=f"{key}.setting=value",
                    next_step=f"Settings of {key}: {', '.join(inner.model_fields)}.",
                )  # fmt: skip
            branch = dict(tree.get(key) or {})
            _merge(branch, value, where, inner)
            tree[key] = branch
        else:
            tree[key] = value


def _nested(keys: Sequence[str], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    return value  # type: ignore[no-any-return]


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = _parsed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigurationError(
            str(path), "cannot be read as YAML", got=str(error).splitlines()[0], next_step="Correct --config."
        ) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(
            str(path), "is not a mapping", got=type(content).__name__, want="sections", next_step="Correct the file."
        )
    return content


def _parsed(text: str) -> Any:
    """Raises YAMLError, or ValueError where a scalar only looks like what it is not, as the date 2026-13-45 does."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader


def _yaml_value(text: str, where: str) -> Any:
    try:
        return _parsed(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigurationError(
            where, "has a value that is not YAML", got=text, next_step="Quote the value."
        ) from error
