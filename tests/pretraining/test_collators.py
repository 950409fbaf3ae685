"""The packing collator uses transformers' masks, adds no padding and keeps documents apart."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DataCollatorForLanguageModeling

from neobert_hf import PackedMLMCollator, PackedStream


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6), seed=st.integers(0, 1000))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_the_row_holds_every_token_of_every_document_once_and_in_order(tokenizer, lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(5, len(tokenizer), (n,), generator=generator).tolist() for n in lengths]
    collator = PackedMLMCollator(tokenizer, seed=seed, return_flash_attn_kwargs=True)
    row = collator([{"input_ids": document} for document in documents])
    assert row["cu_seq_lens_q"].tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert row["cu_seq_lens_k"] is row["cu_seq_lens_q"] and row["cu_seq_lens_q"].dtype == torch.int32
    assert row["max_length_q"] == row["max_length_k"] == max(lengths)
    assert row["position_ids"][0].tolist() == [i for n in lengths for i in range(n)]
    restored = torch.where(row["labels"] != -100, row["labels"], row["input_ids"])[0]
    assert restored.tolist() == [token for document in documents for token in document]
    assert tokenizer.pad_token_id not in row["input_ids"]


BERT = dict(mlm_probability=0.15, mask_replace_prob=0.8, random_replace_prob=0.1)
OURS = dict(mlm_probability=0.5, mask_replace_prob=1.0, random_replace_prob=0.0)


@pytest.mark.parametrize("probabilities", [OURS, BERT])
def test_masks_are_those_that_transformers_draws_for_the_flat_row(tokenizer, probabilities):
    documents = [{"input_ids": tokenizer(text)["input_ids"]} for text in ("the quick fox", "jumps", "over the dog")]
    documents *= 20
    packed = PackedMLMCollator(tokenizer, **probabilities, seed=7)([dict(document) for document in documents])
    stock = DataCollatorForLanguageModeling(tokenizer, **probabilities, seed=7)
    flat = stock([{"input_ids": [token for document in documents for token in document["input_ids"]]}])
    assert all(torch.equal(packed[name], flat[name]) for name in ("input_ids", "labels"))


def test_a_fifth_of_the_ordinary_tokens_and_no_special_token_is_masked(tokenizer):
    """Over 30,000 tokens the share has a standard deviation of 0.0023; the tolerance is four of them."""
    ids = tokenizer(" ".join(["the quick brown fox jumps over the lazy dog"] * 7))["input_ids"]
    row = PackedMLMCollator(tokenizer, seed=0)([{"input_ids": ids} for _ in range(500)])
    is_masked = row["labels"] != -100
    is_special = torch.isin(torch.where(is_masked, row["labels"], row["input_ids"]), torch.tensor([0, 2, 3]))
    assert not (is_masked & is_special).any()
    share = is_masked.sum() / (~is_special).sum()
    assert abs(share - 0.2) < 0.0093
    assert (row["input_ids"][is_masked] == tokenizer.mask_token_id).all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_that_a_tokenizer_padded_give_the_batch_of_the_rows_without_padding(tokenizer, side):
    texts = ["the quick brown fox", "jumps", "over the dog"]

    def batches(names, **options):
        tokens = tokenizer(texts, **options)
        rows = [{name: tokens[name][i] for name in names} for i in range(len(texts))]
        return [PackedMLMCollator(tokenizer, seed=0)(batch) for batch in (rows, [*PackedStream(rows, max_tokens=20)])]

    padded = batches(["input_ids", "attention_mask"], padding=True, padding_side=side)
    for expected, batch in zip(batches(["input_ids"]), padded):
        assert batch.keys() == expected.keys()
        assert all(torch.equal(batch[name], expected[name]) for name in batch)
    packed = {"input_ids": [2, 5, 3, 2, 6, 3, 0], "position_ids": [0, 1, 2, 0, 1, 2, 0]}
    packed |= {"attention_mask": [1] * 6 + [0]}
    assert PackedMLMCollator(tokenizer)([packed])["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2]]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"input_ids": [2, 5, 0, 6, 3], "position_ids": range(5)}, None),  # a text about [PAD]
        ({"input_ids": [2, 5, 0, 6, 3], "attention_mask": [1] * 5}, None),
        ({"input_ids": [2, 5, 3, 0]}, r"holds \[PAD\] where it may be padding or text; give its attention_mask"),
        ({"input_ids": []}, "document 1 of the batch holds no token"),
    ],
)
@pytest.mark.parametrize("batch_format", ["packed", "padded"])
def test_padding_without_a_mask_is_refused_where_it_may_be_text(tokenizer, row, fault, batch_format):
    collator = PackedMLMCollator(tokenizer, batch_format=batch_format)
    if fault:
        with pytest.raises(ValueError, match=fault):
            collator([{"input_ids": [2, 5, 3]}, row])
        return
    batch = collator([row])
    ids = torch.where(batch["labels"] != -100, batch["labels"], batch["input_ids"])
    assert ids.tolist() == [row["input_ids"]]


def test_a_padding_token_that_ends_texts_too_is_text(tokenizer):
    shared = copy.deepcopy(tokenizer)
    shared.pad_token = shared.sep_token
    collator = PackedMLMCollator(shared)
    assert collator([{"input_ids": [2, 5, 3, 6, 3]}])["position_ids"].tolist() == [[0, 1, 2, 3, 4]]


def test_a_tokenizer_without_a_padding_token_packs_and_cannot_pad(tokenizer):
    padless = copy.deepcopy(tokenizer)
    padless.pad_token = None
    documents = [{"input_ids": [2, 5, 6, 7, 3]}, {"input_ids": [2, 8, 3]}]
    row, expected = (PackedMLMCollator(t, mlm_probability=0.5, seed=0)(documents) for t in (padless, tokenizer))
    assert all(torch.equal(row[name], expected[name]) for name in expected)
    with pytest.raises(ValueError, match="no padding token; set tokenizer"):
        PackedMLMCollator(padless, batch_format="padded")


def test_every_batch_format_has_the_same_masks(tokenizer):
    rows = [
        {"input_ids": [2, 5, 6, 7, 3, 2, 8, 9, 3], "position_ids": [0, 1, 2, 3, 4, 0, 1, 2, 3], "mask_seed": 1},
        {"input_ids": [2, *range(5, 30), 3], "position_ids": list(range(27)), "mask_seed": 2},
    ]
    packed, padded, concatenated = (
        PackedMLMCollator(tokenizer, mlm_probability=0.5, batch_format=batch_format)(rows)
        for batch_format in ("packed", "padded", "concatenated")
    )
    is_real = padded["attention_mask"].bool()
    assert is_real.sum(-1).tolist() == [5, 4, 27]
    for name in ("input_ids", "labels"):
        assert torch.equal(padded[name][is_real], packed[name][0])
        assert torch.equal(concatenated[name], packed[name])
    assert (padded["labels"][~is_real] == -100).all()
    assert "position_ids" not in concatenated
    with pytest.raises(ValueError, match="batch_format='flat' is not one of packed, padded, concatenated"):
        PackedMLMCollator(tokenizer, batch_format="flat")


def test_a_position_that_does_not_increase_begins_a_document(tokenizer):
    """The rule of the model, also for rows of others whose later documents begin at another number than 0."""
    row = {"input_ids": [2, 50, 3, 2, 60, 3], "position_ids": [0, 1, 2, 1, 2, 3]}
    batch = PackedMLMCollator(tokenizer)([row])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2]]


def test_the_tensors_of_a_dataset_keep_their_ids(tokenizer):
    ids = torch.arange(5, 60)
    PackedMLMCollator(tokenizer, mlm_probability=0.9)([{"input_ids": ids, "mask_seed": 1}])
    assert torch.equal(ids, torch.arange(5, 60))
