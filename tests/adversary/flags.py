"""Unusual values of every argument of every command: the command refuses them with the name and the bounds, or they are legal."""

import argparse
import contextlib
import inspect
import io
import itertools
import random
import resource
import runpy
import sys
from pathlib import Path
from typing import get_type_hints
from unittest import mock

import build
import build_mini
import distill_embeddings
import evaluate_long_context
import evaluate_model
import evaluate_mteb
import evaluate_pseudo_perplexity
import finetune_classifier
import finetune_glue
import finetune_tagger
import pretrain_mlm
import train_contextual
import train_contrastive
from adversary.machinery import EXPLAINED, RIGHT, Failed, Family, Outcome, explained, fork_case
from adversary.workbench import Workbench

from neobert_hf import cli

HUGE = "1" + "0" * 30
VALUES = ("0", "-1", HUGE, "nan", "")
# Arguments that each command requires, or that keep it on this machine's CPU.
REQUIRED = {
    "neobert tokenize": ["--output_dir=a", "--tokenizer_name=b"],
    "neobert pack": ["a"],
    "neobert embed": ["a.txt", "--output=a.npy"],
    "pretrain_mlm.py": ["--use_cpu=true", "--report_to=none"],
    "train_contrastive.py": ["--use_cpu=true", "--report_to=none", "--output_dir=a", "--model_name_or_path=b"],
    "train_contextual.py": [
        *("--use_cpu=true", "--report_to=none", "--output_dir=a", "--model_name_or_path=b", "--train_files=c"),
    ],
    "evaluate_mteb.py": ["--model=a", "--output_dir=b"],
    "finetune_classifier.py": ["--use_cpu=true", "--report_to=none", "--output_dir=a", "--train_file=b.csv"],
    "finetune_tagger.py": ["--use_cpu=true", "--report_to=none", "--output_dir=a", "--train_file=b.jsonl"],
    "finetune_glue.py": ["--use_cpu=true", "--output_dir=a", "--model_name_or_path=b"],
    "evaluate_pseudo_perplexity.py": ["--files=a.jsonl", "--output_dir=b"],
    "evaluate_long_context.py": ["--files=a.jsonl", "--output_dir=b"],
    "evaluate_model.py": ["--files=a.jsonl", "--output_dir=b"],
    "build.py": ["--model=a", "--out=b"],
    "build_mini.py": ["--stages=a", "--corpus=b"],
    "distill_embeddings.py": [
        *("--use_cpu=true", "--report_to=none", "--output_dir=a", "--tokenizer_name=b", "--text_files=c"),
    ],
}
SCRIPTS = {
    Path(module.__file__).name: module.__file__
    for module in (
        *(pretrain_mlm, train_contrastive, train_contextual, distill_embeddings, evaluate_mteb),
        *(finetune_classifier, finetune_tagger, finetune_glue, evaluate_pseudo_perplexity, evaluate_long_context),
        evaluate_model,
        *(build, build_mini),
    )
}
# Our numeric arguments for which 0 is legal; negative numbers are illegal for all of ours. For numeric arguments of
# transformers, only text that is not a finite number must be refused here; the runs below test their other values.
ZERO_IS_LEGAL = {
    *(
        "seed",
        "max_rows_seed",
        "num_candidates",
        "num_mined_negatives",
        "sampling_exponent",
        "context_dropout",
        "contrastive_weight",
        "mlm_weight",
        "masked_share",
        "pair_share",
        "margin",
        "warmup_steps",
        "decay_until",
        "learning_rate",
    ),
    *(
        "weight_decay",
        "mask_replace_prob",
        "random_replace_prob",
        "max_grad_norm",
        "adam_beta1",
        "adam_beta2",
        "mixture",
    ),
    *("adam_epsilon", "longer_than", "num_held_out", "num_pseudo", "mlm_probability", "num_entries"),
}
SENTINELS = {
    "max_steps",
    "logging_steps",
    "max_grad_norm",
    "learning_rate",
}  # -1 has a meaning, or transformers checks it
# Arguments for which a large number makes a run long.
LONG = {
    "max_steps",
    "tokens_per_step",
    "num_train_epochs",
    "num_mined_negatives",
    "dataloader_num_workers",
    "torch_empty_cache_steps",
    "eval_delay",
}


class Parsed(BaseException):
    """Raised to leave a main function; its argument is the parser."""


def parser_of(script: str) -> argparse.ArgumentParser:
    """The parser that the main function of a script makes first."""

    def leave(parser, *args, **kwargs):
        raise Parsed(parser)

    kept, argv = argparse.ArgumentParser.parse_known_args, sys.argv
    argparse.ArgumentParser.parse_known_args = leave
    sys.argv = [script]
    try:
        runpy.run_path(SCRIPTS[script], run_name="__main__")
    except Parsed as parsed:
        return parsed.args[0]
    finally:
        argparse.ArgumentParser.parse_known_args, sys.argv = kept, argv
    raise AssertionError(f"{script} has no parser")


def arguments_of(command: str, parsers: dict) -> dict[str, tuple[bool, bool, bool]]:
    """By name of each argument that takes a value: whether it is a number, is ours, and takes text."""
    if command not in parsers:
        return _arguments_of_neobert(command.split()[1])
    parser, found = parsers[command], {}
    for dataclass_type in parser.dataclass_types:
        hints = get_type_hints(dataclass_type)
        ours = {
            name
            for base in dataclass_type.__mro__
            if base.__module__.partition(".")[0] not in ("transformers", "sentence_transformers", "builtins")
            for name in inspect.get_annotations(base)
        }
        for action in parser._actions:
            if action.dest in hints and action.option_strings and not action.option_strings[0].startswith("--no_"):
                is_text = hints[action.dest] is str and action.choices is None and action.default != ""
                found[action.dest] = (_is_number(hints[action.dest]), action.dest in ours, is_text)
    return found


def _arguments_of_neobert(name: str) -> dict[str, tuple[bool, bool, bool]]:
    options = [each for each in cli.command.commands[name].params if each.param_type_name == "option"]
    hints = get_type_hints(getattr(cli, name))
    return {
        each.name: (_is_number(hints[each.name]), True, "str" in str(hints[each.name]))
        for each in options
        if each.name in hints and hints[each.name] is not bool
    }


def _is_number(hint) -> bool:
    words = str(hint)
    return ("int" in words or "float" in words) and "str" not in words and "dict" not in words


def prepare(folder: Path) -> tuple[list, dict]:
    """One case for each command, which parses all values of all arguments, and 150 cases that run a command.

    Each kind has a case in every run, so that a small share parses all of them as well.
    """
    parsers = {script: parser_of(script) for script in SCRIPTS}
    for command, required in REQUIRED.items():
        assert _parse(parsers, command, required) == (0, ""), f"REQUIRED is out of date for {command}"
    plan = [(f"arguments of {command}", command) for command in REQUIRED]
    plan += [("runs with unusual numbers", None)] * 150
    return plan, {"parsers": parsers, "bench": Workbench(folder)}


def case(kind: str, command: str | None, rng: random.Random, folder: Path, shared: dict) -> str:
    """Parse each argument of a command with each value, or run a command with one unusual number."""
    if command is None:
        return run_case(rng, folder, shared)
    results, failed = set(), []
    for name, value in itertools.product(arguments_of(command, shared["parsers"]), VALUES):
        try:
            results.add(parse_case(shared["parsers"], command, name, value))
        except Failed as reason:
            failed.append(f"{command} --{name} {value!r}: {reason}")
    if failed:
        raise Failed("; ".join(failed))
    return EXPLAINED if EXPLAINED in results else RIGHT


def parse_case(parsers: dict, command: str, name: str, value: str) -> str:
    """Parse one value of an argument; return RIGHT if it is taken, EXPLAINED if it is refused."""
    argv = [each for each in REQUIRED[command] if not each.startswith(f"--{name}=")] + [f"--{name}={value}"]
    status, errors = _parse(parsers, command, argv)
    is_number, is_ours, is_text = arguments_of(command, parsers)[name]
    is_nonsense = (
        (is_number and value not in ("0", "-1"))
        or (is_number and is_ours and value == "-1" and name not in SENTINELS)
        or (is_number and is_ours and value == "0" and name not in ZERO_IS_LEGAL)
        or (is_text and is_ours and value == "")
    )
    if status == 0:
        if is_nonsense:
            raise Failed("silently wrong: the command accepts it")
        return RIGHT
    if status != 2:
        raise Failed(f"bug: exit status {status}, {errors}")
    outcome = Outcome(status, "", errors, 0.0)
    return explained(outcome, name if name in outcome.message else value)


def _parse(parsers: dict, command: str, argv: list[str]) -> tuple[int, str]:
    """The exit status and standard error of a command that only parses, in this process."""
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            if command in parsers:
                parsers[command].parse_args_into_dataclasses(argv)
            else:
                with (
                    mock.patch.object(cli.Command, "invoke", return_value=None),
                    mock.patch("sys.argv", [*command.split(), *argv]),
                ):
                    cli.main()
        except SystemExit as end:
            return end.code, errors.getvalue()
        except Exception as error:
            return 1, f"{type(error).__name__}: {error}"
    return 0, errors.getvalue()


def run_case(rng: random.Random, folder: Path, shared: dict) -> str:
    """Run a command with one unusual number."""
    bench = shared["bench"]
    name, call = rng.choice(
        (
            ("neobert tokenize", bench.tokenize),
            ("neobert embed", bench.embed),
            ("train_contrastive.py", bench.contrastive),
            *[("pretrain_mlm.py", bench.pretrain)] * 3,
        )
    )
    kinds = arguments_of(name, shared["parsers"])
    argument = rng.choice([argument for argument, (is_number, _, _) in kinds.items() if is_number])
    value = rng.choice(["0", "-1", "1", "3", *(["1000000000"] if argument not in LONG else [])])
    home = {"shards_dir": folder / "shards"} if call == bench.pretrain else {}
    command = call(folder / "out.npy", **home | {argument: value})

    def with_limit():
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 30),) * 2)
        command()

    try:
        outcome = fork_case(with_limit, folder / "log", timeout=60)
        return RIGHT if outcome.status == 0 else explained(outcome)
    except Failed as reason:
        raise Failed(f"{name} --{argument} {value}: {reason}") from reason


FLAGS = Family("flags", prepare, case)
