# make demo: see it work. make test: check everything. All set themselves up.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test docs wheel bench lint format clean

help:
	@echo "make demo    three learners on ten tasks with the bundled digits (under a minute)"
	@echo "make test    ruff, mypy, pytest with the examples in docstrings and README"
	@echo "make docs    the site, docs/_build/html/index.html, with its pictures; its links are checked"
	@echo "make wheel   dist/gradmem-….whl, to install with pip"
	@echo "make bench   milliseconds per step and seconds per run, side by side (10 minutes on two cores)"
	@echo "make lint    ruff and mypy only"
	@echo "make format  let ruff put the code in order"
	@echo "make clean   remove the virtual environment, caches and what the demo wrote"

demo: $(VENV)/.ready
	$(BIN)/gradmem demo

test: lint
	$(BIN)/pytest

docs: $(VENV)/.ready-docs
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -b html -W --keep-going -q docs docs/_build/html
	$(BIN)/python scripts/check_site.py docs/_build/html

wheel: $(VENV)/.ready
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

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

$(VENV)/.ready-docs: pyproject.toml constraints.txt scripts/set_up.py
	$(PYTHON) scripts/set_up.py --docs $(VENV)
	@touch $@ $(VENV)/.ready

clean:
	rm -rf $(VENV) demo build dist docs/_build docs/gallery .mypy_cache .ruff_cache .pytest_cache .hypothesis
