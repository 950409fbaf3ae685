"""Fine-tune any encoder on GLUE by the paper's protocol (section 5.1, appendix C).

    python examples/paper/finetune_glue.py --model_name_or_path chandar-lab/NeoBERT --output_dir runs/glue --seeds 5
    python examples/paper/finetune_glue.py --model_name_or_path runs/small --tasks sst2 --data_dir glue --preset none \\
        --learning_rate 2e-4 --num_train_epochs 3 --output_dir runs/sst2

The rows come from the original files in --data_dir, or from nyu-mll/glue. RTE, STS-B, MRPC and QNLI start from the best MNLI
run, if mnli is in --tasks. Rerun the command to resume after an interruption, which loses at most one run. glue.json has all
results, glue.md the table, glue.png the comparison with Table 3.
"""

from pathlib import Path

from glue_runs import GlueArguments, GlueTrainingArguments, run_suite

from neobert_hf import tune_allocator
from neobert_hf.files import run_command
from neobert_hf.runs import CommandParser, lock_run


def run(arguments: GlueArguments, training: GlueTrainingArguments):
    """Fine-tune, and print the table."""
    tune_allocator()
    with lock_run(training.output_dir):
        run_suite(arguments, training)
    print(Path(training.output_dir, "glue.md").read_text("utf-8"))


def main():
    """Read the command line, and train."""
    parser = CommandParser((GlueArguments, GlueTrainingArguments), description=__doc__)
    run_command(parser.prog, run, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
