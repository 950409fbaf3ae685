# Everything runs in .venv; the first target that needs it creates it: .venv/demo installs the demo, .venv/dev all extras. What needs the
# CUDA build of torch runs in .venv-cuda.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
CUDA_PIP := .venv-cuda/bin/pip install --quiet --disable-pip-version-check --no-compile
COMPAT_VERSIONS := 4.57.6 5.0.0 5.3.0 5.17.0 5.23.0
export HF_HUB_OFFLINE = 1

.PHONY: demo test test-all test-avx2 test-processors test-x86 test-compat test-transformers test-gpu measure-gpu rehearse-gpu test-adversary test-runtimes test-programs docs lint clean

# Other questions: make demo QUESTIONS='"open a socket"'; make demo QUESTIONS= asks for them. The shell runs what is given here.
QUESTIONS ?= "read a file line by line" "run a function after some seconds" "join the parts of a path"
demo: .venv/demo
	$(BIN)/python examples/documentation_search/search.py $(QUESTIONS)

test: .venv/dev
	$(PYTEST) -m "not slow and not gpu and not adversary and not runtime and not rehearsal and not processor"

# And what takes long: trainings that are killed, whole jobs, subprocesses, the projects in examples.
test-all: .venv/dev
	$(PYTEST) -m "not gpu and not adversary and not runtime and not rehearsal and not processor" tests examples benchmarks hub_upload

# The tests that depend on the processor, with the instructions of a processor without AVX-512.
test-avx2: export ATEN_CPU_CAPABILITY = avx2
test-avx2: export ONEDNN_MAX_CPU_ISA = AVX2
test-avx2: export MKL_ENABLE_INSTRUCTIONS = AVX2
test-avx2: export FBGEMM_ENABLE_INSTRUCTIONS = AVX2
test-avx2: export NEOBERT_CPU_BF16 = 0
test-avx2: .venv/dev
	$(PYTEST) tests/model/test_kernels_neobert.py tests/model/test_inference_neobert.py tests/model/test_machine_neobert.py tests/test_pages.py

# Other processors by qemu-user: x86 without VNNI, and ARM, which needs Debian and root. Without qemu, a test says why it is skipped.
# test-x86 is the part of x86 alone, if nothing is installed for ARM.
test-processors: .venv-aarch64/installed test-x86

test-x86: .venv/dev
	command -v qemu-x86_64 || test `id -u` != 0 || ! command -v apt-get || (apt-get update -qq && apt-get install -qq --yes qemu-user)
	$(BIN)/python -m pytest -m processor tests/processors

.venv-aarch64/installed: .venv/dev
	test `id -u` != 0 || ! command -v dpkg || tests/processors/aarch64.sh .venv-aarch64

# make test-compat COMPAT_VERSIONS=lowest tests the lower bounds of pyproject.toml, COMPAT_VERSIONS=newest the newest packages.
# With the oldest torch: make test-compat COMPAT_TORCH=2.6.0. Its Linux build contains CUDA: 2.9 GB to download, 5.2 GB on disk.
test-compat: .venv/dev
	for version in $(COMPAT_VERSIONS); do $(BIN)/python tests/compat.py $$version $(COMPAT_TORCH) || exit 1; done

# The common model tests of transformers, from its source.
test-transformers: .venv/dev
	$(BIN)/python -m pytest -q -o addopts= -W ignore -rsf tests/common_model_tests.py

# Needs CUDA; uses the torch of PYTHON, not .venv. PYTHON needs: pip install -e ".[train,embed]" pytest
test-gpu:
	$(PYTHON) -m pytest -m gpu tests/test_gpu.py

# What can be known of CUDA without a GPU: fake tensors, Triton's interpreter, the sources of other packages.
rehearse-gpu: .venv-cuda/installed
	.venv-cuda/bin/python -m pytest -m rehearsal tests/rehearsal

# For whoever has a GPU: test-gpu and all benchmarks, in at most 9 minutes (docs/performance.md). DTYPE=float32 chooses another dtype.
measure-gpu:
	PYTHON="$(PYTHON)" benchmarks/gpu.sh

# Random cases; tests/adversary/test_adversary.py has the options: ADVERSARY_SHARE=0.1 runs a tenth of them.
test-adversary: export OMP_NUM_THREADS = 1
test-adversary: .venv/dev
	$(BIN)/python -m pytest -m adversary tests/adversary

# transformers.js, the page in Chromium, llama.cpp, Ray, DeepSpeed. Needs Node.js 20, npm and a C++ compiler; as root, installs Chromium on Debian.
test-runtimes: .venv/dev
	command -v chromium || test `id -u` != 0 || (apt-get update -qq && apt-get install -qq --yes chromium)
	ONNXRUNTIME_NODE_INSTALL=skip npm install --prefix tests/export/node --no-package-lock --no-audit --no-fund --silent
	$(PIP) "llama-cpp-python[server]" -e ".[ray]"
	DS_BUILD_OPS=0 $(PIP) -e ".[deepspeed]"
	$(BIN)/python -m pytest -m runtime tests/export tests/examples tests/pretraining examples/corpus/tests

# The programs of docs/other_programs.md, each in an environment of its own in .venv-programs.
test-programs: export OMP_NUM_THREADS = 1
test-programs: .venv/dev
	$(BIN)/python -m pytest -n 2 --durations=0 -m runtime tests/test_programs.py

docs: .venv/dev
	$(BIN)/python -m sphinx -W --keep-going --quiet -b html docs docs/_build

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_budgets.py

# torch comes first, at its pinned version, so that no dependency installs another build. Compiling all modules takes longer than
# the installation (--no-compile); the last line compiles what the demo imports.
.venv/demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) --no-compile torch
	$(PIP) --no-compile -e ".[demo]"
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import neobert_hf, sentence_transformers"
	touch $@

.venv/dev: .venv/demo
	$(PIP) -e ".[dev]"
	touch $@

# The Linux build of torch contains CUDA and Triton.
.venv-cuda/torch:
	@test `uname` = Linux || { echo "the CUDA build of torch exists for Linux only, and this is `uname`"; exit 1; }
	@free=`df -Pk . | awk 'NR == 2 {print int($$4 / 1048576)}'`; \
	echo ".venv-cuda needs 9 GB, 3 to download and 6 installed; $$free GB are free in `pwd`"; test $$free -ge 9
	$(PYTHON) -m venv .venv-cuda
	$(CUDA_PIP) torch==2.14.1
	touch $@

.venv-cuda/installed: .venv-cuda/torch pyproject.toml constraints.txt
	grep -v '^torch==' constraints.txt > .venv-cuda/constraints.txt
	$(CUDA_PIP) --constraint .venv-cuda/constraints.txt -e ".[train,demo]" hypothesis pypi-simple pytest pytest-timeout
	touch $@

clean:
	rm -rf .venv .venv-aarch64 .venv-compat .venv-cuda .venv-programs .transformers-tests docs/_build build dist src/*.egg-info
