"""Fixtures that several rooms share."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from checkpoints.corpora import current_snapshot_id
from checkpoints.run import create_run
from checkpoints.store import Store
from flows.engine import Session, plain_step
from flows.planning import plan_run
from flows.progress import no_progress
from flows.settings import load_settings, validated
from flows.snapshots import make_snapshot
from tests.example import ROOT, RUN, CommandLine


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the checkout; tests that need it are skipped where it is not there."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data beside the checkout at ../shared/data (looked in {folder})")
    return folder


@pytest.fixture(scope="session")
def example_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the bundled example ingested and run, without Prefect; made once for all workers, read only."""
    shared = (
        tmp_path_factory.getbasetemp().parent
        if os.environ.get("PYTEST_XDIST_WORKER")
        else tmp_path_factory.getbasetemp()
    )
    store = shared / "example-store"
    with FileLock(f"{store}.lock"):
        if not (store / "done").exists():
            settings = load_settings(ROOT / "config" / "example.yaml", environment={})
            settings = settings.model_copy(update={"store": str(store)})
            make_snapshot(ROOT / "examples" / "corpus.jsonl", settings, plain_step, no_progress)
            opened = Store(str(store))
            log = ROOT / "examples" / "queries.jsonl"
            plan = plan_run(opened, settings, log, RUN, current_snapshot_id(opened))
            create_run(opened, plan)
            Session(opened, plan, validated(plan.settings)).execute()
            (store / "done").touch()
    return store


@pytest.fixture
def store(example_store: Path, tmp_path: Path) -> Path:
    """A copy of the example's store that a test may write to."""
    copied = tmp_path / "store"
    shutil.copytree(example_store, copied)
    return copied


@pytest.fixture
def dartflow(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, store: Path) -> CommandLine:
    """The command line on a copy of the example's store."""
    monkeypatch.chdir(ROOT)
    return CommandLine(capsys, monkeypatch, store)
