"""`PretrainingTrainer`: HF Trainer with the paper's learning-rate schedule, weight decay, fixed row order and extra metrics.

It overrides four methods of Trainer (sampler, decay parameters, optimizer, scheduler) and adds figures to the log. The training
loop, devices, precision, checkpoints and resume are Trainer's.
"""

import json
import math
import time
import warnings
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import FullyShardedDataParallelPlugin
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, SequentialSampler
from transformers import TrainerCallback, TrainerState
from transformers.integrations import unset_hf_deepspeed_config

from ..files.output import saving, writing
from ..model.modeling_neobert import NeoBERTForMaskedLM
from ..runs.manifests import STATE, CheckedCheckpoints
from ..runs.resume import METRICS, last_complete_checkpoint
from .optimizers import MakeOptimizer, Schedule, check_optimizer, names_with_decay, trainable_parameters
from .recipes import Recipe
from .summary import COUNTS

SECONDS = "seconds"  # in these counts


class PretrainingTrainer(CheckedCheckpoints):
    """Trainer with a recipe.

    Args:
        recipe: Sets the schedule and the parameters with weight decay; `TrainingArguments` are ignored for these two.
        optimizer: Makes the optimizer from the parameters by name; None takes that of Trainer, with the values of the recipe.
        schedule: Share of the peak learning rate by step; None takes the recipe's.
        **kwargs: As for Trainer. The training set is `PackedRows`, `MixedRows` or a stream.

    Each log holds Trainer's `loss` (per masked token), `learning_rate` and `grad_norm`, and also `perplexity`,
    `masked_accuracy`, `num_tokens` and `num_masked` since the start of the run, `packing_efficiency` and `tokens_per_s`.
    `metrics.jsonl` in the output folder holds one line for each log.

    Raises:
        FloatingPointError: The loss or the gradient was not finite. The check runs at each log, and there is a log before each
            checkpoint, which is then not written.
    """

    def __init__(
        self,
        *args,
        recipe: Recipe,
        optimizer: MakeOptimizer | None = None,
        schedule: Schedule | None = None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.recipe = recipe
        self._make_optimizer = optimizer
        self._schedule = schedule or recipe.learning_rate_factor
        self.args.logging_nan_inf_filter = False  # the filter would hide a loss that must stop the run
        self.held_out: TokenCounter | None = None
        if self.is_fsdp_enabled:
            keep_float32(self.accelerator.state.fsdp_plugin)
        if self.is_deepspeed_enabled:
            unset_hf_deepspeed_config()  # ZeRO-3 would shard other models that this process loads, such as the saved one
            # Without these two lines, accelerate warns before it sets this number, and torch of names that DeepSpeed calls.
            self.accelerator.gradient_accumulation_steps = self.args.gradient_accumulation_steps
            warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
        self.add_callback(LogWhereItEnds())
        if not isinstance(self.accelerator.unwrap_model(self.model), NeoBERTForMaskedLM):
            self.compute_loss_func = masked_lm_loss

    # Overrides of Trainer

    # A private method: before transformers 5 there is no argument for rows in their own order.
    def _get_train_sampler(self, train_dataset: Dataset | None = None):
        if train_dataset is None:
            train_dataset = self.train_dataset
        if not hasattr(train_dataset, "__len__"):
            return None
        return SequentialSampler(train_dataset)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of all parameters or of the matrices only, as the recipe says."""
        return names_with_decay(model, self.recipe.decay_norms_and_embeddings)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer by the function that was given, or by Trainer."""
        if self._make_optimizer is None:
            given = () if model is None else (model,)  # transformers 4 has no such argument
            return super().create_optimizer(*given)
        if model is not None:
            raise ValueError("FSDP1 flattens the parameters before the optimizer sees them; set fsdp_version: 2")
        if self.optimizer is None:
            parameters = trainable_parameters(self.model)
            self.optimizer = self._make_optimizer(parameters)
            check_optimizer(self.optimizer, parameters)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
        """Create the schedule, a new one for each call of `train`."""
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, self._schedule)
        return self.lr_scheduler

    # Metrics

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return Trainer's loss; count tokens, masked tokens and correct predictions on the device without a synchronization."""
        labels = inputs["labels"]
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        if model.training:
            self.counter.count(inputs, labels, outputs)
        elif self.held_out is not None and not self._is_repeated():
            if num_items_in_batch is None:
                loss_sum = loss.detach() * (labels != -100).sum()
            else:  # Trainer has divided by the labels of all processes, and multiplied by the number of processes
                loss_sum = loss.detach() * num_items_in_batch / self.accelerator.num_processes
            self.held_out.count(inputs, labels, outputs, loss_sum)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the figures to the log, and append the log to the metrics file."""
        if "loss" in logs:
            self._check_finite(logs)
            counts = self.counter.totals(self.accelerator)
            logs |= self._training_figures(logs["loss"], counts)
            # Trainer writes this state into the checkpoint that follows a log of the same step.
            self.state.stateful_callbacks[COUNTS] = counts | {SECONDS: self.seconds}
        elif "eval_loss" in logs and self.held_out is not None:
            logs |= self._held_out_figures()
        super().log(logs, start_time)
        if self.is_world_process_zero():
            metrics = Path(self.args.output_dir, METRICS)
            with saving(metrics), metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.state.log_history[-1]) + "\n")

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        """Run Trainer's evaluation; return also the loss per masked token over the whole held-out set, and the masked accuracy.

        `eval_trivial_masked_accuracy` is that of the most frequent token of the same masked positions.
        """
        self.held_out = TokenCounter(self.args.device, vocab_size=self.model.config.vocab_size)
        metrics = super().evaluate(*args, **kwargs)  # which `log` has changed
        self.held_out = None
        return metrics

    def _is_repeated(self):
        """Whether this row is a repetition that accelerate adds so that all processes have the same number of rows."""
        state = self.accelerator.gradient_state
        return state.end_of_dataloader and 0 < state.remainder <= self.accelerator.process_index

    def _held_out_figures(self):
        assert self.held_out is not None
        counts = self.held_out.totals(self.accelerator)
        num_masked = counts["num_masked"] or math.nan  # there is no mean over no tokens
        loss = self.accelerator.reduce(self.held_out.loss_sum, "sum").item() / num_masked
        of_labels = self.accelerator.reduce(self.held_out.of_labels, "sum")
        self.most_frequent = of_labels.argmax().item()
        return {
            "eval_loss": loss,
            "eval_perplexity": math.exp(min(loss, 700)),
            "eval_masked_accuracy": counts["num_correct"] / num_masked,
            "eval_trivial_masked_accuracy": of_labels.max().item() / num_masked,
        }

    def _training_figures(self, loss, counts):
        now, step = time.perf_counter(), self.state.global_step
        last_time, last_counts, last_step = self._last_log
        self._last_log = (now, counts, step)
        new = {name: counts[name] - last_counts[name] for name in TokenCounter.NAMES}
        seconds = now - last_time
        self.seconds += seconds
        return {
            "perplexity": math.exp(min(loss, 700)),
            "masked_accuracy": new["num_correct"] / max(new["num_masked"], 1),
            "num_tokens": counts["num_tokens"],
            "num_masked": counts["num_masked"],
            "packing_efficiency": new["num_tokens"] / ((step - last_step) * self.args.tokens_per_step),
            "tokens_per_s": new["num_tokens"] / seconds,
        }

    def _check_finite(self, logs):
        """Raise an error if the loss since the last log, or the gradient of this step, was not finite."""
        # a step that the gradient scaler of fp16 skipped changed nothing
        grad_norm = 0.0 if self.accelerator.optimizer_step_was_skipped else logs.get("grad_norm", 0.0)
        for name, value in {"loss": logs["loss"], "gradient": grad_norm}.items():
            if math.isfinite(value):
                continue
            steps = f"{self._last_log[2] + 1} to {self.state.global_step}"
            last = last_complete_checkpoint(self.args.output_dir)
            raise FloatingPointError(
                f"the {name} was not finite in the optimizer steps {steps}; the last good checkpoint is {last}. Lower "
                "learning_rate, or inspect the rows of these steps"
            )

    # Start, save and resume

    def train(self, resume_from_checkpoint: str | None = None, **kwargs):
        """Train from the start, or resume exactly from a checkpoint of the same run."""
        state = TrainerState()
        if resume_from_checkpoint:
            state = TrainerState.load_from_json(str(Path(resume_from_checkpoint, STATE)))
        if self.is_world_process_zero():
            metrics = Path(self.args.output_dir, METRICS)
            metrics.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(entry) + "\n" for entry in state.log_history]
            with writing(metrics) as file:
                file.write("".join(lines).encode())
        before = state.stateful_callbacks.get(COUNTS, dict.fromkeys(TokenCounter.NAMES, 0))
        self.seconds = before.get(SECONDS, 0.0)  # of the whole run
        self.counter = TokenCounter(self.args.device, before)
        self._last_log = (time.perf_counter(), before, state.global_step)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)


def keep_float32(plugin: FullyShardedDataParallelPlugin) -> None:
    """Give FSDP2 the mixed precision of autocast under DDP.

    Matrix products run in half precision; residual stream, loss and gradient sums stay in fp32. accelerate's own policy casts
    all of them to half precision.
    """
    policy = plugin.mixed_precision_policy
    if getattr(plugin, "fsdp_version", 1) == 2 and policy is not None:  # accelerate < 1.6 has only FSDP1
        changes = dict(reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False)
        plugin.mixed_precision_policy = replace(policy, **changes)


class TokenCounter:
    """Sums over batches, kept on the device to avoid synchronization."""

    NAMES = ("num_tokens", "num_masked", "num_correct")

    def __init__(self, device: torch.device, before: dict | None = None, vocab_size: int = 0):
        self.of_labels = torch.zeros(vocab_size, dtype=torch.int64, device=device)  # labels of each token
        self.counts = torch.zeros(len(self.NAMES), dtype=torch.int64, device=device)
        self.loss_sum = torch.zeros((), device=device)
        self.before = before or {}  # the totals of an earlier part of the run

    def count(self, inputs: dict, labels: torch.Tensor, outputs, loss_sum: torch.Tensor | float = 0.0) -> None:
        """Add a batch: number of tokens, labels and correct predictions, and the sum of the losses at its labels."""
        is_masked = labels != -100
        if "attention_mask" in inputs:
            num_tokens = inputs["attention_mask"].sum()
        else:  # torch.tensor would wait for the device
            num_tokens = torch.full((), labels.numel(), device=labels.device)
        num_correct = getattr(outputs, "num_correct", None)
        if num_correct is None:
            predictions = outputs["logits"].argmax(-1)
            expected = labels[is_masked] if predictions.ndim == 1 else labels
            num_correct = (predictions == expected).sum()
        if len(self.of_labels):  # of held-out rows: bincount waits for the device
            self.of_labels += torch.bincount(labels[is_masked], minlength=len(self.of_labels))
        self.counts += torch.stack((num_tokens, is_masked.sum(), num_correct))
        self.loss_sum += loss_sum

    def totals(self, accelerator) -> dict[str, float]:
        """Return the sums over all processes as numbers; every process must call this."""
        counts = accelerator.reduce(self.counts, "sum").tolist()
        return {name: count + self.before.get(name, 0) for name, count in zip(self.NAMES, counts)}


def predicted_tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the predicted token at each label and -100 elsewhere, for Trainer's `preprocess_logits_for_metrics`.

    With `sparse_prediction`, logits exist at labels only, so their number differs between processes. For `compute_metrics`,
    Trainer gathers tensors of one shape; the result has the shape of the labels.

    Args:
        logits: (number of labels, V), or (B, L, V).
        labels: (B, L).

    Returns:
        (B, L).
    """
    is_label = labels != -100
    predictions = logits.argmax(-1)
    if predictions.ndim > 1:
        predictions = predictions[is_label]
    return labels.masked_scatter(is_label, predictions)


def masked_lm_loss(outputs, labels: torch.Tensor, num_items_in_batch=None) -> torch.Tensor:
    """Return the cross-entropy per masked token of the whole optimizer step, for models that ignore `num_items_in_batch`."""
    logits = outputs["logits"].flatten(0, -2).float()
    summed = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    if num_items_in_batch is None:
        num_items_in_batch = (labels != -100).sum().clamp(min=1)
    return summed / num_items_in_batch


class LogWhereItEnds(TrainerCallback):
    """Log before each checkpoint and after the last step, so that no log covers steps before and after a resume."""

    def on_step_end(self, args, state, control, **kwargs):
        """Request the log; Trainer writes it before the checkpoint."""
        if control.should_save or control.should_training_stop or state.global_step >= state.max_steps:
            control.should_log = True
