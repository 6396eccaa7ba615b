# The two commands of the README: `make demo` and `make test`. Both set up .venv by themselves and are cheap to repeat.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint mutants attack clean

demo: $(VENV)/.demo-ready
	$(BIN)/bespoke compare

test: $(VENV)/.test-ready lint
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

lint: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/mypy

# Faults put into the code on purpose, in a copy of it: which do the tests catch? MUTANTS="--count 0 sampling.py" ...
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
	$(PIP) --editable ".[fast]"
	@touch $@

$(VENV)/.test-ready: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing bespoke and its test tools into $(VENV) (once; PyTorch is large)"
	$(PIP) --editable ".[test]"
	@touch $@ $(VENV)/.demo-ready

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache
