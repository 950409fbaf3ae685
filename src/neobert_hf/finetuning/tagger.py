"""`Tagger`: words get a tag each; windows of long rows, labels of all pieces of a word, metrics, report and predictions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain, compress, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from seqeval import metrics as entities
from sklearn.metrics import accuracy_score, classification_report, f1_score
from tokenizers import Encoding
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    BatchEncoding,
    DataCollatorForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
)

from ..files.messages import say
from ..runs import FineTuningArguments
from ..runs.arguments import EPOCHS, EPOCHS_OF_FEW
from .decorators import all_or_nothing
from .entities import EntityFinder
from .findings import Scores
from .job import TRAINING, Job
from .plan import SMALL, Plan
from .rows import check_known, given_names
from .schemes import from_iob2, iob2_names, is_iob, tag_scheme, to_iob2
from .scores import softmax, tag_columns
from .summary import say_worst, write_report
from .tags import MARKS, division_of, kinds_of, own_pieces
from .words import checked_tags, checked_words, tag_names

Words = Sequence[list[str]]  # or their tags, of each row

FEW_SENTENCES = 3000
IGNORED = -100  # label of a token that has no part in the loss
LATER_PIECE = 0.7  # probability of I- for a later piece whose other tag is B-


class Tagger(Job):
    """Words get a tag each.

    The pipeline of transformers sees pieces of words, and its aggregation strategies join them by their tags. So all pieces are
    trained: the first piece of a word has the tag of the word, and the others continue it (I- after B-). A long row is cut into
    windows that overlap by a quarter. Evaluation takes a word from the window in which it has the most context on both sides.

    A text is divided into words as the training words are, see `division_of`; the config of the model says it.

    Args:
        model: Folder or id on the Hub: of an encoder, or of a trained tagger.
        max_seq_length: Length in tokens of a window of the training, and at most that of later ones, which are as long as the
            longest row of the training. A trained model keeps its own.
        verbose: Tell what `fit`, `evaluate`, `predict` and `save` find; False leaves warnings and errors only.
    """

    auto_class = AutoModelForTokenClassification
    kind = "tags"
    noun = "tagger"
    column_names = ("words", "tags")

    def _begin(self) -> None:
        super()._begin()
        # RoBERTa's class in transformers 4 demands it; `_tokenize` adds the spaces
        self._tokenizer.add_prefix_space = True
        # so the logits of a window begin at its first token, and windows are in order
        self._tokenizer.padding_side = self._tokenizer.truncation_side = "right"
        self._scheme: str | None = None  # of the tags of the training, if it is not that of the model
        self._division = MARKS  # of a text into words

    def _row(self, words: Any, *tags) -> tuple:
        words = checked_words(words)
        return (words, *(checked_tags(words, of_row) for of_row in tags))

    @all_or_nothing
    def fit(
        self,
        words: Words,
        tags: Words,
        validation: tuple[Sequence, Sequence] | None = None,
        training: FineTuningArguments | None = None,
        *,
        classes: Sequence[str] | None = None,
        **options,
    ) -> Tagger:
        """Train on rows of words with a tag each.

        Args:
            words: Words of each row.
            tags: Tag of each word. The model learns E- or L- as I-, and S- or U- as B-, because pipelines know B- and I- only;
                `predict` returns the tags in the scheme of these.
            validation: Other words and tags. They choose the best epoch, and the metrics on them are printed at the end.
            training: As of `Classifier.fit`, and `options` too.
            classes: Names of the tags in the order of the logits; by default the sorted tags, see `tag_names`.

        Raises:
            ValueError: A row has not as many tags as words, or there is one tag only.
            FloatingPointError: The model has diverged.
        """
        words, tags = self._columns(words, tags)
        every = list(chain(*tags))
        self._scheme = tag_scheme(every)
        self._division = division_of(chain(*words))
        self._names = iob2_names(given_names(classes)) or tag_names(every)
        config = AutoConfig.from_pretrained(self._source)
        # F1 chooses the best epoch, also of few rows: the loss is smallest long before F1 is best
        plan = Plan(
            [words, tags],
            validation and self._columns(*validation),
            epochs=EPOCHS_OF_FEW if len(words) <= FEW_SENTENCES else EPOCHS,
            # the mini model learns tags three times as fast as classes; larger models were not compared
            learning_rate=1e-3 if config.hidden_size <= SMALL else None,
        )
        self._fit(plan, training, options)
        return self

    def _load_new(self, plan: Plan, **options) -> PreTrainedModel:
        model = super()._load_new(plan, **options)
        vars(model.config).pop("tag_scheme", None)  # of an earlier training
        if self._scheme:
            model.config.tag_scheme = self._scheme
        model.config.word_division = self._division
        return model

    def _load_trained(self) -> PreTrainedModel:
        model = super()._load_trained()
        self._scheme = getattr(model.config, "tag_scheme", None)
        self._division = getattr(model.config, "word_division", MARKS)
        return model

    def _trainer_for(self, *arguments, **options) -> Trainer:
        collator = DataCollatorForTokenClassification(self.tokenizer, label_pad_token_id=[IGNORED, IGNORED])
        return super()._trainer_for(
            *arguments,
            data_collator=collator,
            compute_loss_func=piece_loss,
            **options,
        )

    def _rows(self, words: Words, tags: Words | None = None, split: str | None = None) -> Dataset:
        """Windows of at most `max_seq_length` tokens.

        `labels` of training windows are those of `piece_loss`. In the other windows the first piece of a word has its tag (the
        first one if there are no tags), in one window only, and `row` is the number of the row.
        """
        names = self._classes
        numbers = {name: number for number, name in enumerate(names)}
        ids = [[0] * len(of_row) for of_row in words]
        if tags:
            tags = to_iob2(tags, names)
            for i, of_row in enumerate(tags):
                check_known(of_row, numbers, f"row {i}: ")
            ids = [[numbers[tag] for tag in of_row] for of_row in tags]
        rows = Dataset.from_dict({"words": list(words), "tags": ids})
        length = self.tokenizer.model_max_length
        options: dict[str, Any] = {"tokenizer": self.tokenizer, "length": length}
        if split == TRAINING:
            options["names"] = names
        windows = rows.map(
            cut,
            batched=True,
            with_indices=True,
            remove_columns=rows.column_names,
            fn_kwargs=options,
        )
        longest = max(map(len, windows["input_ids"]))
        if split == TRAINING and longest < length:  # a longer window has places that the training has not seen
            self.tokenizer.model_max_length = longest
            say(f"texts are read in windows of {longest} tokens, the length of the longest training row")
        return windows

    def _outputs(self, rows: Dataset, logits: np.ndarray, inputs: Sequence) -> list[np.ndarray]:
        """(number of words, number of tags) logits of each row, from (windows, tokens, number of tags)."""
        found = defaultdict(list)
        for window, of_window in zip(rows.select_columns(["row", "labels"]), logits):
            is_marked = np.array(window["labels"])[:, 0] != IGNORED
            of_tokens = of_window[: len(is_marked)]
            found[window["row"]].append(of_tokens[is_marked])
        return list(map(np.concatenate, found.values()))

    def _decide(self, outputs: list[np.ndarray]) -> list[list[str]]:
        tags = self._tags(outputs)
        return from_iob2(tags, self._scheme) if self._scheme else tags

    def _tags(self, outputs: list[np.ndarray]) -> list[list[str]]:
        """Tags of the model; those of the file may have another scheme."""
        names = self._classes
        return [[names[tag] for tag in row.argmax(-1)] for row in outputs]

    def predict_proba(self, words: Words) -> list[np.ndarray]:
        """Return the (number of words, number of tags) probabilities of the tags of the model, for each row of words."""
        return list(map(softmax, self.outputs(words)))

    def find_entities(self, texts: Sequence[str], batch_size: int = 32) -> list[list[dict]]:
        """Return the entities of texts of any length, as `EntityFinder` does.

        Args:
            texts: Texts.
            batch_size: Number of windows in a batch of the model.
        """
        trainer = self._opened()

        def logits_of(windows: Sequence[Encoding]) -> np.ndarray:
            ids = torch.tensor([window.ids for window in windows])
            mask = torch.tensor([window.attention_mask for window in windows])
            inputs = {"input_ids": ids, "attention_mask": mask}
            _, logits, _ = trainer.prediction_step(trainer.model.eval(), inputs, prediction_loss_only=False)
            return logits.float().cpu().numpy()

        tokenizer = self.tokenizer
        finder = EntityFinder(
            tokenizer.backend_tokenizer,
            tokenizer.model_max_length,
            self._classes,
            logits_of,
            self._division,
        )
        return finder(texts, batch_size)

    def score(self, words: Words, tags: Words) -> float:
        """Return F1 of the entities, or accuracy over the words if the tags are plain."""
        found = self.evaluate(words, tags)
        return found["f1" if "precision" in found else "accuracy"]

    def metrics(self, outputs: list[np.ndarray], labels: Words) -> Scores:
        """Return the metrics that `tag_metrics` describes, of the tags of the model."""
        return tag_metrics(to_iob2(labels, self._classes), self._tags(outputs))

    def _served_metrics(self, outputs: Any, labels: list, inputs: Any) -> Scores:
        """Metrics of words; precision, recall and F1 of entities are those of texts, the words of a row with spaces."""
        found = self.metrics(outputs, labels)
        if "precision" not in found:  # plain tags
            return found
        sought = list(map(spans_of, inputs, to_iob2(labels, self._classes)))
        spans = [
            set(map(itemgetter("entity_group", "start", "end"), of_text))
            for of_text in self.find_entities(list(map(" ".join, inputs)))
        ]
        num_right = sum(map(len, map(set.intersection, spans, sought)))
        num_sought = max(sum(map(len, sought)), 1)
        num_found = max(sum(map(len, spans)), 1)
        found["precision"] = num_right / num_found
        found["recall"] = num_right / num_sought
        found["f1"] = 2 * num_right / (num_sought + num_found)
        return found

    def _trivial(self, labels: Words) -> tuple[str, list[np.ndarray]]:
        """The most frequent tag."""
        counts = Counter(chain(*to_iob2(labels, self._classes)))
        tag = max(counts, key=counts.__getitem__)
        logits = np.array([name == tag for name in self._classes], np.float32)
        return f"the trivial answer, always {tag}", [np.tile(logits, (len(row), 1)) for row in labels]

    def _report_classes(self, outputs: list[np.ndarray], labels: Words, report: Path) -> None:
        """Write precision, recall and F1 of each kind, and print the lowest ones."""
        tags = to_iob2(labels, self._classes), self._tags(outputs)
        write_report(report, tag_report(*tags))
        of_kinds = tag_report(*tags, output_dict=True)
        names = [name for name in of_kinds if name != "accuracy" and " avg" not in name]
        say_worst({name: of_kinds[name]["f1-score"] for name in names})

    def prediction_rows(self, outputs: list[np.ndarray], rows: list[dict]) -> list[dict[str, Any]]:
        """Return rows with `prediction`, a tag for each word, and `probability`, that of each tag."""
        found = tag_columns(outputs, self._classes, self._scheme)
        return [row | columns for row, columns in zip(rows, found)]


def piece_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Return the cross-entropy of the pieces of words, for Trainer.

    Example: the words "New", "Yorker" are two entities of one kind, and "Yorker" has the pieces B- and I-. The strategies
    "average" and "max" of the pipeline choose one tag for both pieces. If it is I-, the two entities become one. So the label of
    this second piece is 0.7 I- and 0.3 B-: I- is the most probable tag, as "simple" needs, and B- of the first piece prevails.
    Other pieces have one tag.

    Args:
        outputs: (B, L, C) logits of a model.
        labels: (B, L, 2) tags: the first has 0.7 of the probability and the second 0.3; often they are one tag. -100 is no label.
        num_items_in_batch: Number of tags, two for each label, by which Trainer divides the sum; None divides by the labels of
            this batch.
    """
    kept = labels[..., 0] != IGNORED
    scores = outputs.logits[kept].float().log_softmax(-1).gather(-1, labels[kept])
    shares = scores.new_tensor([LATER_PIECE, 1 - LATER_PIECE])
    loss = -(scores @ shares).sum()
    if num_items_in_batch is None:
        return loss / kept.sum().clamp(min=1)
    return loss / (num_items_in_batch / 2)


def piece_labels(words: np.ndarray, is_joined: np.ndarray, tags: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Return (number of pieces, 2) labels for `piece_loss` of the pieces of a row.

    Args:
        words: For each piece, the number of its word.
        is_joined: Whether the pipeline joins a piece to the one before it.
        tags: Number of the tag of each word.
        names: Names of the tags.
    """
    if not is_iob(names):
        return np.stack([tags[words]] * 2, -1)
    insides = [name if name == "O" else f"I-{name[2:]}" for name in names]
    inside = np.array(list(map(names.index, insides)))[tags]  # of each word
    before = np.concatenate([[-1], inside[:-1]])
    is_adjacent = (tags != inside) & (inside == before)  # it begins an entity right after one of the same kind
    first = np.where(_is_first(words), tags[words], inside[words])
    second = np.where(is_adjacent[words] & is_joined, tags[words], first)
    return np.stack([first, second], -1)


def _is_first(words: np.ndarray) -> np.ndarray:
    """Whether a piece is the first of its word."""
    return np.diff(words, prepend=-1) != 0


def spans_of(words: Sequence[str], tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Return kind, start and end of the entities in the text that words make with a space between two of them."""
    spans: list[tuple[str, int, int]] = []
    start = 0
    for word, (kind, is_first) in zip(words, kinds_of(tags)):
        end = start + len(word)
        if kind != "O":
            begin = start if is_first else spans.pop()[1]
            spans.append((kind, begin, end))
        start = end + 1
    return set(spans)


def tag_metrics(sought: Words, found: Words) -> Scores:
    """Return accuracy over the words, and F1: of the entities if all tags are B-, I- or O, else the mean over the tags.

    Args:
        sought: Tags of the words of each row.
        found: Tags that a model gives them.
    """
    tags = list(chain(*sought)), list(chain(*found))
    scores = {"accuracy": accuracy_score(*tags)}
    if is_iob(chain(*tags)):
        scores["precision"] = entities.precision_score(sought, found, zero_division=0)
        scores["recall"] = entities.recall_score(sought, found, zero_division=0)
        scores["f1"] = entities.f1_score(sought, found, zero_division=0)
    else:
        scores["f1"] = f1_score(*tags, average="macro", zero_division=0)
    return {name: float(value) for name, value in scores.items()}


def tag_report(sought: Words, found: Words, output_dict: bool = False) -> Any:
    """Return precision, recall and F1 of each kind of entity or tag, as a table or a dict; arguments as in `tag_metrics`."""
    options = {"zero_division": 0, "output_dict": output_dict, "digits": 3}
    tags = list(chain(*sought)), list(chain(*found))
    if not is_iob(chain(*tags)):
        return classification_report(*tags, **options)
    if set(chain(*tags)) == {"O"}:
        return {} if output_dict else "no entities, neither in the rows nor in the predictions"
    return entities.classification_report(sought, found, **options)


def cut(
    rows: dict[str, list],
    numbers: list[int],
    tokenizer,
    length: int,
    names: Sequence[str] | None = None,
) -> dict:
    """Return windows of rows of words, for `Dataset.map`; `names` are those of the tags, of a training."""
    overlap = (length - tokenizer.num_special_tokens_to_add()) // 4
    tokens = _tokenize(tokenizer, rows["words"], length, overlap)
    prefix = getattr(tokenizer.backend_tokenizer.model, "continuing_subword_prefix", None)
    owners = tokens["overflow_to_sample_mapping"]
    labels: list[np.ndarray] = []
    for owner, of_row in groupby(range(len(owners)), owners.__getitem__):
        numbers_of = list(of_row)
        windows = [tokens.word_ids(i) for i in numbers_of]
        own = list(own_pieces(windows, overlap))
        words = np.array([windows[i][column] for i, column in own])
        tags = np.array(rows["tags"][owner])
        of_windows = [np.full((len(window), 2), IGNORED) for window in windows]
        labels += of_windows
        is_first = _is_first(words)
        if names is None:  # the first piece of a word, in one window
            for (i, column), word in compress(zip(own, words), is_first):
                of_windows[i][column] = tags[word]
            continue
        is_joined = ~is_first
        if prefix:  # pieces that the pipeline joins to the one before
            pieces = [tokens.tokens(i) for i in numbers_of]
            is_joined = np.array([pieces[i][column].startswith(prefix) for i, column in own])
        of_pieces = piece_labels(words, is_joined, tags, names)
        start = 0
        for window, of_window in zip(windows, of_windows):
            columns = [column for column, word in enumerate(window) if word is not None]
            of_window[columns] = of_pieces[start : start + len(columns)]
            start += len(columns) - overlap
    inputs = {name: tokens[name] for name in tokenizer.model_input_names if name in tokens}
    return inputs | {"labels": labels, "row": [numbers[owner] for owner in owners]}


def _tokenize(
    tokenizer: PreTrainedTokenizerBase,
    rows: list[list[str]],
    length: int,
    overlap: int,
) -> BatchEncoding:
    """Windows of tokens; a word of characters that the tokenizer removes has the unknown token, so that it gets a tag too."""

    def tokenize(rows: list[list[str]]) -> BatchEncoding:
        # the spaces of a text; byte-level tokenizers mark the beginning of a word by one
        rows = [[first, *(f" {word}" for word in others)] for first, *others in rows]
        return tokenizer(
            rows,
            is_split_into_words=True,
            truncation=True,
            max_length=length,
            stride=overlap,
            return_overflowing_tokens=True,
        )

    tokens = tokenize(rows)
    seen = set()
    for window, owner in enumerate(tokens["overflow_to_sample_mapping"]):
        seen |= {(owner, word) for word in tokens.word_ids(window)}
    unknown = tokenizer.unk_token
    kept = [[word if (i, j) in seen else unknown for j, word in enumerate(row)] for i, row in enumerate(rows)]
    return tokens if kept == rows else tokenize(kept)
