"""The demo runs as the README says."""

from __future__ import annotations


def test_the_demo_ends_with_the_verdict_and_the_results(dartflow):
    status, out, _ = dartflow("demo", "--without-prefect")
    assert status == 0
    assert "verdict: partial (5 dead letters)" in out
    assert out.strip().splitlines()[-1].startswith(f"results: {dartflow.store}/runs/")
    assert out.strip().endswith("/10-context")
