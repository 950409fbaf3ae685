"""Ablations: equal arms do not differ, others do; runs resume and are divided among processes; unequal measures are refused."""

import json
import math
from functools import partial

import ablate as example
import ablation as module
import numpy as np
import pytest
import torch
from ablation import Ablation, ablate, compare_losses, read_ablation
from conftest import run_main
from pretraining_runs import SMALL
from scipy import stats
from torch.utils.data import DataLoader

from neobert_hf.data.wordpiece import train_wordpiece
from neobert_hf.pretraining import PackedMLMCollator, open_text
from neobert_hf.pretraining.arguments import VALUES


@pytest.fixture
def common(corpus):
    return dict(
        train_files=str(corpus / "train.jsonl"),
        validation_files=str(corpus / "held_out.jsonl"),
        tokenizer_name=str(corpus / "tokenizer"),
        config_overrides=SMALL,
        **dict(max_length=32, row_tokens=64, tokens_per_step=256, max_steps=8, warmup_steps=2, learning_rate=3e-3),
        **dict(logging_steps=2, use_cpu=True, bf16=False, disable_tqdm=True, num_processes=1),
    )


ARMS = {"base": {}, "same": {}, "slow": {"learning_rate": 3e-5}}


def test_equal_arms_have_no_difference_and_a_slower_one_does_also_after_a_resume(common, tmp_path):
    plan = Ablation(ARMS, (1, 2), common)
    report = ablate(plan, tmp_path)
    arms = report["arms"]
    assert arms["same"]["difference"] == 0 and arms["same"]["interval"] == [0, 0]
    assert 0.1 < arms["slow"]["interval"][0] <= arms["slow"]["difference"] <= arms["slow"]["interval"][1]
    num_masked = json.loads((tmp_path / "base-1/held_out.json").read_text())["num_masked"]
    assert arms["slow"]["same_masks"] and arms["slow"]["num_documents"] == np.count_nonzero(num_masked) > 50
    assert arms["base"]["num_parameters"] == arms["slow"]["num_parameters"] > 0
    expected = np.mean([arms["slow"]["loss_by_seed"][seed] - arms["base"]["loss_by_seed"][seed] for seed in ("1", "2")])
    assert arms["slow"]["difference"] == pytest.approx(expected, abs=1e-6)
    low, high = stats.ttest_1samp(list(arms["slow"]["by_seed"].values()), 0).confidence_interval(0.95)
    assert arms["slow"]["interval_of_seeds"] == pytest.approx([low, high])
    # a run that was killed before its evaluation, and one that was killed before it trained
    (tmp_path / "slow-1/held_out.json").unlink()
    again = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("base-1/*.safetensors")}
    assert ablate(plan, tmp_path) == report
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("base-1/*.safetensors")} == again
    with pytest.raises(ValueError, match=r"holds another ablation: arms were .* and are"):
        ablate(Ablation(ARMS | {"more": {}}, (1, 2), common), tmp_path)
    with pytest.raises(ValueError, match=r"holds another ablation: seeds were .* and are"):
        ablate(Ablation(ARMS, (2, 3), common), tmp_path)


def test_a_recipe_whose_file_has_changed_is_another_ablation_and_seeds_may_be_added(common, tmp_path):
    recipe = tmp_path / "b.yaml"
    recipe.write_text("mask_rate: 0.3")
    arms = {"a": {}, "b": {"recipe": str(recipe)}}
    ablate(Ablation(arms, (1,), common), tmp_path / "runs")
    assert list(ablate(Ablation(arms, (1, 2), common), tmp_path / "runs")["arms"]["b"]["by_seed"]) == ["1", "2"]
    recipe.write_text("mask_rate: 0.4")
    with pytest.raises(ValueError, match=r"holds another ablation: recipes were"):
        ablate(Ablation(arms, (1, 2), common), tmp_path / "runs")


def test_a_function_of_another_name_is_another_ablation(common, tmp_path):
    def plan(schedule):
        ablation = Ablation({"a": {}, "b": {}}, (1,), common, {"b": {"schedule": schedule}})
        arms = {arm: ablation.arguments(arm, 1, tmp_path) for arm in "ab"}
        return module._check_plan(tmp_path, ablation, arms, False)

    (tmp_path / "plan.json").write_text(json.dumps(plan(partial(math.pow, 0.5))))
    assert plan(math.pow)["functions"] == {"b": {"schedule": "pow"}}
    with pytest.raises(ValueError, match=r"holds another ablation: functions were .*'pow'.* and are .*'exp'"):
        plan(math.exp)


def test_an_arm_that_diverged_with_one_seed_says_so_in_its_row():
    arm = dict(num_parameters=1, num_tokens=1, loss=1.0, masked_accuracy=0.5, same_rows=True, same_masks=True)
    row = example.row_of("b", arm | {"diverged": {"2": "the loss was not finite"}})
    assert row[0] == "b (diverged with seed 2)"


def test_a_model_that_is_not_finite_at_the_end_has_diverged(common, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "held_out_losses", lambda *_: {"loss": [1.0, np.nan, np.nan], "num_masked": [1, 0, 2]})
    with pytest.raises(ValueError, match="the baseline a diverged: the loss of a held-out document was not finite"):
        ablate(Ablation({"a": {}, "b": {}}, (1,), common), tmp_path)
    assert not (tmp_path / "b-1").exists()


def test_the_example_writes_table_plot_and_figures_and_stops_early_where_the_sign_is_settled(common, tmp_path, capsys):
    file = tmp_path / "arms.yaml"
    arms = {"base": {}, "slow": {"learning_rate": 3e-5}}
    file.write_text(json.dumps({"arms": arms, "seeds": [1, 2, 3], "common": common}))
    run_main(example, "--arms", file, "--output_dir", tmp_path / "runs", "--stop_early")
    report = json.loads((tmp_path / "runs/ablation.json").read_text())
    assert list(report["arms"]["slow"]["loss_by_seed"]) == ["1", "2"] and not (tmp_path / "runs/slow-3").exists()
    table = (tmp_path / "runs/ablation.md").read_text()
    assert "| slow" in table and "95 %: seeds" in table and "rows and masks" in table and table.count("baseline") == 1
    assert (tmp_path / "runs/ablation.png").stat().st_size > 10_000
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/ablation.md").write_text("my words")
    with pytest.raises(SystemExit, match=r"mine holds ablation\.md; choose a new or empty folder"):
        run_main(example, "--arms", file, "--output_dir", tmp_path / "mine", "--stop_early")


def test_processes_of_a_launcher_divide_the_runs(common, tmp_path, monkeypatch):
    """The second process finds the first run locked; the last one to end writes the result."""
    plan, trained, run = Ablation({"a": {}, "b": {}}, (1,), common), [], module.pretrain
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(module, "pretrain", lambda *args, **more: trained.append(args) or run(*args, **more))
    (tmp_path / module.LOCK).touch()
    with module.filelock.FileLock(tmp_path / "a-1.lock"):
        assert ablate(plan, tmp_path) is None
    assert len(trained) == 1 and (tmp_path / "b-1/held_out.json").exists() and not (tmp_path / "a-1").exists()
    assert ablate(plan, tmp_path)["arms"]["b"]["interval"] == [0, 0]


def test_an_arm_that_diverges_is_named_and_the_others_go_on(common, tmp_path, capsys):
    arms = {"base": {}, "hot": {"learning_rate": 1e30, "max_grad_norm": 1e30}}
    report = ablate(Ablation(arms, (1,), common), tmp_path)
    assert "the arm hot diverged with seed 1: the" in capsys.readouterr().out
    assert "was not finite" in report["arms"]["hot"]["diverged"]["1"] and "interval" not in report["arms"]["hot"]
    with pytest.raises(ValueError, match="the baseline hot diverged: the"):
        ablate(Ablation(dict(reversed(arms.items())), (1,), common), tmp_path / "other")


def test_the_interval_of_a_mean_difference_covers_the_truth_as_often_as_it_says():
    """300 differences around 0.1: the interval of 95 % misses it in 1 to 13 of 100 draws, a binomial's range of 99.9 %."""
    rng, missed = np.random.default_rng(0), 0
    for _ in range(100):
        base = rng.normal(5, 2, 300)
        ours = {seed: base + rng.normal(0.1, 1, 300) for seed in (1, 2)}
        low, high = compare_losses(ours, dict.fromkeys((1, 2), base))["interval"]
        missed += not low < 0.1 < high
    assert 1 <= missed <= 13


def test_a_document_without_a_masked_token_is_left_out():
    found = compare_losses({1: np.array([1.0, np.nan, 3.0])}, {1: np.array([0.5, np.nan, 2.5])})
    assert found["difference"] == 0.5 and found["num_documents"] == 2


@pytest.mark.parametrize("of_documents, of_seeds", [((0.1, 0.1), (0.1, 0.002)), ((-1, 1.04), (1, 1))])
def test_an_arm_is_settled_only_if_both_intervals_are_without_zero(of_documents, of_seeds):
    """Differences of 20 documents, scaled by those of two seeds: only one of the two intervals holds zero."""
    losses = np.array(of_documents * 10)
    results = {("b", seed): {"loss": losses * scale} for seed, scale in zip((1, 2), of_seeds)}
    results |= {("a", seed): {"loss": losses * 0} for seed in (1, 2)}
    found = compare_losses(*({seed: results[arm, seed]["loss"] for seed in (1, 2)} for arm in "ba"))
    assert (found["interval"][0] > 0) != (found["interval_of_seeds"][0] > 0)
    assert not module._is_settled(results, "b", Ablation({"a": {}, "b": {}}), False)


def test_held_out_documents_are_cut_at_the_shortest_length_of_the_arms(common, tmp_path):
    ablation = Ablation({"a": {"max_length": 32}, "b": {"max_length": 16}, "c": {}}, (1,), common)
    arms = {arm: ablation.arguments(arm, 1, tmp_path) for arm in "abc"}
    assert module._check_comparable(ablation, arms, False)[1] == 16


FALLING, DRAWN = {"mask_rate": [0.4, 0.1]}, {"mixture": [0.5, 0.3, 0.2], "longer_than": [12, 24]}
STREAM, WORKERS = {"streaming": True}, {"streaming": True, "dataloader_num_workers": 2}
PAIRS = [  # arguments of both arms, and those of the second one
    *(({}, {name: value}) for name, value in {
        "optimizer": "muon", "learning_rate": 1e-3, "schedule": "linear", "warmup_steps": 1, "decay_until": 7,
        "decay_from": 5, "weight_decay": 0.0, "decay_norms_and_embeddings": False, "adam_beta1": 0.8, "adam_beta2": 0.9,
        "adam_epsilon": 1e-6, "max_grad_norm": 2.0, "tokens_per_step": 128, "max_length": 16, "mask_rate": 0.3,
        "mask_replace_prob": 0.8, "batch_format": "padded", "longer_than": [12, 24], "max_steps": 16, "row_tokens": 128,
        "per_device_train_batch_size": 2, "num_processes": 2, "num_held_out": 3, "long_documents": "chunk", "streaming": True,
        "dataloader_num_workers": 2, "train_files": "OTHER",
    }.items()),
    ({"mask_replace_prob": 0.5}, {"random_replace_prob": 0.5}),
    ({}, {"batch_format": "padded", "architecture": "roberta-prelayernorm", "config_overrides": SMALL}),
    ({}, FALLING), ({}, {"mask_rate": [0.2, 0.2]}), (FALLING, {"mask_rate_shares": [0.25, 0.75]}), (FALLING, {"max_steps": 16}),
    (FALLING | STREAM, {"max_steps": 16}), (FALLING, {"max_steps": 16, "mask_rate_shares": [0.25, 0.75]}),
    ({}, DRAWN), (DRAWN, {"max_steps": 16}), (DRAWN, {"longer_than": [12, 30]}), (DRAWN, {"mixture": [0.4, 0.4, 0.2]}),
    (STREAM, {"dataloader_num_workers": 2}), (WORKERS, {"per_device_train_batch_size": 2}), (WORKERS, {"max_steps": 16}),
    (STREAM, {"per_device_train_batch_size": 2}), (STREAM, {"train_files": "OTHER"}), (STREAM, {"documents_dir": "unused"}),
]  # fmt: skip


def steps_of(data, training, tokenizer):
    """Unmasked ids and labels of each step, as a run reads them."""
    text = open_text(data, training, tokenizer).pack()[0]
    options = training.mask_rate[0], training.mask_replace_prob, training.random_replace_prob
    batches = iter(DataLoader(
        text, training.per_device_train_batch_size, num_workers=training.dataloader_num_workers,
        collate_fn=PackedMLMCollator(tokenizer, *options),
    ))  # fmt: skip
    for _ in range(8):
        step = [next(batches) for _ in range(training.gradient_accumulation_steps)]
        ids, labels = (torch.cat([batch[name][0] for batch in step]) for name in ("input_ids", "labels"))
        yield torch.where(labels != -100, labels, ids).tolist(), ids.tolist(), labels.tolist()


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenized")


@pytest.mark.parametrize("both, second", PAIRS, ids=str)
def test_the_report_says_exactly_where_rows_and_masks_are_the_same(
    common, tokenizer, tokenized, tmp_path, monkeypatch, both, second
):
    monkeypatch.chdir(tmp_path)  # of a relative path
    if "train_files" in second:
        second = {"train_files": common["validation_files"]}
    if both.get("streaming"):  # a worker needs a file
        common = common | {"train_files": [common["train_files"], common["validation_files"]]}
    ablation = Ablation({"a": {}, "b": second}, (1,), common | both)
    arms = {arm: ablation.arguments(arm, 1, tokenized) for arm in "ab"}
    for data, training in arms.values():
        module._tokenize(tokenized, data, training)
    found = [list(steps_of(*arm, tokenizer)) for arm in arms.values()]
    same_rows = all(ours[0] == theirs[0] for ours, theirs in zip(*found))
    described = module._describe({}, "b", ablation, arms, False)
    assert described["same_rows"] == same_rows and described["same_masks"] == (found[0] == found[1])


def test_the_pairs_have_every_value_of_a_recipe():
    assert {*VALUES} <= {name for _, second in PAIRS for name in second}


@pytest.mark.parametrize(
    ("arms", "more", "message"),
    [
        ({"a": {}}, {}, "give two arms or more"),
        ({"a": {}, "b": {"learning_rat": 1}}, {}, "arm b: learning_rat is no .*; did you mean learning_rate"),
        ({"a": {}, "b": {"schedule": "cosine"}}, {}, "arm b: schedule='cosine' is not one of"),
        ({"a": {}, "b": {"bf16": True}}, {}, "the arms a and b have different precision"),
        ({"a": {}, "b": {"config_overrides": "vocab_size=500"}}, {}, r"vocabularies of \{'a': 96, 'b': 500\} tokens"),
        ({"a": {}, "b": {"config_overrides": "hidden_sise=64"}}, {}, "config_overrides='hidden_sise=64'"),
        ({"a": {}, "b": {"seed": 7}}, {}, "arm b: seed has no effect; the ablation sets it for each run"),
        ({"a": {}, "../b": {}}, {}, r"arm '\.\./b' names a folder"),
        ({"a": {}, "b": {"validation_files": "other.jsonl"}}, {}, "give all arms the same validation_files"),
        ({"a": {}, "b": {}}, {"validation_files": None}, "give all arms the same validation_files"),
    ],
)
def test_an_ablation_that_cannot_be_right_is_refused_before_anything_is_written(common, tmp_path, arms, more, message):
    with pytest.raises(ValueError, match=message):
        common = {name: value for name, value in (common | more).items() if value is not None}
        ablate(Ablation(arms, (1,), common), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arm: {}", "holds arm; it must hold arms, and may hold seeds and common"),
        ("- a", "holds list; it must hold arms"),
        ("arms: [a, b]", "arms and common must hold arguments by name"),
        ("arms: {a: {}, b: {}}\nseeds: 3", "seeds a list of numbers"),
        ("arms: {", "cannot be read"),
        ("arms: {a: {}, b: {}}\nseeds: []", "different seeds"),
    ],
)
def test_a_file_that_holds_no_ablation_is_refused(tmp_path, text, message):
    (tmp_path / "arms.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_ablation(tmp_path / "arms.yaml")


def test_arms_with_different_tokenizers_are_compared_per_character_only(common, tmp_path):
    train_wordpiece(["the quick brown fox jumps over lazy dog"] * 9, vocab_size=64).save_pretrained(tmp_path / "other")
    arms = {"a": {}, "b": {"tokenizer_name": str(tmp_path / "other")}}
    with pytest.raises(ValueError, match=r"a and b have different tokenizers, .*; compare them per character"):
        ablate(Ablation(arms, (1,), common), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    report = ablate(Ablation(arms, (1,), common), tmp_path / "runs", per_character=True)
    results = [json.loads((tmp_path / f"runs/{arm}-1/held_out.json").read_text()) for arm in "ab"]
    means = []
    for result in results:
        loss, tokens, characters = (np.array(result[name], float) for name in ("loss", "num_tokens", "num_characters"))
        means.append(np.nanmean(loss * tokens / characters.clip(min=1)))
    assert [report["arms"][arm]["loss"] for arm in "ab"] == pytest.approx(means)
    assert report["unit"] == "character" and not report["arms"]["b"]["same_rows"]
