"""What the model declares to transformers holds: one graph, hidden states and attentions, attention of other libraries."""

import ast
import inspect
import textwrap
from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate import init_empty_weights
from oracle import CONFIG
from torch import nn
from torch._dynamo.utils import counters
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModel

import neobert_hf
from neobert_hf import AUTO_CLASSES, NeoBERTForMaskedLM, NeoBERTModel

VOCAB = CONFIG["vocab_size"]
# float32: sums of a few hundred terms in another order
FLOAT32 = dict(rtol=1e-5, atol=1e-5)
# batches with other lengths and other numbers of documents
BATCHES = [(9, 4, 13, 1), (5, 17), (3, 8, 2, 6, 11), (7, 7, 1)]


def padded(lengths):
    """Padded rows with a mask."""
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": torch.randint(5, VOCAB, mask.shape) * mask, "attention_mask": mask}


def packed(lengths):
    """One packed row with boundaries, as packing collators return it."""
    boundaries = torch.tensor([0, *lengths]).cumsum(0).int()
    marks = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
    marks |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    return {"input_ids": torch.randint(5, VOCAB, (1, sum(lengths))), **marks}


def num_graphs():
    """Number of graphs that torch.compile has made, and of the breaks between them."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


FAST = ("AutoModelForMaskedLM",)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in AUTO_CLASSES if name not in ("AutoConfig", *FAST)]


@pytest.mark.slow
@pytest.mark.parametrize("auto_class", [*FAST, *SLOW])
def test_every_class_compiles_to_one_graph_for_all_lengths(auto_class, tiny_config):
    """One for padded rows, and one for packed rows, which have other arguments."""
    tiny_config.num_hidden_layers = 1
    model = AUTO_CLASSES[auto_class](tiny_config).eval()
    assert model._can_compile_fullgraph
    has_choices = auto_class == "AutoModelForMultipleChoice"
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for make_batch in (padded,) if has_choices else (padded, packed):
        for lengths in BATCHES:
            inputs = make_batch(lengths)
            if has_choices:
                inputs = {name: torch.stack((x, x.flip(0)), 1) for name, x in inputs.items()}
            with torch.no_grad():
                torch.testing.assert_close(compiled(**inputs)[0], model(**inputs)[0], **FLOAT32)
    assert num_graphs() == (1 if has_choices else 2, 0)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, None])
def test_training_on_packed_rows_is_compiled_once_or_twice(dynamic, tiny_config):
    """By default torch assumes constant lengths first, finds that they change, and compiles a second time.

    A row of one document takes one graph more, because torch assumes that a length of 1 is constant.
    """
    tiny_config.num_hidden_layers = 1
    model = NeoBERTForMaskedLM(tiny_config)
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for lengths in [*BATCHES * 2, (12,), (20,)]:
        inputs = packed(lengths)
        inputs["labels"] = torch.where(inputs["input_ids"] % 3 == 0, inputs["input_ids"], -100)
        compiled(**inputs).loss.backward()
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        model(**inputs).loss.backward()
        for expected, gradient in zip(model.parameters(), found):
            torch.testing.assert_close(gradient, expected.grad, **FLOAT32)
        model.zero_grad()
        if lengths == BATCHES[-1]:
            assert num_graphs() == (1 if dynamic else 2, 0)
    assert num_graphs() == (2 if dynamic else 3, 0)


def structure(value):
    """The shapes of an output: tensors become their shapes, and None stays."""
    if isinstance(value, tuple):
        return tuple(map(structure, value))
    return value if value is None else tuple(value.shape)


def requests():
    """Arguments and entries of the config that request states and attentions."""
    yield "nothing", {}, {}
    yield "both", {"output_hidden_states": True, "output_attentions": True}, {}
    yield "tuples", {"output_hidden_states": True, "output_attentions": True, "return_dict": False}, {}
    yield "config", {}, {"output_hidden_states": True, "output_attentions": True}
    yield "argument against config", {"output_hidden_states": False}, {"output_hidden_states": True}
    if hasattr(getattr(transformers.utils, "output_capturing", None), "selected_hidden_states"):  # transformers 5.23
        yield "indices", {"output_hidden_states": [0, -2, 99]}, {}
        yield "last", {"output_hidden_states": -1}, {}
        yield "first", {"output_hidden_states": 0}, {}


@pytest.mark.parametrize("head", ["Model", "ForMaskedLM"])
@pytest.mark.parametrize("arguments, changes", [pytest.param(*rest, id=name) for name, *rest in requests()])
def test_states_and_attentions_are_requested_as_of_modernbert(head, arguments, changes):
    """ModernBERT records them by hooks that it declares in `_can_record_outputs`; ours are made in the forward."""
    sizes = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48)
    sizes |= dict(attn_implementation="eager", **changes)
    theirs = getattr(transformers, f"ModernBert{head}")(transformers.ModernBertConfig(**sizes, pad_token_id=0)).eval()
    ours = getattr(neobert_hf, f"NeoBERT{head}")(neobert_hf.NeoBERTConfig(**sizes)).eval()
    inputs = padded(BATCHES[0])
    with torch.no_grad():
        expected, found = (model(**inputs, **arguments) for model in (theirs, ours))
    if arguments.get("return_dict") is False:
        assert structure(found) == structure(expected)
    else:
        assert {key: structure(x) for key, x in found.items()} == {key: structure(x) for key, x in expected.items()}


def test_selected_states_are_those_of_all_states_with_their_gradients(model):
    """The gradient of a returned state is that of the loss through all later blocks."""
    inputs = packed(BATCHES[0])
    ids = inputs["input_ids"]
    every = model(**inputs, labels=ids, output_hidden_states=True)
    some = model(**inputs, labels=ids, output_hidden_states=[1, -1])
    assert [state is None for state in some.hidden_states] == [True, False, True, False]
    for index in (1, -1):
        torch.testing.assert_close(some.hidden_states[index], every.hidden_states[index], rtol=0, atol=0)
    (found,), (wanted,) = (torch.autograd.grad(x.loss, x.hidden_states[1]) for x in (some, every))
    assert wanted.abs().max() > 0
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def sdpa_of_documents(query, key, value, scaling, lengths):
    """Attention within documents of `lengths`, (T, H * K) each."""
    heads = [x.unflatten(-1, (CONFIG["num_attention_heads"], -1)).split(lengths) for x in (query, key, value)]
    parts = [F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in part), scale=scaling) for part in zip(*heads)]
    return torch.cat([part.transpose(0, 1).flatten(1) for part in parts])


class Served(nn.Module):
    """In place of a layer of vLLM, which is of another class than ours: a function of the input and the weight."""

    def __init__(self, layer, function):
        super().__init__()
        assert layer.weight.is_meta
        self.weight, self.function = nn.Parameter(torch.empty(layer.weight.shape)), function

    def forward(self, x):
        return self.function(x, self.weight)


def normalize(x, weight, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def calls_the_interface(module):
    """Whether the forward of a module calls one function of ALL_ATTENTION_FUNCTIONS, as newer vLLM reads its source."""
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(type(module).forward)))))
    found = [node for node in nodes if isinstance(node, ast.Assign) and "ALL_ATTENTION_FUNCTIONS[" in ast.unparse(node)]
    names = [node.targets[0].id for node in found]
    return sum(isinstance(node, ast.Call) and ast.unparse(node.func) in names for node in nodes) == 1


class Server:
    """What vLLM's backend for transformers does with an encoder, written after its source and documentation.

    `takes_argument`: the layers of attention are an argument of the model, as in vLLM until the middle of 2026; else each is
    attached to the module that calls the attention function.
    """

    def __init__(self, folder, weights, takes_argument):
        AttentionInterface.register("vllm", by_argument if takes_argument else by_module)
        config = AutoConfig.from_pretrained(folder)
        config._attn_implementation = "vllm"
        config.rope_theta = config.rope_parameters["rope_theta"]  # `patch_rope_parameters`
        with init_empty_weights(include_buffers=False):
            self.model = AutoModel.from_config(config, dtype=torch.float32)
        assert type(self.model) is type(self.model.get_decoder()) is NeoBERTModel  # the class that vLLM compiles
        assert config.get_text_config() is config
        self.replace(self.model)
        self.model.set_input_embeddings(Served(self.model.get_input_embeddings(), lambda ids, weight: weight[ids]))
        encoder = {name.removeprefix("model."): x for name, x in weights.items() if "decoder" not in name}
        self.model.load_state_dict(encoder)
        assert not any(parameter.is_meta for parameter in self.model.parameters())

        modules = [module for module in self.model.modules() if hasattr(module, "layer_idx")]
        attention = list(filter(calls_the_interface, modules))
        assert [module.layer_idx for module in attention] == list(range(config.num_hidden_layers))
        assert all(module.config is config and module.is_causal is False for module in attention)
        self.lengths, self.num_calls = None, 0
        layers = dict.fromkeys(range(config.num_hidden_layers), self.layer)
        self.options = {"attention_instances": layers} if takes_argument else {}
        for module in attention:
            module.attn = None if takes_argument else self.layer

    def replace(self, module):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, Served(child, F.linear))
            elif type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, Served(child, partial(normalize, eps=child.eps)))
            else:
                self.replace(child)

    def layer(self, query, key, value, scaling):
        self.num_calls += 1
        return sdpa_of_documents(query, key, value, scaling, self.lengths)

    def __call__(self, ids, positions, lengths, **inputs):
        self.lengths = lengths
        inputs |= dict(use_cache=False, position_ids=positions[None], return_dict=False)
        with torch.inference_mode():
            return self.model(input_ids=ids, **inputs, **self.options)[0][0]


def flat(query, key, value, attention_mask):
    assert attention_mask is None  # T x T numbers, for nothing
    num_tokens = query.shape[-2]
    return [x.transpose(1, 2).reshape(num_tokens, -1) for x in (query, key, value)]


def by_argument(module, query, key, value, attention_mask, scaling=None, attention_instances=None, **kwargs):
    return attention_instances[module.layer_idx](*flat(query, key, value, attention_mask), scaling), None


def by_module(module, query, key, value, attention_mask, scaling=None, **kwargs):
    return module.attn(*flat(query, key, value, attention_mask), scaling), None


@pytest.mark.compat
@pytest.mark.parametrize("takes_argument", [True, False], ids=["argument", "module"])
def test_a_server_like_vllm_runs_the_model_by_its_own_layers(model, checkpoint, takes_argument):
    server = Server(checkpoint, model.state_dict(), takes_argument)
    for lengths in BATCHES:
        inputs = packed(lengths)
        ids, positions = inputs["input_ids"], torch.cat([torch.arange(n) for n in lengths])
        with torch.no_grad():
            expected = model.model(**inputs).last_hidden_state[0]
        embeddings = server.model.get_input_embeddings()(ids)
        # it reads no value of a tensor, so that the host never waits for the device
        with ExitStack() as forbidden:
            for name in ("item", "tolist", "cpu", "__bool__", "__int__"):
                forbidden.enter_context(mock.patch.object(torch.Tensor, name, side_effect=AssertionError(name)))
            found = server(ids, positions, lengths), server(None, positions, lengths, inputs_embeds=embeddings)
        for state in found:
            torch.testing.assert_close(state, expected, **FLOAT32)
    assert server.num_calls == 2 * len(BATCHES) * CONFIG["num_hidden_layers"]


@pytest.mark.compat
@pytest.mark.parametrize("marks", ["attention_mask", "cu_seq_lens_q", "seq_idx"])
def test_a_registered_function_that_gets_no_mask_refuses_what_a_mask_would_say(model, marks):
    AttentionInterface.register("without_mask", by_module)
    assert "without_mask" not in AttentionMaskInterface()
    model.set_attn_implementation("without_mask")
    ids = torch.full((1, 6), 7)
    values = {"attention_mask": ids != 0, "cu_seq_lens_q": torch.tensor([0, 2, 6]), "seq_idx": ids * 0}
    with pytest.raises(ValueError, match=r"registered without a mask function.*MaskInterface.register\('without_mask'"):
        model(ids, **{marks: values[marks]})


def test_arguments_that_a_registered_function_does_not_name_are_refused(model):
    AttentionInterface.register("with_argument", by_argument)
    model.set_attn_implementation("with_argument")
    with pytest.raises(TypeError, match="no argument attention_instance; omit it"):
        model(torch.full((1, 6), 7), attention_instance={})
    model.set_attn_implementation("sdpa")
    with pytest.raises(TypeError, match="no argument attention_instances; omit it"):
        model(torch.full((1, 6), 7), attention_instances={0: None})
