# make run     in a fresh clone: create .venv, install, start the local stack, train two policies
# make test    the whole test suite
# make check   the checks of CI: lint, dependencies, types, import rules, tests
#
# Packages are installed at exact versions from the index of this machine's pip configuration. Each
# file is checked against the SHA-256 in requirements/locked.txt; nothing is built from source but
# deepspeed, which is published so: its Python files are packed, and nothing of it is compiled.
# torch is the exception: its wheels differ between PyPI (on Linux a CUDA build of several GB),
# PyTorch's own indexes and mirrors, so it is installed by version, without hashes and without its
# dependencies. Those are in locked.txt, and the ones of a CUDA build alone in cuda.txt. For the
# small build without CUDA, name PyTorch's index of builds for CPUs (its installation page has it):
#
#   make run TORCH_INDEX=URL
#
# Only torch, and the packages that only its CUDA build needs, are installed from that index.
#
# pip compiles what it installs on one core; compileall does it on all of them.

BIN := .venv/bin
INSTALLED := .venv/.installed
SGLANG := .venv-sglang
TORCH_INDEX ?=
PIP := $(BIN)/python -m pip install --quiet --no-compile
HASHED := $(PIP) --require-hashes --no-deps --only-binary :all:
FROM_TORCH_INDEX := $(if $(TORCH_INDEX),PIP_INDEX_URL='$(TORCH_INDEX)')
NEEDS_CUDA := import sys, importlib.metadata as m; sys.exit(not any("nvidia" in one or "cuda" in one for one in m.requires("torch") or []))
ARGS ?=
TEST_PROCESSES ?= --numprocesses auto --maxprocesses 4 --dist loadscope --no-loadscope-reorder
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python; do \
	if $$python -c '$(SUPPORTED)' 2>/dev/null; then echo $$python; break; fi; done)

# Dozens of processes of a run import the same modules: without stored bytecode each compiles them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install run up down test test-engines docs check mutants lint deps format types borders lock clean
.DEFAULT_GOAL := help

help:
	@echo "make run      train two policies together, on this machine (ARGS='--set steps=40' changes the recipe)"
	@echo "make test     run the whole test suite (ARGS='-k leases' selects; TEST_PROCESSES= uses one process)"
	@echo "make check    the checks of CI: lint, dependencies, types, import rules, tests"
	@echo "make test-engines  install SGLang beside this environment, and run the contract of rollout engines on real servers"
	@echo "make docs     build the documentation into site/, in an environment beside this one; fails at broken links"
	@echo "make mutants  measure which small mistakes the tests find (docs/testing.md; ARGS='--sample 50 storage/coordination/leases.py')"
	@echo "make up       start the local stack;  make down  stop it"
	@echo "make format   format the code"
	@echo "make lock     update requirements/*.txt from pyproject.toml; needs uv"
	@echo "make clean    delete the environment and all caches; runs in .astraflow are kept"

$(INSTALLED): pyproject.toml Makefile $(wildcard requirements/*.txt)
	@if [ -z "$(PYTHON)" ]; then \
		echo "Python 3.11, 3.12 or 3.13 is needed; found: $$(python3 --version 2>&1 || echo none). Install one, or name it: make PYTHON=/path/to/python" >&2; \
		exit 1; \
	fi
	@"$(PYTHON)" -c '$(SUPPORTED)' || { \
		echo "Python 3.11, 3.12 or 3.13 is needed; $(PYTHON) is $$("$(PYTHON)" --version 2>&1)" >&2; exit 1; }
	"$(PYTHON)" -m venv .venv
	$(HASHED) -r requirements/locked.txt
	$(FROM_TORCH_INDEX) $(PIP) --no-deps --only-binary :all: -r requirements/torch.txt
	if $(BIN)/python -c '$(NEEDS_CUDA)'; then \
		$(if $(TORCH_INDEX),$(FROM_TORCH_INDEX) $(PIP) --only-binary :all: -r requirements/torch.txt,$(HASHED) -r requirements/cuda.txt); fi
	DS_BUILD_OPS=0 $(PIP) --require-hashes --no-deps --no-build-isolation --no-binary deepspeed -r requirements/deepspeed.txt
	$(PIP) --no-deps --no-build-isolation -e .
	$(BIN)/python -m pip check
	$(BIN)/python -m compileall -q -q -j 0 -x '/tests/' .venv/lib || true  # some packages contain templates that are no Python
	@touch $@

install: $(INSTALLED)

run: $(INSTALLED)
	$(BIN)/astraflow run $(ARGS)

up down: $(INSTALLED)
	$(BIN)/astraflow $@

test: $(INSTALLED)
	$(BIN)/python -m pytest $(TEST_PROCESSES) --durations=25 --durations-min=20 $(ARGS)

check: lint deps types borders test

# SGLang pins versions of its own, so that it has an environment of its own.
$(SGLANG)/.installed: requirements/sglang.txt requirements/torch.txt
	"$(PYTHON)" -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --require-hashes --no-deps --only-binary :all: -r requirements/sglang.txt
	$(FROM_TORCH_INDEX) $(SGLANG)/bin/python -m pip install --quiet --only-binary :all: -r requirements/torch.txt
	@touch $@

test-engines: $(INSTALLED) $(SGLANG)/.installed
	ASTRAFLOW_TEST_SGLANG_PYTHON=$(CURDIR)/$(SGLANG)/bin/python \
		$(BIN)/python -m pytest tests/contract/test_rollout_engine.py tests/contract/test_sglang_server.py \
		tests/contract/test_sglang_adapters.py $(ARGS)

# The packages that build the site have an environment of their own.
.venv-docs/.installed: requirements/docs.txt
	"$(PYTHON)" -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --require-hashes --no-deps --only-binary :all: -r requirements/docs.txt
	@touch $@

docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict $(ARGS)

mutants: $(INSTALLED)
	$(BIN)/python -m tests.mutants $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

deps: $(INSTALLED)
	$(BIN)/deptry .

types: $(INSTALLED)
	$(BIN)/mypy

borders: $(INSTALLED)
	$(BIN)/lint-imports

lock:
	"$(PYTHON)" requirements/lock.py $(ARGS)

clean:
	@if [ -x $(BIN)/astraflow ]; then $(BIN)/astraflow down; fi
	rm -rf .venv .venv-docs site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
