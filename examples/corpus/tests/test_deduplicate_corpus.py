"""Near-duplicates go, one of each group stays, and every other row is unchanged."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import run_main

# MinHash of datatrove needs huggingface_hub 1, and transformers 4 needs an older one.
example = pytest.importorskip("deduplicate_corpus", exc_type=ImportError)

RNG = random.Random(0)
WORDS = ["".join(RNG.choices("abcdefghij", k=6)) for _ in range(2000)]


def test_planted_near_duplicates_go_and_other_rows_stay_unchanged(tmp_path):
    texts = [RNG.choices(WORDS, k=100) for _ in range(30)]
    halves = [text[:50] + other[50:] for text, other in pairwise(texts)]  # a third of the runs agree
    changed = [[*text[:60], "another", *text[61:]] for text in texts]  # nine tenths of them
    near = [" ".join(text) for text in changed[:15]] + [" ".join(text).upper() + "!" for text in texts[15:]]
    rows = [{"id": i, "text": " ".join(text), "more": [None, "é"]} for i, text in enumerate(texts + halves)]
    rows += [{"text": "too short"}, {"text": ""}, {"text": "too short"}]
    planted = [{"id": -1, "text": text} for text in near]
    for name, part in (("a", rows), ("b", planted[:20]), ("c", planted[20:] + rows[:1])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    files = [tmp_path / f"{name}.jsonl" for name in "abc"]
    printed = run_main(example, *files, "--output_dir", tmp_path / "unique")
    wanted = {"folder": str(tmp_path / "unique"), "rows": len(rows) + 31, "removed": 31}
    assert json.loads(printed) == wanted
    kept = [Path(tmp_path, "unique", f"0000{i}.jsonl").read_text().splitlines() for i in range(3)]
    assert [list(map(json.loads, lines)) for lines in kept] == [rows, [], []]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "c.jsonl", "unique"]


@pytest.mark.parametrize(
    ("content", "files", "line"),
    [
        ('{"text": "a"}\n{"text"\n', ["a.jsonl"], "a.jsonl, line 2"),
        ('{"body": "a"}\n', ["a.jsonl"], "a.jsonl, line 1: no text in the column 'text'; name another --text_column"),
        ('{"text": 1}\n', ["a.jsonl"], "a.jsonl, line 1: no text in the column 'text'"),
        ('{"text": "a"}\n', ["a.jsonl", "--output_dir", "."], ". exists; choose a new folder"),
        ('{"text": "a"}\n', ["a.jsonl", "none.jsonl"], "none.jsonl"),
    ],
)
def test_bad_input_gives_one_line_and_no_folder(tmp_path, monkeypatch, content, files, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(SystemExit) as ended:
        run_main(example, "--output_dir", "out", *files)
    assert line in ended.value.code and "\n" not in ended.value.code
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]
