"""The figures that choose which stages of the mini model ship, for means of stages, as the build would write them.

    python benchmarks/mini_candidates.py --corpus runs/documentation --wordnet .../wordnet/dict --stsb .../STS-B \\
        --candidates "last stage, seed 42=runs/mini-last-42" "mean of two=runs/mini-last-42,runs/mini-last-43" \\
        --json benchmarks/results/mini_candidates_cpu.json

A candidate is a name and folders of examples/distill_embeddings.py or of the build; a folder that is named twice counts twice. A
pair of numbers counts the questions (`questions.py`) with a correct entry first, and among three. WordNet's folder as for
`embeddings.py`.
"""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from embeddings import forms_of, open_model, read_stsb, retrieval, spearman
from harness import finish
from neobert_hf.cli import embedding_model
from questions import KINDS, answered, detail_questions
from tqdm.auto import tqdm
from transformers import AutoModelForMaskedLM, AutoTokenizer, HfArgumentParser

import neobert_hf
from neobert_hf.demo.documentation import collect_documentation
from neobert_hf.demo.search import DocumentationIndex
from neobert_hf.embeddings.training_sets import read_pairs
from neobert_hf.evaluation.masked_lm import masked_accuracy
from neobert_hf.evaluation.retrieval import pairs_evaluator
from neobert_hf.hub.mini import (
    HELD_OUT,
    HELD_OUT_ENTRIES,
    MASKED_DOCUMENTS,
    corpus_texts,
    masked_batches,
    texts_of,
    write_model,
)


@dataclass
class CandidatesArguments:
    """Arguments of the benchmark."""

    candidates: list[str] = field(metadata={"help": "Each as NAME=FOLDER,FOLDER,..., in order of training."})
    wordnet: str = field(metadata={"help": "WordNet's dict folder, for rephrased questions."})
    stsb: str = field(metadata={"help": "Folder of GLUE's STS-B, train.csv and dev.csv."})
    corpus: str = field(
        default="runs/documentation", metadata={"help": "Folder that `neobert documentation` has written."}
    )
    max_length: int = field(default=256, metadata={"help": "Length in tokens to which masked documents are truncated."})
    max_seq_length: int = field(default=128, metadata={"help": "Length in tokens to which embeddings truncate texts."})
    num_details: int = field(default=600, metadata={"help": "Number of questions about details."})
    json: str = field(default=None, metadata={"help": "File to write the result to."})


def masks(folder: str, arguments: CandidatesArguments) -> dict[str, float]:
    """Masked-token accuracy on documents of the packages that are held out, and on held-out entries of the others."""
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    accuracies = {}
    for name, file in {"masked": HELD_OUT, "masked entries": HELD_OUT_ENTRIES}.items():
        texts = texts_of(arguments.corpus, file, MASKED_DOCUMENTS)
        documents = tokenizer(texts, truncation=True, max_length=arguments.max_length)["input_ids"]
        accuracies[name] = masked_accuracy(model, masked_batches(documents, tokenizer))
    return accuracies


def main():
    """Run every measurement, print the table, and end with one line of JSON."""
    (arguments,) = HfArgumentParser(CandidatesArguments).parse_args_into_dataclasses()
    neobert_hf.tune_allocator()
    pairs = read_pairs(Path(arguments.corpus, "held_out_packages_pairs.jsonl"))
    evaluators = {
        form: pairs_evaluator(rows, "documentation") for form, rows in forms_of(pairs, arguments.wordnet).items()
    }
    dev, rows = read_stsb(arguments.stsb, "dev"), []
    with tempfile.TemporaryDirectory() as cache:
        entries = collect_documentation(False, ["python"], cache, public_api=True)
        kinds = KINDS | {"details": detail_questions(entries, arguments.num_details)}
        for candidate in tqdm(arguments.candidates, "candidates"):
            name, folders = candidate.rsplit("=", 1)
            with tempfile.TemporaryDirectory() as folder:
                write_model(folders.split(","), corpus_texts(arguments.corpus), Path(folder), arguments.max_seq_length)
                model = open_model(folder, arguments.max_seq_length)
                found = {form: retrieval(model, evaluator) for form, evaluator in evaluators.items()}

                def search(folder=folder):
                    index = DocumentationIndex(
                        embedding_model(folder), ["python"], 0, show_progress=False, cache_dir=cache
                    )
                    return lambda question: [hit.entry.name for hit in index.search(question, top_k=3)]

                counts, _ = answered(name, search, kinds)
                rows.append(
                    {
                        "model": name,
                        "recall@1": found["as they are"]["recall@1"],
                        "recall": found["as they are"]["recall@10"],
                        "recall@1 other": found["in other words"]["recall@1"],
                        "other": found["in other words"]["recall@10"],
                        "spearman": spearman(model, dev),
                        "everyday": ", ".join(map(str, counts["everyday"].values())),
                        "later": ", ".join(map(str, counts["everyday, later"].values())),
                        "details": ", ".join(map(str, counts["details"].values())),
                        **masks(folder, arguments),
                    }
                )
            print(rows[-1], flush=True)
    arguments.candidates = [candidate.rsplit("=", 1)[0] for candidate in arguments.candidates]
    arguments.dtype = "float32"
    finish("mini_candidates", rows, arguments)


if __name__ == "__main__":
    main()
