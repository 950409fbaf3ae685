"""Fine-tune NeoBERT, or any other encoder, to tag words, for example with the names of people and places.

    python examples/finetune_tagger.py --train_file train.jsonl --validation_file dev.jsonl --output_dir runs/tagger
    python examples/finetune_tagger.py --dataset_name lhoestq/conll2003 --word_column tokens --tag_column ner_tags \\
        --model_name_or_path chandar-lab/NeoBERT --output_dir runs/conll

A row has a list of words and a list of tags: {"words": ["Ada", "codes"], "tags": ["PERSON", "O"]}. The folder opens in
`pipeline("token-classification", model="runs/tagger", trust_remote_code=True)`.
"""

from dataclasses import dataclass, field
from functools import partial

import torch
from seqeval.metrics import f1_score as entity_f1_score
from sklearn.metrics import accuracy_score, f1_score
from transformers import (
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    Trainer,
    set_seed,
)

from neobert_hf import MINI_MODEL_PATH
from neobert_hf.data.labelled import LabelledDataArguments, read_tagged_words
from neobert_hf.data.origins import load_tokenizer
from neobert_hf.data.texts import check_max_length
from neobert_hf.runs.arguments import FineTuningArguments
from neobert_hf.runs.commands import CommandParser, run_command
from neobert_hf.runs.signals import SaveOnTerminate


@dataclass
class TaggerArguments(LabelledDataArguments):
    """Model and data."""

    model_name_or_path: str = field(default=MINI_MODEL_PATH, metadata={"help": "Folder or id on the Hub."})
    word_column: str = field(default="words", metadata={"help": "Column of the lists of words."})
    tag_column: str = field(default="tags", metadata={"help": "Column of the lists of tags."})


def metrics(predictions, names: dict[int, str]) -> dict[str, float]:
    """Return accuracy over the words, and F1: of the entities if all tags are B-, I- or O, else the mean over the tags."""
    is_word, sides = predictions.label_ids != -100, (predictions.label_ids, predictions.predictions.argmax(-1))
    rows = [[[names[tag] for tag in row[kept]] for row, kept in zip(side, is_word)] for side in sides]
    is_iob = all(name == "O" or name.startswith(("B-", "I-")) for name in names.values())
    labels, predicted = (side[is_word] for side in sides)
    f1 = entity_f1_score(*rows) if is_iob else f1_score(labels, predicted, average="macro")
    return {"accuracy": accuracy_score(labels, predicted), "f1": f1}


def train(arguments: TaggerArguments, training: FineTuningArguments):
    """Train, evaluate after each epoch, and save the best model."""
    set_seed(training.seed)
    data = read_tagged_words(arguments, arguments.word_column, arguments.tag_column, training.seed)
    names = dict(enumerate(data["train"].features["tags"].feature.names))
    max_length = arguments.max_seq_length
    tokenizer = load_tokenizer(arguments.model_name_or_path)
    tokenizer.add_prefix_space = True  # RoBERTa's class in transformers 4 demands it; `tokenize` adds the spaces

    def tokenize(rows):
        # the spaces of a text; byte-level tokenizers mark the beginning of a word by one
        words = [[first, *(f" {word}" for word in rest)] for first, *rest in rows["words"]]
        tokens = tokenizer(words, is_split_into_words=True, truncation=True, max_length=max_length)
        labels, cut = [], []
        for i, tags in enumerate(rows["tags"]):
            words = tokens.word_ids(i)  # the first token of a word has its tag; -100 is not trained
            firsts = [None if word == before else word for before, word in zip([None, *words], words)]
            labels.append([-100 if word is None else tags[word] for word in firsts])
            cut.append(len(tags) - len(set(firsts) - {None}))
        return {**tokens, "labels": labels, "cut": cut}

    data = data.map(tokenize, batched=True, remove_columns=["words", "tags"])
    if cut := sum(data["validation"]["cut"]):
        print(f"{cut} validation words have no token among the first {max_length} and are not evaluated", flush=True)
    data = data.remove_columns("cut")
    options = {"id2label": names, "label2id": {name: i for i, name in names.items()}, "dtype": torch.float32}
    options["ignore_mismatched_sizes"] = True  # of a start with other tags
    model = AutoModelForTokenClassification.from_pretrained(arguments.model_name_or_path, **options)
    check_max_length(model, max_length)
    training.choose_learning_rate(model.config)
    rows = {"train_dataset": data["train"], "eval_dataset": data["validation"]}
    options = {"processing_class": tokenizer, "compute_metrics": partial(metrics, names=names)}
    options["callbacks"] = [SaveOnTerminate()]
    trainer = Trainer(model, training, DataCollatorForTokenClassification(tokenizer), **rows, **options)
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("eval", trainer.evaluate())


def main():
    """Read the command line, and train."""
    parser = CommandParser((TaggerArguments, FineTuningArguments), description=__doc__)
    run_command(parser.prog, train, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
