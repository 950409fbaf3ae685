"""Sparse and multi-vector models: exported files and OnnxModel give what sentence-transformers and the definitions give."""

import string

import numpy as np
import pytest
import torch
from conftest import SENTENCE, new_encoder
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

import neobert_hf
from neobert_hf.checkpoints import examine
from neobert_hf.export import OnnxModel, export_model

TEXTS = [SENTENCE, "the fox", "", "[CLS] [SEP]", f"{SENTENCE}, " * 5, "dog. red, red sea!"]  # two are cut
FP32 = {"rtol": 1e-5, "atol": 1e-5}  # float32 sums in another order
pytestmark = pytest.mark.filterwarnings("ignore:.*are truncated to")


@pytest.fixture
def network(tokenizer, tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 96, "decoder_init_range": 0.2}
    return str(new_encoder(tmp_path / "network", tokenizer, **sizes))


def exported(model, folder, int8=True):
    """The exported model in each runtime, with the functions of sentence-transformers for queries and documents."""
    model.save_pretrained(str(folder / "saved"))
    report = export_model(folder / "saved", folder / "out", to=["onnx", "openvino"], int8=int8)
    assert not int8 or report["files"]["onnx/model_quantized.onnx"]["smallest_cosine"] > 0.92
    assert not examine(folder / "out")["findings"]
    roles = ((True, model.encode_query), (False, model.encode_document))
    return [(OnnxModel(folder / "out", runtime=name), roles) for name in ("onnxruntime", "openvino")]


SPARSE = {"max": {}, "sum": {"pooling_strategy": "sum"}, "twice": {"activation_function": "log1p_relu"}}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["max", "sum", "twice"])
def test_a_sparse_model_gives_the_weights_of_sentence_transformers_and_of_the_definition(network, tmp_path, name):
    modules = [Transformer(network, transformer_task="fill-mask", max_seq_length=20), SpladePooling(**SPARSE[name])]
    if name == "twice":  # and queries without inference
        table = SparseStaticEmbedding(modules[0].tokenizer, torch.linspace(-1, 2, len(modules[0].tokenizer)))
        modules = [Router.for_query_document([table], modules)]
    options = {"prompts": {"query": "old sea ", "document": "a "}, "max_active_dims": 30 if name == "sum" else None}
    model = SparseEncoder(modules=modules, device="cpu", **options)
    lm = neobert_hf.NeoBERTForMaskedLM.from_pretrained(network).eval()
    for onnx, roles in exported(model, tmp_path):
        assert onnx.output_names == ["sparse_embedding"]  # the logits, (B, L, V), stay inside
        for is_query, encode in roles:
            found, wanted = onnx.encode_sparse(TEXTS, is_query, batch_size=4), encode(TEXTS).to_dense().numpy()
            assert (found.format, found.dtype) == ("csr", np.float32)
            np.testing.assert_allclose(found.toarray(), wanted, **FP32)
            np.testing.assert_allclose(onnx.encode_sparse("the fox", is_query).toarray(), wanted[1:2], **FP32)
        assert onnx.encode_sparse([]).shape == (0, len(model.tokenizer))
        onnx.max_active_dims = None
        for text, row in zip(TEXTS, onnx.encode_sparse(TEXTS).toarray()):
            ids = model.tokenizer(f"a {text}", truncation=True, max_length=20, return_tensors="pt").input_ids
            weights = np.log1p(np.maximum(lm(ids).logits[0].detach().numpy(), 0))
            weights = {"max": weights.max(0), "sum": weights.sum(0)}.get(name, np.log1p(weights).max(0))
            np.testing.assert_allclose(row, weights, **FP32)
    with pytest.raises(ValueError, match="has the outputs sparse_embedding, and not token_embeddings"):
        onnx.encode_multi_vector("the fox")


MULTI_VECTOR = {  # expansion of queries, their length and that of documents, and whose punctuation is left out
    "plain": (None, 9, None, ["document"]),
    "fixed": ({"strategy": "fixed", "length": 12}, None, 15, ["query", "document"]),
    "fixed, attended": ({"strategy": "fixed", "length": 12, "attend": True, "token": "[UNK]"}, None, 15, ["document"]),
    "at least": ({"strategy": "min", "length": 9, "attend": True}, 14, None, ["query"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(pytest.param(n, marks=pytest.mark.slow) for n in [*MULTI_VECTOR][:3]), "at least"])
def test_a_multi_vector_model_gives_the_vectors_and_scores_of_sentence_transformers(network, tmp_path, name):
    expansion, query_length, document_length, tasks = MULTI_VECTOR[name]
    options = {"query_expansion": expansion, "query_length": query_length, "document_length": document_length}
    modules = [Transformer(network, max_seq_length=20, **options)]
    if name != "plain":
        modules.append(Dense(64, 48, activation_function=torch.nn.Identity(), module_input_name="token_embeddings"))
    modules.append(MultiVectorMask([*string.punctuation, "fox"], skiplist_tasks=tasks))
    modules.append(Normalize(module_input_name="token_embeddings"))
    prompts = {"query": "[Q] ", "document": "[D] "}
    model = MultiVectorEncoder(modules=modules, prompts=prompts, device="cpu", similarity_fn_name="maxsim")
    for onnx, roles in exported(model, tmp_path, int8=name == "plain"):
        both = {}
        for is_query, encode in roles:
            both[is_query] = onnx.encode_multi_vector(TEXTS, is_query, batch_size=4)
            for vectors, wanted in zip(both[is_query], encode(TEXTS, convert_to_numpy=True), strict=True):
                np.testing.assert_allclose(vectors, wanted, **FP32)
            np.testing.assert_allclose(onnx.encode_multi_vector("the fox", is_query), both[is_query][1], **FP32)
        scores = [[(query @ document.T).max(1).sum() for document in both[False]] for query in both[True]]
        wanted = model.similarity(model.encode_query(TEXTS), model.encode_document(TEXTS))
        np.testing.assert_allclose(scores, wanted, **FP32)
    with pytest.warns(UserWarning, match=rf"2 of 6 texts are truncated to {document_length or 20} tokens"):
        onnx.encode_multi_vector(TEXTS)
