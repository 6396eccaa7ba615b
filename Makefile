# The two commands of the README: `make demo` and `make test`. Both set up .venv by themselves and are cheap to repeat.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test federation coverage lint docs hooks mutants attack clean help

demo: $(VENV)/.demo-ready
	$(BIN)/bespoke compare

test: $(VENV)/.test-ready lint
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# A real federation on loopback: every method, and every process killed. Minutes, so apart from `make test`.
federation: $(VENV)/.test-ready
	$(BIN)/python -m pytest -v tests/deploy/slow_federation.py

# Lines that no test reaches, in build/coverage. Apart from `make test`, which it would make a third longer.
coverage: $(VENV)/.test-ready
	$(PIP) coverage==7.17.3 pytest-cov==7.1.0
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal --cov=bespoke --cov-report=term:skip-covered --cov-report=html:build/coverage

lint: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini

# The site in build/site; warnings are errors.
docs: $(VENV)/.docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html, or for the search: $(PYTHON) -m http.server --directory build/site"

hooks: $(VENV)/.test-ready
	$(PIP) --editable ".[dev]"
	$(BIN)/pre-commit install

help:
	@echo "make demo     compare four methods on built-in data"
	@echo "make test     tests, linter, type checker"
	@echo "make federation  all methods on a federation of FLARE, its processes killed (minutes)"
	@echo "make lint     linter and type checker alone"
	@echo "make coverage tests, and the lines that none of them reaches (build/coverage)"
	@echo "make docs     the documentation site, into build/site"
	@echo "make hooks    ruff and mypy before each commit"
	@echo "make mutants  which faults in the code do the tests catch? (docs/testing.md)"
	@echo "make attack   kills, damaged files, fuzzed inputs (docs/reliability.md)"
	@echo "make clean    remove .venv and caches"

# Faults put into the code on purpose, in a copy of it: which do the tests catch? MUTANTS="--count 0 federation/cohorts.py" ...
mutants: $(VENV)/.test-ready
	nice $(BIN)/python benchmarks/mutants.py $(MUTANTS)

# Kills, damaged files and fuzzed inputs, in numbered tries that go on where they were stopped. ATTACK="fuzz --seed 1" ...
attack: $(VENV)/.test-ready
	nice $(BIN)/python -m benchmarks.attack $(ATTACK)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"bespoke needs Python 3.11 or newer, {sys.executable} is {v[0]}.{v[1]}; try: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

# A stamp is remade when the requirements change; an editable install needs no remaking when the code does.
$(VENV)/.demo-ready: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing bespoke into $(VENV) (once; PyTorch is large)"
	$(PIP) --editable ".[fast,demo]"
	@touch $@

$(VENV)/.test-ready: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing bespoke and its test tools into $(VENV) (once; PyTorch is large)"
	$(PIP) --editable ".[test]"
	@touch $@ $(VENV)/.demo-ready

$(VENV)/.docs-ready: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable ".[docs]"
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache
