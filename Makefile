# `make demo` and `make test` need Python 3.11+ and make, and set up the rest themselves.

PYTHON ?=                # the Python to build .venv with; empty: the newest 3.11+ that runs
JOBS ?= 3                # how many tests run at once: some wait for servers and processes
QUERIES_ARGS ?=          # e.g. make queries QUERIES_ARGS="--queries 5000 --seed 7"
FUZZ_ARGS ?=             # e.g. make fuzz FUZZ_ARGS="--images 100000 --seed 7"
PYTEST_ARGS ?=           # e.g. make test PYTEST_ARGS="-k tar -x"

# The tests start hundreds of processes: each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
# What somebody has set for other programs.
unexport PYTHONOPTIMIZE PYTHONSAFEPATH PYTHONWARNINGS PYTHONPATH PYTHONHOME PYTEST_ADDOPTS

bin := .venv/bin
# Tests of a file stay together, for what they share; a process that has none left takes another's.
pytest_args = -n $(strip $(JOBS)) --dist worksteal --timeout 300 $(PYTEST_ARGS)
checked := dask_image_ingest tests examples benchmarks tools docs

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup notebooks demo test test-more test-fast test-packaging test-torch nightly coverage oldest fuzz queries lint format hooks docs wheel release-check bench gpu-test gpu-api gpu-faults clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

setup: .venv/.stamp-test ## make .venv with all that the demo and the tests need

notebooks: .venv/.stamp-notebooks ## add what the notebooks and their tests need: torch, JupyterLab
	@echo "Open them: $(bin)/jupyter lab examples/01_explore.ipynb"

demo: .venv/.stamp-demo ## pack real photographs into shards, read them, show what comes back
	@$(bin)/python examples/demo.py

test: lint ## lint, then run the tests on this machine's CPU
	@$(bin)/python -m pytest -m "not packaging and not more" $(pytest_args)

test-more: .venv/.stamp-test ## further cases of the promises that `make test` keeps
	@$(bin)/python -m pytest -m "more and not packaging" $(pytest_args)

test-fast: JOBS = 2  # none of them waits
test-fast: .venv/.stamp-test ## the tests that take no time, while you edit: a minute
	@$(bin)/python -m pytest -m "not slow and not packaging and not more" $(pytest_args)

test-packaging: .venv/.stamp-test ## test the wheel, tools, examples and documentation
	@$(bin)/python -m pytest -m packaging $(pytest_args)

test-torch: .venv/.stamp-notebooks ## the tests that need torch and Jupyter, which it adds to .venv
	@$(bin)/python -m pytest -m torch $(pytest_args)

nightly: .venv/.stamp-test ## all tests, random ones with fresh seeds and many rounds (an hour)
	@$(bin)/python -m pytest --nightly $(pytest_args) --timeout 1800

coverage: .venv/.stamp-test ## the tests, and which lines they never run, worker processes included
	@rm -rf .coverage
	@$(bin)/python -m coverage run -m pytest $(pytest_args) --timeout 900
	@$(bin)/python -m coverage combine --quiet
	@$(bin)/python -m coverage report

oldest: .oldest/.stamp ## the quick tests with the oldest dependencies that pyproject.toml allows
	@.oldest/bin/python -m pytest -m "not slow and not newest and not packaging and not more" $(pytest_args)

fuzz: .venv/.stamp-test ## 20,000 mutated images through a worker process (minutes)
	@$(bin)/python tests/support/fuzz.py $(FUZZ_ARGS)

queries: .venv/.stamp-test ## 20,000 random queries, each beside the same of rows in memory (an hour)
	@PYTHONPATH=tests/support $(bin)/python tests/support/random_queries.py $(QUERIES_ARGS)

lint: .venv/.stamp-test ## ruff and mypy
	@$(bin)/ruff check $(checked)
	@$(bin)/ruff format --check $(checked) || { echo "Some files are not formatted: run 'make format'."; exit 1; }
	@$(bin)/mypy
	@$(bin)/python tools/check_gpu_api.py

format: .venv/.stamp-test ## let ruff format the code and mend what it can
	@$(bin)/ruff check --quiet --fix $(checked) || true
	@$(bin)/ruff format $(checked)

hooks: .venv/.stamp-test ## let git check each commit as `make lint` does
	@$(bin)/python -m pip install --disable-pip-version-check --quiet pre-commit
	@$(bin)/pre-commit install

docs: .venv/.stamp-docs ## build docs/_build/html; a warning is an error
	@rm -rf docs/_build docs/reference/api
	@$(bin)/python -m sphinx -W --keep-going -n -q -j auto docs docs/_build/html
	@echo docs/_build/html/index.html

wheel: .venv/.stamp-test ## build the wheel and the source distribution into dist/
	@rm -rf dist
	@$(bin)/python -m build --outdir dist . >.venv/build.log 2>&1 || { cat .venv/build.log; exit 1; }
	@ls dist/*

release-check: .venv/.stamp-test ## check the wheel and the source distribution as on every Python that is here, into dist/ (minutes)
	@rm -rf dist
	@$(bin)/python tools/release_check.py --out dist

bench: .venv/.stamp-bench ## compare with the peers, in one run on this machine
	@set -e; for script in $(sort $(wildcard benchmarks/[a-z]*.py)); do $(bin)/python $$script; done
	@test -n "$(wildcard benchmarks/[a-z]*.py)" || echo "There are no benchmarks yet."

gpu-test: ## the tests that need a GPU, with .venv if it has cuDF, else with the active Python
	@python="$(strip $(PYTHON))"; \
	if [ -z "$$python" ]; then \
	  python=python3; \
	  if $(bin)/python -c 'import cudf' 2>/dev/null; then python=$(bin)/python; fi; \
	fi; \
	$$python -m pytest tests/gpu -ra $(PYTEST_ARGS)

gpu-api: .gpu/.stamp ## check names and calls of RAPIDS and DALI, and run what needs no kernel; no GPU, 4.4 GB of disk
	@.gpu/bin/python tools/check_gpu_api.py --require
	@.gpu/bin/python -m pytest -q tests/rapids $(PYTEST_ARGS)
	@PYTHONPATH=tests/played .gpu/bin/python -m pytest -q -p simulated.plugin tests/played tests/gpu $(PYTEST_ARGS)

gpu-faults: .gpu/.stamp ## make faults of streams, memory and kernels in a copy, and see that a test notices each (minutes)
	@.gpu/bin/python tests/played/faults.py

clean: ## remove the environments, caches, and what the demo and the builds wrote
	@rm -rf .venv .oldest .gpu .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@rm -rf build dist docs/_build docs/reference/api demo-data dask-scratch-space
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Set-up is redone only when pyproject.toml changes. A stamp stands for the extras that are installed.

.venv/.stamp-demo: pyproject.toml | $(bin)/python
	@$(call install,.venv,cpu$(,)demo)
	@touch $@

.venv/.stamp-test: pyproject.toml | $(bin)/python
	@$(call install,.venv,cpu$(,)demo$(,)test$(,)s3-test$(,)gcs-test$(,)azure-test)
	@touch .venv/.stamp-demo $@

.venv/.stamp-notebooks: pyproject.toml | $(bin)/python
	@$(call install,.venv,cpu$(,)demo$(,)test$(,)s3-test$(,)gcs-test$(,)azure-test$(,)notebooks)
	@touch .venv/.stamp-demo .venv/.stamp-test $@

.venv/.stamp-docs: pyproject.toml | $(bin)/python
	@$(call install,.venv,docs)
	@touch $@

.venv/.stamp-bench: pyproject.toml | $(bin)/python
	@$(call install,.venv,cpu$(,)demo$(,)bench)
	@touch .venv/.stamp-demo $@

.oldest/.stamp: pyproject.toml tools/oldest.py | .oldest/bin/python
	@.oldest/bin/python tools/oldest.py >.oldest/constraints.txt
	@$(call install,.oldest,cpu$(,)demo$(,)test,-c .oldest/constraints.txt)
	@touch $@

.gpu/.stamp: pyproject.toml tools/gpu_wheels.py | .gpu/bin/python
	@echo "Fetching the wheels of RAPIDS into .gpu (minutes, once) ..."
	@.gpu/bin/python tools/gpu_wheels.py >.gpu/pip.log 2>&1 || { tail -n 30 .gpu/pip.log; exit 1; }
	@touch $@

, := ,
install = $1/bin/python tools/install.py $2 $3

# The newest Python for .venv, the oldest for .oldest. Each is run, since a name on PATH may be a
# shim of a Python that is not installed.
newest_first := python3.13 python3.12 python3.11 python3
$(bin)/python: pythons = $(newest_first)
.gpu/bin/python: pythons = $(newest_first)
.oldest/bin/python: pythons = python3.11 python3.12 python3.13 python3
%/bin/python:
	@for python in $(or $(strip $(PYTHON)),$(pythons)); do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "Making $* with $$($$python --version) ..."; \
	    exec $$python -m venv --clear $*; \
	  fi; \
	done; \
	echo "No Python 3.11 or newer with its venv module was found: install one (Debian and Ubuntu: apt install python3 python3-venv), or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; \
	exit 1
