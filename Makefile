# Every target works on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SEED   ?= 1
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check --root-user-action=ignore
# The build of torch: `cpu`, or `cuda` for NVIDIA GPUs. Where the index has no other, the same one for both.
TORCH  ?= cpu
# The locked versions (`make lock`) with their hashes; torch by version alone, since each of its builds has other hashes.
LOCKED := --require-hashes --no-deps --requirement requirements
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
	--no-emit-package torch

# Without compiled files every process that a test starts compiles the project again, which takes minutes in sum.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup lock demo check test test-oldest test-newest test-nightly test-gpu test-vllm test-agents test-compose test-sandboxes reference docs dist clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: $(VENV)/.done  ## Create .venv with everything in it

$(VENV)/.done: pyproject.toml requirements/dev.lock
	@$(MAKE) --no-print-directory $(VENV)/.runs
	@echo "set-up, once: what tests and docs need, minutes"
	@$(PIP) $(LOCKED)/dev.lock
	@touch $@

# What runs need, and pytest for the tests of environments: half as much as the tests of Penstock itself.
$(VENV)/.runs: pyproject.toml requirements/local.lock
	@echo "set-up, once: 1/3 virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(LOCKED)/pip.lock
	@echo "set-up, once: 2/3 Penstock and its dependencies, a minute"
	@$(PIP) $(LOCKED)/local.lock
	@$(PIP) --no-deps --build-constraint requirements/all.lock --editable .
	@echo "set-up, once: 3/3 torch for $(TORCH), some hundred megabytes; gigabytes with CUDA"
	@PIP="$(PIP)" sh requirements/torch.sh $(TORCH)
	@touch $@

lock: $(VENV)/.runs  ## Lock the newest versions that pyproject.toml permits, for all platforms
	$(PIP) uv
	echo pip | $(COMPILE) --upgrade --all-extras pyproject.toml - --output-file requirements/all.lock
	$(COMPILE) --constraint requirements/all.lock --extra dev pyproject.toml --output-file requirements/dev.lock
	echo pytest | $(COMPILE) --constraint requirements/all.lock --extra local pyproject.toml - --output-file requirements/local.lock
	$(COMPILE) --constraint requirements/all.lock --extra rollout --extra dashboard pyproject.toml \
		--output-file requirements/light.lock
	$(COMPILE) --constraint requirements/all.lock --extra rollout --extra dashboard --extra train --extra storage \
		pyproject.toml --output-file requirements/train.lock
	$(COMPILE) --constraint requirements/all.lock --extra reasoning-gym pyproject.toml \
		--output-file requirements/reasoning-gym.lock
	echo pip | $(COMPILE) --constraint requirements/all.lock - --output-file requirements/pip.lock
	grep -o 'transformers>=[0-9.]*' pyproject.toml | $(COMPILE) --upgrade --resolution lowest-direct - \
		--output-file requirements/oldest.lock
	$(COMPILE) --upgrade --override requirements/vllm-overrides.in requirements/vllm.in --output-file requirements/vllm.lock
	$(COMPILE) --upgrade tests/agents/requirements.in --output-file tests/agents/requirements.lock
	cd tests/agents && npm install --package-lock-only --omit-lockfile-registry-resolved --no-audit --no-fund

demo: $(VENV)/.runs  ## Train a small model to use a calculator, through the whole pipeline
	$(BIN)/penstock demo --seed $(SEED)

check: setup  ## Format, lint, types, import contracts, spelling, house rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/pytest -q tests/unit/test_house_rules.py

test: setup  ## Unit, property, integration and end-to-end tests
	$(BIN)/pytest -m "not full and not gpu and not vllm and not agents and not compose and not sandboxes" -n 4 --dist worksteal --durations 60 --durations-min 4

test-oldest: setup .cache/oldest/.done  ## Trainer and local engine on the oldest transformers that is permitted
	PYTHONPATH=$(CURDIR)/.cache/oldest/site-packages $(BIN)/pytest -m "models and not full" -n 4 --dist worksteal

.cache/oldest/.done: requirements/oldest.lock
	rm -rf .cache/oldest
	$(PIP) $(LOCKED)/oldest.lock --target .cache/oldest/site-packages
	@touch $@

test-newest: setup  ## On the newest versions of all dependencies; names the package with which a test fails
	$(BIN)/python tests/newest.py

test-nightly: setup  ## What is too long for `make test`, with random examples; takes hours
	$(BIN)/python tests/nightly.py

test-gpu: setup  ## The trainer's step on a GPU; skipped without one
	$(BIN)/pytest -m gpu tests/gpu

test-vllm: setup  ## On the real vLLM, on the CPU; creates its virtual environment once
	PYTHON=$(BIN)/python sh tests/vllm/setup.sh
	$(BIN)/pytest -m vllm tests/vllm

test-agents: setup  ## Real agent programs in sandboxes; installs them once (2 GB, needs npm)
	PYTHON=$(BIN)/python sh tests/agents/setup.sh
	$(BIN)/pytest -m agents -rs -n 2 tests/agents

test-compose: setup  ## The images and compose.yaml on a Docker engine; skipped without one
	$(BIN)/pytest -m compose -s tests/compose

test-sandboxes: setup  ## Sandboxes on a Docker engine (tests/sandboxes/engine.sh starts one); skipped without one
	$(BIN)/pytest -m "sandboxes and not full" -n 4 --dist worksteal -rs --durations 10 --ignore tests/sandboxes/test_engine_restart.py tests/sandboxes
	$(BIN)/pytest -m "sandboxes and not full" -rs tests/sandboxes/test_engine_restart.py

reference: setup  ## The pages of docs/ that are generated from the code
	for page in settings records algorithms agents commands http log-events; do \
		$(BIN)/python docs/$$(echo $$page | tr - _)_page.py > .page.md && mv .page.md docs/$$page.md || exit 1; done
	$(BIN)/python docs/settings_schema.py > .schema.json && mv .schema.json workers/settings/settings.schema.json

docs: setup  ## The docs site, into build/docs/site; a broken link fails
	$(BIN)/python docs/site/build_site.py

dist: setup  ## Wheels, source archives and a list of dependencies (SBOM), into dist/
	rm -rf dist build/dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m build --outdir dist plugins/vllm
	$(PYTHON) -m venv build/dist
	build/dist/bin/python -m pip install -qq --disable-pip-version-check "$$(echo dist/penstock-*.whl)[rollout,dashboard]"
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--output-file dist/penstock.cdx.json build/dist/bin/python

clean:  ## Remove everything that setup, tests and demos created
	rm -rf $(VENV) runs build dist .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
