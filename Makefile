# Needs make and Python 3.10 or newer, nothing else. With another interpreter: make test PYTHON=python3.12
PYTHON ?= python3
VENV ?= .venv
EXTRAS := recipes,trackers,deepspeed,demo,export,serve,ray,integrations,test,dev,docs
PROJECT ?= -e '.[$(EXTRAS)]'

VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
CORES := $(shell $(PYTHON) -c 'import os; print(os.cpu_count())')
LOCK := constraints/python$(VERSION).txt
CONSTRAINTS := $(addprefix -c ,$(wildcard $(LOCK)))
# Raised by hand: the figures in the README are measured with it.
TORCH := 2.13.0

# What the recipes and the packaging need has lower bounds of its own.
OLDEST := tests/core tests/placement tests/heads tests/batching

BIN := $(VENV)/bin
INTERPRETER := $(BIN)/python$(VERSION)
INSTALLED := $(VENV)/installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Without a GPU, torch comes from PyTorch's own index of CPU builds, as PyPI's Linux build brings gigabytes of CUDA.
# Where that index does not answer, pip goes on with its usual one.
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
TORCH_INDEX := --extra-index-url https://download.pytorch.org/whl/cpu --timeout 10 --retries 0
endif

.PHONY: help install demo test test-oldest bench docs style quality lock

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s  %s\n", $$1, $$2 }' Makefile

install: $(INSTALLED)  ## make .venv and install the project and its tools, at the locked versions

# Alone, it installs only what it needs, and `make install` the rest.
demo: $(or $(wildcard $(INSTALLED)),$(VENV)/demo)  ## train an adapter on generated sentences: offline, in minutes
	@OMP_NUM_THREADS=$(CORES) $(BIN)/python recipes/demo.py --use_cpu

# One thread for each of the two workers: more would only get in each other's way. What the tests of a file share is made
# once, as one worker runs them all.
test: $(INSTALLED)  ## run all tests but the slow ones, which train on real data or need heavy libraries
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

test-oldest:  ## run the library's tests under the oldest supported PEFT, transformers and torch
	$(MAKE) install VENV=.venv-oldest LOCK=constraints/oldest.txt PROJECT='-e .[test]'
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -n 2 $(OLDEST)

bench: $(INSTALLED)  ## measure speed and memory beside other methods: hours, minutes with benchmarks/run.py --quick
	$(BIN)/python benchmarks/run.py

docs: $(INSTALLED)  ## build the site into docs/_build/html; warnings are errors
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

style: $(INSTALLED)  ## repair what ruff can repair
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

quality: $(INSTALLED)  ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

lock: $(INTERPRETER)  ## lock the newest versions that fit this Python
	$(PIP) install --quiet --dry-run --ignore-installed --report $(VENV)/report.json \
		'.[$(EXTRAS)]' torch==$(TORCH)
	$(BIN)/python constraints/lock.py < $(VENV)/report.json > $(LOCK)

$(INTERPRETER):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo 'Python 3.10 or newer is needed; "$(PYTHON)" is "$(VERSION)". Name another: make PYTHON=python3.11'; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV)

$(VENV)/demo: $(INTERPRETER) setup.cfg
	@echo 'Installing what the demo needs into $(VENV); the log is $(VENV)/demo.log'
	@$(MAKE) --no-print-directory install INSTALLED=$@ EXTRAS=recipes,demo > $(VENV)/demo.log 2>&1 || \
		{ tail $(VENV)/demo.log; exit 1; }

$(INSTALLED): $(INTERPRETER) setup.cfg $(wildcard $(LOCK))
	@test -e $(LOCK) || echo 'No versions are locked for Python $(VERSION): the newest ones are installed.'
	$(PIP) install $(CONSTRAINTS) 'setuptools>=77'
	$(if $(TORCH_INDEX),-$(PIP) install --no-deps $(CONSTRAINTS) $(TORCH_INDEX) torch)
	$(PIP) install $(CONSTRAINTS) --no-build-isolation $(PROJECT)
	@touch $@
