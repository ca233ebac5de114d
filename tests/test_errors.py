"""Errors: one tree, one sentence form, and fields that survive a process border."""

from __future__ import annotations

import copy
import pickle
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import errors
from contracts.errors import (
    ContractError,
    DartflowError,
    InvalidAnswerError,
    ModelError,
    RefusedError,
    TimedOutError,
    TransientError,
)

TREE_LINE = re.compile(r"^(?P<bars>[│ ]*(?:[├└]── )?)(?P<name>\w+Error)(?: |$)")
SENTENCE = re.compile(
    r"^(?P<where>.+?): (?P<problem>[^:]+?)(?:: (?P<found>(?:got|want) .+?))?\. (?P<next>[A-Z].*\.)$", re.DOTALL
)


def drawn_tree() -> dict[str, str | None]:
    """Each class of the docstring's drawing with the class that it hangs from."""
    parents: dict[str, str | None] = {}
    branch: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = TREE_LINE.match(line)
        if match:
            depth = len(match["bars"]) // 4
            branch[depth:] = [match["name"]]
            parents[match["name"]] = branch[depth - 1] if depth else None
    return parents


def defined_tree() -> dict[str, str | None]:
    """Each error class of the module with its base."""
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return {kind.__name__: None if kind is DartflowError else kind.__base__.__name__ for kind in classes}


def example(kind: type[DartflowError]) -> DartflowError:
    if kind is ContractError:
        return ContractError(stage="oversample", column="candidates.score", row=7, value=1.5, want="<= 1")
    return kind("where", "is wrong", got=3, want="4", next_step="Look again.")


EVERY_KIND = [getattr(errors, name) for name in defined_tree()]


def raise_it(error: DartflowError) -> None:
    raise error


def test_the_tree_in_the_docstring_is_the_tree_of_classes():
    assert drawn_tree() == defined_tree()
    assert len(drawn_tree()) >= 14


def test_the_drawing_states_the_exit_status():
    for line in (errors.__doc__ or "").splitlines():
        match = TREE_LINE.match(line)
        if match:
            stated = re.search(r"exit status (\d)", line)
            assert getattr(errors, match["name"]).exit_status == (int(stated[1]) if stated else 1)


def test_an_error_reads_where_what_got_want_and_the_next_step():
    error = DartflowError("log_normal.sigma", "is no width", got=0, want="> 0", next_step="Set it above 0.")

    assert str(error) == "log_normal.sigma: is no width: got 0, want > 0. Set it above 0."
    assert (error.where, error.problem, error.got, error.want, error.next_step) == (
        "log_normal.sigma", "is no width", 0, "> 0", "Set it above 0.",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("got", "want", "sentence"),
    [
        (None, None, "a: is b. Do c."),
        (1, None, "a: is b: got 1. Do c."),
        (None, 2, "a: is b: want 2. Do c."),
        (0, "", "a: is b: got 0, want . Do c."),
    ],
)
def test_a_part_that_is_none_is_left_out_of_the_sentence(got, want, sentence):
    assert str(DartflowError("a", "is b", got=got, want=want, next_step="Do c.")) == sentence


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_every_kind_has_the_sentence_form(kind):
    match = SENTENCE.match(str(example(kind)))

    assert match is not None
    assert match["found"].startswith("got ")
    assert ", want " in match["found"]


def test_a_contract_error_names_stage_column_row_and_value():
    error = ContractError(stage="oversample", column="candidates.score", row=7, value=1.5, want="<= 1")

    assert str(error) == (
        "stage oversample, column candidates.score, row 7: breaks the contract: got 1.5, want <= 1. "
        "Run `dartflow contracts oversample` to see the contract."
    )
    assert (error.stage, error.column, error.row, error.value, error.want) == (
        "oversample", "candidates.score", 7, 1.5, "<= 1",
    )  # fmt: skip


def test_a_contract_error_about_a_whole_column_names_no_row():
    error = ContractError(stage="context", column="tokens", row=None, value="no such column", want="int64")

    assert str(error).startswith("stage context, column tokens: breaks the contract: got 'no such column', want int64.")


def test_a_null_is_named_as_a_value():
    error = ContractError(stage="context", column="text", row=0, value=None, want="a value (not null)")

    assert "got None, want a value (not null)" in str(error)


def test_a_long_value_is_shortened_in_the_sentence_and_whole_in_the_field():
    error = ContractError(stage="context", column="text", row=0, value="x" * 10_000, want="short")

    assert len(str(error)) < 400
    assert "xxx..., want short" in str(error)
    assert error.value == "x" * 10_000


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_keeps_kind_fields_and_sentence_when_copied(kind, copied):
    error = example(kind)
    error.add_note("shard 3")

    twin = copied(error)

    assert type(twin) is kind
    assert twin.__dict__ == error.__dict__
    assert str(twin) == str(error)
    assert twin.__notes__ == ["shard 3"]
    assert twin.exit_status == kind.exit_status


@settings(max_examples=50, deadline=None)
@given(
    stage=st.text(), column=st.text(), row=st.none() | st.integers(),
    value=st.recursive(st.none() | st.floats(allow_nan=False) | st.text(), st.lists), want=st.text(),
)  # fmt: skip
def test_contract_errors_of_any_content_pickle(stage, column, row, value, want):
    error = ContractError(stage=stage, column=column, row=row, value=value, want=want)

    twin = pickle.loads(pickle.dumps(error))

    assert twin.__dict__ == error.__dict__
    assert str(twin) == str(error)


def test_an_error_crosses_a_process_border():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        future = pool.submit(raise_it, example(ContractError))
        with pytest.raises(ContractError) as caught:
            future.result(timeout=60)

    assert caught.value.__dict__.items() >= example(ContractError).__dict__.items()
    assert str(caught.value) == str(example(ContractError))


def test_what_may_pass_is_retried_and_a_refusal_is_not():
    retried = [kind for kind in EVERY_KIND if issubclass(kind, TransientError)]

    assert retried == [TransientError, TimedOutError]
    assert [kind for kind in EVERY_KIND if issubclass(kind, RefusedError)] == [RefusedError]
    assert [kind for kind in EVERY_KIND if issubclass(kind, ModelError)] == [
        ModelError, TransientError, TimedOutError, RefusedError, InvalidAnswerError,
    ]  # fmt: skip
