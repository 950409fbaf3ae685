"""Command-line arguments of pretraining: TrainingArguments, the name of a recipe, and an argument for each value of a recipe."""

import os
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, ClassVar

import torch
from transformers import TrainingArguments

from ..data.corpus import SAMPLES
from ..data.shard_reader import NUM_HELD_OUT
from ..data.shards import LONG_DOCUMENTS, most_processes
from ..runs.arguments import BOUNDS, ResumeArguments
from ..runs.commands import COUNT, SHARE, Bounds, check_bounds
from . import recipes
from .recipes import RECIPES, Recipe

# Values of a recipe that config_overrides and the arguments of the corpus set.
NOT_ARGUMENTS = {"config", "corpus", "text_column", "tokenizer"}


@dataclass
class CorpusArguments:
    """Text and its tokens."""

    GROUPS: ClassVar = {
        "Text": (
            "train_files",
            "validation_files",
            "num_held_out",
            "dataset_name",
            "dataset_config",
            "text_column",
            "sample_by",
        ),
        "Tokens": (
            "tokenizer_name",
            "shards_dir",
            "shard_length",
            "long_documents",
            "num_processes",
            "streaming",
            "verify_shards",
        ),
    }

    train_files: list[str] = field(
        default=None, metadata={"help": "Text, JSON lines, CSV or Parquet files to train on."}
    )
    validation_files: list[str] = field(
        default=None,
        metadata={"help": "Files to evaluate on; without them, documents of the training text are held out."},
    )
    dataset_name: str = field(
        default=None, metadata={"help": "Dataset of the Hub; without it and without files, the recipe's dataset."}
    )
    dataset_config: str = field(default=None, metadata={"help": "Configuration of the dataset."})
    text_column: str = field(
        default=None,
        metadata={"help": "Column that holds the text; text, or the recipe's column for the recipe's dataset."},
    )
    sample_by: str = field(
        default="paragraph",
        metadata={"help": "Unit of a .txt file that is one document: line, paragraph or document."},
    )
    tokenizer_name: str = field(
        default=None, metadata={"help": "Folder or Hub id of a fast tokenizer; without it, the recipe's tokenizer."}
    )
    shards_dir: str = field(
        default=None,
        metadata={
            "help": "Folder of the tokenized text, created if it does not exist; held-out text is stored next to it. Without it, "
            "shards in output_dir."
        },
    )
    long_documents: str = field(
        default="truncate",
        metadata={
            "help": "Documents longer than shard_length: truncate drops the rest, as in the paper; chunk splits them."
        },
    )
    shard_length: Annotated[int, Bounds(3, 1 << 20)] = field(
        default=4096,
        metadata={
            "help": "Maximum length in tokens of a document in the shards; max_length truncates further for a phase."
        },
    )
    num_processes: Annotated[int, Bounds(1, most_processes())] = field(
        default=None, metadata={"help": "Number of processes that tokenize; without it, one per core."}
    )
    num_held_out: Annotated[int, COUNT] = field(
        default=NUM_HELD_OUT, metadata={"help": "Number of documents held out if there are no validation_files."}
    )
    streaming: bool = field(
        default=False,
        metadata={
            "help": "Tokenize during training and store nothing; a resumed run reads the text from its start again."
        },
    )
    verify_shards: bool = field(default=True, metadata={"help": "Verify the checksum of every shard before training."})

    def __post_init__(self):
        if self.sample_by not in SAMPLES:
            raise ValueError(f"sample_by={self.sample_by!r} is not one of {', '.join(SAMPLES)}")
        if self.long_documents not in LONG_DOCUMENTS:
            raise ValueError(f"long_documents={self.long_documents!r} is not one of {', '.join(LONG_DOCUMENTS)}")
        if self.train_files and self.dataset_name:
            raise ValueError("train_files and dataset_name are both given; give one of them")


@dataclass
class PretrainingArguments(ResumeArguments, TrainingArguments):
    """TrainingArguments whose defaults are the values of a recipe."""

    BOUNDS: ClassVar = {
        **BOUNDS,
        **recipes.BOUNDS,
        "phase": Bounds(1, 2),
        "row_tokens": Bounds(3, 1 << 30),
        "mixture": SHARE,
        "longer_than": Bounds(1, 1 << 20),
        "label_smoothing_factor": Bounds(0, 0),  # the paper's loss has none
    }

    GROUPS: ClassVar = {
        "Run": ("recipe", "phase", "init_from", "config_overrides", "architecture", "logging_steps", "report_to"),
        "Optimizer and schedule (without a value: the recipe's)": (
            *("max_steps", "learning_rate", "schedule", "warmup_steps", "decay_until", "weight_decay", "max_grad_norm"),
            *("decay_norms_and_embeddings", "adam_beta1", "adam_beta2", "adam_epsilon"),
        ),
        "Batches (without a value: the recipe's)": (
            *("tokens_per_step", "row_tokens", "per_device_train_batch_size", "per_device_eval_batch_size"),
            *("max_length", "batch_format", "mixture", "longer_than"),
        ),
        "Masking (without a value: the recipe's)": ("mlm_probability", "mask_replace_prob", "random_replace_prob"),
        None: (
            *("gradient_accumulation_steps", "remove_unused_columns", "prediction_loss_only", "dataloader_pin_memory"),
        ),
    }

    recipe: str = field(default="paper", metadata={"help": f"One of {', '.join(RECIPES)}."})
    phase: int = field(
        default=1,
        metadata={
            "help": "1, or 2: longer documents, drawn more often, at a constant tenth of --learning_rate, for 1/20 of the steps "
            "of phase 1 unless --max_steps is given."
        },
    )
    init_from: str = field(default=None, metadata={"help": "Folder of the model of phase 1; phase 2 requires it."})
    config_overrides: str = field(
        default="", metadata={"help": "Values of the model's config, such as hidden_size=256,num_hidden_layers=6."}
    )
    row_tokens: int = field(default=8192, metadata={"help": "Token budget of a row; each device computes whole rows."})

    # Values of a recipe; None takes the recipe's value.
    schedule: str = field(
        default=None,
        metadata={"help": "paper, code, linear, or constant, which is a tenth of the learning rate at every step."},
    )
    decay_until: int = field(
        default=None,
        metadata={
            "help": "Step at which the cosine decay reaches its minimum, a tenth of the peak; scales with max_steps."
        },
    )
    decay_norms_and_embeddings: bool = field(
        default=None, metadata={"help": "Apply weight decay to norms, biases and embeddings too."}
    )
    tokens_per_step: int = field(
        default=None, metadata={"help": "Token budget of an optimizer step, on all devices together."}
    )
    max_length: int = field(default=None, metadata={"help": "Maximum length of a document in tokens."})
    mlm_probability: float = field(default=None, metadata={"help": "Share of the tokens that the model predicts."})
    mask_replace_prob: float = field(
        default=None, metadata={"help": "Share of the predicted tokens that become [MASK]."}
    )
    random_replace_prob: float = field(
        default=None, metadata={"help": "Share of the predicted tokens that become a random token."}
    )
    batch_format: str = field(
        default=None,
        metadata={
            "help": "packed: several documents in a row, kept apart; padded: one document in a row; concatenated: several "
            "documents in a row, not kept apart."
        },
    )
    mixture: list[float] = field(
        default=None,
        metadata={
            "help": "Three shares of the steps: from all documents, from those above the first length of longer_than, from those "
            "above the second."
        },
    )
    longer_than: list[int] = field(
        default=None, metadata={"help": "Two lengths in tokens, for the second and third share of mixture."}
    )
    architecture: str = field(
        default=None, metadata={"help": "neobert or roberta-prelayernorm; without it, the recipe's."}
    )

    # Fields of TrainingArguments with other defaults.
    output_dir: str = field(
        default="runs/pretraining", metadata={"help": "Folder of the checkpoints, the metrics and the model."}
    )
    learning_rate: float = field(
        default=None,
        metadata={
            "help": "Peak of the schedule. Phase 2 trains at a tenth of it, where the schedule of phase 1 ends: give both phases "
            "the same value."
        },
    )
    warmup_steps: int = field(
        default=None, metadata={"help": "Optimizer steps of linear warmup; scales with max_steps."}
    )
    max_steps: int = field(default=None, metadata={"help": "Number of optimizer steps."})
    weight_decay: float = field(default=None, metadata={"help": "Weight decay of AdamW."})
    adam_beta1: float = field(default=None, metadata={"help": "First beta of AdamW."})
    adam_beta2: float = field(default=None, metadata={"help": "Second beta of AdamW."})
    adam_epsilon: float = field(default=None, metadata={"help": "Epsilon of AdamW."})
    max_grad_norm: float = field(
        default=None, metadata={"help": "Maximum norm of the gradient; a larger one is clipped."}
    )
    gradient_accumulation_steps: int = field(
        default=None, metadata={"help": "Computed from tokens_per_step; leave it out."}
    )
    per_device_train_batch_size: int = field(
        default=1, metadata={"help": "Number of rows in a training batch of a device."}
    )
    per_device_eval_batch_size: int = field(
        default=1, metadata={"help": "Number of rows in an evaluation batch of a device."}
    )
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Leave it off: a column of the rows holds the seed of their masks."}
    )
    logging_steps: float = field(default=10, metadata={"help": "Optimizer steps between two log entries."})
    prediction_loss_only: bool = field(
        default=True, metadata={"help": "Evaluation counts correct tokens and does not keep the predictions."}
    )
    report_to: str = field(default="tensorboard", metadata={"help": "tensorboard, wandb, ... or none."})
    dataloader_pin_memory: bool = field(default=None, metadata={"help": "Pin memory; without a value, only with CUDA."})

    def __post_init__(self):
        check_bounds(self, self.BOUNDS)
        if self.recipe not in RECIPES:
            raise ValueError(f"recipe={self.recipe!r} is not one of {', '.join(RECIPES)}")
        if self.phase not in (1, 2) or (self.phase == 2) != bool(self.init_from):
            raise ValueError(
                f"phase={self.phase} and init_from={self.init_from!r}: phase 2 requires init_from, phase 1 refuses it"
            )
        recipe = RECIPES[self.recipe]
        if self.phase == 2:
            recipe = recipe.second_phase()
        names = {f.name for f in fields(Recipe)} - NOT_ARGUMENTS
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        recipe = recipe.replace(**given)
        for name in names:
            setattr(self, name, getattr(recipe, name))
        if self.lr_scheduler_type != "linear":  # the default of TrainingArguments
            raise ValueError(
                f"lr_scheduler_type={self.lr_scheduler_type!r} has no effect here; choose the schedule by schedule"
            )
        if self.phase == 2 and self.config_overrides:
            raise ValueError(
                "config_overrides has no effect in phase 2, which loads the model of init_from; leave it out"
            )
        self._set_accumulation()
        if self.dataloader_pin_memory is None:
            self.dataloader_pin_memory = torch.cuda.is_available() and not self.use_cpu
        if self.accelerator_config is None:  # rows differ in length, so each process reads its own
            self.accelerator_config = {"dispatch_batches": False}
        super().__post_init__()
        if self.n_gpu > 1:
            raise ValueError(
                f"one process has {self.n_gpu} GPUs; start it with accelerate launch, or choose one GPU by CUDA_VISIBLE_DEVICES"
            )
        # rows that fill the last batch would count twice
        if self.world_size > 1 and self.per_device_eval_batch_size > 1:
            raise ValueError(
                f"per_device_eval_batch_size={self.per_device_eval_batch_size} with {self.world_size} processes; give 1, and "
                "choose the tokens of a row by row_tokens"
            )
        if self.ignore_data_skip and not self.resume_inexactly:
            raise ValueError(
                "ignore_data_skip begins with the first rows again after a resume; give --resume_inexactly true too"
            )

    def _set_accumulation(self):
        num_processes = int(os.environ.get("WORLD_SIZE", 1))  # set by every launcher
        at_once = self.row_tokens * self.per_device_train_batch_size * num_processes
        steps, rest = divmod(self.tokens_per_step, at_once)
        if rest or not steps:
            raise ValueError(
                f"tokens_per_step={self.tokens_per_step} is not a multiple of row_tokens={self.row_tokens} x "
                f"{self.per_device_train_batch_size} rows x {num_processes} processes = {at_once}; change one of them"
            )
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
        names = {f.name for f in fields(Recipe)} - NOT_ARGUMENTS
        return replace(RECIPES[self.recipe], **{name: getattr(self, name) for name in names})
