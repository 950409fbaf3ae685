"""Tables of speed and memory."""

from tabulate import tabulate

from page_tables.results import measured, result_of, source, table_of

# What the figure shows, a panel for each kind of CPU.
THROUGHPUT = ("throughput_cpu_bfloat16", "throughput_cpu_float32_avx2")


def lengths_of(result: dict) -> list[int]:
    """The sequence lengths of a result, in ascending order."""
    return sorted({row["length"] for row in result["rows"]})


def pivot(result: dict, value: str, form: str, models: list[str] | None = None) -> list[list]:
    """Rows of a model's name and its value at each length."""
    lengths = lengths_of(result)
    names = models or list(dict.fromkeys(row["model"] for row in result["rows"]))
    cells = {(row["model"], row["length"]): row.get(value) for row in result["rows"]}
    rows = []
    for name in names:
        values = [cells.get((name, length)) for length in lengths]
        rows.append([name, *("" if value is None else format(value, form) for value in values)])
    return rows


def speeds(name: str) -> str:
    """Tokens/s, the ratios of ours to each model, and the shares of the ceiling, by length."""
    result = result_of(name)
    rows = [[f"{row[0]}, tokens/s", *row[1:]] for row in pivot(result, "tokens_per_s", ",.0f")]
    rows += [
        [f"ours / {row[0]}", *row[1:]]
        for row in pivot(result, "ours_over_it", ".2f")
        if row[0] not in ("ours", "ceiling")
    ]
    rows += [
        [f"{row[0]} / ceiling", *row[1:]]
        for row in pivot(result, "share_of_ceiling", ".2f")
        if row[0].startswith("ours")
    ]
    paper = pivot(result, "paper_a100_tokens_per_s", ",.0f")
    rows += [[f"paper, one A100: {row[0].replace('published', 'NeoBERT')}", *row[1:]] for row in paper if any(row[1:])]
    errors = {(row["model"], row["length"]): row["error"] for row in result["errors"]}
    for model in dict.fromkeys(model for model, _ in errors):
        values = [errors.get((model, length)) for length in lengths_of(result)]
        rows.append([f"{model}, error against float64", *("" if v is None else f"{v:.2e}" for v in values)])
    table = tabulate(
        rows, headers=["", *map(str, lengths_of(result))], tablefmt="github", disable_numparse=True, stralign="right"
    )
    tuned = "tune_allocator() for every model" if result["settings"]["tune_allocator"] else "the allocator as it comes"
    return (
        f"{table}\n\n{result['settings']['dtype']}, medians of {result['settings']['num_rounds']} turns or more, {tuned}. "
        f"{measured(result)}."
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


def ratios_of(result: dict) -> dict[tuple[str, int], float]:
    """Tokens/s of ours over those of a model, at a length."""
    return {(row["model"], row["length"]): row["ours_over_it"] for row in result["rows"] if "ours_over_it" in row}


def headline() -> str:
    """Ours against the published code, ModernBERT and OpenVINO, by kind of CPU and length."""
    results = [result_of(name) for name in THROUGHPUT]
    lengths, rows = lengths_of(results[0]), []
    for result in results:
        rows.append([f"**{result['settings']['dtype']}, {result.get('instructions')}**", *[""] * len(lengths)])
        rows.append(["ours, tokens/s", *pivot(result, "tokens_per_s", ",.0f", ["ours"])[0][1:]])
        ratios = ratios_of(result)
        for name, (model, other) in HEADLINE.items():
            if (model, lengths[0]) in ratios and (other, lengths[0]) in ratios:
                values = (ratios[other, length] / ratios[model, length] for length in lengths)
                rows.append([name, *(f"{value:.2f}" for value in values)])
    table = tabulate(rows, headers=["tokens", *map(str, lengths)], tablefmt="github", disable_numparse=True)
    return (
        f"{table}\n\nInference on full-length sequences; 16 tokens are one sentence. A ratio above 1 means that ours is faster. "
        f"int8 rows divide by the other model in the dtype of the block. {'. '.join(map(measured, results))}."
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
    results = [result_of(name) for name in THROUGHPUT]
    for result in results:
        speeds = {(row["model"], row["length"]): row["tokens_per_s"] for row in result["rows"]}
        for length in (128, 512, 2048):
            name = f"tokens/s at {length:,} tokens, {result['settings']['dtype']}, {KINDS[result['instructions']]}"
            rows.append([name, *(f"{speeds[model, length]:,.0f}" for model in models)])
    headers = ["", "published code", "ModernBERT-base", "neobert_hf"]
    table = tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
    return f"{table}\n\nSpeed: inference on full-length sequences, as loaded. {'. '.join(map(measured, results))}."


LATENCY = {
    "dtype": ("dtype", ""),
    "model": ("model", ""),
    "milliseconds": ("milliseconds", ".1f"),
    "spread": ("spread", ".0%"),
    "speed over OpenVINO's": ("over_openvino", ".2f"),
    "first call, s": ("first_call_s", ".1f"),
}


def latency() -> str:
    """One sentence of 16 tokens: milliseconds, the speed over OpenVINO's on the same weights, and what the first call takes."""
    results, rows = [result_of(f"latency_cpu_{dtype}") for dtype in ("bfloat16", "float32")], []
    for result in results:
        ratios = ratios_of(result)
        for row in result["rows"]:
            if row["model"] != "ceiling":
                ratio = ratios["openvino", 16] / ratios[row["model"], 16]
                rows.append(row | {"dtype": result["settings"]["dtype"], "over_openvino": ratio})
    return table_of(rows, LATENCY, results[0])


def packing_plan() -> str:
    """Seconds and peak memory of planning and of reading rows, in a process each."""
    result = result_of("packing_plan_cpu")
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
        f"{result['corpus_mb'] / 1e3:.2f} GB in {result['num_tasks']:,} files; rows of {settings['row_tokens']:,} tokens, "
        f"{on_disk['packing_efficiency']:.2%} full; the plan takes {on_disk['plan_mb']:.0f} MB. {source(result)}."
    )


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
    "over one batch": ("speed_over_one_batch", ".1f"),
    "largest difference, nats": ("largest_difference", ".1e"),
    "memory above the model, MB": ("memory_above_model_mb", ",.0f"),
}

DTYPES = {
    "task": ("task", ""),
    "sequences x tokens": ("shape", ""),
    "dtype": ("dtype", ""),
    "tokens/s": ("tokens_per_s", ",.0f"),
    "spread": ("spread", ".1%"),
    "speed over float32": ("speed_over_float32", ".2f"),
}

SELECTED_TOKENS = {
    "shape": ("shape", ""),
    "task": ("task", ""),
    "the last block computes": ("last_block", ""),
    "tokens/s": ("tokens_per_s", ",.0f"),
    "spread": ("spread", ".1%"),
    "speed over all tokens": ("speed", ".2f"),
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

TRAINING_ATTENTION = {
    "dtype": ("dtype", ""),
    "lengths": ("lengths", ""),
    "attention": ("attention", ""),
    "ms": ("ms", ".1f"),
    "spread": ("spread", ".0%"),
    "speed over the first": ("speed", ".2f"),
}

FAST_PATHS = {
    "dtype": ("dtype", ""),
    "tokens": ("tokens", ","),
    "part": ("part", ""),
    "variant": ("variant", ""),
    "microseconds": ("microseconds", ",.0f"),
    "speed over the first": ("speed_over_plain", ".2f"),
}
