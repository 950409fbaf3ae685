"""A small NeoBERT pretrained by `pretrain`, beside BERT and ModernBERT pretrained by the recipe of transformers' run_mlm.py.

    python examples/documentation_search/corpus.py --output_dir runs/documentation --vocab_size 4096
    python benchmarks/pretraining_peers.py --corpus runs/documentation \\
        --json benchmarks/results/pretraining_peers_cpu.json

All models have about 5.1 million parameters, embeddings included, and the same tokenizer. The recipe of run_mlm.py
concatenates the documents and cuts blocks of `max_length` tokens. It predicts 15 % of the tokens, of which 80 % become [MASK] and
10 % random tokens. Its optimizer is AdamW with the defaults of TrainingArguments. A fourth arm trains NeoBERT by this recipe. All
arms warm up for a tenth of the steps, then the learning rate decays linearly to zero.

1. Each arm trains at each of `learning_rates` with the first seed, and keeps the rate with the lowest held-out loss.
2. Equal tokens: every arm trains `num_steps` steps of `tokens_per_step` tokens, with every seed.
3. Equal time: the slowest arm of 2. sets the seconds, and the others train as many steps as fit into them. NeoBERT by run_mlm.py
   takes no part.

All models predict the same tokens of the same held-out documents: 15 % of them, all replaced by [MASK], one document a row.

Nothing else may run on the machine. Each training is a process of its own, and its result stays in `folder`: the same command
continues after an interruption. Delete the folder to measure again.
"""

import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from datasets import load_dataset, load_from_disk
from harness import finish, in_new_process, read_arguments
from tqdm.auto import tqdm
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM
from neobert_hf.files.output import write_json
from neobert_hf.pretraining import CorpusArguments, PretrainingArguments, pretrain

sys.path.append(str(Path(__file__).parents[1] / "examples/ablation"))
from held_out import held_out_losses

# Width and heads are equal. ModernBERT's shape is that of ettin-encoder-17m, with a feed-forward layer 4 % wider.
WIDTH = {"hidden_size": 256, "num_attention_heads": 4}
SHAPES = {
    "NeoBERT": {**WIDTH, "num_hidden_layers": 4, "intermediate_size": 976, "decoder_init_range": 0.0625},
    "BERT": {**WIDTH, "num_hidden_layers": 5, "intermediate_size": 1024},
    "ModernBERT": {**WIDTH, "num_hidden_layers": 7, "intermediate_size": 400},
}
CLASSES = {
    "NeoBERT": (NeoBERTConfig, NeoBERTForMaskedLM),
    "BERT": (BertConfig, BertForMaskedLM),
    "ModernBERT": (ModernBertConfig, ModernBertForMaskedLM),
}
OURS, STOCK = "neobert_hf", "run_mlm.py"
ARMS = [("NeoBERT", OURS), ("NeoBERT", STOCK), ("BERT", STOCK), ("ModernBERT", STOCK)]  # model and recipe
IN_EQUAL_TIME = [("NeoBERT", OURS), ("BERT", STOCK), ("ModernBERT", STOCK)]
QUIET = {"logging_steps": 50, "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
SHARE_PREDICTED = 0.15  # of the held-out tokens: the share of run_mlm.py, not the 20 % of our recipe


# ---------------------------------------------------------------------------------------- models and data


def build(name: str, tokenizer: PreTrainedTokenizerBase, max_length: int) -> PreTrainedModel:
    """Build the model with random weights from torch's generator."""
    make_config, make_model = CLASSES[name]
    ids = {"pad_token_id": tokenizer.pad_token_id}
    if name == "ModernBERT":  # its defaults are ids of another vocabulary
        ids |= dict.fromkeys(("cls_token_id", "bos_token_id"), tokenizer.cls_token_id)
        ids |= dict.fromkeys(("sep_token_id", "eos_token_id"), tokenizer.sep_token_id)
    config = make_config(vocab_size=len(tokenizer), max_position_embeddings=max_length, **ids, **SHAPES[name])
    if name != "NeoBERT":
        config._attn_implementation = "sdpa"
    return make_model(config)


def num_parameters(model: PreTrainedModel) -> dict[str, int]:
    """The number of parameters, and of those that are in neither the input embeddings nor the output matrix."""
    embeddings = {
        id(module.weight): module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    decoder = model.get_output_embeddings()
    embeddings[id(decoder.weight)] = decoder.weight  # tied in BERT and ModernBERT
    total = model.num_parameters()
    return {"parameters": total, "in_blocks": total - sum(weight.numel() for weight in embeddings.values())}


def prepare(arguments) -> dict:
    """Write the documents and the blocks of run_mlm.py into the folder, unless they are there; return the settings of all runs.

    Raises:
        SystemExit: There is no corpus, or the folder is of other settings.
    """
    folder, corpus = Path(arguments.folder), Path(arguments.corpus)
    if not (corpus / "tokenizer").is_dir():
        raise SystemExit(f"{corpus} has no tokenizer; write it with examples/documentation_search/corpus.py")
    names = ("tokens_per_step", "max_length", "num_documents", "num_held_out")
    settings = {"folder": str(folder), "tokenizer": str(corpus / "tokenizer"), "shapes": SHAPES}
    settings |= {name: getattr(arguments, name) for name in names}
    file = folder / "settings.json"
    if file.is_file():
        if json.loads(file.read_text("utf-8")) != settings:
            raise SystemExit(f"{folder} holds runs of other settings; choose another --folder, or delete it")
        return settings
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", arguments.num_documents), ("held_out", arguments.num_held_out)):
        with open(corpus / f"{part}.jsonl", encoding="utf-8") as rows:
            (folder / f"{part}.jsonl").write_text("".join(itertools.islice(rows, count)), "utf-8")
    tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"])
    blocks_of(str(folder / "train.jsonl"), tokenizer, arguments.max_length).save_to_disk(folder / "blocks")
    write_json(file, settings)
    return settings


def blocks_of(file: str, tokenizer: PreTrainedTokenizerBase, max_length: int):
    """The training set of run_mlm.py without `--line_by_line`: concatenated documents in blocks of `max_length` tokens."""

    def tokenized(rows):
        return tokenizer(rows["text"], return_special_tokens_mask=True)

    def grouped(rows):
        columns = {name: list(itertools.chain(*values)) for name, values in rows.items()}
        total = len(columns["input_ids"]) // max_length * max_length  # the rest of each 1,000 documents is dropped
        return {
            name: [values[i : i + max_length] for i in range(0, total, max_length)] for name, values in columns.items()
        }

    texts = load_dataset("json", data_files=file, split="train", cache_dir=str(Path(file).parent / "datasets"))
    return texts.map(tokenized, batched=True, remove_columns=texts.column_names).map(grouped, batched=True)


# ---------------------------------------------------------------------------------------- held-out loss


def held_out_figures(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, file: str | Path, max_length: int
) -> dict[str, float]:
    """The loss per predicted token of the documents of a file, in nats, and the share of predicted tokens that are right."""
    texts = [json.loads(line)["text"] for line in Path(file).read_text("utf-8").splitlines()]
    found = held_out_losses(model, tokenizer, texts, max_length, SHARE_PREDICTED)
    num_predicted = sum(found["num_masked"])
    loss_sum = np.nansum(np.multiply(found["loss"], found["num_masked"]))
    return {
        "loss": float(loss_sum / num_predicted),
        "accuracy": sum(found["num_correct"]) / num_predicted,
        "num_predicted": int(num_predicted),
    }


# ---------------------------------------------------------------------------------------- training


def train_ours(model: str, learning_rate: float, num_steps: int, seed: int, output: str, settings: dict) -> Trainer:
    """Train by `pretrain`: packed rows, and the paper's values apart from steps, sizes, learning rate and its linear decay."""
    folder = Path(settings["folder"])
    data = CorpusArguments(
        train_files=[str(folder / "train.jsonl")],
        validation_files=[str(folder / "held_out.jsonl")],
        tokenizer_name=settings["tokenizer"],
        documents_dir=str(folder / "documents"),
        num_processes=1,
    )
    training = PretrainingArguments(
        output_dir=output,
        config_overrides=",".join(f"{name}={value}" for name, value in SHAPES[model].items()),
        max_length=settings["max_length"],
        row_tokens=settings["tokens_per_step"],
        tokens_per_step=settings["tokens_per_step"],
        max_steps=num_steps,
        learning_rate=learning_rate,
        schedule="linear",
        warmup_steps=num_steps // 10,
        decay_until=num_steps,
        seed=seed,
        **QUIET,
    )
    return pretrain(data, training)


def train_stock(model: str, learning_rate: float, num_steps: int, seed: int, output: str, settings: dict) -> Trainer:
    """Train as run_mlm.py does, with its defaults apart from steps, batch, learning rate and warm-up."""
    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"])
    training = TrainingArguments(
        output,
        max_steps=num_steps,
        per_device_train_batch_size=settings["tokens_per_step"] // settings["max_length"],
        learning_rate=learning_rate,
        warmup_steps=num_steps // 10,
        seed=seed,
        **QUIET,
    )
    trainer = Trainer(
        build(model, tokenizer, settings["max_length"]),
        training,
        DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
        train_dataset=load_from_disk(Path(settings["folder"], "blocks")),
    )
    trainer.train()
    return trainer


def train_and_evaluate(
    model: str, recipe: str, learning_rate: float, num_steps: int, seed: int, settings: dict
) -> dict[str, float]:
    """Train one model; return its sizes, the seconds of the training alone, and the figures of the held-out documents."""
    train = train_ours if recipe == OURS else train_stock
    with tempfile.TemporaryDirectory() as output:
        trainer = train(model, learning_rate, num_steps, seed, output, settings)
    history = trainer.state.log_history
    (seconds,) = [entry["train_runtime"] for entry in history if "train_runtime" in entry]
    real = [entry["num_tokens"] for entry in history if "num_tokens" in entry]  # packed rows are not quite full
    tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"])
    held_out = Path(settings["folder"], "held_out.jsonl")
    return {
        **num_parameters(trainer.model),
        "steps": num_steps,
        "learning_rate": learning_rate,
        "tokens": real[-1] if real else num_steps * settings["tokens_per_step"],
        "seconds": seconds,
        **held_out_figures(trainer.model, tokenizer, held_out, settings["max_length"]),
    }


def run_once(arm: tuple[str, str], learning_rate: float, num_steps: int, seed: int, settings: dict) -> dict[str, float]:
    """Return the result of a run; train in a new process, unless the folder has the result."""
    name = "-".join(map(str, (*arm, learning_rate, num_steps, seed)))
    file = Path(settings["folder"], f"{name}.json")
    if file.is_file():
        return json.loads(file.read_text("utf-8"))
    # A process of its own: `pretrain` tunes the memory allocator of its process, and run_mlm.py does not.
    result = in_new_process(train_and_evaluate, *arm, learning_rate, num_steps, seed, settings)
    write_json(file, result)
    tqdm.write(f"{name}: loss {result['loss']:.3f}, accuracy {result['accuracy']:.1%}, {result['seconds']:.0f} s")
    return result


def row_of(comparison: str, arm: tuple[str, str], runs: list[dict]) -> dict:
    """The row of a table: what the runs have in common, and lists over the seeds."""
    common = ("parameters", "in_blocks", "steps", "learning_rate")
    measured = ("tokens", "seconds", "loss", "accuracy")
    return {
        **dict(zip(("comparison", "model", "recipe"), (comparison, *arm))),
        **{name: runs[0][name] for name in common},
        **{name: [run[name] for run in runs] for name in measured},
        "tokens_per_s": statistics.median(run["tokens"] / run["seconds"] for run in runs),
    }


def main() -> None:
    """Measure, print the table, and end with one line of JSON."""
    arguments = read_arguments(
        __doc__,
        corpus="runs/documentation",
        folder="runs/pretraining_peers",
        num_steps=260,
        tokens_per_step=1024,
        max_length=256,
        num_documents=8000,
        num_held_out=500,
        learning_rates=[5e-4, 1.5e-3, 4.5e-3],
        seeds=[0, 1, 2],
    )
    settings = prepare(arguments)
    trials, best = [], {}
    for arm in tqdm(ARMS, "learning rates"):
        losses = {}
        for rate in arguments.learning_rates:
            losses[rate] = run_once(arm, rate, arguments.num_steps, arguments.seeds[0], settings)["loss"]
            trials.append({"model": arm[0], "recipe": arm[1], "learning_rate": rate, "loss": losses[rate]})
        best[arm] = min(losses, key=losses.get)

    equal_tokens = {arm: [] for arm in ARMS}
    for seed in tqdm(arguments.seeds, "equal tokens"):
        for arm in ARMS:
            equal_tokens[arm].append(run_once(arm, best[arm], arguments.num_steps, seed, settings))
    seconds = {arm: statistics.mean(run["seconds"] for run in equal_tokens[arm]) for arm in IN_EQUAL_TIME}
    steps = {arm: round(max(seconds.values()) / seconds[arm] * arguments.num_steps) for arm in seconds}
    equal_time = {arm: [] for arm in IN_EQUAL_TIME}
    for seed in tqdm(arguments.seeds, "equal time"):
        for arm in IN_EQUAL_TIME:  # the slowest has trained these steps already
            equal_time[arm].append(run_once(arm, best[arm], steps[arm], seed, settings))

    rows = [row_of("tokens", arm, runs) for arm, runs in equal_tokens.items()]
    rows += [row_of("time", arm, runs) for arm, runs in equal_time.items()]
    num_predicted = equal_tokens[ARMS[0]][0]["num_predicted"]
    finish("pretraining_peers", rows, arguments, trials=trials, num_predicted=num_predicted)


if __name__ == "__main__":
    main()
