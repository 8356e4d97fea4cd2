# make demo         fetch a 135M-parameter model and run configs/demo.yaml; fails when its gate doesn't pass
# make test         linters, types, import rules and all tests (offline, on the CPU)
# make test-oldest  the tests, without the slow ones, on the oldest transformers that kveval supports
# make lint         linters, types and import rules alone
# make clean        remove the environments, the caches and what was built (not runs/)

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := test
.PHONY: demo test test-oldest lint clean

# The first Python that is 3.11 or newer; PYTHON=... chooses another.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
OLDEST_TRANSFORMERS := 5.17.0
VENV := .venv
OLDEST := .venv-oldest
SOURCES := kveval tasks tests scripts benchmarks
# Two test processes with one thread each: torch would otherwise start a thread per core in both.
PYTEST = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2

demo: $(VENV)/.stamp
	$(VENV)/bin/kveval models fetch smollm2-135m
	$(VENV)/bin/kveval run configs/demo.yaml

test: lint
	$(PYTEST)

lint: $(VENV)/.stamp
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

test-oldest: VENV := $(OLDEST)
test-oldest: $(OLDEST)/.stamp
	$(PYTEST) -m 'not gpu and not network and not slow'

clean:
	rm -rf $(VENV) $(OLDEST) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written last: an installation that was cut short is taken up again.
%/bin/python:
	@test -n "$(PYTHON)" || { echo 'Python 3.11 or newer is needed: make PYTHON=/path/to/python' >&2; exit 1; }
	$(PYTHON) -m venv $*

$(VENV)/.stamp: pyproject.toml constraints.txt scripts/install_torch.py | $(VENV)/bin/python
	$(VENV)/bin/python scripts/install_torch.py constraints.txt
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[dev,datasets,lm-eval]'
	touch $@

# transformers and what its version decides are let loose from the pins.
$(OLDEST)/.stamp: pyproject.toml constraints.txt scripts/install_torch.py | $(OLDEST)/bin/python
	$(OLDEST)/bin/python scripts/install_torch.py constraints.txt
	grep -vE '^(transformers|tokenizers|huggingface_hub)==' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet -c $(OLDEST)/constraints.txt -e '.[dev,datasets,lm-eval]' \
		transformers==$(OLDEST_TRANSFORMERS)
	touch $@
