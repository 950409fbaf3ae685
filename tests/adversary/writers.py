"""Places that are written twice: what somebody else has put there stays, or is replaced whole where this was asked for."""

import contextlib
import io
import random
from collections.abc import Callable
from pathlib import Path

from adversary.machinery import EXPLAINED, RIGHT, Failed, Family
from adversary.workbench import Workbench
from conftest import contents

from neobert_hf.checkpoints import convert, write_card
from neobert_hf.data import write_wordpiece
from neobert_hf.embeddings.vector_files import embed_files
from neobert_hf.finetuning import Classifier, Tagger, write_predictions

TEXTS, LABELS = ["open a file", "sort the list", "read a line", "order all words"] * 3, ["open", "sort"] * 6
FAST = {"use_cpu": True, "disable_tqdm": True, "max_steps": 1}
MINE = ("thesis.txt", "train.csv", "README.md", "config.json", "training.json", "1_Pooling/config.json", "notes/a.md")


def prepare(bench: Workbench) -> tuple[list, dict]:
    """48 cases: jobs that are saved twice, and files and folders of commands."""
    model = str(bench.references["the build for the Hub"].folder)
    with contextlib.redirect_stdout(io.StringIO()):
        words = [text.split() for text in TEXTS]
        tags = [["O"] * len(row) for row in words[:-1]] + [["B-X", "O", "O"]]
        jobs = [Classifier(model, 16).fit(TEXTS, LABELS, **FAST), Tagger(model, 16).fit(words, tags, **FAST)]
    cases = [("jobs that are saved twice", save_twice)] * 18 + [("places with files of others", over_mine)] * 30
    return cases, {"model": model, "jobs": jobs}


def case(_, run: Callable, rng: random.Random, folder: Path, shared: dict) -> str:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return run(rng, folder, shared)


def save_twice(rng: random.Random, folder: Path, shared: dict) -> str:
    """Save one job, perhaps its card, a file of its user, and then another job, with and without `overwrite`."""
    place, fresh = folder / "model", folder / "fresh"
    first, second = rng.sample(shared["jobs"], 2)
    first.save(place)
    if rng.random() < 0.7:
        write_card(place)
    has_mine = rng.random() < 0.4
    if has_mine:
        (place / "thesis.txt").write_text("years of work")
    before = contents(place)
    refused(lambda: second.save(place), place, before)
    if has_mine:
        refused(lambda: second.save(place, overwrite=True), place, before)
        return EXPLAINED
    second.save(place, overwrite=True)
    second.save(fresh)
    if contents(place) != contents(fresh):
        raise Failed("a folder that was written over another model differs from a new one")
    return RIGHT


def over_mine(rng: random.Random, folder: Path, shared: dict) -> str:
    """Let a command write where a file of its user stands: as a file, in a folder, or behind a link."""
    model, job, text = shared["model"], rng.choice(shared["jobs"]), folder / "a.txt"
    text.write_text("\n".join(TEXTS))
    writers = {
        "vectors.npy": lambda place: embed_files([str(text)], str(place), model),
        "vectors.jsonl": lambda place: embed_files([str(text)], str(place), model),
        "predictions.csv": lambda place: write_predictions(place, [{"prediction": "a"}]),
        "predictions.parquet": lambda place: write_predictions(place, [{"prediction": "a"}]),
        "tokenizer": lambda place: write_wordpiece(TEXTS, place, 60),
        "converted": lambda place: convert(model, place),
        "job": job.save,
    }
    name, way = rng.choice([*writers]), rng.choice(("content", "link", "again"))
    place, write = folder / "out" / name, writers[name]
    place.parent.mkdir()
    if way == "again":
        write(place)
    else:
        target = folder / "mine" if way == "link" else place
        mine = target if "." in name else target / rng.choice(MINE)
        mine.parent.mkdir(parents=True, exist_ok=True)
        mine.write_text("years of work")
        if way == "link":
            place.symlink_to(target)
    refused(lambda: write(place), folder, contents(folder))
    return EXPLAINED


def refused(call: Callable, folder: Path, before: dict) -> None:
    """Raise `Failed` unless the call is refused in one line and changes nothing."""
    try:
        call()
    except FileExistsError as error:
        if "\n" in str(error) or contents(folder) != before:
            raise Failed(f"lost, or several lines: {error}") from error
        return
    raise Failed("somebody's file was replaced")


WRITERS = Family("writers", prepare, case)
