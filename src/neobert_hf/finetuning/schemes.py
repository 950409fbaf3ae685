"""Schemes of tags: models have IOB2; IOBES and BILOU also mark last words and single words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .tags import kinds_of

# Letters of the last word of an entity and of an entity of one word, by the name of the scheme in seqeval
SCHEMES = {"IOBES": ("E", "S"), "BILOU": ("L", "U")}
IOB2 = {"E": "I", "L": "I", "S": "B", "U": "B"}


def is_iob(names: Iterable[str]) -> bool:
    """Return whether all tags are O, or begin with B- or I-: the first word of an entity, and its other words."""
    return all(name == "O" or name.startswith(("B-", "I-")) for name in names)


def tag_scheme(tags: Iterable[str]) -> str | None:
    """Return the scheme of tags that mark last words and single words, IOBES or BILOU; None for tags of another kind."""
    kinds = set(tags)
    entities = kinds - {"O"}
    if entities == kinds or is_iob(kinds) or not all(re.match("[BIELSU]-.", tag) for tag in entities):
        return None
    return "BILOU" if any(tag[0] in "LU" for tag in entities) else "IOBES"


def to_iob2(rows: Iterable[Sequence[str]], names: Iterable[str]) -> list[list[str]]:
    """Return rows with tags of a model: E- or L- becomes I-, and S- or U- becomes B-, unless the model knows the tag itself.

    Args:
        rows: Tags of each row.
        names: Tags of the model.
    """
    known = set(names)

    def of_model(tag: str) -> str:
        other = iob2_tag(tag)
        if tag not in known and other in known:
            return other
        return tag

    return [list(map(of_model, row)) for row in rows]


def iob2_tag(tag: str) -> str:
    """Return a tag with B- for S- and U-, and with I- for E- and L-."""
    return IOB2.get(tag[0], tag[0]) + tag[1:]


def iob2_names(names: Sequence[str]) -> list[str]:
    """Return names of tags, once each: as B- and I- if `tag_scheme` knows them, because pipelines know no other letters."""
    if tag_scheme(names):
        names = list(map(iob2_tag, names))
    return list(dict.fromkeys(names))


def from_iob2(rows: Iterable[Sequence[str]], scheme: str) -> list[list[str]]:
    """Return rows of B-, I- and O in a scheme that marks last words and single words; the entities stay the same.

    Args:
        rows: Tags of each row.
        scheme: IOBES or BILOU.
    """
    last, single = SCHEMES[scheme]
    letters = {(True, True): single, (True, False): "B", (False, True): last, (False, False): "I"}
    found = []
    for row in rows:
        is_first = [is_first for _, is_first in kinds_of(row)]
        is_last = [*is_first[1:], True]
        tags = []
        for tag, ends in zip(row, zip(is_first, is_last)):
            if tag != "O":
                tag = letters[ends] + tag[1:]
            tags.append(tag)
        found.append(tags)
    return found
