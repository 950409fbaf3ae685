"""The written corpus: what is held out, what each file has, sources with licences, and further packages."""

import json
import os
import random
import re
import zipfile
from collections import Counter
from pathlib import Path

import corpus
import pytest
from conftest import contents
from corpus import question_pairs, retrieval_pairs, sentences, split, training_texts, wordnet_texts, write_corpus
from docstrings import Entry
from hypothesis import given, settings
from hypothesis import strategies as st

SHOP = '''"""A module that says what it is for, at some length."""
raise SystemExit("this must not run")

class Thing:
    """A thing that can be used for this and for that."""

    async def do(self, x: int, *, y=1) -> None:
        """Do the thing with x and, if it is given, with y.

        The thing is changed by this function. It is faster than it was.
        """

def weigh(thing):
    """Tell how heavy a thing is, which compiled code finds out."""

def short():
    """Too short."""
'''
BARN = '''"""Everything about barns and the animals that live inside."""

def weigh(thing):
    """Tell how heavy a thing is, which compiled code finds out."""

def feed(cow, hay):
    """Give some of the hay to the cow and count what remains.

    The cow has to be awake for this to work as it should.
    """
'''


def install(folder, name, version, source, description):
    (folder / name / "tests").mkdir(parents=True)
    (folder / name / "__init__.py").write_text(source)
    (folder / name / "broken.py").write_text("def (:")
    (folder / name / "tests/test_it.py").write_text('"""Tests are not documentation for users, so leave them."""')
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", "License: MIT", "", description]
    (info / "METADATA").write_text("\n".join(lines))
    files = (f"{name}/__init__.py", f"{name}/broken.py", f"{name}/tests/test_it.py")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Two installed packages, of which one repeats a docstring of the other, instead of the packages of this machine."""
    install(tmp_path / "site", "shop", "1.0", SHOP, "The shop sells zebras and yaks to all of its visitors.")
    install(tmp_path / "site", "barn", "2.0", BARN, "The barn keeps the animals warm and dry in winter.")
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path / "site"))
    monkeypatch.setattr(corpus, "read", lambda: [])
    return tmp_path / "site"


def rows(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").open()]


def texts(folder, name):
    return [row["text"] for row in rows(folder, name)]


def test_each_file_has_its_part_of_the_documentation(site, tmp_path, capsys):
    folder = tmp_path / "corpus"
    counts = write_corpus(folder, num_held_out=0, held_out_packages=["barn"], vocab_size=200)
    names = {row["name"] for row in rows(folder, "train")}
    assert names == {"shop", "shop.Thing", "shop.Thing.do"}  # shop.weigh has the docstring of barn.weigh
    assert {row["name"] for row in rows(folder, "held_out_packages")} == {"barn", "barn.weigh", "barn.feed"}
    assert texts(folder, "train_english") == ["The shop sells zebras and yaks to all of its visitors."]
    found = Counter(texts(folder, "train_texts"))
    other = {"The thing is changed by this function.", "It is faster than it was."}
    assert found.total() == 5 and set(found) - other == {
        "A module that says what it is for, at some length.",
        "A thing that can be used for this and for that.",
        "Do the thing with x and, if it is given, with y.",
        "The shop sells zebras and yaks to all of its visitors.",
    }
    assert sorted(texts(folder, "train_documents")) == [
        "shop\nA module that says what it is for, at some length.",
        "shop.Thing\nA thing that can be used for this and for that.",
        "shop.Thing.do(self, x: int, *, y=1)\nThe thing is changed by this function. It is faster than it was.",
    ]
    queries = {row["query"] for row in rows(folder, "train_pairs")}
    assert queries == {"shop.Thing.do(self, x: int, *, y=1)", "Do the thing with x and, if it is given, with y."}
    assert counts == {path.stem: len(path.read_text().splitlines()) for path in folder.glob("*.jsonl")}
    assert counts["train"] == 3 and counts["held_out"] == counts["train_questions"] == 0 and len(counts) == 10
    assert re.search(r"2 files cannot be parsed by this Python, such as .*broken\.py", capsys.readouterr().err)
    vocab = json.loads((folder / "tokenizer/tokenizer.json").read_text())["model"]["vocab"]
    assert "[MASK]" in vocab and not [token for token in vocab if "barn" in token]
    summary = json.loads((folder / "sources.json").read_text())
    (source,) = summary["sources"]
    assert summary["left_out"] == 1
    written = texts(folder, "train") + texts(folder, "train_english")
    about = {"name": "shop", "version": "1.0", "licence": "MIT", "origin": "installed"}
    assert source == about | {"num_texts": len(written), "num_characters": sum(map(len, written))}


def test_written_questions_become_pairs_with_the_text_that_the_search_embeds(site, tmp_path, capsys):
    """A question to an entry that is held out, or that this Python does not have, is no training text."""
    (tmp_path / "questions.tsv").write_text(
        "name\tquestion\n"
        'shop.Thing.do\tuse it with one "number" or two\n'
        "barn.feed\tmy cow is hungry\n"
        "nowhere.at_all\twhere is this\n"
    )
    options = dict(held_out_packages=["barn"], vocab_size=200, question_files=[tmp_path / "questions.tsv"])
    write_corpus(tmp_path / "corpus", num_held_out=0, **options)
    text = "shop Thing do\nDo the thing with x and, if it is given, with y."
    found = [{"query": 'use it with one "number" or two', "document": text}]
    assert rows(tmp_path / "corpus", "train_questions") == found
    assert "2 questions are left out" in capsys.readouterr().err


def test_a_question_belongs_to_the_first_object_of_the_name_and_only_if_it_is_for_training():
    """Not to the topic of the same name, and not to another object because the first is held out."""
    topic = Entry("python", "dict", "", "Dictionary displays are written in braces.")
    first, second = (Entry("builtins", "dict", "", text, "builtins", "dict") for text in ("A new map.", "Another one."))
    entries, asked = [topic, first, second], [("dict", "look up by key")]
    found = question_pairs(asked, entries, [second, topic, first])
    assert found == [{"query": "look up by key", "document": "dict\nA new map."}]
    assert question_pairs(asked, entries, [second, topic]) == []
    assert question_pairs(asked, [topic], [topic])[0]["document"] == f"dict\n{topic.text}"


def test_packages_that_are_not_installed_and_too_many_held_out_entries_are_refused(site, tmp_path):
    with pytest.raises(ValueError, match=r"held_out_packages=\['pandas'\] are not installed"):
        write_corpus(tmp_path / "corpus", held_out_packages=["pandas"])
    with pytest.raises(ValueError, match="num_held_out=1000 leaves none of 6 entries for training; hold out fewer"):
        write_corpus(tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()


WORDS = ["read", "the", "tables", "of", "all", "files", "in", "order", "Return", "a", "copy"]
SENTENCES = st.lists(st.sampled_from(WORDS), min_size=3, max_size=8).map(lambda words: " ".join(words) + ".")
TEXTS = st.lists(SENTENCES, min_size=1, max_size=4).map(" ".join).filter(lambda text: len(text) >= 40)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), TEXTS), min_size=1, max_size=12),
    st.lists(SENTENCES, max_size=4),
    st.randoms(use_true_random=False),
)
def test_no_training_text_is_a_text_or_first_sentence_of_a_held_out_package(drawn, english, rng):
    """Packages a and b are held out; some texts are repeated in package c, also with other spaces and upper case."""
    drawn += [("c", text.upper().replace(" ", "\n")) for _, text in drawn if rng.random() < 0.5]
    drawn = [("c", text) for _, text in drawn if rng.random() < 0.3] + drawn
    drawn += [("a", "A held-out text."), ("b", "Another held-out text."), ("c", "The text of a package that remains.")]
    entries = [Entry(package, f"{package}.f{i}", "(x)", text) for i, (package, text) in enumerate(drawn)]
    english = english + [text for package, text in drawn if package != "c"]
    parts, train, _ = split(entries, 0, ["a", "b"], random.Random(0))
    found = training_texts(train, english, corpus.comparable_texts(parts["held_out_packages"]), random.Random(0))
    found["pairs"] = [text for pair in corpus.training_pairs(train) for text in pair.values()]

    def plain(text):
        return "".join(text.lower().split())

    held = [text for package, text in drawn if package in "ab"]
    forbidden = {plain(text) for text in held}
    forbidden |= {plain(text.split(".")[0] + ".") for text in held if len(text.split(".")[0].split()) >= 6}
    for chosen in found.values():
        assert not forbidden & {plain(text) for text in chosen}
        assert chosen is found["pairs"] or len(set(chosen)) == len(chosen)
    for entry in train:
        assert entry.package == "c" and not forbidden & {plain(entry.text), plain(entry.text.split(".")[0] + ".")}
    assert len(parts["held_out_packages"]) == len(set(held))


def test_the_same_seed_gives_the_same_files_and_another_seed_another_order(site, tmp_path):
    for name, seed in (("first", 0), ("second", 0), ("third", 1)):
        write_corpus(tmp_path / name, num_held_out=1, vocab_size=200, seed=seed)
    first, second, third = (contents(tmp_path / name) for name in ("first", "second", "third"))
    assert first == second != third


def test_downloaded_packages_replace_installed_ones_and_add_wordnet(site, tmp_path, monkeypatch):
    """pip finds two wheels in a folder; nothing in them runs."""
    (tmp_path / "index").mkdir()
    (tmp_path / "list.txt").write_text("shop==9.0\nwn==9.0\n")
    nouns = '1 | the quality of being wide; "a wide barn of a house"\n'
    added = {
        "shop": {"shop/__init__.py": SHOP.replace("a thing", "an object").replace("A thing", "An object")},
        "wn": {"wn/__init__.py": "", "wn/data/wordnet-3.3/data.noun": nouns},
    }
    for name, content in added.items():
        info = f"{name}-9.0.dist-info"
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.0\nLicense-Expression: MIT\n\nThe new {name} sells camels."
        wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        files = {**content, f"{info}/METADATA": about, f"{info}/WHEEL": wheel}
        record = "".join(f"{path},,\n" for path in files)
        with zipfile.ZipFile(tmp_path / f"index/{name}-9.0-py3-none-any.whl", "w") as archive:
            for path, text in {**files, f"{info}/RECORD": record}.items():
                archive.writestr(path, text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_BINARY", "")
    monkeypatch.setattr(corpus, "PACKAGES", tmp_path / "list.txt")
    monkeypatch.setattr(corpus, "FROM_SOURCE", [])
    folder = tmp_path / "corpus"
    write_corpus(folder, num_held_out=0, vocab_size=400, more_packages=True)
    assert "An object that can be used for this and for that." in texts(folder, "train_texts")
    assert {"the quality of being wide", "The new shop sells camels."} <= set(texts(folder, "train_english"))
    sources = json.loads((folder / "sources.json").read_text())["sources"]
    found = {" ".join(row[key] for key in ("name", "version", "licence", "origin")) for row in sources}
    assert found == {"shop 9.0 MIT downloaded", "wn 9.0 MIT downloaded", "barn 2.0 MIT installed"}


def test_the_list_of_packages_is_pinned_and_without_the_packages_that_are_held_out():
    lines = Path(corpus.PACKAGES).read_text().splitlines()
    names = [line.split("==")[0].lower() for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==\d+(\.\d+)+", line) for line in lines if not line.startswith("#"))
    assert len(set(names)) == len(names) == 30  # the README says 30
    assert not {"pandas", "networkx", "geopandas", "modin", "pyspark"} & set(names)


def test_the_query_is_the_first_sentence_and_the_document_does_not_contain_it():
    rest = "It has a rest that is long enough to be a document."
    entries = [
        Entry("p", "p.load", "(path)", f"Load a table from a file. {rest}"),
        Entry("p", "p.twice", "", f"This sentence occurs in two entries. {rest}"),
        Entry("q", "q.twice", "", f"This sentence occurs in two entries. Another {rest}"),
        Entry("p", "p.brief", "", f"Load it. {rest}"),
        Entry("p", "p.alone", "", "Load a whole table from a file of text."),
    ]
    pairs = retrieval_pairs(entries)
    assert pairs == [{"query": "Load a table from a file.", "document": f"p.load(path)\n{rest}"}]
    named = {"query": "p.load(path)", "document": entries[0].text}
    assert corpus.training_pairs(entries) == [*pairs, named]


def test_only_complete_sentences_of_prose_are_chosen():
    text = """The function returns a copy of the table. it begins with a small letter here.

    Parameters
    ----------
    x : array of numbers with a shape
        The values that are copied to
        the new table. Short one. >>> Some code of five words here.

    - Each item of a list is a paragraph.
    Is the sentence after
    it found? See https://example.org for all of the details. No full stop at the end of it"""
    assert sentences(text) == [
        "The function returns a copy of the table.",
        "Each item of a list is a paragraph.",
        "Is the sentence after it found?",
    ]


def test_wordnet_gives_glosses_and_examples_without_the_licence(tmp_path):
    (tmp_path / "data.noun").write_text(
        "  1 This software and database is provided under the | following license.  \n"
        '00001740 03 n 01 entity 0 000 | that which is perceived; "the entity of my mind"; "short one"  \n'
        "00001930 03 n 01 thing 0 000 | two words  \n"
    )
    (tmp_path / "index.noun").write_text("entity n 1 0 1 1 00001740 | not a gloss of this file\n")
    assert wordnet_texts(tmp_path) == ["that which is perceived", "the entity of my mind"]
    assert wordnet_texts(tmp_path / "missing") == []
