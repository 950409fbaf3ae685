"""Contextual embeddings on real text: each package of Python's documentation is a corpus.

    neobert documentation --output_dir runs/documentation --more_packages --held_out_packages pandas networkx
    python benchmarks/contextual.py --corpus runs/documentation --json benchmarks/results/contextual_cpu.json

Three models start from the same encoder and take the same steps on the same pairs: a plain encoder with random batches, the same
with contextual batches, and a contextual model with contextual batches, whose second stage has the encoder's shape. The first
sentence of a docstring searches its entry among all entries of a held-out package, which is a corpus with its own context.
"""

import json
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from harness import finish
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.training_args import BatchSamplers
from transformers import HfArgumentParser
from transformers.utils import logging

import neobert_hf
from neobert_hf import best_dtype, contextual_sentence_transformer, fit_context, sentence_transformer, tune_allocator
from neobert_hf.embeddings.contextual import contextual_model
from neobert_hf.embeddings.contextual_training import (
    TEMPERATURE,
    ContextualArguments,
    ContextualRankingLoss,
    ContextualTrainingArguments,
    number_rows,
    use_clusters,
)
from neobert_hf.evaluation.retrieval import pairs_evaluator

MODELS = {
    "plain, random batches": (False, "random"),
    "plain, contextual batches": (False, "clusters"),
    "contextual, contextual batches": (True, "clusters"),
}


@dataclass
class RealTextArguments:
    """Arguments of the benchmark."""

    corpus: str = field(metadata={"help": "Folder that `neobert documentation` wrote."})
    model: str = field(
        default=neobert_hf.MINI_MODEL_PATH, metadata={"help": "Encoder to start from, and surrogate model."}
    )
    models: list[str] = field(default_factory=lambda: list(MODELS), metadata={"help": f"Among {', '.join(MODELS)}."})
    pairs_of_package: int = field(default=1000, metadata={"help": "Most pairs of a package."})
    context_size: int = field(default=32, metadata={"help": "Documents of the context."})
    batch_size: int = field(default=32, metadata={"help": "Pairs in a batch."})
    cluster_size: int = field(
        default=64, metadata={"help": "Mean number of pairs in a cluster; smaller packages are left out."}
    )
    max_seq_length: int = field(default=64, metadata={"help": "Length in tokens at which texts are truncated."})
    num_steps: int = field(default=300, metadata={"help": "Steps of each run."})
    learning_rate: float = field(default=3e-4, metadata={"help": "Peak learning rate."})
    seeds: list[int] = field(
        default_factory=lambda: [0, 1, 2], metadata={"help": "One run of each model for each seed."}
    )
    clusters_dir: str = field(default=None, metadata={"help": "Folder of the clusters. Default: beside the corpus."})
    json: str = field(default=None, metadata={"help": "File to write the result to."})


def pairs_by_package(file: Path, most: int, seed: int = 0) -> dict[str, Dataset]:
    """Return up to `most` random pairs of each package; an entry begins with its qualified name."""
    found = defaultdict(dict)
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            package, dot, _ = row["document"].split("\n")[0].partition(".")
            if dot and package.isidentifier():
                found[package].setdefault(row["document"], row["query"])  # an entry once
    rng = np.random.default_rng(seed)
    packages = {}
    for package, rows in sorted(found.items()):
        chosen = rng.permutation(len(rows))[:most]
        documents, queries = list(rows), list(rows.values())
        packages[package] = Dataset.from_dict(
            {"query": [queries[i] for i in chosen], "document": [documents[i] for i in chosen]}
        )
    return packages


def train(name: str, sets: DatasetDict, arguments: RealTextArguments, seed: int):
    """Return the trained model."""
    is_contextual, batches = MODELS[name]
    weights = {"dtype": torch.float32}
    torch.manual_seed(seed)
    if is_contextual:
        model = contextual_sentence_transformer(
            arguments.model, context_size=arguments.context_size, model_kwargs=weights
        )
    else:
        model = sentence_transformer(arguments.model, model_kwargs=weights)
    model.max_seq_length = arguments.max_seq_length
    with tempfile.TemporaryDirectory() as folder:
        training = ContextualTrainingArguments(
            folder,
            max_steps=arguments.num_steps,
            per_device_train_batch_size=arguments.batch_size,
            learning_rate=arguments.learning_rate,
            warmup_steps=arguments.num_steps // 10,
            bf16=best_dtype("cpu") == torch.bfloat16,
            use_cpu=True,
            seed=seed,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            batch_sampler=BatchSamplers.BATCH_SAMPLER,
        )
        clusters, rows = None, sets
        if batches == "clusters":
            options = ContextualArguments(
                arguments.model,
                train_files=["-"],
                surrogate_model=arguments.model,
                clusters_dir=arguments.clusters_dir,
                cluster_size=arguments.cluster_size,
            )
            training.seed = 0  # the clusters are the same in all runs
            clusters = use_clusters(sets, options, training)
            training.seed = seed
        else:
            rows = Dataset.from_dict({c: [x for part in sets.values() for x in part[c]] for c in ("query", "document")})
        if is_contextual:
            loss = ContextualRankingLoss(model, TEMPERATURE, mini_batch_size=64, datasets=clusters)
        else:
            loss = PlainLoss(model, clusters)
        trainer = SentenceTransformerTrainer(model, training, train_dataset=rows, loss=loss)
        trainer.train()
        return model


class PlainLoss(CachedMultipleNegativesRankingLoss):
    """The cached loss of a model without context, with the same mask of false negatives."""

    def __init__(self, model, datasets):
        super().__init__(model, scale=1 / TEMPERATURE, mini_batch_size=64)
        self.datasets = datasets

    def calculate_loss(self, reps, labels=None, *, with_backward=False):
        """Called by the loss of sentence-transformers."""
        return ContextualRankingLoss._ranking_loss(self, *map(torch.cat, reps), labels)

    _false_negatives = ContextualRankingLoss._false_negatives


def evaluate(model, corpora: dict[str, Dataset], contexts: dict[str, Dataset] | None) -> dict[str, float]:
    """Return nDCG@10 of each corpus; `contexts` gives the corpus of each context."""
    scores = {}
    for package, rows in corpora.items():
        if contexts:
            fit_context(model, contexts[package]["document"])
        evaluator = pairs_evaluator(rows, package)
        evaluator.show_progress_bar = False
        scores[package] = evaluator(model)[f"{package}_cosine_ndcg@10"]
    if contexts:
        contextual_model(model).set_context(None)
    return scores


def main():
    """Train and evaluate, print the table, and end with one line of JSON."""
    (arguments,) = HfArgumentParser(RealTextArguments).parse_args_into_dataclasses()
    tune_allocator()
    logging.set_verbosity_error()
    corpus = Path(arguments.corpus)
    arguments.clusters_dir = arguments.clusters_dir or str(corpus / "clusters")
    found = pairs_by_package(corpus / "train_pairs.jsonl", arguments.pairs_of_package)
    sets = number_rows({name: rows for name, rows in found.items() if len(rows) >= arguments.cluster_size})
    held_out = pairs_by_package(corpus / "held_out_packages_pairs.jsonl", 1 << 30)
    swapped = dict(zip(held_out, [*list(held_out.values())[1:], *list(held_out.values())[:1]]))
    print(
        f"{sum(map(len, sets.values())):,} pairs of {len(sets)} packages; held out:",
        {k: len(v) for k, v in held_out.items()},
    )
    results = defaultdict(list)
    untrained = sentence_transformer(arguments.model, model_kwargs={"dtype": torch.float32})
    untrained.max_seq_length = arguments.max_seq_length
    results["the encoder before training"].append(evaluate(untrained, held_out, None))
    for seed in arguments.seeds:
        for name in arguments.models:
            model = train(name, sets, arguments, seed)
            cases = {name: held_out if MODELS[name][0] else None}
            if MODELS[name][0]:
                cases |= {
                    f"{name}; evaluated without context": None,
                    f"{name}; evaluated in the context of another package": swapped,
                }
            for case, contexts in cases.items():
                results[case].append(evaluate(model, held_out, contexts))
                print(seed, case, results[case][-1], flush=True)
    arguments.num_pairs, arguments.num_packages = sum(map(len, sets.values())), len(sets)
    arguments.model = "mini" if arguments.model == neobert_hf.MINI_MODEL_PATH else Path(arguments.model).name
    arguments.corpus = arguments.clusters_dir = None
    finish("contextual", [{"model": name, "runs": runs} for name, runs in results.items()], arguments)


if __name__ == "__main__":
    main()
