# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
BIN := .venv/bin
COMPAT_VERSIONS := 4.57.6 5.0.0 5.17.0 5.23.0
export HF_HUB_OFFLINE = 1

.PHONY: demo test test-compat test-gpu lint clean

demo: .venv/installed
	$(BIN)/python examples/demo_documentation.py --output_dir runs/demo

test: .venv/installed
	$(BIN)/python -m pytest -n 2 -m "not gpu" tests

test-compat: .venv/installed
	for version in $(COMPAT_VERSIONS); do $(BIN)/python tests/compat.py $$version || exit 1; done

# Needs CUDA; uses the running Python's torch, so it does not touch .venv.
test-gpu:
	$(PYTHON) -m pytest -m gpu tests/test_gpu.py

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# torch comes first and at its pinned version, so that nothing that depends on it pulls another build.
.venv/installed: setup.py constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .venv-compat build dist src/*.egg-info
