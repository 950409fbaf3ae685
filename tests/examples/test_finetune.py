"""The fine-tuning examples: they learn a rule that the data follow, and the saved folder opens in a pipeline."""

import csv
import json
import os
import random
import shutil
import signal

import finetune_classifier
import finetune_tagger
import pytest
import torch
import transformers
from conftest import SENTENCE, json_lines, run_main
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from neobert_hf import NeoBERTConfig, NeoBERTForSequenceClassification
from neobert_hf.runs import FineTuningArguments

WORDS = SENTENCE.split()
SHAPE = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96)


def command(model_folder, train, out, *more):
    return [
        *("--model_name_or_path", model_folder, "--train_file", train, "--output_dir", out, "--use_cpu", "true"),
        *("--learning_rate", "3e-3", "--per_device_train_batch_size", "16", "--report_to", "none", *more),
    ]


@pytest.mark.parametrize("example", [finetune_classifier, finetune_tagger])
def test_a_length_above_the_positions_of_the_model_is_refused(bert, tmp_path, example):
    words = {"text": "fox", "words": ["fox"]}
    rows = [{**words, "label": name, "tags": [name]} for name in "AB"] * 10
    train = json_lines(tmp_path / "train.jsonl", rows)
    arguments = command(bert, train, tmp_path / "out", "--max_steps", "1")
    with pytest.raises(
        SystemExit, match=r"max_seq_length=512 is more than the 64 positions of .*bert; give 64 or less"
    ):
        run_main(example, *arguments)
    run_main(example, *arguments, "--max_seq_length", "64")


@pytest.mark.slow
@pytest.mark.parametrize("num_texts", [1, 2])
@pytest.mark.compat
def test_the_classifier_learns_which_word_is_there(model_folder, tmp_path, num_texts):
    """The label of a text is whether it holds `red` or `old`; a pair holds the word in its second text."""
    rng = random.Random(0)
    columns = ["first", "second"][:num_texts]
    with (tmp_path / "train.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*columns, "label"])
        for i in range(300):
            texts = [" ".join(rng.choices(WORDS[:9], k=4)) for _ in columns]
            texts[-1] += (" red", " old")[i % 2]
            writer.writerow([*texts, ("Rouge", "Vieux")[i % 2]])
    out = tmp_path / "out"
    run_main(finetune_classifier, *command(model_folder, tmp_path / "train.csv", out, "--text_columns", *columns))
    metrics = json.loads((out / "eval_results.json").read_text())
    assert metrics["eval_accuracy"] == 1.0 == metrics["eval_f1"]
    classify = transformers.pipeline("text-classification", str(out))
    texts = ["the fox red", "the fox old"]
    inputs = texts if num_texts == 1 else [{"text": "the dog", "text_pair": text} for text in texts]
    found = [classify(text)[0] if num_texts == 1 else classify(text) for text in inputs]
    assert [label["label"] for label in found] == ["Rouge", "Vieux"]


def test_a_model_with_other_labels_is_a_start(model_folder, tmp_path):
    """Three scores become two classes: the classifier is new, and the loss is that of classes."""
    config = NeoBERTConfig.from_pretrained(model_folder, num_labels=3, problem_type="regression")
    other = shutil.copytree(model_folder, tmp_path / "other")
    NeoBERTForSequenceClassification(config).save_pretrained(other)
    (tmp_path / "train.csv").write_text("text,label\n" + "the fox,x\nthe dog,y\n" * 10)
    out = tmp_path / "out"
    run_main(finetune_classifier, *command(other, tmp_path / "train.csv", out, "--max_steps", "2"))
    saved = NeoBERTConfig.from_pretrained(out)
    assert saved.num_labels == 2 and saved.problem_type == "single_label_classification"


def test_a_run_resumes_from_its_newest_complete_checkpoint_with_the_same_rows_and_classes_only(start, tmp_path):
    train = json_lines(tmp_path / "train.jsonl", [{"text": "fox", "label": name} for name in "AB" * 20])
    out = tmp_path / "out"
    arguments = command(start, train, out, "--num_train_epochs", "1", "--resume_from_checkpoint")
    (out / "checkpoint-7").mkdir(parents=True)  # a save that was interrupted
    with pytest.raises(SystemExit, match=r"out holds no complete checkpoint; .*start without resume_from_checkpoint"):
        run_main(finetune_classifier, *arguments, "last")
    assert "trained on 40 rows" in run_main(finetune_classifier, *arguments[:-1])
    with pytest.raises(
        SystemExit, match="out holds this training, which is finished; predict with it as model_name_or"
    ):
        run_main(finetune_classifier, *arguments[:-1])
    for name, values in {"num_train_epochs": "1.0 and is 2.0", "learning_rate": "0.003 and is 1.0"}.items():
        with pytest.raises(SystemExit, match=rf"belongs to another run: {name} was {values}; [^\n]*$"):
            run_main(finetune_classifier, *arguments, "last", f"--{name}", values.split()[-1])
    for rows, name in (([("fox", "A"), ("fox", "C")], "classes"), ([("dog", "A"), ("fox", "B")], "rows")):
        json_lines(train, [{"text": text, "label": label} for text, label in rows * 20])
        with pytest.raises(SystemExit, match=rf"belongs to another run: {name} was [^\n]*$"):
            run_main(finetune_classifier, *arguments, "last")


@pytest.mark.slow
@pytest.mark.compat
def test_ctrl_c_saves_a_checkpoint_from_which_the_run_resumes_to_the_same_weights(model_folder, tmp_path, monkeypatch):
    """The best checkpoint is an older one; Trainer would keep only that."""
    texts = [{"text": " ".join(WORDS[i : i + 4]), "label": "AB"[i % 2]} for i in range(12)] * 7
    json_lines(tmp_path / "train.jsonl", texts[:76])  # five steps in an epoch
    wrong = [row | {"label": "AB"[row["label"] == "A"]} for row in texts[76:]]  # never learned
    json_lines(tmp_path / "other.jsonl", wrong)
    options = ["--num_train_epochs", "3", "--learning_rate", "3e-4", "--validation_file", tmp_path / "other.jsonl"]
    whole, parts = (command(model_folder, tmp_path / "train.jsonl", tmp_path / name, *options) for name in "ab")
    run_main(finetune_classifier, *whole, "--save_total_limit", "1")
    step, steps = transformers.Trainer.training_step, []

    def interrupted_step(*args, **kwargs):
        steps.append(1)
        if len(steps) == 8:
            os.kill(os.getpid(), signal.SIGINT)
        return step(*args, **kwargs)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
    with monkeypatch.context() as patch:
        patch.setattr(transformers.Trainer, "training_step", interrupted_step)
        with pytest.raises(SystemExit, match="130"):
            run_main(finetune_classifier, *parts)
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    assert {file.name for file in (tmp_path / "b").glob("checkpoint-*")} == {"checkpoint-5", "checkpoint-8"}
    assert not (tmp_path / "b/model.safetensors").exists()
    assert "\nresuming from checkpoint-8\n" in run_main(finetune_classifier, *parts)
    assert list((tmp_path / "a").glob("checkpoint-*")) and not list((tmp_path / "b").glob("checkpoint-*"))
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.compat
@pytest.mark.skipif(
    not hasattr(transformers.TrainingArguments, "warmup_ratio"), reason="transformers 5 has no warmup_ratio"
)
def test_a_share_of_warmup_in_the_older_argument_counts(tmp_path):
    training = FineTuningArguments(output_dir=str(tmp_path), use_cpu=True, warmup_ratio=0.2)
    assert (training.warmup_ratio, training.get_warmup_steps(100)) == (0.2, 20)


@pytest.mark.compat
def test_the_tagger_takes_robertas_own_tokenizer(tmp_path):
    """Its class in transformers 4 refuses words unless it adds spaces to them."""
    tokens = {token: i for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>", *ByteLevel.alphabet()])}
    tokenizer = Tokenizer(BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model/tokenizer.json"))
    (tmp_path / "model/tokenizer_config.json").write_text('{"tokenizer_class": "RobertaTokenizer"}')
    (tmp_path / "model/vocab.json").write_text(json.dumps(tokens))
    (tmp_path / "model/merges.txt").write_text("#version: 0.2\n")
    config = transformers.RobertaConfig(**SHAPE, vocab_size=len(tokens), max_position_embeddings=514)
    transformers.RobertaForMaskedLM(config).save_pretrained(tmp_path / "model")
    row = json.dumps({"words": ["the", "fox"], "tags": ["O", "ANIMAL"]}) + "\n"
    (tmp_path / "train.jsonl").write_text(row * 20)
    arguments = command(tmp_path / "model", tmp_path / "train.jsonl", tmp_path / "out", "--max_steps", "1")
    assert "validation, 2 rows " in run_main(finetune_tagger, *arguments)
