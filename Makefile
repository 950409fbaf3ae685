# Everything runs in .venv. The first target that needs it creates it: .venv/demo installs the demo, .venv/dev all extras.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
COMPAT_VERSIONS := 4.57.6 5.0.0 5.17.0 5.23.0
export HF_HUB_OFFLINE = 1

.PHONY: demo evaluate test test-avx2 test-compat test-transformers test-gpu test-adversary docs lint clean

# Other questions: make demo QUESTIONS='"open a socket"'; make demo QUESTIONS= asks for them in the terminal.
# The shell runs this text as a part of the command: pass untrusted questions to search.py, not to make.
QUESTIONS ?= "read a file line by line" "run a function after some seconds" "join the parts of a path"
demo: .venv/demo
	$(BIN)/python examples/documentation_search/search.py $(QUESTIONS)

# Evaluates the model in the package on GLUE and by pseudo-perplexity, in float32 on the CPU, and renders the tables of the pages
# again. GLUE=folder has the original files of SST-2, CoLA and STS-B; without it they come from the Hub. EVALUATION keeps the results
# of one model: after a change of its weights, give another folder.
EVALUATION := runs/evaluation
evaluate: export NEOBERT_CPU_BF16 = 0
evaluate: export CUDA_VISIBLE_DEVICES =
evaluate: export HF_HUB_OFFLINE = $(if $(GLUE),1,0)
evaluate: .venv/dev
	$(BIN)/python examples/documentation_search/corpus.py --output_dir $(EVALUATION)/texts --held_out_packages pandas networkx
	$(BIN)/python examples/evaluate_model.py --files $(EVALUATION)/texts/held_out_packages.jsonl $(if $(GLUE),--data_dir $(GLUE)) \
		--output_dir $(EVALUATION) --report $(EVALUATION)/report
	cp $(EVALUATION)/evaluation.json benchmarks/results/evaluation_cpu_float32.json
	$(BIN)/python benchmarks/render_tables.py

test: .venv/dev
	$(PYTEST) -m "not gpu and not adversary" tests

# The tests that depend on the processor, with the instructions of a processor without AVX-512.
test-avx2: export ATEN_CPU_CAPABILITY = avx2
test-avx2: export ONEDNN_MAX_CPU_ISA = AVX2
test-avx2: export MKL_ENABLE_INSTRUCTIONS = AVX2
test-avx2: export FBGEMM_ENABLE_INSTRUCTIONS = AVX2
test-avx2: export NEOBERT_CPU_BF16 = 0
test-avx2: .venv/dev
	$(PYTEST) $(addprefix tests/, model/test_kernels_neobert.py model/test_inference_neobert.py model/test_machine_neobert.py hub/test_mini.py examples/documentation_search/test_search.py test_pages.py)

# With the oldest torch: make test-compat COMPAT_TORCH=2.6.0. Its Linux build contains CUDA: 2.9 GB to download, 5.2 GB on disk.
test-compat: .venv/dev
	for version in $(COMPAT_VERSIONS); do $(BIN)/python tests/compat.py $$version $(COMPAT_TORCH) || exit 1; done

# The common model tests of transformers; downloads the source of transformers to .transformers-tests; half a minute.
test-transformers: .venv/dev
	$(BIN)/python -m pytest -q -o addopts= -W ignore -rsf tests/common_model_tests.py

# Needs CUDA; uses the torch of PYTHON, not .venv.
test-gpu:
	$(PYTHON) -m pytest -m gpu tests/test_gpu.py

# Random cases, 15 minutes on two cores; the table at the end shows the seed. Options: ADVERSARY_SHARE=0.1 runs a tenth,
# ADVERSARY_SEED=... repeats a run, ADVERSARY_ONLY="kills 17" runs a single case.
test-adversary: export OMP_NUM_THREADS = 1
test-adversary: .venv/dev
	$(BIN)/python -m pytest -m adversary tests/adversary

# Builds docs/ and the API reference as docs/_build/index.html; a warning is an error.
docs: .venv/dev
	$(BIN)/python -m sphinx -W --keep-going --quiet -b html docs docs/_build
	@echo docs/_build/index.html

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

# torch is installed first, at its pinned version, so that no dependency installs another build. --no-compile: compiling all
# modules takes longer than the installation; the last line compiles only the modules that the demo imports.
.venv/demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) --no-compile torch
	$(PIP) --no-compile -e ".[demo]"
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import neobert_hf, sentence_transformers"
	touch $@

.venv/dev: .venv/demo
	$(PIP) -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .venv-compat .transformers-tests docs/_build build dist src/*.egg-info
