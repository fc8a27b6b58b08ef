# Two commands do everything: `make demo` and `make test`. Both set up .venv first, and may be typed again at any time.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
FAST   ?=

.PHONY: demo test check format lint types clean

demo: $(STAMP)
	$(BIN)/oelm demo

test: $(STAMP)
	$(BIN)/python -m pytest $(if $(FAST),-m "not slow")

check: $(STAMP)
	FAST="$(FAST)" BIN="$(BIN)" bash .ci/check

format: $(STAMP)
	$(BIN)/ruff format src tests examples
	$(BIN)/ruff check --fix src tests examples

lint: $(STAMP)
	$(BIN)/ruff format --check src tests examples
	$(BIN)/ruff check src tests examples

types: $(STAMP)
	$(BIN)/mypy

# The stamp is written last: an install that was cut short has none, and the next `make` repairs it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is older than 3.11; make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 5; }
	@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[all,dev]"
	@touch $@

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache
