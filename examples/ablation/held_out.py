"""The loss of each held-out document, at masks that depend on neither the model nor its recipe."""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from neobert_hf.pretraining import PackedMLMCollator

MASK_RATE = 0.2  # whatever the rate of the training


def held_out_losses(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    max_length: int,
    mask_rate: float = MASK_RATE,
    batch_size: int = 16,
) -> dict[str, list[float]]:
    """Return the loss of each document at masked tokens; the masks depend on the document's number and the tokenizer alone.

    Args:
        model: A masked language model.
        tokenizer: Its tokenizer.
        texts: The N documents.
        max_length: Length in tokens at which a document is cut.
        mask_rate: Share of the tokens that are masked, all by the mask token.
        batch_size: Documents in a batch.

    Returns:
        N values each: `loss`, the mean over the masked tokens, NaN for a document without one; `num_correct`; `num_masked`;
        `num_tokens`, without special tokens; and `num_characters` that these tokens cover.
    """
    encoded = tokenizer(list(texts), truncation=True, max_length=max_length, return_offsets_mapping=True)
    num_tokens = [len(ids) - tokenizer.num_special_tokens_to_add() for ids in encoded["input_ids"]]
    found = {name: np.full(len(texts), math.nan) for name in ("loss", "num_correct", "num_masked")}
    collator, names = PackedMLMCollator(tokenizer, mask_rate, batch_format="padded"), ("input_ids", "attention_mask")
    by_length = np.argsort([len(ids) for ids in encoded["input_ids"]], kind="stable").tolist()
    model.eval()
    for start in range(0, len(texts), batch_size):
        numbers = by_length[start : start + batch_size]
        batch = collator([{name: encoded[name][i] for name in names} | {"mask_seed": i} for i in numbers])
        labels = batch.pop("labels").to(model.device)
        with torch.no_grad():
            logits = model(**{name: value.to(model.device) for name, value in batch.items()}).logits.float()
        is_label = labels != -100
        sums = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1)
        found["loss"][numbers] = (sums / is_label.sum(1)).cpu()  # 0 / 0 is NaN
        found["num_correct"][numbers] = ((logits.argmax(-1) == labels) & is_label).sum(1).cpu()
        found["num_masked"][numbers] = is_label.sum(1).cpu()
    ends = [max((end for _, end in offsets), default=0) for offsets in encoded["offset_mapping"]]
    found = {name: values.tolist() for name, values in found.items()}
    return found | {"num_tokens": num_tokens, "num_characters": ends}
