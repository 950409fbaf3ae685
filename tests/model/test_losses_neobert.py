"""Chunked losses equal the full loss, with one chunk of logits in memory at a time."""

import pytest
import torch
from test_layout_neobert import LargestTensor
from torch._dynamo.testing import CompileCounter

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.model import losses_neobert
from neobert_hf.model.losses_neobert import cross_entropy
from neobert_hf.model.losses_neobert import cross_entropy_in_chunks as chunked

FLOAT64 = dict(rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_labels", [0, 1, 7, 8, 23])
@pytest.mark.parametrize("counted", [None, 40])
def test_a_chunked_loss_equals_the_full_loss(monkeypatch, num_labels, counted):
    monkeypatch.setattr(losses_neobert, "LOSS_CHUNK", 8)
    decoder = torch.nn.Linear(6, 11).double()
    hidden = torch.randn(num_labels, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(11, (num_labels,))
    gradients = []
    whole, (in_chunks, _) = cross_entropy(decoder(hidden), labels, counted), chunked(decoder, hidden, labels, counted)
    for loss in (whole, in_chunks):
        gradients.append((loss, *torch.autograd.grad(loss, (hidden, decoder.weight, decoder.bias))))
    for wanted, actual in zip(*gradients):
        torch.testing.assert_close(actual, wanted, **FLOAT64)
    num_correct = chunked(decoder, hidden, labels, counted)[1]
    assert num_correct == sum(int(decoder(row).argmax() == label) for row, label in zip(hidden, labels))


@pytest.mark.parametrize("packed", [False, True])
def test_in_training_only_one_chunk_of_logits_exists(tiny_config, monkeypatch, packed):
    """Loss and gradients equal those with all logits, and no tensor has the size of labels times vocabulary."""
    tiny_config.vocab_size = 5000
    model = NeoBERTForMaskedLM(tiny_config).double().train()
    ids = torch.randint(5, 5000, (1 if packed else 4, 80))
    labels = torch.where(torch.rand(ids.shape) < 0.5, ids, -100)
    if packed:
        inputs = {"input_ids": ids, "labels": labels, "cu_seq_lens_q": torch.tensor([0, 30, 80])}
    else:
        mask = torch.ones_like(ids)
        mask[1, 50:], mask[2, :20] = 0, 0
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}
    wanted = model(**inputs)
    assert wanted.logits is not None
    wanted.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.config.sparse_prediction = True
    monkeypatch.setattr(losses_neobert, "LOSS_CHUNK", 16)
    with LargestTensor() as seen:
        actual = model(**inputs)
        actual.loss.backward()
    assert actual.logits is None
    weight = model.decoder.weight.numel()
    num_labels = int((inputs["labels"] != -100).sum())
    assert seen.largest == weight  # its gradient; the gradient of the embedding is as large
    assert 16 * 5000 < weight < num_labels * 5000 or packed
    torch.testing.assert_close(actual.loss, wanted.loss, **FLOAT64)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], **FLOAT64)


@pytest.mark.slow
def test_sparse_training_compiles_into_one_graph_for_every_shape(tiny_config):
    tiny_config.sparse_prediction = True
    model = NeoBERTForMaskedLM(tiny_config).train()
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for shape in ((2, 12), (3, 20), (5, 31)):
        ids = torch.randint(5, 90, shape)
        labels = torch.where(torch.rand(shape) < 0.4, ids, -100)
        results = []
        for each in (compiled, model):
            loss = each(ids, attention_mask=torch.ones_like(ids), labels=labels).loss
            results.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1
