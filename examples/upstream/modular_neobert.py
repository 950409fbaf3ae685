"""NeoBERT as a model of transformers itself: what a pull request would contain (README.md beside it).

Importing this file registers the classes and the conversion of weights. Then a checkpoint in the published layout loads without
the code in its repository, and without the package neobert_hf: `AutoModelForMaskedLM.from_pretrained("chandar-lab/NeoBERT")`.

A NeoBERT block is a EuroBERT block. Three things differ in the weights: the rows of q, k and v are fused and grouped by head, the
rotation turns consecutive pairs instead of halves, and gate and up are fused. The conversion changes them while it loads, and
changes them back while it saves. Tested with transformers 5.23.
"""

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, ConversionOps, PermuteForRope, WeightConverter, WeightRenaming
from transformers.models.eurobert.configuration_eurobert import EuroBertConfig
from transformers.models.eurobert.modeling_eurobert import (
    EuroBertDecoderLayer,
    EuroBertForMaskedLM,
    EuroBertForSequenceClassification,
    EuroBertMLP,
    EuroBertModel,
)


class NeoBertConfig(EuroBertConfig):
    """The keys of the published config.json, under the names that EuroBERT reads."""

    model_type = "neobert"
    attribute_map = {"rms_norm_eps": "norm_eps", "max_position_embeddings": "max_length", "head_dim": "dim_head"}

    vocab_size: int = 30522
    num_hidden_layers: int = 28
    max_length: int = 4096
    norm_eps: float = 1e-5
    dim_head: int | None = None
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    mask_token_id: int = 103
    classifier_pooling: str = "bos"

    @property
    def swiglu_width(self):
        """Width of the feed-forward layer: two thirds of `intermediate_size`, rounded up to a multiple of 8."""
        return -(-int(2 * self.intermediate_size / 3) // 8) * 8


class NeoBertMLP(EuroBertMLP):
    """SwiGLU of two thirds of the nominal width."""

    def __init__(self, config):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size, config.swiglu_width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.swiglu_width, bias=False)
        self.down_proj = nn.Linear(config.swiglu_width, config.hidden_size, bias=False)


class NeoBertEncoderLayer(EuroBertDecoderLayer):
    """A block of EuroBERT with this width."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.mlp = NeoBertMLP(config)


class NeoBertModel(EuroBertModel):
    """The encoder."""

    config_class = NeoBertConfig
    _no_split_modules = ["NeoBertEncoderLayer"]

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList([NeoBertEncoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.post_init()


class NeoBertForMaskedLM(EuroBertForMaskedLM):
    """The published head: a decoder with a bias, and weights of its own."""

    config_class = NeoBertConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = NeoBertModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()


class NeoBertForSequenceClassification(EuroBertForSequenceClassification):
    """The published head for classes, which reads the first position."""

    config_class = NeoBertConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = NeoBertModel(config)
        self.activation = nn.Tanh()  # EuroBERT has GELU here
        self.post_init()


class GroupByProjection(ConversionOps):
    """Order the rows of a fused qkv by projection (3, H, K) instead of by head (H, 3, K), or back."""

    def __init__(self, inverse=False):
        self.inverse = inverse

    @torch.no_grad
    def convert(self, input_dict, source_patterns, target_patterns, config, **kwargs):
        """Return the rows in the other order, for the next operation or, on saving, under the published name."""
        [(name, tensor)] = input_dict.items()
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        heads = config.num_attention_heads
        groups = (3, heads) if self.inverse else (heads, 3)
        rows = tensor.view(*groups, -1, tensor.shape[-1]).transpose(0, 1).reshape(tensor.shape)
        return {target_patterns[0] if self.inverse else name: rows}

    @property
    def reverse_op(self):
        """What saving does."""
        return GroupByProjection(not self.inverse)


PROJECTIONS = [f".self_attn.{name}_proj.weight" for name in "qkv"]
CONVERSION = [
    WeightRenaming(r"(?<!\w)encoder\.", r"(?<!\w)embed_tokens\."),
    WeightRenaming(r"(?<!\w)layer_norm\.", r"(?<!\w)norm\."),
    WeightRenaming(r"^decoder\.", r"^lm_head\."),
    WeightRenaming(r"transformer_encoder\.", r"layers\."),
    WeightRenaming(r"\.attention_norm\.", r"\.input_layernorm\."),
    WeightRenaming(r"\.ffn_norm\.", r"\.post_attention_layernorm\."),
    WeightRenaming(r"\.wo\.", r"\.self_attn\.o_proj\."),
    WeightRenaming(r"\.ffn\.w3\.", r"\.mlp\.down_proj\."),
    WeightConverter(
        ".qkv.weight",
        PROJECTIONS,
        operations=[GroupByProjection(), Chunk(dim=0), PermuteForRope(permute_layer_names=["q_proj", "k_proj"])],
    ),
    WeightConverter(".ffn.w12.weight", [".mlp.gate_proj.weight", ".mlp.up_proj.weight"], operations=[Chunk(dim=0)]),
]
# By class and not by the model type "neobert": a class of another package with this model type keeps its own layout.
for model_class in (NeoBertForMaskedLM, NeoBertForSequenceClassification, NeoBertModel):
    register_checkpoint_conversion_mapping(model_class.__name__, CONVERSION, overwrite=True)

AutoConfig.register("neobert", NeoBertConfig, exist_ok=True)
AutoModel.register(NeoBertConfig, NeoBertModel, exist_ok=True)
AutoModelForMaskedLM.register(NeoBertConfig, NeoBertForMaskedLM, exist_ok=True)
AutoModelForSequenceClassification.register(NeoBertConfig, NeoBertForSequenceClassification, exist_ok=True)
