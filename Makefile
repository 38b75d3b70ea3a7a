# make demo   align the bundled model in minutes; the report's path is printed at the end
# make test   lint, types and tests
# make docs   the documentation as a site, in site/
# make bench  the cost of a rollout against the naive schedule
# Any of them first makes .venv and installs into it; a later call finds that done.
# On Linux, pip's own choice of torch may be a CUDA build of several GB; where a CPU build is wanted,
# tell pip where to find it through its usual environment variables before the first call.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# What the project's own checks look at: a clone may hold a user's files besides.
CODE := src tests benchmarks reliability examples tools
# Further words for the demo's command, as in: make demo ARGS="name=second train.iterations=20"
ARGS ?=

.PHONY: demo test docs bench
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-report
	$(BIN)/flowcredit train recipes/shapes_g2rpo.yaml $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
# One thread for each of the two: threads that wait for each other's cores take twice the time.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --numprocesses 2 --dist loadfile --no-loadscope-reorder

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir site

bench: $(VENV)/.installed-report
	$(BIN)/python benchmarks/rollout.py
	$(BIN)/python benchmarks/rollout.py --method dense_grpo

$(VENV)/.installed-report: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing flowcredit and its dependencies into $(VENV) (about 1.5 GB with a CPU torch; a minute or two) ..."
	@$(PIP) --editable '.[report]'
	@touch $@

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(BIN)/python
	@$(PIP) 'mkdocs-material'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing flowcredit and its development tools into $(VENV) (about 1.5 GB with a CPU torch; a minute or two) ..."
	@$(PIP) --editable '.[dev,report]'
	@touch $@ $(VENV)/.installed-report $(VENV)/.installed-docs

$(BIN)/python:
	@found=$$($(PYTHON) --version 2>&1) || found="not there"; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "flowcredit needs Python 3.11 or newer, but '$(PYTHON)' is $$found; name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
