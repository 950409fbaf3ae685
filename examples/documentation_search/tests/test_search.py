"""The search: ranking, the stored vectors, and the form of an answer."""

import io
import re
import sys
from pathlib import Path

import everyday
import numpy as np
import pytest
import search
from conftest import run_main
from docstrings import Entry, read, views
from search import DocumentationIndex, answer, bonus

from neobert_hf import sentence_transformer

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples/documentation_search"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def entries_about(*texts, mentions=None):
    return [Entry("p", f"p.f{i}", "(x)", x, "p", f"f{i}", mentions[i] if mentions else 0) for i, x in enumerate(texts)]


def test_the_nearest_entries_come_first(folder):
    entries = entries_about("quick fox. The old sea.", "lazy dog", "quick brown fox", "warm house. A fox.", "sea", "a")
    model = sentence_transformer(folder)
    question = "the quick brown fox"
    vector = model.encode(question, normalize_embeddings=True)
    cosines = {each: max(model.encode(views(each), normalize_embeddings=True) @ vector) for each in entries}
    found = DocumentationIndex(entries, folder).search(question, 4)
    assert [entry for entry, _ in found] == sorted(cosines, key=cosines.get, reverse=True)[:4]
    np.testing.assert_allclose([score for _, score in found], [cosines[entry] for entry, _ in found], atol=1e-5)


def test_of_two_entries_that_score_alike_the_one_that_more_modules_mention_comes_first(folder, monkeypatch):
    """The vectors are equal, so only the mentions differ: ten doublings of 1 + mentions are a cosine of 0.1."""
    monkeypatch.setattr(search, "views", lambda entry: [entry.text])
    entries = entries_about(*["the quick fox"] * 4, "the fox", mentions=[0, 3, 1023, 1, 0])
    found = DocumentationIndex(entries, folder).search("the quick fox", 5)
    assert [entry.mentions for entry, _ in found[:3]] == [1023, 3, 1]
    assert [bonus(entry) for entry in entries] == pytest.approx([0, 0.02, 0.1, 0.01, 0])
    assert len({round(cosine, 5) for entry, cosine in found if entry.text == "the quick fox"}) == 1
    monkeypatch.setattr(search, "MENTION_BONUS", 1e-9)  # a clearly nearer entry stays first
    assert DocumentationIndex(entries, folder).search("the fox", 1)[0][0].text == "the fox"


def test_the_index_reads_the_first_300_characters_of_a_text(folder):
    entries = entries_about("quick fox " * 40)
    texts = [passage.text for passage in DocumentationIndex(entries, folder).documents.passages]
    assert "".join(texts).startswith("p f0") and 250 < sum(map(len, texts)) < 350
    assert max(text.count("fox") for text in texts) < 30


def test_the_standard_library_is_read_again_when_a_module_is_installed(tmp_path, monkeypatch):
    """Debian has tkinter in a package of its own, with _tkinter in lib-dynload."""
    (tmp_path / "lib/lib-dynload").mkdir(parents=True)
    monkeypatch.setattr(search.sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    reads = []
    monkeypatch.setattr(search, "read", lambda: reads.append(1) or entries_about("a text"))
    for new in (None, "tkinter", "lib-dynload/_tkinter.so"):
        if new:
            (tmp_path / "lib" / new).touch()
        for _ in range(2):
            assert search.read_cached(["python"]) == entries_about("a text")
    assert len(reads) == 3


def test_an_answer_has_title_sentence_import_and_score():
    entry = Entry("os", "os.path.join", "(a, *p)", "Join two\nparts. Then more.", "os.path", "join", 53)
    assert answer(entry, 0.768, 80).splitlines() == [
        "  os.path.join(a, *p)",
        "      Join two parts.",
        "      from os.path import join    (0.77 cosine, mentioned in 53 modules)",
    ]
    assert answer(entry, 0.768, 20).splitlines()[:2] == ["  os.path.join(a ...", "      Join two p ..."]
    short = answer(Entry("csv", "csv.DictReader", "(f)(f)", "", "csv", "DictReader", 1), 1.0, 20).splitlines()
    assert short[0] == "  csv.DictReader ..." and len(short[0]) == 20
    import_line = "      from csv import DictReader    (1.00 cosine, mentioned in 1 module)"
    assert short[1:] == ["      (no docstring)", import_line]


def test_questions_are_read_from_the_command_line_or_typed(folder, monkeypatch):
    options = ("--package", "json", "--model", folder, "--top_k", 2)
    asked = run_main(search, "decode a number", *options).splitlines()
    assert re.fullmatch(r"\d+ entries", asked[0]) and asked[1] == "decode a number" and len(asked) == 2 + 2 * 3
    assert re.fullmatch(r" {6}(import|from) json.* {4}\(-?\d\.\d\d cosine\)", asked[4])
    monkeypatch.setattr(sys, "stdin", io.StringIO("decode a number\n"))
    assert run_main(search, *options).splitlines()[2:8] == asked[2:8]


def test_the_mini_model_answers_the_first_question_of_the_readme():
    answers = run_main(search, "join the parts of a path", "--package", "os.path,shutil", "--top_k", 1)
    assert "os.path.join(a, *p)" in answers


def test_the_documentation_holds_the_answers_to_the_everyday_questions():
    names = {entry.name for entry in read()}
    asked = everyday.everyday_questions()
    assert len(asked) == 110
    assert {question for question, answers in asked.items() if not names & answers} <= {"hash of a file"}  # Python 3.10


def test_the_counts_are_of_questions_with_a_correct_entry(monkeypatch):
    monkeypatch.setattr(everyday, "everyday_questions", lambda: {"a": {"x"}, "b": {"y", "z"}, "c": {"w"}})
    found = {"a": ["x", "q", "r"], "b": ["q", "r", "z"], "c": ["q"]}
    assert everyday.count(found.get) == {"first": 1, "in_three": 2}


def test_the_table_of_the_page_is_that_of_the_stored_result():
    assert everyday.TABLE.search((FOLDER / "README.md").read_text("utf-8"))[0] == everyday.render()
