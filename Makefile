SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -ec
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV ?= .venv
BIN := $(VENV)/bin
# An interpreter counts only if it runs: version managers leave stubs that exist and fail.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.10; do \
  if $$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; \
  then echo $$p; break; fi; done)
# Package index to take torch from, for a CPU build; empty: the default index.
TORCH_INDEX ?=
PYTEST_ARGS ?=

.PHONY: help venv bundle demo test mutation lint types bench dist clean

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

venv: bundle ## .venv with all that demo, tests and benchmarks need; does nothing if up to date

.PHONY: packages
packages:
	@test -n "$(strip $(PYTHON))" || { echo "venv: no Python 3.10 to 3.12 found; run: sudo apt-get install -y python3 python3-venv python3-dev" >&2; exit 1; }
	@$(PYTHON) -c "" 2>/dev/null || { echo "venv: PYTHON=$(PYTHON) does not run; leave it out or name a Python 3.10 to 3.12" >&2; exit 1; }
	@$(PYTHON) .ci/install.py --venv "$(VENV)" --torch-index "$(TORCH_INDEX)"

bundle: packages
	@$(BIN)/python -m hoverlens.export.random_mllm

demo: venv ## look at aerial photos with compiled models and answer a question
	@$(BIN)/python -m hoverlens.benchmarks.demo

test: venv lint ## lint, then the tests (PYTEST_ARGS="-k nms" narrows them)
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

mutation: venv ## change the search one place at a time; fails on changes that no test notices (half an hour or more)
	@$(BIN)/python .ci/mutation.py

lint: packages types ## ruff and mypy
	@$(BIN)/ruff check .

# The checkout is the package, whatever its folder is called: mypy sees it under its real name
# through links.
types: packages
	@rm -rf build/types && mkdir -p build/types/hoverlens
	@for f in *.py py.typed kernels runtime calibration export benchmarks; do \
	  case $$f in setup.py|conftest.py) ;; *) ln -s "../../../$$f" build/types/hoverlens/ ;; esac; done
	@MYPYPATH=build/types $(BIN)/mypy --config-file pyproject.toml -p hoverlens | sed 's#build/types/hoverlens/##'

bench: venv ## the benchmarks' command line
	@$(BIN)/hoverlens bench --help

dist: packages ## wheel and source distribution in dist/
	@$(BIN)/python -m pip --disable-pip-version-check wheel -q --no-deps --no-build-isolation -w dist .
	@$(BIN)/python -c "import setuptools.build_meta as b; b.build_sdist('dist')" >/dev/null
	@ls -l dist

clean: ## remove what was built here; the caches in the home folder stay
	rm -rf $(VENV) $(VENV).lock build dist *.egg-info kernels/*.so demo-output bench-output
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
