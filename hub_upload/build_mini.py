"""Put a trained small model into the package: bf16 weights, tokenizer, and a card with what was measured.

python hub_upload/build_mini.py --model runs/mini --corpus runs/documentation --out src/neobert_hf/mini

`make mini` trains the model first. The held-out documents of the corpus are what the card's figures are measured on.
"""

import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import ModelCard, ModelCardData
from tabulate import tabulate
from tqdm.auto import tqdm
from transformers import AutoModelForMaskedLM, AutoTokenizer, HfArgumentParser

from neobert_hf import PackedMLMCollator, tune_allocator
from neobert_hf.evaluate import bigram_accuracy, masked_accuracy, pseudo_perplexity, unigram_accuracy

LARGEST_MB = 12
CODE_SUFFIX = "_neobert.py"

CARD = """
# Mini NeoBERT

A NeoBERT ([arXiv 2502.19587](https://arxiv.org/abs/2502.19587)) of {{ num_parameters }} parameters, pretrained on the
documentation inside a Python installation by the recipe of the paper. It ships with the package `neobert_hf`, so that the first
command works offline; it is for trying things out, not for use on other text.

## What it reaches

{{ table }}

Measured on {{ num_documents }} held-out documents, cut at {{ max_length }} tokens, in bfloat16 ({{ machine }}).

## How it was trained

{{ training }}
{%- if held_out_packages %} Nothing of the packages {{ held_out_packages }} was seen.{% endif %}
"""


@dataclass
class MiniArguments:
    """What to build from what."""

    model: str = field(metadata={"help": "Folder that examples/pretrain_mlm.py has written."})
    corpus: str = field(metadata={"help": "Folder that `neobert documentation` has written."})
    out: str = field(default="src/neobert_hf/mini", metadata={"help": "Folder to write."})
    max_length: int = field(default=256, metadata={"help": "Tokens of a document that are used."})
    num_pseudo: int = field(default=100, metadata={"help": "Documents of which the pseudo-perplexity is taken."})


def measure(model, tokenizer, arguments) -> dict:
    """Figures on the held-out documents of the corpus."""
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
    seconds = []
    with torch.inference_mode():
        for batch in [*batches, *batches]:
            started = time.perf_counter()
            model.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
            seconds.append((time.perf_counter() - started) / batch["input_ids"].numel())
    return {
        "num_held_out": len(held_out),
        "masked_accuracy": {
            "most frequent token": unigram_accuracy(training, batches, special),
            "bigrams, the surer neighbour": bigram_accuracy(training, batches, special),
            "mini NeoBERT": masked_accuracy(model, batches),
        },
        "pseudo_perplexity": statistics.median(values),
        "num_pseudo": len(values),
        "tokens_per_s": 1 / statistics.median(seconds),
    }


def held_out_packages(corpus: str) -> str:
    """Names of the packages that were held out whole, if any."""
    file = Path(corpus, "held_out_packages.jsonl")
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    return " and ".join(sorted({json.loads(line)["package"] for line in lines}))


def main():
    """Measure, write the folder, and check its size."""
    (arguments,) = HfArgumentParser(MiniArguments).parse_args_into_dataclasses()
    tune_allocator()
    out = Path(arguments.out)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForMaskedLM.from_pretrained(arguments.model, dtype=torch.bfloat16).eval()
    figures = measure(model, tokenizer, arguments)
    summary = json.loads(Path(arguments.model, "training_summary.json").read_text("utf-8"))

    model.save_pretrained(out)
    for file in out.glob(f"*{CODE_SUFFIX}"):
        file.unlink()  # the package beside it has the code
    config = json.loads((out / "config.json").read_text("utf-8"))
    config.pop("auto_map", None)
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    tokenizer.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    summary["data"].pop("source", None)  # paths of the machine that trained it
    machine = f"{torch.get_num_threads()} CPU threads, torch {torch.__version__}"
    summary["measured"] = {**figures, "machine": machine}
    (out / "training_summary.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    rows = [[f"masked tokens right: {name}", f"{share:.1%}"] for name, share in figures["masked_accuracy"].items()]
    rows.append(
        [f"pseudo-perplexity, median of {figures['num_pseudo']} documents", f"{figures['pseudo_perplexity']:.1f}"]
    )
    rows.append(["tokens/s", f"{figures['tokens_per_s']:,.0f}"])
    recipe = summary["recipe"]
    training = (
        f"{summary['steps']:,} steps of up to {recipe['tokens_per_step']:,} tokens, {summary['num_tokens'] / 1e6:.1f} M real "
        f"tokens seen; peak learning rate {recipe['learning_rate']:g}, schedule `{recipe['schedule']}`, documents cut at "
        f"{recipe['max_length']} tokens; held-out loss {summary['eval_loss']:.3f} per masked token."
    )
    card = ModelCard.from_template(
        ModelCardData(license="mit", library_name="transformers", pipeline_tag="fill-mask", tags=["neobert"]),
        template_str="---\n{{ card_data }}\n---\n" + CARD,
        num_parameters=f"{summary['num_parameters'] / 1e6:.1f} M",
        table=tabulate(rows, headers=["", "measured"], tablefmt="github"),
        num_documents=f"{figures['num_held_out']:,}",
        max_length=arguments.max_length,
        held_out_packages=held_out_packages(arguments.corpus),
        machine=machine,
        training=training,
    )
    card.save(out / "README.md")
    size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    if size > LARGEST_MB:
        raise SystemExit(f"{out} takes {size:.1f} MB, at most {LARGEST_MB} may ship; train a smaller model")
    print(json.dumps({"out": str(out), "megabytes": round(size, 2), **figures}))


if __name__ == "__main__":
    main()
