"""The model with PEFT, pipelines, accelerate, torch.compile and NEFTune."""

import contextlib
import shutil

import pytest
import torch
from transformers import AutoModelForMaskedLM, pipeline
from transformers.pipelines import SUPPORTED_TASKS
from transformers.utils import logging

import neobert_hf

LORA_TARGETS = ["qkv", "wo", "w12", "w3"]


@pytest.mark.parametrize(
    "adapter",
    [
        dict(target_modules=["qkv"], trainable_token_indices=[5, 6]),
        dict(target_modules=["qkv", "model.encoder"], init_lora_weights=False),
        dict(target_modules=["qkv"], modules_to_save=["model.encoder"]),
    ],
    ids=["trainable tokens", "LoRA", "trained in full"],
)
def test_an_adapter_of_the_embedding_trains_and_merges_to_the_same_numbers(checkpoint, adapter):
    import peft

    model = peft.get_peft_model(AutoModelForMaskedLM.from_pretrained(checkpoint), peft.LoraConfig(**adapter)).train()
    ids = torch.randint(5, 96, (2, 7))
    before = model(input_ids=ids, labels=ids)
    before.loss.backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert any("model.encoder." in name for name in trained)
    torch.optim.SGD(trained.values(), lr=0.1).step()
    logits = model.eval()(input_ids=ids).logits
    assert (logits - before.logits).abs().max() > 1e-3
    with pytest.raises(ValueError, match="input_ids contains 96, but the ids of the vocabulary are 0 to 95"):
        model(input_ids=ids.fill_(96))
    ids.fill_(5)
    logits = model(input_ids=ids).logits
    # float32: the product is added to the weight or to the result
    torch.testing.assert_close(model.merge_and_unload()(ids).logits, logits, rtol=1e-4, atol=1e-4)


HEADS = {
    "SEQ_CLS": neobert_hf.NeoBERTForSequenceClassification,
    "MULTIPLE_CHOICE": neobert_hf.NeoBERTForMultipleChoice,
    "TOKEN_CLS": neobert_hf.NeoBERTForTokenClassification,
    "QUESTION_ANS": neobert_hf.NeoBERTForQuestionAnswering,
    "MASKED_LM": neobert_hf.NeoBERTForMaskedLM,
    "FEATURE_EXTRACTION": neobert_hf.NeoBERTModel,
}


@pytest.fixture
def bare_encoder(checkpoint, tmp_path):
    neobert_hf.NeoBERTModel.from_pretrained(checkpoint).save_pretrained(tmp_path / "encoder")
    return tmp_path / "encoder"


def loaded_with_seed(folder, task, seed):
    torch.manual_seed(seed)
    return HEADS[task].from_pretrained(folder)


def inputs_of(task):
    """Token ids, and labels that each head takes."""
    ids = torch.randint(5, 96, (4, 2, 7) if task == "MULTIPLE_CHOICE" else (4, 7))
    ends = {"start_positions": torch.tensor([0, 1, 2, 3]), "end_positions": torch.tensor([3, 3, 4, 5])}
    labels = {"TOKEN_CLS": ids % 2, "MASKED_LM": ids}.get(task, torch.tensor([0, 1, 0, 1]))
    labels = {"QUESTION_ANS": ends, "FEATURE_EXTRACTION": {}}.get(task, {"labels": labels})
    return {"input_ids": ids}, labels


@pytest.mark.parametrize("task", HEADS)
@pytest.mark.compat
def test_an_adapter_of_each_head_gives_the_same_numbers_on_a_base_of_another_seed(bare_encoder, tmp_path, task, caplog):
    """The head is new in both; what PEFT does not save differs."""
    import peft

    options = {"modules_to_save": ["decoder"]} if task == "MASKED_LM" else {}
    config = neobert_hf.lora_config(task, r=4, lora_alpha=8, **options)
    assert config.r == 4 and config.lora_alpha == 8
    model, (ids, labels) = peft.get_peft_model(loaded_with_seed(bare_encoder, task, 1), config), inputs_of(task)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 0.1)
    with warnings_of(caplog) as found:
        for _ in range(3):
            outputs = model(**ids, **labels)
            (outputs.loss if labels else outputs.last_hidden_state.square().mean()).backward()
            optimizer.step()
    assert not found()
    model.eval().save_pretrained(tmp_path / "adapter")
    base = loaded_with_seed(bare_encoder, task, 2)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected, outputs = (each(**ids).to_tuple() for each in (model, again))
    assert all(torch.equal(*pair) for pair in zip(expected, outputs))


@pytest.mark.parametrize(
    ("task", "options", "layer"),
    [
        ("SEQ_CLS", dict(task_type="SEQ_CLS", target_modules=["qkv"]), "dense"),
        ("SEQ_CLS", dict(task_type="SEQ_CLS", target_modules="all-linear"), "dense"),
        ("MULTIPLE_CHOICE", dict(target_modules=["qkv"], modules_to_save=["classifier"]), "dense"),
        ("TOKEN_CLS", dict(target_modules=["qkv"]), "classifier"),
        ("QUESTION_ANS", dict(target_modules=["qkv"]), "qa_outputs"),
        ("MASKED_LM", dict(target_modules=["qkv"]), "decoder"),
    ],
)
def test_training_warns_of_a_new_layer_that_stays_random(bare_encoder, caplog, task, options, layer):
    import peft

    model = peft.get_peft_model(loaded_with_seed(bare_encoder, task, 1), peft.LoraConfig(**options))
    ids, labels = inputs_of(task)
    with warnings_of(caplog) as found:
        model.eval()(**ids, **labels)
        assert not found()
        model.train()(**ids, **labels)
        assert f"The layer {layer} is not in the checkpoint, so its weights are random, and it is frozen" in found()


def test_a_model_with_parameters_of_its_own_trains(bare_encoder):
    class Scaled(neobert_hf.NeoBERTForSequenceClassification):
        def __init__(self, config):
            super().__init__(config)
            self.scale, self.parts = torch.nn.Parameter(torch.ones(())), torch.nn.Sequential(torch.nn.Linear(2, 2))

    model = Scaled.from_pretrained(bare_encoder).train()
    assert {"", "parts.0", "dense"} < model.new_layers
    assert model(input_ids=torch.tensor([[2, 5, 3]]), labels=torch.tensor([1])).loss.isfinite()


@contextlib.contextmanager
def warnings_of(caplog):
    """A function that returns what transformers' loggers have said; each warning counts again."""
    logging.warning_once.cache_clear()
    caplog.clear()
    logging.enable_propagation()
    yield lambda: caplog.text
    logging.disable_propagation()


PIPELINES = {
    "feature-extraction": (neobert_hf.NeoBERTModel, "the quick fox"),
    "fill-mask": (neobert_hf.NeoBERTForMaskedLM, "the quick [MASK] fox"),
    "text-classification": (neobert_hf.NeoBERTForSequenceClassification, "the quick fox"),
    "token-classification": (neobert_hf.NeoBERTForTokenClassification, "the quick fox"),
    "zero-shot-classification": (neobert_hf.NeoBERTForSequenceClassification, "the quick fox"),
    "question-answering": (neobert_hf.NeoBERTForQuestionAnswering, {"question": "fox", "context": "the fox sleeps"}),
}


@pytest.mark.compat
@pytest.mark.parametrize("task", PIPELINES)
def test_the_pipelines_of_the_heads_run(tiny_config, tokenizer, task):
    if task not in SUPPORTED_TASKS:
        pytest.skip(f"this version of transformers has no pipeline for {task}")
    model_class, text = PIPELINES[task]
    tiny_config.vocab_size = len(tokenizer)
    extra = {"candidate_labels": ["red", "old"]} if task == "zero-shot-classification" else {}
    model = model_class(tiny_config).eval()
    if extra:
        model.config.label2id = {"contradiction": 0, "entailment": 1}
    run = pipeline(task, model=model, tokenizer=tokenizer)
    result = run(**text) if isinstance(text, dict) else run(text, **extra)
    assert result
    if task == "feature-extraction":
        with torch.no_grad():
            wanted = model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        torch.testing.assert_close(torch.tensor(result), wanted, rtol=1e-5, atol=1e-5)
    if task == "fill-mask":
        assert result[0]["score"] >= result[1]["score"] > 0
        batch = run([text, "a dog and a [MASK] by the old sea"], batch_size=2)
        assert [guess["token"] for guess in batch[0]] == [guess["token"] for guess in result]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
def test_a_model_compiled_with_inductor_gives_the_same_logits(checkpoint):
    """The whole model in one graph through the default compiler."""
    model = AutoModelForMaskedLM.from_pretrained(checkpoint).eval()
    ids = torch.randint(5, 96, (2, 16))
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)(ids).logits
        torch.testing.assert_close(compiled, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_an_embedding_hook_gets_rows_and_its_output_is_used(checkpoint):
    """NEFTune (arXiv 2310.05914) adds noise to (rows, columns, width); without noise the model is the same."""
    model = AutoModelForMaskedLM.from_pretrained(checkpoint).train()
    ids, mask = torch.randint(5, 96, (3, 7)), torch.ones(3, 7, dtype=torch.long)
    mask[1, 4:] = 0
    plain = model(ids, attention_mask=mask).logits
    shapes, scale = [], torch.ones(())

    def change(module, inputs, output):
        shapes.append(output.shape)
        return output * scale

    with model.get_input_embeddings().register_forward_hook(change):
        torch.testing.assert_close(model(ids, attention_mask=mask).logits, plain, rtol=0, atol=0)
        scale = torch.tensor(2.0)
        assert (model(ids, attention_mask=mask).logits - plain).abs().max() > 1e-3
    assert shapes == [(3, 7, model.config.hidden_size)] * 2
