"""Stores with generated corpora, and whole runs on them as `dartflow run --without-prefect` makes them."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bench.generate import write
from bench.reference import Array
from bench.topics import Sizes
from checkpoints.corpora import current_snapshot_id
from checkpoints.run import create_run
from checkpoints.store import Store
from contracts.manifest import RunPlan, Verdict
from flows.engine import Session, Step, plain_step
from flows.export import stage_tables
from flows.planning import new_run_id, plan_run
from flows.progress import no_progress
from flows.settings import Settings, load_settings, validated
from flows.snapshots import make_snapshot


@dataclass(frozen=True)
class Prepared:
    """A corpus and a query log as files, and a store that the corpus is ingested into."""

    folder: Path

    @property
    def corpus(self) -> Path:
        """The corpus file."""
        return self.folder / "corpus.parquet"

    @property
    def queries(self) -> Path:
        """The query log."""
        return self.folder / "queries.parquet"

    @property
    def store(self) -> Store:
        """The store, opened."""
        return Store(str(self.folder / "store"))

    def settings(self, *assignments: str) -> Settings:
        """The defaults, with vectors that are given and no cross-encoder, and what else is assigned."""
        given = [f"store={self.folder / 'store'}", "embedder.provider=precomputed", "cross_encoder.provider=none"]
        return load_settings(environment={}, assignments=[*given, *assignments])

    def log_of(self, lines: int) -> Path:
        """The first lines of the log, as a log of their own."""
        path = self.folder / f"queries-{lines}.parquet"
        if not path.exists():
            with pq.ParquetFile(self.queries) as file:
                batches = file.iter_batches(batch_size=lines)
                pq.write_table(pa.Table.from_batches([next(batches)]), path)
        return path


def prepared(work: Path, sizes: Sizes) -> Prepared:
    """Generates and ingests a corpus, once for every folder and size."""
    name = "-".join(str(value) for value in asdict(sizes).values())
    found = Prepared((work / f"generated-{name}").resolve())
    if not (found.folder / "done").exists():
        shutil.rmtree(found.folder, ignore_errors=True)
        write(sizes, found.folder)
        ingested(found)
    return found


def ingested(found: Prepared) -> Prepared:
    """Makes the snapshot of a corpus file; the last thing written is the mark that it is done."""
    make_snapshot(found.corpus, found.settings(), plain_step, no_progress)
    (found.folder / "done").touch()
    return found


def whole_run(found: Prepared, queries: Path, *assignments: str, step: Step = plain_step) -> tuple[RunPlan, Verdict]:
    """Plans a run, writes the plan down and carries it out.

    Raises:
        RuntimeError: it is not complete.
    """
    store, settings = found.store, found.settings(*assignments)
    plan = plan_run(store, settings, queries, new_run_id(), current_snapshot_id(store))
    create_run(store, plan)
    verdict = Session(store, plan, validated(plan.settings)).execute(step)
    if verdict.verdict != "complete":
        raise RuntimeError(f"run {plan.run_id} is {verdict.verdict}: {verdict.because}")
    return plan, verdict


def forget(found: Prepared, plan: RunPlan) -> None:
    """Removes a run, so that many of them fit on the disk."""
    shutil.rmtree(found.folder / "store" / "runs" / plan.run_id)


def table_of(found: Prepared, plan: RunPlan, stage: str) -> pa.Table:
    """The table of a stage over all shards."""
    return pa.concat_tables(stage_tables(found.store, plan, stage))


def vectors_of(path: Path) -> Array:
    """(rows, dimension) float32: the vectors of a corpus or log file."""
    lists = pq.read_table(path, columns=["embedding"]).column("embedding").combine_chunks()
    flat: Array = lists.flatten().to_numpy()
    return flat.reshape(len(lists), -1)
