"""Compiled kernels: functions in numba's part of Python, which become machine code when they are first called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Kernel(Generic[Given, Result]):
    """A function that numba compiles, and keeps on disk, when it is first called or first used by another kernel.

    To import numba takes longer than most commands that only look at a store; they import the stages, and call none.

    Args:
        function: what is compiled; it holds no interpreter lock while it runs.
        options: of `numba.njit`, beyond `cache` and `nogil`.
    """

    def __init__(self, function: Callable[Given, Result], **options: Any) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._options = options

    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """What the function gives, from machine code."""
        result: Result = self._compiled(*args, **kwargs)
        return result

    @functools.cached_property
    def _compiled(self) -> Any:
        import numba  # noqa: PLC0415 - see above

        return numba.njit(cache=True, nogil=True, **self._options)(self._function)

    @property
    def _numba_type_(self) -> Any:
        """What numba takes a kernel for that another kernel calls."""
        return self._compiled._numba_type_


def kernel(function: Callable[Given, Result]) -> Kernel[Given, Result]:
    """Makes a kernel of a function."""
    return Kernel(function)


def kernel_adding_in_any_order(function: Callable[Given, Result]) -> Kernel[Given, Result]:
    """Makes a kernel of a function whose sums may change in their last bits, which lets them run in vectors."""
    return Kernel(function, fastmath={"reassoc"})
