"""Measures against judgements: by hand, and over a run as `evaluate` does."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.run import load_plan
from checkpoints.store import Store
from contracts.errors import InputError
from evaluation.measures import context_measures, rank_measures, read_qrels
from flows.evaluate import RANKINGS, evaluate_run, load_qrels
from flows.printing import print_json
from tests.example import ROOT, RUN, row_of

QRELS = ROOT / "examples" / "qrels.tsv"


def _context(*recalls):
    return pa.table({"evidence_family_recall": pa.array(recalls, pa.float64())})


def test_measures_by_hand():
    qrels = {"q1": {"a": 1, "b": 1, "c": 0}, "q2": {"d": 1}, "q3": {"e": 1}}
    found = rank_measures({"q1": ["c", "a"], "q2": ["d"], "unjudged": ["a"]}, qrels)
    assert found["R@5"] == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert found["RR@10"] == pytest.approx((1 / 2 + 1 + 0) / 3)
    first = (1 / np.log2(3)) / (1 + 1 / np.log2(3))
    assert found["nDCG@10"] == pytest.approx((first + 1 + 0) / 3)


@given(st.permutations(list("abcdefghijkl")), st.sets(st.sampled_from("abcdefghijkl"), min_size=1))
@settings(max_examples=60, deadline=None)
def test_recall_and_reciprocal_rank_are_what_their_names_say(ranking, relevant):
    found = rank_measures({"q": ranking}, {"q": dict.fromkeys(relevant, 1)})
    assert found["R@5"] == pytest.approx(len(relevant & set(ranking[:5])) / len(relevant))
    places = [rank for rank, chunk in enumerate(ranking, start=1) if chunk in relevant and rank <= 10]
    assert found["RR@10"] == pytest.approx(1 / places[0] if places else 0.0)


def test_qrels_are_read_at_white_space_and_a_bad_line_is_named():
    assert read_qrels("q 0 a 1\n\nq\t0\tb  0\n", "x") == {"q": {"a": 1, "b": 0}}
    for line in ("q 0 a", "q 0 a one", "q 0 a 1 2"):
        with pytest.raises(InputError, match=r"x, line 2: is no judgement"):
            read_qrels(f"q 0 a 1\n{line}\n", "x")


def test_qrels_that_cannot_be_read_are_refused(tmp_path):
    path = tmp_path / "qrels.tsv"
    with pytest.raises(InputError, match="cannot be read: got No such file"):
        load_qrels(path)
    path.write_bytes(b"caf\xe9 0 a 1\n")
    with pytest.raises(InputError, match=r"qrels.tsv: is not in UTF-8: got byte 0xe9 at 3"):
        load_qrels(path)


def test_context_measures_are_over_the_queries_that_need_families():
    assert context_measures(_context(1.0, None, 0.5, 1.0)) == {
        "evidence_family_recall": pytest.approx(2.5 / 3), "all_families_rate": pytest.approx(2 / 3), "queries": 3.0,
    }  # fmt: skip


@pytest.mark.parametrize("recalls", [(), (None, None)])
def test_contexts_that_need_no_family_have_no_measure_and_are_still_json(recalls, capsys):
    found = context_measures(_context(*recalls))
    assert found == {"evidence_family_recall": None, "all_families_rate": None, "queries": 0.0}
    print_json({"context": found})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"context": found}


def test_nothing_is_printed_that_is_not_json(capsys):
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json({"a": float("nan")})
    assert not capsys.readouterr().out


def test_evaluate_measures_every_ranking_of_a_run(example_store):
    store = Store(str(example_store))
    rankings, context = evaluate_run(store, load_plan(store, RUN), load_qrels(QRELS))
    assert tuple(rankings) == RANKINGS
    assert context["queries"] > 0
    for stage in RANKINGS:
        found = {
            line: [one["chunk_id"] for one in row_of(example_store, RUN, stage, line)["candidates"]]
            for line in ("log-0017", "log-0125")
        }
        qrels = {line: load_qrels(QRELS).get(line, {found[line][0]: 1}) for line in found}
        alone, _ = evaluate_run(store, load_plan(store, RUN), qrels)
        assert alone[stage] == rank_measures(found, qrels)


@pytest.mark.parametrize("text", ["", "other 0 a 1\n", "q-0 0 a 1\n"])
def test_judgements_of_no_query_of_the_run_are_refused(dartflow, tmp_path, text):
    path = tmp_path / "qrels.tsv"
    path.write_text(text)
    for words in ((), ("--json",)):
        status, out, err = dartflow("evaluate", RUN, "--qrels", str(path), *words)
        assert (status, out) == (1, "")
        got = text.split(" ", maxsplit=1)[0] or "none"
        assert f"qrels for run {RUN}: judge no query of the run: got {got}, want log-" in " ".join(err.split())


def test_qrels_in_another_encoding_are_one_clear_error(dartflow, tmp_path):
    path = tmp_path / "qrels.tsv"
    path.write_bytes(b"\xff\xfe")
    status, out, err = dartflow("evaluate", RUN, "--qrels", str(path))
    assert (status, out) == (1, "")
    assert "is not in UTF-8" in " ".join(err.split())
    assert "Traceback" not in err
