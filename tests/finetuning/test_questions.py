"""Questions: SQuAD's nested JSON and flat rows give the same, and a fault names its place and the way out."""

import json

import pytest
from datasets import Dataset

from neobert_hf.finetuning import LabelledDataArguments, read_questions

TEXT = "Köln liegt am Rhein. 東京 ist weit weg 🎉."
FLAT = [
    {"id": "1", "question": "Wo liegt Köln?", "context": TEXT, "answers": {"text": ["am Rhein"], "answer_start": [11]}},
    {"id": "2", "question": "Was ist weit?", "context": TEXT, "answers": {"text": ["東京"], "answer_start": [21]}},
    {"id": "3", "question": "Wer ist da?", "context": "Niemand.", "answers": {"text": [], "answer_start": []}},
]


def nested(number, **more):
    """A question of FLAT as SQuAD writes it."""
    row = FLAT[number]
    answers = [dict(zip(("text", "answer_start"), pair)) for pair in zip(*row["answers"].values())]
    return {"id": row["id"], "question": row["question"], "answers": answers} | more


IMPOSSIBLE = {"is_impossible": True, "plausible_answers": [{"text": "Niemand", "answer_start": 0}]}
PARAGRAPHS = [
    {"context": TEXT, "qas": [nested(0), nested(1, id=2, is_impossible=False)]},
    {"context": "Niemand.", "qas": [nested(2, **IMPOSSIBLE)]},
]
NESTED = {"version": "v2.0", "data": [{"title": "Städte", "paragraphs": PARAGRAPHS}]}


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def read(folder, content, name="test.jsonl", **options):
    (folder / name).write_text(content, "utf-8-sig")
    return flat(read_questions(LabelledDataArguments(test_file=str(folder / name), **options), seed=0))


def flat(found):
    questions, contexts, answers = found.test
    rows = zip(found.test_rows, questions, contexts, answers)
    return [{"id": row["id"], "question": q, "context": c, "answers": a} for row, q, c, a in rows]


def test_nested_and_flat_files_give_the_same_questions(tmp_path):
    assert read(tmp_path, lines(FLAT)) == FLAT
    for indent in (None, 1):
        assert read(tmp_path, json.dumps(NESTED, indent=indent), "squad.json") == FLAT
    Dataset.from_list(FLAT).to_parquet(tmp_path / "rows.parquet")
    arguments = LabelledDataArguments(test_file=str(tmp_path / "rows.parquet"))
    assert flat(read_questions(arguments, seed=0)) == FLAT


@pytest.mark.parametrize("answers", [[dict(text="am Rhein", answer_start=11)], dict(text="am Rhein", answer_start=11)])
def test_other_spellings_of_answers_are_read(tmp_path, answers):
    assert read(tmp_path, lines([FLAT[0] | {"answers": answers}]))[0]["answers"] == FLAT[0]["answers"]


def test_white_space_around_an_answer_is_not_part_of_it(tmp_path):
    answers = {"text": [" am Rhein. "], "answer_start": [10]}
    found = read(tmp_path, lines([FLAT[0] | {"answers": answers}]))[0]["answers"]
    assert found == {"text": ["am Rhein."], "answer_start": [11]}


def test_test_questions_may_have_no_answers_and_no_ids(tmp_path):
    (tmp_path / "test.jsonl").write_text(lines([{"question": row["question"], "context": TEXT} for row in FLAT]))
    found = read_questions(LabelledDataArguments(test_file=str(tmp_path / "test.jsonl")), seed=0)
    assert found.test[2] is None and found.test[1] == [TEXT] * 3
    assert found.test_rows[1] == {"id": f"{tmp_path}/test.jsonl, line 2", "question": "Was ist weit?"}


FAULTS = [
    ({"answers": {"text": ["Rhein"], "answer_start": [11]}}, "the answer 'Rhein' is not at character 11.* it is at 14"),
    ({"answers": {"text": ["Elbe"], "answer_start": [11]}}, "the answer 'Elbe' is not at .* it is nowhere in it"),
    ({"answers": {"text": ["am Rhein"], "answer_start": ["11"]}}, "the answer 'am Rhein' is not at character 11"),
    ({"answers": {"text": ["am Rhein"], "answer_start": []}},
     "'answers' is .*; write the lists text and answer_start, of"),
    ({"answers": "am Rhein"}, "'answers' is 'am Rhein'; write the lists"),
    ({"answers": None}, "'answers' is missing; a question without an answer has empty lists"),
    ({"is_impossible": True}, "the question is_impossible and has the answer 'am Rhein'; remove one of them"),
    ({"question": " "}, "'question' is empty"),
    ({"context": None}, "'context' is empty"),
    ({"context": 3}, "'context' is 3, a int; every text must be a string"),
]  # fmt: skip


@pytest.mark.parametrize("change, message", FAULTS)
def test_the_message_for_a_faulty_row_names_its_line_and_the_fault(tmp_path, change, message):
    (tmp_path / "train.jsonl").write_text(lines([FLAT[1], FLAT[0] | change, FLAT[2]]))
    (tmp_path / "dev.jsonl").write_text(lines(FLAT))
    files = {"train_file": str(tmp_path / "train.jsonl"), "validation_file": str(tmp_path / "dev.jsonl")}
    with pytest.raises(ValueError, match=f"faults in 1 of 6 rows: .*train.jsonl, line 2: {message}") as raised:
        read_questions(LabelledDataArguments(**files), seed=0)
    assert "\n" not in str(raised.value)
    found = read_questions(LabelledDataArguments(**files, skip_bad_rows=True), seed=0)
    assert found.train[0] == [FLAT[1]["question"], FLAT[2]["question"]]


def test_a_test_question_keeps_its_place_without_a_context_or_with_wrong_answers(tmp_path):
    wrong = {"answers": {"text": ["Elbe"], "answer_start": [11]}}
    rows = [FLAT[0], FLAT[1] | {"context": " "}, FLAT[2] | wrong, {"question": "Wer?"}]
    rows += [FLAT[2], FLAT[1] | {"answers": None}]
    (tmp_path / "test.jsonl").write_text(lines(rows))
    found = read_questions(LabelledDataArguments(test_file=str(tmp_path / "test.jsonl")), seed=0)
    assert [row["question"] for row in found.test_rows] == [row["question"] for row in rows]
    assert found.test_places == [0, 2, 4, 5] and found.test[1] == [rows[i]["context"] for i in found.test_places]
    assert found.test[2] == [FLAT[0]["answers"], None, FLAT[2]["answers"], None]
    fault = "the answer 'Elbe' is not at character 11, its answer_start; it is nowhere in it"
    assert found.test_faults == [("line 3", fault)]


def test_a_fault_in_nested_json_is_named_by_title_paragraph_and_question(tmp_path):
    nested = json.loads(json.dumps(NESTED))
    nested["data"][0]["paragraphs"][0]["qas"][1]["answers"][0]["answer_start"] = 22
    (tmp_path / "squad.json").write_text(json.dumps(nested))
    place = r"squad.json, title 1, paragraph 1, question 2: the answer '東京' .* it is at 21"
    with pytest.raises(ValueError, match=place):
        read_questions(LabelledDataArguments(train_file=str(tmp_path / "squad.json")), seed=0)
    del nested["data"][0]["paragraphs"][0]["context"]
    with pytest.raises(ValueError, match=r"squad.json has data that is not as in SQuAD \(KeyError: 'context'\)"):
        read(tmp_path, json.dumps(nested), "squad.json")


def test_held_out_texts_have_no_question_in_training(tmp_path):
    rows = [{**FLAT[2], "context": f"Text {i // 3}.", "id": str(i)} for i in range(60)]
    (tmp_path / "train.jsonl").write_text(lines(rows))
    arguments = LabelledDataArguments(train_file=str(tmp_path / "train.jsonl"))
    found = read_questions(arguments, seed=0)
    trained, held_out = set(found.train[1]), set(found.validation[1])
    assert len(held_out) == 2 and trained.isdisjoint(held_out)
    assert len(found.train[0]) + len(found.validation[0]) == 60
    assert set(read_questions(arguments, seed=1).validation[1]) != held_out
    (tmp_path / "train.jsonl").write_text(lines(rows[:3]))
    with pytest.raises(ValueError, match="all questions have the same context; give validation_file"):
        read_questions(arguments, seed=0)
