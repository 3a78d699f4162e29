# Users: demo, reproduce. Committed results: gallery, circuits, fading, notebooks, numbers, models. What ships with the package: prefixes, scorers.
# Developers: test, test-long, test-hooked, test-harness, lint, types (all six: check), docs, drills, lowest, newest, audit, sbom, dist, locks, clean.
SCALE ?= quick
DATA ?= data
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# Only the paper's models and the corpora of soft prefixes are fetched from the hub.
export HF_HUB_OFFLINE ?= $(if $(filter paper,$(SCALE))$(filter prefixes,$(MAKECMDGOALS)),0,1)
# Nothing is compiled that is never imported: the first import writes the bytecode.
export PYTHONDONTWRITEBYTECODE =
RUN := .venv/.run-installed
DEV := .venv/.installed
HOOKED := .venv-hooked/.installed
HARNESS := .venv-harness/.installed
.PHONY: demo reproduce gallery circuits fading models notebooks numbers prefixes scorers steering-prompts test test-long drills test-hooked test-harness lint types check docs lowest newest audit dist sbom locks clean
.DELETE_ON_ERROR:

# A first look, in a minute or two: results/demo/report.html.
demo: $(RUN)
	@python analyses/demo/demo.py --out results/demo

# Every figure and table. SCALE=tiny: about 40 minutes, far too small to tell; quick: a day of two cores;
# paper: GPUs. Repeat it after a stop: it goes on.
reproduce: $(DEV)
	python analyses/tools/reproduce.py --scale $(SCALE) --out results/$(SCALE)

# The committed results of a scale, as tables and pictures; GRIDS="quick/alpha quick/layers" makes these anew, beside the others.
gallery: $(DEV)
	python analyses/tools/reproduce.py --scale $(SCALE) --out results/$(SCALE) $(if $(GRIDS),--grids $(GRIDS) $(if $(wildcard figures/paper/$(SCALE)/tables),--beside figures/paper/$(SCALE)))
	mkdir -p figures/paper/$(SCALE)/tables
	cp results/$(SCALE)/results.json results/$(SCALE)/figures/*.png figures/paper/$(SCALE)/
	cp results/$(SCALE)/tables/*.csv results/$(SCALE)/tables/*.json results/$(SCALE)/tables/*.md figures/paper/$(SCALE)/tables/

circuits: $(RUN)
	analyses/circuits/run.sh $(SCALE)
fading: steering-prompts
	analyses/fading/run.sh
# Files of three models of analyses/families, in results/models: 1.9 GB.
models: $(RUN)
	analyses/tools/models.sh results/models
prefixes: $(RUN)
	analyses/tools/prefixes.sh
scorers: $(DEV)
	analyses/scorers/run.sh $(DATA)

# The prompts of the grids of analyses/steering (steering-prompts.txt, steering-selection.txt) and analyses/bases (bases/*.txt). In DATA are
# DExperts' neutral OpenWebText prompts: https://github.com/alisawuffles/DExperts.
steering-prompts: $(RUN)
	python analyses/tools/steering_prompts.py $(DATA)/prompts/dexperts_owt_sentiment_10k.jsonl.xz

NOTEBOOKS := first_look control who_reads_the_prefix what_heads_write why_it_fades steer_the_heads
notebooks: $(NOTEBOOKS:%=docs/notebooks/%.ipynb)
docs/notebooks/%.ipynb: analyses/notebooks/%.py $(DEV)
	jupytext --quiet --set-kernel python3 --to ipynb --output $@ $<
	TQDM_DISABLE=1 jupyter-execute --inplace $@

# Tables of the documents out of the committed ones; then every statement on results is checked.
numbers: $(RUN)
	python docs/write_claims.py
	python docs/write_tables.py
	python docs/statements.py

# Files share two processes of one thread each; what needs the machine to itself follows in one.
PARALLEL := --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 60
test: $(DEV)
	python -m pytest -m "not slow and not long and not alone and not drill" $(PARALLEL)
	python -m pytest -m "not slow and alone and not drill" --durations 10 tests/runs
test-long: $(DEV)
	python -m pytest -m "long and not slow and not alone and not drill" $(PARALLEL)
test-hooked: $(HOOKED)
	.venv-hooked/bin/python -m pytest -m "not slow and not drill" $(PARALLEL) tests
# What drives a model of ours: lm-eval, Inspect (which leaves streams open).
test-harness: $(HARNESS)
	.venv-harness/bin/python -m pytest -W ignore::ResourceWarning tests/attention/test_lm_eval.py tests/generation/test_inspect_provider.py tests/serving/test_harnesses.py
# Harm that is done to commands on purpose, and a table of what came of it (docs/reliability.md): up to 8 minutes.
DRILLED ?= tests/faults
drills: $(DEV)
	LAPA2_TYPES=none python -m pytest -m drill --numprocesses 2 --dist loadgroup --no-loadscope-reorder $(DRILLED)
lint: $(DEV)
	ruff check .
	ruff format --check .
types: $(DEV)
	mypy
check: test test-long test-hooked test-harness lint types
# The site: docs/_build/html/index.html.
docs: $(DEV)
	python -m sphinx -W --keep-going --quiet -d docs/_build/doctrees docs docs/_build/html
lowest newest: $(DEV)
	.ci/bounds $@
audit dist: $(DEV)
	.ci/$@
sbom: $(RUN)
	.ci/sbom
locks:
	. .ci/tools && python3 .ci/lock.py $(UPGRADE)
clean:
	rm -rf .venv .venv-* .cache

$(RUN): requirements-run.lock requirements-torch.lock pyproject.toml
	@.ci/install run && touch $@
$(DEV): $(RUN) requirements.lock
	@.ci/install dev && touch $@
$(HOOKED): $(DEV) requirements-hooked.lock
	@.ci/install hooked && touch $@
$(HARNESS): $(DEV) requirements-harness.lock
	@.ci/install harness && touch $@
