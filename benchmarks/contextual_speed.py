"""Cost of contextual embeddings: a training step, an embedding, packing of the second stage, and memory by batch size.

    python benchmarks/contextual_speed.py --json benchmarks/results/contextual_speed_cpu.json

Contenders run in turns, A B A B; each memory case runs in its own process. The weights are those of the mini model.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import torch
from harness import finish, median_and_spread, median_ratio, take_turns
from memory import peak_of
from ragged import log_normal_lengths
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from tqdm.auto import tqdm
from transformers import HfArgumentParser
from transformers.utils import logging

from neobert_hf import MINI_MODEL_PATH, contextual_sentence_transformer, sentence_transformer, tune_allocator
from neobert_hf.embeddings.contextual import contextual_model
from neobert_hf.embeddings.contextual_training import ContextualRankingLoss

PROMPT = 8  # vectors of the soft prompt


@dataclass
class ContextualSpeedArguments:
    """Arguments of the benchmark."""

    batch_size: int = field(default=64, metadata={"help": "Pairs in a training step."})
    context_size: int = field(default=64, metadata={"help": "Documents of the context in training."})
    text_length: int = field(default=32, metadata={"help": "Tokens of a text in training."})
    mini_batch_size: int = field(default=32, metadata={"help": "Texts per forward."})
    query_length: int = field(default=16, metadata={"help": "Tokens of a query to embed."})
    query_context: int = field(default=512, metadata={"help": "Documents of the context of a query, as in the paper."})
    num_queries: int = field(default=32, metadata={"help": "Queries to embed in one forward."})
    memory_batches: list[int] = field(
        default_factory=lambda: [64, 128, 256, 512], metadata={"help": "Pairs in a step."}
    )
    num_rounds: int = field(default=7, metadata={"help": "Turns of each contender."})
    json: str = field(default=None, metadata={"help": "File to write the result to."})


def tokens(lengths: list[int]) -> dict[str, torch.Tensor]:
    """Random texts of these lengths, padded."""
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1000, 9000, mask.shape, generator=torch.Generator().manual_seed(len(lengths)))
    return {"input_ids": ids * mask, "attention_mask": mask}


def build(context_size: int | None):
    """A contextual model in fp32, or a plain one."""
    torch.manual_seed(0)
    if context_size is None:
        return sentence_transformer(MINI_MODEL_PATH)
    options = {"context_size": context_size, "max_position_embeddings": 1024}  # the speed does not depend on the latter
    return contextual_sentence_transformer(MINI_MODEL_PATH, **options)


def training_step(
    context_size: int | None, batch_size: int, length: int, mini_batch_size: int, unpad: bool = True, lengths=None
):
    """Return a function that computes the gradients of one batch."""
    model = build(context_size).train()
    model[0].model.config.unpad_inputs = unpad
    loss_class = CachedMultipleNegativesRankingLoss if context_size is None else ContextualRankingLoss
    loss = loss_class(model, mini_batch_size=mini_batch_size)
    lengths = lengths or [length] * batch_size

    def step():
        model.zero_grad()
        loss([tokens(lengths), tokens(lengths)], None).backward()

    return step


def memory_of(batch_size: int, arguments: ContextualSpeedArguments) -> float:
    """Peak memory of a step over the memory before it, in MB; runs in a new process."""
    tune_allocator()
    step = training_step(arguments.context_size, batch_size, arguments.text_length, arguments.mini_batch_size)
    return peak_of(step, "cpu")[1]


def compared(what: str, first: str, second: str, contenders: dict, num_rounds: int) -> dict:
    """Run two contenders in turns; one row."""
    seconds = take_turns(contenders, num_rounds, "cpu", what)
    median, spread = median_and_spread(seconds[first])
    ratio = median_ratio(seconds[first], seconds[second])
    return {"what": what, "milliseconds": 1000 * median, "spread": spread, "compared_with": second, "times": ratio}


def main():
    """Measure, print the table, and end with one line of JSON."""
    (arguments,) = HfArgumentParser(ContextualSpeedArguments).parse_args_into_dataclasses()
    tune_allocator()
    logging.set_verbosity_error()
    size, length, num_pairs, mini = (
        arguments.context_size,
        arguments.text_length,
        arguments.batch_size,
        arguments.mini_batch_size,
    )
    rows = []
    row_length = size + PROMPT + length
    # The tokens of both stages, as texts of equal length.
    equal = row_length + round(size * length / (2 * num_pairs))
    for name, plain_length in (("equal tokens", equal), ("equal texts", length)):
        plain = f"plain, {plain_length} tokens a text"
        contenders = {
            "contextual": training_step(size, num_pairs, length, mini),
            plain: training_step(None, num_pairs, plain_length, mini),
        }
        rows.append(compared(f"training step, {name}", "contextual", plain, contenders, arguments.num_rounds))

    lengths = log_normal_lengths(num_pairs, 4 * length, torch.Generator().manual_seed(0))
    contenders = {
        name: training_step(size, num_pairs, 0, mini, unpad, lengths)
        for name, unpad in (("packed", True), ("padded", False))
    }
    rows.append(compared("training step, ragged texts", "packed", "padded", contenders, arguments.num_rounds))

    texts = tokens([arguments.query_length] * arguments.num_queries)
    contextual, plain = build(arguments.query_context).eval(), build(None).eval()
    module = contextual_model(contextual)
    with torch.inference_mode():
        contenders = {
            "contextual": lambda: module(**texts),
            "plain": lambda: plain(dict(texts)),
        }
        rows.append(compared("embedding of queries", "contextual", "plain", contenders, arguments.num_rounds))

    memory = {}
    for batch_size in tqdm(arguments.memory_batches, desc="memory"):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            memory[batch_size] = process.submit(memory_of, batch_size, arguments).result()
    finish("contextual_speed", rows, arguments, memory_mb=memory)


if __name__ == "__main__":
    main()
