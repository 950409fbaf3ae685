"""Arguments of fine-tuning: a learning rate for the size of the model, and a loss that is logged often enough."""

import pytest
import torch
import transformers
from glue import TABLE_6
from transformers import TrainerState

from neobert_hf import NeoBERTConfig
from neobert_hf.runs.arguments import FineTuningArguments, default_learning_rate


@pytest.fixture
def arguments(tmp_path):
    return FineTuningArguments(output_dir=str(tmp_path), use_cpu=True)


@pytest.mark.compat
def test_any_run_logs_its_loss_at_least_20_times_or_in_every_step(arguments):
    for num_steps in range(1, 2000):
        state = TrainerState()
        state.compute_steps(arguments, num_steps)
        assert min(20, num_steps) <= num_steps // state.logging_steps <= 40


def test_the_learning_rate_is_chosen_by_the_size_of_the_model_unless_it_is_given(arguments, tmp_path, capsys):
    small = NeoBERTConfig(hidden_size=256, num_attention_heads=4)
    arguments.choose_learning_rate(small)
    assert arguments.learning_rate == 3e-4
    assert capsys.readouterr().out == "learning_rate=0.0003 for hidden_size=256, 16 rows a batch\n"
    given = FineTuningArguments(output_dir=str(tmp_path), use_cpu=True, learning_rate=1e-3)
    given.choose_learning_rate(small)
    assert given.learning_rate == 1e-3 and not capsys.readouterr().out


@pytest.mark.parametrize("given, length, rows", [(0, 100, 16), (0, 30, 21), (0, 10, 32), (8, 10, 8), (64, 10, 64)])
def test_a_step_of_short_texts_has_more_rows_and_the_rate_of_their_number_unless_given(tmp_path, given, length, rows):
    arguments = FineTuningArguments(output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=given)
    arguments.choose_batch(length)
    arguments.choose_learning_rate(NeoBERTConfig(hidden_size=256, num_attention_heads=4))
    assert arguments.per_device_train_batch_size == arguments.train_batch_size == rows
    assert arguments.learning_rate == pytest.approx(3e-4 * (1 if given else (rows / 16) ** 0.5))


def test_the_loss_chooses_the_best_epoch_of_few_validation_rows_unless_a_metric_is_given(arguments, tmp_path, capsys):
    arguments.choose_metric(100, "pearson")
    assert (arguments.metric_for_best_model, arguments.greater_is_better) == ("pearson", True)
    arguments.choose_metric(99, "pearson")
    assert (arguments.metric_for_best_model, arguments.greater_is_better) == ("loss", False)
    arguments.choose_metric(100, "accuracy")
    assert (arguments.metric_for_best_model, arguments.greater_is_better) == ("accuracy", True)
    squares = FineTuningArguments(output_dir=str(tmp_path), use_cpu=True, metric_for_best_model="mse")
    assert squares.greater_is_better is False
    assert capsys.readouterr().out == "the loss chooses the best epoch: 99 validation rows are too few for pearson\n"
    given = FineTuningArguments(output_dir=str(tmp_path), use_cpu=True, metric_for_best_model="accuracy")
    given.choose_metric(4)
    assert given.metric_for_best_model == "accuracy" and given.greater_is_better and not capsys.readouterr().out


# not in all versions of transformers 5
HAS_STRATEGY = hasattr(transformers.TrainingArguments, "train_sampling_strategy")
GROUPED = {"train_sampling_strategy": "group_by_length"} if HAS_STRATEGY else {"group_by_length": True}


@pytest.mark.compat
@pytest.mark.parametrize("options", [GROUPED, {"dataloader_drop_last": True}, {"use_liger_kernel": True}])
def test_options_that_reorder_or_drop_rows_of_a_prediction_or_have_no_effect_are_refused(tmp_path, options):
    reason = "change the order or the number of predictions too; remove them|liger-kernel has no kernels for NeoBERT"
    with pytest.raises(ValueError, match=reason):
        FineTuningArguments(output_dir=str(tmp_path), use_cpu=True, **options)


def test_the_learning_rate_of_the_published_model_is_within_the_papers_rates():
    rates = [rate for columns in TABLE_6.values() for _, rate, _ in columns]
    assert min(rates) < default_learning_rate(NeoBERTConfig(hidden_size=768)) < max(rates)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory is pinned for an accelerator")
def test_a_machine_without_an_accelerator_pins_no_memory(tmp_path):
    assert not FineTuningArguments(output_dir=str(tmp_path)).dataloader_pin_memory
