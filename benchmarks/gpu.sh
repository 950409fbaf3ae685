#!/usr/bin/env bash
# All benchmarks on a GPU, in less than 9 minutes; writes benchmarks/results/*_gpu*.json.
#   PYTHON=python3 benchmarks/gpu.sh        (a Python with a CUDA build of torch, transformers, accelerate, datasets, tabulate)
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
RESULTS=${RESULTS:-benchmarks/results}
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
mkdir -p "$RESULTS"
timeout 240 "$PYTHON" benchmarks/throughput.py --device cuda --dtype bfloat16 --max_tokens 131072 \
    --models ours published bert-base modernbert-base --lengths 512 1024 2048 4096 8192 \
    --json "$RESULTS/throughput_gpu_bfloat16.json"
timeout 120 "$PYTHON" benchmarks/throughput.py --device cuda --dtype bfloat16 --max_tokens 131072 --num_rounds 3 \
    --models ours ours-compiled --lengths 512 4096 --json "$RESULTS/throughput_gpu_bfloat16_compiled.json"
timeout 90 "$PYTHON" benchmarks/ragged.py --device cuda --batch 256 --train_batch 64 \
    --json "$RESULTS/ragged_gpu_bfloat16.json"
timeout 90 "$PYTHON" benchmarks/memory.py --device cuda --models ours published --lengths 512 4096 --batches 1 16 \
    --max_tokens 65536 --train_batch 32 --json "$RESULTS/memory_gpu.json"
