"""Training arguments that every training shares: precision, the card, resume, fine-tuning."""

import math
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import transformers
from transformers import PretrainedConfig, TrainingArguments

from neobert_cli.parser import option

from ..files.messages import say
from ..model.machine_neobert import best_dtype

EPOCHS, EPOCHS_OF_FEW = 3, 10
LAUNCHED = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")  # by accelerate launch
BATCH, STEP_TOKENS = 16, 640  # rows of a step; tokens of a step of short texts
FEW_ROWS = 100  # validation rows; with fewer, one row more or less changes F1 by a percent or more
RESUME = (
    "auto, to resume from the newest complete checkpoint in output_dir if it has one, and start otherwise; last, which is an "
    "error if it has none; or the folder of a checkpoint."
)


if TYPE_CHECKING:
    from transformers import TrainingArguments as Mixin
else:
    Mixin = object


@dataclass
class PrecisionArguments(Mixin):
    """Training arguments with bf16 where it is faster on this machine, and with what the model's card says.

    A mixin before a class of TrainingArguments.
    """

    output_dir: str = option("Folder of the checkpoints and the trained model.")
    bf16: bool | None = option(
        "Products in bf16; weights are float32. Default: where it is faster on this machine (best_dtype)."
    )
    license: str = option("Licence of the model, for its card.")
    language: list[str] = option("Languages of the texts, for the card, such as en.")

    def __post_init__(self):
        if self.use_liger_kernel:  # Trainer would ignore it without a word
            fault = "use_liger_kernel=True, but liger-kernel has no kernels for NeoBERT"
            raise ValueError(f"{fault}; omit it. torch_compile=True fuses operations")
        if self.disable_tqdm is None:  # a bar in a file is one line for each step
            self.disable_tqdm = not sys.stderr.isatty() and "ipykernel" not in sys.modules
        has_shares = int(transformers.__version__.split(".")[0]) >= 5  # older versions have them in warmup_ratio
        if 0 < self.warmup_steps < 1 and not has_shares:
            self.warmup_ratio = self.warmup_ratio or self.warmup_steps
            self.warmup_steps: float = 0
        has_device = torch.accelerator.is_available() and not self.use_cpu
        if self.fp16 and not has_device:
            raise ValueError("fp16=True needs a GPU; leave it out, or give bf16")
        if self.bf16 is None:
            device = torch.accelerator.current_accelerator() if has_device else "cpu"
            self.bf16 = not self.fp16 and best_dtype(device) == torch.bfloat16
        if self.bf16:
            self.use_cpu |= not torch.accelerator.is_available()  # transformers refuses bf16 on a CPU without it
        os.environ["ACCELERATE_MIXED_PRECISION"] = LAUNCHED  # where transformers 4 leaves that of an earlier training
        super().__post_init__()
        self.dataloader_pin_memory &= torch.accelerator.is_available()  # torch warns without one


@dataclass
class ResumeArguments(PrecisionArguments):
    """Training arguments whose resume is exact, unless the user allows an inexact resume."""

    resume_from_checkpoint: str | None = option(RESUME, "auto")
    resume_inexactly: bool = option(
        "Resume with a warning if the optimizer state, random states or the manifest is missing or the number of processes "
        "differs.",
        False,
    )


def default_learning_rate(config: PretrainedConfig) -> float:
    """Return a learning rate of fine-tuning for the size of a model; small models need a larger one.

    1e-5 for models of the size of BERT base or larger is the middle of the rates of NeoBERT, 5e-6 to 2e-5. 3e-4 is right for the
    mini model of this package.

    Source: appendix C, Table 6.
    """
    if config.hidden_size >= 768:
        return 1e-5
    return 1e-4 if config.hidden_size > 384 else 3e-4


@dataclass
class FineTuningArguments(ResumeArguments, TrainingArguments):
    """Training arguments of fine-tuning: evaluation after each epoch, and the best epoch at the end."""

    num_train_epochs: float = option("Epochs; 0 chooses 3, and 10 where the rows are few.", 0)
    # 16 as in Table 6; larger batches leave few steps for a few hundred rows
    per_device_train_batch_size: int = option("Rows of a batch; 0 is 16, or up to 32 short texts.", 0)
    per_device_eval_batch_size: int = 64  # without gradients
    learning_rate: float | None = option("Default: by the size of the model.")
    warmup_steps: float = 0.06  # share of all steps
    logging_steps: float = 0.025  # share of all steps, rounded up: 20 to 40 lines for a run of 20 steps or more
    eval_strategy: str = "epoch"
    save_strategy: str = "epoch"
    save_total_limit: int = option("Checkpoints to keep. Default: one until the model is saved, then none.")
    load_best_model_at_end: bool = True
    metric_for_best_model: str | None = option(
        "Chooses the best epoch. Default: by the job and the number of validation rows."
    )

    def __post_init__(self):
        is_grouped = getattr(self, "group_by_length", False)  # an older name
        if is_grouped or getattr(self, "train_sampling_strategy", "") == "group_by_length" or self.dataloader_drop_last:
            # Trainer evaluates and predicts with the same two options
            fault = "group_by_length and dataloader_drop_last change the order or the number of predictions too"
            raise ValueError(f"{fault}; remove them")
        self.has_limit = self.save_total_limit is not None
        self.save_total_limit = self.save_total_limit or 1
        self._has_batch = self.per_device_train_batch_size > 0
        self.per_device_train_batch_size = self.per_device_train_batch_size or BATCH
        self._has_metric = self.metric_for_best_model is not None
        self.metric_for_best_model = self.metric_for_best_model or "f1"
        if self.greater_is_better is None:  # Trainer knows the loss alone
            self.greater_is_better = is_best_if_large(self.metric_for_best_model)
        super().__post_init__()

    def choose_batch(self, mean_length: float) -> None:
        """Take up to 32 rows of short texts, `STEP_TOKENS` in all, unless the user gave a number or there are several devices."""
        if not self._has_batch and self.world_size == 1 and self.n_gpu <= 1:
            self.per_device_train_batch_size = max(BATCH, min(2 * BATCH, round(STEP_TOKENS / mean_length)))

    def choose_learning_rate(self, config: PretrainedConfig, rate: float | None = None) -> None:
        """Take a rate, `default_learning_rate` by default, and print it, unless the user gave one.

        It belongs to 16 rows; with a number that `choose_batch` took, it grows as the square root.
        """
        if self.learning_rate is None:
            rows = self.per_device_train_batch_size
            growth = 1 if self._has_batch else math.sqrt(rows / BATCH)
            self.learning_rate = growth * (rate or default_learning_rate(config))
            say(f"learning_rate={self.learning_rate:.3g} for hidden_size={config.hidden_size}, {rows} rows a batch")

    def choose_epochs(self, number: int) -> None:
        """Take a number of epochs, and print it if it is not the usual 3, unless the user gave one."""
        if not self.num_train_epochs:
            self.num_train_epochs = number
            if number != EPOCHS and self.max_steps <= 0:
                say(f"num_train_epochs={number} for few rows")

    def choose_metric(self, num_rows: int, name: str = "f1") -> None:
        """Choose the metric that chooses the best epoch, unless one was given.

        Args:
            num_rows: Number of validation rows. If they are few, the loss is taken: F1 is equal after many epochs then.
            name: The metric for enough rows.
        """
        if self._has_metric:
            return
        self.metric_for_best_model = name if num_rows >= FEW_ROWS else "loss"
        self.greater_is_better = is_best_if_large(self.metric_for_best_model)
        if num_rows < FEW_ROWS:
            say(f"the loss chooses the best epoch: {num_rows} validation rows are too few for {name}")


def is_best_if_large(metric: str) -> bool:
    """Whether a larger value of a metric is better; False for a loss or a mean squared error."""
    return not metric.endswith(("loss", "mse"))
