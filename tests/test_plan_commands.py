"""dartflow plan check and explain: a plan is held against a corpus and a log before any run depends on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.families import RESULTS, page_text
from contracts.evidence import EvidencePlan
from corpus.corpus import Corpus
from flows.plan_check import Finding, check_plan, everything, read_plan, recognised_counts, supply_of
from flows.plan_explain import explain
from tests.corpora import make_corpus
from tests.example import QUERIES, ROOT, CommandLine

EXAMPLE_PLAN = str(ROOT / "examples" / "evidence_plan.yaml")
K8S_PLAN = ROOT / "config" / "k8s_evidence_plan.yaml"

CHUNKS = [
    {"chunk_id": "a1", "text": "role binding grants", "source": "rbac/a.md", "document_id": "a", "authority_tier": 1},
    {"chunk_id": "a2", "text": "role verbs", "source": "rbac/a.md", "document_id": "a", "authority_tier": 2},
    {"chunk_id": "b1", "text": "secret token", "source": "secret.md", "document_id": "b"},
    {"chunk_id": "c1", "text": "audit log", "source": "audit.md", "document_id": "c", "metadata": {"kind": "audit"}},
]
RBAC = {"name": "rbac", "source": "^rbac/", "rescue_query": "role binding"}
SECRET = {"name": "secret", "source": "^secret", "rescue_query": "secret"}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return make_corpus(CHUNKS)


def a_plan(family: dict[str, Any] | None = None, **shape: Any) -> EvidencePlan:
    first = {"name": "access", "recognise": ["who may"], "families": [{**RBAC, **(family or {})}, SECRET], **shape}
    return EvidencePlan.model_validate({"name": "p", "version": "3", "shapes": [first]})


def checked(
    corpus: Corpus, plan: EvidencePlan, queries: Sequence[str] | None = None, slots: int = 5
) -> list[tuple[str, str, str]]:
    found = check_plan(plan, corpus, corpus.keyword_search(1.5, 0.75, 0.25), queries, slots)
    return [(one.severity, one.where, one.problem) for one in found]


def test_a_sound_plan_has_no_findings(corpus: Corpus):
    assert checked(corpus, a_plan(), ["who may read", "what is a pod"]) == []


@pytest.mark.parametrize(
    ("family", "severity", "where", "problem"),
    [
        ({"source": "^nowhere/"}, "error", "source", "matches no chunk of the corpus: ^nowhere/"),
        ({"source": "md"}, "warning", "source", "matches every chunk of the corpus: md"),
        ({"metadata": {"tier": "x"}}, "error", "metadata", "no chunk has the metadata key: got tier, want one of "),
        ({"metadata": {"kind": "audit"}}, "error", "", "no chunk of the corpus serves it"),
        ({"authority": [3]}, "error", "authority", "none of its 2 chunks has an authority of [3]"),
        ({"rescue_query": "secret"}, "error", "rescue_query", "finds none of its 2 chunks among the best 20: secret"),
        ({"rescue_query": "verbs", "wanted": 2}, "warning", "rescue_query", "finds 1 of 2 wanted chunks"),
        ({"wanted": 2, "depth": 1}, "warning", "rescue_query", "finds 1 of 2 wanted chunks among the best 1"),
    ],
)  # fmt: skip
def test_a_family_that_the_corpus_cannot_serve_is_found(
    corpus: Corpus, family: dict[str, Any], severity: str, where: str, problem: str
):
    (found,) = checked(corpus, a_plan(family))[:1]
    place = f"shape access, family rbac, {where}".removesuffix(", ")
    assert found[:2] == (severity, place)
    assert found[2].startswith(problem)


def test_more_wanted_than_there_is_is_no_finding(corpus: Corpus):
    assert checked(corpus, a_plan({"wanted": 9, "rescue_query": "role"})) == []


def test_more_families_than_slots_are_an_error(corpus: Corpus):
    problem = "needs 2 families, and a selection has 1 slots (blended_rerank.top_k)"
    assert checked(corpus, a_plan(), slots=1) == [("error", "shape access", problem)]


def test_a_recogniser_that_takes_every_question_is_an_error(corpus: Corpus):
    problem = "recognises every question: a pattern is found in an empty text"
    assert checked(corpus, a_plan(recognise=["x*"])) == [("error", "shape access, recognise", problem)]


def test_a_concept_that_nothing_names_is_a_warning(corpus: Corpus):
    plan = a_plan(concepts={"who": ["who"], "idle": ["x"]}, recognise=[{"of": ["who"]}])
    assert checked(corpus, plan) == [("warning", "shape access, concept idle", "no combination names it")]


def test_recognisers_that_never_or_always_hold_in_a_log_are_found(corpus: Corpus):
    plan = a_plan(
        concepts={"who": ["who"], "may": ["may"]},
        recognise=["^never$", "pods", {"of": ["who", "may"]}, {"of": ["who", "may"], "at_least": 1}],
    )
    found = checked(corpus, plan, ["who sees pods", "may see pods"])
    assert found == [
        ("warning", "shape access, recognise.0", "holds for none of 2 queries: ^never$"),
        ("error", "shape access, recognise.1", "holds for all of 2 queries: pods"),
        ("warning", "shape access, recognise.2", "holds for none of 2 queries: all of who, may"),
        ("error", "shape access, recognise.3", "holds for all of 2 queries: 1 of who, may"),
    ]


def test_questions_of_two_shapes_are_found_and_the_first_takes_them(corpus: Corpus):
    second = {"name": "tokens", "recognise": ["token"], "families": [SECRET]}
    plan = EvidencePlan.model_validate(
        {"name": "p", "version": "1", "shapes": [a_plan().shapes[0].model_dump(), second]}
    )
    queries = ["who may see tokens", "rotate a token", "who may read", "pods"]
    assert checked(corpus, plan, queries) == [(
        "warning", "shapes access, tokens",
        "recognise the same 1 queries, and access takes them, as in: who may see tokens",
    )]  # fmt: skip
    assert recognised_counts(plan, queries) == {"access": 2, "tokens": 1}


def test_an_operator_sees_what_any_group_may_see():
    corpus = make_corpus([{**chunk, "acl": [f"g{place}"]} for place, chunk in enumerate(CHUNKS)])
    search = corpus.keyword_search(1.5, 0.75, 0.25)
    assert everything(corpus).groups == ("g0", "g1", "g2", "g3")
    supply = supply_of(a_plan().shapes[0].families[0], corpus, search, everything(corpus))
    assert (supply.chunks, supply.documents, supply.tiers) == (2, 1, {"1": 1, "2": 1})
    assert checked(corpus, a_plan()) == []


def test_a_family_that_lies_under_the_text_of_another_source_is_found_by_its_copy():
    copies = [{"chunk_id": "0", "text": "role binding grants", "source": "blog.md", "authority_tier": 0}, *CHUNKS]
    corpus = make_corpus(copies)
    supply = supply_of(
        a_plan().shapes[0].families[0], corpus, corpus.keyword_search(1.5, 0.75, 0.25), everything(corpus)
    )
    assert [corpus.column("chunk_id")[row].as_py() for _, row, _ in supply.hits] == ["a1", "a2"]


def test_every_fault_of_a_file_is_told_at_once(tmp_path: Path):
    file = tmp_path / "plan.yaml"
    shape = {"name": "s", "recognise": ["x"], "families": [{"name": "f", "rescue_query": "", "source": "a"}], "more": 1}
    file.write_text(yaml.safe_dump({"name": "p", "version": 1, "shapes": [shape]}))
    plan, findings = read_plan(file)
    assert plan is None
    assert {one.where for one in findings} == {"version", "shapes.0.families.0.rescue_query", "shapes.0.more"}
    assert {one.severity for one in findings} == {"error"}
    shape = {"name": "s", "recognise": ["(x"], "families": [RBAC]}
    file.write_text(yaml.safe_dump({"name": "p", "version": "1", "shapes": [shape]}))
    plan, findings = read_plan(file)
    assert plan is None
    assert isinstance(findings[0], Finding)
    assert "does not compile" in findings[0].problem


def test_a_question_is_explained_with_what_the_corpus_has(corpus: Corpus):
    search = corpus.keyword_search(1.5, 0.75, 0.25)
    found = explain(a_plan(), "Who  may read?", corpus, search, everything(corpus))
    assert (found["question"], found["shape"], found["recognised_by"]) == (
        "Who may read?",
        "access",
        '"Who may" by who may',
    )
    rbac, secret = found["families"]
    assert (rbac["name"], rbac["chunks"], rbac["documents"], rbac["tiers"]) == ("rbac", 2, 1, {"1": 1, "2": 1})
    assert [(hit["rank"], hit["chunk_id"]) for hit in rbac["hits"]] == [(1, "a1"), (2, "a2")]
    assert (secret["tiers"], secret["found"]) == ({"none": 1}, 1)


def test_a_question_of_no_shape_is_told_what_it_lacks(corpus: Corpus):
    plan = a_plan(
        concepts={"who": ["who"], "may": ["may"], "read": ["read"]},
        recognise=[{"of": ["who", "may"]}, {"of": ["who", "may", "read"], "at_least": 3}],
    )
    found = explain(plan, "who reads", corpus, corpus.keyword_search(1.5, 0.75, 0.25), everything(corpus))
    assert (found["shape"], found["families"]) == (None, [])
    assert found["near"] == [
        {"shape": "access", "touched": {"who": "who", "read": "read"}, "lacks": ["may"], "at_least": 3}
    ]


@pytest.fixture
def plan_file(tmp_path: Path) -> Callable[..., str]:
    """Writes the example's plan with one family changed."""

    def write(**changed: Any) -> str:
        tree = yaml.safe_load(Path(EXAMPLE_PLAN).read_text("utf-8"))
        tree["shapes"][0]["families"][0] |= changed
        file = tmp_path / "plan.yaml"
        file.write_text(yaml.safe_dump(tree), "utf-8")
        return str(file)

    return write


def test_the_bundled_plan_fits_the_bundled_corpus_and_log(dartflow: CommandLine):
    status, out, _ = dartflow("plan", "check", EXAMPLE_PLAN, "--queries", QUERIES)
    assert status == 0
    assert "0 errors" in out
    found = dartflow.json("plan", "check", EXAMPLE_PLAN, "--queries", QUERIES)
    assert (found["plan"], found["errors"]) == ("example", 0)
    assert all(count > 0 for count in found["recognised"].values())


def test_a_plan_with_errors_ends_with_status_one(dartflow: CommandLine, plan_file: Callable[..., str]):
    status, out, _ = dartflow("plan", "check", plan_file(source="^nowhere/"))
    assert status == 1
    assert "matches no chunk of the corpus" in out
    assert "1 errors" in out or "2 errors" in out
    status, out, _ = dartflow("plan", "check", plan_file(depth="deep"), "--json")
    found = json.loads(out)
    assert status == 1
    assert (found["plan"], found["errors"], found["findings"][0]["where"]) == (None, 1, "shapes.0.families.0.depth")


def test_a_plan_file_that_is_not_there_is_refused(dartflow: CommandLine, tmp_path: Path):
    status, _, err = dartflow("plan", "check", str(tmp_path / "none.yaml"))
    assert status == 2
    assert "the evidence plan cannot be read" in err


def test_explain_shows_shape_families_and_hits(dartflow: CommandLine):
    question = "a customer disputes a charge and wants a refund"
    status, out, _ = dartflow("plan", "explain", question, "--plan", EXAMPLE_PLAN)
    assert status == 0
    assert "shape: disputed_charge_refund" in out
    for family in ("policy", "procedure", "approval"):
        assert family in out
    found = dartflow.json("plan", "explain", question, "--plan", EXAMPLE_PLAN)
    assert [family["name"] for family in found["families"]] == ["policy", "procedure", "approval"]
    assert all(family["hits"] for family in found["families"])


def test_explain_sees_with_the_groups_that_it_is_given(dartflow: CommandLine):
    question = "my account was hijacked"
    everyone = dartflow.json("plan", "explain", question, "--plan", EXAMPLE_PLAN)
    nobody = dartflow.json("plan", "explain", question, "--plan", EXAMPLE_PLAN, "--group", "nobody")
    chunks = [[family["chunks"] for family in found["families"]] for found in (everyone, nobody)]
    assert chunks[0][2] > chunks[1][2]  # incidents are restricted
    assert all(few <= many for many, few in zip(*chunks, strict=True))


def test_a_plain_question_passes_through_and_is_said_so(dartflow: CommandLine):
    status, out, _ = dartflow("plan", "explain", "what is a hub", "--plan", EXAMPLE_PLAN)
    assert status == 0
    assert "no shape of the plan recognises the question" in out


def test_explain_without_a_plan_is_refused(dartflow: CommandLine):
    status, _, err = dartflow("plan", "explain", "what is a hub")
    assert status == 2
    assert "names no evidence plan" in err


def test_the_documentation_plan_knows_composite_questions_and_leaves_plain_ones(shared_data: Path):
    plan, findings = read_plan(K8S_PLAN)
    assert plan is not None
    assert findings == []
    composite = shared_data / "k8s_docs" / "composite_queries.jsonl"
    for file, most_missed in ((composite, 0.0), (ROOT / "bench" / "family_wordings.jsonl", 0.15)):
        rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        taken = {row["query_id"]: recognised_counts(plan, [row["text"]]) for row in rows}
        shapes = {name: next((shape for shape, count in found.items() if count), None) for name, found in taken.items()}
        missed = [shapes[row["query_id"]] != row["shape"] for row in rows if row["shape"]]
        assert sum(missed) <= most_missed * len(missed)
        assert all(shapes[row["query_id"]] is None for row in rows if row["shape"] is None)


def test_no_sentence_of_the_measured_questions_stands_in_the_plan(shared_data: Path):
    text = K8S_PLAN.read_text("utf-8").casefold()
    rows = (shared_data / "k8s_docs" / "composite_queries.jsonl").read_text("utf-8").splitlines()
    for question in (json.loads(row)["text"].casefold().split() for row in rows):
        runs = (" ".join(question[start : start + 5]) for start in range(len(question) - 4))
        assert not any(run in text for run in runs)


def test_the_page_tells_what_was_measured_and_every_chosen_passage_was_judged():
    results = json.loads(RESULTS.read_text("utf-8"))
    text = page_text(results)
    assert text in (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    assert "not judged" not in text
