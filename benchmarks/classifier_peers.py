"""Whole commands that train a classifier on SST-2, in turns: `neobert finetune-classifier`, stock Trainer and SetFit.

    pip install setfit evaluate
    python benchmarks/classifier_peers.py --glue glue --json benchmarks/results/classifier_peers_cpu.json

All start from the mini model, read the same rows, and predict the same rows of dev.tsv. Seconds are those of a process: imports,
training, evaluation and saving.

- neobert_hf: the defaults of the command, with `--bf16 false` too.
- Trainer: batches of 16, 3 epochs, 3e-4, float32: a loop over the same model as its documentation writes it.
- SetFit: its defaults with `num_iterations` in place of all pairs, of which 2,000 rows have two million.

Nothing else may run on the machine.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas
from harness import finish, read_arguments
from tqdm.auto import tqdm

from neobert_hf import MINI_MODEL_PATH

COMMAND = ["-m", "neobert_cli", "finetune-classifier", "--text_columns", "sentence", "--max_seq_length", "128"]
START = f"""
import sys, neobert_hf, pandas
from datasets import Dataset
train, test, seed, folder = sys.argv[1:]
rows = {{name: Dataset.from_pandas(pandas.read_csv(name)) for name in (train, test)}}
MODEL = {MINI_MODEL_PATH!r}
"""
TRAINER = """
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments, set_seed
set_seed(int(seed))
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=2, dtype="float32")
tokens = {name: part.map(lambda row: tokenizer(row["sentence"], truncation=True, max_length=128)) for name, part in rows.items()}
options = {"num_train_epochs": 3, "learning_rate": 3e-4, "per_device_train_batch_size": 16, "seed": int(seed)}
training = TrainingArguments(folder, save_strategy="no", report_to="none", use_cpu=True, **options)
trainer = Trainer(model, training, train_dataset=tokens[train], processing_class=tokenizer)
trainer.train()
trainer.save_model()
found = trainer.predict(tokens[test]).predictions.argmax(-1)
print((found == rows[test]["label"]).mean())
"""
SETFIT = """
from setfit import SetFitModel, Trainer, TrainingArguments
model = SetFitModel.from_pretrained(MODEL)
training = TrainingArguments(folder, num_iterations=ITERATIONS, seed=int(seed), save_strategy="no", report_to="none")
columns = {"sentence": "text", "label": "label"}
Trainer(model, training, train_dataset=rows[train], column_mapping=columns).train()
model.save_pretrained(folder)
print((model.predict(rows[test]["sentence"]).numpy() == rows[test]["label"]).mean())
"""


def run(way: str, files: list[str], seed: int, num_iterations: int) -> tuple[float, float]:
    """Seconds and accuracy of a command."""
    with tempfile.TemporaryDirectory() as place:
        folder = f"{place}/model"
        if way.startswith("neobert_hf"):
            words = [
                *COMMAND,
                "--train_file",
                files[0],
                "--test_file",
                files[1],
                "--seed",
                str(seed),
                "--output_dir",
                folder,
            ]
            words += ["--bf16", "false"] if "float32" in way else []
        else:
            code = TRAINER if way == "Trainer" else SETFIT.replace("ITERATIONS", str(num_iterations))
            words = ["-c", START + code, *files, str(seed), folder]
        started = time.perf_counter()
        done = subprocess.run([sys.executable, *words], check=True, stdout=subprocess.PIPE, text=True)
        seconds = time.perf_counter() - started
        results = Path(folder, "test_results.json")
        is_ours = way.startswith("neobert_hf")
        return seconds, json.loads(results.read_text())["test_accuracy"] if is_ours else float(done.stdout.split()[-1])


def main():
    """Measure, print the table, and end with one line of JSON."""
    arguments = read_arguments(
        __doc__,
        glue="glue",
        ways=["neobert_hf", "neobert_hf, float32", "Trainer", "SetFit"],
        num_train=2000,
        num_test=1000,
        num_iterations=5,
        seeds=[42, 1, 2],
    )
    found = {way: [] for way in arguments.ways}
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/train.csv", f"{folder}/test.csv"]
        parts = [
            pandas.read_csv(Path(arguments.glue, "SST-2", name), sep="\t", quoting=3)
            for name in ("train.tsv", "dev.tsv")
        ]
        parts[1].sample(arguments.num_test, random_state=0).to_csv(files[1], index=False)
        for seed in tqdm(arguments.seeds):
            parts[0].sample(arguments.num_train, random_state=seed).to_csv(files[0], index=False)
            for way in arguments.ways:
                found[way].append(run(way, files, seed, arguments.num_iterations))
    rows = []
    for way, results in found.items():
        seconds, scores = zip(*results)
        rows.append({"way": way, "seconds": seconds, "scores": scores})
    finish("classifier_peers", rows, arguments)


if __name__ == "__main__":
    main()
