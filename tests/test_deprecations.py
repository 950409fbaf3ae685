"""Old public names work up to version 0.2 and warn once; documented names can be imported."""

import json
import re
import warnings
from pathlib import Path

import pytest

import neobert_hf
from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM
from neobert_hf.pretraining.arguments import CorpusArguments, PretrainingArguments
from neobert_hf.pretraining.recipes import RECIPES, Recipe
from neobert_hf.runs import folders as runs
from neobert_hf.runs.commands import CommandParser

ROOT = Path(__file__).parents[1]


def call_with_one_warning(function, old, new):
    """Call `function` and return its result; it must issue one FutureWarning that names `old` and `new`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
    messages = [str(warning.message) for warning in caught if warning.category is FutureWarning]
    assert len(messages) == 1, messages
    assert f"{old} is now {new}; the old name works up to version 0.2" in messages[0]
    return result, next(warning for warning in caught if warning.category is FutureWarning)


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (neobert_hf, "MINI", "MINI_MODEL_PATH"),
        (runs, "last_whole_checkpoint", "last_complete_checkpoint"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_an_old_name_of_a_module_is_the_same_object(module, old, new):
    name = module.__name__
    value, warning = call_with_one_warning(lambda: getattr(module, old), f"{name}.{old}", f"{name}.{new}")
    assert value is getattr(module, new)
    assert warning.filename == __file__


@pytest.mark.parametrize("module", [neobert_hf, runs], ids=lambda module: module.__name__)
def test_an_unknown_name_of_a_module_is_an_attribute_error(module):
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'no_such_name'"):
        module.no_such_name  # noqa: B018
    assert not hasattr(module, "no_such_name")


OLD, NEW = "attn_implementation='blocked'", "'cpu_tiled'"


@pytest.mark.parametrize("way", ["from_pretrained", "config", "set_attn_implementation"])
def test_the_attention_blocked_is_cpu_tiled(checkpoint, tiny_config, way):
    def make():
        if way == "from_pretrained":
            return NeoBERTForMaskedLM.from_pretrained(checkpoint, attn_implementation="blocked")
        if way == "config":
            return NeoBERTForMaskedLM(NeoBERTConfig(**tiny_config.to_dict(), attn_implementation="blocked"))
        model = NeoBERTForMaskedLM(tiny_config)
        model.set_attn_implementation("blocked")
        return model

    model, _ = call_with_one_warning(make, OLD, NEW)
    assert model.config._attn_implementation == model.model.config._attn_implementation == "cpu_tiled"


def test_layout_of_a_recipe_is_batch_format():
    old, _ = call_with_one_warning(lambda: Recipe(layout="padded"), "Recipe(layout=...)", "Recipe(batch_format=...)")
    assert old == Recipe(batch_format="padded") and "layout" not in old.to_dict()
    old, _ = call_with_one_warning(lambda: Recipe().changed(layout="padded"), "Recipe.changed", "Recipe.replace")
    assert old == Recipe(batch_format="padded")


def test_changed_of_a_recipe_is_replace():
    recipe = RECIPES["paper"]
    old, warning = call_with_one_warning(
        lambda: recipe.changed(max_steps=1000, batch_format="padded"), "Recipe.changed", "Recipe.replace"
    )
    assert old == recipe.replace(max_steps=1000, batch_format="padded") != recipe
    assert warning.filename == __file__


def test_the_flag_layout_is_batch_format(tmp_path):
    common = ["--output_dir", str(tmp_path), "--use_cpu", "--tokenizer_name", "tokenizer", "--train_files", "text.txt"]

    def parse(flag):
        parser = CommandParser((CorpusArguments, PretrainingArguments))
        return parser.parse_args_into_dataclasses([*common, flag, "padded"])[1]

    old, _ = call_with_one_warning(lambda: parse("--layout"), "--layout", "--batch_format")
    new = parse("--batch_format")
    assert old.to_recipe() == new.to_recipe() and old.to_recipe().batch_format == "padded"
    assert (
        old.layout is None and "layout" not in old.to_recipe().to_dict()
    )  # the recipe is the part that run.json stores


def test_the_flag_layout_is_not_in_the_short_help():
    help_text = CommandParser((CorpusArguments, PretrainingArguments)).format_help()
    assert "--batch_format" in help_text and "--layout" not in help_text


def test_layout_and_batch_format_together_are_refused(tmp_path):
    with pytest.raises(ValueError, match="layout='padded' and batch_format='packed' are both given"):
        PretrainingArguments(output_dir=str(tmp_path), use_cpu=True, layout="padded", batch_format="packed")


def test_the_warning_of_layout_names_the_line_of_the_caller(tmp_path):
    options = dict(output_dir=str(tmp_path), use_cpu=True)
    made, warning = call_with_one_warning(
        lambda: PretrainingArguments(layout="padded", **options), "--layout", "--batch_format"
    )
    assert made.batch_format == "padded" and warning.filename == __file__


@pytest.mark.parametrize("batch_format", ["packed", "padded"])
def test_a_run_of_version_0_1_resumes_if_its_layout_is_the_batch_format(tmp_path, batch_format):
    recipe = json.loads(json.dumps(RECIPES["paper"].to_dict()))  # as run.json stores it
    new = {"recipe": recipe, "seed": 0}
    old_recipe = {"layout" if name == "batch_format" else name: value for name, value in recipe.items()}
    assert old_recipe["layout"] == "packed" and "batch_format" not in old_recipe
    (tmp_path / "run.json").write_text(json.dumps({"recipe": {**old_recipe, "layout": batch_format}, "seed": 0}))
    checkpoint = tmp_path / "checkpoint-1"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text('{"global_step": 1}')
    if batch_format == "packed":
        runs._check_run(checkpoint, new, exactly=True)
    else:
        with pytest.raises(ValueError, match=r"belongs to another run: recipe was .*'batch_format': 'padded'"):
            runs._check_run(checkpoint, new, exactly=True)


def documented_names():
    """All names that README and docs import from the package or use as its attributes, or document in the reference."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    imported = re.findall(r"^from neobert_hf import ([\w, ]+)$", text, re.MULTILINE)
    names = {name.strip() for line in imported for name in line.split(",")}
    return names | set(re.findall(r"auto(?:class|function):: (\w+)$", text, re.MULTILINE))


def test_every_documented_name_can_be_imported():
    names = documented_names() | set(neobert_hf.__all__)
    assert names >= {"NeoBERTConfig", "PackedMLMCollator", "best_dtype", "inference_copy", "tune_allocator"}
    assert names == set(neobert_hf.__all__), "a documented name is not in __all__"
    for name in sorted(names):
        scope = {}
        exec(f"from neobert_hf import {name}", scope)
        assert scope[name] is getattr(neobert_hf, name)
