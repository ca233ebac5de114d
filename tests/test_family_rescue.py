"""family_rescue: shapes are recognised, missing families are rescued, and nothing crosses a border."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from contracts.candidates import FusedRanking
from contracts.errors import ConfigurationError, ContractError
from contracts.evidence import EvidencePlan, Family, Shape
from contracts.manifest import Account
from contracts.table import schema
from corpus.corpus import Corpus
from corpus.recognition import check_plan_patterns, recognise
from corpus.scope import Scope, Scopes
from stages.family_rescue import SHARED, STAGE, Params, rescue_missing
from stages.stage import StageOutput
from tests.corpora import make_corpus, make_queries

ACCESS = {
    "name": "access",
    "recognise": [r"who (may|can)\b", "permission"],
    "families": [
        {"name": "rbac", "source": r"rbac/.*\.md$", "rescue_query": "role binding"},
        {"name": "secret", "source": "secret", "rescue_query": "secret token", "wanted": 2},
    ],
}
TOKENS = {
    "name": "tokens",
    "recognise": ["token"],
    "families": [{"name": "audit", "metadata": {"kind": "audit"}, "rescue_query": "audit log"}],
}


def make_plan(*shapes: Mapping[str, Any]) -> EvidencePlan:
    return EvidencePlan.model_validate({"name": "test", "version": "1", "shapes": list(shapes)})


def make_fused(queries: pa.Table, lists: Sequence[Sequence[str]]) -> pa.Table:
    rows = [
        {
            "query_id": query_id,
            "candidates": [
                {
                    "rank": rank,
                    "chunk_id": chunk,
                    "score": 1 / (60 + rank),
                    "greedy_selection_rank": rank,
                    "sparse_search_rank": None,
                }
                for rank, chunk in enumerate(chunks, start=1)
            ],
            "best_possible": 1 / 61,
            "greedy_selection_outcome": "ok" if chunks else "no_match",
            "sparse_search_outcome": "no_match",
        }
        for query_id, chunks in zip(queries.column("query_id").to_pylist(), lists, strict=True)
    ]
    return pa.Table.from_pylist(rows, schema=schema(FusedRanking))


def search(corpus: Corpus, queries: pa.Table, plan: EvidencePlan | None, params: Params) -> StageOutput:
    resources = {"corpus": corpus, "keyword_search": corpus.keyword_search(1.5, 0.75, 0.25), "plan": plan}
    return SHARED.checked_run({"queries": queries}, resources, params)


def rescue(
    corpus: Corpus,
    queries: pa.Table,
    lists: Sequence[Sequence[str]],
    plan: EvidencePlan | None,
    params: Params = Params(),  # noqa: B008 - frozen
    searches: pa.Table | None = None,
) -> StageOutput:
    found = search(corpus, queries, plan, params).table if searches is None else searches
    inputs = {"queries": queries, "rrf_merge": make_fused(queries, lists), "family_searches": found}
    return STAGE.checked_run(inputs, {"corpus": corpus, "plan": plan}, params)


def chunk_lists(table: pa.Table) -> list[list[str]]:
    return [[candidate["chunk_id"] for candidate in row] for row in table.column("candidates").to_pylist()]


CHUNKS = [
    {"chunk_id": "c1", "text": "pods run containers", "source": "concepts/pods.md"},
    {"chunk_id": "c2", "text": "a role binding grants a role", "source": "access/rbac/binding.md"},
    {"chunk_id": "c3", "text": "a role lists verbs", "source": "access/rbac/role.md"},
    {"chunk_id": "c4", "text": "a secret holds a token", "source": "concepts/secret.md"},
    {"chunk_id": "c5", "text": "mount a secret as a volume", "source": "tasks/secret-volume.md"},
    {"chunk_id": "c6", "text": "a token expires", "source": "concepts/secret-tokens.md"},
    {"chunk_id": "c7", "text": "the audit log keeps requests", "source": "debug.md", "metadata": {"kind": "audit"}},
]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return make_corpus(CHUNKS)


def test_the_first_shape_that_matches_is_taken_and_case_is_ignored():
    plan = make_plan(ACCESS, TOKENS)
    texts = ["WHO CAN read tokens?", "rotate a Token", "what is a pod", "who candidly asks", "rotate a Token"]
    places, reasons = recognise(texts, plan.shapes)
    assert places == [0, 1, -1, -1, 1]
    assert reasons == [
        r'"WHO CAN" by who (may|can)\b', '"Token" by token', None, None, '"Token" by token',
    ]  # fmt: skip


def test_missing_families_are_rescued_by_their_best_hits(corpus: Corpus):
    queries = make_queries([{"text": "who can read the pods"}])
    output = rescue(corpus, queries, [["c1", "c4"]], make_plan(ACCESS))
    row = output.table.to_pylist()[0]
    assert row["shape"] == "access"
    # rbac has none of one wanted: c2 has both words of its rescue query. secret has c4 of two wanted: c4
    # is a candidate already, and c6 (three words) outranks c5 (six) with one shared word each.
    assert row["coverage"] == [
        {"family": "rbac", "wanted": 1, "found": 0, "rescued": 1, "outcome": "rescued"},
        {"family": "secret", "wanted": 2, "found": 1, "rescued": 1, "outcome": "rescued"},
    ]
    assert row["candidates"] == [
        {"rank": 1, "chunk_id": "c1", "score": 1 / 61, "families": [], "family_ranks": [], "rescued": False},
        {"rank": 2, "chunk_id": "c4", "score": 1 / 62, "families": ["secret"], "family_ranks": [1], "rescued": False},
        {"rank": 3, "chunk_id": "c2", "score": 0.0, "families": ["rbac"], "family_ranks": [1], "rescued": True},
        {"rank": 4, "chunk_id": "c6", "score": 0.0, "families": ["secret"], "family_ranks": [2], "rescued": True},
    ]
    assert output.account == Account(candidates_in=2, added={"rescued": 2}, removed={}, candidates_out=4)


def test_a_family_with_enough_candidates_is_left_alone(corpus: Corpus):
    queries = make_queries([{"text": "who can read the pods"}])
    output = rescue(corpus, queries, [["c3", "c5", "c4"]], make_plan(ACCESS))
    assert chunk_lists(output.table) == [["c3", "c5", "c4"]]
    assert output.account.added == {}


def test_a_query_without_candidates_is_rescued_too(corpus: Corpus):
    queries = make_queries([{"text": "permission"}, {"text": "pods"}])
    assert chunk_lists(rescue(corpus, queries, [[], []], make_plan(ACCESS)).table) == [["c2", "c4", "c6"], []]


def test_a_chunk_rescued_for_one_family_counts_for_the_next(corpus: Corpus):
    both = [
        {"name": "access", "source": "rbac", "rescue_query": "role binding"},
        {"name": "grants", "source": "binding", "rescue_query": "role verbs"},
        {"name": "all", "source": r"\.md$", "rescue_query": "verbs", "wanted": 2},
    ]
    queries = make_queries([{"text": "who"}])
    shape = {"name": "two", "recognise": ["who"], "families": both}
    row = rescue(corpus, queries, [[]], make_plan(shape)).table.to_pylist()[0]
    assert [(c["chunk_id"], c["families"]) for c in row["candidates"]] == [
        ("c2", ["access", "grants", "all"]),
        ("c3", ["access", "all"]),
    ]
    assert [c["rescued"] for c in row["coverage"]] == [2, 1, 2]


def test_a_hit_with_the_text_of_another_member_is_no_new_evidence():
    chunks = [
        {"chunk_id": "a", "text": "role binding", "source": "rbac/first.md"},
        {"chunk_id": "b", "text": "role binding", "source": "rbac/copy.md"},
        {"chunk_id": "c", "text": "role binding explained", "source": "rbac/own.md"},
    ]
    corpus = make_corpus(chunks, collapse_identical_texts=False)
    queries = make_queries([{"text": "permission"}])
    family = {"name": "rbac", "source": "rbac", "rescue_query": "role binding", "wanted": 2}
    plan = make_plan({"name": "s", "recognise": ["permission"], "families": [family]})
    assert chunk_lists(rescue(corpus, queries, [["a"]], plan).table) == [["a", "c"]]


COPIES = [
    {"chunk_id": "a", "text": "role binding", "source": "blog.md", "authority_tier": 1},
    {"chunk_id": "b", "text": "role binding", "source": "rbac/old.md", "authority_tier": 3},
    {"chunk_id": "c", "text": "role binding", "source": "rbac/new.md", "authority_tier": 2},
    {"chunk_id": "d", "text": "role binding", "source": "rbac/shut.md", "authority_tier": 1},
    {"chunk_id": "e", "text": "pods", "source": "pods.md", "authority_tier": 1},
]


@pytest.mark.parametrize("candidates", [["e"], ["a", "e"]])
def test_a_family_has_its_own_copy_of_a_text_that_stands_elsewhere_too(candidates: list[str]):
    # Searches show a for all four; of those that are members the query sees b and c, and c has more authority.
    chunks = [{**chunk, "acl": ["board"] if chunk["chunk_id"] == "d" else ["all"]} for chunk in COPIES]
    corpus = make_corpus(chunks)
    queries = make_queries([{"text": "permission", "groups": ["all"]}])
    family = {"name": "rbac", "source": "^rbac/", "rescue_query": "role binding"}
    plan = make_plan({"name": "s", "recognise": ["permission"], "families": [family]})
    (row,) = rescue(corpus, queries, [candidates], plan).table.to_pylist()
    assert [one["chunk_id"] for one in row["candidates"]] == [*candidates, "c"]
    assert row["candidates"][-1]["families"] == ["rbac"]
    assert row["coverage"][0]["outcome"] == "rescued"


def test_coverage_says_why_a_family_is_not_served():
    chunks = [{**chunk, "acl": ["all"]} for chunk in CHUNKS]
    corpus = make_corpus([*chunks, {"chunk_id": "c8", "text": "role of the board", "source": "board.md", "acl": ["b"]}])
    families = [
        {"name": "enough", "source": "pods", "rescue_query": "pods"},
        {"name": "rescued", "source": "rbac", "rescue_query": "role binding"},
        {"name": "too_few", "source": "secret", "rescue_query": "secret", "wanted": 3, "depth": 2},
        {"name": "no_hit", "metadata": {"kind": "audit"}, "rescue_query": "verbs"},
        {"name": "no_chunk", "source": "^board", "rescue_query": "role board"},
    ]
    plan = make_plan({"name": "s", "recognise": ["who"], "families": families})
    queries = make_queries([{"text": "who", "groups": ["all"]}])
    (row,) = rescue(corpus, queries, [["c1"]], plan).table.to_pylist()
    assert [(one["family"], one["outcome"]) for one in row["coverage"]] == [
        (one["name"], one["name"]) for one in families
    ]
    assert [one["found"] + one["rescued"] for one in row["coverage"]] == [1, 1, 2, 0, 0]


COMBINED = {
    "name": "combined",
    "concepts": {
        "who": [r"\bwho\b", "which user"],
        "may": [r"\b(may|can)\b"],
        "read": ["read", "list"],
        "unused": ["x"],
    },
    "recognise": [{"of": ["who", "may", "read"], "at_least": 2}, {"of": ["read"]}],
    "families": ACCESS["families"],
}


def test_concepts_are_found_in_any_order_and_a_combination_wants_so_many():
    shapes = make_plan(COMBINED).shapes
    texts = ["Can you tell WHO?", "which user may list", "who else", "may it", "it reads"]
    places, reasons = recognise(texts, shapes)
    assert places == [0, 0, -1, -1, 0]
    assert reasons == [
        'who "WHO", may "Can"', 'who "which user", may "may", read "list"', None, None, 'read "read"',
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("recognise_by", "problem"),
    [
        ([{"of": ["who", "what"]}], "concepts that the shape does not have"),
        ([{"of": ["who", "may"], "at_least": 3}], "at_least must not exceed the 2 concepts"),
        ([{"of": ["who", "who"]}], "names each concept once"),
    ],
)
def test_a_combination_that_cannot_be_is_refused(recognise_by: list[Any], problem: str):
    with pytest.raises(ValidationError, match=problem):
        make_plan({**COMBINED, "recognise": recognise_by})


def test_a_question_says_by_what_it_was_recognised(corpus: Corpus):
    queries = make_queries([{"text": "who can read the pods"}, {"text": "pods"}])
    table = rescue(corpus, queries, [[], []], make_plan(ACCESS)).table
    assert table.column("recognised_by").to_pylist() == [r'"who can" by who (may|can)\b', None]


def test_the_search_goes_no_deeper_than_its_depth(corpus: Corpus):
    queries = make_queries([{"text": "who"}])
    # Best for "role" is c2, which has it twice, then c3, the only member. A deeper neighbour lends no depth.
    deep = {"name": "audit", "metadata": {"kind": "audit"}, "rescue_query": "nothing", "depth": 20}
    for depth, expected in ((1, []), (2, ["c3"])):
        family = {"name": "verbs", "source": "role", "rescue_query": "role", "depth": depth}
        shape = {"name": "s", "recognise": ["who"], "families": [family, deep]}
        assert chunk_lists(rescue(corpus, queries, [[]], make_plan(shape)).table) == [expected]


def test_a_family_may_look_at_everything(corpus: Corpus):
    family = {"name": "verbs", "source": "role", "rescue_query": "role", "depth": 2**31 - 1}
    plan = make_plan({"name": "s", "recognise": ["who"], "families": [family]})
    assert chunk_lists(rescue(corpus, make_queries([{"text": "who"}]), [[]], plan).table) == [["c3"]]


def test_authority_gates_a_family():
    chunks = [
        {"chunk_id": "a", "text": "role binding", "source": "rbac/a.md", "authority_tier": 3},
        {"chunk_id": "b", "text": "role binding of old", "source": "rbac/b.md", "authority_tier": None},
        {"chunk_id": "c", "text": "role binding made official", "source": "rbac/c.md", "authority_tier": 1},
    ]
    family = {"name": "rbac", "source": "rbac", "rescue_query": "role binding", "authority": [1, 2]}
    plan = make_plan({"name": "s", "recognise": ["who"], "families": [family]})
    row = rescue(make_corpus(chunks), make_queries([{"text": "who"}]), [["a"]], plan).table.to_pylist()[0]
    assert [(c["chunk_id"], c["families"]) for c in row["candidates"]] == [("a", []), ("c", ["rbac"])]


@pytest.mark.parametrize(
    ("plan", "params"),
    [(None, Params()), (make_plan(), Params()), (make_plan(ACCESS), Params(enabled=False))],
)
def test_without_a_plan_or_switched_off_every_query_passes_untouched(
    corpus: Corpus, plan: EvidencePlan | None, params: Params
):
    queries = make_queries([{"text": "who can read"}, {"text": "token"}])
    searches = search(corpus, queries, plan, params)
    assert searches.table.num_rows == 0
    output = rescue(corpus, queries, [["c5", "c1"], []], plan, params)
    assert chunk_lists(output.table) == [["c5", "c1"], []]
    assert output.table.column("shape").to_pylist() == [None, None]
    assert output.table.column("coverage").to_pylist() == [[], []]
    assert output.account == Account(candidates_in=2, added={}, removed={}, candidates_out=2)


def test_a_table_without_queries_works(corpus: Corpus):
    output = rescue(corpus, make_queries([]), [], make_plan(ACCESS))
    assert output.table.num_rows == 0


def test_searches_run_once_for_each_shape_and_scope_that_occur():
    corpus = make_corpus([{**chunk, "acl": ["all"]} for chunk in CHUNKS])
    queries = make_queries(
        [
            {"text": "who can read", "groups": ["all"]},
            {"text": "permission", "groups": ["all"]},
            {"text": "permission", "groups": ["none"], "filters": {"kind": "audit"}},
            {"text": "pods", "groups": ["elsewhere"]},
        ]
    )
    output = search(corpus, queries, make_plan(ACCESS, TOKENS), Params())
    rows = output.table.to_pylist()
    assert [(row["shape"], row["family"], row["groups"], row["filters"]) for row in rows] == [
        ("access", "rbac", ["all"], []),
        ("access", "secret", ["all"], []),
        ("access", "rbac", ["none"], [{"key": "kind", "value": "audit"}]),
        ("access", "secret", ["none"], [{"key": "kind", "value": "audit"}]),
    ]
    assert chunk_lists(output.table) == [["c2", "c3"], ["c4", "c6", "c5"], [], []]
    assert output.account == Account(candidates_in=0, added={"found": 5}, removed={}, candidates_out=5)


def test_a_search_that_is_missing_is_not_a_search_without_hits(corpus: Corpus):
    queries = make_queries([{"text": "who can read"}])
    searches = search(corpus, queries, make_plan(ACCESS), Params()).table.slice(1)
    with pytest.raises(ContractError, match="one search for every shape, family and scope") as caught:
        rescue(corpus, queries, [["c1"]], make_plan(ACCESS), searches=searches)
    assert caught.value.value == ("access", "rbac", Scope())


def test_a_search_table_with_foreign_chunks_smuggles_nothing_in():
    chunks = [
        {"chunk_id": "open", "text": "role binding", "source": "rbac/a.md", "acl": ["staff"]},
        {"chunk_id": "shut", "text": "role binding of the board", "source": "rbac/b.md", "acl": ["board"]},
        {"chunk_id": "blog", "text": "role binding in a blog", "source": "blog.md", "acl": ["staff"]},
    ]
    corpus = make_corpus(chunks)
    queries = make_queries([{"text": "permission", "groups": ["staff"]}])
    row = {
        "shape": "s",
        "family": "rbac",
        "groups": ["staff"],
        "filters": [],
        "candidates": [
            {"rank": rank, "chunk_id": chunk, "score": 1.0} for rank, chunk in enumerate(["shut", "blog", "open"], 1)
        ],
    }
    family = {"name": "rbac", "source": "rbac", "rescue_query": "role", "wanted": 3}
    plan = make_plan({"name": "s", "recognise": ["permission"], "families": [family]})
    searches = pa.Table.from_pylist([row], schema=schema(SHARED.writes))
    assert chunk_lists(rescue(corpus, queries, [[]], plan, searches=searches).table) == [["open"]]


def test_a_pattern_that_does_not_compile_is_named():
    check_plan_patterns(make_plan(ACCESS, TOKENS))
    broken = {"name": "rbac", "source": "(?<=rbac)x", "rescue_query": "role"}
    with pytest.raises(ConfigurationError, match=r"shape access, family rbac, source: .*'\(\?<=rbac\)x'"):
        check_plan_patterns(make_plan({**ACCESS, "families": [broken]}))
    with pytest.raises(ConfigurationError, match=r"shape access, recognise: the pattern does not compile .*'\(who'"):
        check_plan_patterns(make_plan({**ACCESS, "recognise": ["token", "(who"]}))
    with pytest.raises(ConfigurationError, match=r"shape combined, concept unused: .*'\[x'"):
        check_plan_patterns(make_plan({**COMBINED, "concepts": {**COMBINED["concepts"], "unused": ["[x"]}}))


def plain_rescue(
    candidates: list[int], demands: list[tuple[set[int], int, list[int]]], texts: list[int]
) -> tuple[list[int], list[int], list[int]]:
    """The oracle: (members, wanted, hits) of each demand to rescued rows, found and rescued counts."""
    added: list[int] = []
    for members, wanted, hits in demands:
        for hit in hits:
            present = [row for row in candidates + added if row in members]
            if len(present) < wanted and texts[hit] not in {texts[row] for row in present}:
                added.append(hit)
    count = [[sum(row in members for row in rows) for members, _, _ in demands] for rows in (candidates, added)]
    return added, count[0], count[1]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_rescue_agrees_with_the_plain_loop(data: st.DataObject):
    size = data.draw(st.integers(1, 8))
    some_rows = st.lists(st.integers(0, size - 1), unique=True)
    texts = data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    families = data.draw(st.lists(st.sets(st.integers(0, size - 1)), min_size=1, max_size=3))
    hits = [[row for row in data.draw(some_rows) if row in family] for family in families]
    demand = st.tuples(st.integers(0, len(families) - 1), st.integers(1, 3))
    queries = data.draw(st.lists(st.tuples(some_rows, st.lists(demand, max_size=3)), max_size=4))
    members = np.zeros((len(families), size), dtype=bool)
    for number, family in enumerate(families):
        members[number, list(family)] = True
    demands = [one for _, wanted in queries for one in wanted]
    kinds = np.array([kind for kind, _ in demands], dtype=np.int64)
    counts, added, found, rescued = rescue_missing(
        np.cumsum([0, *(len(rows) for rows, _ in queries)]),
        np.array([row for rows, _ in queries for row in rows], dtype=np.int64),
        np.cumsum([0, *(len(wanted) for _, wanted in queries)]),
        kinds,
        kinds,
        np.array([wanted for _, wanted in demands], dtype=np.int64),
        members,
        np.cumsum([0, *map(len, hits)]),
        np.array([row for rows in hits for row in rows], dtype=np.int64),
        np.array(texts, dtype=np.int64),
    )
    expected = [
        plain_rescue(rows, [(families[kind], count, hits[kind]) for kind, count in wanted], texts)
        for rows, wanted in queries
    ]
    assert counts.tolist() == [len(rows) for rows, _, _ in expected]
    assert added.tolist() == [row for rows, _, _ in expected for row in rows]
    assert found.tolist() == [count for _, counted, _ in expected for count in counted]
    assert rescued.tolist() == [count for _, _, counted in expected for count in counted]


def may_see(chunk: Mapping[str, Any], query: Mapping[str, Any]) -> bool:
    """Access groups and filters, written plainly."""
    allowed = chunk["acl"] is None or bool(set(chunk["acl"]) & set(query["groups"]))
    return allowed and all(chunk["metadata"].get(key) == value for key, value in query["filters"].items())


def serves(chunk: Mapping[str, Any], family: Family) -> bool:
    """Membership of a family with a source pattern, written plainly."""
    allowed = family.authority is None or chunk["authority_tier"] in family.authority
    return allowed and re.search(family.source or "", chunk["source"]) is not None


def tier_of(chunk: Mapping[str, Any]) -> float:
    """Its authority tier; none ranks below every tier."""
    return math.inf if chunk["authority_tier"] is None else chunk["authority_tier"]


def shape_of(text: str) -> Shape | None:
    """The first shape of `PLAN` that recognises a text, written plainly."""
    return next((s for s in PLAN.shapes if any(re.search(p, text, re.IGNORECASE) for p in s.recognise)), None)


GROUPS = st.lists(st.sampled_from(["g1", "g2"]), unique=True).map(sorted)
CHUNK = st.fixed_dictionaries(
    {
        "text": st.lists(st.sampled_from(["role", "secret", "pod", "log"]), min_size=1, max_size=4).map(" ".join),
        "source": st.sampled_from(["rbac/a.md", "secret.md", "pods.md"]),
        "acl": st.none() | GROUPS,
        "metadata": st.fixed_dictionaries({"version": st.sampled_from(["1", "2"])}),
        "authority_tier": st.none() | st.integers(1, 2),
    }
)
QUERY = st.fixed_dictionaries(
    {
        "text": st.sampled_from(["who can read", "token", "pods", "Permission token"]),
        "groups": GROUPS,
        "filters": st.just({}) | st.fixed_dictionaries({"version": st.sampled_from(["1", "2"])}),
    }
)
RBAC = {"name": "rbac", "source": "rbac/", "rescue_query": "role secret", "wanted": 2, "depth": 4}
SECRET = {"name": "secret", "source": "secret", "rescue_query": "secret log", "wanted": 1, "depth": 3}
OFFICIAL = {"name": "official", "source": "md$", "rescue_query": "pod log role", "wanted": 2, "authority": [1]}
PLAN = make_plan(
    {"name": "access", "recognise": ["who can", "permission"], "families": [RBAC, SECRET]},
    {"name": "tokens", "recognise": ["token"], "families": [SECRET, OFFICIAL]},
)


def copy_of(table: pa.Table) -> pa.Table:
    return pa.Table.from_pylist(table.to_pylist(), schema=table.schema)


@settings(max_examples=80, deadline=None)
@given(st.lists(CHUNK, min_size=1, max_size=12), st.lists(QUERY, max_size=4), st.data())
def test_rescue_never_crosses_groups_or_filters_and_agrees_with_a_search_for_each_query(
    chunks: list[dict[str, Any]], asked: list[dict[str, Any]], data: st.DataObject
):
    chunks = [{"chunk_id": f"c{number:02d}", **chunk} for number, chunk in enumerate(chunks)]
    corpus = make_corpus(chunks)
    queries = make_queries(asked)
    scopes = Scopes.of(queries)
    lists: list[list[str]] = []
    for query in asked:
        visible = [chunk["chunk_id"] for chunk in chunks if may_see(chunk, query)]
        lists.append(data.draw(st.lists(st.sampled_from(visible), unique=True, max_size=4)) if visible else [])
    searches = search(corpus, queries, PLAN, Params()).table
    inputs = {"queries": queries, "rrf_merge": make_fused(queries, lists), "family_searches": searches}
    before = {name: copy_of(table) for name, table in inputs.items()}
    chunks_before = copy_of(corpus.chunks)
    output = STAGE.checked_run(inputs, {"corpus": corpus, "plan": PLAN}, Params())

    by_id = {chunk["chunk_id"]: chunk for chunk in chunks}
    texts = corpus.column("text_id").to_pylist()
    keyword_search = corpus.keyword_search(1.5, 0.75, 0.25)
    for number, row in enumerate(output.table.to_pylist()):
        assert all(may_see(by_id[one["chunk_id"]], asked[number]) for one in row["candidates"] if one["rescued"])
        shape = shape_of(asked[number]["text"])
        assert row["shape"] == (shape.name if shape else None)
        scope = Scopes.single(scopes.distinct[scopes.codes[number]], 1)
        demands = {}
        for family in shape.families if shape else []:
            members = {place for place, chunk in enumerate(chunks) if serves(chunk, family)}
            hits = keyword_search.search([family.rescue_query], scope, family.depth).values["row"].tolist()
            own = []
            for hit in hits:
                copies = {
                    place for place in members if texts[place] == texts[hit] and may_see(chunks[place], asked[number])
                }
                if copies:
                    own.append(hit if hit in members else min(copies, key=lambda one: (tier_of(chunks[one]), one)))
            demands[family.name] = (members, family.wanted, own)
        fused_rows = [int(chunk[1:]) for chunk in lists[number]]
        added, found, rescued = plain_rescue(fused_rows, list(demands.values()), texts)
        rows = [int(one["chunk_id"][1:]) for one in row["candidates"]]
        assert rows == fused_rows + added
        assert [one["rescued"] for one in row["candidates"]] == [False] * len(fused_rows) + [True] * len(added)
        assert [(one["found"], one["rescued"]) for one in row["coverage"]] == list(zip(found, rescued, strict=True))
        assert [one["families"] for one in row["candidates"]] == [
            [name for name, (members, _, _) in demands.items() if place in members] for place in rows
        ]
        assert [one["family_ranks"] for one in row["candidates"]] == [
            [own.index(place) + 1 if place in own else 0 for members, _, own in demands.values() if place in members]
            for place in rows
        ]
    assert output.account.candidates_in == sum(map(len, lists))
    assert all(table.equals(before[name]) for name, table in inputs.items())
    assert corpus.chunks.equals(chunks_before)
