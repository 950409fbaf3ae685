"""The paper's training sets: rows of the Hub, as the cards of the sets show them, become texts."""

from pathlib import Path

import prepare_sets
import pytest
import yaml
from conftest import run_main
from datasets import Dataset

SETS = yaml.safe_load(Path(prepare_sets.__file__).with_name("sets.yaml").read_text("utf-8"))

QUORA = {"set": {"query": "q", "pos": ["p", "p2"], "neg": ["n", "n2"]}}
# One row of each Hub dataset as its card shows it, and the expected texts.
HUB = {
    "ALLNLI": ({"anchor": "a", "positive": "p", "negative": "n"}, ["a", "p", "n"]),
    "AMAZONQA": ({"query": "q", "pos": ["p", "p2"]}, ["q", "p"]),
    "CONCURRENTQA": (
        {"question": "q", "pos_paras": [{"text": "p"}], "neg_paras": [{"text": f"n{i}"} for i in range(6)]},
        ["q", "p", "n0", "n1", "n2", "n3"],
    ),
    "MEDMCQA": ({"question": "q", "exp": "why", "subject_name": "Anatomy"}, ["q", "why"]),
    "PAQ": ({"set": ["q", "p"]}, ["q", "p"]),
    "QQP": (QUORA, ["q", "p", "n"]),
    "SENTENCECOMP": ({"set": ["a long one", "short"]}, ["short", "a long one"]),
    "STS12": ({"sentence1": "a", "sentence2": "b", "score": 4.2}, ["a", "b"]),
}


def load(monkeypatch, name, rows):
    """Load a set whose rows on the Hub are `rows`; return its rows and the arguments of the calls to the Hub."""
    asked = []

    def load_dataset(path, config, split):
        asked.append((path, config, split))
        return Dataset.from_list(rows)

    monkeypatch.setattr(prepare_sets, "load_dataset", load_dataset)
    return prepare_sets.load_set(SETS[name]).to_list(), asked


@pytest.mark.parametrize("name", HUB)
def test_rows_of_the_papers_sets_become_texts(monkeypatch, name):
    row, expected = HUB[name]
    (found,), asked = load(monkeypatch, name, [row])
    assert list(found.values()) == expected
    assert list(found)[:2] == ["anchor", "positive"]
    assert asked == [(SETS[name]["path"], SETS[name].get("configs", [None])[0], "train")]


@pytest.mark.parametrize(
    ("name", "rows", "number"),
    [
        ("STSBENCHMARK", [{"sentence1": "a", "sentence2": "b", "score": score} for score in (4.0, 4.5, 1.0)], 1),
        ("QQP", [QUORA, {"set": {"query": "q", "pos": ["p"], "neg": []}}], 1),  # the second row has no negative
        ("MEDMCQA", [{"question": "q", "exp": None}, {"question": "q", "exp": "e"}], 1),
        ("YAHOO_CLUST", [{"question_title": "t", "best_answer": b, "topic": 1} for b in ("", "x", "y")], 2),
    ],
)
def test_rows_are_filtered_as_the_paper_describes(monkeypatch, name, rows, number):
    """The filter of STS scores in the authors' code had no effect; this filter has one."""
    rows = [*rows, {"question_title": "u", "best_answer": "z", "topic": 2}] if name == "YAHOO_CLUST" else rows
    assert len(load(monkeypatch, name, rows)[0]) == number


def test_pairs_of_ids_become_pairs_of_texts(monkeypatch):
    parts = {
        "default": {"query-id": ["q1", "q2", "q1"], "corpus-id": ["d1", "gone", "d2"], "score": [1.0, 1.0, 0.0]},
        "queries": {"_id": ["q1", "q2"], "text": ["one?", "two?"]},
        "corpus": {"_id": ["d2", "d1"], "title": ["", ""], "text": ["two.", "one."]},
    }
    monkeypatch.setattr(prepare_sets, "load_dataset", lambda path, name, split: Dataset.from_dict(parts[name]))
    assert prepare_sets.load_set(SETS["FEVER"]).to_list() == [{"anchor": "one?", "positive": "one."}]


def test_labelled_texts_are_paired_within_their_class(monkeypatch):
    names = ["Anatomy"] * 4 + ["Surgery"] * 3 + ["Dental"]
    rows = [
        {"question": f"{name} {i}", "subject_name": name, "cop": 1, **{f"op{letter}": letter for letter in "abcd"}}
        for i, name in enumerate(names)
    ]
    triplets, _ = load(monkeypatch, "MEDMCQA_CLUST", rows)
    assert len(triplets) == 7  # the only dental question has no positive
    for triplet in triplets:
        anchor, positive, negative = (text.split()[0] for text in triplet.values())
        assert triplet["anchor"].endswith(" b") and anchor == positive != negative
        assert triplet["anchor"] != triplet["positive"]


def test_the_error_for_a_changed_set_names_it(monkeypatch):
    with pytest.raises(ValueError, match=r"agnews has the columns headline and not the expected ones \('title'\)"):
        load(monkeypatch, "AGNEWS", [{"headline": "a"}])


def test_every_set_of_table_7_is_written_beside_the_list(monkeypatch, tmp_path):
    assert len(SETS) == 22 and all({"file", "instruction", "path"} <= entry.keys() for entry in SETS.values())
    monkeypatch.setattr(prepare_sets, "load_set", lambda entry, seed: Dataset.from_dict({"anchor": [entry["path"]]}))
    (tmp_path / "sets.yaml").write_text(yaml.safe_dump(SETS))
    printed = run_main(prepare_sets, "--sets", tmp_path / "sets.yaml", "--names", "QQP", "NPR")
    assert "QQP.parquet: 1 rows" in printed and len(list((tmp_path / "sets").iterdir())) == 2
    with pytest.raises(SystemExit, match="has no set NOPE; its sets are"):
        run_main(prepare_sets, "--sets", tmp_path / "sets.yaml", "--names", "NOPE")
