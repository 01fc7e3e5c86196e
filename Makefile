# Two commands matter: `make demo` shows it working, `make test` proves it.
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?=
ARGS ?=
export VENV

.PHONY: install demo serve test check trace docs format conformance peers real browser json-schema-suite clients judges report soak faults siege clean

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

# Prints the way of a chat through the gateway, file by file, and counts it.
trace: $(VENV)/.installed-dev
	$(BIN)/python scripts/chat_trace.py

# Builds the pages of docs/ as a site: build/site/index.html.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(VENV)/.installed-docs: pyproject.toml constraints.txt scripts/install
	scripts/install docs
	touch $@ $(VENV)/.installed

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

conformance: $(VENV)/.installed-dev
	scripts/test -m conformance $(ARGS)

# Installs real vLLM, real SMG and two judges of routing, 4.3 GB in .cache/peers, and runs the tests that need them.
peers: $(VENV)/.installed-dev
	scripts/peers $(ARGS)

# Installs configurations and vocabularies of releases and sources of libraries for GPUs in .cache/real, and runs the
# tests that read them.
real: $(VENV)/.installed-dev
	scripts/real $(ARGS)

# Tests the pages in Chromium, which it installs if there is none and the user is root. ARGS=images makes their images.
browser: $(VENV)/.installed-dev
	scripts/browser $(ARGS)

# Installs clients that others wrote in .cache/clients, tries them against a server, and writes docs/clients.md.
clients: $(VENV)/.installed-dev
	$(BIN)/python scripts/clients $(ARGS)

# Takes tests that others wrote from their releases' source archives, 200 MB in .cache/judges, runs them against Saccade,
# and writes docs/judges.md: make judges ARGS="NAME ..." for some.
judges: $(VENV)/.installed-dev
	PYTHONPATH=scripts OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m judges $(ARGS)

# SUITE is a checkout of github.com/json-schema-org/JSON-Schema-Test-Suite; docs/json-schema.md has the result.
json-schema-suite: $(VENV)/.installed-dev
	$(BIN)/python scripts/json_schema_suite.py $(SUITE)

# Measures docs/figures.md, part by part, and goes on after an interruption:
# make report ARGS="--vllm VENV --smg SMG --vllm-router ROUTER --turbojpeg FOLDER"
report: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.report $(ARGS)

# Half an hour of mixed load: make soak ARGS="--minutes 2" for a trial.
soak: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.reliability.soak $(ARGS)

# Measures the table of docs/reliability.md.
faults: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.reliability.faults $(ARGS)

# Twenty minutes of one attack after the other beside honest clients: make siege ARGS="tarpit bombs" for some.
siege: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.reliability.siege $(ARGS)

clean:
	rm -rf $(VENV)
