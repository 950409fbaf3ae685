"""Losses of the heads: a mean over items, or under Trainer a sum divided by the number of items in the optimizer step.

Trainer counts the labels of all accumulation steps and devices, also those at padding, which are ignored here, and passes the
number as `num_items_in_batch`. Division by it makes 1 x 8 and 8 x 1 (batch x accumulation) the same step.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .layout_neobert import SequenceLayout
from .machine_neobert import widen

LOSS_CHUNK = 1024  # labels whose logits are in memory together: 125 MB in fp32 with a vocabulary of 30,522
IGNORE_INDEX = -100  # labels with this value are ignored, as everywhere in PyTorch
ELEMENTWISE_LOSSES = {
    "regression": F.mse_loss,
    "multi_label_classification": F.binary_cross_entropy_with_logits,
}


def mean_loss(
    losses: Tensor,
    num_items: Tensor | int,
    num_items_in_batch=None,
) -> Tensor:
    """Sum of the losses divided by `num_items_in_batch` if given, else by `num_items`; zero without items."""
    count = num_items if num_items_in_batch is None else num_items_in_batch
    if not isinstance(count, Tensor):
        count = torch.tensor(count, device="cpu")
    count = count.clamp(min=1)
    # A number on the CPU can divide a tensor on any device; copying it to the device would make the host wait.
    if count.device.type != "cpu":
        count = count.to(losses.device)
    return losses.sum() / count


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    num_items_in_batch=None,
) -> Tensor:
    """Mean cross-entropy over the labels that are not -100, in fp32 or fp64; logits (M, C), labels (M,)."""
    losses = F.cross_entropy(widen(logits), labels, reduction="none", ignore_index=IGNORE_INDEX)
    return mean_loss(losses, (labels != IGNORE_INDEX).sum(), num_items_in_batch)


def cross_entropy_in_chunks(
    decode: Callable[[Tensor], Tensor],
    hidden_MD: Tensor,
    labels: Tensor,
    num_items_in_batch=None,
) -> tuple[Tensor, Tensor]:
    """`cross_entropy(decode(hidden_MD), labels)` for labels (M,) without -100, with one chunk of logits in memory at a time.

    The backward pass computes the logits of each chunk again; on masked tokens this takes 2 % of a training step.

    Returns:
        The loss, and the number of labels that have the largest logit.
    """

    def sum_losses(hidden, labels):
        logits = decode(hidden)
        num_correct = (logits.detach().argmax(-1) == labels).sum()
        return F.cross_entropy(widen(logits), labels, reduction="sum"), num_correct

    chunks = list(zip(hidden_MD.split(LOSS_CHUNK), labels.split(LOSS_CHUNK)))
    if len(chunks) == 1:
        sums = [sum_losses(hidden_MD, labels)]
    else:
        sums = [checkpoint(sum_losses, *chunk, use_reentrant=False) for chunk in chunks]
    losses, num_correct = map(torch.stack, zip(*sums))
    return mean_loss(losses, labels.numel(), num_items_in_batch), num_correct.sum()


def classification_loss(
    config,
    logits: Tensor,
    labels: Tensor,
    num_items_in_batch=None,
) -> Tensor:
    """Loss of sequence classification by `config.problem_type`; if it is None, the first labels determine it.

    Args:
        config: Has `num_labels` and `problem_type`, which this function sets, as transformers' own models do.
        logits: (N, C).
        labels: (N,) class ids; or (N, C) values for multi label and regression, also (N,) if C is 1.

    Raises:
        ValueError: The labels do not have the shape that the problem type requires, or the problem type is unknown.
    """
    problem_type = config.problem_type
    if problem_type is None:
        problem_type = _problem_type_of(labels, config.num_labels)
    is_single = problem_type == "single_label_classification"
    if not is_single and problem_type not in ELEMENTWISE_LOSSES:
        kinds = ", ".join(("single_label_classification", *ELEMENTWISE_LOSSES))
        raise ValueError(f"problem_type={problem_type!r} is not one of {kinds}")
    if is_single:
        check_labels(labels, logits.shape[:1], "one class id for each sequence")
        config.problem_type = problem_type  # set only after the labels were checked
        return cross_entropy(logits, labels, num_items_in_batch)
    if config.num_labels == 1 and labels.ndim == 1:
        labels = labels[:, None]
    check_labels(labels, logits.shape, f"{config.num_labels} values for each sequence")
    config.problem_type = problem_type
    logits = widen(logits)
    losses = ELEMENTWISE_LOSSES[problem_type](logits, labels.to(logits.dtype), reduction="none")
    return mean_loss(losses, labels.numel(), num_items_in_batch)


def _problem_type_of(labels, num_labels):
    if num_labels == 1:
        return "regression"
    if labels.is_floating_point() or labels.ndim > 1:
        return "multi_label_classification"
    return "single_label_classification"


def span_loss(
    logits: tuple,
    positions: tuple,
    is_real_BL: Tensor,
    num_items_in_batch=None,
) -> Tensor:
    """Mean of the cross-entropies of start and end position.

    Args:
        logits: Start and end logits, (B, L) each.
        positions: Start and end columns, (B,) each. A column outside 0 to L - 1, of a truncated answer, is ignored, and so is one
            of padding.
        is_real_BL: (B, L) bool, True at tokens that are not padding.
    """
    losses = []
    for logits_BL, columns in zip(logits, positions):
        num_rows, num_columns = logits_BL.shape
        check_labels(columns, (num_rows,), "one column for each row")
        in_row = columns.clamp(0, num_columns - 1)
        is_answer = (columns == in_row) & is_real_BL.gather(1, in_row[:, None])[:, 0]
        labels = columns.masked_fill(~is_answer, IGNORE_INDEX)
        losses.append(cross_entropy(logits_BL, labels, num_items_in_batch))
    return sum(losses) / 2


def check_labels(labels: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """Raise ValueError if `labels` does not have `shape`; `meaning` says what one label stands for."""
    if tuple(labels.shape) != tuple(shape):
        raise ValueError(f"labels have shape {tuple(labels.shape)}, expected {tuple(shape)}: {meaning}")


def flatten_labels(labels_BL: Tensor, layout: SequenceLayout) -> Tensor:
    """(T,) labels on the flat axis; labels at padding are removed, or ignored where the layout keeps padding."""
    check_labels(labels_BL, layout.shape, "one for each input token")
    return layout.flatten(labels_BL, fill=IGNORE_INDEX)


def find_labels(labels_BL: Tensor, layout: SequenceLayout) -> Tensor:
    """(S,) int64, indices of the labels on the flat axis; it waits for the device, with all blocks but the last queued."""
    is_label_T = flatten_labels(labels_BL, layout) != IGNORE_INDEX
    return is_label_T.nonzero().flatten()
