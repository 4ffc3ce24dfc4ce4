# Two commands on a fresh machine:  make figure   make test
# A machine without a GPU may add  PIP_ARGS="--extra-index-url …" to get the small build of torch
SHELL := /bin/bash
VENV ?= .venv
PIP_ARGS ?=
# Processes that share the tests
WORKERS ?= 2
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1 && echo $$p && break; done)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt $(PIP_ARGS)

# Releases of transformers beside the pinned one, which `make test` runs in full; oldest supported first
TRANSFORMERS ?= 4.57.6 5.0.0 5.17.0
OLDEST := $(firstword $(TRANSFORMERS))

.PHONY: help figure test test-versions lint unit oldest clean
help:
	@echo "make figure   install into $(VENV), then draw figures/position-bias.png with its data"
	@echo "make test     install into $(VENV), then lint, types, all tests, and a short list on transformers $(OLDEST)"
	@echo "make test-versions   all tests with each of transformers $(TRANSFORMERS), then with the pinned one"
	@echo "make lint     ruff and mypy alone"
	@echo "make unit     pytest alone"
	@echo "make oldest   the short list of tests/versions.py alone, on transformers $(OLDEST) in .venvs"
	@echo "make clean    remove caches and build folders (not $(VENV), not .venvs)"

$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "dart-lab needs Python 3.11, 3.12 or 3.13; none was found. Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.python pyproject.toml constraints.txt
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	@touch $@

figure: $(VENV)/.installed
	$(BIN)/dart-lab figure position-bias --out figures

lint: $(VENV)/.installed-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

unit: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

oldest: $(VENV)/.installed-dev
	$(BIN)/python tests/versions.py $(OLDEST) --short -- -n $(WORKERS) --dist worksteal

test: lint unit oldest

test-versions: $(VENV)/.installed-dev
	$(BIN)/python tests/versions.py $(TRANSFORMERS) -- $(PYTEST_ARGS)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
