# megafp8: `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# On a machine without an NVIDIA driver take the release whose PyPI build CI uses; elsewhere any supported one.
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),torch>=2.11,torch==2.13.0)
# The same driver decides about cuBLASLt's Python binding, which multiplies FP8 on GPUs.
GPU := $(if $(shell command -v nvidia-smi 2>/dev/null),gpu)
EXTRAS ?= dev$(if $(GPU),$(comma)$(GPU))
RUN_PACKAGE := .$(if $(GPU),[$(GPU)])
comma := ,
# Errors only: pip's exit code decides, so nothing is piped through a filter. Modules are compiled when first imported.
PIP := $(PY) -m pip install -qq --disable-pip-version-check --no-compile

# Tests and training start many processes. Without cached bytecode, each of them would compile torch and the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv test test-slow test-docs test-gpu quickstart docs release lint format clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | awk -F ':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

venv: $(VENV)/.installed  ## virtual environment with everything installed

# torch in the same call: its version decides about all others. A container's own torch, and whatever else it has, is
# used with VENV_ARGS=--system-site-packages; so tools are called as modules, wherever they are installed.
define install
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "error: Python 3.10 or newer is needed, for example: make PYTHON=python3.12")'
@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV_ARGS) $(VENV)
@echo "installing into $(VENV) (about a minute) ..."
@$(PIP) '$(TORCH)' -e '$(1)'
endef

$(VENV)/.installed: pyproject.toml
	$(call install,.[$(EXTRAS)])
	@touch $(VENV)/.runtime $@

# What a run needs, without the development tools.
$(VENV)/.runtime: pyproject.toml
	$(call install,$(RUN_PACKAGE))
	@touch $@

test: venv lint  ## lint and the CPU suite (about 17 minutes on 2 cores)
	$(PY) -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

test-slow: venv  ## the tests too slow for every change
	$(PY) -m pytest -q -m slow

test-docs: venv  ## the site and its links, the tutorial, the notebook and a wheel (3 minutes on 2 cores)
	$(PY) -m pytest -q -m slow -n 2 tests/test_tutorial.py tests/test_commands.py tests/test_api.py tests/test_site.py

test-gpu: venv  ## the tests that need a GPU
	$(PY) -m pytest -q -m gpu

quickstart: $(VENV)/.runtime  ## vocabulary, data, FP8 training on 4 processes, loss curve (about 3 minutes)
	@$(PY) -m megafp8 quickstart

docs: venv  ## the site, in build/site
	$(PY) -m mkdocs build --strict -f docs/site/mkdocs.yml

release:  ## wheel, source archive and SBOM, tried in empty environments: make release PYTHONS='python3.10 python3.13'
	.ci/release $(PYTHONS)

lint: venv  ## ruff, types, and the direction of imports
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -c 'from importlinter.cli import lint_imports_command as lint; lint()' --no-logo

format: venv  ## format and fix what can be fixed
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:  ## remove the environment and caches; runs and data stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
