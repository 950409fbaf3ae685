"""`neobert search`: which files are read, where passages begin, what is embedded again, and which passages answer."""

import base64
import hashlib
import io
import json
import os
import random
import re
import stat
import sys
import time
import unicodedata
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("bm25s", reason="neobert search needs it (pip install -e .[embed])")

from conftest import SENTENCE, run_main
from sentence_transformers import SentenceTransformer

from neobert_cli import commands as neobert_cli
from neobert_hf.data.finding import find_files
from neobert_hf.embeddings import kept, passages, search
from neobert_hf.embeddings.passages import is_document
from neobert_hf.embeddings.search import DocumentSearch

WORDS = SENTENCE.split()


@pytest.fixture
def model(folder):
    return folder


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """A folder of Markdown with umlauts, code, a byte order mark and line ends of Windows; each line is unique."""
    monkeypatch.setattr(search, "CACHE", tmp_path / "cache")
    folder = tmp_path / "notes"
    (folder / "sub").mkdir(parents=True)
    for number in range(4):
        lines = [f"# Übung {number}", "", *(f"Größe {number} {i} the old fox" for i in range(12)), ""]
        lines += ["```python", f"def öffne_{number}(datei):", "    return open(datei)  # ñ 漢字", "```", ""]
        lines += [f"## Schluss {number}", "", " ".join(f"{word}{number}" for word in WORDS), ""]
        text = ("\r\n" if number == 1 else "\n").join(lines)
        file = folder / ("sub" if number > 1 else "") / f"{number}.md"
        file.write_bytes(text.encode("utf-8-sig" if number == 2 else "utf-8"))
    return folder


@pytest.fixture
def embedded(monkeypatch):
    texts, encode = [], SentenceTransformer.encode_document

    def counted(self, sentences, **options):
        texts.extend(sentences)
        return encode(self, sentences, **options)

    monkeypatch.setattr(SentenceTransformer, "encode_document", counted)
    return texts


def open_search(folder, model, **options):
    return DocumentSearch([str(folder)], model=model, max_length=24, **options)


def command(*arguments):
    return run_main(neobert_cli, "search", *arguments)


def check_places(found):
    """Each passage stands in its file where it says, in an independent reading of the file."""
    for passage in found:
        lines = Path(passage.file).read_bytes().decode("utf-8-sig").replace("\r\n", "\n").split("\n")
        rest = "\n".join(lines[passage.line - 1 :])
        assert passage.text in rest
        assert rest.index(passage.text) <= len(lines[passage.line - 1])  # it begins in this line


def test_a_passage_begins_in_the_line_that_it_names_and_fits_the_model(notes, model):
    found = open_search(notes, model).passages
    check_places(found)
    tokenizer = SentenceTransformer(model).tokenizer
    lengths = [len(tokenizer(passage.text, truncation=False)["input_ids"]) for passage in found]
    assert max(lengths) <= 24 and np.mean(lengths) > 8
    assert len({(passage.file, passage.line) for passage in found}) > 20


def test_passages_cover_every_word_of_every_file(notes, model, monkeypatch):
    """Also if a file is read in many parts, and if a line is longer than a part."""
    (notes / "long.txt").write_text("a short line\n" + "ü longest line of all " * 40 + "\nthe end\n" * 30)
    monkeypatch.setattr(passages, "PARTS", re.compile(r"(?s).{1,100}\Z|.{1,99}\n|.{1,100}"))
    monkeypatch.setattr(passages, "NUM_TEXTS", 3)
    found = open_search(notes, model).passages
    check_places(passage for passage in found if not passage.file.endswith("long.txt"))
    for file in find_files([str(notes)], is_document)[0]:
        text = "".join(passage.text for passage in found if passage.file == str(file))
        letters = set(file.read_text("utf-8-sig")) - {" ", "\n", "\r", "`"}
        assert letters <= set(text)
    assert max(passage.line for passage in found if passage.file.endswith("long.txt")) >= 30


@pytest.mark.parametrize("text", ["", "no end", "a\nb\n\nc", "line\n" * 30_000, "x" * 200_000, "x" * 70_000 + "\ny"])
def test_parts_are_whole_lines_unless_a_line_is_longer(text):
    parts = passages.PARTS.findall(text)
    assert "".join(parts) == text and all(len(part) <= 1 << 16 for part in parts)
    has_long_line = max(map(len, text.split("\n"))) > 1 << 16
    assert has_long_line or all(part.endswith("\n") for part in parts[:-1])


def test_passages_are_cut_at_headings(notes, model):
    """And neighbours in a paragraph share a part of an eighth."""
    (notes / "long.txt").write_text(" ".join(WORDS * 20))
    words = [word for passage in open_search(notes / "long.txt", model).passages for word in passage.text.split()]
    assert 20 * len(WORDS) < len(words) < 20 * len(WORDS) * 8 / 7
    starts = {passage.text.splitlines()[0] for passage in open_search(notes, model).passages}
    assert {f"{title} {number}" for title in ("# Übung", "## Schluss") for number in range(4)} <= starts


def test_a_folder_contributes_known_suffixes_and_text_and_counts_the_others(notes):
    """Text has no NUL byte in the first 8,000, as git defines it; a table and a PDF may have some."""
    (notes / ".git").mkdir()
    (notes / ".git/a.md").write_text("hidden")
    for name, content in {"a.png": b"\x89PNG\0", "LICENSE": b"text", "data": b"x" * 7999 + b"\0", "a.py": b""}.items():
        (notes / name).write_bytes(content)
    (notes / "b.pdf").write_bytes(b"%PDF\0")
    (notes / "late.log").write_bytes(b"x" * 8000 + b"\0")
    (notes / "sub/up").symlink_to(notes)
    (notes / "zero.md").symlink_to("zero.md")
    os.mkfifo(notes / "pipe.md")
    files, skipped = find_files([str(notes)], is_document)
    names = ["0.md", "1.md", "LICENSE", "a.py", "b.pdf", "late.log", "sub/2.md", "sub/3.md"]
    assert [str(file.relative_to(notes)) for file in files] == names
    ones = dict.fromkeys(("hidden", ".png", "without a suffix", "links to folders"), 1)
    assert skipped == ones | {"pipes and broken links": 2}
    files, skipped = find_files([str(notes / "**/[0-9].md"), str(notes / "LICENSE")], is_document)
    assert len(files) == 5 and all(files.values()) and not skipped


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ([], [], "a.py lib/b.py lib/deep/c.js tests/d.py"),
        (["*.py"], [], "a.py lib/b.py tests/d.py"),
        (["*.py"], ["tests/*"], "a.py lib/b.py"),
        (["lib"], [], "lib/b.py lib/deep/c.js"),
        ([], ["lib/", "tests"], "a.py"),
        (["lib/*.py", "*.js"], ["deep"], "lib/b.py"),
        ("*.rs", None, ""),
    ],
)
def test_patterns_choose_the_files_of_folders_but_not_named_ones(
    tmp_path, model, monkeypatch, include, exclude, expected
):
    monkeypatch.setattr(search, "CACHE", tmp_path / "cache")
    names = ["a.py", "lib/b.py", "lib/deep/c.js", "tests/d.py"]
    for name in ["named.txt", *(f"code/{name}" for name in names)]:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    paths = [str(tmp_path / "code"), str(tmp_path / "named.txt")]
    documents = DocumentSearch(paths, model, include=include, exclude=exclude)
    *found, named = [passage.file for passage in documents.passages]
    assert found == [f"{tmp_path}/code/{name}" for name in expected.split()] and named == paths[1]
    assert documents.skipped["excluded"] == len(names) - len(found)


TEXTS = {
    "cp1252": ["Müller\n", "L'été dernier, nous avons dîné à la fenêtre où le garçon était.\n", "für „alle“ 5 €\n"],
    "cp1251": ["Привет мир, это проверка кодировки текста.\n" * 2],
    "cp932": ["これは日本語のテキストです。検索の試験を行います。\n"],
    "utf-8": ["Größe\n" * 9],
    "utf-16": ["Größe\n"],
}


@pytest.mark.parametrize("encoding", TEXTS)
@pytest.mark.parametrize("name", ["a.txt", "a.tsv", "a.py"])
def test_another_encoding_is_guessed_and_said_at_each_search(notes, model, tmp_path, encoding, name):
    """Unless it is named: then nothing is said."""
    file = tmp_path / name
    for number, text in enumerate(TEXTS[encoding]):
        rows = f"text\n{text}" if name == "a.tsv" else text
        (tmp_path / name).write_bytes(f"{rows}{number}\n".encode(encoding))
        for named in (None, None, encoding):
            documents = open_search(file, model, encoding=named)
            assert text.split()[0] in documents.passages[0].text
            guesses = [] if named or "utf" in encoding else [f"{file}: read as {encoding}"]
            assert documents.guesses == guesses and all(line in documents.summary() for line in guesses)
    with pytest.raises(ValueError, match=rf"{name}, line \d is not ascii"):
        open_search(file, model, encoding="ascii")


def test_a_file_of_a_folder_that_cannot_be_read_is_named_and_the_others_are_searched(notes, model):
    (notes / "old.txt").write_bytes(bytes(range(128, 256)))
    (notes / "package.json").write_text('{"name": "x"}')
    documents = open_search(notes, model)
    assert len({passage.file for passage in documents.passages}) == 4
    problems = "\n".join(documents.problems)
    assert len(documents.problems) == 2 and "old.txt is not text, or its encoding" in problems
    assert "no column 'text'" in problems and "; skipped: not read 2\n" in documents.summary()


def test_passages_are_of_the_content_that_was_hashed_or_the_file_is_not_read(notes, model, monkeypatch):
    """An editor saves between the two readings of a file."""
    file, read = notes / "a.txt", passages.PassageReader.read
    file.write_text("the cat sleeps")

    def change(self, path, encoding=None):
        if path == file:
            file.write_text("the dog")
        return read(self, path, encoding)

    with monkeypatch.context() as patch:
        patch.setattr(passages.PassageReader, "read", change)
        found = open_search(notes, model)
    assert found.problems == [f"{file} changes while it is read; search again when nothing writes to it"]
    file.write_text("the cat sleeps")
    assert "the cat sleeps" in {passage.text for passage in open_search(notes, model).passages}


def test_rows_are_passages_with_their_line(notes, model, tmp_path, monkeypatch):
    """A long row is cut, and all of its passages name the line of the row, also if a file is read in many parts."""
    monkeypatch.setattr(passages, "NUM_TEXTS", 3)
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "a.jsonl").write_text("".join(json.dumps({"body": f"the fox {i}"}) + "\n" for i in range(9)))
    (rows / "b.csv").write_text(f"\ufeffid;body\n1;the old sea\n2;\n3;{SENTENCE * 3}\n4;warm house\n")
    found = open_search(rows, model, text_column="body").passages
    assert [(passage.line, passage.text) for passage in found[:9]] == [(i + 1, f"the fox {i}") for i in range(9)]
    first, *long, last = found[9:]
    assert (first.line, first.text, last.line, last.text) == (2, "the old sea", 5, "warm house")
    other = open_search(rows / "b.csv", model, text_column="id").passages
    assert [passage.text for passage in other] == ["1", "2", "3", "4"]
    assert len(long) > 2 and {passage.line for passage in long} == {4} and long[0].text.startswith("the quick brown")


BYTES = random.Random(0).randbytes(3000)
DATA = {
    "a data URI": f"![logo](data:image/png;base64,{base64.b64encode(BYTES).decode()})",
    "a data URI with percent signs": "<img src='data:image/svg+xml,%3Csvg%20width=%229%22%3E" + "%20" * 99 + "'>",
    "base64": base64.b64encode(BYTES).decode(),
    "base64 in lines": base64.encodebytes(BYTES[:2850]).decode(),  # 50 lines of 76 characters
    "hexadecimal": BYTES.hex(),
}


@pytest.mark.parametrize("name", DATA)
def test_data_in_text_does_not_become_passages_and_lines_stay_right(notes, model, name):
    text = f"first words\n{DATA[name]}\nlast words\n"
    (notes / "a.md").write_text(text)
    (notes / "b.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "second row"}))
    found = [passage for file in ("a.md", "b.jsonl") for passage in open_search(notes / file, model).passages]
    kept_words = {word for passage in found for word in words_of(passage.text)}
    assert kept_words <= {"first", "words", "logo", "img", "src", "last", "second", "row"}
    last = next(passage for passage in found if "last" in passage.text)
    assert last.line + last.text.split("last")[0].count("\n") == text.count("\n")
    assert (found[-1].line, found[-1].text) == (2, "second row")


@pytest.mark.parametrize(
    "text",
    [
        *(hashlib.sha512(b"").hexdigest(), "usr/share/doc/" * 9, "see data: a, b/c, and metadata:x/y", "x" * 200_000),
        "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft",
        "open /Volumes/Users/Anna/Projects/2024/Reports/Quarterly/Final/Summary today",
        "shouldReturn404WhenTheUserIsNotFoundAndTheRequestHasNoAuthorizationHeader",
        "metadata:text/plain,hello",
    ],
)
def test_hashes_long_words_and_paths_stay(text):
    assert passages.without_data(text) == text


def test_words_of_every_script_stay_whole_in_both_unicode_forms():
    assert search.words_of("हिन्दी में किताब, read_csv v2") == ["हिन्दी", "में", "किताब", "read", "csv", "v2"]
    assert search.words_of(unicodedata.normalize("NFD", "Köln")) == search.words_of("Köln") == ["köln"]


def test_only_new_and_changed_passages_are_embedded_again(notes, model, embedded):
    first = open_search(notes, model)
    assert sorted(embedded) == sorted({passage.text for passage in first.passages})
    embedded.clear()
    again = open_search(notes, model)
    assert not embedded and np.array_equal(again.vectors, first.vectors)
    file = notes / "0.md"
    file.write_text(file.read_text().replace("## Schluss 0", "## Ende 0"))
    (notes / "0.md").rename(notes / "moved.md")
    changed = open_search(notes, model)
    assert embedded and all("Ende 0" in text for text in embedded)
    assert len(changed.passages) == len(first.passages)


def test_another_length_or_model_embeds_again(notes, model, embedded, tmp_path):
    open_search(notes, model)
    embedded.clear()
    DocumentSearch([str(notes)], model=model, max_length=30)
    assert embedded
    embedded.clear()
    other = SentenceTransformer(model)
    other[0].model.decoder = None
    next(other.parameters()).data += 0.5
    other.save_pretrained(str(tmp_path / "other"))
    open_search(notes, str(tmp_path / "other"))
    assert embedded


def test_an_interrupted_search_embeds_only_what_is_missing(notes, model, embedded, monkeypatch):
    monkeypatch.setattr(kept, "BLOCK", 8)
    encode, calls = SentenceTransformer.encode_document, []

    def interrupted(self, texts, **options):
        calls.append(texts)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(self, texts, **options)

    with monkeypatch.context() as patch:
        patch.setattr(SentenceTransformer, "encode_document", interrupted)
        with pytest.raises(KeyboardInterrupt):
            open_search(notes, model)
    done = list(embedded)
    assert len(done) == 16
    embedded.clear()
    documents = open_search(notes, model)
    assert not set(done) & set(embedded)
    assert len(done) + len(embedded) == len({passage.text for passage in documents.passages})
    embedded.clear()
    open_search(notes, model)
    assert not embedded


def test_what_no_search_uses_is_removed_after_30_days(notes, model, embedded, monkeypatch):
    open_search(notes, model)
    one_file = len(embedded)
    today = time.time()
    embedded.clear()
    for days, searched in ((20, notes / "0.md"), (29, notes), (45, notes / "0.md"), (60, notes / "0.md")):
        monkeypatch.setattr(kept.time, "time", lambda days=days: today + days * 86400)
        open_search(searched, model)
    assert not embedded
    open_search(notes, model)
    assert 0 < len(embedded) < one_file and not any("Übung 0" in text for text in embedded)


def flip(place):
    def damage(file, content):
        number = int(place * len(content))
        file.write_bytes(content[:number] + bytes([content[number] ^ 1]) + content[number + 1 :])

    return damage


def take_another(file, content):
    """What was kept for another length of passages, under this name."""
    DocumentSearch([str(file.parents[1] / "notes")], model=str(file.parents[1] / "model"), max_length=30)
    (other,) = (each for each in file.parent.iterdir() if each != file)
    other.replace(file)


DAMAGES = {
    "a flipped bit of the hash": flip(0),
    "a flipped bit of the passages": flip(0.2),
    "a flipped bit of a vector": flip(0.9999),
    "cut": lambda file, content: file.write_bytes(content[: len(content) // 2]),
    "foreign": lambda file, content: file.write_bytes(b"PK\x03\x04" * 1000),
    "of another setting": take_another,
    "open to others": lambda file, content: file.chmod(0o644),
}


def words_of(text):
    return "".join(character if character.isalnum() else " " for character in text.lower()).split()


def scores_of_words(texts, question):
    """Lucene's BM25 with k1 = 1.5 and b = 0.75 by its formula, divided by the largest or by a fifth of the rarities."""
    documents = [Counter(words_of(text)) for text in texts]
    lengths = np.array([document.total() for document in documents])
    scores, rarities = np.zeros(len(texts)), 0
    for word in words_of(question):
        counts = np.array([document[word] for document in documents])
        num_with = (counts > 0).sum()
        rarity = np.log(1 + (len(texts) - num_with + 0.5) / (num_with + 0.5))
        scores += rarity * counts / (counts + 1.5 * (0.25 + 0.75 * lengths / lengths.mean()))
        rarities += rarity
    return scores / max(scores.max(), rarities / 5)


def check_answers(documents, model):
    """Scores and passages against BM25, and cosines of vectors that are made here, one text at a time, in float64."""
    encoder, texts = SentenceTransformer(model), [passage.text for passage in documents.passages]
    vectors = np.array([encoder.encode(text) for text in texts], np.float64)
    for question in ("the old fox", "öffne_2 DATEI", "unknown", "many unknown words about datei"):
        asked = encoder.encode(question).astype(np.float64)
        cosines = vectors @ asked / np.linalg.norm(vectors, axis=1) / np.linalg.norm(asked)
        expected = 0.6 * cosines + 0.4 * scores_of_words(texts, question)
        answers = documents.search(question, top_k=7)
        scores = [answer.score for answer in answers]
        np.testing.assert_allclose(scores, np.sort(expected)[::-1][:7], atol=1e-5)  # float32
        found = [expected[documents.passages.index(replace(answer, score=None))] for answer in answers]
        np.testing.assert_allclose(found, scores, atol=1e-5)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_not_believed(notes, model, embedded, caplog, request, name):
    """One line names it, all passages are embedded again, the answers are right, and the next search embeds nothing.

    Only the owner can read what is kept, with any mask of the process.
    """
    before = os.umask(0)
    request.addfinalizer(lambda: os.umask(before))
    caplog.set_level("WARNING")  # bm25s logs more
    (notes.parent / "model").symlink_to(model)
    first = open_search(notes, model)
    (file,) = search.CACHE.iterdir()
    DAMAGES[name](file, file.read_bytes())
    embedded.clear()
    caplog.clear()
    documents = open_search(notes, model)
    assert sorted(embedded) == sorted({passage.text for passage in first.passages})
    (line,) = caplog.messages
    assert line.startswith(f"{file} is not used, and its texts are embedded again: ") and "\n" not in line
    assert documents.passages == first.passages and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(search.CACHE.stat().st_mode) == 0o700
    check_answers(documents, model)
    embedded.clear()
    again = open_search(notes, model)
    check_answers(again, model)
    assert not embedded and len(caplog.messages) == 1
    assert len(again.search("fox", top_k=10_000)) == len(again.passages)


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_search_that_cannot_keep_its_vectors_says_so_once_and_answers(notes, model, caplog, monkeypatch, is_folder):
    """A file in the place of the folder, and a folder in the place of the file; permissions would not stop root."""
    caplog.set_level("WARNING")  # bm25s logs more
    monkeypatch.setattr(kept, "SAVE_SECONDS", -1)
    monkeypatch.setattr(kept, "BLOCK", 8)
    if is_folder:
        open_search(notes, model)
        (file,) = search.CACHE.iterdir()
        file.unlink()
        file.mkdir(0o700)
    else:
        search.CACHE.write_text("a file")
    check_answers(open_search(notes, model), model)
    assert [line.endswith("the next call embeds again") for line in caplog.messages] == [False, True][1 - is_folder :]


def test_two_searches_at_the_same_time_are_both_right(notes, model, embedded, monkeypatch):
    """Another search of other files begins and ends while this one embeds; this one ends last, and its vectors are kept."""
    encode, inner = SentenceTransformer.encode_document, []

    def encode_late(self, texts, **options):
        if not inner:
            inner.append(None)
            inner[0] = open_search(notes / "0.md", model)
        return encode(self, texts, **options)

    with monkeypatch.context() as patch:
        patch.setattr(SentenceTransformer, "encode_document", encode_late)
        outer = open_search(notes / "sub", model)
    check_answers(outer, model)
    check_answers(inner[0], model)
    embedded.clear()
    open_search(notes / "sub", model)
    assert not embedded and len(list(search.CACHE.iterdir())) == 1


def test_documents_and_file_names_cannot_control_the_terminal(tmp_path, model, monkeypatch, capsys):
    monkeypatch.setattr(search, "CACHE", tmp_path / "cache")
    folder = tmp_path / "docs"
    folder.mkdir()
    text = "the quick \x1b]0;PWNED\x07 fox \x1b[2J\x1b[31mjumps \x9b31mover\u202e the dog\n"
    files = {"a.txt": text.encode(), "c\x1b[31m.txt": b"the dog\n", "e\x1b[31mX.txt": bytes(range(128, 256))}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "f.\x1b[5m").write_bytes(b"\0")
    printed = command(folder, "the fox", "--model", model)
    shown = printed + capsys.readouterr().err
    assert "the quick fox jumps over the dog" in " ".join(printed.split()) and "PWNED" not in shown
    assert f"{folder}/c.txt:1" in printed and f"{folder}/eX.txt is not text" in shown
    assert all(character.isprintable() or character == "\n" for character in shown)
    line = command(folder, "the fox", "--model", model, "--json")
    assert all(" " <= character <= "~" for character in line.rstrip("\n"))
    assert any("\x1b]0;PWNED" in answer["text"] for answer in json.loads(line)["answers"])


def test_a_terminal_gets_color_which_a_pipe_and_no_color_do_not(monkeypatch):
    answer = search.Passage("a\x1b[31m.md", 7, 0.5, "Renew_it or RENEW the renewal")
    plain = "a.md:7  (0.50)\n    Renew_it or RENEW the renewal"
    assert neobert_cli._as_text("renew it", [answer]) == plain
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = neobert_cli._as_text("renew it", [answer])
    assert re.sub(r"\x1b\[[0-9;]+m", "", shown) == plain
    assert re.findall(r"\x1b\[[^0][0-9;]*m(.*?)\x1b\[0m", shown) == ["a.md:7", "(0.50)"]
    monkeypatch.setenv("NO_COLOR", "1")
    assert neobert_cli._as_text("renew it", [answer]) == plain


def test_a_sentence_is_found_by_its_exact_words(tmp_path):
    """The mini model alone, which has not learned these words, ranks another sentence first."""
    cook = "Onions, butter and flour are fried. The secret ingredient is nutmeg."
    others = [f"The private key of part {i} is hidden; a component of the secret store reads it." for i in range(9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*others, cook]))
    options = {"cache": tmp_path / "cache"}
    assert DocumentSearch([str(tmp_path)], **options).search("secret ingredient", 1)[0].text == cook
    assert DocumentSearch([str(tmp_path)], word_weight=0, **options).search("secret ingredient", 1)[0].text != cook


def test_the_mini_model_finds_the_passage_and_the_command_prints_file_line_and_passage(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(search, "CACHE", tmp_path / "cache")
    monkeypatch.setenv("COLUMNS", "60")
    paint, numbers = "# Paint\n\nMix red and blue.\n\n" * 20, "# Numbers\n\nround(x) rounds.\n\n" * 20
    (tmp_path / "a.md").write_text(f"# Files\n\nopen(path) opens a file and returns a file object.\n\n{paint}")
    (tmp_path / "b.md").write_text(f"\n\n# Time\n\nsleep(seconds) waits for some seconds.\n\n{numbers}")
    printed = command(tmp_path, "wait for a while", "--top_k", 1)
    first, *rest = printed.splitlines()
    assert first.startswith(f"{tmp_path}/b.md:3  (0.") and "sleep(seconds) waits" in rest[0] and len(rest) <= 3
    assert all(len(line) <= 60 for line in rest)
    (line,) = capsys.readouterr().err.splitlines()  # no progress bars without a terminal
    assert line.startswith("files: 2, passages: ")
    monkeypatch.setattr("sys.stdin", io.StringIO("wait for a while\n\nopen a file"))
    rows = [json.loads(line) for line in command(tmp_path, "--json", "--top_k", 2).splitlines()]
    assert [row["question"] for row in rows] == ["wait for a while", "open a file"]
    assert rows[0]["answers"][0]["line"] == 3 and len(rows[0]["answers"]) == 2
    assert rows[1]["answers"][0]["file"].endswith("a.md") and "opens a file" in rows[1]["answers"][0]["text"]


BAD = [
    (["nowhere", "fox"], "No such file or folder: 'nowhere'"),
    (["notes", "?!"], r"the question '\?!' has no words; ask in words"),
    (["nothing", "fox", "--json"], "nothing: no text to search"),
    (["notes", "fox", "--top_k", "0"], "top_k=0 is less than 1"),
    (["notes", "fox", "--word_weight", "40"], "word_weight=40.0 is not between 0 and 1"),
    (["empty.pdf", "fox"], r"empty.pdf cannot be read as PDF \("),
    (["notes", "fox", "--max_length", "2"], "max_length=2 leaves no token"),
    (["pictures", "fox"], r"pictures: no text to search; files: 0, passages: 0; skipped: .png 1"),
    (["old.txt", "fox"], "old.txt is not text, or its encoding cannot be guessed; name it, if it is text"),
    (["old.txt", "fox", "--encoding", "latin9000"], "unknown encoding: latin9000; --encoding takes a name that Python"),
    (["notes", "fox", "--include", "*.py"], "notes: no text to search; files: 0, passages: 0; skipped: excluded 4"),
    (["loop.txt", "fox"], "Too many levels of symbolic links: 'loop.txt'"),
    (["rows.csv", "fox"], "rows.csv, line 2: no column 'text'; name .*one of body"),
    (["notes", "fox", "--model", "no"], "no is no folder; give"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_gives_one_line_before_anything_is_embedded(notes, model, embedded, monkeypatch, arguments, message):
    monkeypatch.chdir(notes.parent)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    files = {"empty.pdf": b"", "pictures/a.png": b"\0", "old.txt": bytes(range(128, 256)), "rows.csv": b"body\nfox\n"}
    for name, content in files.items():
        file = notes.parent / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
    (notes.parent / "loop.txt").symlink_to("loop.txt")
    (notes.parent / "nothing").mkdir()
    options = () if "--model" in arguments else ("--model", model)
    with pytest.raises(SystemExit, match=f"^neobert search: .*{message}") as ended:
        command(*arguments, *options)
    assert "\n" not in str(ended.value) and not embedded


def write_pdf(file, text):
    from matplotlib.figure import Figure

    page = Figure()
    page.text(0.1, 0.5, text)
    page.savefig(file)


def write_docx(file, text):
    main = "http://schemas.openxmlformats.org"
    word, office = f"{main}/wordprocessingml/2006/main", "application/vnd.openxmlformats"
    kinds = f'<Default Extension="rels" ContentType="{office}-package.relationships+xml"/><Override PartName='
    kinds += f'"/word/document.xml" ContentType="{office}-officedocument.wordprocessingml.document.main+xml"/>'
    link = f'<Relationship Id="a" Target="word/document.xml" Type="{main}/officeDocument/2006/relationships/officeDocument"/>'
    body = f"<w:body><w:p><w:r><w:t>{text}</w:t></w:r></w:p></w:body>"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("[Content_Types].xml", f'<Types xmlns="{main}/package/2006/content-types">{kinds}</Types>')
        of_links = f'<Relationships xmlns="{main}/package/2006/relationships">{link}</Relationships>'
        archive.writestr("_rels/.rels", of_links)
        archive.writestr("word/document.xml", f'<w:document xmlns:w="{word}">{body}</w:document>')


def test_html_pdf_and_docx_are_converted_once(notes, model, monkeypatch):
    markitdown = pytest.importorskip("markitdown", reason="other formats need it (pip install 'markitdown[pdf,docx]')")
    folder = notes.parent / "others"
    folder.mkdir()
    (folder / "a.html").write_text("<html><body><h1>Größe</h1><p>the quick fox, täglich</p></body></html>")
    write_pdf(folder / "b.pdf", "the lazy dog sleeps")
    write_pdf(folder / "scan.pdf", "")
    write_docx(folder / "c.docx", "the warm house, über alles")
    (folder / "broken.pdf").write_bytes((folder / "b.pdf").read_bytes()[:300])
    (folder / "text.pdf").write_text("%PDF-1.4 text that is no PDF")
    locked = b"/ID [<00><00>] /Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O (%s) /U (%s) >>" % (b"a" * 32, b"b" * 32)
    (folder / "locked.pdf").write_bytes((folder / "b.pdf").read_bytes().replace(b"/Size", locked + b"/Size"))
    (folder / "broken.docx").write_bytes((folder / "c.docx").read_bytes()[:300])
    documents = open_search(folder, model)
    texts = {passage.file.rpartition("/")[2]: passage.text for passage in documents.passages}
    assert texts.keys() == {"a.html", "b.pdf", "c.docx"}
    assert "# Größe" in texts["a.html"] and "täglich" in texts["a.html"]
    assert "the lazy dog sleeps" in texts["b.pdf"] and "the warm house, über alles" in texts["c.docx"]
    problems = "\n".join(documents.problems)
    assert re.findall(r"(\S+) cannot be read as (\w+) \([^)]", problems) == [
        (f"{folder}/broken.docx", "DOCX"),
        (f"{folder}/broken.pdf", "PDF"),
        (f"{folder}/text.pdf", "PDF"),
    ]
    assert problems.count(f"{folder}/locked.pdf is encrypted; save it without a password") == 1
    assert problems.count("scan.pdf has no text") == 1
    with pytest.raises(ValueError, match=r"scan.pdf has no text; if it has pictures of pages, recognize their text"):
        open_search(folder / "scan.pdf", model)
    monkeypatch.setattr(markitdown.MarkItDown, "convert", None)
    assert open_search(folder / "c.docx", model).passages[0].text == texts["c.docx"]


def pdf_of_words(words):
    """A PDF of one line, in which narrow words stand apart without spaces; pdfminer joins them, and pdfium does not."""
    line = b"BT /F 10 Tf 50 Tz 50 700 Td [%s] TJ ET" % b" -150 ".join(b"(%s)" % word.encode() for word in words)
    parts = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 900 800] /Contents 4 0 R /Resources << /Font << /F 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(line), line),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    objects = b"".join(b"%d 0 obj\n%s\nendobj\n" % (number, part) for number, part in enumerate(parts, 1))
    return b"%PDF-1.4\n" + objects + b"trailer << /Size 6 /Root 1 0 R >>\n%%EOF"


def test_a_pdf_whose_words_have_lost_their_spaces_is_read_with_them(tmp_path):
    markitdown = pytest.importorskip("markitdown", reason="other formats need it (pip install 'markitdown[pdf,docx]')")
    file = tmp_path / "a.pdf"
    file.write_bytes(pdf_of_words(WORDS))
    assert "".join(WORDS) in markitdown.MarkItDown().convert(file).markdown
    assert passages._as_markdown(file, None).split() == WORDS
    file.write_bytes(pdf_of_words(["".join(WORDS)]))  # a long word stays
    assert passages._as_markdown(file, None).split() == ["".join(WORDS)]


def test_without_markitdown_one_line_says_how_to_install_it(notes, model, monkeypatch):
    write_pdf(notes / "a.pdf", "the fox")
    monkeypatch.setitem(sys.modules, "markitdown", None)
    (problem,) = open_search(notes, model).problems
    assert problem.startswith(f"{notes}/a.pdf: ") and "pip install 'neobert_hf[documents]'" in problem
    with pytest.raises(ImportError, match="markitdown"):
        open_search(notes / "a.pdf", model)
