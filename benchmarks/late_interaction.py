"""Effect and cost of reranking by token embeddings: recall by the number of reranked candidates.

    python benchmarks/late_interaction.py --wordnet .../wordnet/dict --json benchmarks/results/late_interaction_cpu.json

Queries and documents are those of embeddings.py. The nearest documents by cosine are reranked by late interaction, as in
`neobert search --num_candidates`. The seconds are for one query, with its candidates embedded again. BM25 runs on the words as
they are, and with identifiers split.
"""

import statistics
import time
from dataclasses import dataclass, field

import torch
from embeddings import METRICS, bm25, forms_of
from harness import finish
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import semantic_search
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import HfArgumentParser

import neobert_hf
from neobert_hf.demo.ranking import words_of
from neobert_hf.embeddings.training_sets import read_pairs
from neobert_hf.evaluation.retrieval import pairs_evaluator


@dataclass
class LateInteractionArguments:
    """Arguments of the benchmark."""

    model: str = field(default=neobert_hf.MINI_MODEL_PATH, metadata={"help": "Folder of an embedding model."})
    pairs: str = field(
        default="runs/documentation/held_out_packages_pairs.jsonl", metadata={"help": "Questions and answers."}
    )
    wordnet: str = field(default=None, metadata={"help": "WordNet's dict folder, for rephrased questions."})
    num_candidates: list[int] = field(
        default_factory=lambda: [0, 50, 100, 200, 300], metadata={"help": "Numbers of candidates to rerank."}
    )
    num_timed: int = field(default=30, metadata={"help": "Questions to time."})
    json: str = field(default=None, metadata={"help": "File to write the result to."})


def ranked(model, tokens_model, questions: list[str], documents: list[str], most: int) -> list[list[dict]]:
    """The nearest documents of each question: number, cosine, and late-interaction score."""
    options = dict(batch_size=64, convert_to_tensor=True)
    vectors = model.encode_query(questions, **options), model.encode_document(documents, **options)
    nearest = semantic_search(*vectors, top_k=most)
    states = tokens_model.encode_document(documents, batch_size=64)
    lengths = torch.tensor([len(each) for each in states])
    padded = pad_sequence(states, batch_first=True)
    real = torch.arange(padded.shape[1]) < lengths[:, None]
    queries = tokens_model.encode_query(questions, batch_size=64)
    for query, candidates in zip(tqdm(queries, desc="comparing tokens", unit=" questions"), nearest):
        numbers = [hit["corpus_id"] for hit in candidates]
        (scores,) = tokens_model.similarity([query], padded[numbers], b_mask=real[numbers]).tolist()
        for hit, score in zip(candidates, scores):
            hit["late"] = score
    return nearest


def order(candidates: list[dict], count: int) -> list[int]:
    """Numbers of the documents; the first `count` are sorted by their late-interaction score."""
    compared = sorted(candidates[:count], key=lambda hit: hit["late"], reverse=True)
    return [hit["corpus_id"] for hit in compared + candidates[count:]]


def seconds_of(model, tokens_model, question: str, documents: list[str]) -> float:
    """Seconds for one question: its vector and, if documents are given, their token vectors and the scores."""
    started = time.perf_counter()
    model.encode_query([question])
    if documents:
        found = tokens_model.encode_query([question]), tokens_model.encode_document(documents, batch_size=64)
        tokens_model.similarity(*found)
    return time.perf_counter() - started


def main():
    """Run every measurement, print the table, and end with one line of JSON."""
    (arguments,) = HfArgumentParser(LateInteractionArguments).parse_args_into_dataclasses()
    neobert_hf.tune_allocator()
    model = SentenceTransformer(arguments.model)
    tokens_model = neobert_hf.multi_vector_encoder(model)
    pairs = read_pairs(arguments.pairs)
    rows = []
    for form, each in forms_of(pairs, arguments.wordnet).items():
        evaluator = pairs_evaluator(each, "documentation")
        for name, prepare in {"BM25": str, "BM25, identifiers split": words_of}.items():
            rows.append({"questions": form, "order": name, **bm25(evaluator, prepare)})
        found = ranked(model, tokens_model, evaluator.queries, evaluator.corpus, max(10, *arguments.num_candidates))
        for count in arguments.num_candidates:
            hits = [
                [
                    {"corpus_id": evaluator.corpus_ids[i], "score": -rank}
                    for rank, i in enumerate(order(candidates, count))
                ]
                for candidates in found
            ]
            metrics = {name: evaluator.compute_metrics(hits)[key][k] for name, (key, k) in METRICS.items()}
            seconds = [
                seconds_of(
                    model, tokens_model, text, [evaluator.corpus[hit["corpus_id"]] for hit in candidates[:count]]
                )
                for text, candidates in zip(evaluator.queries[: arguments.num_timed], found)
            ]
            name = f"cosine, then tokens of {count}" if count else "cosine"
            rows.append({"questions": form, "order": name, **metrics, "seconds": statistics.median(seconds)})
    finish("late_interaction", rows, arguments, floatfmt=".3f", num_questions=len(pairs))


if __name__ == "__main__":
    main()
