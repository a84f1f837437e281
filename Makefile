# One entry point for everything that is done with this tree. `make` alone explains the targets.
#
# Rules of this file: it works from a clean clone and from a directory whose path contains a space, so every
# path is relative and tools are run as modules of the environment (.venv/bin/python -m …); a target that needs
# something installs it or says in one line what is missing.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-builtin-rules --no-print-directory

# Tests start hundreds of daemons: none shall compile the sources anew. A quarter of its start would go into that.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
# Three on two cores, for a third of the time tests wait: for a time-out, or a member to be missed.
PYTEST_WORKERS ?= 3
PYTEST_ARGS ?=
DEMO_ARGS ?=
RUN ?=
EXAMPLES ?= 2000
SIM_ARGS ?=
TIER ?= all

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.stamp
PIP_INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check
PYTEST := $(PY) -m pytest
LINT_IMPORTS := $(PY) -c 'from importlinter.cli import lint_imports_command as run; run()' --no-logo
# Spark runs on Java, which is looked up (and where possible installed) only by the targets that need it. Its workers
# would run the first python3 of PATH, and SPARK_HOME would bring in another Spark: both are those of the environment.
WITH_JAVA := JAVA_HOME="$$(sh scripts/java.sh)" || exit 1; PYSPARK_PYTHON="$$(pwd)/$(PY)"; \
  export JAVA_HOME PYSPARK_PYTHON; unset SPARK_HOME;
# The columnar engine is built in place, where an editable install has it, and where spark.jars takes it from.
BUILD_JAR := spark_connector/jvm/build.py
# The native core likewise. Without a compiler everything is done in Python, and a line says so.
BUILD_NATIVE := core/native/build.py
# The same tests with the sanitizers of the compiler, in a copy of the package that is found before the tree's.
NATIVE_ASAN := build/native-asan
NATIVE_TESTS := tests/unit/core/test_native.py tests/unit/core/format/test_chunk.py tests/unit/core/format/test_header_table.py \
  tests/unit/core/format/lean tests/unit/core/format/test_joining.py tests/unit/broker/test_native_append.py \
  tests/unit/broker/test_native_taking.py tests/unit/backup/test_native_taking.py tests/unit/broker/test_write.py \
  tests/unit/client/test_bundles.py tests/property/test_native.py tests/property/test_lean.py \
  tests/property/test_joining.py
# Tests of several coordinators run a ZooKeeper of their own, on that Java.
WITH_ZOOKEEPER := sh scripts/zookeeper.sh || exit 1;
# Tests of kera connect run a Kafka and a PostgreSQL; where they cannot be had, these tests are skipped.
WITH_OTHERS := sh scripts/kafka.sh || true; sh scripts/postgres.sh || true;
# Tests of the console look at its pages with Chromium.
WITH_CHROMIUM := sh scripts/chromium.sh >/dev/null || exit 1;
# Tests in one group share a worker; groups come in the order of collection, which tests/conftest.py decides.
# A test that hangs ends its worker, and with the run: what is left of its group, nobody would be given.
PARALLEL = -n $(PYTEST_WORKERS) --dist loadgroup --no-loadscope-reorder --max-worker-restart 0
# The tiers of tests, see docs/testing.md.
TIER_quick := -m "not slow"
TIER_all := --hypothesis-profile full --hypothesis-seed "$$seed"
WITH_SEED := seed="$(SEED)"; seed="$${seed:-$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}"; \
  echo "random examples: repeat them with SEED=$$seed"; \
  export KERA_FUZZ_SEED="$$seed" KERA_SLOW_NETWORK=1 KERA_TESTS_FORK=0;

.PHONY: help setup jar demo demo-check test test-all test-again test-bench test-fast coverage check check-all lint types proto proto-check go
.PHONY: bench bench-age bench-experiments bench-smoke chaos fuzz-log fuzz-replication fuzz-native fuzz-chunks fuzz-structures fuzz-wire constraints clean
.PHONY: docs dist test-spark-versions test-lakehouse test-native-asan sim sim-mutants

# Versions of Spark that the connector works with, besides the one that is pinned.
SPARK_VERSIONS ?= 4.0 4.1 4.2
# With all that it needs beside what is pinned.
LAKEHOUSE := deltalake==1.6.6 arro3-core==0.9.1 deprecated==1.3.1 wrapt==2.5.2

help: ## Show this list.
	@echo "KerA in Python: make <target>"
	@sed -n 's/^\([a-z][a-z-]*\):[^#]*## \(.*\)/\1|\2/p' Makefile | \
	  while IFS='|' read -r name text; do printf '  %-18s %s\n' "$$name" "$$text"; done
	@echo "Variables: PYTHON=$(PYTHON)  PYTEST_ARGS  PYTEST_WORKERS=$(PYTEST_WORKERS)  DEMO_ARGS  RUN"
	@echo "           SEED  EXAMPLES=$(EXAMPLES)  TIER=$(TIER)"

setup: $(STAMP) ## Create .venv with what constraints.txt pins, and install this tree into it, with its native core.
	@$(PY) $(BUILD_NATIVE) --auto

# An environment knows its path and this tree's, so one that was copied or moved along with the tree is made anew.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif
$(STAMP): pyproject.toml $(wildcard distributions/*/pyproject.toml) bench/pyproject.toml constraints.txt
	@PYTHON="$(PYTHON)" sh scripts/venv.sh "$(VENV)"
	@echo "setup: installing the versions pinned in constraints.txt (a minute or two the first time)"
	@$(PIP_INSTALL) -c constraints.txt --upgrade pip
	@$(PIP_INSTALL) --build-constraint constraints.txt -r constraints.txt
	@$(PIP_INSTALL) -c constraints.txt --no-build-isolation -e '.[dev]' $(patsubst %/pyproject.toml,-e ./%,$(wildcard distributions/*/pyproject.toml)) ./bench
	@pwd -P >"$@"
	@echo "setup: done, run anything with .venv/bin/kera or make <target>"

# Asking whether the jar is current is quick and takes no Java, so it is asked each time.
jar: setup ## Build the columnar engine of the Spark connector, unless it is current: Java, compiled against Spark.
	@$(PY) $(BUILD_JAR) --check 2>/dev/null || { \
	  JAVA_HOME="$$(sh scripts/java.sh --compiler)" && export JAVA_HOME && $(PY) $(BUILD_JAR); }

demo: jar ## Run the demonstration: a cluster, an ingest, Spark reading it. DEMO_ARGS are passed on.
	@$(WITH_JAVA) $(PY) -m demo $(DEMO_ARGS)

demo-check: jar ## Run the short form of the demonstration that checks its own results.
	@$(WITH_JAVA) $(PY) -m demo --check

test: jar ## Run every feature once, with real daemons, ZooKeeper and Spark. PYTEST_ARGS are passed on.
	@$(WITH_ZOOKEEPER) $(WITH_CHROMIUM) $(WITH_JAVA) $(PYTEST) $(PARALLEL) $(TIER_quick) $(PYTEST_ARGS)

test-all: jar ## Run all tests, with more examples, of SEED (a new one if it is not given). PYTEST_ARGS are passed on.
	@$(WITH_ZOOKEEPER) $(WITH_CHROMIUM) $(WITH_JAVA) $(WITH_SEED) \
	  $(PYTEST) $(PARALLEL) $(TIER_all) tests bench/tests $(PYTEST_ARGS)

test-again: jar ## Run what failed in the last make test again, alone: three tests at most. What passes now is flaky: a defect, too.
	@test -s build/failed-tests || { echo "$@: no test failed, or more than three, or the run was cut short" >&2; exit 1; }; \
	  $(WITH_ZOOKEEPER) $(WITH_CHROMIUM) $(WITH_JAVA) $(PYTEST) @build/failed-tests

test-bench: setup ## Run the tests of the benchmarks' own code. PYTEST_ARGS are passed on.
	@$(PYTEST) $(PARALLEL) bench/tests $(PYTEST_ARGS)

test-fast: setup ## Run the unit and property tests: no daemons, no Spark.
	@$(PYTEST) $(PARALLEL) $(TIER_quick) $(wildcard tests/unit tests/property tests/simulation) $(PYTEST_ARGS)

sim: setup ## Simulate the whole cluster, from SEED on (1), SEEDS of them (1). SIM_ARGS=--trace prints all of it.
	@$(PY) -m tests.simulation --seed "$(or $(SEED),1)" --seeds "$(or $(SEEDS),1)" $(SIM_ARGS)

sim-mutants: setup ## Find deliberate defects by simulation, SEEDS of each at most (500). SIM_ARGS are passed on.
	@$(PY) -m tests.simulation.mutants --seeds "$(or $(SEEDS),500)" $(SIM_ARGS)

coverage: jar ## Run all tests, or TIER=quick those of `make test`, and print the share of lines and branches per package.
	@$(WITH_ZOOKEEPER) $(WITH_CHROMIUM) $(WITH_JAVA) $(if $(filter all,$(TIER)),$(WITH_SEED)) \
	  $(PYTEST) $(PARALLEL) $(TIER_$(TIER)) --cov --cov-report= --cov-report=json:build/coverage-$(TIER).json $(PYTEST_ARGS)
	@$(PY) -m scripts.coverage_table build/coverage-$(TIER).json

test-native-asan: setup ## Test the native core with the sanitizers of the compiler: EXAMPLES random ones each, of SEED.
	@rm -rf $(NATIVE_ASAN) && mkdir -p $(NATIVE_ASAN) && cp -R core $(NATIVE_ASAN)
	@$(PY) $(NATIVE_ASAN)/core/native/build.py --sanitize
	@$(WITH_SEED) PYTHONPATH="$(NATIVE_ASAN)/core" PYTHONMALLOC=malloc KERA_FUZZ_EXAMPLES="$(EXAMPLES)" \
	  LD_PRELOAD="$$(gcc -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 \
	  $(PYTEST) -p no:xdist -q -s $(NATIVE_TESTS) --hypothesis-seed="$$seed" --timeout 0 $(PYTEST_ARGS)

test-spark-versions: setup ## Test what other versions of Spark can do: fetches each, some 400 MB. SPARK_VERSIONS="4.1".
	@$(WITH_JAVA) KERA_SPARK_VERSIONS="$(SPARK_VERSIONS)" $(PYTEST) tests/spark/test_spark_versions.py $(PYTEST_ARGS)

test-lakehouse: jar ## Test the recipe for Delta Lake with the real library: fetches it, some 50 MB.
	@$(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/lakehouse $(LAKEHOUSE)
	@$(WITH_JAVA) PYTHONPATH=$(VENV)/lakehouse $(PYTEST) tests/spark/test_lakehouse.py $(PYTEST_ARGS)

check: lint types proto-check docs bench-age test ## Run what CI runs: lint, types, layers, generated code, docs, `make test`.

check-all: lint types proto-check docs bench-age test-all ## The same with `make test-all`: what CI runs with KERA_CI_FULL=1.

lint: setup ## Check style, formatting and layers.
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(LINT_IMPORTS)

types: setup ## Check types.
	@$(PY) -m mypy

proto: setup ## Regenerate the messages of proto/kera/v1 in place, and where there is Go those of clients/go.
	@PYTHON=$(PY) sh scripts/proto.sh proto
	@if sh scripts/go.sh --look >/dev/null; then PYTHON=$(PY) sh scripts/proto-go.sh; fi

proto-check: setup ## Check that the generated messages are current.
	@PYTHON=$(PY) sh scripts/proto-check.sh
	@PYTHON=$(PY) sh scripts/proto-go.sh --check

go: ## Build the commands of clients/go into build/go, and run its own tests.
	@go="$$(sh scripts/go.sh)" && mkdir -p build/go && cd clients/go && \
	  "$$go" build -o ../../build/go/ ./cmd/... && "$$go" vet ./... && "$$go" test ./...

bench: setup ## List the benchmarks, or run one: RUN="compare --quick".
	@$(PY) -m bench $(RUN)

bench-age: setup ## Warn of recorded results that were measured more than 200 commits ago.
	@$(PY) -m bench age --old

bench-experiments: setup ## Repeat the thesis's experiments on a machine without other work, five rounds each: three hours.
	@$(PY) -m bench experiments --rounds 5 --load-max 0.5

bench-smoke: setup ## Compare ratios with those that were recorded: three minutes. The same as bench RUN=smoke.
	@$(PY) -m bench smoke

fuzz-log: setup ## Run the log against a disk that breaks: EXAMPLES random histories of SEED (a new one if it is not given).
	@seed="$(SEED)"; seed="$${seed:-$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}"; \
	  echo "fuzz-log: SEED=$$seed EXAMPLES=$(EXAMPLES)"; \
	  KERA_FUZZ_SEED="$$seed" KERA_FUZZ_EXAMPLES="$(EXAMPLES)" \
	  $(PYTEST) -p no:xdist -q tests/property/test_log_machine.py --timeout 0 --show-capture=no

fuzz-replication: setup ## Run replication against backups that fail: EXAMPLES random histories of SEED, likewise.
	@seed="$(SEED)"; seed="$${seed:-$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}"; \
	  echo "fuzz-replication: SEED=$$seed EXAMPLES=$(EXAMPLES)"; \
	  KERA_FUZZ_EXAMPLES="$(EXAMPLES)" $(PYTEST) -p no:xdist -q tests/property/test_replication.py \
	  --hypothesis-seed="$$seed" --timeout 0 --show-capture=no

fuzz-native: setup ## Compare the native core with Python over EXAMPLES random inputs of SEED each.
	@$(WITH_SEED) KERA_FUZZ_EXAMPLES="$(EXAMPLES)" \
	  $(PYTEST) -p no:xdist -q tests/property/test_native.py --hypothesis-seed="$$seed" --timeout 0

fuzz-chunks: jar ## Open EXAMPLES spoilt chunks, from SEED on, as the SDK and both Spark engines do: none may end a process.
	@$(PY) -m tests.chaos.chunks --examples $(EXAMPLES) --seed "$(or $(SEED),1)"
	@JAVA_HOME="$$(sh scripts/java.sh --compiler)" && export JAVA_HOME && PATH="$$JAVA_HOME/bin:$$PATH" \
	  $(PY) -m tests.chaos.columnar_chunks --examples $(EXAMPLES) --seed "$(or $(SEED),1)"

fuzz-structures: jar ## Open EXAMPLES chunks of each version whose structure is wrong, from SEED on: in C, Python, Java and Go.
	@set -e; fuzz="--structure --examples $(EXAMPLES) --seed $(or $(SEED),1)"; \
	  $(PY) -m tests.chaos.chunks $$fuzz --version 2; \
	  KERA_NATIVE=0 $(PY) -m tests.chaos.chunks $$fuzz --version 2; \
	  $(PY) -m tests.chaos.chunks $$fuzz --version 1; \
	  JAVA_HOME="$$(sh scripts/java.sh --compiler)"; export JAVA_HOME; PATH="$$JAVA_HOME/bin:$$PATH"; \
	  for version in 2 1; do $(PY) -m tests.chaos.columnar_chunks $$fuzz --version $$version; done; \
	  if go="$$(sh scripts/go.sh --look)"; then $(PY) -m tests.chaos.go_chunks --go "$$go" $${fuzz#--structure}; fi

fuzz-wire: jar ## Send everything that a peer sends, spoilt, from SEED on (1), for SECONDS (600). FUZZ_ARGS="--only http" is a part.
	@JAVA_HOME="$$(sh scripts/java.sh --compiler)" && export JAVA_HOME && PATH="$$JAVA_HOME/bin:$$PATH" \
	  $(PY) -m tests.fuzz --seed "$(or $(SEED),1)" --seconds "$(or $(SECONDS),600)" $(FUZZ_ARGS)

chaos: $(if $(filter push columnar spark epochs,$(RUN)),jar,setup) ## List the programs that break things under load, or run one: RUN="kill --rounds 20".
	@$(if $(filter push columnar spark epochs,$(RUN)),$(WITH_JAVA)) $(if $(filter access --zookeeper,$(RUN)),$(WITH_ZOOKEEPER)) \
	  $(PY) -m tests.chaos $(RUN)

docs: setup ## Build the documentation as a site, in build/site; a link to nowhere ends it.
	@$(PY) -m scripts.site

dist: jar ## Build what is published into dist/, and check it: sdist, wheel with jar and native core, bill of materials.
	@$(WITH_JAVA) $(PY) -m scripts.dist

constraints: ## Resolve the newest versions anew and write constraints.txt (then run make check).
	@PYTHON="$(PYTHON)" sh scripts/constraints.sh

clean: ## Remove .venv, caches and build outputs.
	rm -rf "$(VENV)" build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage
	rm -rf spark-warehouse metastore_db derby.log spark_connector/kera/spark_connector/jars core/kera/core/_native*.so
	find . -path ./.git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
