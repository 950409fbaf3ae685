"""Train an embedding model as the paper does (section 5.2.1, appendix D.2): an instruction before the texts of each set.

    python examples/paper/embeddings/train_embeddings.py --training_sets examples/paper/embeddings/sets.yaml \\
        --model_name_or_path chandar-lab/NeoBERT --output_dir runs/embeddings --mini_batch_size 32

Files of your own, each with an instruction by its name:

    python examples/paper/embeddings/train_embeddings.py --train_files questions.jsonl claims.jsonl \\
        --instructions instructions.yaml --output_dir runs/embeddings

A set is drawn in proportion to the square root of its number of rows. Rerun the command with `--resume_from_checkpoint last`
to resume exactly after an interruption.
"""

# ruff: noqa: RUF009  (HfArg returns a field)

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from datasets import DatasetDict
from prepare_sets import read_yaml
from transformers.hf_argparser import HfArg

from neobert_hf.checkpoints import write_card
from neobert_hf.embeddings import (
    ContrastiveArguments,
    ContrastiveTrainer,
    ContrastiveTrainingArguments,
    SentenceTransformer,
    contrastive_loss,
    mine_negatives,
    open_embedding_model,
    open_sets,
    pairs_evaluator,
    sentence_transformer,
    set_sampling,
    train_and_record,
    warn_of_truncated,
)
from neobert_hf.finetuning import say_saved
from neobert_hf.runs import run_script


@dataclass
class PaperArguments(ContrastiveArguments):
    """Model, sets, instructions and loss."""

    training_sets: list[str] = HfArg(default=None, help="YAML file of sets, and names of some. Default: all of them.")
    instructions: str = HfArg(default=None, help="JSON or YAML file: instruction by name of a file without suffix.")
    instruction_template: str = HfArg(default="{instruction} ", help="Text before each input.")
    instruction_sides: Literal["both", "query"] = HfArg(default="both", help="both: all columns; query: the first.")

    def __post_init__(self):
        super().__post_init__()
        if "{instruction}" not in self.instruction_template:
            raise ValueError(f"the template {self.instruction_template!r} does not contain {{instruction}}; add it")
        if not self.training_sets:
            return
        if self.train_files or self.instructions:
            raise ValueError("give training_sets, or train_files and instructions, not both")
        file, *names = self.training_sets
        listed = read_yaml(file)
        names = names or list(listed)
        unknown = [name for name in names if "file" not in (listed.get(name) or ())]
        if unknown:
            known = ", ".join(listed)
            raise ValueError(f"{file} has no set with a file named {', '.join(unknown)}; its sets are {known}")
        self.train_files = [str(Path(file).parent / listed[name]["file"]) for name in names]
        self.held_out_share = 0.0

    def entries(self) -> dict[str, dict]:
        """The entries of `training_sets` by name of the file without suffix."""
        if not self.training_sets:
            return {}
        listed = read_yaml(self.training_sets[0]).values()
        return {Path(entry["file"]).stem: entry for entry in listed if "file" in entry}


def read_prompts(arguments: PaperArguments, sets: DatasetDict) -> dict[str, str]:
    """Return the prompt of each set that has an instruction.

    Raises:
        ValueError: An instruction belongs to no set, or a file is invalid.
    """
    instructions = {}
    if arguments.instructions:
        instructions = read_yaml(arguments.instructions)
    if arguments.training_sets:
        entries = arguments.entries()
        instructions = {name: entries[name]["instruction"] for name in sets if "instruction" in entries[name]}
    unknown = instructions.keys() - sets.keys()
    if unknown:
        raise ValueError(f"{arguments.instructions}: {', '.join(unknown)} is not a set; the sets are {', '.join(sets)}")
    template = arguments.instruction_template
    return {name: template.replace("{instruction}", text) for name, text in instructions.items()}


def train_with_prompts(
    model: SentenceTransformer,
    sets: DatasetDict,
    training: ContrastiveTrainingArguments,
    arguments: PaperArguments,
    prompts: dict[str, str],
    held_out: DatasetDict,
) -> list[dict]:
    """Train an embedding model with the prompts of the sets, as `train_contrastive` does without.

    Args:
        model: Embedding model. It keeps the prompt of the sets if they have only one.
        sets: Columns anchor, positive and negatives, by name of the set.
        training: Training arguments, of which the sampler and the prompts are changed.
        arguments: The loss and the sides of the prompts.
        prompts: Text before the inputs of a set, by its name.
        held_out: Pairs to evaluate on before and after the training, by name.
    """
    is_both = arguments.instruction_sides == "both"
    training.prompts = {}
    for name, prompt in prompts.items():
        columns = sets[name].column_names
        training.prompts[name] = dict.fromkeys(columns if is_both else columns[:1], prompt)
    if len(prompts) == len(sets) and len(set(prompts.values())) == 1:
        (prompt,) = set(prompts.values())
        model.prompts = {"query": prompt, "document": prompt if is_both else ""}
    for name, rows in (*sets.items(), *held_out.items()):
        before = dict.fromkeys(rows.column_names if is_both else rows.column_names[:1], prompts.get(name, ""))
        texts = [before.get(column, "") + text for column in rows.column_names for text in rows[column]]
        warn_of_truncated(model, f"{len(rows):,} rows of {name}", texts)
    evaluators = []
    for name, pairs in held_out.items():
        prompt = prompts.get(name)
        evaluators.append(pairs_evaluator(pairs, name, query_prompt=prompt, corpus_prompt=prompt if is_both else None))
    set_sampling(training, arguments.gather_across_devices)
    entries = arguments.entries()
    return train_and_record(
        ContrastiveTrainer,
        model,
        training,
        sets,
        contrastive_loss(model, arguments.temperature, arguments.mini_batch_size, arguments.gather_across_devices),
        evaluators,
        arguments,
        files=[*(arguments.training_sets or ())[:1], arguments.instructions],
        datasets=sorted({entries[name]["path"] for name in sets if "path" in entries.get(name, ())}),
    )


def train(arguments: PaperArguments, training: ContrastiveTrainingArguments):
    """Train, save, evaluate before and after, and write the card."""
    # 1. Model
    options = {"dtype": torch.float32}  # bf16 is the dtype of the computation
    if arguments.pooling:
        model = sentence_transformer(arguments.model_name_or_path, arguments.pooling, model_kwargs=options)
    else:
        model = open_embedding_model(arguments.model_name_or_path, model_kwargs=options)
    model.max_seq_length = arguments.max_seq_length or min(model.max_seq_length, 512)

    # 2. Data
    sets, held_out = open_sets(arguments, training.seed)
    prompts = read_prompts(arguments, sets)
    if arguments.num_mined_negatives:
        for name in sets:
            prompt = prompts.get(name)
            sides = (prompt, prompt if arguments.instruction_sides == "both" else None)
            pairs = {name: sets[name]}
            sets[name] = mine_negatives(pairs, model, arguments.num_mined_negatives, *sides)[name]
    for name, rows in sets.items():
        columns = ", ".join(rows.column_names)
        print(f"{name}: {len(rows):,} rows of {columns}; prompt {prompts.get(name)!r}", flush=True)

    # 3. Training
    train_with_prompts(model, sets, training, arguments, prompts, held_out)
    if training.should_save:
        write_card(training.output_dir)
        say_saved(training.output_dir)


def main():
    """Read the command line, and train."""
    run_script(train, __doc__)


if __name__ == "__main__":
    main()
