"""Entities of texts of any length, by the logits of windows: `EntityFinder`, without torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from .tags import MARKS, kinds_of, own_pieces, word_starts


@dataclass
class EntityFinder:
    """Finds the entities of texts of any length, which a tagger reads in windows; a word has the tag that `Tagger` gives it.

    The tag of a word is that of its first token, in the window in which this has the most context on both sides. Windows overlap
    by a quarter. Words are joined as by the aggregation strategy "first" of the pipeline of transformers.

    Args:
        tokenizer: The tokenizer.
        max_length: Length in tokens of a window.
        names: Names of the tags, in the order of the logits.
        run: Returns the logits (B, L, number of tags) of B windows, which are padded to L tokens.
        division: "whitespace", "ends" or "marks", by which texts become words as in the training.
        unknown: The token of a word of characters that the tokenizer removes.
    """

    tokenizer: Tokenizer
    max_length: int
    names: Sequence[str]
    run: Callable[[Sequence[Encoding]], np.ndarray]
    division: str = MARKS
    unknown: str = ""

    def __post_init__(self) -> None:
        self.tokenizer = Tokenizer.from_str(self.tokenizer.to_str())
        self.overlap = (self.max_length - self.tokenizer.num_special_tokens_to_add(is_pair=False)) // 4
        self.tokenizer.enable_truncation(self.max_length, stride=self.overlap)
        self.tokenizer.enable_padding()  # the mask hides it, so that any id serves

    def __call__(self, texts: Sequence[Any], batch_size: int = 32) -> list[list[dict]]:
        """Return for each text its entities in order, as dicts with `entity_group`, `score`, `start`, `end` and `word`.

        Args:
            texts: Texts.
            batch_size: Number of windows in a batch of the model.

        Raises:
            ValueError: An element is a pair of texts.
            TypeError: An element is no text.
        """
        if pairs := [text for text in texts if isinstance(text, tuple | list)]:
            raise ValueError(f"{pairs[0]!r} is a pair, and a tagger reads one text; give a text, or a list of texts")
        found = self._read(texts, batch_size)
        return [self._entities(text, *of_text) for text, of_text in zip(texts, found)]

    def tag_words(self, rows: Sequence[Sequence[str]], batch_size: int = 32) -> list[np.ndarray]:
        """Return the (number of words, number of tags) logits of rows of words, as `Tagger.outputs` does.

        Args:
            rows: Words of each row, one at least.
            batch_size: Number of windows in a batch of the model.
        """
        # the spaces of a text; byte-level tokenizers mark the beginning of a word by one
        spaced = [[first, *(f" {word}" for word in others)] for first, *others in rows]
        encodings = self.tokenizer.encode_batch(spaced, is_pretokenized=True)
        for row, first in zip(spaced, encodings):
            seen = {word for window in (first, *first.overflowing) for word in window.word_ids}
            row[:] = [word if number in seen else self.unknown for number, word in enumerate(row)]
        found = []
        for windows, logits in self._read(spaced, batch_size, is_pretokenized=True):
            word_ids = [window.word_ids for window in windows]
            of_words: dict[int | None, np.ndarray] = {}
            for window, column in own_pieces(word_ids, self.overlap):
                of_words.setdefault(word_ids[window][column], logits[window][column])
            found.append(np.stack(list(of_words.values())))
        return found

    def _read(self, inputs: Sequence[Any], batch_size: int, **options: bool) -> list[tuple[list[Encoding], list]]:
        """The windows of each input, and their logits; inputs of similar length share a batch."""
        order = sorted(range(len(inputs)), key=lambda number: -len(inputs[number]))
        found = {}
        for start in range(0, len(order), batch_size):
            numbers = order[start : start + batch_size]
            encodings = self.tokenizer.encode_batch([inputs[number] for number in numbers], **options)
            windows = [[first, *first.overflowing] for first in encodings]
            every = list(chain.from_iterable(windows))
            logits = chain.from_iterable(self.run(every[i : i + batch_size]) for i in range(0, len(every), batch_size))
            for number, of_input in zip(numbers, windows):
                found[number] = of_input, list(islice(logits, len(of_input)))
        return [found[number] for number in range(len(inputs))]

    def _entities(self, text: str, windows: Sequence[Encoding], logits: Sequence[np.ndarray]) -> list[dict]:
        word_ids = [window.word_ids for window in windows]
        offsets = [window.offsets for window in windows]
        if self.division != MARKS:
            starts = word_starts(text, self.division)
            word_ids = [_words_at(starts, *columns) for columns in zip(word_ids, offsets)]
        spans, scores = [], []
        for _, pieces in groupby(
            own_pieces(word_ids, self.overlap),
            lambda piece: word_ids[piece[0]][piece[1]],
        ):
            (window, column), *others = pieces
            last_window, last_column = others[-1] if others else (window, column)
            spans.append((offsets[window][column][0], offsets[last_window][last_column][1]))
            of_word = logits[window][column]
            scores.append(np.exp(of_word - of_word.max()))
        kinds = kinds_of([self.names[of_word.argmax()] for of_word in scores])
        entities: list[dict[str, Any]] = []
        for (start, end), of_word, (kind, is_first) in zip(spans, scores, kinds):
            if kind == "O":
                continue
            if is_first:
                entities.append({"entity_group": kind, "score": [], "start": start})
            entities[-1]["score"].append(1 / of_word.sum())  # of the best tag
            entities[-1]["end"] = end
        for entity in entities:
            entity["score"] = float(np.mean(entity["score"]))
            entity["word"] = text[entity["start"] : entity["end"]]
        return entities


def _words_at(starts: list[int], word_ids: list[int | None], offsets: list[tuple[int, int]]) -> list[int | None]:
    """For each token the number of the word that has its last character; None for special tokens."""
    numbers = np.searchsorted(starts, [end - 1 for _, end in offsets], side="right").tolist()
    return [None if word is None else number for word, number in zip(word_ids, numbers)]
