"""Selection, from vectors to picks: the array kernels against the plain loop and pyversity's MMR.

`python -m bench.selection`
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench.generate import query_table
from bench.reference import Array, dartboard, follows_dartboard
from bench.results import Check, Comparison, claim_of, cores, peer
from bench.terminal import run
from bench.timing import Work, in_turn
from bench.topics import Sizes, blocks
from contracts.columns import offsets_from_lengths
from flows.executor import map_shards
from flows.settings import ExecutorParams, RunParams
from stages.distance_matrices import cosine_distances
from stages.greedy_selection import dartboard as select
from stages.log_normal import log_normal

SIGMA = 0.1


@dataclass(frozen=True)
class Shape:
    """How many candidates a query has, how many are picked, and what is wanted.

    `queries` go through dartflow in one turn, `sampled` through the loop and through the peer.
    """

    candidates: int
    k: int
    queries: int
    sampled: int
    times_the_loop: float
    times_the_peer: float


SHAPES = (Shape(15, 5, 16_384, 1_000, 120, 5), Shape(100, 10, 2_048, 256, 35, 5))
SMALL = (Shape(15, 5, 600, 40, 120, 5), Shape(100, 10, 300, 20, 35, 5))


@dataclass(frozen=True)
class Board:
    """Queries, and for each the rows of its candidates, nearest first."""

    queries: Array
    rows: Array
    embeddings: Array

    @classmethod
    def of(cls, sizes: Sizes, candidates: int, queries: int) -> Board:
        """The nearest chunks of each query among all."""
        made = list(blocks(sizes))
        embeddings = np.concatenate([block.vectors for block in made])
        each = -(-queries // len(made))
        asked = [query_table(block, range(each), sizes).column("embedding") for block in made]
        flat = np.concatenate([one.combine_chunks().flatten().to_numpy() for one in asked])
        vectors = np.ascontiguousarray(flat.reshape(-1, sizes.dimension)[:queries])
        rows = np.empty((queries, candidates), np.int64)
        for start in range(0, queries, 256):
            products = vectors[start : start + 256] @ embeddings.T
            best = np.argpartition(-products, candidates, axis=1)[:, :candidates]
            order = np.argsort(-np.take_along_axis(products, best, axis=1), axis=1)
            rows[start : start + 256] = np.take_along_axis(best, order, axis=1)
        return cls(vectors, rows, embeddings)


def pick(board: Board, shape: Shape, picks: Array, shard: int) -> None:
    """What distance_matrices, log_normal and greedy_selection do to one shard, without tables."""
    size = RunParams().shard_size
    part = slice(shard * size, min((shard + 1) * size, len(board.queries)))
    queries = board.queries[part]
    lengths = np.full(len(queries), shape.candidates, dtype=np.int64)
    offsets, pair_offsets = offsets_from_lengths(lengths), offsets_from_lengths(lengths * (lengths - 1) // 2)
    near, far = cosine_distances(queries, offsets, board.rows[part].ravel(), board.embeddings)
    at_zero = log_normal(np.zeros(len(queries), np.float32), SIGMA)
    picks[part], _ = select(
        offsets, log_normal(near, SIGMA), pair_offsets, log_normal(far, SIGMA), at_zero, shape.k, 1.0, 1.0
    )


def works(board: Board, shape: Shape, picks: Array) -> dict[str, Work]:
    """Whole shards on all cores by dartflow, the loop over a sample, and the peer over the same sample."""
    shards = range(-(-shape.queries // RunParams().shard_size))

    def dartflow(_number: int) -> int:
        map_shards(partial(pick, board, shape, picks), shards, ExecutorParams(), lambda _done: None)
        return shape.queries

    def loop(_number: int) -> int:
        for query in range(shape.sampled):
            dartboard(board.queries[query], board.embeddings[board.rows[query]], shape.k, SIGMA)
        return shape.sampled

    found: dict[str, Work] = {"dartflow": dartflow, "reference loop": loop}
    pyversity = peer("pyversity")
    if pyversity is not None:

        def mmr(_number: int) -> int:
            for query in range(shape.sampled):
                candidates = board.embeddings[board.rows[query]]
                pyversity.mmr(candidates, candidates @ board.queries[query], k=shape.k, diversity=0.5)
            return shape.sampled

        found["pyversity MMR"] = mmr
    return found


def checks(board: Board, shape: Shape, picks: Array, name: str) -> list[Check]:
    """The picks of the sampled queries beside those of the loop."""
    same, follows = 0, 0
    for query in range(shape.sampled):
        candidates = board.embeddings[board.rows[query]]
        mine = picks[query].tolist()
        same += mine == dartboard(board.queries[query], candidates, shape.k, SIGMA)
        follows += follows_dartboard(mine, board.queries[query], candidates, SIGMA)
    what = f"{name}: queries whose picks are the loop's, up to ties within 1e-9 ({same} without any)"
    return [Check(what=what, share=follows / shape.sampled, compared=shape.sampled)]


def compare(small: bool, _work: Path) -> Comparison:  # noqa: FBT001 - every comparison is called alike
    """Times both shapes."""
    sizes = Sizes(chunks=2_000 if small else 40_000, queries=1)
    result = Comparison(
        name="selection",
        title="Selection: distances, densities and picks",
        settings={
            "chunks": sizes.chunks, "dimension": sizes.dimension, "sigma": SIGMA, "threads": cores(),
            "shard": RunParams().shard_size, "vectors": "float32", "densities and gains": "float64",
        },
    )  # fmt: skip
    for shape in SMALL if small else SHAPES:
        board = Board.of(sizes, shape.candidates, shape.queries)
        picks = np.empty((shape.queries, shape.k), np.int64)
        sides = works(board, shape, picks)
        sides["dartflow"](0)  # compiles
        name = f"{shape.candidates} candidates, k = {shape.k}"
        result.settings[f"{name}: queries a turn"] = f"{shape.queries}, and {shape.sampled} for the others"
        times = in_turn(sides, rounds=2 if small else 7)
        result.checks += checks(board, shape, picks, name)
        result.claims += [
            claim_of(times, "reference loop", "dartflow", shape.times_the_loop, what=f"{name}: "),
            claim_of(times, "pyversity MMR", "dartflow", shape.times_the_peer, what=f"{name}: ", package="pyversity"),
        ]
    return result


if __name__ == "__main__":
    run(compare)
