# Every command that people need: `make help`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CASES ?=
CORES ?= 0.3
PAUSES ?=
# A test waits for other processes half of its time: four tests at once keep two cores busy.
PARALLEL ?= -n $(shell echo $$(( $$(nproc 2> /dev/null || echo 2) * 2 ))) --dist loadgroup
# Of a few tests: each process more collects them, and starts a control plane of its own.
FEW ?= -n 2 --dist loadgroup
SEEDS ?= 0:200
HISTORIES ?= 300
KARPENTER ?= v1.13.0
JOBSET ?= v0.10.1
TRAINER ?= v2.1.0
REGISTRY ?= kfp-gpuquota
TAG ?=
IMAGES ?=
KFP := kfp kfp-kubernetes kfp-pipeline-spec kfp-server-api
SOAKED := restarts group_liveness placement_oracle hostile_objects crds device_parts rough_days two_versions devcluster
SOAKED_TESTS := dsl/test_examples elastic_runtime/test_bench_workers elastic_runtime/test_rehearsal elastic_runtime/test_sharded_zoo \
  elastic_runtime/test_ways_of_start ray/test_node_cut_off security/test_training_under_attack
OLDEST_TESTS := api cli cluster server web security/test_state_file.py
CLIENT_TESTS := access client exporting logs
KFP_TESTS := compile caching local check pipeline_file worker_settings

# Hundreds of processes import the same modules: they are compiled once, at their first import; pip would compile all,
# which takes a minute, and a few of them are used.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-slow test-all slow-machine paused newest oldest coverage soak lint types layers check docs release screenshots clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

quickstart: $(VENV)/.quickstart  ## Set up, then run the example pipeline on a cluster of its own
	$(BIN)/python examples/quickstart.py

test: $(VENV)/.dev  ## Set up, then run the tests, all but the slow ones
	$(BIN)/python -m tools.devcluster build
	$(BIN)/python -m pytest $(PARALLEL) -m 'not slow' $(CASES)

test-slow: $(VENV)/.dev  ## The slow tests: whole trainings and examples, real nodes, random histories
	$(BIN)/python -m tools.devcluster build
	$(BIN)/python -m pytest $(PARALLEL) -m slow $(CASES)

test-all: $(VENV)/.dev  ## Both, in one run: what both share is started once
	$(BIN)/python -m tools.devcluster build
	$(BIN)/python -m pytest $(PARALLEL) $(CASES)

slow-machine: $(VENV)/.dev  ## The tests CASES with CORES=0.3 of a core (root): what fails there fails on a busy machine
	@set -e; if [ -e /sys/fs/cgroup/cgroup.controllers ]; then group=/sys/fs/cgroup/slow; mkdir -p $$group; \
	  echo +cpu > /sys/fs/cgroup/cgroup.subtree_control; \
	  awk 'BEGIN { print $(CORES) * 100000, 100000 }' > $$group/cpu.max; \
	else group=/sys/fs/cgroup/cpu/slow; mkdir -p $$group; echo 100000 > $$group/cpu.cfs_period_us; \
	  awk 'BEGIN { print $(CORES) * 100000 }' > $$group/cpu.cfs_quota_us; fi; \
	echo $$$$ > $$group/cgroup.procs; exec $(BIN)/python -m pytest -n 0 $(CASES)

paused: $(VENV)/.dev  ## The tests CASES while random processes of them are stopped for moments: what fails there fails on a busy machine
	$(BIN)/python -m tools.pauses $(PAUSES) -- $(BIN)/python -m pytest -n 2 $(CASES)

newest: $(VENV)/.dev  ## The tests that use kfp or the client of Kubernetes, with the newest instead of the pinned, oldest one
	rm -rf out/kfp out/kubernetes
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --target out/kfp $(KFP:%='%>=2.17,<3')
	PYTHONPATH=out/kfp $(BIN)/python -c 'import kfp; print("kfp", kfp.__version__)'
	PYTHONPATH=$(CURDIR)/out/kfp $(BIN)/python -m pytest $(FEW) $(KFP_TESTS:%=tests/dsl/test_%.py)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --target out/kubernetes kubernetes
	PYTHONPATH=out/kubernetes $(BIN)/python -c 'import kubernetes; print("kubernetes", kubernetes.__version__)'
	$(BIN)/python -m tools.devcluster build
	PYTHONPATH=$(CURDIR)/out/kubernetes $(BIN)/python -m pytest $(FEW) $(CLIENT_TESTS:%=tests/kubernetes/test_%.py)

oldest: $(VENV)/.dev  ## The embedded cluster with the oldest versions that pyproject.toml admits of what it needs
	rm -rf out/oldest
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --target out/oldest \
	  $$($(BIN)/python -m tools.oldest cluster controller)
	PYTHONPATH=$(CURDIR)/out/oldest $(BIN)/python -m pytest $(FEW) -m 'not slow' $(OLDEST_TESTS:%=tests/%)

coverage: $(VENV)/.dev  ## Modules of which `make test` executes fewer lines than `make test-all`, by more than three points of 100
	rm -rf out/coverage
	mkdir -p out/coverage/quick out/coverage/slow
	$(BIN)/python -m tools.devcluster build
	-COVERAGE_FILE=$(CURDIR)/out/coverage/quick/data $(BIN)/python -m coverage run -m pytest $(PARALLEL) -m 'not slow' $(CASES)
	-COVERAGE_FILE=$(CURDIR)/out/coverage/slow/data $(BIN)/python -m coverage run -m pytest $(PARALLEL) -m slow $(CASES)
	$(BIN)/python -m tools.coverage_gap out/coverage

soak: $(VENV)/.dev  ## What CI samples, in full: histories (SEEDS=0:200, or ELASTIC_HISTORY='...'), the controller's kills and failovers
	$(BIN)/python -m tools.devcluster build
	$(BIN)/python -m pytest -n 0 tests/kubernetes/test_faults.py --plans 200 --away 120 --timeout 3600
	$(BIN)/python -m pytest -n 0 tests/kubernetes/test_failover.py --workers 200
	CHURN_SECONDS=3600 CHURN_PER_SECOND=20 $(BIN)/python -m pytest -n 0 tests/kubernetes/test_churn.py
	WORKLOADS=0:100 $(BIN)/python -m pytest -n 0 tests/kubernetes/test_workload_histories.py
	SOAK=1 $(BIN)/python -m pytest $(PARALLEL) --hypothesis-profile random -m 'not slow' --timeout 7200 tests/api tests/membership tests/scheduler \
	  tests/kubernetes/test_plain_pods.py
	SOAK=1 $(BIN)/python -m pytest $(PARALLEL) --hypothesis-profile random -m slow --timeout 7200 tests/server/test_fuzz.py \
	  $(SOAKED:%=tests/kubernetes/test_%.py)
	SOAK=1 $(BIN)/python -m pytest $(PARALLEL) --timeout 7200 tests/cli/test_generated_commands.py
	SOAK=1 $(BIN)/python -m pytest -n 0 -m slow --timeout 3600 tests/test_release_images.py $(SOAKED_TESTS:%=tests/%.py)
	ELASTIC_SEEDS=$(SEEDS) $(BIN)/python -m pytest -n 2 --dist load tests/elastic_runtime/test_histories.py
	ELASTIC_RECIPES=2000 $(BIN)/python -m pytest -n 2 -m slow tests/elastic_runtime/test_generated.py --timeout 7200
	PIPELINES=200 $(BIN)/python -m pytest $(PARALLEL) -m slow tests/dsl/test_generated_pipelines.py --timeout 3600
	ELASTIC_HISTORIES=all $(BIN)/python -m pytest -n 2 --dist load -m slow tests/elastic_runtime/test_lightning.py --timeout 3600
	$(BIN)/python -m pytest $(PARALLEL) tests/simulation --histories 0:20000
	$(BIN)/python -m pytest -n 2 --dist load -m slow tests/cluster/test_chaos.py tests/cluster/test_hostile_machine.py \
	  --seeds $$(seq -s , 1 $(HISTORIES))
	GOBIN=$(CURDIR)/out/karpenter go install sigs.k8s.io/karpenter/kwok@$(KARPENTER)
	GPUQUOTA_KARPENTER=$(CURDIR)/out/karpenter/kwok \
	  GPUQUOTA_KARPENTER_CRDS="$$(go env GOMODCACHE)/sigs.k8s.io/karpenter@$(KARPENTER)" \
	  $(BIN)/python -m pytest -n 0 -m slow tests/kubernetes/test_karpenter.py
	tools/build_trainer out/trainer $(JOBSET) $(TRAINER)
	GPUQUOTA_TRAINER=$(CURDIR)/out/trainer $(BIN)/python -m pytest -n 0 -m slow tests/kubernetes/test_kubeflow_trainer.py
	$(MAKE) oldest
	cd tools/devcluster/kuberay && GOBIN=$(CURDIR)/out/kuberay go install tool
	GPUQUOTA_KUBERAY=$(CURDIR)/out/kuberay/ray-operator $(BIN)/python -m pytest -n 0 tests/kubernetes/test_kuberay.py
	ELASTIC_REHEARSALS=all $(BIN)/python -m pytest $(PARALLEL) tests/elastic_runtime/test_rehearsal.py

check: lint types layers  ## Style, types and import layers

lint: $(VENV)/.dev  ## Style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev  ## Types (strict)
	$(BIN)/mypy

layers: $(VENV)/.dev  ## Import layers
	$(BIN)/lint-imports

docs: $(VENV)/.dev  ## The documentation as a site, in out/docs; any warning is an error
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs out/docs

release: $(VENV)/.dev  ## What a release publishes, in out/release: sdists, wheels, chart, install YAML, SBOM, with IMAGES=1 images (REGISTRY=..., TAG=...)
	$(BIN)/python -m tools.release out/release --registry '$(REGISTRY)' $(TAG:%=--tag '%') $(IMAGES:%=--images)

screenshots: $(VENV)/.dev  ## Pictures of the web page for docs/images, of a cluster made for them; needs chromium
	$(BIN)/python -m tools.screenshots

clean:  ## Remove what these commands made
	rm -rf $(VENV) out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@command -v $(PYTHON) > /dev/null || { echo "$(PYTHON) is not installed: Python 3.11 or newer is needed; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.quickstart: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing into $(VENV): one to four minutes and 5 GB, most of it torch"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[quickstart]'
	@touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing into $(VENV): one to four minutes and 5 GB, most of it torch"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.quickstart
