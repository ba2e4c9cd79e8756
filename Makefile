# megafp8: `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# On a machine without an NVIDIA driver take the release whose PyPI build CI uses; elsewhere any supported one.
TORCH ?= $(if $(shell command -v nvidia-smi),torch>=2.11,torch==2.13.0)
PIP := $(PY) -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help venv test test-slow test-gpu quickstart lint format clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | awk -F ':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

venv: $(VENV)/.installed  ## virtual environment with everything installed

# torch first: with it present, nothing below can pull in another build.
$(VENV)/.installed: pyproject.toml
	@test -x $(PY) || $(PYTHON) -m venv $(VENV_ARGS) $(VENV)
	@echo "installing into $(VENV) (about a minute) ..."
	@$(PIP) "$(TORCH)" 2>&1 | grep -v '^WARNING' || true
	@$(PIP) -e '.[dev]' 2>&1 | grep -v '^WARNING' || true
	@$(PY) -c 'import torch, megafp8, pytest, ruff, mypy, importlinter'
	@touch $@

test: venv lint  ## lint and the whole CPU suite (under 15 minutes on 2 cores)
	$(PY) -m pytest -q

test-slow: venv  ## the tests too slow for every change
	$(PY) -m pytest -q -m slow

test-gpu: venv  ## the tests that need a GPU
	$(PY) -m pytest -q -m gpu

quickstart: venv  ## vocabulary, data, FP8 training on 4 processes, loss curve (under 5 minutes)
	@$(PY) tools/quickstart.py

lint: venv  ## ruff, types, and the direction of imports
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo

format: venv  ## format and fix what can be fixed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:  ## remove the environment and caches; runs and data stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
