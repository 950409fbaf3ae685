"""A card of each kind is complete, valid and short, and its example runs without the package."""

import ast
import copy
import html
import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import EvalResult, InferenceClient, ModelCard
from huggingface_hub.utils import validate_repo_id
from markdown_it import MarkdownIt
from peft import get_peft_model
from sentence_transformers import CrossEncoder
from transformers import Trainer, TrainingArguments
from transformers.pipelines import SUPPORTED_TASKS
from transformers.utils import logging as transformers_logging

import neobert_hf
from neobert_hf import contextual_sentence_transformer, sentence_transformer
from neobert_hf.embeddings.models import multi_vector_encoder, sparse_encoder
from neobert_hf.finetuning.few_examples import add_head
from neobert_hf.runs.card_files import CARD, check_metadata, editing_card, is_edited, keeping_card
from neobert_hf.runs.cards import CardFacts, eval_results, write_card

HOSTILE = 'a"); __import__("os").system("id") # `|<script>![x](y)\n```\n# title'
HEADS = {
    "masked": ("NeoBERTForMaskedLM", {}),
    "encoder": ("NeoBERTModel", {}),
    "classifier": ("NeoBERTForSequenceClassification", {"id2label": {0: "good", 1: "bad", 2: HOSTILE}}),
    "several": (
        "NeoBERTForSequenceClassification",
        {"num_labels": 60, "problem_type": "multi_label_classification"},
    ),
    "number": ("NeoBERTForSequenceClassification", {"num_labels": 1, "problem_type": "regression"}),
    "pairs": (
        "NeoBERTForSequenceClassification",
        {"id2label": {0: "yes", 1: "no"}, "classifier_pooling": "mean"},
    ),
    "tagger": ("NeoBERTForTokenClassification", {"id2label": {0: "O", 1: "B-PER", 2: "I-PER"}}),
    "answers": ("NeoBERTForQuestionAnswering", {}),
    "choice": ("NeoBERTForMultipleChoice", {}),
}
EMBEDDERS = ("embedding", "sparse", "multi_vector", "contextual", "few", "reranker")
KINDS = (*HEADS, "adapter", *EMBEDDERS)
MINI = Path(neobert_hf.MINI_MODEL_PATH)


def embedder(kind, checkpoint):
    """A model of sentence-transformers, as the package makes it."""
    if kind == "sparse":
        return sparse_encoder(checkpoint)
    if kind == "multi_vector":
        return multi_vector_encoder(checkpoint)
    if kind == "contextual":
        return contextual_sentence_transformer(checkpoint, context_size=8, max_seq_length=32)
    if kind == "reranker":
        return CrossEncoder(checkpoint, num_labels=1, model_kwargs={"ignore_mismatched_sizes": True})
    model = sentence_transformer(checkpoint, prompts={"query": "find: "} if kind == "embedding" else None)
    if kind == "few":
        add_head(model, ["the fox", "a red house", "old sea"] * 2, [0, 1, 2] * 2, ["fox", "house", "sea"])
    return model


@pytest.fixture(scope="module")
def folder(checkpoint, tokenizer, tmp_path_factory):
    """A folder with a saved model of each kind, and its card."""
    root = tmp_path_factory.mktemp("cards")
    source = root / "base"
    base = neobert_hf.NeoBERTForMaskedLM.from_pretrained(checkpoint)
    base.save_pretrained(source)
    tokenizer.save_pretrained(source)
    card = "---\nlicense: cc-by-4.0\nlanguage: de\nbase_model: org/ancestor\n---\n# base\n"
    (source / CARD).write_text(card)
    for kind in KINDS:
        torch.manual_seed(0)
        facts = CardFacts(
            str(source),
            rows={"/home/me/secret/train.csv": 1234, "org/set": None},
            datasets=["org/set"],
            results=eval_results({"eval_f1": 0.5, "eval_runtime": 3.0, "eval_samples_per_second": 7.0}, "train.csv"),
            is_pair=kind == "pairs",
        )
        out, model = root / kind, None
        if kind in HEADS:
            name, options = HEADS[kind]
            getattr(neobert_hf, name).from_pretrained(source, **options).save_pretrained(out)
            tokenizer.save_pretrained(out)
        elif kind == "adapter":
            classifier = neobert_hf.NeoBERTForSequenceClassification.from_pretrained(source, num_labels=2)
            neobert_hf.save_adapter(get_peft_model(classifier, neobert_hf.lora_config("SEQ_CLS", r=2)), out)
            tokenizer.save_pretrained(out)
        else:
            model = embedder(kind, str(source))
            model.save_pretrained(str(out), create_model_card=False)
        assert write_card(out, facts, model)
    return root


def tasks_of_the_hub():
    """Names of tasks that huggingface_hub and transformers know, and the three that only sentence-transformers uses."""
    methods = {name.replace("_", "-") for name in dir(InferenceClient)}
    return methods | set(SUPPORTED_TASKS) | {"sentence-similarity", "text-ranking", "multiple-choice"}


def assert_valid(card):
    """What the Hub checks, as far as its library says it: types, ids, the tasks and the form of the scores."""
    data = card.data.to_dict()
    assert ModelCard(str(card)).data.to_dict() == data
    assert data["pipeline_tag"] in tasks_of_the_hub()
    assert data["library_name"] in ("transformers", "peft", "sentence-transformers")
    check_metadata(data["license"], data["language"])
    for name in (data["base_model"], *data["datasets"]):
        validate_repo_id(name)
    assert data["base_model_relation"] in ("finetune", "adapter")
    assert all(isinstance(tag, str) for tag in data["tags"]) and data["tags"][0].endswith("neobert")
    assert all(isinstance(result, EvalResult) and result.task_type for result in card.data.eval_results)
    assert all(type(result.metric_value) in (int, float) for result in card.data.eval_results)


@pytest.mark.parametrize("kind", KINDS)
def test_a_card_is_valid_and_short_and_says_nothing_of_this_machine(folder, kind):
    text = (folder / kind / CARD).read_text("utf-8")
    card = ModelCard(text)
    assert_valid(card)
    assert (card.data.license, card.data.language, card.data.base_model) == ("cc-by-4.0", ["de"], "org/ancestor")
    assert card.data.base_model_relation == ("adapter" if kind == "adapter" else "finetune")
    assert len(text.encode()) < 20_000 and max(map(len, text.splitlines())) < 2000
    assert str(folder) not in text and "/home" not in text and "secret" not in text and "Infinity" not in text
    assert "train.csv: 1,234 rows" in text and "huggingface.co/datasets/org/set" in text
    assert "| train.csv | F1 | 0.5 |" in text and "samples" not in text and "runtime" not in text
    assert "SwiGLU of width" in text and not is_edited(folder / kind)
    assert "It was trained from base, whose base model is [org/ancestor](https://huggingface.co/org/ancestor)." in text
    for words in ("Languages of its texts: de", "The licence is cc-by-4.0"):
        assert f"{words}, as on the card of the model that the training started from." in text
    assert ("| embedding |" in text) == (kind in ("embedding", "sparse", "multi_vector", "contextual"))
    assert ("| classifier | reads the mean over all tokens |" in text) == (kind == "pairs")


def test_the_card_of_an_adapter_says_before_the_example_what_it_needs(folder):
    before, _, _ = (folder / "adapter" / CARD).read_text("utf-8").partition("```python")
    assert "The repository holds an adapter and its tokenizer, and no model" in before
    assert re.search(
        r"The base model is base, .* which is not on the Hub: give the path of its folder\s+in the", before
    )


def test_a_card_names_the_mini_model_and_a_hostile_title_as_text(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    write_card(tmp_path / "model", CardFacts(str(MINI), language=["de"]))
    card = (tmp_path / "model" / CARD).read_text("utf-8")
    assert "It was trained from the mini model of neobert\\_hf." in card and "Languages of its texts: de." in card
    (tmp_path / CARD).write_text("---\n# a comment\nlicense: mit\n---\n\n# <script>![x](y) & z\\_z\n")
    write_card(tmp_path / "model", CardFacts(str(tmp_path)))
    rendered = MarkdownIt().render(ModelCard.load(tmp_path / "model" / CARD).text)
    assert "It was trained from &lt;script&gt;![x](y) &amp; z_z.</p>" in rendered


def examples(folder):
    """The example of each card, and what the card says that it prints."""
    for kind in (*KINDS, MINI.name):
        text = (folder / kind / CARD).read_text("utf-8")
        code, *_ = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        printed = re.findall(r"^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        yield kind, code, printed[0] if printed else None


def test_the_example_of_each_card_prints_what_the_card_shows_without_the_package(folder, tmp_path):
    (folder / MINI.name).symlink_to(MINI)
    script = """
import contextlib, io, json, sys
sys.modules["neobert_hf"] = None
results = {}
for kind, code in json.load(sys.stdin).items():
    before, printed = set(sys.modules), io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    code_of = [name for name in set(sys.modules) - before if name.startswith("transformers_modules.")]
    results[kind] = [printed.getvalue(), any("modeling_neobert" in name for name in code_of)]
print(json.dumps(results))
"""
    run = subprocess.run(
        [sys.executable, "-B", "-c", script],
        cwd=folder,
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
        input=json.dumps({kind: code for kind, code, _ in examples(folder)}),
        capture_output=True,
        text=True,
    )
    assert not run.returncode, run.stderr
    results = json.loads(run.stdout.splitlines()[-1])
    for kind, code, shown in examples(folder):
        printed, is_remote = results[kind]
        assert printed.strip() and is_remote, kind
        if shown is None:  # sentence-transformers writes the output as comments, with the shapes
            numbers = re.findall(r"\d\.\d{3}", printed)
            assert numbers and all(number in code for number in numbers), kind
        elif kind == MINI.name:  # its scores depend on the processor, their order does not
            words, wanted = ([line.split()[1:] for line in text.splitlines()] for text in (printed, shown))
            assert words == wanted
        elif "```" not in printed:
            assert printed.strip() == shown.strip(), kind


def test_hostile_labels_stay_text(folder):
    """The labels come from files of data; one of them tries to end the code, the cell and the fence."""
    text = (folder / "classifier" / CARD).read_text("utf-8")
    rendered = MarkdownIt().render(ModelCard(text).text)
    assert "<script>" not in rendered and "<img" not in rendered and rendered.count("<h1>") == 1
    assert " ".join(HOSTILE.split())[:60] in html.unescape(rendered)
    adapter = (folder / "adapter" / CARD).read_text("utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", adapter, re.DOTALL | re.MULTILINE)
    assert 'labels = ["LABEL_0", "LABEL_1"]' in code and ast.parse(code)


def test_a_hostile_mask_token_and_a_hostile_file_stay_text(model, tokenizer, tmp_path):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.mask_token = HOSTILE
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    file = HOSTILE.replace("/", "")
    write_card(tmp_path / "model", CardFacts(rows={file: 3}, results=eval_results({"f1": 0.5}, file)))
    card = ModelCard.load(tmp_path / "model" / CARD)
    (code,) = re.findall(r"^```python\n(.*?)^```$", card.text, re.DOTALL | re.MULTILINE)
    calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)}
    assert calls == {"pipeline", "fill_mask", "print"}
    assert f"The capital of France is {HOSTILE}." in [
        node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)
    ]
    rendered = html.unescape(MarkdownIt().enable("table").render(card.text))
    assert f"<td>{' '.join(file.split())}</td>" in rendered and f"<li>{' '.join(file.split())}: 3 rows</li>" in rendered
    assert card.data.eval_results[0].dataset_name == file and rendered.count("<h1>") == 1


def test_what_is_not_given_is_not_assumed_and_a_message_says_so(model, tokenizer, tmp_path, caplog):
    logging.getLogger("neobert_hf").propagate = True
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    write_card(tmp_path, CardFacts(source=str(tmp_path)))
    data = ModelCard.load(tmp_path / CARD).data.to_dict()
    assert set(data) == {"library_name", "pipeline_tag", "tags"}
    assert "names no licence: none was given, nor found at the start; give --license" in caplog.text
    assert "licence is not known" in (tmp_path / CARD).read_text("utf-8")


def test_the_example_leaves_random_numbers_and_verbosity_as_they_were(folder, tmp_path):
    """Of all kinds, an adapter draws the most: for the head of its base model, and for the adapter before it is loaded."""
    adapter = shutil.copytree(folder / "adapter", tmp_path / "adapter")
    before = torch.get_rng_state(), np.random.get_state()[1], random.getstate(), transformers_logging.get_verbosity()
    assert write_card(adapter, CardFacts(str(folder / "base"))) and "It prints" in (adapter / CARD).read_text("utf-8")
    after = torch.get_rng_state(), np.random.get_state()[1], random.getstate(), transformers_logging.get_verbosity()
    assert before[0].equal(after[0]) and (before[1] == after[1]).all() and before[2:] == after[2:]


def test_an_example_that_fails_leaves_the_card_without_output(model, tokenizer, tmp_path, monkeypatch, caplog):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr("transformers.pipeline", lambda *args, **options: 1 / 0)
    logging.getLogger("neobert_hf").propagate = True
    assert write_card(tmp_path, CardFacts())
    text = (tmp_path / CARD).read_text("utf-8")
    assert "It prints" not in text and "```python" in text
    assert "the example of the card did not run (division by zero)" in caplog.text


@pytest.mark.compat
def test_the_card_of_trainer_is_replaced_until_a_person_has_read_it(model, tokenizer, tmp_path):
    """With `--push_to_hub` Trainer writes its card before ours."""
    trainer = Trainer(model, TrainingArguments(str(tmp_path), report_to="none", use_cpu=True))
    trainer.save_model()
    tokenizer.save_pretrained(tmp_path)
    trainer.create_model_card()
    text = (tmp_path / CARD).read_text("utf-8")
    assert "generated_from_trainer" in text and write_card(tmp_path, CardFacts(license="mit"))
    assert "generated_from_trainer" not in (tmp_path / CARD).read_text("utf-8")
    (tmp_path / CARD).write_text(re.sub("<!--.*?-->", "my words", text, flags=re.DOTALL), "utf-8")
    assert not write_card(tmp_path, CardFacts())


@pytest.mark.parametrize("edit", [lambda text: text.replace("# ", "# My "), lambda text: "my words", lambda text: ""])
def test_a_card_that_a_person_edited_stays(model, tokenizer, tmp_path, edit):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert write_card(tmp_path, CardFacts(license="mit"))
    assert write_card(tmp_path, CardFacts(license="apache-2.0"))  # an own card is replaced
    with editing_card(tmp_path / CARD) as card:  # and still counts as own after an evaluation
        card.text += "\n## Evaluation\n"
    assert write_card(tmp_path, CardFacts())
    (tmp_path / CARD).write_text(words := edit((tmp_path / CARD).read_text("utf-8")), "utf-8")
    assert not write_card(tmp_path, CardFacts())
    with keeping_card(tmp_path):
        (tmp_path / CARD).write_text("the card of a library")
    assert (tmp_path / CARD).read_text("utf-8") == words


def test_an_adapter_has_no_card_of_the_library_which_names_folders(folder):
    base = neobert_hf.NeoBERTForSequenceClassification.from_pretrained(folder / "base", num_labels=2)
    adapter = get_peft_model(base, neobert_hf.lora_config("SEQ_CLS", r=2))
    neobert_hf.save_adapter(adapter, folder / "again")
    assert not (folder / "again" / CARD).exists()


@pytest.mark.parametrize(
    "wrong", [{"license": "MIT License"}, {"language": ["en", "English"]}, {"model_id": "a/b/c"}, {"license": ""}]
)
def test_metadata_that_the_hub_refuses_are_refused(wrong):
    with pytest.raises(ValueError, match=r"license=|language=|Repo id"):
        check_metadata(**wrong)


def test_the_card_of_the_mini_model_is_valid_and_sealed():
    text = (MINI / CARD).read_text("utf-8")
    card = ModelCard(text)
    assert (card.data.license, card.data.language, card.data.pipeline_tag) == ("mit", "en", "sentence-similarity")
    assert card.data.eval_results and len(text.encode()) < 20_000 and not is_edited(MINI)
