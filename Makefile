# `make demo` and `make test` do all the setup themselves: Python 3.11 or later and make are enough.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed

.PHONY: help setup demo test test-papers test-slow test-long test-lowest lint format docs dist bench gpu clean

help:
	@echo "make demo       train a small model that grows a sink, and a cured one that does not"
	@echo "make test       run the test suite"
	@echo "make test-papers  run the test suite of papers/"
	@echo "make test-slow  run the tests that take seconds each, with shapes and types checked"
	@echo "make test-long  run the tests that take minutes each"
	@echo "make test-lowest  run the test suite with the oldest versions allowed of what wakeful needs"
	@echo "make lint       check style and types"
	@echo "make format     format the code"
	@echo "make docs       build the pages and the reference as a site, into build/docs"
	@echo "make dist       build wheel and sdist, check them and install the wheel where nothing is"
	@echo "make bench      measure speed and memory as ratios against the field"
	@echo "make gpu        what one GPU shows in 25 minutes, into runs/gpu; TEXT=FOLDER of text to train on"
	@echo "make clean      remove the virtual environment and caches"

setup: $(STAMP)

$(STAMP): pyproject.toml papers/pyproject.toml constraints.txt tools/install.py
	$(PYTHON) tools/install.py $(VENV)
	@touch $@

demo: $(STAMP)
	$(BIN)/wakeful compare patient --seeds 0 --only vanilla large-sink --train.steps 600 --out runs/demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-papers: $(STAMP)
	cd papers && ../$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "slow and not long"

test-long: $(STAMP)
	$(BIN)/python -m pytest -m long
	cd papers && ../$(BIN)/python -m pytest -m long

test-lowest:
	$(PYTHON) tools/install.py $(VENV)-lowest --lowest
	$(VENV)-lowest/bin/python -m pytest -n 2 --dist worksteal -W 'ignore:`torch.jit.script` is deprecated'

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python tools/pages.py

dist: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[release]'
	$(BIN)/python tools/dist.py

bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --requirement benchmarks/requirements.txt
	$(BIN)/python -m benchmarks

gpu: $(STAMP)
	$(BIN)/python -m benchmarks.on_gpu $(if $(TEXT),--text "$(TEXT)")

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
