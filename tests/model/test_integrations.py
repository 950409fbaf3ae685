"""The model with PEFT, pipelines, accelerate, torch.compile and NEFTune."""

import pytest
import torch
from transformers import AutoModelForMaskedLM, pipeline

from neobert_hf import (
    NeoBERTForMaskedLM,
    NeoBERTForQuestionAnswering,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
)
from neobert_hf.model.checkpoint_neobert import check_can_be_saved

LORA_TARGETS = ["qkv", "wo", "w12", "w3"]


def test_lora_trains_only_its_matrices_and_merges_to_the_same_numbers(checkpoint):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=LORA_TARGETS, init_lora_weights=False)
    model = peft.get_peft_model(AutoModelForMaskedLM.from_pretrained(checkpoint), config).eval()
    ids = torch.randint(5, 96, (2, 7))
    outputs = model(ids, labels=ids)
    outputs.loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(trained) == 3 * len(LORA_TARGETS) * 2 and all("lora_" in name for name in trained)
    merged = model.merge_and_unload()
    # float32: the rank-4 product is added to the weight or to the result
    torch.testing.assert_close(merged(ids).logits, outputs.logits, rtol=1e-4, atol=1e-4)


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
    peft = pytest.importorskip("peft")
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


def test_lora_for_classification_saves_the_head_and_loads_again(classifier_checkpoint, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        task_type="SEQ_CLS",
        target_modules=LORA_TARGETS,
        modules_to_save=["dense", "classifier"],
        init_lora_weights=False,
    )
    load = NeoBERTForSequenceClassification.from_pretrained
    model = peft.get_peft_model(load(classifier_checkpoint), config).eval()
    ids = torch.randint(5, 96, (2, 7))
    logits = model(input_ids=ids, labels=torch.tensor([0, 1])).logits
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(load(classifier_checkpoint), tmp_path).eval()
    assert torch.equal(again(input_ids=ids).logits, logits)


def test_weights_of_torchao_are_refused_before_a_file_is_written(checkpoint, tmp_path):
    """A tensor class of the same module stands for torchao's, which safetensors cannot store."""
    weights = type("Int8Tensor", (torch.Tensor,), {"__module__": "torchao.quantization"})
    model = AutoModelForMaskedLM.from_pretrained(checkpoint)
    layer = model.model.transformer_encoder[0].qkv
    layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(weights))
    with pytest.raises(ValueError, match=r"qkv.weight is a Int8Tensor of torchao's quantize_, .*; save the model bef"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    model.hf_quantizer = object()  # transformers has loaded the model quantized, and knows how to save it
    check_can_be_saved(model)


@pytest.mark.compat
def test_the_fill_mask_pipeline_fills_masks(tiny_config, tokenizer):
    tiny_config.vocab_size = len(tokenizer)
    fill = pipeline("fill-mask", model=NeoBERTForMaskedLM(tiny_config).eval(), tokenizer=tokenizer, top_k=2)
    guesses = fill("the quick [MASK] fox")
    assert len(guesses) == 2 and guesses[0]["score"] >= guesses[1]["score"] > 0
    batch = fill(["the [MASK]", "a dog and a [MASK] by the old sea"], batch_size=2)
    alone = fill("the [MASK]")
    assert [guess["token"] for guess in batch[0]] == [guess["token"] for guess in alone]


@pytest.mark.compat
@pytest.mark.parametrize(
    ("task", "model_class", "text"),
    [
        ("feature-extraction", NeoBERTModel, "the quick fox"),
        ("text-classification", NeoBERTForSequenceClassification, "the quick fox"),
        ("token-classification", NeoBERTForTokenClassification, "the quick fox"),
        ("zero-shot-classification", NeoBERTForSequenceClassification, "the quick fox"),
        ("question-answering", NeoBERTForQuestionAnswering, {"question": "the fox", "context": "the quick fox sleeps"}),
    ],
)
def test_the_pipelines_of_the_heads_run(tiny_config, tokenizer, task, model_class, text):
    if task == "question-answering":
        from transformers.pipelines import SUPPORTED_TASKS

        if task not in SUPPORTED_TASKS:
            pytest.skip("this version of transformers has no question-answering pipeline")
    tiny_config.vocab_size = len(tokenizer)
    extra = {"candidate_labels": ["red", "old"]} if task == "zero-shot-classification" else {}
    model = model_class(tiny_config).eval()
    if extra:
        model.config.label2id = {"contradiction": 0, "entailment": 1}
    run = pipeline(task, model=model, tokenizer=tokenizer)
    result = run(**text) if isinstance(text, dict) else run(text, **extra)
    if task == "feature-extraction":
        with torch.no_grad():
            wanted = model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        torch.testing.assert_close(torch.tensor(result), wanted, rtol=1e-5, atol=1e-5)
    else:
        assert result


def test_pipelines_log_no_error_about_the_model(tiny_config, tokenizer, caplog):
    """A pipeline logs an error for a class that is not registered."""
    from transformers.utils import logging

    tiny_config.vocab_size = len(tokenizer)
    logging.enable_propagation()
    pipeline("fill-mask", model=NeoBERTForMaskedLM(tiny_config), tokenizer=tokenizer)
    pipeline("text-classification", model=NeoBERTForSequenceClassification(tiny_config), tokenizer=tokenizer)
    logging.disable_propagation()
    assert "not supported" not in caplog.text


def test_accelerate_in_bf16_trains_close_to_float32(checkpoint):
    accelerate = pytest.importorskip("accelerate")
    ids = torch.randint(5, 96, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = torch.where(ids % 2 == 0, ids, -100)
    losses = {}
    for precision in ("no", "bf16"):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=True)
        model = AutoModelForMaskedLM.from_pretrained(checkpoint)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        for _ in range(3):
            loss = model(ids, labels=labels).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
        losses[precision] = loss.item()
    # bf16: eight bits of mantissa in every product
    assert abs(losses["bf16"] - losses["no"]) < 0.02 * losses["no"]


def test_a_model_compiled_with_inductor_gives_the_same_logits(checkpoint):
    """The whole model in one graph through the default compiler; needs a C++ compiler, as torch.compile does."""
    import shutil

    if shutil.which("g++") is None:
        pytest.skip("torch.compile on a CPU needs g++")
    model = AutoModelForMaskedLM.from_pretrained(checkpoint).eval()
    ids = torch.randint(5, 96, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(model, fullgraph=True)(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4
        )


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
