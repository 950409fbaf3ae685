"""Rephrase sentences with WordNet synonyms, so that fewer words match exactly."""

import re
from pathlib import Path

# File of each kind of synset in WordNet's sense keys. Nouns (1) stay: in documentation they are terms.
PARTS = {2: "data.verb", 3: "data.adj", 4: "data.adv", 5: "data.adj"}
ENDINGS = ("s", "es", "ed", "d", "ing", "")


class Paraphraser:
    """Replaces each word by the first other lemma of its most frequent sense in WordNet 3 (wordnet.princeton.edu).

    Nouns, words of three letters or fewer, identifiers, and words that WordNet does not have or has no other word for stay as
    they are. An ending is put back on the first word. The result is no good English, but it means about the same.

    Args:
        folder: WordNet's `dict` folder, with `index.sense` and its `data.*` files.

    Raises:
        OSError: The folder holds no WordNet.
        ValueError: Index and data are not of one version.
    """

    def __init__(self, folder: str | Path) -> None:
        data = {part: Path(folder, name).read_bytes() for part, name in PARTS.items()}
        senses = {}
        for line in Path(folder, "index.sense").read_text("latin-1").splitlines():
            key, offset, _, count = line.split()
            lemma, _, rest = key.partition("%")
            senses[lemma] = max(senses.get(lemma, (0, 0, 0)), (int(count), int(offset), int(rest[0])))
        self.synonyms = {}
        for lemma, (count, offset, part) in senses.items():
            lemmas = self._lemmas(data[part], offset) if count and part in PARTS else []
            other = next((each for each in lemmas if each != lemma), None)
            if other:
                self.synonyms[lemma] = other

    @staticmethod
    def _lemmas(data: bytes, offset: int) -> list[str]:
        fields = data[offset : data.index(b"\n", offset)].decode("latin-1").split()
        if int(fields[0]) != offset:
            raise ValueError(f"the data file holds {fields[0]} at {offset}; index and data are not of one WordNet")
        lemmas = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
        return [re.sub(r"\(.*\)", "", lemma).replace("_", " ") for lemma in lemmas]

    def __call__(self, sentence: str) -> str:
        """The rephrased sentence."""
        return re.sub(r"(?<![\w.`])[A-Za-z][a-z]{3,}(?![\w`(]|\.\w)", self._replace, sentence)

    def _replace(self, match: re.Match) -> str:
        word = match[0].lower()
        for ending in ENDINGS:
            stem = word.removesuffix(ending)
            if word.endswith(ending) and len(stem) > 2 and not word.endswith("ss") and stem in self.synonyms:
                first, *rest = self.synonyms[stem].split()
                return " ".join([first + ending, *rest])
        return match[0]
