"""Two processes of tensor parallelism give the values and the gradients of one process. They run this file as a script."""

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from launch import on_two_processes
from packaging.version import Version
from safetensors.torch import load_file, save_file

from neobert_hf import NeoBERTForMaskedLM, NeoBERTModel

IS_OLD = Version(transformers.__version__) < Version("5.17")
REASON = "transformers has no packed columns in tensor parallelism"
pytestmark = [pytest.mark.compat, pytest.mark.skipif(IS_OLD, reason=REASON)]


def load(cls, folder, **options):
    from transformers.distributed import DistributedConfig

    return cls.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2), **options)


def results(model):
    """Values without and with gradients, and the gradients, for padded rows and for documents packed in one row."""
    ids = torch.randint(5, 96, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    positions = torch.cat((torch.arange(7), torch.arange(5)))[None]
    found = {}
    for name, inputs in {
        "padded": dict(input_ids=ids, attention_mask=mask),
        "packed": dict(input_ids=ids[:1], position_ids=positions),
    }.items():
        model.zero_grad()
        with torch.no_grad():
            found[f"{name} inference"] = model.eval()(**inputs)[0].clone()
        found[f"{name} training"] = values = model.train()(**inputs)[0]
        values.square().mean().backward()
        for key, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad
                gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                found[f"{name} {key}"] = gradient.clone()
    return {name: tensor.detach().contiguous() for name, tensor in found.items()}


def main(folder, out):
    found, words = {}, {}
    for cls in (NeoBERTModel, NeoBERTForMaskedLM):
        model = load(cls, folder)
        found |= {f"{cls.__name__} {name}": tensor for name, tensor in results(model).items()}
    words["shape of qkv"] = list(model.model.transformer_encoder[0].qkv.weight.to_local().shape)
    model.save_pretrained(out / "saved")
    half = load(NeoBERTModel, folder, dtype=torch.float16)
    half.layer_norm.register_forward_pre_hook(lambda module, inputs: words.update(stream=str(inputs[0].dtype)))
    half(input_ids=torch.tensor([[5, 6, 7]]))
    rank = torch.distributed.get_rank()
    save_file(found, out / f"{rank}.safetensors")
    (out / f"{rank}.json").write_text(json.dumps(words))


@pytest.mark.slow
def test_two_processes_that_share_the_heads_give_the_results_of_one(tiny_config, tmp_path):
    """1e-5 in float32: only the order of sums differs."""
    tiny_config.num_attention_heads, tiny_config.hidden_size = 4, 64
    NeoBERTForMaskedLM(tiny_config).save_pretrained(tmp_path / "even")
    on_two_processes(__file__, str(tmp_path / "even"), str(tmp_path))

    expected = {}
    for cls in (NeoBERTModel, NeoBERTForMaskedLM):
        model = cls.from_pretrained(tmp_path / "even")
        expected |= {f"{cls.__name__} {name}": tensor for name, tensor in results(model).items()}
    for rank in (0, 1):
        found, words = load_file(tmp_path / f"{rank}.safetensors"), json.loads((tmp_path / f"{rank}.json").read_text())
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5 * tensor.abs().max(), msg=name)
        assert words["shape of qkv"] == [3 * 64 // 2, 64]
        assert words["stream"] == "torch.float32"
    saved = NeoBERTForMaskedLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
