"""What a fit does is decided by its rows and arguments alone, before anything is trained."""

from types import SimpleNamespace

import numpy as np
import pytest

from neobert_hf.checkpoints import lora_config
from neobert_hf.finetuning.plan import plan_fit
from neobert_hf.finetuning.texts import MULTI, REGRESSION, SINGLE

MINI, LARGE = (SimpleNamespace(hidden_size=size, classifier_pooling="cls") for size in (384, 768))
ROWS = ["a", "a", "b", "b"]


def planned(labels=ROWS, kind=SINGLE, config=MINI, weights=None, is_held_out=True, is_new=True, **parameters):
    columns, held_out = [[str(i) for i in range(len(labels))], labels], [["new"], labels[:1]]
    parameters = {"adapter": None, "classifier_pooling": None, "head_first": None} | parameters
    return plan_fit(columns, held_out, weights, kind, 2, parameters, config, is_new, is_held_out)


@pytest.mark.parametrize(
    ("options", "head_first", "weak", "pooling", "epochs"),
    [
        ({}, True, True, "mean", 10),
        ({"labels": ["a", "b"] * 60}, True, True, "mean", 10),
        ({"labels": ["a", "b"] * 99, "is_held_out": False}, True, True, "mean", 10),
        ({"labels": ["a", "b"] * 200, "head_first": True, "is_held_out": False}, True, True, "mean", 6),
        ({"labels": ["a", "b"] * 600, "head_first": True}, True, True, "mean", 4),
        ({"labels": ["a", "b"] * 100}, False, False, None, 3),
        ({"is_new": False}, False, False, None, 3),
        ({"head_first": False}, False, False, None, 3),
        ({"classifier_pooling": "cls"}, True, True, "cls", 10),
        ({"config": LARGE}, True, False, "mean", 10),
        ({"adapter": lora_config("SEQ_CLS")}, True, False, None, 10),
        ({"kind": MULTI, "labels": [["a"], ["b"]]}, True, False, "mean", 10),
        ({"kind": REGRESSION, "labels": [1.5, 2.5]}, False, False, None, 3),
        ({"kind": REGRESSION, "labels": [1.5, 2.5], "head_first": True}, True, False, "mean", 10),
    ],
)
def test_the_last_layer_first_and_fewer_epochs_the_more_rows_there_are(options, head_first, weak, pooling, epochs):
    plan = planned(**options)
    assert (plan.is_head_first, plan.is_head_weak, plan.pooling, plan.epochs) == (head_first, weak, pooling, epochs)
    assert plan.best_metric == ("pearson" if options.get("kind") == REGRESSION else "f1")
    assert (plan.mean, plan.deviation) == ((2, 0.5) if options.get("kind") == REGRESSION else (0, 1))
    assert plan.has_short_steps == (not options.keys() & {"config", "adapter"})


@pytest.mark.parametrize(
    "options",
    [
        {"labels": ["a", "a", "b"]},  # a fold can hold out one class only
        {"is_held_out": False},
        {"head_first": False},
        {"weights": np.ones(4)},
        {"kind": MULTI, "labels": [["a"], ["a"], ["b"], ["b"]]},
    ],
    ids=str,
)
def test_held_out_rows_are_trained_on_if_a_cross_validation_can_give_the_metrics(options):
    plan = planned()
    assert plan.is_crossed and plan.validation is None and plan.columns == [[*"0123", "new"], [*ROWS, "a"]]
    other = planned(**options)
    assert not other.is_crossed and other.validation and "new" not in other.columns[0]


def test_an_adapter_learns_ten_times_as_fast():
    assert planned(adapter=lora_config("SEQ_CLS"), config=LARGE).learning_rate == pytest.approx(1e-4)
    assert planned().learning_rate is None
