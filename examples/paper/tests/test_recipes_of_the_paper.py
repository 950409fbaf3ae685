"""The recipes M0 to M9 are the ablations of the paper's Table 2."""

from dataclasses import asdict
from pathlib import Path

from neobert_hf.pretraining.recipes import RECIPES, load_recipe

ABLATIONS = Path(__file__).parents[1] / "recipes"


def ablation(name):
    return load_recipe(str(ABLATIONS / f"{name}.yaml"))


def test_ablations_change_only_the_values_of_table_2():
    """Each ablation is compared with its predecessor; the paper rejects M3 and M6, so M4 follows M2 and M7 follows M5."""
    changed = {
        ("m0", "m1"): {"architecture"},
        ("m1", "m2"): {"corpus", "text_column"},
        ("m2", "m3"): {"tokenizer"},
        ("m2", "m4"): {"schedule", "weight_decay", "adam_beta2"},
        ("m4", "m5"): {"mask_rate", "mask_replace_prob", "random_replace_prob"},
        ("m5", "m6"): {"batch_format"},
        ("m5", "m7"): {"config"},
        ("m7", "m8"): {"config"},
    }
    for (before, after), names in changed.items():
        a, b = asdict(ablation(before)), asdict(ablation(after))
        assert {name for name in a if a[name] != b[name]} == names, (before, after)
    assert ablation("m9") == RECIPES["paper"]
    assert {file.stem for file in ABLATIONS.iterdir()} == {f"m{number}" for number in range(10)}
