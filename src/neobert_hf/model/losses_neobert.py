"""Losses of the heads: a mean over items, or Trainer's sum over the number of items in a whole optimizer step.

Trainer counts the labels of all accumulation steps and devices and passes the number as `num_items_in_batch`. Dividing the
sum by it, instead of averaging averages, makes 1 x 8, 2 x 4 and 8 x 1 (batch x accumulation) the same step.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from .layout_neobert import OnHost, SequenceLayout, to_device

LOSS_CHUNK = 1024  # labels whose logits exist at once: 125 MB in fp32 with a vocabulary of 30,522
IGNORE_INDEX = -100  # labels with this value do not count, as everywhere in PyTorch
ELEMENTWISE_LOSSES = {
    "regression": F.mse_loss,
    "multi_label_classification": F.binary_cross_entropy_with_logits,
}


def mean_loss(losses: torch.Tensor, num_items: torch.Tensor | int, num_items_in_batch=None) -> torch.Tensor:
    """Sum of the losses over `num_items_in_batch` if Trainer counted it, else over `num_items`; zero if there is none."""
    count = torch.as_tensor(num_items if num_items_in_batch is None else num_items_in_batch).clamp(min=1)
    # A number on the host divides a tensor anywhere; bringing it to the device first would make the host wait.
    return losses.sum() / (count if count.device.type == "cpu" else count.to(losses.device))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch=None) -> torch.Tensor:
    """Cross-entropy per label that is not -100, in fp32 at least; logits (M, C), labels (M,)."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE_INDEX)
    return mean_loss(losses, (labels != IGNORE_INDEX).sum(), num_items_in_batch)


def cross_entropy_in_chunks(
    decode: Callable[[torch.Tensor], torch.Tensor],
    hidden_MD: torch.Tensor,
    labels: torch.Tensor,
    num_items_in_batch=None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cross_entropy(decode(hidden_MD), labels)` for labels (M,) without -100, with the logits of one chunk at a time.

    The backward pass computes the logits of each chunk once more; on masked tokens that is 2 % of a step.

    Returns:
        The loss, and the number of labels that the logits rank first.
    """

    def summed(hidden, labels):
        logits = decode(hidden)
        num_correct = (logits.detach().argmax(-1) == labels).sum()
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits, labels, reduction="sum"), num_correct

    chunks = list(zip(hidden_MD.split(LOSS_CHUNK), labels.split(LOSS_CHUNK)))
    if len(chunks) == 1:
        sums = [summed(hidden_MD, labels)]
    else:
        sums = [checkpoint(summed, *chunk, use_reentrant=False) for chunk in chunks]
    losses, num_correct = map(torch.stack, zip(*sums))
    return mean_loss(losses, labels.numel(), num_items_in_batch), num_correct.sum()


def classification_loss(config, logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch=None) -> torch.Tensor:
    """Loss of sequence classification by `config.problem_type`, which the first labels decide if it is open.

    Args:
        config: Has `num_labels` and `problem_type`; the latter is set here, as in transformers' own models.
        logits: (N, C).
        labels: (N,) class ids; or (N, C) values for multi label and regression, (N,) too if C is 1.
        num_items_in_batch: From Trainer.

    Raises:
        ValueError: The labels do not have the shape that the problem type wants, or there is no such type.
    """
    problem_type = config.problem_type
    if problem_type is None:
        is_single = not labels.is_floating_point() and labels.ndim == 1
        problem_type = "single_label_classification" if is_single else "multi_label_classification"
        problem_type = "regression" if config.num_labels == 1 else problem_type
    is_single = problem_type == "single_label_classification"
    if not is_single and problem_type not in ELEMENTWISE_LOSSES:
        kinds = ", ".join(("single_label_classification", *ELEMENTWISE_LOSSES))
        raise ValueError(f"problem_type={problem_type!r} is not one of {kinds}")
    if is_single:
        check_labels(labels, logits.shape[:1], "one class id for each sequence")
    else:
        labels = labels[:, None] if config.num_labels == 1 and labels.ndim == 1 else labels
        check_labels(labels, logits.shape, f"{config.num_labels} values for each sequence")
    config.problem_type = problem_type  # labels that fit, and only such, settle it
    if is_single:
        return cross_entropy(logits, labels, num_items_in_batch)
    loss = ELEMENTWISE_LOSSES[problem_type]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = loss(logits, labels.to(logits.dtype), reduction="none")
    return mean_loss(losses, labels.numel(), num_items_in_batch)


def span_loss(logits: tuple, positions: tuple, num_items_in_batch=None) -> torch.Tensor:
    """Mean of the cross-entropies of start and end over columns.

    Args:
        logits: Start and end logits, (B, L) each.
        positions: Start and end columns, (B,) each; outside 0 to L - 1 the answer was cut off and does not count.
        num_items_in_batch: From Trainer.

    Raises:
        ValueError: There is not one position for each row.
    """
    losses = []
    for logits_BL, columns in zip(logits, positions):
        num_rows, num_columns = logits_BL.shape
        check_labels(columns, (num_rows,), "one column for each row")
        is_cut_off = (columns < 0) | (columns >= num_columns)
        losses.append(cross_entropy(logits_BL, columns.masked_fill(is_cut_off, IGNORE_INDEX), num_items_in_batch))
    return sum(losses) / 2


def check_labels(labels: torch.Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """Raise ValueError if `labels` does not have `shape`; `meaning` says what one label stands for."""
    if tuple(labels.shape) != tuple(shape):
        raise ValueError(f"labels have shape {tuple(labels.shape)}, expected {tuple(shape)}: {meaning}")


def mark_labels(
    labels: torch.Tensor | None, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None
) -> torch.Tensor | None:
    """(B, L) bool, True where there is a label; None without labels.

    Raises:
        ValueError: There is not one label for each token.
    """
    tokens = inputs_embeds if input_ids is None else input_ids
    if labels is None or tokens is None:
        return None
    check_labels(labels, tokens.shape[:2], "one for each input token")
    return labels != IGNORE_INDEX


def mark_ends(
    ends: tuple[torch.Tensor, torch.Tensor] | None,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
) -> torch.Tensor | None:
    """(B, L) bool, True where an answer starts or ends; None without answers, and for columns that are refused later."""
    tokens = inputs_embeds if input_ids is None else input_ids
    if ends is None or tokens is None or any(columns.shape != tokens.shape[:1] for columns in ends):
        return None
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    return (columns == ends[0][:, None]) | (columns == ends[1][:, None])


def check_no_label_at_padding(on_host: OnHost) -> None:
    """Raise ValueError where what was copied to the host has a label at padding; nothing without a padding mask."""
    if on_host.copied is None or on_host.is_real is None:
        return
    is_wrong = on_host.copied & ~on_host.is_real
    if is_wrong.any():
        row, column = is_wrong.nonzero()[0].tolist()
        raise ValueError(
            f"labels[{row}, {column}] is a label, but the attention_mask says padding; set labels to {IGNORE_INDEX} there "
            "(a label is also where an answer starts or ends)"
        )


def find_label_indices(labels_T: torch.Tensor, on_host: OnHost, layout: SequenceLayout) -> torch.Tensor:
    """(M,) int64, places on the flat axis that have a label.

    Where no value was copied to the host, it waits for the device here, when the blocks already run.
    """
    if on_host.copied is None:
        return (labels_T != IGNORE_INDEX).nonzero().flatten()
    is_label = on_host.copied.flatten() if layout.indices is None else on_host.copied[on_host.is_real]
    return to_device(is_label.nonzero().flatten(), labels_T.device)
