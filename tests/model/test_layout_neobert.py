"""Layouts from masks, boundaries and positions: all give the same results, and invalid input is refused."""

import math

import numpy as np
import pytest
import torch
from conftest import random_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import CONFIG, Oracle, random_weights, write_checkpoint
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DataCollatorWithFlattening
from transformers.utils import logging

from neobert_hf import NeoBERTForMaskedLM, NeoBERTForSequenceClassification, NeoBERTModel
from neobert_hf.model import attention_neobert, layout_neobert
from neobert_hf.model.backends_neobert import BACKENDS
from neobert_hf.model.layout_neobert import make_layout, sequence_of_each_token

VOCAB = CONFIG["vocab_size"]
some_examples = settings(max_examples=60, deadline=None, derandomize=True)

lengths_of_documents = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@st.composite
def masks(draw):
    """(B, L) masks of any shape, with padding at any place and at least one real token in each row."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 10))
    values = st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns)
    mask = np.array(draw(values)).reshape(rows, columns)
    for row in mask:
        row[draw(st.integers(0, columns - 1))] = True
    return torch.from_numpy(mask)


@pytest.fixture(scope="module")
def double_model(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("layout"), random_weights())
    return NeoBERTModel.from_pretrained(folder, dtype=torch.float64).eval()


def boundaries_of(lengths):
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


@pytest.mark.parametrize("is_training", [False, True])
def test_the_default_device_of_torch_moves_no_value_that_belongs_on_the_host(double_model, is_training):
    """The device meta stands for a GPU: it computes nothing, so that a value there is an error."""
    ids, mask = random_ids(3, 7), torch.ones(3, 7).long()
    mask[1, 4:] = mask[2, :2] = 0
    masked_lm = NeoBERTForMaskedLM(double_model.config).eval()
    classifier = NeoBERTForSequenceClassification(double_model.config).eval()
    marks = [{}, {"attention_mask": mask}, {"position_ids": torch.arange(7).expand(3, 7) % 4}, {"seq_idx": mask}]
    cases = [(double_model, inputs) for inputs in marks]
    cases += [(masked_lm, {"labels": ids}), (classifier, {"labels": torch.tensor([0, 1, 0]), "num_items_in_batch": 7})]

    def run():
        return [model(**{"input_ids": ids} | inputs)[0] for model, inputs in cases]

    with torch.set_grad_enabled(is_training):
        wanted = run()
        with torch.device("meta"):
            found = run()
    for a, b in zip(found, wanted):
        # float32: a default device is a mode of torch, so the reference kernels run in place of the fast ones
        torch.testing.assert_close(a, b, rtol=0, atol=0 if a.dtype == torch.float64 else 1e-6)


@given(mask=masks(), seed=st.integers(0, 2**16), unpad=st.booleans())
@some_examples
def test_with_any_mask_the_real_tokens_agree_with_the_oracle(double_model, mask, seed, unpad):
    ids = random_ids(*mask.shape, seed=seed)
    double_model.config.unpad_inputs = unpad
    with torch.no_grad():
        states = double_model(ids, attention_mask=mask.long()).last_hidden_state
    oracle = Oracle(random_weights())
    for row, real, state in zip(ids.numpy(), mask.numpy(), states):
        columns = np.flatnonzero(real)  # padding between tokens keeps their distance
        wanted = oracle.encode(row[real], positions=columns - columns[0])[2]
        assert np.abs(state[real].numpy() - wanted).max() < 1e-10
        assert not state[~real].any()


def marks_of(lengths, first=0):
    """`position_ids` whose documents start at `first`, and `seq_idx`, of a row of documents."""
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    return torch.cat([torch.arange(first, first + n) for n in lengths])[None], numbers.int()


@given(lengths=lengths_of_documents, seed=st.integers(0, 2**16), first=st.integers(1, 5), unpad=st.booleans())
@some_examples
def test_all_marks_of_documents_and_single_documents_give_the_same_states(double_model, lengths, seed, first, unpad):
    double_model.config.unpad_inputs = unpad
    ids = random_ids(1, sum(lengths), seed=seed)
    positions, numbers = marks_of(lengths)
    marks = [{"position_ids": positions}, {"seq_idx": numbers}, {"seq_idx": numbers, "position_ids": positions}]
    with torch.no_grad():
        by_boundaries = double_model(ids, cu_seq_lens_q=boundaries_of(lengths)).last_hidden_state
        for each in marks:
            assert torch.equal(by_boundaries, double_model(ids, **each).last_hidden_state)
        shifted = double_model(ids, position_ids=marks_of(lengths, first)[0]).last_hidden_state
        alone = [double_model(document[None]).last_hidden_state[0] for document in ids[0].split(lengths)]
    for states in (by_boundaries, shifted):  # attention reads distances, so the first position does not matter
        assert (states[0] - torch.cat(alone)).abs().max() < 1e-10


@st.composite
def marked_rows(draw):
    """(B, L) mask and positions of packed rows with padding at any place; and the columns of each document of each row."""
    rows = draw(st.lists(lengths_of_documents, min_size=1, max_size=3))
    columns, width = [], 0
    for lengths in rows:
        column, documents = draw(st.integers(0, 2)), []
        for length in lengths:
            gaps = draw(st.lists(st.integers(1, 3), min_size=length, max_size=length))  # 1: no padding between
            documents.append(column + np.cumsum([0, *gaps[:-1]]))
            column = int(documents[-1][-1]) + gaps[-1]
        columns.append(documents)
        width = max(width, column)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    generator = torch.Generator().manual_seed(width)
    positions = torch.randint(0, 9, mask.shape, generator=generator)  # those of padding are free
    for row, documents in enumerate(columns):
        for document in documents:
            mask[row, document], positions[row, document] = 1, torch.arange(len(document))
    return mask, positions, columns


@given(rows=marked_rows(), seed=st.integers(0, 2**16), unpad=st.booleans())
@some_examples
def test_positions_mark_documents_beside_a_mask_too(double_model, rows, seed, unpad):
    """Collators of packed rows often add a mask of ones, or one of the padding."""
    mask, positions, columns = rows
    ids = random_ids(*mask.shape, seed=seed)
    double_model.config.unpad_inputs = unpad
    with torch.no_grad():
        states = double_model(ids, attention_mask=mask, position_ids=positions).last_hidden_state
    assert not states[mask == 0].any()
    oracle = Oracle(random_weights())
    for row, documents in enumerate(columns):
        for document in documents:
            wanted = oracle.encode(ids[row, document].numpy())[2]
            assert np.abs(states[row, document].numpy() - wanted).max() < 1e-10


@given(rows=marked_rows())
@some_examples
def test_positions_beside_a_mask_make_the_same_layout_on_every_path(rows):
    """One path removes padding, one keeps it, and one may not read values, as in a compiled model."""
    mask, positions, columns = rows
    ids, boundaries = random_ids(*mask.shape), layout_neobert.Boundaries(position_ids=positions)
    packed, dense, traced = (
        make_layout(ids, VOCAB, boundaries, mask, is_packed, reads_values)
        for is_packed, reads_values in ((True, True), (False, True), (False, False))
    )
    documents = [row * mask.shape[1] + each for row, found in enumerate(columns) for each in found]
    assert packed.lengths == tuple(len(each) for each in documents)
    assert dense.first_tokens.tolist() == [each[0] for each in documents]
    values = torch.randn(mask.numel(), 3, dtype=torch.float64)
    wanted = torch.stack([values[each].mean(0) for each in documents])
    torch.testing.assert_close(packed.mean_of_sequences(values[packed.indices] if mask.min() == 0 else values), wanted)
    torch.testing.assert_close(dense.mean_of_sequences(values), wanted)
    firsts = torch.stack([values[row * mask.shape[1] + found[0]].mean(0) for row, found in enumerate(columns)])
    torch.testing.assert_close(traced.mean_of_sequences(values), firsts)  # the first document of each row
    for layout in (dense, traced):
        allowed = attention_neobert.make_dense_mask(layout).expand(len(mask), 1, *[mask.shape[1]] * 2)[:, 0]
        for row, found in enumerate(columns):
            for each in found:
                found_keys = [np.flatnonzero(keys).tolist() for keys in allowed[row, each].numpy()]
                assert found_keys == [each.tolist()] * len(each)


@pytest.mark.slow
@pytest.mark.parametrize("num_columns", [1, 2, 7])
def test_an_exported_graph_marks_documents_by_positions_beside_a_mask(double_model, num_columns):
    """Each length from one token on, although the example has others."""
    double_model.config.unpad_inputs = True
    rows, columns = torch.export.Dim("rows", max=9), torch.export.Dim("columns", max=64)
    sizes = {0: rows, 1: columns}
    names = ("input_ids", "attention_mask", "position_ids")
    example = random_ids(2, 5), torch.ones(2, 5, dtype=torch.long), torch.arange(5).expand(2, 5) % 3
    options = {"dynamic_shapes": dict.fromkeys(names, sizes), "strict": False}
    exported = torch.export.export(double_model, (), dict(zip(names, example)), **options).module()
    mask = torch.ones(3, num_columns, dtype=torch.long)
    mask[1, num_columns // 2 + 1 :] = 0
    inputs = dict(zip(names, (random_ids(3, num_columns), mask, torch.arange(num_columns).expand(3, -1) % 3)))
    with torch.no_grad():
        wanted = double_model(**inputs).last_hidden_state
        assert (exported(**inputs).last_hidden_state - wanted).abs().max() < 1e-10


def test_free_positions_mark_no_documents(double_model):
    """Equal positions in an attention that reads distances: the order of the tokens has no effect."""
    ids, mask, order = random_ids(1, 6), torch.ones(1, 6, dtype=torch.long), torch.tensor([3, 0, 5, 1, 4, 2])
    for options in ({}, {"attention_mask": mask}):
        options |= {"position_ids": torch.zeros(1, 6, dtype=torch.long), "free_positions": True}
        for unpad in (True, False):
            double_model.config.unpad_inputs = unpad
            with torch.no_grad():
                states, turned = (double_model(x, **options).last_hidden_state for x in (ids, ids[:, order]))
                alone = double_model(ids[:, :1]).last_hidden_state
            assert (turned - states[:, order]).abs().max() < 1e-12
            assert (states[:, :1] - alone).abs().max() > 1e-3


def test_the_rows_of_transformers_packing_collator_are_read(double_model):
    double_model.config.unpad_inputs = True
    documents = [random_ids(n, seed=n) for n in (3, 1, 4)]
    for options in ({"return_position_ids": False, "return_seq_idx": True}, {"return_flash_attn_kwargs": True}):
        row = DataCollatorWithFlattening(**options)([{"input_ids": each.tolist()} for each in documents])
        del row["labels"]
        with torch.no_grad():
            states = double_model(**row).last_hidden_state[0]
            alone = torch.cat([double_model(each[None]).last_hidden_state[0] for each in documents])
        assert (states - alone).abs().max() < 1e-10


@given(lengths=lengths_of_documents, seed=st.integers(0, 2**16), data=st.data())
@some_examples
def test_tokens_never_see_other_documents(double_model, lengths, seed, data):
    """A change in one document of a packed row changes no bit of the others."""
    changed = data.draw(st.integers(0, len(lengths) - 1))
    ids = random_ids(1, sum(lengths), seed=seed)
    boundaries = boundaries_of(lengths)
    document = slice(boundaries[changed], boundaries[changed + 1])
    other_ids = ids.clone()
    other_ids[0, document] = (ids[0, document] + 1).clamp(max=VOCAB - 1)
    with torch.no_grad():
        before, after = (double_model(x, cu_seq_lens_q=boundaries).last_hidden_state[0] for x in (ids, other_ids))
    elsewhere = torch.ones(sum(lengths), dtype=torch.bool)
    elsewhere[document] = False
    assert torch.equal(before[elsewhere], after[elsewhere])


def test_a_change_in_one_row_of_a_padded_batch_changes_no_bit_of_the_others(model):
    ids, mask = random_ids(3, 12), torch.ones(3, 12, dtype=torch.long)
    mask[0, 7:], mask[2, :5] = 0, 0
    other_ids = ids.clone()
    other_ids[0, :7] = random_ids(7, seed=9)
    with torch.no_grad():
        before, after = (model(x, attention_mask=mask).logits for x in (ids, other_ids))
    assert torch.equal(before[1:], after[1:])
    assert not torch.equal(before[0], after[0])


@pytest.mark.parametrize("side", ["left", "right"])
def test_more_padding_changes_no_bit(model, side):
    ids, mask = random_ids(3, 12), torch.ones(3, 12, dtype=torch.long)
    mask[0, 7:] = 0
    more = (5, 0) if side == "left" else (0, 5)
    padded_ids, padded_mask = (torch.nn.functional.pad(x, more) for x in (ids, mask))
    with torch.no_grad():
        states = model.model(ids, attention_mask=mask).last_hidden_state
        padded_states = model.model(padded_ids, attention_mask=padded_mask).last_hidden_state
    assert torch.equal(states, padded_states[:, 5:] if side == "left" else padded_states[:, :12])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_4d_mask_may_be_bool_integer_or_additive_and_of_another_dtype_than_the_model(model, implementation):
    """The lowest number of one dtype may not exist in the other dtype."""
    ids, mask = random_ids(2, 10), torch.ones(2, 10, dtype=torch.bool)
    mask[0, 6:] = False
    model.set_attn_implementation(implementation)
    as_4d = mask[:, None, None]
    masks = [as_4d, as_4d.long(), as_4d.expand(2, 1, 10, 10)]
    for dtype in (torch.float16, torch.float32, torch.float64):
        for lowest in (-torch.inf, torch.finfo(dtype).min):
            masks.append(torch.zeros(as_4d.shape, dtype=dtype).masked_fill(~as_4d, lowest))
    for dtype, error in ((torch.float32, 1e-5), (torch.float64, 1e-10), (torch.bfloat16, 0.05)):  # the order of sums
        with torch.no_grad():
            wanted = model.to(dtype)(ids, attention_mask=mask).logits[mask]
            for each in masks:
                found = model(ids, attention_mask=each).logits[mask]
                assert (found - wanted).abs().max() <= error * wanted.abs().max()


def test_an_additive_mask_may_leave_padding_rows_without_any_key(model):
    """In the 4-D masks of transformers, rows of padding have no key; they must not cause NaN in other rows."""
    ids, mask = random_ids(2, 10), torch.ones(2, 10, dtype=torch.bool)
    mask[0, 6:] = False
    pairs = mask[:, None, :, None] & mask[:, None, None, :]
    for dtype, lowest in ((torch.float32, -torch.inf), (torch.bfloat16, torch.finfo(torch.float32).min)):
        model = model.to(dtype)
        additive = torch.zeros(pairs.shape).masked_fill(~pairs, lowest)
        with torch.no_grad():
            wanted = model(ids, attention_mask=mask, output_attentions=True).logits[mask]
            logits = model(ids, attention_mask=additive, output_attentions=True).logits[mask]
        torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)


def test_a_causal_4d_mask_is_applied(model):
    """With a causal mask, the first token has the same state as in a row without later tokens."""
    ids = random_ids(1, 8)
    causal = torch.ones(1, 1, 8, 8).tril().bool()
    with torch.no_grad():
        states = model.model(ids, attention_mask=causal).last_hidden_state
        first = model.model(ids[:, :1]).last_hidden_state
    assert (states[0, 0] - first[0, 0]).abs().max() < 1e-5


class LargestTensor(TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        for output in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            if torch.is_tensor(output):
                self.largest = max(self.largest, output.numel())
        return outputs


def test_a_padding_mask_makes_no_tensor_of_length_times_length(tiny_config):
    length = 2048
    model = NeoBERTModel(tiny_config).eval()
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, 1500:] = 0
    with torch.no_grad(), LargestTensor() as seen:
        model(random_ids(2, length), attention_mask=mask)
    assert seen.largest <= 2 * length * 2 * tiny_config.swiglu_width < length * length


class WaitsForDevice(TorchFunctionMode):
    """Records the calls that would make the host wait, except on tensors that `_copy_to_host` returned."""

    WAITING = ("item", "tolist", "numpy", "cpu", "nonzero", "equal", "allclose", "__bool__", "__int__", "__float__")

    def __init__(self, monkeypatch):
        super().__init__()
        self.waits, self.on_host = [], []
        self.copies = 0
        copy = layout_neobert._copy_to_host
        monkeypatch.setattr(layout_neobert, "_copy_to_host", lambda *tensors: self.copy(copy, tensors))

    def copy(self, copy, tensors):
        self.copies += 1
        with torch._C.DisableTorchFunction():
            copied = copy(*tensors)
        self.on_host += [tensor for tensor in copied if tensor is not None]
        return copied

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        values = [value for arg in args for value in (arg if isinstance(arg, (tuple, list)) else (arg,))]
        inputs = [value for value in values if torch.is_tensor(value)]
        # the model names the device by an object, and the host by a string
        names_device = isinstance((kwargs or {}).get("device"), torch.device)
        is_on_host = all(any(value is known for known in self.on_host) for value in inputs) and not names_device
        if is_on_host and torch.is_tensor(result):
            self.on_host.append(result)
        name = getattr(function, "__name__", "")
        has_bool_index = name == "__getitem__" and torch.is_tensor(args[1]) and args[1].dtype == torch.bool
        if inputs and not is_on_host and (name in self.WAITING or has_bool_index):
            self.waits.append(name)
        return result


@pytest.mark.parametrize("form", ["padded", "by boundaries", "by positions", "by numbers", "one length"])
def test_the_host_waits_once_for_the_device(model, monkeypatch, form):
    ids, mask = random_ids(3, 7), torch.ones(3, 7, dtype=torch.long)
    mask[1, 4:] = 0
    boundaries = boundaries_of([3, 4])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    inputs = {
        "padded": dict(input_ids=ids, attention_mask=mask, labels=ids),
        # moving a batch to a device turns one shared tensor into two
        "by boundaries": dict(input_ids=ids[:1], cu_seq_lens_q=boundaries, cu_seq_lens_k=boundaries.clone()),
        "by positions": dict(input_ids=ids[:1], position_ids=positions),
        "by numbers": dict(input_ids=ids[:1], position_ids=positions, seq_idx=torch.tensor([[0] * 3 + [1] * 4])),
        "one length": dict(input_ids=ids),
    }[form]
    with torch.no_grad(), WaitsForDevice(monkeypatch) as device:
        model(**inputs)
    assert device.copies == 1 and not device.waits


@pytest.fixture
def varlen(monkeypatch):
    """`torch_varlen` on the CPU, in standard operations that read the boundaries without synchronisation."""

    def varlen_attn(q, k, v, boundaries, _, max_q, max_k):
        sequence_ids = sequence_of_each_token(boundaries, len(q))
        is_same = sequence_ids[:, None] == sequence_ids
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=is_same).transpose(0, 1)

    monkeypatch.setattr(attention_neobert, "varlen_attn", varlen_attn)
    # "auto" must not choose it: the choice is cached and would hold in later tests
    changes = dict(devices=("cpu",), capabilities={}, is_installed=lambda: True, is_automatic=False)
    monkeypatch.setitem(BACKENDS, "torch_varlen", BACKENDS["torch_varlen"]._replace(**changes))
    return "torch_varlen"


@pytest.mark.parametrize("is_sparse", [False, True])
def test_with_trusted_boundaries_training_does_not_wait_before_the_first_block(model, varlen, monkeypatch, is_sparse):
    model.train().config.sparse_prediction = is_sparse
    boundaries, ids = boundaries_of([3, 1, 6]), random_ids(1, 10)
    labels = ids.masked_fill(ids % 3 > 0, -100)
    wanted = model(ids, labels=labels, cu_seq_lens_q=boundaries).loss
    model.set_attn_implementation(varlen)
    at_first = []
    with WaitsForDevice(monkeypatch) as device:
        model.model.transformer_encoder[0].register_forward_pre_hook(lambda *_: at_first.append(list(device.waits)))
        packed = dict(cu_seq_lens_q=boundaries, cu_seq_lens_k=boundaries.clone(), max_length_q=6, max_length_k=6)
        loss = model(ids, labels=labels, **packed, trust_boundaries=True, num_items_in_batch=7).loss
        loss.backward()
    assert device.copies == 0 and at_first == [[]]
    # sparse prediction needs the number of labels on the host; all blocks but the last are queued by then
    assert device.waits == (["nonzero"] if is_sparse else [])
    num_labels = (labels != -100).sum()
    torch.testing.assert_close(loss, wanted * num_labels / 7)


def test_trusted_boundaries_are_still_checked_if_attention_needs_them_on_the_host(model):
    with pytest.raises(ValueError, match=r"cu_seq_lens is 0, 3; it must .* end with 2"):
        model(random_ids(1, 2), cu_seq_lens_q=boundaries_of([3]), max_length_q=3, trust_boundaries=True)


NOT_0_AND_1 = "{}-D attention_mask of torch.{} contains values other than 0 and 1; .* give `attention_mask == 0`"
BOUNDARIES = "cu_seq_lens is {}; it must be 1-D, begin with 0, increase from document to document and end with {},"
INVALID_INPUTS = {
    "an id beyond the vocabulary": (dict(input_ids=[[5, VOCAB]]), f"contains {VOCAB}, but the ids .* 0 to {VOCAB - 1}"),
    "a negative id": (dict(input_ids=[[5, -1]]), "input_ids contains -1"),
    "no token": (dict(input_ids=[[5], [7]], attention_mask=[[1], [0]]), "row 1 of attention_mask has no real token"),
    "no columns": (dict(input_ids=[[]]), "is empty; give at least one token"),
    "one axis": (dict(input_ids=[5, 6]), "input_ids has shape \\(2,\\); it must be \\(rows, columns\\)"),
    "a mask of another shape": (dict(input_ids=[[5, 6]], attention_mask=[[1, 1, 1]]), "attention_mask has shape"),
    "positions of another shape": (dict(input_ids=[[5, 6]], position_ids=[[0, 1, 2]]), "position_ids has shape"),
    "boundaries not from 0": (dict(input_ids=[[5, 6]], cu_seq_lens_q=[1, 2]), BOUNDARIES.format("1, 2", 2)),
    "boundaries not to T": (dict(input_ids=[[5, 6]], cu_seq_lens_q=[0, 3]), BOUNDARIES.format("0, 3", 2)),
    "falling boundaries": (dict(input_ids=[[5, 6, 7]], cu_seq_lens_q=[0, 2, 1, 3]), BOUNDARIES.format("0, 2, 1, 3", 3)),
    "an empty document": (dict(input_ids=[[5, 6, 7]], cu_seq_lens_q=[0, 2, 2, 3]), BOUNDARIES.format("0, 2, 2, 3", 3)),
    "boundaries of two rows": (dict(input_ids=[[5], [6]], cu_seq_lens_q=[0, 1, 2]), "flatten it to \\(1, T\\)"),
    "a matrix of boundaries": (dict(input_ids=[[5, 6]], cu_seq_lens_q=[[0, 2]]), BOUNDARIES.format("0, 2", 2)),
    "boundaries against positions": (dict(input_ids=[[5, 6, 7]], cu_seq_lens_q=[0, 2, 3], position_ids=[[0, 0, 1]]),
     "cu_seq_lens starts documents at 0, 2, but position_ids at 0, 1; correct one of them or omit it"),
    "boundaries and a mask": (dict(input_ids=[[5, 6]], cu_seq_lens_q=[0, 2], attention_mask=[[1, 1]]),
     "both cu_seq_lens and attention_mask"),
    "boundaries against numbers of documents": (dict(input_ids=[[5, 6, 7]], cu_seq_lens_q=[0, 2, 3], seq_idx=[[0, 1, 1]]),
     "cu_seq_lens starts documents at 0, 2, but seq_idx at 0, 1"),
    "numbers of documents against positions": (dict(input_ids=[[5, 6, 7]], position_ids=[[0, 1, 2]], seq_idx=[[0, 1, 1]]),
     "seq_idx starts documents at 0, 1, but position_ids at 0; correct one of them or omit it"),
    "more numbers": (dict(input_ids=[[5, 6]], seq_idx=[[0, 0, 1]]), "seq_idx has shape .1, 3."),
    "positions between tokens": (dict(input_ids=[[5, 6]], position_ids=[0.0, 0.5]), "torch.float32; give integers of shape"),
    "a mask too": (dict(input_ids=[[5]], seq_idx=[[0]], attention_mask=[[1]]), "both seq_idx and attention_mask"),
    "a length that is too small": (dict(input_ids=[[5, 6, 7]], cu_seq_lens_q=[0, 3], max_length_q=2),
     "max_length_q=2 is less than the longest sequence, 3"),
    "4-D integers": (dict(input_ids=[[5]], attention_mask=[[[[-10000]]]]), NOT_0_AND_1.format(4, "int64")),
    "4-D floats of 0 and 1": (dict(input_ids=[[5]], attention_mask=[[[[1.0]]]]), "float32 contains values above 0"),
    "2-D additive": (dict(input_ids=[[5, 6]], attention_mask=[[0.0, -math.inf]]), NOT_0_AND_1.format(2, "float32")),
    "2-D weights": (dict(input_ids=[[5, 6]], attention_mask=[[1.0, 0.5]]), NOT_0_AND_1.format(2, "float32")),
    "2-D integers": (dict(input_ids=[[5, 6]], attention_mask=[[1, 2]]), NOT_0_AND_1.format(2, "int64")),
    "zeros": (dict(input_ids=[[5]], attention_mask=[[0.0]]), "row 0 of attention_mask has no real token \\(no 1\\)"),
    "trusted boundaries without max_length_q": (dict(input_ids=[[5, 6]], cu_seq_lens_q=[0, 2], trust_boundaries=True),
     "max_length_q is missing; .* give max_length_q as an integer"),
    "both": (dict(input_ids=[[5]], inputs_embeds=[[[0.0] * 32]]), "give exactly one of input_ids and inputs_embeds"),
    "embeddings of one axis": (dict(inputs_embeds=[[0.0] * 32]), "inputs_embeds has shape .1, 32.; it must be .rows, col"),
    "neither": ({}, "give exactly one of input_ids and inputs_embeds"),
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID_INPUTS)
def test_invalid_input_is_refused_with_value_rule_and_solution(model, name, monkeypatch):
    arguments, message = INVALID_INPUTS[name]
    if arguments.get("trust_boundaries"):
        from_device = BACKENDS["sdpa"]._replace(reads_boundaries=True)
        monkeypatch.setitem(BACKENDS, "sdpa", from_device)
        monkeypatch.setitem(BACKENDS, "cpu_tiled", from_device)
    tensors = {key: value if isinstance(value, int) else torch.tensor(value) for key, value in arguments.items()}
    if name == "no columns":
        tensors["input_ids"] = tensors["input_ids"].long()
    with pytest.raises(ValueError, match=message):
        model(**tensors)


def test_unknown_arguments_are_refused(model):
    ids = random_ids(1, 4)
    with pytest.raises(TypeError, match=r"no argument attn_mask; omit it$"):
        model(ids, attn_mask=torch.ones(1, 4))
    with pytest.raises(TypeError, match=r"no argument labels; load a model with a head$"):
        model.model(ids, labels=torch.ones(1, 4))


@pytest.mark.parametrize("unpad", [True, False])
def test_only_a_sequence_longer_than_the_training_context_warns_and_once(tiny_config, caplog, unpad):
    """The row is longer, its documents are not."""
    logging.warning_once.cache_clear()
    tiny_config.unpad_inputs = unpad
    model, mask = NeoBERTModel(tiny_config), torch.ones(1, 80).long()
    mask[:, 60:] = 0
    model(random_ids(1, 80), cu_seq_lens_q=boundaries_of([40, 40]))
    model(random_ids(1, 80), attention_mask=mask)
    assert not caplog.records
    for _ in range(2):
        assert model(random_ids(1, 80)).last_hidden_state.shape[:2] == (1, 80)
    assert sum("80 tokens is longer than the 64" in record.message for record in caplog.records) == 1
