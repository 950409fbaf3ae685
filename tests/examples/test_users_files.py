"""Files as people have them, each through the script of its job: it works, or says in one line what to do."""

import importlib
import json
import re

import pytest
from conftest import run_main

import neobert_hf
from neobert_hf.embeddings import search

SHORT = ["--max_steps", "2", "--report_to", "none", "--use_cpu"]
TEXTS = {
    "Störung": "Die Lampe\r\nflackert; seit gestern „{}“",
    "Rechnung": "Die Rechnung für Stück {} ist falsch, oder?",
}


def write(file, content, encoding="utf-8"):
    file.write_bytes(content if isinstance(content, bytes) else content.encode(encoding))
    return file


def run(script, *options):
    """Run a script of examples/, or a command of `neobert`."""
    module = "neobert_cli.commands" if script in ("embed", "search") else script
    return run_main(importlib.import_module(module), *([script] if module != script else []), *options)


def refusal(capsys, script, *options):
    """The only line of a command that ends with status 1 or 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        run(script, *options)
    lines = [line for line in capsys.readouterr().err.splitlines() if line and "|" not in line]  # without progress bars
    if isinstance(end.value.code, str):  # Python prints it, and ends with status 1
        lines += end.value.code.splitlines()
    else:
        assert end.value.code in (1, 2)
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize("mine", ["train.csv", "other.csv", "thesis.jsonl"])
def test_predictions_replace_no_file_of_the_user(tmp_path, capsys, mine):
    """The error comes before the training."""
    rows = "".join(f"{word} number {i},{word}\n" for i in range(6) for word in ("open", "sort"))
    train, other = (write(tmp_path / name, f"text,label\n{rows}") for name in ("train.csv", "other.csv"))
    files = ["--train_file", train, "--test_file", other, "--output_dir", tmp_path / "out", *SHORT]
    write(tmp_path / "thesis.jsonl", "years of work")
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(SystemExit) as error:
        run("finetune_classifier", *files, "--predictions_file", tmp_path / "out/.." / mine)
    assert error.value.code == 2 and "name another" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


CONLL = """-DOCSTART-\t-X-\tO\tO

Zoë\tNNP\tB-NP\tB-PER
Müller\tNNP\tI-NP\tI-PER
wohnt\tVB\tB-VP\tO
in\tIN\tB-PP\tO
Zürich\tNNP\tB-NP\tB-LOC
.\t.\tO\tO

float32\tNN\tB-NP\tO
kostet\tVB\tB-VP\tO
12,50\tCD\tB-NP\tO
€\tNN\tI-NP\tO
"""


def squad(number=6, **change):
    """SQuAD 2.0: every second question has no answer, and plausible ones instead; `change` is for the first question."""
    paragraphs = []
    for i in range(number):
        context = f"Das Lager Nr. {i} liegt in Köln.\nEs öffnet um {i + 6} Uhr."
        answer = {"text": f"{i + 6} Uhr", "answer_start": context.index(f"{i + 6} Uhr")}
        known = {"id": f"{i}a", "question": "Wann öffnet das Lager?", "is_impossible": False, "answers": [answer]}
        known |= change if i == 0 else {}
        unknown = {"id": f"{i}b", "question": "Wem gehört es?", "is_impossible": True, "answers": []}
        paragraphs.append({"context": context, "qas": [known, {**unknown, "plausible_answers": [answer]}]})
    return json.dumps({"version": "v2.0", "data": [{"title": "Lager", "paragraphs": paragraphs}]}, ensure_ascii=False)


def test_squad_with_impossible_answers_is_answered(start, tmp_path):
    train = write(tmp_path / "train-v2.0.json", squad())
    out = tmp_path / "out"
    files = ["--train_file", train, "--test_file", train, "--output_dir", out]
    run("finetune_qa", "--model_name_or_path", start, *files, "--max_seq_length", 64, *SHORT)
    rows = [json.loads(line) for line in (out / "predictions.jsonl").read_text("utf-8").splitlines()]
    assert [row["id"] for row in rows] == [f"{i}{kind}" for i in range(6) for kind in "ab"]
    contexts = [paragraph["context"] for paragraph in json.loads(squad())["data"][0]["paragraphs"]]
    assert all(row["answer"] in contexts[i // 2] for i, row in enumerate(rows))


@pytest.mark.slow
def test_pairs_with_a_bom_train_a_reranker_and_embeddings(tmp_path):
    lines = "".join(f'"Wie alt ist Nr. {i}?";"Nr. {i} ist {i} Jahre alt, \nungefähr."\n' for i in range(40))
    pairs = write(tmp_path / "paare.csv", f"Frage;Antwort\n{lines}", "utf-8-sig")
    assert "ndcg" in run("train_reranker", "--train_file", pairs, "--output_dir", tmp_path / "a", *SHORT).lower()
    model = ["--model_name_or_path", neobert_hf.MINI_MODEL_PATH, "--per_device_train_batch_size", "8"]
    run("train_contrastive", "--train_files", pairs, "--output_dir", tmp_path / "b", *model, *SHORT)
    assert (tmp_path / "b/modules.json").is_file()


# The suffix of the file that a job reads, and the words before and after it.
TRAINING = ["--output_dir", "out", *SHORT]
JOBS = {
    "finetune_classifier": (".csv", ["--train_file"], TRAINING),
    "finetune_lora": (".csv", ["--train_file"], TRAINING),
    "finetune_tagger": (".conll", ["--train_file"], TRAINING),
    "finetune_qa": (".json", ["--train_file"], TRAINING),
    "train_reranker": (".jsonl", ["--train_file"], TRAINING),
    "train_contrastive": (".jsonl", ["--model_name_or_path", neobert_hf.MINI_MODEL_PATH, "--train_files"], TRAINING),
    "search": (".md", [], ["a question"]),
    "embed": (".txt", [], ["-o", "vectors.npy"]),
}
NUMBERS = "".join(json.dumps({"text": i, "label": i % 2}) + "\n" for i in range(20))
LABELS_MISSING = "text,label\n" + "a text,good\nanother,\nthird,bad\nlast,\n" * 8
# Suffix of the file, its content (None: there is no file), and what the line says.
BAD_ROWS = [
    (".csv", "text,label\n" + "a text,good\n" * 20, "label 'good'"),
    (".csv", LABELS_MISSING, "16 of 32 .*FILE.csv, line 3: .*label.*skip_bad_rows"),
    (".csv", "text,label\n" + "a text,good\n,bad\nthird,bad\n" * 8, "8 of 24 .*FILE.csv, line 3: 'text'"),
    (".csv", "body,label\n" + "a text,good\nb,bad\n" * 8, "no column 'text' .*body"),
    (".csv", "text,label\n" + "".join(f"text {i},class {i}\n" for i in range(20)), "20 classes"),
    (".jsonl", NUMBERS, "20 of 20 .*FILE.jsonl, line 1: 'text' is 0"),
]
REFUSED = [
    *(
        (script, suffix, content, "FILE")
        for script, (suffix, *_) in JOBS.items()
        for content in ("", "\ufeff", " \n\n")
    ),
    *((script, suffix, None, rf"FILE{suffix}'.* No such|No such .*FILE{suffix}'$") for script, (suffix, *_) in JOBS.items()),
    *(("finetune_classifier", *bad) for bad in BAD_ROWS),
    ("finetune_classifier", ".csv", "text;label\nfür dich;gut\nnicht schön;schlecht\n".encode("cp1252"),
     "FILE.csv, line 2 is not UTF-8; save it as UTF-8"),
    ("finetune_tagger", ".conll", CONLL + "\nWort\n", "line 15: 1 columns"),
    ("finetune_tagger", ".conll", "".join(f"Wort{i} O\n" for i in range(9)) + "\nWort O\n\nZwei O\n", "label 'O'"),
    ("finetune_tagger", ".conll", "\x00", "FILE.conll has one column"),
    ("finetune_qa", ".json", squad(answers=[{"text": "6 Uhr", "answer_start": 1}]),
     "paragraph 1, question 1: .*it is at 44"),
    ("finetune_qa", ".json", squad(answers=[{"text": "nie", "answer_start": 1}]), "paragraph 1, question 1: .*nowhere"),
    ("finetune_qa", ".json", squad(answers=None), "paragraph 1, question 1: 'answers' is missing"),
    ("finetune_qa", ".json", squad(question=" "), "paragraph 1, question 1: 'question' is empty"),
]  # fmt: skip


@pytest.mark.parametrize(("script", "suffix", "content", "message"), REFUSED)
def test_bad_input_is_one_line_and_nothing_is_written(script, suffix, content, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(search, "CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    _, before, after = JOBS[script]
    if content is not None:
        write(tmp_path / f"FILE{suffix}", content)
    line = refusal(capsys, script, *before, f"FILE{suffix}", *after)
    assert re.search(message, line), line
    files = {file.name for file in tmp_path.rglob("*") if file.is_file() and file.parent.name != "cache"}
    assert files == ({f"FILE{suffix}"} if content is not None else set())
