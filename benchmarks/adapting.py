"""Adaptation to the documentation of a package that the mini model has not read: how fast does the held-out loss fall?

    python benchmarks/adapting.py --json benchmarks/results/adapting_cpu.json

Three ways continue the pretraining of the mini model for the same steps: with a new vocabulary whose rows are the means of their
old tokens, with the same vocabulary and random new rows, and with the old tokenizer. Random rows have the mean and the standard
deviation of the old ones in each dimension. Some docstrings are held out.

The losses of two vocabularies are comparable only per character: "bits for each character" is the loss times the tokens, over
the characters.
"""

import json
import math
import tempfile
from pathlib import Path

import torch
from harness import docstrings, finish, read_arguments
from transformers import AutoTokenizer

from neobert_hf import MINI_MODEL_PATH, NeoBERTForMaskedLM
from neobert_hf.data import train_wordpiece
from neobert_hf.pretraining import CorpusArguments, PretrainingArguments, adapt_vocabulary, pretrain


def write_starts(folder: Path, texts: list[str], vocab_size: int) -> dict[str, str]:
    """Write the model of each way with its tokenizer, and return the folders by the name of the way."""
    torch.manual_seed(0)
    old = AutoTokenizer.from_pretrained(MINI_MODEL_PATH)
    new = train_wordpiece(texts, vocab_size)
    model = NeoBERTForMaskedLM.from_pretrained(MINI_MODEL_PATH, dtype=torch.float32)
    means, mixed = (adapt_vocabulary(model, old, new) for _ in range(2))
    is_new = torch.ones(len(new), dtype=torch.bool)
    is_new[[i for token, i in new.get_vocab().items() if token in old.get_vocab()]] = False
    print(f"{is_new.sum()} of {len(new)} tokens are new", flush=True)
    for name in ("model.encoder.weight", "decoder.weight", "decoder.bias"):
        rows, before = mixed.get_parameter(name).data, model.get_parameter(name).data
        rows[is_new] = before.mean(0) + before.std(0) * torch.randn_like(rows[is_new])
    folders = {}
    for way, start, tokenizer in (
        ("new tokens: means of old ones", means, new),
        ("new tokens: random", mixed, new),
        ("old tokenizer", model, old),
    ):
        folders[way] = str(folder / f"start-{len(folders)}")
        start.save_pretrained(folders[way])
        tokenizer.save_pretrained(folders[way])
    return folders


def held_out_losses(start: str, folder: Path, arguments) -> dict[int, float]:
    """Continue the pretraining; return the held-out loss by step."""
    data = CorpusArguments(
        train_files=[str(folder / "train.jsonl")],
        validation_files=[str(folder / "held_out.jsonl")],
        tokenizer_name=start,
        num_processes=1,
    )
    training = PretrainingArguments(
        output_dir=f"{start}-trained",
        phase=2,
        init_from=start,
        mixture=[1.0, 0.0, 0.0],
        max_length=256,
        max_steps=arguments.num_steps,
        learning_rate=arguments.learning_rate,
        schedule="linear",
        warmup_steps=arguments.num_steps // 10,
        decay_until=arguments.num_steps,
        row_tokens=arguments.tokens_per_step,
        tokens_per_step=arguments.tokens_per_step,
        eval_strategy="steps",
        eval_steps=arguments.eval_steps,
        eval_on_start=True,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    log = pretrain(data, training).state.log_history
    return {entry["step"]: entry["eval_loss"] for entry in log if "eval_loss" in entry}


def main():
    """Measure, print the table, and end with one line of JSON."""
    arguments = read_arguments(
        __doc__,
        package="pandas",
        vocab_size=8192,
        num_held_out=100,
        num_steps=120,
        eval_steps=30,
        tokens_per_step=1024,
        learning_rate=1e-3,
    )
    texts = list(dict.fromkeys(docstrings(arguments.package)))
    step = len(texts) // arguments.num_held_out
    parts = {"train": [x for i, x in enumerate(texts) if i % step], "held_out": texts[::step]}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part, chosen in parts.items():
            (folder / f"{part}.jsonl").write_text(
                "".join(f"{json.dumps({'text': text})}\n" for text in chosen), "utf-8"
            )
        for way, start in write_starts(folder, parts["train"], arguments.vocab_size).items():
            losses = held_out_losses(start, folder, arguments)
            tokenizer = AutoTokenizer.from_pretrained(start, model_max_length=1_000_000)
            num_tokens = sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in parts["held_out"])
            tokens_per_character = num_tokens / sum(map(len, parts["held_out"]))
            bits = losses[max(losses)] * tokens_per_character / math.log(2)
            shown = {f"step {step}": loss for step, loss in losses.items()}
            rows.append(
                {"way": way, **shown, "characters for each token": 1 / tokens_per_character}
                | {"bits for each character": bits}
            )
            print(json.dumps(rows[-1]), flush=True)
    finish("adapting", rows, arguments)


if __name__ == "__main__":
    main()
