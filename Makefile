# Everything runs from .venv, which `make setup` creates; nothing needs to be activated.
# PYTHON=/path/to/python3.12 chooses the interpreter of .venv; ARGS="-k name" is passed to pytest; SEEDS=100000 to simulate.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PREPARED := $(VENV)/.spark-prepared
DOCS := $(VENV)/.docs
DIST := $(VENV)/.dist
COMPILED := $(VENV)/.compiled
# Where Debian's package of Prometheus is unpacked for a moment.
PROMETHEUS := $(VENV)/prometheus
# What `make check` runs: nothing here starts Spark, a server or the command.
LIGHT := tests/unit tests/contract tests/loop tests/sim/test_simulation.py
# Three processes run the tests, whole scopes at a time (tests/conftest.py), since tests often wait for a broker, a lock or the
# start of a JVM. ARGS="-n0" runs all in one process.
SIDE_BY_SIDE := -n 3 --no-loadscope-reorder
# Spark comes as source: pip builds a wheel of it and unpacks it again. Most of that time went into compressing its jars.
UNCOMPRESSED := $(VENV)/uncompressed.cfg
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# With this variable set, each of the hundreds of Python processes that tests start would compile pandas, Spark and this project anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-svg ui-picture rocketmq check tools budget test test-all lint docs reference dist simulate bench bench-rocketmq bench-kafka bench-report soak clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with pinned versions and this project, editable

$(STAMP): pyproject.toml constraints.txt
	@if [ ! -x $(BIN)/python ]; then \
	  for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do \
	    if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      echo "setup: creating $(VENV) with $$("$$python" --version)"; \
	      "$$python" -m venv $(VENV) && break || exit 1; \
	    fi; \
	  done; \
	  if [ ! -x $(BIN)/python ]; then \
	    echo "setup: needs Python 3.11 or newer with its venv module; install it or name it: make setup PYTHON=/path/to/python3.11" >&2; \
	    exit 1; \
	  fi; \
	fi
	@echo "setup: installing the build tools"
	@$(PIP) install --constraint constraints.txt hatchling editables setuptools wheel
	@echo "setup: installing orderedmq and its dependencies (the first time with Spark, about 500 MB)"
	@printf '[bdist_wheel]\ncompression = stored\n' > $(UNCOMPRESSED)
	@DIST_EXTRA_CONFIG=$(abspath $(UNCOMPRESSED)) $(PIP) install --no-compile --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@
	@echo "setup: done"

# Without it Spark starts later, and nothing else is different.
$(PREPARED): $(STAMP)
	@echo "setup: letting Spark start sooner, once"
	@$(BIN)/orderedmq spark prepare || true
	@touch $@

demo: $(PREPARED) ## play a year of flights through ordered queues, kill the job half-way, resume, audit
	@$(BIN)/orderedmq demo

rocketmq: $(STAMP) ## run a RocketMQ on this machine until Ctrl-C; ARGS="--port 9999" is passed to it
	@$(BIN)/orderedmq rocketmq up $(ARGS)

# Once, in one process: otherwise each of the processes below would compile pandas, Spark and the tests for itself, at the same time.
# If the tests cannot be collected, the run itself says why.
$(COMPILED): $(STAMP)
	@echo "test: compiling the tests and what they import"
	@$(BIN)/python -m pytest --collect-only -qq $(LIGHT) > /dev/null 2>&1 || true
	@touch $@

check: $(STAMP) ## lint, types and the tests that start no Spark, no server and no command
	@$(MAKE) --no-print-directory -j 2 lint check-tests

# Property tests run few examples here; `make test` runs more, and `make test-all` the most.
.PHONY: check-tests
check-tests: $(COMPILED)
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) --hypothesis-profile quick --seeds 100 -q -m "not spark and not rocketmq" $(LIGHT) $(ARGS)

# Debian's packages. Where they cannot be had, the tests that need them are skipped, but not in CI. Of Prometheus only the program promtool
# is taken, into .venv: the package would start a server.
tools: ## install Chromium with its driver, strace and promtool, which tests need, if they are missing and apt-get can
	@missing=; \
	command -v chromedriver >/dev/null || missing="chromium chromium-driver"; \
	command -v strace >/dev/null || missing="$$missing strace"; \
	promtool=; command -v promtool >/dev/null || [ -x $(BIN)/promtool ] || promtool=promtool; \
	if [ -z "$$missing$$promtool" ]; then exit 0; fi; \
	root=; if [ "$$(id -u)" != 0 ]; then root="sudo -n"; fi; \
	echo "tools: installing" $$missing $$promtool; \
	{ command -v apt-get && $$root apt-get -qq update; } >/dev/null 2>&1 || true; \
	if [ -n "$$missing" ] && ! { \
	  DEBIAN_FRONTEND=noninteractive $$root apt-get -qq install --no-install-recommends $$missing; } >/dev/null 2>&1; then \
	  echo "tools: apt-get cannot install $$missing here; install it yourself, or the tests that need it are skipped" >&2; \
	fi; \
	if [ -n "$$promtool" ] && ! { rm -rf $(PROMETHEUS) && mkdir -p $(PROMETHEUS) $(BIN) && \
	  (cd $(PROMETHEUS) && apt-get -qq download prometheus && dpkg-deb -x prometheus_*.deb .) && \
	  cp $(PROMETHEUS)/usr/bin/promtool $(BIN)/promtool; } >/dev/null 2>&1; then \
	  echo "tools: apt-get cannot fetch promtool here; install it yourself, or the tests that need it are skipped" >&2; \
	fi; \
	rm -rf $(PROMETHEUS)

budget: $(STAMP) ## hold the CPU time of test modules to what the last `make test` needed, or to RUNS="CLONE/.pytest_cache/v/cpu ..."
	@$(BIN)/python -m tests.budget $(RUNS)

# What tests need besides .venv.
.PHONY: ready
ready: $(COMPILED) $(PREPARED)

test: ready tools ## run the tests and print the time of each folder; ARGS="-k name" runs only those
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

test-all: ready tools ## run the long tier as well: whole environments, every release of RocketMQ, damage to each used field of a store
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) --nightly $(ARGS)

lint: $(STAMP) ## ruff, strict mypy, and expressions that make a reader stop
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m tests.wording

docs: $(DOCS) ## build the site into build/site; a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "docs: build/site/index.html"

$(DOCS): $(STAMP)
	@echo "docs: installing what builds the site"
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[docs]'
	@touch $@

dist: $(DIST) ## build a release into dist, the wheel from the sdist, and check both as an index does
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation
	@$(BIN)/python -m twine check --strict dist/*

$(DIST): $(STAMP)
	@echo "dist: installing what checks a release"
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[dist]'
	@touch $@

reference: $(STAMP) ## write what docs/reference has of the code: options, conditions, the command's help
	@$(BIN)/python docs/generate.py && $(BIN)/python docs/diagrams.py

demo-svg: $(PREPARED) ## record the demo as docs/demo.svg, the picture in the README
	@$(BIN)/python docs/record_demo.py

ui-picture: $(STAMP) tools ## take docs/ui.png, the picture of the web page in the README
	@$(BIN)/python docs/picture_ui.py

simulate: $(STAMP) ## run queries of a group through simulated faults; SEEDS=100000 says how many seeds
	@$(BIN)/python -m tests.sim --seeds $(or $(SEEDS),10000)

bench: $(STAMP) ## measure source, sink and broker against their ceilings
	@$(BIN)/python -m bench.run

bench-rocketmq: $(STAMP) ## measure what runs over RocketMQ; RUNS=3 says how many times
	@for run in $$(seq $(or $(RUNS),1)); do $(BIN)/python -m bench.run --rocketmq || exit 1; done

bench-kafka: $(STAMP) ## measure Spark's Kafka connector beside source and sink; RUNS=3 says how many times
	@for run in $$(seq $(or $(RUNS),1)); do $(BIN)/python -m bench.run --kafka || exit 1; done

soak: $(STAMP) ## run 20,000 micro-batches of each kind and keep what memory did; ARGS="--spark" in Spark, which takes hours
	@$(BIN)/python -m bench.soak --keep $(ARGS)

bench-report: $(STAMP) ## print the ranges of the kept runs of all three
	@$(BIN)/python -m bench.run --report

clean: ## remove .venv and all that tools leave behind
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis spark-warehouse metastore_db derby.log artifacts
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
