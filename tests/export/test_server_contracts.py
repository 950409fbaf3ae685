"""What the loaders of vLLM and text-embeddings-inference demand of a folder, restated from their source.

vLLM 0.32.0 (vllm/model_executor/models/transformers/base.py, vllm/transformers_utils/config.py) has run with such folders, see
docs/exporting.md. text-embeddings-inference 1.9.3 (router/src/lib.rs, backends/candle/src/lib.rs, backends/ort/src/lib.rs) has
not.
"""

import json
import re

import onnxruntime
import pytest
import torch
import transformers
from safetensors import safe_open
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModel

from neobert_hf import NeoBERTForMaskedLM, NeoBERTForTokenClassification, sentence_transformer
from neobert_hf.export import export_model

pytest.importorskip("transformers.models.eurobert", reason="EuroBERT is native since transformers 5.3")

TEI_MODULES = {f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling", "Dense", "Normalize")}
# The values of `model_type` that the CUDA and Metal images know; the CPU image reads them after ONNX.
TEI_MODEL_TYPES = {
    *("bert", "deberta-v2", "camembert", "distilbert", "gemma3_text", "gte", "new", "mpnet", "mistral", "modernbert"),
    *("nomic_bert", "qwen2", "qwen3", "bidirectional_pplx_qwen3", "roberta", "xlm-roberta", "llama", "llama_bidirec"),
}


@pytest.fixture(scope="module")
def sources(checkpoint, tokenizer, tmp_path_factory):
    """An embedding model with Dense behind the pooling, and a tagger."""
    folder = tmp_path_factory.mktemp("sources")
    for name, model_class in (("masked_lm", NeoBERTForMaskedLM), ("tagger", NeoBERTForTokenClassification)):
        model_class.from_pretrained(checkpoint, num_labels=3).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    chain = sentence_transformer(str(folder / "masked_lm"), prompts={"query": "query: "})
    SentenceTransformer(modules=[*chain, Dense(32, 16), Normalize()], device="cpu").save(str(folder / "embedding"))
    return folder


@pytest.fixture(scope="module")
def twins(sources, tmp_path_factory):
    folder = tmp_path_factory.mktemp("twins")
    for name in ("embedding", "tagger"):
        export_model(sources / name, folder / name, to="eurobert")
    return folder


def read(folder, file):
    return json.loads((folder / file).read_text("utf-8"))


def names_in(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("name", ["embedding", "tagger"])
def test_vllm_maps_every_tensor_to_a_parameter_of_its_model_and_fills_all(twins, name):
    """Base._create_hf_to_vllm_mapper adds the prefix `model.` to children of the base model; no name may be left over."""
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.from_pretrained(twins / name))
    children = "|".join(child for child, _ in model.named_children())
    found = {re.sub(rf"^(?!model\.)(({children}).*)", r"model.\1", tensor) for tensor in names_in(twins / name)}
    head = {"classifier.weight", "classifier.bias"} if name == "tagger" else set()
    assert found == {f"model.{parameter}" for parameter in model.state_dict()} | head


@pytest.mark.parametrize(("name", "ending"), [("embedding", "Model"), ("tagger", "ForTokenClassification")])
def test_vllm_takes_the_class_of_transformers_as_an_encoder(twins, name, ending):
    """The ending of `architectures[0]` is the task; attention is bidirectional where `is_causal` is False."""
    [architecture] = read(twins / name, "config.json")["architectures"]
    assert architecture.endswith(ending)
    model_class = getattr(transformers, architecture)  # else vLLM asks for remote code
    assert model_class._supports_attention_backend or model_class.is_backend_compatible()
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.from_pretrained(twins / name))
    causal = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    assert causal == [False] * model.config.num_hidden_layers
    assert "roberta" not in model.config.model_type  # vLLM would add padding_idx + 1 to the positions


def test_vllm_finds_pooling_dense_and_normalization_and_nothing_that_it_would_pass_over(twins):
    """get_pooling_config and try_get_dense_modules read modules.json; Dense runs behind the pooling, other modules never."""
    modules = read(twins / "embedding", "modules.json")
    assert [module["type"].rpartition(".")[2] for module in modules] == ["Transformer", "Pooling", "Dense", "Normalize"]
    # of sentence_transformers 6 or before: vLLM knows both
    new = r"sentence_transformers\.(base|sentence_transformer)\.modules\.(\w+)\.\w+"
    assert all(module["type"] in TEI_MODULES or re.fullmatch(new, module["type"]) for module in modules)
    assert pooling_of(twins / "embedding", modules) == "MEAN"
    assert read(twins / "embedding", "sentence_bert_config.json")["max_seq_length"] == 64
    with safe_open(twins / "embedding" / modules[2]["path"] / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {"linear.weight", "linear.bias"}


def pooling_of(folder, modules):
    """vLLM's name of the pooling; it takes the last key whose value is true, or a text under `pooling_mode`."""
    names = [
        value if key == "pooling_mode" and isinstance(value, str) else key
        for key, value in read(folder / modules[1]["path"], "config.json").items()
        if value is True or (key == "pooling_mode" and isinstance(value, str))
    ]
    known = {name.replace("pooling_mode_", "").split("_")[0].upper() for name in names}
    return next(name for name in known if name in ("CLS", "LAST", "MEAN"))


def test_rotary_settings_are_in_the_form_that_vllm_and_transformers_share(twins):
    """vLLM reads `rope_parameters`; `rope_theta` beside it would be set as an attribute, which EuroBERT's config allows."""
    config = read(twins / "embedding", "config.json")
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    loaded = AutoConfig.from_pretrained(twins / "embedding")
    loaded.rope_theta = config["rope_parameters"]["rope_theta"]
    loaded.standardize_rope_params()
    loaded.validate_rope()


def test_text_embeddings_inference_does_not_know_the_model_type_and_so_needs_onnx(twins):
    assert read(twins / "embedding", "config.json")["model_type"] not in TEI_MODEL_TYPES


@pytest.mark.slow
def test_the_onnx_folder_has_what_text_embeddings_inference_reads(sources, tmp_path):
    export_model(sources / "embedding", tmp_path / "exported")
    folder = tmp_path / "exported"
    config = read(folder, "config.json")
    kinds = {
        "architectures": list,
        "model_type": str,
        "max_position_embeddings": int,
        "pad_token_id": int,
        "hidden_size": int,
    }
    assert {key: type(config[key]) for key in kinds} == kinds
    assert not config["architectures"][0].endswith("Classification")  # it would be served as a classifier
    pooling = read(folder, "1_Pooling/config.json")  # both flags are required: the form before sentence-transformers 6
    assert (pooling["pooling_mode_cls_token"], pooling["pooling_mode_mean_tokens"]) == (False, True)
    assert type(read(folder, "sentence_bert_config.json")["max_seq_length"]) is int
    assert read(folder, "tokenizer_config.json").get("padding_side", "right") in ("left", "right")
    graph = onnxruntime.InferenceSession(folder / "onnx/model.onnx")
    assert {item.name for item in graph.get_inputs()} == {"input_ids", "attention_mask"}
    outputs = {item.name for item in graph.get_outputs()}
    assert "sentence_embedding" in outputs  # it wins over pooling of `last_hidden_state`, so Dense is in it
    Tokenizer.from_file(str(folder / "tokenizer.json"))
