"""Texts with one class, several classes or a number: the kind follows from the labels, and labels keep their meaning."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from neobert_hf.finetuning import LabelledTextArguments, read_labelled_texts
from neobert_hf.finetuning.texts import MULTI, REGRESSION, SINGLE


def csv_file(folder, labels, name="train.csv", header="text,label"):
    (folder / name).write_text("\n".join([header, *(f"text {i},{label}" for i, label in enumerate(labels))]) + "\n")
    return str(folder / name)


def jsonl_file(folder, labels, name="train.jsonl"):
    (folder / name).write_text("".join(json.dumps({"text": "a", "label": label}) + "\n" for label in labels))
    return str(folder / name)


def read(file, **options):
    return read_labelled_texts(LabelledTextArguments(train_file=file, validation_file=file, **options), 0, None)


def test_numbers_with_a_fraction_are_a_regression_and_the_reader_is_told(tmp_path, capsys):
    found = read(csv_file(tmp_path, ["1.5", "2", "-3.25"]))
    assert (found.problem_type, found.classes, found.train[1]) == (REGRESSION, ["label"], [1.5, 2, -3.25])
    assert "numbers from -3.25 to 2 with fractions, so this is a regression" in capsys.readouterr().out


@pytest.mark.parametrize("labels", [[1, 2, 3, 1, 2, 3], ["1.0", "0.0"] * 3, ["a", "1.5", "1.5", "a"]])
def test_whole_numbers_and_names_are_classes_unless_a_regression_is_asked_for(tmp_path, labels):
    file = csv_file(tmp_path, labels)
    assert read(file).problem_type == SINGLE
    if "a" not in labels:
        assert read(file, problem_type=REGRESSION).train[1] == [float(label) for label in labels]


LIKE_NUMBERS = [
    ([1, 2, 3, 4, 5], "labels: numbers from 1 to 5, taken as 5 classes; problem_type=regression predicts numbers"),
    (["3.8 €", "1,50 €", "0 €"],
     "'3.8 €' (4), '1,50 €' (4), '0 €' (4); to predict numbers, write them as 3.5, without"),
    (["$ 1 000", "-2 EUR", "4/5", "10 %", "n/a"], "as classes: '$ 1 000' (4), '-2 EUR' (4), '4/5' (4), '10 %' (4); to"),
    (["1 star", "2 stars", "3 stars"], "'1 star' (4), '2 stars' (4), '3 stars' (4); to predict"),
    ([0, 1], None),
    (["label 1", "label 2", "label 3"], None),
    (["01", "02", "03"], None),
    (["1 star", "good", "bad", "worse"], None),
]  # fmt: skip


@pytest.mark.parametrize(("labels", "line"), LIKE_NUMBERS)
def test_classes_that_look_like_numbers_are_named_with_the_option_that_predicts_numbers(tmp_path, capsys, labels, line):
    assert read(jsonl_file(tmp_path, labels * 4)).problem_type == SINGLE
    out = capsys.readouterr().out
    assert line in out if line else "regression" not in out


def test_texts_with_several_labels_are_named_with_the_number_of_each(tmp_path, capsys):
    def out_of(texts, labels, **options):
        file = tmp_path / "a.jsonl"
        file.write_text("".join(json.dumps({"text": t, "label": y}) + "\n" for t, y in zip(texts, labels)))
        read(str(file), **options)
        return capsys.readouterr().out

    texts = ["one two", " one\n two", "three", "four"]
    assert "several labels (1): 'one two' {'a': 5, 'b': 5}; give each text one label" in out_of(texts * 5, "abab" * 5)
    assert "(1): 'one two' {'a, b': 5, 'b': 5}" in out_of(texts * 5, [["b", "a"], ["b"], ["a"], ["b"]] * 5)
    for labels in ("aabb", [["a", "b"], ["b", "a"], ["a"], ["b"]], [1.5, 2.5, 3.5, 4.5]):
        assert "several" not in out_of(texts * 5, [*labels] * 5)


def test_several_classes_are_the_same_as_lists_as_columns_and_with_a_separator(tmp_path):
    names, rows = ["news", "rare", "sport"], [["news"], [], ["sport", "news"], ["rare"]] * 6
    columns = [",".join(str(int(name in row)) for name in names) for row in rows]
    columns = csv_file(tmp_path, columns, "columns.csv", "text,news,rare,sport")
    separated = csv_file(tmp_path, ["; ".join(row) for row in rows], "separated.csv")
    for file, options in (
        (jsonl_file(tmp_path, rows), {}),
        (columns, {"label_columns": names}),
        (separated, {"label_separator": ";"}),
    ):
        found = read(file, **options)
        assert (found.problem_type, found.classes) == (MULTI, names)
        assert list(map(set, found.train[1])) == list(map(set, rows))


def test_a_pair_of_columns_is_a_pair_of_texts(tmp_path):
    rows = [{"one": "a", "two": "b", "gold": i % 2, "other": 0} for i in range(4)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read(str(tmp_path / "a.jsonl"), text_columns=["one", "two"], label_column="gold")
    assert found.train == ([("a", "b")] * 4, ["0", "1"] * 2)


UNCLEAR = [
    (["x", "x"], {}, "all training rows have the label 'x'"),
    (["0,5", "1,5"], {"problem_type": REGRESSION}, "'0,5' is not a number"),
    (["0.5", "n/a"], {"problem_type": REGRESSION}, "'n/a' is not a number"),
    (["0.5", "1_000"], {"problem_type": REGRESSION}, "'1_000' is not a number, such as 3.5"),
    (["1,250.50", "950.00"], {"problem_type": REGRESSION}, "'1,250.50' is not a number"),
    (["1.250,50", "950,00"], {"problem_type": REGRESSION}, "'1.250,50' is not a number"),
    (["0.5", "nan"], {"problem_type": REGRESSION}, "'nan' is not finite"),
    (["0,5", "1", "2,5"], {}, "numbers with a decimal comma, such as '0,5'; write points"),
    ([[1, 0], [0, 1, 0]], {}, r"line 2: the label \[0, 1, 0\] has a class twice; .* label_columns"),
    ([[1, 0], [0, 1]], {}, "the lists of classes have 0 and 1 only; list the names .* label_columns"),
    ([["x", " x"], ["y"]], {}, r"line 1: the label \['x', ' x'\] has a class twice"),
    (["x; x", "y"], {"label_separator": ";"}, r"line 1: the label \['x', ' x'\] has a class twice"),
    ([f"{i}.8 €" for i in range(9)], {},
     "9 classes for 9 labels, .*write them as 3.5, without a unit, and choose problem_type"),
    ([["x"], "x"], {}, r"line 2: the label 'x' is no list"),
    ([1, 0, 1.0, 0, 1, 1], {}, "the classes '1' and '1.0' are one number; write it in one way"),
    (["True", "1", "0", "0"] * 2, {}, "the classes '1' and 'True' are one number"),
]  # fmt: skip


@pytest.mark.parametrize(("labels", "options", "message"), UNCLEAR)
def test_labels_with_no_or_two_meanings_are_refused(tmp_path, labels, options, message):
    with pytest.raises(ValueError, match=message):
        read(jsonl_file(tmp_path, labels), **options)


def test_a_missing_label_of_pandas_is_missing(tmp_path):
    import pandas

    frame = pandas.DataFrame({"text": ["one", "two", "three"], "label": [1, None, 0]})
    frame.to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"faults in 2 of 6 rows: .*a\.parquet, row 2: the label is missing"):
        read(str(tmp_path / "a.parquet"))


def test_test_rows_may_lack_labels_and_keep_all_columns(tmp_path):
    train = csv_file(tmp_path, "ababab")
    (tmp_path / "test.csv").write_text("id,text\n7,new\n")
    found = read(train, test_file=str(tmp_path / "test.csv"))
    assert found.test == (["new"], None) and found.test_rows == [{"id": "7", "text": "new"}]
    (tmp_path / "test.csv").write_text("id,text,label\n7,new,a\n8,old,\n")
    assert read(train, test_file=str(tmp_path / "test.csv")).test == (["new", "old"], ["a", None])
    assert read(train, test_file=csv_file(tmp_path, "  ", "blank.csv")).test[1] is None
    with pytest.raises(ValueError, match="'prediction' has the name of what is predicted; rename it"):
        read(train, test_file=csv_file(tmp_path, ["mine"], "test.csv", "text,prediction"))


def test_a_trained_model_gives_the_classes_if_there_are_no_training_rows(tmp_path):
    arguments = LabelledTextArguments(test_file=csv_file(tmp_path, ["b", "a"]))
    trained = SimpleNamespace(classes_=["b", "a"], problem_type=SINGLE)
    assert read_labelled_texts(arguments, 0, trained).test[1] == ["b", "a"]
    found = read_labelled_texts(arguments, 0, SimpleNamespace(classes_=["b", "c"], problem_type=SINGLE))
    assert found.test == (["text 0", "text 1"], ["b", None]) and found.test_faults == [("line 3", "unknown class 'a'")]


TEST_LABELS = [
    ("single", ["x", "new", "", "y"], {}, ["x", None, None, "y"], "unknown class 'new'"),
    ("regression", ["0.5", "n/a", "", "1"], {"problem_type": REGRESSION}, [0.5, None, None, 1],
     "the label 'n/a' is not a n"),
    ("separated", ["x; y", "x;new", "", "x"], {"label_separator": ";"}, [["x", "y"], None, [], ["x"]],
     "unknown class 'new'"),
    ("columns", ["1,0", "2,0", ",", "0,0"], {"label_columns": ["x", "y"]}, [["x"], None, None, []],
     "'x' has '2'; give 0 or 1"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "labels", "options", "expected", "reason"), TEST_LABELS)
def test_a_test_label_that_is_unknown_odd_or_missing_costs_no_row(tmp_path, kind, labels, options, expected, reason):
    header = "text,x,y" if kind == "columns" else "text,label"
    train = {"single": "xy", "regression": ["0.5", "1.5"], "separated": ["x; y", "y"], "columns": ["1,0", "0,1"]}[kind]
    test = csv_file(tmp_path, labels, "test.csv", header)
    found = read(csv_file(tmp_path, [*train] * 3, header=header), test_file=test, **options)
    assert found.test == ([f"text {i}" for i in range(4)], expected)
    ((place, fault),) = found.test_faults
    assert place == "line 3" and reason in fault


def test_one_filled_text_of_a_pair_is_enough_and_a_test_row_without_a_text_keeps_its_place(tmp_path):
    """As the report of a user: messages without a subject."""
    rows = [{"subject": "hi", "body": None}, {"subject": "", "body": "ten"}, {"body": "see you"}]
    rows.append({"subject": "b", "body": "c"})
    rows = [row | {"label": "ab"[i % 2]} for i, row in enumerate(rows)]
    for name, more in (("train", []), ("test", [{"subject": " ", "id": 7}, {"id": 8}, rows[0]])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows + more))
    columns = {"text_columns": ["subject", "body"], "test_file": str(tmp_path / "test.jsonl")}
    found = read(str(tmp_path / "train.jsonl"), **columns)
    assert found.train[0] == [("hi", ""), ("", "ten"), ("", "see you"), ("b", "c")]
    assert found.test == ([*found.train[0], ("hi", "")], [*"abab", "a"])
    assert found.test_places == [0, 1, 2, 3, 6] and found.test_rows[4] == {"subject": " ", "id": 7}
    with pytest.raises(ValueError, match=r"faults in 4 of 14 rows: .*line 5: 'subject' and 'body' are empty; .*line"):
        read(columns["test_file"], text_columns=columns["text_columns"])
    (tmp_path / "test.jsonl").write_text('{"subject": "", "body": ""}\n')
    with pytest.raises(ValueError, match=r"test\.jsonl: 0 test rows with a text; give at least 1"):
        read(str(tmp_path / "train.jsonl"), **columns)


def test_three_columns_of_texts_are_refused():
    with pytest.raises(ValueError, match="text_columns=a b c; name one or two"):
        LabelledTextArguments(train_file="a.csv", text_columns=["a", "b", "c"])


def test_numbers_of_all_sizes_are_held_out(tmp_path):
    """Each of ten equal ranges of the sorted numbers gives one of ten held-out rows."""
    file = csv_file(tmp_path, np.random.default_rng(0).permutation(np.arange(100) + 0.5))
    held_out = read_labelled_texts(LabelledTextArguments(train_file=file), 0, None).validation[1]
    assert sorted(number // 10 for number in held_out) == list(range(10))
