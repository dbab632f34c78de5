# `make demo` and `make test` need Python 3.11+ and make, and set up the rest themselves.

PYTHON ?=                # the Python to build .venv with; empty: the newest 3.11+ that runs
JOBS ?= 2                # how many tests run at once
FUZZ_ARGS ?=             # e.g. make fuzz FUZZ_ARGS="--images 100000 --seed 7"
PYTEST_ARGS ?=           # e.g. make test PYTEST_ARGS="-k tar -x"

bin := .venv/bin
checked := dask_image_ingest tests examples benchmarks tools

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup notebooks demo test fuzz lint format bench gpu-test clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' Makefile

setup: .venv/.stamp-test ## make .venv with all that the demo and the tests need

notebooks: .venv/.stamp-notebooks ## add what the notebooks and their tests need: torch, JupyterLab
	@echo "Open them: $(bin)/jupyter lab examples/01_explore.ipynb"

demo: .venv/.stamp-demo ## pack real photographs into shards, read them, show what comes back
	@$(bin)/python examples/demo.py

test: lint ## lint, then run the tests on this machine's CPU
	@$(bin)/python -m pytest -n $(strip $(JOBS)) --timeout 300 $(PYTEST_ARGS)

fuzz: .venv/.stamp-test ## 20,000 mutated images through a worker process (minutes)
	@$(bin)/python tests/fuzz.py $(FUZZ_ARGS)

lint: .venv/.stamp-test ## ruff and mypy
	@$(bin)/ruff check $(checked)
	@$(bin)/ruff format --check $(checked) || { echo "Some files are not formatted: run 'make format'."; exit 1; }
	@$(bin)/mypy
	@$(bin)/python tools/check_gpu_api.py

format: .venv/.stamp-test ## let ruff format the code and mend what it can
	@$(bin)/ruff check --quiet --fix $(checked) || true
	@$(bin)/ruff format $(checked)

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

clean: ## remove .venv, caches and what the demo wrote
	@rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist demo-data dask-scratch-space
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Set-up is redone only when pyproject.toml changes. A stamp stands for the extras that are installed.

.venv/.stamp-demo: pyproject.toml | $(bin)/python
	@$(call install,cpu$(,)demo)
	@touch $@

.venv/.stamp-test: pyproject.toml | $(bin)/python
	@$(call install,cpu$(,)demo$(,)test)
	@touch .venv/.stamp-demo $@

.venv/.stamp-notebooks: pyproject.toml | $(bin)/python
	@$(call install,cpu$(,)demo$(,)test$(,)notebooks)
	@touch .venv/.stamp-demo .venv/.stamp-test $@

.venv/.stamp-bench: pyproject.toml | $(bin)/python
	@$(call install,cpu$(,)demo$(,)bench)
	@touch .venv/.stamp-demo $@

, := ,
# pip is heard only when it fails.
install = echo "Installing dask-image-ingest[$1] into .venv (a minute or two, once) ..."; \
  $(bin)/python -m pip install --disable-pip-version-check --no-input -e ".[$1]" >.venv/pip.log 2>&1 \
  || { tail -n 30 .venv/pip.log; echo "pip failed: the lines above are the end of .venv/pip.log."; exit 1; }

# Each candidate is run, since a name on PATH may be a shim of a Python that is not installed.
$(bin)/python:
	@for python in $(or $(strip $(PYTHON)),python3.13 python3.12 python3.11 python3); do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "Making .venv with $$($$python --version) ..."; \
	    exec $$python -m venv --clear .venv; \
	  fi; \
	done; \
	echo "No Python 3.11 or newer with its venv module was found: install one (Debian and Ubuntu: apt install python3 python3-venv), or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; \
	exit 1
