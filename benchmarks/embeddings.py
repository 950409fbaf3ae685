"""Embedding models on documentation: retrieval, STS-B, the cost of int8, and the speed of `encode` with and without padding.

    python benchmarks/embeddings.py --stsb GLUE/STS-B --json benchmarks/results/embeddings_cpu.json
    python benchmarks/embeddings.py --models src/neobert_hf/mini FOLDER_OF_ANOTHER_MODEL

Docstrings of packages that were never in the training set of the mini model: the first paragraph is the question, the rest is the
correct answer among the answers of all packages. BM25 splits identifiers into words, stems, and removes stopwords. A model named
"int8" is `inference_copy(model, int8=True)`; its vectors are compared with those of the model. `encode` runs on all answers, in
turns with and without computing padding.
"""

import csv
import re
from pathlib import Path

import bm25s
import Stemmer
import torch
from datasets import Dataset
from harness import docstrings, finish, median_and_spread, median_ratio, read_arguments, take_turns
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

import neobert_hf
from neobert_hf.embeddings import pairs_evaluator

METRICS = {
    "recall@1": ("recall@k", 1),
    "recall@10": ("recall@k", 10),
    "MRR@10": ("mrr@k", 10),
    "nDCG@10": ("ndcg@k", 10),
}


def make_pairs(packages: list[str], num_pairs: int) -> Dataset:
    """Questions and answers from docstrings with more than one paragraph; 0 pairs are all."""
    parts = (text.partition("\n\n") for package in packages for text in docstrings(package))
    pairs = {question: answer for question, _, answer in parts if answer and len(question) < 200}
    rows = [{"question": question, "answer": answer} for question, answer in pairs.items()]
    return Dataset.from_list(rows[: num_pairs or None])


def bm25(evaluator) -> dict[str, float]:
    """Metrics of BM25 on the evaluator's queries and documents."""

    def tokenize(texts):
        words = [re.sub(r"(?<=[a-z])(?=[A-Z])|[_.]", " ", text) for text in texts]
        return bm25s.tokenize(words, stopwords="en", stemmer=Stemmer.Stemmer("english"), show_progress=False)

    retriever = bm25s.BM25()
    retriever.index(tokenize(evaluator.corpus), show_progress=False)
    k = min(10, len(evaluator.corpus))
    found, scores = retriever.retrieve(tokenize(evaluator.queries), k=k, show_progress=False)
    hits = [
        [{"corpus_id": evaluator.corpus_ids[i], "score": float(score)} for i, score in zip(*ranking)]
        for ranking in zip(found, scores)
    ]
    return {name: evaluator.compute_metrics(hits)[key][k] for name, (key, k) in METRICS.items()}


def retrieval(model: SentenceTransformer, evaluator) -> dict[str, float]:
    """The same metrics, of an embedding model."""
    result = evaluator(model)
    return {name: result[f"{evaluator.name}_cosine_{key[:-1]}{k}"] for name, (key, k) in METRICS.items()}


def speed(model: SentenceTransformer, texts: list[str], num_rounds: int) -> dict[str, float]:
    """Tokens/s of `encode`, and for a NeoBERT its speed over the same model computing padding."""

    def encode(unpad):
        model[0].model.config.unpad_inputs = unpad
        return model.encode(texts)

    runs = {"as loaded": lambda: model.encode(texts)}
    if hasattr(model[0].model.config, "unpad_inputs"):
        runs = {"as loaded": lambda: encode(True), "padded": lambda: encode(False)}
    seconds = take_turns(runs, num_rounds, "cpu", "encode")
    lengths = model.tokenizer(texts, truncation=True, max_length=model.max_seq_length, return_length=True)["length"]
    median, spread = median_and_spread(seconds["as loaded"])
    ratio = median_ratio(seconds["padded"], seconds["as loaded"]) if "padded" in seconds else None
    return {"tokens_per_s": sum(lengths) / median, "spread": spread, "speed_over_padded": ratio}


def spearman(model: SentenceTransformer, folder: str) -> float:
    """Spearman correlation of cosines with the scores of STS-B's development set."""
    with Path(folder, "dev.csv").open(encoding="utf-8", newline="") as stream:
        rows = [row[4:7] for row in csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)]
    scores, *sentences = zip(*rows)
    evaluator = EmbeddingSimilarityEvaluator(
        *map(list, sentences), list(map(float, scores)), main_similarity="cosine", write_csv=False, name="stsb"
    )
    return evaluator(model)["stsb_spearman_cosine"]


def main():
    """Measure every model, print the table, and end with one line of JSON."""
    arguments = read_arguments(
        __doc__,
        models=[neobert_hf.MINI_MODEL_PATH],
        packages=["pandas", "networkx"],
        num_pairs=0,
        stsb=None,
        max_lengths=[128, 256],
        num_rounds=3,
    )
    neobert_hf.tune_allocator()
    pairs = make_pairs(arguments.packages, arguments.num_pairs)
    evaluator, texts = pairs_evaluator(pairs, "documentation"), list(pairs["answer"])
    rows, sts = [{"model": "BM25", **bm25(evaluator)}], []
    for folder in arguments.models:
        model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": torch.float32})
        contenders = {Path(folder).name: model}
        if model[0].model.config.model_type == "neobert":
            contenders[f"{Path(folder).name}, int8"] = neobert_hf.inference_copy(model, int8=True)
        for length in arguments.max_lengths:
            wanted = None
            for name, contender in contenders.items():
                contender.max_seq_length = length
                vectors = contender.encode(texts, convert_to_tensor=True)
                wanted = vectors if wanted is None else wanted
                row = {"model": name, "max_length": length, **retrieval(contender, evaluator)}
                row["cosine"] = torch.cosine_similarity(vectors, wanted).mean().item()
                rows.append(row | speed(contender, texts, arguments.num_rounds))
        if arguments.stsb:
            sts += [{"model": name, "spearman": spearman(found, arguments.stsb)} for name, found in contenders.items()]
    arguments.models = [Path(folder).name for folder in arguments.models]
    finish("embeddings", rows, arguments, num_questions=len(pairs), sts=sts)


if __name__ == "__main__":
    main()
