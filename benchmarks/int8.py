"""Cost of int8 products in the mini model: retrieval, and cosine of the embeddings with those in float32.

    python benchmarks/int8.py --json benchmarks/results/int8_cpu.json

Queries are first sentences and documents are docstrings, of packages that were never in the mini model's training set.
"""

from dataclasses import dataclass, field

import torch
from corpus import retrieval_pairs  # examples/documentation_search
from datasets import Dataset
from docstrings import read
from harness import finish
from sentence_transformers import SentenceTransformer
from transformers import HfArgumentParser

import neobert_hf
from neobert_hf.evaluation.retrieval import pairs_evaluator

METRICS = {"recall@1": "cosine_recall@1", "recall@10": "cosine_recall@10", "nDCG@10": "cosine_ndcg@10"}


@dataclass
class Int8Arguments:
    """Arguments of the benchmark."""

    model: str = field(
        default=neobert_hf.MINI_MODEL_PATH, metadata={"help": "Folder of an embedding model on a NeoBERT."}
    )
    packages: list[str] = field(
        default_factory=lambda: ["pandas", "networkx"],
        metadata={"help": "Installed packages whose docstrings are the documents."},
    )
    num_questions: int = field(default=None, metadata={"help": "Use the first questions only, for a quick run."})
    json: str = field(default=None, metadata={"help": "File to write the result to."})


def main():
    """Run both, print the table, and end with one line of JSON."""
    (arguments,) = HfArgumentParser(Int8Arguments).parse_args_into_dataclasses()
    pairs = retrieval_pairs(read(tuple(arguments.packages or ["python"])))[: arguments.num_questions]
    evaluator = pairs_evaluator(Dataset.from_list(pairs), "packages")
    texts = [pair["document"] for pair in pairs]
    rows, wanted = [], None
    for name in ("float32", "int8"):
        model = SentenceTransformer(arguments.model, device="cpu", model_kwargs={"dtype": torch.float32})
        model = neobert_hf.inference_copy(model, int8=True) if name == "int8" else model
        vectors = model.encode(texts, convert_to_tensor=True, show_progress_bar=True)
        wanted = vectors if wanted is None else wanted
        cosines = torch.cosine_similarity(vectors, wanted)
        scores = evaluator(model)
        row = {"products": name} | {metric: scores[f"packages_{key}"] for metric, key in METRICS.items()}
        rows.append(row | {"cosine": cosines.mean().item(), "smallest cosine": cosines.min().item()})
    finish("int8", rows, arguments, floatfmt=".4f", num_questions=len(pairs))


if __name__ == "__main__":
    main()
