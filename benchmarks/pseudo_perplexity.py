"""Pseudo-perplexity: batches of copies with logits at one position, against two naive ways with logits at all positions.

    python benchmarks/pseudo_perplexity.py --json benchmarks/results/pseudo_perplexity_cpu.json

One naive way is a forward for each position, the other one batch with a copy for each position. All mask the same positions of
the same text, in turns. The peak memory is measured for each length in a new process.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import torch
from harness import DTYPES, finish, median_and_spread, median_ratio, take_turns
from memory import peak_of
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm
from transformers import AutoModelForMaskedLM, HfArgumentParser, PreTrainedModel

import neobert_hf
from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM, tune_allocator
from neobert_hf.evaluation.pseudo_perplexity import MAX_TOKENS, MaskedText, masked_losses

MASK = 4  # any id, since the texts are random


@dataclass
class PseudoPerplexityArguments:
    """Arguments of the benchmark."""

    models: list[str] = field(
        default_factory=lambda: [neobert_hf.MINI_MODEL_PATH],
        metadata={"help": "Folders, or neobert: the published shape with random weights."},
    )
    lengths: list[int] = field(default_factory=lambda: [128, 512, 2048], metadata={"help": "Lengths in tokens."})
    positions: int = field(default=64, metadata={"help": "Positions in the text that are masked."})
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"], metadata={"help": "Of the weights."})
    num_rounds: int = field(default=3, metadata={"help": "Turns of each."})
    num_layers: int = field(default=None, metadata={"help": "Fewer layers in the published shape, for a quick run."})
    json: str = field(default=None, metadata={"help": "File to write the result to."})


def load(name: str, dtype: str, num_layers: int | None) -> PreTrainedModel:
    """Return a model of a folder, or one of the published shape."""
    if name != "neobert":
        return AutoModelForMaskedLM.from_pretrained(name, dtype=DTYPES[dtype]).eval()
    torch.manual_seed(0)
    config = NeoBERTConfig()
    config.num_hidden_layers = num_layers or config.num_hidden_layers
    return NeoBERTForMaskedLM(config).to(DTYPES[dtype]).eval()


def random_text(length: int, positions: int, vocab_size: int) -> MaskedText:
    """Return random tokens, and positions at equal distances."""
    ids = torch.randint(5, vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    step = max(1, length // positions)
    return MaskedText(ids, list(range(0, length, step))[:positions])


@torch.no_grad()
def naive_losses(model: PreTrainedModel, text: MaskedText) -> list[float]:
    """Return the losses by one forward for each position, which computes all logits."""
    losses, original = [], torch.tensor([text.input_ids])
    for position in text.positions:
        masked = original.clone()
        masked[0, position] = MASK
        logits = model(input_ids=masked).logits[0, position].float()
        losses.append(cross_entropy(logits, original[0, position]).item())
    return losses


@torch.no_grad()
def losses_of_one_batch(model: PreTrainedModel, text: MaskedText) -> list[float]:
    """Return the losses by one batch with a copy for each position, which computes all logits of all copies."""
    rows, positions = torch.arange(len(text.positions)), torch.tensor(text.positions)
    masked = torch.tensor([text.input_ids]).repeat(len(rows), 1)
    original = masked[rows, positions]
    masked[rows, positions] = MASK
    logits = model(input_ids=masked).logits[rows, positions].float()
    return cross_entropy(logits, original, reduction="none").tolist()


def batched_losses(model: PreTrainedModel, text: MaskedText) -> list[float]:
    """Return the losses by the library."""
    return next(masked_losses(model, MASK, [text]))


def peak(name: str, dtype: str, num_layers: int | None, length: int) -> float:
    """Return the memory above that of the model, in MB, in a new process."""
    model = load(name, dtype, num_layers)
    text = random_text(length, 2 * MAX_TOKENS // length, model.config.vocab_size)
    return peak_of(lambda: batched_losses(model, text), "cpu")[1]


def main():
    """Measure, print the table, and end with one line of JSON."""
    (arguments,) = HfArgumentParser(PseudoPerplexityArguments).parse_args_into_dataclasses()
    tune_allocator()
    rows = []
    cases = [(name, dtype) for name in arguments.models for dtype in arguments.dtypes]
    for name, dtype in tqdm(cases, desc="models", unit=" models"):
        model = load(name, dtype, arguments.num_layers)
        for length in arguments.lengths:
            text = random_text(length, arguments.positions, model.config.vocab_size)
            contenders = {
                "ours": lambda model=model, text=text: batched_losses(model, text),
                "naive": lambda model=model, text=text: naive_losses(model, text),
                "one batch": lambda model=model, text=text: losses_of_one_batch(model, text),
            }
            losses = {way: run() for way, run in contenders.items()}
            naive = (losses[way] for way in ("naive", "one batch"))
            difference = max(abs(a - b) for each in naive for a, b in zip(losses["ours"], each))
            seconds = take_turns(contenders, arguments.num_rounds, "cpu", f"{dtype}, {length} tokens")
            median, spread = median_and_spread(seconds["ours"])
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                megabytes = process.submit(peak, name, dtype, arguments.num_layers, length).result()
            rows.append(
                {
                    "model": "mini" if name == neobert_hf.MINI_MODEL_PATH else name,
                    "dtype": dtype,
                    "length": length,
                    "tokens_per_s": length * len(text.positions) / median,
                    "spread": spread,
                    "speed_over_naive": median_ratio(seconds["naive"], seconds["ours"]),
                    "speed_over_one_batch": median_ratio(seconds["one batch"], seconds["ours"]),
                    "largest_difference": difference,
                    "memory_above_model_mb": megabytes,
                }
            )
            print(rows[-1], flush=True)
    arguments.models = [row["model"] for row in rows[:: len(arguments.lengths) * len(arguments.dtypes)]]
    finish("pseudo_perplexity", rows, arguments)


if __name__ == "__main__":
    main()
