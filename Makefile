# `make demo` and `make test` set up .venv by themselves: Python 3.11+, a C++ compiler and make are all they need.

VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.ready
CXX    ?= g++
# pytest's own options. Planning and compiling run on one core, so two files are tested at a time; files stay whole, since
# their tests share captured and compiled graphs, in the order of tests/conftest.py: the longest first.
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder

# The first interpreter that runs and is new enough; 3.11 first, since constraints.txt was taken on it.
# An interpreter named on the command line (`make PYTHON=...`) is used as it is, and checked.
is_new_enough := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	$$p $(is_new_enough) >/dev/null 2>&1 && { echo $$p; break; }; done)

.PHONY: help setup demo test test-all lint clean check-compiler check-python
.DEFAULT_GOAL := help

help:
	@echo "make demo      train the demo model under a memory budget (recipes/demo.py)"
	@echo "make test      lint, types, import contracts, and every test that is not slow"
	@echo "make test-all  the same with the slow tests"
	@echo "make lint      lint, types, import contracts"
	@echo "make clean     remove caches and builds ($(VENV) and runs/ stay)"

setup: $(STAMP)

demo: $(STAMP) check-compiler
	$(PY) recipes/demo.py

test: lint check-compiler
	$(PY) -m pytest -m "not slow" $(PYTEST_ARGS)

test-all: lint check-compiler
	$(PY) -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

# torch goes first and alone: it is the large download, and the one whose failure should be seen by itself.
# No build isolation: an isolated build would fetch a setuptools that constraints.txt does not pin.
$(STAMP): pyproject.toml constraints.txt | check-python check-compiler
	test -x $(PY) || "$(PYTHON)" -m venv $(VENV)
	$(PY) -m pip install -c constraints.txt setuptools
	$(PY) -m pip install -c constraints.txt torch==2.13.0
	$(PY) -m pip install -c constraints.txt --no-build-isolation -e ".[dev,lightning,plot,exact,accelerate,transformers]"
	@touch $@

check-python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "error: no Python 3.11 or newer found; install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; fi
	@"$(PYTHON)" $(is_new_enough) || { \
		echo "error: '$(PYTHON)' is not a working Python 3.11 or newer; name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "error: '$(PYTHON)' has no venv module; install it (Debian, Ubuntu: python3-venv)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || { \
		echo "error: '$(PYTHON)' has no C headers, which compiled kernels include; install them (Debian, Ubuntu: python3-dev)" >&2; exit 1; }

check-compiler:
	@command -v $(firstword $(CXX)) >/dev/null || { \
		echo "error: no C++ compiler '$(CXX)', which torch.compile needs on CPU; install g++, or name one: make CXX=clang++" >&2; exit 1; }

clean:
	rm -rf build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
