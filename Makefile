# Two commands do all the set-up: `make run` (the debug job, on a machine without a GPU too) and `make test`.
#
#   make run [resume=outputs/NAME] [args="trainer.steps=5 rollout.max_staleness=0"]
#   make test       the fast tests          make test-all   every test (without=slurm: but those that need a Slurm)
#   make lint       ruff and mypy           make install    the environment alone, for CPUs
#   make install-gpu   the environment for GPUs, in its place; needs nvcc of CUDA 13. `make run` does so where it sees a GPU
#                      (make run gpu= does not)
#   make docs       the documentation site, served on this machine; make docs-build builds it into site/
#   make peers      .venv-peers, with the packages that benchmarks/peers_objectives.py compares with

SHELL := /bin/bash
VENV := .venv
# Modules are compiled when first used: compiling all of them takes longer than the rest of the installation.
PIP_INSTALL := $(VENV)/bin/python -m pip install -q --disable-pip-version-check --no-compile
# The environment is installed again only when what it was made from has changed.
INSTALLED := $(VENV)/installed-$(shell cat $(filter-out requirements/peers.txt requirements/cuda%,$(wildcard requirements/*.txt)) pyproject.toml | sha256sum | cut -c1-12)
INSTALLED_GPU := $(VENV)/installed-gpu-$(shell cat requirements/*cuda* pyproject.toml | sha256sum | cut -c1-12)
gpu ?= $(wildcard /proc/driver/nvidia/gpus/*)
IS_3_11 := import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))

.PHONY: install install-gpu run test test-all lint peers docs docs-build

install: $(INSTALLED)

install-gpu: $(INSTALLED_GPU)

$(VENV)/bin/python:
	@for python in python3.11 python3; do "$$python" -c '$(IS_3_11)' 2>/dev/null && break; python=; done; \
	if [ -z "$$python" ]; then \
	  echo "make: needs Python 3.11 with venv and pip as python3.11 or python3 (found: $$(python3 --version 2>&1))" >&2; \
	  exit 1; \
	fi; \
	"$$python" -m venv $(VENV)

$(INSTALLED_GPU): | $(VENV)/bin/python
	@echo "installing the environment for GPUs into $(VENV), once; compiling Transformer Engine takes about half an hour"
	requirements/install_cuda.sh $(VENV)/bin/python
	$(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/installed-* && touch $@

$(INSTALLED): | $(VENV)/bin/python
	@echo "installing the environment into $(VENV), once; it takes some minutes"
	$(PIP_INSTALL) -r requirements/cpu.txt -c requirements/constraints.txt
	$(PIP_INSTALL) --no-deps -r requirements/cpu-nodeps.txt
	$(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/installed-* && touch $@

run: $(if $(gpu),$(INSTALLED_GPU),$(INSTALLED))
	@launch/debug.sh $(if $(resume),'resume=$(resume)') $(args)

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -m "not slow$(if $(without), and not $(without))" tests

test-all: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q $(if $(without),-m "not $(without)") tests

peers: .venv-peers/installed-$(shell cat requirements/peers.txt | sha256sum | cut -c1-12)

.venv-peers/installed-%: $(INSTALLED)
	$(VENV)/bin/python -m venv --clear .venv-peers
	.venv-peers/bin/python -m pip install -q --disable-pip-version-check --no-compile --no-deps -r requirements/peers.txt
	@realpath $(VENV)/lib/python3.11/site-packages > .venv-peers/lib/python3.11/site-packages/venv.pth
	@touch $@

lint: $(INSTALLED)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

# Material prints a notice about a successor of MkDocs; it is off, so that a warning is something to mend.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs serve

docs-build: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
