"""The trainer of the jobs, and its arguments."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from transformers import IntervalStrategy

from ..runs import CheckedCheckpoints, FineTuningArguments

# Without validation rows there is no best epoch.
LAST_EPOCH = {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}


@contextmanager
def training_arguments(
    training: FineTuningArguments | None,
    options: dict[str, Any],
    has_validation: bool = False,
) -> Iterator[FineTuningArguments]:
    """Give a copy of the arguments, or those of the options; without `output_dir`, their folder is removed at the end."""
    if training and options:
        raise ValueError(f"give {', '.join(options)} in the training arguments, not beside training=...")
    with TemporaryDirectory() as folder:
        if training is None:
            if "output_dir" not in options:
                options = {
                    "output_dir": folder,
                    "report_to": "none",
                    "save_only_model": True,
                } | options
            if not has_validation:
                options = LAST_EPOCH | options
            yield FineTuningArguments(**options)
            return
        training = copy.copy(training)
        if not has_validation:
            training.eval_strategy = IntervalStrategy.NO
            training.load_best_model_at_end = False
        if training.output_dir is None:  # of a pickle: the devices are those of this process
            training = dataclasses.replace(training, output_dir=folder)
        yield training


class JobTrainer(CheckedCheckpoints):
    """Trainer that predicts in float32 also if it trains in bf16, so that it predicts what the saved model does."""

    use_cpu_amp = property(lambda self: False, lambda self, _: None)  # of transformers 4, beside that of accelerate

    def prediction_step(self, model: Any, *args, **kwargs) -> Any:
        """As Trainer's, without the autocast that accelerate adds to the forward."""
        inner = vars(self.accelerator.unwrap_model(model))
        wrapped = inner.get("forward")
        if "_original_forward" in inner:
            inner["forward"] = inner["_original_forward"]
        try:
            return super().prediction_step(model, *args, **kwargs)
        finally:
            if "_original_forward" in inner:
                inner["forward"] = wrapped
