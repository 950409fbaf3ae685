"""`PretrainingTrainer`: batch format and accumulation change nothing, figures are right, a loss that is not finite ends a run."""

import json
from collections import Counter
from itertools import count

import numpy as np
import pytest
import torch
from conftest import SENTENCE, packed_rows
from pretraining_runs import QUIET, RECIPES_OF_PAPER, SIZES, SMALL
from torch import nn
from transformers import set_seed

from neobert_hf import NeoBERTForMaskedLM, PackedMLMCollator
from neobert_hf.pretraining.arguments import PretrainingArguments
from neobert_hf.pretraining.packing import MixedRows
from neobert_hf.pretraining.recipes import RECIPES
from neobert_hf.pretraining.trainer import PretrainingTrainer
from neobert_hf.pretraining.training import build_model
from neobert_hf.runs import last_complete_checkpoint


@pytest.fixture
def documents(tokenizer):
    """Text in which each word determines the next word, so that a model can learn it."""
    tokens = tokenizer(SENTENCE, add_special_tokens=False)["input_ids"]
    rng = np.random.default_rng(0)
    starts, lengths = rng.integers(0, len(tokens), 400), rng.integers(3, 30, 400)
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    return [[cls, *(tokens[(a + i) % len(tokens)] for i in range(n)), sep] for a, n in zip(starts, lengths)]


@pytest.fixture
def trainer_of(tmp_path, tokenizer, documents, tiny_config):
    """A function that makes the trainer of a run of 10 steps with 8 rows each."""

    def make(model=None, **changes):
        options = dict(output_dir=str(tmp_path), save_strategy="no", tokens_per_step=512, **SIZES, **QUIET)
        args = PretrainingArguments(**{**options, "max_steps": 10, **changes})
        recipe, sizes = args.to_recipe(), dict(max_tokens=args.row_tokens, max_length=args.max_length)
        set_seed(0)
        tiny_config.sparse_prediction = True
        num_rows = args.max_steps * args.rows_per_step
        masking = dict(mlm_probability=recipe.mask_rate[0], batch_format=recipe.batch_format)
        data = {"train_dataset": packed_rows(documents, **sizes, num_rows=num_rows), "processing_class": tokenizer}
        data |= {"eval_dataset": packed_rows(documents[:40], **sizes, seed=9)}
        data |= {"data_collator": PackedMLMCollator(tokenizer, **masking)}
        made = model(recipe) if model else NeoBERTForMaskedLM(tiny_config)
        return PretrainingTrainer(made, args, recipe=recipe, **data)

    return make


def curve(trainer, name="loss"):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.slow
def test_packed_and_padded_training_follow_the_same_curve_and_concatenation_does_not(trainer_of):
    """Tolerance 1e-4 over 50 steps in fp32: packed and padded differ only by rounding; ten times that is another computation."""
    curves = {}
    for batch_format in ("packed", "padded", "concatenated"):
        trainer = trainer_of(batch_format=batch_format, max_steps=50, tokens_per_step=128)
        trainer.train()
        curves[batch_format] = np.array(curve(trainer))
    assert np.abs(curves["packed"] - curves["padded"]).max() < 1e-4
    assert np.abs(curves["packed"] - curves["concatenated"]).max() > 1e-3
    assert curves["packed"][-1] < curves["packed"][0] - 0.5  # the model learns


@pytest.mark.slow
@pytest.mark.compat
def test_batch_and_accumulation_give_the_same_curve(trainer_of):
    curves = []
    for batch in (1, 2, 8):
        trainer = trainer_of(per_device_train_batch_size=batch, max_steps=8)
        assert trainer.args.gradient_accumulation_steps == 8 // batch
        trainer.train()
        curves.append(np.array(curve(trainer)))
    assert max(np.abs(curves[0] - other).max() for other in curves[1:]) < 1e-4


@pytest.mark.slow
def test_the_trivial_accuracy_is_that_of_the_most_frequent_label_of_the_held_out_rows(trainer_of):
    trainer = trainer_of(eval_strategy="steps", eval_steps=5)
    trainer.train()
    rows = [trainer.data_collator([trainer.eval_dataset[number]]) for number in range(len(trainer.eval_dataset))]
    labels = Counter(label for row in rows for label in row["labels"].flatten().tolist() if label != -100)
    ((token, number),) = labels.most_common(1)
    found = [*curve(trainer, "eval_trivial_masked_accuracy"), trainer.evaluate()["eval_trivial_masked_accuracy"]]
    assert found == [number / labels.total()] * 3 and trainer.most_frequent == token


def test_logged_figures_equal_a_plain_pass_over_the_rows(trainer_of, tmp_path):
    """Figures: tokens, masked tokens, accuracy and loss. The learning rate is 0, so the weights do not change."""
    trainer = trainer_of(max_steps=2, learning_rate=0.0, logging_steps=2)
    trainer.train()
    model = trainer.model.eval()
    model.config.sparse_prediction = False
    entry = next(e for e in trainer.state.log_history if "loss" in e)
    num_tokens = num_masked = num_correct = 0
    step_losses = [[], []]
    for number in range(len(trainer.train_dataset)):
        row = trainer.data_collator([trainer.train_dataset[number]])
        with torch.no_grad():
            logits = model(input_ids=row["input_ids"], position_ids=row["position_ids"]).logits
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
    assert entry["tokens_per_s"] > 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0] == entry


def test_held_out_loss_is_the_mean_over_all_masked_tokens(trainer_of):
    trainer = trainer_of()
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


def test_weight_decay_applies_to_all_parameters_or_to_matrices_only(trainer_of):
    all_of_them = trainer_of()
    names = {name for name, _ in all_of_them.model.named_parameters()}
    assert set(all_of_them.get_decay_parameter_names(all_of_them.model)) == names
    some = trainer_of(decay_norms_and_embeddings=False)
    left_out = names - set(some.get_decay_parameter_names(some.model))
    assert left_out == {n for n in names if "norm" in n or n.endswith("bias") or n == "model.encoder.weight"}


def test_the_learning_rate_follows_the_schedule_of_the_recipe(trainer_of):
    trainer = trainer_of(tokens_per_step=64)
    trainer.train()
    recipe = trainer.recipe
    wanted = [recipe.learning_rate * recipe.learning_rate_factor(step) for step in range(10)]
    assert np.allclose(curve(trainer, "learning_rate"), wanted, rtol=1e-12)


def poison_loss(trainer):
    forward, calls = trainer.model.forward, count(1)

    def poisoned(**inputs):
        outputs = forward(**inputs)
        if next(calls) == 5 * 8 + 3:
            outputs.loss = outputs.loss * float("nan")
        return outputs

    trainer.model.forward = poisoned


def poison_gradient(trainer):
    factor = lambda: float("nan") if trainer.state.global_step == 5 else 1.0  # noqa: E731
    trainer.model.decoder.weight.register_hook(lambda gradient: gradient * factor())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "poison"), [("loss", poison_loss), ("gradient", poison_gradient)])
def test_a_loss_or_gradient_that_is_not_finite_stops_the_run_and_is_not_saved(trainer_of, tmp_path, name, poison):
    trainer = trainer_of(save_strategy="steps", save_steps=2, logging_steps=100)
    poison(trainer)
    words = rf"{name} was not finite in the optimizer steps 5 to 6; .*checkpoint-4"
    with pytest.raises(FloatingPointError, match=words):
        trainer.train()
    assert last_complete_checkpoint(tmp_path).name == "checkpoint-4"


def test_a_step_that_the_gradient_scaler_of_fp16_skips_does_not_end_the_run(trainer_of, monkeypatch):
    trainer = trainer_of(logging_steps=1, max_steps=4)
    factor = lambda: float("inf") if trainer.state.global_step == 2 else 1.0  # noqa: E731
    trainer.model.decoder.weight.register_hook(lambda gradient: gradient * factor())
    # the scaler, which runs on a GPU only, skips such a step
    was_skipped = property(lambda _: trainer.state.global_step == 3)
    monkeypatch.setattr(type(trainer.accelerator), "optimizer_step_was_skipped", was_skipped)
    # step 3 passes; without a scaler its update was not skipped, so that the loss of step 4 is not finite
    with pytest.raises(FloatingPointError, match="the loss was not finite in the optimizer steps 4 to 4"):
        trainer.train()


def test_a_step_draws_all_its_rows_from_one_part_with_the_papers_shares():
    """20 / 40 / 40 over 3,000 steps, within three standard deviations."""
    shares, num_steps = (0.2, 0.4, 0.4), 3000
    parts = [packed_rows([[part] * 5] * 7, 5, num_rows=num_steps * 4) for part in range(3)]
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


def test_m0_is_roberta_prelayernorm_and_learns_under_the_same_trainer(trainer_of, tokenizer):
    options = {"recipe": f"{RECIPES_OF_PAPER}/m0.yaml", "max_steps": 4}
    trainer = trainer_of(lambda recipe: build_model(recipe, tokenizer, SMALL), **options)
    assert trainer.model.config.model_type == "roberta-prelayernorm"
    trainer.train()
    losses = curve(trainer)
    assert losses[-1] < losses[0] and abs(losses[0] - np.log(len(tokenizer))) < 0.5  # a mean over masked tokens


@pytest.mark.slow
def test_a_second_training_has_a_schedule_of_its_own(trainer_of):
    trainer = trainer_of(max_steps=3)
    trainer.train()
    rates = curve(trainer, "learning_rate")
    trainer.train()
    assert curve(trainer, "learning_rate") == rates


def test_an_unknown_or_invalid_config_override_is_refused(tokenizer):
    with pytest.raises(ValueError, match="config_overrides='hidden_sise=64': key"):
        build_model(RECIPES["paper"], tokenizer, "hidden_sise=64")
    with pytest.raises(ValueError, match="hidden_size=65"):
        build_model(RECIPES["paper"], tokenizer, "hidden_size=65")
