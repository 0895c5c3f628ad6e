# Two commands matter: `make demo` and `make test`. Each sets up its own environment the first time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# A process per core, each with one thread: threads of several would wait for each other.
BESIDE := --numprocesses auto --maxprocesses 8 --dist loadfile
QUICK := not slow and not gpu and not browser and not faults

.PHONY: help setup demo test lint golden coverage test-slow test-gpu test-browser test-faults test-foreign test-wheel audit coverage-table docs format clean

help:
	@echo "make demo        see, induce and understand locality: runs/demo/report.html (3 minutes)"
	@echo "make test        lint, types and tests"
	@echo "make golden      write every report again from the raw tables, and compare it with what is committed (1 minute)"
	@echo "make coverage    the tests once more, and how much of the code they reach"
	@echo "make test-slow   tests marked slow"
	@echo "make test-gpu    tests that need a CUDA device"
	@echo "make test-browser  the page in headless Chromium, which is installed from Debian's packages where it is missing"
	@echo "make test-faults   kills, damaged files, full disks and a real Ray cluster (up to 15 minutes)"
	@echo "make test-foreign  the lens on models of other libraries, which are installed for it (2 minutes)"
	@echo "make audit       known vulnerabilities of what is installed"
	@echo "make test-wheel  build the wheel, install it into an empty environment and run its demo"
	@echo "make coverage-table  check every timm family and the models of other libraries again, and write docs/coverage.md"
	@echo "make docs        the site, with its gallery and its notebooks executed: build/site/index.html (3 minutes)"
	@echo "make format      let ruff format and fix"

setup: $(READY)

$(READY): pyproject.toml src/nearsight/version.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 …"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/nearsight demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest $(BESIDE) -m "$(QUICK)"

# For whoever changes how results are told: no number may move, nor a word by accident.
golden: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/golden.py $(STUDIES)

# Apart from the tests, because it makes them a third slower.
coverage: $(READY)
	$(BIN)/coverage erase
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest $(BESIDE) -m "$(QUICK)"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --fail-under=90

test-slow: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	$(BIN)/pytest -m slow

test-gpu: $(READY)
	$(BIN)/pytest -m gpu

test-browser: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[browser]'
	command -v chromium > /dev/null || apt-get install --quiet --yes --no-install-recommends chromium
	$(BIN)/pytest -m browser

test-faults: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[ray]'
	OMP_NUM_THREADS=1 $(BIN)/pytest $(BESIDE) -m faults

test-foreign: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[foreign]'
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/lens/test_foreign.py

audit: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pip-audit
	mkdir -p build
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+[^ ;]*//' > build/audit.txt
	$(BIN)/pip-audit --strict --no-deps --disable-pip --progress-spinner off --requirement build/audit.txt

test-wheel: $(READY)
	rm -rf build/wheel && mkdir -p build/wheel
	$(BIN)/python -m build --quiet --wheel --outdir build/wheel
	$(PYTHON) -m venv build/wheel/empty
	build/wheel/empty/bin/python -m pip install --quiet --disable-pip-version-check build/wheel/*.whl
	cd build/wheel && empty/bin/nearsight demo

coverage-table: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[foreign]'
	PYTHONPATH=tests/lens $(BIN)/python -W ignore -m vit_references.write_table docs/coverage.md

# The studies' pages and the notebooks' outputs are made first; the last step is then quick, and fails on any broken link.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	OMP_NUM_THREADS=1 $(BIN)/python docs/site/gallery.py
	OMP_NUM_THREADS=1 $(BIN)/python docs/site/notebooks.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "Site: build/site/index.html"

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf build dist .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .hypothesis
