"""What a classifier reads: the first real token of each sequence, or the mean over its real tokens."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import random_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import CONFIG, Oracle, random_weights, write_checkpoint

from neobert_hf import NeoBERTForMultipleChoice, NeoBERTForSequenceClassification
from neobert_hf.model.layout_neobert import make_layout

VOCAB = CONFIG["vocab_size"]
LENGTHS = (9, 4, 13, 1)
LABELS = torch.tensor([0, 2, 1, 1])
ORACLE = Oracle(random_weights())
some_examples = settings(max_examples=40, deadline=None, derandomize=True)
lengths_of_documents = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A classifier in float64 that reads the mean, with the oracle's weights."""
    names = {str(i): f"LABEL_{i}" for i in range(3)}
    folder = tmp_path_factory.mktemp("pooling")
    write_checkpoint(folder, random_weights(), "NeoBERTForSequenceClassification", id2label=names)
    options = dict(dtype=torch.float64, classifier_pooling="mean")
    return NeoBERTForSequenceClassification.from_pretrained(folder, **options).eval()


@pytest.fixture(autouse=True)
def defaults(classifier):
    """Each test begins with the same options of the shared model."""
    classifier.config.classifier_pooling, classifier.config.unpad_inputs = "mean", True
    classifier.zero_grad()


def wanted_logits(documents, pooling="mean"):
    """The oracle's logits (N, C) of documents of ids."""
    states = [ORACLE.encode(np.asarray(ids))[2] for ids in documents]
    return torch.tensor(np.stack([ORACLE.class_logits(state, pooling) for state in states]))


def assert_exact(logits, wanted):
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-10)


def batches():
    """Documents, and the same as padded rows, as rows with padding on the left, and in a packed row with each of its marks."""
    documents = [random_ids(n, seed=n) for n in LENGTHS]
    pad = torch.nn.utils.rnn.pad_sequence
    right, mask = pad(documents, True), pad([torch.ones(n).long() for n in LENGTHS], True)
    ones = [torch.ones(n).long() for n in LENGTHS]
    left, left_mask = (pad([x.flip(0) for x in rows], True).flip(1) for rows in (documents, ones))
    row, lengths = torch.cat(documents)[None], torch.tensor(LENGTHS)
    marks = {
        "cu_seq_lens_q": F.pad(lengths.cumsum(0), (1, 0)).int(),
        "cu_seqlens": F.pad(lengths.cumsum(0), (1, 0)).int(),
        "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
        "seq_idx": torch.arange(len(LENGTHS)).repeat_interleave(lengths)[None],
    }
    return documents, {
        "padded": dict(input_ids=right, attention_mask=mask),
        "padded on the left": dict(input_ids=left, attention_mask=left_mask),
        **{f"packed by {name}": {"input_ids": row, name: mark} for name, mark in marks.items()},
    }


DOCUMENTS, BATCHES = batches()


@pytest.mark.parametrize("unpad", [True, False])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("form", BATCHES)
def test_every_form_of_a_batch_gives_the_logits_of_the_oracle(classifier, form, pooling, unpad):
    classifier.config.classifier_pooling, classifier.config.unpad_inputs = pooling, unpad
    with torch.no_grad():
        logits = classifier(**BATCHES[form]).logits
    assert_exact(logits, wanted_logits(DOCUMENTS, pooling))


@given(data=st.data(), seed=st.integers(0, 2**16), unpad=st.booleans())
@some_examples
def test_the_mean_is_over_the_real_tokens_of_any_mask(classifier, data, seed, unpad):
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 10))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns)))
    mask = mask.view(rows, columns)
    mask[range(rows), data.draw(st.lists(st.integers(0, columns - 1), min_size=rows, max_size=rows))] = True
    ids = random_ids(rows, columns, seed=seed)
    classifier.config.unpad_inputs = unpad
    with torch.no_grad():
        logits = classifier(ids, mask.long()).logits
    for row, real, found in zip(ids.numpy(), mask.numpy(), logits):
        places = np.flatnonzero(real)  # padding between tokens keeps their distance
        state = ORACLE.encode(row[real], positions=places - places[0])[2]
        assert_exact(found, torch.tensor(ORACLE.class_logits(state, "mean")))


@given(rows=st.lists(lengths_of_documents, min_size=1, max_size=3), seed=st.integers(0, 2**16), unpad=st.booleans())
@some_examples
def test_every_document_of_every_packed_row_has_its_own_mean(classifier, rows, seed, unpad):
    longest = max(map(sum, rows))
    rows = [[*lengths, longest - sum(lengths)] if sum(lengths) < longest else lengths for lengths in rows]
    ids = random_ids(len(rows), longest, seed=seed)
    numbers = torch.stack([torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in rows])
    classifier.config.unpad_inputs = unpad
    with torch.no_grad():
        logits = classifier(ids, seq_idx=numbers).logits
    documents = [document for row, lengths in zip(ids, rows) for document in row.split(lengths)]
    assert_exact(logits, wanted_logits(documents))


def test_in_a_packed_layout_not_even_nan_reaches_another_document(classifier):
    embeddings = classifier.get_input_embeddings()(torch.cat(DOCUMENTS)[None]).detach()
    boundaries = BATCHES["packed by cu_seq_lens_q"]["cu_seq_lens_q"]
    embeddings[0, : LENGTHS[0]] = torch.nan
    with torch.no_grad():
        logits = classifier(inputs_embeds=embeddings, cu_seq_lens_q=boundaries).logits
    assert logits[0].isnan().all()
    assert_exact(logits[1:], wanted_logits(DOCUMENTS[1:]))


def gradients(model, loss):
    loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def test_gradients_of_the_mean_are_those_of_the_oracle_in_every_form(classifier):
    """The expected gradient is a central difference of the oracle's float64 loss, at one entry of each weight."""
    found = {form: gradients(classifier, classifier(**batch, labels=LABELS).loss) for form, batch in BATCHES.items()}
    alone = sum(F.cross_entropy(classifier(ids[None]).logits, LABELS[i : i + 1]) for i, ids in enumerate(DOCUMENTS))
    found["one by one"] = gradients(classifier, alone / len(LENGTHS))
    one_by_one = found["one by one"]
    for form in found:
        for name, gradient in found[form].items():
            torch.testing.assert_close(gradient, one_by_one[name], rtol=0, atol=1e-10, msg=f"{form}, {name}")

    rng, step = np.random.default_rng(0), 1e-5
    for name, gradient in one_by_one.items():
        if "transformer_encoder" in name and "transformer_encoder.2" not in name:
            continue  # the last block is the one that the pooling reads
        values = ORACLE.weights[name]
        at = tuple(rng.integers(n) for n in values.shape)
        if name == "model.encoder.weight":
            at = (int(DOCUMENTS[0][1]), at[1])  # a token that occurs
        kept, losses = values[at], []
        for sign in (1, -1):
            values[at] = kept + sign * step
            losses.append(F.cross_entropy(wanted_logits(DOCUMENTS), LABELS).item())
        values[at] = kept
        # the error of a central difference: step^2 from curvature, 1e-16 / step from rounding
        assert abs(gradient[at].item() - (losses[0] - losses[1]) / (2 * step)) < 1e-8, name


def test_multiple_choice_scores_the_mean_of_each_choice(classifier):
    model = NeoBERTForMultipleChoice(classifier.config).double().eval()
    ids, mask = (x.view(2, 2, -1) for x in BATCHES["padded"].values())
    with torch.no_grad():
        states = [model.model(document[None]).last_hidden_state[0].mean(0) for document in DOCUMENTS]
        wanted = model.classifier(torch.tanh(model.dense(torch.stack(states)))).view(2, 2)
        assert_exact(model(ids, mask).logits, wanted)


# bf16 has 8 bits: the mean is rounded once. A sum in bf16 would stop growing after some hundred tokens.
# float32: 4,096 sums one after the other
@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 2**-8), (torch.float32, 1e-5)])
@pytest.mark.parametrize("is_packed", [True, False])
def test_the_mean_of_many_tokens_is_rounded_once(dtype, bound, is_packed):
    states = (torch.randn(4096, 8, generator=torch.Generator().manual_seed(0)) + 1).to(dtype)
    layout = make_layout(random_ids(1, 4096), VOCAB, is_packed=is_packed)
    mean, wanted = layout.mean_of_sequences(states), states.double().mean(0)
    assert mean.dtype == dtype
    assert ((mean[0].double() - wanted).abs() <= bound * wanted.abs()).all()


def test_the_pooling_is_saved_and_a_published_folder_reads_the_first_token(classifier, classifier_checkpoint, tmp_path):
    published = NeoBERTForSequenceClassification.from_pretrained(classifier_checkpoint, dtype=torch.float64).eval()
    assert published.config.classifier_pooling == "cls"
    with torch.no_grad():
        assert_exact(published(**BATCHES["padded"]).logits, wanted_logits(DOCUMENTS, "cls"))
    classifier.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["classifier_pooling"] == "mean"
    again = NeoBERTForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64).eval()
    with torch.no_grad():
        assert_exact(again(**BATCHES["padded"]).logits, wanted_logits(DOCUMENTS, "mean"))
