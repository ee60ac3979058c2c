# Two commands: `make demo` trains a small language model on two processes, `make test` checks everything.
# Both install into .venv first. PYTHON=/path/to/python uses that environment instead and installs nothing.
# TORCH=2.11.0 picks another version of torch, in an environment of its own.

TORCH ?= 2.13.0
VENV := .venv$(if $(filter-out 2.13.0,$(TORCH)),-$(TORCH))

ifdef PYTHON
READY :=
else
PYTHON := $(CURDIR)/$(VENV)/bin/python
READY := $(VENV)/.installed
endif

# The first interpreter of a supported version, for making .venv.
FIND_PYTHON = for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null \
	&& command -v $$python && break; done

export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
export OMP_NUM_THREADS ?= 1

# Tests of ranks that disagree, die or leave, and of programs that measure them: they wait, and compute little.
WAITS := tests/benchmarks tests/dist/test_ranks.py tests/dist/test_endings.py tests/dist/test_divergence.py tests/runtime/ranks/test_agreement.py

.PHONY: demo test test-ranks test-waits test-rest gpu-test lint format install
.DEFAULT_GOAL := test

demo: $(READY)
	$(PYTHON) -m torch.distributed.run --standalone --nproc_per_node=2 examples/train_lm.py --check $(ARGS)

# Three parts at once keep two cores busy. ARGS are options of pytest, such as --wide.
test: lint
	@$(MAKE) --no-print-directory --jobs=3 --output-sync=target test-ranks test-waits test-rest

test-ranks: $(READY)
	$(PYTHON) -m pytest -m "not gpu" $(ARGS) $(WAITS:%=--ignore=%) tests/dist

test-waits: $(READY)
	$(PYTHON) -m pytest -m "not gpu" $(ARGS) $(WAITS)

test-rest: $(READY)
	$(PYTHON) -m pytest -m "not gpu" $(ARGS) $(WAITS:%=--ignore=%) --ignore tests/dist

# SHARE_GPU=1: what needs two GPUs runs on one that its two ranks share.
gpu-test: $(READY)
	$(PYTHON) -m pytest -m gpu tests $(ARGS)

# Types are checked against one version of torch: the annotations of others differ.
lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(if $(filter 2.13.0,$(TORCH)),$(PYTHON) -m pyright --pythonpath $(PYTHON))

format: $(READY)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

install: $(READY)

$(VENV)/.installed: pyproject.toml
	@if [ ! -x $(VENV)/bin/python ]; then \
		python=$$($(FIND_PYTHON)); \
		if [ -z "$$python" ]; then echo "no Python 3.11, 3.12 or 3.13 with the venv module on PATH; install one or pass PYTHON=/path/to/python" >&2; exit 1; fi; \
		echo "making $(VENV) with $$python"; "$$python" -m venv $(VENV); \
	fi
	$(VENV)/bin/python -m pip install --quiet "torch==$(TORCH)"
	$(VENV)/bin/python -m pip install --quiet "torch==$(TORCH)" --editable ".[test]"
	@touch $@
