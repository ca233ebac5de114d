"""Kernels: compiled at the first call, called by each other, and not at all by commands that only look."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from corpus.compiled import kernel, kernel_adding_in_any_order


@kernel
def _twice(number: float) -> float:
    return 2.0 * number


@kernel
def _sum_of_twice(numbers: np.ndarray) -> float:
    """A sum."""
    total = 0.0
    for number in numbers:
        total += _twice(number)
    return total


@kernel_adding_in_any_order
def _sum(numbers: np.ndarray) -> float:
    total = 0.0
    for number in numbers:
        total += number
    return total


def test_a_kernel_may_call_another():
    assert _sum_of_twice(np.arange(5.0)) == 20.0
    assert _twice(1.5) == 3.0


def test_a_kernel_keeps_the_name_and_the_docstring_of_its_function():
    assert (_sum_of_twice.__name__, _sum_of_twice.__doc__) == ("_sum_of_twice", "A sum.")


def test_sums_in_any_order_differ_in_their_last_bits_alone():
    numbers = np.random.default_rng(0).normal(size=1001)
    assert abs(_sum(numbers) - np.sum(numbers)) < 1e-11


def test_planning_imports_no_compiler_and_no_model():
    # A dry run plans and computes nothing; each of these takes longer to import than it takes altogether.
    heavy = {"numba", "faiss", "scipy", "onnxruntime", "prefect"}
    code = f"import flows.planning, sys; print(*sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
