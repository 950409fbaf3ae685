"""Tables of the stored results: NAME.md beside each NAME.json, the marked blocks of the pages, and the figure.

    python benchmarks/result_tables.py            (after a new result, and after a change of this file)

A page holds its tables between `<!-- table:NAME -->` and `<!-- end -->`, so that every reader of Markdown shows them. NAME is a
result, or a function of `SUMMARIES`.
"""

import hashlib
import json
import re
import statistics
import sys
from pathlib import Path

from matplotlib.figure import Figure
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[1] / "examples/paper"))
from evaluation_report import evaluation_report, mteb_tables

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
FIGURE = RESULTS / "throughput.png"
MAIN = ("throughput_cpu_bfloat16", "throughput_cpu_float32_avx2")  # in the README: one result for each kind of CPU

# Names of models in tables and in the figure, with the parameters of the encoder.
NAMES = {
    "ours": "NeoBERT (222 M)",
    "ours-prepacked": "NeoBERT, prepacked",
    "ours-int8": "NeoBERT, int8",
    "ours-graphs": "NeoBERT, prepacked, CUDA graphs",
    "ours-compiled": "NeoBERT, torch.compile",
    "ours-autotuned": "NeoBERT, prepacked, autotuned",
    "ours, no padding given": "NeoBERT, one packed row",
    "ours, equal lengths": "NeoBERT, equal lengths",
    "published": "published NeoBERT code (222 M)",
    "openvino": "NeoBERT in OpenVINO",
    "modernbert-base": "ModernBERT-base (149 M)",
    "modernbert-base-int8": "ModernBERT-base, int8",
    "modernbert-large": "ModernBERT-large (395 M)",
    "bert-base": "BERT-base (109 M)",
    "bert-large": "BERT-large (335 M)",
    "roberta-base": "RoBERTa-base (125 M)",
    "roberta-large": "RoBERTa-large (355 M)",
    "nomic-bert": "nomic-bert (137 M)",
    "ceiling": "NeoBERT's matrix products alone",
}

# Heading and format of the keys of a row. Another key is its own heading, and a float has three digits.
COLUMNS = {
    "what": ("", ""),
    "tokens_per_s": ("tokens/s", ",.0f"),
    "per_s": ("per second", ",.2f"),
    "spread": ("spread", ".1%"),
    "ours_over_it": ("ours over it", ".2f"),
    "real_share": ("real tokens", ".0%"),
    "milliseconds": ("ms", ",.0f"),
    "peak_mb": ("peak, MB", ",.0f"),
    "above_model_mb": ("above the model, MB", ",.0f"),
    "peak_rss_mb": ("peak memory, MB", ",.0f"),
    "process_s": ("seconds", ".1f"),
    "plan_s": ("of them for the plan", ".1f"),
    "first_row_s": ("seconds to the first row", ".1f"),
    "trained_weights": ("trained weights", ",d"),
    "saved_mb": ("saved, MB", ",.1f"),
    "weights_mb": ("weights, MB", ",.0f"),
    "times_of_all": ("speed over all weights", ".2f"),
    "mean_length": ("mean length", ".1f"),
    "max_length": ("tokens", ""),
    "speed_over_padded": ("speed over padded", ".2f"),
    "speed_over_float32": ("speed over float32", ".2f"),
    "speed": ("speed over the first", ".2f"),
    "times": ("times", ".2f"),
    "ms": ("ms", ".1f"),
    "requests_per_s": ("requests/s", ",.0f"),
    "p50_ms": ("half within, ms", ",.0f"),
    "p99_ms": ("99 % within, ms", ",.0f"),
    "compared_with": ("that of", ""),
    "expected": ("expected", ",.0f"),
    "share_of_expected": ("of it", ".2f"),
    "products": ("mini model", ""),
    "cosine": ("cosine with float32", ".4f"),
    "smallest cosine": ("smallest", ".4f"),
}


def name_of(file: Path) -> str:
    """The name of a result by its table: the path below the folder of results, where gpu/CARD holds those of other cards."""
    return file.relative_to(RESULTS).with_suffix("").as_posix()


def read(name: str) -> dict:
    """The stored result `name`.json."""
    return {"benchmark": name.split("_cpu")[0]} | json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def source(result: dict) -> str:
    """Machine, versions and commit of a result."""
    # All results without instructions are older than this entry, and of one kind of machine.
    machine = f"{result['cores']} cores of {result['processor']}, {result.get('instructions', 'AVX-512 with bf16')}"
    if result.get("settings", {}).get("device") == "cuda":
        machine = f"One {result['gpu']}"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{machine}, {versions}, commit {result['commit']}"


def spread(result: dict) -> str:
    """The spread of speeds over turns, and the source."""
    spreads = [row["spread"] for row in result["rows"]]
    if not spreads:  # no figure was stable
        return f"{source(result)}."
    middle = statistics.median(spreads)
    return f"Spread (half range / median): typically {middle:.1%}, at most {max(spreads):.0%}. {source(result)}."


def grid(rows: list, headers: list[str]) -> str:
    """A Markdown table of cells that are formatted already."""
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def rows_table(result: dict) -> str:
    """The table of a list of rows, and the source."""
    rows = result["rows"]
    keys = dict.fromkeys(key for row in rows for key in row)

    def cell(key, value):
        form = COLUMNS.get(key, ("", ".3g" if isinstance(value, float) else ""))[1]
        return "" if value is None else NAMES.get(value) or format(value, form)

    table = grid(
        [[cell(key, row.get(key)) for key in keys] for row in rows], [COLUMNS.get(key, [key])[0] for key in keys]
    )
    dtype = result.get("settings", {}).get("dtype")
    return f"{table}\n\n{f'{dtype}, ' if dtype else ''}{source(result)}."


def lengths_of(result: dict) -> list[int]:
    """The sequence lengths of a throughput result."""
    return sorted({row["length"] for row in result["rows"]})


def throughput(result: dict) -> str:
    """Tokens/s by model and length, in brackets NeoBERT's speed over the model's, and the error of a forward."""
    cells = {(row["model"], row["length"]): row for row in result["rows"]}
    errors = {row["model"]: f"{row['error']:.1e}" for row in result["errors"]}
    rows, lengths = [], lengths_of(result)
    for model in dict.fromkeys(row["model"] for row in result["rows"]):
        row = [NAMES[model]]
        for length in lengths:
            found = cells.get((model, length), {})
            ratio = f" ({found['ours_over_it']:.2f})" if model != "ours" and "ours_over_it" in found else ""
            row.append(f"{found['tokens_per_s']:,.0f}{ratio}" if found else "")
        rows.append([*row, errors.get(model, "")])
        paper = [cells.get((model, length), {}).get("paper_a100_tokens_per_s") for length in lengths]
        if result["settings"].get("table_10") and any(paper):
            rows.append(
                [f"{NAMES[model]}: paper, one A100", *("" if speed is None else f"{speed:,}" for speed in paper), ""]
            )
    table = grid(rows, ["tokens/s by length", *(f"{length:,}" for length in lengths), "error"])
    settings = result["settings"]
    note = f"{settings['dtype']}. In brackets: NeoBERT's speed over the model's. Error: of the states, against float64."
    return f"{table}\n\n{note} {spread(result)}"


def cpu_kernels(result: dict) -> str:
    """Speed of each variant over the first of its part, by dtype and number of tokens."""
    cells = {(r["part"], r["variant"], r["dtype"], r["tokens"]): r["speed_over_plain"] for r in result["rows"]}
    cases = list(dict.fromkeys((dtype, tokens) for *_, dtype, tokens in cells))
    rows = []
    for part, variant in dict.fromkeys((part, variant) for part, variant, *_ in cells):
        speeds = (cells.get((part, variant, *case)) for case in cases)
        rows.append([part, variant, *("" if speed is None else f"{speed:.2f}" for speed in speeds)])
    heads = [f"{dtype}, {tokens:,}" for dtype, tokens in cases]
    return f"{grid(rows, ['part', 'variant', *heads])}\n\nSpeed over the first variant of the part. {source(result)}."


def corpus_cipher(result: dict) -> str:
    """Recall@1 with and without context, over the seeds."""
    keys = ("own_answer", "answer_of_the_context")
    rows = [[row["model"], *(mean_and_range(row[key], ".1%") for key in keys)] for row in result["rows"]]
    table = grid(rows, ["model, context", "finds the answer of its corpus", "finds the answer of the other corpus"])
    settings = result["settings"]
    note = f"Recall@1, mean ± half the range of {len(settings['seeds'])} seeds, {settings['num_steps']} steps."
    return f"{table}\n\n{note} {source(result)}."


def mean_and_range(values: list[float] | None, form: str) -> str:
    """The mean of some runs ± half their range."""
    if not values:
        return ""
    half = f" ± {(max(values) - min(values)) / 2:{form}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{half}"


def embeddings(result: dict) -> str:
    """Retrieval, and STS-B."""
    sts = [[row["model"], f"{row['spearman']:.3f}"] for row in result["sts"]]
    sts = f"{grid(sts, ['STS-B dev', 'Spearman'])}\n\n" if sts else ""
    return f"{sts}{rows_table(result)} {result['num_questions']:,} questions."


def packing_plan(result: dict) -> str:
    """Seconds and memory of each part, and the size of the task."""
    keys, settings = ("part", "process_s", "plan_s", "first_row_s", "peak_rss_mb"), result["settings"]
    table = rows_table(result | {"rows": [{key: row.get(key) for key in keys} for row in result["rows"]]})
    lengths = f"{settings['shortest']} to {settings['longest']} tokens"
    return f"{table} {settings['num_documents']:,} documents of {lengths}, rows of {settings['row_tokens']:,} tokens."


def pretraining_peers(result: dict) -> str:
    """Held-out loss and accuracy of each model and recipe, over the seeds; the note has the learning rates that were tried."""
    rows = []
    for row in result["rows"]:
        rows.append(
            [*(row[key] for key in ("comparison", "model", "recipe"))]
            + [f"{row[key] / 1e6:.2f} M" for key in ("parameters", "in_blocks")]
            + [f"{row['steps']:,}", f"{statistics.mean(row['tokens']):,.0f}", mean_and_range(row["seconds"], ".0f")]
            + [f"{row['tokens_per_s']:,.0f}", f"{row['learning_rate']:g}"]
            + [mean_and_range(row["loss"], ".3f"), mean_and_range(row["accuracy"], ".1%")]
        )
    heads = ["equal", "model", "recipe", "parameters", "in blocks", "steps", "tokens", "seconds", "tokens/s"]
    table = grid(rows, [*heads, "learning rate", "held-out loss", "masked accuracy"])
    tried = {}
    for trial in result["trials"]:
        tried.setdefault(f"{trial['model']} by {trial['recipe']}", []).append(
            f"{trial['loss']:.3f} at {trial['learning_rate']:g}"
        )
    losses = "; ".join(f"{name} {', '.join(found)}" for name, found in tried.items())
    settings = result["settings"]
    note = f"Mean ± half the range of {len(settings['seeds'])} seeds, {result['num_predicted']:,} predicted tokens of "
    note += f"{settings['num_held_out']:,} held-out documents, {settings['tokens_per_step']:,} tokens a step, float32. "
    return f"{table}\n\n{note}Held-out loss of the first seed by learning rate: {losses}. {source(result)}."


def contextual_speed(result: dict) -> str:
    """Times, and the memory by batch size."""
    memory = ", ".join(f"{value:,.0f} MB for {size} pairs" for size, value in result["memory_mb"].items())
    return f"{rows_table(result)} Memory of a training step above the model: {memory}."


def few_examples(result: dict) -> str:
    """Scores of each way by data, over the seeds."""
    cells = {(row["way"], row["data"]): row for row in result["rows"]}
    data = list(dict.fromkeys(row["data"] for row in result["rows"]))
    rows = []
    for way in dict.fromkeys(row["way"] for row in result["rows"]):
        found = [cells.get((way, name)) for name in data]
        seconds = statistics.mean(row["seconds"] for row in found if row)
        rows.append([way, *(row and mean_and_range(row["scores"], ".1%") for row in found), f"{seconds:.0f}"])
    settings = result["settings"]
    note = f"Mean ± half the range of {len(settings['seeds'])} seeds, {settings['num_test']:,} test rows of SST-2."
    return f"{grid(rows, ['way', *data, 'seconds'])}\n\n{note} {source(result)}."


def classifier_peers(result: dict) -> str:
    """Seconds and accuracy of each command, over the seeds."""
    rows = [
        [row["way"], mean_and_range(row["seconds"], ".0f"), mean_and_range(row["scores"], ".1%")]
        for row in result["rows"]
    ]
    settings = result["settings"]
    note = f"{settings['num_train']:,} rows of SST-2, {settings['num_test']:,} test rows, mean ± half the range of "
    note += f"{len(settings['seeds'])} seeds; SetFit with num_iterations={settings['num_iterations']}."
    return f"{grid(rows, ['command', 'seconds', 'accuracy'])}\n\n{note} {source(result)}."


def runtimes(result: dict) -> str:
    """Error, size and speed of each runtime: milliseconds of one sentence, tokens/s of a batch, and the command."""
    cells = {(row["path"], row["batch"]): row for row in result["rows"]}
    batches = {row["batch"]: row for row in result["rows"]}
    rows = []
    for path in result["paths"]:
        measured = [cells.get((path["path"], batch)) for batch in batches]
        forms = ["{milliseconds:,.1f}" if row["sequences"] == 1 else "{tokens_per_s:,.0f}" for row in batches.values()]
        speeds = [form.format(**row) if row else "" for form, row in zip(forms, measured)]
        accuracy = [f"{path['error']:.1e}", f"{path['cosine']:.4f}"]
        rows.append([path["path"], *accuracy, f"{path['mb']:,.0f}", *speeds, f"`{path['command']}`"])
    units = [f"{name}: {'ms' if row['sequences'] == 1 else 'tokens/s'}" for name, row in batches.items()]
    table = grid(rows, ["path", "error", "cosine", "MB", *units, "command"])
    ragged = next((row for row in batches.values() if row["real_share"] < 1), None)
    padding = f"; of the padded batch, {ragged['real_share']:.0%} are tokens" if ragged else ""
    note = f"{result['settings']['num_threads']} threads; smallest cosine of a token{padding}"
    versions = "".join(f", {name} {version}" for name, version in result["runtimes"].items())
    unstable = f" Left out, spread above 10 % twice: {'; '.join(result['unstable'])}." if result.get("unstable") else ""
    return f"{table}\n\n{note}.{unstable} {spread(result)[:-1]}{versions}."


LARGEST_SPREAD = 0.1  # of a figure of servers: half the range over the median


def serving(result: dict) -> str:
    """Requests a second of each server, and in brackets the milliseconds within which half and 99 % of the answers came."""
    cells = {(row["model"], row["tokens"], row["clients"], row["server"]): row for row in result["rows"]}
    servers = list(dict.fromkeys(row["server"] for row in result["rows"]))
    rows = []
    for case in dict.fromkeys(key[:-1] for key in cells):
        found = [cells[(*case, server)] for server in servers]
        cell = "{requests_per_s:,.3g} ({p50_ms:,.0f}, {p99_ms:,.0f})"
        shown = [cell.format(**row) if row["spread"] <= LARGEST_SPREAD else "" for row in found]
        rows.append([*map(str, case), *shown])
    stable = [row for row in result["rows"] if row["spread"] <= LARGEST_SPREAD]
    note = f"Left out: a spread above {LARGEST_SPREAD:.0%}. {spread(result | {'rows': stable})}"
    return f"{grid(rows, ['model', 'tokens', 'clients', *servers])}\n\n{note}"


def roofline(result: dict) -> str:
    """Expected tokens/s of each card, and the model of roofline.py beside the measured H200."""
    lengths = lengths_of(result)

    def rounded(value):
        return f"{float(f'{value:.2g}'):,.0f}"  # the model is no better than that

    rows = []
    for card in dict.fromkeys(row["card"] for row in result["rows"]):
        found = [row for row in result["rows"] if row["card"] == card]
        ranges = [f"{rounded(row['ours'])} to {rounded(row['ours-prepacked'])}" for row in found]
        rows.append([f"{card}, {found[0]['dtype']}: as loaded to `inference_copy`", *ranges])
        rows.append(["wrong if below, as loaded", *(rounded(row["ours"] * row["wrong_below"]) for row in found)])
        rows.append(["matrix products alone", *(rounded(row["ceiling"]) for row in found)])
    heads = [f"{length:,}" for length in lengths]
    table = grid(rows, ["expected tokens/s by length", *heads])
    cells = {(row["model"], row["length"]): row for row in result["check"]}
    rows = []
    for model in dict.fromkeys(row["model"] for row in result["check"]):
        measured = [cells.get((model, length)) for length in lengths]
        cell = "{tokens_per_s:,.0f} ({share_of_expected:.2f})"
        rows.append([NAMES[model], *(cell.format(**row) if row else "" for row in measured)])
    check = grid(rows, ["measured on the H200 (over expected)", *heads])
    products, memory = (f"{result['factors'][name]:.0%}" for name in ("products", "memory"))
    note = f"Fitted on the H200 at 512 tokens: products reach {products} of the peak, memory {memory} of the bandwidth."
    for dtype, count in result["launches"].items():
        lowest, highest = result["one_text_ms"][dtype]
        note += f" One text of 16 to 512 tokens, {dtype}: {count} kernel launches, {lowest} to {highest} ms."
    return f"{table}\n\n{check}\n\n{note}"


def rehearsal(result: dict) -> str:
    """How often the host waits for the device in one forward, by backend and device."""
    keys = ("before", "before_trusted", "after", "cases")
    rows = [[f"`{row['backend']}`", row["device"].upper(), *(row[key] for key in keys)] for row in result["rows"]]
    heads = ["", "device", "waits before the first block", "with `trust_boundaries=True`", "after it", "cases"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{grid(rows, heads)}\n\n{versions}, no GPU."


def versions(result: dict) -> str:
    """Versions, and how many of the tests passed with them."""
    return tabulate(result["rows"], headers="keys", tablefmt="github", disable_numparse=True)


SPECIAL = (
    throughput,
    classifier_peers,
    cpu_kernels,
    contextual_speed,
    corpus_cipher,
    embeddings,
    few_examples,
    packing_plan,
    pretraining_peers,
    rehearsal,
    roofline,
    runtimes,
    serving,
    versions,
)
# other results are a list of rows
RENDER = {function.__name__: function for function in SPECIAL} | {"evaluation": evaluation_report, "mteb": mteb_tables}


def render(result: dict) -> str:
    """The table of a result."""
    return RENDER.get(result["benchmark"], rows_table)(result)


# ---------------------------------------------------------------------------------------- the blocks of pages

# What each implementation does. The published code: revision 5424c8e of chandar-lab/NeoBERT. ModernBERT: transformers 5.23.
FEATURES = [
    ["transformers", "4.x; NaN on 5.x", "4.48 or newer", "4.57 to 5.24"],
    ["runs on a CPU", "no, requires xformers", "yes", "yes"],
    ["computes nothing on padding", "no", "in FlashAttention only", "yes, on every device"],
    ["packed documents kept apart", "on CUDA", "with FlashAttention", "yes, on every device"],
    ["loss of masked language modelling", "no", "yes", "yes"],
    ["heads", "2", "5", "5"],
    ["gradient checkpointing, PEFT", "no", "yes", "yes"],
    ["longest training sequence, tokens", "4,096", "8,192", "4,096"],
]


PEERS = {"published": "published code", "modernbert-base": "ModernBERT-base", "ours": "neobert_hf"}


def features() -> str:
    """Features of the published code, ModernBERT-base and this library."""
    return grid(FEATURES, ["", *PEERS.values()])


# What the README shows: the machine, the ragged batches on it, and the rows of 512 tokens.
MACHINES = {
    "an H200, bfloat16": ("ragged_gpu_bfloat16", "throughput_gpu_bfloat16"),
    "two cores with AVX512-BF16, bfloat16": ("ragged_cpu_bfloat16", "throughput_cpu_bfloat16"),
    "two cores with AVX2, float32": ("ragged_cpu_float32_avx2_intel", "throughput_cpu_float32_avx2_intel"),
}


def comparison() -> str:
    """Tokens per second of each machine, of texts of different lengths and of rows of one length."""
    heads = ["tokens/s", "published code (222 M)", "ModernBERT-base (149 M)", "neobert_hf (222 M)"]
    rows, spreads, machines = [], [], []
    for machine, (ragged, full) in MACHINES.items():
        of_ragged = [row for row in read(ragged)["rows"] if row["lengths"] == "log-normal"]
        of_full = [row for row in read(full)["rows"] if row["length"] == 512]
        kinds = {
            "texts of different lengths": [row for row in of_ragged if row["what"] == "inference"],
            "the same, a training step": [row for row in of_ragged if row["what"] == "training step"],
            "rows of 512 tokens": of_full,
        }
        for kind, measured in kinds.items():
            speeds = {row["model"]: f"{row['tokens_per_s']:,.0f}" for row in measured}
            spreads += [row["spread"] for row in measured if row["model"] in PEERS]
            if speeds:
                rows.append([f"{machine}: {kind}", *(speeds.get(model, "not measured") for model in PEERS)])
        machines += [source(read(ragged)), source(read(full))]
    note = (
        "Random weights, as loaded. Texts of different lengths: at most 512 tokens, a quarter of that in the mean; their own "
        "tokens count, and padding does not. ModernBERT unpads with FlashAttention only, which was not installed, so it computed "
        "the padding; with FlashAttention it was not measured. The published code does not run on a CPU, so its forward pass was "
        "rewritten."
    )
    note += f" Spread (half range / median): typically {statistics.median(spreads):.0%}, at most {max(spreads):.0%}."
    return f"{grid(rows, heads)}\n\n{note} {'; '.join(dict.fromkeys(machines))}."


# Which runtime on which machine: the machine, a result and a path of it, what to write, and where the page goes on.
BY_MACHINE = (
    (
        "CPU with AMX, or AMD with AVX512-BF16",
        "runtimes_cpu",
        "inference copy, int8",
        "`inference_copy(model, int8=True)`",
    ),
    ("", "runtimes_cpu", "inference copy, bfloat16", "`inference_copy(model)` of a model in bfloat16"),
    ("CPU with AVX2 only", "runtimes_cpu_avx2", "inference copy, int8", "`inference_copy(model, int8=True)`"),
    ("", "runtimes_cpu_avx2", "inference copy", "`inference_copy(model)`"),
    ("no PyTorch", "runtimes_cpu", "ONNX Runtime", "`neobert export MODEL OUT`, then [`OnnxModel`](#without-a-server)"),
    ("", "runtimes_cpu", "llama.cpp", "`neobert export MODEL OUT --to gguf`, then [llama.cpp](#llama-cpp)"),
    (
        "browser, Node (mini model)",
        "runtimes_cpu_mini",
        "transformers.js, Node",
        "`neobert export MODEL OUT`, then [transformers.js](#javascript)",
    ),
)


def machines() -> str:
    """The speed of a runtime on a machine over that of PyTorch as loaded, for eight docstrings."""
    rows = []
    for machine, name, path, command in BY_MACHINE:
        speeds = {row["path"]: row["tokens_per_s"] for row in read(name)["rows"] if row["batch"] == "8 docstrings"}
        rows.append([machine, path, f"{speeds[path] / speeds['PyTorch (SDPA)']:.2f}", command])
    gpu = read("gpu/nvidia_h100_80gb_hbm3/fast_path_speed_bfloat16")["rows"]
    speeds = {row["model"]: row["tokens_per_s"] for row in gpu if row["batch"] == "256 ragged rows"}
    ratio = f"{speeds['ours-prepacked'] / speeds['ours']:.2f}"
    rows.insert(0, ["GPU (H100)", "inference copy, bfloat16", ratio, "`inference_copy(model)` of a model in bfloat16"])
    rows.append(["ARM", "inference copy", "not measured", "`inference_copy(model)`"])
    return grid(rows, ["machine", "runtime", "speed over PyTorch as loaded", "command"])


def evaluation() -> str:
    """The evaluation of the mini model, by the name that `evaluation_report` gives it in a card."""
    return render(read("evaluation_cpu_float32"))


SUMMARIES = {function.__name__: function for function in (comparison, evaluation, features, machines)}
PAGES = [
    ROOT / "README.md",
    ROOT / "benchmarks/README.md",
    ROOT / "src/neobert_hf/mini/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


RUNTIMES = ("PyTorch (SDPA)", "PyTorch, bfloat16", "inference copy", "inference copy, bfloat16", "inference copy, int8")
RUNTIMES += ("ONNX Runtime", "OpenVINO", "llama.cpp", "llama.cpp, q8_0")
# The rows that a page shows of a long table: a key, and its values.
SHOWN = {
    "embeddings_cpu_float32": ("model", ("BM25", "mini", "all-MiniLM-L6-v2")),
    "runtimes_cpu": ("path", RUNTIMES),
}


def excerpt(name: str) -> str:
    """The table of a result, with the rows that a page shows."""
    result = read(name)
    key, values = SHOWN.get(name, ("", ()))
    for part in ("rows", "sts", "paths"):
        if key and part in result:
            result[part] = [row for row in result[part] if row[key] in values]
    if key and "unstable" in result:
        result["unstable"] = [case for case in result["unstable"] if case.rpartition(" at ")[0] in values]
    return render(result)


def block(name: str) -> str:
    """The table of a result or a summary, without the blanks that align its columns."""
    table = SUMMARIES[name]() if name in SUMMARIES else excerpt(name)
    return re.sub(r"-{3,}", "---", re.sub(r" +\|", " |", table))


def with_blocks(page: Path) -> str:
    """The text of a page with its tables as they are now."""
    text = page.read_text("utf-8")
    assert text.count("<!-- table:") == text.count("<!-- end -->"), f"{page}: a table has no end"
    blocks = r"(<!-- table:(\S+) -->\n).*?(<!-- end -->)"
    return re.sub(blocks, lambda found: f"{found[1]}{block(found[2])}\n{found[3]}", text, flags=re.DOTALL)


# ---------------------------------------------------------------------------------------- the figure

LINES = {  # model: colour and style
    "ours": ("C0", "-"),
    "ours-prepacked": ("C1", "-"),
    "ours-int8": ("C2", "-"),
    "ceiling": ("C0", ":"),
    "published": ("C3", "--"),
    "modernbert-base": ("C4", "--"),
}


def figure_hash() -> str:
    """Hash of what the figure shows."""
    shown = json.dumps([LINES, {model: NAMES[model] for model in LINES}])
    return hashlib.sha256(
        b"".join([*((RESULTS / f"{name}.json").read_bytes() for name in MAIN), shown.encode()])
    ).hexdigest()


def draw() -> None:
    """Draw tokens/s by sequence length: a panel for each kind of CPU, the same models in both."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    for axes, result in zip(figure.subplots(1, len(MAIN)), map(read, MAIN)):
        for model, (color, style) in LINES.items():
            points = sorted((row["length"], row["tokens_per_s"]) for row in result["rows"] if row["model"] == model)
            label = NAMES[model] + (" (upper limit as loaded)" if model == "ceiling" else "")
            axes.plot(*zip(*points), style, color=color, marker="o", markersize=4, linewidth=1.8, label=label)
        axes.set_xscale("log", base=2)
        ticks = {length: f"{length:,}" if length > 16 else "16\none sentence" for length in lengths_of(result)}
        axes.set_xticks(list(ticks), ticks.values())
        axes.minorticks_off()
        axes.set_xlabel("tokens in a sequence")
        axes.set_title(f"{result['settings']['dtype']}, {result['instructions']}", fontsize="medium")
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
    figure.axes[0].set_ylabel("tokens per second")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(FIGURE, dpi=130, metadata={"Source": figure_hash()})


def main() -> None:
    """Write all tables and the figure."""
    for file in RESULTS.rglob("*.md"):
        file.write_text(render(read(name_of(file))) + "\n", "utf-8")
    for page in PAGES:
        page.write_text(with_blocks(page), "utf-8")
    draw()


if __name__ == "__main__":
    main()
