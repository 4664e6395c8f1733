# One-word verbs; each does the set-up it needs. `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
COMPILED := *.so kernels/cpu/*.so scheduler/*.so deployments/*.so deployments/*/*.so
export PYTHONUNBUFFERED := 1
# Each of a few hundred processes would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo serve test check bench gpu golden clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' Makefile | sed -E 's/:.*  ## /\t/' | expand -t 10

setup: $(READY) .links/coissue $(VENV)/.compiled  ## make .venv with everything pinned

$(READY): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit(f"coissue needs Python 3.11 to 3.13, this is {v[0]}.{v[1]}: make PYTHON=python3.11 ...")'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Python lacks venv: apt install python3-venv"; exit 1; }
	@echo "Setting up $(VENV) (once; three to five minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt pip setuptools wheel mypy
	@echo "Installing torch for the CPU"
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	@echo "Installing Ray and the rest"
	@COISSUE_PURE=1 $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	@echo "Compiling the scheduler's core and the request's path (about a minute)"
	@$(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch -c $(COMPILED)
	@touch $@ $(VENV)/.compiled

# What runs per kernel and request as extension modules, again whenever it changed; without a C
# compiler it runs as it is.
$(VENV)/.compiled: setup.py $(wildcard kernels/cpu/*.c scheduler/*.py deployments/*.py deployments/channel/*.py deployments/http/*.py) | $(READY)
	@echo "Compiling the scheduler's core and the request's path (a minute)"
	@rm -f $(COMPILED) && $(BIN)/python setup.py -q build_ext --inplace
	@touch -c $(COMPILED)  # those that came out alike keep their old time
	@touch $@

.links/coissue:
	@mkdir -p $@ && for part in kernels scheduler deployments; do ln -sfn ../../$$part $@/$$part; done

demo: setup  ## twelve tenants served and measured under two policies (CPU, about two minutes)
	@$(BIN)/python -m load_tests.demo.run

serve: setup  ## serve the demo's tenants on 127.0.0.1:8000 until Ctrl-C
	@$(BIN)/python -m load_tests.demo.train
	@$(BIN)/coissue up configs/demo.yaml

test: setup  ## all tests that this machine can run, but those of `make check`
	@$(BIN)/python -m pytest -n 3 --ignore=tests/architecture

check: setup  ## lint, format, types, architecture
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy -p coissue.kernels -p coissue.scheduler -p coissue.deployments
	@$(BIN)/python -m pytest -q tests/architecture

bench: setup  ## the figures of docs/results (about twenty minutes, needs a quiet machine)
	@$(BIN)/python -m load_tests.bench

# $(call IF_THERE,folder,why it is not): goes on only where the folder is there.
IF_THERE = test -d $(1) || { echo "Nothing to do yet: there is no $(1), because $(2)."; exit 0; };

gpu: $(if $(wildcard tests/gpu),setup)  ## the tests that need a GPU (none yet: there is no CUDA device so far)
	@$(call IF_THERE,tests/gpu,there is no CUDA device so far) $(BIN)/python -m pytest tests/gpu

golden: setup  ## rewrite the golden files; review the diff
	@$(BIN)/python -m pytest -q tests/golden --rewrite-golden

clean:  ## remove everything that make made
	rm -rf $(VENV) .links .cache build dist out $(COMPILED) *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
