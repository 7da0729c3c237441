# moedoctor: `make run` and `make test` work on a fresh clone that has Python 3.10 or newer and a package index.

# The interpreter that makes .venv; empty: python3, or whatever .venv was made with.
PYTHON ?=
# The torch to install; empty: the newest that the package index has. Without an NVIDIA GPU one release is named, so
# that runs on different machines can be compared.
ifeq ($(shell uname -s),Linux)
ifeq ($(wildcard /dev/nvidia0)$(shell command -v nvidia-smi 2>/dev/null),)
TORCH ?= 2.13.0
endif
endif
TORCH ?=
# More arguments for the command that a target runs: make run ARGS="MD001 --format json"
ARGS ?=

# The vLLM releases that `make test-upstream` installs and asks, with spaces between; empty: those of scripts/releases.txt.
VLLM ?=

# The release for `make release`, such as 0.34.0.
V ?=

# The reports that `make evidence` makes, of evidence/promises.yaml and reports.yaml; empty: none, it judges what is stored.
NAMES ?=

# The releases that `make releases` runs, such as "torch 2.14.0"; empty: all of scripts/releases.txt.
RELEASES ?=

BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: docs evidence help setup run test lint format schema readme reports plugintable baseline browser test-upstream release releases backendreports slow

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 21
	@echo 'Variables: PYTHON=python3.12, TORCH=2.11.0, ARGS="..." for run and test'

setup: ## make .venv and install what is missing; nothing where that is done
	@PYTHON='$(PYTHON)' TORCH='$(TORCH)' GOAL='$(firstword $(MAKECMDGOALS))' sh scripts/setup.sh

run: setup ## run every built-in scenario
	@$(BIN)/moedoctor run $(ARGS)

test: setup ## run the tests
	@$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

browser: ## fetch axe-core, which checks HTML reports for accessibility, and say how to install a browser
	@sh scripts/browser.sh

# One worker more than cores: tests of a Ray cluster wait most of their time.
slow: setup browser ## run the tests that take minutes, then those that measure times, one by one
	@$(BIN)/python -m pytest -n $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --dist worksteal -m 'slow and not alone' $(ARGS) || [ $$? -eq 5 ]
	@$(BIN)/python -m pytest -n 0 -m 'slow and alone' $(ARGS) || [ $$? -eq 5 ]

test-upstream: setup ## run the tests that need a real vLLM and FlashInfer, in .venv-upstream
	@VLLM='$(VLLM)' TORCH='$(TORCH)' ARGS='$(ARGS)' sh scripts/test_upstream.sh

releases: setup ## run the scenarios of vLLM's and torch's own code on a CPU, release by release, and write reports/releases anew; by hand
	@RELEASES='$(RELEASES)' sh scripts/releases.sh

release: setup ## make all tables anew with vLLM V and say what it changes and what needs a person; docs/releases.md
	@status=0; TORCH='$(TORCH)' $(BIN)/python scripts/release $(V) || status=$$?; [ $$status -le 1 ] && \
		RELEASES='vllm $(V)' sh scripts/releases.sh && \
		make --no-print-directory backendreports reports readme && exit $$status

lint: setup ## format, lint, types, import contracts, scenario schema, made blocks of the documents
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy --strict moedoctor
	@$(BIN)/lint-imports
	@$(BIN)/python scripts/check_size.py
	@$(BIN)/python scripts/made_blocks.py

format: setup ## format the code, and fix what can be fixed by itself
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

readme: setup ## make anew what is made from code and reports: blocks of documents, scenarios/schema.json, the plug-in's data
	@$(BIN)/python scripts/made_blocks.py --write

schema: readme ## the same, for scenarios/schema.json

plugintable: readme ## the same, for the data of `moedoctor check` and the table of docs/plugin.md

docs: setup ## build the documentation in out/site; open out/site/index.html
	@$(BIN)/python -m mkdocs build --quiet $(ARGS)

reports: setup ## write the page of each stored report anew from its JSON
	@$(BIN)/python scripts/stored_pages.py --write

backendreports: setup ## write reports/backends anew from the tables of `moedoctor backends`
	@$(BIN)/python scripts/backend_reports.py reports/backends

evidence: setup ## judge what moedoctor promises by the stored reports; NAMES="..." makes these reports first, on a GPU
	@$(BIN)/python evidence/promises.py $(NAMES)

baseline: setup ## measure the CPU baseline anew that CI compares with
	@mkdir -p reports/baselines
	@$(BIN)/moedoctor run --format json -o reports/baselines/cpu.json
