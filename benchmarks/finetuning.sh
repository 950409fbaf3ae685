#!/usr/bin/env bash
# Pretrains a NeoBERT and a pre-norm RoBERTa of the mini model's size by the same recipe (m1 and m0 differ in the architecture
# only), and fine-tunes them beside the mini model and models with random weights. Two hours on two cores.
#
#     benchmarks/finetuning.sh runs/documentation glue        (as `make mini` and the authors of GLUE leave these folders)
set -euo pipefail
corpus=$1 glue=$2
shape=hidden_size=256,num_hidden_layers=4,num_attention_heads=4,intermediate_size=1024,tie_word_embeddings=false
for recipe in m1 m0; do
    python examples/pretrain_mlm.py --recipe $recipe --config_overrides $shape --tokenizer_name src/neobert_hf/mini \
        --train_files "$corpus/train_documents.jsonl" --validation_files "$corpus/held_out.jsonl" \
        --documents_dir runs/pretrained-documents --max_length 128 --row_tokens 4096 --tokens_per_step 8192 \
        --max_steps 250 --learning_rate 1.5e-3 --warmup_steps 25 --use_cpu --auto_precision --report_to none \
        --output_dir runs/pretrained-$recipe
done
python benchmarks/finetuning.py --data_dir "$glue" --output_dir runs/finetuning --json benchmarks/results/finetuning_cpu.json \
    --pretrained "NeoBERT, pretrained by recipe m1=runs/pretrained-m1" \
    "RoBERTa pre-norm, pretrained by recipe m0=runs/pretrained-m0"
