# Make orders the stages, the console command executes them: one process per stage.
# Freshness is a matter of recipe and key, never of a file's time, so every target is phony and answers at once when nothing changed.

PROJECT ?= data/example
PYTHON ?= python3
EVERY ?= 250
WORK ?= build
LATENTMILL = .venv/bin/python -m pipeline
RUN = $(LATENTMILL) run
# Through the environment, and by other names, so that spaces, quotes and dollars reach the command as they were typed.
export LATENTMILL_PROJECT := $(value PROJECT)
export LATENTMILL_SET := $(value SET)
export LATENTMILL_SQL := $(value SQL)
export LATENTMILL_WHAT := $(value WHAT)
export LATENTMILL_IMAGES := $(value IMAGES)
export LATENTMILL_FAMILY := $(value FAMILY)
export LATENTMILL_TRIGGER := $(value TRIGGER)
unexport PROJECT SET SQL WHAT IMAGES FAMILY TRIGGER

# One stage at a time, also under `make -j`: never two models in memory.
.NOTPARALLEL:
.PHONY: init images captions ingest buckets latents embeddings train samples segments status query follow memory export clean
.PHONY: scores evaluate
.PHONY: test check format bench dictionary recipe figures experiments
.DEFAULT_GOAL := train

# A new project: make init PROJECT=data/cats IMAGES=~/Pictures/cats FAMILY=klein-base-4b TRIGGER="ohwx cat"
init: .venv/ready
	@$(LATENTMILL) init

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

# How well the adapter learnt: the previews' style and agreement, beside those of real pictures. Not part of `train`.
scores: samples
	@$(RUN) scores

evaluate: scores
	@$(LATENTMILL) evaluate

# The same in segments: EVERY steps, previews, and on.
segments: latents embeddings captions buckets images
	@$(LATENTMILL) segments --every $(EVERY)

# Looking

status: .venv/ready
	@$(LATENTMILL) status

query: .venv/ready
	@$(LATENTMILL) query

follow: .venv/ready
	@$(LATENTMILL) follow

memory: .venv/ready
	@$(LATENTMILL) memory

export: .venv/ready
	@$(LATENTMILL) export

clean: .venv/ready
	@$(LATENTMILL) clean

# Development

test: .venv/test
	env $(foreach name,PROJECT SET SQL WHAT IMAGES FAMILY TRIGGER,-u LATENTMILL_$(name)) .venv/bin/python -m pytest

check: .venv/check
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

format: .venv/check
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

dictionary: .venv/ready
	.venv/bin/python -m data.pages.dictionary

recipe: .venv/ready
	.venv/bin/python -m data.pages.recipe

figures: .venv/plots
	.venv/bin/python -m data.pages.figures

bench: .venv/ready
	.venv/bin/python -m tests.bench.measure

# What the average of the weights, caption dropout, several resolutions and preservation do on micro: data/experiments/README.md
experiments: .venv/plots
	.venv/bin/python -m data.experiments.experiments $(WORK)

# The environment, each part made once and again when pyproject.toml changes

.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "latentmill needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; make PYTHON=python3.12 names another")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet --editable .
	@touch $@

.venv/plots: .venv/ready
	.venv/bin/python -m pip install --quiet --editable ".[plots]"
	@touch $@

# torch goes first and by itself: with any other package in the same command a resolver may prefer its CUDA build.
.venv/test: .venv/ready
	.venv/bin/python -m pip install --quiet torch==2.13.0
	.venv/bin/python -m pip install --quiet --editable ".[test]"
	@touch $@

.venv/check: .venv/ready
	.venv/bin/python -m pip install --quiet --editable ".[check]"
	@touch $@
