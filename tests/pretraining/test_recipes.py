"""Recipes hold the paper's values; the schedule meets every corner and scales with the number of steps."""

import math
from pathlib import Path

import pytest

from neobert_hf.pretraining.arguments import PretrainingArguments
from neobert_hf.pretraining.recipes import RECIPES, Recipe, load_recipe

SHARES = "must sum to 1, with a share for each of mask_rate"
ABLATIONS = Path(__file__).parents[2] / "examples/paper/recipes"


# (step, share of the peak), computed by hand from the paper's section 3.3 and from the formula of the authors' code.
CORNERS = {
    "paper": [(0, 0.0), (1_000, 0.5), (2_000, 1.0), (451_000, 0.55), (900_000, 0.1), (10**6, 0.1), (2 * 10**6, 0.1)],
    "code": [(0, 1e-4), (1_000, 0.50005), (2_000, 1.0), (452_000, 0.55), (900_000, 0.1), (1_000_000, 0.1)],
    # 1 - sqrt of the share of the decay that has passed
    "wsd": [(0, 0.0), (1_000, 0.5), (2_000, 1.0), (900_000, 1.0), (925_000, 0.5), (1_000_000, 0.0), (2_000_000, 0.0)],
    "linear": [(0, 0.0), (1_000, 0.5), (2_000, 1.0), (501_000, 0.5), (1_000_000, 0.0)],
}


@pytest.mark.parametrize("name, step, share", [(n, *corner) for n, corners in CORNERS.items() for corner in corners])
def test_the_schedule_meets_its_corners(name, step, share):
    recipe = RECIPES["code" if name == "code" else "paper"].replace(schedule=name)
    assert math.isclose(recipe.learning_rate_factor(step), share, rel_tol=1e-12, abs_tol=1e-12)


def test_mask_rates_follow_one_another_for_their_shares_of_the_steps():
    recipe = Recipe(mask_rate=(0.3, 0.15, 0.05)).replace(max_steps=10)
    assert [recipe.mask_rate_at(step) for step in range(11)] == [0.3] * 3 + [0.15] * 4 + [0.05] * 4
    recipe = recipe.replace(mask_rate_shares=(0.7, 0.2, 0.1))
    assert [recipe.mask_rate_at(step) for step in range(10)] == [0.3] * 7 + [0.15] * 2 + [0.05]
    assert Recipe(mask_rate=0.4).mask_rate_at(999) == 0.4
    assert recipe.second_phase().mask_rate == (0.05,)


def test_fewer_steps_scale_warmup_and_decay_unless_they_are_given():
    recipe = Recipe().replace(max_steps=1_000)
    assert (recipe.warmup_steps, recipe.decay_until, recipe.decay_from) == (2, 900, 900)
    recipe = Recipe().replace(max_steps=1_000, warmup_steps=100)
    assert (recipe.warmup_steps, recipe.decay_until) == (100, 900)


def test_the_recipe_of_the_paper_has_its_values():
    """Section 3.3 and Table 2, by hand."""
    recipe = RECIPES["paper"]
    assert (recipe.warmup_steps, recipe.decay_until, recipe.max_steps) == (2000, 900_000, 10**6)
    assert recipe.learning_rate == 6e-4
    assert (recipe.adam_beta1, recipe.adam_beta2, recipe.adam_epsilon) == (0.9, 0.95, 1e-8)
    assert (recipe.weight_decay, recipe.max_grad_norm) == (0.1, 1.0)
    assert (recipe.max_length, recipe.tokens_per_step) == (1024, 2**21)
    assert (recipe.mask_rate, recipe.mask_replace_prob, recipe.random_replace_prob) == ((0.2,), 1.0, 0.0)


def test_the_second_phase_has_the_values_of_the_paper():
    recipe = RECIPES["paper"].second_phase()
    assert (recipe.max_steps, recipe.max_length, recipe.tokens_per_step) == (50_000, 4_096, 2_097_152)
    assert recipe.mixture == (0.2, 0.4, 0.4) and recipe.longer_than == (1_024, 2_048)
    assert {recipe.learning_rate_factor(step) for step in (0, 1, 49_999)} == {0.1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"longer_than": (512, 1024, 2048)}, "with a share for each of longer_than"),
        ({"warmup_steps": 950_000}, "must be in ascending order"),
        ({"schedule": "wsd", "decay_from": 1_000}, "warmup_steps=2000, decay_from=1000 and max_steps=1000000 must"),
        ({"optimizer": "sgd"}, "optimizer='sgd' is not one of adamw, muon"),
        ({"mask_rate": ()}, "is not above 0 and at most 1"),
        ({"mask_rate": (0.3, 0.1), "mask_rate_shares": (0.5, 0.4)}, SHARES),
        ({"mask_rate": (0.3, 0.1), "mask_rate_shares": (1.0,)}, SHARES),
        ({"architecture": "roberta-prelayernorm"}, "cannot keep packed documents apart"),
    ],
)
def test_an_invalid_recipe_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RECIPES["paper"].replace(**changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1", "must hold values by name, such as max_length: 512; the names are optimizer, "),
        ("- 5", "must hold values by name"),
        ("run: 3", "must hold values by name"),
        ("learning_rate: 1e-4", r"learning_rate='1e-4' is a str, not a float \(0.0001, not 1e-4\)"),
        ("max_steps: 1.5", "max_steps=1.5 is a float, not a int"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_file_that_holds_no_recipe_is_refused(tmp_path, text, message):
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_recipe(str(tmp_path / "m.yaml"))


def test_values_of_a_file_have_the_types_of_a_recipe(tmp_path):
    text = "mixture: [0.5, 0.5, 0.0]\nweight_decay: 0\nconfig: {hidden_size: 64}\nmask_rate: 0.4"
    (tmp_path / "m.yaml").write_text(text)
    recipe = load_recipe(str(tmp_path / "m.yaml"))
    assert recipe == Recipe(mixture=(0.5, 0.5, 0.0), weight_decay=0.0, config={"hidden_size": 64}, mask_rate=(0.4,))


@pytest.mark.parametrize("phase", [1, 2])
def test_values_that_a_run_has_recorded_are_those_of_its_phase(tmp_path, phase):
    (tmp_path / "m.yaml").write_text(f"max_length: 64\nrun: {{phase: {phase}}}")
    options = {"output_dir": str(tmp_path), "use_cpu": True, "recipe": str(tmp_path / "m.yaml")}
    second = PretrainingArguments(**options, phase=2, init_from="model")
    assert second.max_length == (64 if phase == 2 else 4 * 64)
    if phase == 2:
        with pytest.raises(ValueError, match="is of phase 2; give phase=2 and init_from"):
            PretrainingArguments(**options)
