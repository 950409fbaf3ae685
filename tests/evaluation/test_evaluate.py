"""Masked-token accuracy and its baselines equal values computed by hand."""

import pytest
import torch
from transformers.modeling_outputs import MaskedLMOutput

from neobert_hf.evaluation.masked_lm import bigram_accuracy, masked_accuracy, unigram_accuracy


class KnowsOnlySeven(torch.nn.Module):
    """Predicts token 7 everywhere."""

    device = "cpu"

    def forward(self, input_ids):
        logits = torch.zeros(*input_ids.shape, 10)
        logits[..., 7] = 1
        return MaskedLMOutput(logits=logits)


BATCHES = [
    {"input_ids": torch.tensor([[7, 1, 1]]), "labels": torch.tensor([[-100, 7, 3]])},
    {"input_ids": torch.tensor([[1, 7]]), "labels": torch.tensor([[7, -100]])},
]


def test_only_masked_tokens_count():
    model = KnowsOnlySeven().train()
    assert masked_accuracy(model, BATCHES) == 2 / 3
    assert model.training


def test_batches_without_a_masked_token_are_refused():
    with pytest.raises(ValueError, match="no batch holds a masked token"):
        masked_accuracy(KnowsOnlySeven(), [{"input_ids": torch.tensor([[7]]), "labels": torch.tensor([[-100]])}])


def test_the_unigram_baseline_is_the_share_of_the_most_frequent_training_token():
    assert abs(unigram_accuracy([[0, 0, 0, 7, 7, 3]], BATCHES, ignored_ids=[0]) - 2 / 3) < 1e-6
    assert abs(unigram_accuracy([[3, 3, 7]], BATCHES, ignored_ids=[0]) - 1 / 3) < 1e-6


def test_the_bigram_baseline_follows_the_more_confident_neighbour():
    training = [[2, 5, 6, 7, 3], [2, 5, 8, 7, 3], [2, 5, 8, 7, 3], [2, 9, 6, 9, 3]]
    masked = 4

    def accuracy(ids, place, label):
        labels = [-100] * len(ids)
        labels[place] = label
        batch = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}
        return bigram_accuracy(training, [batch], ignored_ids=[2, 3])

    assert accuracy([2, 5, masked, 7, 3], 2, 8) == 1  # after 5: 8 in two of three
    assert accuracy([2, 5, masked, 9, 3], 2, 6) == 1  # 6 always precedes 9, which is more confident than 8 after 5
    assert accuracy([2, masked, masked, 9, 3], 2, 6) == 1  # a masked neighbour predicts nothing
    assert accuracy([2, masked, masked, masked, 3], 2, 5) == 1  # the most frequent token: 5, three times
