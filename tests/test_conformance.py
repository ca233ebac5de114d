"""Every stage of PIPELINE keeps the promises of a stage, whatever it computes."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import stages
from checkpoints.commit import parquet_bytes
from checkpoints.logical_digest import logical_digest
from contracts.columns import column, ragged
from contracts.errors import ConfigurationError
from contracts.evidence import EvidencePlan
from contracts.table import check_rows, schema
from stages import greedy_selection, oversample
from stages.pipeline import PIPELINE, RUNS_ONCE, check_wiring, find_stage, numbered_stages
from stages.stage import Stage
from tests.chain import TableCrossEncoder, resources_of, run_chain
from tests.corpora import make_corpus, make_queries

WORDS = "reset password billing invoice refund token security hub meter tariff export webhook".split()
PLAN = EvidencePlan.model_validate(
    {
        "name": "test",
        "version": "1",
        "shapes": [
            {
                "name": "refunds",
                "recognise": ["refund"],
                "families": [
                    {"name": "policy", "source": "^policy/", "rescue_query": "refund policy", "keep_together": 1},
                    {"name": "form", "source": "^form/", "rescue_query": "webhook tariff"},
                ],
            }
        ],
    }
)


def _corpus() -> Any:
    random = np.random.default_rng(7)
    chunks = []
    for number in range(40):
        kind = ("policy", "form", "faq")[number % 3]
        text = " ".join(random.choice(WORDS, size=6)) if number % 7 else "reset your password twice"
        chunks.append(
            {
                "chunk_id": f"{kind}-{number:02d}", "text": text, "source": f"{kind}/{number}.md",
                "acl": None if number % 4 else ["staff"], "authority_tier": number % 3 + 1,
                "metadata": {"language": "en" if number % 2 else "es"},
            }
        )  # fmt: skip
    return make_corpus(chunks)


RESOURCES = resources_of(_corpus(), PLAN, TableCrossEncoder(default=-1.0))
SHAPES = {
    "empty input": make_queries([]),
    "one query": make_queries([{"text": "reset password"}]),
    "ragged candidate counts": make_queries(
        [
            {"text": "refund of the invoice, how"},
            {"text": "zzz nothing shares a term", "groups": ["staff"]},
            {"text": "hub", "filters": {"language": "es"}},
            {"text": "token", "filters": {"chunk_id": "faq-02"}},
            {"text": "token", "filters": {"version": "none has one"}},
        ]
    ),
}


def _stage_inputs(stage: Stage, queries: pa.Table) -> dict[str, pa.Table]:
    tables = {"queries": queries} | {name: out.table for name, out in run_chain(queries, RESOURCES).items()}
    return {name: tables[name] for name in stage.reads}


def _run(stage: Stage, inputs: Mapping[str, pa.Table]) -> Any:
    return stage.checked_run(inputs, RESOURCES, stage.params())


ALL = [stage for _, stage in numbered_stages()]
NAMES = [stage.name for stage in ALL]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stage", ALL, ids=NAMES)
def test_stage_obeys_its_contract_and_balances_its_account(stage, shape):
    output = _run(stage, _stage_inputs(stage, SHAPES[shape]))
    check_rows(output.table.to_pylist(), stage.writes, stage.name)
    assert output.table.schema.equals(schema(stage.writes))
    assert output.account.balanced
    assert all(count > 0 for count in [*output.account.added.values(), *output.account.removed.values()])
    if stage.name not in RUNS_ONCE:
        assert output.table.column("query_id").equals(SHAPES[shape].column("query_id"))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stage", ALL, ids=NAMES)
def test_stage_leaves_its_inputs_alone(stage, shape):
    inputs = _stage_inputs(stage, SHAPES[shape])
    before = {name: logical_digest(table) for name, table in inputs.items()}
    _run(stage, inputs)
    assert {name: logical_digest(table) for name, table in inputs.items()} == before


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stage", ALL, ids=NAMES)
def test_same_input_gives_the_same_bytes(stage, shape):
    inputs = _stage_inputs(stage, SHAPES[shape])
    again = {name: pa.Table.from_pylist(table.to_pylist(), schema=table.schema) for name, table in inputs.items()}
    assert parquet_bytes(_run(stage, inputs).table) == parquet_bytes(_run(stage, again).table)


@pytest.mark.parametrize("stage", PIPELINE, ids=[stage.name for stage in PIPELINE])
def test_a_query_gets_the_same_row_whatever_shares_its_shard(stage):
    queries = SHAPES["ragged candidate counts"]
    together = _run(stage, _stage_inputs(stage, queries)).table.to_pylist()
    alone = [_run(stage, _stage_inputs(stage, queries.slice(i, 1))).table.to_pylist()[0] for i in range(len(queries))]
    assert together == alone


@pytest.mark.parametrize("stage", ALL, ids=NAMES)
def test_stage_takes_what_it_says_it_reads_and_needs(stage):
    wanted = {*stage.reads, *stage.needs, "params"}
    assert set(inspect.signature(stage.run).parameters) == wanted


def _only(table: pa.Table, columns: tuple[str, ...]) -> pa.Table:
    """The table with some columns, and of a list of structs with some fields."""
    wanted: dict[str, set[str]] = {}
    for one in columns:
        name, _, field = one.partition(".")
        wanted.setdefault(name, set()).add(field)
    found = {}
    for name, fields in wanted.items():
        found[name] = column(table, name)
        if fields != {""}:
            lists = ragged(table, name)
            kept = [field for field in found[name].type.value_type if field.name in fields]
            values = pa.StructArray.from_arrays([lists.values[field.name] for field in kept], fields=kept)
            found[name] = pa.ListArray.from_arrays(pa.array(lists.offsets, pa.int32()), values)
    return pa.table(found)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stage", ALL, ids=NAMES)
def test_stage_needs_no_column_but_those_it_says(stage, shape):
    inputs = _stage_inputs(stage, SHAPES[shape])
    narrow = {name: _only(inputs[name], columns) for name, columns in stage.reads.items()}
    assert _run(stage, narrow).table.equals(_run(stage, inputs).table)


# Compared where they are there, or said in an error.
UNCOMPUTED = {"query_id", "family_rescue.shape"}


@pytest.mark.parametrize("stage", ALL, ids=NAMES)
def test_stage_says_no_column_that_it_does_not_need(stage):
    inputs = _stage_inputs(stage, SHAPES["ragged candidate counts"])
    for name, columns in stage.reads.items():
        for one in columns:
            if one not in UNCOMPUTED and f"{name}.{one}" not in UNCOMPUTED:
                others = tuple(other for other in columns if other != one)
                with pytest.raises((KeyError, TypeError, AttributeError)):
                    _run(stage, {**inputs, name: _only(inputs[name], others)})


@pytest.mark.parametrize("stage", ALL, ids=NAMES)
def test_stage_says_everything_an_operator_asks(stage):
    for text in (stage.summary, stage.on_partial_failure, stage.known_failure, stage.roll_back):
        assert text.endswith(".")
        assert len(text.split()) > 3
    assert stage.owner
    assert "Attributes:" in (inspect.getdoc(stage.params) or "") or not stage.params.model_fields


def test_pipeline_is_the_ten_stages_in_order():
    assert [stage.name for stage in PIPELINE] == [
        "oversample", "distance_matrices", "log_normal", "greedy_selection", "sparse_search",
        "rrf_merge", "family_rescue", "blended_rerank", "crag_grading", "context",
    ]  # fmt: skip


def test_every_stage_file_is_in_the_pipeline():
    files = {info.name for info in pkgutil.iter_modules(stages.__path__)} - {"pipeline", "stage"}
    assert files == {stage.name for stage in PIPELINE}
    for name in files:
        assert importlib.import_module(f"stages.{name}").STAGE in PIPELINE


def test_wiring_is_checked_before_data_move():
    check_wiring()
    with pytest.raises(ConfigurationError, match=r"stage greedy_selection: reads a table that no earlier stage writes"):
        check_wiring((oversample.STAGE, greedy_selection.STAGE))


def test_an_unknown_stage_name_lists_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"got rerank, want one of oversample, "):
        find_stage("rerank")
