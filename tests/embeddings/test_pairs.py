"""Pairs from files of rows: the order of the columns, refused lines, and rows that are held out."""

import pytest
from datasets import Dataset

from neobert_hf.embeddings import hold_out, read_pairs


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"q": "a", "d": "b"}\n\n{"q": "a"}\n', "line 3: .* is not a row of at least two columns"),
        ('{"q": "a", "d": "b"}\n{"q": "a", "e": "b"}\n', "line 2: .* the same in all lines"),
        ('{"q": "a", "d": null}\n', "line 1: d is None"),
        ('{"q": "a", "d": "  "}\n', "line 1: d is empty, which is neither"),
        ('["a", "b"]\n', "item 1: .* is not a row"),
        ("", "a.jsonl is empty"),
    ],
)
def test_the_error_for_an_invalid_line_of_pairs_names_its_number(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_pairs(tmp_path / "a.jsonl")


def test_every_kind_of_file_gives_the_same_pairs(tmp_path):
    rows = {"label": ["a, b", "c"], "score": ['d "e"', "f\ng"], "hard": ["h", "i"]}
    dataset = Dataset.from_dict(rows)
    dataset.to_json(tmp_path / "a.jsonl")
    dataset.to_csv(tmp_path / "a.csv", index=False)
    dataset.to_parquet(tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.csv", "a.parquet"):
        read = read_pairs(tmp_path / name)  # "label" and "score" would not be read as texts
        assert read.column_names == ["anchor", "positive", "negative_1"]
        assert list(read.to_dict().values()) == list(rows.values())


def test_held_out_rows_are_a_share_by_the_seed_and_never_trained():
    rows = Dataset.from_dict({"anchor": [f"question {i}" for i in range(50)], "positive": [str(i) for i in range(50)]})

    def divided(seed, share=0.2):
        training, held_out = hold_out({"set": rows}, share, seed)
        return list(training["set"]["anchor"]), list(held_out["set"]["anchor"])

    training, held_out = divided(0)
    assert len(held_out) == 10 and sorted(training + held_out) == sorted(rows["anchor"])
    assert divided(0) == (training, held_out) != divided(1)
    training, held_out = hold_out({"set": rows}, 0, 0)
    assert len(training["set"]) == 50 and not held_out
    many = Dataset.from_dict({"anchor": ["a"] * 20_000, "positive": ["b"] * 20_000})
    assert len(hold_out({"set": many}, 0.1, 0)[1]["set"]) == 1000
