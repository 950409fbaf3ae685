"""`SentenceTransformer.encode` on documentation: the model without padding, and the same model computing padding.

    python benchmarks/encode.py --json benchmarks/results/encode_cpu.json

Both get the same texts in the same batches, sorted by length by sentence-transformers. They run in turns.
"""

import random
import statistics
import time
from dataclasses import dataclass, field

import numpy as np
from docstrings import read  # examples/documentation_search
from harness import DTYPES, finish
from sentence_transformers import SentenceTransformer
from transformers import HfArgumentParser

import neobert_hf


@dataclass
class EncodeArguments:
    """Arguments of the benchmark."""

    model: str = field(default=neobert_hf.MINI_MODEL_PATH, metadata={"help": "A folder of sentence-transformers."})
    num_texts: int = field(default=1500, metadata={"help": "Entries of the documentation."})
    max_lengths: list[int] = field(default_factory=lambda: [128, 256], metadata={"help": "Truncation lengths, tokens."})
    batch_sizes: list[int] = field(default_factory=lambda: [32, 128], metadata={"help": "Texts in a batch."})
    dtypes: list[str] = field(
        default_factory=lambda: ["float32", "bfloat16"], metadata={"help": "Dtypes of the weights."}
    )
    num_turns: int = field(default=3, metadata={"help": "Turns of each."})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda."})
    json: str = field(default=None, metadata={"help": "File to write the result to."})


def main():
    """Run every measurement, print the table, and end with one line of JSON."""
    (arguments,) = HfArgumentParser(EncodeArguments).parse_args_into_dataclasses()
    neobert_hf.tune_allocator()
    texts = [entry.full_text for entry in read()]
    texts = random.Random(0).sample(texts, arguments.num_texts)
    rows = []
    for dtype in arguments.dtypes:
        model = SentenceTransformer(arguments.model, model_kwargs={"dtype": DTYPES[dtype]}, device=arguments.device)
        for max_length in arguments.max_lengths:
            model.max_seq_length = max_length
            lengths = [len(ids) for ids in model.tokenizer(texts, truncation=True, max_length=max_length)["input_ids"]]
            for batch_size in arguments.batch_sizes:

                def encode(unpad, batch_size=batch_size, model=model):
                    model[0].model.config.unpad_inputs = unpad
                    started = time.perf_counter()
                    vectors = model.encode(texts, batch_size=batch_size)
                    return time.perf_counter() - started, vectors

                difference = np.abs(encode(True)[1] - encode(False)[1]).max()  # and warm up
                turns = [(encode(True)[0], encode(False)[0]) for _ in range(arguments.num_turns)]
                ratios = [padded / ours for ours, padded in turns]
                rows.append(
                    {
                        "dtype": dtype,
                        "max_length": max_length,
                        "batch_size": batch_size,
                        "mean_length": statistics.mean(lengths),
                        "tokens_per_s": sum(lengths) / statistics.median(ours for ours, _ in turns),
                        "speed_over_padded": statistics.median(ratios),
                        "spread": (max(ratios) - min(ratios)) / 2,
                        "difference": float(difference),
                    }
                )
    finish("encode", rows, arguments, floatfmt=".3g")


if __name__ == "__main__":
    main()
