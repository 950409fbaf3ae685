"""Compute the pseudo-perplexity of texts by any masked language model (paper, section 5.3), and plot it by length.

    python examples/paper/evaluate_pseudo_perplexity.py --files texts.jsonl --model_name_or_path src/neobert_hf/mini \\
        --output_dir runs/pseudo-perplexity
    python examples/paper/evaluate_pseudo_perplexity.py --files texts.jsonl --model_name_or_path chandar-lab/NeoBERT \\
        --positions 100 --max_seq_length 4096 --output_dir runs/neobert

Every token is masked alone. A file texts-HASH.jsonl gets one line per text; rerun the command to resume. summary.json has the
median over the texts and the curve by length; by_length.png is its figure.
"""

import json

from pseudo_perplexity_runs import PseudoPerplexityArguments, evaluate_files

from neobert_hf import tune_allocator
from neobert_hf.files import run_command
from neobert_hf.runs import CommandParser, lock_run


def evaluate(arguments: PseudoPerplexityArguments):
    """Evaluate, and print the summary."""
    tune_allocator()
    with lock_run(arguments.output_dir):
        print(json.dumps(evaluate_files(arguments)))


def main():
    """Read the command line, and evaluate."""
    parser = CommandParser(PseudoPerplexityArguments, description=__doc__)
    run_command(parser.prog, evaluate, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
