"""GLUE: every task's original files, metrics against scikit-learn and scipy, the order of the runs, and what stops them."""

import json
import math
import shutil
from pathlib import Path

import finetune_glue
import glue_runs
import numpy as np
import pytest
from conftest import SENTENCE, run_main
from datasets import ClassLabel, Value
from glue import AVERAGED, FROM_MNLI, PRESETS, TABLE_3, TABLE_3_TASKS, TASKS, average, load_task, task_metrics
from scipy import stats
from sklearn import metrics
from transformers import AutoModelForSequenceClassification, pipeline

from neobert_hf import NeoBERTForMaskedLM

GLUE = Path(__file__).with_name("glue")
WORDS = SENTENCE.split()

# First line of each original file, and a row whose texts have quotation marks, with its label.
ORIGINALS = {
    "cola": (None, 'gj04\t1\t\tThe "fox jumps.', 1),
    "mnli": (
        "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse\t"
        "sentence1\tsentence2\tlabel1\tgold_label",
        '0\t1\t2\tfiction\tp\tp\tp\tp\tThe "fox jumps.\tIt sleeps.\tneutral\tcontradiction',
        2,
    ),
    "mrpc": ("\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", '1\t70\t71\tThe "fox jumps.\tIt sleeps.', 1),
    "qnli": ("index\tquestion\tsentence\tlabel", '0\tThe "fox jumps.\tIt sleeps.\tnot_entailment', 1),
    "qqp": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", '1\t2\t3\tThe "fox jumps.\tIt sleeps.\t0', 0),
    "rte": ("index\tsentence1\tsentence2\tlabel", '0\tThe "fox jumps.\tIt sleeps.\tentailment', 0),
    "sst2": ("sentence\tlabel", 'The "fox jumps.\t1', 1),
    "stsb": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        '0\tnews\tf\t2012\t1\tnone\tnone\tThe "fox jumps.\tIt sleeps.\t3.750',
        3.75,
    ),
    "wnli": ("index\tsentence1\tsentence2\tlabel", '0\tThe "fox jumps.\tIt sleeps.\t1', 1),
}


def write_task(folder, name, lines=None):
    header, row, _ = ORIGINALS[name]
    folder.mkdir(parents=True, exist_ok=True)
    stems = ["train", *(split.replace("validation", "dev") for split in TASKS[name].validation)]
    for stem in stems:
        content = "\n".join([*([header] if header else []), *(lines or [row, row])])
        (folder / f"{stem}.tsv").write_text(content + "\n", "utf-8")
    return folder


@pytest.mark.parametrize("name", TASKS)
def test_the_original_files_of_every_task_are_read(tmp_path, name):
    task, label = TASKS[name], ORIGINALS[name][2]
    write_task(tmp_path / task.folder, name)
    data = load_task(task, tmp_path)
    assert list(data) == ["train", *task.validation]
    texts = ['The "fox jumps.', "It sleeps."][: len(task.texts)]
    for rows in data.values():
        assert list(rows) == [{**dict(zip(task.texts, texts)), "label": label}] * 2
    kind = data["train"].features["label"]
    assert kind == (Value("float32") if task.classes is None else ClassLabel(names=list(task.classes)))


def test_the_stsbenchmark_files_have_no_header(tmp_path):
    (tmp_path / "STS-B").mkdir()
    for stem in ("train", "dev"):
        (tmp_path / f"STS-B/sts-{stem}.csv").write_text("news\tf\t2012\t1\t5.000\tA.\tB.\tsource\tsource\n")
    assert load_task(TASKS["stsb"], tmp_path)["train"][0] == {"sentence1": "A.", "sentence2": "B.", "label": 5.0}


# Files with the peculiarities of those that people have: no newline at the end of CoLA's dev.tsv, a space after each text of
# SST-2, quotation marks that open a column of STS-B and never close it, and lines of STS-B with two more columns.
PLACES = {"cola": (3, 1), "sst2": (0, 1), "stsb": (5, 6, 4)}  # of the texts and the label in a line


@pytest.mark.parametrize("name", PLACES)
def test_every_line_of_a_file_with_the_peculiarities_of_the_real_ones_is_one_row(name):
    task = TASKS[name]
    for split, rows in load_task(task, GLUE).items():
        (file,) = (GLUE / task.folder).glob(f"{split.replace('validation', 'dev')}.*")
        lines = file.read_text("utf-8").removesuffix("\n").split("\n")[name == "sst2" :]
        assert len(lines) > 1
        for line, row in zip(lines, rows, strict=True):
            *texts, label = (line.split("\t")[place] for place in PLACES[name])
            assert [row[column] for column in task.texts] == texts
            assert row["label"] == pytest.approx(float(label))  # a score is a float32


STSB = "0\tn\tf\t1\t1\tn\tn\tA\tB\t"  # a row up to its score


@pytest.mark.parametrize(
    "name, line, message",
    [
        ("sst2", "a text\t2", r"train\.tsv, line 3: the label '2' is not one of negative, positive, 0, 1; correct"),
        ("sst2", "a text\t-1", r"train\.tsv, line 3: the label '-1' is not one of"),
        # of WNLI, whose ids have the reverse order
        ("rte", "0\tA\tB\t1", r"train\.tsv, line 3: the label '1' is not one of entailment, not_entailment; correct"),
        ("stsb", STSB + "five", r"train\.tsv, line 3: could not convert string to float"),
        ("stsb", STSB + "5.1", r"train\.tsv, line 3: the score 5\.1 is not from 0 to 5"),
        ("stsb", STSB + "nan", r"train\.tsv, line 3: the score nan is not from 0 to 5"),
    ],
)
def test_a_label_of_no_class_is_refused_with_its_file_and_number(tmp_path, name, line, message):
    write_task(tmp_path / TASKS[name].folder, name, [ORIGINALS[name][1], line])
    with pytest.raises(ValueError, match=message):
        load_task(TASKS[name], tmp_path)


def test_lines_end_at_a_newline_with_or_without_a_carriage_return_and_nowhere_else(tmp_path):
    write_task(tmp_path / "SST-2", "sst2")
    (tmp_path / "SST-2/train.tsv").write_bytes(b"sentence\tlabel\r\nA\rB\xc2\x85C\t1\r\n")
    assert list(load_task(TASKS["sst2"], tmp_path)["train"]) == [{"sentence": "A\rB\x85C", "label": 1}]


def test_truncated_lines_of_qqp_are_left_out_and_named_and_empty_questions_are_kept_as_on_the_hub(tmp_path, capsys):
    row = ORIGINALS["qqp"][1]
    write_task(tmp_path / "QQP", "qqp", [row, "7\t8\t9\tWhat", "7\t8\t9\tHow can I develop android app?\t\t0"])
    rows = load_task(TASKS["qqp"], tmp_path)["train"]
    assert list(rows["question2"]) == ["It sleeps.", ""]
    assert "train.tsv: left out 1 lines with another number of columns: [3]" in capsys.readouterr().out


def test_files_of_another_task_missing_files_and_files_without_rows_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"RTE has none of train\.tsv"):
        load_task(TASKS["rte"], tmp_path)
    write_task(tmp_path / "RTE", "sst2")
    with pytest.raises(ValueError, match=r"has no rows with the columns sentence1, sentence2, label; its first line"):
        load_task(TASKS["rte"], tmp_path)
    (tmp_path / "RTE/train.tsv").write_text(ORIGINALS["rte"][0] + "\n")
    with pytest.raises(ValueError, match=r"train\.tsv has no rows with the columns"):
        load_task(TASKS["rte"], tmp_path)


@pytest.mark.parametrize("name", TASKS)
def test_metrics_equal_those_of_scikit_learn_and_scipy(name):
    task, rng = TASKS[name], np.random.default_rng(0)
    if task.classes is None:
        labels, logits = rng.uniform(0, 5, 200), rng.normal(size=(200, 1))
        expected = [stats.pearsonr(labels, logits[:, 0])[0], stats.spearmanr(labels, logits[:, 0])[0]]
    else:
        labels, logits = rng.integers(0, len(task.classes), 200), rng.normal(size=(200, len(task.classes)))
        predicted = logits.argmax(1)
        names = {"accuracy": "accuracy_score", "f1": "f1_score", "matthews": "matthews_corrcoef"}
        expected = [getattr(metrics, names[metric])(labels, predicted) for metric in task.metrics]
    values = task_metrics(task, logits, labels)
    assert list(values) == [*task.metrics, "score"]
    for value, other in zip(values.values(), [*expected, np.mean(expected)]):
        assert abs(value - 100 * other) < 1e-12 * 100


def test_a_prediction_that_is_not_finite_is_an_error_and_equal_predictions_have_a_correlation_of_zero():
    with pytest.raises(FloatingPointError, match="a prediction is not finite"):
        task_metrics(TASKS["sst2"], np.array([[math.nan, 1.0]]), np.array([0]))
    assert task_metrics(TASKS["stsb"], np.ones((3, 1)), np.array([1.0, 2.0, 3.0]))["score"] == 0
    assert task_metrics(TASKS["cola"], np.array([[1.0, 0.0]] * 3), np.array([0, 1, 1]))["score"] == 0


def test_the_averages_of_table_3_are_those_of_its_rows():
    printed = {"BERT": 79.6, "RoBERTa": 86.4, "ModernBERT": 88.5, "NeoBERT-1024": 88.8, "NeoBERT-4096": 89.0}
    for model, scores in TABLE_3.items():
        name = model.removesuffix(" base")
        # the paper prints 79.6 for BERT, and its row has the mean 79.05
        tolerance = 0.6 if name == "BERT" else 0.1
        assert average(dict(zip(TABLE_3_TASKS, scores))) == pytest.approx(printed[name], abs=tolerance)
    assert set(TABLE_3_TASKS) == set(AVERAGED) == set(PRESETS["NeoBERT-1024"]) == set(PRESETS["NeoBERT-4096"])
    assert average({"rte": 1.0}) is None


@pytest.fixture
def model_folder(start, tmp_path):
    return shutil.copytree(start, tmp_path / "model")


@pytest.fixture
def data(tmp_path):
    """SST-2 whose label is a word's presence; MNLI, RTE and STS-B with labels at random."""
    rng = np.random.default_rng(0)

    def sentence():
        return " ".join(rng.choice(WORDS[:10], 5))

    rows = {
        "sst2": lambda i: f"{sentence()} {('warm', 'cold')[i % 2]}\t{i % 2}",
        "rte": lambda i: f"{i}\t{sentence()}\t{sentence()}\t{('entailment', 'not_entailment')[i % 2]}",
        "stsb": lambda i: "\t".join([*"123456", "s", "s", sentence(), sentence(), f"{i % 6}.000"][1:]),
        "mnli": lambda i: "\t".join([*"01234567", sentence(), sentence(), "x", TASKS["mnli"].classes[i % 3]]),
    }
    for name, row in rows.items():
        write_task(tmp_path / "glue" / TASKS[name].folder, name, [row(i) for i in range(40)])
    return tmp_path / "glue"


def command(model_folder, data, out, *more):
    return [
        *("--model_name_or_path", model_folder, "--data_dir", data, "--output_dir", out, "--use_cpu", "true"),
        *("--num_train_epochs", "1", "--per_device_train_batch_size", "8", "--preset", "none", *more),
    ]


@pytest.mark.slow
@pytest.mark.compat
def test_the_runs_learn_transfer_from_mnli_and_write_one_table(model_folder, data, tmp_path):
    out = tmp_path / "out"
    more = ("--tasks", "rte", "sst2", "stsb", "mnli", "--seeds", "2", "--learning_rate", "1e-3")
    printed = run_main(finetune_glue, *command(model_folder, data, out, *more))
    summary = json.loads((out / "glue.json").read_text())
    by_task = {task["task"]: task for task in summary["tasks"]}
    assert list(by_task) == ["mnli", "rte", "sst2", "stsb"] and summary["average"] is None
    assert by_task["rte"]["start"] == by_task["stsb"]["start"] == by_task["mnli"]["model"]
    assert by_task["sst2"]["start"] == str(model_folder)
    for task in by_task.values():
        assert len(task["scores"]) == 2
        assert task["mean"] == pytest.approx(np.mean(task["scores"]))
        assert task["standard_deviation"] == pytest.approx(np.std(task["scores"], ddof=1))
        assert [path.parent for path in (out / task["task"]).rglob("model.safetensors")] == [Path(task["model"])]
    assert (out / "glue.md").read_text().strip() in printed and "± " in printed
    assert (out / "glue.png").stat().st_size > 10_000
    classify = pipeline("text-classification", by_task["sst2"]["model"])
    assert classify("the fox")[0]["label"] in ("negative", "positive")


@pytest.fixture
def ran(monkeypatch):
    """The runs that were made, in place of training; a score follows from learning rate and seed, and one setting diverges."""
    runs = []

    def fine_tune(task, data, start, training, *options):
        runs.append((task.name, training.seed, training.learning_rate, start))
        Path(training.output_dir, "model").mkdir(parents=True)
        Path(training.output_dir, "model/config.json").write_text(training.output_dir[-16:])
        setting = (training.train_batch_size, training.learning_rate, training.weight_decay)
        if setting[1] == 3e-5:
            return None  # diverged
        return {"accuracy": 1.0, "score": 0.7 if setting == (8, 1e-5, 1e-5) else 100 * setting[1] - training.seed % 10}

    monkeypatch.setattr(glue_runs, "fine_tune", fine_tune)
    return runs


@pytest.mark.slow
def test_only_missing_runs_are_made_whatever_was_changed(model_folder, data, tmp_path, ran, monkeypatch):
    out = tmp_path / "out"

    def made(*more, out=out):
        ran.clear()
        run_main(finetune_glue, *command(model_folder, data, out, "--tasks", *more))
        return [(task, seed) for task, seed, *_ in ran]

    assert made("sst2") == [("sst2", 42)]
    assert made("sst2") == []
    assert made("sst2", "rte", "--transfer", "false") == [("rte", 42)]
    assert made("sst2", "--seeds", "2") == [("sst2", 43)]
    changes = ("--max_steps 2", "--bf16_full_eval true", "--learning_rate 0.0010000001", "--max_seq_length 9")
    for change in (*changes, "--classifier_pooling mean"):
        assert made("sst2", *change.split()) == [("sst2", 42)]
    assert made("sst2", "--logging_steps", "3", "--seed", "20240101") == [("sst2", 20240101)]
    shutil.copytree(out, tmp_path / "copy")
    assert made("sst2", out=tmp_path / "copy") == []
    assert str(out) not in (tmp_path / "copy/glue.json").read_text()
    file = data / "SST-2/dev.tsv"
    file.write_text(file.read_text().replace("\t1\n", "\t0\n", 1))
    assert made("sst2") == [("sst2", 42)]
    model = NeoBERTForMaskedLM.from_pretrained(model_folder)
    model.model.encoder.weight.data[5] += 1
    model.save_pretrained(model_folder)
    assert made("sst2") == [("sst2", 42)]
    monkeypatch.setattr(glue_runs.GlueTrainingArguments, "world_size", 2)  # another batch size
    assert made("sst2") == [("sst2", 42)]


def test_fewer_seeds_than_before_end_with_the_weights_of_their_best_run(model_folder, data, tmp_path, ran):
    def task(seeds):
        run_main(finetune_glue, *command(model_folder, data, tmp_path / "out", "--tasks", "sst2", "--seeds", seeds))
        return json.loads((tmp_path / "out/glue.json").read_text())["tasks"][0]

    assert [Path(task("9")["model"])] == list((tmp_path / "out").rglob("model"))  # of seed 50
    alone = task("1")
    assert len(alone["scores"]) == 1 and Path(alone["model"]).is_dir()


def test_the_grid_takes_the_best_of_all_settings_that_do_not_diverge(model_folder, data, tmp_path, ran):
    arguments = command(model_folder, data, tmp_path / "out", "--tasks", "sst2")
    i = arguments.index("--per_device_train_batch_size")
    run_main(finetune_glue, *arguments[:i], *arguments[i + 2 :], "--grid", "true", "--seeds", "2", "--seed", "10")
    (best,) = json.loads((tmp_path / "out/glue.json").read_text())["tasks"]
    assert list(best["setting"].values()) == [8, 1e-5, 1e-5] and best["scores"] == [0.7, 0.7]
    assert len(ran) == 60 + 1 and len(list((tmp_path / "out").rglob("model"))) == 1
    with pytest.raises(SystemExit, match="a prediction is not finite; lower the learning rate"):
        run_main(finetune_glue, *arguments, "--learning_rate", "3e-5")


def test_a_task_without_mnli_starts_from_the_given_model_and_says_so(model_folder, data, tmp_path, ran):
    printed = run_main(finetune_glue, *command(model_folder, data, tmp_path / "out", "--tasks", "rte"))
    assert f"rte: start from {model_folder}, not from the best run of mnli; add mnli" in printed
    assert ran[0][3] == str(model_folder)


@pytest.mark.compat
@pytest.mark.parametrize(
    "given, message",
    [
        ("--lr_scheduler_type cosine", "lr_scheduler_type is part of the paper's protocol"),
        ("--eval_strategy steps", "eval_strategy is part of the paper's protocol"),
        ("--seeds 0", "seeds=0 leaves no run"),
        ("--max_seq_length 2", "max_seq_length=2 leaves no token"),
        # before WNLI runs
        ("--tasks wnli sst2 --preset NeoBERT-1024 --learning_rate 1e-3", "--grid or --preset sets per_device_train"),
        ("--save_steps 7", "save_steps is part of the paper's protocol"),
    ],
)
def test_arguments_that_would_have_no_effect_are_refused(model_folder, data, tmp_path, given, message, capsys):
    with pytest.raises(SystemExit) as ended:
        run_main(finetune_glue, *command(model_folder, data, tmp_path / "out", "--tasks", "sst2", *given.split()))
    assert message in f"{ended.value} {capsys.readouterr().err}"
    assert not list(tmp_path.glob("out/[!_]*"))


def test_the_schedule_and_the_evaluations_are_those_of_the_paper(model_folder, data, tmp_path, monkeypatch):
    """Warmup over 6 %, then linear decay to a tenth of the peak; an evaluation every min(500, batches // 10) steps."""
    made = []
    monkeypatch.setattr(glue_runs, "Trainer", lambda *a, **k: made.append(Recorded(*a, **k)) or made[-1])
    more = ["--tasks=sst2", "--learning_rate=1e-3", "--num_train_epochs=10", "--per_device_train_batch_size=2"]
    run_main(finetune_glue, *command(model_folder, data, tmp_path / "out", *more))
    (trainer,) = made
    steps, warmup = 200, 12
    for step, rate in enumerate(trainer.rates, 1):
        share = step / warmup if step < warmup else 1 - (step - warmup) / (steps - warmup)
        expected = 0.1 + 0.9 * share
        assert rate == pytest.approx(1e-3 * expected, rel=1e-6)
    assert trainer.args.eval_steps == 2 and trainer.args.max_steps == -1
    scores = [entry["eval_score"] for entry in trainer.state.log_history if "eval_score" in entry]
    best = scores.index(max(scores))
    assert len(scores) == best + 1 + 15 + 1  # stops after 15 without improvement, and evaluates the best one again


class Recorded(glue_runs.Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rates = []

    def training_step(self, *args, **kwargs):
        if self.state.global_step:
            self.rates.append(self.lr_scheduler.get_last_lr()[0])
        return super().training_step(*args, **kwargs)


def test_a_run_with_predictions_that_are_not_finite_has_no_weights(model_folder, data, tmp_path, monkeypatch):
    """It diverges at the second evaluation, after a checkpoint."""
    found = iter([{"accuracy": 50.0, "score": 50.0}])

    def diverged(*_):
        if first := next(found, None):
            return first
        assert list((tmp_path / "out").glob("checkpoint-*"))
        raise FloatingPointError

    monkeypatch.setattr(glue_runs, "task_metrics", diverged)
    training = glue_runs.GlueTrainingArguments(str(tmp_path / "out"), max_steps=2, eval_steps=1, use_cpu=True)
    task = TASKS["sst2"]
    assert glue_runs.fine_tune(task, load_task(task, data), str(model_folder), training) is None
    assert not list((tmp_path / "out").glob("*/*.safetensors"))


def test_a_classifier_of_another_task_keeps_the_layer_before_it(model_folder, data, tmp_path):
    arguments = command(model_folder, data, tmp_path / "out", "--tasks", "mnli", "rte", "--learning_rate", "0")
    run_main(finetune_glue, *arguments)
    mnli, rte = (
        AutoModelForSequenceClassification.from_pretrained(task["model"]).state_dict()
        for task in json.loads((tmp_path / "out/glue.json").read_text())["tasks"]
    )
    assert all((rte[name] == tensor).all() for name, tensor in mnli.items() if not name.startswith("classifier"))
    assert rte["classifier.weight"].shape[0] == 2 and "rte" in FROM_MNLI
