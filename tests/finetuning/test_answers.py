"""Answers: windows and best spans equal those of exhaustive searches, metrics those computed by hand; the script learns."""

import json
import random
import re
import unicodedata

import finetune_qa
import numpy as np
import pytest
from conftest import SENTENCE, run_main

from neobert_hf import MINI_MODEL_PATH
from neobert_hf.checkpoints.tokenizer import load_tokenizer
from neobert_hf.finetuning import QuestionAnswerer, answer_metrics
from neobert_hf.finetuning.answers import best_answers, cut_windows

FEET = unicodedata.normalize("NFD", "Füße")  # the accent is a character of its own
WORDS = ["Grüße", "Köln", FEET, "東京都", "日本", "🎉", "👩\u200d👧", "float32", "parseXML", "l'été", "a"]
LABELLED = ("row", "input_ids", "offsets", "first", "start_positions", "end_positions")


@pytest.fixture(scope="module")
def mini_tokenizer():
    return load_tokenizer(MINI_MODEL_PATH)


def examples(num_rows):
    """Questions on random words of several scripts; the answer is some words in a row, or missing."""
    rng = random.Random(0)
    rows = {"question": [], "context": [], "answers": []}
    for i in range(num_rows):
        words = rng.choices(WORDS, k=rng.randrange(1, 90))
        begin = rng.randrange(len(words))
        chosen = words[begin : begin + rng.randrange(1, 4)]
        answers = {"text": [" ".join(chosen)], "answer_start": [len(" ".join([*words[:begin], ""]))]}
        rows["question"].append(" ".join(rng.choices(WORDS, k=rng.randrange(1, 5))))
        rows["context"].append(" ".join(words))
        rows["answers"].append(answers if i % 4 else {"text": [], "answer_start": []})
    return rows


def test_an_answer_is_labelled_in_each_window_that_has_all_of_it_and_in_no_other(mini_tokenizer):
    rows = examples(200)
    windows = cut_windows(rows, range(200), mini_tokenizer, max_seq_length=48, stride=16)
    whole = [0] * 200
    for row, ids, offsets, first, start, end in zip(*(windows[name] for name in LABELLED)):
        assert len(ids) <= 48 and len(offsets) == len(ids) - first - 1  # [SEP] is last
        context, answers = rows["context"][row], rows["answers"][row]
        is_inside = False
        if answers["text"]:
            begin = answers["answer_start"][0]
            letters = [begin + i for i, letter in enumerate(answers["text"][0]) if not unicodedata.combining(letter)]
            is_inside = offsets[0][0] <= letters[0] and letters[-1] < offsets[-1][1]
        assert (start > 0) == (end > 0) == is_inside
        if is_inside:
            assert offsets[start - first][0] == begin
            assert context[offsets[end - first][1] : begin + len(answers["text"][0])] in ("", "\u0308")
            whole[row] += 1
    assert max(windows["row"].count(row) for row in range(200)) > 3
    assert max(whole) > 1  # in the tokens that two windows share
    short = [row for row in range(200) if rows["answers"][row]["text"] and whole[row] == 0]
    assert not short  # an answer has fewer tokens than two windows share


def test_answers_that_no_window_has_as_a_whole_are_counted(capsys):
    context = "a b c d e f " * 9
    answers = [{"text": [context[:n].strip()] * (n > 0), "answer_start": [0] * (n > 0)} for n in (80, 9, 0)]
    answerer = QuestionAnswerer(stride=8)
    answerer.tokenizer.model_max_length = 32
    answerer._rows(["a"] * 3, [context] * 3, answers, split="training")
    line = "; 1 of the answers are whole in no window, and are trained as none; give a larger stride\n"
    assert capsys.readouterr().out.endswith(line)


def spans(start, end, first, count, longest):
    for i in range(first, first + count):
        for j in range(i, min(first + count, i + longest)):
            yield float(start[i]) + float(end[j]) - float(start[0]) - float(end[0]), i - first, j - first


def test_the_best_answer_is_that_of_an_exhaustive_search_over_all_windows(mini_tokenizer):
    rows, rng = examples(60), np.random.default_rng(0)
    windows = cut_windows(rows, range(60), mini_tokenizer, max_seq_length=40, stride=10)
    width = max(map(len, windows["input_ids"])) + 3  # padding
    start, end = rng.normal(size=(2, len(windows["row"]), width))
    start[:, 0] += 2.5  # so that some questions have no answer
    found = best_answers(start, end, windows, rows["context"], max_answer_tokens=5)
    for row in range(60):
        best = max(
            (*span, offsets)
            for window, (number, offsets, first) in enumerate(zip(*(windows[x] for x in ("row", "offsets", "first"))))
            if number == row
            for span in spans(start[window], end[window], first, len(offsets), 5)
        )
        score, i, j, offsets = best
        assert found[row]["score"] == pytest.approx(score, abs=1e-12)
        if score <= 0:
            assert found[row] == {"answer": "", "score": found[row]["score"], "start": None}
        else:
            text = rows["context"][row][offsets[i][0] : offsets[j][1]]
            assert found[row]["start"] == offsets[i][0]
            assert found[row]["answer"].rstrip("\u0308") == text.rstrip("\u0308")
    assert {bool(answer["answer"]) for answer in found} == {True, False}


def test_the_tokens_of_an_answer_give_the_answer_again(mini_tokenizer):
    """Also where an answer crosses the end of a window, and where an accent is a character that no token has."""
    rows = examples(200)
    windows = cut_windows(rows, range(200), mini_tokenizer, max_seq_length=48, stride=16)
    start, end = (np.zeros((len(windows["row"]), 48)) for _ in range(2))
    for window, (first, last) in enumerate(zip(windows["start_positions"], windows["end_positions"])):
        start[window, first], end[window, last] = 5, 5
    found = [answer["answer"] for answer in best_answers(start, end, windows, rows["context"])]
    assert found == [answers["text"][0] if answers["text"] else "" for answers in rows["answers"]]


def test_a_question_that_leaves_no_place_and_a_context_without_tokens_are_refused(mini_tokenizer):
    rows = {"question": ["open a file " * 20], "context": ["a b c " * 50]}
    with pytest.raises(ValueError, match=r"has 60 tokens, but max_seq_length=64 and stride=16 leave 44; shorten it"):
        cut_windows(rows, [0], mini_tokenizer, 64)
    with pytest.raises(ValueError, match="has no token; remove its questions"):
        cut_windows({"question": ["what"], "context": ["\x00"]}, [0], mini_tokenizer, 64)


def test_the_metrics_are_those_of_squad():
    answers = ["the Rhine!", "river Rhine", "", "Rhine", "Elbe"]
    expected = [["Rhine"], ["Elbe", "the Rhine"], [], [], ["Rhine"]]
    found = answer_metrics(answers, [{"text": texts} for texts in expected])
    f1 = [1, 2 / 3, 1, 0, 0]  # the second shares one of two and of one word with its better answer
    assert found == pytest.approx(
        {"exact_match": 2 / 5, "f1": sum(f1) / 5, "answerable_f1": (1 + 2 / 3) / 3, "impossible_accuracy": 1 / 2},
        abs=1e-6,
    )
    assert answer_metrics(["x"], [{"text": ["x"]}]) == {"exact_match": 1, "f1": 1}


@pytest.mark.slow
@pytest.mark.compat
def test_the_script_learns_which_word_answers_and_the_saved_model_gives_the_predictions(model_folder, tmp_path):
    """`fox` is the answer to `the quick`; a text without it has none. Some texts have several windows."""
    rng, others = random.Random(0), [word for word in SENTENCE.split() if word != "fox"]

    def write(name, count):
        with (tmp_path / name).open("w") as stream:
            for i in range(count):
                words = rng.choices(others, k=rng.randrange(2, 40))
                answers = {"text": [], "answer_start": []}
                if i % 3:
                    words[rng.randrange(len(words))] = "fox"
                    answers = {"text": ["fox"], "answer_start": [" ".join(words).index("fox")]}
                row = {"question": "the quick", "context": " ".join(words), "answers": answers}
                stream.write(json.dumps(row) + "\n")
        return tmp_path / name

    options = ["--test_file", write("test.jsonl", 30), "--output_dir", tmp_path / "out", "--use_cpu"]
    training = ["--train_file", write("train.jsonl", 300), "--learning_rate", "3e-3", "--max_seq_length", "32"]
    printed = run_main(finetune_qa, "--model_name_or_path", model_folder, *training, *options)
    for words in (r"training: \d+ questions, \d+ windows", r"test, .*exact_match.*\nthis model +1.0000"):
        assert re.search(words, printed)
    predictions = [json.loads(line) for line in (tmp_path / "out/predictions.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (tmp_path / "test.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in predictions] == ["fox" if row["answers"]["text"] else "" for row in rows]
    asked = [[row[name] for row in rows] for name in ("question", "context")]
    answerer = QuestionAnswerer(tmp_path / "out")
    found = answerer.predict(*asked)
    assert [row["start"] for row in found] == [row["start"] for row in predictions]
    assert [row["score"] for row in found] == pytest.approx([row["score"] for row in predictions], abs=1e-4)  # float32
    assert answerer.evaluate(*asked, [row["answers"] for row in rows])["f1"] == 1

    options[3] = tmp_path / "alone"
    predicted = ("--predictions_file", tmp_path / "a.csv")
    run_main(finetune_qa, "--model_name_or_path", tmp_path / "out", *options, *predicted)
    of_test = [tmp_path / folder / "test_results.json" for folder in ("out", "alone")]
    assert of_test[0].read_text() == of_test[1].read_text()
    assert (tmp_path / "a.csv").read_text().startswith("id,question,answer,score,start\n")
    with pytest.raises(SystemExit, match="is not a trained model for questions; give the folder of one"):
        run_main(finetune_qa, "--model_name_or_path", model_folder, *options)


def test_a_saved_model_gives_the_answers_of_the_fit(start, tmp_path):
    contexts = [f"the {word} jumps over {other}" for word in ("fox", "dog") for other in ("sea", "house")] * 4
    answers = [{"text": [text.split()[1]], "answer_start": [4]} for text in contexts]
    options = {"use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2, "max_steps": 24}
    answerer = QuestionAnswerer(start, 16).fit(["it"] * 16, contexts, answers, **options)
    found = answerer.predict(["it"] * 16, contexts)
    assert [row["answer"] for row in found] == [text.split()[1] for text in contexts]
    assert answerer.evaluate(["it"] * 16, contexts, answers) == {"exact_match": 1, "f1": 1}
    answerer.save(tmp_path / "saved")
    assert QuestionAnswerer(tmp_path / "saved").predict(["it"] * 16, contexts) == found
