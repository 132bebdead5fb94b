# Every target works alone on a fresh clone: what it needs is set up first.
#   make test ARGS="-k layout"      some of the tests
#   make bench NAME=step            one benchmark
#   make setup PYTHON=python3.12    with another interpreter

VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
DOCS := .venv-docs
NAME ?= step
ARGS ?=
# JupyterLab refuses to run as root, as in most containers, unless it is told so.
ROOT_FLAG := $(if $(filter 0,$(shell id -u)),--allow-root)

.DEFAULT_GOAL := help
.PHONY: help setup pages check-pages demo lab test bench docs links lint format types lock clean

help:
	@echo "make setup   .venv with pinned dependencies"
	@echo "make demo    trains a small GPT and changes its ZeRO stage while it runs; prints what it measured"
	@echo "make lab     opens the same notebook in JupyterLab"
	@echo "make test    runs all tests            (ARGS=\"-k name\" for some, ARGS=\"-n 0\" for one after the other)"
	@echo "make bench   side-by-side measurements (NAME=step; installs the peers in $(PEERS) first)"
	@echo "make docs    the documentation's site, in build/site/html (installs Sphinx in $(DOCS) first); runs some notebooks"
	@echo "             once, about two minutes, for their outputs (ARGS=all for all of them, about ten)"
	@echo "make links   asks every address on it whether it is there; needs a network"
	@echo "make lint    ruff: rules and formatting"
	@echo "make types   pyright"
	@echo "make pages   builds JupyterLab's extension again, after a change in extension/lab"
	@echo "make check-pages   its rules, types and tests"
	@echo "make format  ruff: writes the formatting"
	@echo "make lock    writes requirements.lock from .venv"
	@echo "make clean   removes caches; .venv and runs/ stay"

setup: $(VENV)/.ready

$(VENV)/.ready: requirements.lock pyproject.toml .ci/setup.sh .ci/pages.sh
	@.ci/setup.sh

pages: setup
	@.ci/pages.sh
	@$(BIN)/python -m pip -qq install --no-deps --no-build-isolation --editable .

check-pages: setup
	@.ci/pages.sh check

demo: setup
	@$(BIN)/speedlab demo

lab: setup
	@$(BIN)/jupyter lab $(ROOT_FLAG) $(ARGS) notebooks/01_quickstart.ipynb

# Some hundred processes start, and each would compile everything anew where the environment wants no bytecode kept.
test: setup
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses 2 --tb=short $(ARGS)

bench: $(PEERS)/.ready
	@PATH="$(CURDIR)/$(PEERS)/bin:$$PATH" $(PEERS)/bin/python -m tests.benchmarks $(NAME) $(ARGS)

$(PEERS)/.ready: $(VENV)/.ready .ci/peers.sh
	@.ci/peers.sh

docs: $(DOCS)/.ready
	@$(BIN)/python notebooks/site/outputs.py $(ARGS)
	@$(DOCS)/bin/python notebooks/site/build.py html

links: $(DOCS)/.ready
	@$(DOCS)/bin/python notebooks/site/build.py linkcheck

$(DOCS)/.ready: $(VENV)/.ready notebooks/site/requirements.lock .ci/site.sh
	@.ci/site.sh

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: setup
	@$(BIN)/pyright

lock: setup
	@$(BIN)/python .ci/lock.py > requirements.lock.new
	@mv requirements.lock.new requirements.lock
	@test ! -e $(DOCS)/.ready || $(DOCS)/bin/python .ci/lock.py docs > notebooks/site/requirements.lock
	@echo "lock: $$(grep -c == requirements.lock) packages"

clean:
	rm -rf .pytest_cache .ruff_cache .hypothesis build dist
	find speedlab cuda_ops extension tests -name __pycache__ -type d -prune -exec rm -rf {} +
