"""log_normal: the log of a normal density, as exact as float64."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy.stats import norm

from contracts.candidates import Distances
from contracts.table import schema
from stages.log_normal import STAGE, Params, log_normal

distances = st.lists(st.floats(0, 2, width=32), max_size=12)
sigmas = st.floats(0.001, 10)


def run(rows, **params):
    table = pa.Table.from_pylist(rows, schema=schema(Distances))
    return STAGE.checked_run({"distance_matrices": table}, {}, Params(**params))


def test_densities_of_a_case_by_hand():
    # At sigma 1: -0.5 ln(2 pi) = -0.9189385, less d^2 / 2.
    got = log_normal(np.array([0.0, 1.0, 2.0], dtype=np.float32), 1.0)
    assert got.tolist() == pytest.approx([-0.9189385332, -1.4189385332, -2.9189385332])
    # At sigma 0.1 the peak is ln 10 higher, and 0.5 lies 5 sigma off: 12.5 lower.
    got = log_normal(np.array([0.0, 0.5], dtype=np.float32), 0.1)
    assert got.tolist() == pytest.approx([1.3836465597893728, 1.3836465597893728 - 12.5])


@given(distances, sigmas)
@settings(max_examples=100, deadline=None)
def test_agrees_with_the_normal_density_of_scipy(values, sigma):
    array = np.array(values, dtype=np.float32)
    got = log_normal(array, sigma)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, norm.logpdf(array.astype(np.float64), scale=sigma), rtol=1e-12, atol=1e-12)


@given(st.floats(0, 2, width=32), st.floats(0, 2, width=32), sigmas)
@settings(max_examples=100, deadline=None)
def test_nearer_is_never_less_dense(one, other, sigma):
    near, far = log_normal(np.array(sorted([one, other]), dtype=np.float32), sigma)
    assert near >= far
    assert np.isfinite([near, far]).all()


def test_it_is_a_density_and_no_log_normal_distribution():
    grid = np.linspace(-8, 8, 100_001)
    density = np.exp(log_normal(grid.astype(np.float32), 1.0))
    assert float(np.sum(density) * (grid[1] - grid[0])) == pytest.approx(1.0, abs=1e-6)


def test_small_sigma_keeps_differences_that_float32_would_lose():
    one, other = np.float32(1.9999), np.nextafter(np.float32(1.9999), np.float32(2), dtype=np.float32)
    near, far = log_normal(np.array([one, other]), 0.005)
    assert -81_000 < far < near < -79_000
    assert near - far == pytest.approx((float(other) ** 2 - float(one) ** 2) / (2 * 0.005**2), rel=1e-6)


def test_the_layout_of_the_distances_is_kept():
    rows = [
        {"query_id": "a", "query_distances": [0.1, 0.2, 0.3], "document_distances": [0.4, 0.5, 0.6]},
        {"query_id": "b", "query_distances": [], "document_distances": []},
        {"query_id": "c", "query_distances": [0.7], "document_distances": []},
    ]
    output = run(rows, sigma=0.5)
    constant = -math.log(0.5) - 0.5 * math.log(2 * math.pi)
    for given_row, row in zip(rows, output.table.to_pylist(), strict=True):
        assert row["query_id"] == given_row["query_id"]
        for kind in ("query", "document"):
            want = [constant - d * d / 0.5 for d in given_row[f"{kind}_distances"]]
            assert row[f"{kind}_log_probabilities"] == pytest.approx(want, rel=1e-6)
    assert output.account.candidates_in == output.account.candidates_out == 4


def test_an_empty_table_works():
    output = run([])
    assert output.table.num_rows == 0
    assert output.account.balanced


@pytest.mark.parametrize("sigma", [0, 0.0, -0.1, math.nan, math.inf, True, "0.1"])
def test_a_sigma_that_is_not_a_positive_number_is_refused(sigma):
    with pytest.raises(ValidationError):
        Params(sigma=sigma)


def test_the_density_at_distance_zero_is_written_for_every_query():
    written = run(
        [
            {"query_id": "a", "query_distances": [0.25], "document_distances": []},
            {"query_id": "b", "query_distances": [], "document_distances": []},
        ],
        sigma=0.1,
    ).table
    # -ln 0.1 - ln(2 pi) / 2 = 2.302585 - 0.918939
    assert written.column("log_probability_at_zero").to_pylist() == pytest.approx([1.383647, 1.383647], abs=1e-6)
