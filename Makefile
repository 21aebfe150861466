# Make orders the stages; the console command runs each one as a process of its own.
# Recipes and keys decide what is up to date, not file times, so every target is phony and returns at once when nothing changed.

PROJECT ?= data/projects/example
PYTHON ?= python3
EVERY ?= 250
WORKERS ?= 2
FAST ?=
SEEDS ?=
REPAIR ?=
QUERY = parse a date from text
LATENTMILL = .venv/bin/python -m pipeline
GIVEN = SET SQL WHAT NAME RUN RUNS IMAGES FAMILY TRIGGER PRESET PORT SEED STYLE
# A misspelt variable, such as PROJET=x, would otherwise run the example.
VARIABLES = PROJECT PYTHON EVERY WORKERS FAST SEEDS REPAIR QUERY LATENTMILL $(GIVEN)
UNKNOWN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(filter-out $(VARIABLES) -%,$(name))))
$(if $(strip $(UNKNOWN)),$(error make has no variable $(firstword $(UNKNOWN)); there are $(VARIABLES)))
# Recipes write "$$SQL": the shell has each variable as it was typed, with its spaces, quotes and dollars.
$(foreach name,$(GIVEN),$(eval override $(name) := $$(if $$(filter command%,$$(origin $(name))),$$(value $(name)))))
CHOSEN := $(filter-out file,$(origin PROJECT))
override PROJECT := $(value PROJECT)
override QUERY := $(value QUERY)
export PROJECT QUERY $(GIVEN)
# What is installed without compiled code, see the end, is compiled once, and not by each command.
unexport PYTHONDONTWRITEBYTECODE

IN = -p "$$PROJECT" $(if $(SET),--set "$$SET") $(MORE)
RUNNING = $(if $(RUN),--run "$$RUN")
ON = $(IN) $(RUNNING)
SETTINGS = '$(subst ','\'',$(PROJECT))/project.toml' 2>/dev/null
# The pipeline of the project, for targets of which two pipelines have one; and whether it has a section [train].
PIPELINE := $(shell sed -n 's/^ *pipeline *= *"\([a-z_]*\)".*/\1/p' $(SETTINGS))
TRAINS := $(and $(filter retrieval,$(PIPELINE)),$(shell grep '^ *\[train[].]' $(SETTINGS)))
SLIDES := $(shell grep '^ *\[train\.slider\]' $(SETTINGS))
TEXT_TO_IMAGE = images captions checks descriptions buckets latents embeddings drawings
RETRIEVAL = sources units pairs tokens negatives vectors ranks
COMMANDS = lint crops plan status query view report generate panel follow search export verify clean runs best compare

# One stage at a time, also under `make -j`, so that no two models are in memory together.
.NOTPARALLEL:
.PHONY: $(TEXT_TO_IMAGE) $(RETRIEVAL) $(COMMANDS) train samples scores evaluate segments index
.PHONY: help init memory doctor test prove check format pages bench
.DEFAULT_GOAL := train

## help         Show this list
help:
	@sed -n 's/^## /make /p' $(MAKEFILE_LIST)

## init         Make a project: make init PROJECT=cats IMAGES=~/Pictures/cats
init: .venv/ready
	$(if $(CHOSEN),,$(error make init needs PROJECT and IMAGES, such as: make init PROJECT=cats IMAGES=~/Pictures/cats))
	$(if $(IMAGES),,$(error make init needs IMAGES, the folder of images, such as: make init PROJECT=$(PROJECT) IMAGES=~/Pictures/cats))
	@$(LATENTMILL) init --images "$$IMAGES" $(if $(FAMILY),--family "$$FAMILY") $(if $(TRIGGER),--trigger "$$TRIGGER") \
		$(if $(PRESET),--preset "$$PRESET") -- "$$PROJECT"

# Stages. What a stage reads stands before it; `captions` before `latents`, so that a missing caption is found before weights
# are downloaded.

## images       Read the image folder: one row per file
images: .venv/ready
## captions     Find the captions of the images
captions: images
## checks       Look for near-duplicates, blur and mistakes in captions
checks: images captions
## descriptions Write missing captions by a vision-language model
descriptions: images
## buckets      Decide the size and the crop of each image at each resolution
buckets: images checks
## latents      Encode the crops with the autoencoder
latents: buckets images
## embeddings   Encode the captions with the text encoder
embeddings: captions
## drawings     Draw what a slider is trained on
drawings: embeddings

sources: .venv/ready
units: sources
pairs: units
tokens: pairs
negatives: pairs units tokens
vectors: tokens pairs
ranks: vectors pairs units
# The encoder is tuned first if the project says how.
ifneq ($(TRAINS),)
vectors: train
endif

$(TEXT_TO_IMAGE) $(RETRIEVAL):
	@$(LATENTMILL) run $@ --only $(ON)

## train        Train, then draw previews (the default), after earlier stages
ifeq ($(PIPELINE),retrieval)
train: negatives tokens
	@$(LATENTMILL) run train --only $(ON) $(if $(NAME),--name "$$NAME")
else
train: images captions checks buckets latents embeddings
	@$(LATENTMILL) run train --only $(ON) $(if $(NAME),--name "$$NAME")
	@$(LATENTMILL) run samples --only $(ON)
ifneq ($(SLIDES),)
train: drawings
endif
# All preview prompts are drawn and scored, also those after the first `samples.first_prompts`.
scores: MORE = --set samples.first_prompts=0
endif
samples: train

## scores       Compare the previews with training images and real pictures
scores: samples
	@$(LATENTMILL) run scores --only $(ON)

# SEEDS=3 trains data/projects/example with three seeds, in memory, and shows means with intervals.
## evaluate     Score the newest finished run beside base and real pictures
evaluate: $(if $(SEEDS),,$(if $(filter retrieval,$(PIPELINE)),ranks)) .venv/ready
ifneq ($(SEEDS),)
	@mkdir -p build
	@.venv/bin/python -m data.research.experiments.recipes build/example-seeds.jsonl --example --seeds $(SEEDS)
endif
	@$(LATENTMILL) evaluate $(ON)

## segments     Train in parts of EVERY=250 steps, with previews after each
segments: images captions checks buckets latents embeddings
	@$(LATENTMILL) segments --every $(EVERY) $(IN)

## index        Tune to a folder of code, index, evaluate, answer QUERY
index: ranks vectors units sources
	@$(LATENTMILL) run index --only $(ON)
	@$(LATENTMILL) evaluate $(ON)
	@$(LATENTMILL) search $(ON) -- "$$QUERY"

# Looking at a project

## lint         Show the images with warnings
lint: .venv/ready
## crops        Draw all crops on contact sheets
crops: .venv/ready
## plan         Show what each stage will need: rows, disk, memory, time
plan: .venv/ready
## status       Show what is built, what is missing, and all training runs
status: .venv/ready
## export       Write the adapter for other programs; RUN=NAME chooses a run
export: .venv/ready
export: WORDS = $(if $(STYLE),--style "$$STYLE")
## clean        Delete rows and tables that the settings no longer use
clean: .venv/ready
## verify       Find damaged files; REPAIR=1 makes them again
verify: .venv/ready
verify: WORDS = $(if $(REPAIR),--repair)
## query        Ask in SQL: make query SQL='select * from tables'
query: .venv/ready
query: WORDS = $(if $(SQL),-- "$$SQL")
## search       Find code by meaning: make search QUERY="parse a date"
search: .venv/ready
search: WORDS = -- "$$QUERY"
## generate     Draw with the adapter: make generate WHAT='a cat' SEED=1
generate: .venv/ready
## follow       Show what became of an input: make follow WHAT=fox
follow: .venv/ready
follow: WORDS = $(if $(WHAT),-- "$$WHAT")
generate: WORDS = $(if $(SEED),--seed "$$SEED") $(if $(WHAT),-- "$$WHAT")
## panel        Answer a stored question: make panel NAME=loss; or list them
panel: .venv/ready
panel: WORDS = $(if $(NAME),-- "$$NAME")
## runs         List the training runs; RUN=1a2b NAME=fast names one
runs: .venv/ready
## best         Name the best checkpoint of a run, and why
best: .venv/ready
runs best: RUNNING = $(if $(filter runs,$@),$(if $(NAME),--name "$$NAME")) $(if $(RUN),-- "$$RUN")
## compare      Compare training runs: make compare RUNS='slow fast'
compare: .venv/ready
compare: RUNNING = -- $$RUNS
## view         Show the project as a web page on this machine; PORT=8766
view: .venv/view
view: WORDS = $(if $(PORT),--port "$$PORT")
## report       Write the web page as one HTML file
report: .venv/view

$(COMMANDS):
	@$(LATENTMILL) $@ $(ON) $(WORDS)
## memory       Measure the memory of a few training steps
memory: .venv/ready
	@$(LATENTMILL) memory -p "$$PROJECT"
## doctor       Show this machine, its problems, and what it can train
doctor: .venv/ready
	@$(LATENTMILL) doctor -p "$$PROJECT"

# Development

## test         Run all tests; FAST=1 runs the fast ones
test: .venv/test
	env -u PROJECT .venv/bin/python -m pytest -n $(WORKERS) --dist loadfile $(if $(FAST),-m fast)
# One after another: each adds a row to data/measurements/proofs.jsonl.
## prove        Run the long forms of the tests
prove: .venv/test
	env -u PROJECT .venv/bin/python -m pytest -m proof --prove
## check        Run ruff, mypy and the import contracts
check: .venv/check
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
## format       Format the code
format: .venv/check
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
## pages        Write the generated pages and figures again
pages: .venv/plots
	for page in dictionary settings trainers recipe figures machines macs footprint; do .venv/bin/python -m data.research.pages.$$page || exit 1; done
## bench        Measure this machine
bench: .venv/ready
	.venv/bin/python -m tests.bench.measure

# The environment: each part is made once, and again when pyproject.toml changes
# --no-compile: a quarter of these files is ever imported. Python compiles those then, once.

.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "latentmill needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; make PYTHON=python3.12 names another")'
	@$(PYTHON) -c 'import platform, sys; sys.exit(sys.platform == "darwin" and platform.machine() != "arm64" and "latentmill needs a Python for Apple Silicon (arm64), this one is built for Intel and runs under Rosetta; install the one of python.org, then make PYTHON=/usr/local/bin/python3")'
	@echo "Installing Python packages into .venv, once: about 2 GB, some minutes"
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet --no-compile --editable .
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
	.venv/bin/python -m pip install --quiet --no-compile torch==2.13.0
	.venv/bin/python -m pip install --quiet --no-compile --editable ".[test]"
	@touch $@

.venv/check: .venv/ready
	.venv/bin/python -m pip install --quiet --editable ".[check]"
	@touch $@
