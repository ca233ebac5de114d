"""The whole crash matrix: a kill at every point, a power cut at a third of them, three kills in a row by seed.

`python -m tests.crash.matrix` runs it in parallel and counts; arguments are pytest's.
"""

from __future__ import annotations

import atexit
import random
import shutil
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.crash.acts import Scenario
from tests.crash.ordeal import Ordeal
from tests.crash.scenarios import make_scenarios

SEEDS = range(40)


@cache
def _scenarios() -> dict[str, Scenario]:
    """Made when tests are collected, since their points are the tests; by each worker for itself."""
    folder = Path(tempfile.mkdtemp(prefix="dartflow-crash-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return make_scenarios(folder)


def _some(scenario: Scenario) -> list[str]:
    """A third of the points, by seed."""
    return sorted(random.Random(scenario.name).sample(scenario.points, -(-len(scenario.points) // 3)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "point" in metafunc.fixturenames:
        every = metafunc.function is test_killed
        cases = [
            (scenario.name, point)
            for scenario in _scenarios().values()
            for point in (scenario.points if every else _some(scenario))
        ]
        metafunc.parametrize(("name", "point"), cases, ids=[f"{name}: {point}" for name, point in cases])


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose name is short, whatever the point's is."""
    return tmp_path_factory.mktemp("ordeal")


def test_killed(name: str, point: str, folder: Path) -> None:
    ordeal = Ordeal(_scenarios()[name], folder)
    ordeal.kill(point)
    ordeal.finish()
    shutil.rmtree(folder)


def test_power_cut(name: str, point: str, folder: Path) -> None:
    """All that was not synced is lost, or by seed some of it."""
    chance = random.Random(point)
    ordeal = Ordeal(_scenarios()[name], folder)
    ordeal.kill(point, power_cut=True, chance=chance if chance.random() < 0.5 else None)
    ordeal.finish()
    shutil.rmtree(folder)


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_three_times(seed: int, folder: Path) -> None:
    chance = random.Random(seed)
    ordeal = Ordeal(_scenarios()["run"], folder)
    for _ in range(3):
        ordeal.kill_on_the_way(chance)
    ordeal.finish()
    shutil.rmtree(folder)


class _Count:
    """Tells at the end how often a run was killed and came back."""

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        passed = terminalreporter.stats.get("passed", [])
        counts = Counter(report.nodeid.partition("[")[0].rpartition("test_")[2] for report in passed)
        terminalreporter.write_line(", ".join(f"{name.replace('_', ' ')}: {n}" for name, n in sorted(counts.items())))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-n", "auto", "--tb=short", *sys.argv[1:]], plugins=[_Count()]))
