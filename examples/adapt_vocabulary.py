"""Adapt NeoBERT to a domain or a language: give it a new vocabulary, and continue pretraining.

    neobert adapt-vocabulary --train_files domain.jsonl --validation_files held_out.jsonl \\
        --output_dir runs/domain --max_steps 500 --learning_rate 5e-3
    neobert adapt-vocabulary --init_from chandar-lab/NeoBERT --train_files domain.jsonl --vocab_size 32768 \\
        --output_dir runs/domain --max_steps 2000 --tokens_per_step 131072 --bf16
    neobert adapt-vocabulary --train_files domain.jsonl --tokenizer_name path/to/tokenizer --output_dir runs/domain

A new WordPiece tokenizer learns the words of the text, unless --tokenizer_name gives one. A token that the model has not seen
begins as the mean of the tokens that its old tokenizer gives for it. The folder `start` in the output folder holds the model
before the training. Rerun the command after an interruption.

The learning rate is a constant tenth of --learning_rate; --schedule linear decays from all of it to zero.
"""

from dataclasses import dataclass, field

from neobert_cli.parser import option
from neobert_hf import MINI_MODEL_PATH
from neobert_hf.checkpoints import write_card
from neobert_hf.pretraining import CorpusArguments, PretrainingArguments, pretrain, say_pretrained, write_adapted_model
from neobert_hf.runs import run_script


@dataclass
class VocabularyArguments:
    """New vocabulary."""

    vocab_size: int = option("Tokens of the new tokenizer. Default: as many as the old one; fewer for a small text.")


@dataclass
class AdaptationArguments(PretrainingArguments):
    """Continued pretraining."""

    phase: int = option("Always 2: the run continues a model.", 2)
    init_from: str = option("Folder or Hub id of the model, with its old tokenizer.", MINI_MODEL_PATH)
    max_length: int = option("Maximum length of a document in tokens.", 512)
    mixture: list[float] = field(default_factory=lambda: [1.0, 0.0, 0.0])
    max_steps: int = option("Optimizer steps.", 500)
    tokens_per_step: int = option("Token budget of an optimizer step, on all devices together.", 8192)
    output_dir: str = option("Folder of the checkpoints, the metrics and the model.", "runs/adapted")
    report_to: str = option("tensorboard, wandb, ... or none.", "none")


def adapt(vocabulary: VocabularyArguments, data: CorpusArguments, training: AdaptationArguments):
    """Write the model with the new vocabulary, continue its pretraining, and write the model cards."""
    with training.main_process_first():  # the other processes find the folder
        start = write_adapted_model(training.init_from, data, training, vocabulary.vocab_size)
    data.tokenizer_name = training.init_from = start
    trainer = pretrain(data, training)
    if trainer.is_world_process_zero():
        write_card(start)  # first: the other card tells of it
        write_card(training.output_dir)
        say_pretrained(training.output_dir)


def main():
    """Read the command line, and adapt."""
    run_script(adapt, __doc__)


if __name__ == "__main__":
    main()
