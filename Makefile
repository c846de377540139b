# make tune | test | lint | wheels | clean. Each does its own set-up.
#
#   VENV=0             use the Python at hand (PYTHON=...) as it is; install nothing
#   SHAPES=FILE        what `make tune` tunes            TUNE_ARGS="--budget 420"
#   TESTS="tests/unit" what `make test` runs             TEST_ARGS="-k config"

SHAPES ?= shapes/deepseek_v3.txt
TUNE_ARGS ?=
TESTS ?= tests
TEST_ARGS ?=
VENV ?= .venv
PYTHON ?= python3

ifeq ($(VENV),0)
PY := $(PYTHON)
READY := check-python
else
PY := $(VENV)/bin/python
READY := $(VENV)/.kgen-ready
endif

.PHONY: tune test lint format wheels clean check-python

tune: $(READY)
	$(PY) -m kgen.cli.main tune --shapes $(SHAPES) $(TUNE_ARGS)

test: $(READY)
	$(PY) -m pytest $(TESTS) $(TEST_ARGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Written last, so that an interrupted set-up is done again.
$(VENV)/.kgen-ready: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(VENV)/bin/python -m pip install \
	    --disable-pip-version-check --quiet --editable '.[test]'
	touch $@

check-python:
	@$(PY) tools/check_python.py

# Wheels for a GPU machine without network: Python $(WHEELS_PYTHON), Linux x86_64; torch and the
# CUDA packages it brings must be there already. CONTRIBUTING.md says how to install them there.
WHEELS_PYTHON ?= 3.12
wheels:
	WHEELS_PYTHON=$(WHEELS_PYTHON) PYTHON=$(PYTHON) tools/collect_wheels.sh .wheels

clean:
	rm -rf build dist .wheels .pytest_cache .mypy_cache .ruff_cache .hypothesis
