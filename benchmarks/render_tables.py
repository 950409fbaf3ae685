"""Render every table of the pages, and the figure, from the code and benchmarks/results/*.json.

    python benchmarks/render_tables.py            (write)
    python benchmarks/render_tables.py --check    (exit status 1 if anything is not what would be written)

A table stands between `<!-- table:NAME -->` and `<!-- end -->`. The figure carries a hash of the results that it shows.
"""

import re
import sys
from dataclasses import dataclass, field
from functools import partial

from page_tables import contextual, model, quality, speed
from page_tables.figure import FIGURE, draw, figure_hash
from page_tables.results import ROOT, rows_of
from PIL import Image
from transformers import HfArgumentParser


@dataclass
class RenderArguments:
    """Whether to write."""

    check: bool = field(default=False, metadata={"help": "Write nothing; fail if a page or the figure is out of date."})


TABLES = {
    "README.md": {"comparison": speed.comparison},
    "docs/loading.md": {"auto_classes": model.auto_classes, "backends": model.backends, "agreement": model.agreement},
    "docs/performance.md": {"headline": speed.headline, "int8": partial(rows_of, "int8_cpu", quality.INT8)},
    "docs/pretraining.md": {"packing_plan": speed.packing_plan},
    "docs/mini.md": {"mini": quality.mini},
    "docs/mini_training.md": {
        "distillation_trials": partial(rows_of, "distillation_trials_cpu", quality.DISTILLATION_TRIALS),
        "shapes": partial(rows_of, "mini_shapes_cpu_float32", quality.WRITTEN_QUESTIONS),
        "distillation_stages": partial(rows_of, "distillation_stages_cpu", quality.DISTILLATION_STAGES),
        "distillation_continued": partial(rows_of, "distillation_continued_cpu", quality.DISTILLATION_TRIALS),
        "token_weights": partial(rows_of, "token_weights_cpu_float32", quality.TOKEN_WEIGHTS),
        "written_questions": partial(rows_of, "written_questions_cpu_float32", quality.WRITTEN_QUESTIONS),
        "whitening": partial(rows_of, "mini_whitening_cpu_float32", quality.WRITTEN_QUESTIONS),
        "wider": partial(rows_of, "mini_wider_cpu_float32", quality.WRITTEN_QUESTIONS),
        "seeds": quality.seeds,
    },
    "docs/embeddings.md": {"embeddings": quality.embeddings},
    "docs/contextual.md": {
        "corpus_cipher": contextual.corpus_cipher,
        "contextual": contextual.contextual,
        "contextual_speed": contextual.contextual_speed,
    },
    "benchmarks/README.md": {
        "throughput": partial(speed.speeds, "throughput_cpu_bfloat16"),
        "throughput_long": partial(speed.speeds, "throughput_cpu_bfloat16_long"),
        "throughput_others": partial(speed.speeds, "throughput_cpu_bfloat16_others"),
        "throughput_float32": partial(speed.speeds, "throughput_cpu_float32"),
        "throughput_avx2": partial(speed.speeds, "throughput_cpu_float32_avx2"),
        "throughput_table_10": partial(speed.speeds, "throughput_cpu_float32_table_10"),
        "throughput_untuned": partial(speed.speeds, "throughput_cpu_bfloat16_untuned"),
        "latency": speed.latency,
        "ragged": partial(rows_of, "ragged_cpu_bfloat16", speed.RAGGED),
        "ragged_float32": partial(rows_of, "ragged_cpu_float32", speed.RAGGED),
        "ragged_avx2": partial(rows_of, "ragged_cpu_float32_avx2", speed.RAGGED),
        "memory": partial(rows_of, "memory_cpu", speed.MEMORY),
        "pretraining": partial(rows_of, "pretraining_cpu", speed.PRETRAINING),
        "ablations": quality.ablations,
        "finetuning_speed": partial(rows_of, "finetuning_speed_cpu", speed.FINETUNING_SPEED),
        "finetuning_speed_float32": partial(rows_of, "finetuning_speed_cpu_float32", speed.FINETUNING_SPEED),
        "dtypes": partial(rows_of, "dtypes_cpu", speed.DTYPES),
        "selected_tokens": partial(rows_of, "selected_tokens_cpu_float32", speed.SELECTED_TOKENS),
        "pseudo_perplexity_avx2": partial(rows_of, "pseudo_perplexity_cpu_float32", speed.PSEUDO_PERPLEXITY),
        "pseudo_perplexity": partial(rows_of, "pseudo_perplexity_cpu", speed.PSEUDO_PERPLEXITY),
        "encode": partial(rows_of, "encode_cpu", speed.ENCODE),
    },
    "benchmarks/kernels.md": {
        "fast_paths": partial(rows_of, "fast_paths_cpu", speed.FAST_PATHS),
        "fast_paths_avx2": partial(rows_of, "fast_paths_cpu_avx2", speed.FAST_PATHS),
        "training_attention": partial(rows_of, "training_attention_cpu", speed.TRAINING_ATTENTION),
    },
    "docs/evaluation.md": {
        "evaluation": quality.evaluation,
        "evaluation_bfloat16": quality.evaluation_bfloat16,
        "finetuning": partial(quality.finetuning, "finetuning_cpu"),
        "finetuning_recipes": partial(quality.finetuning, "finetuning_recipes_cpu"),
        "finetuning_recipes_float32": partial(quality.finetuning, "finetuning_recipes_cpu_float32"),
        "long_context": quality.long_context,
    },
    "src/neobert_hf/mini/README.md": {"evaluation": quality.evaluation},
    "SECURITY.md": {"adversary": model.adversary},
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
