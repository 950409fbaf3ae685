"""Write the small embedding model of the package: bf16 weights, tokenizer, and a card with its measured results.

    python hub_upload/build_mini.py --pretrained runs/mini --model runs/mini-embeddings --corpus runs/documentation

`make mini` trains both models first. The figures on the card are measured on the held-out documents and packages of the corpus.
"""

import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from huggingface_hub import ModelCard, ModelCardData
from sentence_transformers import SentenceTransformer
from tabulate import tabulate
from tqdm.auto import tqdm
from transformers import AutoModelForMaskedLM, AutoTokenizer

from ..allocator import tune_allocator
from ..commands import Bounds, CommandParser, run_command
from ..data.collators import PackedMLMCollator
from ..data.files import saving, write_json
from ..embeddings.training_sets import read_pairs
from ..evaluation.masked_lm import bigram_accuracy, masked_accuracy, pseudo_perplexity, unigram_accuracy
from ..evaluation.retrieval import pairs_evaluator
from .build import markdown, move_files

LARGEST_MB = 12
SUMMARY = "training_summary.json"  # a file of this name with the keys PARTS identifies a folder that this module wrote
PARTS = {"pretraining", "contrastive", "measured"}

CARD = """
# Mini NeoBERT

A small NeoBERT ([arXiv 2502.19587](https://arxiv.org/abs/2502.19587)) that embeds software documentation: {{ num_parameters }}
parameters. It was pretrained with the recipe of the paper on the documentation inside a Python installation. Then it was trained
with the contrastive loss of the paper to find a docstring by its first sentence. It ships with the package `neobert_hf`, so that
the first command works offline. Use it to try the library; for other text, use a larger model.

## Results

Retrieval: for each query, the model ranks {{ num_pairs }} docstrings of {{ packages }}. The query is the first sentence of a
docstring; the correct document is the rest of this docstring. The training data contains nothing of these packages.

{{ retrieval }}

Masked-token accuracy of the parent model, before contrastive training, on {{ num_documents }} held-out documents; the shipped
model has no decoder:

{{ masked }}

The pseudo-perplexity of the parent model is {{ pseudo_perplexity }} (median of {{ num_pseudo }} documents). The shipped model
embeds {{ speed }} tokens/s. All figures: bfloat16, {{ machine }}.

## Training

{{ training }}
"""


@dataclass
class MiniArguments:
    """Sources and target of the build."""

    pretrained: str = field(metadata={"help": "Folder that examples/pretrain_mlm.py has written."})
    model: str = field(metadata={"help": "Folder that examples/train_contrastive.py has written."})
    corpus: str = field(metadata={"help": "Folder that `neobert documentation` has written."})
    out: str = field(default="src/neobert_hf/mini", metadata={"help": "Folder to write."})
    max_length: Annotated[int, Bounds(4, 1 << 20)] = field(
        default=256, metadata={"help": "Length in tokens to which held-out documents are truncated."}
    )
    num_pseudo: Annotated[int, Bounds(1)] = field(
        default=100, metadata={"help": "Number of documents for the pseudo-perplexity."}
    )


def measure_pretrained(arguments) -> dict:
    """Measure masked-token accuracy and pseudo-perplexity of the pretrained model on the held-out documents."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.pretrained)
    model = AutoModelForMaskedLM.from_pretrained(arguments.pretrained, dtype=torch.bfloat16).eval()
    cut = dict(truncation=True, max_length=arguments.max_length)
    training, held_out = (
        tokenizer(
            [json.loads(line)["text"] for line in Path(arguments.corpus, name).read_text("utf-8").splitlines()], **cut
        )
        for name in ("train.jsonl", "held_out.jsonl")
    )
    training, held_out = training["input_ids"], held_out["input_ids"]
    collator = PackedMLMCollator(tokenizer, seed=0)
    batches = [collator([{"input_ids": ids} for ids in held_out[i : i + 32]]) for i in range(0, len(held_out), 32)]
    special = tokenizer.all_special_ids
    values = [
        pseudo_perplexity(model, ids, tokenizer.mask_token_id, special)
        for ids in tqdm(held_out[: arguments.num_pseudo], desc="pseudo-perplexity", unit=" documents")
    ]
    return {
        "num_held_out": len(held_out),
        "masked_accuracy": {
            "most frequent token": unigram_accuracy(training, batches, special),
            "bigram model (the more confident neighbour)": bigram_accuracy(training, batches, special),
            "parent of mini NeoBERT": masked_accuracy(model, batches),
        },
        "pseudo_perplexity": statistics.median(values),
        "num_pseudo": len(values),
    }


def measure_embeddings(model: SentenceTransformer, arguments) -> dict:
    """Measure retrieval on packages outside the training data, before and after contrastive training, and embedding speed."""
    pairs = read_pairs(Path(arguments.corpus, "held_out_packages_pairs.jsonl"))
    evaluator = pairs_evaluator(pairs, "held_out")
    before = SentenceTransformer(arguments.pretrained, model_kwargs={"dtype": torch.bfloat16})
    before.max_seq_length = model.max_seq_length
    found = {}
    for name, each in {"pretrained only": before, "mini NeoBERT": model}.items():
        scores = evaluator(each)
        found[name] = {key: scores[f"held_out_cosine_{key}"] for key in ("recall@1", "recall@10", "mrr@10", "ndcg@10")}
    texts = pairs[pairs.column_names[1]][:2000]
    num_tokens = sum(map(len, model.tokenizer(list(texts), truncation=True)["input_ids"]))
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        model.encode(list(texts), batch_size=64)
        seconds.append(time.perf_counter() - started)
    return {"num_pairs": len(pairs), "retrieval": found, "tokens_per_s": num_tokens / statistics.median(seconds)}


def held_out_packages(corpus: str) -> str:
    """Return the names of the packages that were held out entirely, if any."""
    file = Path(corpus, "held_out_packages.jsonl")
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    return " and ".join(sorted({json.loads(line)["package"] for line in lines}))


def check_out(out: Path) -> None:
    """Raise ValueError if the folder holds anything other than a model that this module wrote."""
    if not out.exists() or not any(out.iterdir()):
        return
    try:
        is_ours = set(json.loads((out / SUMMARY).read_text("utf-8"))) == PARTS
    except (OSError, ValueError, TypeError):
        is_ours = False
    if not is_ours:
        raise ValueError(
            f"{out} holds files that this command did not write; choose another folder, nothing was written"
        )


def write_model(model: SentenceTransformer, out: Path) -> None:
    """Save the model into an empty folder, without its code, which is part of the package."""
    model.save_pretrained(str(out), create_model_card=False)
    for file in out.glob("*_neobert.py"):
        file.unlink()
    config = json.loads((out / "config.json").read_text("utf-8"))
    config.pop("auto_map", None)
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    (out / "model.safetensors").chmod(0o644)


def build(arguments: MiniArguments) -> dict:
    """Measure the models, write the folder, and return its size and the figures.

    Raises:
        ValueError: The folder holds other files, or the model is too large to ship.
        OSError: A file cannot be read or written.
    """
    tune_allocator()
    out = Path(arguments.out)
    check_out(out)
    model = SentenceTransformer(arguments.model, model_kwargs={"dtype": torch.bfloat16})
    summary, contrastive = (
        json.loads(Path(folder, "training_summary.json").read_text("utf-8"))
        for folder in (arguments.pretrained, arguments.model)
    )
    summary["data"].pop("source", None)  # contains local paths
    figures = {**measure_pretrained(arguments), **measure_embeddings(model, arguments)}
    figures["machine"] = f"{torch.get_num_threads()} CPU threads, torch {torch.__version__}"
    written = {"pretraining": summary, "contrastive": contrastive, "measured": figures}
    assert set(written) == PARTS

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as beside:
        partial = Path(beside, out.name)
        packages = held_out_packages(arguments.corpus)
        with saving(out):
            write_model(model, partial)
            write_card(model, partial, written, packages)
        write_json(partial / SUMMARY, written)
        size = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file()) / 1e6
        if size > LARGEST_MB:
            raise ValueError(
                f"{out} would take {size:.1f} MB, but at most {LARGEST_MB} MB may ship; train a smaller model"
            )
        move_files(partial, out, last="config.json")
    return {"out": str(out), "megabytes": round(size, 2), **figures}


def write_card(model: SentenceTransformer, out: Path, written: dict, packages: str) -> None:
    """Render the card from the figures and the training summaries."""
    summary, contrastive, figures = (written[name] for name in ("pretraining", "contrastive", "measured"))
    recipe, loss = summary["recipe"], summary["eval_loss"]
    training = (
        f"Pretraining: {summary['steps']:,} steps of up to {recipe['tokens_per_step']:,} tokens, "
        f"{summary['num_tokens'] / 1e6:.1f} million real tokens; peak learning rate {recipe['learning_rate']:g}, schedule "
        f'"{markdown(recipe["schedule"])}", documents truncated to {recipe["max_length"]:,} tokens; held-out loss {loss:.3f} per '
        f"masked token. Contrastive: {contrastive['steps']:,} steps of {contrastive['batch_size']:,} pairs from "
        f"{contrastive['num_rows']:,} pairs; peak learning rate {contrastive['learning_rate']:g}, temperature "
        f"{contrastive['temperature']:g}, texts truncated to {contrastive['max_seq_length']:,} tokens."
    )
    card = ModelCard.from_template(
        ModelCardData(
            license="mit",
            library_name="sentence-transformers",
            pipeline_tag="sentence-similarity",
            tags=["neobert", "sentence-transformers"],
        ),
        template_str="---\n{{ card_data }}\n---\n" + CARD,
        num_parameters=f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million",
        num_pairs=f"{figures['num_pairs']:,}",
        packages=markdown(packages),
        retrieval=tabulate(
            [{"model": name, **scores} for name, scores in figures["retrieval"].items()],
            headers="keys",
            tablefmt="github",
            floatfmt=".3f",
        ),
        masked=tabulate(
            figures["masked_accuracy"].items(),
            headers=["model", "masked-token accuracy"],
            tablefmt="github",
            floatfmt=".1%",
        ),
        num_documents=f"{figures['num_held_out']:,}",
        pseudo_perplexity=f"{figures['pseudo_perplexity']:.1f}",
        num_pseudo=figures["num_pseudo"],
        speed=f"{figures['tokens_per_s']:,.0f}",
        machine=figures["machine"],
        training=training,
    )
    card.save(out / "README.md")


def main() -> None:
    """Build the folder and print the figures."""
    parser = CommandParser(MiniArguments, prog="build_mini.py", description=MiniArguments.__doc__)
    print(json.dumps(run_command(parser.prog, build, *parser.parse_args_into_dataclasses())))


if __name__ == "__main__":
    main()
