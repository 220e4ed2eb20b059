# `make run` and `make test` need Python 3.11 or newer and make, nothing else: they set up .venv themselves, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
# Compiled with the installation where a C compiler is there.
KERNEL := $(wildcard devices/products/expert_*.[ch])

SCRIPTS = $(wildcard tests/*.py examples/*.py benchmarks/*.py tools/*.py)
BENCHMARKS = $(wildcard benchmarks/[!_]*.py)
# Scripts and tests call libraries without types; everything else of strict mode holds for them too.
RELAXED := --allow-untyped-calls --allow-untyped-decorators --allow-subclassing-any --allow-any-generics --no-warn-return-any

.PHONY: help run test lint types format bench pages clean distclean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1|\2/p' Makefile | while IFS='|' read -r command does; do printf '  %-16s %s\n' "$$command" "$$does"; done

run: $(INSTALLED) ## generate text with offloaded weights, compare the policies with their predictions, write traces to out/
	$(BIN)/python examples/first_run.py

test: lint types ## everything that must hold before a change goes in
	$(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile

lint: $(INSTALLED) ## style, format, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(INSTALLED) ## mypy, strict
	$(BIN)/mypy
	$(BIN)/mypy $(RELAXED) $(SCRIPTS)

format: $(INSTALLED) ## rewrite the sources in the house's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED) ## run every benchmark; each writes its result with the machine in it
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python "$$script"; done
	$(BIN)/python benchmarks/_pages.py

pages: $(INSTALLED) ## write the tables of the docs from the result files
	$(BIN)/python benchmarks/_pages.py

clean: ## remove what was built and written: wheels, caches, traces, generated models (out/)
	rm -rf build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## the same, and .venv and the compiled CPU kernel
	rm -rf $(VENV) devices/products/_expert_kernel*

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "moesched needs Python 3.11 or newer; '$(PYTHON)' is not: try make PYTHON=python3.12 ..." >&2; exit 2; }
	@echo "Setting up $(VENV): once, a few minutes"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 2; }

$(INSTALLED): pyproject.toml constraints.txt $(KERNEL) | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check --no-input -c constraints.txt -e '.[dev]'
	@$(BIN)/python -c 'from moesched.devices.products.expert_kernel import availability; print(availability())'
	@touch $@
