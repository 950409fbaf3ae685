"""SIGTERM and Ctrl-C during a training: save a checkpoint, then end."""

import os
import signal
import threading
from functools import partial

import torch
from transformers import TrainerCallback
from transformers.utils import logging

logger = logging.get_logger(__name__)

SAVING_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class SaveOnTerminate(TrainerCallback):
    """On SIGTERM or Ctrl-C, save a checkpoint after the current step and end the process; a second Ctrl-C ends it at once.

    Schedulers send SIGTERM before they preempt a job. All processes agree on the step. With Trainer's own
    `enable_jit_checkpoint`, each process decides alone.
    """

    def on_train_begin(self, args, state, control, train_dataloader, **kwargs):
        """Install the signal handlers, except for signals that this process ignores, as a job in the background does."""
        self._signal = self._agreed_signal = 0
        self._is_alone = args.world_size == 1
        numbers = [number for number in SAVING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        if threading.current_thread() is not threading.main_thread():  # Python gives signals to the main thread
            numbers = []
        self._before = {number: signal.signal(number, self._handle_signal) for number in numbers}
        loader = getattr(train_dataloader, "base_dataloader", train_dataloader)  # accelerate wraps it
        loader.worker_init_fn = partial(_begin_worker, loader.worker_init_fn)

    def _handle_signal(self, number, frame):
        self._signal = number
        if number == signal.SIGINT and self._is_alone:  # launchers repeat a Ctrl-C to their processes
            signal.signal(number, self._before[number])
            # a logger is not safe in a handler
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
        """End the process if a signal has stopped the training.

        Raises:
            SystemExit: The status is that of a process that the signal ended: 143 for SIGTERM, 130 for Ctrl-C.
        """
        self.restore_handlers()
        if self._agreed_signal:
            if state.is_world_process_zero:
                message = "rerun the command to resume"
                logger.warning(f"stopped at step {state.global_step}; {message}")
            raise SystemExit(128 + self._agreed_signal)

    def restore_handlers(self) -> None:
        """Restore the handlers that were there before the training."""
        for number, handler in getattr(self, "_before", {}).items():
            signal.signal(number, handler)


def _begin_worker(begin, number):
    """Ignore the signals, which reach all processes: a worker ends with its parent, which saves first."""
    for signal_number in SAVING_SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN)
    if begin is not None:
        begin(number)
