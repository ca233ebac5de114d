"""A sample of the crash matrix: a run that is killed or loses power can be trusted as far as it came, and is finished.

`make test-crash` kills at every point, see tests/crash/matrix.py.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from stages.pipeline import numbered_stages
from tests.crash.acts import Scenario
from tests.crash.ordeal import Ordeal
from tests.crash.process import POISONED_STAGE
from tests.crash.scenarios import RUN, make_scenarios

STAGES = ["log_lines", "queries", *(stage.name for _, stage in numbered_stages())]

PUT = {"write", "sync_file", "unlink", "sync_folder"}


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scenario]:
    return make_scenarios(tmp_path_factory.mktemp("scenarios"))


def points_of(scenario: Scenario, pattern: str) -> list[str]:
    return [point for point in scenario.points if re.search(pattern, point)]


def chosen(scenario: Scenario, pattern: str, number: int) -> str:
    """One of the points of a pattern: for the numbers from 0, all of them in turn, far apart."""
    found = points_of(scenario, pattern)
    return found[number * 7 % len(found)]


def steps(scenario: Scenario, path: str) -> set[tuple[str, str]]:
    """(moment, step) of the points of a file."""
    return {tuple(point.split()[:2]) for point in scenario.points if point.endswith(path)}  # type: ignore[misc]


def around(*names: str) -> set[tuple[str, str]]:
    return {(moment, name) for name in names for moment in ("before", "after")}


def test_the_points_cover_every_file_of_every_stage_at_every_step(scenarios: dict[str, Scenario]) -> None:
    run = scenarios["run"]
    files = {point.rpartition(" ")[2] for point in run.points}
    assert run.plan is not None
    torn = {("during", "write")}
    for entry in run.plan.stages:
        folder = f"runs/{RUN}/{entry.number:02d}-{entry.stage}"
        assert steps(run, f" {folder}/") == around("make_folder", "sync_folder")
        assert steps(run, f" {folder}/summary-00000.json") == torn | around("rename", *PUT)
        for part in range(entry.parts):
            assert steps(run, f" {folder}/part-{part:05d}.*.parquet") == torn | around("rename", *PUT)
            assert steps(run, f" {folder}/part-{part:05d}.json") == torn | around("link", *PUT)
    assert steps(run, f" runs/{RUN}/run.json") == torn | around("link", *PUT)
    assert steps(run, f"sync_folder runs/{RUN}/lease/000001.json")
    assert steps(run, f"again runs/{RUN}/lease/000001.json") == torn | around("rename", *PUT)
    letters = sorted(file.rpartition("/")[2].partition("-part")[0] for file in files if "/dead_letters/" in file)
    assert letters == ["", POISONED_STAGE, "log_lines"]  # the folder, and two files in it
    assert steps(scenarios["failing"], "/failure.json") >= torn | around("rename", *PUT)
    assert around("unlink", "sync_folder") <= steps(scenarios["failed"], f"deleting runs/{RUN}/failure.json")
    assert around("unlink", "sync_folder") <= steps(scenarios["failed"], f"deleting runs/{RUN}/lease/000002.json")
    for number, name in enumerate(("first publish", "publish", "rollback"), start=1):
        assert steps(scenarios[name], " published/current.json") == torn | around("rename", *PUT)
        assert steps(scenarios[name], f" published/history/{number:06d}.json") == torn | around("link", *PUT)
    assert steps(scenarios["gc"], f" deleting runs/{RUN}/run.json") == around("unlink", "sync_folder")
    assert steps(scenarios["ingest"], " corpora/current.json") == torn | around("rename", *PUT)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_a_run_that_is_killed_in_a_stage_is_finished_by_resume(
    scenarios: dict[str, Scenario], tmp_path: Path, stage: str, kind: str
) -> None:
    number = 2 * STAGES.index(stage) + (kind == "json")
    ordeal = Ordeal(scenarios["run"], tmp_path)
    ordeal.kill(chosen(scenarios["run"], rf"-{stage}/part-.*\.{kind}$", number))
    ordeal.finish()


@pytest.mark.parametrize(
    ("scenario", "file"),
    [
        ("ingest", "corpora/current"),
        ("run", "run.json"),
        ("run", "lease/000001"),
        ("run", "dead_letters/"),
        ("run", "summary-"),
        ("failing", "failure.json"),
        ("failed", "failure.json"),
        ("failed", "lease/"),
        ("beating", "again .*lease/"),
        ("rerun", "part-"),
        ("replay", "part-"),
        ("replay", "before link .*family_searches/part-00002"),
        ("first publish", "published/history"),
        ("publish", "published/current"),
        ("rollback", "published/current"),
        ("gc", "deleting runs/r/0"),
    ],
)
def test_so_is_one_that_is_killed_outside_of_the_stages(
    scenarios: dict[str, Scenario], tmp_path: Path, scenario: str, file: str
) -> None:
    ordeal = Ordeal(scenarios[scenario], tmp_path)
    ordeal.kill(chosen(scenarios[scenario], file, len(file)))
    ordeal.finish()


@pytest.mark.parametrize("number", range(8))
def test_so_is_one_that_loses_power(scenarios: dict[str, Scenario], tmp_path: Path, number: int) -> None:
    """Half of them lose everything that was not synced, the others some of it."""
    ordeal = Ordeal(scenarios["run"], tmp_path)
    point = chosen(scenarios["run"], "after (rename|link|sync_folder) .*part-", 11 * number)
    ordeal.kill(point, power_cut=True, chance=random.Random(number) if number % 2 else None)
    ordeal.finish()


@pytest.mark.parametrize("seed", range(2))
def test_so_is_one_that_is_killed_again_while_it_is_resumed(
    scenarios: dict[str, Scenario], tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    ordeal = Ordeal(scenarios["run"], tmp_path)
    for _ in range(3):
        ordeal.kill_on_the_way(chance)
    ordeal.finish()


@pytest.mark.parametrize("forgets", ["sync_file", "sync_folder"])
def test_a_store_that_forgets_to_sync_is_found_out(
    scenarios: dict[str, Scenario], tmp_path: Path, forgets: str
) -> None:
    ordeal = Ordeal(scenarios["run"], tmp_path, forgets)
    with pytest.raises(AssertionError, match="lost, though put or deleted for good"):
        ordeal.kill(f"before write runs/{RUN}/01-oversample/part-00001.json", power_cut=True)


def test_a_store_that_writes_in_place_is_found_out(scenarios: dict[str, Scenario], tmp_path: Path) -> None:
    ordeal = Ordeal(scenarios["run"], tmp_path, "rename")
    with pytest.raises(AssertionError, match=r"neither as before nor as after: .*part-00001\.json"):
        ordeal.kill(f"during write runs/{RUN}/01-oversample/part-00001.json")


def test_a_resume_that_computes_again_what_is_committed_is_found_out(
    scenarios: dict[str, Scenario], tmp_path: Path
) -> None:
    ordeal = Ordeal(scenarios["run"], tmp_path)
    ordeal.kill(f"after link runs/{RUN}/01-oversample/part-00001.json")
    with pytest.raises(AssertionError, match=r"computed again, though committed: .*oversample"):
        ordeal.finish(mischief="forget")
