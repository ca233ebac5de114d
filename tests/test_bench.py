"""Benchmarks: every comparison runs in small, gives what the oracle gives, and the page shows what was measured."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bench import report, results, terminal
from bench.generate import log_order, write
from bench.machine import description
from bench.profile import by_stage, hottest, profiled
from bench.reference import dartboard, follows_dartboard, follows_nearest, fused
from bench.results import Check, Claim, Comparison
from bench.stores import forget, prepared
from bench.timing import Sample, in_turn
from bench.topics import Sizes, blocks, zipf
from stages.pipeline import numbered_stages

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for generated data that the comparisons share."""
    return tmp_path_factory.mktemp("bench")


def generated(folder: Path, sizes: Sizes) -> tuple[pa.Table, pa.Table]:
    write(sizes, folder)
    return pq.read_table(folder / "corpus.parquet"), pq.read_table(folder / "queries.parquet")


def sample(*values: float) -> Sample:
    return Sample(name="side", values=list(values), unit="ms a query")


@pytest.mark.parametrize("name", report.COMPARISONS)
def test_a_comparison_runs_in_small_and_gives_what_the_oracle_gives(name, work):
    comparison = importlib.import_module(f"bench.{name}").compare(True, work)

    assert comparison.name == name
    assert comparison.claims or comparison.tables
    assert [check.what for check in comparison.checks if check.share != 1 or not check.compared] == []
    for claim in comparison.claims:
        reasons = ("is not installed", "are not beside the checkout")
        assert (claim.spread is not None and claim.spread[0] > 0) or str(claim.missing).endswith(reasons), claim.what
    assert name in terminal.text_of(comparison)


def test_every_comparison_is_on_the_page_and_in_make_bench():
    files = {file.stem for file in (ROOT / "bench").glob("*.py") if "def compare(" in file.read_text("utf-8")}

    assert set(report.COMPARISONS) == files
    assert "-m bench\n" in (ROOT / "Makefile").read_text("utf-8")


def test_the_page_shows_what_was_measured():
    page = report.PAGE.read_text("utf-8")

    assert report.page_text(results.load()) in page


def test_the_page_names_a_ratio_that_is_not_met():
    claim = Claim(what="slow / fast", above=sample(10, 30, 20), below=sample(10, 10, 10), wanted=5)
    met = Claim(what="cost", above=sample(11), below=sample(10), wanted=1.15, bound="at most")
    missing = results.claim_of({}, "peer", "ours", 2, package="a peer")
    found = Comparison(
        name="selection", title="A title", settings={"threads": 2}, claims=[claim, met, missing],
        checks=[Check(what="picks", share=0.5, compared=4)],
    )  # fmt: skip
    machine = {
        "processor": "P",
        "cores": 2,
        "memory_gib": 8,
        "system": "S",
        "python": "3",
        "packages": {"numpy": "2.0"},
    }
    kept = {"selection": {**found.model_dump(), "machine": "m"}}
    page = report.page_text({"machines": {"m": machine}, "comparisons": kept})

    assert "| slow / fast | 2.00 (1.00 to 3.00) | at least 5 | **not met** |" in page
    assert "| cost | 1.10 (1.10 to 1.10) | at most 1.15 | met |" in page
    assert "| peer / ours | a peer is not installed | at least 2 | | |" in page
    assert "| picks | 0.5000 | 4 |" in page
    assert "Machine: P, 2 cores, 8 GiB, S, Python 3; numpy 2.0." in page


def test_what_is_compared_runs_in_turn():
    order = []
    times = in_turn(
        {"a": lambda number: order.append(("a", number)) or 2, "b": lambda n: order.append(("b", n)) or 1}, 2
    )

    assert order == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert [len(times[name].values) for name in ("a", "b")] == [2, 2]


def test_a_comparison_alone_prints_and_keeps_nothing_in_small():
    before = results.load()
    line = [sys.executable, "-m", "bench.fusion", "--small"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "ranx / dartflow" in done.stdout
    assert results.load() == before


def test_results_that_differ_from_the_oracle_end_with_status_1(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.x", "--small"])
    wrong = Comparison(name="x", title="X", settings={}, checks=[Check(what="picks", share=0.9, compared=10)])
    with pytest.raises(SystemExit) as stop:
        terminal.run(lambda _small, _work: wrong)

    assert stop.value.code == 1
    assert "picks: 0.9000 of 10" in capsys.readouterr().out


def test_a_profile_tells_every_stage_and_its_hottest_functions(work):
    found = prepared(work, Sizes(chunks=600, queries=300, dimension=32))
    plan, steps = profiled(found, 60)
    forget(found, plan)
    table = by_stage(steps, 60)

    stages = {stage.name for _, stage in numbered_stages()}
    assert {*stages, "log_lines", "queries", "plan and verdict"} == set(steps)
    assert stages <= {row[0] for row in table.rows}
    assert any("stages/oversample.py" in where for _, where in hottest([steps["oversample"][1]]))
    whole = sum(seconds for seconds, _ in steps.values())
    assert 0 < sum(seconds for seconds, _ in hottest([one for _, one in steps.values()])) <= 1.5 * whole


def test_the_loop_by_hand():
    # Two candidates at the query, one of them twice, and one a little aside: the copy tells nothing new.
    candidates = np.array([[1.0, 0.0], [1.0, 0.0], [0.8, 0.6]])
    query = np.array([1.0, 0.0])

    assert dartboard(query, candidates, 2, sigma=0.2) == [0, 2]
    assert follows_dartboard([0, 2], query, candidates, 0.2)
    assert follows_dartboard([1, 2], query, candidates, 0.2)  # a tie
    assert not follows_dartboard([0, 1], query, candidates, 0.2)
    assert not follows_dartboard([2, 0], query, candidates, 0.2)
    assert not follows_dartboard([0, 0], query, candidates, 0.2)


def test_nearest_rows_are_all_of_them_in_order():
    embeddings = np.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]], dtype=np.float32)
    query = np.array([1.0, 0.0], dtype=np.float32)

    assert follows_nearest([0, 1], query, embeddings, 2)
    assert follows_nearest([0, 1, 2], query, embeddings, 5)
    for wrong in ([1, 0], [0, 2], [0], [0, 0]):
        assert not follows_nearest(wrong, query, embeddings, 2)


def test_exact_fusion_by_hand():
    # b: 1/62 + 1/61, c: 1/62, a: 1/61.
    assert fused([["a", "b"], ["b", "c"]], [Fraction(1), Fraction(1)], 60) == ["b", "a", "c"]
    assert fused([["b"], ["a"]], [Fraction(1), Fraction(1)], 60) == ["a", "b"]
    assert fused([["b"], ["a"]], [Fraction(2), Fraction(1)], 60) == ["b", "a"]


def test_the_same_seed_makes_the_same_files(tmp_path):
    sizes = Sizes(chunks=50, queries=20, dimension=4, distinct_share=0.5, groups=3)
    first, second = (generated(tmp_path / name, sizes) for name in ("a", "b"))
    other = generated(tmp_path / "c", Sizes(chunks=50, queries=20, dimension=4, distinct_share=0.5, groups=3, seed=8))

    assert first[0].equals(second[0])
    assert first[1].equals(second[1])
    assert not first[0].equals(other[0])


def test_a_log_has_as_many_distinct_queries_as_is_stated(tmp_path):
    corpus, log = generated(tmp_path, Sizes(chunks=9_000, queries=1_000, dimension=2, distinct_share=0.4, groups=5))
    texts = log["text"].to_pylist()
    counts = sorted((texts.count(text) for text in set(texts)), reverse=True)

    assert (corpus.num_rows, log.num_rows, len(counts)) == (9_000, 1_000, 400)
    assert counts[0] > 20  # the most popular one
    assert counts[200] <= 2
    assert len(set(corpus["text"].to_pylist())) == 9_000
    assert {name for one in corpus["acl"].to_pylist() for name in one} == {f"g{number}" for number in range(5)}
    lengths = np.linalg.norm(log["embedding"].combine_chunks().flatten().to_numpy().reshape(-1, 2), axis=1)
    assert np.allclose(lengths, 1)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_near_copies_are_as_many_as_is_stated(share):
    block = next(blocks(Sizes(chunks=2_000, queries=1, dimension=64, near_copies=share)))
    cosines = block.vectors @ block.vectors.T - 2 * np.eye(2_000)

    # A copy has an original, which may be a copy or be overwritten by one.
    assert abs((cosines.max(axis=1) > 0.95).mean() - 1.4 * share) < 0.1


def test_any_size_is_made_block_by_block():
    sizes = Sizes(chunks=10**9, queries=10**6, dimension=8)
    made = blocks(sizes)

    assert [len(next(made).chunks) for _ in range(2)] == [8192, 8192]
    ends = [sizes.asked_of(number) for number in (0, 1, sizes.blocks - 1)]
    assert (ends[0].start, ends[0].stop, ends[2].stop) == (0, ends[1].start, 10**6)


def test_lines_follow_the_law_of_zipf():
    counts = np.sort(np.bincount(log_order(Sizes(chunks=1, queries=100_000, distinct_share=0.01))))[::-1] - 1

    # The r-th most popular one takes about 1 / r of what the first takes.
    assert 0.8 < counts[0] / (10 * counts[9]) < 1.25
    assert np.allclose(np.diff(zipf(3, shift=0.0), prepend=0), np.array([6, 3, 2]) / 11)


def test_the_generator_is_a_command(tmp_path):
    words = ["--chunks", "30", "--queries", "10", "--dimension", "4", "--out", str(tmp_path / "made")]
    done = subprocess.run([sys.executable, "-m", "bench.generate", *words], cwd=ROOT, capture_output=True, check=False)

    assert done.returncode == 0, done.stderr
    assert pq.read_table(tmp_path / "made" / "corpus.parquet").num_rows == 30
    assert pq.read_table(tmp_path / "made" / "queries.parquet").num_rows == 10
    assert sorted(file.name for file in (tmp_path / "made").iterdir()) == ["corpus.parquet", "queries.parquet"]


def test_results_carry_the_machine_and_all_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results.json")
    for threads, machine in ((1, {"cores": 64}), (2, description())):
        results.keep(Comparison(name="x", title="X", settings={"threads": threads}), machine)
    kept = json.loads((tmp_path / "results.json").read_text("utf-8"))
    (machine,) = kept["machines"].values()

    assert kept["comparisons"]["x"]["settings"] == {"threads": 2}
    assert list(kept["machines"]) == [kept["comparisons"]["x"]["machine"]]
    assert machine["cores"] == results.cores()
    assert machine["packages"]["numpy"] == np.__version__
