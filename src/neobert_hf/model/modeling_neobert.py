"""NeoBERT (arXiv 2502.19587): a bidirectional encoder of 28 blocks of width 768, with task heads.

Architecture, in the order of the data flow:
- token embeddings, no position or token-type embeddings;
- pre-normalised blocks, RMSNorm, no bias, no dropout;
- attention with rotary positions on consecutive pairs and one fused qkv whose rows are grouped per head;
- SwiGLU of two thirds of the nominal feed-forward width, gate and up fused in one matrix;
- a final RMSNorm; for masked language modelling, an untied decoder with bias.

Padding is removed before the first block and restored after the last (see `make_layout`), so all tensors in between are (T, ...),
and (S, ...) from the last attention on. Losses are means over real tokens; labels at padding are ignored.

Axes: `B` rows, `L` columns of the input; `T` tokens on the flat axis; `S` tokens that a head reads; `N` sequences; `D` hidden;
`H` heads; `K` head width; `F` feed-forward; `V` vocabulary; `C` labels.
"""

import sys
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import can_return_tuple

# The loader of transformers 4.57 copies only the files that this one imports directly, so it imports all of them.
from .attention_neobert import attend_sdpa, loading_error  # noqa: F401
from .backends_neobert import check_installed, is_own_backend
from .blocks_neobert import NeoBERTAttention, NeoBERTBlock, RMSNorm, SwiGLU, normalize
from .checkpoint_neobert import (
    check_can_be_saved,
    check_encoder_is_complete,
    save_code,
    set_auto_map,
    warn_of_frozen_layers,
)
from .configuration_neobert import NeoBERTConfig
from .gpu_neobert import CompiledBlock  # noqa: F401
from .inference_neobert import check_is_original
from .invariant_neobert import InvariantBlock  # noqa: F401
from .kernels_neobert import check_conversion, is_hooked, linear
from .layout_neobert import Boundaries, SequenceLayout, check_tokens
from .losses_neobert import (
    check_labels,
    classification_loss,
    cross_entropy,
    cross_entropy_in_chunks,
    find_labels,
    flatten_labels,
    span_loss,
)
from .machine_neobert import is_autocast_on, is_tracing
from .plan_neobert import ForwardPlan, arguments_of, indices_of_states, make_plan
from .rotary_neobert import Rotary, rotary_table
from .weight_files_neobert import check_names, check_weight_files, explain_damaged_file, stored_names


@dataclass
class NeoBERTModelOutput(BaseModelOutput):
    """Output of `NeoBERTModel`; packed, `last_hidden_state` is (T, D), or (S, D) of the tokens with the indices `tokens_S`."""

    plan: ForwardPlan | Any = None  # None without `return_packed`, which heads set
    tokens_S: Tensor | None = None


@dataclass
class NeoBERTMaskedLMOutput(MaskedLMOutput):
    """Output of `NeoBERTForMaskedLM`; if logits are not kept, `num_correct` is the number of labels with the largest logit."""

    num_correct: Tensor | None = None


class NeoBERTPreTrainedModel(PreTrainedModel):
    """Initialisation, loading and saving, shared by the encoder and its heads."""

    config_class = NeoBERTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["NeoBERTBlock"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # Every class loads from every NeoBERT checkpoint and ignores the weights of other heads without a warning.
    _keys_to_ignore_on_load_unexpected = [r"^(decoder|dense|classifier|qa_outputs)\."]
    is_inference_copy = False  # set by `inference_copy`
    new_layers = frozenset()  # layers of the head that the checkpoint lacked
    unused_tensors = frozenset()  # of the checkpoint, such as blocks beyond num_hidden_layers

    @property
    def auto_classes(self) -> dict[str, type]:
        """The Auto classes that load a saved folder, and the classes that they return.

        A variant, whose config class is its own, has those classes of the same file that name this config class.
        """
        config_class = type(self.config)
        if config_class is NeoBERTConfig:
            return AUTO_CLASSES
        found = {"AutoConfig": config_class}
        for each in vars(sys.modules[config_class.__module__]).values():
            if getattr(each, "config_class", None) is config_class and each._auto_class:
                found[each._auto_class] = each
        return found

    def get_input_embeddings(self) -> nn.Embedding:
        return self.base_model.encoder

    def set_input_embeddings(self, value: nn.Embedding):
        self.base_model.encoder = value

    def _init_weights(self, module: nn.Module):
        """As in the paper's code: linear and embedding uniform, task heads normal, norms one, biases and padding row zero."""
        if isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, nn.Embedding):
            bound = self.config.embedding_init_range
            # transformers marks loaded weights, and its own check does not see the mark on the slice below.
            if not getattr(module.weight, "_is_hf_initialized", False):
                nn.init.uniform_(module.weight, -bound, bound)
                if module.padding_idx is not None:
                    nn.init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, nn.Linear):
            bound = self.config.decoder_init_range
            heads = [getattr(self, name, None) for name in ("dense", "classifier", "qa_outputs")]
            if any(module is head for head in heads):
                nn.init.normal_(module.weight, std=self.config.classifier_init_range)
            else:
                nn.init.uniform_(module.weight, -bound, bound)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Resolve `attn_implementation`: None is "auto"; transformers checks the names in its own registry."""
        if requested_attention is None or requested_attention == "auto":
            return "auto"
        if not is_own_backend(requested_attention):
            if loading_error(requested_attention):
                check_installed(requested_attention)  # transformers names no remedy
            requested_attention = super().get_correct_attn_implementation(requested_attention, is_init_check)
        check_installed(requested_attention)  # transformers finds a package whose kernels do not load
        return requested_attention

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info=False, **kwargs):
        """Load as any transformers model, but never from a pickle and never with missing encoder weights.

        Raises:
            ValueError: The checkpoint lacks tensors of the encoder, or half of a head layer, or has a tensor twice.
            OSError: The folder has no safetensors weights, or a file is damaged.
        """
        check_weight_files(pretrained_model_name_or_path, kwargs)
        kwargs |= {"use_safetensors": True, "output_loading_info": True}
        with explain_damaged_file(pretrained_model_name_or_path):
            model, info = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        check_names(stored_names(pretrained_model_name_or_path, kwargs))
        check_encoder_is_complete(model, set(info["missing_keys"]), set(info["unexpected_keys"]))
        new = list(info["missing_keys"])
        for name in info["mismatched_keys"]:
            new.append(name if isinstance(name, str) else name[0])  # also the shapes
        model.new_layers = frozenset(name.rpartition(".")[0] for name in new)
        model.unused_tensors = frozenset(info["unexpected_keys"])
        if output_loading_info:
            return model, info
        return model

    def train(self, mode: bool = True):
        """As in nn.Module; an inference copy refuses (see `inference_copy`)."""
        if mode:
            check_is_original(self, "trained")
        return super().train(mode)

    def _apply(self, fn, *args, **kwargs):
        """As in nn.Module, which calls it to convert and to move all tensors; an inference copy refuses both."""
        if self.is_inference_copy:
            check_conversion(fn, self.dtype, self.device)
        return super()._apply(fn, *args, **kwargs)

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Save weights, config and code, also that of a subclass, with an `auto_map`; an inference copy refuses."""
        check_is_original(self, "saved")
        check_can_be_saved(self, NeoBERTModel)
        set_auto_map(self, self.auto_classes)
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):  # for a subclass, super() saves only its own file
            save_code(NeoBERTModel, self.auto_classes.values(), save_directory)


class NeoBERTModel(NeoBERTPreTrainedModel):
    """The encoder: token ids in, one vector per token out.

    A subclass is a variant of the model if it sets one of the classes below, or overrides `embed` or `rotary_table`
    (docs/variants.md).

    Attributes:
        norm_class: Norm before attention, before the feed-forward layer and at the end; made from (D, eps=...).
        attention_class: A `NeoBERTAttention` that overrides `attend`; made from (config, index of the block).
        ffn_class: Feed-forward layer from (T, D) to (T, D); made from (config).
    """

    norm_class: type[nn.Module] = RMSNorm
    attention_class: type[nn.Module] = NeoBERTAttention
    ffn_class: type[nn.Module] = SwiGLU

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config)
        self.encoder = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        parts = self.norm_class, self.attention_class, self.ffn_class
        blocks = [NeoBERTBlock(config, index, *parts) for index in range(config.num_hidden_layers)]
        self.transformer_encoder = nn.ModuleList(blocks)
        self.layer_norm = self.norm_class(config.hidden_size, eps=config.norm_eps)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        output_hidden_states: bool | int | list[int] | None = None,
        output_attentions: bool | None = None,
        return_packed: bool = False,
        select_tokens: Callable[[SequenceLayout], Tensor] | None = None,
        **kwargs,
    ) -> NeoBERTModelOutput:
        """Encode padded rows, or documents packed into one row.

        Args:
            input_ids: (B, L) token ids; either this or `inputs_embeds`.
            attention_mask: (B, L), 0 at padding on any side or in between; or 4-D, broadcastable to (B, H, L, L), True or 0.0
                where a token may attend. None: every token is real.
            position_ids: (B, L), (1, L) or (L,). A document begins where the position of a real token does not increase.
            inputs_embeds: (B, L, D) embeddings in place of `input_ids`.
            token_type_ids: Ignored, because NeoBERT has no token types; accepted, because tokenizers return it.
            output_hidden_states: Return the embeddings and the state after each block; the last state is after the final norm.
                Indices, which may be negative, return these states, and None in the place of the others.
            output_attentions: Return the probabilities of each block, with eager attention.
            return_packed: Return `last_hidden_state` as (T, D), real tokens only, and the plan with the layout that describes it.
            select_tokens: Function from the layout to indices on the flat axis, (S,) int64, of the tokens that a head reads;
                needs `return_packed`. The last block then computes its output projection and SwiGLU for these only, unless
                `hidden_states` are returned or a hook reads its states.
            **kwargs: Boundaries of packed documents and arguments of a registered attention function; no other is accepted.

                - `cu_seq_lens_q`, `cu_seq_lens_k` or `cu_seqlens`, the name in the published code: (N + 1,) boundaries of the
                  documents in a packed row (1, T).
                - `max_length_q`, `max_length_k` or `max_seqlen`: length of the longest document.
                - `seq_idx`: (B, L), (1, L) or (L,) number of each token's document in packed rows.
                - `free_positions`: `position_ids` mark no documents; without other marks, every row is one document.
                - `trust_boundaries`: The caller guarantees valid ids, `cu_seq_lens_q` and `max_length_q`. Attention that reads
                  the boundaries on the device (FlashAttention, torch_varlen) then needs no synchronisation before the first
                  block; for other attention the values are still checked.

        Returns:
            `last_hidden_state` (B, L, D), zero at padding; `hidden_states`, num_hidden_layers + 1 of the same shape;
            `attentions`, num_hidden_layers of (B, H, L, L).

        Raises:
            ValueError: Inputs are invalid or contradict each other.
            TypeError: An argument is unknown.

        Source: paper, section 3.1.
        """
        config = self.config
        options = arguments_of(config._attn_implementation)  # transformers has no public name for it
        boundaries = Boundaries.from_arguments(type(self).__name__, {"position_ids": position_ids, **kwargs}, options)
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        returned = indices_of_states(output_hidden_states, len(self.transformer_encoder) + 1)
        if output_attentions is None:
            output_attentions = config.output_attentions

        tokens = check_tokens(input_ids, inputs_embeds)
        plan = make_plan(self, tokens, boundaries, attention_mask, bool(output_attentions))
        x_TD, states, attentions, tokens_S = self.run_blocks(tokens, plan, returned, select_tokens)
        if output_attentions and not attentions:
            raise ValueError(f"{self.attention_class.__name__} returns no probabilities; omit output_attentions")

        layout, hidden_states = plan.layout, None
        if returned is not None:
            x_BLD = layout.unflatten(x_TD)
            hidden_states = (*states, x_BLD if len(states) in returned else None)
            x_TD = layout.flatten(x_BLD)
        elif not return_packed:
            x_BLD = layout.unflatten(x_TD)
        if not return_packed:
            return NeoBERTModelOutput(x_BLD, hidden_states, attentions or None)
        if select_tokens is not None and tokens_S is None:
            tokens_S = select_tokens(layout)
            x_TD = x_TD.index_select(0, tokens_S)
        return NeoBERTModelOutput(x_TD, hidden_states, attentions or None, plan, tokens_S)

    def run_blocks(
        self,
        tokens: Tensor,
        plan: ForwardPlan,
        returned: Container[int] | None,
        select_tokens: Callable | None,
    ) -> tuple[Tensor, tuple, tuple, Tensor | None]:
        """The residual stream from the embeddings to the last norm.

        Args:
            tokens: (B, L) ids or (B, L, D) embeddings.
            returned: Indices of the states to return; None if no states are returned.
            select_tokens: As in `forward`.

        Returns:
            (T, D) after the last norm, or (S, D) of the selected tokens; the states before it, None in the place of those that
            are not returned; the probabilities; the indices (S,) of the selected tokens, None if no block has selected them.
        """
        layout, last = plan.layout, self.transformer_encoder[-1]
        tokens_S = None
        states: tuple[Tensor | None, ...] = ()
        attentions: tuple[Tensor, ...] = ()
        x_TD = self.embed(tokens, layout)
        # float64 embeddings may feed a float32 model, whose products need a float32 table
        rotary = Rotary(self.rotary_table(layout, self.encoder.weight.dtype))
        for index, block in enumerate(self.transformer_encoder):
            if returned is not None:
                # kept only if requested, because they need much memory; the gradient must pass through them
                state = None
                if index in returned:
                    state = layout.unflatten(x_TD)
                    x_TD = layout.flatten(state)
                states += (state,)
            elif select_tokens is not None and block is last and not is_hooked(*block.modules(), self.layer_norm):
                # nothing reads the states of other tokens; this may wait for the device, so the other blocks are queued before
                tokens_S = select_tokens(layout)
            x_TD = block(x_TD, rotary, plan, tokens_S)
            if isinstance(x_TD, tuple):
                x_TD, weights = x_TD
                if plan.need_weights:
                    attentions += (weights,)
        return normalize(self.layer_norm, x_TD, plan.is_fast), states, attentions, tokens_S

    def rotary_table(self, layout: SequenceLayout, dtype: torch.dtype) -> Tensor:
        """(T, K / 2, 2), cosine and sine of the angle of each token and pair of a head (see rotary_neobert.py)."""
        return rotary_table(self.config, layout, dtype)

    def embed(self, tokens: Tensor, layout: SequenceLayout) -> Tensor:
        """(B, L) ids or (B, L, D) embeddings to the residual stream (T, D)."""
        if tokens.ndim == 2 and is_hooked(self.encoder):  # a hook, for example NEFTune's, expects (B, L, D)
            tokens = self.encoder(tokens)
        x_TD = layout.flatten(tokens)
        if tokens.ndim == 2:
            x_TD = self.encoder(x_TD)
        # In deep blocks its values exceed the range of float16. Under autocast it is always float32: FSDP2 then has bf16 weights
        # where DDP has float32 weights, and both must compute the same. Products stay in half precision.
        if x_TD.dtype == torch.float16 or (x_TD.dtype == torch.bfloat16 and is_autocast_on(x_TD.device)):
            return x_TD.float()
        return x_TD


# sentence-transformers reads this annotation to find `logits`.
HeadOutput: TypeAlias = (
    NeoBERTMaskedLMOutput
    | SequenceClassifierOutput
    | MultipleChoiceModelOutput
    | TokenClassifierOutput
    | QuestionAnsweringModelOutput
)


class _HeadModel(NeoBERTPreTrainedModel):
    """The encoder, for a subclass that adds a head: it says which tokens the head reads, and predicts from their states."""

    encoder_class = NeoBERTModel

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config)
        self.model = self.encoder_class(config)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs,
    ) -> HeadOutput:
        """Encode, then predict; labels and output are those of the class, other arguments as in `NeoBERTModel.forward`.

        Args:
            labels: See the class. Without labels there is no loss.
            num_items_in_batch: Number of labels in the whole optimizer step, from Trainer.
        """
        inputs = input_ids, attention_mask, position_ids, inputs_embeds
        outputs = self.encode(*inputs, select_tokens=self.select(labels), **kwargs)
        return self.predict(outputs, labels, num_items_in_batch)

    def encode(self, *inputs, **kwargs) -> NeoBERTModelOutput:
        """The states of real tokens, and the plan; arguments as in `NeoBERTModel.forward`."""
        warn_of_frozen_layers(self)
        return self.model(*inputs, **kwargs, return_packed=True, return_dict=True)

    def select(self, labels: Tensor | None) -> Callable[[SequenceLayout], Tensor] | None:
        """`select_tokens` of `NeoBERTModel.forward`; None: the head reads all tokens."""
        return None


class NeoBERTForMaskedLM(_HeadModel):
    """Encoder with an untied masked-LM decoder that has a bias.

    Labels are (B, L) token ids to predict, -100 elsewhere; labels at padding are ignored. The output has `loss`, mean over
    labels, and `logits` (B, L, V), zero at padding. With `config.sparse_prediction` and labels, only labelled positions are
    decoded, except while compiling: `logits` is (number of labels, V) in evaluation and None in training, where the loss is
    computed chunk by chunk.
    """

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.decoder

    def set_output_embeddings(self, value: nn.Linear):
        self.decoder = value

    def select(self, labels):
        """The labelled tokens, if `config.sparse_prediction` is set."""
        if self.config.sparse_prediction and labels is not None and not is_tracing(labels):
            return partial(find_labels, labels)
        return None

    def predict(self, outputs: NeoBERTModelOutput, labels, num_items_in_batch) -> NeoBERTMaskedLMOutput:
        """Logits and loss from the states (T, D), or (S, D) of the labelled tokens."""
        plan, hidden_TD, tokens_S = outputs.plan, outputs.last_hidden_state, outputs.tokens_S
        loss = logits = num_correct = None
        if labels is not None:
            labels = flatten_labels(labels, plan.layout)
        if tokens_S is not None:
            labels = labels[tokens_S]
        if tokens_S is not None and self.training:
            loss, num_correct = cross_entropy_in_chunks(self.decoder, hidden_TD, labels, num_items_in_batch)
        else:
            logits = linear(self.decoder, hidden_TD, plan.multiply)
            if labels is not None:
                loss = cross_entropy(logits, labels, num_items_in_batch)
        if tokens_S is None:
            logits = plan.layout.unflatten(logits)
        return NeoBERTMaskedLMOutput(loss, logits, outputs.hidden_states, outputs.attentions, num_correct)


class _PooledHead(_HeadModel):
    """The encoder, and on one vector per sequence (see `config.classifier_pooling`) dropout, dense, tanh, dropout, classifier."""

    def __init__(self, config: NeoBERTConfig, num_outputs: int):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, num_outputs)
        self.post_init()

    def select(self, labels):
        """The first token of each sequence, unless the head reads the mean."""
        if self.config.classifier_pooling == "mean":
            return None
        return lambda layout: layout.first_tokens

    def classify(self, outputs: NeoBERTModelOutput) -> Tensor:
        """Logits (N, C) from the states (T, D) for the mean, else (N, D)."""
        pooled_ND = outputs.last_hidden_state
        if outputs.tokens_S is None:
            pooled_ND = outputs.plan.layout.mean_of_sequences(pooled_ND)
        pooled_ND = torch.tanh(self.dense(self.dropout(pooled_ND)))
        return self.classifier(self.dropout(pooled_ND))


class NeoBERTForSequenceClassification(_PooledHead):
    """One prediction per sequence: regression, single label or multi label, by `config.problem_type`.

    A sequence is a row, or a document of a packed row; while compiling or exporting, only `cu_seq_lens_q` gives a prediction for
    each document. Labels are (N,) class ids for a single label; (N, C) floats for multi label and regression, also (N,) if C
    is 1. The output has `loss` and `logits` (N, C).
    """

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config, config.num_labels)

    def predict(self, outputs: NeoBERTModelOutput, labels, num_items_in_batch) -> SequenceClassifierOutput:
        """Logits and loss."""
        logits, loss = self.classify(outputs), None
        if labels is not None:
            loss = classification_loss(self.config, logits, labels, num_items_in_batch)
        return SequenceClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class NeoBERTForMultipleChoice(_PooledHead):
    """One score per choice; the choice with the highest score is the answer.

    Inputs are (B, choices, L), labels (B,) indices of the correct choices. The output has `loss` and `logits` (B, choices).
    """

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config, 1)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs,
    ) -> MultipleChoiceModelOutput:
        """Score the choices of each question; `token_type_ids` are ignored."""
        tokens = check_tokens(input_ids, inputs_embeds, "rows, choices, columns")
        num_rows, num_choices = tokens.shape[:2]
        inputs = input_ids, attention_mask, position_ids, inputs_embeds
        # position_ids of shape (L,) or (1, L) are the same for all rows
        rows = [x if x is None or x.ndim < 3 else x.flatten(0, 1) for x in inputs]
        outputs = self.encode(*rows, select_tokens=self.select(labels), **kwargs)
        logits, loss = self.classify(outputs).view(num_rows, num_choices), None
        if labels is not None:
            check_labels(labels, (num_rows,), "the index of the correct choice for each question")
            loss = cross_entropy(logits, labels, num_items_in_batch)
        return MultipleChoiceModelOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class NeoBERTForTokenClassification(_HeadModel):
    """One prediction per token: dropout, then a linear classifier.

    Labels are (B, L) class ids, -100 where there is none; labels at padding are ignored. The output has `loss` and `logits`
    (B, L, C), zero at padding.
    """

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def predict(self, outputs: NeoBERTModelOutput, labels, num_items_in_batch) -> TokenClassifierOutput:
        """Logits and loss."""
        layout, loss = outputs.plan.layout, None
        logits_TC = self.classifier(self.dropout(outputs.last_hidden_state))
        if labels is not None:
            loss = cross_entropy(logits_TC, flatten_labels(labels, layout), num_items_in_batch)
        return TokenClassifierOutput(loss, layout.unflatten(logits_TC), outputs.hidden_states, outputs.attentions)


class NeoBERTForQuestionAnswering(_HeadModel):
    """Start and end of the answer in each row."""

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs,
    ) -> QuestionAnsweringModelOutput:
        """Find the answer; other arguments as in `NeoBERTModel.forward`.

        Args:
            start_positions: (B,) column of the first token of the answer. A column outside 0 to L - 1 marks a truncated
                answer. It is ignored, and so is a column of padding.
            end_positions: (B,) column of the last token of the answer, by the same rules.
            num_items_in_batch: Number of answers in the whole optimizer step.

        Returns:
            `loss`, mean of start and end; `start_logits` and `end_logits` (B, L), the lowest value of the dtype at padding,
            so that the softmax over columns ignores padding.
        """
        outputs = self.encode(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        layout, loss = outputs.plan.layout, None
        ends_T2 = self.qa_outputs(outputs.last_hidden_state)
        lowest = torch.finfo(ends_T2.dtype).min
        start_BL, end_BL = layout.unflatten(ends_T2, fill=lowest).unbind(-1)
        if start_positions is not None and end_positions is not None:
            is_real_T = torch.ones_like(ends_T2[:, 0], dtype=torch.bool)
            is_real_BL = layout.unflatten(is_real_T, fill=False)
            loss = span_loss((start_BL, end_BL), (start_positions, end_positions), is_real_BL, num_items_in_batch)
        ends = start_BL.contiguous(), end_BL.contiguous()
        return QuestionAnsweringModelOutput(loss, *ends, outputs.hidden_states, outputs.attentions)


# The table of classes for registration, the `auto_map` of saved checkpoints, and the tests.
AUTO_CLASSES: dict[str, Any] = {
    "AutoConfig": NeoBERTConfig,
    "AutoModel": NeoBERTModel,
    "AutoModelForMaskedLM": NeoBERTForMaskedLM,
    "AutoModelForSequenceClassification": NeoBERTForSequenceClassification,
    "AutoModelForTokenClassification": NeoBERTForTokenClassification,
    "AutoModelForQuestionAnswering": NeoBERTForQuestionAnswering,
    "AutoModelForMultipleChoice": NeoBERTForMultipleChoice,
}
for _auto_class, _class in AUTO_CLASSES.items():
    _class.register_for_auto_class(_auto_class)

# Names in the published code.
NeoBERT = NeoBERTModel
NeoBERTLMHead = NeoBERTForMaskedLM

__all__ = [_class.__name__ for _class in AUTO_CLASSES.values()] + ["AUTO_CLASSES", "NeoBERT", "NeoBERTLMHead"]
