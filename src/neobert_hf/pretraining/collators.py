"""Collators for masked language modelling."""

from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

# How documents share the rows of a batch: packed rows keep documents apart, padded rows hold one document each, and in a
# concatenated row tokens attend to other documents.
BATCH_FORMATS = ("packed", "padded", "concatenated")


@dataclass
class PackedMLMCollator:
    """Mask tokens and pack the documents of a batch into one row without padding.

    transformers' own collator draws the masks: 20 % of the tokens, all replaced by `[MASK]`, never a special token. They do not
    depend on the batch format.

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
            a document holds no token, or one without a mask holds
            the padding token.

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
        roles = self.tokenizer.special_tokens_map
        others = [roles[name] for name in roles if name != "pad_token"]
        is_text = self.tokenizer.pad_token in [None, *others]  # such as the end of a text
        self.padding_id = -1 if is_text else self.tokenizer.pad_token_id

    def __call__(self, documents: list[dict]) -> dict:
        """Turn N tokenized documents into one packed row of T tokens.

        Args:
            documents: Dicts with `input_ids`. Tokens whose `attention_mask` is 0 are padding and are removed. A dict that also
                has `position_ids` is a packed row, for example of `PackedStream`; a position that does not increase begins a
                document. With `mask_seed`, the masks of a row depend only on this number and the row; a `mask_rate` overrides
                `mlm_probability`.

        Returns:
            `input_ids`, `labels` and `position_ids` (1, T); positions begin at 0 in each document. With
            `return_flash_attn_kwargs` also `cu_seq_lens_q` and `cu_seq_lens_k` (N + 1,) int32, and `max_length_q` and
            `max_length_k` as integers. "concatenated": without `position_ids`. "padded": `input_ids`, `labels` and
            `attention_mask` (N, longest).
        """
        rows = [self._read_row(row) for row in documents]
        lengths = [length for _, lengths in rows for length in lengths]
        if 0 in lengths:
            raise ValueError(
                f"document {lengths.index(0)} of the batch holds no token; drop empty documents before packing"
            )
        if "mask_seed" in documents[0]:
            masked = [self._mask(ids, row["mask_seed"], row.get("mask_rate")) for (ids, _), row in zip(rows, documents)]
            input_ids, labels = (torch.cat(parts) for parts in zip(*masked))
        else:
            input_ids, labels = self._mask(torch.cat([ids for ids, _ in rows]))
        if self.batch_format == "padded":
            return {
                "input_ids": _padded(input_ids, lengths, self.tokenizer.pad_token_id),
                "attention_mask": _padded(torch.ones_like(input_ids), lengths, 0),
                "labels": _padded(labels, lengths, -100),
            }
        batch = {"input_ids": input_ids[None], "labels": labels[None]}
        if self.batch_format == "concatenated":
            return batch
        batch["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
        if self.return_flash_attn_kwargs:
            boundaries = torch.tensor([0, *lengths]).cumsum(0).int()
            batch |= {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
            batch |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
            if self.trust_boundaries:
                batch["trust_boundaries"] = True
        return batch

    def _read_row(self, row):
        """Return the ids of a row without padding, (T,), and the lengths of its documents."""
        ids = torch.as_tensor(row["input_ids"])
        mask = row.get("attention_mask")
        positions = row.get("position_ids")
        if mask is None and positions is None and (ids == self.padding_id).any():
            raise ValueError(
                f"a document holds {self.tokenizer.pad_token} where it may be padding or text; give its attention_mask"
            )
        is_real = slice(None) if mask is None else torch.as_tensor(mask).bool()
        ids = ids[is_real]
        if positions is None:
            return ids, [len(ids)]
        positions = torch.as_tensor(positions)[is_real]
        if len(positions) != len(ids) or positions[:1].tolist() != [0]:
            raise ValueError(
                f"a packed row has {len(ids)} input_ids and {len(positions)} position_ids that begin with "
                f"{positions[:1].tolist()}; give one position for each token, and 0 where a document begins"
            )
        starts = (positions.diff() <= 0).nonzero().flatten() + 1  # as the model reads them
        return ids, torch.tensor([0, *starts.tolist(), len(ids)]).diff().tolist()

    def _mask(self, ids, mask_seed=None, mask_rate=None):
        """Return masked ids and labels, (T,) both."""
        self.stock.mlm_probability = mask_rate or self.mlm_probability
        if mask_seed is not None:
            self.stock.generator = torch.Generator().manual_seed(mask_seed)
        elif self.seed is not None and self.stock.generator is None:
            self.stock.create_rng()
        masked, labels = self.stock.torch_mask_tokens(ids[None].clone(), torch.isin(ids, self.special_ids)[None])
        return masked[0], labels[0]


def _padded(values, lengths, fill):
    """Divide values (T,) into rows of these lengths, (N, longest)."""
    return pad_sequence(values.split(lengths), batch_first=True, padding_value=fill)
