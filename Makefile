# Two commands set everything up: `make demo` and `make test`. Both make .venv on first use.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin

.PHONY: demo test test-full check bench setup clean

demo: $(VENV)/.ready-demo
	$(RUN)/mlfabric demo

test: check
	PYTHON=$(RUN)/python bash scripts/test -m "not full"

test-full: check
	PYTHON=$(RUN)/python bash scripts/test

check: $(VENV)/.ready-dev
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy

bench: $(VENV)/.ready-dev
	$(RUN)/mlfabric bench plan

setup: $(VENV)/.ready-dev

# The demo needs less than the tests; each set of packages is installed once.
$(VENV)/.ready-%: pyproject.toml constraints.txt scripts/bootstrap
	@PYTHON=$(PYTHON) VENV=$(VENV) bash scripts/bootstrap $*
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
