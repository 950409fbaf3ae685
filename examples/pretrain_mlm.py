"""Pretrain NeoBERT by the paper's recipe: HF Trainer, packed rows, exact resume, one machine or many.

    neobert documentation --output_dir runs/documentation
    python examples/pretrain_mlm.py --train_files runs/documentation/train.jsonl \\
        --validation_files runs/documentation/held_out.jsonl --tokenizer_name runs/documentation/tokenizer \\
        --config_overrides hidden_size=256,num_hidden_layers=3,num_attention_heads=4,intermediate_size=1024 \\
        --output_dir runs/small --max_steps 300 --max_length 256 --row_tokens 2048 --tokens_per_step 4096 \\
        --learning_rate 1e-3 --warmup_steps 50                                  (a quick look, minutes on a CPU)

    accelerate launch --config_file examples/accelerate/ddp.yaml examples/pretrain_mlm.py --bf16         (the paper)
    ... --phase 2 --init_from runs/pretraining --output_dir runs/pretraining-4096                        (and its phase 2)
    ... --resume_from_checkpoint last                                           (go on after an interruption, exactly)

`--recipe` names the values (paper, code, m0 to m9); every one of them has a flag. `--max_steps` scales warmup and decay.
"""

import json
import sys
from pathlib import Path

from transformers import AutoModelForMaskedLM, AutoTokenizer, HfArgumentParser, set_seed

from neobert_hf import PackedMLMCollator, PackedStream, tune_allocator
from neobert_hf.arguments import CorpusArguments, PretrainingArguments
from neobert_hf.corpus import Corpus
from neobert_hf.packing import PackedRows
from neobert_hf.pretraining import (
    PretrainingTrainer,
    SaveOnTerminate,
    begin_or_resume,
    build_model,
    training_rows,
    write_summary,
)
from neobert_hf.shards import Shards, tokenize_corpus, tokenizer_hash


def open_corpus(data: CorpusArguments, training: PretrainingArguments, files: list[str] | None) -> Corpus:
    """The text of files, or else of the named dataset."""
    name = None if files else data.dataset_name or training.corpus
    return Corpus(files, name, data.dataset_config, text_column=training.text_column, sample_by=data.sample_by)


def open_shards(data, training, tokenizer, files, folder: Path) -> Shards:
    """Tokenize into the folder, or find there what an earlier run has tokenized."""
    with training.main_process_first(desc="tokenizing"):
        corpus = open_corpus(data, training, files)
        options = dict(
            max_length=data.shard_length, long_documents=data.long_documents, num_processes=data.num_processes
        )
        tokenize_corpus(corpus, tokenizer, folder, corpus.source, **options)
    shards = Shards(folder, verify=data.verify_shards and training.process_index == 0)
    shards.check_tokenizer(tokenizer)
    return shards


def main():
    """Train, evaluate, save, and write a summary."""
    data, training = HfArgumentParser((CorpusArguments, PretrainingArguments)).parse_args_into_dataclasses()
    recipe = training.to_recipe()
    set_seed(training.seed)
    if training.device.type == "cpu":
        tune_allocator()
    print(f"recipe {training.recipe}, phase {training.phase}:\n{json.dumps(recipe.to_dict(), indent=1)}")

    # 1. Tokens
    tokenizer = AutoTokenizer.from_pretrained(data.tokenizer_name or training.tokenizer)
    folder = Path(data.shards_dir or Path(training.output_dir, "shards"))
    if data.streaming:
        corpus = open_corpus(data, training, data.train_files)
        cut = dict(truncation=True, max_length=training.max_length)
        tokens = corpus.stream().map(lambda row: tokenizer(row[corpus.text_column] or "", **cut))
        tokens = tokens.filter(lambda row: len(row["input_ids"]) > tokenizer.num_special_tokens_to_add())
        rows = PackedStream(tokens.select_columns(["input_ids"]), training.row_tokens, seed=training.seed)
        held_out, source = None, corpus.source
    else:
        shards = open_shards(data, training, tokenizer, data.train_files, folder)
        if data.validation_files:
            documents, held_out = (
                shards,
                open_shards(data, training, tokenizer, data.validation_files, folder / "held_out"),
            )
        else:
            documents, held_out = shards.split(data.num_held_out, training.seed)
        source = {name: shards.manifest[name] for name in ("source", "num_documents", "num_tokens", "tokenizer")}

        # 2. Rows
        rows = training_rows(documents, training, training.max_steps)
        held_out = PackedRows(held_out, held_out.lengths, training.row_tokens, training.max_length, seed=training.seed)
    masking = dict(mlm_probability=recipe.mlm_probability, mask_replace_prob=recipe.mask_replace_prob)
    masking |= dict(random_replace_prob=recipe.random_replace_prob, layout=recipe.layout)

    # 3. Model
    if training.phase == 2:
        model = AutoModelForMaskedLM.from_pretrained(training.init_from)
        model.config.max_position_embeddings = training.max_length
        model.config.sparse_prediction = True
    else:
        model = build_model(recipe, len(tokenizer), training.config_overrides)
    run = {
        "recipe": recipe.to_dict(),
        "phase": training.phase,
        "init_from": training.init_from,
        "config": {
            k: v for k, v in model.config.to_diff_dict().items() if k not in ("auto_map", "transformers_version")
        },
        "data": source,
        "tokenizer_sha256": tokenizer_hash(tokenizer),
        "row_tokens": training.row_tokens,
        "seed": training.seed,
    }
    run = json.loads(json.dumps(run))
    checkpoint = begin_or_resume(training.output_dir, run, training.resume_from_checkpoint)

    # 4. Training
    trainer = PretrainingTrainer(
        model,
        training,
        recipe=recipe,
        train_dataset=rows,
        eval_dataset=held_out,
        data_collator=PackedMLMCollator(tokenizer, **masking),
        processing_class=tokenizer,
        callbacks=[SaveOnTerminate()],
    )
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    if trainer.state.global_step < training.max_steps:
        print(f"stopped at step {trainer.state.global_step}; --resume_from_checkpoint last goes on", file=sys.stderr)
        raise SystemExit(143)  # what a process ended by SIGTERM returns

    # 5. What it has learned
    metrics = {} if held_out is None else trainer.evaluate()
    model.config.sparse_prediction = False
    trainer.save_model()
    if trainer.is_world_process_zero():
        summary = write_summary(trainer, run, {k: v for k, v in metrics.items() if k.startswith("eval_")})
        print(json.dumps({k: v for k, v in summary.items() if not isinstance(v, dict)}))


if __name__ == "__main__":
    main()
