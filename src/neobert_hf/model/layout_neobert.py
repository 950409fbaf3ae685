"""`make_layout`: from whatever describes the sequences of a batch to one layout, checked, before the first block.

A batch comes as padded rows with a mask, as documents packed into a row with `cu_seq_lens`, or as rows whose
`position_ids` restart. All of them become a `SequenceLayout`: packed where values may be looked at, so that padding costs
nothing, and dense under tracing and where the caller wants it.

Axes: `B` rows, `L` columns of the input; `T` tokens on the flat axis; `N` sequences.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F


class SequenceLayout(NamedTuple):
    """Where sequences begin and end on the flat token axis; made once for each forward.

    Attributes:
        shape: (B, L) of the input.
        position_ids: (T,) int64, the position that RoPE gives each token.
        first_tokens: (N,) int64, index on the flat axis of each sequence's first real token.
        cu_seq_lens: (N + 1,) int32 boundaries of a packed layout; None in a dense layout.
        lengths: N sequence lengths of a packed layout, on the host; None in a dense layout and under tracing.
        max_length: The longest of `lengths`.
        indices: (T,) int64, place of each packed token in the flattened (B * L) input; None if every place is kept.
        is_real: (B, L) bool, True at tokens that are not padding, in a dense layout with a padding mask; else None.
        documents: (B, L) int64 in a dense layout of packed rows: tokens attend where it is equal; else None.
    """

    shape: tuple[int, int]
    position_ids: torch.Tensor
    first_tokens: torch.Tensor
    cu_seq_lens: torch.Tensor | None = None
    lengths: tuple[int, ...] | None = None
    max_length: int | None = None
    indices: torch.Tensor | None = None
    is_real: torch.Tensor | None = None
    documents: torch.Tensor | None = None

    @property
    def is_packed(self) -> bool:
        """Whether the flat axis holds real tokens only."""
        return self.cu_seq_lens is not None

    def flatten(self, x_BL: torch.Tensor, fill: float | None = None) -> torch.Tensor:
        """Bring (B, L, ...) to (T, ...); with `fill`, padding that a dense layout keeps gets this value."""
        if fill is not None and self.is_real is not None:
            x_BL = x_BL.masked_fill(~self.is_real, fill)
        x_T = x_BL.flatten(0, 1)
        return x_T if self.indices is None else x_T[self.indices]

    def unflatten(self, x_T: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """Bring (T, ...) back to (B, L, ...); padding gets `fill`."""
        if self.indices is not None:
            flat = x_T.new_full((self.shape[0] * self.shape[1], *x_T.shape[1:]), fill)
            x_T = flat.index_copy(0, self.indices, x_T)
        x_BL = x_T.unflatten(0, self.shape)
        if self.is_real is not None:
            x_BL = x_BL.masked_fill(~self.is_real.view(*self.shape, *[1] * (x_BL.ndim - 2)), fill)
        return x_BL

    def sequence_ids(self) -> torch.Tensor:
        """(T,) int64, a number for each token that two tokens share when they belong to the same sequence."""
        if self.is_packed:
            return sequence_of_each_token(self.cu_seq_lens, len(self.position_ids))
        rows = torch.arange(self.shape[0], device=self.position_ids.device)[:, None]
        within_row = torch.zeros_like(rows) if self.documents is None else self.documents
        return (rows * self.shape[1] + within_row).expand(self.shape).flatten()


class OnHost(NamedTuple):
    """What was copied to the host; both None where no value was looked at.

    Attributes:
        is_real: (B, L) bool, True at tokens that are not padding; None without a padding mask.
        copied: (B, L) bool, what the caller wanted with the same copy.
    """

    is_real: torch.Tensor | None = None
    copied: torch.Tensor | None = None


def sequence_of_each_token(cu_seq_lens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """(T,) int64, the number of the sequence between whose boundaries each token lies; waits for no value."""
    tokens = torch.arange(num_tokens, device=cu_seq_lens.device)
    return torch.bucketize(tokens, cu_seq_lens[1:].long(), right=True)


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host to `device`, without waiting where that is safe.

    Towards CUDA the copy starts from pinned memory, which torch keeps until the copy is done. Elsewhere memory that is freed
    too early can arrive as garbage (pytorch issues 139550 and 189690), so there the copy waits.
    """
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def check_tokens(input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
    """Return the one of the two that was given.

    Args:
        input_ids: (B, L) token ids.
        inputs_embeds: (B, L, D) in their place.

    Raises:
        ValueError: Both or neither is given, or its shape is another.
    """
    if (input_ids is None) == (inputs_embeds is None):
        given = "neither" if input_ids is None else "both"
        raise ValueError(f"{given} of input_ids and inputs_embeds given; give exactly one")
    tokens = input_ids if inputs_embeds is None else inputs_embeds
    if tokens.ndim != (2 if inputs_embeds is None else 3):
        rule = "input_ids is (rows, columns), inputs_embeds (rows, columns, hidden_size)"
        raise ValueError(f"{rule}, got shape {tuple(tokens.shape)}")
    return tokens


def make_layout(
    tokens: torch.Tensor,
    *,
    vocab_size: int,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens: list[torch.Tensor] | tuple[torch.Tensor, ...] = (),
    max_length: int | None = None,
    copy_to_host: torch.Tensor | None = None,
    is_packed: bool = True,
    may_look: bool = True,
) -> tuple[SequenceLayout, OnHost]:
    """Turn whatever describes the sequences into one layout, with one copy from device to host at most.

    Args:
        tokens: (B, L) input ids, or (B, L, D) embeddings.
        vocab_size: Input ids must be below this.
        attention_mask: (B, L) with 0 at padding, any side, holes too; or 4-D, which says nothing of sequences.
        position_ids: (B, L), (1, L) or (L,). Without an attention mask, every 0 begins a new sequence.
        cu_seq_lens: (N + 1,) boundaries of the sequences in a single packed row, under every name they were given.
        max_length: Length of the longest sequence; only checked, but needed where no value is looked at.
        copy_to_host: (B, L) bool that the caller needs on the host; it comes with the same copy.
        is_packed: Take padding out of the computation; False keeps it.
        may_look: Look at values and check them. Without, a packed layout needs `cu_seq_lens` and `max_length`.

    Raises:
        ValueError: Values or shapes contradict each other; the message names both and the way out.
    """
    shape, device = tuple(tokens.shape[:2]), tokens.device
    first_cu_seq_lens = cu_seq_lens[0] if cu_seq_lens else None
    _check_shapes(shape, attention_mask, position_ids, first_cu_seq_lens)
    if position_ids is not None:
        position_ids = position_ids.expand(shape)
    is_real = attention_mask != 0 if attention_mask is not None and attention_mask.ndim == 2 else None
    has_4d_mask = attention_mask is not None and is_real is None
    if not may_look:
        if is_packed:
            if max_length is None:
                raise ValueError(
                    "max_length_q is missing; where no value of cu_seq_lens is looked at, while compiling and with "
                    "trust_boundaries, give it as a whole number"
                )
            return _packed_layout(shape, device, position_ids, first_cu_seq_lens.int(), max_length), OnHost()
        return _dense_layout(shape, device, has_4d_mask, is_real, position_ids, first_cu_seq_lens), OnHost()

    boundaries, on_host = _look_at_values(
        tokens, vocab_size, attention_mask, position_ids, cu_seq_lens, max_length, copy_to_host
    )
    if not is_packed:
        layout = _dense_layout(shape, device, has_4d_mask, is_real, position_ids, first_cu_seq_lens, boundaries)
        return layout, on_host
    lengths, boundaries = tuple(boundaries.diff().tolist()), to_device(boundaries.int(), device)
    return _packed_layout(shape, device, position_ids, boundaries, max(lengths), lengths, on_host.is_real), on_host


def _packed_layout(shape, device, position_ids, cu_seq_lens, max_length, lengths=None, is_real_on_host=None):
    """Put real tokens one after the other."""
    indices = None
    if is_real_on_host is not None and not is_real_on_host.all():
        columns = torch.arange(shape[1]) - is_real_on_host.long().argmax(-1)[:, None]
        position_ids = to_device(columns, device) if position_ids is None else position_ids
        indices = to_device(is_real_on_host.flatten().nonzero().flatten(), device)
    if position_ids is not None:
        position_ids = position_ids.reshape(-1)
        position_ids = position_ids if indices is None else position_ids[indices]
    else:
        tokens = torch.arange(shape[0] * shape[1], device=device)
        position_ids = tokens - cu_seq_lens[sequence_of_each_token(cu_seq_lens, len(tokens))].long()
    return SequenceLayout(
        shape=shape,
        position_ids=position_ids,
        first_tokens=cu_seq_lens[:-1].long(),
        cu_seq_lens=cu_seq_lens,
        lengths=lengths,
        max_length=max_length,
        indices=indices,
    )


def _dense_layout(shape, device, has_4d_mask, is_real, position_ids, cu_seq_lens, boundaries=None):
    """Keep the shape (B, L); nothing here looks at a value.

    `boundaries` are on the host, and None while tracing.
    """
    num_rows, num_columns = shape
    columns = torch.arange(num_columns, device=device).expand(shape)
    first_tokens = torch.arange(num_rows, device=device) * num_columns
    documents = None
    if cu_seq_lens is not None:
        documents = sequence_of_each_token(cu_seq_lens, num_columns)[None]
        first_tokens = cu_seq_lens[:-1].long()
    elif position_ids is not None and is_real is None and not has_4d_mask:
        # While tracing nobody can see whether positions restart, so the mask has to be there in any case.
        if boundaries is None or len(boundaries) - 1 > num_rows:
            documents = ((position_ids == 0) | (columns == 0)).long().cumsum(-1) - 1
            first_tokens = first_tokens if boundaries is None else to_device(boundaries[:-1], device)
    elif is_real is not None:
        first_column = is_real.long().argmax(-1)
        first_tokens = first_tokens + first_column
        position_ids = columns - first_column[:, None] if position_ids is None else position_ids
        position_ids = position_ids.masked_fill(~is_real, 0)  # padding is not the longest position of its row

    if position_ids is None:
        position_ids = columns if documents is None else columns - cu_seq_lens[documents].long()
    return SequenceLayout(
        shape=shape,
        position_ids=position_ids.reshape(-1),
        first_tokens=first_tokens,
        is_real=is_real,
        documents=documents,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Checks: of shapes, and of values, all of these on one host copy
# ----------------------------------------------------------------------------------------------------------------------


def _check_shapes(shape, attention_mask, position_ids, cu_seq_lens):
    if 0 in shape:
        raise ValueError(f"input of {shape[0]} rows and {shape[1]} columns is empty; give at least one token")
    if cu_seq_lens is not None and attention_mask is not None:
        raise ValueError(
            "both cu_seq_lens and attention_mask are given; packed rows hold no padding, so leave out the mask"
        )
    if cu_seq_lens is not None and shape[0] != 1:
        raise ValueError(f"cu_seq_lens describes one packed row, but the input has {shape[0]}; flatten it to (1, T)")
    if position_ids is not None and not _fits(position_ids, shape[-position_ids.ndim :] if position_ids.ndim else ()):
        raise ValueError(f"position_ids has shape {tuple(position_ids.shape)}, which does not fit {shape} of the input")
    if attention_mask is not None:
        pairs = (shape[0], None, shape[1], shape[1])
        if not (_fits(attention_mask, pairs) or tuple(attention_mask.shape) == shape):
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, the input {shape}; "
                "give a mask of the input's shape or a 4-D one"
            )


def _fits(tensor, shape):
    """Whether `tensor` has as many axes as `shape` and broadcasts to it; None stands for any length."""
    axes = tensor.shape
    return len(axes) == len(shape) and all(have == 1 or want in (None, have) for have, want in zip(axes, shape))


def _look_at_values(tokens, vocab_size, attention_mask, position_ids, all_cu_seq_lens, max_length, copy_to_host):
    """Check the values and find the boundaries of the sequences.

    Returns:
        (N + 1,) int64 boundaries, in tokens of the packed layout, on the host; and what else is there now.
    """
    input_ids = tokens if tokens.ndim == 2 else tokens.new_zeros(1)
    is_4d = attention_mask is not None and attention_mask.ndim == 4
    id_range, mask, positions, has_odd_mask, copied, *all_boundaries = _copy_to_host(
        torch.stack(input_ids.aminmax()),
        None if attention_mask is None or is_4d else attention_mask != 0,
        position_ids,
        None if attention_mask is None else _is_odd(attention_mask),
        copy_to_host,
        *all_cu_seq_lens,
    )
    smallest, largest = id_range.tolist()
    if tokens.ndim == 2 and not 0 <= smallest <= largest < vocab_size:
        wrong = smallest if smallest < 0 else largest
        raise ValueError(
            f"input_ids holds {wrong}, but the vocabulary ends at {vocab_size - 1}; "
            "use the tokenizer that belongs to the model, or resize_token_embeddings"
        )
    if has_odd_mask and not is_4d:
        raise ValueError(
            f"the 2-D attention_mask of {attention_mask.dtype} holds values other than 0 and 1; it is 1 at tokens and 0 at "
            "padding: of a mask to be added to the scores, 0 and -inf, give `attention_mask == 0`"
        )
    if has_odd_mask:
        raise ValueError(
            f"the 4-D attention_mask of {attention_mask.dtype} holds values that no mask has: a bool or integer mask is 1 "
            "where a token may attend and 0 elsewhere, a floating one is added to the scores, so 0 there and negative elsewhere"
        )
    num_rows, num_columns = tokens.shape[:2]
    if mask is not None:
        mask = mask.bool()
        lengths = mask.sum(-1)
        if not lengths.all():
            row = int((lengths == 0).nonzero()[0])
            raise ValueError(
                f"row {row} of attention_mask has no real token, that is no 1; remove the row or give it at least one"
            )
    else:
        lengths = torch.full((num_rows,), num_columns)

    starts = None if positions is None or attention_mask is not None else _starts_of_sequences(positions)
    if all_boundaries:
        boundaries = all_boundaries[0]
        for other in all_boundaries[1:]:
            if not torch.equal(boundaries, other):
                raise ValueError(
                    f"cu_seq_lens is given more than once with different values, {_some(boundaries.flatten())} and "
                    f"{_some(other.flatten())}; queries and keys are the same tokens, so give it once"
                )
        _check_cu_seq_lens(boundaries, num_columns)
        if starts is not None and not torch.equal(starts, boundaries[:-1]):
            raise ValueError(
                f"cu_seq_lens begins sequences at {_some(boundaries[:-1])}, position_ids restarts at {_some(starts)}; "
                "they must agree, or leave position_ids out"
            )
    elif starts is not None:
        boundaries = torch.cat((starts, torch.tensor([num_rows * num_columns])))
    else:
        boundaries = F.pad(lengths.cumsum(0), (1, 0))

    longest = int(boundaries.diff().max())
    if max_length is not None and int(max_length) < longest:
        raise ValueError(
            f"max_length_q={int(max_length)} is below the longest sequence, {longest} tokens; correct it or leave it out"
        )
    return boundaries, OnHost(mask, None if copied is None else copied.bool())


def _copy_to_host(*tensors):
    """Copy int tensors (or None) to the host as int64 with a single synchronisation."""
    present = [tensor for tensor in tensors if tensor is not None]
    flat = torch.cat([tensor.reshape(-1).long() for tensor in present]).cpu()
    parts = iter(flat.split([tensor.numel() for tensor in present]))
    return [None if tensor is None else next(parts).view(tensor.shape) for tensor in tensors]


def _starts_of_sequences(positions):
    """Flat indices where packed rows begin a sequence: every row's first token and every position 0."""
    is_start = positions == 0
    is_start[:, 0] = True
    grows = F.pad(positions.diff(dim=-1) > 0, (1, 0), value=True)
    if not (is_start | grows).all():
        row, column = (~(is_start | grows)).nonzero()[0].tolist()
        raise ValueError(
            f"position_ids[{row}, {column}]={int(positions[row, column])} follows {int(positions[row, column - 1])}; inside a "
            "sequence positions grow, a new one begins at 0; give an attention_mask as well to use positions freely"
        )
    return is_start.flatten().nonzero().flatten()


def _check_cu_seq_lens(boundaries, num_tokens):
    if boundaries.ndim != 1 or len(boundaries) < 2:
        raise ValueError(f"cu_seq_lens has shape {tuple(boundaries.shape)}; it is one row of N + 1 boundaries, 0 first")
    if boundaries[0] != 0:
        raise ValueError(f"cu_seq_lens begins with {int(boundaries[0])}; the first boundary is 0")
    if boundaries[-1] != num_tokens:
        raise ValueError(
            f"cu_seq_lens ends with {int(boundaries[-1])}, the row holds {num_tokens} tokens; they must agree"
        )
    if (boundaries.diff() <= 0).any():
        place = int((boundaries.diff() <= 0).nonzero()[0])
        raise ValueError(
            f"cu_seq_lens goes from {int(boundaries[place])} to {int(boundaries[place + 1])}; it must increase: "
            "leave out empty sequences"
        )


def _is_odd(mask):
    """() bool tensor: whether a mask holds values that it cannot mean: a floating 4-D one is added, any other 0 and 1."""
    if mask.dtype == torch.bool:
        return torch.zeros((), dtype=torch.bool, device=mask.device)
    return (mask > 0).any() if mask.ndim == 4 and mask.is_floating_point() else ((mask != 0) & (mask != 1)).any()


def _some(values, count=6):
    shown = ", ".join(str(int(value)) for value in values[:count])
    return shown + (", ..." if len(values) > count else "")
