"""Build the folder that goes to the Hub: weights, config, tokenizer, modules of sentence-transformers, model code and a card.

python hub_upload/build.py --model DIR_OR_ID --out HUB_DIR [--model_id org/name] [--license ID] [--language en]
python hub_upload/push.py HUB_DIR org/name
"""

import sys
from dataclasses import dataclass, field

from building import build
from transformers.utils import logging

from neobert_hf.runs import run_script


@dataclass
class BuildArguments:
    """Sources and target of the build."""

    model: str = field(metadata={"help": "Checkpoint to publish: a folder, or an id on the Hub."})
    out: str = field(metadata={"help": "Folder to write, new or empty."})
    tokenizer: str = field(default=None, metadata={"help": "Tokenizer, if it is not in the folder of the model."})
    model_id: str = field(default=None, metadata={"help": "Name on the Hub, for the card's example. Default: --out."})
    license: str = field(default=None, metadata={"help": "Licence, for the card. Default: that of the model's card."})
    language: list[str] = field(
        default=None, metadata={"help": "Languages, for the card, such as en. Default: those of the model's card."}
    )


def run(arguments: BuildArguments) -> None:
    """Build the folder and print the next command."""
    logging.disable_progress_bar()
    folder = build(**vars(arguments))
    next_command = f"python hub_upload/push.py {folder} {arguments.model_id or 'org/name'}"
    print(f"built {folder}; next: {next_command}", file=sys.stderr)


def main() -> None:
    """Read the command line and build the folder."""
    run_script(run, __doc__)


if __name__ == "__main__":
    main()
