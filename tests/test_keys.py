"""Keys: whatever can change a stage's result changes its key, and nothing else does."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grimp
import numpy as np
import pyarrow as pa
import pytest
import yaml
from pydantic import create_model

from checkpoints.corpora import current_snapshot_id, load_snapshot
from checkpoints.logical_digest import logical_digest
from checkpoints.manifests import read_manifest
from checkpoints.run import create_run, load_plan, stage_entries
from checkpoints.store import Store
from contracts.errors import ConfigurationError
from contracts.evidence import EvidencePlan, Family, Shape
from contracts.manifest import Manifest, RunPlan
from contracts.params import Params
from contracts.rules import Unique
from flows.engine import Session, plain_step
from flows.fingerprint import Facts, loaded_inputs, params_of, stage_inputs
from flows.planning import open_query_log, plan_rerun, plan_run
from flows.progress import no_progress
from flows.resources import Resources
from flows.settings import Settings, load_settings
from flows.shard_inputs import shard_inputs
from flows.snapshots import make_snapshot
from loading.query_log import embed_queries
from stages.pipeline import LOADED, RUNS_ONCE, numbered_stages
from tests.small import planned, session_of, small_settings, small_store, write_small_inputs

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(
    folder.parent.name for folder in ROOT.glob("*/__init__.py") if folder.parent.name not in {"tests", "bench"}
)
STAGES = {stage.name: stage for _, stage in numbered_stages()}
ALL = frozenset({*LOADED, *STAGES})

# Which stages a change reaches by itself. What it does to data reaches the stages behind through the digests of
# their parents, which are no part of these inputs.
NOTHING: frozenset[str] = frozenset()
LOG = frozenset(LOADED)
# Whoever is handed the corpus is handed the snapshot, opened with the one choice that a reader has.
CORPUS = frozenset({
    "oversample", "distance_matrices", "sparse_search", "family_searches", "family_rescue", "blended_rerank",
    "crag_grading", "context",
})  # fmt: skip
# BM25 has one set of parameters, those of sparse_search: rescue and corrective searches use them too.
BM25 = frozenset({"sparse_search", "family_searches", "crag_grading"})
# The cross-encoder scores candidates, and the hits of the corrective search.
MODEL = frozenset({"blended_rerank", "crag_grading"})
# Whoever says whether a passage answers a query.
GRADER = frozenset({"crag_grading"})
# The plan says what to rescue, what bounds a selection, and what families a neighbour or a hit of the corrective search
# may serve; coverage goes on as data.
PLAN = frozenset({"family_searches", "family_rescue", "blended_rerank", "crag_grading"})
# A shard is what a key stands for, so all that is cut into shards, or reads all of them, depends on the cut.
CUT = ALL - {"log_lines"}
# Ingest has fixed it in the snapshot, or the corpus was embedded by another model: the plan is refused.
REFUSED = None


def only(*stages: str) -> frozenset[str]:
    return frozenset(stages)


# Every setting, another value for it (in YAML), and the stages that it reaches.
SETTINGS: dict[str, tuple[str, frozenset[str] | None]] = {
    "store": ("elsewhere", NOTHING),
    "corpus.columns": ("{text: body}", REFUSED),
    "corpus.chunking": ("by page", REFUSED),
    "corpus.default_access": ("public", REFUSED),
    "corpus.searched_text": ("text", REFUSED),
    "corpus.tokeniser.language": ("german", REFUSED),
    "corpus.tokeniser.stop_words": ("none", REFUSED),
    "corpus.index_factory": ("HNSW32", REFUSED),
    "corpus.collapse_identical_texts": ("false", CORPUS),
    "corpus.on_bad_chunk": ("quarantine", REFUSED),
    "query_log.columns": ("{query_id: query_id}", LOG),
    "query_log.max_characters": ("300", LOG),
    # Whether an empty log is an error changes no line of a log that has any.
    "query_log.allow_empty": ("true", NOTHING),
    "embedder.provider": ("use-multilingual", REFUSED),
    "embedder.name": ("another", REFUSED),
    "cross_encoder.provider": ("none", MODEL),
    "cross_encoder.folder": ("other_model", MODEL),
    "cross_encoder.threads": ("1", NOTHING),
    # What another provider would use; what these do to its id is for tests of that provider.
    "cross_encoder.http.base_url": ("http://localhost:8000", NOTHING),
    "cross_encoder.http.model": ("reranker", NOTHING),
    "cross_encoder.http.keys": ("RERANK_KEYS", NOTHING),
    "cross_encoder.http.scores": ("logit", NOTHING),
    "cross_encoder.http.passages_per_request": ("9", NOTHING),
    "cross_encoder.http.passage_characters": ("900", NOTHING),
    "cross_encoder.http.timeout_seconds": ("9.0", NOTHING),
    "cross_encoder.column.file": ("scores.parquet", NOTHING),
    "cross_encoder.column.scores": ("logit", NOTHING),
    "grader.provider": ("score", GRADER),
    "grader.base_url": ("http://127.0.0.1:2/v1", GRADER),
    "grader.model": ("another", GRADER),
    "grader.max_answer_tokens": ("50", GRADER),
    "grader.file": ("other.csv", GRADER),
    # How often, with whose keys and for how much a model is asked changes none of its answers.
    "grader.keys": ("OTHER_KEYS", NOTHING),
    "grader.requests_per_minute": ("60", NOTHING),
    "grader.concurrent_requests": ("1", NOTHING),
    "grader.token_budget": ("5000", NOTHING),
    "grader.timeout_seconds": ("5.0", NOTHING),
    "grader.retries": ("0", NOTHING),
    "grader.retry_seconds": ("0.5", NOTHING),
    "grader.prices.input": ("2.5", NOTHING),
    "grader.prices.output": ("10.0", NOTHING),
    "run.shard_size": ("5", CUT),
    # How much a run may lose decides whether it goes on, not what a row is.
    "run.dead_letter_share": ("0.4", NOTHING),
    "run.dead_letter_count": ("7", NOTHING),
    "run.allow_emptied_stages": ("true", NOTHING),
    "executor.workers": ("1", NOTHING),
    "executor.retries": ("0", NOTHING),
    "executor.retry_seconds": ("0.5", NOTHING),
    "executor.cache": ("copies", NOTHING),
    "oversample.k": ("4", only("oversample")),
    "oversample.oversampling": ("2", only("oversample")),
    "log_normal.sigma": ("0.2", only("log_normal")),
    "greedy_selection.k": ("9", only("greedy_selection")),
    "greedy_selection.method": ("mmr", only("greedy_selection")),
    "greedy_selection.relevance_weight": ("2.0", only("greedy_selection")),
    "greedy_selection.diversity_weight": ("0.5", only("greedy_selection")),
    "greedy_selection.mmr_lambda": ("0.9", only("greedy_selection")),
    "sparse_search.enabled": ("false", only("sparse_search")),
    "sparse_search.depth": ("7", only("sparse_search")),
    "sparse_search.k1": ("1.2", BM25),
    "sparse_search.b": ("0.5", BM25),
    "sparse_search.epsilon": ("0.5", BM25),
    # It is meant to give the same table; that it does is for the next stages to see from its digest.
    "sparse_search.engine": ("rank-bm25", only("sparse_search")),
    "rrf_merge.greedy_selection_weight": ("1.0", only("rrf_merge")),
    "rrf_merge.sparse_search_weight": ("0.5", only("rrf_merge")),
    "rrf_merge.rank_constant": ("60", only("rrf_merge")),
    "rrf_merge.rank_window": ("9", only("rrf_merge")),
    "rrf_merge.limit": ("9", only("rrf_merge")),
    "family_rescue.enabled": ("false", only("family_searches", "family_rescue")),
    "family_rescue.plan": ("null", PLAN),
    "blended_rerank.enabled": ("false", only("blended_rerank")),
    "blended_rerank.cross_encoder_weight": ("0.5", only("blended_rerank")),
    "blended_rerank.retrieval_weight": ("0.5", only("blended_rerank")),
    "blended_rerank.lexical_weight": ("0.5", only("blended_rerank")),
    "blended_rerank.exact_token_bonus": ("0.2", only("blended_rerank")),
    "blended_rerank.cross_encoder_depth": ("9", only("blended_rerank")),
    "blended_rerank.top_k": ("4", only("blended_rerank")),
    "blended_rerank.max_per_document": ("1", only("blended_rerank")),
    "blended_rerank.family_fit": ("0.2", only("blended_rerank")),
    "blended_rerank.spread_below": ("0.2", only("blended_rerank")),
    "blended_rerank.spread_from": ("2", only("blended_rerank")),
    "blended_rerank.document_support": ("0.2", only("blended_rerank")),
    "blended_rerank.near_duplicate": ("0.9", only("blended_rerank")),
    "blended_rerank.normalisation": ("min_max", only("blended_rerank")),
    "crag_grading.enabled": ("false", only("crag_grading")),
    "crag_grading.upper": ("0.8", only("crag_grading")),
    "crag_grading.lower": ("0.1", only("crag_grading")),
    "crag_grading.corrective_depth": ("9", only("crag_grading")),
    "crag_grading.corrective_terms": ("2", only("crag_grading")),
    "crag_grading.corrective_limit": ("2", only("crag_grading")),
    "context.token_budget": ("9", only("context")),
    "context.strips": ("true", only("context")),
    "context.strip_sentences": ("1", only("context")),
    "context.strip_overlap": ("0.5", only("context")),
    # What a finished run must be like to be published; it is finished by then.
    "publish.allow_partial": ("false", NOTHING),
    "publish.max_lost_line_share": ("0.5", NOTHING),
    "publish.max_duplicate_share": ("0.5", NOTHING),
    "publish.max_empty_context_share": ("0.5", NOTHING),
    "publish.min_family_recall": ("0.5", NOTHING),
    "publish.min_all_families_rate": ("0.5", NOTHING),
    "publish.qrels": ("other.tsv", NOTHING),
    "publish.min_metrics": ("{context.nDCG@10: 0.5}", NOTHING),
    "publish.fused_tolerance": ("0.5", NOTHING),
    "publish.approval_required": ("true", NOTHING),
}
REACHING = {name: (value, reach) for name, (value, reach) in SETTINGS.items() if reach is not None}

FACTS: dict[str, tuple[Any, frozenset[str]]] = {
    "snapshot_id": ("corpus-other", CORPUS),
    "cross_encoder_id": ("onnx-other", MODEL),
    "grader_id": ("other", GRADER),
    "embedder_id": ("other", only("queries")),
    "plan_digest": ("other", PLAN),
    "query_log_sha256": ("0" * 64, LOG),
    # Vectors of the log that have another width are dead letters, and so are filters on unknown keys.
    "dimension": (17, LOG),
    "filter_keys": (["language"], LOG),
    "shards": (7, CUT),
}

EVIDENCE: dict[str, Any] = {
    "name": "small",
    "version": "1",
    "shapes": [
        {
            "name": "how_and_why",
            "recognise": ["how .* and why"],
            "families": [
                {
                    "name": "guide", "source": "^guide/", "metadata": {"document_id": "d-1", "source": "guide/3.md"},
                    "rescue_query": "guide steps", "wanted": 1, "depth": 20, "authority": [1],
                },
                {"name": "reference", "source": "^reference/", "rescue_query": "reference options"},
            ],
        },
        {
            "name": "when",
            "recognise": ["when"],
            "families": [{"name": "note", "source": "^note/", "rescue_query": "note"}],
        },
    ],
}  # fmt: skip
_SHAPE, _FAMILY = "shapes.0.", "shapes.0.families.0."
EVIDENCE_FIELDS = {
    **{name: name for name in EvidencePlan.model_fields},
    **{_SHAPE + name: f"Shape.{name}" for name in Shape.model_fields},
    **{_FAMILY + name: f"Family.{name}" for name in Family.model_fields},
}
EVIDENCE_FLIPS: dict[str, Any] = {
    "name": "other",
    "version": "2",
    "shapes": EVIDENCE["shapes"][::-1],
    _SHAPE + "name": "other",
    _SHAPE + "concepts": {"how": ["how"]},
    _SHAPE + "recognise": ["why .* and how"],
    _SHAPE + "max_per_document": 1,
    _SHAPE + "families": EVIDENCE["shapes"][0]["families"][::-1],
    _FAMILY + "name": "other",
    _FAMILY + "source": "^guides/",
    _FAMILY + "metadata": {"document_id": "d-2", "source": "guide/3.md"},
    _FAMILY + "rescue_query": "guides",
    _FAMILY + "wanted": 2,
    _FAMILY + "depth": 21,
    _FAMILY + "authority": None,
    _FAMILY + "keep_together": 1,
}


def leaves(model: type[Params], prefix: str = "") -> Iterator[str]:
    """Every setting below a model, with dots."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Params):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def at(tree: Any, path: str) -> Any:
    """What lies at a path with dots; None where a field is left out."""
    for step in path.split("."):
        tree = tree[int(step)] if step.isdigit() else tree.get(step)
    return tree


@dataclass(frozen=True)
class Small:
    """The small store, and the settings that its flips start from."""

    folder: Path
    store: Store
    settings: Settings

    def with_(self, *assignments: str) -> Settings:
        return load_settings(environment={}, assignments=assignments, base=self.settings.model_dump(mode="json"))

    def inputs(self, settings: Settings, log: str = "queries.jsonl") -> dict[str, dict[str, object]]:
        plan = plan_run(self.store, settings, self.folder / log, "any", current_snapshot_id(self.store))
        return {entry.stage: entry.inputs for entry in plan.stages}

    def changed(self, *assignments: str, log: str = "queries.jsonl") -> set[str]:
        """The stages whose inputs differ under other settings or another log."""
        return differing(self.inputs(self.settings), self.inputs(self.with_(*assignments), log))


def differing(before: Mapping[str, object], now: Mapping[str, object]) -> set[str]:
    assert before.keys() == now.keys()
    return {name for name in before if before[name] != now[name]}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Iterator[Small]:
    """A store, a log and a plan; planning only hashes the files of a cross-encoder, so that any bytes do."""
    folder = tmp_path_factory.mktemp("keys")
    store = small_store(folder)
    for name, data in (("model", b"one"), ("same_model", b"one"), ("other_model", b"two")):
        (folder / name).mkdir()
        (folder / name / "model.onnx").write_bytes(data)
        (folder / name / "tokenizer.json").write_bytes(b"{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "other.csv").write_text("query_id,chunk_id,decision\nq,c-001,correct\n")
        patch.setenv("OTHER_KEYS", "one two")
        given = (
            "cross_encoder.provider=onnx", "cross_encoder.folder=model", "publish.qrels=qrels.tsv",
            "grader.model=small", "grader.base_url=http://127.0.0.1:1/v1", "grader.provider=llm",
        )  # fmt: skip
        yield Small(folder, store, small_settings(folder, *given))


def test_every_setting_has_a_stated_reach():
    assert set(leaves(Settings)) == set(SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_changes_the_inputs_of_the_stages_that_it_reaches_and_of_no_other(small, name):
    value, reach = SETTINGS[name]
    other = small.with_(f"{name}={value}").model_dump(mode="json")
    assert at(other, name) != at(small.settings.model_dump(mode="json"), name), "the flip must be one"
    if reach is not REFUSED:
        assert small.changed(f"{name}={value}") == reach
        return
    with pytest.raises(ConfigurationError) as refused:
        small.changed(f"{name}={value}")
    where = "embedder.provider" if name.startswith("embedder") else ".".join(name.split(".")[:2])
    assert refused.value.where == f"setting {where}"


@pytest.mark.parametrize("name", [name for name in REACHING if not name.startswith(("cross_encoder", "grader"))])
def test_a_stage_that_a_setting_does_not_reach_gives_the_same_data(small, base, name):
    """The reach is not only what was declared: everything else is computed under the other value, and is the same."""
    value, reach = REACHING[name]
    settings = small.with_("cross_encoder.provider=none", "grader.provider=score", f"{name}={value}")
    resources = Resources(small.store, settings, base.snapshot_id)
    for stage in STAGES.values():
        if stage.name not in reach:
            given = shard_inputs(small.store, base, stage, 0, ())
            output = stage.checked_run(given.tables, resources.of(stage), params_of(settings, stage))
            assert logical_digest(output.table) == manifest(small.store, base, stage.name, 0).logical_digest, stage.name
    log = open_query_log(small.folder / "queries.jsonl", settings, load_snapshot(small.store, base.snapshot_id))
    if "log_lines" not in reach:
        assert logical_digest(log.lines) == manifest(small.store, base, "log_lines", 0).logical_digest
    if "queries" not in reach:
        first = range(base.shard_size)
        queries = embed_queries(log.queries.take(pa.array(first)), log.embeddings(np.arange(base.shard_size)), None)
        assert logical_digest(queries) == manifest(small.store, base, "queries", 0).logical_digest


def test_every_fact_has_a_stated_reach():
    assert {field.name for field in dataclasses.fields(Facts)} == set(FACTS)


@pytest.mark.parametrize("name", FACTS)
def test_a_fact_changes_the_inputs_of_the_stages_that_it_reaches_and_of_no_other(small, name):
    value, reach = FACTS[name]
    facts = Facts("corpus-1", "onnx-1", "score", "given", "plan-1", "f" * 64, 16, ["source"], 3)

    def inputs(facts: Facts) -> dict[str, Any]:
        loaded = {one: loaded_inputs(one, small.settings, facts) for one in LOADED}
        return loaded | {one: stage_inputs(stage, small.settings, facts) for one, stage in STAGES.items()}

    assert differing(inputs(facts), inputs(dataclasses.replace(facts, **{name: value}))) == reach


def test_a_model_is_known_by_its_bytes_not_by_its_folder(small):
    assert small.changed("cross_encoder.folder=same_model") == NOTHING


def test_a_log_is_known_by_its_bytes_not_by_its_path(small):
    text = (small.folder / "queries.jsonl").read_text()
    (small.folder / "same.jsonl").write_text(text)
    (small.folder / "other.jsonl").write_text(text.replace("option 3", "choice 3"))
    assert small.changed(log="same.jsonl") == NOTHING
    assert small.changed(log="other.jsonl") == LOG


@pytest.mark.parametrize(
    ("old", "new", "name", "reach"),
    [
        ("options number 7", "choices number 7", "precomputed", CORPUS),
        ('"c-007"', '"c-0077"', "precomputed", CORPUS),
        ("", "", "renamed", CORPUS | {"queries"}),
        ('"document_id": "d-2"', '"document_id": "d-2", "version": "3"', "precomputed", CORPUS | LOG),
    ],
    ids=["text", "chunk id", "embedding model", "a new key to filter on"],
)
def test_another_snapshot_changes_whoever_is_handed_the_corpus(small, tmp_path, old, new, name, reach):
    write_small_inputs(tmp_path)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(corpus.read_text().replace(old, new))
    settings = small.with_(f"store={tmp_path / 'store'}", f"embedder.name={name}")
    make_snapshot(corpus, settings, plain_step, no_progress)
    other = Small(small.folder, Store(settings.store), settings)
    assert differing(small.inputs(small.settings), other.inputs(settings)) == reach


def test_every_field_of_an_evidence_plan_is_flipped():
    assert set(EVIDENCE_FLIPS) == set(EVIDENCE_FIELDS)


@pytest.mark.parametrize("path", EVIDENCE_FLIPS)
def test_a_field_of_the_evidence_plan_changes_the_stages_that_are_handed_the_plan(small, tmp_path, path):
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(EVIDENCE))
    changed = json.loads(json.dumps(EVIDENCE))
    above, _, field = path.rpartition(".")
    place = at(changed, above) if above else changed
    assert place.get(field) != EVIDENCE_FLIPS[path]
    place[field] = EVIDENCE_FLIPS[path]
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(changed))
    before, now = (
        small.inputs(small.with_(f"family_rescue.plan={tmp_path / name}")) for name in ("plan.yaml", "other.yaml")
    )
    assert differing(before, now) == PLAN


def test_an_evidence_plan_is_known_by_its_content_not_by_its_path_or_form(small, tmp_path):
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(EVIDENCE))
    model = EvidencePlan.model_validate(EVIDENCE).model_dump(mode="json")  # with every default written out
    backwards = {**dict(reversed(model.items()))}
    (tmp_path / "same.yaml").write_text("# another form\n" + yaml.safe_dump(backwards, sort_keys=False, indent=7))
    assert (tmp_path / "plan.yaml").read_text() != (tmp_path / "same.yaml").read_text()
    before, now = (
        small.inputs(small.with_(f"family_rescue.plan={tmp_path / name}")) for name in ("plan.yaml", "same.yaml")
    )
    assert before == now


@pytest.mark.parametrize("name", STAGES)
def test_a_changed_contract_changes_the_key_of_its_stage(small, name):
    stage = STAGES[name]
    facts = Facts("corpus-1", "onnx-1", "score", "given", "plan-1", "f" * 64, 16, ["source"], 3)
    before = stage_inputs(stage, small.settings, facts)
    wider = create_model("Wider", __base__=stage.writes, added=(int, ...))
    stricter = create_model("Stricter", __base__=stage.writes)
    stricter.rules = (*stage.writes.rules, Unique("added"))
    for other in (
        dataclasses.replace(stage, writes=wider),
        dataclasses.replace(stage, writes=stricter),
        dataclasses.replace(stage, reads={**stage.reads, "more": ("query_id",)}),
    ):
        assert differing(before, stage_inputs(other, small.settings, facts)) == {"contract"}


# Runs in a copy of the checkout. One byte of a file is changed, everything is read again, and the file put back.
FLIP_FILES = """
import json, sys
from pathlib import Path
from flows import fingerprint
from flows.settings import Settings
from stages.pipeline import LOADED, numbered_stages

facts = fingerprint.Facts("corpus-1", "onnx-1", "score", "given", "plan-1", "f" * 64, 16, ["source"], 3)
settings = Settings()

def inputs():
    fingerprint.code_digest.cache_clear()
    fingerprint.lock_digest.cache_clear()
    found = {name: fingerprint.loaded_inputs(name, settings, facts) for name in LOADED}
    return found | {one.name: fingerprint.stage_inputs(one, settings, facts) for _, one in numbered_stages()}

def changed_by(path, before):
    old = Path(path).read_bytes()
    Path(path).write_bytes(old[:4] + bytes([old[4] ^ 1]) + old[5:])
    now = inputs()
    Path(path).write_bytes(old)
    return [name for name in before if before[name] != now[name]]

before = inputs()
flips = {path: changed_by(path, before) for path in json.loads(sys.argv[1])}
assert inputs() == before

forms = {}
Path("stages/extra.py").write_text("EXTRA = 1\\n")
plain = Path("stages/log_normal.py").read_text()
for form in json.loads(sys.argv[2]):
    Path("stages/log_normal.py").write_text(plain + f"\\n\\ndef later():\\n    {form}\\n")
    fingerprint._imported_files.cache_clear()
    forms[form] = changed_by("stages/extra.py", inputs())
print(json.dumps({"root": str(fingerprint.ROOT), "flips": flips, "forms": forms}))
"""
IMPORT_FORMS = (
    "import stages.extra", "import stages.extra as more", "from stages import extra", "from stages.extra import EXTRA",
    "from . import extra", "from .extra import EXTRA", "from ..stages import extra",
)  # fmt: skip


@pytest.fixture(scope="module")
def files() -> list[str]:
    return sorted(file.relative_to(ROOT).as_posix() for package in PACKAGES for file in (ROOT / package).rglob("*.py"))


@pytest.fixture(scope="module")
def flipped_files(files, tmp_path_factory) -> dict[str, Any]:
    """For each file, in a copy of the checkout, the stages whose inputs one changed byte changes."""
    copy = tmp_path_factory.mktemp("copy") / "checkout"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "requirements.lock", copy)
    done = subprocess.run(
        [sys.executable, "-c", FLIP_FILES, json.dumps([*files, "requirements.lock"]), json.dumps(IMPORT_FORMS)],
        cwd=copy, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert Path(found["root"]) == copy.resolve()
    return found


def code_behind(graph: grimp.ImportGraph, stage: str) -> set[str]:
    """The modules behind a stage, by a walk of imports that is not the product's."""
    starts = {"loading.query_log" if stage in LOG else f"stages.{stage}"}
    if stage == "family_searches":
        starts = {"stages.family_rescue"}
    # What it is handed was opened by code that it need not import itself.
    starts |= {"corpus.files"} if stage in CORPUS else set()
    starts |= {"models.cross_encoder"} if stage in MODEL else set()
    starts |= {"models.llm_grader", "models.file_grader"} if stage in GRADER else set()
    modules = starts.union(*(graph.find_upstream_modules(start) for start in starts))
    # Python runs a package before any module in it.
    return modules | {module.split(".")[0] for module in modules}


def test_a_changed_byte_of_source_changes_exactly_the_stages_behind_which_it_stands(files, flipped_files):
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    behind = {stage: code_behind(graph, stage) for stage in ALL}
    modules = {file: file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in files}
    expected = {file: {stage for stage in ALL if module in behind[stage]} for file, module in modules.items()}
    assert {file: set(stages) for file, stages in flipped_files["flips"].items()} == {
        **expected, "requirements.lock": ALL,
    }  # fmt: skip
    assert len([file for file in expected if expected[file]]) > 30


@pytest.mark.parametrize(
    ("file", "reach"),
    [
        ("requirements.lock", ALL),
        ("contracts/columns.py", ALL),
        ("contracts/__init__.py", ALL),
        ("stages/stage.py", ALL - LOG),
        ("stages/log_normal.py", only("log_normal")),
        ("stages/family_rescue.py", only("family_searches", "family_rescue")),
        ("corpus/files.py", CORPUS),
        ("corpus/keyword_index.py", CORPUS),
        ("corpus/bm25_top.py", CORPUS),
        ("corpus/exact_tokens.py", only("blended_rerank")),
        ("models/onnx_cross_encoder.py", MODEL),
        ("models/llm_grader.py", GRADER),
        ("models/file_grader.py", GRADER),
        ("models/embedder.py", LOG),
        ("loading/identity.py", LOG),
        ("loading/corpus_file.py", NOTHING),
        ("checkpoints/commit.py", NOTHING),
        ("flows/executor.py", NOTHING),
    ],
)
def test_a_changed_file_reaches_what_one_would_say(flipped_files, file, reach):
    """The walk above is checked in turn, on files whose reach can be told without it."""
    assert set(flipped_files["flips"][file]) == reach


@pytest.mark.parametrize("form", IMPORT_FORMS)
def test_an_import_counts_in_whatever_form_it_is_written(flipped_files, form):
    assert flipped_files["forms"][form] == ["log_normal"]


def manifest(store: Store, plan: RunPlan, stage: str, part: int) -> Manifest:
    found = read_manifest(store, plan, stage_entries(plan, stage)[0], part)
    assert found is not None
    return found


def manifests_of(store: Store, plan: RunPlan) -> dict[tuple[str, int], Manifest]:
    """All manifests of a finished run."""
    return {(one.stage, part): manifest(store, plan, one.stage, part) for one in plan.stages for part in one.shards}


RUN = """
import sys
from pathlib import Path
from tests.small import planned, session_of, small_store

folder = Path(sys.argv[1])
store = small_store(folder)
print(session_of(store, planned(store, folder, "run", *sys.argv[2:])).execute().verdict)
"""


def test_processes_with_other_hash_seeds_threads_and_budgets_give_equal_keys_and_bytes(tmp_path):
    """Store, log and evidence plan lie at other paths, too."""
    execution = {
        "1": ["executor.workers=1", "executor.retries=0"],
        "2": [
            "executor.workers=4", "executor.retries=9", "executor.retry_seconds=0.25", "executor.cache=copies",
            "run.dead_letter_share=0.75", "run.dead_letter_count=4", "run.allow_emptied_stages=true",
            "cross_encoder.threads=1",
        ],
    }  # fmt: skip
    running = []
    for seed, assignments in execution.items():
        (tmp_path / seed).mkdir()
        command = [sys.executable, "-c", RUN, str(tmp_path / seed), *assignments]
        running.append(
            subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    for one in running:
        out, err = one.communicate(timeout=120)
        assert (one.returncode, out) == (0, "partial\n"), err
    stores = [Store(str(tmp_path / seed / "store")) for seed in execution]
    first, second = (manifests_of(store, load_plan(store, "run")) for store in stores)
    assert first.keys() == second.keys()
    assert len(first) > 30
    for place, one in first.items():
        other = second[place]
        assert one.key_parts == other.key_parts, place
        assert (one.key, one.file, one.sha256) == (other.key, other.file, other.sha256), place
        assert stores[0].read(one.file) == stores[1].read(other.file), place
        assert one.dead_letters == other.dead_letters, place


@pytest.fixture(scope="module")
def base(small) -> RunPlan:
    """A finished run without a cross-encoder."""
    plan = planned(small.store, small.folder, "base")
    assert session_of(small.store, plan).execute().verdict == "partial"  # the log has a bad line
    return plan


def rerun(small: Small, parent: RunPlan, run_id: str, *assignments: str) -> RunPlan:
    settings = load_settings(environment={}, assignments=assignments, base=parent.settings)
    plan = plan_rerun(small.store, parent, settings, from_stage=None, run_id=run_id)
    create_run(small.store, plan)
    assert Session(small.store, plan, settings).execute().verdict == "partial"
    return plan


def changed_keys(small: Small, before: RunPlan, now: RunPlan) -> dict[str, list[int]]:
    """The parts of each stage whose keys changed, after making sure that each had a reason to."""
    old, new = manifests_of(small.store, before), manifests_of(small.store, now)
    own = differing({e.stage: e.inputs for e in before.stages}, {e.stage: e.inputs for e in now.stages})
    changed: dict[str, list[int]] = {}
    for place, one in new.items():
        stage, part = place
        if one.key != old[place].key:
            changed.setdefault(stage, []).append(part)
        parents = [
            (name, parent)
            for name in (STAGES[stage].reads if stage in STAGES else ())
            for parent in ([0] if name in RUNS_ONCE else range(now.shards) if stage in RUNS_ONCE else [part])
        ]
        other_data = any(old[parent].logical_digest != new[parent].logical_digest for parent in parents)
        assert (one.key != old[place].key) == (stage in own or other_data), place
    return changed


def test_other_data_change_the_keys_of_whoever_reads_them(small, base):
    every = list(range(base.shards))
    changed = changed_keys(small, base, rerun(small, base, "wider", "log_normal.sigma=0.2"))
    behind = ("log_normal", "greedy_selection", "rrf_merge", "family_rescue", "blended_rerank", "crag_grading")
    assert changed == dict.fromkeys([*behind, "context"], every)


def test_keys_change_shard_by_shard(small, base):
    """Fewer demands on a correct passage change what some queries get, and the context of their shards alone."""
    changed = changed_keys(small, base, rerun(small, base, "milder", "crag_grading.upper=0.8"))
    assert changed["crag_grading"] == list(range(base.shards))
    assert 0 < len(changed["context"]) < base.shards
    assert set(changed) == {"crag_grading", "context"}


def test_equal_data_leave_the_keys_of_whoever_reads_them(small, base):
    again = rerun(small, base, "reference", "sparse_search.engine=rank-bm25")
    assert changed_keys(small, base, again) == {"sparse_search": list(range(base.shards))}
    old, new = manifests_of(small.store, base), manifests_of(small.store, again)
    computed = {stage for stage, _ in new if new[stage, 0].borrowed_from is None}
    assert computed == {
        "sparse_search", "rrf_merge", "family_rescue", "blended_rerank", "crag_grading", "context",
    }  # fmt: skip
    assert {place: one.sha256 for place, one in new.items()} == {place: one.sha256 for place, one in old.items()}
