# make demo: see it work. make test: check everything. Both set themselves up.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test bench lint format clean

help:
	@echo "make demo    every learner on 20 rotated tasks with the bundled digits (under 3 minutes)"
	@echo "make test    ruff, mypy, pytest with the examples in docstrings and README"
	@echo "make bench   milliseconds per step and seconds per run, side by side (10 minutes on two cores)"
	@echo "make lint    ruff and mypy only"
	@echo "make format  let ruff put the code in order"
	@echo "make clean   remove the virtual environment, caches and what the demo wrote"

demo: $(VENV)/.ready
	$(BIN)/gradmem compare --benchmark mnist-rotations --data sample --out demo

test: lint
	$(BIN)/pytest

bench: $(VENV)/.ready-dev
	$(BIN)/python -m benchmarks

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.ready: pyproject.toml constraints.txt scripts/set_up.py
	$(PYTHON) scripts/set_up.py $(VENV)
	@touch $@

$(VENV)/.ready-dev: pyproject.toml constraints.txt scripts/set_up.py
	$(PYTHON) scripts/set_up.py --dev $(VENV)
	@touch $@ $(VENV)/.ready

clean:
	rm -rf $(VENV) demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
