# SPDX-License-Identifier: Apache-2.0
# Two commands matter to a newcomer: `make demo` and `make test`. Both set up what they need.
# Settings: PYTHON=/path/to/python3.11, TORCH_INDEX_URL=..., PYTEST_ARGS="-k name", JOBS=2.

PY := .venv/bin/python
PYTEST := $(PY) -m pytest
PYTEST_ARGS ?=
# Processes for the tests that start no engine.
JOBS ?= 2
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
.PHONY: help setup test lint type unit engine demo bench model spin spec clean faults fuzz world machines mutation contracts upstream interop

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
	$(PYTEST) -n $(JOBS) --dist loadfile -m "not engine and not gpu" $(PYTEST_ARGS)

engine: setup ## the tests that start a real vLLM engine
	$(PYTEST) -m "engine and not gpu" $(PYTEST_ARGS)

demo: setup ## the whole story on a real vLLM engine
	@$(PY) -m kvsafe.cli.main demo

bench: setup ## measure on this machine: seal, worker, scheduler side, time to first token
	@for name in seal_open worker_copy scheduler_side fs_tier ttft lmcache lmcache_ttft; do \
		echo "== $$name"; $(PY) -m benchmarks.$$name || exit 1; done

model: setup ## walk the lifecycle model's default worlds, then its seeded faults
	@$(PY) -m kvsafe.cli.main model check
	@$(PY) -m kvsafe.cli.main model mutants

spin: ## the core of the lifecycle in a second notation (needs spin and a C compiler)
	@sh spec/models/run

world: setup ## the whole connector as one world: 20,000 seeded runs over vLLM's scheduler
	@$(PY) -m fuzz.world --flavour kvsafe --runs 20000 --jobs 2

machines: setup ## vLLM's managers and ours in lockstep with the lifecycle machine, long
	KVSAFE_LONG=20 $(PYTEST) tests/lockstep --timeout=7200

faults: setup ## kvsafe-fs: kills, power loss, failing calls, full disks, a crowd of processes, long
	@for name in kills power calls batches full crowd; do $(PY) -m fuzz.campaigns.$$name || exit 1; done

fuzz: setup ## every fuzz target for ten minutes
	@$(PY) -m kvsafe.cli.main fuzz all --seconds 600 --jobs 2

contracts: setup ## CrossHair over the contracts, half a minute for each; renews spec/contracts.md
	@$(PY) -m fuzz.contracts --timeout 30 --write

mutation: setup ## break seal, host, device and lifecycle one line at a time and see the tests notice
	@$(PY) -m fuzz.mutation seal host device lifecycle

upstream: setup ## vLLM's own offload tests with our classes in place of theirs (needs the network)
	@$(PY) -m conformance.upstream

interop: setup ## share chunks with real LMCache peers (needs the network and redis-server)
	@sh conformance/lmcache/setup
	@$(PY) -m conformance.lmcache.interop

spec: setup ## write the generated parts of spec/
	@$(PY) -m kvsafe.seal.tables
	@$(PY) -m kvsafe.engine.config --write spec/configuration.md

clean: ## remove .venv, caches and build leftovers
	rm -rf kvsafe/tiers/_batch*.so kvsafe/seal/_batch*.so .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find kvsafe tests fuzz conformance benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
