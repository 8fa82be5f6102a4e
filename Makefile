# Everything that is done to this project by hand. Needs Python 3.11 or newer and pip, no compiler.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help serve test test-all test-clients lint check clean

VENV := .venv
BIN := $(VENV)/bin
CLIENTS := $(VENV)/clients
SUITES := $(basename $(notdir $(wildcard tests/clients/requirements/*.txt)))
PORT := 8000
ARGS :=
# Two processes, which take files of tests and packages of them in the order of their names: in the
# end the short files, so that neither waits long for the other (tests/distribution.py).
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --max-worker-restart 0 \
    --dist loadfile --no-loadscope-reorder

help:
	@echo 'make serve      serve the default model on 127.0.0.1:8000; PORT=8001 ARGS="--workers 2"'
	@echo 'make test       run the tests; ARGS="-k blocks" passes options to pytest'
	@echo 'make test-all   run the slow tests too'
	@echo 'make test-clients  install clients and suites of others, and run them against servers'
	@echo 'make check      what CI runs: ruff, mypy, then make test'
	@echo 'make clean      remove $(VENV) and what tools have cached here'

serve: $(VENV)/installed-worker
	exec $(BIN)/pagefleet serve --port $(PORT) $(ARGS)

test: $(VENV)/installed-dev
	$(PYTEST) -m 'not slow' $(ARGS)

test-all: $(VENV)/installed-dev
	$(PYTEST) $(ARGS)

test-clients: $(VENV)/installed-dev $(SUITES:%=$(CLIENTS)/%/installed) $(CLIENTS)/node/installed
	PAGEFLEET_CLIENTS=$(CLIENTS) $(BIN)/python -m pytest tests/clients $(ARGS)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

check: lint test

clean:
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find shared kernels services tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

# The project, editable, with the extra `worker` or `dev`; done again when its requirements change.
$(VENV)/installed-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing Pagefleet and what it needs into $(VENV); PyTorch alone may take minutes.'
	$(BIN)/python -m pip install --disable-pip-version-check \
	    --constraint constraints.txt --editable '.[$*]'
	@touch $@

# The environment of somebody else's client. It sees ours behind its own, so that what both need,
# such as PyTorch, is there once.
SITE := import sysconfig; print(sysconfig.get_path("purelib"))
$(CLIENTS)/%/installed: tests/clients/requirements/%.txt | $(VENV)/installed-dev
	$(BIN)/python -m venv $(@D)
	$(BIN)/python -c '$(SITE)' > "$$($(@D)/bin/python -c '$(SITE)')/project.pth"
	$(@D)/bin/python -m pip install --disable-pip-version-check --requirement $<
	@touch $@

$(CLIENTS)/node/installed: tests/clients/package.json
	mkdir -p $(@D)
	cp $< $(@D)
	npm install --prefix $(@D) --no-package-lock --no-audit --no-fund
	@touch $@

$(BIN)/python:
	@for python in $(PYTHON) python3.11 python3; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "Making $(VENV) with $$($$python --version)."; \
	        $$python -m venv $(VENV) && exit; \
	        rm -rf $(VENV); exit 1; \
	    fi; \
	done; \
	echo 'Pagefleet needs Python 3.11 or newer, but neither python3.11 nor python3 is that.' >&2; \
	echo 'Install it, or name another one: make PYTHON=/path/to/python ...' >&2; exit 1
