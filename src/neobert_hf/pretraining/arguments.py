"""Arguments of pretraining: the text, and TrainingArguments with a recipe and an argument for each of its values."""

import json
import os
from argparse import Namespace
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from neobert_cli.parser import option

from ..data.lengths import as_list
from ..runs.arguments import ResumeArguments
from .documents import MANIFEST
from .recipes import RECIPES, Recipe, read_recipe

# Fields of a recipe that are arguments too; CorpusArguments and config_overrides set the others.
VALUES = [field.name for field in fields(Recipe) if field.name not in ("config", "corpus", "text_column", "tokenizer")]

# Arguments that `recipe.yaml` repeats, beside those of the text and of the recipe.
REPEATED = (
    *("phase", "init_from", "config_overrides", "row_tokens", "per_device_train_batch_size", "dataloader_num_workers"),
    *("seed", "bf16", "fp16", "tf32", "use_cpu", "torch_compile", "optim", "optim_args"),
)


@dataclass
class CorpusArguments:
    """Text and its tokens."""

    train_files: list[str] | None = option("Text, JSON lines, CSV or Parquet files to train on.")
    validation_files: list[str] | None = option("Files to evaluate on. Default: documents are held out.")
    num_held_out: int = option("Documents held out if there are no validation_files.", 1000)
    dataset_name: str = option("Dataset of the Hub. Default: without files, the recipe's dataset.")
    dataset_config: str = option("Configuration of the dataset.")
    text_column: str = option("Column of the text. Default: text, or that of the recipe's dataset.")
    sample_by: str = option("One document of a .txt file: line, paragraph or document.", "paragraph")
    tokenizer_name: str = option("Folder or Hub id of a fast tokenizer. Default: the recipe's.")
    documents_dir: str = option("Folder of the tokenized text, new or old. Default: in output_dir.")
    long_documents: str = option("Above max_length: truncate, as in the paper, or chunk.", "truncate")
    num_processes: int = option("Processes that tokenize. Default: one per core.")
    streaming: bool = option("Tokenize during training, store nothing; a resume reads all again.", False)

    def __post_init__(self):
        self.train_files = as_list(self.train_files) or None
        self.validation_files = as_list(self.validation_files) or None
        if self.train_files and self.dataset_name:
            raise ValueError("train_files and dataset_name are both given; give one of them")
        if self.long_documents not in ("truncate", "chunk"):
            raise ValueError(f"long_documents={self.long_documents!r} is not one of truncate, chunk")
        if self.streaming and self.long_documents != "truncate":
            raise ValueError("a stream truncates long documents; leave streaming or long_documents out")


@dataclass
class PretrainingArguments(ResumeArguments, TrainingArguments):
    """TrainingArguments whose defaults are the values of a recipe."""

    recipe: str = option(f"{' or '.join(RECIPES)}, or a YAML file with values of a recipe.", "paper")
    phase: int = option("1, or 2: longer documents at a constant tenth of learning_rate.", 1)
    init_from: str = option("Folder of the model of phase 1; phase 2 requires it.")
    config_overrides: str = option("Values of the config: hidden_size=256,num_hidden_layers=6.", "")
    row_tokens: int = option("Token budget of a row; each device computes whole rows.", 8192)

    # Values of the recipe; None takes the recipe's value.
    optimizer: str = option("adamw, or muon for the matrices of the blocks.")
    learning_rate: float = option("Peak of the schedule; the same in both phases.")
    schedule: str = option("paper, code, linear, wsd, or constant: a tenth of learning_rate.")
    warmup_steps: int = option("Optimizer steps of linear warmup; scales with max_steps.")
    decay_until: int = option("Step where the cosine has decayed to a tenth; scales with max_steps.")
    decay_from: int = option("Step where the decay of wsd begins; scales with max_steps.")
    max_steps: int = option("Optimizer steps.")
    weight_decay: float = option("Weight decay of AdamW and Muon.")
    decay_norms_and_embeddings: bool = option("Decay norms, biases and embeddings too.")
    adam_beta1: float = option("First beta of AdamW.")
    adam_beta2: float = option("Second beta of AdamW.")
    adam_epsilon: float = option("Epsilon of AdamW.")
    max_grad_norm: float = option("Norm to which a larger gradient is clipped.")
    tokens_per_step: int = option("Token budget of an optimizer step, on all devices together.")
    max_length: int = option("Maximum length of a document in tokens.")
    mask_rate: list[float] = option("Share of the tokens that the model predicts, or several that follow one another.")
    mask_rate_shares: list[float] = option("Shares of the steps of several mask rates.")
    mask_replace_prob: float = option("Share of the predicted tokens that become [MASK].")
    random_replace_prob: float = option("Share of the predicted tokens that become random tokens.")
    batch_format: str = option("Documents in a row: packed (kept apart), padded (one), concatenated.")
    mixture: list[float] = option("Three shares of the steps: all documents, and those of longer_than.")
    longer_than: list[int] = option("Two lengths in tokens, for the shares of mixture.")
    architecture: str = option("neobert or roberta-prelayernorm.")

    # Fields of TrainingArguments with other defaults.
    output_dir: str = option("Folder of the checkpoints, the metrics and the model.", "runs/pretraining")
    gradient_accumulation_steps: int = option("Computed from tokens_per_step; leave it out.")
    per_device_train_batch_size: int = option("Rows in a training batch of a device.", 1)
    per_device_eval_batch_size: int = option("Rows in an evaluation batch of a device.", 1)
    logging_steps: float = option("Optimizer steps between two log entries.", 10)
    report_to: str = option("tensorboard, wandb, ... or none.", "tensorboard")
    remove_unused_columns: bool = False  # a column of the rows holds the seed of their masks
    prediction_loss_only: bool = True  # the trainer counts correct tokens itself

    def __post_init__(self):
        num_phases = 2 if self.init_from else 1
        if self.phase != num_phases:
            raise ValueError(
                f"phase={self.phase} and init_from={self.init_from!r}: phase 2 requires init_from, phase 1 refuses it"
            )
        # What Trainer would ignore without a word.
        if self.phase == 2 and self.config_overrides:
            raise ValueError("config_overrides has no effect in phase 2, which loads the model of init_from")
        if self.lr_scheduler_type != "linear":  # the default of TrainingArguments
            raise ValueError(f"lr_scheduler_type={self.lr_scheduler_type!r} has no effect; choose the schedule instead")
        recipe = self.to_recipe()
        if recipe.optimizer != "adamw":
            self.refuse_optim(f"optimizer={recipe.optimizer!r}")
        for name in VALUES:
            setattr(self, name, getattr(recipe, name))
        self._set_accumulation()
        if self.accelerator_config is None:  # rows differ in length, so each process reads its own
            self.accelerator_config = {"dispatch_batches": False}
        super().__post_init__()
        if self.n_gpu > 1:
            raise ValueError(
                f"one process has {self.n_gpu} GPUs; start it with accelerate launch, or choose one by CUDA_VISIBLE_DEVICES"
            )
        if self.world_size > 1 and self.per_device_eval_batch_size > 1:  # rows that fill the last batch count twice
            raise ValueError(
                f"per_device_eval_batch_size={self.per_device_eval_batch_size} with {self.world_size} processes; give 1, and "
                "choose the tokens of a row by row_tokens"
            )

    @classmethod
    def defaults_of(cls, given: Namespace) -> dict[str, Any]:
        """Return what the file of `--recipe` gives in place of defaults: its `run`, and values that have a default here.

        Raises:
            ValueError: The file cannot be read, or its `run` holds what is no argument.
        """
        _, values, run = read_recipe(given.recipe)
        items = fields(cls)
        known = {item.name for item in (*items, *fields(CorpusArguments))}
        unknown = [f"{name} {value}" for name, value in run.items() if name not in known]
        if unknown:
            raise ValueError(
                f"{given.recipe}: the run has {', '.join(unknown)}, which no argument gives; call pretrain from Python"
            )
        for item in items:
            if item.name in VALUES and item.default is not None and item.name in values:
                run.setdefault(item.name, values[item.name])
        return run

    def refuse_optim(self, chosen: str) -> None:
        """Raise ValueError if `optim` names an optimizer of Trainer beside another one, such as that of a function."""
        optim = getattr(self.optim, "value", self.optim)
        if optim not in ("adamw_torch", "adamw_torch_fused") or self.optim_args:  # the defaults of transformers 4 and 5
            raise ValueError(
                f"optim={optim} and optim_args={self.optim_args} have no effect beside {chosen}; leave them out"
            )

    def _set_accumulation(self):
        num_processes = int(os.environ.get("WORLD_SIZE", 1))
        at_once = self.row_tokens * self.per_device_train_batch_size * num_processes
        smallest = min(self.row_tokens, self.per_device_train_batch_size, self.tokens_per_step)
        if smallest < 1 or self.tokens_per_step % at_once:
            raise ValueError(
                f"tokens_per_step={self.tokens_per_step} is not a multiple of row_tokens={self.row_tokens} x "
                f"{self.per_device_train_batch_size} rows x {num_processes} processes; change one of them"
            )
        steps = self.tokens_per_step // at_once
        if self.gradient_accumulation_steps not in (None, steps):
            raise ValueError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} contradicts "
                f"tokens_per_step={self.tokens_per_step}, which requires {steps}; leave it out"
            )
        self.gradient_accumulation_steps = steps

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step, on all devices and accumulation steps together."""
        return self.tokens_per_step // self.row_tokens

    def to_recipe(self) -> Recipe:
        """The recipe that these arguments describe."""
        recipe, _, run = read_recipe(self.recipe)
        phase = run.get("phase", 1)
        if self.phase < phase:
            raise ValueError(f"recipe={self.recipe!r} is of phase {phase}; give phase={phase} and init_from")
        if self.phase > phase:
            recipe = recipe.second_phase()
        given = {name: getattr(self, name) for name in VALUES}
        return recipe.replace(**{name: value for name, value in given.items() if value is not None})


def record_of(data: CorpusArguments, training: PretrainingArguments, functions: dict[str, str]) -> dict:
    """Return what repeats a run, in plain types: the values of its recipe, and under `run` its other arguments.

    A value that the run does not use is left out: the recipe's text beside other text, its tokenizer beside another one.

    Args:
        data: Arguments of the run.
        training: Arguments of the run.
        functions: Names of the functions that `pretrain` got, by argument; a file cannot give them.
    """
    values = {name: value for name, value in asdict(training.to_recipe()).items() if value not in ((), {})}
    has_documents = data.documents_dir and Path(data.documents_dir, MANIFEST).is_file()
    if data.train_files or data.dataset_name or has_documents:
        del values["corpus"], values["text_column"]
    if data.tokenizer_name:
        del values["tokenizer"]
    given = vars(training) | vars(data)
    repeated = [item for item in fields(PretrainingArguments) if item.name in REPEATED]
    items = {item.name: item.default for item in (*fields(CorpusArguments), *repeated)}
    del items["num_processes"]  # changes nothing
    run = {name: given[name] for name, default in items.items() if given[name] != default}
    if functions:
        run["functions"] = ", ".join(f"{name}={function}" for name, function in functions.items())
    return json.loads(json.dumps(values | {"run": run}, default=str))
