"""Tables of what the models predict: accuracy, retrieval, fine-tuning, pseudo-perplexity."""

import json
from statistics import mean, stdev

from tabulate import tabulate

from neobert_hf.evaluation.report import evaluation_sections, long_context_table, markdown
from neobert_hf.hub.mini import masked_table
from page_tables.results import RESULTS, ROOT, result_of, source

MINI_SUMMARY = ROOT / "src/neobert_hf/mini/training_summary.json"


def mini() -> str:
    """Masked-token accuracy of the mini model, next to baselines without a model."""
    measured = json.loads(MINI_SUMMARY.read_text("utf-8"))["measured"]
    packages, entries = measured["num_held_out"], measured["num_held_out_entries"]
    return (
        f"{masked_table(measured)}\n\nMasked-token accuracy on {packages:,} docstrings of pandas and networkx, of which the "
        f"model learned nothing, and on {entries:,} held-out docstrings of the other packages, some of which the stages that had "
        f"an earlier corpus may have read. At most {measured['max_length']} tokens each. {measured['machine']}."
    )


def embeddings() -> str:
    """Retrieval in documentation and STS-B, beside the teacher and BM25."""
    result = result_of("embeddings_cpu_float32")
    metrics = ("recall@1", "recall@10", "MRR@10", "nDCG@10")
    spearman = {row["model"]: row["spearman"] for row in result["sts"]}
    columns = ("questions", "model", "max_length", *metrics)
    rows = [[row.get(name) for name in columns] for row in result["rows"]]  # BM25 reads whole texts
    rows.sort(key=lambda row: row[0] != "as they are")
    retrieval = tabulate(rows, headers=["questions", "model", "tokens", *metrics], tablefmt="github", floatfmt=".3f")
    sts = tabulate(spearman.items(), headers=["STS-B dev", "Spearman"], tablefmt="github", floatfmt=".3f")
    notes = [
        f"{result['num_questions']:,} queries: first sentences of docstrings. Correct answer: the rest of the same docstring."
    ]
    if "in other words" in result["examples"]:
        example, rephrased = next(pair for pair in zip(*result["examples"].values()) if pair[0] != pair[1])
        share = f"{result['share_rephrased']:.0%}"
        notes.append(f'"In other words": WordNet synonyms, which change {share}: "{example}" becomes "{rephrased}".')
    return f"{retrieval}\n\n{sts}\n\n{' '.join([*notes, source(result)])}."


def evaluation() -> str:
    """The evaluation of the mini model by examples/evaluate_model.py."""
    result = result_of("evaluation_cpu_float32")
    return markdown(evaluation_sections(result, RESULTS))


def evaluation_bfloat16() -> str:
    """GLUE of the same evaluation on a processor with AVX-512 and bf16."""
    (glue, _) = evaluation_sections(result_of("evaluation_cpu_bfloat16"), RESULTS)
    table = tabulate(glue.rows, headers="keys", tablefmt="github")
    return f"{table}\n\n{glue.text}"


def seeds() -> str:
    """Retrieval, STS-B, answers and masks of the last stage of the mini model, which was trained with several seeds."""
    result = result_of("mini_seeds_cpu_float32")
    runs = result["rows"]
    rows = []
    for metric, (key, form) in WRITTEN_QUESTIONS.items():
        if key == "model":
            continue
        values = [row[key] for row in runs]
        # a pair counts the correct answers first, and among three
        columns = zip(*(map(int, value.split(", ")) if isinstance(value, str) else [value] for value in values))
        spread = [f"{mean(column):{form or '.1f'}} ± {stdev(column):{form or '.1f'}}" for column in columns]
        rows.append([metric, *(format(value, form) for value in values), ", ".join(spread)])
    heads = ["metric", *(row["model"] for row in runs), "mean"]
    table = tabulate(rows, headers=heads, tablefmt="github", disable_numparse=True)
    return f"{table}\n\nMeans with standard deviations. {result['settings']['dtype']}, {source(result)}."


def finetuning(name: str) -> str:
    """Scores of the mini model and of its peers on GLUE, under equal conditions."""
    result = result_of(name)
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
        f"without the decoder. {source(result)}."
    )


def long_context() -> str:
    """Pseudo-perplexity of the mini model beyond the length of its training."""
    result = result_of("long_context_cpu")
    return (
        f"{long_context_table(result)}\n\n{result['texts']} texts, the same for all lengths, {result['positions']} masked "
        f"positions in each, with 95 % intervals. Trained length: {result['trained_length']} tokens."
    )


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
    result = result_of("ablations_cpu")
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
        f"{settings['learning_rate']:g}; means of {len(settings['seeds'])} seeds ± half their range. {source(result)}."
    )


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

TOKEN_WEIGHTS = {
    "weights of the tokens": ("model", ""),
    "recall@1": ("recall@1", ".3f"),
    "recall@10": ("recall", ".3f"),
    "recall@1, other words": ("recall@1 other", ".3f"),
    "recall@10, other words": ("other", ".3f"),
    "STS-B dev": ("spearman", ".3f"),
    "correct first, of 60": ("first", ""),
    "correct among 3": ("three", ""),
}

WRITTEN_QUESTIONS = {
    "model": ("model", ""),
    "recall@1": ("recall@1", ".3f"),
    "recall@10": ("recall", ".3f"),
    "recall@1, other words": ("recall@1 other", ".3f"),
    "recall@10, other words": ("other", ".3f"),
    "STS-B dev": ("spearman", ".3f"),
    "everyday: 60": ("everyday", ""),
    "everyday, later: 50": ("later", ""),
    "details: 600": ("details", ""),
    "masked accuracy": ("masked", ".3f"),
    "of held-out entries": ("masked entries", ".3f"),
}

INT8 = {
    "products": ("products", ""),
    "recall@1": ("recall@1", ".3f"),
    "recall@10": ("recall@10", ".3f"),
    "nDCG@10": ("nDCG@10", ".3f"),
    "cosine with float32, mean": ("cosine", ".4f"),
    "smallest": ("smallest cosine", ".4f"),
}
