"""Labels of people: the classes are those of the rows before they were spoiled, and each fault is one line that names it."""

import contextlib
import csv
import gzip
import io
import json
import logging
import random
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
from adversary.machinery import EXPLAINED, RIGHT, Failed, Family

from neobert_hf.finetuning import LabelledTextArguments, read_labelled_texts

NAMES = ("billing", "on time", "größe", "漢字", "B-side", "Bug report", "no", "level 3", "007")
EDGES = (" ", "  ", "\xa0", "\u200b", "\ufeff", "\u3000", "\u2009\u200e")
# What the one line of each fault says, whatever else it says.
CASE, CONFLICT, NUMBERS = "upper and lower case", "several labels", "regression"


def prepare(_) -> tuple[list, None]:
    """160 cases: rows of each format, with some of the faults."""
    return [(kind, suffix) for kind, suffix in FORMATS.items() for _ in range(40)], None


def case(_, suffix: str, rng: random.Random, folder: Path, shared: None) -> str:
    """Spoil rows, read them as rows of training, validation and test, and compare them with the rows as they were."""
    rows, must_say = draw_rows(rng)
    spoiled = [(text, rng.choice(EDGES) * rng.randint(0, 1) + name + rng.choice(EDGES)) for text, name in rows]
    spoiled = [pair if rng.random() < 0.5 else row for pair, row in zip(spoiled, rows)]
    file, said = write(folder / f"rows{suffix}", spoiled, rng), io.StringIO()
    logging.getLogger().addHandler(logging.StreamHandler(said))
    with contextlib.redirect_stdout(said):
        found = read_labelled_texts(LabelledTextArguments(str(file), str(file), str(file)), 0, None)
    for split in (found.train, found.validation, found.test):
        if list(zip(*split)) != rows:
            raise Failed(f"silently wrong: {set(zip(*split)) ^ set(rows)}")
    if set(found.classes) != {name for _, name in rows} or len(found.test_rows) != len(rows):
        raise Failed(f"silently wrong: the classes are {found.classes}")
    for mark in (CASE, CONFLICT, NUMBERS):
        marked = [line for line in said.getvalue().splitlines() if mark in line]
        if len(marked) != (mark in must_say):
            raise Failed(f"{len(marked)} lines of {mark!r}: {said.getvalue()!r}")
        if missing := [part for part in must_say.get(mark, ()) for line in marked if part not in line]:
            raise Failed(f"{missing} is not in {marked}")
    return EXPLAINED if must_say else RIGHT


def draw_rows(rng: random.Random) -> tuple[list[tuple[str, str]], dict[str, list[str]]]:
    """Texts with labels, perhaps with a class in two cases or a text with two labels; and what the lines must say."""
    numbers = rng.choice((None, None, "{}", "{}.5 €", "{}/5", "{} stars", "EUR {},50"))
    count, must_say = rng.randint(3, 5), {NUMBERS: []} if numbers else {}
    names = [numbers.format(i + 1) for i in range(count)] if numbers else rng.sample(NAMES, count)
    rows = [(f"text {i} of a person", names[i % count]) for i in range(count * rng.randint(6, 9))]
    shouted = rng.choice(names)
    has_two_cases = not numbers and shouted.upper() != shouted
    if has_two_cases and rng.random() < 0.5:
        number = next(i for i, (_, name) in enumerate(rows) if name == shouted)
        rows[number] = (rows[number][0], shouted.upper())
    if rng.random() < 0.4:
        for number, (text, name) in enumerate(rng.sample(rows, rng.randint(1, 3)), 1):
            other = next(each for each in names if each.casefold() != name.casefold())
            rows.insert(rng.randrange(len(rows)), (text.replace(" ", rng.choice((" ", "  ", "\xa0"))), other))
            must_say[CONFLICT] = [f"({number})", "text "]
    counts = Counter(name for _, name in rows)
    if has_two_cases and counts[shouted.upper()]:
        must_say[CASE] = [f"{name!r} ({counts[name]})" for name in (shouted, shouted.upper())]
    return rows, must_say


def write(file: Path, rows: list[tuple[str, str]], rng: random.Random) -> Path:
    """Write rows as people do: some compressed, some with a byte order mark, semicolons or Windows' line ends."""
    dicts = [{"text": text, "label": label} for text, label in rows]
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(dicts), file)
        return file
    stream, end = io.StringIO(newline=""), rng.choice(("\n", "\r\n"))
    if file.suffix == ".jsonl":
        stream.writelines(json.dumps(row, ensure_ascii=rng.random() < 0.5) + end for row in dicts)
    elif file.suffix == ".tsv":
        stream.writelines("\t".join(row) + end for row in [("text", "label"), *rows])
    else:
        writer = csv.writer(stream, delimiter=rng.choice(",;"), lineterminator=end)
        writer.writerows([("text", "label"), *rows])
    content = stream.getvalue().encode(rng.choice(("utf-8", "utf-8-sig")))
    if rng.random() < 0.2:
        file, content = file.with_name(f"{file.name}.gz"), gzip.compress(content)
    file.write_bytes(content)
    return file


SUFFIXES = {"CSV": ".csv", "TSV": ".tsv", "JSON lines": ".jsonl", "Parquet": ".parquet"}
FORMATS = {f"labels of people in {name}": suffix for name, suffix in SUFFIXES.items()}
LABELS = Family("labels", prepare, case)
