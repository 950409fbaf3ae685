"""`PretrainingTrainer`: HF Trainer with the paper's learning-rate schedule, weight decay, fixed row order and extra metrics.

It overrides three methods of Trainer (sampler, decay parameters, scheduler) and adds figures to the log. The training loop,
devices, precision, checkpoints and resume are Trainer's.
"""

import json
import math
import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import FullyShardedDataParallelPlugin
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, SequentialSampler
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerState,
)

from ..data.documents import Documents, Selection
from ..data.files import write_error, writing
from ..data.packing import MixedRows, PackedRows
from ..data.plans import PLANS, NothingToPack, write_packing_plan
from ..model.configuration_neobert import NeoBERTConfig
from ..runs.folders import last_complete_checkpoint
from ..runs.manifests import STATE, CheckedCheckpoints
from .flops import matrix_flops_per_s, training_flops
from .recipes import Recipe

METRICS = "metrics.jsonl"
SAVING_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class PretrainingTrainer(CheckedCheckpoints):
    """Trainer with a recipe.

    Args:
        recipe: Sets the schedule and the parameters with weight decay; `TrainingArguments` are ignored for these two.
        **kwargs: As for Trainer. The training set is `PackedRows`, `MixedRows` or a stream.

    Each log holds Trainer's `loss` (per masked token), `learning_rate` and `grad_norm`, and also `perplexity`,
    `masked_accuracy`, `num_tokens` and `num_masked` since the start of the run, `packing_efficiency`, `tokens_per_s`, and
    `model_flops_utilization`, the share of this device's peak matrix-product throughput. `metrics.jsonl` in the output folder
    holds one line for each log.

    Raises:
        FloatingPointError: The loss or the gradient was not finite. The check runs at each log and before each checkpoint,
            which is then not written.
    """

    def __init__(self, *args, recipe: Recipe, **kwargs):
        super().__init__(*args, **kwargs)
        self.recipe = recipe
        self.args.logging_nan_inf_filter = False  # the filter would hide a loss that must stop the run
        self.counter, self.held_out = None, None
        self._peak = self._last_log = None
        if self.is_fsdp_enabled:
            keep_float32(self.accelerator.state.fsdp_plugin)
        self.add_callback(LogWhereItEnds())
        if recipe.architecture != "neobert":
            self.compute_loss_func = masked_lm_loss

    # Overrides of Trainer

    def _get_train_sampler(self, train_dataset: Dataset | None = None):
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return SequentialSampler(dataset) if hasattr(dataset, "__len__") else None

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of all parameters or of the matrices only, as the recipe says."""
        names = [name for name, _ in model.named_parameters()]
        if self.recipe.decay_norms_and_embeddings:
            return names
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        return [name for name, p in model.named_parameters() if p.ndim > 1 and id(p) not in embeddings]

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
        """Create the recipe's schedule."""
        if self.lr_scheduler is None:
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, self.recipe.learning_rate_factor)
            self._created_lr_scheduler = True  # so that a second train() creates a new schedule
        return self.lr_scheduler

    # Metrics

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return Trainer's loss; count tokens, masked tokens and correct predictions on the device without a synchronization."""
        labels = inputs["labels"]
        options = dict(return_outputs=True, num_items_in_batch=num_items_in_batch)
        loss, outputs = super().compute_loss(model, inputs, **options)
        if model.training:
            self.counter.count(inputs, labels, outputs, loss.detach(), self.state.global_step)
        elif self.held_out is not None and not self._is_repeated():
            # Trainer may have divided by the number of labels of all processes, and multiplied by the number of processes.
            num_processes = 1 if num_items_in_batch is None else self.accelerator.num_processes
            num_items = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
            summed = loss.detach() * num_items / num_processes
            self.held_out.count(inputs, labels, outputs, summed, self.state.global_step)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the figures to the log, and append the log to the metrics file."""
        if "loss" in logs:
            counts = self.counter.totals(self.accelerator)
            # a step that the gradient scaler of fp16 skipped changed nothing
            is_skipped = self.accelerator.optimizer_step_was_skipped
            self._check_finite(counts, 0.0 if is_skipped else logs.get("grad_norm", 0.0))
            logs |= self._training_figures(logs["loss"], counts)
        elif "eval_loss" in logs and self.held_out is not None:
            logs |= self._held_out_figures()
        super().log(logs, start_time)
        if self.is_world_process_zero():
            metrics = Path(self.args.output_dir, METRICS)
            try:
                with metrics.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(self.state.log_history[-1]) + "\n")
            except OSError as error:
                raise write_error(
                    error, metrics, "every checkpoint is complete; free disk space and resume from the last one"
                ) from error

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        """Run Trainer's evaluation; return also the loss per masked token over the whole held-out set and the masked accuracy."""
        self.held_out = Counter(self.args.device)
        metrics = super().evaluate(*args, **kwargs)
        metrics |= self._held_out_figures()
        self.held_out = None
        return metrics

    def _is_repeated(self):
        """Whether this row is a repetition that accelerate adds so that all processes have the same number of rows."""
        state = self.accelerator.gradient_state
        return state.end_of_dataloader and 0 < state.remainder <= self.accelerator.process_index

    def _held_out_figures(self):
        counts = self.held_out.totals(self.accelerator)
        if not counts["num_masked"]:
            raise ValueError(
                f"none of the {counts['num_tokens']} held-out tokens was masked, so there is no accuracy to measure; hold out "
                "more text, or raise mlm_probability"
            )
        loss = counts["loss_sum"] / counts["num_masked"]
        return {
            "eval_loss": loss,
            "eval_perplexity": math.exp(min(loss, 700)),
            "eval_masked_accuracy": counts["num_correct"] / counts["num_masked"],
        }

    def _training_figures(self, loss, counts):
        now, before = time.perf_counter(), self._last_log
        self._last_log = (now, counts, self.state.global_step)
        new = {name: counts[name] - before[1][name] for name in Counter.NAMES}
        seconds, num_steps = now - before[0], self.state.global_step - before[2]
        flops = training_flops(
            self.accelerator.unwrap_model(self.model), new["num_tokens"], new["num_masked"], new["sum_of_squares"]
        )
        return {
            "perplexity": math.exp(min(loss, 700)),
            "masked_accuracy": new["num_correct"] / max(new["num_masked"], 1),
            "num_tokens": counts["num_tokens"],
            "num_masked": counts["num_masked"],
            "packing_efficiency": new["num_tokens"] / (num_steps * self.args.tokens_per_step),
            "tokens_per_s": new["num_tokens"] / seconds,
            "model_flops_utilization": flops / seconds / (self._peak * self.accelerator.num_processes),
        }

    def _check_finite(self, counts, grad_norm=0.0):
        step, what = counts["first_bad_step"] + 1, "loss"
        if counts["first_bad_step"] == NEVER:
            if math.isfinite(grad_norm):
                return
            step, what = self.state.global_step, "gradient"
        last = last_complete_checkpoint(self.args.output_dir)
        advice = f"the last good checkpoint is {last}" if last else "no checkpoint was written before it"
        raise FloatingPointError(
            f"the {what} was not finite in optimizer step {step}; {advice}. Lower learning_rate, or inspect the rows of this step"
        )

    # Start, save and resume

    def train(self, resume_from_checkpoint: str | None = None, **kwargs):
        """Train from the start, or resume exactly from a checkpoint of the same run."""
        before, step = dict.fromkeys(Counter.NAMES, 0), 0
        metrics = Path(self.args.output_dir, METRICS)
        if resume_from_checkpoint:
            state = TrainerState.load_from_json(str(Path(resume_from_checkpoint, STATE)))
            before, step = state.stateful_callbacks.get("pretraining"), state.global_step
            if before is None:
                raise ValueError(
                    f"{resume_from_checkpoint} was not written by PretrainingTrainer: its {STATE} has no token counts"
                )
        if self.is_world_process_zero():
            metrics.parent.mkdir(parents=True, exist_ok=True)
            kept = state.log_history if resume_from_checkpoint else []
            with writing(metrics) as file:
                file.write("".join(json.dumps(entry) + "\n" for entry in kept).encode())
        self.counter = Counter(self.args.device, before)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision, torch.float32)
        self._peak = matrix_flops_per_s(self.args.device, dtype)
        self._last_log = (time.perf_counter(), before, step)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _save_checkpoint(self, model, trial):
        counts = self.counter.totals(self.accelerator)
        self._check_finite(counts)
        self.state.stateful_callbacks["pretraining"] = {name: counts[name] for name in Counter.NAMES}
        super()._save_checkpoint(model, trial)


def keep_float32(plugin: FullyShardedDataParallelPlugin) -> None:
    """Give FSDP2 the mixed precision of autocast under DDP.

    Matrix products run in half precision; residual stream, loss and gradient sums stay in fp32. accelerate's own policy casts
    all of them to half precision.
    """
    policy = plugin.mixed_precision_policy
    if getattr(plugin, "fsdp_version", 1) == 2 and policy is not None:  # accelerate < 1.6 has only FSDP1
        changes = dict(reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False)
        plugin.mixed_precision_policy = replace(policy, **changes)


NEVER = 1 << 62  # a step that no run reaches


class Counter:
    """Sums over batches, kept on the device to avoid synchronization."""

    NAMES = ("num_tokens", "num_masked", "num_correct", "sum_of_squares")

    def __init__(self, device: torch.device, before: dict | None = None):
        self.counts = torch.zeros(len(self.NAMES), dtype=torch.int64, device=device)
        self.loss_sum = torch.zeros((), device=device)
        self.first_bad_step = torch.full((), NEVER, dtype=torch.int64, device=device)
        self.before = before or {}  # the totals of an earlier part of the run

    def count(self, inputs: dict, labels: torch.Tensor, outputs, loss: torch.Tensor, step: int) -> None:
        """Add a batch: number of tokens, labels and correct predictions, the loss, and whether the loss is finite."""
        is_masked = labels != -100
        num_masked = is_masked.sum()
        if "attention_mask" in inputs:
            lengths = inputs["attention_mask"].sum(-1)
            num_tokens, squares = lengths.sum(), lengths.square().sum()
        else:
            num_tokens = torch.full(
                (), labels.numel(), device=labels.device
            )  # torch.tensor would synchronize with the device
            positions = inputs.get("position_ids")  # for a document of n tokens: 1 + 3 + 5 + ... + (2 n - 1) = n^2
            squares = num_tokens**2 if positions is None else (2 * positions + 1).sum()
        num_correct = getattr(outputs, "num_correct", None)
        if num_correct is None:
            predictions = outputs["logits"].argmax(-1)
            expected = labels[is_masked] if predictions.ndim == 1 else labels
            num_correct = (predictions == expected).sum()
        self.counts += torch.stack((num_tokens, num_masked, num_correct, squares))
        self.loss_sum += loss.float()
        is_bad = ~loss.isfinite()
        self.first_bad_step = torch.where(is_bad, self.first_bad_step.clamp(max=step), self.first_bad_step)

    def totals(self, accelerator) -> dict[str, float]:
        """Return the sums over all processes as numbers; every process must call this."""
        counts = accelerator.reduce(self.counts, "sum").tolist()
        bad = int(accelerator.gather(self.first_bad_step[None]).min())
        totals = dict(zip(self.NAMES, counts)) | {"loss_sum": accelerator.reduce(self.loss_sum, "sum").item()}
        return {name: value + self.before.get(name, 0) for name, value in totals.items()} | {"first_bad_step": bad}


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


class SaveOnTerminate(TrainerCallback):
    """On SIGTERM or Ctrl-C, save a checkpoint after the current step and end the process; a second Ctrl-C ends it at once.

    Schedulers send SIGTERM before they preempt a job. All processes agree on the step. With Trainer's own
    `enable_jit_checkpoint`, each process decides alone.
    """

    def on_train_begin(self, args, state, control, train_dataloader, **kwargs):
        """Install the signal handlers, except for signals that this process ignores, as a job in the background does."""
        self._signal = self._agreed_signal = 0
        self._is_alone = args.world_size == 1
        numbers = [each for each in SAVING_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._handle_signal) for number in numbers}
        loader = getattr(train_dataloader, "base_dataloader", train_dataloader)  # accelerate wraps it
        loader.worker_init_fn = partial(_begin_worker, loader.worker_init_fn)

    def _handle_signal(self, number, frame):
        self._signal = number
        if number == signal.SIGINT and self._is_alone:  # launchers repeat a Ctrl-C to their processes
            signal.signal(number, self._before[number])
            # print is not safe in a handler
            os.write(2, b"\nCtrl-C: saving a checkpoint after this step; a second Ctrl-C ends at once\n")

    def on_step_end(self, args, state, control, **kwargs):
        """Save and stop if any process has received a signal, unless this was the last step."""
        number = self._signal
        if args.world_size > 1:
            agreed = torch.tensor(number, device=args.device)
            torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MAX)
            number = int(agreed)
        if number and state.global_step < state.max_steps:
            self._agreed_signal = number
            args.save_total_limit = None  # Trainer would remove this checkpoint in favour of the best one
            control.should_log = control.should_save = control.should_training_stop = True

    def on_epoch_end(self, args, state, control, **kwargs):
        """Prevent the evaluation of a part of an epoch, which could count as the best one."""
        if self._agreed_signal:
            control.should_evaluate = control.should_save = False

    def on_train_end(self, args, state, control, **kwargs):
        """Restore the previous handlers; end the process if a signal has stopped the training.

        Raises:
            SystemExit: The status is that of a process that the signal ended: 143 for SIGTERM, 130 for Ctrl-C.
        """
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._agreed_signal:
            if state.is_world_process_zero:
                message = "the same command with --resume_from_checkpoint last resumes here"
                print(f"stopped at step {state.global_step}; {message}", file=sys.stderr)
            raise SystemExit(128 + self._agreed_signal)


def _begin_worker(begin, number):
    """Ignore the signals, which reach all processes: a worker ends with its parent, which saves first."""
    for each in SAVING_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    if begin is not None:
        begin(number)


def training_rows(
    documents: Documents | Selection, args, long_documents: str = "truncate", verify: bool = False
) -> Dataset:
    """The rows of a whole run, by packing plans that are made at the first run and kept beside the documents.

    Where nothing can be written beside the documents, a new plan is kept in the output folder.

    Args:
        documents: Documents to train on.
        args: `PretrainingArguments`.
        long_documents: As for `PackingSettings`.
        verify: Compare the checksums of plans that exist.

    Raises:
        ValueError: The mixture draws from documents of a length that no document has, or a plan is damaged.
        OSError: A plan cannot be written.
    """
    parts = []
    options = dict(max_length=args.max_length, seed=args.seed, verify=verify, show_progress=not args.disable_tqdm)
    options |= dict(spare_folder=Path(args.output_dir, PLANS), long_documents=long_documents)
    for share, least in zip(args.mixture, (0, *args.longer_than)):
        if not share:
            parts.append(None)
            continue
        chosen = documents.longer_than(least) if least else documents
        try:
            plan = write_packing_plan(chosen, args.row_tokens, **options)
        except NothingToPack as error:
            raise ValueError(
                f"mixture={args.mixture} draws {share:.0%} of the steps from documents of more than {least} tokens, and "
                "there are none; change mixture or longer_than"
            ) from error
        num_rows = args.max_steps * args.rows_per_step
        parts.append(PackedRows.from_plan(documents, plan, num_rows))
    if args.mixture[0] == 1.0:
        return parts[0]
    return MixedRows(parts, args.mixture, args.rows_per_step, args.max_steps, args.seed)


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, config_overrides: str = "") -> PreTrainedModel:
    """Build the recipe's model with randomly initialized weights.

    Args:
        recipe: Sets architecture, shape and context length.
        tokenizer: Sets vocabulary size and padding token.
        config_overrides: Changes to the config, such as "hidden_size=256,num_hidden_layers=6".

    Raises:
        ValueError: An override names no field of the config, or a field that is no number.
    """
    values = dict(recipe.config, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    if recipe.architecture == "neobert":
        config = NeoBERTConfig(**values, max_position_embeddings=recipe.max_length, sparse_prediction=True)
    else:  # its position ids start at pad_token_id + 1
        context = recipe.max_length + tokenizer.pad_token_id + 1
        config = AutoConfig.for_model(recipe.architecture, **values, max_position_embeddings=context)
    if config_overrides:
        try:
            config.update_from_string(",".join(map(str.strip, config_overrides.split(","))))
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(
                f"config_overrides={config_overrides!r}: {error}; give numbers of the config, such as "
                "hidden_size=256,num_hidden_layers=6"
            ) from error
        config = type(config).from_dict(config.to_dict())  # validates the combination
    return AutoModelForMaskedLM.from_config(config)
