"""Damaged files: the command uses an older complete state and gives the right result, or an error names the file."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from adversary.interruptions import check_result, kill, start_again
from adversary.machinery import RIGHT, Failed, Family, at_event, explained, fork_case
from adversary.workbench import Workbench
from transformers import AutoModelForMaskedLM, AutoTokenizer

from neobert_hf.files.errors import run_command

COUNTS = {
    "checkpoints of pretraining": 40, "checkpoints of contrastive training": 25,
    "documents and their manifest": 25, "unfinished documents": 25, "weights and config for the Hub": 20,
}  # fmt: skip
USES = {  # the run whose result a damage must not change
    "checkpoints of pretraining": "pretraining",
    "checkpoints of contrastive training": "contrastive training",
    "documents and their manifest": "pretraining",
    "unfinished documents": "tokenizing",
}


def prepare(bench: Workbench) -> tuple[list, dict]:
    whole = bench.references
    templates = {name: bench.folder / f"damaged-{i}" for i, name in enumerate(COUNTS)}
    _stop_after(templates["checkpoints of pretraining"] / "out", whole["pretraining"].folder, "checkpoint-12")
    contrastive = templates["checkpoints of contrastive training"] / "out"
    _stop_after(contrastive, whole["contrastive training"].folder, "checkpoint-8")
    shutil.copytree(bench.folder / "documents", templates["documents and their manifest"] / "documents")
    _interrupt_tokenizing(bench, templates["unfinished documents"] / "out")
    shutil.copytree(whole["the build for the Hub"].folder, templates["weights and config for the Hub"])
    logits = bench.finish(_load(templates["weights and config for the Hub"]), "load").output
    shared = {"bench": bench, "templates": templates, "logits": logits}
    return [(f"damage to {name}", name) for name, count in COUNTS.items() for _ in range(count)], shared


def _stop_after(folder: Path, whole: Path, last: str) -> None:
    """Copy a run without its last checkpoint and its final model."""
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / last)
    for file in folder.iterdir():
        if file.is_file() and file.name not in ("run.json", "metrics.jsonl"):
            file.unlink()


def _interrupt_tokenizing(bench: Workbench, folder: Path) -> None:
    """Run some of the ten tasks, and write no manifest."""
    folder.parent.mkdir()
    fork_case(at_event(bench.tokenize(folder, workers=1), folder, 60, kill(0)), folder.with_name("log"))
    if (folder / "manifest.json").exists() or not list(folder.glob("records/*.json")):
        raise Failed("error in this test: tokenizing did not stop between its first task and its manifest")


def cut(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.choice((0, len(content) // 2, len(content) - 1, rng.randrange(len(content))))]


def junk(rng: random.Random, content: bytes) -> bytes:
    return rng.choice((b"{}", b"[]", b"null", b"\xff\xfe\x00", content + b"0"))


def damage(rng: random.Random, folder: Path, files: list[Path]) -> str:
    """Damage one of the files; return its name and the damage.

    A checkpoint and documents are compared by names and sizes, so each damage changes one of them.
    """
    file = rng.choice(files)
    way = rng.choice((cut, cut, junk, "removed", "swapped"))
    name, size = file.relative_to(folder), file.stat().st_size
    if way == "removed":
        file.unlink()
    elif way == "swapped":
        other = rng.choice([each for each in files if each.stat().st_size != size])
        mine, theirs = file.read_bytes(), other.read_bytes()
        file.write_bytes(theirs)
        other.write_bytes(mine)
        name = f"{name} with {other.relative_to(folder)}"
    else:
        file.write_bytes(way(rng, file.read_bytes()))
        way = way.__name__
    return f"{name}: {way}"


def case(_, name: str, rng: random.Random, folder: Path, shared: dict) -> str:
    bench = shared["bench"]
    copy = folder / "copy"
    shutil.copytree(shared["templates"][name], copy)
    is_hub = name == "weights and config for the Hub"
    files = [copy / "model.safetensors", copy / "config.json"] if is_hub else copy.rglob("*")
    done = damage(rng, copy, sorted(file for file in files if file.is_file() and file.stat().st_size))
    try:
        return _use(name, bench, copy, shared)
    except Failed as reason:
        raise Failed(f"{done}: {reason}") from reason


def _use(name: str, bench: Workbench, copy: Path, shared: dict) -> str:
    out = copy / "out"
    if name == "weights and config for the Hub":
        outcome = fork_case(_load(copy), copy / "log")
        if outcome.status:
            return explained(outcome, str(copy))
        if outcome.output != shared["logits"]:
            raise Failed(f"silently wrong: {outcome.output!r}, not {shared['logits']!r}")
        return RIGHT
    run, named = USES[name], str(out)
    if name.startswith("checkpoints"):
        outcome = start_again(bench, run, out)
    elif name == "unfinished documents":
        outcome = fork_case(bench.tokenize(out), copy / "log")
    else:
        outcome, named = fork_case(bench.pretrain(out, documents_dir=copy / "documents"), copy / "log"), str(copy)
    if outcome.status:
        return explained(outcome, named)
    check_result(run, out, bench.references[run])
    return RIGHT


def _load(folder: Path) -> Callable[[], None]:
    def run():
        model, tokenizer = AutoModelForMaskedLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
        with torch.no_grad():
            print(model(**tokenizer("the quick brown fox", return_tensors="pt")).logits.sum((0, 1)).tolist())

    return lambda: run_command("load", run)


DAMAGE = Family("damage", prepare, case)
