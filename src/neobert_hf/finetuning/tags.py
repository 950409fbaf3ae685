"""Tags of tokens become tags of words, and those of words entities; without torch, for exported models too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def own_pieces(windows: Sequence[Sequence[int | None]], overlap: int) -> Iterator[tuple[int, int]]:
    """Yield each token of a text once, in order: its window and its column there, where it has the most context on both sides.

    Half of an overlap belongs to the window before, the other half to the one after.

    Args:
        windows: For each window of the text, the number of the word of each token; None for special tokens and padding.
        overlap: Number of tokens that a window shares with the one before it.
    """
    for number, words in enumerate(windows):
        columns = [column for column, word in enumerate(words) if word is not None]
        first = overlap // 2 if number else 0
        end = len(columns) - (overlap - overlap // 2 if number + 1 < len(windows) else 0)
        yield from ((number, column) for column in columns[first:end])


def kinds_of(tags: Sequence[str]) -> list[tuple[str, bool]]:
    """Return for the tag of each word the kind of its entity, and whether the word begins one.

    B- begins an entity, I- continues one of its kind and otherwise begins one, as in `conlleval` and in the default mode of
    seqeval. Words of one other tag side by side are one entity, as in the pipeline of transformers. "O" is a kind too.
    """
    kinds = [tag[2:] if tag.startswith(("B-", "I-")) else tag for tag in tags]
    return [(kind, tag.startswith("B-") or kind != last) for last, kind, tag in zip(["O", *kinds], kinds, tags)]
