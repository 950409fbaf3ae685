"""Masked-token accuracy and its baseline equal values computed by hand."""

import torch
from masked_accuracy import bigram_accuracy, masked_accuracy
from transformers.modeling_outputs import MaskedLMOutput


class KnowsOnlySeven(torch.nn.Module):
    def forward(self, input_ids):
        logits = torch.zeros(*input_ids.shape, 10)
        logits[..., 7] = 1
        return MaskedLMOutput(logits=logits)


BATCHES = [
    {"input_ids": torch.tensor([[7, 1, 1]]), "labels": torch.tensor([[-100, 7, 3]])},
    {"input_ids": torch.tensor([[1, 7]]), "labels": torch.tensor([[7, -100]])},
]


def test_only_masked_tokens_count():
    assert masked_accuracy(KnowsOnlySeven(), BATCHES) == 2 / 3


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
