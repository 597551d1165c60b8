# Each target makes .venv itself and installs what it needs; a second call finds it done.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints-cpu.txt
# The tests start processes of their own: more threads than cores would only make them wait.
ONE_THREAD := OMP_NUM_THREADS=1
DEMO := runs/sentiment

.DEFAULT_GOAL := help
.PHONY: help demo test check fix bench wheel clean

help:
	@echo "make demo    train the Chinese review classifier on two processes, then check its figures"
	@echo "make test    run the tests"
	@echo "make check   lint, format check, types and tests"
	@echo "make fix     let ruff repair and format what it can"
	@echo "make bench   measure the overhead of the loop"
	@echo "make wheel   build the wheel into dist/"
	@echo "make clean   remove what these targets made, but for the runs"

demo: .venv/with-examples
	rm -rf $(DEMO)
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 \
		examples/sentiment.py --output-dir $(DEMO)
	$(BIN)/python examples/check_sentiment.py $(DEMO) --at-least 0.78

test: .venv/with-test
	$(ONE_THREAD) $(BIN)/python -m pytest -q

check: .venv/with-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(ONE_THREAD) $(BIN)/python -m pytest -q

fix: .venv/with-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/with-test
	$(ONE_THREAD) $(BIN)/python benchmarks/overhead.py

wheel: .venv/with-dev
	$(BIN)/python -m build --wheel

clean:
	rm -rf .venv build dist trainkit.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache

# The pinned torch comes first and alone, so that no other package chooses it.
.venv/with-torch: constraints-cpu.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) torch
	touch $@

# The extra of that name in pyproject.toml.
.venv/with-%: .venv/with-torch pyproject.toml
	$(INSTALL) --editable '.[$*]'
	touch $@
