"""Files as people have them, each through the script of its job: it works, or says in one line what to do."""

import csv
import importlib
import json

import pytest
from conftest import run_main
from peft import get_peft_model
from transformers import pipeline

import neobert_hf

SHORT = ["--max_steps", "2", "--report_to", "none", "--use_cpu"]
TEXTS = {
    "Störung": "Die Lampe\r\nflackert; seit gestern „{}“",
    "Rechnung": "Die Rechnung für Stück {} ist falsch, oder?",
}


def write(file, text, encoding="utf-8"):
    file.write_bytes(text.encode(encoding))
    return file


def json_lines(file, rows):
    return write(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def tickets(number=24):
    """Texts and classes, in turns."""
    return [(text.format(i), label) for i in range(number // 2) for label, text in TEXTS.items()]


def run(script, *options):
    """Run a script of examples/, or a command of `neobert`."""
    module = "neobert_cli" if script in ("embed", "search") else script
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


def test_a_spreadsheet_with_semicolons_quoted_newlines_and_a_bom_is_classified(tmp_path):
    def sheet(name, rows):
        lines = [f'"{text.replace(chr(34), chr(34) * 2)}";{label}\r\n' for text, label in rows]
        return write(tmp_path / name, f"Text;Klasse\r\n{''.join(lines)}", "utf-8-sig")

    train, test = sheet("tickets.csv", tickets()), sheet("neu.csv", tickets(6))
    columns = ["--text_columns", "Text", "--label_column", "Klasse"]
    run(
        "finetune_classifier",
        "--train_file",
        train,
        "--test_file",
        test,
        *columns,
        "--output_dir",
        tmp_path / "out",
        *SHORT,
    )
    with open(tmp_path / "out/predictions.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["Text"] for row in rows] == [text for text, _ in tickets(6)]
    assert json.loads((tmp_path / "out/config.json").read_text())["label2id"] == {"Rechnung": 0, "Störung": 1}


def test_json_lines_with_lists_of_labels_are_several_classes(tmp_path):
    labels = [["urgent", "bug"], ["bug"], [], ["invoice"]]
    rows = [{"body": f"ticket {i}", "tags": labels[i % 4]} for i in range(40)]
    train = json_lines(tmp_path / "tickets.jsonl", rows)
    columns = ["--text_columns", "body", "--label_column", "tags", "--output_dir", tmp_path / "out"]
    file = tmp_path / "predicted.jsonl"
    run(
        "finetune_classifier", "--train_file", train, "--test_file", train, *columns, "--predictions_file", file, *SHORT
    )
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    assert set(config["label2id"]) == {"urgent", "bug", "invoice"}
    predicted = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert [(row["body"], row["tags"]) for row in predicted] == [(row["body"], row["tags"]) for row in rows]


def test_a_column_of_prices_is_predicted_as_numbers(tmp_path, capsys):
    lines = "".join(f"a house with {i} rooms,{i * 1.5}\n" for i in range(1, 31))
    train = write(tmp_path / "houses.csv", f"text,price\n{lines}")
    out = run(
        "finetune_classifier",
        "--train_file",
        train,
        "--label_column",
        "price",
        "--output_dir",
        tmp_path / "out",
        *SHORT,
    )
    assert "regression" in out
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["problem_type"] == "regression" and len(config["id2label"]) == 1


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


def test_conll_with_tabs_is_tagged_in_whole_words(tmp_path):
    train = write(tmp_path / "train.conll", (CONLL + "\n") * 10)
    run("finetune_tagger", "--train_file", train, "--test_file", train, "--output_dir", tmp_path / "out", *SHORT)
    tags = {"O", "B-PER", "I-PER", "B-LOC", "I-LOC"}
    assert set(json.loads((tmp_path / "out/config.json").read_text())["label2id"]) == tags
    rows = [json.loads(line) for line in (tmp_path / "out/predictions.jsonl").read_text().splitlines()]
    assert len(rows) == 20
    assert rows[0]["words"] == ["Zoë", "Müller", "wohnt", "in", "Zürich", "."]
    assert all(set(row["prediction"]) <= tags for row in rows)
    text = "Zoë Müller wohnt in Zürich"
    found = pipeline("token-classification", str(tmp_path / "out"), aggregation_strategy="first")(text)
    assert all(text[entity["start"] : entity["end"]].strip(" ") in text for entity in found)


def notes(folder):
    """A folder of Markdown with umlauts and code, an empty file and a picture."""
    (folder / "Rezepte").mkdir(parents=True)
    write(
        folder / "Rezepte/Käse.md",
        "---\ntags: [Küche]\n---\n# Käsespätzle\n\nMehl, Eier und Käse.\n\n## Öfen\n\n180 °C.\n",
    )
    code = "```python\n# not a heading\nwith open(path) as file:\n    print(file.read())\n```\n"
    write(folder / "python.md", f"# Files\n\nRead a file line by line:\n\n{code}\n# Time\n\nWait for some seconds.\n")
    write(folder / "leer.md", "")
    (folder / "bild.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00")
    return folder


def test_a_folder_of_markdown_with_umlauts_and_code_is_searched(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (line,) = run("search", notes(tmp_path / "notes"), "sleep for a few seconds", "--json").splitlines()
    best = json.loads(line)["answers"][0]
    assert best["file"].endswith("python.md") and "Wait for some seconds." in best["text"]
    text = (tmp_path / "notes/python.md").read_text("utf-8").splitlines()
    assert text[best["line"] - 1] in best["text"]


def test_a_folder_with_texts_is_embedded_and_one_without_is_one_line(tmp_path, capsys):
    folder = notes(tmp_path / "notes")
    assert "no rows" in refusal(capsys, "embed", folder, "-o", tmp_path / "vectors.jsonl")
    write(folder / "Sätze.txt", "Öffnet eine Datei.\r\nWartet.\r\n", "utf-8-sig")
    run("embed", folder, "-o", tmp_path / "vectors.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "vectors.jsonl").read_text("utf-8").splitlines()]
    assert [row["text"] for row in rows] == ["Öffnet eine Datei.", "Wartet."]
    assert {len(row["embedding"]) for row in rows} == {256}


def squad(number=6):
    """SQuAD 2.0: every second question has no answer, and plausible ones instead."""
    paragraphs = []
    for i in range(number):
        context = f"Das Lager Nr. {i} liegt in Köln.\nEs öffnet um {i + 6} Uhr."
        answer = {"text": f"{i + 6} Uhr", "answer_start": context.index(f"{i + 6} Uhr")}
        known = {"id": f"{i}a", "question": "Wann öffnet das Lager?", "is_impossible": False, "answers": [answer]}
        unknown = {"id": f"{i}b", "question": "Wem gehört es?", "is_impossible": True, "answers": []}
        paragraphs.append({"context": context, "qas": [known, {**unknown, "plausible_answers": [answer]}]})
    return {"version": "v2.0", "data": [{"title": "Lager", "paragraphs": paragraphs}]}


def test_squad_with_impossible_answers_is_answered(tmp_path):
    train = write(tmp_path / "train-v2.0.json", json.dumps(squad(), ensure_ascii=False))
    out = tmp_path / "out"
    run("finetune_qa", "--train_file", train, "--test_file", train, "--output_dir", out, *SHORT)
    rows = [json.loads(line) for line in (out / "predictions.jsonl").read_text("utf-8").splitlines()]
    assert [row["id"] for row in rows] == [f"{i}{kind}" for i in range(6) for kind in "ab"]
    contexts = [paragraph["context"] for paragraph in squad()["data"][0]["paragraphs"]]
    assert all(row["answer"] in contexts[i // 2] for i, row in enumerate(rows))


def test_pairs_with_a_bom_train_a_reranker_and_embeddings(tmp_path):
    lines = "".join(f'"Wie alt ist Nr. {i}?";"Nr. {i} ist {i} Jahre alt, \nungefähr."\n' for i in range(40))
    pairs = write(tmp_path / "paare.csv", f"Frage;Antwort\n{lines}", "utf-8-sig")
    assert "ndcg" in run("train_reranker", "--train_file", pairs, "--output_dir", tmp_path / "a", *SHORT).lower()
    model = ["--model_name_or_path", neobert_hf.MINI_MODEL_PATH, "--per_device_train_batch_size", "8"]
    run("train_contrastive", "--train_files", pairs, "--output_dir", tmp_path / "b", *model, *SHORT)
    assert (tmp_path / "b/modules.json").is_file()


@pytest.mark.parametrize("script", ["finetune_few_shot", "finetune_lora"])
def test_the_same_spreadsheet_works_in_the_other_scripts_of_classes(script, tmp_path):
    lines = "".join(f'"{text}";{label}\n' for text, label in tickets(32))
    train = write(tmp_path / "tickets.csv", f"Text;Klasse\n{lines}", "utf-8-sig")
    columns = ["--text_columns", "Text", "--label_column", "Klasse", "--output_dir", tmp_path / "out"]
    run(script, "--train_file", train, *columns, *SHORT)
    assert any((tmp_path / "out").iterdir())


JOBS = {
    "finetune_classifier": ["--train_file", "FILE.csv"],
    "finetune_few_shot": ["--train_file", "FILE.csv"],
    "finetune_lora": ["--train_file", "FILE.csv"],
    "finetune_tagger": ["--train_file", "FILE.conll"],
    "finetune_qa": ["--train_file", "FILE.json"],
    "train_reranker": ["--train_file", "FILE.jsonl"],
    "train_contrastive": ["--model_name_or_path", neobert_hf.MINI_MODEL_PATH, "--train_files", "FILE.jsonl"],
    "search": ["FILE.md", "a question"],
    "embed": ["FILE.txt"],
}
CLASSES = ["finetune_classifier", "finetune_few_shot", "finetune_lora"]


def job(script, folder):
    """Options of a job without its file, and the file that it reads."""
    given = [folder / word if word.startswith("FILE") else word for word in JOBS[script]]
    (file,) = (word for word in given if word in folder.parents or getattr(word, "stem", "") == "FILE")
    output = {"search": [], "embed": ["-o", folder / "vectors.npy"]}.get(
        script, ["--output_dir", folder / "out", *SHORT]
    )
    return [*given, *output], file


def left_over(folder):
    """Names of the files below a folder, without the cache and the lock of a run."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != "_lock")
    return {file.name for file in files if "cache" not in file.relative_to(folder).parts}


@pytest.mark.parametrize("script", JOBS)
@pytest.mark.parametrize("content", ["", "\ufeff", " \n\n"], ids=["empty", "BOM alone", "white space"])
def test_an_empty_file_is_one_line(script, content, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    if script == "embed" and content:
        pytest.skip("neobert embed reads each line of a .txt file as a text, also one without words")
    options, file = job(script, tmp_path)
    write(file, content)
    assert file.name in refusal(capsys, script, *options)
    assert left_over(tmp_path) == {file.name}


@pytest.mark.parametrize("script", JOBS)
def test_a_file_that_is_missing_is_one_line(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    options, file = job(script, tmp_path)
    assert file.name in refusal(capsys, script, *options)
    assert not left_over(tmp_path)


BAD_ROWS = {
    "one class only": ("text,label\n" + "a text,good\n" * 20, "good"),
    "labels missing in half of the rows": ("text,label\n" + "a text,good\nanother,\nthird,bad\nlast,\n" * 8, "16"),
    "texts missing": ("text,label\n" + "a text,good\n,bad\nthird,bad\n" * 8, "line 3"),
    "no such column": ("body,label\n" + "a text,good\nb,bad\n" * 8, "body"),
    "a class for every row": ("text,label\n" + "".join(f"text {i},class {i}\n" for i in range(20)), "class"),
}


@pytest.mark.parametrize("script", CLASSES)
@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows_of_classes_are_one_line(script, case, tmp_path, capsys):
    options, file = job(script, tmp_path)
    content, word = BAD_ROWS[case]
    write(file, content)
    assert word in refusal(capsys, script, *options)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("script", CLASSES)
def test_a_column_of_numbers_is_no_column_of_texts(script, tmp_path, capsys):
    rows = json_lines(tmp_path / "rows.jsonl", [{"text": i, "label": i % 2} for i in range(20)])
    line = refusal(capsys, script, "--train_file", rows, "--output_dir", tmp_path / "out", *SHORT)
    assert "text" in line and list(tmp_path.iterdir()) == [rows]


def test_a_file_of_a_western_windows_encoding_is_one_line_that_names_utf_8(tmp_path, capsys):
    train = write(tmp_path / "tickets.csv", "text;label\nfür dich;gut\nnicht schön;schlecht\n" * 8, "cp1252")
    line = refusal(capsys, "finetune_classifier", "--train_file", train, "--output_dir", tmp_path / "out", *SHORT)
    assert "UTF-8" in line and list(tmp_path.iterdir()) == [train]


def test_a_test_file_without_labels_is_predicted_and_a_class_that_nobody_learned_is_one_line(tmp_path, capsys):
    rows = "".join(
        f"{text.split(';')[0]},{label}\n" for text, label in [("good day", "gut"), ("bad day", "schlecht")] * 10
    )
    train = write(tmp_path / "train.csv", f"text,label\n{rows}")
    unlabelled, unknown = (
        write(tmp_path / "a.csv", "text\nhello\n"),
        write(tmp_path / "b.csv", "text,label\nhello,neu\n"),
    )
    model = tmp_path / "model"
    run("finetune_classifier", "--train_file", train, "--output_dir", model, *SHORT)
    alone = ["--model_name_or_path", model, "--output_dir", tmp_path / "out", "--report_to", "none", "--use_cpu"]
    run("finetune_classifier", "--test_file", unlabelled, *alone)
    assert len((tmp_path / "out/predictions.csv").read_text().splitlines()) == 2
    assert not (tmp_path / "out/model.safetensors").exists()
    (tmp_path / "out/predictions.csv").unlink()
    assert "neu" in refusal(capsys, "finetune_classifier", "--test_file", unknown, *alone)
    assert not (tmp_path / "out/predictions.csv").exists()


@pytest.mark.parametrize("case", ["no file", "pictures", "empty files", "a question without words", "no question mark"])
def test_a_folder_without_text_and_a_question_without_words_are_one_line(case, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder, question = tmp_path / "notes", "a question"
    folder.mkdir()
    if case == "pictures":
        (folder / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00")
    elif case == "empty files":
        write(folder / "a.md", ""), write(folder / "b.txt", " \n")
    elif case == "a question without words":
        write(folder / "a.md", "# A text\n\nwith words\n")
        question = "   "
    elif case == "no question mark":
        write(folder / "a.md", "# A text\n\nwith words\n")
        question = "?!"
    refusal(capsys, "search", folder, question, "--json")


def pdf(file):
    """A PDF with one empty page."""
    objects = ["<</Type/Catalog/Pages 2 0 R>>", "<</Type/Pages/Kids[3 0 R]/Count 1>>"]
    objects.append("<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]>>")
    body = "%PDF-1.4\n" + "".join(f"{i} 0 obj{content}endobj\n" for i, content in enumerate(objects, 1))
    return write(file, body + "trailer<</Root 1 0 R/Size 4>>\n%%EOF\n")


def test_a_pdf_without_text_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    pdf(tmp_path / "scan.pdf")
    assert "scan.pdf" in refusal(capsys, "search", tmp_path / "scan.pdf", "a question")


BAD_SQUAD = {
    "an answer at another place": lambda data: data["paragraphs"][0]["qas"][0]["answers"][0].update(answer_start=1),
    "an answer that is not in the text": lambda data: data["paragraphs"][0]["qas"][0]["answers"][0].update(text="nie"),
    "no context": lambda data: data["paragraphs"][1].pop("context"),
    "no answers": lambda data: data["paragraphs"][1]["qas"][0].pop("answers"),
    "a question without words": lambda data: data["paragraphs"][1]["qas"][0].update(question=" "),
}


@pytest.mark.parametrize("case", BAD_SQUAD)
def test_a_wrong_file_of_questions_is_one_line(case, tmp_path, capsys):
    data = squad()
    BAD_SQUAD[case](data["data"][0])
    train = write(tmp_path / "train.json", json.dumps(data))
    line = refusal(capsys, "finetune_qa", "--train_file", train, "--output_dir", tmp_path / "out", *SHORT)
    assert "paragraph" in line and list(tmp_path.iterdir()) == [train]


BAD_CONLL = {
    "a word without a tag": CONLL + "\nWort\n",
    "one tag only": "\n".join(f"Wort{i} O" for i in range(9)) + "\n\nWort O\n\nZwei O\n",
    "windows without an end": "\x00",
}


@pytest.mark.parametrize("case", BAD_CONLL)
def test_a_wrong_file_of_tags_is_one_line(case, tmp_path, capsys):
    train = write(tmp_path / "train.conll", BAD_CONLL[case])
    refusal(capsys, "finetune_tagger", "--train_file", train, "--output_dir", tmp_path / "out", *SHORT)
    assert list(tmp_path.iterdir()) == [train]


def test_an_adapter_of_another_base_model_is_one_line(tmp_path, tiny_config, capsys):
    other = neobert_hf.NeoBERTForSequenceClassification(tiny_config)
    get_peft_model(other, neobert_hf.lora_config("SEQ_CLS", r=4)).save_pretrained(tmp_path / "adapter")
    rows = "".join("good day,gut\nbad day,schlecht\n" for _ in range(8))
    train = write(tmp_path / "train.csv", f"text,label\n{rows}")
    options = ["--model_name_or_path", tmp_path / "adapter", "--output_dir", tmp_path / "out", *SHORT]
    line = refusal(capsys, "finetune_classifier", "--train_file", train, *options)
    assert "adapter" in line and not (tmp_path / "out").exists()
