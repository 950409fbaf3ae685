"""The commands under test, with a few hundred short texts and models of two layers and width 32.

This file imports all of them, before a case forks. A call of a command sets `sys.argv` and runs the script's main function.
"""

import hashlib
import json
import random
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import build
import matplotlib.backends.backend_agg  # noqa: F401 (commands import it late; imported here, cases do not wait for it)
import pretrain_mlm
import scipy.io  # noqa: F401
import torch._dynamo
import train_contrastive
from adversary.machinery import Failed, Outcome, counting_events, fork_case
from conftest import SENTENCE, flags
from datasets.packaged_modules.json import json as json_builder  # noqa: F401
from safetensors import safe_open

from neobert_cli import commands as neobert_cli
from neobert_hf.data.wordpiece import train_wordpiece

SHAPE = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=48"
QUIET = dict(report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=1)
WORDS = SENTENCE.split()
CORPUS_TEXTS, PAIRS = 300, 120
# The runs to interrupt and the method of the workbench that makes the command; the first four are trainings, which resume.
COMMANDS = {
    "pretraining": "pretrain", "pretraining, phase 2": "second_phase", "pretraining from a stream": "streaming",
    "contrastive training": "contrastive", "tokenizing": "tokenize", "the build for the Hub": "hub",
}  # fmt: skip
TRAININGS = tuple(COMMANDS)[:4]


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run: its folder, its duration, and how often it changed a file."""

    folder: Path
    seconds: float
    num_events: int


class Workbench:
    """A folder with texts, pairs, tokenizer, documents and a pretrained model; the first use writes it, cases only read it."""

    def __init__(self, folder: Path):
        self.folder = folder

    @cached_property
    def references(self) -> dict[str, Reference]:
        """The uninterrupted run of each command; families that need the workbench ask for it before the first fork."""
        self.finish(self._write_texts, "texts")
        self.finish(self.pretrain(self.folder / "model", documents_dir=self.folder / "documents"), "model")
        references = {}
        for name, method in COMMANDS.items():
            folder = self.folder / f"whole-{method}"
            outcome = self.finish(counting_events(getattr(self, method)(folder), folder), method)
            references[name] = Reference(folder, outcome.seconds, int(outcome.output.split()[-1]))
        return references

    def _write_texts(self):
        rng = random.Random(0)
        for name, count in {"train": CORPUS_TEXTS, "held_out": 20}.items():
            lines = [json.dumps({"text": self._text(rng, rng.randint(3, 60))}) for _ in range(count)]
            (self.folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        pairs = [json.dumps({"query": self._text(rng, 4), "document": self._text(rng, 12)}) for _ in range(PAIRS)]
        (self.folder / "pairs.jsonl").write_text("\n".join(pairs) + "\n")
        train_wordpiece([SENTENCE] * 20, vocab_size=96, model_max_length=64).save_pretrained(self.folder / "tokenizer")

    def _text(self, rng, length):
        start = rng.randrange(len(WORDS))
        return " ".join(WORDS[(start + i * rng.choice((1, 1, 1, 2))) % len(WORDS)] for i in range(length))

    def finish(self, command: Callable[[], None], name: str) -> Outcome:
        outcome = fork_case(command, self.folder / f"log-{name}")
        if outcome.status != 0:
            raise Failed(f"bug: {name} ended with status {outcome.status}: {outcome.errors[-2000:]}")
        return outcome

    # Each method returns a function without arguments, which a fork calls.

    def pretrain(self, output_dir: Path, **changes) -> Callable[[], None]:
        files = {"train_files": "train.jsonl", "validation_files": "held_out.jsonl"}
        files |= {"tokenizer_name": "tokenizer", "documents_dir": "documents"}
        options = {name: self.folder / file for name, file in files.items()} | QUIET
        options |= dict(output_dir=output_dir, config_overrides=SHAPE, num_processes=1)
        options |= dict(max_steps=12, warmup_steps=2, learning_rate=3e-3, save_steps=4)
        options |= dict(max_length=32, row_tokens=64, tokens_per_step=128)
        return script(pretrain_mlm.__file__, options | changes)

    def second_phase(self, output_dir: Path, **changes) -> Callable[[], None]:
        options = dict(phase=2, init_from=self.folder / "model", longer_than=[24, 40], max_length=64)
        return self.pretrain(output_dir, warmup_steps=None, config_overrides=None, **options, **changes)

    def streaming(self, output_dir: Path, **changes) -> Callable[[], None]:
        return self.pretrain(output_dir, streaming=True, **changes)

    def contrastive(self, output_dir: Path, **changes) -> Callable[[], None]:
        files = dict(model_name_or_path=self.folder / "model", train_files=self.folder / "pairs.jsonl")
        options = QUIET | files | dict(output_dir=output_dir, max_steps=8, warmup_steps=2, save_steps=3)
        options |= dict(per_device_train_batch_size=8, max_seq_length=32, learning_rate=1e-3)
        return script(train_contrastive.__file__, options | changes)

    def tokenize(self, output_dir: Path, **changes) -> Callable[[], None]:
        options = dict(tokenizer_name=self.folder / "tokenizer", files=self.folder / "train.jsonl")
        options |= dict(output_dir=output_dir, tasks=10, workers=2)
        return partial(_call_cli, ["tokenize", *flags(options | changes)])

    def hub(self, out: Path, **changes) -> Callable[[], None]:
        return script(build.__file__, dict(model=self.folder / "model", out=out, model_id="org/tiny") | changes)


def script(file: str, options: dict) -> Callable[[], None]:
    return partial(_call_script, file, flags(options))


def _call_script(file, argv):
    torch.set_num_threads(1)
    sys.argv = [file, *argv]
    runpy.run_path(file, run_name="__main__")


def _call_cli(argv):
    torch.set_num_threads(1)
    sys.argv = ["neobert", *map(str, argv)]
    neobert_cli.main()


def weights_of(folder: Path) -> str:
    digest = hashlib.sha256()
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            digest.update(name.encode() + file.get_tensor(name).numpy().tobytes())
    return digest.hexdigest()


def losses_of(folder: Path) -> dict[int, float]:
    entries = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {entry["step"]: entry["loss"] for entry in entries if "loss" in entry}
