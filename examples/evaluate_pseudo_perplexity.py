"""Compute the pseudo-perplexity of texts by any masked language model (paper, section 5.3), and plot it by length.

    python examples/evaluate_pseudo_perplexity.py --files texts.jsonl --output_dir runs/pseudo-perplexity
    python examples/evaluate_pseudo_perplexity.py --files texts.jsonl --model_name_or_path chandar-lab/NeoBERT \\
        --positions 100 --max_seq_length 4096 --output_dir runs/neobert

Every token is masked alone. texts.jsonl gets one line per text, and the same command goes on where it was interrupted.
summary.json has the median over the texts and the curve by length; by_length.png is its figure.
"""

import json

from neobert_hf.evaluation.pseudo_perplexity_runs import PseudoPerplexityArguments, evaluate_alone
from neobert_hf.runs.commands import CommandParser, run_command


def main():
    """Read the command line, evaluate, and print the summary."""
    parser = CommandParser(PseudoPerplexityArguments, description=__doc__)
    print(json.dumps(run_command(parser.prog, evaluate_alone, *parser.parse_args_into_dataclasses())))


if __name__ == "__main__":
    main()
