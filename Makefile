# Commands of this repository; `make` lists them.  Everything runs in .venv, made from requirements.lock.
.DEFAULT_GOAL := help

# The first command that is Python 3.11: the locked DGL has no wheel for a newer one.
is_311 = $(shell $(1) -c 'import sys; print(sys.version_info[:2] == (3, 11))' 2>/dev/null)
PYTHON ?= $(firstword $(foreach p,python3.11 python3,$(if $(filter True,$(call is_311,$(p))),$(p))))

export DGLBACKEND := pytorch
export PYTHONHASHSEED := 0
# Keep freed memory instead of faulting it in again for every temporary tensor: 10-30 % faster steps on a CPU.
export MALLOC_MMAP_THRESHOLD_ := 1073741824
export MALLOC_TRIM_THRESHOLD_ := 4294967296
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The lock holds Linux wheels, named by their hashes; elsewhere pip chooses, held to the tested versions of what is used
# directly.
ifeq ($(shell uname -s),Linux)
PACKAGES := --require-hashes -r requirements.lock
else
PACKAGES := -c constraints.txt setuptools -e '.[vision,graph,text,lightning,notebooks,cluster,book,dev]'
endif

# What the user gives goes to the recipes as it was written, through the environment: a name may hold spaces, quotes or $.
# Where several words may be given, `set -f` keeps the shell from reading * as names of files.
GIVEN := NB SCALE DATASET PARAMS ONLY JOBS CHANGED UPDATE COMPAT IMAGE RUNS UP
$(foreach name,$(GIVEN),$(eval override $(name) := $$(value $(name))))
export $(GIVEN)

# make takes any name: nb=01 would run all notebooks.
GIVEN_IN_LOWER_CASE := nb scale dataset params only jobs changed update compat image runs up
$(foreach name,$(GIVEN_IN_LOWER_CASE),$(if $(filter command,$(origin $(name))),\
  $(error unknown variable $(name)=$(value $(name)); did you mean $(shell echo $(name) | tr a-z A-Z)=$(value $(name))?)))

BIN := .venv/bin
# What pip says on its way is shown where it fails for another reason than that no index can be reached.
SETUP_LOG := .venv/setup.log
NO_NETWORK := "NewConnectionError|Name or service not known|name resolution|Network is unreachable|ConnectTimeout|ProxyError"
CPT := $(BIN)/python -m cpt_lab
# The many processes that tests start compile the package once, also where Python was told to keep no bytecode.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Three processes, for two cores: tests that start programs wait for them. Tests run in any order; only the cells of a
# notebook stay together (tests/conftest.py).
PYTESTS := $(PYTEST) -n 3

.PHONY: help setup lint check test weekly reproduce notebooks book evidence bench demo-check mutants third-party trackers wheel image compat chromium browser lock clean distclean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

setup: .venv/.installed  ## make .venv from requirements.lock

.venv/.packages: requirements.lock
	@[ "$(call is_311,$(or $(PYTHON),false))" = True ] || { \
	  echo "setup needs Python 3.11, found $(or $(PYTHON),none); install it, or name it: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "setup: about 200 packages, 6 GB, into .venv: about two minutes with uv, three to eight with pip"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q --retries 1 uv 2>$(SETUP_LOG) || echo "setup: no uv, pip does the work"
	@if $(BIN)/python -m uv --version >/dev/null 2>&1; then \
	  $(BIN)/python -m uv pip install --compile-bytecode -p $(BIN)/python $(PACKAGES) && exit 0; fi; \
	  $(BIN)/python -m pip install --retries 2 $(PACKAGES) 2>$(SETUP_LOG) && exit 0; \
	  if grep -qE $(NO_NETWORK) $(SETUP_LOG); then \
	    echo "setup: no network: the packages could not be fetched; connect, or set HTTPS_PROXY, and say make setup again" >&2; \
	  else tail -n 15 $(SETUP_LOG) >&2; \
	    echo "setup: the packages could not be installed (see above); is there a network connection, and a proxy set if needed?" >&2; \
	  fi; exit 1
	@touch $@

# The locked setuptools builds the package, so that nothing outside the lock takes part.
.venv/.installed: .venv/.packages pyproject.toml
	@$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	@touch $@
	@echo "setup: done; next: make reproduce, or $(BIN)/jupyter lab"

lint: setup  ## style, types, imports, pages, notebooks, installation files and commit subjects
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select PLW1514 cpt_*  # text files are opened as UTF-8
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile
	$(BIN)/python -m bench.lint

check: lint  ## lint, types and the tests that are not marked slow: while you work
	$(PYTESTS) -m "not slow and not weekly" tests

test: lint  ## lint, types, tests and notebooks; no GPU, no download
	@# builds the C++ kernels where they are not built yet, so that no test waits for them
	@$(BIN)/python -c "import cpt_core; print(cpt_core.backend())"
	$(PYTESTS) -m "not weekly" --nbval-lax --nbval-current-env --nbval-cell-timeout=300 \
	  --nbval-kernel-startup-timeout=300 tests notebooks
	@echo "make test: all checks passed"

weekly: setup  ## the tests that make test leaves out: the wheel, growth of work, models of other libraries
	$(PYTESTS) -m weekly tests

NARROWED = $${NB:+--notebook "$$NB"} $${DATASET:+--dataset "$$DATASET"} $${PARAMS:+--parameter "$$PARAMS"}

reproduce: setup  ## run the notebooks and write a report; NB=03 SCALE=smoke|demo|paper DATASET=cifar10
	@$(CPT) reproduce $${SCALE:+--scale "$$SCALE"} $(NARROWED)

notebooks: setup  ## run the notebooks again and keep their outputs in place
	$(BIN)/python -m book.notebooks

book: setup  ## the site, build/book/index.html: notebooks with their outputs, a reference, the pages; runs nothing
	$(BIN)/python -m book
	$(CPT) explorer build/book/explorer.html --home index.html
	$(BIN)/python -m book.reading_length
	@$(BIN)/python -m book.links build/book
	@echo "book: build/book/index.html"

evidence: setup  ## what the rows say of every claim of the paper, then one row of every store run again and compared
	@$(CPT) claims --evidence
	@$(CPT) verify --rows 1 --cheapest --skip-missing data/results/*.jsonl

bench: setup  ## time of a quantised training step relative to float32
	$(BIN)/python -m bench.step_ratio

demo-check: setup  ## run notebooks 03 to 07 at demo scale; every promised figure and table must be there: 15 minutes; ONLY=03
	set -f; $(BIN)/python -m bench.demo_check $${ONLY:+--only $$ONLY}

mutants: setup  ## make small wrong changes in a copy, each of which must turn a test red: an hour; ONLY=bitops JOBS=2 CHANGED=main
	set -f; $(BIN)/python -m bench.mutants $${ONLY:+--only $$ONLY} $${JOBS:+-j "$$JOBS"} $${CHANGED:+--changed "$$CHANGED"}

third-party: setup  ## torch's databases, invariances of foreign models, tests of transformers; ONLY=layers UPDATE=1
	set -f; $(BIN)/python -m bench.third_party $${ONLY:+--only $$ONLY} $${UPDATE:+--update}

# Their clients need other versions than the lock has: they lie in an environment before the packages of .venv.
.venv/.trackers: .venv/.installed tests/trackers/requirements.lock
	@$(BIN)/python -m venv .venv/trackers
	@echo "import site; site.addsitedir('$(abspath .venv)/lib/python3.11/site-packages')" > \
	  .venv/trackers/lib/python3.11/site-packages/packages_of_venv.pth
	@$(BIN)/python -m uv pip install -q -p .venv/trackers/bin/python --require-hashes -r tests/trackers/requirements.lock || \
	  .venv/trackers/bin/python -m pip install -q --require-hashes -r tests/trackers/requirements.lock
	@touch $@

trackers: .venv/.trackers  ## send rows to TensorBoard, MLflow, Trackio and Weights & Biases through their real clients, offline
	CPT_TRACKERS=1 OMP_NUM_THREADS=1 .venv/trackers/bin/python -m pytest tests/trackers

# From the source distribution, so that nothing gets into the wheel that is not in there.
wheel: setup  ## build dist/*.whl and dist/*.tar.gz, check them, install the wheel elsewhere and run it
	rm -rf build/lib build/bdist.* dist
	$(BIN)/uv build -q --no-build-isolation -p $(BIN)/python
	$(BIN)/uvx twine check --strict dist/*
	$(PYTEST) tests/test_wheel.py

image:  ## build the Docker image (docker, podman or buildah), start it, and run a notebook in it; IMAGE="--base ..."
	set -f; $(PYTHON) -m bench.image $$IMAGE

compat: setup  ## the library alone on Python 3.11 to 3.13, torch 2.6 and newest; COMPAT="--python 3.12 --torch 2.6.0"
	set -f; $(BIN)/python -m bench.compat $$COMPAT

.venv/.browser: .venv/.installed browser/requirements.lock
	@$(BIN)/python -m uv pip install -q -p $(BIN)/python --require-hashes -r browser/requirements.lock || \
	  $(BIN)/python -m pip install -q --require-hashes -r browser/requirements.lock
	@touch $@

chromium: .venv/.browser  ## the Chromium that belongs to Playwright, for make browser
	$(BIN)/playwright install $(if $(CI),--with-deps) chromium

browser: .venv/.browser $(if $(ONLY),,book)  ## notebooks in JupyterLab, report and site in a browser: ten minutes; ONLY=03 or ONLY=explorer
	$(PYTEST) browser $${ONLY:+-k "$$ONLY"}
	@echo "make browser: all is well; screenshots: build/browser"

lock:  ## resolve requirements.lock and constraints.txt again; UP=--upgrade for newer versions
	UV_CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/uv pip compile -q pyproject.toml --all-extras --python-version 3.11 \
	  --no-annotate --no-emit-index-url --generate-hashes $$UP -o requirements.lock
	UV_CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/uv pip compile -q pyproject.toml --all-extras --python-version 3.11 \
	  --no-annotate --no-emit-index-url --no-deps -c requirements.lock -o constraints.txt
	UV_CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/uv pip compile -q --group browser --python-version 3.11 \
	  --no-annotate --no-emit-index-url --generate-hashes -c requirements.lock $$UP -o browser/requirements.lock
	mkdir -p build && grep -E '^(numpy|pandas)==' constraints.txt > build/trackers.txt
	UV_CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/uv pip compile -q --group trackers --python-version 3.11 \
	  --no-annotate --no-emit-index-url --generate-hashes -c build/trackers.txt $$UP -o tests/trackers/requirements.lock

clean:  ## remove caches, builds, pages and reports; RUNS=delete also rows, checkpoints and all else of runs/
	rm -rf runs/reproduce runs/report.html build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@if [ "$$RUNS" = delete ]; then rm -rf runs; elif [ -d runs ]; then \
	  find runs -name '*.jsonl' -exec sh -c 'echo "kept: $$1 ($$(wc -l < "$$1") rows)"' sh {} \; ; \
	  echo "runs/ is kept, with the checkpoints of its rows; make clean RUNS=delete removes it"; fi
	find . \( -path ./.venv -o -path ./data -o -path ./runs -o -path ./.git \) -prune -o \
	  \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -exec rm -rf {} +

distclean: clean  ## clean, and remove .venv too
	rm -rf .venv
