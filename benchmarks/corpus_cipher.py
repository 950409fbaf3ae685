"""Proof that contextual embeddings use their context: a task whose answers only the corpus determines.

    python benchmarks/corpus_cipher.py --json benchmarks/results/corpus_cipher_cpu.json

A corpus has two hidden shifts. Query i of group A is answered by document i + a of group A, query i of group B by document i + b
of group B (modulo the size of the group). Header documents state the shifts. The item documents are the same in all corpora, so a
model without context ranks them in the same order everywhere and is right for one of the S shifts: its recall@1 over corpora in
which each shift is equally frequent is at most 1/S, whatever its size. Training never sees the combinations of the evaluation.
"""

import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from harness import finish, read_arguments
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from neobert_hf import NeoBERTConfig, NeoBERTModel
from neobert_hf.embeddings import sentence_transformer

sys.path.append(str(Path(__file__).parents[1] / "examples/paper/contextual"))
from contextual_batches import ROW_COLUMN, ContextualBatchSampler, PairClusters
from contextual_embeddings import contextual_model, contextual_sentence_transformer, fit_context
from contextual_training import ContextualRankingLoss

NUM_SHIFTS = 6  # S, of each group
GROUP = 12  # items of a group
HEADERS = 4  # documents of a corpus that state the shift of a group
CORPUS = 2 * (GROUP + HEADERS)
TEMPERATURE = 0.05


@dataclass(frozen=True)
class Corpus:
    """Queries, documents, and the number of the document that answers each query; items first, then headers."""

    queries: list[str]
    documents: list[str]
    answers: list[int]


def make_corpus(a: int, b: int) -> Corpus:
    """Build the corpus of two shifts."""
    queries, documents, answers = [], [], []
    for group, shift, start in (("a", a, 0), ("b", b, GROUP)):
        queries += [f"query_{group}{i}" for i in range(GROUP)]
        documents += [f"document_{group}{i}" for i in range(GROUP)]
        answers += [start + (i + shift) % GROUP for i in range(GROUP)]
    for group, shift in (("a", a), ("b", b)):
        for i in range(HEADERS):
            queries.append(f"query_header_{group}{i}")
            documents.append(f"header_{group}{i} shift_{group}{shift}")
            answers.append(len(documents) - 1)
    return Corpus(queries, documents, answers)


def is_held_out(a: int, b: int) -> bool:
    """Two diagonals of all combinations are held out; each shift of each group is in them equally often."""
    return (b - a) % NUM_SHIFTS in (0, 3)


def combinations(held_out: bool) -> list[tuple[int, int]]:
    """The shifts of all corpora of training, or of the evaluation."""
    shifts = range(NUM_SHIFTS)
    return [(a, b) for a in shifts for b in shifts if is_held_out(a, b) == held_out]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Each word of the corpora is a token."""
    texts = [
        text
        for pair in combinations(True) + combinations(False)
        for text in (make_corpus(*pair).queries + make_corpus(*pair).documents)
    ]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({word for text in texts for word in text.split()})]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    named = {
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **named)


def new_model(
    contextual: bool, seed: int, context_size: int = 24, context_dropout: float = 0.005
) -> SentenceTransformer:
    """A small model with random weights: contextual, or an encoder with the shape of one stage."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    shape = dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=192, max_position_embeddings=128
    )
    # At this width the paper's range of 0.02 makes the output of each layer tiny, and the task is not learned in 600 steps.
    ranges = dict(decoder_init_range=0.125, embedding_init_range=0.5)
    with tempfile.TemporaryDirectory() as folder:
        NeoBERTModel(NeoBERTConfig(vocab_size=len(tokenizer), **shape, **ranges)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if contextual:
            return contextual_sentence_transformer(folder, context_size=context_size, context_dropout=context_dropout)
        return sentence_transformer(folder)


def train(model: SentenceTransformer, num_steps: int, seed: int, learning_rate: float = 1e-3) -> None:
    """Train on the corpora of the training combinations; each batch is one corpus."""
    corpora = [make_corpus(*pair) for pair in combinations(False)]
    rows = Dataset.from_dict(
        {
            "query": [text for corpus in corpora for text in corpus.queries],
            "document": [corpus.documents[answer] for corpus in corpora for answer in corpus.answers],
            ROW_COLUMN: range(CORPUS * len(corpora)),
        }
    )
    unused = np.zeros((len(rows), 1), np.float32)  # no surrogate: the corpora are the clusters
    pairs = PairClusters(unused, unused, np.repeat(np.arange(len(corpora)), CORPUS))
    if hasattr(model[0].model, "set_context"):
        loss = ContextualRankingLoss(model, TEMPERATURE, mini_batch_size=CORPUS)
    else:
        loss = MultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE)
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            folder,
            max_steps=num_steps,
            per_device_train_batch_size=CORPUS,
            learning_rate=learning_rate,
            warmup_steps=num_steps // 10,
            batch_sampler=partial(ContextualBatchSampler, datasets={0: pairs}),
            seed=seed,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        SentenceTransformerTrainer(model, arguments, train_dataset=rows, loss=loss).train()


def recall(model: SentenceTransformer, contexts: dict | None) -> tuple[float, float]:
    """Recall@1 on item queries over all held-out corpora, of the corpus' own answers and of those of the context's corpus.

    Args:
        model: Embedding model.
        contexts: For each held-out corpus the shifts of the corpus that gives the context; None gives no context.
    """
    own, other = [], []
    for pair in combinations(True):
        corpus = make_corpus(*pair)
        source = make_corpus(*(contexts or {}).get(pair, pair))
        if contexts:
            fit_context(model, source.documents)
        items = slice(0, 2 * GROUP)
        queries, documents = model.encode(corpus.queries[items]), model.encode(corpus.documents)
        found = model.similarity(queries, documents).argmax(1).tolist()
        own += [place == answer for place, answer in zip(found, corpus.answers[items])]
        other += [place == answer for place, answer in zip(found, source.answers[items])]
    if contexts:
        contextual_model(model).set_context(None)
    return float(np.mean(own)), float(np.mean(other))


def other_corpora() -> dict:
    """For each held-out corpus another one with other shifts in both groups."""
    return {(a, b): ((a + 2) % NUM_SHIFTS, (b + 2) % NUM_SHIFTS) for a, b in combinations(True)}


def main():
    """Train, evaluate, print the table, and end with one line of JSON."""
    arguments = read_arguments(__doc__, num_steps=600, seeds=[0, 1, 2])
    logging.set_verbosity_error()
    own = {pair: pair for pair in combinations(True)}
    results = {}
    for seed in tqdm(arguments.seeds, unit=" seeds"):
        for contextual in (False, True):
            model = new_model(contextual, seed)
            started = time.perf_counter()
            train(model, arguments.num_steps, seed)
            seconds = time.perf_counter() - started
            cases = {
                "contextual, own context": own,
                "contextual, no context": None,
                "contextual, context of another corpus": other_corpora(),
            }
            for name, contexts in (cases if contextual else {"no context in the model": None}).items():
                results.setdefault(name, []).append((*recall(model, contexts), seconds))
                print(seed, name, results[name][-1], flush=True)
    rows = [
        {
            "model": name,
            "own_answer": [own for own, _, _ in runs],
            "answer_of_the_context": [other for _, other, _ in runs] if "another" in name else None,
            "seconds": [seconds for *_, seconds in runs],
        }
        for name, runs in results.items()
    ]
    finish("corpus_cipher", rows, arguments)


if __name__ == "__main__":
    main()
