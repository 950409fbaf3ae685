"""The encoder and its heads: gradients, losses, outputs, precision, and the interface that transformers expects."""

import sys
import warnings
import weakref
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import relative_error
from oracle import CONFIG, Oracle, random_weights
from torch.nn.parallel import replicate, scatter_gather
from transformers.trainer_utils import set_seed

from neobert_hf import (
    AUTO_CLASSES,
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForMultipleChoice,
    NeoBERTForQuestionAnswering,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
    inference_copy,
)

VOCAB = CONFIG["vocab_size"]
LENGTHS = (9, 4, 13, 1)
# float32: sums of a few hundred terms in another order
FLOAT32 = dict(rtol=1e-5, atol=1e-5)


@pytest.fixture
def batch():
    """Four documents, padded, with a third of the tokens labelled, and the same packed into one row."""
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(5, VOCAB, (n,), generator=generator) for n in LENGTHS]
    labels = [torch.where(torch.arange(n) % 3 == 0, document, -100) for n, document in zip(LENGTHS, documents)]
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad([torch.ones(n, dtype=torch.long) for n in LENGTHS], batch_first=True)
    padded = {
        "input_ids": pad(documents, batch_first=True),
        "attention_mask": mask,
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }
    boundaries = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    packed = {"input_ids": torch.cat(documents)[None], "labels": torch.cat(labels)[None], "cu_seq_lens_q": boundaries}
    return {"documents": documents, "document_labels": labels, "padded": padded, "packed": packed}


def gradients(model):
    """Copy every parameter's gradient and clear it."""
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def test_packed_padded_and_single_documents_agree_per_layer_in_logits_loss_and_gradients(model, batch):
    is_real = batch["padded"]["attention_mask"].bool()
    runs = {}
    for name, unpad in (("packed", True), ("padded", True), ("padded in dense form", False)):
        model.config.unpad_inputs = unpad
        outputs = model(**batch[name.split()[0]], output_hidden_states=True)
        outputs.loss.backward()
        where = (lambda x: x[0]) if name == "packed" else (lambda x: x[is_real])
        runs[name] = ([where(s) for s in outputs.hidden_states], where(outputs.logits), outputs.loss, gradients(model))

    count = (batch["packed"]["labels"] != -100).sum()
    model.config.unpad_inputs = True
    singles = [
        model(document[None], labels=labels[None], num_items_in_batch=count, output_hidden_states=True)
        for document, labels in zip(batch["documents"], batch["document_labels"])
    ]
    loss = sum(output.loss for output in singles)
    loss.backward()
    states = [torch.cat([o.hidden_states[i][0] for o in singles]) for i in range(len(singles[0].hidden_states))]
    runs["one by one"] = (states, torch.cat([o.logits[0] for o in singles]), loss, gradients(model))

    states, logits, loss, grads = runs.pop("packed")
    for name, (other_states, other_logits, other_loss, other_grads) in runs.items():
        for layer, (state, other) in enumerate(zip(states, other_states)):
            torch.testing.assert_close(state, other, **FLOAT32, msg=lambda m, n=name, i=layer: f"{n}, state {i}: {m}")
        torch.testing.assert_close(logits, other_logits, **FLOAT32)
        torch.testing.assert_close(loss, other_loss, **FLOAT32)
        for parameter in grads:
            pair = grads[parameter], other_grads[parameter]
            torch.testing.assert_close(*pair, **FLOAT32, msg=lambda m, n=name, p=parameter: f"{n}, {p}: {m}")


def test_loss_and_its_gradient_agree_with_the_oracle(model, batch):
    """The expected gradient is a central difference of the oracle's float64 loss, at one entry of each weight."""
    model = model.double()
    loss = model(**batch["packed"]).loss
    loss.backward()
    documents = [document.numpy() for document in batch["documents"]]
    labels = [wanted.numpy() for wanted in batch["document_labels"]]
    oracle = Oracle(random_weights())
    assert abs(loss.item() - oracle.mlm_loss(documents, labels)) < 1e-10

    rng, step = np.random.default_rng(0), 1e-5
    for name, parameter in model.named_parameters():
        if "transformer_encoder.2" in name:  # two of the three blocks are enough
            continue
        values = oracle.weights[name]
        at = tuple(rng.integers(n) for n in values.shape)
        if name == "model.encoder.weight":
            at = (documents[0][1], at[1])  # a token that occurs
        kept, differences = values[at], []
        for sign in (1, -1):
            values[at] = kept + sign * step
            differences.append(oracle.mlm_loss(documents, labels))
        values[at] = kept
        wanted = (differences[0] - differences[1]) / (2 * step)
        # the error of a central difference: step^2 from curvature, 1e-16 / step from rounding
        assert abs(parameter.grad[at].item() - wanted) < 1e-8, name


def test_every_parameter_has_a_gradient(tiny_config, batch):
    for model_class, labels in (
        (NeoBERTForMaskedLM, batch["padded"]["labels"]),
        (NeoBERTForSequenceClassification, torch.tensor([0, 1, 1, 0])),
        (NeoBERTForTokenClassification, batch["padded"]["labels"].clamp(max=1)),
    ):
        model = model_class(tiny_config)
        model(**{**batch["padded"], "labels": labels}).loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(model, batch, reentrant):
    model.train()
    loss = model(**batch["padded"]).loss
    loss.backward()
    plain = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    checkpointed = model(**batch["padded"]).loss
    checkpointed.backward()
    assert torch.equal(loss, checkpointed)
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, plain[name]), name


HEADS = ("masked tokens", "first tokens")


def head_of(name, config, batch):
    """A model whose head reads the masked tokens or the first tokens, and labels of the four documents, padded and packed."""
    config.sparse_prediction, config.num_labels, config.classifier_dropout = True, 3, 0.0
    torch.manual_seed(1)
    if name == "masked tokens":
        return NeoBERTForMaskedLM(config), {form: batch[form]["labels"] for form in ("padded", "packed")}
    return NeoBERTForSequenceClassification(config), dict.fromkeys(("padded", "packed"), torch.tensor([0, 2, 1, 1]))


@contextmanager
def all_tokens_are_read(model):
    """A hook reads the states after the last block, so the block computes all of them. Gives the number of its rows."""
    rows = []
    hook = model.model.transformer_encoder[-1].register_forward_hook(lambda *call: rows.append(len(call[-1])))
    yield rows
    hook.remove()


@pytest.mark.parametrize("form", ["packed", "padded", "padded in dense form"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("head", HEADS)
def test_a_last_block_of_what_the_head_reads_has_the_same_loss_and_gradients(
    tiny_config, batch, head, checkpointing, form
):
    tiny_config.unpad_inputs = "dense" not in form
    model, labels = head_of(head, tiny_config, batch)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    form, _, is_dense = form.partition(" in ")
    inputs = batch[form] | {"labels": labels[form]}
    loss = model(**inputs).loss
    loss.backward()
    selected = gradients(model)
    with all_tokens_are_read(model) as rows:
        wanted = model(**inputs).loss
        wanted.backward()
    assert set(rows) == {inputs["input_ids"].numel() if is_dense else sum(LENGTHS)}
    torch.testing.assert_close(loss, wanted, **FLOAT32)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(selected[name], gradient, **FLOAT32, msg=lambda text, name=name: f"{name}: {text}")


# the logits of a few rows and of all come from products of other shapes; bf16: a few units of its 8 bits
@pytest.mark.parametrize("dtype, bounds", [(torch.float32, FLOAT32), (torch.bfloat16, dict(rtol=3e-2, atol=3e-2))])
@pytest.mark.parametrize("makes_copy", [False, True], ids=["", "copy"])
@pytest.mark.parametrize("head", HEADS)
def test_in_inference_logits_of_selected_tokens_are_those_of_all(tiny_config, batch, head, makes_copy, dtype, bounds):
    model, labels = head_of(head, tiny_config, batch)
    model = model.to(dtype).eval()
    if makes_copy:
        model = inference_copy(model)
    with torch.inference_mode():
        logits = model(**batch["padded"] | {"labels": labels["padded"]}).logits
        with all_tokens_are_read(model) as rows:
            wanted = model(**batch["padded"] | {"labels": labels["padded"]}).logits
    assert rows == [sum(LENGTHS)]
    torch.testing.assert_close(logits, wanted, **bounds)


@pytest.mark.parametrize("head", HEADS)
def test_the_products_after_the_last_attention_see_only_what_the_head_reads(tiny_config, batch, head, monkeypatch):
    model, labels = head_of(head, tiny_config, batch)
    rows, forward = {}, torch.nn.Linear.forward  # a hook on a layer would make the block compute all tokens
    names = {module: name for name, module in model.model.transformer_encoder.named_modules()}

    def recording_forward(layer, x):
        rows[names.get(layer)] = len(x)
        return forward(layer, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", recording_forward)
    model.train()(**batch["packed"] | {"labels": labels["packed"]})
    read = {"masked tokens": int((batch["packed"]["labels"] != -100).sum()), "first tokens": len(LENGTHS)}[head]
    last = str(CONFIG["num_hidden_layers"] - 1)
    after_attention = {f"{last}.wo", f"{last}.ffn.w12", f"{last}.ffn.w3"}
    assert {name for name in rows if name and rows[name] == read} == after_attention
    assert {rows[name] for name in rows if name and name not in after_attention} == {sum(LENGTHS)}


@pytest.mark.parametrize("implementation, num_outputs", [("auto", 1), ("sdpa", 1), ("eager", 2)])
def test_every_output_of_a_block_is_a_tensor(model, batch, implementation, num_outputs):
    """captum reads the output of a layer, and fails at None."""
    model.set_attn_implementation(implementation)
    seen = []
    model.model.transformer_encoder[1].register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(**batch["padded"])
    outputs = seen[0] if isinstance(seen[0], tuple) else seen
    assert len(outputs) == num_outputs and all(isinstance(each, torch.Tensor) for each in outputs)


@pytest.mark.parametrize("place", ["layer_norm", "transformer_encoder.2.ffn", "transformer_encoder.2"])
def test_a_hook_behind_the_last_attention_reads_all_tokens(tiny_config, batch, place):
    assert CONFIG["num_hidden_layers"] == 3
    model, labels = head_of("first tokens", tiny_config, batch)
    seen = []
    model.model.get_submodule(place).register_forward_hook(
        lambda module, inputs, output: seen.append(len(output[0] if isinstance(output, tuple) else output))
    )
    model.train()(**batch["packed"] | {"labels": labels["packed"]})
    assert seen == [sum(LENGTHS)]


def test_requested_hidden_states_hold_all_tokens_beside_selected_ones(tiny_config, batch):
    model, _ = head_of("first tokens", tiny_config, batch)
    model.eval()
    inputs = {name: batch["padded"][name] for name in ("input_ids", "attention_mask")}
    outputs = model(**inputs, output_hidden_states=True)
    torch.testing.assert_close(outputs.hidden_states[-1], model.model(**inputs).last_hidden_state)
    torch.testing.assert_close(outputs.logits, model(**inputs).logits, **FLOAT32)


@pytest.mark.parametrize("form", ["packed", "padded", "padded in dense form"])
def test_gradients_pass_through_returned_states_and_attentions(checkpoint, batch, form):
    model = NeoBERTForMaskedLM.from_pretrained(checkpoint, unpad_inputs=form != "padded in dense form").double()
    rows = batch["packed" if form == "packed" else "padded"]
    outputs = model(**rows, output_hidden_states=True, output_attentions=form != "packed")
    kept = [*outputs.hidden_states, *(outputs.attentions or ())]
    for tensor in kept:
        tensor.retain_grad()
    outputs.loss.backward()
    assert all(tensor.grad is not None and tensor.grad.any() for tensor in kept)
    with_states = gradients(model)
    model(**rows).loss.backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(with_states[name], gradient, rtol=0, atol=1e-10)

    # The expected gradient of a state: the change of the loss when the input of a block changes.
    step, losses = 1e-4, []
    for sign in (1, -1):

        def move(block, inputs, sign=sign):
            moved = inputs[0].clone()
            moved[0, 3] += sign * step
            return (moved, *inputs[1:])

        with model.model.transformer_encoder[1].register_forward_pre_hook(move):
            losses.append(model(**rows).loss.item())
    slope = (losses[0] - losses[1]) / (2 * step)
    assert abs(slope) > 1e-4 and abs(outputs.hidden_states[1].grad[0, 0, 3].item() - slope) < 1e-4 * abs(slope)


def test_states_that_were_not_requested_are_freed(model, batch):
    """In inference the input of a block is freed after the next block; otherwise 28 states would stay in memory."""
    alive, references = [], []

    def record(module, inputs, output):
        references.append(weakref.ref(output))
        alive.append(sum(reference() is not None for reference in references))

    for block in model.model.transformer_encoder:
        block.register_forward_hook(record)
    with torch.no_grad():
        model(**batch["padded"])
    assert max(alive) <= 2


@pytest.mark.parametrize("model_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [5, 70])  # short and long sequences have other kernels
def test_float64_embeddings_may_feed_a_model_of_another_dtype(model, model_dtype, length):
    model = model.to(model_dtype).model
    ids = torch.randint(5, VOCAB, (2, length))
    embeddings = model.encoder(ids)
    wanted = model(inputs_embeds=embeddings).last_hidden_state
    with torch.no_grad():
        found = model(inputs_embeds=embeddings.double()).last_hidden_state
    assert found.dtype == model_dtype
    # bf16: the residual stream is rounded in one and not in the other
    bounds = FLOAT32 if model_dtype == torch.float32 else dict(rtol=0.05, atol=0.05)
    torch.testing.assert_close(found, wanted, **bounds)


def test_token_types_are_accepted_and_ignored(model, batch):
    ids = batch["padded"]["input_ids"]
    assert torch.equal(model(ids, token_type_ids=torch.ones_like(ids)).logits, model(ids).logits)


def test_a_batch_without_labels_has_loss_zero_and_gradients(model, batch):
    batch["padded"]["labels"].fill_(-100)
    for sparse in (False, True):
        model.config.sparse_prediction = sparse
        for counted in (None, 0, torch.tensor(0)):  # under Trainer a whole step may have no labels
            loss = model(**batch["padded"], num_items_in_batch=counted).loss
            loss.backward()
            assert loss.item() == 0
        assert not model.decoder.weight.grad.any()


@pytest.fixture
def labels_everywhere(batch):
    is_padding = batch["padded"]["attention_mask"] == 0
    return {**batch["padded"], "labels": batch["padded"]["labels"].masked_fill(is_padding, 1)}


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("auto", "eager", "flex_attention")]


@pytest.mark.parametrize("implementation", ["sdpa", *OTHERS])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_the_loss_ignores_labels_at_padding(checkpoint, oracle, batch, labels_everywhere, implementation, is_sparse):
    model = NeoBERTForMaskedLM.from_pretrained(checkpoint, dtype=torch.float64, attn_implementation=implementation)
    model.config.sparse_prediction = is_sparse
    documents = [document.numpy() for document in batch["documents"]]
    wanted = oracle.mlm_loss(documents, [labels.numpy() for labels in batch["document_labels"]])
    with torch.no_grad():  # flex attention has no backward pass on a CPU
        losses = [model(**inputs).loss for inputs in (labels_everywhere, batch["packed"])]
        if implementation != "flex_attention":  # which only packs
            losses.append(torch.compile(model, backend="eager")(**labels_everywhere).loss)  # compiled, it keeps padding
            model.config.unpad_inputs = False
            losses += [model(**inputs).loss for inputs in (labels_everywhere, batch["packed"])]
    for loss in losses:
        assert abs(loss.item() - wanted) < 1e-10


@pytest.mark.parametrize("unpad", [True, False])
def test_token_classification_ignores_labels_at_padding(tiny_config, batch, labels_everywhere, unpad):
    tiny_config.unpad_inputs = unpad
    model = NeoBERTForTokenClassification(tiny_config).double().eval()
    labels_everywhere["labels"] = labels_everywhere["labels"].clamp(max=1)
    outputs = model(**labels_everywhere)
    is_real = batch["padded"]["attention_mask"].bool()
    wanted = F.cross_entropy(outputs.logits[is_real], labels_everywhere["labels"][is_real])
    torch.testing.assert_close(outputs.loss, wanted, rtol=0, atol=1e-10)


WRONG_LABELS = [
    (NeoBERTForMaskedLM, torch.zeros(4, 3).long(), r"labels have shape \(4, 3\), expected \(4, 13\): one for each"),
    (NeoBERTForTokenClassification, torch.zeros(4).long(), r"labels have shape \(4,\), expected \(4, 13\)"),
    (NeoBERTForSequenceClassification, torch.zeros(3).long(), r"labels have shape \(3,\), expected \(4,\)"),
    (NeoBERTForSequenceClassification, torch.zeros(4, 3), r"labels have shape \(4, 3\), expected \(4, 2\)"),
    (NeoBERTForSequenceClassification, torch.zeros(4, 1).long(), "2 values for each sequence"),
]


@pytest.mark.parametrize(("model_class", "labels", "message"), WRONG_LABELS)
def test_labels_of_a_wrong_shape_are_refused_and_set_no_problem_type(tiny_config, batch, model_class, labels, message):
    model, ids = model_class(tiny_config), batch["padded"]["input_ids"]
    with pytest.raises(ValueError, match=message):
        model(ids, labels=labels)
    assert model.config.problem_type is None


@pytest.mark.parametrize(
    ("num_labels", "labels", "kind", "loss"),
    [
        (1, torch.tensor([0.5, 1.0, -1.0, 2.0]), "regression", lambda x, y: F.mse_loss(x[:, 0], y)),
        (3, torch.tensor([0, 2, 1, 1]), "single_label_classification", F.cross_entropy),
        (3, torch.eye(4, 3), "multi_label_classification", F.binary_cross_entropy_with_logits),
    ],
)
def test_labels_determine_the_problem_type_and_its_loss(tiny_config, batch, num_labels, labels, kind, loss):
    tiny_config.num_labels = num_labels
    model = NeoBERTForSequenceClassification(tiny_config).eval()
    inputs = batch["padded"]["input_ids"], batch["padded"]["attention_mask"]
    outputs = model(*inputs, labels=labels)
    assert model.config.problem_type == kind
    torch.testing.assert_close(outputs.loss, loss(outputs.logits, labels), **FLOAT32)
    # Trainer's count of a step with twice as many labels, so half of the mean
    counted = model(*inputs, labels=labels, num_items_in_batch=torch.tensor(2 * labels.numel()))
    torch.testing.assert_close(counted.loss, outputs.loss / 2, **FLOAT32)


def test_an_unknown_problem_type_is_refused(tiny_config):
    tiny_config.problem_type = "ranking"
    with pytest.raises(ValueError, match="problem_type='ranking' is not one of"):
        NeoBERTForSequenceClassification(tiny_config)(torch.tensor([[5], [6]]), labels=torch.tensor([0, 1]))


def test_multiple_choice_scores_each_choice_as_a_row(tiny_config, batch):
    model = NeoBERTForMultipleChoice(tiny_config).eval()
    ids, mask = batch["padded"]["input_ids"].view(2, 2, -1), batch["padded"]["attention_mask"].view(2, 2, -1)
    outputs = model(ids, mask, labels=torch.tensor([1, 0]))
    scores = model.classify(model.encode(ids.flatten(0, 1), mask.flatten(0, 1), select_tokens=model.select(None)))
    assert torch.equal(outputs.logits, scores.view(2, 2))
    torch.testing.assert_close(outputs.loss, F.cross_entropy(scores.view(2, 2), torch.tensor([1, 0])), **FLOAT32)
    positions = torch.arange(ids.shape[-1])
    torch.testing.assert_close(model(ids, mask, position_ids=positions).logits, outputs.logits, **FLOAT32)
    with pytest.raises(ValueError, match=r"input_ids has shape \(2, 13\); it must be \(rows, choices, columns\)"):
        model(ids[0], mask[0])


def test_question_answering_excludes_padding_from_the_softmax(tiny_config, batch):
    model = NeoBERTForQuestionAnswering(tiny_config).eval()
    ids, mask = batch["padded"]["input_ids"], batch["padded"]["attention_mask"]
    starts, ends = torch.tensor([2, 0, 12, 99]), torch.tensor([4, 3, 12, -1])  # the last answer is truncated
    outputs = model(ids, mask, start_positions=starts, end_positions=ends)
    losses = []
    for logits, positions in ((outputs.start_logits, starts), (outputs.end_logits, ends)):
        rows = [F.cross_entropy(logits[i, : LENGTHS[i]][None], positions[i : i + 1]) for i in range(3)]
        losses.append(torch.stack(rows).mean())
    torch.testing.assert_close(outputs.loss, sum(losses) / 2, **FLOAT32)
    assert (outputs.start_logits.argmax(-1) < torch.tensor(LENGTHS)).all()
    # an answer at padding is ignored, as a truncated one
    at_padding = dict(start_positions=torch.tensor([2, 0, 12, 5]), end_positions=torch.tensor([4, 3, 12, 1]))
    for unpad in (True, False):
        model.config.unpad_inputs = unpad
        torch.testing.assert_close(model(ids, mask, **at_padding).loss, outputs.loss, **FLOAT32)


@pytest.mark.parametrize("model_class", [cls for name, cls in AUTO_CLASSES.items() if name != "AutoConfig"])
def test_data_parallel_replicas_give_the_output_of_the_model(model_class, tiny_config, batch, monkeypatch):
    """Trainer without a launcher uses nn.DataParallel on several GPUs; here copies on the CPU stand for the replicas."""
    copies = lambda tensors, devices, detach: [[tensor.clone() for tensor in tensors] for _ in devices]  # noqa: E731
    monkeypatch.setattr(sys.modules["torch.nn.parallel.replicate"], "_broadcast_coalesced_reshape", copies)
    gather = lambda device, dim, *parts: torch.cat([*map(torch.atleast_1d, parts)])  # noqa: E731
    monkeypatch.setattr(scatter_gather.Gather, "apply", gather)
    tiny_config.sparse_prediction = True
    model = model_class(tiny_config).eval()
    rows = {name: batch["padded"][name] for name in ("input_ids", "attention_mask")}
    if model_class is NeoBERTForMaskedLM:  # logits of labels only, whose number differs between replicas
        rows["labels"] = batch["padded"]["labels"]
    if model_class is NeoBERTForMultipleChoice:
        rows = {name: value[:, None].expand(-1, 2, -1) for name, value in rows.items()}
    replicas = replicate(model, [0, 1])
    parts = [{name: value[place] for name, value in rows.items()} for place in (slice(2), slice(2, None))]
    gathered = scatter_gather.gather([replica(**part) for replica, part in zip(replicas, parts)], 0)
    for name, value in model(**rows).items():
        if name != "loss":
            torch.testing.assert_close(gathered[name], value, **FLOAT32)


def test_initialisation_follows_the_paper(tiny_config):
    set_seed(0)
    tiny_config.num_labels = 400
    model = NeoBERTForSequenceClassification(tiny_config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif name.startswith(("dense", "classifier")):  # normal
            assert 0.9 * 0.02 < parameter.std() < 1.1 * 0.02 and parameter.abs().max() > 0.03, name
        else:  # uniform
            assert 0.019 < parameter.abs().max() <= 0.02, name
    assert not model.model.encoder.weight[0].any()


def test_the_padding_embedding_stays_zero_in_training(tiny_config):
    model = NeoBERTForMaskedLM(tiny_config)
    ids = torch.tensor([[0, 5, 6]])  # id 0 in the text, without a mask
    model(ids, labels=ids).loss.backward()
    assert not model.model.encoder.weight.grad[0].any()


def test_bf16_is_as_precise_as_its_eight_bits_allow(reference):
    """Our error is at most three times that of rounding the float64 weights to bf16 and computing in float64."""
    # at position 600 an angle that is rounded to bf16 has an error of more than one radian
    ids = torch.randint(5, VOCAB, (1, 600), generator=torch.Generator().manual_seed(0))
    for implementation in ("sdpa", "eager"):
        options = {"attn_implementation": implementation, "max_position_embeddings": 1024}
        exact = NeoBERTForMaskedLM.from_pretrained(reference[0], dtype=torch.float64, **options).eval()
        rounded = NeoBERTForMaskedLM.from_pretrained(reference[0], dtype=torch.bfloat16, **options).eval()
        with torch.no_grad():
            wanted = exact(ids).logits
            actual = rounded(ids).logits
            floor = relative_error(rounded.double()(ids).logits, wanted)
        assert relative_error(actual, wanted) <= 3 * floor


def test_the_loss_of_a_bf16_model_is_computed_in_float32(checkpoint):
    model = NeoBERTForMaskedLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    ids = torch.randint(5, VOCAB, (4, 16), generator=torch.Generator().manual_seed(0))
    outputs = model(ids, labels=ids)
    wanted = F.cross_entropy(outputs.logits.double().flatten(0, 1), ids.flatten())
    assert outputs.loss.dtype == torch.float32
    assert abs(outputs.loss.item() - wanted.item()) < 1e-5 * wanted.item()


@pytest.mark.parametrize(("embedding", "w3", "reached"), [(1, 30, 1_300), (2.5e6, 600, 65_504)])
def test_fp16_stays_finite(tiny_config, embedding, w3, reached):
    """Activations of 1,300, as in the published model, and a residual stream beyond the range of fp16."""
    set_seed(0)
    model = NeoBERTModel(tiny_config).eval()
    with torch.no_grad():
        model.encoder.weight.mul_(embedding)
        for block in model.transformer_encoder:
            block.ffn.w12.weight.mul_(220)
            block.ffn.w3.weight.mul_(w3)
            block.wo.weight.mul_(20)
    largest = []
    for block in model.transformer_encoder:
        block.register_forward_hook(lambda module, inputs, output: largest.append(output.abs().max().item()))
    ids = torch.randint(5, VOCAB, (2, 12))
    with torch.no_grad():
        wanted = model.double()(ids).last_hidden_state
        assert max(largest) > reached
        state = model.half()(ids).last_hidden_state
    assert state.dtype == torch.float16 and state.isfinite().all()
    # fp16: eleven bits, three blocks
    assert relative_error(state, wanted) < 0.01


@pytest.mark.parametrize("is_sparse", [False, True])
def test_gradients_per_sample_are_those_of_single_rows(model, batch, is_sparse):
    model.config.sparse_prediction = is_sparse
    rows = batch["padded"]
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters, row):
        return torch.func.functional_call(model, parameters, (), {key: value[None] for key, value in row.items()}).loss

    with warnings.catch_warnings():  # torch has no batched kernel of attention and runs one row after the other
        warnings.filterwarnings("ignore", message="There is a performance drop")
        found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, rows)
    for row in range(len(LENGTHS)):
        model(**{key: value[row : row + 1] for key, value in rows.items()}).loss.backward()
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(found[name][row], gradient, **FLOAT32, msg=name)


@pytest.mark.slow
def test_a_compiled_model_masks_padding_and_packing_instead_of_unpadding(model, batch):
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        for name in ("padded", "packed"):
            torch.testing.assert_close(compiled(**batch[name]).logits, model(**batch[name]).logits, **FLOAT32)
        twice = {**batch["packed"], "cu_seq_lens_k": batch["packed"]["cu_seq_lens_q"].clone()}
        torch.testing.assert_close(compiled(**twice).logits, model(**twice).logits, **FLOAT32)
        ids, boundaries = batch["packed"]["input_ids"], batch["packed"]["cu_seq_lens_q"]
        positions = torch.cat([torch.arange(2, 2 + n) for n in LENGTHS])[None]  # they may restart at any number
        numbers = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None]
        for marks in ({"position_ids": positions}, {"seq_idx": numbers}):
            found = compiled(ids, **marks).logits
            torch.testing.assert_close(found, model(ids, cu_seq_lens_q=boundaries).logits, **FLOAT32)


def test_a_traced_model_masks_instead_of_unpadding(model, batch):
    ids, mask = batch["padded"]["input_ids"], batch["padded"]["attention_mask"]
    traced = torch.jit.trace(model, (ids, mask), strict=False)
    other_mask = mask.flip(0)  # another pattern of the same shape; traced unpadding would give wrong results
    with torch.no_grad():
        torch.testing.assert_close(traced(ids, other_mask)["logits"], model(ids, other_mask).logits, **FLOAT32)


def test_the_default_model_has_the_published_number_of_parameters():
    with torch.device("meta"):
        model = NeoBERTForMaskedLM(NeoBERTConfig())
    assert sum(p.numel() for p in model.parameters()) == 245_136_954
    assert sum(p.numel() for p in model.model.parameters()) == 221_665_536
