"""Collators for masked language modelling."""

from dataclasses import dataclass

import torch
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase


@dataclass
class PackedMLMCollator:
    """Mask tokens and pack the documents of a batch into one row without padding.

    The masks come from transformers' own collator, drawn before packing: 20 % of the tokens, every one of them replaced by
    `[MASK]`, special tokens never.

    Args:
        tokenizer: Pads, and knows the mask token and the special tokens.
        mlm_probability: Share of the tokens to mask.
        seed: Seed of the masks; None draws from torch's global generator.
        return_flash_attn_kwargs: Also return `cu_seq_lens_q/k` and `max_length_q/k`, as transformers' packing collator does
            under this name. The positions say the same; a compiled model wants the boundaries. Trainer cannot pass them on
            with a streamed dataset unless `accelerator_config={"dispatch_batches": False}`.

    Raises:
        ValueError: The tokenizer has no mask token, or a document holds no token.

    Source: paper, section 3.2 (20 % masking without random or kept tokens) and Table 2, row M6, which shows the loss from
        packing without isolating documents.
    """

    tokenizer: PreTrainedTokenizerBase
    mlm_probability: float = 0.2
    seed: int | None = None
    return_flash_attn_kwargs: bool = False

    def __post_init__(self):
        self.mask_padded = DataCollatorForLanguageModeling(
            self.tokenizer,
            mlm_probability=self.mlm_probability,
            mask_replace_prob=1.0,
            random_replace_prob=0.0,
            seed=self.seed,
        )

    def __call__(self, documents: list[dict]) -> dict:
        """Turn N tokenized documents into one packed row of T tokens.

        Args:
            documents: Dicts with `input_ids`; one with `position_ids` as well is a packed row, of `PackedStream` for
                instance, and holds a document from each position 0 on.

        Returns:
            `input_ids`, `labels` and `position_ids` (1, T); positions begin at 0 in each document. With
            `return_flash_attn_kwargs` also `cu_seq_lens_q` and `cu_seq_lens_k` (N + 1,) int32, and `max_length_q` and
            `max_length_k` as numbers.
        """
        padded = self.mask_padded([document for row in documents for document in _documents_of(row)])
        is_real = padded["attention_mask"].bool()
        lengths = is_real.sum(-1)
        if not lengths.all():
            empty = int((lengths == 0).nonzero()[0])
            raise ValueError(f"document {empty} of the batch holds no token; drop empty documents before packing")
        row = {name: padded[name][is_real][None] for name in ("input_ids", "labels")}
        row["position_ids"] = (is_real.cumsum(-1) - 1)[is_real][None]
        if self.return_flash_attn_kwargs:
            boundaries, longest = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(), int(lengths.max())
            row |= {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
            row |= {"max_length_q": longest, "max_length_k": longest}
        return row


def _documents_of(row):
    if "position_ids" not in row:
        return [row]
    positions = [int(position) for position in row["position_ids"]]
    if len(positions) != len(row["input_ids"]) or positions[:1] != [0]:
        raise ValueError(
            f"a packed row has {len(row['input_ids'])} input_ids and {len(positions)} position_ids that begin with "
            f"{positions[:1]}; it needs one position for each token, and 0 where a document begins"
        )
    starts = [index for index, position in enumerate(positions) if position == 0]
    ends = [*starts[1:], len(positions)]
    return [{"input_ids": row["input_ids"][start:end]} for start, end in zip(starts, ends)]
