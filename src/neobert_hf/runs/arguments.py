"""Training arguments that every training command shares: bounds of the numbers, precision, resume, fine-tuning."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
import transformers
from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..model.machine_neobert import best_dtype
from .commands import COUNT, SHARE, Bounds, check_bounds

SEED = Bounds(0, (1 << 32) - 1)  # the range of NumPy's seeds
STEPS = Bounds(0, 100_000_000)
INTERVAL = Bounds(above=0, most=1 << 30)  # optimizer steps; a value below 1 is a share of max_steps
# Numeric arguments of transformers' TrainingArguments.
BOUNDS = {
    "learning_rate": Bounds(0, 100),
    "warmup_steps": STEPS,
    "max_steps": Bounds(1, STEPS.most),
    "weight_decay": Bounds(0, 100),
    "adam_beta1": Bounds(0, 0.999999),
    "adam_beta2": Bounds(0, 0.999999999),
    "adam_epsilon": Bounds(0, 1),
    "max_grad_norm": Bounds(0, 1e9),
    "num_train_epochs": Bounds(above=0, most=1e6),
    "dataloader_num_workers": Bounds(0, 1024),
    "eval_delay": Bounds(0, 1 << 30),
    "neftune_noise_alpha": Bounds(0, 1e6),
    "local_rank": Bounds(-1, 1 << 16),
    **dict.fromkeys(("seed", "data_seed"), SEED),
    **dict.fromkeys(("warmup_ratio", "label_smoothing_factor"), SHARE),
    **dict.fromkeys(("logging_steps", "eval_steps", "save_steps"), INTERVAL),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), COUNT),
    **dict.fromkeys(("gradient_accumulation_steps", "eval_accumulation_steps", "torch_empty_cache_steps"), COUNT),
    **dict.fromkeys(("save_total_limit", "dataloader_prefetch_factor", "ddp_bucket_cap_mb", "ddp_timeout"), COUNT),
}
# Fine-tuning counts epochs; max_steps=-1 sets no number of steps.
FINE_TUNING_BOUNDS = {**BOUNDS, "max_steps": Bounds(-1, STEPS.most)}


def numbered_checkpoints(folder: str | Path) -> list[tuple[int, Path]]:
    """Return step and path of every path named checkpoint-N in a folder, highest step first."""
    found = []
    for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if step.isdecimal():
            found.append((int(step), path))
    return sorted(found, reverse=True)


@dataclass
class PrecisionArguments:
    """Training arguments with bounds for all numbers, and with bf16 only if it is faster on this machine."""

    BOUNDS: ClassVar = BOUNDS
    GROUPS: ClassVar = {"Run": ("output_dir", "auto_precision")}

    auto_precision: bool = field(
        default=False,
        metadata={
            "help": "bf16 if it is faster on this machine (best_dtype), else float32; --bf16 or --fp16 overrides it."
        },
    )

    def __post_init__(self):
        check_bounds(self, self.BOUNDS)
        has_shares = int(transformers.__version__.split(".")[0]) >= 5  # older versions have them in warmup_ratio
        if 0 < self.warmup_steps < 1 and not has_shares:
            self.warmup_ratio, self.warmup_steps = self.warmup_ratio or self.warmup_steps, 0
        if self.auto_precision and not (self.bf16 or self.fp16):
            device = "cuda" if torch.cuda.is_available() and not self.use_cpu else "cpu"
            self.bf16 = best_dtype(device) == torch.bfloat16
            self.use_cpu |= not torch.accelerator.is_available()  # transformers refuses bf16 on a CPU without it
        super().__post_init__()


@dataclass
class FineTuningArguments(PrecisionArguments, TrainingArguments):
    """Training arguments of fine-tuning: evaluation after each epoch, and the best epoch at the end."""

    BOUNDS: ClassVar = FINE_TUNING_BOUNDS

    num_train_epochs: float = 3
    learning_rate: float = 5e-5
    warmup_steps: float = 0.06  # share of all steps
    eval_strategy: str = "epoch"
    save_strategy: str = "epoch"
    save_total_limit: int = 1
    load_best_model_at_end: bool = True
    metric_for_best_model: str = "accuracy"
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={
            "help": "last, to resume from the newest complete checkpoint in output_dir; auto, to do so if output_dir has one and "
            "start otherwise; or the folder of a checkpoint. Give the same data and arguments: they are not compared."
        },
    )

    def __post_init__(self):
        super().__post_init__()
        # Trainer writes this file last
        found = [path for _, path in numbered_checkpoints(self.output_dir) if (path / TRAINER_STATE_NAME).is_file()]
        newest = found[0] if found else None
        if self.resume_from_checkpoint in ("last", "auto"):
            if not found and self.resume_from_checkpoint == "last":
                raise ValueError(
                    f"{self.output_dir} has no complete checkpoint; omit --resume_from_checkpoint, or give auto"
                )
            self.resume_from_checkpoint = newest and str(newest)
        elif found and self.resume_from_checkpoint is None:
            raise ValueError(  # a later resume would continue the checkpoint with the larger number
                f"{self.output_dir} has {newest.name} of an earlier run; give --resume_from_checkpoint last to continue it, or "
                "another --output_dir"
            )


@dataclass
class ResumeArguments(PrecisionArguments):
    """Training arguments whose resume is exact, unless the user allows an inexact resume."""

    GROUPS: ClassVar = {"Run": ("resume_from_checkpoint", "resume_inexactly")}

    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={
            "help": "last, to resume from the newest complete checkpoint in output_dir; auto, to do so if output_dir has one "
            "and start otherwise; or the folder of a checkpoint."
        },
    )
    resume_inexactly: bool = field(
        default=False,
        metadata={
            "help": "Resume with a warning if the optimizer state, random states or the manifest is missing or the number of "
            "processes differs."
        },
    )
