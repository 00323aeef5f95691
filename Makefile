# loco-peer: what a developer types. `make help` lists it.

VENV      := .venv
BIN       := $(VENV)/bin
STAMP     := $(VENV)/.installed
# -qq: pip's errors, without its warnings about indexes that this machine's settings name. What is
# installed is compiled afterwards, on all processors.
PIP       := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt
OUT       ?= demo-run
METHOD    ?= noloco
BOX       ?= 1
PYTEST    ?=
# Files that `test` leaves out: options of pytest (.ci/run).
WITHOUT   ?=
BENCHES   ?= startup codec latency exchange small_messages overlap memory utilisation throughput gossip_links planner pipeline_churn noloco_quality fuzz hostile corpus
RESULTS   ?= bench-run
# The first suitable interpreter, unless PYTHON says which.
CANDIDATES := $(if $(PYTHON),$(PYTHON),python3 python3.13 python3.12 python3.11)

.DEFAULT_GOAL := help
.PHONY: help env test test-all test-fast coverage lint format docs demo bench gpu dist clean

help:  ## This list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(STAMP)  ## The environment: .venv with pinned dependencies; redone only when they changed

$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	if $(BIN)/python -m pip --version >/dev/null 2>&1; then echo "env: bringing $(VENV) up to date"; exit 0; fi; \
	for python in $(CANDIDATES); do \
	  if "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; \
	  then found="$$python"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "loco-peer needs Python 3.11, 3.12 or 3.13 (tried: $(CANDIDATES))." >&2; \
	  echo "Install one, or name it: make env PYTHON=/path/to/python3.12" >&2; exit 1; \
	fi; \
	"$$found" -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "$$found cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 1; }; \
	echo "env: $(VENV) with $$("$$found" --version); pinned dependencies, a few minutes the first time"; \
	"$$found" -m venv --clear $(VENV)
	@$(PIP) pip setuptools wheel
	@$(PIP) --no-build-isolation -e . --group dev
	@$(BIN)/python -m compileall -q -j 0 $(VENV) >/dev/null || true  # of some packages, old syntax
	@touch $@
	@echo "env: ready"

# Whole swarms of real processes wait for what users see, within bounds, and for each other: two at a
# time. All other tests share the processors.
test: env  ## The tests, but for the long ones (PYTEST='-m long'); PYTEST='...' gives pytest options, and runs one by one
ifeq ($(strip $(PYTEST)),)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --ignore=tests/e2e $(WITHOUT)
	@$(BIN)/python -m pytest -n 2 --durations=12 tests/e2e
else
	@$(BIN)/python -m pytest $(PYTEST)
endif

test-all: test  ## All tests, the long ones too: an hour and a half; those behind routers need root and nft
	@$(BIN)/python -m pytest -m long --durations=12

test-fast: env  ## The tests that take less than a quarter of a second each
	@$(BIN)/python -m pytest -m "not slow and not e2e and not long" $(PYTEST)

coverage: env  ## Coverage of the tests that start no processes
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest -q -m "not e2e" $(PYTEST)
	@$(BIN)/coverage combine -q
	@$(BIN)/coverage report

lint: env  ## Lint, format, types, boundaries, spelling, Dockerfile
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo
	@git ls-files -z | xargs -0 $(BIN)/codespell
	@$(BIN)/hadolint Dockerfile
	@echo "lint: clean"

format: env  ## Format the code, and fix what ruff can fix
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format .

docs: env  ## The documentation as a site, in build/site; a broken link ends it
	@PYTHONPATH=. $(BIN)/python tests/cli_reference.py
	@$(BIN)/python -m zensical build --clean --strict

demo: env  ## Four peers and a lone one train a small model on this machine; OUT=DIR says where, METHOD=diloco, pipeline or experts how, BOX=2 in how many processes the last peer trains
	@$(BIN)/python -m demo --out "$(OUT)" --method "$(METHOD)" --box "$(BOX)"

bench: env  ## All measurements, some minutes each; BENCHES="codec latency" chooses, FULL=1 takes the long settings
	@mkdir -p "$(RESULTS)"
	@set -e; for name in $(BENCHES); do \
	  echo "bench: $$name"; \
	  $(BIN)/python -m bench.$$name $(if $(FULL),--full) --json "$(RESULTS)/$$name.json"; \
	done

gpu: env  ## What a CUDA card does here: its tests, tokens/s and MFU, memory, Muon, peers; RESULTS=DIR says where
	@$(BIN)/python -m bench.gpu --out "$(RESULTS)/gpu" tests speed memory noloco box

dist: env  ## Source distribution and wheel, in dist/
	@rm -rf build dist
	@$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' >/dev/null
	@$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
	@ls dist

clean:  ## Remove the environment and everything that tools left behind
	rm -rf $(VENV) build dist htmlcov .coverage .coverage.* *.egg-info \
	  .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
