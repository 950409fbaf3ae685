"""`make_layout`: one checked `SequenceLayout` from an attention mask, or from the inputs that mark packed documents.

A batch consists of padded rows with a mask, or of packed rows (see `DocumentMarks`). The layout is packed if tensor values can
be read, so that padding costs no computation. It is dense while tracing, and if the caller requests it.

Axes: `B` rows, `L` columns of the input; `T` tokens on the flat axis; `N` sequences.
"""

import inspect
from typing import NamedTuple

import torch
import torch.nn.functional as F


class SequenceLayout(NamedTuple):
    """Where sequences start and end on the flat token axis; made once per forward.

    Attributes:
        shape: (B, L) of the input.
        position_ids: (T,) int64, position of each token for RoPE.
        first_tokens: (N,) int64, index on the flat axis of each sequence's first real token.
        cu_seq_lens: (N + 1,) int32 boundaries of a packed layout; None in a dense layout.
        lengths: N sequence lengths of a packed layout, on the host; None in a dense layout and while tracing.
        max_length: Length of the longest sequence; None in a dense layout while tracing.
        indices: (T,) int64, index of each packed token in the flattened (B * L) input; None if all tokens are kept.
        is_real: (B, L) bool, True at tokens that are not padding, in a dense layout with a padding mask; else None.
        documents: (B, L) int64 in a dense layout of packed rows, document number of each token; tokens attend only to tokens
            with the same number. Else None.
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
        """Flatten (B, L, ...) to (T, ...); with `fill`, padding in a dense layout is set to this value."""
        if fill is not None and self.is_real is not None:
            x_BL = x_BL.masked_fill(~self.is_real, fill)
        x_T = x_BL.flatten(0, 1)
        return x_T if self.indices is None else x_T[self.indices]

    def unflatten(self, x_T: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """Restore (B, L, ...) from (T, ...); padding is set to `fill`."""
        if self.indices is not None:
            flat = x_T.new_full((self.shape[0] * self.shape[1], *x_T.shape[1:]), fill)
            x_T = flat.index_copy(0, self.indices, x_T)
        x_BL = x_T.unflatten(0, self.shape)
        if self.is_real is not None:
            x_BL = x_BL.masked_fill(~self.is_real.view(*self.shape, *[1] * (x_BL.ndim - 2)), fill)
        return x_BL

    def sequence_ids(self) -> torch.Tensor:
        """(T,) int64, a sequence number for each token, equal only for tokens of the same sequence."""
        if self.is_packed:
            return sequence_of_each_token(self.cu_seq_lens, len(self.position_ids))
        rows = torch.arange(self.shape[0], device=self.position_ids.device)[:, None]
        within_row = torch.zeros_like(rows) if self.documents is None else self.documents
        return (rows * self.shape[1] + within_row).expand(self.shape).flatten()


class DocumentMarks(NamedTuple):
    """The inputs that mark the documents of packed rows. All that are given must agree.

    Attributes:
        position_ids: (B, L), (1, L) or (L,). Without an attention mask, a document begins where a position does not increase.
        seq_idx: (B, L), (1, L) or (L,). A document begins where the number changes.
        cu_seq_lens: For each argument that gives them, the (N + 1,) boundaries of the documents in one row.
        max_length: Length of the longest document; only checked if values are read, required otherwise.
    """

    position_ids: torch.Tensor | None = None
    seq_idx: torch.Tensor | None = None
    cu_seq_lens: dict[str, torch.Tensor] = {}
    max_length: int | None = None


NO_MARKS = DocumentMarks()


def collect_marks(
    position_ids=None,
    seq_idx=None,
    cu_seq_lens_q=None,
    cu_seq_lens_k=None,
    cu_seqlens=None,
    max_length_q=None,
    max_length_k=None,
    max_seqlen=None,
) -> DocumentMarks:
    """Collect the arguments of a forward that mark documents, aliases included."""
    cu_seq_lens = dict(cu_seq_lens_q=cu_seq_lens_q, cu_seq_lens_k=cu_seq_lens_k, cu_seqlens=cu_seqlens)
    cu_seq_lens = {name: value for name, value in cu_seq_lens.items() if value is not None}
    max_length = next((value for value in (max_length_q, max_length_k, max_seqlen) if value is not None), None)
    return DocumentMarks(position_ids, seq_idx, cu_seq_lens, max_length)


MARKS = tuple(inspect.signature(collect_marks).parameters)  # names of the arguments of a forward that mark documents


class HostValues(NamedTuple):
    """Values that were copied to the host; both are None if no value was read.

    Attributes:
        is_real: (B, L) bool, True at tokens that are not padding; None without a padding mask.
        requested: (B, L) bool, `copy_to_host` of the caller, or None.
    """

    is_real: torch.Tensor | None = None
    requested: torch.Tensor | None = None


def find_first_tokens(layout: SequenceLayout, host_values: HostValues) -> torch.Tensor:
    """(N,) int64, index on the flat axis of each sequence's first real token."""
    return layout.first_tokens


def sequence_of_each_token(cu_seq_lens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """(T,) int64, the index of each token's sequence, computed on the device without synchronisation."""
    tokens = torch.arange(num_tokens, device=cu_seq_lens.device)
    return torch.bucketize(tokens, cu_seq_lens[1:].long(), right=True)


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to `device`, asynchronously if that is safe.

    A copy to CUDA starts from pinned memory, which torch keeps until the copy is complete. To other devices an asynchronous
    copy can read memory that was already freed (pytorch issues 139550 and 189690), so there the copy is synchronous.
    """
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def check_tokens(
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    hidden_size: int,
    axes: str = "rows, columns",
) -> torch.Tensor:
    """Return `input_ids` or `inputs_embeds`, whichever is given.

    Args:
        input_ids: (B, L) token ids.
        inputs_embeds: (B, L, D) embeddings in place of `input_ids`.
        hidden_size: D of the model.
        axes: Names of the axes before D.

    Raises:
        ValueError: Both or neither is given, or the shape is wrong.
    """
    if (input_ids is None) == (inputs_embeds is None):
        given = (
            "neither input_ids nor inputs_embeds is" if input_ids is None else "both input_ids and inputs_embeds are"
        )
        raise ValueError(f"{given} given; give exactly one of them")
    num_axes = axes.count(",") + 1
    if input_ids is not None:
        if input_ids.ndim != num_axes:
            raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; it must be ({axes})")
        return input_ids
    if inputs_embeds.ndim != num_axes + 1 or inputs_embeds.shape[-1] != hidden_size:
        raise ValueError(
            f"inputs_embeds has shape {tuple(inputs_embeds.shape)}; it must be ({axes}, hidden_size={hidden_size})"
        )
    return inputs_embeds


def make_layout(
    tokens: torch.Tensor,
    *,
    vocab_size: int,
    attention_mask: torch.Tensor | None = None,
    marks: DocumentMarks = NO_MARKS,
    copy_to_host: torch.Tensor | None = None,
    is_packed: bool = True,
    can_read_values: bool = True,
) -> tuple[SequenceLayout, HostValues]:
    """Make the layout of a batch, with at most one copy from device to host.

    Args:
        tokens: (B, L) input ids, or (B, L, D) embeddings.
        vocab_size: Input ids must be below this.
        attention_mask: (B, L) with 0 at padding, on any side or in between; or 4-D, which does not define sequences.
        marks: The inputs that mark the documents of packed rows; without them every row is one sequence.
        copy_to_host: (B, L) bool that the caller needs on the host; it is part of the same copy.
        is_packed: Remove padding from the computation; False keeps it.
        can_read_values: Read values and check them. If False, a packed layout requires `marks.cu_seq_lens` and
            `marks.max_length`.

    Returns:
        The layout, and the values that were copied to the host.

    Raises:
        ValueError: Values or shapes contradict each other; the message names both and the solution.
    """
    shape, device = tuple(tokens.shape[:2]), tokens.device
    _check_shapes(shape, attention_mask, marks)
    marks = marks._replace(
        position_ids=None if marks.position_ids is None else marks.position_ids.expand(shape),
        seq_idx=None if marks.seq_idx is None else marks.seq_idx.expand(shape),
    )
    is_real = attention_mask != 0 if attention_mask is not None and attention_mask.ndim == 2 else None
    has_4d_mask = attention_mask is not None and is_real is None
    if not can_read_values:
        if not is_packed:
            return _dense_layout(shape, device, has_4d_mask, is_real, marks), HostValues()
        if marks.max_length is None:
            raise ValueError(
                "max_length_q is missing; while compiling and with trust_boundaries=True the values of cu_seq_lens are "
                "not read, so give max_length_q as an integer"
            )
        boundaries = next(iter(marks.cu_seq_lens.values())).int()
        return _packed_layout(shape, device, marks.position_ids, boundaries, marks.max_length), HostValues()

    boundaries, host_values = _read_values(tokens, vocab_size, attention_mask, marks, copy_to_host)
    if not is_packed:
        return _dense_layout(shape, device, has_4d_mask, is_real, marks, boundaries), host_values
    lengths, boundaries = tuple(boundaries.diff().tolist()), to_device(boundaries.int(), device)
    return _packed_layout(
        shape, device, marks.position_ids, boundaries, max(lengths), lengths, host_values.is_real
    ), host_values


def _packed_layout(shape, device, position_ids, cu_seq_lens, max_length, lengths=None, is_real_on_host=None):
    """The layout of the real tokens only, without padding."""
    indices = None
    if is_real_on_host is not None and not is_real_on_host.all():
        columns = torch.arange(shape[1], device="cpu") - is_real_on_host.long().argmax(-1)[:, None]
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


def _dense_layout(shape, device, has_4d_mask, is_real, marks, boundaries=None):
    """The layout that keeps the shape (B, L); no value of a tensor on the device is read.

    `boundaries` are on the host; they are None while tracing.
    """
    num_rows, num_columns = shape
    columns = torch.arange(num_columns, device=device).expand(shape)
    first_tokens = torch.arange(num_rows, device=device) * num_columns
    position_ids, documents = marks.position_ids, None
    if marks.cu_seq_lens:
        cu_seq_lens = next(iter(marks.cu_seq_lens.values()))
        documents = sequence_of_each_token(cu_seq_lens, num_columns)[None]
        first_tokens = cu_seq_lens[:-1].long()
        position_ids = columns - cu_seq_lens[documents].long() if position_ids is None else position_ids
    elif is_real is not None:
        first_column = is_real.long().argmax(-1)
        first_tokens = first_tokens + first_column
        position_ids = columns - first_column[:, None] if position_ids is None else position_ids
        position_ids = position_ids.masked_fill(~is_real, 0)  # padding must not hold the largest position of its row
    elif not has_4d_mask and (marks.seq_idx is not None or position_ids is not None):
        name = "position_ids" if marks.seq_idx is None else "seq_idx"
        is_first = _find_first(name, getattr(marks, name))
        # While tracing, values cannot be read and may mark documents, so the document mask is always made.
        if boundaries is None or len(boundaries) - 1 > num_rows:
            documents = is_first.long().cumsum(-1) - 1
            first_tokens = first_tokens if boundaries is None else to_device(boundaries[:-1], device)
        if position_ids is None:
            position_ids = columns - columns.masked_fill(~is_first, 0).cummax(-1).values
    return SequenceLayout(
        shape=shape,
        position_ids=(columns if position_ids is None else position_ids).reshape(-1),
        first_tokens=first_tokens,
        max_length=None if boundaries is None else int(boundaries.diff().max()),
        is_real=is_real,
        documents=documents,
    )


def _find_first(name, values):
    """(B, L) bool, True at the first token of each document: `seq_idx` changes, or `position_ids` does not increase."""
    before = values.roll(1, -1)  # an exporter would exclude rows of two columns from a difference
    is_first = values != before if name == "seq_idx" else values <= before
    is_first[:, 0] = True
    return is_first


# ----------------------------------------------------------------------------------------------------------------------
# Checks of shapes, and of values on one copy to the host
# ----------------------------------------------------------------------------------------------------------------------


def _check_shapes(shape, attention_mask, marks):
    if 0 in shape:
        raise ValueError(f"input of {shape[0]} rows and {shape[1]} columns is empty; give at least one token")
    if attention_mask is not None and (marks.cu_seq_lens or marks.seq_idx is not None):
        raise ValueError(
            f"both {'cu_seq_lens' if marks.cu_seq_lens else 'seq_idx'} and attention_mask are given; packed rows have no "
            "padding, so omit attention_mask"
        )
    if marks.cu_seq_lens and shape[0] != 1:
        raise ValueError(
            f"cu_seq_lens describes one packed row, but the input has {shape[0]} rows; flatten it to (1, T)"
        )
    for name, values in (*marks.cu_seq_lens.items(), ("position_ids", marks.position_ids), ("seq_idx", marks.seq_idx)):
        if values is not None and values.is_floating_point():
            raise ValueError(f"{name} has the dtype {values.dtype}; its values must be integers: call .long()")
    for name, values in (("position_ids", marks.position_ids), ("seq_idx", marks.seq_idx)):
        if values is not None and not _broadcasts_to(values, shape[-values.ndim :] if values.ndim else ()):
            raise ValueError(
                f"{name} has shape {tuple(values.shape)}, but the input has shape {shape}; "
                f"give {name} of shape {shape}, (1, {shape[1]}) or ({shape[1]},)"
            )
    if attention_mask is not None:
        pairs = (shape[0], None, shape[1], shape[1])
        if not (_broadcasts_to(attention_mask, pairs) or tuple(attention_mask.shape) == shape):
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, but the input has shape {shape}; "
                f"give a mask of shape {shape}, or a 4-D mask that broadcasts to (B, H, {shape[1]}, {shape[1]})"
            )


def _broadcasts_to(tensor, shape):
    """Whether `tensor` has as many axes as `shape` and broadcasts to it; None stands for any length."""
    axes = tensor.shape
    return len(axes) == len(shape) and all(given == 1 or length in (None, given) for given, length in zip(axes, shape))


def _read_values(tokens, vocab_size, attention_mask, marks, copy_to_host):
    """Check the values and find the boundaries of the sequences.

    Returns:
        (N + 1,) int64 boundaries, in tokens of the packed layout, on the host; and the other values on the host.
    """
    input_ids = tokens if tokens.ndim == 2 else tokens.new_zeros(1)
    is_4d = attention_mask is not None and attention_mask.ndim == 4
    id_range, mask, positions, sequences, has_invalid_mask, requested, *cu_seq_lens = _copy_to_host(
        torch.stack(input_ids.aminmax()),
        None if attention_mask is None or is_4d else attention_mask != 0,
        marks.position_ids,
        marks.seq_idx,
        None if attention_mask is None else _has_invalid_values(attention_mask),
        copy_to_host,
        *marks.cu_seq_lens.values(),
    )
    smallest, largest = id_range.tolist()
    if tokens.ndim == 2 and not 0 <= smallest <= largest < vocab_size:
        wrong = smallest if smallest < 0 else largest
        raise ValueError(
            f"input_ids contains {wrong}, but the ids of the vocabulary are 0 to {vocab_size - 1}; "
            "use the tokenizer of the model, or call resize_token_embeddings"
        )
    if has_invalid_mask and not is_4d:
        raise ValueError(
            f"the 2-D attention_mask of {attention_mask.dtype} contains values other than 0 and 1; it must be 1 at tokens and "
            "0 at padding. If it is additive, with 0 and -inf, give `attention_mask == 0`"
        )
    if has_invalid_mask:
        raise ValueError(
            f"the 4-D attention_mask of {attention_mask.dtype} contains invalid values: a bool or integer mask must be 1 where "
            "a token may attend and 0 elsewhere; a floating-point mask is added to the scores, so it must be 0 where a token may "
            "attend and negative elsewhere"
        )
    num_rows, num_columns = tokens.shape[:2]
    if mask is not None:
        mask = mask.bool()
        lengths = mask.sum(-1)
        if not lengths.all():
            row = int((lengths == 0).nonzero()[0])
            raise ValueError(
                f"row {row} of attention_mask has no real token (no 1); remove the row or give it at least one token"
            )
    else:
        lengths = torch.full((num_rows,), num_columns, device="cpu")

    found = dict(zip(marks.cu_seq_lens, cu_seq_lens))
    for boundaries in cu_seq_lens:
        _check_cu_seq_lens(boundaries, num_columns)
    if attention_mask is None:
        end = torch.tensor([num_rows * num_columns], device="cpu")
        for name, values in (("seq_idx", sequences), ("position_ids", positions)):
            if values is not None:
                found[name] = torch.cat((_find_first(name, values).flatten().nonzero().flatten(), end))
    name, boundaries = next(iter(found.items()), ("", F.pad(lengths.cumsum(0), (1, 0))))
    for other_name, other in found.items():
        if not torch.equal(boundaries, other):
            raise ValueError(
                f"{name} starts documents at {_preview(boundaries[:-1])}, but {other_name} at {_preview(other[:-1])}; correct "
                "one of them or omit it"
            )
    longest = int(boundaries.diff().max())
    if marks.max_length is not None and int(marks.max_length) < longest:
        raise ValueError(
            f"max_length_q={int(marks.max_length)} is less than the longest sequence, {longest} tokens; correct it or omit it"
        )
    return boundaries, HostValues(mask, None if requested is None else requested.bool())


def _copy_to_host(*tensors):
    """Copy integer tensors (or None) to the host as int64 with a single synchronisation."""
    present = [tensor for tensor in tensors if tensor is not None]
    flat = torch.cat([tensor.reshape(-1).long() for tensor in present]).cpu()
    parts = iter(flat.split([tensor.numel() for tensor in present]))
    return [None if tensor is None else next(parts).view(tensor.shape) for tensor in tensors]


def _check_cu_seq_lens(boundaries, num_tokens):
    if boundaries.ndim != 1 or len(boundaries) < 2:
        raise ValueError(
            f"cu_seq_lens has shape {tuple(boundaries.shape)}; it must be 1-D: N + 1 boundaries, starting with 0"
        )
    if boundaries[0] != 0:
        raise ValueError(f"cu_seq_lens starts with {int(boundaries[0])}; the first boundary must be 0")
    if boundaries[-1] != num_tokens:
        raise ValueError(
            f"cu_seq_lens ends with {int(boundaries[-1])}, but the row has {num_tokens} tokens; the last boundary must be "
            "the number of tokens"
        )
    if (boundaries.diff() <= 0).any():
        place = int((boundaries.diff() <= 0).nonzero()[0])
        raise ValueError(
            f"in cu_seq_lens {int(boundaries[place])} is followed by {int(boundaries[place + 1])}; boundaries must increase, "
            "so remove empty sequences"
        )


def _has_invalid_values(mask):
    """() bool tensor, whether a mask has invalid values: a floating-point 4-D mask is additive, any other mask is 0 and 1."""
    if mask.dtype == torch.bool:
        return torch.zeros((), dtype=torch.bool, device=mask.device)
    return (mask > 0).any() if mask.ndim == 4 and mask.is_floating_point() else ((mask != 0) & (mask != 1)).any()


def _preview(values, count=6):
    shown = ", ".join(str(int(value)) for value in values[:count])
    return shown + (", ..." if len(values) > count else "")
