PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JAVASCRIPT := tests/contract/javascript
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Each of the thousands of processes that the tests start would compile the packages again.
unexport PYTHONDONTWRITEBYTECODE

# The files of `make test` are in memory where that has 4 GiB for them: a disk takes milliseconds to store each of many thousands for good.
# Proofs write more, and stay on the disk.
MEMORY := /dev/shm
ifeq ($(shell grep -q ' $(MEMORY) .*noexec' /proc/mounts || df --output=avail $(MEMORY) 2>/dev/null | awk 'NR == 2 && $$1 > 4194304 { print "room" }'),room)
test: export PYTEST_DEBUG_TEMPROOT ?= $(MEMORY)
endif

# A slow machine on a fast one: ISA=avx2 builds and runs as on a processor without AVX-512, BUSY=1 keeps a core busy with something else
# for as long as the lanes run. `make test proof ISA=avx2 BUSY=1`.
ifeq ($(ISA),avx2)
export CC := gcc -mno-avx512f -mno-avx512bf16 -mno-avx512fp16 -mno-amx-tile -mno-amx-bf16 -mno-amx-int8 -mno-avxvnni
export ATEN_CPU_CAPABILITY := avx2
export ONEDNN_MAX_CPU_ISA := AVX2
export MKL_ENABLE_INSTRUCTIONS := AVX2
else ifneq ($(ISA),)
$(error ISA is avx2 or not given)
endif

# Four lanes run side by side, longest first; each of the others begins when one has ended, so that short ones at the end keep both cores busy.
# Tests of the engine and of the models keep one core busy; those of the other lanes mostly wait for processes that they started.
LANES := pipeline engine models queue system workers control api contract
MODEL_TESTS := tests/workers/engine/models tests/workers/engine/kernels tests/benchmarks tests/tools
ENGINE_TESTS := tests/workers/engine tests/workers/text
QUEUE_TESTS := tests/jobs
CONTROL_TESTS := tests/jobs/control
CONTRACT_TESTS := tests/contract
WORKER_TESTS := tests/workers
API_TESTS := tests/api
PIPELINE_TESTS := tests/pipeline tests/batch_inference_pipeline
MATRIX_TESTS ?= tests/jobs tests/api
SMOKE_TESTS := tests/pipeline/test_run_batch.py::test_every_line_is_answered_rightly_in_input_order \
  tests/pipeline/test_serve.py::test_the_official_client_streams_the_right_tokens \
  tests/pipeline/test_serve.py::test_streamed_and_whole_answers_are_the_same \
  tests/pipeline/test_embeddings.py::test_a_batch_of_the_api_has_embeddings \
  tests/workers/engine/models/test_parity.py::test_same_as_transformers[llama-cached-preempted-ahead-cpu]

.PHONY: help demo test smoke again touched proof chaos faults matrix coverage docs helm lint bench bench-full bench-gpu clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed  ## install, then answer examples/requests.jsonl with the demo model
	$(BIN)/pipeline demo

# $(call lane,NAME,COMMAND): run a lane and say how long it took; `lanes` repeats that at the end of all output.
LANE_TIMES := .lanes
lane = began=$$(date +%s); $(2); status=$$?; mkdir -p $(LANE_TIMES); \
  if [ $$status != 0 ] && [ -n "$$TIMED_OUT_TESTS" ]; then echo $(1) >> "$$(dirname "$$TIMED_OUT_TESTS")/refused"; fi; \
  echo "$(1): $$(( $$(date +%s) - began )) s" > $(LANE_TIMES)/$(1); exit $$status
busy = $(if $(filter 1,$(BUSY)),(while :; do :; done) & trap "kill $$!" EXIT; trap "exit 130" INT TERM;)
lanes = $(busy) rm -f $(LANE_TIMES)/$(1)-*; $(MAKE) --no-print-directory -j4 --output-sync=target $(2:%=$(1)-%); \
  status=$$?; echo "Time of each lane:"; cat $(LANE_TIMES)/$(1)-*; exit $$status

models_tests = OMP_NUM_THREADS=1 $(BIN)/pytest -q $(1) $(MODEL_TESTS)
engine_tests = OMP_NUM_THREADS=1 $(BIN)/pytest -q $(1) $(ENGINE_TESTS) $(MODEL_TESTS:%=--ignore=%)
queue_tests = $(BIN)/pytest -q $(1) $(QUEUE_TESTS) $(CONTROL_TESTS:%=--ignore=%)
control_tests = $(BIN)/pytest -q $(1) $(CONTROL_TESTS)
workers_tests = $(BIN)/pytest -q $(1) $(WORKER_TESTS) $(ENGINE_TESTS:%=--ignore=%)
api_tests = $(BIN)/pytest -q $(1) $(API_TESTS)
contract_tests = $(BIN)/pytest -q $(1) $(CONTRACT_TESTS)
pipeline_tests = $(BIN)/pytest -q $(1) $(PIPELINE_TESTS)
system_tests = $(BIN)/pytest -q $(1) $(patsubst %,--ignore=%,$(MODEL_TESTS) $(QUEUE_TESTS) $(CONTRACT_TESTS) $(WORKER_TESTS) $(API_TESTS) $(PIPELINE_TESTS))

test: $(VENV)/.installed-test $(JAVASCRIPT)/node_modules  ## linters, types and the test suite, in lanes (under 6 minutes on two slow cores)
	+@$(call lanes,test,$(LANES) lint)

test-lint:
	@$(call lane,$@,$(MAKE) --no-print-directory lint)

test-%:
	@$(call lane,$@,$(call $*_tests))

smoke: $(VENV)/.installed-test  ## whether the install works, in under a minute: a batch file, the Batch API, live calls, the engine against transformers
	$(BIN)/pytest -q $(SMOKE_TESTS)

again:  ## one test, alone, whose id is TEST in the environment
	@$(BIN)/pytest -q "$$TEST"

touched: $(VENV)/.installed-test  ## the proofs of what changed since all of them passed, in at most ten minutes; BASE=commit compares with another
	@$(busy) $(BIN)/python -m tests.touched_proofs

proof: $(VENV)/.installed-test  ## all kill rounds, fuzzing and wide grids, in lanes (under 35 minutes on two slow cores)
	+@$(call lanes,proof,$(LANES))

proof-%:
	@$(call lane,$@,$(call $*_tests,-m proof))

chaos: $(VENV)/.installed-test  ## ten minutes of a fleet at work while everything breaks; SEED=n repeats a run
	$(BIN)/python -m tests.chaos --seconds 600 $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.chaos --sentinel --seconds 150 --requests 3000 $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.chaos --bucket --seconds 150 --requests 3000 $(if $(SEED),--seed $(SEED))

faults: $(VENV)/.installed-test  ## put known faults into a copy of the code one by one: the suite has to find each
	$(BIN)/python -m tests.faults

matrix: $(VENV)/.installed-test  ## tests of what talks to Redis on each server binary of SERVERS="path …", one after the other
	$(BIN)/python -m tests.matrix $(SERVERS) -- $(MATRIX_TESTS)

coverage: $(VENV)/.installed-test  ## the share of each package's lines that the fast tests run, or those of TESTS="path …"; child processes count
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -q $(TESTS); tests=$$?; $(BIN)/coverage combine --quiet && $(BIN)/python -m tests.coverage_table && exit $$tests

docs: $(VENV)/.installed  ## the tables of docs/, and the client's names of the API, that follow from the code
	$(BIN)/python -m tools.docs_tables
	$(BIN)/python -m tools.client_vocabulary

helm: $(VENV)/.installed  ## docker/helm/rendered/, by the `helm` on PATH
	$(BIN)/python -m tools.helm_chart

lint: $(VENV)/.installed-test  ## ruff, mypy and the borders of packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed  ## this engine and run-batch on a CPU, on random weights of a real shape, in some minutes
	$(BIN)/python -m benchmarks

bench-full: $(VENV)/.installed  ## the same and more by turns with vLLM's CPU build, from the folder PEERS, in under an hour: the goals of docs/performance.md
	$(BIN)/python -m benchmarks --full

bench-gpu: $(VENV)/.installed  ## one GPU, in under 8 minutes: the table of docs/gpu.md with what was measured
	$(BIN)/python -m benchmarks.gpu

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v >= (3, 11) else f"Python {v[0]}.{v[1]} found; this needs 3.11 or later. Say which: make $(MAKECMDGOALS) PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -e '.[worker]'
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) install -q -e '.[worker,test]'
	touch $@

$(JAVASCRIPT)/node_modules: $(JAVASCRIPT)/package.json  # the official JavaScript client, for its contract tests; without it they are skipped
	npm install --prefix $(JAVASCRIPT) --no-package-lock --ignore-scripts --no-audit --no-fund --silent && touch $@ || echo "no JavaScript client: its tests will be skipped"

clean:
	rm -rf $(VENV) $(LANE_TIMES) $(JAVASCRIPT)/node_modules build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*
