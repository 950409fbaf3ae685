"""Pseudo-perplexity against the naive computation, for five architectures; intervals; resume; the budget."""

import copy
import json
import math

import evaluate_pseudo_perplexity
import numpy as np
import pseudo_perplexity as module
import pytest
import torch
import transformers
from conftest import SENTENCE, json_lines, run_main
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudo_perplexity import (
    MaskedText,
    confidence_interval,
    load_masked_model,
    masked_losses,
    median_by_length,
    positions_to_mask,
    pseudo_perplexity,
)

from neobert_hf.data.lengths import longest_text

SHAPE = dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
SHAPE["pad_token_id"] = 0
OTHERS = {
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SHAPE)),
    "roberta": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SHAPE, max_position_embeddings=70)),
    "roformer": lambda: transformers.RoFormerForMaskedLM(
        transformers.RoFormerConfig(**SHAPE, max_position_embeddings=70)
    ),
    "modernbert": lambda: transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(**SHAPE, attn_implementation="sdpa")
    ),
}
MASK, SPECIAL = 4, {2, 3}


@pytest.fixture(params=["neobert", *OTHERS])
def any_model(request, model):
    torch.manual_seed(0)
    return model if request.param == "neobert" else OTHERS[request.param]().eval()


def naive(model, ids, positions):
    """One copy at a time, all logits."""
    losses = []
    for position in positions:
        copy = torch.tensor([ids])
        copy[0, position] = MASK
        with torch.no_grad():
            logits = model(input_ids=copy).logits[0, position].double()
        losses.append(float(torch.logsumexp(logits, 0) - logits[ids[position]]))
    return losses


def texts(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [[2, *rng.integers(5, 96, length).tolist(), 3] for length in lengths]


@pytest.mark.parametrize("max_tokens", [6, 33, 16_384])  # the first is less than a text has
def test_losses_equal_the_naive_computation_whatever_the_budget(any_model, max_tokens):
    documents = [MaskedText(ids, positions_to_mask(ids, SPECIAL)) for ids in texts([1, 7, 7, 12])]
    config = any_model.config.to_dict()
    found = list(masked_losses(any_model, MASK, documents, max_tokens))
    assert list(map(len, found)) == [1, 7, 7, 12]
    for document, losses in zip(documents, found):
        np.testing.assert_allclose(losses, naive(any_model, document.input_ids, document.positions), rtol=1e-5)
    assert not any_model.base_model._forward_hooks and any_model.config.to_dict() == config


def test_losses_equal_those_of_the_numpy_oracle(model, oracle):
    ids = texts([6])[0]
    expected = []
    for position in range(1, 7):
        copy = list(ids)
        copy[position] = MASK
        logits = oracle.mlm_logits(oracle.encode(np.array(copy))[2])[position]
        expected.append(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[ids[position]])
    (losses,) = masked_losses(model, MASK, [MaskedText(ids, range(1, 7))])
    assert pseudo_perplexity(losses) == pytest.approx(np.exp(np.mean(expected)), rel=1e-5)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8), max_tokens=st.integers(22, 60))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_batch_exceeds_the_budget_and_every_position_is_masked_once(lengths, max_tokens):
    documents = [MaskedText(ids, positions_to_mask(ids, SPECIAL)) for ids in texts(lengths)]
    batches = list(module._batches(documents, max_tokens))
    for batch in batches:
        assert len(batch) * max(len(text.input_ids) for text, _ in batch) <= max_tokens
    copies = [(id(text), position) for batch in batches for text, position in batch]
    assert copies == [(id(text), position) for text in documents for position in text.positions]


def test_the_head_decodes_masked_positions_only(any_model):
    """The logits are the largest tensor of a masked language model: length x vocabulary for each copy."""
    shapes = []
    hook = any_model.get_output_embeddings().register_forward_hook(lambda m, args, out: shapes.append(tuple(out.shape)))
    list(masked_losses(any_model, MASK, [MaskedText(ids, [1, 2, 3]) for ids in texts([30])]))
    hook.remove()
    assert math.prod(shapes[0]) == 3 * 96


def test_a_sample_of_positions_is_sorted_distinct_and_seeded():
    ids = texts([50])[0]
    sample = positions_to_mask(ids, SPECIAL, 10, seed=1)
    assert sample == sorted(set(sample)) and len(sample) == 10 and not {0, 51} & set(sample)
    assert sample == positions_to_mask(ids, SPECIAL, 10, seed=1) != positions_to_mask(ids, SPECIAL, 10, seed=2)
    assert positions_to_mask(ids, (), 100) == list(range(52))
    with pytest.raises(ValueError, match="special tokens only"):
        positions_to_mask([2, 3], SPECIAL)


def test_the_interval_of_a_sample_covers_the_value_of_all_tokens_in_95_of_100_draws():
    """The loss of a token is drawn once; 2,000 samples of 60 of 300 tokens."""
    rng = np.random.default_rng(0)
    losses = rng.gamma(2.0, 1.5, 300)
    exact, covered = math.exp(losses.mean()), 0
    for _ in range(2000):
        low, high = confidence_interval(list(rng.choice(losses, 60, replace=False)), 300)
        covered += low <= exact <= high
    assert 0.92 < covered / 2000 < 0.97


def test_all_tokens_give_an_interval_of_width_zero_and_one_token_an_infinite_one():
    low, high = confidence_interval([1.0, 2.0], 2)
    assert low == high == pytest.approx(math.exp(1.5))
    assert confidence_interval([1.0], 5) == (0.0, math.inf)
    assert pseudo_perplexity([1e4]) == math.inf


@pytest.mark.parametrize(
    "lengths, values, num_bins, bins",
    [
        ([4, 1, 2, 3], [40.0, 10.0, 20.0, 30.0], 2, [(2, 15.0, 2), (4, 35.0, 2)]),
        ([1, 2, 9, 9, 9, 9], [1.0, 2.0, 40.0, 10.0, 20.0, 30.0], 3, [(2, 1.5, 2), (9, 25.0, 4)]),
    ],
)
def test_the_curve_has_medians_of_bins_and_texts_of_one_length_are_in_one(lengths, values, num_bins, bins):
    """Texts that were truncated to one length would otherwise be divided by their values."""
    assert [tuple(each.values()) for each in median_by_length(lengths, values, num_bins)] == bins


def test_a_model_without_the_head_is_refused(any_model, tmp_path):
    any_model.base_model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"choose a checkpoint with the head of masked language modelling"):
        load_masked_model(str(tmp_path))
    any_model.save_pretrained(tmp_path / "whole")
    assert load_masked_model(str(tmp_path / "whole")).dtype == any_model.dtype


def test_learned_positions_limit_the_length_and_rotary_ones_do_not(any_model):
    longest = longest_text(any_model)
    assert (longest is None) == (any_model.config.model_type in ("neobert", "modernbert"))
    if longest:
        ids = torch.full((1, longest + 1), 5)
        any_model(input_ids=ids[:, 1:])
        with pytest.raises((IndexError, RuntimeError)):
            any_model(input_ids=ids)


@pytest.fixture
def command(published, tmp_path):
    words = SENTENCE.split()
    texts = json_lines(tmp_path / "texts.jsonl", [{"text": " ".join(words[: 3 + i])} for i in range(6)])
    return ["--files", texts, "--model_name_or_path", published, "--output_dir", tmp_path / "out"]


def lines(folder):
    (file,) = (folder / "out").glob("texts-*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_command_writes_a_line_per_text_a_summary_and_a_figure(command, tmp_path):
    summary = json.loads(run_main(evaluate_pseudo_perplexity, *command).splitlines()[-1])
    written = lines(tmp_path)
    assert sorted(line["text"] for line in written) == list(range(6))
    assert all(line["low"] == line["pseudo_perplexity"] == line["high"] for line in written)
    assert summary["median"] == np.median([line["pseudo_perplexity"] for line in written])
    assert summary["positions"] == sum(line["length"] - 2 for line in written)  # without [CLS] and [SEP]
    assert (tmp_path / "out/by_length.png").stat().st_size > 5_000


def test_an_interrupted_command_resumes_and_ends_with_the_same_lines_also_from_a_folder_that_moved(command, tmp_path):
    run_main(evaluate_pseudo_perplexity, *command)
    whole = lines(tmp_path)
    (file,) = (tmp_path / "out").glob("texts-*.jsonl")
    content = file.read_text().splitlines(keepends=True)
    file.write_text("".join(content[:3]) + content[3][:10])  # a part of the fourth line, as after a kill
    command[3] = command[3].rename(tmp_path / "moved")
    run_main(evaluate_pseudo_perplexity, *command)
    assert file.read_text().splitlines(keepends=True)[:3] == content[:3]
    for before, after in zip(whole, lines(tmp_path), strict=True):
        assert before["text"] == after["text"]
        assert after["pseudo_perplexity"] == pytest.approx(before["pseudo_perplexity"], rel=1e-6)


def test_other_arguments_have_lines_of_their_own(command, tmp_path):
    for more in ((), ("--positions", "2"), ("--positions", "2", "--seed", "1"), ("--num_texts", "3")):
        summary = json.loads(run_main(evaluate_pseudo_perplexity, *command, *more).splitlines()[-1])
    assert summary["texts"] == 3
    assert len(list((tmp_path / "out").glob("texts-*.jsonl"))) == 4


def test_a_tokenizer_without_a_mask_token_and_less_than_one_text_are_refused(command, tmp_path, tokenizer, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_main(evaluate_pseudo_perplexity, *command, "--num_texts", "0")
    assert "num_texts=0 leaves no text" in capsys.readouterr().err
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.mask_token = None
    tokenizer.save_pretrained(command[3])
    with pytest.raises(SystemExit, match="published has no mask token; choose a masked model"):
        run_main(evaluate_pseudo_perplexity, *command)


@pytest.mark.parametrize(
    "row, message",
    [({"other": 1}, "line 7: no column 'text'"), ({"text": ""}, "line 7: the text has special tokens only")],
)
def test_a_row_without_text_is_refused_before_any_computation(command, tmp_path, row, message):
    with (tmp_path / "texts.jsonl").open("a") as stream:
        stream.write(json.dumps(row) + "\n")
    with pytest.raises(SystemExit, match=message):
        run_main(evaluate_pseudo_perplexity, *command)
    assert not list((tmp_path / "out").glob("texts-*.jsonl"))
