"""Short runs of pretraining, in this process or in another one that a signal can end."""

import json
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import fields
from pathlib import Path

from neobert_hf.pretraining.arguments import CorpusArguments, PretrainingArguments
from neobert_hf.pretraining.training import pretrain

SMALL = "hidden_size=64,num_hidden_layers=2,num_attention_heads=2,intermediate_size=96"
SIZES = dict(max_length=32, row_tokens=64, max_steps=12, warmup_steps=2, learning_rate=3e-3, logging_steps=1)
RECIPES_OF_PAPER = Path(__file__).parents[1] / "examples/paper/recipes"
QUIET = dict(use_cpu=True, bf16=False, report_to="none", disable_tqdm=True)
# Processes are forks of one that has imported the package, since the imports take most of the time of a short run.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["neobert_hf.pretraining.training"])


def options_of(corpus, folder, **changes):
    """Values of both dataclasses of arguments by name; None leaves a value out."""
    options = dict(train_files=[corpus / "train.jsonl"], validation_files=[corpus / "held_out.jsonl"])
    options |= dict(tokenizer_name=corpus / "tokenizer", documents_dir=corpus / "documents", output_dir=folder)
    options |= dict(config_overrides=SMALL, tokens_per_step=256, save_steps=4, num_processes=1, **SIZES, **QUIET)
    return {name: value for name, value in {**options, **changes}.items() if value is not None}


def run(corpus, folder, model=None, functions=None, **changes):
    """Pretrain in this process, with functions and a model as `pretrain` takes them; return the loss of each step."""
    values = {name: _plain(value) for name, value in options_of(corpus, folder, **changes).items()}
    names = {field.name for field in fields(CorpusArguments)}
    data = CorpusArguments(**{name: value for name, value in values.items() if name in names})
    training = PretrainingArguments(**{name: value for name, value in values.items() if name not in names})
    pretrain(data, training, model=model, **functions or {})
    return losses_of(folder)


def _plain(value):
    return list(map(_plain, value)) if isinstance(value, list) else str(value) if isinstance(value, Path) else value


def command(corpus, folder, **changes):
    values = options_of(corpus, folder, **changes).items()
    return [str(part) for name, value in values for part in (f"--{name}", *(value if type(value) is list else [value]))]


def start(module, arguments, errors):
    """Call `main` of a module with arguments in another process; `errors` is the file of its standard error."""
    process = FORKS.Process(target=_call_main, args=(module.__name__, module.__file__, arguments, errors))
    process.start()
    return process


def _call_main(name, file, arguments, errors):
    with open(os.devnull, "wb") as nowhere, open(errors, "wb") as handle:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(handle.fileno(), 2)
    multiprocessing.set_start_method("fork", force=True)  # for workers, as in a process of its own on Linux
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
    sys.argv = [file, *arguments]
    __import__(name).main()


def wait_for_steps(process, folder, num_steps):
    deadline, metrics = time.monotonic() + 120, Path(folder, "metrics.jsonl")
    while time.monotonic() < deadline and process.is_alive():
        if metrics.exists() and len(metrics.read_text().splitlines()) >= num_steps:
            return
        time.sleep(0.002)


def entries_of(folder):
    return list(map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines()))


def losses_of(folder):
    return {entry["step"]: entry["loss"] for entry in entries_of(folder) if "loss" in entry}
