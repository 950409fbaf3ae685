"""The configuration of NeoBERT (arXiv 2502.19587); it also reads the config.json published with `chandar-lab/NeoBERT`."""

import math
from collections.abc import Callable
from inspect import signature
from typing import Any

from transformers import PretrainedConfig
from transformers.utils.versions import require_version

require_version("transformers>=4.57.0", "NeoBERT needs a newer transformers: pip install -U transformers")


# What a value in config.json must be: in words, and as a function of the value. A bool is no number.
SIZE = "a positive integer", lambda value: type(value) is int and value > 0
POSITIVE = "a positive number", lambda value: type(value) in (int, float) and 0 < value < math.inf
PROBABILITY = "a number of at least 0 and below 1", lambda value: type(value) in (int, float) and 0 <= value < 1
FLAG = "true or false", lambda value: type(value) is bool
SECTION = "a dictionary", lambda value: isinstance(value, dict)


def optional(rule: tuple[str, Callable]) -> tuple[str, Callable]:
    """The same rule for a value that may be None."""
    return f"{rule[0]}, or null", lambda value: value is None or rule[1](value)


SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "num_labels")
# The keys whose wrong values would give wrong numbers, or a text in the place of a flag, without an error that names the key.
RULES = {
    **dict.fromkeys(SIZES, SIZE),
    **dict.fromkeys(("max_position_embeddings", "max_length", "dim_head"), optional(SIZE)),
    "norm_eps": POSITIVE,
    "rope_theta": optional(POSITIVE),
    **dict.fromkeys(
        ("rope_parameters", "rope_scaling", "id2label", "label2id", "quantization_config"), optional(SECTION)
    ),
    "classifier_dropout": PROBABILITY,
    "classifier_pooling": ("'cls' or 'mean'", lambda value: value in ("cls", "mean")),
    **dict.fromkeys(("unpad_inputs", "sparse_prediction", "tie_word_embeddings"), FLAG),
    **dict.fromkeys(("output_hidden_states", "output_attentions", "return_dict"), optional(FLAG)),
    # Of the published training code and its forks, where other values are other models.
    **dict.fromkeys(("rope", "rms_norm"), ("true: NeoBERT is built so", lambda value: value is True)),
    "ngpt": ("false: that is another model", lambda value: value is False),
    "hidden_act": ("swiglu: NeoBERT is built so", lambda value: str(value).lower() == "swiglu"),
}


def check_values(
    values: dict[str, Any],
    rules: dict[str, tuple[str, Callable]],
    place: str = "",
) -> None:
    """Raise ValueError for a value that breaks the rule of its name; `place` says where it stands."""
    for name, (words, holds) in rules.items():
        if name in values and not holds(values[name]):
            raise ValueError(f"{name}={values[name]!r}{place} must be {words}")


ROPE_SECTIONS = ("rope_parameters", "rope_scaling")  # of transformers 5 and of transformers 4
# Keys of each rope_type, besides `rope_type` and `rope_theta`; all types but the default require `factor`.
ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"},
}
# Another type or a factor below 1 would be ignored without an error.
ROPE_RULES = {
    **dict.fromkeys(("rope_theta", *ROPE_KEYS["yarn"]), POSITIVE),
    "rope_type": (f"one of {', '.join(ROPE_KEYS)}", lambda value: value in tuple(ROPE_KEYS)),
    "factor": ("a number of at least 1", lambda value: type(value) in (int, float) and 1 <= value < math.inf),
}


# Keys of the published config.json, and of those that its training code writes, which change nothing in NeoBERT.
JUNK_KEYS = (
    "kwargs",
    "trust_remote_code",
    "pretrained_model_name_or_path",
    "rope",
    "rms_norm",
    "ngpt",
    "hidden_act",
    "base_scale",
    "dropout",
    "dropout_prob",
    "flash_attention",
    "attn_backend",
    "kernel_backend",
    "swiglu_width",  # a property, as is the next
    "use_return_dict",
)
# Keys of config.json by which transformers would run code of another place: a pipeline's, a kernel's.
CODE_KEYS = ("custom_pipelines", "attn_implementation", "_attn_implementation", "experts_implementation")

# Tools that read saved checkpoints, such as llama.cpp, expect the class names of the published code.
PUBLISHED_ARCHITECTURES = {"NeoBERTModel": "NeoBERT", "NeoBERTForMaskedLM": "NeoBERTLMHead"}


class NeoBERTConfig(PretrainedConfig):
    """Shape, initialisation and behaviour of a NeoBERT model; the defaults are those of the published model.

    Args:
        vocab_size: Number of token ids.
        hidden_size: Width D of the residual stream; a multiple of `num_attention_heads`.
        num_hidden_layers: Number of blocks.
        num_attention_heads: Number of heads H; `hidden_size / num_attention_heads` must be even.
        intermediate_size: Nominal feed-forward width; SwiGLU uses two thirds of it (see `swiglu_width`).
        max_position_embeddings: Context length of the training, in tokens. Longer input is accepted with a warning.
        max_length: Published name of `max_position_embeddings`; it is read and available as an attribute, but never saved.
        norm_eps: Epsilon of RMSNorm.
        rope_parameters: RoPE in the format of transformers 5: `rope_type` (default, linear, dynamic or yarn), `rope_theta`
            and the keys that the type requires.
        rope_theta: RoPE base in the format of transformers 4; overrides `rope_parameters`.
        rope_scaling: RoPE scaling in the format of transformers 4; overrides `rope_parameters`.
        embedding_init_range: Bound x of the uniform initialisation of embeddings, in [-x, x].
        decoder_init_range: Bound x of the uniform initialisation of linear layers, in [-x, x].
        classifier_init_range: Standard deviation of the normal initialisation of task heads.
        classifier_dropout: Dropout probability in task heads.
        classifier_pooling: What `NeoBERTForSequenceClassification` and `NeoBERTForMultipleChoice` read of a sequence: "cls", its
            first real token, as published; or "mean", the mean over its real tokens. A 4-D mask marks no padding.
        pad_token_id: Id of the padding token, whose embedding stays zero.
        dim_head: Published name of the head width; only checked against `hidden_size / num_attention_heads`.
        unpad_inputs: Compute on real tokens only. False computes on the padded batch.
        sparse_prediction: If labels are given, run the LM head, and the last block behind its attention, on labelled positions
            only. `logits` then has one row per label in evaluation; in training it is None, because the loss is computed chunk
            by chunk.

    Raises:
        ValueError: A value is invalid, or the config belongs to another model of the type "neobert" (NeoDictaBERT).

    Source: paper, section 3.1 and Table 1; values from the published config.json.
    """

    model_type = "neobert"
    attribute_map = {"max_length": "max_position_embeddings"}
    # Tensor parallelism: each process holds a part of the heads and of the feed-forward width. Embedding, norms and heads are
    # whole in each process. The rows of qkv are grouped by head; w12 packs two matrices.
    base_model_tp_plan = {
        "transformer_encoder.*.qkv": "colwise",
        "transformer_encoder.*.wo": "rowwise",
        "transformer_encoder.*.ffn.w12": "packed_colwise",
        "transformer_encoder.*.ffn.w3": "rowwise",
    }

    def __init__(
        self,
        vocab_size=30522,
        hidden_size=768,
        num_hidden_layers=28,
        num_attention_heads=12,
        intermediate_size=3072,
        max_position_embeddings=None,
        max_length=None,
        norm_eps=1e-5,
        rope_parameters=None,
        rope_theta=None,
        rope_scaling=None,
        embedding_init_range=0.02,
        decoder_init_range=0.02,
        classifier_init_range=0.02,
        classifier_dropout=0.1,
        classifier_pooling="cls",
        pad_token_id=0,
        dim_head=None,
        unpad_inputs=True,
        sparse_prediction=False,
        tie_word_embeddings=False,
        **kwargs,
    ):
        kind = kwargs.get("model_type", self.model_type)
        if kind not in ("neobert", self.model_type):
            raise ValueError(f"model_type={kind!r}: this is a {kind}, not a NeoBERT; choose a checkpoint of NeoBERT")
        if "encoder_init_range" in kwargs:
            raise ValueError(
                f"encoder_init_range={kwargs['encoder_init_range']} marks a NeoDictaBERT checkpoint of the same model type: it "
                "rotates halves instead of pairs and has another feed-forward width; load it with the code in its own repository"
            )
        dim_head = kwargs.pop("head_dim", dim_head)  # the name of other libraries, here a property
        check_values(locals() | kwargs, RULES)
        if tie_word_embeddings:
            raise ValueError(
                "tie_word_embeddings=True, but the decoder of NeoBERT has its own weights; write them out: "
                "neobert convert SRC DST, and load DST"
            )
        for key in JUNK_KEYS:
            kwargs.pop(key, None)

        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        context_length = max_position_embeddings or max_length or 4096
        self.max_position_embeddings = context_length
        self.norm_eps = norm_eps
        self.embedding_init_range = embedding_init_range
        self.decoder_init_range = decoder_init_range
        self.classifier_init_range = classifier_init_range
        self.classifier_dropout = classifier_dropout
        self.classifier_pooling = classifier_pooling
        self.unpad_inputs = unpad_inputs
        self.sparse_prediction = sparse_prediction
        self._check_shape(pad_token_id, dim_head)
        self.rope_parameters = self._standard_rope_parameters(rope_parameters, rope_theta, rope_scaling)
        super().__init__(pad_token_id=pad_token_id, tie_word_embeddings=False, **kwargs)
        # transformers 4 treats `max_length` as a generation parameter and has just set it to the default 20.
        self.max_position_embeddings = context_length

    def __init_subclass__(cls, **kwargs):
        # transformers 5 gives a class without an own __init__ that of a dataclass, which would not set these fields
        cls.__init__ = cls.__init__  # type: ignore[method-assign]  # of the class itself
        super().__init_subclass__(**kwargs)

    @property
    def head_dim(self):
        """Width K of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def swiglu_width(self):
        """Width F of the feed-forward layer: two thirds of `intermediate_size`, rounded up to a multiple of 8."""
        return -(-int(2 * self.intermediate_size / 3) // 8) * 8

    @property
    def rope_theta(self):
        """Base of the rotary frequencies; vLLM sets it."""
        return self.rope_parameters["rope_theta"]

    @rope_theta.setter
    def rope_theta(self, value):
        self.rope_parameters["rope_theta"] = value

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """Build a config from the content of config.json; overrides are checked like all other values.

        A scaling of RoPE replaces the stored settings in both formats. It keeps the base of the training, and YaRN scales from
        the context length of the training.
        """
        own: set[str] = set()
        for base in cls.__mro__:
            if issubclass(base, NeoBERTConfig):
                own |= signature(base.__init__).parameters.keys()
        overrides = {key: kwargs.pop(key) for key in list(kwargs) if key in own}
        check_values(overrides, RULES)
        if "max_length" in overrides:
            overrides.setdefault("max_position_embeddings", overrides.pop("max_length"))
        if overrides.get("rope_parameters", {}) is None:  # no override
            del overrides["rope_parameters"]
        stored = {key: value for key, value in config_dict.items() if key not in CODE_KEYS}
        scalings = [overrides[key] for key in ROPE_SECTIONS if overrides.get(key)]
        if scalings:
            trained = cls(**stored)
            for key in ROPE_SECTIONS:
                stored.pop(key, None)
                rope = overrides.get(key) or {}
                if "yarn" in (rope.get("rope_type"), rope.get("type")):
                    overrides[key] = {"original_max_position_embeddings": trained.max_position_embeddings, **rope}
            bases = [rope.get("rope_theta") for rope in (overrides, *scalings)]
            overrides["rope_theta"] = next((base for base in bases if base is not None), trained.rope_theta)
        return super().from_dict(stored | overrides, **kwargs)

    def to_dict(self):
        """Return the content of config.json, with the architectures under their published names.

        Some tools do not round two thirds of `intermediate_size` up to a multiple of 8, so it is saved as a size that needs no
        rounding: 1032 in place of 1024, both for a width of 688.
        """
        output = super().to_dict()
        if int(2 * self.intermediate_size / 3) != self.swiglu_width:
            output["intermediate_size"] = 3 * self.swiglu_width // 2
        if output.get("architectures"):
            output["architectures"] = [PUBLISHED_ARCHITECTURES.get(name, name) for name in output["architectures"]]
        return output

    def _get_generation_parameters(self):
        # An encoder generates no text. Without this method transformers 5 finds `max_length` and refuses to save.
        return {}

    _get_non_default_generation_parameters = _get_generation_parameters  # the name in transformers 4

    def _check_shape(self, pad_token_id, dim_head):
        heads = self.num_attention_heads
        if self.hidden_size % (2 * heads):
            raise ValueError(
                f"hidden_size={self.hidden_size} is not divisible by num_attention_heads={heads} into heads of an even width, "
                f"whose pairs RoPE rotates; choose a multiple of {2 * heads}"
            )
        if dim_head is not None and dim_head != self.head_dim:
            raise ValueError(
                f"dim_head={dim_head} disagrees with hidden_size={self.hidden_size} / num_attention_heads={heads} = "
                f"{self.head_dim}; remove dim_head or correct the others"
            )
        if pad_token_id is not None and (type(pad_token_id) is not int or not 0 <= pad_token_id < self.vocab_size):
            raise ValueError(
                f"pad_token_id={pad_token_id!r} must be null, or an integer between 0 and vocab_size - 1 = {self.vocab_size - 1}"
            )

    def _standard_rope_parameters(self, rope_parameters, rope_theta, rope_scaling):
        """Convert both formats to that of transformers 5 and check the values."""
        given = rope_scaling or rope_parameters or {}
        rope = {key: value for key, value in given.items() if value is not None}
        other_base = (rope_parameters or {}).get("rope_theta")
        bases = (rope_theta, rope.get("rope_theta"), other_base, 10000.0)
        rope["rope_theta"] = next(base for base in bases if base is not None)
        if "type" in rope:  # name of the key before transformers 4.45
            rope.setdefault("rope_type", rope.pop("type"))
        kind = rope.setdefault("rope_type", "default")
        check_values(rope, ROPE_RULES, " in rope_parameters")
        if kind != "default" and "factor" not in rope:
            raise ValueError(f"rope_type={kind!r} needs factor; add it to rope_parameters")
        unknown = set(rope) - ROPE_KEYS[kind] - {"rope_type", "rope_theta"}
        if unknown:
            allowed = ", ".join(sorted(ROPE_KEYS[kind])) or "rope_theta only"
            raise ValueError(f"rope_type={kind!r} does not accept {', '.join(sorted(unknown))}; it accepts {allowed}")
        if kind == "yarn":
            rope.setdefault("original_max_position_embeddings", self.max_position_embeddings)
        return rope
