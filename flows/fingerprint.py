"""Fingerprints: everything that can change a stage's result and is known before anything is computed."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, distributions
from itertools import accumulate
from pathlib import Path
from typing import Any

from checkpoints.digests import canonical_json, sha256
from contracts.params import Params
from contracts.table import schema
from flows.settings import Settings
from stages.stage import Stage

ROOT = Path(__file__).resolve().parents[1]

# Import statements, which stand on lines of their own. A text that looks like one only adds a file to a digest;
# to parse whole files takes ten times as long, which every look at a plan would pay for.
_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+)?import[ \t]+(\([^)]*\)|[^\n(]+)", re.MULTILINE)
_NAME = re.compile(r"[\w.]+")
_HEADER = re.compile(r"^(Name|Version):[ \t]*(\S+)", re.MULTILINE)

# What stands behind `log_lines` and `queries`, which no stage computes.
_LOADING = ROOT / "loading" / "query_log.py"

# What makes the things that stages name in `needs`: a stage imports their types, and need not import this.
_OPENED_BY = {
    "corpus": (ROOT / "corpus" / "files.py",),
    "keyword_search": (ROOT / "corpus" / "files.py",),
    "cross_encoder": (ROOT / "models" / "cross_encoder.py",),
    "grader": (ROOT / "models" / "llm_grader.py", ROOT / "models" / "file_grader.py"),
}


@dataclass(frozen=True)
class Facts:
    """What a run stands on, apart from settings and code.

    Attributes:
        snapshot_id: the corpus snapshot.
        cross_encoder_id: `none`, or the model's id.
        grader_id: `score`, or the grader's id.
        embedder_id: likewise; for queries.
        plan_digest: of the evidence plan's content; `none` without a plan.
        query_log_sha256: of the log file.
        dimension: of the snapshot's embeddings; lines that come with a vector of another width are dead letters.
        filter_keys: what filters of the log may name; other lines are dead letters.
        shards: how many shards the distinct queries make.
    """

    snapshot_id: str
    cross_encoder_id: str
    grader_id: str
    embedder_id: str
    plan_digest: str
    query_log_sha256: str
    dimension: int
    filter_keys: list[str]
    shards: int


def stage_inputs(stage: Stage, settings: Settings, facts: Facts) -> dict[str, Any]:
    """The parts of a stage's keys that are known before the run.

    Settings that only say where or how fast (executor, threads) take no part.
    """
    inputs: dict[str, Any] = {
        "stage": stage.name,
        "contract": _contract_digest(stage),
        "code": code_digest(
            Path(inspect.getsourcefile(stage.run) or "").resolve(),
            *(file for need in stage.needs for file in _OPENED_BY.get(need, ())),
        ),
        "lock": lock_digest(),
        # The plan takes part by its content, not by the path it lies at.
        "params": params_of(settings, stage).model_dump(mode="json", exclude={"plan"}),
        "shards": {"count": facts.shards, "size": settings.run.shard_size},
    }
    if "corpus" in stage.needs or "keyword_search" in stage.needs:
        inputs["snapshot"] = facts.snapshot_id
        inputs["corpus"] = {"collapse_identical_texts": settings.corpus.collapse_identical_texts}
    if "keyword_search" in stage.needs:
        inputs["keyword_search"] = settings.sparse_search.model_dump(mode="json", include={"k1", "b", "epsilon"})
    if "cross_encoder" in stage.needs:
        inputs["cross_encoder"] = facts.cross_encoder_id
    if "grader" in stage.needs:
        inputs["grader"] = facts.grader_id
    if "plan" in stage.needs:
        inputs["plan"] = facts.plan_digest
    return inputs


def params_of(settings: Settings, stage: Stage) -> Params:
    """A stage's part of the configuration; a shared step has the part of the stage it serves."""
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if type(value) is stage.params:
            return value
    raise TypeError(f"Settings has no part for the params of {stage.name}")


def loaded_inputs(name: str, settings: Settings, facts: Facts) -> dict[str, Any]:
    """The same for `log_lines` and `queries`, which are loaded from the query log."""
    inputs: dict[str, Any] = {
        "stage": name,
        "code": code_digest(_LOADING),
        "lock": lock_digest(),
        # Whether an empty log is allowed changes no line of a log that has any.
        "params": settings.query_log.model_dump(mode="json", exclude={"allow_empty"}),
        "vectors_from_log": facts.dimension if settings.embedder.provider == "precomputed" else None,
        "query_log": facts.query_log_sha256,
        "filter_keys": facts.filter_keys,
    }
    if name == "queries":
        inputs["embedder"] = facts.embedder_id
        inputs["shards"] = {"count": facts.shards, "size": settings.run.shard_size}
    return inputs


def difference(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> str | None:
    """The first part that differs, in words (`sigma: 0.1 -> 0.2`), or None."""
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            return difference(old, new, f"{prefix}{name}." if name != "params" else prefix)
        return f"{prefix}{name}: {_short(old)} -> {_short(new)}"
    return None


@cache
def code_digest(*files: Path) -> str:
    """A digest of source files and of every file of this checkout that they import, directly or through others."""
    found = set(files)
    waiting = list(found)
    while waiting:
        fresh = _imported_files(waiting.pop()) - found
        found |= fresh
        waiting += fresh
    named = sorted((str(path.relative_to(ROOT)), path.read_bytes()) for path in found)
    return sha256(b"".join(f"{name}:{sha256(data)};".encode() for name, data in named))[:16]


@cache
def _imported_files(file: Path) -> set[Path]:
    """The files of this checkout that a file imports, also inside functions; Python runs their packages with them."""
    modules: set[str] = set()
    for origin, names in _IMPORT.findall(file.read_text(encoding="utf-8")):
        before = f"{_full_name(file, origin)}." if origin else ""
        modules |= {f"{before}{name}" for name in _NAME.findall(names)}
    with_packages = {place for module in modules for place in accumulate(module.split("."), "{}/{}".format)}
    places = {ROOT / place for place in with_packages}
    return {path for place in places for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()}


def _full_name(file: Path, origin: str) -> str:
    """The module that `from ... import` names, by its full name also where it is relative to the file."""
    module = origin.lstrip(".")
    level, package = len(origin) - len(module), file.relative_to(ROOT).parent.parts
    above = package[: len(package) + 1 - level] if level else ()
    return ".".join([*above, *([module] if module else [])])


@cache
def lock_digest() -> str:
    """A digest of requirements.lock, or of the installed versions where the lock file is not at hand."""
    lock = ROOT / "requirements.lock"
    if lock.is_file():
        return sha256(lock.read_bytes())[:16]
    return sha256(canonical_json(package_versions()))[:16]


@cache
def package_versions() -> dict[str, str]:
    """Every installed distribution with its version."""
    return dict(sorted(_name_and_version(found) for found in distributions()))


def _name_and_version(found: Distribution) -> tuple[str, str]:
    text = found.read_text("METADATA") or found.read_text("PKG-INFO") or ""
    # `found.metadata` would parse the long description below the headers too, which takes fifty times as long.
    headers = dict(_HEADER.findall(text.partition("\n\n")[0]))
    return headers["Name"].lower(), headers["Version"]


def _contract_digest(stage: Stage) -> str:
    parts = {
        "schema": str(schema(stage.writes)),
        "rules": [repr(rule) for rule in stage.writes.rules],
        "reads": {name: list(columns) for name, columns in stage.reads.items()},
    }
    return sha256(canonical_json(parts))[:16]


def _short(value: object) -> str:
    return textwrap.shorten(str(value), width=24, placeholder="...")
