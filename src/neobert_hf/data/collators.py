"""Collators for masked language modelling."""

from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from . import BATCH_FORMATS


@dataclass
class PackedMLMCollator:
    """Mask tokens and pack the documents of a batch into one row without padding.

    transformers' own collator draws the masks before packing: 20 % of the tokens, all replaced by `[MASK]`, never a special
    token. A padded batch of the same documents therefore has the same masks.

    Args:
        tokenizer: Provides the mask token and the special tokens.
        mlm_probability: Share of the tokens to predict.
        mask_replace_prob: Share of the tokens to predict that become `[MASK]`.
        random_replace_prob: Share of the tokens to predict that become a random token; the remaining ones stay unchanged.
        batch_format: "packed"; "padded", one document a row, for models that cannot keep packed documents apart; or
            "concatenated", one row in which tokens attend to other documents, which the paper tried and rejected.
        seed: Seed of the masks; None draws from torch's global generator. The `mask_seed` of a row overrides it.
        return_flash_attn_kwargs: Also return `cu_seq_lens_q/k` and `max_length_q/k`, as transformers' packing collator does
            under this name. The positions hold the same information; a compiled model needs the boundaries. With a streamed
            dataset, Trainer passes them to the model only if `accelerator_config={"dispatch_batches": False}`.
        trust_boundaries: Also tell NeoBERT that ids and boundaries are correct, so that it does not check their values; needs
            `return_flash_attn_kwargs`.

    Raises:
        ValueError: The tokenizer has no mask token, or no padding token for "padded"; the batch format is unknown,
            `trust_boundaries` is set without `return_flash_attn_kwargs`, or a document holds no token.

    Source: paper, section 3.3 (20 % masking without random or kept tokens) and Table 2, row M6, which shows the loss from
        packing without isolating documents.
    """

    tokenizer: PreTrainedTokenizerBase
    mlm_probability: float = 0.2
    mask_replace_prob: float = 1.0
    random_replace_prob: float = 0.0
    batch_format: str = "packed"
    seed: int | None = None
    return_flash_attn_kwargs: bool = False
    trust_boundaries: bool = False

    def __post_init__(self):
        if self.trust_boundaries and not self.return_flash_attn_kwargs:
            raise ValueError("trust_boundaries=True without boundaries; set return_flash_attn_kwargs=True as well")
        if self.batch_format not in BATCH_FORMATS:
            raise ValueError(f"batch_format={self.batch_format!r} is not one of {', '.join(BATCH_FORMATS)}")
        if self.batch_format == "padded" and self.tokenizer.pad_token_id is None:
            raise ValueError(
                "batch_format='padded' pads, and the tokenizer has no padding token; set tokenizer.pad_token, or choose 'packed'"
            )
        self.stock = DataCollatorForLanguageModeling(
            self.tokenizer,
            mlm_probability=self.mlm_probability,
            mask_replace_prob=self.mask_replace_prob,
            random_replace_prob=self.random_replace_prob,
            seed=self.seed,
        )
        self.special_ids = torch.tensor(self.tokenizer.all_special_ids)

    def __call__(self, documents: list[dict]) -> dict:
        """Turn N tokenized documents into one packed row of T tokens.

        Args:
            documents: Dicts with `input_ids`. Tokens whose `attention_mask` is 0 are padding and are removed. A dict that also
                has `position_ids` is a packed row, for example of `PackedStream`; a position that does not increase begins a
                document. With `mask_seed`, the masks of a row depend only on this number and the row.

        Returns:
            `input_ids`, `labels` and `position_ids` (1, T); positions begin at 0 in each document. With
            `return_flash_attn_kwargs` also `cu_seq_lens_q` and `cu_seq_lens_k` (N + 1,) int32, and `max_length_q` and
            `max_length_k` as integers. "concatenated": without `position_ids`. "padded": `input_ids`, `labels` and
            `attention_mask` (N, longest).
        """
        is_seeded = bool(documents) and "mask_seed" in documents[0]
        masked = [self._mask(rows) for rows in ([[row] for row in documents] if is_seeded else [documents])]
        input_ids, labels = ([document for part in parts for document in part] for parts in zip(*masked))
        if self.batch_format == "padded":
            return {
                "input_ids": pad_sequence(input_ids, batch_first=True, padding_value=self.tokenizer.pad_token_id),
                "attention_mask": pad_sequence([torch.ones_like(ids) for ids in input_ids], batch_first=True),
                "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
            }
        row = {"input_ids": torch.cat(input_ids)[None], "labels": torch.cat(labels)[None]}
        if self.batch_format == "concatenated":
            return row
        row["position_ids"] = torch.cat([torch.arange(len(ids)) for ids in input_ids])[None]
        if self.return_flash_attn_kwargs:
            lengths = torch.tensor([0, *map(len, input_ids)])
            boundaries, longest = lengths.cumsum(0).int(), int(lengths.max())
            row |= {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
            row |= {"max_length_q": longest, "max_length_k": longest}
            row |= {"trust_boundaries": True} if self.trust_boundaries else {}
        return row

    def _mask(self, rows):
        """Return masked ids and labels of each document; transformers' collator draws the masks on the padded batch."""
        documents = [document for row in rows for document in _documents_of(row)]
        lengths = list(map(len, documents))
        if 0 in lengths:
            raise ValueError(
                f"document {lengths.index(0)} of the batch holds no token; drop empty documents before packing"
            )
        if "mask_seed" in rows[0]:
            self.stock.generator = torch.Generator().manual_seed(rows[0]["mask_seed"])
        elif self.seed is not None and self.stock.generator is None:
            self.stock.create_rng()
        # Padding is cut off below, so it may be any special token; a tokenizer may have no padding token.
        ids = pad_sequence(documents, batch_first=True, padding_value=self.tokenizer.mask_token_id)
        masked, labels = self.stock.torch_mask_tokens(ids, torch.isin(ids, self.special_ids))
        return tuple([document[:length] for document, length in zip(part, lengths)] for part in (masked, labels))


def _documents_of(row):
    ids = torch.as_tensor(row["input_ids"])
    is_real = torch.as_tensor(row["attention_mask"]).bool() if row.get("attention_mask") is not None else slice(None)
    if "position_ids" not in row:
        return [ids[is_real]]
    ids, positions = ids[is_real], torch.as_tensor(row["position_ids"])[is_real]
    if len(positions) != len(ids) or positions[:1].tolist() != [0]:
        raise ValueError(
            f"a packed row has {len(ids)} input_ids and {len(positions)} position_ids that begin with "
            f"{positions[:1].tolist()}; give one position for each token, and 0 where a document begins"
        )
    starts = [0, *((positions.diff() <= 0).nonzero().flatten() + 1).tolist()]  # as the model reads them
    return list(ids.split([end - start for start, end in zip(starts, [*starts[1:], len(ids)])]))
