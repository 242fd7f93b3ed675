# Everything runs from .venv, which `make` creates from pyproject.toml and the lock of the target.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# What .venv is for: cpu, cuda or rocm; once set up, it stays that.
TARGET ?= $(or $(shell cat $(VENV)/.target 2>/dev/null),cpu)
LOCK := requirements-$(TARGET).lock
ARGS ?=
# Set it on the command line only: some sites define CLUSTER in the environment.
CLUSTER :=
DOCS := .venv-docs/bin/mkdocs

# Ray accepts only clients with its token; see actors/cluster/auth.py.
export RAY_AUTH_MODE ?= token
export RAY_USAGE_STATS_ENABLED ?= 0
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
# Container images often set it; here dozens of processes import the same modules, and would compile them each time.
unexport PYTHONDONTWRITEBYTECODE

UNREAL := not slow and not gpu and not real

.PHONY: help setup train experiment test test-fast test-journeys test-all gpu-smoke gpu-first-hour chaos check format bench bench-sandbox soak-sandbox fuzz-sandbox bench-balancer bench-learner bench-evaluation calibrate
.PHONY: cluster-up cluster-down dashboards preflight docs clean same-target

help:  ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(READY)  ## Create .venv with the exact versions of the lock; TARGET=cuda or rocm for GPUs (default cpu)

# A lock is complete and installed without resolving: vLLM's CPU build names torchvision, torchaudio and torchcodec, whose
# builds need CUDA and break `import transformers` without it; text models need none of the three. In vLLM's images the
# environment lies over the image's Python, and what is there is not installed again (deploy/missing.py).
$(READY): pyproject.toml $(LOCK) | same-target
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || deploy/venv.sh $(TARGET) $(PYTHON) $(VENV)
	@echo $(TARGET) > $(VENV)/.target
	@echo "setting up $(VENV) for $(TARGET): a few minutes the first time"
	@for kind in hashed unhashed; do $(BIN)/python deploy/missing.py $(LOCK) $$kind > $(VENV)/$$kind.txt || exit 1; done
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $(VENV)/hashed.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r $(VENV)/unhashed.txt || { \
	  echo "If it is torch's CPU build (+cpu) that was not found: it lies in PyTorch's own package index. Set"; \
	  echo "PIP_EXTRA_INDEX_URL to the address that PyTorch's page 'Start Locally' gives for CPU, and repeat."; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	$(BIN)/python -m actors.preflight.imports $(TARGET)
	@touch $@

same-target:
	@test ! -e $(VENV)/.target || test "$(TARGET)" = "$$(cat $(VENV)/.target)" || { \
	  echo "$(VENV) is set up for $$(cat $(VENV)/.target): 'make clean' first"; exit 1; }

requirements-%.lock:
	@echo "TARGET is one of cpu, cuda and rocm, not '$*'"; exit 1

train: $(READY)  ## The whole recipe (SFT, three RL stages, report); ARGS="--seed 1 --run-dir ..." to change it
	$(BIN)/python recipes/train.py $(ARGS)

experiment: $(READY)  ## Evidence of learning, arm by arm (docs/evidence.md); ARGS="--parts C --seeds 3" to choose
	$(BIN)/python -m benchmarks.evidence $(ARGS)

# The real ones come last: most of their time is starting processes. ARGS may select tests of one
# half only (exit status 5: no test was selected).
test: $(READY)  ## The tests that run on a CPU, without journeys
	$(BIN)/python -m pytest -q -m "$(UNREAL)" --numprocesses 2 $(ARGS) $(if $(ARGS),|| test $$? -eq 5)
	$(BIN)/python -m pytest -q -m "real and not journey and not slow and not gpu" --numprocesses 2 $(ARGS) $(if $(ARGS),|| test $$? -eq 5)

test-journeys: $(READY)  ## End-to-end journeys of a user (minutes): the recipe, killed and resumed; a base model that becomes a served agent; the wheel by itself
	$(BIN)/python -m pytest -q -m "journey and not slow" --numprocesses 2 $(ARGS)

test-all: $(READY)  ## What CI runs: the tests that run on a CPU, and the journeys
	$(BIN)/python -m pytest -q -m "$(UNREAL)" --numprocesses 2
	$(BIN)/python -m pytest -q -m "real and not slow and not gpu" --numprocesses 2

test-fast: $(READY)  ## The quick tests: without Ray, vLLM, DeepSpeed, sandbox and browser
	$(BIN)/python -m pytest -q -m "$(UNREAL) and not isolated and not long" --numprocesses 2 $(ARGS)

gpu-smoke: $(READY)  ## Five minutes on one GPU: learner, engine and publish; then recipes/rehearse.py --scale gpu
	$(BIN)/python -m pytest -q -m gpu -rs tests/gpu $(ARGS)

gpu-first-hour:  ## The first hour with a GPU, learner first: each step at most 8 minutes, resumable; measured beside planned
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu_first_hour $(ARGS)

chaos: $(READY)  ## Inject faults into one real run, a line for each; ARGS="--kinds SIGKILL --seeds 3" to choose
	$(BIN)/python -m tests.chaos $(ARGS)

check: $(READY)  ## Format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: $(READY)  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: bench-sandbox bench-balancer bench-learner bench-evaluation  ## All benchmarks; each prints one JSON line

bench-sandbox: $(READY)  ## Sandbox calls/s; REFERENCE=URL names a running Code Judge to alternate with
	$(BIN)/python -m benchmarks.sandbox $(ARGS)

soak-sandbox: $(READY)  ## 200,000 mixed calls, 5 % hostile, watching memory and leaks
	$(BIN)/python -m benchmarks.sandbox_soak $(ARGS)

fuzz-sandbox: $(READY)  ## Generated programs against the sandbox, at each level, as each user; ARGS="--seconds 900", or "--http" for the HTTP server
	$(BIN)/python -m tests.fuzz $(ARGS)

bench-balancer: $(READY)  ## The balancer simulated, and on real engines
	$(BIN)/python -m benchmarks.scheduler $(ARGS)
	$(BIN)/python -m benchmarks.balancer
	$(BIN)/python -m benchmarks.balancer --costly

bench-evaluation: $(READY)  ## Evaluating against a bare engine
	$(BIN)/python -m benchmarks.evaluation $(ARGS)

calibrate: $(READY)  ## Fit the simulator's engine model to this machine's vLLM and predict runs it has not seen
	$(BIN)/python -m benchmarks.balancer --calibrate $(ARGS)

bench-learner: $(READY)  ## Learner tokens/s against a bare DeepSpeed loop and TRL; publishing to an engine
	$(BIN)/python -m benchmarks.learner $(ARGS)
	$(BIN)/python -m benchmarks.publish

cluster-up: $(READY)  ## A Ray head with dashboard on 127.0.0.1:8265; CLUSTER=deploy/mi300x.yaml for hosts over ssh
	@$(BIN)/python -m actors.cluster up $(CLUSTER)

cluster-down: $(READY)  ## Stop the head that cluster-up started, and no other; CLUSTER=... for the hosts of a file
	@$(BIN)/python -m actors.cluster down $(CLUSTER)

dashboards: $(READY)  ## Prometheus for that head on 127.0.0.1:9090, and how to point Grafana at it; ARGS="9091" for another port
	@$(BIN)/python -m actors.cluster.dashboards $(ARGS)

preflight: $(READY)  ## Check this machine, or every node of the cluster, and show how to fix what is wrong
	@$(BIN)/python -m actors.preflight $(ARGS)

docs: $(DOCS)  ## The docs as a site in build/docs, every link checked; mkdocs is installed in .venv-docs
	NO_MKDOCS_2_WARNING=1 $(DOCS) build --strict
	@echo "open build/docs/index.html"

$(DOCS): pyproject.toml
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check $$(.venv-docs/bin/python -c "import tomllib; \
	  print(*tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups']['docs'])")
	@touch $@

clean:  ## Remove the environment and caches; runs stay
	rm -rf $(VENV) .venv-docs .pytest_cache .ruff_cache .hypothesis
