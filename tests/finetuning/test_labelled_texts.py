"""Texts with one class, several classes or a number: the kind follows from the labels, and labels keep their meaning."""

import json

import numpy as np
import pytest

pytest.importorskip("datasets", reason="labelled rows need datasets (pip install -e .[train])")

from neobert_hf.finetuning.labelled_texts import MULTI, REGRESSION, SINGLE, LabelledTextArguments, read_texts


def csv_file(folder, labels, name="train.csv", header="text,label"):
    (folder / name).write_text("\n".join([header, *(f"text {i},{label}" for i, label in enumerate(labels))]) + "\n")
    return str(folder / name)


def jsonl_file(folder, labels, name="train.jsonl"):
    (folder / name).write_text("".join(json.dumps({"text": "a", "label": label}) + "\n" for label in labels))
    return str(folder / name)


def read(file, **options):
    return read_texts(LabelledTextArguments(train_file=file, validation_file=file, **options), 0)


def test_numbers_with_a_fraction_are_a_regression_and_the_reader_is_told(tmp_path, capsys):
    texts = read(csv_file(tmp_path, ["1.5", "2", "-3.25"]))
    assert (texts.problem_type, texts.names) == (REGRESSION, ["label"])
    assert list(texts.data["train"]["label"]) == [1.5, 2, -3.25]
    assert "label: numbers from -3.25 to 2 with fractions, so this is a regression" in capsys.readouterr().out


@pytest.mark.parametrize("labels", [[1, 2, 3, 1, 2, 3], ["1.0", "0.0"] * 3, ["a", "1.5", "1.5", "a"]])
def test_whole_numbers_and_names_are_classes_unless_a_regression_is_asked_for(tmp_path, labels):
    file = csv_file(tmp_path, labels)
    assert read(file).problem_type == SINGLE
    if "a" not in labels:
        texts = read(file, problem_type=REGRESSION)
        assert list(texts.data["train"]["label"]) == [float(label) for label in labels]


def test_several_classes_are_the_same_as_lists_as_columns_and_with_a_separator(tmp_path):
    names, rows = ["news", "rare", "sport"], [["news"], [], ["sport", "news"], ["rare"]] * 6
    lists = jsonl_file(tmp_path, rows)
    columns = csv_file(
        tmp_path,
        [",".join(str(int(name in row)) for name in names) for row in rows],
        "columns.csv",
        "text,news,rare,sport",
    )
    separated = csv_file(tmp_path, ["; ".join(row) for row in rows], "separated.csv")
    expected = [[float(name in row) for name in names] for row in rows]
    for file, options in (
        (lists, {}),
        (columns, {"label_columns": names}),
        (separated, {"label_separator": ";"}),
    ):
        texts = read(file, **options)
        assert (texts.problem_type, texts.names) == (MULTI, names)
        assert list(texts.data["train"]["label"]) == expected


@pytest.mark.parametrize(
    ("labels", "same"),
    [
        (["1", "1.0", "True", "0", "False"], ["1", "1", "1", "0", "0"]),
        ([1, 1.0, True, 0, 0.0], ["1", "1", "1", "0", "0"]),
    ],
)
def test_spellings_of_one_number_are_one_class_and_the_reader_is_told(tmp_path, capsys, labels, same):
    texts = read(jsonl_file(tmp_path, labels * 2))
    assert [texts.names[i] for i in texts.data["train"]["label"]] == same * 2
    assert "the labels '1', '1.0', 'True' are one class: '1'" in capsys.readouterr().out


@pytest.mark.parametrize("file", [csv_file, jsonl_file])
@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        (["x", "x"], {}, "all training rows have the label 'x'"),
        (["0,5", "1,5"], {"problem_type": REGRESSION}, "'0,5' is not a number"),
        (["0.5", "n/a"], {"problem_type": REGRESSION}, "'n/a' is not a number"),
        (["0.5", "nan"], {"problem_type": REGRESSION}, "'nan' is not finite"),
        (["2", "2"], {"problem_type": REGRESSION}, "all training rows have the number 2.0; nothing can be learned"),
    ],
)
def test_labels_from_which_nothing_can_be_learned_are_refused(tmp_path, file, labels, options, message):
    if file is csv_file and "," in labels[0]:
        labels = [f'"{label}"' for label in labels]
    with pytest.raises(ValueError, match=message):
        read(file(tmp_path, labels), **options)


def test_a_missing_label_of_pandas_is_missing(tmp_path):
    pandas = pytest.importorskip("pandas", reason="datasets depends on it")
    frame = pandas.DataFrame({"text": ["one", "two", "three"], "label": [1, None, 0]})
    frame.to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"2 of 6 rows have faults: .*a\.parquet, row 2: the label is missing"):
        read(str(tmp_path / "a.parquet"))


def test_decimal_commas_and_vectors_in_the_place_of_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="label has numbers with a decimal comma, such as '0,5'; write points"):
        read(csv_file(tmp_path, ['"0,5"', "1", '"2,5"']))
    with pytest.raises(ValueError, match=r"line 2: the label \[0, 1, 0\] has a class twice; .* --label_columns"):
        read(jsonl_file(tmp_path, [[1, 0], [0, 1, 0]]))
    with pytest.raises(ValueError, match=r"line 2: the label 'x' is no list"):
        read(jsonl_file(tmp_path, [["x"], "x"]))


def test_a_column_of_numbers_is_no_text(tmp_path):
    file = csv_file(tmp_path, [f"{label},7" for label in "abab"], header="text,label,id")
    with pytest.raises(ValueError, match=r"the column 'id' has numbers only, such as '7' .*line 2.* by --text_columns"):
        read(file, text_columns=["id"])


def test_test_rows_may_lack_labels_and_keep_all_columns(tmp_path):
    train = csv_file(tmp_path, "abab")
    (tmp_path / "test.csv").write_text("id,text\n7,new\n")
    texts = read(train, test_file=str(tmp_path / "test.csv"))
    assert texts.data["test"].column_names == ["text"]
    assert texts.test_rows == [{"id": "7", "text": "new"}]
    (tmp_path / "test.csv").write_text("id,text,label\n7,new,a\n8,old,\n")
    with pytest.raises(ValueError, match=r"1 of 14 rows has a fault: .*test\.csv, line 3: the label is missing"):
        read(csv_file(tmp_path, "ababab"), test_file=str(tmp_path / "test.csv"))


def test_test_rows_whose_labels_are_all_blank_are_rows_without_labels(tmp_path):
    train, blank, half = (csv_file(tmp_path, labels, labels + ".csv") for labels in ("abab", "  ", "a "))
    assert "label" not in read(train, test_file=blank).data["test"].column_names
    with pytest.raises(ValueError, match=r"a .csv, line 3: the label is missing"):
        read(train, test_file=half)


def test_a_test_column_with_the_name_of_the_predictions_is_refused(tmp_path):
    train, test = csv_file(tmp_path, "abab"), csv_file(tmp_path, ["mine"], "test.csv", "text,prediction")
    with pytest.raises(ValueError, match="'prediction' has the name of what is predicted; rename it"):
        read(train, test_file=test)


def test_one_row_of_each_class_leaves_one_class_to_train(tmp_path):
    with pytest.raises(ValueError, match="all training rows have one class when the validation rows are held out"):
        read_texts(LabelledTextArguments(train_file=csv_file(tmp_path, "ab")), 0)


def test_a_trained_model_gives_the_classes_if_there_are_no_training_rows(tmp_path):
    arguments = LabelledTextArguments(test_file=csv_file(tmp_path, ["b", "a"]))
    texts = read_texts(arguments, 0, SINGLE, ["b", "a"])
    assert list(texts.data["test"]["label"]) == [0, 1]
    with pytest.raises(ValueError, match=r"line 3: the label 'a' is in no training row; they have b, c"):
        read_texts(arguments, 0, SINGLE, ["b", "c"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_columns": ["a", "b", "c"]}, "are 3 columns; name one or two"),
        ({"label_columns": ["a"], "label_separator": ";"}, "give one of --label_columns and --label_separator"),
        ({"label_separator": ";", "problem_type": REGRESSION}, "give several classes, not problem_type=regression"),
        ({"label_columns": ["text"]}, "a column of texts cannot be that of the labels"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LabelledTextArguments(train_file="a.csv", **options)


def test_numbers_of_all_sizes_are_held_out(tmp_path):
    """Each of ten equal ranges of the sorted numbers gives one of ten held-out rows."""
    rng = np.random.default_rng(0)
    file = csv_file(tmp_path, rng.permutation(np.arange(100) + 0.5))
    data = read_texts(LabelledTextArguments(train_file=file), 0).data
    assert sorted(number // 10 for number in data["validation"]["label"]) == list(range(10))
