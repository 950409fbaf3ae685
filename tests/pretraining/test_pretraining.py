"""Pretraining: batch format, accumulation and interruptions do not change the loss curve; NaN stops a run; both phases run."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import corpus as corpus_script
import numpy as np
import pretrain_mlm
import psutil
import pytest
import torch
from conftest import SENTENCE, run_main
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerFast, set_seed

from neobert_hf import NeoBERTForMaskedLM, PackedMLMCollator, cli
from neobert_hf.data.packing import MixedRows, PackedRows
from neobert_hf.data.plans import PACKING
from neobert_hf.data.wordpiece import train_wordpiece
from neobert_hf.pretraining.arguments import CorpusArguments, PretrainingArguments
from neobert_hf.pretraining.recipes import RECIPES
from neobert_hf.pretraining.trainer import PretrainingTrainer, build_model
from neobert_hf.runs.folders import begin_or_resume, last_complete_checkpoint
from neobert_hf.runs.manifests import write_manifest

SMALL = "hidden_size=64,num_hidden_layers=2,num_attention_heads=2,intermediate_size=96"


def arguments(folder, **changes):
    defaults = dict(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        max_steps=10,
        warmup_steps=2,
        learning_rate=3e-3,
        max_length=32,
        row_tokens=64,
        tokens_per_step=512,
    )
    return PretrainingArguments(**{**defaults, **changes})


@pytest.fixture
def documents(tokenizer):
    """Text in which each word determines the next word, so that a model can learn it."""
    tokens = tokenizer(SENTENCE, add_special_tokens=False)["input_ids"]
    rng = np.random.default_rng(0)
    starts, lengths = rng.integers(0, len(tokens), 400), rng.integers(3, 30, 400)
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    return [[cls, *(tokens[(a + i) % len(tokens)] for i in range(n)), sep] for a, n in zip(starts, lengths)]


def trainer_for(folder, tokenizer, documents, tiny_config, **changes):
    args = arguments(folder, **changes)
    recipe = args.to_recipe()
    set_seed(0)
    tiny_config.sparse_prediction = True
    rows = PackedRows(
        documents,
        list(map(len, documents)),
        args.row_tokens,
        args.max_length,
        num_rows=args.max_steps * args.rows_per_step,
    )
    masking = dict(mlm_probability=recipe.mlm_probability, batch_format=recipe.batch_format)
    return PretrainingTrainer(
        NeoBERTForMaskedLM(tiny_config),
        args,
        recipe=recipe,
        train_dataset=rows,
        eval_dataset=PackedRows(
            documents[:40], list(map(len, documents[:40])), args.row_tokens, args.max_length, seed=9
        ),
        data_collator=PackedMLMCollator(tokenizer, **masking),
        processing_class=tokenizer,
    )


def curve(trainer, name="loss"):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_packed_and_padded_training_follow_the_same_curve_and_concatenation_does_not(
    tokenizer, documents, tiny_config, tmp_path
):
    """Tolerance 1e-4 over 50 steps in fp32: packed and padded differ only by rounding."""
    curves = {}
    for batch_format in ("packed", "padded", "concatenated"):
        trainer = trainer_for(tmp_path, tokenizer, documents, tiny_config, batch_format=batch_format, max_steps=50)
        trainer.train()
        curves[batch_format] = np.array(curve(trainer))
    assert np.abs(curves["packed"] - curves["padded"]).max() < 1e-4
    assert np.abs(curves["packed"] - curves["concatenated"]).max() > 1e-2
    assert curves["packed"][-1] < curves["packed"][0] - 0.5  # the model learns


@pytest.mark.compat
def test_batch_and_accumulation_give_the_same_curve(tokenizer, documents, tiny_config, tmp_path):
    curves = []
    for batch in (1, 2, 8):
        changes = dict(per_device_train_batch_size=batch, max_steps=8)
        trainer = trainer_for(tmp_path, tokenizer, documents, tiny_config, **changes)
        assert trainer.args.gradient_accumulation_steps == 8 // batch
        trainer.train()
        curves.append(np.array(curve(trainer)))
    assert max(np.abs(curves[0] - other).max() for other in curves[1:]) < 1e-4


def test_logged_figures_equal_a_plain_pass_over_the_rows(tokenizer, documents, tiny_config, tmp_path):
    """Figures: tokens, masked tokens, accuracy and loss. The learning rate is 0, so the weights do not change."""
    trainer = trainer_for(tmp_path, tokenizer, documents, tiny_config, max_steps=2, learning_rate=0.0, logging_steps=2)
    model = NeoBERTForMaskedLM(tiny_config)
    model.load_state_dict(trainer.model.state_dict())
    model.config.sparse_prediction = False
    trainer.train()
    entry = next(e for e in trainer.state.log_history if "loss" in e)
    num_tokens = num_masked = num_correct = 0
    step_losses = [[], []]
    for number in range(len(trainer.train_dataset)):
        row = trainer.data_collator([trainer.train_dataset[number]])
        with torch.no_grad():
            logits = model.eval()(input_ids=row["input_ids"], position_ids=row["position_ids"]).logits
        is_masked = row["labels"] != -100
        wanted = row["labels"][is_masked]
        num_tokens += row["labels"].numel()
        num_masked += len(wanted)
        num_correct += int((logits[is_masked].argmax(-1) == wanted).sum())
        step_losses[number // 8] += nn.functional.cross_entropy(logits[is_masked], wanted, reduction="none").tolist()
    assert (entry["num_tokens"], entry["num_masked"]) == (num_tokens, num_masked)
    assert entry["masked_accuracy"] == num_correct / num_masked
    assert abs(entry["loss"] - np.mean([np.mean(losses) for losses in step_losses])) < 1e-5
    assert abs(entry["perplexity"] / np.exp(entry["loss"]) - 1) < 1e-9
    assert 0 < entry["model_flops_utilization"] < 1 and entry["tokens_per_s"] > 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0] == entry


def test_held_out_loss_is_the_mean_over_all_masked_tokens(tokenizer, documents, tiny_config, tmp_path):
    trainer = trainer_for(tmp_path, tokenizer, documents, tiny_config)
    metrics = trainer.evaluate()
    losses, correct = [], []
    model = trainer.model
    for number in range(len(trainer.eval_dataset)):
        row = trainer.data_collator([trainer.eval_dataset[number]])
        with torch.no_grad():
            outputs = model(**row)
        labels = row["labels"][row["labels"] != -100]
        losses += nn.functional.cross_entropy(outputs.logits, labels, reduction="none").tolist()
        correct += (outputs.logits.argmax(-1) == labels).tolist()
    assert abs(metrics["eval_loss"] - np.mean(losses)) < 1e-5
    assert metrics["eval_masked_accuracy"] == np.mean(correct)


def test_weight_decay_applies_to_all_parameters_or_to_matrices_only(tokenizer, documents, tiny_config, tmp_path):
    every = trainer_for(tmp_path, tokenizer, documents, tiny_config)
    names = {name for name, _ in every.model.named_parameters()}
    assert set(every.get_decay_parameter_names(every.model)) == names
    some = trainer_for(tmp_path, tokenizer, documents, tiny_config, decay_norms_and_embeddings=False)
    left_out = names - set(some.get_decay_parameter_names(some.model))
    assert left_out == {n for n in names if "norm" in n or n.endswith("bias") or n == "model.encoder.weight"}


def test_the_learning_rate_follows_the_schedule_of_the_recipe(tokenizer, documents, tiny_config, tmp_path):
    trainer = trainer_for(tmp_path, tokenizer, documents, tiny_config)
    trainer.train()
    recipe = trainer.recipe
    wanted = [recipe.learning_rate * recipe.learning_rate_factor(step) for step in range(10)]
    assert np.allclose(curve(trainer, "learning_rate"), wanted, rtol=1e-12)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(
    tokenizer, documents, tiny_config, tmp_path
):
    trainer = trainer_for(
        tmp_path, tokenizer, documents, tiny_config, save_strategy="steps", save_steps=2, logging_steps=100
    )
    forward, calls = trainer.model.forward, 0

    def poisoned(**inputs):
        nonlocal calls
        calls += 1
        outputs = forward(**inputs)
        if calls == 5 * 8 + 3:  # the third row of the sixth step
            outputs.loss = outputs.loss * float("nan")
        return outputs

    trainer.model.forward = poisoned
    with pytest.raises(FloatingPointError, match=r"optimizer step 6; the last good checkpoint is .*checkpoint-4"):
        trainer.train()
    assert last_complete_checkpoint(tmp_path).name == "checkpoint-4"


def test_a_gradient_that_is_not_finite_is_not_saved(tokenizer, documents, tiny_config, tmp_path):
    trainer = trainer_for(
        tmp_path, tokenizer, documents, tiny_config, save_strategy="steps", save_steps=2, logging_steps=100
    )

    def poison(gradient):
        return gradient * (float("nan") if trainer.state.global_step == 5 else 1.0)

    trainer.model.decoder.weight.register_hook(poison)
    with pytest.raises(FloatingPointError, match=r"gradient was not finite in optimizer step 6; .*checkpoint-4"):
        trainer.train()
    assert last_complete_checkpoint(tmp_path).name == "checkpoint-4"


def test_a_step_that_the_gradient_scaler_of_fp16_skips_does_not_end_the_run(
    tokenizer, documents, tiny_config, tmp_path, monkeypatch
):
    trainer = trainer_for(tmp_path, tokenizer, documents, tiny_config, logging_steps=1, max_steps=4)
    trainer.model.decoder.weight.register_hook(
        lambda gradient: gradient * (float("inf") if trainer.state.global_step == 2 else 1.0)
    )
    # the scaler, which runs on a GPU only, skips such a step
    monkeypatch.setattr(
        type(trainer.accelerator), "optimizer_step_was_skipped", property(lambda _: trainer.state.global_step == 3)
    )
    # step 3 passes; without a scaler its update was not skipped, so that the loss of step 4 is not finite
    with pytest.raises(FloatingPointError, match="the loss was not finite in optimizer step 4"):
        trainer.train()


def test_last_complete_checkpoint_ignores_partial_checkpoints(tmp_path):
    for step, content in {2: '{"global_step": 2}', 4: '{"global_step": 4}', 6: '{"global_st', 8: None}.items():
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if content is not None:
            (folder / "trainer_state.json").write_text(content)
            write_manifest(folder)
    assert last_complete_checkpoint(tmp_path).name == "checkpoint-4"
    assert last_complete_checkpoint(tmp_path / "nothing") is None


def test_a_run_resumes_only_from_its_own_checkpoints(tmp_path):
    run = {"recipe": {"learning_rate": 1e-3}, "seed": 0}
    assert begin_or_resume(tmp_path, run, None) is None
    with pytest.raises(FileNotFoundError, match="holds no complete checkpoint"):
        begin_or_resume(tmp_path, run, "last")
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2/trainer_state.json").write_text('{"global_step": 2}')
    write_manifest(tmp_path / "checkpoint-2")
    with pytest.raises(
        FileExistsError, match=r"holds checkpoint-2 and no resume .*; give --resume_from_checkpoint last"
    ):
        begin_or_resume(tmp_path, run, None)
    assert begin_or_resume(tmp_path, run, "last").name == "checkpoint-2"
    with pytest.raises(ValueError, match="belongs to another run: seed was 0 and is 1"):
        begin_or_resume(tmp_path, {**run, "seed": 1}, "last")


def test_a_step_draws_all_its_rows_from_one_part_with_the_papers_shares():
    """20 / 40 / 40 over 3,000 steps, within three standard deviations."""
    shares, num_steps = (0.2, 0.4, 0.4), 3000
    parts = [PackedRows([[part] * 5] * 7, [5] * 7, 5, num_rows=num_steps * 4) for part in range(3)]
    rows = MixedRows(parts, shares, rows_per_step=4, num_steps=num_steps, seed=1)
    assert len(rows) == num_steps * 4
    for step in range(50):
        assert {rows[step * 4 + i]["input_ids"][0] for i in range(4)} == {rows.draws[step]}
    for part, share in enumerate(shares):
        deviation = (share * (1 - share) / num_steps) ** 0.5
        assert abs((rows.draws == part).mean() - share) < 3 * deviation
    # the steps of one part read its rows in order and leave out none
    seen = [rows[step * 4 + i]["mask_seed"] for step in np.flatnonzero(rows.draws == 1)[:5] for i in range(4)]
    assert seen == [parts[1][number]["mask_seed"] for number in range(20)]


def test_memory_is_pinned_for_cuda_only(tmp_path):
    assert arguments(tmp_path, use_cpu=False).dataloader_pin_memory == torch.cuda.is_available()
    assert not arguments(tmp_path).dataloader_pin_memory


def test_m0_is_roberta_prelayernorm_and_learns_under_the_same_trainer(tokenizer, documents, tmp_path):
    args = arguments(tmp_path, recipe="m0", max_steps=4)
    shape = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=96)
    overrides = ",".join(f"{name}={value}" for name, value in shape.items())
    set_seed(0)
    model = build_model(args.to_recipe(), tokenizer, overrides)
    assert model.config.model_type == "roberta-prelayernorm"
    rows = PackedRows(documents, list(map(len, documents)), 64, 32, num_rows=4 * args.rows_per_step)
    collator = PackedMLMCollator(tokenizer, batch_format="padded")
    trainer = PretrainingTrainer(model, args, recipe=args.to_recipe(), train_dataset=rows, data_collator=collator)
    trainer.train()
    losses = curve(trainer)
    assert losses[-1] < losses[0] and abs(losses[0] - np.log(len(tokenizer))) < 0.5  # a mean over masked tokens


def test_an_unknown_or_invalid_config_override_is_refused(tokenizer):
    with pytest.raises(ValueError, match="hidden_sise"):
        build_model(RECIPES["paper"], tokenizer, "hidden_sise=64")
    with pytest.raises(ValueError, match="hidden_size=65"):
        build_model(RECIPES["paper"], tokenizer, "hidden_size=65")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "papr"}, "recipe='papr' is not one of paper, code"),
        ({"tokens_per_step": 500}, "tokens_per_step=500 is not a multiple of row_tokens=64"),
        ({"gradient_accumulation_steps": 3}, "contradicts tokens_per_step=512, which requires 8"),
        ({"phase": 2}, "phase 2 requires init_from, phase 1 refuses it"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **changes)


@pytest.mark.parametrize("has_instructions", [False, True])
def test_auto_precision_follows_the_machine_unless_the_user_chooses(tmp_path, monkeypatch, has_instructions):
    monkeypatch.setenv("NEOBERT_CPU_BF16", str(int(has_instructions)))
    assert arguments(tmp_path, auto_precision=True).bf16 is has_instructions
    assert arguments(tmp_path, auto_precision=True, bf16=True).bf16 and not arguments(tmp_path).bf16


# Runs of examples/pretrain_mlm.py.


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, tokenizer):
    """A folder with text files, a tokenizer and, after the first run, shards; all runs below use it."""
    folder = tmp_path_factory.mktemp("corpus")
    words = SENTENCE.split()
    rng = np.random.default_rng(0)
    for name, count in {"train": 600, "held_out": 60}.items():
        lines = []
        for start, length in zip(rng.integers(0, len(words), count), rng.integers(3, 60, count)):
            lines.append(json.dumps({"text": " ".join(words[(start + i) % len(words)] for i in range(length))}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder


def command(corpus, folder, **changes):
    options = dict(
        train_files=corpus / "train.jsonl",
        validation_files=corpus / "held_out.jsonl",
        tokenizer_name=corpus / "tokenizer",
        shards_dir=corpus / "shards",
        output_dir=folder,
        config_overrides=SMALL,
        max_steps=12,
        warmup_steps=2,
        learning_rate=3e-3,
        max_length=32,
        row_tokens=64,
        tokens_per_step=256,
        logging_steps=1,
        save_steps=4,
        eval_strategy="no",
        report_to="none",
        use_cpu=True,
        num_processes=1,
        disable_tqdm=True,
    )
    options = {name: value for name, value in {**options, **changes}.items() if value is not None}
    return [
        str(part)
        for name, value in options.items()
        for part in (f"--{name}", *(value if isinstance(value, list) else [value]))
    ]


def run(*args, **changes):
    run_main(pretrain_mlm, *command(*args, **changes))
    return losses_of(args[1])


def start(*args, **changes):
    """Start the command in another process, which a signal can end."""
    options = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests in the background ignore it
    return subprocess.Popen([sys.executable, pretrain_mlm.__file__, *command(*args, **changes)], **options)


def losses_of(folder):
    entries = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return {entry["step"]: entry["loss"] for entry in entries if "loss" in entry}


@pytest.mark.parametrize("streaming", [False, True])
def test_a_killed_run_resumes_to_the_same_losses_bitwise(corpus, tmp_path, streaming):
    """SIGKILL after the sixth step; the folder also holds a partial checkpoint."""
    changes = dict(streaming=streaming, num_held_out=None, max_steps=40)  # the kill comes before the last step
    whole = run(corpus, tmp_path / "whole", **changes)
    assert sorted(whole) == list(range(1, 41))
    folder = tmp_path / "killed"
    process = start(corpus, folder, **changes)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "metrics.jsonl").exists() and len((folder / "metrics.jsonl").read_text().splitlines()) >= 6:
            process.kill()
        time.sleep(0.002)
    process.wait()
    assert process.returncode == -signal.SIGKILL, process.stderr.read()[-2000:]
    cut = last_complete_checkpoint(folder)
    assert cut is not None
    half = folder / "checkpoint-39"  # the state after a kill during a save
    shutil.copytree(cut, half)
    (half / "trainer_state.json").unlink()
    (half / "model.safetensors").write_bytes(b"half")
    resumed = run(corpus, folder, resume_from_checkpoint="last", **changes)
    assert resumed == whole


@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_that_resumes_after_its_last_step_only_saves_the_model(corpus, tmp_path, streaming):
    """The run was killed between its last checkpoint and the save of the model."""
    losses = run(corpus, tmp_path, streaming=streaming)
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").unlink()
    assert run(corpus, tmp_path, streaming=streaming, resume_from_checkpoint="last") == losses
    assert (tmp_path / "model.safetensors").read_bytes() == weights
    assert not (tmp_path / "checkpoint-13").exists()


def test_a_pickled_stream_yields_the_same_rows(corpus, tokenizer, tmp_path):
    """A DataLoader that spawns its workers pickles the stream."""
    data = CorpusArguments(train_files=[str(corpus / "train.jsonl")], streaming=True)
    stream, _ = pretrain_mlm.open_stream(data, arguments(tmp_path), tokenizer)
    again = pickle.loads(pickle.dumps(stream))
    assert list(islice(again, 5)) == list(islice(stream, 5))


def test_more_workers_than_files_of_a_stream_are_refused(corpus, tokenizer, tmp_path):
    """`datasets` stops the workers without a file, and the run would end before its last step."""
    data = CorpusArguments(
        train_files=[str(corpus / f"{name}.jsonl") for name in ("train", "held_out")], streaming=True
    )
    with pytest.raises(
        ValueError, match=r"dataloader_num_workers=3 is above num_shards=2, .* --dataloader_num_workers 2"
    ):
        pretrain_mlm.open_stream(data, arguments(tmp_path, dataloader_num_workers=3), tokenizer)
    training = arguments(tmp_path, dataloader_num_workers=2)
    stream, _ = pretrain_mlm.open_stream(data, training, tokenizer)
    rows = DataLoader(stream, batch_size=None, num_workers=2)
    assert sum(1 for _ in rows) == training.max_steps * training.rows_per_step


def test_one_process_of_a_machine_compares_finished_shards_with_the_corpus(corpus, tokenizer, tmp_path, monkeypatch):
    data = CorpusArguments(train_files=[str(corpus / "train.jsonl")], num_processes=1)
    recipe, opened = arguments(tmp_path).to_recipe(), []

    def open_shards(process, num_processes, folder=tmp_path / "shards"):
        numbers = dict(world_size=num_processes, process_index=process, local_process_index=process)
        training = SimpleNamespace(**numbers, to_recipe=lambda: recipe)
        return pretrain_mlm.open_shards(data, training, tokenizer, data.train_files, folder)

    written = open_shards(0, 1)
    open_corpus = pretrain_mlm.open_corpus
    monkeypatch.setattr(pretrain_mlm, "open_corpus", lambda *args: opened.append(1) or open_corpus(*args))
    assert [len(open_shards(process, 3)) for process in (0, 1, 2)] == [len(written)] * 3
    assert len(opened) == 1
    with pytest.raises(ValueError, match="holds no shards; tokenize before"):
        open_shards(1, 3, tmp_path / "none")


@pytest.mark.parametrize(
    ("number", "status", "num_workers"), [(signal.SIGTERM, 143, 0), (signal.SIGTERM, 143, 1), (signal.SIGINT, 130, 1)]
)
def test_sigterm_and_ctrl_c_save_a_checkpoint_before_the_run_ends(corpus, tmp_path, number, status, num_workers):
    """Schedulers and terminals send them to the workers of the data too."""
    folder = tmp_path / "stopped"
    options = dict(max_steps=100_000, save_steps=100_000, dataloader_num_workers=num_workers)
    process = start(corpus, folder, **options)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (folder / "metrics.jsonl").exists():
        time.sleep(0.05)
    while time.monotonic() < deadline and len((folder / "metrics.jsonl").read_text().splitlines()) < 3:
        time.sleep(0.05)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= num_workers
    for each in (*(worker.pid for worker in workers), process.pid):
        os.kill(each, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors[-2000:]
    checkpoint = last_complete_checkpoint(folder)
    assert checkpoint is not None and b"--resume_from_checkpoint last resumes here" in errors
    assert int(checkpoint.name.rpartition("-")[2]) >= 3


@pytest.mark.compat
def test_both_phases_run_and_auto_model_loads_the_result(corpus, tmp_path):
    first = run(corpus, tmp_path / "one", eval_strategy="steps", eval_steps=6)
    longer = dict(
        phase=2, init_from=tmp_path / "one", max_steps=6, warmup_steps=None, config_overrides=None, max_length=64
    )
    second = run(corpus, tmp_path / "two", longer_than=[24, 40], **longer)
    assert second[1] < first[1] - 0.5  # phase 2 starts from the model of phase 1
    summary = json.loads((tmp_path / "two/training_summary.json").read_text())
    assert summary["phase"] == 2 and summary["recipe"]["mixture"] == [0.2, 0.4, 0.4]
    assert summary["steps"] == 6 and 0 < summary["eval_masked_accuracy"] <= 1
    assert (tmp_path / "two/training_curves.png").stat().st_size > 10_000
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "two")
    assert model.config.max_position_embeddings == 64 and not model.config.sparse_prediction


def test_phase_2_without_validation_files_holds_out_the_documents_of_phase_1_or_is_refused(corpus, tmp_path):
    options = dict(validation_files=None, num_held_out=20, shards_dir=tmp_path / "shards", max_steps=2, warmup_steps=0)
    run(corpus, tmp_path / "one", **options)
    options |= dict(phase=2, init_from=tmp_path / "one", warmup_steps=None, config_overrides=None, longer_than=[8, 16])
    num_plans = len(list((tmp_path / "shards/plans").iterdir()))
    with pytest.raises(
        SystemExit, match="may have trained on the documents that are held out here: seed was 42 and is 5"
    ):
        run(corpus, tmp_path / "two", **options, seed=5)
    assert len(list((tmp_path / "shards/plans").iterdir())) == num_plans
    run(corpus, tmp_path / "two", **options)


def test_both_phases_train_on_the_documentation_of_this_python(tmp_path, monkeypatch):
    """The commands of the README, with a tiny model and one installed package; phase 2 has the paper's lengths."""
    monkeypatch.setattr(corpus_script.sysconfig, "get_path", lambda name: str(tmp_path))  # the standard library alone
    run_main(corpus_script, "--output_dir", tmp_path, "--vocab_size", "4096")
    options = ("--output_dir", tmp_path / "shards", "--tokenizer_name", tmp_path / "tokenizer")
    run_main(cli, "tokenize", *options, "--files", tmp_path / "train.jsonl")
    options = dict(num_processes=None, row_tokens=4096, tokens_per_step=4096, save_steps=100, report_to=None)
    first = run(tmp_path, tmp_path / "one", max_length=1024, **options)
    longer = dict(phase=2, init_from=tmp_path / "one", max_length=4096, warmup_steps=None, config_overrides=None)
    second = run(tmp_path, tmp_path / "two", **longer, **options)
    assert second[12] < first[12] < first[1]
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "two")
    assert model.config.max_position_embeddings == 4096
    assert list(tmp_path.glob("one/**/events.out.tfevents*"))  # TensorBoard is the default


def test_m3_trains_with_a_bpe_tokenizer_that_has_no_mask_token(corpus, tmp_path):
    """LLaMA's tokenizer has no mask, padding or separator token, and adds one token at the start."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False)
    bpe.train_from_iterator([SENTENCE] * 20, trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(tmp_path / "bpe")
    options = ("--output_dir", tmp_path / "shards", "--tokenizer_name", tmp_path / "bpe")
    run_main(cli, "tokenize", *options, "--files", corpus / "train.jsonl")
    names = dict(recipe="m3", tokenizer_name=tmp_path / "bpe", shards_dir=tmp_path / "shards")
    losses = run(corpus, tmp_path / "run", **names)
    assert losses[12] < losses[1] - 0.5
    saved = AutoTokenizer.from_pretrained(tmp_path / "run")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "run")
    assert saved.mask_token == "[MASK]" and saved.pad_token == "[PAD]"
    assert model.config.vocab_size == len(saved) and model.config.pad_token_id == saved.pad_token_id


def test_a_resume_with_other_values_is_refused(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("NEOBERT_TRACEBACK", "1")
    run(corpus, tmp_path / "run", max_steps=4)
    train_wordpiece(["other words to learn from"] * 9, vocab_size=64).save_pretrained(tmp_path / "other")
    for changes, message in (
        ({"learning_rate": 1e-3}, "belongs to another run: recipe was"),
        ({"config_overrides": SMALL.replace("=96", "=128")}, "belongs to another run: config was"),
        ({"config_overrides": "rope_theta=500"}, "config_overrides='rope_theta=500': .*; give numbers of the config"),
        ({"config_overrides": "hidden_size"}, "config_overrides='hidden_size': .*; give numbers of the config"),
        ({"max_length": 4097}, "max_length=4097, but documents were cut at 4096 tokens when they were tokenized"),
        ({"ignore_data_skip": True}, "ignore_data_skip begins with the first rows again after a resume"),
        ({"tokenizer_name": tmp_path / "other"}, "shards of something else: tokenizer is"),
    ):
        with pytest.raises(ValueError, match=message):
            run(corpus, tmp_path / "run", **dict(max_steps=4, resume_from_checkpoint="last") | changes)
    with pytest.raises(ValueError, match="bogus"):
        run(corpus, tmp_path / "run", max_steps=4, bogus=1)


def test_training_stores_its_plan_next_to_the_shards_and_refuses_a_resume_with_another_order_of_rows(corpus, tmp_path):
    """A stored plan and a rebuilt plan give the same losses, also in a resumed run."""
    options = dict(shards_dir=tmp_path / "shards", max_steps=8)
    losses = run(corpus, tmp_path / "one", **options)
    (plan,) = (tmp_path / "shards/plans").glob("*/plan.json")
    made = plan.stat().st_mtime_ns
    assert run(corpus, tmp_path / "two", **options) == losses and plan.stat().st_mtime_ns == made
    shutil.rmtree(plan.parent)
    shutil.rmtree(tmp_path / "two/checkpoint-8")
    assert run(corpus, tmp_path / "two", **options, resume_from_checkpoint="last") == losses and plan.exists()
    with pytest.raises(SystemExit, match="no resume from this folder was requested"):
        run(corpus, tmp_path / "two", **options, seed=5)
    assert len(list((tmp_path / "shards/plans").iterdir())) == 1  # no plan for a run that is refused
    file = tmp_path / "two/run.json"
    identity = json.loads(file.read_text())
    assert identity.pop("packing") == PACKING
    file.write_text(json.dumps(identity))
    with pytest.raises(SystemExit, match=r"rows have another order \(packing version 1"):
        run(corpus, tmp_path / "two", **options, resume_from_checkpoint="last")
