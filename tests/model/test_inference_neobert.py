"""`inference_copy`: the same numbers from another object, an untouched original, and refusals of all that a copy cannot do."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from conftest import relative_error
from peft import LoraConfig, get_peft_model
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import LayerNorm
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import Trainer, TrainingArguments, pipeline

import neobert_hf
from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM, NeoBERTForSequenceClassification, NeoBERTModel, inference_copy
from neobert_hf.model.invariant_neobert import make_invariant, pad_columns
from neobert_hf.model.kernels_neobert import InferenceLinear, Int8Linear
from neobert_hf.model.machine_neobert import has_invariant_products

IDS = torch.tensor([[2, 50, 60, 3], [2, 7, 9, 3]])
# An int8 product with random weights differs by about 1 % of its norm from float32; three blocks together by less than 3 %.
INT8_ERROR = 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_computes_the_logits_of_the_oracle(model, expected, dtype):
    """Of the padded batch; bf16: at most 3 times the error of the model itself."""
    ids, mask, wanted = expected["input_ids"], expected["attention_mask"], expected["mlm_logits"]
    real = mask.bool()
    model = model.to(dtype)
    copied = inference_copy(model)
    assert type(copied) is NeoBERTForMaskedLM and copied is not model and not copied.training
    assert (copied.dtype, copied.device, copied.num_parameters() > 0) == (dtype, torch.device("cpu"), True)
    with torch.inference_mode():
        allowed = 1e-5
        if dtype == torch.bfloat16:
            allowed = 3 * relative_error(model(ids, attention_mask=mask).logits[real], wanted[real])
        assert relative_error(copied(ids, attention_mask=mask).logits[real], wanted[real]) <= allowed
    assert relative_error(copied(ids, attention_mask=mask).logits[real].detach(), wanted[real]) <= allowed


@pytest.mark.parametrize("int8", [False, True])
def test_a_copy_shares_no_memory_with_the_model(tiny_config, int8):
    model = NeoBERTModel(tiny_config).eval()
    copied = inference_copy(model, int8=int8)
    with torch.inference_mode():
        before = copied(IDS).last_hidden_state
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    with torch.inference_mode():
        assert torch.equal(copied(IDS).last_hidden_state, before)
    del model, parameter
    gc.collect()
    assert not any(weight() is not None for weight in weights)


REFUSALS = {
    "train": (lambda copied, _: copied.train(), "cannot be trained"),
    "optimizer": (lambda copied, _: _take_a_step(copied), "has no gradients"),
    "Trainer": (lambda copied, path: _train(copied, path), "cannot be trained"),
    "save_pretrained": (lambda copied, path: copied.save_pretrained(path), "cannot be saved"),
    "torch.save": (lambda copied, path: torch.save(copied, path / "model.pt"), "cannot be copied or pickled"),
    "pickle": (lambda copied, _: pickle.dumps(copied), "cannot be copied or pickled"),
    "deepcopy": (lambda copied, _: copy.deepcopy(copied), "cannot be copied or pickled"),
    "a copy of the copy": (lambda copied, _: inference_copy(copied), "cannot be copied"),
    "LoRA": (lambda copied, _: get_peft_model(copied, LoraConfig(target_modules=["qkv"])), "is not supported"),
    "half": (lambda copied, _: copied.half(), "cannot be converted to torch.float16 on cpu"),
    "to a dtype": (lambda copied, _: copied.to(torch.bfloat16), "cannot be converted to torch.bfloat16 on cpu"),
    "to a device": (lambda copied, _: copied.to("meta"), "cannot be converted to torch.float32 on meta"),
    "half of a part": (lambda copied, _: copied.decoder.half(), "cannot be converted to torch.float16 on cpu"),
    "half in another model": (lambda copied, _: nn.Sequential(copied).half(), "cannot be converted to torch.float16"),
    "export": (lambda copied, _: torch.export.export(copied, (IDS,), strict=False), "cannot be traced or exported"),
}


def _take_a_step(copied):
    optimizer = torch.optim.AdamW(copied.parameters())
    copied(IDS, labels=IDS).loss.backward()
    optimizer.step()


def _train(copied, path):
    arguments = TrainingArguments(path, report_to="none", use_cpu=True, max_steps=1)
    Trainer(copied, arguments, train_dataset=[{"input_ids": IDS[0], "labels": IDS[0]}]).train()


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("action", REFUSALS)
def test_what_a_copy_cannot_do_is_refused_with_the_way_out_and_changes_nothing(tiny_config, tmp_path, action, int8):
    copied = inference_copy(NeoBERTForMaskedLM(tiny_config), int8=int8)
    with torch.inference_mode():
        before = copied(IDS).logits
    run, reason = REFUSALS[action]
    with pytest.raises(ValueError, match=f"(?s){reason}|use the model that this inference copy was made from") as error:
        run(copied, tmp_path)
    assert reason in str(error.value) and "use the model that this inference copy was made from" in str(error.value)
    assert not copied.training
    with torch.inference_mode():
        assert torch.equal(copied(IDS).logits, before)
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("int8", [False, True])
def test_conversions_that_change_nothing_are_allowed(tiny_config, int8):
    """Pipelines and trainers move every model."""
    copied = inference_copy(NeoBERTModel(tiny_config).bfloat16(), int8=int8)
    with torch.inference_mode():
        before = copied(IDS).last_hidden_state
        copied = copied.to("cpu").to(copied.dtype).cpu()
        assert torch.equal(copied(IDS).last_hidden_state, before)


def test_a_model_without_a_copy_of_this_kind_is_refused(tiny_config, monkeypatch):
    with pytest.raises(ValueError, match="needs a model on a CPU or one CUDA GPU, but it is on meta; call"):
        inference_copy(NeoBERTModel(tiny_config).to("meta"))
    split = NeoBERTModel(tiny_config)
    split.layer_norm.to("meta")
    with pytest.raises(ValueError, match=r"one CUDA GPU, but it is on cpu, meta; call model\.cpu\(\)"):
        inference_copy(split)
    with pytest.raises(ValueError, match="Linear contains no NeoBERT; give a NeoBERT"):
        inference_copy(nn.Linear(3, 3))
    adapted = get_peft_model(NeoBERTModel(tiny_config), LoraConfig(target_modules=["qkv", "wo", "w12", "w3"]))
    with pytest.raises(ValueError, match="can be int8 or compiled, because all have hooks, adapters or quantized w"):
        inference_copy(adapted, int8=True)
    with pytest.raises(ValueError, match=r"batch_invariant=True needs .* torch\.float64 .* dtype=torch\.float32 on"):
        inference_copy(NeoBERTModel(tiny_config).double(), batch_invariant=True)
    monkeypatch.setattr("neobert_hf.model.inference_neobert.TORCH.onednn_int8_linear", None)
    with pytest.raises(ValueError, match="has no int8 products for cpu on this machine; omit int8=True"):
        inference_copy(NeoBERTModel(tiny_config), int8=True)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("target", ["qkv", "wo", "w12", "w3"])
def test_hooks_and_adapters_act_in_a_copy(tiny_config, target, int8):
    """Layers with an adapter stay as they are; int8 of the others changes the states by less than three blocks in int8."""
    model = NeoBERTModel(tiny_config).eval()
    hooked = model.transformer_encoder[0].ffn.w3 if target == "wo" else model.transformer_encoder[0].wo
    hooked.register_forward_hook(lambda module, _, output: 2 * output)
    adapted = get_peft_model(model, LoraConfig(target_modules=[target], init_lora_weights=False)).eval()
    copied = inference_copy(adapted, int8=int8)
    with torch.inference_mode():
        wanted = adapted(IDS).last_hidden_state.double()
        error = relative_error(copied(IDS).last_hidden_state, wanted)
        assert error < (INT8_ERROR if int8 else 1e-5)
        merged = copied.merge_and_unload()(IDS).last_hidden_state
    assert relative_error(merged, wanted) < (INT8_ERROR if int8 else 1e-5)


def test_a_hook_on_all_modules_does_not_prevent_int8_and_layers_of_others_stay(tiny_config):
    class WithProbe(NeoBERTModel):
        __module__ = "code_of_a_user"

        def __init__(self, config):
            super().__init__(config)
            self.probe = nn.Linear(config.hidden_size, 2)

    handle = register_module_forward_hook(lambda *_: None)
    try:
        copied = inference_copy(WithProbe(tiny_config), int8=True)
    finally:
        handle.remove()
    assert sum(type(layer) is Int8Linear for layer in copied.modules()) == 4 * tiny_config.num_hidden_layers
    assert type(copied.probe) is nn.Linear


def test_a_copy_that_is_made_in_inference_mode_runs_outside_it(tiny_config):
    model = NeoBERTForMaskedLM(tiny_config)
    with torch.inference_mode():
        copied = inference_copy(model)
        wanted = copied(IDS).logits
    torch.testing.assert_close(copied(IDS).logits.detach(), wanted, rtol=1e-5, atol=1e-5)  # fp32, other kernels


@pytest.mark.slow
def test_a_copy_runs_compiled_and_under_autocast(tiny_config):
    model = NeoBERTModel(tiny_config).eval()
    copied = inference_copy(model)
    with torch.inference_mode():
        wanted = model(IDS).last_hidden_state
        compiled = torch.compile(copied, backend="eager")(IDS).last_hidden_state
        torch.testing.assert_close(compiled, wanted, rtol=1e-5, atol=1e-5)  # fp32, other library
        with torch.autocast("cpu", torch.bfloat16):
            # bf16 between products
            torch.testing.assert_close(copied(IDS).last_hidden_state, wanted, rtol=0.1, atol=0.1)


def test_sentence_transformers_and_pipelines_use_a_copy():
    texts = ["open a file", "close the window", "x"]
    model = SentenceTransformer(neobert_hf.MINI_MODEL_PATH, device="cpu", model_kwargs={"dtype": torch.float32})
    copied = inference_copy(model)
    assert (copied.device, copied.dtype) == (model.device, model.dtype)
    torch.testing.assert_close(copied.encode(texts), model.encode(texts), rtol=1e-5, atol=1e-5)  # fp32, other library
    with pytest.raises(ValueError, match="an inference copy cannot be trained"):
        copied.train()
    masked = inference_copy(NeoBERTForMaskedLM.from_pretrained(neobert_hf.MINI_MODEL_PATH, dtype=torch.float32))
    fill = pipeline("fill-mask", masked, tokenizer=model.tokenizer, device="cpu")
    assert len(fill(f"open a {model.tokenizer.mask_token}")) == 5


def int8_layer(num_inputs, num_outputs):
    return Int8Linear(nn.Linear(num_inputs, num_outputs, bias=False), torch.float32)


def test_int8_products_run_in_every_block_and_stay_close(model, expected):
    copied = inference_copy(model.bfloat16(), int8=True)
    assert sum(type(layer) is Int8Linear for layer in copied.modules()) == 4 * model.config.num_hidden_layers
    assert type(copied.decoder) is InferenceLinear
    real = expected["attention_mask"].bool()
    with torch.inference_mode():
        logits = copied(expected["input_ids"], attention_mask=expected["attention_mask"]).logits[real]
    assert logits.dtype == torch.float32
    assert 1e-4 < relative_error(logits, expected["mlm_logits"][real]) < INT8_ERROR


@pytest.mark.parametrize("num_rows", [1, 17, 300])
def test_the_error_of_an_int8_product_is_one_percent(num_rows):
    """In each row, whatever its size: the factors' rounding errors, of 7 and 8 bits, add up to about 1.1 %."""
    layer, x = nn.Linear(768, 96, bias=False), torch.randn(num_rows, 768) * torch.logspace(-2, 1, num_rows)[:, None]
    with torch.inference_mode():
        out = Int8Linear(layer, torch.float32).multiply(x)
        product = x.double() @ layer.weight.double().T
        errors = (out.double() - product).norm(dim=1) / product.norm(dim=1)
    assert errors.max() < 0.02


def test_large_numbers_do_not_saturate():
    """The largest sums that int8 products can have, which a CPU without VNNI adds in 16 bits."""
    layer = nn.Linear(768, 32, bias=False)
    signs = torch.randint(0, 2, (32, 1)) * 2.0 - 1
    with torch.inference_mode():
        layer.weight.copy_(signs.expand(32, 768))
        for x in (torch.ones(17, 768), -torch.ones(17, 768)):
            wanted = x @ layer.weight.T
            # sums in float32
            torch.testing.assert_close(Int8Linear(layer, torch.float32).multiply(x), wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_a_row_of_an_int8_product_does_not_depend_on_other_rows(num_rows):
    layer, x = int8_layer(256, 64), torch.randn(64, 256)
    with torch.inference_mode():
        together = layer.multiply(x)
        x[num_rows:] *= 1000
        assert torch.equal(layer.multiply(x[:num_rows]), together[:num_rows])
        x[num_rows:] = torch.nan
        assert torch.equal(layer.multiply(x)[:num_rows], together[:num_rows])


def test_int8_rows_of_zeros_stay_zeros_and_no_rows_give_no_rows():
    layer = int8_layer(64, 8)
    with torch.inference_mode():
        assert torch.equal(layer(torch.zeros(3, 64)), torch.zeros(3, 8))
        assert layer(torch.zeros(0, 64)).shape == (0, 8)


def test_the_vector_of_a_text_in_int8_does_not_depend_on_its_batch():
    model = SentenceTransformer(neobert_hf.MINI_MODEL_PATH, device="cpu", model_kwargs={"dtype": torch.float32})
    copied = inference_copy(model, int8=True)
    texts = ["open a file", "return the current time of the system clock in seconds " * 3, "x"]
    together = copied.encode(texts, convert_to_tensor=True)
    alone = torch.stack([copied.encode(text, convert_to_tensor=True) for text in texts])
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-4 * together.abs().max().item())  # fp32 attention
    assert F.cosine_similarity(together, model.encode(texts, convert_to_tensor=True)).min() > 0.995


LENGTHS = [1, 2, 3, 7, 15, 16, 33, 63, 64, 65, 127, 129, 257]  # of texts: around every block of rows, and odd


@pytest.fixture
def set_threads():
    """`torch.set_num_threads`, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def _invariant_copy(model, int8=False):
    dtype = torch.float32 if int8 else model.dtype
    if not has_invariant_products(dtype):
        pytest.skip(f"this CPU has no products in {dtype} whose bits do not depend on the batch")
    return inference_copy(model, int8=int8, batch_invariant=True)


def _padded(texts, side):
    """ids and mask (B, L) with two more columns than the longest text has."""
    ids = torch.zeros(len(texts), max(map(len, texts)) + 2, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        columns = slice(0, len(text)) if side == "right" else slice(ids.shape[1] - len(text), None)
        ids[row, columns], mask[row, columns] = text, 1
    return ids, mask


@pytest.mark.parametrize("dtype, int8", [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)])
@torch.inference_mode()
def test_a_batch_invariant_copy_gives_a_text_the_same_states_bit_by_bit_in_every_batch(dtype, int8, set_threads):
    """Alone and beside others, by batch size, order, side of the padding, packing, and number of threads."""
    model = NeoBERTModel.from_pretrained(neobert_hf.MINI_MODEL_PATH, dtype=dtype, num_hidden_layers=2)
    copied = _invariant_copy(model, int8)
    texts = [torch.randint(5, 12000, (length,), generator=torch.Generator().manual_seed(length)) for length in LENGTHS]
    set_threads(1)
    alone = [copied(text[None]).last_hidden_state[0] for text in texts]
    for threads in (1, 2):
        set_threads(threads)
        for order in (range(13), range(12, -1, -1), (0, 12), (9, 9, 9)):
            members = [texts[index] for index in order]
            ends = torch.tensor([0, *map(len, members)]).cumsum(0)
            packed = copied(torch.cat(members)[None], cu_seq_lens_q=ends, cu_seq_lens_k=ends).last_hidden_state[0]
            batches = [packed.split(list(map(len, members)))]
            for ids, mask in (_padded(members, "right"), _padded(members, "left")):
                states = copied(ids, attention_mask=mask).last_hidden_state
                batches.append([row[is_real.bool()] for row, is_real in zip(states, mask)])
            for batch in batches:
                assert all(torch.equal(alone[index], states) for index, states in zip(order, batch))


def _dense(activation=None, num_outputs=37, place="sentence_embedding", **options):
    torch.manual_seed(0)
    return Dense(256, num_outputs, activation_function=activation, module_input_name=place, **options)


# Modules of sentence-transformers behind the pooling, or before it if they read `token_embeddings`.
MODULES = {
    "mini": lambda: [],
    "classes": lambda: [Normalize(), _dense()],
    "residual": lambda: [_dense(nn.GELU(), use_residual=True)],
    "one number": lambda: [LayerNorm(256), _dense(nn.Sigmoid(), 1)],
    "tokens": lambda: [_dense(nn.SiLU(), 256, "token_embeddings")],
}


@pytest.mark.slow
@pytest.mark.parametrize("modules, dtype", [*((x, torch.float32) for x in MODULES), ("mini", torch.bfloat16)], ids=str)
def test_a_batch_invariant_copy_embeds_a_text_as_the_same_vector_in_every_batch(modules, dtype, set_threads):
    model = SentenceTransformer(neobert_hf.MINI_MODEL_PATH, device="cpu", model_kwargs={"dtype": dtype})
    for module in MODULES[modules]():
        model.insert(1 if getattr(module, "module_input_name", "") == "token_embeddings" else len(model), module)
    before = model.encode("one text")
    copied = _invariant_copy(model)
    texts = ["word " * length for length in (1, 5, 11, 28, 61, 93, 123, 200)]
    set_threads(1)
    alone = [copied.encode([text])[0] for text in texts]
    for threads, batch_size in ((1, 2), (2, 8)):
        set_threads(threads)
        for order in (range(8), range(7, -1, -1)):
            vectors = copied.encode([texts[index] for index in order], batch_size=batch_size)
            assert all((alone[index] == vector).all() for index, vector in zip(order, vectors))
    set_threads(1)
    assert (model.encode("one text") == before).all()


def test_the_sum_over_the_columns_of_a_text_does_not_follow_the_longest_text_of_the_batch():
    """The modules behind the encoder add up the weights of the words; those of padding are zero."""

    def sums(rows):
        return pad_columns(nn.Module(), ({"attention_mask": rows},))[0]["attention_mask"].sum(1)

    for length in range(1, 257):
        weights = torch.rand(16, length)
        together = sums(torch.cat((F.pad(weights, (0, 300 - length)), torch.rand(1, 300))))
        assert torch.equal(torch.cat([sums(row) for row in weights.split(1)]), together[:16])


ACTIVATIONS = [nn.Tanh, nn.Sigmoid, nn.SiLU, nn.GELU, nn.ELU, nn.CELU, nn.SELU, nn.Mish, nn.Softplus]


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_an_activation_of_a_batch_invariant_copy_gives_a_row_the_same_bits_among_any_rows(kind, set_threads):
    activation = kind()
    make_invariant(activation)
    for width in (1, 37, 301):
        x = 3 * torch.randn(201, width)
        set_threads(1)
        alone = torch.cat([activation(row) for row in x.split(1)])
        torch.testing.assert_close(alone, kind()(x))
        for threads in (1, 3):
            set_threads(threads)
            assert all(torch.equal(activation(x[:rows]), alone[:rows]) for rows in (2, 33, 201))
            assert torch.equal(activation(x[:, 0]), alone[:, 0])


def test_a_batch_invariant_copy_of_a_cross_encoder_gives_a_pair_the_same_score_in_every_batch():
    """The sigmoid behind the logits of 32 pairs is computed in vectors."""
    torch.manual_seed(0)
    model = CrossEncoder(neobert_hf.MINI_MODEL_PATH, num_labels=1, model_kwargs={"dtype": torch.float32}, device="cpu")
    nn.init.normal_(model[0].model.classifier.weight)
    copied = _invariant_copy(model)
    pairs = [("open a file", f"{word} the file {'again ' * count}") for count in range(7) for word in "abcde"]
    alone = copied.predict(pairs, batch_size=1)
    assert all((copied.predict(pairs, batch_size=size) == alone).all() for size in (2, 35))
    assert abs(alone - model.predict(pairs)).max() < 1e-5


@pytest.mark.parametrize(("num_heads", "width"), [(4, 4), (4, 6), (4, 8), (4, 10), (3, 14), (2, 20), (1, 8), (1, 64)])
@torch.inference_mode()
def test_small_heads_and_a_single_head_give_a_text_the_same_states_for_1_and_7_threads(num_heads, width, set_threads):
    shape = {"hidden_size": num_heads * width, "num_attention_heads": num_heads, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = NeoBERTModel(NeoBERTConfig(vocab_size=99, **shape)).eval()
    for weight in model.parameters():
        weight.normal_(std=weight.shape[-1] ** -0.5)
    copied = _invariant_copy(model)
    for length in (5, 9, 18, 25, 31, 33, 65):
        ids = torch.randint(1, 99, (3, length))
        set_threads(1)
        alone = torch.cat([copied(row).last_hidden_state for row in ids.split(1)])
        torch.testing.assert_close(alone, model(ids).last_hidden_state)
        for threads in (1, 2, 7):
            set_threads(threads)
            assert torch.equal(copied(ids).last_hidden_state, alone)
            assert torch.equal(copied(ids[:1]).last_hidden_state, alone[:1])


@torch.inference_mode()
def test_a_batch_invariant_copy_gives_a_text_the_same_logits_in_every_batch(tiny_config):
    """One text alone makes products of a single row behind the last attention; oneDNN has another program for 2,048 columns."""
    wide = NeoBERTConfig(num_hidden_layers=1, vocab_size=100)
    copied = _invariant_copy(NeoBERTForSequenceClassification(wide))
    assert torch.equal(copied(IDS).logits[1:], copied(IDS[1:]).logits)
    _, mask = _padded(IDS, "left")
    tiny_config.unpad_inputs, tiny_config._attn_implementation = False, "eager"
    padded = _invariant_copy(NeoBERTModel(tiny_config))
    ids = F.pad(IDS, (2, 0))
    assert torch.equal(padded(ids, attention_mask=mask).last_hidden_state[:, 2:], padded(IDS).last_hidden_state)


@pytest.mark.parametrize(
    ("arguments", "has_autograd"),
    [({"output_attentions": True}, False), ({"attention_mask": torch.ones(1, 1, 4, 4).bool()}, False), ({}, True)],
    ids=["attentions", "4-D mask", "autograd"],
)
def test_a_batch_invariant_copy_refuses_what_would_depend_on_the_batch(tiny_config, arguments, has_autograd):
    copied = _invariant_copy(NeoBERTModel(tiny_config))
    refusal = pytest.raises(ValueError, match=r"copy cannot run with autograd, .* use torch\.inference_mode\(\)")
    with torch.set_grad_enabled(has_autograd), refusal:
        copied(IDS[:1], **arguments)
