# make bench: set up, then the main job. make test: set up, then the tests. make test-long: those that take long and are
# the only ones of something. make test-all: all, with further cases of what others cover. make check: lint, format,
# types, floors.
PYTHON ?= python3
VENV := .venv
RUN := OMP_NUM_THREADS=1 $(VENV)/bin/python -m

WORKERS ?= 3
LAYOUT := build/layout
CONSTRAINTS ?= constraints.txt

# Tests start several hundred interpreters. Without bytecode each compiles all modules of the project again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: bench test test-long test-all check types floors layout format clean

bench: $(VENV)/ready
	$(RUN) sp_bench method=mesh gpus=4 cluster=local seqlen=8k heads=8 head_dim=64 dtype=float32 iters=5 warmup=1
	$(RUN) sp_bench method=mesh gpus=256

test: WHICH := and not exhaustive and not long
test-long: WHICH := and long and not exhaustive
RANKS = $(RUN) pytest -m 'ranks $(WHICH)'
REST = $(RUN) pytest -n $(WORKERS) -m 'not ranks $(WHICH)'

# Nine ranks wait for each other's messages part of the time, which the rest fills. It is nice: a rank that runs late
# keeps all others waiting.
test: $(VENV)/ready
	@echo "$@: the tests of ranks, whose output comes at the end, and beside them the rest on $(WORKERS) workers. A dot" \
	    "is a test, and '$(RUN) pytest tests/plan' runs those of one folder."
	@mkdir -p build && \
	{ $(RANKS) >build/ranks.log 2>&1 & ranks=$$!; } && \
	trap "kill $$ranks 2>/dev/null; exit 130" INT TERM && \
	{ nice env $(REST) && rest=0 || rest=$$?; } && \
	{ wait $$ranks && of_ranks=0 || of_ranks=$$?; } && \
	echo "The tests of ranks:" && cat build/ranks.log && exit $$((rest | of_ranks))

# One after the other: beside nine ranks, those that SLURM starts here get so little of a machine that they seem to hang.
test-long test-all: $(VENV)/ready
	@{ $(REST) && rest=0 || rest=$$?; } && { $(RANKS) && of_ranks=0 || of_ranks=$$?; } && exit $$((rest | of_ranks))

check: $(VENV)/ready types floors
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(VENV)/bin/oxlint --deny-warnings analysis/explorer/*.js

# The package as a wheel has it, for tools that read files and import nothing: links to files, or copies without them.
layout:
	rm -rf $(LAYOUT) && mkdir -p $(LAYOUT)
	cp -rs $(CURDIR)/sp_bench $(LAYOUT) 2>/dev/null || cp -r sp_bench $(LAYOUT)
	for name in analysis conf methods slurm; do \
	    cp -rs $(CURDIR)/$$name $(LAYOUT)/sp_bench 2>/dev/null || cp -r $$name $(LAYOUT)/sp_bench; \
	done

types: $(VENV)/ready layout
	$(RUN) pyright

floors: $(VENV)/ready layout
	cd $(LAYOUT) && $(CURDIR)/$(VENV)/bin/lint-imports --no-cache --config $(CURDIR)/pyproject.toml

format: $(VENV)/ready
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "Installing sp_bench with torch and its tools into $(VENV): about $$(grep -c == $(CONSTRAINTS)) packages, 3 GB," \
	    "of which some minutes pass in silence. Once: afterwards make is ready at once."
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	@$(VENV)/bin/python -c 'from sp_bench.simulate.flows import prepare; prepare()'
	touch $@

clean:
	rm -rf $(VENV) $(LAYOUT) .pytest_cache .ruff_cache .hypothesis
