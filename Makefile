# make train     environment, default corpus, a small GPT trained on it, a sample
# make test      environment with the test tools, lint, the tests that a change is to pass before anything else
# make test-all  these, and the rest of the grids (make test-long), as CI has it
# make test-gpu  the tests that need a CUDA GPU;  make test-slow  hundreds of kills and resumes, hours
# make test-mistakes  plants the mistakes of tests/mistakes.toml one at a time: do the tests notice?
# make test-fuzz 100,000 random calls of all attentions, on a GPU if there is one (ARGS="--minutes 9 --seed 0")
# make clean     removes the environment, the prepared corpora and caches; runs/ stays
#
# PYTHON=python3.12 chooses the interpreter (3.11 or newer). VENV= uses an environment of yours, PY=python3 unless said
# otherwise, as it is: nothing is installed into it, nothing of it removed.

PYTHON ?= python3
VENV ?= .venv
PY ?= $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
INSTALLED = $(if $(VENV),$(VENV)/.installed)
INSTALLED_DEV = $(if $(VENV),$(VENV)/.installed-dev)
ARGS ?=
# Tests run in this many processes. One more than there are cores, as some wait for processes of their own: two left
# 16 to 21% of two cores idle. With a GPU each holds a CUDA context (half a GB) and what its tests left in the
# allocator's cache, and all share the GPU: beyond 14 they wait for each other.
WORKERS ?= $(shell $(PY) -c "import os; print(min(8, os.cpu_count() + 1))")
GPU_WORKERS ?= $(shell $(PY) -c "import os; print(max(1, min(14, os.cpu_count() - 2)))")

# Tests start some hundred processes that import torch. From bytecode that takes 4 s each, without it 8: it is written,
# whatever the environment says.
export PYTHONDONTWRITEBYTECODE =

.PHONY: train test test-long test-all test-gpu test-slow test-mistakes test-fuzz lint clean
.DELETE_ON_ERROR:

train: $(INSTALLED)
	$(PY) train.py experiment=$$($(PY) -c "import torch; print('quickstart_gpu' if torch.cuda.is_available() else 'quickstart')") $(ARGS)

test: $(INSTALLED_DEV) lint
	$(PY) -m pytest -m "not gpu and not long and not slow" -n $(WORKERS) --dist worksteal $(ARGS)

test-long: $(INSTALLED_DEV)
	$(PY) -m pytest -m "long and not gpu and not slow" -n $(WORKERS) --dist worksteal $(ARGS)

test-all: test test-long

# What measures memory or time has the GPU to itself.
test-gpu: $(INSTALLED_DEV)
	TORCHINDUCTOR_COMPILE_THREADS=1 $(PY) -m pytest -m "gpu and not alone" -n $(GPU_WORKERS) --dist worksteal $(ARGS)
	$(PY) -m pytest -m "gpu and alone" $(ARGS)

test-slow: $(INSTALLED_DEV)
	$(PY) -m pytest -m slow $(ARGS)

test-mistakes: $(INSTALLED_DEV)
	$(PY) -m tests.mistakes $(ARGS)

test-fuzz: $(INSTALLED_DEV)
	$(PY) -m tests.fuzz --calls 100000 $(ARGS)

lint: $(INSTALLED_DEV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -c "from importlinter.cli import lint_imports_command; lint_imports_command()" --no-cache --no-logo

ifneq ($(VENV),)
$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "there is no $(PYTHON) here: make $(MAKECMDGOALS) PYTHON=<another, 3.11 or newer>"; exit 2; }
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "tilegpt needs Python 3.11 or newer;" \
	  "$(PYTHON) is $$($(PYTHON) --version). Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)

# --no-compile: Python compiles what it imports, when it does; all that is installed would take 30 s.
$(INSTALLED): pyproject.toml | $(VENV)/bin/python
	@echo "installing what training needs into $(VENV): a minute, more where torch is to be downloaded"
	$(PY) -m pip install --quiet --no-compile --editable .
	@touch $@

$(INSTALLED_DEV): pyproject.toml tests/compilers.py | $(VENV)/bin/python
	@echo "installing the test tools too into $(VENV): a minute, more where torch is to be downloaded"
	$(PY) -m pip install --quiet --no-compile --editable '.[dev]'
	missing=$$($(PY) -m tests.compilers) && { [ -z "$$missing" ] || $(PY) -m pip install --quiet --no-compile $$missing; }
	@touch $@ $(INSTALLED)
endif

clean:
	rm -rf $(if $(wildcard $(VENV)/pyvenv.cfg),$(VENV)) data/prepared *.egg-info .pytest_cache .ruff_cache
