"""Render every table of the pages, and the figure, from the code and benchmarks/results/*.json.

    python benchmarks/render_tables.py            (write)
    python benchmarks/render_tables.py --check    (exit status 1 if anything is not what would be written)

A table stands between `<!-- table:NAME -->` and `<!-- end -->`. The figure carries a hash of the results that it shows.
"""

import hashlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import contextual_tables
from matplotlib.figure import Figure
from PIL import Image
from tabulate import tabulate
from transformers import HfArgumentParser

from neobert_hf import AUTO_CLASSES
from neobert_hf.evaluation.report import evaluation_sections, long_context_table, markdown
from neobert_hf.model.backends_neobert import BACKENDS, Backend

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
FIGURE = RESULTS / "throughput.png"
MINI_SUMMARY = ROOT / "src/neobert_hf/mini/training_summary.json"
# What the figure shows, a panel for each kind of CPU.
THROUGHPUT = ("throughput_cpu_bfloat16", "throughput_cpu_float32_avx2")


@dataclass
class RenderArguments:
    """Whether to write."""

    check: bool = field(default=False, metadata={"help": "Write nothing; fail if a page or the figure is out of date."})


def _result(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def _source(result: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{_machine(result)}, {versions}, commit {result['commit']}"


def _measured(result: dict) -> str:
    """Spread and source of speeds."""
    spreads = sorted(row["spread"] for row in result["rows"])
    return (
        f"Half the distance between the slowest and the fastest turn is {spreads[len(spreads) // 2]:.1%} of the median "
        f"typically, {spreads[-1]:.0%} at most: {_source(result)}"
    )


def _with_source(name: str, table: Callable[[dict], str]) -> str:
    """A table with its own note, and the source of its figures."""
    result = _result(f"{name}_cpu")
    return f"{table(result)} {_source(result)}."


def _machine(result: dict) -> str:
    # Results without this entry are older than it; all of them are of one kind of machine.
    instructions = result.get("instructions", "AVX-512 with bf16")
    return f"{result['cores']} cores of {result['processor']}, {instructions}"


def auto_classes() -> str:
    """The Auto classes and what each of them loads."""
    rows = [[f"`{name}`", f"`{loaded.__name__}`", _first_line(loaded)] for name, loaded in AUTO_CLASSES.items()]
    return tabulate(rows, headers=["Auto class", "loads", ""], tablefmt="github")


def _first_line(documented) -> str:
    return documented.__doc__.strip().splitlines()[0].rstrip(".")


# What has run where; tests/test_backends_neobert.py holds the tests behind "simulated".
TRIED = {
    "cpu": {
        "cpu_tiled": "measured",
        "sdpa": "measured",
        "eager": "measured",
        "flex_attention": "measured, no backward",
    },
    "cuda": dict.fromkeys(
        ("flash_attention_3", "flash_attention_2", "flash_attention_4", "torch_varlen", "xformers", "sdpa"), "simulated"
    ),
    "mps": {"sdpa": "simulated"},
}


def backends() -> str:
    """The table of attention backends: what each needs, and what has run where."""
    rows = [
        [
            f"`{name}`",
            _needs(backend),
            *(
                TRIED[device].get(name, "untried") if device in (backend.devices or TRIED) else ""
                for device in ("cpu", "cuda", "mps")
            ),
        ]
        for name, backend in BACKENDS.items()
    ]
    return tabulate(rows, headers=["", "needs", "CPU", "CUDA", "MPS"], tablefmt="github")


def _needs(backend: Backend) -> str:
    parts = [f"heads of a multiple of {backend.head_multiple}, up to {backend.max_head_width}"]
    parts = parts if backend.max_head_width else []
    ranges = {}
    for dtype, limits in backend.capabilities.items():
        ranges.setdefault(limits, []).append(str(dtype).removeprefix("torch."))
    for (lowest, highest), dtypes in ranges.items():
        capability = f"{lowest[0]}.{lowest[1]} " + (f"to {highest[0]}.{highest[1]}" if highest[0] < 99 else "or newer")
        parts.append(f"{', '.join(dtypes)}: capability {capability}")
    return "; ".join([*parts, *(["a model that only infers"] if backend.is_for_inference else [])])


def agreement() -> str:
    """Errors against the oracle."""
    result = _result("agreement")
    table = tabulate(result["rows"], headers="keys", tablefmt="github", floatfmt=".1e")
    settings = result["settings"]
    return (
        f"{table}\n\nLargest error of the logits over their largest value; {settings['num_hidden_layers']} layers, "
        f"random weights, documents of {', '.join(map(str, settings['lengths']))} tokens; {_source(result)}."
    )


def mini() -> str:
    """Masked-token accuracy of the mini model, next to baselines without a model."""
    measured = json.loads(MINI_SUMMARY.read_text("utf-8"))["measured"]
    rows = [[name, share] for name, share in measured["masked_accuracy"].items()]
    table = tabulate(rows, headers=["model", "masked-token accuracy"], tablefmt="github", floatfmt=".1%")
    return (
        f"{table}\n\nMasked-token accuracy on {measured['num_held_out']:,} held-out documents of at most "
        f"{measured['max_length']} tokens. {measured['machine']}."
    )


def embeddings() -> str:
    """Retrieval in documentation and STS-B, beside the teacher and BM25."""
    result = _result("embeddings_cpu")
    metrics = ("recall@1", "recall@10", "MRR@10", "nDCG@10")
    spearman = {row["model"]: row["spearman"] for row in result["sts"]}
    rows = [[row["questions"], row["model"], *(row[name] for name in metrics)] for row in result["rows"]]
    rows.sort(key=lambda row: row[0] != "as they are")
    retrieval = tabulate(rows, headers=["questions", "model", *metrics], tablefmt="github", floatfmt=".3f")
    sts = tabulate(spearman.items(), headers=["STS-B dev", "Spearman"], tablefmt="github", floatfmt=".3f")
    source = [
        f"{result['num_questions']:,} queries: first sentences of docstrings. Correct answer: the rest of the same docstring."
    ]
    if "in other words" in result["examples"]:
        example, rephrased = next(pair for pair in zip(*result["examples"].values()) if pair[0] != pair[1])
        share = f"{result['share_rephrased']:.0%}"
        source.append(f'"In other words": WordNet synonyms, which change {share}: "{example}" becomes "{rephrased}".')
    return f"{retrieval}\n\n{sts}\n\n{' '.join([*source, _source(result)])}."


def evaluation() -> str:
    """The evaluation of the mini model by examples/evaluate_model.py."""
    result = _result("evaluation_cpu_bfloat16")
    return markdown(evaluation_sections(result, RESULTS))


def seeds() -> str:
    """Retrieval and STS-B of the mini model, whose last stage was trained with several seeds."""
    result = _result("embeddings_seeds_cpu")
    rows = [{"metric": "STS-B dev, Spearman", **{row["model"]: row["spearman"] for row in result["sts"]}}]
    for metric in ("recall@10", "recall@1"):
        for form in dict.fromkeys(row["questions"] for row in result["rows"]):
            scores = {row["model"]: row[metric] for row in result["rows"] if row["questions"] == form}
            rows.append({"metric": f"{metric}, questions {form}", **scores})
    table = tabulate(rows, headers="keys", tablefmt="github", floatfmt=".3f")
    return f"{table}\n\nfloat32, {_source(result)}."


def finetuning(name: str) -> str:
    """Scores of the mini model and of its peers on GLUE, under equal conditions."""
    result = _result(name)
    tasks = {row["task"]: f"{row['task']}, {row['metric']}" for row in result["rows"]}
    cells = {
        (row["model"], row["task"]): f"{row['mean']:.1f} ± {row['standard_deviation']:.1f}" for row in result["rows"]
    }
    sizes = {row["model"]: f"{row['num_parameters'] / 1e6:.1f} M" for row in result["rows"]}
    rows = [[model, size, *(cells.get((model, task)) for task in tasks)] for model, size in sizes.items()]
    settings = result["settings"]
    rates = " or ".join(f"{rate:g}" for rate in settings["learning_rates"])
    table = tabulate(rows, headers=["model", "parameters", *tasks.values()], tablefmt="github", disable_numparse=True)
    return (
        f"{table}\n\nDevelopment sets, {settings['max_steps']} batches of 32 rows at a learning rate of {rates}, evaluated every "
        f"200 steps, the best evaluation of each run. Means and standard deviations of {settings['seeds']} seeds. Parameters "
        f"without the decoder. {_source(result)}."
    )


def long_context() -> str:
    """Pseudo-perplexity of the mini model beyond the length of its training."""
    result = _result("long_context_cpu")
    return (
        f"{long_context_table(result)}\n\n{result['texts']} texts, the same for all lengths, {result['positions']} masked "
        f"positions in each, with 95 % intervals. Trained length: {result['trained_length']} tokens."
    )


def questions() -> str:
    """Everyday questions that each search answers, and the seconds."""
    result = _result("questions_cpu")
    num_questions = result["settings"]["num_questions"]
    rows = [
        [
            row["search"],
            f"{row['right_first']} / {num_questions}",
            f"{row['right_in_three']} / {num_questions}",
            f"{row['index_s']:.0f}",
            f"{row['first_question_s']:.2f}",
            f"{row['question_s']:.3f}",
        ]
        for row in result["rows"]
    ]
    headers = [
        "search",
        "correct first",
        "correct among 3",
        "embed all entries, s",
        "first question, s",
        "each question, s",
    ]
    table = tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
    others = f" BM25 and all-MiniLM-L6-v2: commit {result['others_commit']}." if "others_commit" in result else ""
    source = f"{num_questions} questions that we wrote, {result['num_entries']:,} entries.{others} {_source(result)}."
    ends = [f"The command `neobert search`: {name}: {seconds:.0f} s." for name, seconds in result["commands_s"].items()]
    return "\n\n".join([table, source, *ends])


def everyday() -> str:
    """Everyday questions that each search answers, without the seconds."""
    result = _result("questions_cpu")
    num_questions = result["settings"]["num_questions"]
    rows = [[row["search"], row["right_first"], row["right_in_three"]] for row in result["rows"]]
    table = tabulate(rows, headers=["search", "correct first", "correct among 3"], tablefmt="github")
    return f"{table}\n\n{num_questions} everyday questions to the standard library. {_source(result)}."


def adversary() -> str:
    """How the cases of `make test-adversary` ended."""
    result = _result("adversary")
    table = tabulate(result["rows"], headers="keys", tablefmt="github")
    return f"{table}\n\nSeed {result['seed']}, {result['seconds'] / 60:.0f} minutes. {_source(result)}."


ABLATIONS = {  # what each has that the one before in the paper's Table 2 has not
    "M0": "pre-LayerNorm BERT: learned positions, GELU, LayerNorm, dropout of 0.1",
    "M1": "RoPE, SwiGLU, RMSNorm",
    "M5": "AdamW, cosine; 20 % of the tokens, all of them `[MASK]`",
    "M6": "M5, attention across documents",
    "M7": "M5, 4 layers of 256",
    "M8": "M5, 9 layers of 192",
}


def ablations() -> str:
    """Held-out loss and masked accuracy of each variant, over its seeds."""
    result = _result("ablations_cpu")
    rows = [
        [
            row["variant"],
            ABLATIONS[row["variant"]],
            f"{row['num_parameters'] / 1e6:.1f} M",
            f"{row['loss']:.3f} ± {row['loss_spread']:.3f}",
            f"{row['masked_accuracy']:.1%} ± {row['masked_accuracy_spread']:.1%}",
        ]
        for row in result["rows"]
    ]
    headers = ["", "what it is", "parameters", "held-out loss", "masked accuracy"]
    table = tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
    settings, tokens = result["settings"], {row["num_tokens"] for row in result["rows"]}
    return (
        f"{table}\n\n{settings['num_steps']} steps, {min(tokens) / 1e6:.2f} M real tokens, peak learning rate "
        f"{settings['learning_rate']:g}; means of {len(settings['seeds'])} seeds ± half their range. {_source(result)}."
    )


def _pivot(result: dict, value: str, form: str, models: list[str] | None = None) -> list[list]:
    """Rows of a model's name and its value at each length."""
    lengths = _lengths(result)
    names = models or list(dict.fromkeys(row["model"] for row in result["rows"]))
    cells = {(row["model"], row["length"]): row.get(value) for row in result["rows"]}
    rows = []
    for name in names:
        values = [cells.get((name, length)) for length in lengths]
        rows.append([name, *("" if value is None else format(value, form) for value in values)])
    return rows


def _lengths(result):
    return sorted({row["length"] for row in result["rows"]})


def _speeds(name: str) -> str:
    """Tokens/s, the ratios of ours to each model, and the shares of the ceiling, by length."""
    result = _result(name)
    rows = [[f"{row[0]}, tokens/s", *row[1:]] for row in _pivot(result, "tokens_per_s", ",.0f")]
    rows += [
        [f"ours / {row[0]}", *row[1:]]
        for row in _pivot(result, "ours_over_it", ".2f")
        if row[0] not in ("ours", "ceiling")
    ]
    rows += [
        [f"{row[0]} / ceiling", *row[1:]]
        for row in _pivot(result, "share_of_ceiling", ".2f")
        if row[0].startswith("ours")
    ]
    paper = _pivot(result, "paper_a100_tokens_per_s", ",.0f")
    rows += [[f"paper, one A100: {row[0].replace('published', 'NeoBERT')}", *row[1:]] for row in paper if any(row[1:])]
    errors = {(row["model"], row["length"]): row["error"] for row in result["errors"]}
    for model in dict.fromkeys(model for model, _ in errors):
        values = [errors.get((model, length)) for length in _lengths(result)]
        rows.append([f"{model}, error against float64", *("" if v is None else f"{v:.2e}" for v in values)])
    table = tabulate(
        rows, headers=["", *map(str, _lengths(result))], tablefmt="github", disable_numparse=True, stralign="right"
    )
    tuned = "tune_allocator() for every model" if result["settings"]["tune_allocator"] else "the allocator as it comes"
    return (
        f"{table}\n\n{result['settings']['dtype']}, medians of {result['settings']['num_rounds']} turns or more, {tuned}. "
        f"{_measured(result)}."
    )


HEADLINE = {  # what is divided by what, in the results of one kind of CPU
    "ours / published code": ("ours", "published"),
    "ours, prepacked / published code": ("ours-prepacked", "published"),
    "ours / ModernBERT-base": ("ours", "modernbert-base"),
    "ours, prepacked / OpenVINO, same weights": ("ours-prepacked", "openvino"),
    "ours, int8 / ours": ("ours-int8", "ours"),
    "ours, int8 / ModernBERT-base": ("ours-int8", "modernbert-base"),
    "ours, int8 / ModernBERT-base, int8": ("ours-int8", "modernbert-base-int8"),
}


def _ratios(result: dict) -> dict[tuple[str, int], float]:
    """Tokens/s of ours over those of a model, at a length."""
    return {(row["model"], row["length"]): row["ours_over_it"] for row in result["rows"] if "ours_over_it" in row}


def headline() -> str:
    """Ours against the published code, ModernBERT and OpenVINO, by kind of CPU and length."""
    results = [_result(name) for name in THROUGHPUT]
    lengths, rows = _lengths(results[0]), []
    for result in results:
        rows.append([f"**{result['settings']['dtype']}, {result.get('instructions')}**", *[""] * len(lengths)])
        rows.append(["ours, tokens/s", *_pivot(result, "tokens_per_s", ",.0f", ["ours"])[0][1:]])
        ratios = _ratios(result)
        for name, (model, other) in HEADLINE.items():
            if (model, lengths[0]) in ratios and (other, lengths[0]) in ratios:
                values = (ratios[other, length] / ratios[model, length] for length in lengths)
                rows.append([name, *(f"{value:.2f}" for value in values)])
    table = tabulate(rows, headers=["tokens", *map(str, lengths)], tablefmt="github", disable_numparse=True)
    return (
        f"{table}\n\nInference on full-length sequences; 16 tokens are one sentence. A ratio above 1 means that ours is faster. "
        f"int8 rows divide by the other model in the dtype of the block. {'. '.join(map(_measured, results))}."
    )


# What each implementation does. The published code: revision 5424c8e of chandar-lab/NeoBERT. ModernBERT: transformers 5.23.
FEATURES = [
    ["transformers", "4.x; NaN on 5.x", "4.48 or newer", "4.57 to 5.23"],
    ["runs on a CPU", "no, requires xformers", "yes", "yes"],
    ["computes nothing on padding", "no", "in FlashAttention only", "yes, on every device"],
    ["packed documents kept apart", "on CUDA", "with FlashAttention", "yes, on every device"],
    ["loss of masked language modelling", "no", "yes", "yes"],
    ["heads", "2", "5", "5"],
    ["gradient checkpointing, PEFT", "no", "yes", "yes"],
    ["longest training sequence, tokens", "4,096", "8,192", "4,096"],
]


KINDS = {"AVX-512 with bf16": "AVX-512", "AVX2 only (its AVX-512 hidden)": "AVX2"}


def comparison() -> str:
    """Features and speed of the published code, ModernBERT-base and ours."""
    models, rows = ("published", "modernbert-base", "ours"), list(FEATURES)
    results = [_result(name) for name in THROUGHPUT]
    for result in results:
        speeds = {(row["model"], row["length"]): row["tokens_per_s"] for row in result["rows"]}
        for length in (128, 512, 2048):
            name = f"tokens/s at {length:,} tokens, {result['settings']['dtype']}, {KINDS[result['instructions']]}"
            rows.append([name, *(f"{speeds[model, length]:,.0f}" for model in models)])
    headers = ["", "published code", "ModernBERT-base", "neobert_hf"]
    table = tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
    return f"{table}\n\nSpeed: inference on full-length sequences, as loaded. {'. '.join(map(_measured, results))}."


LATENCY = {
    "dtype": ("dtype", ""),
    "model": ("model", ""),
    "milliseconds": ("milliseconds", ".1f"),
    "spread": ("spread", ".0%"),
    "speed over OpenVINO's": ("over_openvino", ".2f"),
    "first call, s": ("first_call_s", ".1f"),
}


def packing_plan() -> str:
    """Seconds and peak memory of planning and of reading rows, in a process each."""
    result = _result("packing_plan_cpu")
    found, settings = {row["part"]: row for row in result["rows"]}, result["settings"]
    on_disk, read, memory = found["plan on disk"], found["read"], found["plan in memory"]
    rows = [
        ["imports alone", "", found["imports"]["peak_rss_mb"]],
        ["make the plan, on disk", f"{on_disk['plan_s']:.0f}", on_disk["peak_rss_mb"]],
        ["start a process and read the first row", f"{read['first_row_s']:.1f}", read["peak_rss_mb"]],
        ["make the plan in memory, and compare all rows: equal" if memory["same_rows"] else "rows differ",
         f"{memory['plan_s']:.0f}", memory["peak_rss_mb"]],
    ]  # fmt: skip
    headers = ["process", "seconds", "peak memory, MB"]
    table = tabulate(rows, headers=headers, tablefmt="github", floatfmt=",.0f", disable_numparse=[1])
    return (
        f"{table}\n\n{settings['num_documents']:,} documents of {settings['shortest']} to {settings['longest']} tokens, "
        f"{result['corpus_mb'] / 1e3:.2f} GB in {result['num_shards']:,} shards; rows of {settings['row_tokens']:,} tokens, "
        f"{on_disk['packing_efficiency']:.2%} full; the plan takes {on_disk['plan_mb']:.0f} MB. {_source(result)}."
    )


def latency() -> str:
    """One sentence of 16 tokens: milliseconds, the speed over OpenVINO's on the same weights, and what the first call takes."""
    results, rows = [_result(f"latency_cpu_{dtype}") for dtype in ("bfloat16", "float32")], []
    for result in results:
        ratios = _ratios(result)
        for row in result["rows"]:
            if row["model"] != "ceiling":
                ratio = ratios["openvino", 16] / ratios[row["model"], 16]
                rows.append(row | {"dtype": result["settings"]["dtype"], "over_openvino": ratio})
    return _table(rows, LATENCY, results[0])


def _rows_of(name: str, columns: dict[str, tuple[str, str]]) -> str:
    result = _result(name)
    return _table(result["rows"], columns, result)


def _table(rows: list[dict], columns: dict[str, tuple[str, str]], result: dict) -> str:
    cells = [["" if row.get(key) is None else format(row[key], form) for key, form in columns.values()] for row in rows]
    table = tabulate(cells, headers=list(columns), tablefmt="github", disable_numparse=True)
    dtype = [result["settings"]["dtype"]] if "dtype" in result["settings"] and "dtype" not in columns else []
    return f"{table}\n\n{', '.join([*dtype, _source(result)])}."


RAGGED = {
    "lengths": ("lengths", ""),
    "": ("what", ""),
    "model": ("model", ""),
    "real tokens": ("real_share", ".0%"),
    "tokens/s": ("tokens_per_s", ",.0f"),
    "spread": ("spread", ".1%"),
    "ours over it": ("ours_over_it", ".2f"),
}
MEMORY = {
    "": ("what", ""),
    "length": ("length", ","),
    "batch": ("batch", ""),
    "model": ("model", ""),
    "peak, MB": ("peak_mb", ",.0f"),
    "above the model, MB": ("above_model_mb", ",.0f"),
    "ours over it": ("ours_over_it", ".2f"),
}
PSEUDO_PERPLEXITY = {
    "model": ("model", ""),
    "dtype": ("dtype", ""),
    "length": ("length", ","),
    "tokens/s": ("tokens_per_s", ",.0f"),
    "spread": ("spread", ".1%"),
    "speed over naive": ("speed_over_naive", ".1f"),
    "largest difference, nats": ("largest_difference", ".1e"),
    "memory above the model, MB": ("memory_above_model_mb", ",.0f"),
}
FINETUNING_SPEED = {
    "model": ("model", ""),
    "task": ("task", ""),
    "mean length": ("mean_length", ".1f"),
    "tokens of text/s": ("tokens_per_s", ",.0f"),
    "spread": ("spread", ".1%"),
    "speed over padded": ("speed_over_padded", ".2f"),
}
PRETRAINING = {
    "": ("what", ""),
    "contender": ("contender", ""),
    "per second": ("per_s", ",.2f"),
    "unit": ("unit", ""),
    "spread": ("spread", ".1%"),
    "ours over it": ("ours_over_it", ".2f"),
}
ENCODE = {
    "dtype": ("dtype", ""),
    "texts cut at": ("max_length", ""),
    "batch": ("batch_size", ""),
    "tokens/s": ("tokens_per_s", ",.0f"),
    "speed over padded": ("speed_over_padded", ".2f"),
    "spread": ("spread", ".2f"),
    "largest difference": ("difference", ".1e"),
}
LATE_INTERACTION = {
    "questions": ("questions", ""),
    "order": ("order", ""),
    "recall@1": ("recall@1", ".3f"),
    "recall@10": ("recall@10", ".3f"),
    "MRR@10": ("MRR@10", ".3f"),
    "nDCG@10": ("nDCG@10", ".3f"),
    "seconds": ("seconds", ".3f"),
}
TRAINING_ATTENTION = {
    "dtype": ("dtype", ""),
    "lengths": ("lengths", ""),
    "attention": ("attention", ""),
    "ms": ("ms", ".1f"),
    "spread": ("spread", ".0%"),
    "speed over the first": ("speed", ".2f"),
}
DISTILLATION_TRIALS = {
    "trial": ("trial", ""),
    "steps": ("steps", ""),
    "recall@10": ("recall", ".3f"),
    "in other words": ("recall_other_words", ".3f"),
    "STS-B dev": ("spearman", ".3f"),
}
DISTILLATION_STAGES = {
    "training": ("model", ""),
    "recall@1": ("recall@1", ".3f"),
    "recall@10": ("recall", ".3f"),
    "STS-B dev": ("spearman", ".3f"),
    "correct first, of 60": ("first", ""),
    "correct among 3": ("three", ""),
}
INT8 = {
    "products": ("products", ""),
    "recall@1": ("recall@1", ".3f"),
    "recall@10": ("recall@10", ".3f"),
    "nDCG@10": ("nDCG@10", ".3f"),
    "cosine with float32, mean": ("cosine", ".4f"),
    "smallest": ("smallest cosine", ".4f"),
}
FAST_PATHS = {
    "dtype": ("dtype", ""),
    "tokens": ("tokens", ","),
    "part": ("part", ""),
    "variant": ("variant", ""),
    "microseconds": ("microseconds", ",.0f"),
    "speed over the first": ("speed_over_plain", ".2f"),
}
TABLES = {
    "README.md": {"comparison": comparison, "everyday": everyday},
    "docs/loading.md": {"auto_classes": auto_classes, "backends": backends, "agreement": agreement},
    "docs/performance.md": {"headline": headline, "int8": lambda: _rows_of("int8_cpu", INT8)},
    "docs/pretraining.md": {"packing_plan": packing_plan},
    "docs/mini.md": {
        "distillation_trials": lambda: _rows_of("distillation_trials_cpu", DISTILLATION_TRIALS),
        "distillation_stages": lambda: _rows_of("distillation_stages_cpu", DISTILLATION_STAGES),
        "distillation_continued": lambda: _rows_of("distillation_continued_cpu", DISTILLATION_TRIALS),
        "seeds": seeds,
        "questions": questions,
        "mini": mini,
    },
    "docs/embeddings.md": {"embeddings": embeddings},
    "docs/contextual.md": {
        name: partial(_with_source, name, getattr(contextual_tables, name))
        for name in ("corpus_cipher", "contextual", "contextual_speed")
    },
    "benchmarks/README.md": {
        "throughput": lambda: _speeds("throughput_cpu_bfloat16"),
        "throughput_long": lambda: _speeds("throughput_cpu_bfloat16_long"),
        "throughput_others": lambda: _speeds("throughput_cpu_bfloat16_others"),
        "throughput_float32": lambda: _speeds("throughput_cpu_float32"),
        "throughput_avx2": lambda: _speeds("throughput_cpu_float32_avx2"),
        "throughput_untuned": lambda: _speeds("throughput_cpu_bfloat16_untuned"),
        "latency": latency,
        "ragged": lambda: _rows_of("ragged_cpu_bfloat16", RAGGED),
        "ragged_float32": lambda: _rows_of("ragged_cpu_float32", RAGGED),
        "ragged_avx2": lambda: _rows_of("ragged_cpu_float32_avx2", RAGGED),
        "memory": lambda: _rows_of("memory_cpu", MEMORY),
        "pretraining": lambda: _rows_of("pretraining_cpu", PRETRAINING),
        "ablations": ablations,
        "finetuning_speed": lambda: _rows_of("finetuning_speed_cpu", FINETUNING_SPEED),
        "pseudo_perplexity": lambda: _rows_of("pseudo_perplexity_cpu", PSEUDO_PERPLEXITY),
        "late_interaction": lambda: _rows_of("late_interaction_cpu", LATE_INTERACTION),
        "encode": lambda: _rows_of("encode_cpu", ENCODE),
    },
    "benchmarks/kernels.md": {
        "fast_paths": lambda: _rows_of("fast_paths_cpu", FAST_PATHS),
        "fast_paths_avx2": lambda: _rows_of("fast_paths_cpu_avx2", FAST_PATHS),
        "training_attention": lambda: _rows_of("training_attention_cpu", TRAINING_ATTENTION),
    },
    "docs/evaluation.md": {
        "evaluation": evaluation,
        "finetuning": lambda: finetuning("finetuning_cpu"),
        "finetuning_recipes": lambda: finetuning("finetuning_recipes_cpu"),
        "long_context": long_context,
    },
    "src/neobert_hf/mini/README.md": {"evaluation": evaluation},
    "SECURITY.md": {"adversary": adversary},
}


def render(text: str, name: str) -> str:
    """Return the text of the file `name` with every table replaced by its current form.

    Raises:
        KeyError: The text does not hold each of its tables once.
    """
    tables = TABLES[name]
    marker = re.compile(r"<!-- table:(\w+) -->\n.*?<!-- end -->", re.DOTALL)
    found = marker.findall(text)
    if sorted(found) != sorted(tables):
        raise KeyError(f"{name} has the tables {found}, expected each of {list(tables)} once")
    return marker.sub(lambda match: f"<!-- table:{match[1]} -->\n{tables[match[1]]()}\n<!-- end -->", text)


def figure_hash() -> str:
    """The hash that the figure carries: of the results that it shows, and of its labels."""
    contents = [(RESULTS / f"{name}.json").read_bytes() for name in THROUGHPUT]
    return hashlib.sha256(b"".join([*contents, json.dumps(FIGURE_LABELS).encode()])).hexdigest()


def draw() -> None:
    """Draw tokens/s by sequence length into FIGURE: a panel for each kind of CPU, a line for each model."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    colors = {}
    for axes, result in zip(figure.subplots(1, len(THROUGHPUT), sharey=True), map(_result, THROUGHPUT)):
        lengths = [length for length in _lengths(result) if length > 16]
        for model in dict.fromkeys(row["model"] for row in result["rows"]):
            speeds = [r["tokens_per_s"] for r in result["rows"] if r["model"] == model and r["length"] in lengths]
            is_ours = model.startswith("ours")
            style = ":" if model == "ceiling" else "-" if is_ours else "--"
            color = colors.setdefault(model, f"C{len(colors)}")
            label = FIGURE_LABELS.get(model, model)
            axes.plot(lengths, speeds, style, color=color, marker="o", linewidth=2.5 if is_ours else 1.2, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, map(str, lengths))
        axes.set_xlabel("sequence length, tokens (log scale)")
        axes.set_title(f"{result['settings']['dtype']}\n{_machine(result)}", fontsize="medium")
        axes.grid(which="major", alpha=0.3)
        axes.legend(fontsize="x-small")
    ticks = [100, 200, 500, 1000, 2000, 5000]
    figure.axes[0].set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    figure.axes[0].set_ylabel("tokens per second (log scale)")
    figure.savefig(FIGURE, dpi=130, metadata={"Source": figure_hash()})


FIGURE_LABELS = {
    "ceiling": "ours: matrix products only",
    "ours": "ours",
    "ours-prepacked": "ours, prepacked",
    "ours-int8": "ours, int8",
    "published": "published code",
    "openvino": "OpenVINO, same weights",
    "modernbert-base": "ModernBERT-base",
    "modernbert-base-int8": "ModernBERT-base, int8",
    "bert-base": "BERT-base",
    "nomic-bert": "nomic-bert",
}


def main():
    """Write the pages and the figure, or check them."""
    (arguments,) = HfArgumentParser(RenderArguments).parse_args_into_dataclasses()
    outdated = []
    for name in TABLES:
        page = ROOT / name
        before = page.read_text("utf-8")
        after = render(before, name)
        if after != before:
            outdated.append(name)
        if not arguments.check:
            page.write_text(after, "utf-8")
    if not FIGURE.exists() or Image.open(FIGURE).text.get("Source") != figure_hash():
        outdated.append(str(FIGURE.relative_to(ROOT)))
        if not arguments.check:
            draw()
    if arguments.check and outdated:
        sys.exit(f"out of date: {', '.join(outdated)}; run python benchmarks/render_tables.py and commit")


if __name__ == "__main__":
    main()
