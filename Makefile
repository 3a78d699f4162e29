# make demo | reproduce | gallery | test | test-hooked | lint | types | notebook | check | prefixes
PYTHON ?= python3
VENV := .venv
HOOKED := .venv-hooked
export HF_HUB_OFFLINE ?= 1

.PHONY: demo reproduce gallery test test-hooked lint types notebook check prefixes clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(VENV)/bin/python analyses/reproduce.py --scale demo --out results/demo

# Every figure and table: SCALE=quick takes hours of two cores (`lapa2 grids` estimates them), SCALE=paper GPUs. Stop and repeat as you like.
SCALE ?= quick
reproduce: $(VENV)/.installed
	$(VENV)/bin/python analyses/reproduce.py --scale $(SCALE) --out results/$(SCALE)

test: $(VENV)/.installed
	$(VENV)/bin/python -m pytest -m "not slow"

test-hooked: $(HOOKED)/.installed
	$(HOOKED)/bin/python -m pytest -m "not slow" tests

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.installed
	$(VENV)/bin/mypy

notebook: $(VENV)/.installed
	mkdir -p results
	$(VENV)/bin/jupytext --quiet --to ipynb --output results/first_look.ipynb analyses/first_look.py
	$(VENV)/bin/jupyter-execute --inplace results/first_look.ipynb

check: test test-hooked lint types

# The soft prefixes that ship for SmolLM2, two hours on two cores: what is interrupted goes on where it was. Corpora come from
# the hub; other files, and Jigsaw's comments, are given as SENTIMENT="--data FILE --held-out FILE" and so on.
SENTIMENT ?= --data sst2 --data imdb
TOPIC ?= --data agnews
DETOX ?= --data jigsaw_train.jsonl
TRAIN = $(VENV)/bin/lapa2 prefix train --task

prefixes: $(VENV)/.installed
	$(TRAIN) sentiment $(SENTIMENT) --set limit=5400 --set check_every=60 --out results/prefixes/sentiment-mle
	$(TRAIN) topic $(TOPIC) --set start=random --set limit=2200 --set check_every=60 --out results/prefixes/topic-mle
	$(TRAIN) detox $(DETOX) --set start=random --set limit=4000 --set check_every=60 --out results/prefixes/detox-mle
	$(TRAIN) sentiment $(SENTIMENT) --objective contrastive --from results/prefixes/sentiment-mle --set lr=0.01 \
		--set limit=4200 --set check_every=60 --out results/prefixes/sentiment-contrastive
	$(TRAIN) topic $(TOPIC) --objective contrastive --from results/prefixes/topic-mle --set lr=0.01 \
		--set limit=500 --set check_every=40 --out results/prefixes/topic-contrastive
	$(TRAIN) detox $(DETOX) --objective contrastive --from results/prefixes/detox-mle --set lr=0.01 \
		--set limit=1500 --set check_every=60 --out results/prefixes/detox-contrastive

# The committed results of scale quick.
gallery: reproduce
	mkdir -p figures/$(SCALE)
	cp -r results/$(SCALE)/tables results/$(SCALE)/report.html results/$(SCALE)/results.json results/$(SCALE)/figures/* figures/$(SCALE)/

# torch first and with its dependencies: the builds for GPUs bring their own libraries, which no lock for all platforms
# can name. Everything else comes exactly as locked.
define install
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lapa2_interp needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(1)
	$(1)/bin/pip install --quiet --disable-pip-version-check --constraint requirements.lock torch
	$(1)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement requirements.lock
	$(2)
	$(1)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(1)/.installed
endef

$(VENV)/.installed: requirements.lock pyproject.toml
	$(call install,$(VENV),)

$(HOOKED)/.installed: requirements.lock requirements-hooked.lock pyproject.toml
	$(call install,$(HOOKED),$(HOOKED)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement requirements-hooked.lock)

clean:
	rm -rf $(VENV) $(HOOKED)
