"""greedy_selection: Dartboard against the plain loop, exact arithmetic and cases by hand; and its baselines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal, localcontext

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy.special import logsumexp

from contracts.candidates import Candidates, Distances, LogProbabilities, Selection
from contracts.table import check_table, schema
from stages import distance_matrices, log_normal, oversample
from stages.greedy_selection import STAGE, Params, dartboard, log_gains_of, mmr
from tests.corpora import make_corpus, make_queries, unit

seeds = st.integers(0, 2**32 - 1)


@dataclass(frozen=True)
class Board:
    """One query and its candidates: distances as the stages measure them, and what is made of them."""

    query: np.ndarray
    document: np.ndarray  # full matrix

    @classmethod
    def of(cls, query, candidates):
        """From unit vectors, through the kernel of distance_matrices."""
        count = len(candidates)
        to_query, pairs = distance_matrices.cosine_distances(
            query[None], np.array([0, count]), np.arange(count), candidates
        )
        return cls.of_distances(to_query, pairs)

    @classmethod
    def of_distances(cls, to_query, pairs):
        full = np.zeros((len(to_query), len(to_query)), np.float32)
        full[np.tril_indices(len(to_query), -1)] = pairs
        return cls(np.asarray(to_query, np.float32), full + full.T)

    @property
    def count(self):
        return len(self.query)

    @property
    def pairs(self):
        return self.document[np.tril_indices(self.count, -1)]

    @property
    def layout(self):
        return np.array([0, self.count]), np.array([0, len(self.pairs)])

    def logs(self, sigma):
        """l(q, c), and the full matrix of l(c, c')."""
        return log_normal.log_normal(self.query, sigma), log_normal.log_normal(self.document, sigma)

    def arguments(self, sigma):
        offsets, pair_offsets = self.layout
        return (
            offsets,
            log_normal.log_normal(self.query, sigma),
            pair_offsets,
            log_normal.log_normal(self.pairs, sigma),
            log_normal.log_normal(np.zeros(1, np.float32), sigma),
        )

    def picks(self, k, sigma=0.1, relevance=1.0, diversity=1.0):
        picks, log_gains = dartboard(*self.arguments(sigma), k, float(relevance), float(diversity))
        return picks[0].tolist(), log_gains[0]

    def mmr(self, k, mmr_lambda):
        offsets, pair_offsets = self.layout
        return mmr(offsets, self.query, pair_offsets, self.pairs, k, mmr_lambda)[0].tolist()

    def reordered(self, order):
        return Board(self.query[order], self.document[np.ix_(order, order)])


def clustered(random, count=None, dimension=None, clusters=None):
    """A query and candidates in clusters around it, nearest first: near copies, cousins and strangers."""
    count = count or int(random.integers(15, 31))
    dimension = dimension or int(random.choice([32, 64, 128, 256, 384]))
    clusters = clusters or int(random.integers(2, 8))
    spread, tightness = random.uniform(0.3, 1.2), random.uniform(0.05, 0.6)
    query = unit(random.normal(size=(1, dimension)))[0]
    centres = query + random.normal(size=(clusters, dimension)) * spread / math.sqrt(dimension)
    members = centres[random.integers(0, clusters, size=count)]
    candidates = unit(members + random.normal(size=(count, dimension)) * tightness / math.sqrt(dimension))
    return query, candidates[np.argsort(-(candidates @ query))]


def random_board(seed, **sizes):
    return Board.of(*clustered(np.random.default_rng(seed), **sizes))


def plain_loop(log_query, log_documents, k, relevance=1.0, diversity=1.0):
    """The published pattern: each pick maximises the whole sum, in float64; picked ones are left out."""
    picks = [int(np.argmax(log_query))]
    covered = log_documents[picks[0]]
    while len(picks) < min(k, len(log_query)):
        sums = logsumexp(np.maximum(covered, log_documents) * diversity + log_query * relevance, axis=1)
        sums[picks] = -np.inf
        picks.append(int(np.argmax(sums)))
        covered = np.maximum(covered, log_documents[picks[-1]])
    return picks


def exact_loop(board, sigma, k):
    """The same in decimal arithmetic with 60 digits and unbounded exponents: slow, and never rounds a gain away."""
    with localcontext() as context:
        context.prec, context.Emin, context.Emax = 60, -(10**9), 10**9
        width = 2 * Decimal(sigma) ** 2
        relevance = [(-(Decimal(float(d)) ** 2) / width).exp() for d in board.query]
        density = [[(-(Decimal(float(d)) ** 2) / width).exp() for d in row] for row in board.document]
        picks = [int(np.argmin(board.query))]
        covered = density[picks[0]]
        while len(picks) < min(k, board.count):
            gains = {
                c: sum(
                    (
                        a * max(new - old, Decimal(0))
                        for a, new, old in zip(relevance, density[c], covered, strict=True)
                    ),
                    Decimal(0),
                )
                for c in range(board.count)
                if c not in picks
            }
            picks.append(max(gains, key=lambda c: (gains[c], -board.query[c], -c)))
            covered = [max(pair) for pair in zip(covered, density[picks[-1]], strict=True)]
        return picks


def test_picks_and_gains_of_a_case_by_hand():
    # Sigma 0.1. Candidate 1 is a near copy of 0 (distance 0.02), candidate 2 lies apart from both (0.5).
    board = Board.of_distances([0.1, 0.2, 0.3], [0.02, 0.5, 0.5])
    peak = 10 / math.sqrt(2 * math.pi)  # the density at distance 0
    relevance = [peak * math.exp(-0.5), peak * math.exp(-2), peak * math.exp(-4.5)]
    # Picked 0 covers 1 but for 1 - exp(-0.02) and 2 but for 1 - exp(-12.5):
    near_copy = relevance[1] * peak * (1 - math.exp(-0.02))
    apart = relevance[2] * peak * (1 - math.exp(-12.5))
    assert apart > near_copy
    first = peak * (relevance[0] + relevance[1] * math.exp(-0.02) + relevance[2] * math.exp(-12.5))
    picks, log_gains = board.picks(3)
    assert picks == [0, 2, 1]
    assert log_gains.tolist() == pytest.approx([math.log(first), math.log(apart), math.log(near_copy)], rel=1e-5)


def test_picks_are_those_of_the_plain_loop_at_sigma_one_tenth():
    random = np.random.default_rng(2024)
    by_relevance = 0
    for _ in range(1000):
        board, k = Board.of(*clustered(random)), int(random.integers(5, 11))
        picks, _ = board.picks(k)
        assert picks == plain_loop(*board.logs(0.1), k)
        by_relevance += picks == list(range(k))
    assert by_relevance < 500  # the cases tell Dartboard from plain relevance


@given(seeds, st.floats(0.08, 1), st.floats(0.1, 4), st.floats(0.1, 4))
@settings(max_examples=60, deadline=None)
def test_picks_are_those_of_the_plain_loop_under_weights(seed, sigma, relevance, diversity):
    board = random_board(seed, count=12)
    logs = board.logs(sigma)
    picks, log_gains = board.picks(6, sigma, relevance, diversity)
    # Sound is the plain sum only where each gain is well above its rounding.
    if log_gains.min() > log_gains[0] + math.log(1e-6):
        assert picks == plain_loop(*logs, 6, relevance, diversity)


@given(seeds, st.sampled_from([0.005, 0.02, 0.1, 0.5]))
@settings(max_examples=50, deadline=None)
def test_picks_are_those_of_exact_arithmetic_at_every_sigma(seed, sigma):
    board = random_board(seed, count=7, dimension=16)
    assert board.picks(7, sigma)[0] == exact_loop(board, sigma, 7)


def corpus_with_copies(random):
    """20 texts, 5 copies of each whose embeddings differ in their last bits, and a query near them all."""
    query, texts = clustered(random, count=20, dimension=64, clusters=20)
    scaled = (np.repeat(texts, 5, axis=0) * random.uniform(0.1, 10.0, size=(100, 1))).astype(np.float32)
    copies = scaled / np.linalg.norm(scaled, axis=1, keepdims=True)
    chunks = [{"chunk_id": f"c-{i:03d}", "text": f"text {i // 5}"} for i in range(100)]
    corpus = make_corpus(chunks, copies, collapse_identical_texts=False)
    return make_queries([{"text": "q", "embedding": query}]), corpus


def run_all(queries, corpus, sigma, **params):
    """The four stages in a row."""
    tables = {"queries": queries}
    resources = {"corpus": corpus}
    for stage, own in (
        (oversample.STAGE, oversample.Params(k=10, oversampling=10)),
        (distance_matrices.STAGE, distance_matrices.Params()),
        (log_normal.STAGE, log_normal.Params(sigma=sigma)),
        (STAGE, Params(**params)),
    ):
        output = stage.checked_run({name: tables[name] for name in stage.reads}, resources, own)
        tables[stage.name] = output.table
    return tables, output.account


def texts_of(selection):
    return [int(pick["chunk_id"][2:]) // 5 for pick in selection.column("candidates")[0].as_py()]


@pytest.mark.parametrize("sigma", [0.005, 0.02, 0.05, 0.1, 0.2])
def test_no_copy_is_picked_while_there_are_other_texts(sigma):
    random = np.random.default_rng(7)
    for _ in range(10):
        queries, corpus = corpus_with_copies(random)
        plain = 1.0 - corpus.embeddings[:5].astype(np.float64) @ corpus.embeddings[:5].T.astype(np.float64)
        assert np.abs(plain).max() > 0  # the copies do differ in float arithmetic
        tables, _ = run_all(queries, corpus, sigma, k=10)
        assert len(set(texts_of(tables["greedy_selection"]))) == 10


def test_the_plain_loop_picks_copies_at_small_sigma():
    query, texts = clustered(np.random.default_rng(7), count=20, dimension=64, clusters=20)
    board = Board.of(query, np.repeat(texts, 5, axis=0))
    assert len({c // 5 for c in plain_loop(*board.logs(0.02), 10)}) < 8
    assert len({c // 5 for c in board.picks(10, 0.02)[0]}) == 10


def test_picks_that_add_nothing_come_last_in_order_of_relevance_and_have_no_score():
    corpus = make_corpus(
        [{"chunk_id": f"c-{i}", "text": f"text {i}"} for i in range(4)],
        [[1.0, 0.1], [0.5, 1.0], [0.5, 1.0], [1.0, 0.1]],
        collapse_identical_texts=False,
    )
    queries = make_queries([{"text": "q", "embedding": [1.0, 0.0]}])
    tables, account = run_all(queries, corpus, 0.1, k=6)
    (row,) = tables["greedy_selection"].to_pylist()
    assert [pick["chunk_id"] for pick in row["candidates"]] == ["c-0", "c-1", "c-3", "c-2"]
    assert [pick["score"] is None for pick in row["candidates"]] == [False, False, True, True]
    assert row["shortfall"] == 2
    assert (account.candidates_in, account.candidates_out, account.removed) == (4, 4, {})


def test_the_first_score_is_the_log_of_the_objective():
    board = random_board(1)
    log_query, log_documents = board.logs(0.1)
    picks, log_gains = board.picks(1, relevance=0.7, diversity=1.3)
    assert log_gains[0] == pytest.approx(logsumexp(1.3 * log_documents[picks[0]] + 0.7 * log_query))


@given(seeds, st.floats(0.05, 0.5), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_gains_fall_and_add_up_to_the_objective_of_the_whole_selection(seed, sigma, k):
    board = random_board(seed, count=12)
    log_query, log_documents = board.logs(sigma)
    picks, log_gains = board.picks(k, sigma)
    assert logsumexp(log_gains) == pytest.approx(logsumexp(log_documents[picks].max(axis=0) + log_query))
    # The first pick is the nearest, which need not gain most; after it gains only fall.
    assert (np.diff(log_gains[1:]) <= 1e-9).all()


@given(seeds, st.sampled_from([0.005, 0.1, 1.0]), st.integers(1, 40))
@settings(max_examples=80, deadline=None)
def test_the_first_pick_is_the_nearest_and_no_candidate_is_picked_twice(seed, sigma, k):
    board = random_board(seed, count=1 + seed % 25)
    for picks in (board.picks(k, sigma)[0], board.mmr(k, 0.5), board.mmr(k, 1.0)):
        picked = [c for c in picks if c >= 0]
        assert board.query[picked[0]] == board.query.min()
        assert len(set(picked)) == len(picked) == min(k, board.count)
        assert picks[len(picked) :] == [-1] * (k - len(picked))


@given(seeds, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_order_of_the_candidates_decides_nothing_but_ties(seed, shuffler):
    board = random_board(seed, count=15)
    order = list(range(15))
    shuffler.shuffle(order)
    picks, log_gains = board.picks(6)
    shuffled, shuffled_gains = board.reordered(order).picks(6)
    assert [order[c] for c in shuffled] == picks
    np.testing.assert_allclose(shuffled_gains, log_gains, rtol=1e-9)


def test_ties_go_to_the_more_relevant_and_then_to_the_earlier():
    # Diversity weight 0: no gain at all, so every later pick ties.
    board = Board.of_distances([0.3, 0.1, 0.2, 0.2], [0.5, 0.6, 0.7, 0.4, 0.6, 0.9])
    assert board.picks(4, diversity=0)[0] == [1, 2, 3, 0]
    assert board.mmr(4, 1.0) == [1, 2, 3, 0]


@given(seeds, st.floats(0.05, 4), st.sampled_from([0.1, 0.2, 0.4]))
@settings(max_examples=50, deadline=None)
def test_a_weight_acts_like_another_sigma(seed, weight, sigma):
    board = random_board(seed, count=10)
    assert board.picks(5, sigma, weight, weight)[0] == board.picks(5, sigma / math.sqrt(weight))[0]


def mean_pairwise_distance(boards, diversity):
    chosen = [(board, board.picks(8, diversity=diversity)[0]) for board in boards]
    return np.mean([board.document[np.ix_(picks, picks)].sum() / 56 for board, picks in chosen])


def test_both_ends_of_the_diversity_weight_are_the_order_by_relevance():
    boards = [random_board(seed, count=24, clusters=5) for seed in range(60)]
    for board in boards:
        picks, log_gains = board.picks(24, diversity=0)
        assert picks == list(range(24))
        assert np.isneginf(log_gains[1:]).all()
    by_relevance = mean_pairwise_distance(boards, 0)
    spread = [mean_pairwise_distance(boards, weight) for weight in (1e-9, 0.03, 0.3, 1, 10, 1000, 1e9)]
    # Diversity jumps up right after 0 and falls from there: the weight's effect is not monotone.
    assert spread[0] > 1.1 * by_relevance
    assert spread == sorted(spread, reverse=True)
    assert spread[-1] == pytest.approx(by_relevance)


def test_a_very_large_diversity_weight_still_puts_copies_last():
    query, texts = clustered(np.random.default_rng(5), count=6, dimension=32)
    board = Board.of(query, np.repeat(texts, 2, axis=0))
    picks, log_gains = board.picks(12, diversity=1e6)
    assert picks == [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11]
    assert np.isneginf(log_gains[6:]).all()


def test_relevance_weight_zero_looks_at_the_query_for_the_first_pick_alone():
    board = random_board(11)
    turned = Board(board.query.copy(), board.document)
    turned.query[1:] = turned.query[1:][::-1]
    assert board.picks(8, relevance=0)[0] == turned.picks(8, relevance=0)[0]
    assert board.picks(30, relevance=1e6)[0] == list(range(board.count)) + [-1] * (30 - board.count)


def test_the_baselines_on_a_near_duplicate_triple():
    # The triple of pyversity's tests, with scores 1, 0.9 and 0.8.
    triple = unit([[1.0, 0.0], [0.999, 0.001], [0.0, 1.0]])
    board = Board.of_distances([0.0, 0.1, 0.2], Board.of(triple[0], triple).pairs)
    # After 0, the near duplicate is worth 0.5 x 0.9 - 0.5 x 1, and the stranger 0.5 x 0.8 - 0.5 x 0.
    assert board.mmr(2, 0.5) == [0, 2]
    assert board.mmr(2, 1.0) == [0, 1]
    assert board.picks(2)[0] == [0, 2]


@given(seeds, st.floats(0, 1), st.integers(1, 12))
@settings(max_examples=80, deadline=None)
def test_mmr_agrees_with_its_formula(seed, mmr_lambda, k):
    board = random_board(seed, count=10, dimension=16)
    similarity, between = 1.0 - board.query.astype(np.float64), 1.0 - board.document.astype(np.float64)
    picks = [int(np.argmax(similarity))]
    while len(picks) < min(k, 10):
        rest = [c for c in range(10) if c not in picks]
        value = {c: mmr_lambda * similarity[c] - (1 - mmr_lambda) * max(between[c, picks]) for c in rest}
        picks.append(max(rest, key=lambda c: (value[c], similarity[c], -c)))
    assert board.mmr(k, mmr_lambda)[: len(picks)] == picks


def test_mmr_at_zero_takes_the_farthest_from_the_first():
    board = random_board(4)
    assert board.mmr(2, 0.0)[1] == int(np.argmax(board.document[0]))


def shard(boards, sigma=0.1):
    """Tables as the stages before write them, from boards (None: a query without candidates)."""
    names = [f"q-{number:04d}" for number in range(len(boards))]
    empty = Board(np.zeros(0, np.float32), np.zeros((0, 0), np.float32))
    boards = [board or empty for board in boards]
    found = [
        [{"rank": i + 1, "chunk_id": f"{name}/{i:02d}", "score": 1.0 - i / 100} for i in range(board.count)]
        for name, board in zip(names, boards, strict=True)
    ]
    distances = pa.table(
        {
            "query_id": pa.array(names, pa.string()),
            "query_distances": pa.array([board.query.tolist() for board in boards], pa.list_(pa.float32())),
            "document_distances": pa.array([board.pairs.tolist() for board in boards], pa.list_(pa.float32())),
        }
    )
    rows = [{"query_id": name, "candidates": one} for name, one in zip(names, found, strict=True)]
    return {
        "oversample": pa.Table.from_pylist(rows, schema=schema(Candidates)),
        "distance_matrices": distances.cast(schema(Distances)),
        "log_normal": log_normal.STAGE.run(distance_matrices=distances, params=log_normal.Params(sigma=sigma)).table,
    }


def run(tables, **params):
    return STAGE.checked_run(tables, {}, Params(**params))


def chosen(output):
    return [[int(pick["chunk_id"][-2:]) for pick in row] for row in output.table.column("candidates").to_pylist()]


@pytest.mark.parametrize("method", ["dartboard", "top_k", "mmr"])
def test_each_method_picks_for_every_query_of_a_shard_by_itself(method):
    boards = [random_board(1), None, random_board(2, count=3), random_board(3), random_board(4, count=1)]
    together = run(shard(boards), k=5, method=method)
    assert [len(picks) for picks in chosen(together)] == [5, 0, 3, 5, 1]
    assert together.table.column("shortfall").to_pylist() == [0, 5, 2, 0, 4]
    found = sum(board.count for board in boards if board is not None)
    assert (together.account.candidates_in, together.account.candidates_out) == (found, 14)
    assert together.account.removed == {"not_picked": found - 14}
    for number, board in enumerate(boards):
        alone = run(shard([board]), k=5, method=method)
        assert chosen(alone)[0] == chosen(together)[number]
        scores = [
            [pick["score"] for pick in output.table.column("candidates")[place].as_py()]
            for output, place in ((alone, 0), (together, number))
        ]
        assert scores[0] == scores[1]


def test_methods_of_the_table_are_the_kernels():
    board = random_board(8)
    tables = shard([board])
    assert chosen(run(tables, k=6)) == [board.picks(6)[0]]
    assert chosen(run(tables, k=6, method="top_k")) == [list(range(6))]
    assert chosen(run(tables, k=6, method="mmr", mmr_lambda=0.3)) == [board.mmr(6, 0.3)]
    weights = {"relevance_weight": 0.5, "diversity_weight": 2.0}
    assert chosen(run(tables, k=6, **weights)) == [board.picks(6, relevance=0.5, diversity=2)[0]]


@given(seeds)
@settings(max_examples=50, deadline=None)
def test_scores_of_baselines_are_gains_on_the_scale_of_dartboard(seed):
    board = random_board(seed, count=9)
    log_query, log_documents = board.logs(0.1)
    for given_picks in (board.picks(9)[0], board.mmr(9, 0.5)):
        (log_gains,) = log_gains_of(np.array([given_picks]), *board.arguments(0.1), 1.0, 1.0)
        for step in range(1, 10):
            reached = logsumexp(log_documents[given_picks[:step]].max(axis=0) + log_query)
            assert logsumexp(log_gains[:step]) == pytest.approx(reached)
    assert log_gains_of(np.array([board.picks(9)[0]]), *board.arguments(0.1), 1.0, 1.0)[0] == pytest.approx(
        board.picks(9)[1], rel=1e-12
    )


@pytest.mark.parametrize("method", ["dartboard", "top_k", "mmr"])
def test_empty_tables_and_empty_lists_work(method):
    assert run(shard([]), method=method).table.num_rows == 0
    output = run(shard([None, None]), k=3, method=method)
    assert output.table.column("shortfall").to_pylist() == [3, 3]
    assert output.account.removed == {}


def test_a_pick_that_is_no_candidate_of_its_query_is_refused():
    tables = shard([random_board(1, count=4), random_board(2, count=4)])
    output = run(tables, k=2).table
    check = STAGE.success[1]
    assert check.problem(tables, output) is None
    rows = output.to_pylist()
    for foreign in ("q-0001/03", "nowhere"):  # another query's candidate, and nobody's
        rows[0]["candidates"][1]["chunk_id"] = foreign
        assert check.problem(tables, pa.Table.from_pylist(rows, schema=schema(Selection))) == f"row 0 picked {foreign}"


def test_a_shortfall_while_candidates_are_left_is_refused():
    tables = shard([random_board(1, count=4)])
    rows = run(tables, k=2).table.to_pylist()
    rows[0]["shortfall"] = 1
    problem = STAGE.success[2].problem(tables, pa.Table.from_pylist(rows, schema=schema(Selection)))
    assert problem == "row 0 left 2 candidates"


def test_the_tables_of_the_helper_obey_their_contracts():
    tables = shard([random_board(1), None])
    assert tables["log_normal"].schema.names == schema(LogProbabilities).names
    for name, model in (("oversample", Candidates), ("distance_matrices", Distances), ("log_normal", LogProbabilities)):
        check_table(tables[name], model, name)


@pytest.mark.parametrize(
    "wrong",
    [
        {"k": 0}, {"k": True}, {"method": "msd"}, {"relevance_weight": -0.1}, {"diversity_weight": math.inf},
        {"mmr_lambda": 1.1}, {"mmr_lambda": -0.1}, {"sigma": 0.1},
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValidationError):
        Params(**wrong)
