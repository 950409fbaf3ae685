"""Pretrain NeoBERT by the paper's recipe: HF Trainer, packed rows, exact resume, one machine or many.

A short run, some minutes on a CPU:

    python examples/documentation_search/corpus.py --output_dir runs/documentation
    python examples/pretrain_mlm.py --train_files runs/documentation/train.jsonl \\
        --validation_files runs/documentation/held_out.jsonl --tokenizer_name runs/documentation/tokenizer \\
        --config_overrides hidden_size=256,num_hidden_layers=3,num_attention_heads=4,intermediate_size=1024 \\
        --output_dir runs/small --max_steps 200 --max_length 256 --row_tokens 4096 --tokens_per_step 4096 \\
        --learning_rate 2e-3 --warmup_steps 20 --use_cpu

Phase 2 of this run, on longer documents; it reuses the tokenized text:

    python examples/pretrain_mlm.py --phase 2 --init_from runs/small --output_dir runs/small-2 \\
        --train_files runs/documentation/train.jsonl --validation_files runs/documentation/held_out.jsonl \\
        --tokenizer_name runs/documentation/tokenizer --shards_dir runs/small/shards \\
        --max_steps 20 --max_length 1024 --longer_than 256 512 --row_tokens 4096 --tokens_per_step 4096 \\
        --learning_rate 2e-3 --use_cpu

The paper, phases 1 and 2:

    accelerate launch --config_file examples/accelerate/ddp.yaml examples/pretrain_mlm.py --bf16
    accelerate launch --config_file examples/accelerate/ddp.yaml examples/pretrain_mlm.py --bf16 --phase 2 \\
        --init_from runs/pretraining --output_dir runs/pretraining-4096 --shards_dir runs/pretraining/shards

After an interruption, the same command with `--resume_from_checkpoint last` resumes exactly. `--recipe` names the values (paper,
code, m0 to m9), and each value has an argument. `--max_steps` scales warmup and decay. Phase 2 trains at a tenth of
`--learning_rate`, where the schedule of phase 1 ends: give both phases the same value.
"""

import json
import os
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForMaskedLM, set_seed

from neobert_hf import PackedMLMCollator, PackedStream, tune_allocator
from neobert_hf.data.corpus import Corpus
from neobert_hf.data.files import saving
from neobert_hf.data.origins import load_tokenizer
from neobert_hf.data.packing import PackedRows
from neobert_hf.data.plans import PACKING
from neobert_hf.data.shards import MANIFEST, Shards, tokenize_corpus
from neobert_hf.data.wordpiece import tokenizer_hash
from neobert_hf.pretraining.arguments import CorpusArguments, PretrainingArguments
from neobert_hf.pretraining.recipes import Recipe
from neobert_hf.pretraining.trainer import PretrainingTrainer, SaveOnTerminate, build_model, training_rows
from neobert_hf.runs.commands import CommandParser, run_command
from neobert_hf.runs.folders import begin_or_resume, check_held_out, check_start, lock_run, write_summary
from neobert_hf.runs.manifests import STILL_GOOD


def open_corpus(data: CorpusArguments, recipe: Recipe, files: list[str] | None) -> Corpus:
    """The text of the files; without files, of the named dataset; without a name, of the recipe's dataset."""
    name = None if files else data.dataset_name or recipe.corpus
    is_recipes = name == recipe.corpus and not data.text_column
    column = recipe.text_column if is_recipes else data.text_column or "text"
    return Corpus(files, name, data.dataset_config, text_column=column, sample_by=data.sample_by)


def open_shards(data, training, tokenizer, files, folder: Path) -> Shards:
    """Find tokenized text in the folder, or tokenize into it."""
    is_finished = (folder / MANIFEST).is_file()
    if not is_finished and training.world_size > 1:
        raise ValueError(
            f"{folder} holds no shards; tokenize before you start several processes: neobert tokenize --help"
        )
    # One process of each machine compares finished shards with the corpus, which takes a hash of its files.
    is_compared = (files or data.dataset_name) and training.local_process_index == 0
    if not is_finished or is_compared:
        corpus = open_corpus(data, training.to_recipe(), files)
        options = dict(
            max_length=data.shard_length, long_documents=data.long_documents, num_processes=data.num_processes
        )
        tokenize_corpus(corpus, tokenizer, folder, corpus.source, **options)
    shards = Shards(folder, verify=data.verify_shards and training.process_index == 0)
    shards.check_tokenizer(tokenizer)
    return shards


def tokenize(row: dict, tokenizer, text_column: str, max_length: int) -> dict:
    """The tokens of a row of the corpus; a function of the module, since a lambda cannot be sent to other processes."""
    return tokenizer(row[text_column], truncation=True, max_length=max_length)


def has_text(row: dict, num_special_tokens: int) -> bool:
    """Whether the row has other tokens than special tokens."""
    return len(row["input_ids"]) > num_special_tokens


def launched_precision() -> str:
    """The precision that `accelerate launch --mixed_precision` has chosen."""
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    return "as launched" if precision == "no" else precision


def check_length(shards: Shards, max_length: int):
    """Raise ValueError if documents of the shards were cut at a smaller length than that of the training."""
    if max_length > shards.manifest["max_length"]:
        raise ValueError(
            f"max_length={max_length}, but documents were cut at {shards.manifest['max_length']} tokens when they were "
            "tokenized; give a smaller --max_length, or tokenize with a larger --shard_length into another folder"
        )


def open_stream(data, training, tokenizer) -> tuple[PackedStream, dict]:
    """The corpus, tokenized during training and repeated without end, and the description of its source."""
    if training.mixture[0] != 1.0:
        raise ValueError(
            f"mixture={training.mixture} requires the lengths of all documents, unknown in a stream; leave --streaming out"
        )
    corpus = open_corpus(data, training.to_recipe(), data.train_files)
    options = dict(tokenizer=tokenizer, text_column=corpus.text_column, max_length=training.max_length)
    stream = corpus.stream()
    if training.dataloader_num_workers > stream.num_shards:  # a worker without a file would yield no rows
        raise ValueError(
            f"dataloader_num_workers={training.dataloader_num_workers} is above num_shards={stream.num_shards}, the files of the "
            f"stream, and each worker reads files of its own; give --dataloader_num_workers {stream.num_shards} or more files"
        )
    tokens = stream.map(partial(tokenize, **options))
    tokens = tokens.filter(partial(has_text, num_special_tokens=tokenizer.num_special_tokens_to_add()))
    tokens = tokens.select_columns(["input_ids"]).repeat(None)
    num_rows = training.max_steps * training.rows_per_step  # a run that resumes after its last step has no row left
    return PackedStream(tokens, training.row_tokens, seed=training.seed, num_rows=num_rows), corpus.source


def train(data: CorpusArguments, training: PretrainingArguments):
    """Train, evaluate, save, and write a summary."""
    recipe = training.to_recipe()
    set_seed(training.seed)
    if training.device.type == "cpu":
        tune_allocator()
    if training.process_index == 0:
        print(
            f"recipe {training.recipe}, phase {training.phase}:\n{json.dumps(recipe.to_dict(), indent=1)}", flush=True
        )

    # 1. Tokens
    tokenizer = load_tokenizer(data.tokenizer_name or recipe.tokenizer)
    folder = Path(data.shards_dir or Path(training.output_dir, "shards"))
    held_out = None
    if data.validation_files:
        held_out = open_shards(
            data, training, tokenizer, data.validation_files, folder.with_name(f"{folder.name}-held_out")
        )
    if not data.streaming:
        documents = open_shards(data, training, tokenizer, data.train_files, folder)
        check_length(documents, training.max_length)
        source = {name: documents.manifest[name] for name in ("source", "num_documents", "num_tokens", "tokenizer")}
        if held_out is None:
            documents, held_out = documents.split(data.num_held_out, training.seed)
    if tokenizer.mask_token is None or tokenizer.pad_token is None:  # LLaMA's, of m3; text is tokenized without them
        tokenizer.add_special_tokens({"mask_token": "[MASK]", "pad_token": "[PAD]"})

    if data.streaming:
        rows, source = open_stream(data, training, tokenizer)

    # 2. Model
    if training.phase == 2:
        model = AutoModelForMaskedLM.from_pretrained(training.init_from, dtype=torch.float32)
        check_start(model, training.init_from, recipe.architecture, len(tokenizer), tokenizer_hash(tokenizer))
        if recipe.architecture == "neobert":  # others have as many positions as they were made with
            model.config.max_position_embeddings = training.max_length
            model.config.sparse_prediction = True
    else:
        model = build_model(recipe, tokenizer, training.config_overrides)
    run = {
        "recipe": {k: v for k, v in recipe.to_dict().items() if k not in ("corpus", "text_column", "tokenizer")},
        "phase": training.phase,
        "init_from": training.init_from,
        "config": {
            k: v for k, v in model.config.to_diff_dict().items() if k not in ("auto_map", "transformers_version")
        },
        "data": source,
        "tokenizer_sha256": tokenizer_hash(tokenizer),
        "held_out": {
            "files": [Path(file).name for file in data.validation_files or ()],
            "num_held_out": data.num_held_out,
        },
        "row_tokens": training.row_tokens,
        "seed": training.seed,
        "precision": "bf16" if training.bf16 else "fp16" if training.fp16 else launched_precision(),
    }
    if not data.streaming:
        run["packing"] = PACKING
    elif training.dataloader_num_workers:  # each packs documents of its own
        run["dataloader_num_workers"] = training.dataloader_num_workers
    run = json.loads(json.dumps(run))
    if training.phase == 2 and not data.streaming and not data.validation_files:
        check_held_out(training.init_from, run)
    exactly = not training.resume_inexactly
    checkpoint = begin_or_resume(training.output_dir, run, training.resume_from_checkpoint, exactly)

    # 3. Rows
    if not data.streaming:
        is_verified = data.verify_shards and training.process_index == 0
        rows = training_rows(documents, training, tokenizer.sep_token_id, is_verified)
    if held_out is not None:
        cut = dict(max_length=training.max_length, end_token=tokenizer.sep_token_id, seed=training.seed)
        held_out = PackedRows(held_out, held_out.lengths, training.row_tokens, **cut)
    masking = dict(mlm_probability=recipe.mlm_probability, mask_replace_prob=recipe.mask_replace_prob)
    masking |= dict(random_replace_prob=recipe.random_replace_prob, batch_format=recipe.batch_format)
    if recipe.batch_format == "packed":  # the GPU does not wait for checks of positions and labels
        masking |= dict(return_flash_attn_kwargs=True, trust_boundaries=True)

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

    # 5. Evaluation
    metrics = {} if held_out is None else trainer.evaluate()
    model.config.sparse_prediction = False
    if trainer.is_fsdp_enabled:  # one file, even if checkpoints are sharded
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    with saving(Path(training.output_dir), STILL_GOOD):
        trainer.save_model()
    if trainer.is_world_process_zero():
        summary = write_summary(trainer, run, {k: v for k, v in metrics.items() if k.startswith("eval_")})
        print(json.dumps({k: v for k, v in summary.items() if not isinstance(v, dict)}))


def train_alone(data: CorpusArguments, training: PretrainingArguments):
    """Train, and lock the folder against other processes."""
    with lock_run(training.output_dir):
        train(data, training)


def main():
    """Read the command line, and train."""
    parser = CommandParser((CorpusArguments, PretrainingArguments), description=__doc__)
    run_command(parser.prog, train_alone, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
