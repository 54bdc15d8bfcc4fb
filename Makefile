# Everything is in .venv; outside of this folder there are only the caches of pip and vitlab (~/.cache).
PYTHON ?= python3
BIN := .venv/bin
STUDY ?= pipelines/quickstart.yaml
# Of the mutants of make fuzz; each day has its own.
SEED ?= $(shell date +%Y%m%d)
# Each plugin is a distribution with its own tests; "make test" installs and tests all of them.
PLUGINS := $(wildcard plugins/*/pyproject.toml)
TYPES := $(BIN)/mypy && $(BIN)/lint-imports
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal --basetemp .venv/tests

# Otherwise matplotlib writes its list of fonts to the home folder.
export MPLCONFIGDIR := $(CURDIR)/.venv/matplotlib

# Delete incomplete targets of failed commands.
.DELETE_ON_ERROR:

.PHONY: demo test test-slow test-gpu gpu-dry-run check style bench bench-gpu soak fuzz shape reference docs setup clean

demo: .venv/ready
	$(BIN)/vitlab run $(STUDY)

# Types and imports are checked beside the tests; what was found is printed at the end.
test: style
	($(TYPES)) > .venv/types.log 2>&1 & types=$$!; trap 'kill $$types 2>/dev/null' INT TERM; \
	$(PYTEST) -m "not slow"; tests=$$?; \
	wait $$types; types=$$?; cat .venv/types.log; exit $$((tests || types))

# The tests that take about a second each, or more; CI runs them after the others.
test-slow: .venv/ready-dev
	$(PYTEST) -m slow

# Only the tests that need a CUDA device.
test-gpu: .venv/ready-dev
	@if $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
	  OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m gpu --basetemp .venv/tests-gpu tests; \
	else echo "test-gpu: NOT RUN, because torch finds no CUDA device here"; fi

# Needs no GPU; takes some minutes.  ARMS="base position" selects arms by parts of their names, ARMS=--steps is fast.
gpu-dry-run: .venv/ready-dev
	OMP_NUM_THREADS=1 $(BIN)/python tools/gpu_dry_run.py $(ARMS)

check: style
	$(TYPES)

style: .venv/ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# How much there is to read, and how many files a change touches.
shape: .venv/ready-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s -n 0 tests/test_shape.py \
	  tests/test_sections.py::test_plugin_file_adds_section_to_every_format \
	  tests/test_engines.py::test_engine_of_a_file_trains_a_study

# Only the benchmarks need vit-pytorch.
bench: .venv/ready-dev
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt vit-pytorch==1.26.11
	OMP_NUM_THREADS=1 $(BIN)/python tools/benchmarks/run.py

# For one GPU: a quarter of an hour, and a table for BENCHMARKS.md.  It runs on a CPU with SMALL=--small.
bench-gpu: .venv/ready-dev
	$(BIN)/python tools/benchmarks/gpu.py $(SMALL)

# Half an hour of faults; only this target installs Ray.
soak: .venv/ready-dev
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[ray]"
	OMP_NUM_THREADS=1 $(BIN)/python tools/soak.py

# Damaged study files and stores, and what commands are given; a finding is printed with the input that repeats it.
fuzz: .venv/ready-dev
	OMP_NUM_THREADS=1 $(BIN)/python tools/fuzz_studies.py --inputs 30000 --processes 2 --seed $(SEED)
	OMP_NUM_THREADS=1 $(BIN)/python tools/fuzz_studies.py --inputs 6000 --processes 2 --seed every
	OMP_NUM_THREADS=1 $(BIN)/python tools/fuzz_store.py --inputs 3000 --seed $(SEED)
	OMP_NUM_THREADS=1 $(BIN)/python tools/fuzz_inputs.py --inputs 5000 --seed $(SEED)

# Pages of the reference, which are in the repository: after a change of options, commands or docstrings.
reference: .venv/ready-dev
	$(BIN)/python docs/reference.py

# Tests build the site, too.  It is read from .venv/site/index.html, without a server.
docs: reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q -f docs/mkdocs.yml -d $(CURDIR)/.venv/site

setup: .venv/ready-dev

# Debian's Python has no ensurepip without python3-venv; its pip can install into the environment instead.
.venv/bin/python:
	if $(PYTHON) -c "import ensurepip" 2>/dev/null; then $(PYTHON) -m venv .venv; else \
	  $(PYTHON) -m venv --without-pip .venv && \
	  $(PYTHON) -m pip --disable-pip-version-check --python .venv/bin/python install -q pip; fi

# The constraints pin exact versions; on a machine with CUDA the same pins resolve to the CUDA builds.
.venv/ready: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e .
	touch $@

.venv/ready-dev: .venv/ready $(PLUGINS)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt $(PLUGINS:%/pyproject.toml=-e %)
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
