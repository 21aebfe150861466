# Make orders the stages, the console command executes them: one process per stage.
# Freshness is a matter of recipe and key, never of a file's time, so every target is phony and answers at once when nothing changed.

PROJECT ?= data/example
PYTHON ?= python3
LATENTMILL = .venv/bin/python -m pipeline
RUN = $(LATENTMILL) run --project "$(PROJECT)" $(foreach value,$(SET),--set $(value))

.PHONY: images captions ingest buckets latents embeddings train samples status query follow export test check format bench clean dictionary
.DEFAULT_GOAL := train

# Stages

images: .venv/ready
	@$(RUN) images

captions: images
	@$(RUN) captions

ingest: images captions

buckets: images
	@$(RUN) buckets

latents: buckets images
	@$(RUN) latents

embeddings: captions
	@$(RUN) embeddings

# The previews come last and name the adapter, so `train` ends with them; `samples` is the same chain.
train: latents embeddings captions buckets images
	@$(RUN) train
	@$(RUN) samples

samples: train

# Looking

status: .venv/ready
	@$(LATENTMILL) status --project "$(PROJECT)"

query: export SQL := $(value SQL)
query: .venv/ready
	@$(LATENTMILL) query --project "$(PROJECT)"

follow: export WHAT := $(value WHAT)
follow: .venv/ready
	@$(LATENTMILL) follow --project "$(PROJECT)"

export: .venv/ready
	@$(LATENTMILL) export --project "$(PROJECT)"

clean: .venv/ready
	@$(LATENTMILL) clean --project "$(PROJECT)"

# Development

test: .venv/test
	.venv/bin/python -m pytest

check: .venv/check
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

format: .venv/check
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

dictionary: .venv/ready
	.venv/bin/python -c "from pipeline.dictionary import write; write()"

bench: .venv/ready
	$(LATENTMILL) bench

# The environment, each part made once and again when pyproject.toml changes

.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "latentmill needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; make PYTHON=python3.12 names another")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet --editable .
	@touch $@

# torch goes first and by itself: with any other package in the same command a resolver may prefer its CUDA build.
.venv/test: .venv/ready
	.venv/bin/python -m pip install --quiet torch==2.13.0
	.venv/bin/python -m pip install --quiet --editable ".[test]"
	@touch $@

.venv/check: .venv/ready
	.venv/bin/python -m pip install --quiet --editable ".[check]"
	@touch $@
