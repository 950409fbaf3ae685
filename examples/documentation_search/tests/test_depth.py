"""More blocks for a trained model: the same function at first, gradients to every new block afterwards."""

import pytest
import torch
from depth import with_more_blocks

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM, NeoBERTModel

CONFIG = dict(vocab_size=50, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=48)


@pytest.fixture
def ids():
    return torch.randint(1, 50, (2, 12), generator=torch.Generator().manual_seed(0))


def model_of(model_class):
    torch.manual_seed(0)
    return model_class(NeoBERTConfig(**CONFIG)).eval()


@pytest.mark.parametrize("model_class, output", [(NeoBERTModel, "last_hidden_state"), (NeoBERTForMaskedLM, "logits")])
@pytest.mark.parametrize("num_hidden_layers", [5, 6, 8, 11])
def test_a_deeper_model_computes_the_same_also_from_its_folder(ids, tmp_path, model_class, output, num_hidden_layers):
    model = model_of(model_class)
    deeper = with_more_blocks(model, num_hidden_layers)
    deeper.save_pretrained(tmp_path)
    loaded, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()) and len(loaded.base_model.transformer_encoder) == num_hidden_layers
    with torch.no_grad():
        expected = model(ids)[output]
        for each in (deeper, loaded.eval()):
            torch.testing.assert_close(each(ids)[output], expected, atol=0, rtol=0)
    assert model.config.num_hidden_layers == len(model.base_model.transformer_encoder) == 4  # it stays as it is


def test_new_blocks_are_copies_without_output_spread_evenly_among_the_trained_ones():
    model = model_of(NeoBERTModel)
    deeper = with_more_blocks(model, 6)
    for block, origin, is_new in zip(deeper.transformer_encoder, (0, 0, 1, 2, 2, 3), (0, 1, 0, 0, 1, 0)):
        for name, weight in model.transformer_encoder[origin].named_parameters():
            expected = torch.zeros_like(weight) if is_new and name in ("wo.weight", "ffn.w3.weight") else weight
            torch.testing.assert_close(block.get_parameter(name), expected, atol=0, rtol=0)


def test_gradients_reach_the_output_of_a_new_block_at_once_and_the_whole_block_after_a_step(ids):
    deeper = with_more_blocks(model_of(NeoBERTForMaskedLM), 5).train()
    block = deeper.model.transformer_encoder[1]
    optimizer = torch.optim.SGD(deeper.parameters(), lr=0.1)
    deeper(ids, labels=ids).loss.backward()
    reached = {name for name, weight in block.named_parameters() if weight.grad.any()}
    assert reached == {"wo.weight", "ffn.w3.weight"}
    optimizer.step()
    deeper(ids, labels=ids).loss.backward()
    assert all(weight.grad.any() for weight in block.parameters())


def test_a_depth_that_is_not_more_is_refused():
    with pytest.raises(ValueError, match="num_hidden_layers=4, but the model has 4; choose a larger number"):
        with_more_blocks(model_of(NeoBERTModel), 4)
