# make train     environment, default corpus, a small GPT trained on it, a sample
# make test      environment with the test tools, lint, every test that this machine can run
# make test-gpu  the tests that need a CUDA GPU;  make test-slow  the long ones (ten kills and resumes)
# make clean     removes the environment, the prepared corpora and caches; runs/ stays
#
# PYTHON=python3.12 chooses the interpreter (3.11 or newer); VENV= with PY=python3 uses an environment of yours.

PYTHON ?= python3
VENV ?= .venv
PY ?= $(VENV)/bin/python
ARGS ?=
# Tests run in this many processes. With a GPU each holds a CUDA context (half a GB) and what its tests left in the
# allocator's cache, and all share the GPU: beyond 14 they wait for each other.
WORKERS ?= $(shell $(PYTHON) -c "import os; print(min(8, os.cpu_count()))")
GPU_WORKERS ?= $(shell $(PYTHON) -c "import os; print(max(1, min(14, os.cpu_count() - 2)))")

.PHONY: train test test-gpu test-slow lint clean
.DELETE_ON_ERROR:

train: $(VENV)/.installed
	$(PY) train.py experiment=$$($(PY) -c "import torch; print('quickstart_gpu' if torch.cuda.is_available() else 'quickstart')") $(ARGS)

test: $(VENV)/.installed-dev lint
	$(PY) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-gpu: $(VENV)/.installed-dev
	TORCHINDUCTOR_COMPILE_THREADS=1 $(PY) -m pytest -m gpu -n $(GPU_WORKERS) --dist worksteal $(ARGS)

test-slow: $(VENV)/.installed-dev
	$(PY) -m pytest -m slow $(ARGS)

lint: $(VENV)/.installed-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

$(VENV)/bin/python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
	  { echo "tilegpt needs Python 3.11 or newer; $(PYTHON) is older. Try: make train PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "installing what training needs into $(VENV): a minute, more where torch is to be downloaded"
	$(PY) -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	@echo "installing the test tools too into $(VENV): a minute, more where torch is to be downloaded"
	$(PY) -m pip install --quiet --editable '.[dev]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) data/prepared *.egg-info .pytest_cache .ruff_cache
