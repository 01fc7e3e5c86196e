# Two commands matter: `make demo` shows it working, `make test` proves it.
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?=
ARGS ?=
export VENV

.PHONY: install demo serve test check format conformance clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt scripts/install
	scripts/install
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt scripts/install
	scripts/install dev
	touch $@ $(VENV)/.installed

demo: install
	$(BIN)/saccade demo $(ARGS)

serve: install
	$(BIN)/saccade serve $(MODEL) $(ARGS)

test: $(VENV)/.installed-dev
	scripts/test $(ARGS)

check: $(VENV)/.installed-dev
	scripts/check

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

conformance: $(VENV)/.installed-dev
	scripts/test -m conformance $(ARGS)

clean:
	rm -rf $(VENV)
