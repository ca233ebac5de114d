"""Human review: what people are asked, how their decisions are read and kept, and the run that is graded with them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints.decisions import digest_in, keep_decisions, load_decisions
from checkpoints.run import load_plan
from checkpoints.store import Store
from contracts.errors import CorruptArtifactError, InputError, MissingArtifactError
from flows.review import COLUMNS
from models.file_grader import FileGrader, decisions_digest, form_of, model_id_with, read_decisions
from models.grader import Pair
from models.outcomes import Spending
from tests.example import RUN, manifests_of, table_of


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of an exported file."""
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def exported(dartflow, path: Path, run: str = RUN) -> list[dict[str, Any]]:
    status, _, err = dartflow("review", "export", run, str(path))
    assert status == 0, err
    return lines_of(path)


def decided(path: Path, lines: list[dict[str, Any]], *decisions: str) -> Path:
    """A JSONL file of the first lines with these decisions; the other lines decide nothing."""
    filled = [{**line, "decision": decision} for line, decision in zip(lines, decisions, strict=False)]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*filled, *lines[len(decisions) :]]), encoding="utf-8")
    return path


def imported(dartflow, file: Path, run: str = RUN) -> dict[str, Any]:
    return dartflow.json("review", "import", run, str(file), "--without-prefect")


def graded_of(store: Path, run: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Every graded passage of a run."""
    rows = table_of(store, run, "crag_grading").to_pylist()
    return {(row["query_id"], one["chunk_id"]): one for row in rows for one in row["candidates"]}


def test_every_ambiguous_passage_is_asked_and_no_other(dartflow, tmp_path):
    lines = exported(dartflow, tmp_path / "review.jsonl")
    graded = graded_of(dartflow.store, RUN)
    ambiguous = {pair for pair, one in graded.items() if one["grade"] == "ambiguous"}
    assert {(line["query_id"], line["chunk_id"]) for line in lines} == ambiguous
    assert len(lines) == len(ambiguous) > 50
    queries = {row["query_id"]: row for row in table_of(dartflow.store, RUN, "queries").to_pylist()}
    for line in lines:
        assert tuple(line) == COLUMNS
        assert line["query"] == queries[line["query_id"]]["text"]
        assert line["score"] == graded[line["query_id"], line["chunk_id"]]["score"]
        assert (line["grade"], line["decision"]) == ("ambiguous", "")
        assert line["text"]
        assert line["source"]


def test_what_matters_most_comes_first(dartflow, tmp_path):
    lines = exported(dartflow, tmp_path / "review.jsonl")
    actions = {row["query_id"]: row["action"] for row in table_of(dartflow.store, RUN, "crag_grading").to_pylist()}
    asked = {row["query_id"]: row["occurrences"] for row in table_of(dartflow.store, RUN, "queries").to_pylist()}
    graded = graded_of(dartflow.store, RUN)
    keys = []
    for line in lines:
        one = graded[line["query_id"], line["chunk_id"]]
        correct = actions[line["query_id"]] == "correct"
        keys.append((correct, -asked[line["query_id"]], line["query_id"], not one["kept"], one["rank"]))
    assert keys == sorted(keys)
    assert {key[0] for key in keys} == {False, True}
    assert min(key[1] for key in keys) < -1


def test_csv_and_jsonl_say_the_same(dartflow, tmp_path):
    plain, table = exported(dartflow, tmp_path / "a.jsonl"), exported(dartflow, tmp_path / "a.csv")
    assert table == [{name: str(value) for name, value in line.items()} for line in plain]


def test_decisions_make_a_new_run_from_crag_grading_on(dartflow, tmp_path):
    lines = exported(dartflow, tmp_path / "review.jsonl")
    file = decided(tmp_path / "done.jsonl", lines, "correct", " Incorrect ", "ambiguous")
    found = imported(dartflow, file)
    run = found["run_id"]
    assert run.startswith(f"{RUN}-review-")
    computed = {stage["stage"] for stage in found["stages"] if stage["computed"]}
    assert computed == {"crag_grading", "context"}
    graded = graded_of(dartflow.store, run)
    first, second, third = ((line["query_id"], line["chunk_id"]) for line in lines[:3])
    for pair, grade in ((first, "correct"), (second, "incorrect"), (third, "ambiguous")):
        assert (graded[pair]["grade"], graded[pair]["graded_by"]) == (grade, "file")
        assert graded[pair]["score"] == graded_of(dartflow.store, RUN)[pair]["score"]
    assert {one["graded_by"] for pair, one in graded.items() if pair not in {first, second, third}} == {"score"}
    actions = {row["query_id"]: row["action"] for row in table_of(dartflow.store, run, "crag_grading").to_pylist()}
    assert actions[first[0]] == "correct"
    contexts = table_of(dartflow.store, run, "context").to_pylist()
    shown = {(row["query_id"], one["chunk_id"]): one for row in contexts for one in row["candidates"]}
    assert shown[first]["graded_by"] == "file"
    assert second not in shown or shown[second]["restored"]


def test_the_decisions_lie_in_the_store_and_their_digest_is_in_the_key(dartflow, tmp_path):
    lines = exported(dartflow, tmp_path / "review.jsonl")
    run = imported(dartflow, decided(tmp_path / "done.jsonl", lines, "correct"))["run_id"]
    store = Store(str(dartflow.store))
    plan = load_plan(store, run)
    file = plan.settings["grader"]["file"]
    pair = (lines[0]["query_id"], lines[0]["chunk_id"])
    assert load_decisions(store, file) == {pair: "correct"}
    (key,) = {manifest.key_parts["grader"] for manifest in manifests_of(dartflow.store, run, "crag_grading")}
    assert key == f"decisions-{digest_in(file)}"
    (before,) = {manifest.key_parts["grader"] for manifest in manifests_of(dartflow.store, RUN, "crag_grading")}
    assert before == "score"


def test_importing_twice_gives_the_same_run(dartflow, tmp_path):
    lines = exported(dartflow, tmp_path / "review.jsonl")
    first = imported(dartflow, decided(tmp_path / "one.jsonl", lines, "correct", "incorrect"))
    before = {path: path.read_bytes() for path in dartflow.store.rglob("part-*") if path.is_file()}
    # The same decisions in another order and another form.
    with (tmp_path / "two.csv").open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["decision", "chunk_id", "query_id", "note"])
        for decision, line in (("INCORRECT", lines[1]), ("correct", lines[0])):
            writer.writerow([decision, line["chunk_id"], line["query_id"], "two\nlines"])
    again = imported(dartflow, tmp_path / "two.csv")
    assert again["run_id"] == first["run_id"]
    assert {path: path.read_bytes() for path in dartflow.store.rglob("part-*") if path.is_file()} == before


def test_a_second_review_keeps_the_decisions_of_the_first(dartflow, tmp_path):
    lines = exported(dartflow, tmp_path / "review.jsonl")
    first = imported(dartflow, decided(tmp_path / "one.jsonl", lines, "ambiguous", "incorrect"))["run_id"]
    left = exported(dartflow, tmp_path / "left.jsonl", first)
    pairs = [(line["query_id"], line["chunk_id"]) for line in left]
    assert not {(line["query_id"], line["chunk_id"]) for line in lines[:2]} & set(pairs), "nobody is asked twice"
    # One more, and one that is changed.
    mended = [{**lines[1], "decision": "correct"}, {**left[0], "decision": "correct"}]
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(line) + "\n" for line in mended))
    second = imported(dartflow, tmp_path / "two.jsonl", first)["run_id"]
    graded = graded_of(dartflow.store, second)
    by_file = {pair: one["grade"] for pair, one in graded.items() if one["graded_by"] == "file"}
    named = [(line["query_id"], line["chunk_id"]) for line in lines[:2]]
    assert by_file == {named[0]: "ambiguous", named[1]: "correct", pairs[0]: "correct"}


def test_status_says_who_graded_and_inspect_shows_it_by_passage(dartflow, tmp_path):
    lines = exported(dartflow, tmp_path / "review.jsonl")
    run = imported(dartflow, decided(tmp_path / "done.jsonl", lines, "correct"))["run_id"]
    total = len(graded_of(dartflow.store, run))
    assert f"passages graded by file 1, score {total - 1}" in dartflow.json("status", run)["notes"]
    _, out, _ = dartflow("inspect", run, "context", lines[0]["query_id"])
    assert "graded_by" in out
    assert "file" in out


def test_lines_that_cannot_be_used_are_named_and_nothing_is_taken_over(dartflow, tmp_path):
    lines = exported(dartflow, tmp_path / "review.jsonl")
    wrong = [
        {**lines[0], "decision": "yes"},
        {**lines[1], "decision": "correct", "chunk_id": "nowhere"},
        {**lines[2], "decision": "correct", "query_id": "nobody"},
    ]
    file = tmp_path / "wrong.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in wrong))
    status, _, err = dartflow("review", "import", RUN, str(file), "--without-prefect")
    assert (status, "line 1: decision 'yes'" in " ".join(err.split())) == (1, True)
    file.write_text("".join(json.dumps(line) + "\n" for line in wrong[1:]))
    _, _, err = dartflow("review", "import", RUN, str(file), "--without-prefect")
    said = " ".join(err.split())
    assert f"line 1: no passage nowhere of query {lines[1]['query_id']}; line 2: no query nobody" in said
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "decides nothing" in dartflow("review", "import", RUN, str(file), "--without-prefect")[2]
    assert not (dartflow.store / "decisions").exists()
    assert {path.name for path in (dartflow.store / "runs").iterdir()} == {RUN}


def test_a_file_of_grades_may_come_with_the_first_run(dartflow, tmp_path):
    lines = exported(dartflow, tmp_path / "review.jsonl")
    file = decided(tmp_path / "grades.jsonl", lines, "correct", "incorrect")
    words = ("rerun", RUN, "--set", f"grader.file={file}", "--run-id", "by-file", "--without-prefect")
    assert dartflow(*words)[0] == 3
    by_import = imported(dartflow, file)["run_id"]
    keys = [
        [manifest.key for manifest in manifests_of(dartflow.store, run, "crag_grading")]
        for run in ("by-file", by_import)
    ]
    assert keys[0] == keys[1], "the content counts, not the file"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"query_id": "q", "chunk_id": "c", "decision": "maybe"}\n', "line 1: decision 'maybe'"),
        ("a.jsonl", '\n{"query_id": "q", "chunk_id": "c"}\n', "line 2: no decision"),
        ("a.jsonl", "[1]\nnot json\n", "line 1: no object with named values; line 2: no object"),
        ("a.jsonl", '{"query_id": 7, "chunk_id": "", "decision": "correct"}', "line 1: query_id 7 and chunk_id ''"),
        ("a.jsonl", '{"query_id": "q", "chunk_id": "c", "decision": ["correct"]}', r"line 1: decision \['correct'\]"),
        ("a.csv", 'query_id,chunk_id,decision,text\nq,c,correct,"a\nb"\nq,d,corect,\n', "line 4: decision 'corect'"),
        (
            "a.csv",
            "query_id,chunk_id,decision\nq,c,correct\nq,c,incorrect\n",
            "line 3: incorrect, but line 2 says corr",
        ),
        ("a.csv", "query_id,chunk_id\nq,c\n", "line 2: no decision"),
        ("a.csv", 'query_id,chunk_id,decision\nq,c,"corr', "line 2: is no CSV"),
        ("a.txt", "", "got txt, want .jsonl or .csv"),
    ],
)
def test_a_line_that_is_no_decision_is_named(name, text, said):
    with pytest.raises(InputError, match=said):
        read_decisions(text.encode(), name)


def test_of_many_bad_lines_the_first_are_named():
    text = "query_id,chunk_id,decision\n" + "".join(f"q,c{n},no\n" for n in range(9))
    with pytest.raises(InputError, match="line 6: decision 'no'; and 4 more"):
        read_decisions(text.encode(), "a.csv")


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(InputError, match="is not in UTF-8: got byte 0xff at 0"):
        read_decisions(b"\xff\xfe", "a.csv")


def test_what_decides_nothing_is_passed_over():
    text = '{"query_id": "q", "chunk_id": "c", "decision": null}\n{"query_id": "q", "chunk_id": "d", "decision": " "}\n'
    assert read_decisions(text.encode(), "a.jsonl") == []
    assert form_of("A.CSV") == "csv"


def test_the_digest_is_of_the_content():
    one = {("q", "a"): "correct", ("q", "b"): "incorrect"}
    assert decisions_digest(one) == decisions_digest(dict(reversed(one.items())))
    others = [{("q", "a"): "correct"}, {**one, ("q", "b"): "correct"}, {("q", "a"): "correct", ("b", "q"): "incorrect"}]
    assert len({decisions_digest(one), *map(decisions_digest, others)}) == 4


def test_kept_decisions_that_were_changed_are_refused(tmp_path):
    store = Store(str(tmp_path))
    path = keep_decisions(store, {("q", "a"): "correct"})
    other = keep_decisions(store, {("q", "a"): "incorrect"})
    assert load_decisions(store, path) == {("q", "a"): "correct"}
    for data in (store.read(other), b"nothing", store.read(path)[:-1]):
        store.write(path, data)
        with pytest.raises(CorruptArtifactError, match="is not what was kept"):
            load_decisions(store, path)
    with pytest.raises(MissingArtifactError):
        load_decisions(store, f"decisions/{'0' * 32}.parquet")


def test_the_grader_behind_is_asked_of_the_others_alone_and_its_calls_are_counted():
    class Behind:
        model_id = "behind"

        def __init__(self, spending: Spending | None = None) -> None:
            self.spending = spending

        def grade(self, pairs):
            if self.spending is not None:
                self.spending.note("ok", times=len(pairs))
            return ["ambiguous"] * len(pairs)

        def counting(self, spending: Spending) -> Behind:
            return Behind(spending)

    decisions = {("q", "a"): "correct"}
    pairs = [Pair("q", name, "question", "text") for name in "ab"]
    spending = Spending()
    grader = FileGrader(decisions, Behind()).counting(spending)
    assert grader.grade(pairs) == ["correct", "ambiguous"]
    assert spending.calls == {"ok": 1}
    assert grader.model_id == model_id_with(decisions_digest(decisions), "behind")
    assert FileGrader(decisions).grade(pairs) == ["correct", None]
