"""Tagging: whole words in every strategy of the pipeline, windows that lose no word, metrics of words."""

import itertools
import json
import random

import numpy as np
import pytest
import torch

pytest.importorskip("seqeval", reason="tagging needs seqeval (pip install -e .[train])")

import finetune_tagger
from conftest import SENTENCE, run_main
from sklearn.metrics import f1_score
from transformers import AutoTokenizer, pipeline
from transformers.modeling_outputs import TokenClassifierOutput

from neobert_hf import MINI_MODEL_PATH, NeoBERTConfig, NeoBERTForMaskedLM, NeoBERTForTokenClassification
from neobert_hf.files.wordpiece import train_wordpiece
from neobert_hf.finetuning.tagged_words import TaggedWordArguments, read_tagged_words
from neobert_hf.finetuning.tagging import TaggingTask, piece_loss, tag_metrics, tag_report

STRATEGIES = ["simple", "first", "average", "max"]
# Digits, camel case, accents, Chinese characters, punctuation without blanks, entities of two words, adjacent entities
# fmt: off
WORDS = [
    "use", "float32", ",", "int64", "of", "IntervalArray", "(", "café", ")", "in", "東京", "with", "Szczęście",
    "Antidisestablishmentarianism", "and", "x1", ".",
]
TAGS = [
    "O", "B-TYPE", "O", "B-TYPE", "O", "B-TYPE", "O", "B-PLACE", "O", "O", "B-PLACE", "O", "B-PLACE",
    "I-PLACE", "O", "B-TYPE", "O",
]
ADJACENT = ["reload", "float32", "foxdog", "foxdogs", "the", "foxdogs", "int64", "café", "café"]
ADJACENT_TAGS = ["O", "B-TYPE", "B-TYPE", "B-TYPE", "O", "B-PLACE", "B-TYPE", "B-PLACE", "B-PLACE"]
# fmt: on
TEXTS = [
    " ".join(WORDS).replace(" ,", ",").replace("( ", "(").replace(" )", ")").replace(" .", "."),
    " ".join(ADJACENT),
]
ROWS = [(WORDS, TAGS), (ADJACENT, ADJACENT_TAGS)]


def tokenizer_named(name):
    if name == "mini":
        return AutoTokenizer.from_pretrained(MINI_MODEL_PATH)
    tokenizer = train_wordpiece([TEXTS[0], "reload the float32 fox foxd ogs"] * 3, vocab_size=130)
    if name == "bert":  # does not split identifiers
        backend = tokenizer.backend_tokenizer
        backend.normalizer = backend.normalizer[2]
    return tokenizer


def task_of(folder, rows, **options):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"words": words, "tags": tags}) + "\n" for words, tags in rows), "utf-8")
    arguments = TaggedWordArguments(train_file=str(file), validation_file=str(file), **options)
    return TaggingTask(read_tagged_words(arguments, 0))


def trained_pipeline(task, tokenizer):
    """The pipeline of a model that has learned the training labels without an error."""
    logits = {}
    for row in task.tokenize(tokenizer, 256)["train"]:
        scores = torch.zeros(1, len(row["labels"]), len(task.words.names), requires_grad=True)
        labels = torch.tensor([row["labels"]])
        piece_loss(TokenClassifierOutput(logits=scores), labels, num_items_in_batch=1).backward()
        wanted = scores.detach().softmax(-1) - scores.grad  # the gradient of cross-entropy is p - wanted
        logits[tuple(row["input_ids"])] = wanted.clamp(min=1e-9).log()
    config = NeoBERTConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
        id2label=dict(enumerate(task.words.names)), label2id={name: i for i, name in enumerate(task.words.names)},
    )  # fmt: skip
    model = NeoBERTForTokenClassification(config)
    model.forward = lambda input_ids, **_: TokenClassifierOutput(logits=logits[tuple(input_ids[0].tolist())])
    return pipeline("token-classification", model=model, tokenizer=tokenizer)


def sought(words, tags):
    """Words of the entities, and their kinds: words of the same plain tag side by side are one group in transformers."""
    groups = []
    for word, tag in zip(words, tags):
        kind = tag.removeprefix("B-").removeprefix("I-")
        if groups and groups[-1][1] == kind and not tag.startswith("B-"):
            groups[-1][0].append(word)
        else:
            groups.append(([word], kind))
    return [(" ".join(of_group), kind) for of_group, kind in groups if kind != "O"]


def groups_of(tagger, text, strategy):
    """Texts and kinds that the pipeline returns."""
    return [(text[e["start"] : e["end"]], e["entity_group"]) for e in tagger(text, aggregation_strategy=strategy)]


@pytest.mark.parametrize("is_iob", [True, False], ids=["iob", "plain"])
@pytest.mark.parametrize("name", ["mini", "bert", "wordpiece"])
def test_every_strategy_of_the_pipeline_returns_the_words_of_the_file(tmp_path, name, is_iob):
    tokenizer = tokenizer_named(name)
    rows = [(words, tags if is_iob else [tag.partition("-")[2] or "O" for tag in tags]) for words, tags in ROWS]
    tagger = trained_pipeline(task_of(tmp_path, rows), tokenizer)
    for strategy, (text, (words, tags)) in itertools.product(STRATEGIES, zip(TEXTS, rows)):
        if strategy == "average" and words == ADJACENT and is_iob:
            continue  # the mean over four or more pieces joins adjacent entities
        assert groups_of(tagger, text, strategy) == sought(words, tags), strategy


def test_the_strategy_average_keeps_adjacent_entities_apart_if_they_begin_with_words_of_three_pieces(tmp_path):
    tokenizer, words = tokenizer_named("mini"), ["the", "café", "Zürich", "Lovelace", "float32", "café", "café"]
    assert tokenizer.tokenize("Zürich") == ["z", "##ur", "##ich"]
    tags = ["O", "B-TYPE", "B-TYPE", "B-TYPE", "B-TYPE", "B-TYPE", "I-TYPE"]
    tagger = trained_pipeline(task_of(tmp_path, [(words, tags)] * 2), tokenizer)
    assert groups_of(tagger, " ".join(words), "average") == sought(words, tags)


@pytest.mark.parametrize("max_length", [8, 13, 40, 500])
def test_windows_evaluate_each_word_once_with_context_on_both_sides_and_train_all_pieces(
    tmp_path, tokenizer, max_length
):
    """A word without visible characters for the tokenizer is evaluated too."""
    rng = random.Random(0)
    words = [rng.choices([*SENTENCE.split(), "foxdogcat", "\u200b"], k=length) for length in (1, 7, 60, 150)]
    tags = [[rng.choice(["O", "B-A", "I-A", "B-B"]) for _ in of_row] for of_row in words]
    task = task_of(tmp_path, list(zip(words, tags)))
    windows = task.tokenize(tokenizer, max_length)
    names = task.words.names
    marked = [[] for _ in words]
    for window in windows["validation"]:
        labels = window["labels"]
        assert len(labels) == len(window["input_ids"]) <= max_length
        places = [i for i, label in enumerate(labels) if label != -100]
        marked[window["row"]] += [names[labels[i]] for i in places]
        if max_length < 40 and len(labels) == max_length and places and window["row"] == 3:
            assert all(min(i, max_length - 1 - i) >= (max_length - 2) // 8 or i <= places[0] for i in places[1:-1])
    assert marked == tags
    assert all(
        (label == -100) == (token in tokenizer.all_special_ids and token != tokenizer.unk_token_id)
        for window in windows["train"]
        for token, label in zip(window["input_ids"], window["labels"])
    )


def test_logits_of_windows_become_those_of_the_words_of_each_row(tmp_path, tokenizer):
    words = [["fox"] * 40, ["dog"] * 3]
    task = task_of(tmp_path, [(of_row, ["A", "B"] * 20 if len(of_row) == 40 else ["A", "A", "B"]) for of_row in words])
    windows = task.tokenize(tokenizer, 12)["validation"]
    longest = max(map(len, windows["labels"]))
    logits = np.full((len(windows), longest, 2), np.nan, np.float32)
    for of_window, labels in zip(logits, windows["labels"]):
        for i, label in enumerate(labels):
            of_window[i] = np.eye(2)[label] if label != -100 else np.nan
    found = task._logits_of_words("validation", logits)
    assert [row.argmax(-1).tolist() for row in found] == [list(row) for row in task.words.data["validation"]["tags"]]


def test_piece_loss_of_first_pieces_is_the_cross_entropy():
    logits = torch.randn(2, 5, 3)
    labels = torch.tensor([[0, 1, -100, 2, 1], [-100, 2, 2, 0, -100]])
    expected = torch.nn.functional.cross_entropy(logits.reshape(-1, 3), labels.reshape(-1))
    torch.testing.assert_close(piece_loss(TokenClassifierOutput(logits=logits), labels), expected)


def test_f1_of_entities_counts_an_entity_only_with_all_its_words():
    """Two persons, of which the one of two words is found without its second word: 1 right of 2 found and 2 sought."""
    tags = [["O", "B-PERSON", "I-PERSON"], ["B-PERSON", "O"]], [["O", "B-PERSON", "O"], ["B-PERSON", "O"]]
    assert tag_metrics(*tags) == {"accuracy": 0.8, "precision": 0.5, "recall": 0.5, "f1": 0.5}
    assert "PERSON" in tag_report(*tags)


def test_f1_of_plain_tags_is_the_mean_over_the_tags():
    tags = [["VERB", "NOUN", "O"]], [["VERB", "O", "O"]]
    assert tag_metrics(*tags)["f1"] == pytest.approx(f1_score(tags[0][0], tags[1][0], average="macro"))
    assert "NOUN" in tag_report(*tags)


def test_rows_without_an_entity_have_a_report_too():
    assert tag_report([["O", "O"]], [["O", "O"]]).startswith("no entities")


def test_a_saved_tagger_predicts_the_tags_of_a_test_file_and_trains_nothing(tokenizer, tmp_path):
    shape = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48)
    NeoBERTForMaskedLM(NeoBERTConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "train.conll").write_text("the O\nquick O\nfox B-ANIMAL\n\n" * 20)
    (tmp_path / "new.conll").write_text("the\nfox\n\nthe\n" + "dog\n" * 100)
    (tmp_path / "test.txt").write_text("the O\nfox B-ANIMAL\n")
    more = ("--use_cpu", "true", "--report_to", "none", "--output_dir")
    train = ("--model_name_or_path", tmp_path / "model", "--train_file", tmp_path / "train.conll")
    options = ("--max_seq_length", "16", "--max_steps", "1")
    run_main(finetune_tagger, *train, *options, *more, tmp_path / "tagger")
    for file in ("new.conll", "test.txt"):
        test = ("--model_name_or_path", tmp_path / "tagger", "--test_file", tmp_path / file)
        printed = run_main(finetune_tagger, *test, *more, tmp_path / file.partition(".")[0])
        assert ("test_f1" in printed) == (file == "test.txt")
    rows = [json.loads(line) for line in (tmp_path / "new/predictions.jsonl").read_text().splitlines()]
    assert [len(row["prediction"]) for row in rows] == [len(row["probability"]) for row in rows] == [2, 101]
    assert {tag for row in rows for tag in row["prediction"]} <= {"O", "B-ANIMAL", "I-ANIMAL"}
    assert not (tmp_path / "new/model.safetensors").exists()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_pipeline_with_a_stride_returns_the_words_of_a_long_text(strategy):
    """The model knows the tag of each token, so that only the borders of windows could cut a word."""
    tokenizer, names = tokenizer_named("mini"), ["O", "B-PLACE", "I-PLACE"]
    tokenizer.model_max_length = 64
    table = torch.tensor([[0.8, 0.1, 0.1]] * len(tokenizer))
    for first, *others in map(tokenizer.tokenize, ["Zürich", "Lovelace", "Kraków"]):
        table[tokenizer.convert_tokens_to_ids(first)] = torch.tensor([0, 0.98, 0.02])
        table[tokenizer.convert_tokens_to_ids(others)] = torch.tensor([0, 0.3, 0.7])
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    model = NeoBERTForTokenClassification(NeoBERTConfig(len(tokenizer), **shape, id2label=dict(enumerate(names))))
    model.forward = lambda input_ids, **_: TokenClassifierOutput(logits=table[input_ids].log())
    words = random.Random(0).choices(["Zürich", "Lovelace", "Kraków", "the", "and", "float32", ","], k=500)
    tagger = pipeline(
        "token-classification", model=model, tokenizer=tokenizer, stride=16, aggregation_strategy=strategy
    )
    found = tagger(text := " ".join(words))
    assert [text[entity["start"] : entity["end"]] for entity in found] == [
        w for w in words if len(w) > 5 and w.isalpha()
    ]
