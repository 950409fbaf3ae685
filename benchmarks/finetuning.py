"""Accuracy of fine-tuning on SST-2, CoLA and STS-B: one command with its defaults, beside two other ways.

    python benchmarks/finetuning.py --glue glue --json benchmarks/results/finetuning.json

`examples/finetune_classifier.py` trains the mini NeoBERT, and a BERT of its shape with its tokenizer and random weights. The
third way is TF-IDF with logistic regression, and with ridge regression for scores. All ways read the same training rows, and a
tenth of them chooses the epoch. The metrics are those of the development files, which no training reads.

Is the mean of all tokens better than the first token?

    python benchmarks/finetuning.py --glue glue --ways first-token mean --max_train_rows 4000 \\
        --json benchmarks/results/classifier_pooling_cpu.json
"""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet
from harness import finish, read_arguments
from scipy.sparse import csr_matrix, hstack
from scipy.stats import spearmanr
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import accuracy_score, matthews_corrcoef
from torch import manual_seed
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

import neobert_hf

sys.path.insert(0, str(Path(__file__).parents[1] / "examples/paper"))
from glue import TASKS, GlueTask, load_task

CLASSIFIER = Path(__file__).parents[1] / "examples/finetune_classifier.py"
METRICS = {
    "sst2": ("accuracy", accuracy_score),
    "cola": ("Matthews", matthews_corrcoef),
    "stsb": ("Spearman", lambda labels, predicted: spearmanr(labels, predicted).statistic),
}
SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "pad_token_id")


def write_bert(folder: str, seed: int) -> str:
    """Write a BERT of the mini model's shape with random weights, and the mini model's tokenizer."""
    ours = AutoConfig.from_pretrained(neobert_hf.MINI_MODEL_PATH)
    manual_seed(seed)
    config = AutoConfig.for_model("bert", **{name: getattr(ours, name) for name in SHAPE})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(neobert_hf.MINI_MODEL_PATH).save_pretrained(folder)
    return folder


def dev_file(task: GlueTask, glue: str, stem: str) -> str:
    """Return the training or development file of a task."""
    (file,) = Path(glue, task.folder).glob(f"{stem}.[ct]sv")
    return str(file)


def fine_tuned(
    model: str, task: GlueTask, glue: str, rows: int, seed: int, *options: str
) -> tuple[np.ndarray, np.ndarray]:
    """Train by the script with its defaults; return the labels of the development file, and its predictions."""
    with tempfile.TemporaryDirectory() as folder:
        predictions = Path(folder, "predictions.parquet")
        command = [sys.executable, str(CLASSIFIER), "--model_name_or_path", model, "--seed", str(seed)]
        command += ["--train_file", dev_file(task, glue, "train"), "--test_file", dev_file(task, glue, "dev")]
        command += ["--text_columns", *task.texts, "--label_column", task.file_label, "--max_train_rows", str(rows)]
        if task.no_header:  # some rows of STS-B have two more columns
            command += ["--column_names", *task.no_header, "--skip_bad_rows"]
        command += [*options, "--output_dir", f"{folder}/model", "--predictions_file", str(predictions)]
        subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=subprocess.DEVNULL)
        table = pyarrow.parquet.read_table(predictions)
        return np.array(table[task.file_label].to_pylist(), float), np.array(table["prediction"].to_pylist(), float)


def tf_idf(task: GlueTask, glue: str, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels of the development file, and the predictions of a linear model on TF-IDF of words and pairs of words.

    A pair of texts is the product and the difference of its two vectors, and their cosine.
    """
    data = load_task(task, glue)
    train, dev = data["train"].shuffle(seed=seed), data["validation"]
    train = train.select(range(min(rows, len(train))))
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    vectorizer.fit([text for column in task.texts for text in train[column]])

    def features(part):
        first, *rest = (vectorizer.transform(part[column]) for column in task.texts)
        if not rest:
            return first
        product = first.multiply(rest[0])
        return hstack([product, abs(first - rest[0]), csr_matrix(product.sum(1))]).tocsr()

    linear = LogisticRegression(max_iter=1000) if task.classes else Ridge()
    linear.fit(features(train), train["label"])
    return np.array(dev["label"], float), linear.predict(features(dev)).astype(float)


def random_bert(*of_run) -> tuple[np.ndarray, np.ndarray]:
    """As `fine_tuned`, from a BERT with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        return fine_tuned(write_bert(folder, of_run[-1]), *of_run)


def pooled(pooling: str):
    """As `fine_tuned`, from the mini model with a pooling that is not the default of the script."""
    return lambda *of_run: fine_tuned(neobert_hf.MINI_MODEL_PATH, *of_run, "--classifier_pooling", pooling)


WAYS = {
    "mini": ("mini NeoBERT", lambda *of_run: fine_tuned(neobert_hf.MINI_MODEL_PATH, *of_run)),
    "bert": ("BERT of its shape, random weights", random_bert),
    "tf-idf": ("TF-IDF and a linear model", tf_idf),
    "first-token": ("mini NeoBERT, first token", pooled("cls")),
    "mean": ("mini NeoBERT, mean of all tokens", pooled("mean")),
}


def main():
    """Measure, print the table, and end with one line of JSON."""
    arguments = read_arguments(
        __doc__, glue="glue", tasks=list(METRICS), ways=list(WAYS)[:3], max_train_rows=16_000, seeds=[0, 1, 2]
    )
    rows = []
    for task in map(TASKS.get, arguments.tasks):
        name, metric = METRICS[task.name]
        for way, run in map(WAYS.get, arguments.ways):
            scores = {}
            for seed in tqdm(arguments.seeds, f"{task.name}, {way}"):
                labels, predicted = run(task, arguments.glue, arguments.max_train_rows, seed)
                scores[f"seed {seed}"] = float(metric(labels, predicted))
                tqdm.write(f"{task.name}, {way}, seed {seed}: {scores[f'seed {seed}']:.4f}")
            rows.append(
                {"task": f"{task.folder}, {name}", "way": way, "mean": statistics.mean(scores.values()), **scores}
            )
    finish("finetuning", rows, arguments)


if __name__ == "__main__":
    main()
