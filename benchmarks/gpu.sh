#!/usr/bin/env bash
# Tests and benchmarks on one GPU, in at most 9 minutes: `make measure-gpu`. Results: benchmarks/results/gpu/CARD/*.json.
#   PYTHON=python3 benchmarks/gpu.sh     a Python with a CUDA build of torch, after: pip install -e ".[train,embed]" pytest
#   DTYPE=float32 benchmarks/gpu.sh      another dtype than best_dtype("cuda")
# Each stage has a limit in seconds. A stage that fails leaves its output in STAGE.log, and the next one runs.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
BUDGET=${BUDGET:-500} # seconds for all stages
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-0} # with several GPUs, Trainer would distribute the rows of a test
settings=$("$PYTHON" benchmarks/card.py) || exit 1
read -r card dtype max_tokens batch train_batch <<<"$settings"
export RESULTS=${RESULTS:-benchmarks/results/gpu/$card}
mkdir -p "$RESULTS"
lines=() failed=0
trap 'exit 130' INT

stage() { # NAME LIMIT SCRIPT ARGUMENTS...
    local name=$1 limit=$2 started=$SECONDS left=$((BUDGET - SECONDS)) status=0
    shift 2
    if ((left < 20)); then
        lines+=("$name: not run, no time left") failed=1
        return
    fi
    echo "== $name"
    timeout --foreground --signal=INT --kill-after=10 $((limit < left ? limit : left)) "$PYTHON" "$@" 2>&1 | tee "$RESULTS/$name.log"
    status=${PIPESTATUS[0]}
    if ((status == 0)); then
        rm "$RESULTS/$name.log"
        lines+=("$name: done in $((SECONDS - started)) s")
    else
        ((status == 124 || status == 137)) && status="time limit"
        lines+=("$name: FAILED ($status) after $((SECONDS - started)) s, see $RESULTS/$name.log") failed=1
    fi
}

speed=(benchmarks/throughput.py --device cuda --dtype "$dtype" --max_tokens "$max_tokens" --num_rounds 3)
fast_path() { # STEP LIMIT
    stage "$1" "$2" benchmarks/gpu_fast_path.py --device cuda --dtype "$dtype" --max_tokens "$max_tokens" --num_rounds 3 \
        --steps "$1" --json "$RESULTS/fast_path_$1_$dtype.json"
}
stage tests 120 -m pytest -q -m gpu tests/test_gpu.py
fast_path replays 60
fast_path profile 30
fast_path levers 90
stage throughput 130 "${speed[@]}" --models ours ours-prepacked published bert-base modernbert-base \
    --lengths 16 512 1024 2048 4096 8192 --json "$RESULTS/throughput_$dtype.json"
fast_path speed 100
stage ragged 60 benchmarks/ragged.py --device cuda --dtype "$dtype" --batch "$batch" --train_batch "$train_batch" \
    --models ours ours-prepacked published modernbert-base --num_rounds 3 --json "$RESULTS/ragged_$dtype.json"
fast_path autotuned 60
stage memory 60 benchmarks/memory.py --device cuda --dtype "$dtype" --models ours ours-prepacked published --lengths 512 4096 \
    --batches 16 --max_tokens "$max_tokens" --train_batch "$train_batch" --json "$RESULTS/memory_$dtype.json"
"$PYTHON" benchmarks/roofline.py --measured "$RESULTS" || failed=1
printf '%s\n' "" "${lines[@]}" "results: $RESULTS"
exit $failed
