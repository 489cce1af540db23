# `make demo` and `make test` work as the first command on a fresh clone: both set up .venv when it is missing or stale.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stamp
# pip compiles its 20,000 modules one after another, for a minute: here all cores do
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
# What Apache-2.0 may depend on. atheris (Apache-2.0) and axe-playwright-python (MIT), used by tests alone, do not say so in their wheels.
LICENCES := MIT;BSD;Apache;MPL;Mozilla Public License;Unlicense;PSF;Python Software Foundation;ISC;CC0

.PHONY: setup demo test check style types imports unused licences protobuf docs fix bench chaos internet proto constraints clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(INSTALL) "torch==2.13.0"
	$(INSTALL) --editable ".[dev]"
	@$(BIN)/python -W ignore -m compileall -qq -j 0 .venv/lib node protocol swarm compression || true
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/swarm-node demo

# Four workers, also on two cores: many tests wait for processes or the network. A file stays on one worker, for what its
# tests share, and `tests/conftest.py` says in which order.
test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder

# `make -j2 check` does two at a time.
check: style types imports unused licences protobuf docs

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Also the tests that the default suite leaves out: a bench that calls what is gone would be noticed only when it is run.
types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

unused: $(STAMP)
	$(BIN)/vulture

licences: $(STAMP)
	$(BIN)/pip-licenses --partial-match --ignore-packages atheris axe-playwright-python torchao --output-file /dev/null --allow-only "$(LICENCES)"

protobuf: $(STAMP)
	$(BIN)/python protocol/compile_protos.py --check

# The site, in build/site. Any warning is an error: a link that leads nowhere, a page that no menu names.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

fix: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(STAMP)
	$(BIN)/python protocol/compile_protos.py

bench: $(STAMP)
	$(BIN)/python -m pytest tests/bench -m bench -s -rx

chaos: $(STAMP)
	$(BIN)/python -m pytest tests/chaos -m chaos -s

# Real nodes on a small internet of network namespaces: root on Linux with iproute2 and iptables, else skipped in words.
internet: $(STAMP)
	$(BIN)/python -m pytest tests/internet -m internet -s -rx

constraints:
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' > constraints.txt

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
