"""Muon beside AdamW against torch's own optimizers; functions of the user's own decide a run and are recorded."""

import copy
import json
from functools import partial

import pretrain_mlm
import pytest
import torch
from conftest import run_main
from pretraining_runs import run
from torch import nn

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.pretraining import muon

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon (torch >= 2.9)")
OPTIONS = dict(lr=0.05, weight_decay=0.1)
MOONLIGHT = dict(adjust_lr_fn="match_rms_adamw")
NUM_STEPS = 4


def set_gradients(parameters, step):
    """Random gradients by name and step, so that two models get the same."""
    for name, parameter in parameters.items():
        generator = torch.Generator().manual_seed(sum(name.encode()) + 1000 * step)
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.fixture
def parameters(tiny_config):
    return dict(NeoBERTForMaskedLM(tiny_config).named_parameters())


def parts_of(name, tensor, head_dim):
    """Query, key and value, or gate and up, copied head by head; another matrix is one part."""
    if name.endswith("qkv.weight"):
        heads = tensor.split(head_dim)
        return [torch.cat(heads[part::3]) for part in range(3)]
    if name.endswith("w12.weight"):
        half = len(tensor) // 2
        return [tensor[:half].clone(), tensor[half:].clone()]
    return [tensor.clone()]


@needs_muon
@pytest.mark.parametrize("in_parts", [True, False])
def test_matrices_take_the_steps_of_torchs_muon_and_others_those_of_adamw(parameters, tiny_config, in_parts):
    head_dim = tiny_config.head_dim if in_parts else None
    optimizer = muon(parameters, **OPTIONS, head_dim=head_dim)
    split = partial(parts_of, head_dim=tiny_config.head_dim) if in_parts else lambda name, tensor: [tensor.clone()]
    copies = {name: [nn.Parameter(part) for part in split(name, p.detach())] for name, p in parameters.items()}
    is_matrix = {name: "transformer_encoder" in name and p.ndim == 2 for name, p in parameters.items()}
    matrices = [part for name, parts in copies.items() if is_matrix[name] for part in parts]
    others = [part for name, parts in copies.items() if not is_matrix[name] for part in parts]
    assert len(matrices) == tiny_config.num_hidden_layers * (7 if in_parts else 4)
    peers = torch.optim.Muon(matrices, **OPTIONS, **MOONLIGHT), torch.optim.AdamW(others, **OPTIONS, betas=(0.9, 0.95))
    for step in range(NUM_STEPS):
        set_gradients(parameters, step)
        for name, parts in copies.items():
            for part, grad in zip(parts, split(name, parameters[name].grad)):
                part.grad = grad
        for each in (optimizer, *peers):
            each.step()
    for name, parts in copies.items():
        expected = [part.detach() for part in parts]
        torch.testing.assert_close(split(name, parameters[name].detach()), expected, rtol=0, atol=0, msg=name)


@needs_muon
def test_a_schedule_and_a_restored_state_reach_both_rules(parameters, tiny_config):
    model = NeoBERTForMaskedLM(tiny_config)
    second, options = dict(model.named_parameters()), OPTIONS | {"head_dim": tiny_config.head_dim}
    one, two = muon(parameters, **options), muon(second, **options)
    for step in range(NUM_STEPS):
        set_gradients(parameters, step)
        one.step()
    for old, new in zip(second.values(), parameters.values()):
        old.data.copy_(new.data)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for optimizer, each in ((one, parameters), (two, second)):
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
        set_gradients(each, NUM_STEPS)
        optimizer.step()
        assert {group["lr"] for group in optimizer.param_groups} == {0.025}
    torch.testing.assert_close(list(parameters.values()), list(second.values()), atol=0, rtol=0)


@needs_muon
def test_norms_and_embeddings_have_no_decay_where_the_recipe_says_so(parameters):
    norms = [name for name, parameter in parameters.items() if parameter.ndim == 1]
    optimizer = muon(parameters, **OPTIONS, no_decay=norms)
    (group,) = [group for group in optimizer.param_groups if not group["weight_decay"]]
    assert {id(p) for p in group["params"]} == {id(parameters[name]) for name in norms}


def own(parameters, lr=1e-2):
    return torch.optim.SGD(parameters.values(), lr=lr, momentum=0.9)


def half(step):
    return 0.5


@pytest.mark.slow
def test_functions_decide_the_run_and_are_recorded_and_another_one_cannot_resume_it(corpus, tmp_path, capsys):
    folder, functions = tmp_path / "run", {"optimizer": partial(own, lr=1e-2), "schedule": half}
    run(corpus, folder, functions=functions, max_steps=4)
    summary, record = (json.loads((folder / name).read_text()) for name in ("training_summary.json", "training.json"))
    assert summary["optimizer"] == "test_optimizers.own"
    names = "optimizer=test_optimizers.own, schedule=test_optimizers.half"
    assert record["settings"]["functions"] == names
    with pytest.raises(SystemExit, match="2"):  # a file cannot give functions
        run_main(pretrain_mlm, "--recipe", folder / "recipe.yaml", "--output_dir", tmp_path / "again")
    assert f"the run has functions {names}, which no argument gives" in capsys.readouterr().err
    rates = [json.loads(line).get("learning_rate") for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert set(rates) == {5e-3, None}
    for name in functions:
        other = {**functions, name: None}
        with pytest.raises(ValueError, match=f"belongs to another run: {name} was test_optimizers"):
            run(corpus, folder, functions=other, max_steps=4, resume_from_checkpoint="last")


@pytest.mark.parametrize(
    ("functions", "changes", "message"),
    [
        (
            {"optimizer": lambda p: torch.optim.SGD([x for n, x in p.items() if "qkv" not in n], lr=1.0)},
            {},
            r"the optimizer leaves out model.transformer_encoder.0.qkv.weight, model.transformer_encoder.1.qkv.weight; give",
        ),
        ({"optimizer": own}, {"optim": "sgd"}, "optim=sgd and optim_args=None have no effect beside a function"),
        ({}, {"optimizer": "muon", "optim": "sgd"}, "optim=sgd and .* have no effect beside optimizer='muon'"),
    ],
)
def test_an_optimizer_that_would_spoil_a_run_is_refused(corpus, tmp_path, functions, changes, message):
    with pytest.raises(ValueError, match=message):
        run(corpus, tmp_path / "run", functions=functions, max_steps=4, **changes)
    assert not (tmp_path / "run/model.safetensors").exists()
