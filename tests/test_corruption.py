"""Corruption: whatever happens to a file of a store, it is refused by name, or was not used; no wrong row comes out."""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import flows.engine
from checkpoints.corpora import current_snapshot_id, load_snapshot
from checkpoints.manifests import manifest_path, manifests
from checkpoints.run import create_run, load_plan, open_letters
from checkpoints.store import Store
from checkpoints.verdict import verdict
from checkpoints.verify import verify
from contracts.errors import CorruptArtifactError, DartflowError, MissingArtifactError
from contracts.manifest import RunPlan
from corpus.files import snapshot_files
from flows.engine import Session, plain_step
from flows.export import stage_tables
from flows.planning import open_query_log, plan_rerun
from flows.progress import no_progress
from flows.resources import Resources
from flows.settings import Settings, validated
from flows.snapshots import make_snapshot
from stages.pipeline import find_stage
from tests.small import planned, session_of, small_settings, small_store

RUN, AGAIN = "nightly", "again"
FAULTY = "rrf_merge"  # the stage that takes a query out
RERUN_FROM = "blended_rerank"
COMPUTED_AGAIN = ("blended_rerank", "crag_grading", "context")

# What a file of a store is.
MANIFEST, PARQUET, LETTERS, PLAN = "manifest", "parquet", "dead letters", "run.json"
SNAPSHOT, SNAPSHOT_FILE, POINTER = "snapshot.json", "snapshot file", "pointer"
RECORDS = (MANIFEST, PLAN, SNAPSHOT, POINTER)


@dataclass(frozen=True)
class File:
    """A file of the store that something stands on; `artifact` is what verify calls it."""

    path: str
    sort: str
    artifact: str = ""
    stage: str = ""
    part: int = 0


@dataclass(frozen=True)
class Case:
    """One damage: what is put where, None for nothing at all."""

    number: int
    kind: str
    file: File
    damage: str
    puts: Mapping[str, bytes | None]

    @property
    def gone(self) -> bool:
        return self.kind == "missing"

    def __str__(self) -> str:
        return f"{self.number:4}  {self.kind:17}  {self.file.path}  {self.damage}"


@dataclass
class Damaged:
    """A store on disk whose files are damaged, and put back."""

    folder: Path
    store: Store
    settings: Settings
    plan: RunPlan
    poison: str
    files: list[File] = field(repr=False)
    whole: Mapping[str, bytes] = field(repr=False)

    def put(self, *cases: Case) -> None:
        for case in cases:
            for path, data in case.puts.items():
                self._write(path, data)

    def restore(self, *cases: Case) -> None:
        for case in cases:
            for path in case.puts:
                self._write(path, self.whole.get(path))

    def _write(self, path: str, data: bytes | None) -> None:
        if data is None:
            (self.folder / path).unlink()
        else:
            (self.folder / path).write_bytes(data)

    def read(self, reader: str, stage: str = "") -> Any:
        """What a reader gets, from nothing but the store."""
        if reader == "pointer":
            return current_snapshot_id(self.store)
        if reader == "corpus":
            return snapshot_files(Resources(self.store, self.settings, self.plan.snapshot_id).corpus)
        plan = load_plan(self.store, RUN)
        if reader == "rows":
            return pa.concat_tables(stage_tables(self.store, plan, stage))
        if reader == "verdict":
            return verdict(self.store, plan).model_dump()
        if reader == "letters":
            return open_letters(self.store, plan)
        return self._rerun(plan)

    def _rerun(self, parent: RunPlan) -> pa.Table:
        """The contexts of a rerun that borrows most of the run, and computes the rest with the corpus."""
        try:
            settings = validated(parent.settings)
            plan = plan_rerun(self.store, parent, settings, from_stage=RERUN_FROM, run_id=AGAIN)
            create_run(self.store, plan)
            with faulty(self.poison):
                Session(self.store, plan, settings).execute()
            return pa.concat_tables(stage_tables(self.store, plan, "context"))
        finally:
            shutil.rmtree(self.folder / "runs" / AGAIN, ignore_errors=True)


@contextmanager
def faulty(poison: str) -> Iterator[None]:
    """A stage that cannot take one of the queries."""

    def find(name: str):
        stage = find_stage(name)

        def run(**given):
            if any(poison in table["query_id"].to_pylist() for table in given.values() if isinstance(table, pa.Table)):
                raise ValueError("cannot be fused")
            return stage.run(**given)

        return dataclasses.replace(stage, run=run) if name == FAULTY else stage

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flows.engine, "find_stage", find)
        yield


def finished_run(folder: Path, store: Store, *assignments: str) -> tuple[RunPlan, str]:
    """A run of three shards; the log has a bad line, and a stage takes out the query that is given back."""
    plan = planned(store, folder, RUN, *assignments)
    log = open_query_log(folder / "queries.jsonl", validated(plan.settings), load_snapshot(store, plan.snapshot_id))
    poison = log.queries["query_id"][5].as_py()
    with faulty(poison):
        assert session_of(store, plan).execute().verdict == "partial"
    assert [letter.stage for letter in open_letters(store, plan)] == ["log_lines", FAULTY]
    return plan, poison


def files_of(store: Store, plan: RunPlan) -> list[File]:
    """Everything that a run stands on, from its plan and manifests."""
    corpus = f"corpora/{plan.snapshot_id}"
    files = [File(f"runs/{RUN}/run.json", PLAN), File("corpora/current.json", POINTER)]
    files.append(File(f"{corpus}/snapshot.json", SNAPSHOT, plan.snapshot_id))
    names = [file.name for file in load_snapshot(store, plan.snapshot_id).files]
    files += [File(f"{corpus}/{name}", SNAPSHOT_FILE, f"{plan.snapshot_id}/{name}") for name in names]
    for entry in plan.stages:
        for part, manifest in zip(entry.shards, manifests(store, plan, entry), strict=True):
            place = (f"{entry.stage}/part-{part:05d}", entry.stage, part)
            files.append(File(manifest_path(RUN, entry.number, entry.stage, part), MANIFEST, *place))
            files.append(File(manifest.file, PARQUET, *place))
            if manifest.dead_letters is not None:
                files.append(File(manifest.dead_letters.file, LETTERS, *place))
    return files


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> Damaged:
    folder = tmp_path_factory.mktemp("corruption")
    store = small_store(folder)
    plan, poison = finished_run(folder, store)
    files, whole = files_of(store, plan), bytes_of(folder / "store")
    return Damaged(folder / "store", store, small_settings(folder), plan, poison, files, whole)


@pytest.fixture(scope="module")
def older(tmp_path_factory) -> tuple[list[File], dict[str, bytes]]:
    """A run of the same name over the same corpus, but of another log and under other settings."""
    folder = tmp_path_factory.mktemp("older")
    store = small_store(folder)
    log = folder / "queries.jsonl"
    log.write_text(log.read_text().replace("option", "choice"))
    plan, _ = finished_run(folder, store, "log_normal.sigma=0.2", "sparse_search.k1=1.2")
    return files_of(store, plan), bytes_of(folder / "store")


@pytest.fixture(scope="module")
def other_snapshot(tmp_path_factory) -> dict[str, bytes]:
    """The files of another snapshot by name."""
    folder = tmp_path_factory.mktemp("other")
    small_store(folder)
    corpus = folder / "corpus.jsonl"
    corpus.write_text(corpus.read_text().replace("steps", "stages"))
    snapshot = make_snapshot(
        corpus, small_settings(folder).model_copy(update={"store": str(folder / "new")}), plain_step, no_progress
    )
    return bytes_of(folder / "new" / "corpora" / snapshot.snapshot_id)


def flipped(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    byte, bit = chance.randrange(len(data)), chance.randrange(8)
    return data[:byte] + bytes([data[byte] ^ 1 << bit]) + data[byte + 1 :], f"bit {bit} of byte {byte} of {len(data)}"


def truncated(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    length = chance.choice((0, len(data) - 1, chance.randrange(len(data))))
    return data[:length], f"cut to {length} of {len(data)} bytes"


def blanked(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """A stretch of zeros, as of a block that never reached the disk."""
    start, end = sorted((chance.randrange(len(data)), chance.randrange(len(data)) + 1))
    return data[:start] + bytes(end - start) + data[end:], f"bytes {start} to {end} of {len(data)} are zero"


def extended(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    more = chance.randbytes(chance.choice((1, 8, 100)))
    return data + more, f"{len(more)} bytes behind the {len(data)}"


def missing(data: bytes, chance: random.Random) -> tuple[None, str]:
    return None, "gone"


SPOIL: dict[str, Callable[[bytes, random.Random], tuple[bytes | None, str]]] = {
    "bit flip": flipped,
    "truncated": truncated,
    "blanked": blanked,
    "extended": extended,
    "missing": missing,
}
# Kind, file, damage in words, and what is put where.
Made = tuple[str, File, str, Mapping[str, bytes | None]]


def spoilt(damaged: Damaged) -> Iterator[Made]:
    """Every file, by itself, in all ways that need no other file."""
    for number, file in enumerate(damaged.files):
        for turn, kind in enumerate(("bit flip", *SPOIL)):
            data, words = SPOIL[kind](damaged.whole[file.path], random.Random(10 * number + turn))
            yield kind, file, words, {file.path: data}


def swapped(damaged: Damaged) -> Iterator[Made]:
    """A file in the place of another of its sort: of another shard or another stage; and one record for another."""
    places = {(file.sort, file.artifact): file.path for file in damaged.files}
    for number, file in enumerate(damaged.files):
        chance = random.Random(number)
        others = [other for other in damaged.files if other.sort == file.sort and other != file]
        shards = [other for other in others if file.stage and other.stage == file.stage]
        # Of a snapshot, which has no stages, any other file.
        for kind, found in (("other shard", shards), ("other stage", [one for one in others if one not in shards])):
            if found:
                other = chance.choice(found)
                words, mine = f"is {other.path}", {file.path: damaged.whole[other.path]}
                yield kind, file, words, mine
                if file.sort == MANIFEST:
                    theirs = damaged.whole[places[PARQUET, other.artifact]]
                    yield f"{kind}, both", file, words, mine | {places[PARQUET, file.artifact]: theirs}
        if file.sort in RECORDS:
            record = chance.choice([one for one in damaged.files if one.sort in RECORDS])
            yield "other record", file, f"is {record.path}", {file.path: damaged.whole[record.path]}


def put_back(
    damaged: Damaged, older: tuple[list[File], dict[str, bytes]], snapshot: dict[str, bytes]
) -> Iterator[Made]:
    """Files of an earlier run of the same name, alone and together; and of another snapshot."""
    files, whole = older
    earlier = {(file.sort, file.artifact): file.path for file in files}
    for file in damaged.files:
        if file.sort in {SNAPSHOT, SNAPSHOT_FILE}:
            yield "older", file, "of another corpus", {file.path: snapshot[file.path.rsplit("/", 1)[-1]]}
        elif file.sort != POINTER:  # an earlier pointer is a pointer: it names a snapshot that is there and whole
            yield "older", file, "of an earlier run", {file.path: whole[earlier[file.sort, file.artifact]]}
        if file.sort == MANIFEST:
            mine = {file.path: whole[earlier[MANIFEST, file.artifact]]}
            named = [earlier[sort, file.artifact] for sort in (PARQUET, LETTERS) if (sort, file.artifact) in earlier]
            words = "of an earlier run, with what it names"
            yield "older, both", file, words, mine | {path: whole[path] for path in named}


@pytest.fixture(scope="module")
def cases(damaged, older, other_snapshot) -> list[Case]:
    made = [*spoilt(damaged), *swapped(damaged), *put_back(damaged, older, other_snapshot)]
    return [
        Case(number, kind, file, words, puts)
        for number, (kind, file, words, puts) in enumerate(made)
        # Equal bytes are no damage.
        if puts[file.path] != damaged.whole[file.path]
    ]


def test_the_cases_are_many_and_of_every_kind(cases):
    kinds, sorts = Counter(case.kind for case in cases), Counter(case.file.sort for case in cases)
    assert len(cases) >= 500
    assert set(kinds) == {
        "bit flip", "truncated", "blanked", "extended", "missing", "other shard", "other shard, both", "other stage",
        "other stage, both", "other record", "older", "older, both",
    }  # fmt: skip
    assert min(kinds.values()) >= 25, kinds
    assert kinds["bit flip"] >= 150
    assert set(sorts) == {MANIFEST, PARQUET, LETTERS, PLAN, SNAPSHOT, SNAPSHOT_FILE, POINTER}
    assert min(sorts[MANIFEST], sorts[PARQUET]) >= 200, sorts


def told(case: Case, error: DartflowError) -> bool:
    """Whether an error names what is damaged."""
    if not isinstance(error, CorruptArtifactError | MissingArtifactError):
        return False
    if case.file.path in str(error):
        return True
    if case.gone and case.file.sort == MANIFEST:  # the commit itself: there is nothing that could be corrupt
        return error.where == f"run {RUN}, stage {case.file.stage}" and error.got == f"no part {case.file.part}"
    if case.gone and case.file.sort == PLAN:
        return error.problem == "has no such run" and error.got == RUN
    # With run.json of an earlier run, the manifests are the ones that seem to be of another: both are named by it.
    return case.file.sort == PLAN and error.problem == "was made under another plan than the run's"


def must_be_refused(case: Case, reader: str) -> bool:
    """Whether a reader stands on the damaged file."""
    sort, stage = case.file.sort, case.file.stage
    if sort == POINTER:
        return reader == "pointer"
    if sort in {SNAPSHOT, SNAPSHOT_FILE}:
        return reader in {"corpus", "rerun"}
    if sort == PLAN:
        return reader not in {"pointer", "corpus"}
    if reader == "rows":
        return sort != LETTERS
    if reader == "rerun":
        return stage not in COMPUTED_AGAIN and not (sort == MANIFEST and case.gone)
    return (sort == MANIFEST and not case.gone) or (reader, sort) == ("letters", LETTERS)


def expected(case: Case, reader: str, original: Any) -> Any:
    """What a reader may give without a word: the original; less the part whose commit is gone, which is told."""
    if not (case.gone and case.file.sort == MANIFEST):
        return original
    if reader == "letters":
        return [one for one in original if (one.stage, one.shard) != (case.file.stage, case.file.part)]
    return original


def problem(damaged: Damaged, case: Case, reader: str, stage: str, original: Any) -> str | None:
    """What is wrong with what a reader makes of a damage; None when it refuses it or did not need the file."""
    mine = reader != "rows" or stage == case.file.stage or case.file.sort == PLAN
    try:
        got = damaged.read(reader, stage)
    except DartflowError as error:
        return None if told(case, error) else f"does not name it: {type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is no sentence
        return f"breaks: {type(error).__name__}: {error}"
    if mine and must_be_refused(case, reader):
        return "takes it for good"
    if reader == "verdict" and case.gone and case.file.sort == MANIFEST:
        interrupted = got["verdict"] == "interrupted" and f"{case.file.stage} (1)" in got["because"]
        return None if interrupted else f"says {got['verdict']}: {got['because']}"
    return None if got == expected(case, reader, original) else "gives other rows"


def problems(damaged: Damaged, cases: list[Case], readers: Callable[[Case], list[tuple[str, str]]]) -> list[str]:
    """A line for each case that a reader fails on."""
    originals: dict[tuple[str, str], Any] = {}
    wrong = []
    for case in cases:
        chosen = dict.fromkeys(readers(case))
        for reader in chosen:
            if reader not in originals:
                originals[reader] = damaged.read(*reader)
        damaged.put(case)
        found = {reader: problem(damaged, case, *reader, originals[reader]) for reader in chosen}
        damaged.restore(case)
        wrong += [f"{case}  {' '.join(reader)}: {told}" for reader, told in found.items() if told is not None]
    return wrong


def test_every_reader_refuses_a_damage_by_name_or_gives_the_original(damaged, cases):
    stages = sorted({file.stage for file in damaged.files if file.stage})

    def readers(case: Case) -> list[tuple[str, str]]:
        any_stage = stages[case.number % len(stages)]
        if case.file.sort in {SNAPSHOT, SNAPSHOT_FILE, POINTER}:
            return [("pointer", ""), ("corpus", ""), ("rows", any_stage)]
        by_turns = [("rows", any_stage), ("verdict", ""), ("letters", "")]
        standing = [one for one in by_turns if must_be_refused(case, one[0])]
        return [("rows", case.file.stage or any_stage), by_turns[case.number % 3], *standing]

    wrong = problems(damaged, cases, readers)
    assert not wrong, "\n".join(["", *wrong])


def test_a_rerun_borrows_nothing_that_is_damaged(damaged, cases):
    """A case of each kind of damage for each sort of file, and some in what is computed again."""
    alike: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        if case.file.stage not in COMPUTED_AGAIN:
            alike.setdefault((case.kind, case.file.sort), []).append(case)
    chosen = [some[len(some) // 2] for some in alike.values()]
    chosen += [case for case in cases if case.file.stage == "context" and case.file.part == 1][::8]
    assert len(chosen) >= 50
    wrong = problems(damaged, chosen, lambda case: [("rerun", "")])
    assert not wrong, "\n".join(["", *wrong])


def rounds(cases: list[Case]) -> Iterator[list[Case]]:
    """Cases that can be there at the same time: no two of one artifact, and the corpus in one file alone."""
    waiting = list(cases)
    while waiting:
        chosen: dict[str, Case] = {}
        left = []
        for case in waiting:
            place = case.file.artifact if case.file.stage else "corpus"
            if place in chosen:
                left.append(case)
            else:
                chosen[place] = case
        yield list(chosen.values())
        waiting = left


def test_verify_finds_every_damage_names_it_and_blames_nothing_else(damaged, cases):
    plan = load_plan(damaged.store, RUN)
    names = dict(verify(damaged.store, plan))
    assert set(names.values()) == {"ok"}
    wrong = []
    for together in rounds([case for case in cases if case.file.sort not in {PLAN, POINTER}]):
        damaged.put(*together)
        found = dict(verify(damaged.store, plan))
        damaged.restore(*together)
        for case in together:
            finding = found.pop(case.file.artifact)
            committed_not = case.gone and case.file.sort == MANIFEST and finding == "not committed"
            if finding == "ok" or not (committed_not or case.file.path in f"corpora/{case.file.artifact} {finding}"):
                wrong.append(f"{case}  verify: {finding}")
        wrong += [
            f"{together[0]} and others  verify blames {name}: {told}" for name, told in found.items() if told != "ok"
        ]
    assert not wrong, "\n".join(["", *wrong])


def test_verify_under_the_plan_of_an_earlier_run_finds_no_artifact_good(damaged, cases):
    (case,) = [case for case in cases if case.file.sort == PLAN and case.kind == "older"]
    damaged.put(case)
    plan = load_plan(damaged.store, RUN)
    found = {name: finding for name, finding in verify(damaged.store, plan) if plan.snapshot_id not in name}
    damaged.restore(case)
    assert len(found) > 30
    assert all("was made under another plan than the run's" in finding for finding in found.values()), found


def test_the_store_is_whole_again(damaged):
    """The cases before stood each on a store that was damaged in nothing else."""
    assert bytes_of(damaged.folder) == damaged.whole
