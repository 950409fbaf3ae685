"""Training with instructions: their effect, their files, and what the texts of a set look like to model and evaluator."""

import json
from pathlib import Path

import numpy as np
import pytest
import train_embeddings
from conftest import SENTENCE, new_encoder, run_main
from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformer
from train_embeddings import PaperArguments, read_prompts, train_with_prompts

from neobert_hf.data.wordpiece import train_wordpiece
from neobert_hf.embeddings import ContrastiveTrainingArguments, open_sets, sentence_transformer

QUIET = dict(use_cpu=True, report_to="none", disable_tqdm=True)
SYLLABLES = [a + b for a in "bdfgklmnprst" for b in "aeio"]
SIZE = dict(hidden_size=64, num_hidden_layers=2, intermediate_size=96)
PROMPT = "the red "


@pytest.mark.slow
def test_instructions_decide_between_two_targets_of_one_question_in_a_training_from_python(tmp_path):
    """Each question has one target for each instruction, from the same words; without instructions recall is at most one half."""
    words = SYLLABLES
    questions, targets = words[:16], {"first": words[16:32], "second": words[17:32] + words[16:17]}
    tokenizer = train_wordpiece([" ".join([*words, *targets])] * 3, vocab_size=200, model_max_length=32)
    model = sentence_transformer(str(new_encoder(tmp_path / "bare", tokenizer, **SIZE)))
    sets = {name: Dataset.from_dict({"anchor": questions, "positive": texts}) for name, texts in targets.items()}
    options = {"max_steps": 150, "per_device_train_batch_size": 16, "learning_rate": 2e-3, "warmup_steps": 10}
    training = ContrastiveTrainingArguments(str(tmp_path / "run"), save_strategy="no", **options, **QUIET)
    arguments = PaperArguments(str(tmp_path / "bare"), instruction_sides="query")
    prompts = {name: f"{name} " for name in targets}
    train_with_prompts(model, DatasetDict(sets), training, arguments, prompts, DatasetDict())
    assert training.prompts == {name: {"anchor": f"{name} "} for name in targets}
    run = json.loads((tmp_path / "run/run.json").read_text())  # a resume compares it
    assert run["prompts"] == training.prompts and run["texts"]["first"] != run["texts"]["second"]

    documents = targets["first"]
    expected = [documents.index(answer) for answers in targets.values() for answer in answers]
    texts = [f"{name} {word}" for name in targets for word in questions]
    found = model.encode(texts, normalize_embeddings=True) @ model.encode(documents, normalize_embeddings=True).T
    assert np.mean(found.argmax(1) == np.array(expected)) >= 0.95


@pytest.fixture
def command(folder, tmp_path):
    rng, words, files = np.random.default_rng(0), SENTENCE.split(), []
    for name, count in {"large": 90, "small": 12}.items():
        rows = [{"q": " ".join(rng.choice(words, 3)), "d": " ".join(rng.choice(words, 6))} for _ in range(count)]
        files.append(str(tmp_path / f"{name}.jsonl"))
        Path(files[-1]).write_text("\n".join(map(json.dumps, rows)))
    options = dict(model_name_or_path=folder, validation_files=files[1], per_device_train_batch_size=4, max_steps=2)

    def build(**changes):
        flags = {"train_files": files, **options, **QUIET, "output_dir": tmp_path / "run", **changes}
        given = {name: value for name, value in flags.items() if value is not None}
        parts = [[f"--{name}", *(value if isinstance(value, list) else [value])] for name, value in given.items()]
        return [str(word) for part in parts for word in part]

    return build


def test_listed_sets_have_the_files_and_instructions_of_their_yaml_file(command, tmp_path):
    listed = {name: {"file": f"{name}.jsonl", "instruction": f"the {name}"} for name in ("large", "small")}
    listed["small"]["path"] = "org/small"
    (tmp_path / "sets.yaml").write_text(json.dumps(listed))  # JSON is YAML
    given = command(train_files=None, training_sets=[tmp_path / "sets.yaml", "small"])
    printed = run_main(train_embeddings, *given)
    assert "small: 12 rows of anchor, positive; prompt 'the small '" in printed and "large" not in printed
    assert json.loads((tmp_path / "run/training.json").read_text("utf-8"))["datasets"] == ["org/small"]
    assert SentenceTransformer(str(tmp_path / "run")).prompts == {"query": "the small ", "document": "the small "}
    arguments = PaperArguments("model", training_sets=[str(tmp_path / "sets.yaml")])
    sets, held_out = open_sets(arguments, 0)
    assert read_prompts(arguments, sets) == {"large": "the large ", "small": "the small "}
    assert len(sets["large"]) == 90 and not held_out


@pytest.mark.slow
def test_mined_negatives_instructions_and_gradient_caching_run_through_the_example(command, tmp_path):
    Path(tmp_path, "instructions.json").write_text(json.dumps({"small": "the fox", "large": "a house"}))
    changes = dict(instructions=tmp_path / "instructions.json", num_mined_negatives=2, mini_batch_size=2, max_steps=3)
    printed = run_main(train_embeddings, *command(**changes))
    assert "12 rows of anchor, positive, negative_1, negative_2; prompt 'the fox '" in printed


@pytest.mark.parametrize("sides", ["both", "query"])
def test_texts_that_are_truncated_with_their_instruction_are_counted(folder, tokenizer, tmp_path, caplog, sides):
    questions, answers = ["the fox", "the quick old fox"], ["sea by the old sea", "dog"]
    rows = Dataset.from_dict({"anchor": questions, "positive": answers})
    model = SentenceTransformer(folder)
    model.max_seq_length = 6
    options = dict(max_steps=1, per_device_train_batch_size=2, save_strategy="no", **QUIET)
    training = ContrastiveTrainingArguments(str(tmp_path / "run"), **options)
    arguments = PaperArguments(folder, instruction_sides=sides)
    train_with_prompts(model, DatasetDict(faq=rows), training, arguments, {"faq": PROMPT}, DatasetDict(faq=rows))
    before = PROMPT if sides == "both" else ""
    inputs = [PROMPT + text for text in questions] + [before + text for text in answers]
    number = sum(len(tokenizer(text)["input_ids"]) > 6 for text in inputs)
    assert f"2 rows of faq: {number} of 4 texts are truncated" in caplog.text and 0 < number < 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(train_files=["a.jsonl"], training_sets=["s.yaml"]), "not both"),
        (dict(instructions="i.json", training_sets=["s.yaml"]), "not both"),
        (dict(training_sets=["s.yaml", "b"]), "s.yaml has no set with a file named b; its sets are a, c"),
        (dict(training_sets=["s.yaml"]), "s.yaml has no set with a file named c"),
        (dict(train_files=["a.jsonl"], instructions="broken"), "broken is no YAML in UTF-8"),
        (dict(train_files=["a.jsonl"], instruction_template="x"), "does not contain"),
        (dict(train_files=["a.jsonl"], instructions="i.json"), "i.json: other is not a set; the sets are a"),
    ],
)
def test_instructions_that_contradict_the_sets_are_refused(tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"q": "a", "d": "b"}\n')
    Path("s.yaml").write_text("a: {file: a.jsonl}\nc: {instruction: Find it.}\n")
    Path("i.json").write_text('{"other": "Find it."}')
    Path("broken").write_text("{a: [")
    with pytest.raises(ValueError, match=message):
        arguments = PaperArguments("model", **changes)
        read_prompts(arguments, open_sets(arguments, 0)[0])
