# make report   set up if need be, run train, profile and bottlenecks on the experiment
# make test     everything that CI checks
# make lab      JupyterLab on this machine only, with its token; asks nothing of the network
# make bench    the ratios in benchmarks/results (PEER=DIR: a facebookresearch/dlrm checkout)
# make diagnose  recordings whose cause is known (LABELLED=FOLDER): right, partly or wrong
# make gpu-check  on a GPU node: GPU paths against the CPU, timings, a profile; PEER=DIR compares
# make examples what outputs/examples holds: measured here, and from the recordings in RECORDINGS
# make soak     20,000 iterations, up to 50 runs at once, disturbed ranks, eight ranks; about half an hour
#               (SHORT=1: less of each, about ten minutes)
# make clean    what was built (outputs/ stays)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SET_UP := $(VENV)/.set-up
PARAMETERS ?= parameters/seed.yaml

.DELETE_ON_ERROR:
.PHONY: help setup report test lint lab bench diagnose gpu-check examples soak clean

help:
	@sed -n 's/^# //p' Makefile

setup: $(SET_UP)

$(SET_UP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  f"Python {sys.version.split()[0]} is too old: 3.11 or newer is needed (make PYTHON=python3.12)")'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "Python's venv module is missing: apt-get install python3-venv (Debian, Ubuntu)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@# no bytecode of all that is there: making it takes longer than the rest
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.lock
	@# TorchRec belongs to the lock's torch and FBGEMM, but declares FBGEMM's CUDA package
	@[ "$$(uname)" != Linux ] || $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --no-compile --no-deps torchrec==1.8.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@# torch and one page make the bytecode of what commands import, even where Python is told to
	@# write none: without it every later command compiles for 2 to 4 s again
	-env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c 'import torch'
	-env -u PYTHONDONTWRITEBYTECODE $(BIN)/dlrm run bottlenecks \
	  -p profile_run=dlrm_workbook/samples/seed-cpu --output-root build/set-up >/dev/null 2>&1
	@touch $@

report: $(SET_UP)
	$(BIN)/dlrm run all -f $(PARAMETERS)

PYTEST = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest

test: $(SET_UP) lint
	@# every child that the tests start would compile again what it imports; three processes on
	@# two cores, since a fifth of their time they wait for children, ranks and browsers. Tests that
	@# measure programs may fail beside others: what failed is run once more, alone
	$(PYTEST) -n 3 --dist loadfile || { [ $$? -eq 1 ] && $(PYTEST) --last-failed; }

lint: $(SET_UP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

lab: $(SET_UP)
	$(BIN)/jupyter lab --ip 127.0.0.1 --ServerApp.root_dir . --LabApp.news_url= \
	  --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate \
	  --LabApp.default_url=/lab/tree/notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

# the first line begins the file anew, the others add to it (BENCH_BIN=DIR: of a virtual
# environment with what the checkout needs beside this one's packages; RESULTS=DIR: elsewhere)
RESULTS ?= benchmarks/results
BENCH_BIN ?= $(BIN)
BENCH = $(BENCH_BIN)/python -m dlrm_workbook bench --rounds 5 $(if $(PEER),--peer $(PEER))
STEPS = $(BENCH) --iterations 6 --json $(RESULTS)/step.json
TURNS = $(STEPS) --precision bf16 --no-plain
SHAPES := 8x1M-100,8x1M-10,26x100k-10

bench: $(SET_UP)
	$(TURNS) --torchrec --shape $(SHAPES)
	$(TURNS) --resume --shape $(SHAPES) --threads 2
	$(TURNS) --resume --shape 8x1M-10-b16384 --threads 1,2
	$(TURNS) --resume --growth batch,tables,dim,pooling
	$(STEPS) --resume --ablation
	$(BENCH) --iterations 2 --shape 8x1M-10 --precision bf16,fp16 --no-plain --json $(RESULTS)/fp16.json
	$(BENCH) --iterations 4 --embeddings all --threads 1,2 --json $(RESULTS)/embeddings.json
	$(BENCH_BIN)/python benchmarks/database.py --json $(RESULTS)/database.json \
	  $(if $(HPCANALYSIS),--hpcanalysis $(HPCANALYSIS))
	$(BENCH_BIN)/python benchmarks/page.py

RECORDINGS ?= ../shared/recordings
LABELLED ?= $(RECORDINGS)/labelled

# of another folder, with its own answers: LABELLED=FOLDER ANSWERS=FILE
diagnose: $(SET_UP)
	$(BIN)/python benchmarks/diagnose.py $(LABELLED) $(if $(ANSWERS),--answers $(ANSWERS),--json \
	  $(RESULTS)/diagnose.json)
	$(BIN)/python benchmarks/page.py

# measured on this machine, about ten minutes of quiet; the H100's needs only the recordings;
# without the path of this checkout, so that pages are the same wherever they are made
EXAMPLES := build/examples
PUBLISH = sed 's|$(CURDIR)/||g' $(EXAMPLES)/*/*-$(1)/$(2) > outputs/examples/$(3)

examples: $(SET_UP)
	rm -rf $(EXAMPLES) && mkdir -p outputs/examples
	$(BIN)/dlrm run experiment -p profile_run=$(RECORDINGS)/dlrm-h100-pc.d \
	  -p host_run=$(RECORDINGS)/dlrm-h100-host.d --output-root $(EXAMPLES)
	$(BIN)/dlrm run all -f parameters/seed.yaml --output-root $(EXAMPLES)
	$(BIN)/dlrm run compare -f parameters/seed.yaml -p profile_run=latest -p rounds=6 \
	  -p iterations=8 --output-root $(EXAMPLES)
	$(BIN)/dlrm run scaling -f parameters/kalamkar_small.yaml --output-root $(EXAMPLES)
	$(call PUBLISH,experiment-*,experiment.ipynb,experiment.ipynb)
	$(call PUBLISH,bottlenecks-seed,bottlenecks.ipynb,bottlenecks-seed.ipynb)
	$(call PUBLISH,bottlenecks-seed,verdict.md,bottlenecks-seed.md)
	$(call PUBLISH,compare-seed,compare.ipynb,compare-seed.ipynb)
	$(call PUBLISH,scaling-kalamkar_small,scaling.ipynb,scaling-kalamkar_small.ipynb)

# On a GPU node the lock's packages are not wanted: the node's own torch is used.
gpu-check:
	$(PYTHON) -m dlrm_workbook gpu-check --json benchmarks/results/gpu-check.json \
	  $(if $(PEER),--peer $(PEER))

soak: $(SET_UP)
	nice -n 10 $(BIN)/python -m tests.campaigns.soak $(if $(SHORT),--short,--json benchmarks/results/soak.json)
	nice -n 10 $(BIN)/python -m tests.campaigns.attacks pages --count $(if $(SHORT),100,1000)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -exec rm -rf {} +
