# `make run` and `make test` need Python 3.11 or newer and make, nothing else: they set up .venv themselves, once.
# `make run` installs what running needs; `make test` and its like install that with the tools of `.[dev]`, at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
TOOLS := $(VENV)/installed-dev
FOR_DOCS := $(VENV)/installed-docs
NEWEST := .venv-newest
# Without --no-compile pip compiles all modules of torch; Python compiles those that are imported, once.
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --no-input --no-compile -c constraints.txt
# Compiled during the installation where there is a C compiler.
COMPILED := moesched/engine.c moesched/system/bound_call.c $(wildcard devices/native/*.[ch])

# Set in many containers; each of the many processes of the tests would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# Without the one that installs other programs: bench-peers runs it.
SCRIPTS = $(foreach purpose,speed fidelity exact robustness gpu,$(wildcard benchmarks/$(purpose)/[!_]*.py))
BENCHMARKS = $(subst /,.,$(basename $(SCRIPTS)))

# A call of every command, and tests of what leans on libraries: HiGHS, safetensors, tokenizers, ZeroMQ, pyarrow.
SMOKE = $(addprefix tests/test_,outputs.py cli.py plan.py checkpoints.py prompts.py zeromq.py sweeps.py)

.PHONY: help run test test-newest test-triton lint types sizes format bench bench-peers docs docs-serve fuzz pages clean distclean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | while IFS='|' read -r command does; do printf '  %-16s %s\n' "$$command" "$$does"; done

run: $(INSTALLED) ## generate text with offloaded weights, compare policies with their predictions, write traces to out/
	$(BIN)/python examples/first_run.py

test: lint types ## run everything that must pass before a change goes in
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder

# Torch stays as pinned: its newest build has gigabytes of accelerator libraries on Linux.
test-newest: ## run a few tests with the newest version of every dependency that pyproject.toml allows
	$(PYTHON) -m venv --clear $(NEWEST)
	grep '^torch==' constraints.txt > $(NEWEST)/torch.txt
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check --no-input -c $(NEWEST)/torch.txt -e '.[dev]'
	$(NEWEST)/bin/pytest -n auto --dist loadfile $(SMOKE)

test-triton: $(TOOLS) ## install Triton (250 MB) and run its kernels by its interpreter, on the CPU
	$(PIP_INSTALL) 'triton>=3.6'
	$(BIN)/pytest tests/test_triton.py

lint: $(TOOLS) ## check style, format, and the order of packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

# Exit code 2: mypy gave up, as it does where a busy machine starts its workers too late.
types: $(TOOLS) ## check types with mypy, strict
	$(BIN)/mypy --num-workers 2 || { [ $$? -eq 2 ] && $(BIN)/mypy; }

sizes: $(INSTALLED) ## print the largest files, functions and classes
	$(BIN)/python tools/sizes.py

format: $(TOOLS) ## let ruff rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(TOOLS) ## run every benchmark; each writes a result file
	@set -e; for module in $(BENCHMARKS); do echo "== $$module"; $(BIN)/python -m "$$module"; done
	$(BIN)/python -m benchmarks.pages.write

bench-peers: $(TOOLS) ## run the same model with other programs in turn; installs them into the cache folder, once
	$(BIN)/python -m benchmarks.peers.against_peers
	$(BIN)/python -m benchmarks.pages.write

docs: $(FOR_DOCS) ## build the site into out/site, without the network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "open out/site/index.html"

docs-serve: $(FOR_DOCS) ## show the site at http://127.0.0.1:8000 while you write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

fuzz: $(TOOLS) ## damage every kind of file and message, 100,000 times each; takes hours
	$(BIN)/python -m benchmarks.robustness.fuzz_inputs

pages: $(INSTALLED) ## write the tables of the docs from the result files
	$(BIN)/python -m benchmarks.pages.write

clean: ## remove wheels, caches, traces and generated models (out/)
	rm -rf build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -path './.venv*' -prune -o -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## remove .venv, and all that was compiled, too
	rm -rf $(VENV) $(NEWEST) devices/native/_kernels* moesched/_engine.* moesched/system/_bound_call.*

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "moesched needs Python 3.11 or newer; '$(PYTHON)' is not: try make PYTHON=python3.12 ..." >&2; exit 2; }
	@echo "Setting up $(VENV): once, a few minutes"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 2; }

# Each installs the package, and with it the compiled parts; the tools need no installation before their own.
$(INSTALLED): pyproject.toml constraints.txt $(COMPILED) | $(BIN)/python
	$(PIP_INSTALL) -e .
	@$(BIN)/python -c 'from moesched.devices.native.compiled import availability; print(availability())'
	@touch $@

$(TOOLS): pyproject.toml constraints.txt $(COMPILED) | $(BIN)/python
	$(PIP_INSTALL) -e '.[dev]'
	@$(BIN)/python -c 'from moesched.devices.native.compiled import availability; print(availability())'
	@touch $(INSTALLED) $@

$(FOR_DOCS): $(INSTALLED)
	$(PIP_INSTALL) -e '.[docs]'
	@touch $@
