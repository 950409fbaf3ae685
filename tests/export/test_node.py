"""transformers.js under Node reads the exported folders, and answers as PyTorch does. `make test-runtimes` installs it."""

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import GOLDEN, SENTENCE
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
from transformers import AutoTokenizer, pipeline

import neobert_hf
from neobert_hf.checkpoints.network import AUTO_CLASS_OF
from neobert_hf.export import export_model
from neobert_hf.export.graphs import TASKS
from neobert_hf.export.parity import random_batches
from neobert_hf.finetuning import Tagger
from neobert_hf.model.modeling_neobert import AUTO_CLASSES

HERE = Path(__file__).parent / "node"
FP32 = 1e-5  # of the largest value: another order of summation
INT8 = 0.995  # smallest cosine

# Lengths from 3 tokens to more than the 64 of the tiny models, other scripts, punctuation, names in camel case.
TEXTS = ["x", "Open a file.", "naïve café — λ, ∑; `np.ndarray` readLine"]
TEXTS.append(f"Return the mean of an array. {SENTENCE} {SENTENCE}")
TINY_TEXTS = [SENTENCE, "the fox sleeps", "dog", "a warm red house by the sea and a lazy dog"]
HEADS = {
    "text-classification": neobert_hf.NeoBERTForSequenceClassification,
    "token-classification": neobert_hf.NeoBERTForTokenClassification,
    "question-answering": neobert_hf.NeoBERTForQuestionAnswering,
}
# Models by name, and what is exported of them. The chain of the model "mini" is compared in a test of its own.
TASK_OF = {"mini-mlm": "fill-mask", "plain": "feature-extraction", **{task: task for task in HEADS}}
TASK_OF |= {"golden-masked_lm": "fill-mask", "golden-classifier": "text-classification"}

pytestmark = [
    pytest.mark.runtime,
    pytest.mark.skipif(not (HERE / "node_modules").exists(), reason="needs npm packages: make test-runtimes"),
]


@pytest.fixture(scope="module")
def sources(checkpoint, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    torch.manual_seed(0)
    for task, model_class in HEADS.items():
        labels = {} if task == "question-answering" else {"id2label": dict(enumerate("ABC"))}
        model = model_class.from_pretrained(checkpoint, **labels)
        for name, parameter in model.named_parameters():
            if name in model.new_layers or name.split(".")[0] in model.new_layers:
                torch.nn.init.normal_(parameter, std=0.5)  # so that an error moves the scores
        model.save_pretrained(folder / task)
        tokenizer.save_pretrained(folder / task)
    neobert_hf.NeoBERTForMaskedLM.from_pretrained(checkpoint).save_pretrained(folder / "lm")
    tokenizer.save_pretrained(folder / "lm")
    neobert_hf.sentence_transformer(str(folder / "lm"), prompts={}).save_pretrained(str(folder / "plain"))
    neobert_hf.sparse_encoder(str(folder / "lm")).save_pretrained(str(folder / "sparse-encoder"))
    neobert_hf.multi_vector_encoder(str(folder / "lm")).save_pretrained(str(folder / "multi-vector"))
    ours = {name: folder / name for name in [*HEADS, "plain", "sparse-encoder", "multi-vector"]}
    golden = {f"golden-{name}": GOLDEN / name for name in ("masked_lm", "classifier")}
    return {"mini": Path(neobert_hf.MINI_MODEL_PATH), "mini-mlm": Path(neobert_hf.MINI_MODEL_PATH), **ours, **golden}


@pytest.fixture(scope="module")
def exported(sources, tmp_path_factory):
    """The folder of the exported folders; the mini model has files in int8 too."""
    folder = tmp_path_factory.mktemp("exported")
    for name, source in sources.items():
        task = "fill-mask" if name == "mini-mlm" else None
        export_model(source, folder / name, int8=name.startswith("mini"), task=task)
    return folder


@pytest.fixture(scope="module")
def ask(exported):
    def answers(*jobs):
        command = ["node", "answers.mjs", f"{exported}/"]
        done = subprocess.run(command, cwd=HERE, input=json.dumps(jobs), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return answers


def relative_error(found, wanted):
    return np.abs(np.asarray(found) - np.asarray(wanted)).max() / np.abs(wanted).max()


def cosines(found, wanted):
    found, wanted = np.asarray(found), np.asarray(wanted)
    return (found * wanted).sum(-1) / np.linalg.norm(found, axis=-1) / np.linalg.norm(wanted, axis=-1)


@pytest.mark.parametrize(("name", "texts"), [("mini", TEXTS), ("plain", TINY_TEXTS)])
def test_token_ids_equal_those_of_python(name, texts, sources, ask):
    wanted = AutoTokenizer.from_pretrained(sources[name])(texts, padding=True, truncation=True)
    (found,) = ask({"model": name, "auto": "AutoTokenizer", "inputs": texts})
    assert found["input_ids"] == wanted["input_ids"] and found["attention_mask"] == wanted["attention_mask"]


@pytest.mark.parametrize(("name", "texts"), [("mini", TEXTS), ("plain", TINY_TEXTS)])
def test_feature_extraction_with_a_mean_gives_the_embeddings(name, texts, sources, ask):
    """transformers.js pools `last_hidden_state` itself; the words of mini have weights, and a matrix follows its mean."""
    wanted = SentenceTransformer(str(sources[name]), device="cpu").encode(texts, normalize_embeddings=True)
    dtypes = ["fp32", "q8"] if name == "mini" else ["fp32"]
    options = {"pooling": "mean", "normalize": True}
    jobs = [{"task": "feature-extraction", "model": name, "dtype": dtype, "options": options} for dtype in dtypes]
    batched, *int8 = ask(*({**job, "inputs": [texts]} for job in jobs))
    alone = ask(*({**jobs[0], "inputs": [[text]]} for text in texts))
    assert relative_error(batched, wanted) < FP32
    assert relative_error(np.concatenate(alone), wanted) < FP32
    assert all(cosines(found, wanted).min() > INT8 for found in int8)


@pytest.mark.parametrize("name", TASK_OF)
def test_every_batch_gives_the_outputs_of_torch(name, sources, ask):
    """Padding on either side, one row, one token. What stands at padding means nothing."""
    task = TASK_OF[name]
    kind, outputs = TASKS[task]
    auto_class = AUTO_CLASS_OF[kind]
    model = AUTO_CLASSES[auto_class].from_pretrained(sources[name], dtype=torch.float32).eval()
    batches = random_batches(model.config.vocab_size, 0, 64).values()
    jobs = [{"model": name, "auto": auto_class, "dtype": "fp32", "inputs": rows_of(batch)} for batch in batches]
    for batch, found in zip(batches, ask(*jobs)):
        with torch.inference_mode():
            wanted = model(**{key: torch.from_numpy(values.copy()) for key, values in batch.items()})
        real = slice(None) if task == "text-classification" else batch["attention_mask"] != 0
        for output in outputs:
            assert relative_error(np.asarray(found[output])[real], wanted[output].numpy()[real]) < FP32


@pytest.mark.parametrize("name", ["sparse-encoder", "multi-vector"])
def test_every_batch_gives_the_weights_or_vectors_of_sentence_transformers(name, sources, ask):
    model_class = SparseEncoder if name == "sparse-encoder" else MultiVectorEncoder
    model = model_class(str(sources[name]), device="cpu")
    batches = random_batches(model[0].config.vocab_size, 0, 64).values()
    jobs = [{"model": name, "auto": "AutoModel", "dtype": "fp32", "inputs": rows_of(batch)} for batch in batches]
    feature = "sentence_embedding" if name == "sparse-encoder" else "token_embeddings"
    for batch, found in zip(batches, ask(*jobs)):
        wanted = model({key: torch.from_numpy(values.copy()) for key, values in batch.items()})[feature]
        assert relative_error(found[TASKS[name][1][0]], wanted.detach().numpy()) < FP32


def rows_of(batch):
    return {name: values.tolist() for name, values in batch.items()}


NULL = 3  # `top_k` of all classes, of which null is the default in transformers.js
PIPELINES = {  # task, options there and here, and what an answer names
    "mini-mlm": ("fill-mask", {}, ("token", "sequence")),
    "text-classification": ("text-classification", {"top_k": None}, ("label",)),
    "token-classification": ("token-classification", {"ignore_labels": []}, ("entity",)),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_gives_the_answers_of_transformers_with_their_scores(name, sources, ask):
    task, options, keys = PIPELINES[name]
    text = "Raise an error if the file does not [MASK]." if task == "fill-mask" else TINY_TEXTS[0]
    wanted = pipeline(task, model=str(sources[name]), device="cpu")(text, **options)
    options = {key: NULL if value is None else value for key, value in options.items()}
    job = {"task": task, "model": name, "inputs": [text], "options": options}
    found, *int8 = ask(*({**job, "dtype": dtype} for dtype in ("fp32", "q8")[: 1 + (task == "fill-mask")]))
    assert [[answer[key] for key in keys] for answer in found] == [[answer[key] for key in keys] for answer in wanted]
    np.testing.assert_allclose([answer["score"] for answer in found], [a["score"] for a in wanted], atol=FP32)
    assert all(words[0]["token"] == wanted[0]["token"] for words in int8)


def test_question_answering_gives_the_span_and_its_score(sources, ask):
    question, context = "what sleeps", "the quick fox and the lazy dog"
    task = "question-answering"
    model = neobert_hf.NeoBERTForQuestionAnswering.from_pretrained(sources[task]).eval()
    tokenizer = AutoTokenizer.from_pretrained(sources[task])
    inputs = tokenizer(question, context, return_tensors="pt")
    with torch.inference_mode():
        output = model(**{name: inputs[name] for name in ("input_ids", "attention_mask")})
    first = inputs.sequence_ids().index(1)
    last = first + inputs.sequence_ids().count(1)
    answers = [0, *range(first, last)]  # transformers.js compares the context with [CLS], which stands for no answer
    starts, ends = (logits[0, answers].softmax(0)[1:] for logits in (output.start_logits, output.end_logits))
    spans = starts[:, None] * ends
    start, end = divmod(spans.triu().argmax().item(), last - first)
    words = tokenizer.decode(inputs["input_ids"][0, first + start : first + end + 1])
    (found,) = ask({"task": task, "model": task, "dtype": "fp32", "inputs": [question, context], "options": {}})
    assert found["answer"] == words
    np.testing.assert_allclose(found["score"], spans[start, end].item(), atol=FP32)


def test_the_function_of_the_page_gives_each_word_of_a_long_text_the_tag_of_tagger(sources, exported):
    name, texts = "token-classification", [" ".join(TINY_TEXTS * n) for n in (1, 5, 20)]
    texts.append(f"a brown{'own' * 25} sea " * 5)
    page = (Path(__file__).parents[2] / "docs/exporting.md").read_text("utf-8")
    (snippet,) = (part for part in re.findall(r"```js\n(.*?)```", page, re.DOTALL) if "tagWords" in part)
    script = snippet.replace("models/", f"{exported}/").replace('"exported"', json.dumps(name))
    script += f"console.log(JSON.stringify(await Promise.all({json.dumps(texts)}.map(tagWords))));"
    done = subprocess.run(["node", "--input-type=module", "--eval", script], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tagger = Tagger(sources[name], 64, verbose=False)
    split = tagger.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    words = [[word for word, _ in split(text)] for text in texts]
    wanted = [[{"word": word, "tag": tag} for word, tag in zip(*row)] for row in zip(words, tagger.predict(words))]
    assert json.loads(done.stdout) == wanted and {each["tag"] for each in wanted[2]} == {*"ABC"}
