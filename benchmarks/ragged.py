"""Batches of sequences with different lengths: padded against packed, inference and a training step.

    python benchmarks/ragged.py --json benchmarks/results/ragged_cpu_bfloat16.json
    python benchmarks/ragged.py --num_layers 4 --models ours published              (a quick run)

Two sets of lengths: log-normal with a mean of a quarter of the maximum, and those of docstrings of Python's standard library,
both truncated at the maximum. Every model gets the same padded batch with its mask. `ours, no padding given` gets the same
documents as one packed row; `ours, equal lengths` as many tokens in documents of one length. A training step is forward,
backward and AdamW on the masked language model: ours with PackedMLMCollator, the others with transformers' padding collator.
Tokens/s counts real tokens. `--train_batch 0` skips training. Models run in turns; medians, and ratios within
a turn, are reported.
"""

import torch
from harness import (
    DTYPES,
    build,
    docstrings,
    finish,
    free,
    median_and_spread,
    median_ratio,
    read_arguments,
    take_turns,
)
from transformers import BertTokenizerFast, DataCollatorForLanguageModeling

from neobert_hf import PackedMLMCollator, tune_allocator
from neobert_hf.data import train_wordpiece


def log_normal_lengths(count: int, max_length: int, generator: torch.Generator) -> list[int]:
    """Log-normal lengths with mean max_length / 4 and spread e^0.8; one of them is max_length."""
    draws = torch.randn(count, generator=generator).mul(0.8).exp()
    lengths = (draws * max_length / 4 / draws.mean()).round().long().clamp(8, max_length)
    lengths[0] = max_length
    for _ in range(20):  # truncation lowers the mean: scale it up again
        rest = lengths[1:].double()
        rest *= (count * max_length / 4 - max_length) / rest.sum()
        lengths[1:] = rest.round().long().clamp(8, max_length)
    return lengths.tolist()


def documentation_lengths(count: int, max_length: int, seed: int) -> list[int]:
    """Lengths of docstrings in tokens of a WordPiece trained on them."""
    entries = docstrings()
    order = torch.randperm(len(entries), generator=torch.Generator().manual_seed(seed)).tolist()
    tokenizer = train_wordpiece([entries[index] for index in order[:5000]], vocab_size=8192)
    texts = [entries[index] for index in order[-count:]]
    return [min(len(ids), max_length) for ids in tokenizer(texts)["input_ids"]]


def stock_tokenizer() -> BertTokenizerFast:
    """A tokenizer with the vocabulary size of the model; only its special tokens are used."""
    words = ["[PAD]", *(f"word{i}" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += [f"word{i}" for i in range(99, 30_522 - 5)]
    return BertTokenizerFast(vocab={word: index for index, word in enumerate(words)})


def inference(documents, arguments) -> list[dict]:
    """Rows of the padded batch through every model, and of ours without padding."""
    dtype, device = DTYPES[arguments.dtype], arguments.device
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(documents, batch_first=True).to(device)
    mask = pad([torch.ones_like(document) for document in documents], batch_first=True).to(device)
    num_tokens = int(mask.sum())
    models = {name: build(name, dtype, device, arguments.max_length, arguments.num_layers) for name in arguments.models}
    runs = {name: lambda model=model: model(ids, attention_mask=mask) for name, model in models.items()}
    if "ours" in models:
        lengths = torch.tensor([0, *map(len, documents)])
        packed = {
            "input_ids": torch.cat(documents)[None].to(device),
            "cu_seq_lens_q": lengths.cumsum(0).int().to(device),
        }
        runs["ours, no padding given"] = lambda: models["ours"](**packed)
        equal = packed["input_ids"][0, : num_tokens // len(documents) * len(documents)].view(len(documents), -1)
        runs["ours, equal lengths"] = lambda: models["ours"](equal)
    with torch.inference_mode():
        seconds = take_turns(runs, arguments.num_rounds, device, "inference")
    return rows_of("inference", seconds, num_tokens, num_tokens / ids.numel())


def training(documents, arguments) -> list[dict]:
    """Rows of one optimizer step on the masked language model: ours packed, the others padded."""
    examples = [{"input_ids": document.tolist()} for document in documents[: arguments.train_batch]]
    num_tokens = sum(len(example["input_ids"]) for example in examples)
    names = [name for name in arguments.models if name != "ours-prepacked"]
    steps = {name: training_step(name, examples, arguments.max_length, arguments) for name in names}
    seconds = take_turns(steps, arguments.num_rounds, arguments.device, "training step")
    longest = max(len(example["input_ids"]) for example in examples)
    return rows_of("training step", seconds, num_tokens, num_tokens / (longest * len(examples)))


def training_step(name: str, examples: list[dict], max_length: int, arguments):
    """A function that collates, runs forward and backward under autocast, and steps AdamW, as a user of `name` trains it."""
    device, dtype = arguments.device, DTYPES[arguments.dtype]
    model = build(name, torch.float32, device, max_length, arguments.num_layers, head=True).train()
    torch.manual_seed(0)  # the same masks in every run
    masking = dict(tokenizer=stock_tokenizer(), mlm_probability=0.2)
    if name == "ours":
        model.config.sparse_prediction = True
        collator = PackedMLMCollator(**masking)
    else:
        collator = DataCollatorForLanguageModeling(mask_replace_prob=1.0, random_replace_prob=0.0, **masking)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step():
        batch = {name: value.to(device) for name, value in collator([dict(row) for row in examples]).items()}
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            output = model(**batch)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def rows_of(what, seconds, num_tokens, filled) -> list[dict]:
    """One row for each contender, with its time divided by ours."""
    rows = []
    for name, runs in seconds.items():
        median, spread = median_and_spread(runs)
        row = {"what": what, "model": name, "tokens_per_s": num_tokens / median, "spread": spread}
        row |= {"real_share": filled, "milliseconds": median * 1000}
        rows.append(row | {"ours_over_it": median_ratio(runs, seconds["ours"])} if "ours" in seconds else row)
    return rows


def main():
    """Measure, print the table, and end with one line of JSON."""
    arguments = read_arguments(
        __doc__,
        models=["ours", "published", "modernbert-base"],
        batch=32,
        train_batch=8,
        max_length=512,
        device="cpu",
        dtype="bfloat16",
        num_layers=0,
        num_rounds=5,
        seed=0,
    )
    if arguments.device == "cpu":
        tune_allocator()
    generator = torch.Generator().manual_seed(arguments.seed)
    rows = []
    for name, lengths in {
        "log-normal": log_normal_lengths(arguments.batch, arguments.max_length, generator),
        "documentation": documentation_lengths(arguments.batch, arguments.max_length, arguments.seed),
    }.items():
        documents = [torch.randint(105, 30_000, (length,), generator=generator) for length in lengths]
        rows += [{"lengths": name, **row} for row in inference(documents, arguments)]
        free(arguments.device)
        if arguments.train_batch:
            rows += [{"lengths": name, **row} for row in training(documents, arguments)]
            free(arguments.device)
    finish("ragged", rows, arguments)


if __name__ == "__main__":
    main()
