"""Tagging of words: windows of long rows, labels of all pieces of a word, metrics, report and predictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from datasets import DatasetDict
from scipy.special import softmax
from seqeval import metrics as entities
from sklearn.metrics import accuracy_score, classification_report, f1_score
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    BatchEncoding,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
)

from ..files.texts import check_max_length
from .tagged_words import TaggedWords, is_iob

IGNORED = -100  # label of a token that has no part in the loss
LATER_PIECE = 0.7  # probability of I- for a later piece whose other tag is B-


def trained_tags(source: str) -> list[str]:
    """Return the names of the tags of a trained tagger.

    Args:
        source: Folder or id on the Hub.

    Raises:
        ValueError: The model is not a tagger.
        OSError: There is no such model.
    """
    config = AutoConfig.from_pretrained(source)
    if not any(name.endswith("ForTokenClassification") for name in config.architectures or ()):
        raise ValueError(
            f"{source} is not a trained tagger; give the folder of one by --model_name_or_path, or rows to train by --train_file"
        )
    return [config.id2label[i] for i in range(config.num_labels)]


class TaggingTask:
    """What the tags of words decide in a training and in an evaluation.

    The pipeline of transformers sees pieces of words, and its aggregation strategies join them by their tags. So all pieces are
    trained: the first piece of a word has the tag of the word, and the others continue it (I- after B-). A long row is cut into
    windows that overlap by a quarter. Evaluation takes a word from the window in which it has the most context on both sides.

    Args:
        words: Words with tags.
    """

    def __init__(self, words: TaggedWords):
        self.words = words
        self.windows = DatasetDict()
        self.is_iob = is_iob(words.names)

    def load_model(self, source: str, max_length: int) -> PreTrainedModel:
        """Load a model with a head for these tags, in float32; the head is new unless it has their number already."""
        names = dict(enumerate(self.words.names))
        model = AutoModelForTokenClassification.from_pretrained(
            source,
            id2label=names,
            label2id={name: i for i, name in names.items()},
            ignore_mismatched_sizes=True,  # of a start with other tags
            dtype=torch.float32,
        )
        check_max_length(model, max_length)
        return model

    def tokenize(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> DatasetDict:
        """Return windows of at most `max_length` tokens of all splits.

        `labels` of training windows are those of `piece_loss`. In the other windows the first piece of a word has its tag (0 if
        there are no tags), in one window only, and `row` is the number of the row. The tokenizer then pads on the right.
        """
        tokenizer.padding_side = "right"  # so the logits of a window begin at its first token

        def windows(rows: dict[str, list], numbers: list[int], is_training: bool) -> dict[str, list]:
            labels_of = self._training_labels if is_training else _first_pieces
            return _cut(tokenizer, rows, numbers, max_length, labels_of, is_training)

        for split, rows in self.words.data.items():
            options = {"batched": True, "with_indices": True, "remove_columns": rows.column_names}
            self.windows[split] = rows.map(windows, **options, fn_kwargs={"is_training": split == "train"})
        return self.windows

    def _training_labels(self, words: np.ndarray, is_joined: np.ndarray, tags: np.ndarray) -> np.ndarray:
        """Labels for `piece_loss` of the pieces of a row."""
        names = self.words.names
        if not self.is_iob:
            return tags[words]
        inside = np.array([names.index(name if name == "O" else f"I-{name[2:]}") for name in names])
        labels = np.where(_is_first(words), tags[words], inside[tags[words]])
        # words that begin an entity right after one of the same kind
        is_adjacent = (tags != inside[tags]) & (inside[tags] == np.concatenate([[-1], inside[tags][:-1]]))
        distance = (tags - inside[tags]) % len(names)  # from I- to B-
        return labels + len(names) * (distance * is_adjacent)[words] * is_joined

    def metrics(self, predictions: EvalPrediction) -> dict[str, float]:
        """Return accuracy and F1 of the validation words, for Trainer; see `tag_metrics`."""
        return tag_metrics(*self._tag_names("validation", predictions.predictions))

    def _tag_names(self, split: str, logits: np.ndarray) -> tuple[list[list[str]], list[list[str]]]:
        """Tags of the file and tags of the model for each row."""
        names = self.words.names
        rows = self._logits_of_words(split, logits)
        sought = [[names[tag] for tag in tags] for tags in self.words.data[split]["tags"]]
        return sought, [[names[tag] for tag in row.argmax(-1)] for row in rows]

    def _logits_of_words(self, split: str, logits: np.ndarray) -> list[np.ndarray]:
        """(number of words, number of tags) logits of each row, from (windows, tokens, number of tags)."""
        rows: list[list[np.ndarray]] = [[] for _ in self.words.data[split]]
        for window, of_window in zip(self.windows[split].select_columns(["row", "labels"]), logits):
            labels = np.array(window["labels"])
            rows[window["row"]].append(of_window[: len(labels)][labels != IGNORED])
        return [np.concatenate(windows) for windows in rows]

    def evaluate(self, trainer: Trainer, split: str) -> list[np.ndarray]:
        """Return the logits of the words of each row; if the split has tags, write metrics and print a report for each kind.

        Args:
            trainer: Its model predicts.
            split: "validation" or "test".

        Raises:
            FloatingPointError: A prediction is not finite.
        """
        logits = trainer.predict(self.windows[split].remove_columns("labels")).predictions
        rows, prefix = self._logits_of_words(split, logits), {"validation": "eval"}.get(split, split)
        if not all(np.isfinite(row).all() for row in rows):
            raise FloatingPointError("a prediction is not finite; the model has diverged, lower --learning_rate")
        if "tags" not in self.words.data[split].column_names:
            print(f"the {split} rows have no tags, so there are no metrics", flush=True)
        elif trainer.is_world_process_zero():
            tags = self._tag_names(split, logits)
            found = {f"{prefix}_{name}": value for name, value in tag_metrics(*tags).items()}
            trainer.log_metrics(prefix, found)
            trainer.save_metrics(prefix, found, combined=False)
            print(tag_report(*tags), flush=True)
        return rows

    def prediction_rows(self, logits: list[np.ndarray]) -> list[dict[str, Any]]:
        """Return the test rows with `prediction`, a tag for each word, and `probability`, that of each tag.

        Args:
            logits: What `evaluate` returned for the test rows.
        """
        names, rows = self.words.names, []
        for row, of_row in zip(self.words.test_rows, logits):
            probabilities = softmax(of_row.astype(np.float64), -1).max(-1)
            tags = [names[tag] for tag in of_row.argmax(-1)]
            rows.append({**row, "prediction": tags, "probability": [round(float(value), 6) for value in probabilities]})
        return rows


def piece_loss(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Return the cross-entropy of the pieces of words, for Trainer.

    Example: the words "New", "Yorker" are two entities of one kind, and "Yorker" has the pieces B- and I-. The strategies
    "average" and "max" of the pipeline choose one tag for both pieces. If it is I-, the two entities become one. So the label of
    this second piece is 0.7 I- and 0.3 B-: I- is the most probable tag, as "simple" needs, and B- of the first piece prevails.
    Other pieces have one tag.

    Args:
        outputs: (B, L, C) logits of a model.
        labels: (B, L) tags; -100 for no label; tag + C d, if the tag that is d places after it, modulo C, has a part of the
            probability.
        num_items_in_batch: Number of labels by which the sum is divided; None divides by those of this batch.
    """
    kept = labels != IGNORED
    scores, labels = outputs.logits[kept].float().log_softmax(-1), labels[kept]
    num_tags = scores.shape[-1]
    tags = torch.stack([labels, labels + labels // num_tags], -1) % num_tags  # the same tag twice if there is no other
    loss = -(scores.gather(-1, tags) @ scores.new_tensor([LATER_PIECE, 1 - LATER_PIECE])).sum()
    return loss / (kept.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)


def tag_metrics(sought: list[list[str]], found: list[list[str]]) -> dict[str, float]:
    """Return accuracy over the words, and F1: of the entities if all tags are B-, I- or O, else the mean over the tags.

    Args:
        sought: Tags of the words of each row.
        found: Tags that a model gives them.
    """
    tags = [tag for row in sought for tag in row], [tag for row in found for tag in row]
    scores = {"accuracy": accuracy_score(*tags)}
    if is_iob(set().union(*tags)):
        for name in ("precision", "recall", "f1"):
            scores[name] = getattr(entities, f"{name}_score")(sought, found, zero_division=0)
    else:
        scores["f1"] = f1_score(*tags, average="macro", zero_division=0)
    return {name: float(value) for name, value in scores.items()}


def tag_report(sought: list[list[str]], found: list[list[str]]) -> str:
    """Return a table of precision, recall and F1 of each kind of entity or tag; the arguments are as in `tag_metrics`."""
    tags = [tag for row in sought for tag in row], [tag for row in found for tag in row]
    if not is_iob(set().union(*tags)):
        return classification_report(*tags, zero_division=0, digits=3)
    if set().union(*tags) == {"O"}:
        return "no entities, neither in the rows nor in the predictions"
    return entities.classification_report(sought, found, zero_division=0, digits=3)


def _is_first(words: np.ndarray) -> np.ndarray:
    """Whether a piece is the first of its word."""
    return np.diff(words, prepend=-1) != 0


def _first_pieces(words: np.ndarray, _: np.ndarray, tags: np.ndarray) -> np.ndarray:
    """The tag of a word at its first piece."""
    return np.where(_is_first(words), tags[words], IGNORED)


def _cut(tokenizer, rows: dict[str, list], numbers: list[int], max_length: int, labels_of: Callable, is_training: bool):
    """Windows of rows; `labels_of` makes the labels of a whole row of words, whether they are joined, and tags."""
    size = max_length - tokenizer.num_special_tokens_to_add()
    overlap = size // 4
    tokens = _tokens(tokenizer, rows["words"], max_length, overlap)
    prefix = getattr(tokenizer.backend_tokenizer.model, "continuing_subword_prefix", None)
    owners = tokens["overflow_to_sample_mapping"]
    places = [[j for j, word in enumerate(tokens.word_ids(i)) if word is not None] for i in range(len(owners))]
    words: list[list[int]] = [[] for _ in rows["words"]]  # of the pieces of a whole row
    is_joined: list[list[bool]] = [[] for _ in rows["words"]]  # to the piece before, by the pipeline
    starts = []  # of windows in their rows
    for i, owner in enumerate(owners):
        word_of, names, has_before = tokens.word_ids(i), tokens.tokens(i), bool(words[owner])
        starts.append(len(words[owner]) - overlap if has_before else 0)
        for j in places[i][overlap if has_before else 0 :]:
            same_word = words[owner][-1:] == [word_of[j]]
            is_joined[owner].append(names[j].startswith(prefix) if prefix else same_word)
            words[owner].append(word_of[j])
    tags = rows.get("tags") or [[0] * len(of_row) for of_row in rows["words"]]
    labels = [labels_of(*map(np.array, row)) for row in zip(words, is_joined, tags)]
    windows = []
    for i, owner in enumerate(owners):
        # evaluation: half of an overlap belongs to the window before, the other half to the one after
        first, end = starts[i], starts[i] + len(places[i])
        if not is_training:
            first += overlap // 2 if first else 0
            end -= overlap - overlap // 2 if owners[i + 1 : i + 2] == [owner] else 0
        window = np.full(len(tokens["input_ids"][i]), IGNORED)
        window[places[i][first - starts[i] : end - starts[i]]] = labels[owner][first:end]
        windows.append(window)
    inputs = {name: tokens[name] for name in tokenizer.model_input_names if name in tokens}
    return inputs | {"labels": windows, "row": [numbers[owner] for owner in owners]}


def _tokens(tokenizer: PreTrainedTokenizerBase, rows: list[list[str]], max_length: int, overlap: int) -> BatchEncoding:
    """Windows of tokens; a word of characters that the tokenizer removes has the unknown token, so that it gets a tag too."""

    def tokenize(rows: list[list[str]]) -> BatchEncoding:
        # the spaces of a text; byte-level tokenizers mark the beginning of a word by one
        rows = [[first, *(f" {word}" for word in others)] for first, *others in rows]
        options = {"truncation": True, "max_length": max_length, "stride": overlap, "return_overflowing_tokens": True}
        return tokenizer(rows, is_split_into_words=True, **options)

    tokens = tokenize(rows)
    seen: list[set[int | None]] = [set() for _ in rows]
    for i, owner in enumerate(tokens["overflow_to_sample_mapping"]):
        seen[owner].update(tokens.word_ids(i))
    if all(len(words) <= len(of_row - {None}) for words, of_row in zip(rows, seen)):
        return tokens
    unknown = tokenizer.unk_token
    return tokenize([[word if i in kept else unknown for i, word in enumerate(row)] for row, kept in zip(rows, seen)])
