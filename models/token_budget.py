"""Token budget: what the calls of a run may be charged for, reserved before each call and settled after it."""

from __future__ import annotations

import threading

from contracts.errors import RefusedError


class TokenBudget:
    """Tokens spent and reserved; together they never exceed the limit, unless a service charges more than was asked.

    Safe for threads.

    Args:
        limit: of all calls of the run; None sets none.
        spent: what the run was charged for before.
        run_id: names the run in errors.
    """

    def __init__(self, limit: int | None, spent: int, run_id: str) -> None:
        self._limit = limit
        self._spent = spent
        self._reserved = 0
        self._run_id = run_id
        self._changed = threading.Condition()

    @property
    def spent(self) -> int:
        """Tokens charged for so far."""
        with self._changed:
            return self._spent

    def reserve(self, tokens: int) -> None:
        """Sets tokens aside; waits while calls in flight may still leave room when they are settled.

        Raises:
            RefusedError: there is no room, and nothing in flight that could make some.
        """
        with self._changed:
            while self._limit is not None and self._spent + self._reserved + tokens > self._limit:
                if not self._reserved:
                    raise RefusedError(
                        f"token budget of run {self._run_id}", "has no room for the next call",
                        got=f"{self._spent} tokens spent, up to {tokens} to come", want=f"at most {self._limit} in all",
                        next_step=f"Raise grader.token_budget (in --config, or as DARTFLOW_GRADER__TOKEN_BUDGET) and "
                        f"`dartflow resume {self._run_id}`: what was paid for is kept.",
                    )  # fmt: skip
                self._changed.wait()
            self._reserved += tokens

    def settle(self, reserved: int, spent: int) -> None:
        """Gives back a reservation, and counts what was spent of it: 0 where the call was not charged for."""
        with self._changed:
            self._reserved -= reserved
            self._spent += spent
            self._changed.notify_all()
