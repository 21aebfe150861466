# Make orders the stages; the console command runs each one as a process of its own.
# Recipes and keys decide what is up to date, not file times, so every target is phony and returns at once when nothing changed.

PROJECT ?= data/example
PYTHON ?= python3
EVERY ?= 250
WORK ?= build
WORKERS ?= 2
FAST ?=
SEEDS ?=
QUERY ?= parse a date from text
LATENTMILL = .venv/bin/python -m pipeline
# A misspelt variable, such as PROJET=x, would otherwise run the example.
VARIABLES = PROJECT PYTHON EVERY WORK WORKERS FAST QUERY SET SQL WHAT NAME RUN RUNS IMAGES FAMILY TRIGGER PRESET LATENTMILL SEEDS REPAIR
UNKNOWN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(filter-out $(VARIABLES) -%,$(name))))
$(if $(strip $(UNKNOWN)),$(error make has no variable $(firstword $(UNKNOWN)); there are $(VARIABLES)))
# Passed in the environment under other names, so that spaces, quotes and dollars reach the command as they were typed.
export LATENTMILL_PROJECT := $(value PROJECT)
export LATENTMILL_SET := $(value SET)
export LATENTMILL_SQL := $(value SQL)
export LATENTMILL_WHAT := $(value WHAT)
export LATENTMILL_NAME := $(value NAME)
export LATENTMILL_RUN := $(if $(filter command%,$(origin RUN)),$(value RUN))
export LATENTMILL_RUNS := $(value RUNS)
export LATENTMILL_IMAGES := $(value IMAGES)
export LATENTMILL_FAMILY := $(value FAMILY)
export LATENTMILL_TRIGGER := $(value TRIGGER)
export LATENTMILL_PRESET := $(value PRESET)
export LATENTMILL_QUERY := $(value QUERY)
unexport PROJECT SET SQL WHAT NAME RUN RUNS IMAGES FAMILY TRIGGER PRESET QUERY
# The pipeline of the project, for targets of which two pipelines have one.
PIPELINE := $(shell sed -n 's/^ *pipeline *= *"\([a-z_]*\)".*/\1/p' '$(subst ','\'',$(value PROJECT))/project.toml' 2>/dev/null)
# Not empty if the project has a section [train].
TRAINS := $(shell grep '^ *\[train[].]' '$(subst ','\'',$(value PROJECT))/project.toml' 2>/dev/null)
override RUN = $(LATENTMILL) run

# One stage at a time, also under `make -j`, so that no two models are in memory together.
.NOTPARALLEL:
.PHONY: init images captions ingest buckets latents embeddings train samples segments status query panel follow memory export verify clean
.PHONY: plan doctor checks lint descriptions crops
.PHONY: scores evaluate
.PHONY: sources units pairs tokens negatives vectors index ranks search
.PHONY: help runs compare best view report generate
.PHONY: test prove check format bench pages dictionary recipe machines macs figures experiments recipes
.DEFAULT_GOAL := train

## Show this list
help:
	@awk '/^## / { text = substr($$0, 4); next } /^[a-z]+:/ && text { sub(":.*", ""); printf "make %-11s %s\n", $$0, text } { text = "" }' $(MAKEFILE_LIST)

## Make a project: make init PROJECT=cats IMAGES=~/Pictures/cats
init: .venv/ready
	$(if $(filter file,$(origin PROJECT)),$(error make init needs PROJECT and IMAGES, such as: make init PROJECT=cats IMAGES=~/Pictures/cats))
	$(if $(value IMAGES),,$(error make init needs IMAGES, the folder of images, such as: make init PROJECT=$(value PROJECT) IMAGES=~/Pictures/cats))
	@$(LATENTMILL) init

# Stages

## Read the image folder: one row per file
images: .venv/ready
	@$(RUN) images --only

## Find the captions of the images
captions: images
	@$(RUN) captions --only

ingest: images captions

## Look for near-duplicates, blur and mistakes in captions
checks: images captions
	@$(RUN) checks --only

## Write missing captions by a vision-language model
descriptions: images
	@$(RUN) descriptions --only

## Show the images with warnings
lint: checks
	@$(LATENTMILL) lint

## Decide the size and the crop of each image at each resolution
buckets: images checks
	@$(RUN) buckets --only

## Draw all crops on contact sheets
crops: buckets
	@$(LATENTMILL) crops

## Encode the crops with the autoencoder
latents: buckets images
	@$(RUN) latents --only

## Encode the captions with the text encoder
embeddings: captions
	@$(RUN) embeddings --only

# `train` ends with the previews, which name the adapter; `samples` is an alias.
# `captions` stands before `latents`, so that a missing caption is found before weights are downloaded.
ifeq ($(PIPELINE),retrieval)
train: negatives tokens
	@$(RUN) train --only
else
## Train, then draw previews (the default), after earlier stages
train: images captions checks buckets latents embeddings
	@$(RUN) train --only
	@$(RUN) samples --only
endif

samples: train

# Not part of `train`: it draws every preview prompt, also those after the first `samples.first_prompts`.
## Compare the previews with training images and real pictures
scores evaluate: export LATENTMILL_SET := $(value SET) $(if $(filter retrieval,$(PIPELINE)),,samples.first_prompts=0)
scores: samples
	@$(RUN) scores --only

# SEEDS=3 trains data/example with three seeds, in memory, and shows the means with intervals over seeds and pictures.
## Show the scores of base, adapters and real pictures
ifneq ($(SEEDS),)
evaluate: .venv/ready
	@mkdir -p $(WORK)
	@.venv/bin/python -m data.experiments.recipes $(WORK)/example-seeds.jsonl --example --seeds $(SEEDS)
else
ifeq ($(PIPELINE),retrieval)
evaluate: ranks
else
evaluate: scores
endif
	@$(LATENTMILL) evaluate
endif

## Train in parts of EVERY=250 steps, with previews after each
segments: images captions checks buckets latents embeddings
	@$(LATENTMILL) segments --every $(EVERY)

# Stages of the pipeline retrieval

sources: .venv/ready
	@$(RUN) sources --only

units: sources
	@$(RUN) units --only

pairs: units
	@$(RUN) pairs --only

tokens: pairs
	@$(RUN) tokens --only

negatives: pairs units tokens
	@$(RUN) negatives --only

# The encoder is tuned first if the project says how.
ifneq ($(and $(filter retrieval,$(PIPELINE)),$(TRAINS)),)
vectors: train
endif
vectors: tokens pairs
	@$(RUN) vectors --only

## Tune to a folder of code, index, evaluate, answer QUERY
index: vectors units sources
	@$(RUN) index --only
	@$(RUN) ranks --only
	@$(LATENTMILL) evaluate
	@$(LATENTMILL) search

ranks: index

## Find code by meaning: make search QUERY="parse a date"
search: .venv/ready
	@$(LATENTMILL) search

# Looking at a project

## Show what each stage will need: rows, disk, memory, time
plan: .venv/ready
	@$(LATENTMILL) plan

## Show this machine, its problems, and what it can train
doctor: .venv/ready
	@$(LATENTMILL) doctor

## Show what is built, what is missing, and all training runs
status: .venv/ready
	@$(LATENTMILL) status

## Ask in SQL: make query SQL='select * from tables'
query: .venv/ready
	@$(LATENTMILL) query

## List the training runs; RUN=1a2b NAME=fast names one
runs: .venv/ready
	@$(LATENTMILL) runs

## Compare training runs: make compare RUNS='slow fast'
compare: .venv/ready
	@$(LATENTMILL) compare

## Name the best checkpoint of a run, and why
best: .venv/ready
	@$(LATENTMILL) best

## Show the project as a web page on this machine
view: .venv/view
	@$(LATENTMILL) view

## Write the web page as one HTML file
report: .venv/view
	@$(LATENTMILL) report

## Draw with the adapter: make generate WHAT='a cat'
generate: .venv/ready
	@$(LATENTMILL) generate $${LATENTMILL_WHAT:+"$$LATENTMILL_WHAT"}

## Answer a stored question: make panel NAME=loss; or list them
panel: .venv/ready
	@$(LATENTMILL) panel

## Show what became of an input: make follow WHAT=fox
follow: .venv/ready
	@$(LATENTMILL) follow

## Measure the memory of a few training steps
memory: .venv/ready
	@$(LATENTMILL) memory

## Write the adapter for other programs; RUN=NAME chooses a run
export: .venv/ready
	@$(LATENTMILL) export

## Find damaged files; REPAIR=1 makes them again
verify: .venv/ready
	@$(LATENTMILL) verify $(if $(REPAIR),--repair)

## Delete rows and tables that the settings no longer use
clean: .venv/ready
	@$(LATENTMILL) clean

# Development

# Tests must not see the variables that were set for a project.
PYTEST = env $(foreach name,PROJECT SET SQL WHAT NAME RUN RUNS IMAGES FAMILY TRIGGER PRESET QUERY,-u LATENTMILL_$(name)) .venv/bin/python -m pytest

## Run all tests; FAST=1 runs the fast ones
test: .venv/test
	$(PYTEST) -n $(WORKERS) --dist loadfile $(if $(FAST),-m fast)

# The proofs in their full form, one after another: each adds a row to data/proofs.jsonl.
## Run the long forms of the tests
prove: .venv/test
	$(PYTEST) -m proof --prove

## Run ruff, mypy and the import contracts
check: .venv/check
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

## Format the code
format: .venv/check
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

## Write the generated pages and figures again
pages: dictionary recipe figures machines macs

dictionary: .venv/ready
	.venv/bin/python -m data.pages.dictionary

recipe: .venv/ready
	.venv/bin/python -m data.pages.recipe

machines: .venv/ready
	.venv/bin/python -m data.pages.machines

macs: .venv/ready
	.venv/bin/python -m data.pages.macs

figures: .venv/plots
	.venv/bin/python -m data.pages.figures

## Measure this machine
bench: .venv/ready
	.venv/bin/python -m tests.bench.measure

# The recipes of other trainers on data/example: 57 runs, for a GPU; WORKERS run at a time
recipes: .venv/plots
	.venv/bin/python -m data.experiments.recipes data/experiments/recipes.jsonl --workers $(WORKERS)
	.venv/bin/python -m data.experiments.recipes_page

# The experiments on micro behind data/experiments/README.md
experiments: .venv/plots
	.venv/bin/python -m data.experiments.experiments $(WORK)

# The environment: each part is made once, and again when pyproject.toml changes

.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "latentmill needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; make PYTHON=python3.12 names another")'
	@$(PYTHON) -c 'import platform, sys; sys.exit(sys.platform == "darwin" and platform.machine() != "arm64" and "latentmill needs a Python for Apple Silicon (arm64), this one is built for Intel and runs under Rosetta; install the one of python.org, then make PYTHON=/usr/local/bin/python3")'
	@echo "Installing Python packages into .venv, once: about a minute"
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet --editable .
	@touch $@

.venv/plots: .venv/ready
	.venv/bin/python -m pip install --quiet --editable ".[plots]"
	@touch $@

.venv/view: .venv/ready
	.venv/bin/python -m pip install --quiet --editable ".[view]"
	@touch $@

# torch is installed first, in a command of its own: together with other packages a resolver may prefer its CUDA build.
.venv/test: .venv/ready
	@echo "Installing PyTorch, diffusers and what else the tests compare with, once: some minutes"
	.venv/bin/python -m pip install --quiet torch==2.13.0
	.venv/bin/python -m pip install --quiet --editable ".[test]"
	@touch $@

.venv/check: .venv/ready
	.venv/bin/python -m pip install --quiet --editable ".[check]"
	@touch $@
