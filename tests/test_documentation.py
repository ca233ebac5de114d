"""README and runbook show what the commands really print."""

from __future__ import annotations

import shutil

import pytest

from tests.documentation import PAGES, blocks, masked, reader, run_command


@pytest.fixture(scope="module")
def as_a_reader(example_store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reader")
    # The models have read the example before: their scores are reused, as they are between nights.
    (folder / ".dartflow").mkdir()
    shutil.copytree(example_store / "pair_scores", folder / ".dartflow" / "pair_scores")
    with reader(folder):
        yield folder


def test_every_block_prints_what_the_page_shows(as_a_reader, monkeypatch):
    monkeypatch.setattr("sys.argv", [])
    for page in PAGES:
        assert len(blocks(page)) >= 5, page
        for block in blocks(page):
            for command, shown in block:
                assert masked(run_command(command)) == masked(shown), f"{page}: {command}"
