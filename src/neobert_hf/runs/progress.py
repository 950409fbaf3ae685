"""What a training shows: one bar with the time left, and a line for each epoch; short work of libraries shows no bar."""

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean

import datasets
from huggingface_hub.utils import enable_progress_bars
from tqdm.auto import tqdm
from transformers import ProgressCallback
from transformers.utils import logging

from ..files.messages import say

NUM_LINES = 20  # of a run of steps without a bar
NOT_SHOWN = ("_runtime", "_per_second", "_time", "_trivial_masked_accuracy")
MOST_SCORES = 5  # in a line; an evaluation of a search has thirty


class Progress(ProgressCallback):
    """The bar of transformers with the loss, and a line for each epoch: the mean of its losses, and the scores after it.

    A run of one epoch, or of `max_steps`, has a line for each evaluation. With `disable_tqdm` there is no bar, and such a run has
    twenty lines. Numbers in `log_history` are those of Trainer.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        """Show the bar, from the step of a checkpoint on."""
        self.current_step = self._last_step = state.global_step
        self._num_told = len(state.log_history)
        if state.is_world_process_zero:
            options = {"initial": state.global_step, "unit": "step", "disable": args.disable_tqdm}
            self.training_bar = tqdm(total=state.max_steps, dynamic_ncols=True, **options)

    def on_prediction_step(self, args, state, control, **kwargs):
        """Show the bar of an evaluation, which does not stay."""
        if not args.disable_tqdm:
            super().on_prediction_step(args, state, control, **kwargs)
            if self.prediction_bar is not None:
                self.prediction_bar.leave = False

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Show the loss in the bar, and tell the lines of a run of steps."""
        if self.training_bar is None:
            return
        if "loss" in logs:
            self.training_bar.set_postfix_str(f"loss {logs['loss']:.4g}")
        is_due = args.disable_tqdm and state.global_step - self._last_step >= state.max_steps / NUM_LINES
        if not _has_epochs(args) and (is_due or any(name.startswith("eval_") for name in logs)):
            self._tell(args, state)

    def on_epoch_begin(self, args, state, control, **kwargs):
        """Tell the line of the epoch before, which has been evaluated."""
        if _has_epochs(args):
            self._tell(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        """Tell what is left; the bar stays."""
        if _has_epochs(args) or args.disable_tqdm:
            self._tell(args, state)
        super().on_train_end(args, state, control, **kwargs)

    def _tell(self, args, state):
        new = state.log_history[self._num_told :]
        losses = [entry["loss"] for entry in new if "loss" in entry]
        scores = {name: value for entry in new for name, value in entry.items() if name.startswith("eval_")}
        shown = [name for name in scores if not name.endswith(NOT_SHOWN)][:MOST_SCORES]
        parts = [f"loss {fmean(losses):.4g}"] if losses else []
        if shown:
            parts.append("validation " + ", ".join(f"{name[len('eval_') :]} {scores[name]:.4g}" for name in shown))
        if parts:
            place, end = ("epoch", args.num_train_epochs) if _has_epochs(args) else ("step", state.max_steps)
            now = state.epoch if _has_epochs(args) else state.global_step
            with tqdm.external_write_mode():  # the line stands above the bar
                say(f"{place} {now:.7g} of {end:g}: {'; '.join(parts)}")
        self._num_told, self._last_step = len(state.log_history), state.global_step


def _has_epochs(args) -> bool:
    return args.max_steps <= 0 and args.num_train_epochs > 1


@contextmanager
def without_bars() -> Iterator[None]:
    """Let transformers load and save, and datasets map, without a bar; a download from the Hub keeps its own."""
    is_shown, are_maps_shown = logging.is_progress_bar_enabled(), not datasets.are_progress_bars_disabled()
    if is_shown:
        logging.disable_progress_bar()
        enable_progress_bars()  # of downloads, which transformers disables too
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if is_shown:
            logging.enable_progress_bar()
        if are_maps_shown:
            datasets.enable_progress_bars()
