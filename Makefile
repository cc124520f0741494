# Everything runs in .venv, which `make venv` makes from constraints.txt; each target makes it first.
#
#   make demo    compile, inspect, train and verify examples/quickstart
#   make test    all checks and all tests
#                one third of large suites, which the commit chooses; TLORA_FX_SAMPLE=all tries all
#   make fuzz    20,000 damaged files
#   make docs    all pages and the reference as a site, with every link checked
#   make tinker-sdk   the client of the Tinker API, in an environment of its own, for its tests
#   make sizes   lines of code by room; nothing fails on a number
#
# pip's own settings are honoured; on a machine without a GPU an index with torch's CPU build saves
# gigabytes.

PYTHON ?= python3
WORKERS ?= 3
# Damaged files of each of 17 kinds that `make fuzz` reads.
FUZZ_CASES ?= 1350

# What runs of the tests leave each other (tests/kept_between_runs.py); mypy compares contents.
KEPT := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/tlora-fx-tests

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

JOBS := examples/quickstart/jobs.yaml
DEMO_BUILD := build/quickstart
DEMO_RUN := runs/quickstart

# Where nothing may be kept of what Python compiles, each process compiles all sources again.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help venv demo test check dumps format-check lint types floors unit slow fuzz docs sizes tinker-sdk wheel-check coverage format assets clean

help:
	@echo "make demo | test | check | dumps | unit | slow | fuzz | docs | sizes | tinker-sdk | wheel-check | coverage | format | assets | clean"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "tlora-fx needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "no venv; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "installing torch and others into $(VENV): some minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	@rm -rf $(DEMO_BUILD) $(DEMO_RUN)
	$(BIN)/tlora-fx compile $(JOBS) -o $(DEMO_BUILD)
	$(BIN)/tlora-fx inspect $(DEMO_BUILD)
	$(BIN)/tlora-fx train $(JOBS) -o $(DEMO_RUN)
	$(BIN)/tlora-fx verify $(JOBS) --steps 20
	@echo
	@echo "The adapters, one PEFT folder a job:"
	@find $(DEMO_RUN) -maxdepth 3 -name adapter_config.json -printf '  %h\n' | sort
	@echo "The fused graph: $(DEMO_BUILD)/ssm.txt"

# Tests of several processes wait a part of their time: slower checks run beside them.
test: $(STAMP)
	@$(MAKE) --no-print-directory format-check lint
	@$(MAKE) --no-print-directory -j 4 types floors wheel-check unit

check: format-check lint types floors dumps

# The code of the tested architectures against the accepted one; ACCEPT=--accept takes it over.
dumps: $(STAMP)
	$(BIN)/python -m pytest -q -n $(WORKERS) $(ACCEPT) tests/inspect/test_model_dumps.py

format-check: $(STAMP)
	$(BIN)/ruff format --check --quiet .

lint: $(STAMP)
	$(BIN)/ruff check --quiet .

types: $(STAMP)
	@kept="$(KEPT)/mypy"; mkdir -p "$$kept" 2>/dev/null && test -w "$$kept" || kept=.mypy_cache; \
	  MYPY_CACHE_DIR="$$kept" $(BIN)/mypy

floors: $(STAMP)
	$(BIN)/lint-imports --no-logo --no-cache

unit: $(STAMP)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow"

slow: $(STAMP)
	TLORA_FX_RANDOM=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m "slow or hypothesis"
	$(BIN)/python scripts/wheel_check.py --each

fuzz: $(STAMP)
	TLORA_FX_FUZZ_CASES=$(FUZZ_CASES) $(BIN)/python -m pytest -q -n $(WORKERS) tests/fuzz

docs: $(STAMP)
	$(BIN)/python scripts/make_docs.py build/docs/pages
	$(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/docs/site/index.html"

tinker-sdk:
	$(PYTHON) -m venv .tinker-sdk
	.tinker-sdk/bin/python -m pip install --quiet --disable-pip-version-check tinker==0.38.0

sizes: $(STAMP)
	@$(BIN)/python scripts/sizes.py

wheel-check: $(STAMP)
	$(BIN)/python scripts/wheel_check.py

coverage: $(STAMP)
	$(BIN)/coverage run -m pytest -q
	$(BIN)/coverage report

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

assets: $(STAMP)
	$(BIN)/python examples/quickstart/make_assets.py

clean:
	rm -rf build dist runs .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
