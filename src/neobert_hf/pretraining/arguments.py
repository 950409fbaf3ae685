"""Command-line arguments of pretraining: a recipe by name, each of its values open to change, inside TrainingArguments."""

import os
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, ClassVar

import torch
from transformers import TrainingArguments
from transformers.hf_argparser import HfArg

from ..commands import Bounds
from ..data.corpus import SAMPLES
from ..data.shards import LONG_DOCUMENTS, most_processes
from ..model.machine_neobert import best_dtype
from . import recipes
from .recipes import RECIPES, SHARE, Recipe, check_bounds

# Values of a recipe that other arguments change: config_overrides, and those of the corpus.
NOT_ARGUMENTS = {"config", "corpus", "text_column", "tokenizer"}

COUNT = Bounds(1, 1 << 30)
SEED = Bounds(0, (1 << 32) - 1)  # what NumPy takes
INTERVAL = Bounds(above=0, most=1 << 30)  # optimizer steps; below 1 a share of them
# Numbers that transformers' TrainingArguments takes.
BOUNDS = {name: recipes.BOUNDS[name] for name in ("learning_rate", "warmup_steps", "max_steps", "weight_decay")}
BOUNDS |= {name: recipes.BOUNDS[name] for name in ("adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm")}
BOUNDS |= dict.fromkeys(("logging_steps", "eval_steps", "save_steps"), INTERVAL)
BOUNDS |= dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), COUNT)
BOUNDS |= dict.fromkeys(("gradient_accumulation_steps", "eval_accumulation_steps", "torch_empty_cache_steps"), COUNT)
BOUNDS |= dict.fromkeys(("save_total_limit", "dataloader_prefetch_factor", "ddp_bucket_cap_mb", "ddp_timeout"), COUNT)
BOUNDS |= {"seed": SEED, "data_seed": SEED, "warmup_ratio": SHARE, "label_smoothing_factor": SHARE}
BOUNDS |= {"num_train_epochs": Bounds(above=0, most=1e6), "dataloader_num_workers": Bounds(0, 1024)}
BOUNDS |= {"eval_delay": Bounds(0, 1 << 30), "neftune_noise_alpha": Bounds(0, 1e6), "local_rank": Bounds(-1, 1 << 16)}


@dataclass
class CorpusArguments:
    """The text to train on, and how it becomes tokens."""

    train_files: list[str] = field(default=None, metadata={"help": "Text, JSON lines or Parquet files to train on."})
    validation_files: list[str] = field(
        default=None,
        metadata={"help": "Files to measure on; without them, documents are held out of the training ones."},
    )
    dataset_name: str = field(
        default=None, metadata={"help": "Dataset of the Hub; the recipe's if no files are given."}
    )
    dataset_config: str = field(default=None, metadata={"help": "Its configuration."})
    text_column: str = field(
        default=None, metadata={"help": "Column of the text; text, or the recipe's for its corpus."}
    )
    sample_by: str = field(default="paragraph", metadata={"help": "A document in .txt: line, paragraph or document."})
    tokenizer_name: str = field(default=None, metadata={"help": "Folder or Hub id of a fast tokenizer; the recipe's."})
    shards_dir: str = field(
        default=None,
        metadata={"help": "Tokenized text is kept and found here, the held-out beside it; output_dir/shards."},
    )
    long_documents: str = field(
        default="truncate", metadata={"help": "What becomes of text above shard_length: truncate (the paper) or chunk."}
    )
    shard_length: Annotated[int, Bounds(3, 1 << 20)] = field(
        default=4096, metadata={"help": "Where documents are cut for good; phases cut further."}
    )
    num_processes: Annotated[int, Bounds(1, most_processes())] = field(
        default=None, metadata={"help": "Processes that tokenize; one for each core."}
    )
    num_held_out: Annotated[int, COUNT] = field(
        default=1000, metadata={"help": "Documents held out if there are no validation_files."}
    )
    streaming: bool = field(default=False, metadata={"help": "Tokenize on the fly and keep nothing; reads from the start "
                                                     "again when resuming."})  # fmt: skip
    verify_shards: bool = field(default=True, metadata={"help": "Compare the checksum of every shard at the start."})

    def __post_init__(self):
        if self.sample_by not in SAMPLES:
            raise ValueError(f"sample_by={self.sample_by!r} is not one of {', '.join(SAMPLES)}")
        if self.long_documents not in LONG_DOCUMENTS:
            raise ValueError(f"long_documents={self.long_documents!r} is not one of {', '.join(LONG_DOCUMENTS)}")
        if self.train_files and self.dataset_name:
            raise ValueError("train_files and dataset_name were given; give one of them")


@dataclass
class PrecisionArguments:
    """What our training arguments add: bf16 only where the machine is faster with it, and bounds of all numbers."""

    BOUNDS: ClassVar = BOUNDS

    auto_precision: bool = field(
        default=False,
        metadata={
            "help": "--bf16 if the machine has the instructions (best_dtype), else float32; --bf16 and --fp16 hold."
        },
    )

    def __post_init__(self):
        check_bounds(self, self.BOUNDS)
        if self.auto_precision and not (self.bf16 or self.fp16):
            device = "cuda" if torch.cuda.is_available() and not self.use_cpu else "cpu"
            self.bf16 = best_dtype(device) == torch.bfloat16
        super().__post_init__()


@dataclass
class ResumeArguments(PrecisionArguments):
    """And whether a checkpoint is taken that does not give the very same training."""

    resume_inexactly: bool = field(
        default=False,
        metadata={
            "help": "Resume also where optimizer state, random numbers, a manifest or processes are missing, with a warning."
        },
    )


@dataclass
class PretrainingArguments(ResumeArguments, TrainingArguments):
    """TrainingArguments whose defaults come from a recipe; what is given overrides it."""

    BOUNDS: ClassVar = {
        **BOUNDS,
        **recipes.BOUNDS,
        "phase": Bounds(1, 2),
        "row_tokens": Bounds(3, 1 << 30),
        "mixture": SHARE,
        "longer_than": Bounds(1, 1 << 20),
        "label_smoothing_factor": Bounds(0, 0),  # the loss is the paper's
    }

    recipe: str = field(default="paper", metadata={"help": f"One of {', '.join(RECIPES)}."})
    phase: int = field(default=1, metadata={"help": "1, or 2: longer documents at a constant low learning rate."})
    init_from: str = field(default=None, metadata={"help": "Folder of the model of phase 1, for phase 2."})
    config_overrides: str = field(default="", metadata={"help": "For instance hidden_size=256,num_hidden_layers=6."})
    row_tokens: int = field(default=8192, metadata={"help": "Token budget of a row; a device computes whole rows."})

    # Of the recipe; None takes its value.
    schedule: str = field(default=None, metadata={"help": "paper, code, linear or constant."})
    decay_until: int = field(default=None, metadata={"help": "Step at which the cosine has come down."})
    decay_norms_and_embeddings: bool = field(default=None, metadata={"help": "Weight decay on every parameter."})
    tokens_per_step: int = field(default=None, metadata={"help": "Token budget of an optimizer step on all devices."})
    max_length: int = field(default=None, metadata={"help": "Where documents are cut, in tokens."})
    mlm_probability: float = field(default=None, metadata={"help": "Share of the tokens to predict."})
    mask_replace_prob: float = field(default=None, metadata={"help": "Share of those that become [MASK]."})
    random_replace_prob: float = field(default=None, metadata={"help": "Share of those that become a random token."})
    batch_format: str = HfArg(default=None, aliases=["--layout"], help="packed, padded or concatenated.")
    mixture: list[float] = field(default=None, metadata={"help": "Shares of steps: all documents, longer, longest."})
    longer_than: list[int] = field(default=None, metadata={"help": "Tokens above which a document is longer, longest."})
    architecture: str = field(default=None, metadata={"help": "neobert or roberta-prelayernorm."})

    # TrainingArguments has these too, with defaults that are not the recipe's.
    output_dir: str = field(default="runs/pretraining", metadata={"help": "Checkpoints, metrics and the model."})
    learning_rate: float = field(default=None, metadata={"help": "Peak of the schedule."})
    warmup_steps: int = field(default=None, metadata={"help": "Steps of linear warmup; scales with max_steps."})
    max_steps: int = field(default=None, metadata={"help": "Optimizer steps."})
    weight_decay: float = field(default=None, metadata={"help": "AdamW's."})
    adam_beta1: float = field(default=None, metadata={"help": "AdamW's first beta."})
    adam_beta2: float = field(default=None, metadata={"help": "AdamW's second beta."})
    adam_epsilon: float = field(default=None, metadata={"help": "AdamW's epsilon."})
    max_grad_norm: float = field(default=None, metadata={"help": "Where the gradient's norm is clipped."})
    gradient_accumulation_steps: int = field(default=None, metadata={"help": "Follows from tokens_per_step; leave it."})
    per_device_train_batch_size: int = field(default=1, metadata={"help": "Rows that a device computes at once."})
    per_device_eval_batch_size: int = field(default=1, metadata={"help": "Rows that a device evaluates at once."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Rows carry the seed of their masks."})
    logging_steps: float = field(default=10, metadata={"help": "Optimizer steps between two logs."})
    prediction_loss_only: bool = field(default=True, metadata={"help": "Figures are counted, predictions not kept."})
    report_to: str = field(default="tensorboard", metadata={"help": "tensorboard, wandb, ... or none."})
    dataloader_pin_memory: bool = field(default=None, metadata={"help": "True with CUDA."})

    def __post_init__(self):
        check_bounds(self, self.BOUNDS)
        if self.recipe not in RECIPES:
            raise ValueError(f"recipe={self.recipe!r} is not one of {', '.join(RECIPES)}")
        if self.phase not in (1, 2) or (self.phase == 2) != bool(self.init_from):
            raise ValueError(
                f"phase={self.phase} and init_from={self.init_from!r}: phase 2, and it alone, needs init_from"
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
                f"lr_scheduler_type={self.lr_scheduler_type!r} would have no effect; schedule says which it is"
            )
        if self.phase == 2 and self.config_overrides:
            raise ValueError("config_overrides would have no effect in phase 2, whose model comes from init_from")
        self._set_accumulation()
        if self.dataloader_pin_memory is None:
            self.dataloader_pin_memory = torch.cuda.is_available() and not self.use_cpu
        if self.accelerator_config is None:  # rows differ in length, so each process reads its own
            self.accelerator_config = {"dispatch_batches": False}
        super().__post_init__()
        if self.n_gpu > 1:
            raise ValueError(
                f"one process sees {self.n_gpu} GPUs; start it with accelerate launch, or choose one by CUDA_VISIBLE_DEVICES"
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
                f"tokens_per_step={self.tokens_per_step}, which takes {steps}; leave it out"
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
