# make demo    install, make small assets, train SFT then DPO on the CPU
# make test    install, run the tests that take seconds; make test-all runs the others
# make check   lint, format, types
# make docs    write docs/cli.md, build the site of docs/ in build/site
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
DEMO   := build/demo
# two more than there are cores: much of what the tests start waits
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 2)

# Where launch itself looks for the pinned checkout; its packages are installed only if one is there.
CHECKOUT := $(firstword $(wildcard $(LAUNCH_OPEN_INSTRUCT)/open_instruct/finetune.py \
  external/open-instruct/open_instruct/finetune.py \
  /workspace/open-instruct/open_instruct/finetune.py \
  $(HOME)/open-instruct/open_instruct/finetune.py))

.PHONY: demo docs test test-all check format golden bench bench-check gpu-benchmarks soak snapshot history install install-trl install-open-instruct install-dev clean

$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit("launch needs Python 3.11 or later: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/trl: $(VENV)/created pyproject.toml constraints.txt
	$(PIP) install -q -c constraints.txt -e '.[trl]'
	@touch $@

# deepspeed has no wheel and its build imports torch
$(VENV)/open-instruct: $(VENV)/trl
	$(PIP) install -q -c constraints.txt setuptools wheel ninja py-cpuinfo hjson pydantic
	DS_BUILD_OPS=0 $(PIP) install -q -c constraints.txt --no-build-isolation deepspeed
	$(PIP) install -q -c constraints.txt -e '.[open-instruct]'
	@touch $@

$(VENV)/dev: $(VENV)/created pyproject.toml constraints.txt
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $@

install: $(VENV)/created
	$(PIP) install -q -c constraints.txt -e .

install-trl: $(VENV)/trl
install-open-instruct: $(VENV)/open-instruct
install-dev: $(VENV)/dev

demo: $(VENV)/trl
	rm -rf $(DEMO)
	$(BIN)/python scripts/make_demo_assets.py $(DEMO)
	$(BIN)/launch pipeline configs/demo/pipeline.yaml

# a module is compiled when it is first imported, not all 25,000 of them while they are installed
test test-all: export PIP_COMPILE = 0

# `test-all` is what `test` leaves out: real trainings, kills, whole searches
test: SELECTION = not slow
test-all: SELECTION = slow

# thousands of short processes: what each of them would compile anew is kept, whatever the shell says
test test-all: $(VENV)/trl $(VENV)/dev $(if $(CHECKOUT),$(VENV)/open-instruct)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 \
	  --dist loadfile --no-loadscope-reorder -m "$(SELECTION)"

check: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/check_expressions.py launcher tests scripts benchmarks
	$(BIN)/mypy

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/docs: $(VENV)/created pyproject.toml
	@$(PIP) install -q -c constraints.txt -e '.[docs]' || \
	  { echo "make docs: cannot install mkdocs-material; it needs a package index, or --find-links in PIP_FIND_LINKS" >&2; exit 1; }
	@touch $@

docs: $(VENV)/docs
	$(BIN)/python scripts/reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

# rewrites the command lines and the parsers' verdicts that the tests compare with
golden: $(VENV)/open-instruct $(VENV)/dev
	LAUNCH_GOLDEN=write $(BIN)/python -m pytest tests/plan/test_command.py tests/plan/test_plan_golden.py \
	  tests/agreement/test_parser_agreement.py tests/agreement/test_trl_agreement.py

# kills runs 20 times each at random moments and compares them with undisturbed ones; half an hour
soak: $(VENV)/open-instruct $(VENV)/dev
	$(BIN)/python scripts/soak.py --out docs/evidence/soak.json

# measures what launch itself costs beside its physical neighbours, some minutes; rewrites
# benchmarks/results.json
bench: $(VENV)/trl $(VENV)/dev
	$(BIN)/python -m benchmarks

# the same, compared with what is stored: fails where a ratio is more than 20 % worse
bench-check: $(VENV)/trl $(VENV)/dev
	$(BIN)/python -m benchmarks --check

# runs the cases of docs/benchmarks.md that this machine can, hours on GPUs, and merges them into
# docs/benchmarks.json; CASES="--minutes 30", CASES="--only sft-7b-tune", CASES=--list
gpu-benchmarks: $(VENV)/open-instruct
	$(BIN)/python scripts/gpu_benchmarks.py $(CASES)

# rewrites launcher/upstream/snapshots from the pinned checkout and the installed packages
snapshot: $(VENV)/open-instruct
	$(BIN)/python scripts/snapshot.py $(dir $(patsubst %/,%,$(dir $(CHECKOUT))))

# brings launcher/upstream/snapshots/history.json up to the pin, once its snapshot is taken
history: $(VENV)/dev
	$(BIN)/python scripts/history.py $(dir $(patsubst %/,%,$(dir $(CHECKOUT))))

clean:
	rm -rf $(VENV) build dist *.egg-info
