"""Tagging: whole words in every strategy of the pipeline, windows that lose no word, metrics of words."""

import copy
import itertools
import json
import random
import re

import finetune_tagger
import pytest
import torch
from conftest import SENTENCE, run_main
from sklearn.metrics import f1_score
from tokenizers import Tokenizer
from tokenizers.models import Unigram
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import ByteLevel, Metaspace
from transformers import AutoTokenizer, PreTrainedTokenizerFast, pipeline
from transformers.modeling_outputs import TokenClassifierOutput

from neobert_hf import MINI_MODEL_PATH, NeoBERTConfig, NeoBERTForTokenClassification
from neobert_hf.data.wordpiece import train_wordpiece
from neobert_hf.export import OnnxModel, export_model
from neobert_hf.finetuning import Tagger, tag_metrics
from neobert_hf.finetuning.tagger import piece_loss, tag_report
from neobert_hf.finetuning.tags import division_of, own_pieces, word_starts
from neobert_hf.finetuning.words import tag_names

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
PLAIN_TEXT = " ".join(WORDS).replace(" ,", ",").replace("( ", "(").replace(" )", ")").replace(" .", ".")
TEXTS = [PLAIN_TEXT, " ".join(ADJACENT)]
ROWS = [(WORDS, TAGS), (ADJACENT, ADJACENT_TAGS)]


def tokenizer_named(name):
    if name == "mini":
        return AutoTokenizer.from_pretrained(MINI_MODEL_PATH)
    tokenizer = train_wordpiece([TEXTS[0], "reload the float32 fox foxd ogs"] * 3, vocab_size=130)
    if name == "bert":  # does not split identifiers
        backend = tokenizer.backend_tokenizer
        backend.normalizer = backend.normalizer[2]
    return tokenizer


def tagger_of(rows, tokenizer, length=256):
    """A tagger of the tags of rows, whose model is not needed."""
    tagger = Tagger(max_seq_length=length)
    tagger._start()
    tagger._tokenizer = copy.deepcopy(tokenizer)
    tagger._tokenizer.model_max_length = length
    tagger._names = tag_names([tag for _, tags in rows for tag in tags])
    return tagger


def trained_pipeline(rows, tokenizer):
    """The pipeline of a model that has learned the training labels without an error."""
    tagger, logits = tagger_of(rows, tokenizer), {}
    for row in tagger._rows(*zip(*rows), split="training"):
        scores = torch.zeros(1, len(row["labels"]), len(tagger.classes_), requires_grad=True)
        labels = torch.tensor([row["labels"]])
        piece_loss(TokenClassifierOutput(logits=scores), labels, num_items_in_batch=2).backward()
        wanted = scores.detach().softmax(-1) - scores.grad  # the gradient of cross-entropy is p - wanted
        logits[tuple(row["input_ids"])] = wanted.clamp(min=1e-9).log()
    config = NeoBERTConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
        id2label=dict(enumerate(tagger.classes_)), label2id={name: i for i, name in enumerate(tagger.classes_)},
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
    return [(text[e["start"] : e["end"]], e["entity_group"]) for e in tagger(text, aggregation_strategy=strategy)]


@pytest.mark.parametrize("is_iob", [True, False], ids=["iob", "plain"])
@pytest.mark.parametrize("name", ["mini", "bert", "wordpiece"])
def test_every_strategy_of_the_pipeline_returns_the_words_of_the_file(name, is_iob):
    tokenizer = tokenizer_named(name)
    rows = [(words, tags if is_iob else [tag.partition("-")[2] or "O" for tag in tags]) for words, tags in ROWS]
    tagger = trained_pipeline(rows, tokenizer)
    for strategy, (text, (words, tags)) in itertools.product(STRATEGIES, zip(TEXTS, rows)):
        if strategy == "average" and words == ADJACENT and is_iob:
            continue  # the mean over four or more pieces joins adjacent entities
        assert groups_of(tagger, text, strategy) == sought(words, tags), strategy


def test_the_strategy_average_keeps_adjacent_entities_apart_if_they_begin_with_words_of_three_pieces():
    tokenizer, words = tokenizer_named("mini"), ["the", "café", "Zürich", "Lovelace", "float32", "café", "café"]
    assert tokenizer.tokenize("Zürich") == ["z", "##ur", "##ich"]
    tags = ["O", "B-TYPE", "B-TYPE", "B-TYPE", "B-TYPE", "B-TYPE", "I-TYPE"]
    tagger = trained_pipeline([(words, tags)], tokenizer)
    assert groups_of(tagger, " ".join(words), "average") == sought(words, tags)


@pytest.mark.parametrize("max_length", [8, 13, 40, 500])
def test_windows_evaluate_each_word_once_with_context_on_both_sides_and_train_all_pieces(tokenizer, max_length):
    """A word without visible characters for the tokenizer is evaluated too."""
    rng = random.Random(0)
    words = [rng.choices([*SENTENCE.split(), "foxdogcat", "\u200b"], k=length) for length in (1, 7, 60, 150)]
    tags = [[rng.choice(["O", "B-A", "I-A", "B-B"]) for _ in of_row] for of_row in words]
    tagger = tagger_of(list(zip(words, tags)), tokenizer, max_length)
    names = tagger.classes_.tolist()
    marked = [[] for _ in words]
    for window in tagger._rows(words, tags):
        labels = [first for first, second in window["labels"]]
        assert len(labels) == len(window["input_ids"]) <= max_length
        marked[window["row"]] += [names[label] for label in labels if label != -100]
    assert marked == tags
    assert all(
        (label[0] == -100) == (token in tokenizer.all_special_ids and token != tokenizer.unk_token_id)
        for window in tagger._rows(words, tags, split="training")
        for token, label in zip(window["input_ids"], window["labels"])
    )


LINE = "Set (in U.S. e-mail) Ada's $HOME, ~/.xauth/export or --no-color."
ENDS = "Set ( in U.S . e-mail ) Ada 's $HOME , ~/.xauth/export or --no-color ."


@pytest.mark.parametrize(("division", "words"), [("whitespace", LINE.split()), ("ends", ENDS.split())])
def test_a_text_is_divided_as_the_words_of_the_training_are(division, words):
    starts = word_starts(LINE, division)
    assert [LINE[start:end].strip() for start, end in itertools.pairwise([*starts, None])] == words
    assert division_of(words) == division
    assert division_of([word for word in words if word.isalpha()]) == "marks", "as the pipeline does"


@pytest.mark.slow
def test_entities_of_texts_are_those_of_words_with_marks_inside_and_the_score_is_theirs(
    start, tmp_path, capsys, monkeypatch
):
    """The tag of a path is learned from its end, which only the whole word has; 40 rows, so that all is learned."""
    rows = [
        (f"use {path}, or --no-{word} (see {word}).".split(), path)
        for word in ("fox", "dog")
        for path in (f"~/.{word}/sea", f"$HOME/{word}.red", f"/old/{word}-{word}/by")
    ] * 8
    words = [row for row, _ in rows]
    tags = [["O", "B-FILE", "O", "B-OPTION", "O", "O"] for _ in rows]
    tagger = Tagger(start, 32).fit(words, tags, (words, tags), use_cpu=True, learning_rate=1e-2, max_steps=60)
    printed = capsys.readouterr().out
    assert "windows of" in printed and re.search(r"\nthis model +1.0000 +1.0000 +1.0000 +1.0000\n", printed)
    tagger.save(tmp_path / "saved")
    texts = [" ".join(row) for row in words[:6]]
    ends = [(4 + len(row[1]), 8 + len(row[1] + row[3])) for row in words[:6]]
    wanted = [[("FILE", 4, first), ("OPTION", first + 4, last)] for first, last in ends]

    def spans(found):
        return [[(each["entity_group"], each["start"], each["end"]) for each in of_text] for of_text in found]

    assert spans(tagger.find_entities(texts)) == wanted
    again = Tagger(tmp_path / "saved", verbose=False)
    assert spans(again.find_entities(texts)) == wanted and again.predict(words[:1]) == tags[:1]
    rows_of_ids = again.tokenizer([" ".join(row) for row in words]).input_ids
    assert again.tokenizer.model_max_length == max(map(len, rows_of_ids))
    export_model(tmp_path / "saved", tmp_path / "exported")
    assert spans(OnnxModel(tmp_path / "exported").predict(texts)) == wanted
    files = [of_text[:1] for of_text in tagger.find_entities(texts)]
    monkeypatch.setattr(tagger, "find_entities", lambda _: files)
    found = tagger._served_metrics(tagger.outputs(words[:6]), tags[:6], words[:6])
    assert found == {"accuracy": 1, "precision": 1, "recall": 0.5, "f1": pytest.approx(2 / 3)}


def test_a_token_counts_in_the_window_where_it_has_the_most_context():
    windows = [[None, 0, 1, 2, 3, None], [None, 2, 3, 4, 5, None], [None, 4, 5, 6, None]]
    assert [*own_pieces(windows, 2)] == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 2), (2, 3)]
    windows = [[None, 0, 1, 2, 3, None], [None, 1, 2, 3, 4, None]]  # of an odd overlap, the window after has one more
    assert [*own_pieces(windows, 3)] == [(0, 1), (0, 2), (1, 2), (1, 3), (1, 4)]


BYTES = {"pre_tokenizer": ByteLevel(add_prefix_space=False)}


@pytest.mark.parametrize("form", [{"pre_tokenizer": Metaspace()}, {"normalizer": Replace(" ", "▁")}, BYTES])
def test_with_a_tokenizer_of_a_multilingual_encoder_every_word_has_a_tag_and_the_tokens_of_a_text(form):
    letters = sorted({"▁", "Ġ", *"".join(WORDS)} - {"東"})
    backend = Tokenizer(Unigram([("<unk>", 0), *((letter, -1) for letter in letters)], 0))
    for name, part in form.items():
        setattr(backend, name, part)
    tagger = tagger_of(ROWS, PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", pad_token="<unk>"))
    for (words, tags), row in zip(ROWS, tagger._rows(*zip(*ROWS))):
        assert [tagger.classes_[label] for label, _ in row["labels"] if label != -100] == tags
        assert row["input_ids"] == backend.encode(" ".join(words)).ids


def test_piece_loss_of_first_pieces_is_the_cross_entropy():
    logits = torch.randn(2, 5, 3)
    labels = torch.tensor([[0, 1, -100, 2, 1], [-100, 2, 2, 0, -100]])
    expected = torch.nn.functional.cross_entropy(logits.reshape(-1, 3), labels.reshape(-1))
    pairs = labels[..., None].expand(2, 5, 2)
    for number in (None, (pairs != -100).sum()):
        torch.testing.assert_close(piece_loss(TokenClassifierOutput(logits=logits), pairs, number), expected)


def test_piece_loss_of_two_tags_is_the_cross_entropy_with_their_shares():
    logits, labels = torch.randn(1, 2, 3), torch.tensor([[[0, 2], [1, 1]]])
    shares = torch.tensor([[[0.7, 0, 0.3], [0, 1, 0]]])
    expected = torch.nn.functional.cross_entropy(logits[0], shares[0])
    torch.testing.assert_close(piece_loss(TokenClassifierOutput(logits=logits), labels), expected)


def test_a_fit_without_a_folder_learns_and_a_saved_tagger_predicts_the_same(start, tmp_path):
    words = [["the", word, "and", other] for word in ("fox", "dog") for other in ("sea", "house")] * 16
    tags = [["O", "B-ANIMAL", "O", "O"]] * 64
    options = {"use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2, "max_steps": 30}
    tagger = Tagger(start, 16).fit(words, tags, **options)
    assert tagger.classes_.tolist() == ["B-ANIMAL", "O", "I-ANIMAL"]
    assert tagger.predict([["the", "dog"], ["fox"] * 30])[0] == ["O", "B-ANIMAL"]
    assert tagger.evaluate(words, [["O", "B-ANIMAL", "O", "O"]] * 64)["f1"] == 1
    tagger.save(tmp_path / "saved")
    again = Tagger(tmp_path / "saved", 16)
    assert again.predict(words) == tagger.predict(words)
    assert all(row.sum(-1) == pytest.approx(1) for row in again.predict_proba(words[:4]))
    with pytest.raises(ValueError, match="4 words and 1 tags; every word needs one tag"):
        tagger.fit(words[:1], [["O"]])


@pytest.mark.slow
def test_predictions_have_the_scheme_of_the_training_tags_and_the_model_the_tags_of_pipelines(start, tmp_path):
    """A saved tagger that gets a test file alone remembers the scheme; a second training on other tags does not."""
    words = ["the", "fox", "and", "the", "quick", "brown", "dog"]
    tags = ["O", "U-A", "O", "B-A", "I-A", "I-A", "L-A"]
    conll = "".join(f"{word} {tag}\n" for word, tag in zip(words, tags)) + "\n"
    (tmp_path / "train.conll").write_text(conll * 48)
    (tmp_path / "test.conll").write_text(conll)
    more = ("--use_cpu", "true", "--report_to", "none", "--test_file", tmp_path / "test.conll", "--output_dir")
    options = ("--train_file", tmp_path / "train.conll", "--learning_rate", "1e-2", "--max_steps", "24")
    run_main(finetune_tagger, "--model_name_or_path", start, *options, *more, tmp_path / "tagger")
    printed = run_main(finetune_tagger, "--model_name_or_path", tmp_path / "tagger", *more, tmp_path / "new")
    assert printed.splitlines()[1].split() == ["this", "model", *["1.0000"] * 4]
    for folder in ("tagger", "new"):
        assert json.loads((tmp_path / folder / "predictions.jsonl").read_text())["prediction"] == tags
    tagger = Tagger(tmp_path / "tagger")
    assert tagger.predict([words]) == [tags] and tagger.evaluate([words], [tags])["f1"] == 1
    assert (tagger.model_.config.tag_scheme, sorted(tagger.classes_)) == ("BILOU", ["B-A", "I-A", "O"])
    found = groups_of(pipeline("token-classification", str(tmp_path / "tagger")), " ".join(words), "first")
    assert found == [("fox", "A"), ("the quick brown dog", "A")]
    tagger.fit([words] * 4, [["O", "B-A", "O", "B-A", "I-A", "I-A", "I-A"]] * 4, use_cpu=True, max_steps=1)
    assert {tag[0] for tag in tagger.predict([words])[0]} <= {"B", "I", "O"}
    assert not hasattr(tagger.model_.config, "tag_scheme")


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


def test_a_saved_tagger_predicts_the_tags_of_a_test_file_and_trains_nothing(start, tmp_path):
    (tmp_path / "train.conll").write_text("the O\nquick O\nfox B-ANIMAL\n\n" * 20)
    (tmp_path / "new.conll").write_text("the\nfox\n\nthe\n" + "dog\n" * 100)
    (tmp_path / "test.txt").write_text("the O\nfox B-ANIMAL\n")
    more = ("--use_cpu", "true", "--report_to", "none", "--output_dir")
    train = ("--model_name_or_path", start, "--train_file", tmp_path / "train.conll")
    options = ("--max_seq_length", "16", "--max_steps", "1")
    run_main(finetune_tagger, *train, *options, *more, tmp_path / "tagger")
    for file in ("new.conll", "test.txt"):
        test = ("--model_name_or_path", tmp_path / "tagger", "--test_file", tmp_path / file)
        printed = run_main(finetune_tagger, *test, *more, tmp_path / file.partition(".")[0])
        assert ("test, 1 row " in printed) == (file == "test.txt")
    rows = [json.loads(line) for line in (tmp_path / "new/predictions.jsonl").read_text().splitlines()]
    assert [len(row["prediction"]) for row in rows] == [len(row["probability"]) for row in rows] == [2, 101]
    assert {tag for row in rows for tag in row["prediction"]} <= {"O", "B-ANIMAL", "I-ANIMAL"}
    assert not (tmp_path / "new/model.safetensors").exists()
