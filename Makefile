# `make train` trains the default model, `make test` runs every test; both build .venv first.
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
	&& echo $$p && break; done)
ARGS ?=

.PHONY: train test lint

train: .venv/installed
	.venv/bin/python train.py --norm triton $(ARGS)

test: .venv/installed
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -n 2 $(ARGS)

lint: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

.venv/installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "This project needs Python 3.11 or 3.12; name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet --group dev .
	@rm -rf build *.egg-info
	@touch $@
