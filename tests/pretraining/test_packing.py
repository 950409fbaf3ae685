"""The packer: every document once and whole, rows within the budget, and rows that depend on their number alone."""

import random
from itertools import islice

import datasets
import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from conftest import packed_rows, unpack
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from neobert_hf import NeoBERTForMaskedLM, PackedMLMCollator, PackedStream

SEEDS = st.integers(0, 99)
STREAMS = st.lists(st.integers(1, 40), max_size=60)


def documents_of(lengths):
    tokens = iter(range(sum(lengths)))
    return [{"input_ids": [next(tokens) for _ in range(length)]} for length in lengths]


@settings(max_examples=100, deadline=None)
@given(lengths=STREAMS, max_tokens=st.integers(40, 100), max_open_rows=st.integers(1, 5))
def test_every_document_is_in_one_row_and_whole(lengths, max_tokens, max_open_rows):
    documents = documents_of(lengths)
    rows = list(PackedStream(documents, max_tokens, max_open_rows=max_open_rows))
    assert all(0 < len(row["input_ids"]) <= max_tokens for row in rows)
    assert sorted(unpack(rows)) == [document["input_ids"] for document in documents]


@settings(max_examples=100, deadline=None)
@given(lengths=STREAMS, max_tokens=st.integers(1, 30))
def test_chunks_hold_every_token_and_truncation_only_first_ones(lengths, max_tokens):
    documents = documents_of(lengths)
    chunks = unpack(PackedStream(documents, max_tokens, long_documents="chunk"))
    assert sorted(token for chunk in chunks for token in chunk) == list(range(sum(lengths)))
    stream = PackedStream(documents, max_tokens, long_documents="truncate")
    assert sorted(unpack(stream)) == [document["input_ids"][:max_tokens] for document in documents]
    assert stream.num_truncated == sum(length > max_tokens for length in lengths)


def test_an_iteration_begins_anew_after_a_whole_one():
    stream = PackedStream(documents_of([5, 9, 3, 12, 7]), 16)
    assert list(stream) == list(stream)


@pytest.mark.parametrize("draw", ["uniform", "log-uniform"])
def test_rows_are_at_least_97_percent_full(draw):
    """Documents of 10 to 1,024 tokens, a budget of 8,192: the requirement on the packer."""
    rng = random.Random(0)
    lengths = {
        "uniform": [rng.randint(10, 1024) for _ in range(4000)],
        "log-uniform": [int(10 * 102.4 ** rng.random()) for _ in range(8000)],
    }[draw]
    stream = PackedStream(({"input_ids": [5] * length} for length in lengths), 8192)
    for _ in stream:
        pass
    assert stream.packing_efficiency >= 0.97


def test_efficiency_is_tokens_over_budget():
    stream = PackedStream(documents_of([6, 4, 7]), 10)
    assert str(stream.packing_efficiency) == "nan"
    assert len(list(stream)) == 2
    assert stream.packing_efficiency == 17 / 20


def test_workers_share_the_documents():
    documents = documents_of([5, 9, 3, 12, 7, 4, 8])
    for source in (documents, datasets.Dataset.from_list(documents).to_iterable_dataset(num_shards=2)):
        rows = list(DataLoader(PackedStream(source, 16), batch_size=None, num_workers=2))
        assert sorted(unpack(rows)) == [document["input_ids"] for document in documents]


def test_several_processes_share_the_rows_without_dispatched_batches():
    documents = documents_of(range(3, 12))
    rows = list(PackedStream(documents, 16, max_open_rows=2))
    assert len(rows) % 2 == 0  # else accelerate repeats some, so that all processes have as many
    shares = []
    for process in range(2):
        loader = DataLoader(PackedStream(documents, 16, max_open_rows=2), batch_size=1, collate_fn=lambda rows: rows[0])
        shares.append(list(prepare_data_loader(loader, num_processes=2, process_index=process, dispatch_batches=False)))
    assert [row for pair in zip(*shares) for row in pair] == rows


BAD = {
    "a document above the budget": (dict(lengths=[3, 50]), "document 1 of the stream has 50 tokens, the budget .* 40"),
    "an empty document": (dict(lengths=[3, 0]), "document 1 of the stream holds no token"),
    "an unknown choice": (dict(lengths=[3], long_documents="split"), "'split' is not one of error, truncate, chunk"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name):
    arguments, message = BAD[name]
    lengths = arguments.pop("lengths")
    with pytest.raises(ValueError, match=message):
        list(PackedStream(documents_of(lengths), **{"max_tokens": 40, **arguments}))


@pytest.mark.slow
def test_a_resumed_trainer_continues_after_the_last_row_that_was_trained(tiny_config, tmp_path):
    """And not after the last one that was read, which is further on."""
    documents, trained = documents_of(range(3, 12)), []

    def train(max_steps, checkpoint=None):
        rows = PackedStream(documents, 12, max_open_rows=2)
        model = NeoBERTForMaskedLM(tiny_config)
        model.register_forward_pre_hook(
            lambda *call: trained.append(call[2]["input_ids"][0].tolist()), with_kwargs=True
        )
        options = dict(save_strategy="steps", save_steps=2, per_device_train_batch_size=1, max_steps=max_steps)
        training = TrainingArguments(tmp_path, use_cpu=True, report_to=[], disable_tqdm=True, **options)
        Trainer(model, training, collate, rows).train(resume_from_checkpoint=checkpoint)
        return rows

    def collate(rows):
        return {name: torch.tensor([rows[0]["input_ids"]]) for name in ("input_ids", "labels")}

    rows = train(2)
    assert rows.num_yielded > len(trained) == 2
    train(4, str(tmp_path / "checkpoint-2"))
    assert trained == [row["input_ids"] for row in islice(PackedStream(documents, 12, max_open_rows=2), 4)]


def test_a_packed_row_is_masked_as_its_documents_are(tokenizer):
    documents = [{"input_ids": tokenizer(text)["input_ids"]} for text in ("the quick brown fox", "jumps", "over it")]
    (row,) = PackedStream(documents, 100)
    of_row = PackedMLMCollator(tokenizer, seed=5)([row])
    of_documents = PackedMLMCollator(tokenizer, seed=5)(documents)
    assert all(torch.equal(of_row[name], of_documents[name]) for name in ("input_ids", "labels", "position_ids"))


@pytest.mark.parametrize("positions", [[0, 1], [1, 2, 3]])
def test_a_packed_row_without_a_position_for_each_token_is_refused(tokenizer, positions):
    with pytest.raises(ValueError, match="one position for each token, and 0 where a document begins"):
        PackedMLMCollator(tokenizer)([{"input_ids": [5, 6, 7], "position_ids": positions}])


def numbered_documents(lengths):
    """Documents whose tokens are their own number, so that each can be told in a row."""
    return [[100 + number] * length for number, length in enumerate(lengths)]


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=80),
    max_tokens=st.integers(30, 90),
    seed=st.integers(0, 99),
    num_passes=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_each_pass_over_rows_holds_every_document_once_and_whole(lengths, max_tokens, seed, num_passes):
    documents = numbered_documents(lengths)
    once = packed_rows(documents, max_tokens, seed=seed)
    rows = packed_rows(documents, max_tokens, seed=seed, num_rows=num_passes * len(once))
    assert len(rows) == num_passes * len(once)
    for number_of_pass in range(num_passes):
        found = []
        for place in range(len(once)):
            row = rows[number_of_pass * len(once) + place]
            assert len(row["input_ids"]) == len(row["position_ids"]) <= max_tokens
            found += unpack([row])
        assert sorted(found) == documents
    assert once.plan.num_tokens == sum(lengths)


def test_a_row_depends_on_its_number_alone():
    """In whatever order rows are asked for, by whichever process."""
    lengths = np.random.default_rng(0).integers(1, 30, 200)
    documents = numbered_documents(lengths)
    rows = packed_rows(documents, 64, num_rows=300, seed=5)
    wanted = [rows[number] for number in range(300)]
    assert [rows[number] for number in reversed(range(300))] == wanted[::-1]
    assert len({row["mask_seed"] for row in wanted}) == 300
    first, second = ([row["input_ids"] for row in wanted[a : a + len(rows.plan)]] for a in (0, len(rows.plan)))
    assert first != second and sorted(first) == sorted(second)  # another order in the next pass
    low, high = np.random.SeedSequence((5, 7)).generate_state(2).tolist()  # of numpy's; a resume draws the same masks
    assert wanted[7]["mask_seed"] == (high * 2**32 + low) // 2
    with pytest.raises(IndexError, match="row 300 of 300"):
        rows[300]


@given(lengths=st.lists(st.integers(2, 60), min_size=1, max_size=40), max_length=st.integers(3, 30), seed=SEEDS)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_rows_cut_documents_and_keep_their_special_tokens_and_with_chunks_every_token(lengths, max_length, seed):
    """Documents of tokens from 2 on, between 0 and 1."""
    tokens = iter(range(2, 5000))
    documents = [[0, *(next(tokens) for _ in range(length - 2)), 1] for length in lengths]
    options = dict(max_length=max_length, special_tokens=(1, 1), seed=seed)
    cut = packed_rows(documents, 30, **options)
    pieces = unpack(cut)
    assert sorted(pieces) == sorted([*document[: max_length - 1], 1][: len(document)] for document in documents)
    chunked = packed_rows(documents, 30, long_documents="chunk", **options)
    pieces = unpack(chunked)
    assert all(piece[0] == 0 and piece[-1] == 1 and len(piece) <= max_length for piece in pieces)
    inner = sorted(piece[1:-1] for piece in pieces)
    assert [token for piece in inner for token in piece] == list(range(2, next(tokens)))
    assert sum(map(len, pieces)) == chunked.plan.num_tokens
    assert len(pieces) == sum(max(1, -(-(length - 2) // (max_length - 2))) for length in lengths)


TOO_LONG = r"document 1 has 9 tokens, a row takes 1 to 8; raise row_tokens \(max_tokens\) or lower max_length=None"
ENDS_ONLY = {"max_length": 2, "special_tokens": (1, 1)}
UNPACKABLE = [
    ([], {}, "none of the 0 documents is left to pack"),
    ([0, 0], {}, "none of the 2 documents is left to pack"),
    ([3, 9], {}, TOO_LONG),
    ([3, 9], ENDS_ONLY, "max_length=2 leaves no token beside the 2 special tokens"),
    ([3, 9], {"max_length": 0}, "max_length=0 leaves no token"),
]


@pytest.mark.parametrize(("lengths", "options", "message"), UNPACKABLE)
def test_documents_that_cannot_be_packed_are_refused(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        packed_rows(numbered_documents(lengths), 8, **options)


def test_masks_of_a_row_do_not_depend_on_the_rows_beside_it(tokenizer):
    rows = list(PackedStream([[2, *range(5, 5 + n), 3] for n in range(1, 20)], 32, seed=1))
    collator = PackedMLMCollator(tokenizer)
    alone, together = collator([rows[4]]), collator(rows[3:6])
    place = len(rows[3]["input_ids"])
    assert torch.equal(together["labels"][0, place : place + alone["labels"].shape[1]], alone["labels"][0])


def test_each_pass_masks_the_same_rows_anew(tokenizer):
    """The same documents share a row in every pass; the masks of two passes agree no more than by chance."""
    lengths = np.random.default_rng(0).integers(20, 60, 200).tolist()
    ordinary = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]
    documents = [[tokenizer.cls_token_id, *random.Random(i).choices(ordinary, k=n)] for i, n in enumerate(lengths)]
    rows, num_passes = packed_rows(documents, 256, seed=3, num_rows=10_000), 3
    collator, passes = PackedMLMCollator(tokenizer), []
    for start in range(0, num_passes * len(rows.plan), len(rows.plan)):
        numbers = range(start, start + len(rows.plan))
        batches = {tuple(rows[number]["input_ids"]): collator([rows[number]]) for number in numbers}
        masks = {ids: batch["input_ids"][0] == tokenizer.mask_token_id for ids, batch in batches.items()}
        assert all(torch.equal(masks[ids], batch["labels"][0] != -100) for ids, batch in batches.items())
        passes.append(masks)
    assert all(masks.keys() == passes[0].keys() for masks in passes)
    num_ordinary = sum(lengths)
    first, second, third = (torch.cat([masks[ids] for ids in passes[0]]) for masks in passes)
    for masks in (first, second, third):
        assert abs(masks.sum().item() / num_ordinary - 0.2) < 0.02  # five standard deviations
    for one, other in ((first, second), (first, third), (second, third)):
        assert abs((one & other).sum().item() / num_ordinary - 0.2**2) < 0.011


def test_workers_draw_other_masks():
    """Rows of the same number in two workers must not be masked alike."""
    documents = datasets.IterableDataset.from_generator(documents_of, gen_kwargs={"lengths": [8] * 40})
    stream = PackedStream(documents, 16, seed=3)
    for num_workers in (0, 2):
        rows = list(DataLoader(stream, batch_size=None, num_workers=num_workers))
        assert len(rows) == len({row["mask_seed"] for row in rows}) == 20


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_ends_after_the_rows_that_were_asked_for(num_workers):
    documents = datasets.IterableDataset.from_generator(documents_of, gen_kwargs={"lengths": [8] * 40})
    everything = list(DataLoader(PackedStream(documents, 16, seed=3), batch_size=None, num_workers=num_workers))
    for wanted in (1, 5, 20, 99):
        stream = PackedStream(documents, 16, seed=3, num_rows=wanted)
        assert list(DataLoader(stream, batch_size=None, num_workers=num_workers)) == everything[:wanted]
