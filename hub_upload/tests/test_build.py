"""A build publishes one NeoBERT of its own code only, and loses no file that it does not replace."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from building import build
from conftest import change_config, contents, largest_file, reranker_of_modules
from huggingface_hub import ModelCard
from transformers import BertConfig
from verifying import verify

from neobert_hf import MINI_MODEL_PATH, NeoBERTForMaskedLM, NeoBERTForSequenceClassification, NeoBERTModel
from neobert_hf.checkpoints import write_card
from neobert_hf.checkpoints.card import UNKNOWN_LICENSE
from neobert_hf.checkpoints.record import GENERATED
from neobert_hf.embeddings import open_embedding_model, sentence_transformer
from neobert_hf.embeddings.reranking import open_reranker
from neobert_hf.export.graphs import load_graph


def assert_refused(message, model, out, **options):
    """The build raises the error and changes no file in the folder of `out`."""
    before = contents(out.parent)
    with pytest.raises((ValueError, FileExistsError), match=message):
        build(model, out, **options)
    assert contents(out.parent) == before


@pytest.mark.parametrize("name", ["thesis.tex", "checkpoint-500/optimizer.pt", ".git/HEAD", "config.json"])
def test_a_build_is_written_to_a_new_or_empty_folder_only(saved, tmp_path, name):
    (tmp_path / "mine" / name).parent.mkdir(parents=True)
    (tmp_path / "mine" / name).write_text("years of work")
    assert_refused(f"mine holds {name}; choose a new or empty folder", saved, tmp_path / "mine/new/..")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_build_that_fails_leaves_nothing(saved, tmp_path, name):
    with (
        pytest.raises(OSError, match=r"hub cannot be written|File too large"),
        largest_file((saved / name).stat().st_size - 1),
    ):
        build(saved, tmp_path / "hub")
    assert {file.name for file in tmp_path.iterdir()} == {"saved"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["embedding", "reranker", "modules"])
def test_a_model_of_sentence_transformers_is_built_with_all_modules_its_head_and_a_card(saved, tmp_path, kind):
    import sentence_transformers

    if is_reranker := kind in ("reranker", "modules"):
        make = sentence_transformers.CrossEncoder if kind == "reranker" else reranker_of_modules
        model = make(str(saved), num_labels=1)
    else:
        model = sentence_transformer(str(saved), pooling="cls", prompts={"query": "find: "}, normalize=True)
    source = tmp_path / "source"
    model.save_pretrained(str(source))
    if kind == "embedding":  # one folder that embeds and fills masks, as that of the mini model
        NeoBERTForMaskedLM.from_pretrained(saved).save_pretrained(source)
    out = build(source, tmp_path / "hub", model_id="org/name", license="mit")
    if is_reranker:  # tests/checkpoints/test_verify.py has other kinds
        wanted = model.predict([("one two", "three"), ("four", "five")])  # in another process without the package
        assert verify(out)["embedding"]["first_values"] == pytest.approx(wanted.tolist(), abs=1e-5)
    again = type(model)(str(out))
    compute = "predict" if is_reranker else "encode"
    texts = [["the fox", "a house"]] if is_reranker else ["the fox"]
    assert (getattr(again, compute)(texts) == getattr(model, compute)(texts)).all()
    card = (out / "README.md").read_text("utf-8")
    assert '"org/name", trust_remote_code=True)' in card and "license: mit" in card
    if kind == "embedding":
        assert again.prompts["query"] == "find: "
        head = NeoBERTForMaskedLM.from_pretrained(out).decoder.weight
        assert head.equal(NeoBERTForMaskedLM.from_pretrained(saved).decoder.weight)


def test_a_build_of_the_mini_model_has_its_weights_and_is_loaded_in_float32(tmp_path):
    """With bf16, numpy() would refuse what the model returns."""
    mini, out = Path(MINI_MODEL_PATH), build(MINI_MODEL_PATH, tmp_path / "hub", model_id="org/name")
    before, after = (contents(folder) for folder in (mini, out))
    same = [name for name in before if name.endswith("safetensors")]
    assert len(same) == 3 and all(before[name] == after[name] for name in same)
    assert json.loads(after["config.json"])["dtype"] == "float32" and b'"mini"' not in after["README.md"]
    assert {"sources.json", "training_summary.json"} <= after.keys()


def test_the_card_of_a_folder_is_copied_with_what_is_given_and_without_one_a_card_is_written(saved, tmp_path):
    build(saved, tmp_path / "hub", model_id="org/name")
    card = ModelCard.load(tmp_path / "hub/README.md")
    assert card.data.to_dict().keys() == {"library_name", "pipeline_tag", "tags"}  # what is not given is not assumed
    assert "licence is not known" in card.text
    (saved / "README.md").write_text("---\nlicense: [\n---\nwords")
    with pytest.raises(ValueError, match=r"README\.md is no model card"):
        build(saved, tmp_path / "damaged")
    words = f"# My words\n\nLoad {json.dumps(saved.name)}.\n"
    (saved / "README.md").write_text(f"---\nlicense: cc-by-4.0\nlanguage: de\n---\n{words}")
    for given, license in ((None, "cc-by-4.0"), ("mit", "mit")):
        build(saved, tmp_path / license, model_id="org/name", license=given)
        card = ModelCard.load(tmp_path / license / "README.md")
        assert (card.data.license, card.data.language) == (license, "de")
        assert "# My words" in card.text and 'Load "org/name".' in card.text


@pytest.mark.parametrize("card", [None, "generated", "of write_card", "mine"])
def test_a_card_is_written_from_the_record_of_a_training_and_the_words_of_an_author_stay(saved, tmp_path, card):
    facts = {"source": None, "rows": {"reviews.csv": 500}, "settings": {}, "scores": [], "datasets": []}
    (saved / "training.json").write_text(json.dumps(facts))
    (saved / "training_summary.json").write_text('{"init_from": "/home/me/secret"}')
    (saved / "sources.json").write_text("{}")
    if card == "of write_card":
        write_card(saved)
    elif card:
        text = GENERATED[1] if card == "generated" else f"My words. {UNKNOWN_LICENSE[:-1]}"
        (saved / "README.md").write_text(f"---\ntags: [a]\n---\n{text}\n")
    out = build(saved, tmp_path / "hub", model_id="org/name", license="mit", language=["en"])
    text, names = (out / "README.md").read_text("utf-8"), {file.name for file in out.iterdir()}
    assert "license: mit" in text and UNKNOWN_LICENSE not in text
    assert ("reviews.csv" in text) == ("Languages of its texts: en." in text) == (card != "mine")
    assert ("My words." in text) == (card == "mine")
    assert not names & {"training.json", "training_summary.json", "sources.json"}


def test_a_hub_id_is_read_from_the_cache_whose_links_are_its_own(saved, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshot = tmp_path / "cache/models--org--name/snapshots" / ("0" * 40)
    for folder in (snapshot, snapshot.parents[1] / "refs", snapshot.parents[1] / "blobs"):
        folder.mkdir(parents=True)
    (snapshot.parents[1] / "refs/main").write_text("0" * 40)
    for file in saved.iterdir():
        shutil.copy(file, snapshot.parents[1] / "blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    out = build("org/name", tmp_path / "hub", tokenizer=saved)
    assert (out / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()


def adapter(saved):
    import peft

    model = NeoBERTForSequenceClassification.from_pretrained(saved)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["qkv"])).save_pretrained(saved)


def module(**values):
    def change(saved):
        sentence_transformer(str(saved)).save_pretrained(str(saved))
        modules = json.loads((saved / "modules.json").read_text())
        modules[1] |= values
        (saved / "modules.json").write_text(json.dumps(modules))

    return change


def config(**values):
    return lambda saved: change_config(saved, **values)


def embedder(name, text):
    def change(saved):
        module()(saved)
        (saved / name).write_text(text)

    return change


def pickled_module(saved):
    module()(saved)
    torch.save({}, saved / "1_Pooling/pytorch_model.bin")


def router(saved):
    module(type="sentence_transformers.base.modules.Router")(saved)
    (saved / "query_0_Dense").mkdir()
    (saved / "query_0_Dense/config.json").write_text('{"activation_function": "torch.hub.list"}')


def encoder(**values):
    def change(saved):
        NeoBERTModel.from_pretrained(saved).save_pretrained(saved)
        config(**values)(saved)

    return change


WRONG = {
    "a head without weights": (encoder(architectures=["NeoBERTForSequenceClassification"]), {},
     "lacks classifier, dense in the shapes of config.json, so they would be random: the head for classes was never"),
    "an encoder that names no class": (encoder(architectures=None), {}, "lacks decoder in the shapes of config.json"),
    "a callable at the root": (
        embedder("config_sentence_transformers.json", '{"activation_fn": "torch.utils.collect_env.main"}'),
        {},
        "config_sentence_transformers.json of .* names .torch.utils.collect_env.main. as activation_fn",
    ),
    "a callable in a part of a router": (router, {}, "query_0_Dense/config.json of .* names .torch.hub.list. as"),
    "settings that are a list": (embedder("config_sentence_transformers.json", "[]"), {},
     "config_sentence_transformers.json is no JSON object"),
    "modules that are a string": (embedder("modules.json", '"x"'), {}, "modules.json is no list of modules"),
    "a pickled module": (pickled_module, {}, "1_Pooling/pytorch_model.bin is a pickle, which is not opened"),
    "a module at the root": (module(path="/"), {}, "outside its folder|does not exist|is not"),
    "a module outside": (module(path="../outside"), {}, r"names the module .*outside', outside its folder"),
    "an adapter": (adapter, {}, "saved holds an adapter; merge it into its model"),
    "a BERT": (config(**BertConfig(architectures=["BertForMaskedLM"]).to_dict()), {},
     "has the model_type 'bert', and its weights are those of a NeoBERT"),
    "a module of others": (module(type="os.path.X"), {}, 'modules.json of .* names "os.path.X" as type'),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), {}, "holds no tokenizer .*; copy that of its model"),
    "a name with a space": (lambda f: None, {"model_id": "org/na me"}, "Repo id"),
    "a name that goes up": (lambda f: None, {"model_id": "../up"}, "Repo id"),
    "no name": (lambda f: None, {"model_id": ""}, "Repo id"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_published_is_refused_and_nothing_is_written(saved, tmp_path, case):
    change, options, message = WRONG[case]
    change(saved)
    assert_refused(message, saved, tmp_path / "hub", **options)
    assert {file.name for file in tmp_path.iterdir()} == {"saved"}


SENTENCE_TRANSFORMERS = [case for case in WRONG if case.startswith(("a callable", "settings", "modules", "a pickled"))]


@pytest.mark.parametrize("case", [*SENTENCE_TRANSFORMERS, "a module outside"])
@pytest.mark.parametrize("load", [open_embedding_model, open_reranker, load_graph])
def test_what_runs_code_or_opens_a_pickle_is_opened_nowhere(saved, case, load):
    change, _, message = WRONG[case]
    change(saved)
    with pytest.raises(ValueError, match=message) as error:
        load(str(saved))
    assert "\n" not in str(error.value)


def test_a_name_of_a_module_cannot_control_the_terminal(saved):
    module(type="sentence_transformers.\x1b[2JDense")(saved)
    with pytest.raises(ValueError, match="which is no code of sentence-transformers") as error:
        sentence_transformer(str(saved))
    assert "\x1b" not in str(error.value)


@pytest.mark.slow
def test_a_foreign_tokenizer_neither_runs_nor_is_published(saved, tmp_path):
    """The oracle is a clean process with the line of the card: it shows that the poisoned folder runs the foreign code."""
    (tmp_path / "evil").mkdir()
    code = "from transformers import PreTrainedTokenizerFast as P\nclass T(P): pass\n"
    (tmp_path / "evil/code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n{code}")
    settings = json.loads((saved / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": [None, f"{tmp_path / 'evil'}--code.T"]}
    (saved / "tokenizer_config.json").write_text(json.dumps(settings))
    out = build(saved, tmp_path / "hub")
    assert verify(out)["ok"]
    report = verify(saved)
    assert not report["ok"] and "names foreign code: auto_map" in report["error"]
    line = (
        "import os, sys\nfrom transformers import AutoTokenizer\n"
        "for folder in sys.argv[1:]:\n"
        "    AutoTokenizer.from_pretrained(folder, trust_remote_code=True)\n"
        "    print(os.path.exists('ran'))"
    )
    options = {"cwd": tmp_path, "env": os.environ | {"HF_HOME": str(tmp_path)}, "capture_output": True, "text": True}
    run = subprocess.run([sys.executable, "-c", line, str(out), str(saved)], **options)
    assert run.stdout.split() == ["False", "True"]
