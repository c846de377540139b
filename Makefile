# make tune | test | lint | wheels | clean. Each does its own set-up.
#
#   VENV=0             use the Python at hand (PYTHON=...) as it is; install nothing
#   SHAPES=FILE        what `make tune` tunes            TUNE_ARGS="--budget 420"
#   TESTS="tests/unit" what `make test` runs             TEST_ARGS="-k config"
#   TEST_JOBS=N        processes of `make test`; 0: one after another. GPU tests share one of them

SHAPES ?= shapes/deepseek_v3.txt
TUNE_ARGS ?=
TESTS ?= tests
TEST_ARGS ?=
TEST_JOBS ?= auto
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
	$(PY) -m pytest -n $(TEST_JOBS) --dist loadgroup $(TESTS) $(TEST_ARGS)

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

# Wheels of everything pinned but torch, what a CUDA torch brings along, and tools for the desk:
# for a GPU machine without network. CONTRIBUTING.md says how to install them there.
WHEELS_PYTHON ?= 3.12
WHEELS_GLIBC := 2_28 2_27 2_24 2_17 2_12 2_5
NOT_IN_WHEELS := torch|cuda-|nvidia-|matplotlib|contourpy|cycler|fonttools|kiwisolver|pillow|pyparsing|python-dateutil|tzdata|sympy|mpmath|networkx|fsspec|filelock|setuptools|ruff|mypy|ast_|librt|build|hatchling|tomlkit|trove|pyproject_hooks|pathspec
wheels:
	rm -rf .wheels
	mkdir .wheels
	grep -vE '^(#|$$|$(NOT_IN_WHEELS))' constraints.txt >.wheels/requirements.txt
	$(PYTHON) -m pip download --disable-pip-version-check --quiet --no-deps --dest .wheels \
	    --only-binary=:all: --python-version $(WHEELS_PYTHON) --implementation cp \
	    $(WHEELS_GLIBC:%=--platform manylinux_%_x86_64) --platform manylinux2014_x86_64 \
	    --platform manylinux1_x86_64 --requirement .wheels/requirements.txt
	du -ch .wheels/*.whl | tail -1

clean:
	rm -rf build dist .wheels .pytest_cache .mypy_cache .ruff_cache .hypothesis
