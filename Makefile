# `make help` lists the targets. What they make is in the checkout: .venv, .cache, .asv. (README.md, Two
# commands, says what else is left in your home.)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# What the tests marked `upstream` look at.
UPSTREAM_RELEASES ?= 0.5.9 0.5.10rc0 0.5.13.post1 0.5.14 0.5.23
# Options for pytest, for example: make test ARGS="test/srt/managers -k merge"
ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' \
	  | while IFS='|' read -r name text; do printf '  %-16s %s\n' "$$name" "$$text"; done
	@printf '\nPYTHON=%s is the interpreter that .venv is made with (3.11 or newer).\n' '$(PYTHON)'

# --- Environment: one stamp per step, so that a second call does nothing ------------------------

$(PY):
	@echo "== env: $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, this is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

# torch comes first, alone and pinned: requirements/torch.txt says why.
$(VENV)/.stamp-torch: requirements/torch.txt | $(PY)
	@echo "== env: torch"
	$(PY) -m pip install -r requirements/torch.txt
	@touch $@

$(VENV)/.stamp-dev: requirements/dev.txt requirements/constraints.txt $(VENV)/.stamp-torch
	@echo "== env: everything else"
	$(PY) -m pip install -r requirements/dev.txt
	@touch $@

$(VENV)/.stamp-workflows: requirements/workflows.txt $(VENV)/.stamp-dev
	@echo "== env: what checks the workflows"
	$(PY) -m pip install --no-deps --require-hashes -r requirements/workflows.txt
	@touch $@

$(VENV)/.stamp-package: python/pyproject.toml $(VENV)/.stamp-dev $(VENV)/.stamp-workflows
	@echo "== env: the package, editable"
	$(PY) -m pip install --no-deps --no-build-isolation -e python
	@touch $@

.PHONY: env
env: $(VENV)/.stamp-package ## Make .venv with the pinned requirements and the package

.PHONY: model
model: env ## Make or verify SmolLM2-135M-Instruct in .cache/models
	@$(PY) scripts/fetch_model.py

# --- What people call -------------------------------------------------------------------------

.PHONY: test
test: env model ## Run the tests (ARGS="..." goes to pytest)
	$(PY) -m pytest $(ARGS)

.PHONY: bench
bench: env model ## Measure the landmark commits with asv and print the table (the quick set)
	$(PY) scripts/bench.py $(ARGS)

.PHONY: bench-full
bench-full: env model ## The same with all cases and not the quick set of each question
	$(PY) scripts/bench.py --full $(ARGS)

.PHONY: report
report: env ## Write .asv/report.html, a page of what asv measured, that needs no network
	$(PY) scripts/report.py $(ARGS)

.PHONY: bench-gate
bench-gate: env ## Compare two commits: make bench-gate ARGS="main HEAD"
	$(PY) scripts/bench_gate.py $(ARGS)

.PHONY: prove-fixes
prove-fixes: env model ## Show that each fix's tests fail before it and pass with it
	$(PY) scripts/prove_fixes.py $(ARGS)

.PHONY: upstream
upstream: env ## Get the releases of SGLang that tests look at, and environments for them
	$(PY) scripts/upstream fetch --environment $(UPSTREAM_RELEASES)

.PHONY: prove-upstream
prove-upstream: env model ## Take the fixes to releases of SGLang, prove them there, write docs/upstream-matrix.md
	$(PY) scripts/upstream matrix $(or $(ARGS),--engine --write docs/upstream-matrix.md)

.PHONY: kernels
kernels: env ## Compile the Triton kernels for sm_80, sm_90, sm_100 and gfx942; fail on any spill
	$(PY) scripts/compile_kernels.py $(ARGS)

.PHONY: speed
speed: env model ## Compare decoding with Hugging Face, the loops, penalties and host work, in one run
	$(PY) benchmark/speed.py $(ARGS)

.PHONY: bench-penalties
bench-penalties: env ## Compare the cost of penalties with dense ones and with upstream's, cell by cell
	$(PY) benchmark/micro/penalties.py $(ARGS)

.PHONY: micro
micro: env ## Time variants of one piece of work side by side: commits, kinds of penalties, copies
	$(PY) -m pytest benchmark/micro --benchmark-sort=name --benchmark-columns=median,iqr,rounds $(ARGS)

.PHONY: lint
lint: env lint-workflows ## Check style, spelling, workflows and shell scripts
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/codespell

# actionlint asks shellcheck about the workflows' own scripts.
.PHONY: lint-workflows
lint-workflows: env ## Check the workflows and the shell scripts
	$(VENV)/bin/actionlint
	$(VENV)/bin/zizmor --offline --no-progress .github
	@if command -v shellcheck >/dev/null; then \
	  echo "shellcheck .ci/run scripts/*.sh"; shellcheck .ci/run scripts/*.sh; \
	else echo "shellcheck is not installed: the shell scripts are not checked"; fi

.PHONY: gpu-check
gpu-check: env ## Measure everything on a GPU, or with ARGS=--dry-run walk through it on the CPU
	PYTHON=$(PY) scripts/gpu_check.sh $(ARGS)

.PHONY: clean
clean: ## Remove build products and tool caches (.venv and .cache stay)
	rm -rf python/build python/dist python/*.egg-info .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . \( -path ./.venv -o -path ./.cache -o -path ./.git \) -prune -o -name __pycache__ -type d -print0 | xargs -0 -r rm -rf
