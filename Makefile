# Everything runs from .venv, which the first target that needs it makes.
#   make demo [STEPS=n] [RUN=name] [SEED=s]     train a small language model from a log
#   make test [TIER=all]                        unit and integration tests; TIER=all runs the slow ones too
#   make soak                                   the tests that take minutes each
#   make chaos [FAULTS=n] [SEED=s]              a run on three brokers, killed and stopped by a schedule, must end as a
#                                               calm one (3 minutes; FAULTS=200 writes its result to benchmarks/results)
#   make vllm                                   vLLM's CPU build, for the tests of engines (a gigabyte)
#   make docs                                   the site of docs/, into site/: strictly, without a network
#   make lint | bench | clean
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help vllm demo test soak chaos lint bench docs clean

# The pins in constraints.txt were tested on 3.11; the first interpreter that is new enough is taken.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

help:
	@sed -n 's/^#   //p' Makefile

$(STAMP): constraints.txt pyproject.toml schemas/delta/native.c
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer with its venv module is needed: install it, or say make PYTHON=/path/to/python" >&2; exit 2; }
	@command -v cc >/dev/null || { echo "a C compiler is needed (the delta codec's inner loops, and reasoning-gym's pycosat): install gcc" >&2; exit 2; }
	@echo "making $(VENV) with $$($(PYTHON) --version): 5 GB of packages, which takes minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r constraints.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@# One of reasoning-gym's dependencies warns when it is compiled: let that happen here, in silence.
	@$(BIN)/python -W ignore -m compileall -q $(VENV)/lib/python*/site-packages/cellpylib
	@# Each role is a process of its own: what they import is compiled once, here, also where Python is told to keep no
	@# bytecode. Otherwise each would spend seconds of CPU on it.
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -W ignore -m compileall -q $(VENV)/lib/python*/site-packages/ray/*.py \
		$(VENV)/lib/python*/site-packages/ray/{_common,_private,dashboard,util}
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -W ignore -c "import pathlib, headrace.trainer.loop, reasoning_gym; \
		from headrace.models import tiny_model; from headrace.producers.engines.hf import HfEngine; \
		HfEngine(str(tiny_model(pathlib.Path('$(VENV)/tiny'))), slots=1, max_tokens=16)"
	@touch $@

# Optional (the tests that need it skip without it), and a gigabyte.
VLLM_STAMP := $(VENV)/.vllm
vllm: $(VLLM_STAMP)
$(VLLM_STAMP): $(STAMP) constraints-vllm.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r constraints-vllm.txt
	@# Compiled and loaded once here, so that no test's engine does it again.
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -W ignore -m compileall -q -j 2 $(VENV)/lib/python*/site-packages/vllm
	@env -u PYTHONDONTWRITEBYTECODE VLLM_LOGGING_LEVEL=ERROR $(BIN)/python -W ignore -c "import vllm.v1.engine.async_llm, \
		vllm.entrypoints.openai.api_server, vllm.v1.worker.cpu_worker" 2>/dev/null
	@touch $@

demo: $(STAMP)
	@$(BIN)/python examples/demo.py $(if $(STEPS),--steps $(STEPS)) $(if $(RUN),--run $(RUN)) $(if $(SEED),--seed $(SEED))

# Three files at a time: many tests wait for a time-out. One thread each: processes with two threads on two cores
# would take turns at every step of a model.
test: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -n 3 --dist loadfile --no-loadscope-reorder -m "$(if $(filter all,$(TIER)),,not slow and )not soak"

# What takes minutes: more of the same kind as the slow tests, and fifty publications under live traffic.
soak: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -m soak

chaos: $(STAMP)
	@$(BIN)/python -m tests.chaos $(if $(FAULTS),--faults $(FAULTS)) $(if $(SEED),--seed $(SEED))

# Type checkers can't follow the editable install's hook: links show them the same mapping.
lint: $(STAMP)
	@mkdir -p .types/headrace
	@for d in schemas streams producers trainer consumers; do ln -sfn ../../$$d .types/headrace/$$d; done
	@for f in headrace/*.py headrace/py.typed; do ln -sfn ../../$$f .types/headrace/$${f#headrace/}; done
	@for f in .types/headrace/*; do test -e "$$f" || rm "$$f"; done
	@$(BIN)/ruff check .
	@$(BIN)/python -m tests.docstrings
	@$(BIN)/mypy

docs: $(STAMP)
	@$(BIN)/python -m docs.reference >/dev/null
	@$(BIN)/python -m mkdocs build --strict --quiet
	@echo "site/index.html"

bench: $(STAMP)
	@for f in $$(grep -l '^def main' benchmarks/[!_]*.py); do m=$${f#benchmarks/}; \
		echo "== $${m%.py}"; $(BIN)/python -m benchmarks.$${m%.py} --quick; done

clean:
	rm -rf $(VENV) .types build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
