# SPDX-License-Identifier: Apache-2.0
# Two commands matter to a newcomer: `make demo` and `make test`. Both set up what they need.
# Settings: PYTHON=/path/to/python3.11, TORCH_INDEX_URL=..., PYTEST_ARGS="-k name".

PY := .venv/bin/python
PYTEST := $(PY) -m pytest
PYTEST_ARGS ?=
CODE := $(wildcard kvsafe tests fuzz conformance benchmarks)

# The engine stays small and offline; a value that the caller has set wins.
VLLM_CPU_KVCACHE_SPACE ?= 1
export VLLM_CPU_KVCACHE_SPACE
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
export PYTHON TORCH_INDEX_URL

.DEFAULT_GOAL := help
.PHONY: help setup test lint type unit engine demo bench model spin spec clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | sort | while read -r name text; do \
		printf '  make %-8s %s\n' "$$name" "$$text"; done

setup: ## make .venv from the pinned list (instant when it is up to date)
	@sh .ci/setup

test: setup ## lint, types, unit tests, then engine tests
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory type
	@$(MAKE) --no-print-directory unit
	@$(MAKE) --no-print-directory engine

lint: setup ## ruff check and ruff format --check
	$(PY) -m ruff check $(CODE)
	$(PY) -m ruff format --check $(CODE)

type: setup ## mypy, strict
	$(PY) -m mypy

unit: setup ## the tests that start no engine
	$(PYTEST) -m "not engine and not gpu" $(PYTEST_ARGS)

engine: setup ## the tests that start a real vLLM engine
	$(PYTEST) -m "engine and not gpu" $(PYTEST_ARGS)

demo: setup ## the whole story on a real vLLM engine
	@$(PY) -m kvsafe.cli.main demo

bench: setup ## measure on this machine: seal, worker, scheduler side, time to first token
	@for name in seal_open worker_copy scheduler_side fs_tier ttft; do \
		echo "== $$name"; $(PY) -m benchmarks.$$name || exit 1; done

model: setup ## walk the lifecycle model's default worlds, then its seeded faults
	@$(PY) -m kvsafe.cli.main model check
	@$(PY) -m kvsafe.cli.main model mutants

spin: ## the core of the lifecycle in a second notation (needs spin and a C compiler)
	@sh spec/models/run

spec: setup ## write the generated parts of spec/
	@$(PY) -m kvsafe.seal.tables
	@$(PY) -m kvsafe.engine.config --write spec/configuration.md

clean: ## remove .venv, caches and build leftovers
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find kvsafe tests fuzz conformance benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
