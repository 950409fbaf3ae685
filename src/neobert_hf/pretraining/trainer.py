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
from .flops import matrix_flops_per_s, training_flops
from .optimizers import MakeOptimizer, Schedule, names_with_decay, trainable_parameters
from .recipes import Recipe
from .summary import COUNTS, SIZES

SECONDS = "seconds"  # in these counts


class PretrainingTrainer(CheckedCheckpoints):
    """Trainer with a recipe.

    Args:
        recipe: Sets the schedule and the parameters with weight decay; `TrainingArguments` are ignored for these two.
        optimizer: Makes the optimizer from the parameters by name; None takes that of Trainer, with the values of the recipe.
        schedule: Share of the peak learning rate by step; None takes the recipe's.
        **kwargs: As for Trainer. The training set is `PackedRows`, `MixedRows` or a stream.

    Each log holds Trainer's `loss` (per masked token), `learning_rate` and `grad_norm`, and also `perplexity`,
    `masked_accuracy`, `num_tokens` and `num_masked` since the start of the run, `packing_efficiency`, `tokens_per_s`, and
    `model_flops_utilization`, the share of this device's peak matrix-product throughput. `metrics.jsonl` in the output folder
    holds one line for each log.

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
        self.recipe, self._make_optimizer = recipe, optimizer
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
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return SequentialSampler(dataset) if hasattr(dataset, "__len__") else None

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of all parameters or of the matrices only, as the recipe says."""
        return names_with_decay(model, self.recipe.decay_norms_and_embeddings)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer by the function that was given, or by Trainer."""
        if self._make_optimizer is None:
            return super().create_optimizer(*() if model is None else (model,))  # transformers 4 has no such argument
        if model is not None:
            raise ValueError("FSDP1 flattens the parameters before the optimizer sees them; set fsdp_version: 2")
        if self.optimizer is None:
            self.optimizer = self._make_optimizer(trainable_parameters(self.model))
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
            # Trainer may have divided by the number of labels of all processes, and multiplied by the number of processes.
            num_processes = 1 if num_items_in_batch is None else self.accelerator.num_processes
            num_items = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
            self.held_out.count(inputs, labels, outputs, loss.detach() * num_items / num_processes)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the figures to the log, and append the log to the metrics file."""
        if "loss" in logs:
            self._check_finite(logs)
            counts = self.counter.totals(self.accelerator)
            logs |= self._training_figures(logs["loss"], counts)
            # Trainer writes this state into the checkpoint that follows a log of the same step.
            totals = {name: counts[name] for name in TokenCounter.NAMES}
            self.state.stateful_callbacks[COUNTS] = totals | {SECONDS: self.seconds}
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
        loss = counts["loss_sum"] / num_masked
        of_labels = self.accelerator.reduce(self.held_out.of_labels, "sum")
        self.most_frequent = of_labels.argmax().item()
        return {
            "eval_loss": loss,
            "eval_perplexity": math.exp(min(loss, 700)),
            "eval_masked_accuracy": counts["num_correct"] / num_masked,
            "eval_trivial_masked_accuracy": of_labels.max().item() / num_masked,
        }

    def _training_figures(self, loss, counts):
        now, before = time.perf_counter(), self._last_log
        self._last_log = (now, counts, self.state.global_step)
        new = {name: counts[name] - before[1][name] for name in TokenCounter.NAMES}
        seconds, num_steps = now - before[0], self.state.global_step - before[2]
        self.seconds += seconds
        flops = training_flops(self.accelerator.unwrap_model(self.model), *(new[name] for name in SIZES))
        return {
            "perplexity": math.exp(min(loss, 700)),
            "masked_accuracy": new["num_correct"] / max(new["num_masked"], 1),
            **{name: counts[name] for name in ("num_tokens", "num_masked")},
            "packing_efficiency": new["num_tokens"] / (num_steps * self.args.tokens_per_step),
            "tokens_per_s": new["num_tokens"] / seconds,
            "model_flops_utilization": flops / seconds / (self._peak * self.accelerator.num_processes),
        }

    def _check_finite(self, logs):
        """Raise an error if the loss since the last log, or the gradient of this step, was not finite."""
        # a step that the gradient scaler of fp16 skipped changed nothing
        grad_norm = 0.0 if self.accelerator.optimizer_step_was_skipped else logs.get("grad_norm", 0.0)
        bad = [name for name, value in (("loss", logs["loss"]), ("gradient", grad_norm)) if not math.isfinite(value)]
        if bad:
            last = last_complete_checkpoint(self.args.output_dir)
            advice = f"the last good checkpoint is {last}" if last else "no checkpoint was written before it"
            steps = f"{self._last_log[2] + 1} to {self.state.global_step}"
            raise FloatingPointError(
                f"the {bad[0]} was not finite in the optimizer steps {steps}; {advice}. Lower learning_rate, or inspect the rows "
                "of these steps"
            )

    # Start, save and resume

    def train(self, resume_from_checkpoint: str | None = None, **kwargs):
        """Train from the start, or resume exactly from a checkpoint of the same run."""
        checkpoint = Path(resume_from_checkpoint or ".", STATE)
        state = TrainerState.load_from_json(str(checkpoint)) if resume_from_checkpoint else TrainerState()
        if self.is_world_process_zero():
            metrics = Path(self.args.output_dir, METRICS)
            metrics.parent.mkdir(parents=True, exist_ok=True)
            with writing(metrics) as file:
                file.write("".join(json.dumps(entry) + "\n" for entry in state.log_history).encode())
        before = state.stateful_callbacks.get(COUNTS, dict.fromkeys(TokenCounter.NAMES, 0))
        self.seconds = before.get(SECONDS, 0.0)  # of the whole run
        self.counter = TokenCounter(self.args.device, before)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision, torch.float32)
        self._peak = matrix_flops_per_s(self.args.device, dtype)
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

    NAMES = ("num_tokens", "num_masked", "num_correct", "sum_of_squares")

    def __init__(self, device: torch.device, before: dict | None = None, vocab_size: int = 0):
        self.of_labels = torch.zeros(vocab_size, dtype=torch.int64, device=device)  # labels of each token
        self.counts = torch.zeros(len(self.NAMES), dtype=torch.int64, device=device)
        self.loss_sum = torch.zeros((), device=device)
        self.before = before or {}  # the totals of an earlier part of the run

    def count(self, inputs: dict, labels: torch.Tensor, outputs, loss_sum: torch.Tensor | float = 0.0) -> None:
        """Add a batch: number of tokens, labels and correct predictions, and the sum of the losses at its labels."""
        is_masked = labels != -100
        if "attention_mask" in inputs:
            lengths = inputs["attention_mask"].sum(-1)
            num_tokens, squares = lengths.sum(), lengths.square().sum()
        else:
            # torch.tensor would wait for the device
            num_tokens = torch.full((), labels.numel(), device=labels.device)
            positions = inputs.get("position_ids")  # for a document of n tokens: 1 + 3 + 5 + ... + (2 n - 1) = n^2
            squares = num_tokens**2 if positions is None else (2 * positions + 1).sum()
        num_correct = getattr(outputs, "num_correct", None)
        if num_correct is None:
            predictions = outputs["logits"].argmax(-1)
            expected = labels[is_masked] if predictions.ndim == 1 else labels
            num_correct = (predictions == expected).sum()
        if len(self.of_labels):  # of held-out rows: bincount waits for the device
            self.of_labels += torch.bincount(labels[is_masked], minlength=len(self.of_labels))
        self.counts += torch.stack((num_tokens, is_masked.sum(), num_correct, squares))
        self.loss_sum += loss_sum

    def totals(self, accelerator) -> dict[str, float]:
        """Return the sums over all processes as numbers; every process must call this."""
        counts = accelerator.reduce(self.counts, "sum").tolist()
        totals = {name: count + self.before.get(name, 0) for name, count in zip(self.NAMES, counts)}
        return totals | {"loss_sum": accelerator.reduce(self.loss_sum, "sum").item()}


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
    is_label, predictions = labels != -100, logits.argmax(-1)
    return labels.masked_scatter(is_label, predictions[is_label] if predictions.ndim > 1 else predictions)


def masked_lm_loss(outputs, labels: torch.Tensor, num_items_in_batch=None) -> torch.Tensor:
    """Return the cross-entropy per masked token of the whole optimizer step, for models that ignore `num_items_in_batch`."""
    logits = outputs["logits"].flatten(0, -2).float()
    summed = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    return summed / (num_items_in_batch if num_items_in_batch is not None else (labels != -100).sum().clamp(min=1))


class LogWhereItEnds(TrainerCallback):
    """Log before each checkpoint and after the last step, so that no log covers steps before and after a resume."""

    def on_step_end(self, args, state, control, **kwargs):
        """Request the log; Trainer writes it before the checkpoint."""
        if control.should_save or control.should_training_stop or state.global_step >= state.max_steps:
            control.should_log = True
