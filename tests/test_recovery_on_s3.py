"""Recovery on object storage: runs, kills, damage, dead letters, publishing and gc against a real S3 protocol.

The commit protocol has fewer steps here than on disk: an object is there whole or not at all, so a process
can only be killed before or after each request that writes.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal

import pyarrow as pa
import pytest

import flows.engine
from checkpoints.commit import read_table
from checkpoints.gc import collect
from checkpoints.published import published_pointer, roll_back
from checkpoints.run import create_run, load_plan, open_letters, stage_manifests, stage_names
from checkpoints.store import Store
from checkpoints.survey import Bounds
from checkpoints.verdict import verdict
from checkpoints.verify import verify
from contracts.errors import CheckpointError, CorruptArtifactError, MissingArtifactError, RunHeldError
from flows.export import stage_tables
from flows.planning import plan_rerun
from flows.publishing import publish_run
from flows.replay import plan_replay
from flows.settings import PublishParams, validated
from stages.pipeline import find_stage
from tests.s3 import s3_bucket
from tests.small import planned, session_of, small_store

_PROCESSES = multiprocessing.get_context("forkserver")


class KillingStore(Store):
    """Kills its process before or after the first request whose name (`after create 06-rrf_merge`) it is given."""

    point = ""

    def write(self, path, data):
        self._around("write", path, lambda: Store.write(self, path, data))

    def create(self, path, data):
        self._around("create", path, lambda: Store.create(self, path, data))

    def delete(self, path):
        self._around("delete", path, lambda: Store.delete(self, path))

    def _around(self, request, path, send):
        for when in ("before", "after"):
            if when == "after":
                send()
            wanted_when, wanted_request, wanted_part = self.point.split()
            if (when, request) == (wanted_when, wanted_request) and wanted_part in path:
                os.kill(os.getpid(), signal.SIGKILL)


def _carry_out(uri, run_id, point, environment):
    os.environ.update(environment)  # the server that forks may have started before the bucket
    store = KillingStore(uri)
    store.point = point
    session_of(store, load_plan(store, run_id)).execute()


@pytest.fixture(scope="module")
def bucket():
    with s3_bucket() as uri:
        yield uri


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("on-s3")


@pytest.fixture(scope="module")
def store(bucket, folder) -> Store:
    return small_store(folder, f"{bucket}/store")


@pytest.fixture(scope="module", autouse=True)
def _cache_below(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield


@pytest.fixture(scope="module")
def undisturbed(store, folder):
    plan = planned(store, folder, "undisturbed", f"store={store.uri}")
    assert session_of(store, plan).execute().verdict == "partial"  # the log has a bad line
    return plan


def _artifacts(store, plan):
    return {
        (stage, manifest.shard): (manifest.sha256, manifest.key, manifest.rows, manifest.account)
        for stage in stage_names(plan)
        for manifest in stage_manifests(store, plan, stage)
    }


def test_a_run_in_a_bucket_has_the_artifacts_of_a_run_on_disk(store, undisturbed, tmp_path):
    disk = small_store(tmp_path)
    plan = planned(disk, tmp_path, "undisturbed")
    session_of(disk, plan).execute()
    assert _artifacts(store, undisturbed) == _artifacts(disk, plan)
    assert {finding for _, finding in verify(store, undisturbed)} == {"ok"}


POINTS = [
    f"{when} {request} {part}"
    for when in ("before", "after")
    for request, part in [
        ("create", "lease/"), ("write", "00-log_lines"), ("write", "dead_letters"), ("create", "00-queries"),
        ("create", "01-oversample"), ("write", "04-greedy_selection"), ("create", "07-family_searches"),
        ("create", "09-crag_grading"), ("write", "10-context"), ("create", "10-context"), ("write", "lease/"),
        ("delete", "failure.json"),
    ]
]  # fmt: skip


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_run_is_resumed_to_the_same_artifacts(store, folder, undisturbed, point):
    run_id = point.replace(" ", "-").replace("/", "").replace("_", "-")
    plan = planned(store, folder, run_id, f"store={store.uri}")
    process = _PROCESSES.Process(target=_carry_out, args=(store.uri, run_id, point, dict(os.environ)))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    kept = {path: store.read(path) for path in store.files(f"runs/{run_id}") if "/part-" in path}
    assert verdict(store, plan).verdict in {"interrupted", "partial"}
    assert {finding for _, finding in verify(store, plan)} <= {"ok", "not committed"}
    assert session_of(store, plan).execute().verdict == "partial"
    assert _artifacts(store, plan) == _artifacts(store, undisturbed)
    manifests_kept = {path: data for path, data in kept.items() if path.endswith(".json")}
    assert {path: store.read(path) for path in manifests_kept} == manifests_kept


def test_a_second_process_is_refused_while_one_is_at_it(store, folder):
    from checkpoints.lease import hold

    plan = planned(store, folder, "held", f"store={store.uri}")
    with hold(store, "runs/held", "run held"), pytest.raises(RunHeldError, match="run held: is held by another"):
        session_of(store, plan).execute()


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "swapped"])
@pytest.mark.parametrize("kind", [".json", ".parquet"])
def test_damage_is_refused_by_name(store, undisturbed, kind, damage):
    folder = "runs/undisturbed/06-rrf_merge/part-00000"
    (path,) = [path for path in store.files("runs/undisturbed/06-rrf_merge") if path.startswith(folder)
               and path.endswith(kind)]  # fmt: skip
    (other,) = [one for one in store.files("runs/undisturbed/06-rrf_merge") if "part-00001" in one
                and one.endswith(kind)]  # fmt: skip
    whole = store.read(path)
    if damage == "missing":
        store.delete(path)
    else:
        flipped = bytearray(whole)
        flipped[len(whole) // 3] ^= 4
        store.write(path, {"flipped": bytes(flipped), "cut": whole[: len(whole) // 2]}.get(damage) or store.read(other))
    try:
        bad = [name for name, finding in verify(store, undisturbed) if finding != "ok"]
        assert bad == ["rrf_merge/part-00000"]
        with pytest.raises((CorruptArtifactError, MissingArtifactError)) as refused:
            pa.concat_tables(stage_tables(store, undisturbed, "rrf_merge"))
        assert (path in str(refused.value)) or ("no part 0" in str(refused.value))
    finally:
        store.write(path, whole)
    assert {finding for _, finding in verify(store, undisturbed)} == {"ok"}


def test_dead_letters_are_replayed_and_runs_published_rolled_back_and_collected(
    store, folder, undisturbed, monkeypatch
):
    victim = next(iter(stage_manifests(store, undisturbed, "queries")))
    query_id = read_table(store, victim)["query_id"][1].as_py()

    def find(name):
        stage = find_stage(name)

        def run(**tables):
            if query_id in tables["rrf_merge"]["query_id"].to_pylist():
                raise ValueError("cannot be read")
            return stage.run(**tables)

        return dataclasses.replace(stage, run=run) if name == "blended_rerank" else stage

    plan = planned(store, folder, "poisoned", f"store={store.uri}")
    monkeypatch.setattr(flows.engine, "find_stage", find)
    assert session_of(store, plan).execute().dead_letters == 2
    assert open_letters(store, plan)[-1].query_id == query_id
    monkeypatch.undo()
    again = plan_replay(store, plan, validated(plan.settings))
    create_run(store, again)
    assert session_of(store, again).execute().dead_letters == 1

    gates = PublishParams(max_lost_line_share=0.5)
    assert publish_run(store, plan, gates, by="night-shift").moved
    assert publish_run(store, again, gates, by="night-shift").moved
    assert not publish_run(store, undisturbed, PublishParams(max_lost_line_share=0.0)).moved
    assert published_pointer(store).current().target == again.run_id
    assert roll_back(store, by="night-shift", why=None).target == "poisoned"

    rerun = plan_rerun(store, undisturbed, validated(undisturbed.settings), from_stage="context", run_id="rerun")
    create_run(store, rerun)
    session_of(store, rerun).execute()
    from datetime import UTC, datetime

    collect(store, Bounds(keep=1, older_than_days=None, now=datetime.now(UTC)))
    assert {finding for _, finding in verify(store, rerun)} == {"ok"}
    assert {finding for _, finding in verify(store, plan)} == {"ok"}
    with pytest.raises(CheckpointError):
        load_plan(store, "undisturbed")
