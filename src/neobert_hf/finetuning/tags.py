"""Tags of tokens become tags of words, and those of words entities; without torch, for exported models too."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

# How a text is divided into words: at white space; also around brackets, quotation marks and marks of sentences at the ends of a
# word; or at every mark, as BERT's tokenizer and the pipeline of transformers do.
WHITESPACE, ENDS, MARKS = "whitespace", "ends", "marks"
OPENING, CLOSING = "([{<\"'`“‘«„¿¡", ")]}>\"'`”’»“.,;:!?…"  # noqa: RUF001
ENDING = re.compile(r"(?<=\w)['’]\w{1,2}$")  # noqa: RUF001  # "'s" behind a name
SIGN = re.compile(r"[^\w\s]|_")


def word_starts(text: str, division: str) -> list[int]:
    """Return where the words of a text begin, by a division at white space or at the ends of words."""
    starts = []
    for found in re.finditer(r"\S+", text):
        start, end = found.span()
        if division == WHITESPACE:
            starts.append(start)
            continue
        first, last = (start + column for column in _body(found[0]))
        ending = ENDING.search(text[first:last])
        starts += range(start, first + 1)
        if ending:
            starts.append(first + ending.start())
        starts += range(last, end)
    return list(dict.fromkeys(starts))  # a word of marks alone has no body


def division_of(words: Iterable[str]) -> str:
    """Return the division of texts that gives the words of a training.

    Marks of sentences say white space if most of them are attached to a word ("London."). If they stand alone, and words have
    signs inside ("e-mail"), the ends of words are divided; otherwise words are divided at every mark.
    """
    num_attached = num_alone = num_inside = 0
    for word in words:
        first, last = _body(word)
        num_alone += first == last
        num_attached += first < last < len(word)
        num_inside += bool(SIGN.search(word[first:last]))
    if num_attached > num_alone:
        return WHITESPACE
    return ENDS if num_inside else MARKS


def _body(word: str) -> tuple[int, int]:
    """The columns between which a word has no brackets, quotation marks and marks of a sentence at its ends."""
    first = len(word) - len(word.lstrip(OPENING))
    return first, max(first, len(word.rstrip(CLOSING)))


def own_pieces(windows: Sequence[Sequence[int | None]], overlap: int) -> Iterator[tuple[int, int]]:
    """Yield each token of a text once, in order: its window and its column there, where it has the most context on both sides.

    Half of an overlap belongs to the window before, the other half to the one after.

    Args:
        windows: For each window of the text, the number of the word of each token; None for special tokens and padding.
        overlap: Number of tokens that a window shares with the one before it.
    """
    for number, words in enumerate(windows):
        columns = [column for column, word in enumerate(words) if word is not None]
        first, end = 0, len(columns)
        if number > 0:
            first = overlap // 2
        if number + 1 < len(windows):
            end -= overlap - overlap // 2
        yield from ((number, column) for column in columns[first:end])


def kinds_of(tags: Sequence[str]) -> list[tuple[str, bool]]:
    """Return for the tag of each word the kind of its entity, and whether the word begins one.

    B- begins an entity, I- continues one of its kind and otherwise begins one, as in `conlleval` and in the default mode of
    seqeval. Words of one other tag side by side are one entity, as in the pipeline of transformers. "O" is a kind too.
    """
    kinds = [tag[2:] if tag.startswith(("B-", "I-")) else tag for tag in tags]
    return [(kind, tag.startswith("B-") or kind != last) for last, kind, tag in zip(["O", *kinds], kinds, tags)]
