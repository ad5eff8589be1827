# Tasks for contributors: `make lint types test`. CONTRIBUTING.md says when to run which.
# Activate the environment first: `pip install torch==2.13.0 -e ".[dev,agents]"`.

PYTHON ?= python
SGLANG_PYTHON ?= .sglang/bin/python
PACKAGES = import sysconfig; print(sysconfig.get_path('purelib'))

.PHONY: help lint format types test test-slow test-sglang test-trackers test-chaos coverage docs site

help:  ## Print this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

lint:  ## Check code, formatting, imports between layers, spelling and prose.
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	lint-imports
	$(PYTHON) -m codespell_lib
	$(PYTHON) -m pytest -n 0 tests/test_prose.py

format:  ## Sort imports and format the code.
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

types:  ## Check types.
	$(PYTHON) -m pyright --pythonpath $(shell command -v $(PYTHON))

test:  ## Run the everyday tests (some minutes on two idle cores).
	$(PYTHON) -m pytest -n logical --dist worksteal

test-slow:  ## Run the slow tests (half an hour on two busy cores).
	$(PYTHON) -m pytest -n logical --dist worksteal -m slow

test-sglang:  ## Run the tests that start the real SGLang (half an hour on two busy cores).
	AGENTRL_AGENTS_PYTHON=$(shell command -v $(PYTHON)) $(SGLANG_PYTHON) -m pytest -m sglang

test-trackers:  ## Run the tests of all real trackers, in .trackers: this environment with other versions.
	$(PYTHON) -m venv .trackers
	.trackers/bin/python -c "import pathlib, sys; pathlib.Path(sys.argv[1], 'base.pth').write_text(sys.argv[2])" \
		$$(.trackers/bin/python -c "$(PACKAGES)") $$($(PYTHON) -c "$(PACKAGES)")
	.trackers/bin/python -m pip install --quiet -e ".[mlflow,swanlab,trackio]"
	.trackers/bin/python -m pytest -n 0 -m slow tests/trainer/metrics/test_trackers.py

test-chaos:  ## Kill processes of runs on Ray at five random instants of each kind.
	AGENTRL_CHAOS_INSTANTS=5 $(PYTHON) -m pytest -n 0 -m slow tests/cluster/test_chaos.py

coverage:  ## Run the everyday tests and print which lines they miss.
	$(PYTHON) -m pytest -n logical --dist worksteal --cov=agentrl --cov-report=term-missing:skip-covered

docs:  ## Write the generated pages again.
	$(PYTHON) docs/make_tree.py
	$(PYTHON) docs/make_methods.py
	$(PYTHON) docs/make_keys.py
	$(PYTHON) docs/make_verl_table.py
	$(PYTHON) docs/make_trust_table.py
	$(PYTHON) docs/make_memory.py
	$(PYTHON) docs/make_roles.py
	$(PYTHON) docs/make_figures.py
	$(PYTHON) docs/make_reference.py

site:  ## Build the documentation site; open site/index.html.
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict
