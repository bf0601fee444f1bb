# All targets use .venv, which `make setup` creates; you need not activate it.
# PYTHON=/path/to/python3.12 chooses the interpreter of .venv. ARGS="-k name" is passed to pytest, SEEDS=100000 to the simulation.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PREPARED := $(VENV)/.spark-prepared
DOCS := $(VENV)/.docs
DIST := $(VENV)/.dist
COMPILED := $(VENV)/.compiled
# A temporary folder for Debian's package of Prometheus.
PROMETHEUS := $(VENV)/prometheus
# The tests of `make check`. None of them starts Spark, a server or the command.
LIGHT := tests/unit tests/contract tests/loop tests/sim/test_simulation.py
# Three processes run the tests, whole scopes at a time (tests/conftest.py), since tests often wait for a broker, a lock or the
# start of a JVM. ARGS="-n0" runs all in one process.
SIDE_BY_SIDE := -n 3 --no-loadscope-reorder
# PySpark is distributed as source, so pip builds a wheel of it and unpacks it again. Without compression that is much faster.
UNCOMPRESSED := $(VENV)/uncompressed.cfg
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# With this variable set, each of the hundreds of Python processes that tests start would compile pandas, Spark and this project again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-svg ui-picture rocketmq check tools test test-all lint docs reference dist sbom simulate evidence bench bench-rocketmq bench-kafka bench-report soak clean

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

# If this step fails, Spark only starts later.
$(PREPARED): $(STAMP)
	@echo "setup: letting Spark start sooner, once"
	@$(BIN)/orderedmq spark prepare || true
	@touch $@

demo: $(PREPARED) ## send a year of flights through ordered queues, kill the job half-way, resume, audit
	@$(BIN)/orderedmq demo
	@echo "The command orderedmq is in $(BIN). To call it by its name, run first: . $(BIN)/activate"

rocketmq: $(STAMP) ## run a RocketMQ on this machine until Ctrl-C; ARGS="--port 9999" is passed to it
	@$(BIN)/orderedmq rocketmq up $(ARGS)

# Compile once in one process. Otherwise the test processes would all compile pandas, Spark and the tests at the same time.
# Errors are ignored here, because the test run itself reports them.
$(COMPILED): $(STAMP)
	@echo "test: compiling the tests and what they import"
	@$(BIN)/python -m pytest --collect-only -qq $(LIGHT) > /dev/null 2>&1 || true
	@touch $@

check: $(STAMP) ## run lint, mypy and the tests that start no Spark, server or command
	@$(MAKE) --no-print-directory -j 2 lint check-tests

# Property tests run few examples here, more in `make test`, and most in `make test-all`.
.PHONY: check-tests
check-tests: $(COMPILED)
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) --hypothesis-profile quick --seeds 100 -q -m "not spark and not rocketmq" $(LIGHT) $(ARGS)

# Debian's packages. If they cannot be installed, the tests that need them are skipped, except in CI. Only the program promtool of Prometheus
# is copied into .venv, because installing the package would start a server.
tools: ## install missing tools of the tests with apt-get: Chromium with its driver, strace, promtool
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

# Everything that tests need in addition to .venv.
.PHONY: ready
ready: $(COMPILED) $(PREPARED)

test: ready tools ## run the tests and print the time of each folder; ARGS="-k name" runs only those
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

test-all: ready tools ## also run the long tier: whole environments, every release of RocketMQ, damage to each used piece of a store
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) --nightly $(ARGS)

lint: $(STAMP) ## run ruff, strict mypy and the contracts of imports, and check the workflows
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo --no-cache
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(BIN)/zizmor --offline --quiet --no-progress --min-severity medium .github/workflows

docs: $(DOCS) ## build the site into build/site; a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "docs: build/site/index.html"

$(DOCS): $(STAMP)
	@echo "docs: installing what builds the site"
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[docs]'
	@touch $@

dist: $(DIST) ## build a release into dist (the wheel from the sdist) and check both as a package index does
	@$(BIN)/validate-pyproject pyproject.toml > /dev/null
	@rm -rf dist
	@SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)} $(BIN)/python -m build --no-isolation
	@$(BIN)/python -m twine check --strict dist/*

# An environment with only the dependencies of the core, without pip.
sbom: $(DIST) ## write sbom.cdx.json, the list of the packages on which the core depends, which the wheel contains
	@rm -rf build/sbom && $(BIN)/python -m venv --without-pip build/sbom
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' > build/sbom/needs.txt
	@$(PIP) --python build/sbom/bin/python install --no-compile --constraint constraints.txt --requirement build/sbom/needs.txt
	@env -u SOURCE_DATE_EPOCH $(BIN)/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible --output-file sbom.cdx.json build/sbom/bin/python

$(DIST): $(STAMP)
	@echo "dist: installing what checks a release"
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[dist]'
	@touch $@

reference: $(STAMP) ## write the generated parts of the documents, and the diagrams
	@$(BIN)/python docs/generate.py && $(BIN)/python docs/diagrams.py

demo-svg: $(PREPARED) ## record the demo as docs/demo.svg, a picture in the README
	@$(BIN)/python docs/record_demo.py

ui-picture: $(STAMP) tools ## take docs/ui.png, the picture of the web page in the README
	@$(BIN)/python docs/picture_ui.py

simulate: $(STAMP) ## run queries of a group with simulated faults; SEEDS=100000 sets the number of seeds
	@$(BIN)/python -m tests.sim --seeds $(or $(SEEDS),10000) $(ARGS)

evidence: ready tools ## run the tests of faults one by one, and keep what they count for docs/reliability.md
	@$(BIN)/python -m tests.evidence $(ARGS)
	@$(MAKE) --no-print-directory reference

bench: $(STAMP) ## measure source, sink and broker against their ceilings
	@$(BIN)/python -m bench.run

bench-rocketmq: $(STAMP) ## measure source, sink and broker over RocketMQ; RUNS=3 measures three times
	@for run in $$(seq $(or $(RUNS),1)); do $(BIN)/python -m bench.run --rocketmq || exit 1; done

bench-kafka: $(STAMP) ## compare source and sink with Spark's Kafka connector; RUNS=3 measures three times
	@for run in $$(seq $(or $(RUNS),1)); do $(BIN)/python -m bench.run --kafka || exit 1; done

soak: $(STAMP) ## run 20,000 micro-batches of each kind and keep their memory use
	@$(BIN)/python -m bench.soak --keep $(ARGS)

bench-report: $(STAMP) ## print the ranges of the kept runs of these benchmarks
	@$(BIN)/python -m bench.run --report

clean: ## remove .venv and all files that tools create
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis spark-warehouse metastore_db derby.log artifacts
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
