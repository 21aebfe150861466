# Make orders the stages; the console command runs each one as a process of its own.
# Recipes and keys decide what is up to date, not file times, so every target is phony and returns at once when nothing changed.

PROJECT ?= data/example
PYTHON ?= python3
EVERY ?= 250
WORK ?= build
WORKERS ?= 2
FAST ?=
LATENTMILL = .venv/bin/python -m pipeline
RUN = $(LATENTMILL) run
# Passed in the environment under other names, so that spaces, quotes and dollars reach the command as they were typed.
export LATENTMILL_PROJECT := $(value PROJECT)
export LATENTMILL_SET := $(value SET)
export LATENTMILL_SQL := $(value SQL)
export LATENTMILL_WHAT := $(value WHAT)
export LATENTMILL_NAME := $(value NAME)
export LATENTMILL_IMAGES := $(value IMAGES)
export LATENTMILL_FAMILY := $(value FAMILY)
export LATENTMILL_TRIGGER := $(value TRIGGER)
unexport PROJECT SET SQL WHAT NAME IMAGES FAMILY TRIGGER

# One stage at a time, also under `make -j`, so that no two models are in memory together.
.NOTPARALLEL:
.PHONY: init images captions ingest buckets latents embeddings train samples segments status query panel follow memory export clean
.PHONY: scores evaluate
.PHONY: sources units pairs
.PHONY: test prove check format bench pages dictionary recipe figures experiments
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

# `train` ends with the previews, which name the adapter; `samples` is an alias.
# `captions` stands before `latents`, so that a missing caption is found before weights are downloaded.
train: images captions buckets latents embeddings
	@$(RUN) train
	@$(RUN) samples

samples: train

# Compare the previews with the training images and with real pictures. Not part of `train`.
scores: samples
	@$(RUN) scores

evaluate: scores
	@$(LATENTMILL) evaluate

# Train in segments of EVERY steps, each a process of its own, with previews after each.
segments: images captions buckets latents embeddings
	@$(LATENTMILL) segments --every $(EVERY)

# Stages of the pipeline retrieval

sources: .venv/ready
	@$(RUN) sources

units: sources
	@$(RUN) units

pairs: units
	@$(RUN) pairs

# Looking at a project

status: .venv/ready
	@$(LATENTMILL) status

query: .venv/ready
	@$(LATENTMILL) query

# A stored query of the pipeline: make panel NAME=loss; without NAME, the list.
panel: .venv/ready
	@$(LATENTMILL) panel

follow: .venv/ready
	@$(LATENTMILL) follow

memory: .venv/ready
	@$(LATENTMILL) memory

export: .venv/ready
	@$(LATENTMILL) export

clean: .venv/ready
	@$(LATENTMILL) clean

# Development

# Tests must not see the variables that were set for a project.
PYTEST = env $(foreach name,PROJECT SET SQL WHAT NAME IMAGES FAMILY TRIGGER,-u LATENTMILL_$(name)) .venv/bin/python -m pytest

# All tests in WORKERS processes; with FAST=1 those that take less than a minute together.
test: .venv/test
	$(PYTEST) -n $(WORKERS) --dist loadfile $(if $(FAST),-m fast)

# The proofs in their full form, one after another: each adds a row to data/proofs.jsonl.
prove: .venv/test
	$(PYTEST) -m proof --prove

check: .venv/check
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

format: .venv/check
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

# The generated pages and figures of data/, after a change to schemas or settings.
pages: dictionary recipe figures

dictionary: .venv/ready
	.venv/bin/python -m data.pages.dictionary

recipe: .venv/ready
	.venv/bin/python -m data.pages.recipe

figures: .venv/plots
	.venv/bin/python -m data.pages.figures

bench: .venv/ready
	.venv/bin/python -m tests.bench.measure

# The experiments on micro behind data/experiments/README.md
experiments: .venv/plots
	.venv/bin/python -m data.experiments.experiments $(WORK)

# The environment: each part is made once, and again when pyproject.toml changes

.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "latentmill needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; make PYTHON=python3.12 names another")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet --editable .
	@touch $@

.venv/plots: .venv/ready
	.venv/bin/python -m pip install --quiet --editable ".[plots]"
	@touch $@

# torch is installed first, in a command of its own: together with other packages a resolver may prefer its CUDA build.
.venv/test: .venv/ready
	.venv/bin/python -m pip install --quiet torch==2.13.0
	.venv/bin/python -m pip install --quiet --editable ".[test]"
	@touch $@

.venv/check: .venv/ready
	.venv/bin/python -m pip install --quiet --editable ".[check]"
	@touch $@
