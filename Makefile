# make run     a fresh clone trains two policies: makes .venv, installs, starts the local stack, shows the run
# make test    the whole test suite
# make check   what CI runs: lint, types, the rooms' borders, tests
#
# The versions stand in constraints.txt; pip takes them from the index this machine is configured for. torch comes from
# there as well: on Linux that is a build with CUDA, of several GB. Who wants the small CPU build sets the environment
# variable PIP_EXTRA_INDEX_URL to PyTorch's CPU index before the first `make`.

BIN := .venv/bin
INSTALLED := .venv/.installed
ARGS ?=
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python; do \
	if $$python -c '$(SUPPORTED)' 2>/dev/null; then echo $$python; break; fi; done)

.PHONY: help install run up down test check mutants lint format types borders clean
.DEFAULT_GOAL := help

help:
	@echo "make run      train two policies together, on this machine (ARGS='--set steps=40' changes the recipe)"
	@echo "make test     run the whole test suite (ARGS='-k leases' selects)"
	@echo "make check    lint, types, import rules and tests: what CI runs"
	@echo "make mutants  which small mistakes in the code do the tests notice? (docs/testing.md; ARGS='--sample 50 storage/leases.py')"
	@echo "make up       start the local stack;  make down  stop it"
	@echo "make format   put the code in its standard form"
	@echo "make clean    remove the environment and all caches; runs in .astraflow stay"

$(INSTALLED): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "Python 3.11, 3.12 or 3.13 is needed; found: $$(python3 --version 2>&1 || echo none). Install one, or name it: make PYTHON=/path/to/python" >&2; \
		exit 1; \
	fi
	@$(PYTHON) -c '$(SUPPORTED)' || { \
		echo "Python 3.11, 3.12 or 3.13 is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1)" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev,s3]"
	@touch $@

install: $(INSTALLED)

run: $(INSTALLED)
	$(BIN)/astraflow run $(ARGS)

up down: $(INSTALLED)
	$(BIN)/astraflow $@

test: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

check: lint types borders test

mutants: $(INSTALLED)
	$(BIN)/python -m tests.mutants $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED)
	$(BIN)/mypy

borders: $(INSTALLED)
	$(BIN)/lint-imports

clean:
	@if [ -x $(BIN)/astraflow ]; then $(BIN)/astraflow down; fi
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
