"""examples/pretrain_mlm.py, but the second process ends itself by SIGKILL at step 15."""

import os
import runpy
import signal
from pathlib import Path
from unittest import mock

from neobert_hf.pretraining.trainer import PretrainingTrainer

STEP = 15
EXAMPLE = Path(__file__).parents[1] / "examples/pretrain_mlm.py"


def log_or_end(self, *args, log=PretrainingTrainer.log):
    """In place of `PretrainingTrainer.log`."""
    if self.state.global_step == STEP and self.args.process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    log(self, *args)


if __name__ == "__main__":
    with mock.patch.object(PretrainingTrainer, "log", log_or_end):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
