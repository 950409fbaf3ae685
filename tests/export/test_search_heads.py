"""Sparse and multi-vector models: exported files and OnnxModel give what sentence-transformers gives, and the definitions."""

import string

import numpy as np
import pytest
import torch
from conftest import SENTENCE
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

import neobert_hf
from neobert_hf.export import OnnxModel, export_model
from neobert_hf.hub import examine

TEXTS = [SENTENCE, "the fox", "", "[CLS] [SEP]", f"{SENTENCE}, " * 5, "dog. red, red sea!"]  # two are cut
RUNTIMES = ("onnxruntime", "openvino")
FP32 = 1e-5  # float32 sums in another order


def transformer(folder, tokenizer, task, **options):
    """A network of one block, whose weights are large enough to show errors, with the length 20."""
    config = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64}
    network = neobert_hf.NeoBERTForMaskedLM(neobert_hf.NeoBERTConfig(len(tokenizer), **config))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Transformer(str(folder), transformer_task=task, max_seq_length=20, **options)


SPARSE = {  # pooling of a sparse model, and whether its queries are weighed without inference
    "max": ({}, False),
    "sum": ({"pooling_strategy": "sum", "activation_function": "log1p_relu"}, False),
    "table": ({"activation_function": "log1p_relu"}, True),
}


@pytest.mark.parametrize("name", [pytest.param("max", marks=pytest.mark.slow), "sum", "table"])
@pytest.mark.filterwarnings("ignore:.*are cut to")
def test_a_sparse_model_gives_the_weights_of_sentence_transformers_and_of_the_definition(name, tokenizer, tmp_path):
    options, has_table = SPARSE[name]
    modules = [transformer(tmp_path / "lm", tokenizer, "fill-mask"), SpladePooling(**options)]
    if has_table:
        table = SparseStaticEmbedding(tokenizer, torch.linspace(-1, 2, len(tokenizer)))
        modules = [Router.for_query_document([table], modules)]
    prompts = {"query": "old sea ", "document": "a "}
    model = SparseEncoder(modules=modules, prompts=prompts, device="cpu", max_active_dims=30 if has_table else None)
    model.save_pretrained(str(tmp_path / "saved"))
    report = export_model(tmp_path / "saved", tmp_path / "out", to=["onnx", "openvino"], int8=True)
    assert report["task"] == "sparse-encoder" and not examine(tmp_path / "out")["findings"]
    lm = neobert_hf.NeoBERTForMaskedLM.from_pretrained(tmp_path / "lm").eval()
    for runtime in RUNTIMES:
        onnx = OnnxModel(tmp_path / "out", runtime=runtime)
        assert onnx.output_names == ["sparse_embedding"]  # the logits, (B, L, V), stay inside
        for is_query, encode in ((True, model.encode_query), (False, model.encode_document)):
            found, wanted = onnx.encode_sparse(TEXTS, is_query, batch_size=4), encode(TEXTS).to_dense().numpy()
            assert found.format == "csr" and found.dtype == np.float32
            np.testing.assert_allclose(found.toarray(), wanted, rtol=0, atol=FP32)
            np.testing.assert_allclose(
                onnx.encode_sparse("the fox", is_query).toarray(), wanted[1:2], rtol=0, atol=FP32
            )
        assert onnx.encode_sparse([]).shape == (0, len(tokenizer))
        onnx.max_active_dims = None
        for text, row in zip(TEXTS, onnx.encode_sparse(TEXTS).toarray()):
            ids = tokenizer("a " + text, truncation=True, max_length=20, return_tensors="pt")["input_ids"]
            logits = lm(ids).logits[0].detach().numpy()
            weights = np.log1p(np.maximum(logits, 0))
            weights = np.log1p(weights) if options.get("activation_function") else weights
            np.testing.assert_allclose(row, weights.sum(0) if name == "sum" else weights.max(0), rtol=FP32, atol=FP32)
        if has_table:
            onnx._run = None  # queries need no graph
            assert OnnxModel.encode_sparse(onnx, "red fox", is_query=True).nnz == 4  # two of the prompt
    with pytest.raises(ValueError, match="has the outputs sparse_embedding, and not token_embeddings"):
        onnx.encode_multi_vector("the fox")


MULTI_VECTOR = {  # expansion of queries, their length and that of documents, and whose punctuation is left out
    "plain": (None, 9, None, ["document"]),
    "fixed": ({"strategy": "fixed", "length": 12}, None, 15, ["query", "document"]),
    "fixed, attended": ({"strategy": "fixed", "length": 12, "attend": True, "token": "[UNK]"}, None, 15, ["document"]),
    "at least": ({"strategy": "min", "length": 9, "attend": True}, 14, None, ["query"]),
}


@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.slow) for n in list(MULTI_VECTOR)[:3]), "at least"]
)
@pytest.mark.filterwarnings("ignore:.*are cut to")
def test_a_multi_vector_model_gives_the_vectors_and_scores_of_sentence_transformers(name, tokenizer, tmp_path):
    expansion, query_length, document_length, tasks = MULTI_VECTOR[name]
    options = {"query_expansion": expansion, "query_length": query_length, "document_length": document_length}
    modules = [transformer(tmp_path / "encoder", tokenizer, "feature-extraction", **options)]
    modules.append(Dense(32, 16, activation_function=torch.nn.Identity(), module_input_name="token_embeddings"))
    modules.append(MultiVectorMask([*string.punctuation, "fox"], skiplist_tasks=tasks))
    modules.append(Normalize(module_input_name="token_embeddings"))
    prompts = {"query": "[Q] ", "document": "[D] "}
    model = MultiVectorEncoder(modules=modules, prompts=prompts, device="cpu", similarity_fn_name="maxsim")
    model.save_pretrained(str(tmp_path / "saved"))
    report = export_model(tmp_path / "saved", tmp_path / "out", to=["onnx", "openvino"], int8=True)
    assert report["task"] == "multi-vector" and not examine(tmp_path / "out")["findings"]
    for runtime in RUNTIMES:
        onnx, found = OnnxModel(tmp_path / "out", runtime=runtime), {}
        for is_query, encode in ((True, model.encode_query), (False, model.encode_document)):
            found[is_query] = onnx.encode_multi_vector(TEXTS, is_query, batch_size=4)
            for vectors, wanted in zip(found[is_query], encode(TEXTS, convert_to_numpy=True), strict=True):
                np.testing.assert_allclose(vectors, wanted, rtol=0, atol=FP32)
            alone = onnx.encode_multi_vector("the fox", is_query)
            np.testing.assert_allclose(alone, found[is_query][1], rtol=0, atol=FP32)
        scores = [[(query @ document.T).max(1).sum() for document in found[False]] for query in found[True]]
        wanted = model.similarity(model.encode_query(TEXTS), model.encode_document(TEXTS))
        np.testing.assert_allclose(scores, wanted, rtol=FP32, atol=FP32)
    with pytest.warns(UserWarning, match=rf"2 of 6 texts are cut to {document_length or 20} tokens"):
        onnx.encode_multi_vector(TEXTS)
