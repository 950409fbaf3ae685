"""Tables of contextual embeddings."""

import statistics

from tabulate import tabulate

from page_tables.results import result_of, source


def share(values: list[float]) -> str:
    """Mean of runs ± half their range, in percent."""
    spread = (max(values) - min(values)) / 2
    return f"{100 * statistics.mean(values):.1f} % ± {100 * spread:.1f}"


def corpus_cipher() -> str:
    """Recall@1 with and without context, over the seeds."""
    result = result_of("corpus_cipher_cpu")
    rows = [
        [
            row["model"],
            share(row["own_answer"]),
            share(row["answer_of_the_context"]) if row["answer_of_the_context"] else "",
        ]
        for row in result["rows"]
    ]
    headers = ["model, context", "finds the answer of its corpus", "finds the answer of the other corpus"]
    settings = result["settings"]
    note = f"Recall@1; {settings['num_steps']} steps, {len(settings['seeds'])} seeds, mean ± half the range."
    return f"{tabulate(rows, headers=headers, tablefmt='github')}\n\n{note} {source(result)}."


def contextual_speed() -> str:
    """Times of both contenders, and the memory by batch size."""
    result = result_of("contextual_speed_cpu")
    rows = [
        [
            row["what"],
            f"{row['milliseconds']:,.0f} ms",
            f"{row['spread']:.0%}",
            f"{row['times']:.2f} times {row['compared_with']}",
        ]
        for row in result["rows"]
    ]
    times = tabulate(rows, headers=["", "contextual", "spread", "compared with"], tablefmt="github")
    memory = tabulate(
        [[f"{size} pairs", f"{value:,.0f} MB"] for size, value in result["memory_mb"].items()],
        headers=["training step", "memory above the model"],
        tablefmt="github",
    )
    settings = result["settings"]
    note = (
        f"Training: {settings['batch_size']} pairs, texts of {settings['text_length']} tokens, context of "
        f"{settings['context_size']}, mini-batches of {settings['mini_batch_size']}. Queries: {settings['num_queries']} of "
        f"{settings['query_length']} tokens, context of {settings['query_context']}."
    )
    return f"{times}\n\n{memory}\n\n{note} {source(result)}."
