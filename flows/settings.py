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
from pydantic import Field, ValidationError

from contracts.errors import ConfigurationError
from contracts.params import Params
from loading.corpus_file import CorpusParams
from loading.query_log import QueryLogParams
from models.cross_encoder import CrossEncoderParams
from models.embedder import EmbedderParams
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

PREFIX = "DARTFLOW_"

_FLOAT_TAG = "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):
    """YAML 1.1, but 1e-3 and 1.5e3 are numbers, as in YAML 1.2 and everywhere else."""


_Loader.add_implicit_resolver(
    _FLOAT_TAG, re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


class RunParams(Params):
    """How a run is cut and how much it may lose.

    Attributes:
        shard_size: distinct queries a shard, >= 1. Small shards lose less in a crash; large ones
            spend less on files.
        dead_letter_share: dead letters that still count as a partial run, as a share of the log
            lines; 0 allows none, 1 allows all.
        dead_letter_count: the same as a number; None leaves it to the share alone.
    """

    shard_size: Annotated[int, Ge(1)] = 256
    dead_letter_share: Annotated[float, Ge(0), Le(1)] = 0.05
    dead_letter_count: Annotated[int, Ge(0)] | None = None


class ExecutorParams(Params):
    """Where shards run; nothing here changes a result.

    Attributes:
        workers: threads that run shards side by side, >= 1; None takes one a processor.
    """

    workers: Annotated[int, Ge(1)] | None = None


class Settings(Params):
    """The configuration tree; each stage's part is the `Params` of its file."""

    store: str = ".dartflow"
    corpus: CorpusParams = Field(default_factory=CorpusParams)
    query_log: QueryLogParams = Field(default_factory=QueryLogParams)
    embedder: EmbedderParams = Field(default_factory=EmbedderParams)
    cross_encoder: CrossEncoderParams = Field(default_factory=CrossEncoderParams)
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
            got=repr(first.get("input")),
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
