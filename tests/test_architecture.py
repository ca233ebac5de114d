"""Architecture: the house rules that hold for the checkout as a whole."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PACKAGES = sorted(
    folder.parent.name for folder in ROOT.glob("*/__init__.py") if folder.parent.name not in {"tests", "bench"}
)
PREFECT_MODULES = {"flows/rerank.py", "flows/ingest.py"}

# Some letters stand in brackets, so that this file passes its own checks.
MACHINE_PATH = re.compile(r"(?<![\w./}~])/(?:work|root|tmp/work)(?![\w-])")
REGISTRY = re.compile(
    r"index-url[= ]+['\"]?\w+:|find-links[= ]+['\"]?\w+:|://[^\s'\"]*/simple\b|\b(?:[a]rtifactory|[d]evpi|[n]exus)\b|pythonhoste[d]",
    re.IGNORECASE,
)


def python_files() -> list[Path]:
    folders = [*PACKAGES, "tests", "bench"]
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def named(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def tracked_texts() -> Iterator[tuple[str, str]]:
    """Every text file that git tracks, by name."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    listed = subprocess.run([git, "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip(f"git does not list the files: {listed.stderr.decode()}")
    for name in listed.stdout.decode().split("\0"):
        file = ROOT / name
        if name and file.is_file():
            content = file.read_bytes()
            if b"\0" not in content:
                yield name, content.decode("utf-8", errors="replace")


def found_in_tracked_texts(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in tracked_texts()
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]


def imports(tree: ast.AST, *, in_function: bool = False) -> Iterator[tuple[str, bool]]:
    """Every imported module, and whether it is imported only when a function runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, in_function
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or "", in_function
        deeper = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports(node, in_function=deeper)


def imports_of_prefect(source: str) -> list[bool]:
    """One entry an import of Prefect: whether it stands inside a function."""
    return [inside for module, inside in imports(ast.parse(source)) if module.split(".")[0] == "prefect"]


def test_the_import_contracts_hold():
    # In a process of its own, since the linter imports from the current folder and warns as it likes.
    command = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    linted = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)

    assert linted.returncode == 0, linted.stdout + linted.stderr
    assert f"Contracts: {len(PROJECT['tool']['importlinter']['contracts'])} kept, 0 broken." in linted.stdout


def test_every_package_is_built_and_linted():
    linter = PROJECT["tool"]["importlinter"]
    forbidden = next(one for one in linter["contracts"] if one["type"] == "forbidden")
    layers = next(one for one in linter["contracts"] if one["type"] == "layers")

    assert sorted(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == PACKAGES
    assert sorted(linter["root_packages"]) == PACKAGES
    assert sorted(forbidden["source_modules"]) == [name for name in PACKAGES if name != "flows"]
    assert sorted(name for layer in layers["layers"] for name in re.findall(r"\w+", layer)) == PACKAGES


def test_every_stage_is_held_independent_of_the_others():
    independence = next(one for one in PROJECT["tool"]["importlinter"]["contracts"] if one["type"] == "independence")
    stages = {f"stages.{file.stem}" for file in (ROOT / "stages").glob("*.py")}

    assert set(independence["modules"]) == stages - {"stages.__init__", "stages.stage", "stages.pipeline"}


@pytest.mark.parametrize("package", ["contracts", "stages", "checkpoints", "flows", "corpus", "models"])
def test_packages_come_from_this_checkout(package):
    """Another distribution may carry a package of the same plain name and hide ours without a word."""
    folders = [Path(folder).resolve() for folder in importlib.import_module(package).__path__]

    assert folders == [ROOT / package]


def test_every_module_opens_with_one_sentence():
    wrong = []
    for file in python_files():
        source = file.read_text("utf-8")
        opening = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0].replace("\n", " ")
        if source.strip() and (not opening.endswith(".") or re.search(r"[.!?] +[A-Z]", opening)):
            wrong.append(f"{named(file)}: {opening!r}")

    assert wrong == []


def test_no_module_is_called_utils():
    assert [named(file) for file in python_files() if re.search(r"(^|_)utils?$", file.stem)] == []


def test_no_path_of_a_machine_stands_in_a_tracked_file():
    assert found_in_tracked_texts(MACHINE_PATH) == []


def test_no_package_registry_stands_in_a_tracked_file():
    assert found_in_tracked_texts(REGISTRY) == []
    locks = [(name, text) for name, text in tracked_texts() if name.endswith(".lock")]
    assert [name for name, text in locks if "://" in text] == []


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        (MACHINE_PATH, "see /" + "work/main", True),
        (MACHINE_PATH, '"/' + 'root"', True),
        (MACHINE_PATH, "cd /" + "tmp/work", True),
        (MACHINE_PATH, "../work/x, s3://root/x, .github/workflows, a/root, /workflow, /tmp/store", False),
        (REGISTRY, "pip install --index-" + "url https://mirror.example/pypi/", True),
        (REGISTRY, 'url = "https://mirror.example/si' + 'mple"', True),
        (REGISTRY, "uv pip compile --no-emit-index-url --quiet", False),
        (REGISTRY, "https://example.org/a/simpler/page", False),
    ],
)
def test_the_patterns_find_what_they_are_for(pattern, text, found):
    assert bool(pattern.search(text)) is found


def test_prefect_is_imported_by_flows_alone_and_late():
    """Commands must start in a moment and run on the day that Prefect is down."""
    wrong = []
    for file in python_files():
        package = named(file).split("/")[0]
        for inside in imports_of_prefect(file.read_text("utf-8")):
            allowed = package == "flows" and (inside or named(file) in PREFECT_MODULES)
            if package in PACKAGES and not allowed:
                wrong.append(f"{named(file)}: {'inside a function' if inside else 'when it is imported'}")

    assert wrong == []


@pytest.mark.parametrize(
    ("source", "inside"),
    [
        ("import prefect", [False]),
        ("from prefect.states import State", [False]),
        ("if True:\n    import prefect.states as states", [False]),
        ("class A:\n    from prefect import flow", [False]),
        ("def run():\n    from prefect import flow", [True]),
        ("async def run():\n    with x:\n        import prefect", [True]),
        ("import prefectly\nfrom .prefect import flow\nprefect = 1", []),
    ],
)
def test_imports_of_prefect_are_recognised(source, inside):
    assert imports_of_prefect(source) == inside


@pytest.mark.parametrize("module", ["stages.pipeline", "flows.cli", "flows.settings"])
def test_prefect_is_not_loaded_by(module):
    command = f"import sys, {module}; print('prefect' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (loaded.returncode, loaded.stdout.strip()) == (0, "False"), loaded.stderr
