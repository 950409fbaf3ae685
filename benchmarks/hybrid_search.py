"""`neobert search` by words, by vectors and by both: the nDCG@10 of documents that hold the answers of known questions.

    python benchmarks/hybrid_search.py --pairs squad.csv man.csv --json benchmarks/results/hybrid_search_cpu.json

A row of a CSV file has a question and the document that answers it; a document without a question is searched too. A question
may have several answers: the best one counts. The last `num_questions` questions are asked. In the stored result:

- squad: paragraphs and questions of SQuAD 1.1, development set; xquad_de: its part in German.
- man: manual pages of Debian 12 without the section NAME; the question is the description in NAME.
- docstrings: of pandas and networkx, in which the first paragraph is the question and the rest the document.
- everyday: `examples/documentation_search/everyday_questions.tsv`, and all entries of the standard library.

Words count in `DocumentSearch.search` with `word_weight`: 0 for vectors, 1 for words. The weight in use and the other constants
were chosen on other questions of squad and of docstrings, and on other manual pages, but on the same ones of the other two.
"""

import csv
import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import finish, read_arguments

import neobert_hf
from neobert_hf.embeddings import DocumentSearch
from neobert_hf.embeddings.search import WORD_WEIGHT

WEIGHTS = {"words": 1, "vectors": 0, "both": WORD_WEIGHT}
NUM_PASSAGES = 200  # for a question; ten documents nearly always are among them


def read_pairs(file: str) -> tuple[list[str], dict[str, set[int]]]:
    """Documents, and the numbers from 1 of those that answer each question."""
    numbers, answers = {}, {}
    with open(file, encoding="utf-8", newline="") as stream:
        for question, document in list(csv.reader(stream))[1:]:
            number = numbers.setdefault(document, len(numbers) + 1)
            if question:
                answers.setdefault(question, set()).add(number)
    return list(numbers), answers


def gain(documents: DocumentSearch, question: str, answers: set[int]) -> float:
    """nDCG@10 of a question with one answer; a document is as good as its best passage, and its number is its line."""
    ranking = dict.fromkeys(answer.line for answer in documents.search(question, NUM_PASSAGES))
    places = [place for place, number in enumerate(list(ranking)[:10], 1) if number in answers]
    return 1 / math.log2(places[0] + 1) if places else 0


def measure(file: str, model: str, num_questions: int) -> dict:
    """nDCG@10 of the last questions of a file, by each way."""
    texts, answers = read_pairs(file)
    asked = dict(list(answers.items())[-num_questions:])
    with TemporaryDirectory() as folder:
        rows = Path(folder, "documents.jsonl")
        rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        documents = DocumentSearch([str(rows)], model)
    counts = {"documents": len(texts), "passages": len(documents.passages), "questions": len(asked)}
    row = {"what": Path(file).stem} | {name: f"{count:,}" for name, count in counts.items()}
    for way, documents.word_weight in WEIGHTS.items():
        row[way] = sum(gain(documents, *pair) for pair in asked.items()) / len(asked)
    return row


def main():
    """Measure each file, print the table, and end with one line of JSON."""
    arguments = read_arguments(__doc__, pairs=["pairs.csv"], model=neobert_hf.MINI_MODEL_PATH, num_questions=1000)
    neobert_hf.tune_allocator()
    rows = [measure(file, arguments.model, arguments.num_questions) for file in arguments.pairs]
    arguments.pairs = [Path(file).name for file in arguments.pairs]
    finish("hybrid_search", rows, arguments)


if __name__ == "__main__":
    main()
