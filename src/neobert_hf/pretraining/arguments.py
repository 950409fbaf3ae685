"""Arguments of pretraining: the text, and TrainingArguments with a recipe and an argument for each of its values."""

# ruff: noqa: RUF009  (HfArg returns a field)

import os
from dataclasses import dataclass, fields

import torch
from transformers import TrainingArguments
from transformers.hf_argparser import HfArg
from transformers.integrations import is_deepspeed_available

from ..runs.arguments import ResumeArguments
from .plans import LONG_DOCUMENTS
from .recipes import RECIPES, Recipe

# Fields of a recipe that are arguments too; CorpusArguments and config_overrides set the others.
VALUES = [field.name for field in fields(Recipe) if field.name not in ("config", "corpus", "text_column", "tokenizer")]


@dataclass
class CorpusArguments:
    """Text and its tokens."""

    train_files: list[str] = HfArg(default=None, help="Text, JSON lines, CSV or Parquet files to train on.")
    validation_files: list[str] = HfArg(
        default=None, help="Files to evaluate on; without them, documents of the training text are held out."
    )
    num_held_out: int = HfArg(default=1000, help="Documents held out if there are no validation_files.")
    dataset_name: str = HfArg(
        default=None, help="Dataset of the Hub; without it and without files, the recipe's dataset."
    )
    dataset_config: str = HfArg(default=None, help="Configuration of the dataset.")
    text_column: str = HfArg(
        default=None, help="Column of the text; without it, text, or that of the recipe's dataset."
    )
    sample_by: str = HfArg(
        default="paragraph", help="Unit of a .txt file that is one document: line, paragraph or document."
    )
    tokenizer_name: str = HfArg(
        default=None, help="Folder or Hub id of a fast tokenizer; without it, the recipe's tokenizer."
    )
    documents_dir: str = HfArg(
        default=None, help="Folder of the tokenized text, written if it does not exist; without it, in output_dir."
    )
    long_documents: str = HfArg(
        default="truncate",
        help="Documents longer than max_length: truncate drops the rest, as in the paper; chunk splits them.",
    )
    num_processes: int = HfArg(default=None, help="Processes that tokenize; without it, one per core.")
    streaming: bool = HfArg(
        default=False,
        help="Tokenize during training and store nothing; a resumed run reads the text from its start again.",
    )
    verify_documents: bool = HfArg(default=True, help="Verify the checksums of the tokenized text before training.")

    def __post_init__(self):
        if self.train_files and self.dataset_name:
            raise ValueError("train_files and dataset_name are both given; give one of them")
        if self.long_documents not in LONG_DOCUMENTS:
            raise ValueError(f"long_documents={self.long_documents!r} is not one of {', '.join(LONG_DOCUMENTS)}")
        if self.streaming and self.long_documents != "truncate":
            raise ValueError("a stream truncates long documents; leave --streaming or --long_documents out")


@dataclass
class PretrainingArguments(ResumeArguments, TrainingArguments):
    """TrainingArguments whose defaults are the values of a recipe."""

    recipe: str = HfArg(default="paper", help=f"One of {', '.join(RECIPES)}.")
    phase: int = HfArg(default=1, help="1, or 2: longer documents at a constant tenth of learning_rate.")
    init_from: str = HfArg(default=None, help="Folder of the model of phase 1; phase 2 requires it.")
    config_overrides: str = HfArg(
        default="", help="Values of the model's config, such as hidden_size=256,num_hidden_layers=6."
    )
    row_tokens: int = HfArg(default=8192, help="Token budget of a row; each device computes whole rows.")

    # Values of the recipe; None takes the recipe's value.
    learning_rate: float = HfArg(
        default=None, help="Peak of the schedule; phase 2 trains at a tenth of it. Give both phases the same value."
    )
    schedule: str = HfArg(default=None, help="paper, code, linear, or constant: a tenth of learning_rate.")
    warmup_steps: int = HfArg(default=None, help="Optimizer steps of linear warmup; scales with max_steps.")
    decay_until: int = HfArg(
        default=None, help="Step at which the cosine decay reaches a tenth of the peak; scales with max_steps."
    )
    max_steps: int = HfArg(default=None, help="Optimizer steps.")
    weight_decay: float = HfArg(default=None, help="Weight decay of AdamW.")
    decay_norms_and_embeddings: bool = HfArg(
        default=None, help="Apply weight decay to norms, biases and embeddings too."
    )
    adam_beta1: float = HfArg(default=None, help="First beta of AdamW.")
    adam_beta2: float = HfArg(default=None, help="Second beta of AdamW.")
    adam_epsilon: float = HfArg(default=None, help="Epsilon of AdamW.")
    max_grad_norm: float = HfArg(default=None, help="Norm to which a larger gradient is clipped.")
    tokens_per_step: int = HfArg(default=None, help="Token budget of an optimizer step, on all devices together.")
    max_length: int = HfArg(default=None, help="Maximum length of a document in tokens.")
    mlm_probability: float = HfArg(default=None, help="Share of the tokens that the model predicts.")
    mask_replace_prob: float = HfArg(default=None, help="Share of the predicted tokens that become [MASK].")
    random_replace_prob: float = HfArg(default=None, help="Share of the predicted tokens that become random tokens.")
    batch_format: str = HfArg(
        default=None,
        help="packed: several documents in a row, kept apart; padded: one document in a row; concatenated: several documents in "
        "a row, not kept apart.",
    )
    mixture: list[float] = HfArg(
        default=None,
        help="Three shares of the steps: from all documents, from those above the first and the second length of longer_than.",
    )
    longer_than: list[int] = HfArg(default=None, help="Two lengths in tokens, for the shares of mixture.")
    architecture: str = HfArg(default=None, help="neobert or roberta-prelayernorm; without it, the recipe's.")

    # Fields of TrainingArguments with other defaults.
    output_dir: str = HfArg(default="runs/pretraining", help="Folder of the checkpoints, the metrics and the model.")
    gradient_accumulation_steps: int = HfArg(default=None, help="Computed from tokens_per_step; leave it out.")
    per_device_train_batch_size: int = HfArg(default=1, help="Rows in a training batch of a device.")
    per_device_eval_batch_size: int = HfArg(default=1, help="Rows in an evaluation batch of a device.")
    logging_steps: float = HfArg(default=10, help="Optimizer steps between two log entries.")
    report_to: str = HfArg(default="tensorboard", help="tensorboard, wandb, ... or none.")
    remove_unused_columns: bool = False  # a column of the rows holds the seed of their masks
    prediction_loss_only: bool = True  # the trainer counts correct tokens itself
    dataloader_pin_memory: bool = torch.cuda.is_available()

    def __post_init__(self):
        if self.recipe not in RECIPES:
            raise ValueError(f"recipe={self.recipe!r} is not one of {', '.join(RECIPES)}")
        if self.phase not in (1, 2) or (self.phase == 2) != bool(self.init_from):
            raise ValueError(
                f"phase={self.phase} and init_from={self.init_from!r}: phase 2 requires init_from, phase 1 refuses it"
            )
        if self.phase == 2 and self.config_overrides:
            raise ValueError("config_overrides has no effect in phase 2, which loads the model of init_from")
        if self.lr_scheduler_type != "linear":  # the default of TrainingArguments
            raise ValueError(f"lr_scheduler_type={self.lr_scheduler_type!r} has no effect; choose the schedule instead")
        if self.label_smoothing_factor:
            raise ValueError("label_smoothing_factor: the loss of masked language modelling has none; leave it out")
        if self.ignore_data_skip and not self.resume_inexactly:
            raise ValueError("ignore_data_skip repeats rows after a resume; give --resume_inexactly true too")
        recipe = self.to_recipe()
        for name in VALUES:
            setattr(self, name, getattr(recipe, name))
        self._set_accumulation()
        if self.accelerator_config is None:  # rows differ in length, so each process reads its own
            self.accelerator_config = {"dispatch_batches": False}
        if self.deepspeed and not is_deepspeed_available():
            raise ValueError(
                f"--deepspeed {self.deepspeed} needs DeepSpeed: DS_BUILD_OPS=0 pip install 'neobert_hf[deepspeed]'"
            )
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
        if self.deepspeed_plugin is not None:
            self._check_deepspeed(self.deepspeed_plugin.deepspeed_config)

    def _check_deepspeed(self, config):
        """Refuse a DeepSpeed config that would change the recipe, save no model, or train in each process alone."""
        if "WORLD_SIZE" not in os.environ:
            raise ValueError("DeepSpeed trains in processes of a launcher; start with accelerate launch or torchrun")
        if found := [part for part in ("optimizer", "scheduler") if part in config]:
            raise ValueError(f"the recipe sets {' and '.join(found)}; remove this from the DeepSpeed config")
        required = {
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "gradient_clipping": self.max_grad_norm,
        }
        for name, value in required.items():
            if config.get(name, "auto") not in ("auto", value):
                raise ValueError(
                    f"{name}={config[name]} in the DeepSpeed config, but the run requires {value}; set it to auto"
                )
        zero = config["zero_optimization"]
        if zero.get("stage") == 3 and not zero.get("stage3_gather_16bit_weights_on_model_save"):
            raise ValueError(
                "ZeRO-3 would save no model; set zero3_save_16bit_model: true in the config of accelerate, or "
                "stage3_gather_16bit_weights_on_model_save in that of DeepSpeed"
            )
        num_processes = int(os.environ["WORLD_SIZE"])
        if self.world_size != num_processes:
            raise ValueError(
                f"DeepSpeed found no GPU for {num_processes} processes; give --use_cpu to train on the CPU"
            )

    def _set_accumulation(self):
        if self.row_tokens < 1 or self.per_device_train_batch_size < 1:
            raise ValueError(
                f"row_tokens={self.row_tokens} and per_device_train_batch_size={self.per_device_train_batch_size} must be at "
                "least 1"
            )
        num_processes = int(os.environ.get("WORLD_SIZE", 1))  # set by every launcher
        at_once = self.row_tokens * self.per_device_train_batch_size * num_processes
        steps, rest = divmod(self.tokens_per_step, at_once)
        if rest or steps < 1:
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
        recipe = RECIPES[self.recipe] if self.phase == 1 else RECIPES[self.recipe].second_phase()
        given = {name: getattr(self, name) for name in VALUES if getattr(self, name) is not None}
        return recipe.replace(**given)
