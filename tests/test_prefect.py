"""Under real Prefect: one task a stage, tables in the UI, and the very bytes of a run without it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.prefect_environment import ship_settings
from stages.pipeline import LOADED, numbered_stages
from tests.example import QUERIES, RUN, manifests_of

STAGES = [*LOADED, *(stage.name for _, stage in numbered_stages())]

# Prefect's own modules use what their dependencies deprecate.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def prefect_server():
    before = set(os.environ)
    ship_settings()
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield
    for name in set(os.environ) - before:
        del os.environ[name]


async def _seen_by_prefect(run_id: str) -> tuple[str, list[str], list[dict]]:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter, FlowRunFilterName

    async with get_client() as client:
        by_name = FlowRunFilter(name=FlowRunFilterName(any_=[run_id]))
        (flow_run,) = await client.read_flow_runs(flow_run_filter=by_name)
        tasks = await client.read_task_runs(flow_run_filter=by_name)
        artifacts = await client.read_artifacts(flow_run_filter=by_name, artifact_filter=ArtifactFilter())
        return flow_run.state_name, [task.name for task in tasks], [artifact.key for artifact in artifacts]


def test_a_run_under_prefect_gives_the_same_bytes_as_one_without(dartflow, prefect_server):
    words = ("--config", str(Path(__file__).parents[1] / "config" / "example.yaml"))
    status, out, _ = dartflow("run", QUERIES, "--run-id", "under-prefect", *words)
    assert status == 3
    assert "verdict: partial" in out
    for stage in STAGES:
        with_prefect = manifests_of(dartflow.store, "under-prefect", stage)
        without = manifests_of(dartflow.store, RUN, stage)
        assert [m.key for m in with_prefect] == [m.key for m in without], stage
        for one, other in zip(with_prefect, without, strict=True):
            assert one.file != other.file
            assert (dartflow.store / one.file).read_bytes() == (dartflow.store / other.file).read_bytes(), stage

    state, tasks, artifacts = asyncio.run(_seen_by_prefect("under-prefect"))
    assert state == "Completed"
    assert sorted(name.rsplit("-", 1)[0] for name in tasks) == sorted(STAGES)
    assert sorted(set(artifacts)) == sorted(f"dartflow-{stage.replace('_', '-')}" for stage in STAGES)


def test_a_failed_stage_fails_the_flow_and_names_the_artifact(dartflow, prefect_server):
    file = manifests_of(dartflow.store, RUN, "sparse_search")[0].file
    path = dartflow.store / file
    path.write_bytes(path.read_bytes()[:-1])
    status, out, err = dartflow("rerun", RUN, "--from", "rrf_merge", "--run-id", "broken")
    assert status == 1
    assert f"{file}: is not what was committed" in err
    assert "Traceback" not in out + err
    state, tasks, _ = asyncio.run(_seen_by_prefect("broken"))
    assert state == "Failed"
    assert [name.rsplit("-", 1)[0] for name in tasks] == ["borrow"]


def test_ingest_under_prefect_gives_the_same_snapshot(dartflow, prefect_server):
    before = sorted(path.name for path in (dartflow.store / "corpora").iterdir())
    status, out, _ = dartflow("ingest", str(Path(QUERIES).with_name("corpus.jsonl")))
    assert status == 0
    assert "snapshot corpus-" in out
    assert sorted(path.name for path in (dartflow.store / "corpora").iterdir()) == before


def test_prefect_tries_nothing_again_since_the_executor_does(prefect_server):
    from prefect import flow

    from contracts.errors import TransientError
    from flows.rerank import as_task

    tries: list[str] = []

    def fails() -> None:
        tries.append("service")
        raise TransientError("service", "did not answer", next_step="Wait.")

    @flow
    def one() -> None:
        as_task("service", fails)()

    with pytest.raises(TransientError, match="did not answer"):
        one()
    assert tries == ["service"]


def test_a_prefect_api_that_is_down_is_said_in_one_sentence(dartflow):
    dark = os.environ | {"PREFECT_API_URL": "http://127.0.0.1:9/api", "PREFECT_CLIENT_MAX_RETRIES": "0"}
    words = ("rerun", RUN, "--from", "context", "--run-id", "dark", "--store", str(dartflow.store))
    command = [sys.executable, "-m", "flows.cli", *words]
    found = subprocess.run(command, capture_output=True, text=True, env=dark, check=False)
    assert found.returncode == 1
    assert "Traceback" not in found.stdout + found.stderr
    error = " ".join(found.stderr.split())
    assert "Prefect: could not carry out the flow" in error
    assert "Go on with `dartflow resume dark --without-prefect`." in error
    assert dartflow("resume", "dark", "--without-prefect")[0] == 3
