# milepost: `make help` lists the commands. Everything is installed into $(VENV), nothing outside this folder.

VENV ?= .venv
# TRL has an environment of its own: it is measured, not used.
TRL_VENV ?= $(VENV)/trl
SEED ?= 0
RUN_DIR ?= runs/quickstart-seed$(SEED)
# More flags for `milepost train`, for example ARGS="--set optimizer.lr=0".
ARGS ?=
# More flags for pytest, for example PYTEST_ARGS="tests/config -k unknown".
PYTEST_ARGS ?=
# Test files run side by side.
TEST_WORKERS ?= 2
# Where the CPU build of torch is looked for when the configured package index has none.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# How much `make robustness` does.
KILLS ?= 20
BAD_CONFIGS ?= 200
# The first Python that is new enough; `make PYTHON=/path/to/python3` picks another.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

BIN := $(VENV)/bin
SETUP := pyproject.toml constraints.txt scripts/setup.py scripts/install_sglang_cpu.sh
# What the tests run for real, beside torch; SGLang has an installation of its own for CPUs.
TEST_EXTRAS := torch,data,ray,megatron,wandb,tensorboard
CHECKED := core plugins tests examples scripts docs benchmarks

.DEFAULT_GOAL := help
.PHONY: help quickstart test check format bench-trl robustness docs clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

quickstart: $(VENV)/.quickstart  ## set up, then train a tiny Qwen3 on sums with GRPO (SEED=0, ARGS="--set ...")
	$(BIN)/python examples/quickstart/make.py --seed $(SEED)
	$(BIN)/milepost train examples/quickstart.yaml --set run.seed=$(SEED) --run-dir $(RUN_DIR) $(ARGS)

test: $(VENV)/.dev  ## set up what the tests need and run them all (PYTEST_ARGS="...")
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

check: $(VENV)/.dev  ## lint, formatting, types
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy

format: $(VENV)/.dev  ## format the code and sort its imports
	$(BIN)/ruff check --fix-only --quiet $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

bench-trl: $(VENV)/.quickstart $(TRL_VENV)/.ready  ## milepost beside TRL on the CPU, in turn: samples per second and their ratio
	$(BIN)/python benchmarks/beside_trl/run.py --trl-python $(TRL_VENV)/bin/python $(ARGS)

robustness: $(VENV)/.dev  ## kill a run and resume it, bad configs, rewards that misbehave (KILLS=20, BAD_CONFIGS=200)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/robustness/kills.py --kills $(KILLS) --seed $(SEED)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/robustness/configs.py --count $(BAD_CONFIGS) --seed $(SEED)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/robustness/rewards.py

docs: $(VENV)/.dev  ## write docs/configuration.md anew from the run config's schema
	$(BIN)/python docs/generate.py

clean:  ## remove the environment, caches, builds and what the quickstart made; run folders stay
	rm -rf $(VENV) quickstart quickstart.partial build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(TRL_VENV)/.ready: $(VENV)/.quickstart benchmarks/beside_trl/requirements.txt
	$(BIN)/python -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/python -m pip install --quiet --extra-index-url $(TORCH_INDEX) -r benchmarks/beside_trl/requirements.txt
	@touch $@

$(VENV)/.quickstart: $(SETUP)
	@test -n "$(PYTHON)" || { echo "milepost needs Python 3.11 or newer, and none was found; make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) scripts/setup.py --venv $(VENV) --extras torch --torch-index $(TORCH_INDEX)
	@touch $@

$(VENV)/.dev: $(SETUP)
	@test -n "$(PYTHON)" || { echo "milepost needs Python 3.11 or newer, and none was found; make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) scripts/setup.py --venv $(VENV) --extras $(TEST_EXTRAS) --dev --torch-index $(TORCH_INDEX)
	scripts/install_sglang_cpu.sh $(BIN)/python
	@touch $(VENV)/.quickstart $@
