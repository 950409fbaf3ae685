"""`make_layout`: one checked `SequenceLayout` from an attention mask, or from the inputs that mark packed documents.

The layout is packed if tensor values can be read, so that padding costs no computation. It is dense while tracing, and if the
caller requests it.

Axes: `B` rows, `L` columns of the input; `T` tokens on the flat axis; `N` sequences.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import logging

from .machine_neobert import widen

logger = logging.get_logger(__name__)


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
        documents: (B, L) int64 in a dense layout of packed rows, document number of each token; tokens attend only to real tokens
            with the same number. Else None.
    """

    shape: tuple[int, int]
    position_ids: Tensor
    first_tokens: Tensor
    cu_seq_lens: Tensor | None = None
    lengths: tuple[int, ...] | None = None
    max_length: int | None = None
    indices: Tensor | None = None
    is_real: Tensor | None = None
    documents: Tensor | None = None

    @property
    def is_packed(self) -> bool:
        """Whether the flat axis holds real tokens only."""
        return self.cu_seq_lens is not None

    def flatten(self, x_BL: Tensor, fill: float | None = None) -> Tensor:
        """Flatten (B, L, ...) to (T, ...); with `fill`, padding in a dense layout is set to this value."""
        if fill is not None and self.is_real is not None:
            x_BL = x_BL.masked_fill(~self.is_real, fill)
        x_T = x_BL.flatten(0, 1)
        if self.indices is None:
            return x_T
        return x_T[self.indices]

    def unflatten(self, x_T: Tensor, fill: float = 0.0) -> Tensor:
        """Restore (B, L, ...) from (T, ...); padding is set to `fill`."""
        if self.indices is not None:
            num_rows, num_columns = self.shape
            flat = x_T.new_full((num_rows * num_columns, *x_T.shape[1:]), fill)
            x_T = flat.index_copy(0, self.indices, x_T)
        x_BL = x_T.unflatten(0, self.shape)
        if self.is_real is None:
            return x_BL
        axes_of_values = [1] * (x_BL.ndim - 2)
        return x_BL.masked_fill(~self.is_real.view(*self.shape, *axes_of_values), fill)

    def sequence_ids(self) -> Tensor:
        """(T,) int64, a sequence number for each token, equal only for tokens of the same sequence."""
        if self.is_packed:
            return sequence_of_each_token(self.cu_seq_lens, len(self.position_ids))
        num_rows, num_columns = self.shape
        numbers = torch.arange(num_rows, device=self.position_ids.device)[:, None] * num_columns
        if self.documents is not None:
            numbers = numbers + self.documents
        return numbers.expand(self.shape).flatten()

    def mean_of_sequences(self, x_TD: Tensor) -> Tensor:
        """(N, D), the mean of (T, D) over the real tokens of each sequence in `first_tokens`; sums are float32 or wider."""
        wide_TD = widen(x_TD)
        num_sequences = self.first_tokens.shape[0]  # len() would make it a constant of an exported graph
        if self.is_packed or num_sequences != self.shape[0]:
            mean_ND = self._mean_of_documents(wide_TD, num_sequences)
        else:
            mean_ND = self._mean_of_rows(wide_TD)
        return mean_ND.to(x_TD.dtype)

    def _mean_of_documents(self, x_TD, num_sequences):
        sequence_T = sequence_of_each_token(self.first_tokens, len(x_TD))
        counted_T = torch.ones_like(x_TD[:, 0])
        if self.is_real is not None:
            counted_T = self.is_real.flatten().to(counted_T.dtype)
            x_TD = x_TD.masked_fill(~self.is_real.view(-1, 1), 0)
        sums_ND = x_TD.new_zeros(num_sequences, x_TD.shape[1]).index_add(0, sequence_T, x_TD)
        counts_N = x_TD.new_zeros(num_sequences).index_add(0, sequence_T, counted_T)
        return sums_ND / counts_N[:, None]

    def _mean_of_rows(self, x_TD):
        """One sequence per row. While tracing, that is the first document of the row."""
        is_counted_BL = self.is_real
        if self.documents is not None:
            is_first_BL = self.documents == self.documents[:, :1]
            is_counted_BL = is_first_BL if is_counted_BL is None else is_counted_BL & is_first_BL
        x_BLD = x_TD.unflatten(0, self.shape)
        if is_counted_BL is None:
            return x_BLD.mean(1)
        sums_BD = x_BLD.masked_fill(~is_counted_BL[..., None], 0).sum(1)
        return sums_BD / is_counted_BL.sum(1, keepdim=True)


CU_SEQ_LENS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")  # the last is the name in the published code
MAX_LENGTHS = ("max_length_q", "max_length_k", "max_seqlen")
BOUNDARIES = ("position_ids", "seq_idx", "free_positions", *CU_SEQ_LENS, *MAX_LENGTHS, "trust_boundaries")
# Beginnings of the names that modules of sentence-transformers add to the inputs; a second pass gives them to the model too.
ADDED_BY_SENTENCE_TRANSFORMERS = (
    "token_embeddings",
    "token_weights_sum",
    "all_layer_embeddings",
    "sentence_embedding",
    "scores",
    "dataset_name",
    "decoded_embedding",  # of a sparse autoencoder
    "auxiliary_embedding",
)


class Boundaries(NamedTuple):
    """The inputs that mark the documents of packed rows, which must agree, and those for a registered attention function.

    Attributes:
        position_ids: (B, L), (1, L) or (L,). A document begins where the position of a real token does not increase, unless
            `has_free_positions`.
        seq_idx: (B, L), (1, L) or (L,). A document begins where the number changes.
        cu_seq_lens: (N + 1,) boundaries of the documents in one row.
        max_length: Length of the longest document; only checked if values are read, required otherwise.
        has_free_positions: `position_ids` are positions only and mark no documents.
        is_trusted: The caller guarantees that values are valid, so they need no check.
        options: Arguments for an attention function that the user registered.
    """

    position_ids: Tensor | None = None
    seq_idx: Tensor | None = None
    cu_seq_lens: Tensor | None = None
    max_length: int | None = None
    has_free_positions: bool = False
    is_trusted: bool = False
    options: dict[str, Any] = {}

    @classmethod
    def from_arguments(
        cls,
        model: str,
        arguments: dict[str, Any],
        options: Iterable[str] = (),
    ) -> "Boundaries":
        """Collect the arguments of a forward that mark documents, with their aliases, and those named in `options`.

        Args:
            model: Class of the model, for the message.
            arguments: Values by name. None and False count as not given. Those that sentence-transformers adds are ignored.
            options: Names of the arguments of a registered attention function.

        Raises:
            TypeError: Another argument is given.
        """
        given = {name: value for name, value in arguments.items() if value is not None and value is not False}
        known = (*BOUNDARIES, *options)
        for name in given:
            if name not in known and not name.startswith(ADDED_BY_SENTENCE_TRANSFORMERS):
                remedy = "load a model with a head" if name == "labels" else "omit it"
                raise TypeError(f"{model} has no argument {name}; {remedy}")

        def first_of(names):
            return next((given[name] for name in names if name in given), None)

        return cls(
            position_ids=given.get("position_ids"),
            seq_idx=given.get("seq_idx"),
            cu_seq_lens=first_of(CU_SEQ_LENS),
            max_length=first_of(MAX_LENGTHS),
            has_free_positions="free_positions" in given,
            is_trusted="trust_boundaries" in given,
            options={name: arguments[name] for name in options if name in arguments},
        )


NO_BOUNDARIES = Boundaries()


def sequence_of_each_token(cu_seq_lens: Tensor, num_tokens: int) -> Tensor:
    """(T,) int64, the index of each token's sequence, computed on the device without synchronisation."""
    tokens = torch.arange(num_tokens, device=cu_seq_lens.device)
    return torch.bucketize(tokens, cu_seq_lens[1:].long(), right=True)


def check_tokens(
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    axes: str = "rows, columns",
) -> Tensor:
    """Return `input_ids` (B, L) or `inputs_embeds` (B, L, D), whichever is given; `axes` names the axes before D.

    Raises:
        ValueError: Both or neither is given, or the number of axes is wrong.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give exactly one of input_ids and inputs_embeds")
    name, tokens = "input_ids", input_ids
    if tokens is None:
        name, tokens, axes = "inputs_embeds", inputs_embeds, f"{axes}, hidden_size"
    assert tokens is not None  # by the first check
    if tokens.ndim != axes.count(",") + 1:
        raise ValueError(f"{name} has shape {tuple(tokens.shape)}; it must be ({axes})")
    return tokens


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to `device`, asynchronously if that is safe.

    A copy to CUDA starts from pinned memory, which torch keeps until the copy is complete. To other devices an asynchronous
    copy can read memory that was already freed (pytorch issues 139550 and 189690), so there the copy is synchronous.
    """
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def make_layout(
    tokens: Tensor,
    vocab_size: int,
    boundaries: Boundaries = NO_BOUNDARIES,
    attention_mask: Tensor | None = None,
    is_packed: bool = True,
    reads_values: bool = True,
) -> SequenceLayout:
    """Make the layout of a batch, with at most one copy from device to host.

    Args:
        tokens: (B, L) input ids, or (B, L, D) embeddings.
        vocab_size: Input ids must be below this.
        boundaries: The inputs that mark the documents of packed rows; without them every row is one sequence.
        attention_mask: (B, L) with 0 at padding, on any side or in between; or 4-D, which does not define sequences.
        is_packed: Remove padding from the computation; False keeps it.
        reads_values: Read values and check them. If False, a packed layout requires `cu_seq_lens` and `max_length`.

    Raises:
        ValueError: Values or shapes contradict each other; the message names both and the solution.
    """
    shape, device = tuple(tokens.shape[:2]), tokens.device
    _check_shapes(shape, attention_mask, boundaries)
    boundaries = _expand(boundaries, shape)
    starts = is_real_on_host = None
    if reads_values:
        starts, is_real_on_host = _read_values(tokens, vocab_size, attention_mask, boundaries)
    if not is_packed:
        return _dense_layout(shape, device, attention_mask, boundaries, starts, is_real_on_host)
    lengths, longest, cu_seq_lens = None, boundaries.max_length, boundaries.cu_seq_lens
    if starts is not None:
        lengths = tuple(starts.diff().tolist())
        longest = max(lengths)
        cu_seq_lens = to_device(starts.int(), device)
    elif longest is None:
        raise ValueError(
            "max_length_q is missing; compiled, and with trust_boundaries=True, the values of cu_seq_lens are not read, so give "
            "max_length_q as an integer"
        )
    assert cu_seq_lens is not None  # without values, a packed layout requires them
    cu_seq_lens = cu_seq_lens.int()
    return _packed_layout(shape, device, boundaries.position_ids, cu_seq_lens, longest, lengths, is_real_on_host)


def warn_of_length(layout: SequenceLayout, max_position_embeddings: int) -> None:
    """Warn once about a sequence that is longer than the training context."""
    longest = layout.max_length
    if longest is not None and longest > max_position_embeddings:
        logger.warning_once(
            f"A sequence of {longest} tokens is longer than the {max_position_embeddings} tokens of the training context "
            "(max_position_embeddings); results may be worse. Truncate the input to avoid this."
        )


def _packed_layout(shape, device, position_ids, cu_seq_lens, longest, lengths, is_real_on_host):
    """The layout of the real tokens only, without padding."""
    indices = None
    if is_real_on_host is not None and not is_real_on_host.all():
        indices = to_device(is_real_on_host.flatten().nonzero().flatten(), device)
        if position_ids is None:
            first_columns = is_real_on_host.long().argmax(-1)[:, None]
            position_ids = to_device(torch.arange(shape[1], device="cpu") - first_columns, device)
        position_ids = position_ids.reshape(-1)[indices]
    elif position_ids is not None:
        position_ids = position_ids.reshape(-1)
    else:
        num_tokens = shape[0] * shape[1]  # len() of a tensor would make it a constant of an exported graph
        tokens = torch.arange(num_tokens, device=device)
        position_ids = tokens - cu_seq_lens[sequence_of_each_token(cu_seq_lens, num_tokens)].long()
    first_tokens = cu_seq_lens[:-1].long()
    return SequenceLayout(shape, position_ids, first_tokens, cu_seq_lens, lengths, longest, indices)


def _dense_layout(shape, device, attention_mask, boundaries, starts, is_real_on_host):
    """The layout that keeps the shape (B, L); no value of a tensor on the device is read.

    `starts` are the boundaries of all sequences in real tokens, on the host; they are None while tracing.
    """
    num_rows, num_columns = shape
    columns = torch.arange(num_columns, device=device).expand(shape)
    first_tokens = torch.arange(num_rows, device=device) * num_columns
    position_ids, cu_seq_lens = boundaries.position_ids, boundaries.cu_seq_lens
    documents = is_real = None
    if cu_seq_lens is not None:
        documents = sequence_of_each_token(cu_seq_lens, num_columns)[None]
        first_tokens = cu_seq_lens[:-1].long()
        if position_ids is None:
            position_ids = columns - cu_seq_lens[documents].long()
    elif is_4d(attention_mask):
        if position_ids is None:
            position_ids = columns
    else:
        first_columns = columns[:, :1]
        if attention_mask is not None:
            is_real = attention_mask != 0
            first_columns = is_real.long().argmax(-1, keepdim=True)
            first_tokens = first_tokens + first_columns[:, 0]
        is_first = _first_of_documents(boundaries, is_real)
        # While tracing, values cannot be read and may mark documents, so the document mask is always made.
        if is_first is not None and (starts is None or len(starts) - 1 > num_rows):
            documents = (is_first.long().cumsum(-1) - 1).clamp(min=0)
        if documents is not None and starts is not None:
            first_tokens = to_device(_tokens_on_host(shape, is_real_on_host)[starts[:-1]], device)
        if position_ids is None:
            position_ids = _count_positions(columns, first_columns, is_first)
        if is_real is not None:
            # padding must not hold the largest position of its row
            position_ids = position_ids.masked_fill(~is_real, 0)
    position_ids = position_ids.reshape(-1)
    longest = _longest(starts)
    return SequenceLayout(shape, position_ids, first_tokens, max_length=longest, is_real=is_real, documents=documents)


def _count_positions(columns, first_columns, is_first):
    """(B, L) positions, from 0 at the first column of a row, or at the first token of each document."""
    if is_first is not None:
        first_columns = columns.masked_fill(~is_first, 0).cummax(-1).values
    return columns - first_columns


def _longest(starts):
    """Length of the longest sequence between these boundaries on the host; None while tracing."""
    return None if starts is None else int(starts.diff().max())


def _tokens_on_host(shape, is_real):
    """Indices of the real tokens in the flattened (B * L) input, on the host."""
    if is_real is None:
        return torch.arange(shape[0] * shape[1], device="cpu")
    return is_real.flatten().nonzero().flatten()


def _first_of_documents(boundaries, is_real):
    """(B, L) bool, True at the first token of each document by `seq_idx` or `position_ids`; None if neither marks any."""
    if boundaries.seq_idx is not None:
        return _find_first("seq_idx", boundaries.seq_idx, is_real)
    if boundaries.position_ids is not None and not boundaries.has_free_positions:
        return _find_first("position_ids", boundaries.position_ids, is_real)
    return None


def _find_first(name, values, is_real):
    """(B, L) bool, True at the first token of each document: `seq_idx` changes, or `position_ids` does not increase.

    With (B, L) `is_real`, each real token is compared with the real token before it, and padding is no first token.
    """
    if is_real is None:
        before = values.roll(1, -1)  # an exporter would exclude rows of two columns from a difference
        is_first = values != before if name == "seq_idx" else values <= before
        is_first[:, 0] = True
        return is_first
    rank = is_real.long().cumsum(-1)  # a real token is the first, second, ... of its row
    num_rows, num_columns = values.shape
    by_rank = values.new_zeros(num_rows, num_columns + 1).scatter(-1, rank * is_real, values)
    before = by_rank.gather(-1, (rank - 1).clamp(min=0))
    return is_real & ((rank == 1) | (values <= before))


def is_4d(attention_mask: Tensor | None) -> bool:
    """Whether a mask is 4-D: it then says which pairs of tokens attend, and defines no sequences."""
    return attention_mask is not None and attention_mask.ndim == 4


def _check_shapes(shape, attention_mask, boundaries):
    num_rows, num_columns = shape
    if 0 in shape:
        raise ValueError(f"input of {num_rows} rows and {num_columns} columns is empty; give at least one token")
    for name in ("cu_seq_lens", "seq_idx"):
        if attention_mask is not None and getattr(boundaries, name) is not None:
            raise ValueError(
                f"both {name} and attention_mask are given; packed rows have no padding, so omit attention_mask"
            )
    if boundaries.cu_seq_lens is not None and num_rows != 1:
        raise ValueError(
            f"cu_seq_lens describes one packed row, but the input has {num_rows} rows; flatten it to (1, T)"
        )
    if attention_mask is None or tuple(attention_mask.shape) == shape:
        return
    if not _broadcasts_to(attention_mask, (num_rows, None, num_columns, num_columns)):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, but the input has shape {shape}; "
            f"give a mask of shape {shape}, or a 4-D mask that broadcasts to (B, H, {num_columns}, {num_columns})"
        )


def _expand(boundaries, shape):
    """Boundaries whose `position_ids` and `seq_idx` have the shape (B, L)."""
    for name in ("position_ids", "seq_idx"):
        values = getattr(boundaries, name)
        if values is None:
            continue
        if values.is_floating_point() or not _broadcasts_to(values, shape[-values.ndim :]):
            raise ValueError(
                f"{name} has shape {tuple(values.shape)} and {values.dtype}; "
                f"give integers of shape {shape}, (1, {shape[1]}) or ({shape[1]},)"
            )
        boundaries = boundaries._replace(**{name: values.expand(shape)})
    return boundaries


def _broadcasts_to(tensor, shape):
    """Whether `tensor` has as many axes as `shape` and broadcasts to it; None stands for any length."""
    if tensor.ndim != len(shape):
        return False
    return all(given == 1 or length in (None, given) for given, length in zip(tensor.shape, shape))


def _read_values(tokens, vocab_size, attention_mask, boundaries):
    """Check the values and find where sequences begin and end.

    Returns:
        (N + 1,) int64 boundaries of the sequences, in real tokens; and (B, L) bool, True at real tokens, or None without a 2-D
        mask; both on the host.
    """
    num_rows, num_columns = tokens.shape[:2]
    id_range = is_invalid = is_real = None
    if tokens.ndim == 2:
        id_range = torch.stack(tokens.aminmax())
    if attention_mask is not None:
        is_invalid = _has_invalid_values(attention_mask)
        if not is_4d(attention_mask):
            is_real = attention_mask != 0
    id_range, is_invalid, is_real, cu_seq_lens, seq_idx, position_ids = _copy_to_host(
        id_range, is_invalid, is_real, boundaries.cu_seq_lens, boundaries.seq_idx, boundaries.position_ids
    )
    if id_range is not None:
        _check_ids(id_range, vocab_size)
    if is_real is not None:
        is_real = is_real.bool()
    if attention_mask is not None:
        _check_mask(attention_mask, is_invalid, is_real)
    if boundaries.has_free_positions:
        position_ids = None
    marks = {"seq_idx": seq_idx, "position_ids": position_ids}
    if is_4d(attention_mask):
        marks = {}
    starts = _agreed(_find_boundaries(num_rows, num_columns, cu_seq_lens, marks, is_real))
    longest, given = _longest(starts), boundaries.max_length
    if given is not None and int(given) < longest:
        raise ValueError(
            f"max_length_q={int(given)} is less than the longest sequence, {longest}; correct it or omit it"
        )
    return starts, is_real


def _find_boundaries(num_rows, num_columns, cu_seq_lens, marks, is_real):
    """(N + 1,) int64 boundaries of the sequences by the name of the input that marks them; those of the rows if none does."""
    found = {}
    if cu_seq_lens is not None:
        _check_cu_seq_lens(cu_seq_lens, num_columns)
        found["cu_seq_lens"] = cu_seq_lens
    for name, numbers in marks.items():
        if numbers is not None:
            found[name] = _find_starts(name, numbers, is_real)
    if not found:
        lengths = torch.full((num_rows,), num_columns, device="cpu")
        if is_real is not None:
            lengths = is_real.sum(-1)
        found["rows"] = F.pad(lengths.cumsum(0), (1, 0))
    return found


def _find_starts(name, values, is_real):
    """(N + 1,) int64 boundaries of the documents, in real tokens, by `seq_idx` or `position_ids`."""
    is_first = _find_first(name, values, is_real)
    is_first = is_first.flatten() if is_real is None else is_first[is_real]
    starts = is_first.nonzero().flatten()
    return F.pad(starts, (0, 1), value=len(is_first))


def _copy_to_host(*tensors):
    """Copy integer tensors (or None) to the host as int64 with a single synchronisation."""
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return tensors
    flat = torch.cat([tensor.reshape(-1).long() for tensor in present]).cpu()
    parts = iter(flat.split([tensor.numel() for tensor in present]))
    return [None if tensor is None else next(parts).view(tensor.shape) for tensor in tensors]


def _check_ids(id_range, vocab_size):
    smallest, largest = id_range.tolist()
    if not 0 <= smallest <= largest < vocab_size:
        raise ValueError(
            f"input_ids contains {smallest if smallest < 0 else largest}, but the ids of the vocabulary are 0 to "
            f"{vocab_size - 1}; use the tokenizer of the model, or call resize_token_embeddings"
        )


def _check_mask(mask, is_invalid, is_real):
    if is_invalid:
        rule = "above 0" if mask.ndim == 4 and mask.is_floating_point() else "other than 0 and 1"
        raise ValueError(
            f"the {mask.ndim}-D attention_mask of {mask.dtype} contains values {rule}; it must be 1 where a token may attend "
            "and 0 elsewhere. Only a 4-D floating-point mask is added to the scores; it must be 0 where a token may attend and "
            "negative elsewhere. For an additive 2-D mask, give `attention_mask == 0`"
        )
    if is_real is None:
        return
    for row in (~is_real.any(-1)).nonzero():
        raise ValueError(
            f"row {int(row)} of attention_mask has no real token (no 1); remove the row or give it at least one token"
        )


def _agreed(found):
    (name, starts), *others = found.items()
    for other_name, other in others:
        if not torch.equal(starts, other):
            places = f"{name} starts documents at {_preview(starts[:-1])}, but {other_name} at {_preview(other[:-1])}"
            raise ValueError(f"{places}; correct one of them or omit it")
    return starts


def _check_cu_seq_lens(boundaries, num_tokens):
    values = boundaries.flatten().tolist()
    is_rising = values == sorted(set(values))
    if boundaries.ndim != 1 or not is_rising or [*values[:1], *values[-1:]] != [0, num_tokens]:
        raise ValueError(
            f"cu_seq_lens is {_preview(boundaries.flatten())}; it must be 1-D, begin with 0, increase from document to document "
            f"and end with {num_tokens}, the number of tokens of the row"
        )


def _has_invalid_values(mask):
    """() bool tensor, whether a mask has invalid values: a floating-point 4-D mask is additive, any other mask is 0 and 1."""
    if mask.dtype == torch.bool:
        return torch.zeros((), dtype=torch.bool, device=mask.device)
    if mask.ndim == 4 and mask.is_floating_point():
        return (mask > 0).any()
    return ((mask != 0) & (mask != 1)).any()


def _preview(values, count=6):
    shown = [str(int(value)) for value in values[:count]]
    if len(values) > count:
        shown.append("...")
    return ", ".join(shown)
