"""Pretrain one of the variants beside this file:

    python examples/variants/train_variant.py --variant alibi --config_overrides alibi_exponent=6,hidden_size=256,... \\
        --train_files runs/documentation/train.jsonl --tokenizer_name runs/documentation/tokenizer --output_dir runs/alibi

All other arguments are those of `neobert pretrain-mlm`. For a variant of your own, give its class to `pretrain`.
"""

from dataclasses import dataclass

from alibi import AlibiForMaskedLM
from geglu import GegluForMaskedLM
from layer_norm import LayerNormForMaskedLM
from no_positions import NoPositionsForMaskedLM
from transformers.hf_argparser import HfArg

from neobert_hf.pretraining import CorpusArguments, PretrainingArguments, pretrain
from neobert_hf.runs import run_script

VARIANTS = {
    "alibi": AlibiForMaskedLM,
    "geglu": GegluForMaskedLM,
    "layer_norm": LayerNormForMaskedLM,
    "no_positions": NoPositionsForMaskedLM,
}


@dataclass
class VariantArguments:
    """The model."""

    variant: str = HfArg(help=" or ".join(VARIANTS))

    def __post_init__(self):
        if self.variant not in VARIANTS:
            raise ValueError(f"variant={self.variant!r} is not one of {', '.join(VARIANTS)}")


def train(chosen: VariantArguments, data: CorpusArguments, training: PretrainingArguments):
    """Train by a recipe."""
    pretrain(data, training, model=VARIANTS[chosen.variant])


def main():
    """Read the command line, and train."""
    run_script(train, __doc__)


if __name__ == "__main__":
    main()
