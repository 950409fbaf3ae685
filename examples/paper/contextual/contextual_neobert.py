"""Contextual document embeddings (CDE, arXiv 2410.02525) on NeoBERT: embeddings that depend on the corpus.

Two encoders, in the order of the data flow:
- the first stage embeds each of the J documents of the context: mean of its token vectors, a small MLP, RMSNorm;
- the second stage reads `[J context vectors][S soft prompt vectors][text]`. The context is a set, so its vectors all have
  position 0; soft prompt and text have the positions J, J + 1, ...;
- the embedding is the mean over the text's tokens, plus a small MLP of it.

A learned null vector replaces context vectors: some in training (`context_dropout`), all if the model has no context.

Axes: `B` texts, `L` columns of the input; `J` context vectors; `S` soft prompt vectors; `D` hidden.

Source: paper, section 5.2.2 and appendix G; CDE, section 4.2.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers.utils import ModelOutput, can_return_tuple

# Below the room, since a saved folder holds this file and imports the class from the file beside it.
from neobert_hf.model.modeling_neobert import NeoBERTConfig, NeoBERTModel, NeoBERTPreTrainedModel


class ContextualNeoBERTConfig(NeoBERTConfig):
    """Configuration of `ContextualNeoBERTModel`: the shape of both encoders, which is that of a NeoBERT, and of the context.

    Args:
        context_size: Number J of context vectors.
        num_soft_prompt_tokens: Number S of learned vectors between context and text; 0 for none.
        context_dropout: Probability that a context vector is replaced by the null vector in training, at least 0 and below 1.
            Without it, the model never learns to embed texts without a context.
        has_context: Whether the checkpoint contains the context of a corpus (see `set_context`).
        trained_context_size: With a context, the number of context vectors that the model has without it.
        **kwargs: As in `NeoBERTConfig`.

    Raises:
        ValueError: A value is invalid.

    Source: paper, appendix G.2 (J = 512); CDE, section 4.2; the 8 vectors of the soft prompt are those of its public code.
    """

    model_type = "contextual_neobert"

    def __init__(
        self,
        context_size=512,
        num_soft_prompt_tokens=8,
        context_dropout=0.005,
        has_context=False,
        trained_context_size=None,
        **kwargs,
    ):
        if context_size < 1:
            raise ValueError(f"context_size={context_size} is not positive; give the number of context vectors")
        if not 0 <= context_dropout < 1:
            raise ValueError(f"context_dropout={context_dropout} is no probability of at least 0 and below 1")
        self.context_size = context_size
        self.num_soft_prompt_tokens = num_soft_prompt_tokens
        self.context_dropout = context_dropout
        self.has_context = has_context
        self.trained_context_size = trained_context_size if has_context and trained_context_size else context_size
        super().__init__(**kwargs)


@dataclass
class ContextualNeoBERTOutput(ModelOutput):
    """Output of `ContextualNeoBERTModel`.

    Attributes:
        sentence_embedding: (B, D), an embedding of each text; with `embeds_context`, a context vector of each.
    """

    sentence_embedding: torch.Tensor | None = None


class ContextualNeoBERTModel(NeoBERTPreTrainedModel):
    """Two NeoBERTs: texts in, one embedding per text out, which depends on a context of J documents.

    `sentence_transformers.SentenceTransformer` hosts it with stock modules (see `contextual_sentence_transformer`).
    """

    config_class = ContextualNeoBERTConfig
    _keys_to_ignore_on_load_unexpected = None

    def __init__(self, config: ContextualNeoBERTConfig):
        super().__init__(config)
        width = config.hidden_size
        self.first_stage = NeoBERTModel(config)
        self.first_projection = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.context_norm = type(self.first_stage.layer_norm)(width, eps=config.norm_eps)
        self.null_context = nn.Embedding(1, width)
        self.soft_prompt = nn.Embedding(config.num_soft_prompt_tokens, width)
        self.second_stage = NeoBERTModel(config)
        self.second_projection = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.register_buffer("context", torch.zeros(config.context_size, width))
        self.post_init()

    @classmethod
    def from_encoder(cls, encoder: NeoBERTModel, **context_options) -> "ContextualNeoBERTModel":
        """Build a model whose two stages both start with the weights of `encoder`, as in CDE, section 4.2.

        Args:
            encoder: A NeoBERT.
            **context_options: `context_size`, `num_soft_prompt_tokens` and `context_dropout` of the config.
        """
        options = {
            key: value for key, value in encoder.config.to_dict().items() if key not in ("model_type", "auto_map")
        }
        options |= {"architectures": None, "attn_implementation": encoder.config._attn_implementation}
        model = cls(ContextualNeoBERTConfig(**options | context_options)).to(encoder.dtype)
        model.train(encoder.training)
        model.first_stage.load_state_dict(encoder.state_dict())
        model.second_stage.load_state_dict(encoder.state_dict())
        with torch.no_grad():  # context vectors join the residual stream with the size of token embeddings
            model.context_norm.weight.fill_(encoder.encoder.weight.square().mean().sqrt())
        return model.to(encoder.device)

    @property
    def auto_classes(self) -> dict[str, type]:
        """See `NeoBERTPreTrainedModel.auto_classes`."""
        return {"AutoConfig": ContextualNeoBERTConfig, "AutoModel": ContextualNeoBERTModel}

    def get_input_embeddings(self) -> nn.Embedding:
        """The token embeddings of the second stage; the first stage has its own."""
        return self.second_stage.encoder

    def set_input_embeddings(self, value: nn.Embedding):
        """Replace the token embeddings of the second stage."""
        self.second_stage.encoder = value

    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if module is self.context_norm:  # the size of new token embeddings, which are uniform in [-x, x]
            nn.init.constant_(module.weight, self.config.embedding_init_range / 3**0.5)

    def set_context(self, vectors: torch.Tensor | None) -> None:
        """Set the context of a corpus for all following forwards; `save_pretrained` saves it with the weights.

        Args:
            vectors: (J, D) context vectors, as the forward with `embeds_context` returns them. None removes the context and
                restores the number of context vectors.

        Raises:
            ValueError: The shape is wrong, or a value is not finite.
        """
        has_context, width = vectors is not None, self.config.hidden_size
        if not has_context:
            vectors = self.context.new_zeros(self.config.trained_context_size, width)
        if vectors.ndim != 2 or vectors.shape[1] != width or not len(vectors):
            raise ValueError(
                f"context vectors have shape {tuple(vectors.shape)}; it must be (documents, {width}), the "
                "hidden_size of this model: embed the documents with this model"
            )
        vectors = vectors.detach().to(self.context.device, self.context.dtype, copy=True)
        if not vectors.isfinite().all():
            raise ValueError("context vectors contain infinite values or NaN; embed the documents again")
        self.context = vectors
        self.config.context_size, self.config.has_context = len(vectors), has_context

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        dataset_embeddings: torch.Tensor | None = None,
        embeds_context: bool = False,
        token_type_ids: torch.Tensor | None = None,
        **kwargs,
    ) -> ContextualNeoBERTOutput:
        """Embed texts in a context, or, with `embeds_context`, documents as context vectors.

        Args:
            input_ids: (B, L) token ids, one text in each row.
            attention_mask: (B, L), 0 at padding on any side; None: every token is real.
            dataset_embeddings: (J, D) context vectors. Default: the stored context, or J null vectors if none is stored.
            embeds_context: Return the first stage's vectors; each is independent of the others.
            token_type_ids: Ignored, as in `NeoBERTModel`.
            **kwargs: Refused, unless the value is None or False.

        Returns:
            `sentence_embedding` (B, D), one for each text, not normalised; compare with cosines.

        Raises:
            ValueError: A text has no token, or the shape of `dataset_embeddings` is not (J, D).
            TypeError: An argument is unknown, such as one that marks texts in a packed row.

        Source: paper, appendix G.1.
        """
        if unknown := [name for name, value in kwargs.items() if value is not None and value is not False]:
            raise TypeError(
                f"ContextualNeoBERTModel has no argument {unknown[0]}; give padded rows of input_ids and attention_mask"
            )
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if not torch.compiler.is_compiling() and not (mask != 0).any(-1).all():
            raise ValueError("a row of attention_mask has no real token; remove the row")
        if embeds_context:
            outputs = self.first_stage(input_ids, mask, return_dict=True)
            means = mean_of_texts(outputs.last_hidden_state, mask)
            return ContextualNeoBERTOutput(self.context_norm(self.first_projection(means)))
        return ContextualNeoBERTOutput(self._embed_texts(input_ids, mask, dataset_embeddings))

    def _embed_texts(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, context_JD: torch.Tensor | None
    ) -> torch.Tensor:
        """(B, L) texts to (B, D) embeddings."""
        num_texts, num_context = len(input_ids), self.config.context_size
        num_before = num_context + self.config.num_soft_prompt_tokens
        text_BLD = self.second_stage.encoder(input_ids)
        context_BJD = self._context_of_texts(num_texts, context_JD).to(text_BLD.dtype)
        x_BND = torch.cat(
            (context_BJD, self.soft_prompt.weight.expand(num_texts, -1, -1), text_BLD), 1
        )  # N = J + S + L
        mask_BN = torch.cat((attention_mask.new_ones(num_texts, num_before), attention_mask), 1)

        before = torch.arange(num_before, device=input_ids.device)
        before = before.masked_fill(before < num_context, 0).expand(num_texts, -1)
        of_text = (attention_mask != 0).cumsum(-1) - 1  # -1 in padding on the left, which is never read
        positions_BN = torch.cat((before, num_before + of_text), 1)
        inputs = {"attention_mask": mask_BN, "position_ids": positions_BN, "free_positions": True}
        outputs = self.second_stage(inputs_embeds=x_BND, **inputs, return_dict=True)
        pooled_BD = mean_of_texts(outputs.last_hidden_state[:, num_before:], attention_mask)
        return pooled_BD + self.second_projection(pooled_BD)

    def _context_of_texts(self, num_texts: int, context_JD: torch.Tensor | None) -> torch.Tensor:
        """(B, J, D) context vectors, with dropout in training."""
        size, null_D = (self.config.context_size, self.config.hidden_size), self.null_context.weight[0]
        if context_JD is None and not self.config.has_context:
            return null_D.expand(num_texts, *size)
        context_JD = self.context if context_JD is None else context_JD
        if tuple(context_JD.shape) != size:
            raise ValueError(
                f"dataset_embeddings has shape {tuple(context_JD.shape)}, but this model reads {size}: context_size vectors of "
                "hidden_size; embed that number of documents with this model, or call set_context, which changes the number"
            )
        context_BJD = context_JD.expand(num_texts, -1, -1)
        if not self.training:
            return context_BJD
        is_dropped_BJ1 = torch.rand(*context_BJD.shape[:2], 1, device=context_BJD.device) < self.config.context_dropout
        return torch.where(is_dropped_BJ1, null_D.to(context_BJD.dtype), context_BJD)


def mean_of_texts(states_BLD: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """(B, D), the mean over the tokens of each text; the states are zero at padding."""
    return states_BLD.sum(1) / (attention_mask != 0).sum(-1, keepdim=True)
