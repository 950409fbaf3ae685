"""What a training shows: one bar with the time left, and a line for each epoch; loading shows faults of the encoder alone."""

import logging
import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import fmean

from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from huggingface_hub.utils import enable_progress_bars as enable_downloads
from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback
from transformers.modeling_utils import logger
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from ..files.messages import say

NOT_SHOWN = ("_runtime", "_per_second", "_time", "_trivial_masked_accuracy")
MOST_SCORES = 5  # in a line; an evaluation of a search has thirty
# Reports of transformers 5 and 4 on weights, and a name in them that is not of a head.
REPORT = re.compile("LOAD REPORT|newly initialized|were not used when initializing")
HEADS = r"(?:classifier|dense|decoder|score|qa_outputs|lm_head|head|cls|(?:\w+\.)?pooler)\."
OF_ENCODER = re.compile(rf"(?:^|^- |')(?!{HEADS})\w+\.\w", re.MULTILINE)


class EpochLines(TrainerCallback):
    """A line for each epoch: the mean of its losses, and the scores after it; for each log in a run of one epoch or of steps."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Tell a log of a run of steps; beside a bar, which has the loss, its scores alone."""
        if not _has_epochs(args) and (args.disable_tqdm or "loss" not in logs):
            _tell(f"step {state.global_step} of {state.max_steps}", [logs])

    def on_epoch_begin(self, args, state, control, **kwargs):
        """Tell the epoch before, which has been evaluated."""
        if _has_epochs(args):
            first = math.ceil(state.epoch) - 1
            logs = [log for log in state.log_history if log.get("epoch", 0) > first]
            _tell(f"epoch {state.epoch:.4g} of {args.num_train_epochs:g}", logs)

    def on_train_end(self, args, state, control, **kwargs):
        """Tell the last epoch."""
        self.on_epoch_begin(args, state, control)
        super().on_train_end(args, state, control, **kwargs)


class Progress(EpochLines, ProgressCallback):
    """The bar of transformers, with the loss; the bar of an evaluation does not stay."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Show the loss in the bar."""
        super().on_log(args, state, control, logs, **kwargs)
        if self.training_bar is not None and "loss" in logs:
            self.training_bar.set_postfix_str(f"loss {logs['loss']:.4g}")

    def on_prediction_step(self, *args, **kwargs):
        """Show the bar of an evaluation."""
        super().on_prediction_step(*args, **kwargs)
        if self.prediction_bar is not None:
            self.prediction_bar.leave = False


def _has_epochs(args) -> bool:
    return args.max_steps <= 0 and args.num_train_epochs > 1


def _tell(place: str, logs: list[dict]) -> None:
    losses = [log["loss"] for log in logs if "loss" in log]
    scores = {name: value for log in logs for name, value in log.items() if name.startswith("eval_")}
    shown = [name for name in scores if not name.endswith(NOT_SHOWN)][:MOST_SCORES]
    parts = [f"loss {fmean(losses):.4g}"] if losses else []
    if shown:
        parts.append("validation " + ", ".join(f"{name[len('eval_') :]} {scores[name]:.4g}" for name in shown))
    if parts:
        with tqdm.external_write_mode():  # the line stands above the bar
            say(f"{place}: {'; '.join(parts)}")


@contextmanager
def without_bars(is_head_new: bool = False) -> Iterator[None]:
    """Let transformers load and save, and datasets map, without a bar; a download from the Hub keeps its own.

    Args:
        is_head_new: Also leave out the report on the weights of a head; it stays if it names a weight of the encoder.
    """
    with ExitStack() as before:
        if is_progress_bar_enabled():
            before.callback(enable_progress_bar)
            disable_progress_bar()
            enable_downloads()  # transformers disables them too
        if not are_progress_bars_disabled():
            before.callback(enable_progress_bars)
            disable_progress_bars()
        if is_head_new:
            before.callback(logger.removeFilter, _is_told)
            logger.addFilter(_is_told)
        yield


def _is_told(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not REPORT.search(text) or bool(OF_ENCODER.search(text))
