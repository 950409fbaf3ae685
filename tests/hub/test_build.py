"""A build publishes one NeoBERT of its own code only, and never replaces what it did not write; verify runs no foreign code."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from evaluation_report import write_card_section
from huggingface_hub import ModelCard
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM, PreTrainedModel

from neobert_hf import MINI_MODEL_PATH, NeoBERTForMaskedLM, NeoBERTForSequenceClassification, sentence_transformer
from neobert_hf.finetuning import add_head
from neobert_hf.hub.build import RECORD, BuildArguments, build
from neobert_hf.hub.verify import load_every_class, verify
from neobert_hf.runs.card_files import CARD, is_edited
from neobert_hf.runs.cards import CardFacts, eval_results, write_card


@pytest.fixture
def saved(model, tokenizer, tmp_path):
    """The tiny masked language model as save_pretrained writes it, with a tokenizer."""
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def built(saved, tmp_path):
    """The folder of a first build."""
    return build(BuildArguments(model=str(saved), out=str(tmp_path / "hub")))


def contents(folder):
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def assert_refused(message, **arguments):
    """The build raises the error and changes no file in the folder of `out`."""
    out = Path(arguments["out"])
    before = contents(out.parent)
    with pytest.raises(ValueError, match=message):
        build(BuildArguments(**{name: str(value) for name, value in arguments.items()}))
    assert contents(out.parent) == before


# ---------------------------------------------------------------------------------------- what a build may replace


def test_a_trained_model_is_not_replaced_if_the_arguments_are_swapped(saved, tmp_path):
    trained = shutil.copytree(saved, tmp_path / "trained")
    assert_refused("was not written by a build; choose another folder, or give --overwrite", model=saved, out=trained)


def test_a_model_that_was_trained_in_the_folder_of_a_build_is_not_replaced(saved, built, model):
    model.decoder.bias.data += 1
    model.save_pretrained(built)
    assert_refused("hub holds model.safetensors, which was changed after the last build", model=saved, out=built)
    build(BuildArguments(model=str(saved), out=str(built), overwrite=True))
    assert (built / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["thesis.txt", "checkpoint-500/optimizer.pt", "config.json", "modeling_neobert.py"])
@pytest.mark.parametrize("record", [None, "{}", "[]", "{", '{"thesis.txt": "0"}'])
def test_a_file_that_no_build_wrote_is_not_lost(saved, tmp_path, name, record):
    (tmp_path / "mine" / name).parent.mkdir(parents=True)
    (tmp_path / "mine" / name).write_text("years of work")
    (tmp_path / "mine/config.json").touch()
    if record is not None:
        (tmp_path / "mine" / RECORD).write_text(record)
    assert_refused(
        r"mine holds .*, which was (not written by a|changed after the last) build", model=saved, out=tmp_path / "mine"
    )


def test_a_record_of_other_people_removes_no_file_outside_the_folder(saved, built, tmp_path):
    (tmp_path / "secret").touch()
    record = json.loads((built / RECORD).read_text()) | {"../secret": "0", str(tmp_path / "secret"): "0"}
    (built / RECORD).write_text(json.dumps(record))
    build(BuildArguments(model=str(saved), out=str(built)))
    assert (tmp_path / "secret").exists()


def test_a_file_that_the_last_build_wrote_and_this_one_does_not_is_removed(saved, tmp_path):
    template = saved / "chat_template.jinja"
    template.write_text("{{ messages }}")
    out = build(BuildArguments(model=str(saved), out=str(tmp_path / "hub")))
    assert (out / template.name).exists()
    template.unlink()
    assert not (build(BuildArguments(model=str(saved), out=str(out))) / template.name).exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_card_that_a_person_edited_stays(saved, built, overwrite, caplog):
    arguments = BuildArguments(model=str(saved), out=str(built), model_id="org/other", overwrite=overwrite)
    assert "org/other" in (build(arguments) / CARD).read_text()  # the card of a build is replaced
    (built / CARD).write_text("my words")
    for _ in range(2):
        assert (build(arguments) / CARD).read_text() == "my words"
    assert "README.md is not as it was written here, so it stays" in caplog.text


def test_a_clone_of_an_empty_repository_can_be_built_into(saved, tmp_path):
    (tmp_path / "clone/.git").mkdir(parents=True)
    for name in (".git/HEAD", ".gitattributes", CARD):
        (tmp_path / "clone" / name).write_text("of git")
    out = build(BuildArguments(model=str(saved), out=str(tmp_path / "clone")))
    assert all((out / name).read_text() == "of git" for name in (".git/HEAD", ".gitattributes", CARD))
    assert AutoModelForMaskedLM.from_pretrained(out).num_parameters() > 0


# ---------------------------------------------------------------------------------------- what can be published


@pytest.mark.parametrize("kind", ["embedding", "classes", "reranker"])
def test_a_model_of_sentence_transformers_is_built_with_all_modules_its_head_and_a_card(
    saved, tmp_path, kind, monkeypatch
):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    if kind == "reranker":
        model = sentence_transformers.CrossEncoder(str(saved), num_labels=1)
    else:
        model = sentence_transformer(str(saved), pooling="cls", prompts={"query": "find: "}, normalize=True)
    if kind == "classes":
        add_head(model, ["the fox", "a red house"] * 2, [0, 1] * 2, ["animal", "build|ing"])
    source = tmp_path / "source"
    model.save_pretrained(str(source))
    if kind == "embedding":  # one folder that embeds and fills masks, as that of the mini model
        NeoBERTForMaskedLM.from_pretrained(saved).save_pretrained(source)
    saves, save = [], PreTrainedModel.save_pretrained
    monkeypatch.setattr(
        PreTrainedModel, "save_pretrained", lambda *args, **kwargs: (saves.append(args), save(*args, **kwargs))
    )
    out = build(BuildArguments(model=str(source), out=str(tmp_path / "hub"), model_id="org/name", license="mit"))
    assert len(saves) == (2 if kind == "embedding" else 1)  # a second time with the head that the encoder lacks
    if kind == "reranker":  # tests/hub/test_verify.py has other kinds
        assert verify(out)["ok"]
    again = type(model)(str(out))
    compute = model.predict if kind == "reranker" else model.encode
    texts = [["the fox", "a house"]] if kind == "reranker" else ["the fox"]
    assert (getattr(again, compute.__name__)(texts) == compute(texts)).all()
    card = (out / CARD).read_text("utf-8")
    assert '("org/name", trust_remote_code=True)' in card and "license: mit" in card and len(card) < 20_000
    if kind == "embedding":
        assert again.prompts["query"] == "find: "
        head = NeoBERTForMaskedLM.from_pretrained(out).decoder.weight
        assert head.equal(NeoBERTForMaskedLM.from_pretrained(saved).decoder.weight)
    if kind == "classes":
        assert "animal, build\\|ing." in card and "pipeline_tag: text-classification" in card
    assert build(BuildArguments(model=str(source), out=str(out))) == out
    if kind == "embedding":  # the modules of the earlier build go with it
        assert not (build(BuildArguments(model=str(saved), out=str(out))) / "modules.json").exists()


def test_the_modules_of_a_model_that_no_build_wrote_are_not_mixed_with_another_model(saved, tmp_path):
    pytest.importorskip("sentence_transformers")
    sentence_transformer(str(saved)).save_pretrained(str(tmp_path / "embeddings"))
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"embeddings holds modules\.json, which a build does not replace"):
            build(BuildArguments(model=str(saved), out=str(tmp_path / "embeddings"), overwrite=overwrite))


def test_a_module_of_other_code_is_refused(saved, tmp_path):
    pytest.importorskip("sentence_transformers")
    sentence_transformer(str(saved)).save_pretrained(str(tmp_path / "embeddings"))
    file = tmp_path / "embeddings/modules.json"
    modules = json.loads(file.read_text())
    modules[1]["type"] = "os.path.Pooling"
    file.write_text(json.dumps(modules))
    assert_refused(
        'modules.json of .* names "os.path.Pooling" as type', model=tmp_path / "embeddings", out=tmp_path / "hub"
    )
    modules[1] |= {"type": "sentence_transformers.models.Pooling", "path": "/"}  # no file of another place is searched
    file.write_text(json.dumps(modules))
    with pytest.raises((OSError, ValueError)):
        build(BuildArguments(model=str(tmp_path / "embeddings"), out=str(tmp_path / "hub")))
    assert not (tmp_path / "hub").exists()


def test_licence_language_and_scores_come_from_the_card_of_the_model_and_are_not_assumed(saved, tmp_path):
    build(BuildArguments(model=str(saved), out=str(tmp_path / "hub")))
    card = ModelCard.load(tmp_path / "hub" / CARD)
    assert card.data.license is None and card.data.language is None and "licence is not known" in card.text
    scores = "[{name: 1, results: [{task: {type: 1}, dataset: {name: 2, type: 3}, metrics: [{type: 4, value: {}}]}]}]"
    for index in (scores, "[{name: x, results: [{task: 1, dataset: 2, metrics: 3}]}]", "7"):
        wrong = f"license: [1]\nlanguage: Klingon, mostly\ndatasets: 3\nbase_model: a b\nmodel-index: {index}"
        (saved / CARD).write_text(f"---\n{wrong}\n---\nwords")
        build(BuildArguments(model=str(saved), out=str(tmp_path / "hub")))
        assert ModelCard.load(tmp_path / "hub" / CARD).data.to_dict() == card.data.to_dict()
    (saved / CARD).unlink()
    results = eval_results({"eval_perplexity": 7.25}, "held-out documents")
    facts = CardFacts(None, license="cc-by-4.0", language=["de"], rows={"x/text.txt": 12}, results=results)
    write_card(saved, facts)
    write_card_section(saved / CARD, "measured")
    build(BuildArguments(model=str(saved), out=str(tmp_path / "hub"), model_id="org/name"))
    card = ModelCard.load(tmp_path / "hub" / CARD)
    assert (card.data.license, card.data.language) == ("cc-by-4.0", ["de"])
    assert card.data.eval_results[0].metric_value == 7.25
    for words in ("text.txt: 12 rows", "| 7.25 |", "measured", 'model="org/name"'):
        assert words in card.text
    (saved / CARD).write_text((saved / CARD).read_text().replace("measured", "my words"))
    assert "my words" in (build(BuildArguments(model=str(saved), out=str(tmp_path / "hub"))) / CARD).read_text()


def changed_lines(before, after):
    """Pairs of lines that differ in two cards of equal length, without the seal."""
    lines = [(folder / CARD).read_text("utf-8").splitlines()[:-1] for folder in (before, after)]
    return [pair for pair in zip(*lines, strict=True) if pair[0] != pair[1]]


def test_what_the_card_says_of_the_start_of_the_training_stays(saved, tmp_path):
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / CARD).write_text("---\nlicense: mit\nlanguage: de\n---\n# The start\n")
    write_card(saved, CardFacts(str(tmp_path / "start"), model_id="org/name"))
    out = build(BuildArguments(model=str(saved), out=str(tmp_path / "hub"), model_id="org/name"))
    assert "trained from The start." in (out / CARD).read_text() and not changed_lines(saved, out)


def test_a_build_of_the_mini_model_has_its_bytes_its_card_and_the_files_that_the_card_names(tmp_path):
    pytest.importorskip("sentence_transformers")
    mini = Path(MINI_MODEL_PATH)
    out = build(BuildArguments(model=str(mini), out=str(tmp_path / "hub"), model_id="org/name"))
    before, after = ({str(name): text for name, text in contents(folder).items()} for folder in (mini, out))
    same = [name for name in before if name.endswith(("safetensors", "sources.json", "summary.json"))]
    assert len(same) == 5 and all(before[name] == after[name] for name in same)
    assert (
        json.loads(after["config.json"])["dtype"] == "float32"
    )  # with bf16, numpy() would refuse what the model returns
    assert [new for _, new in changed_lines(mini, out)] == [
        line.replace('"mini"', '"org/name"') for line, _ in changed_lines(mini, out)
    ]
    assert not is_edited(out) and b'"mini"' not in after[CARD]


@pytest.mark.parametrize(
    ("name", "value"), [("license", "MIT License"), ("language", ["English"]), ("model_id", "org/na me")]
)
def test_metadata_that_the_hub_refuses_are_refused_before_anything_is_written(saved, tmp_path, name, value):
    with pytest.raises(ValueError, match=f"{name}=|Repo id"):
        build(BuildArguments(model=str(saved), out=str(tmp_path / "hub"), **{name: value}))
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]


def test_an_adapter_is_refused(saved, tmp_path):
    peft = pytest.importorskip("peft")
    model = NeoBERTForSequenceClassification.from_pretrained(saved)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["qkv"])).save_pretrained(saved)
    assert_refused("saved holds an adapter; merge it into its model", model=saved, out=tmp_path / "hub")


def test_a_folder_of_bert_is_named_as_one(saved, tmp_path):
    shape = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    BertForMaskedLM(BertConfig(vocab_size=96, **shape)).save_pretrained(saved)
    message = (
        "saved holds a BertForMaskedLM of the type bert, which is no NeoBERT; choose a checkpoint of NeoBERTModel, "
    )
    assert_refused(message, model=saved, out=tmp_path / "hub")
    with pytest.raises(ValueError, match="this is a bert, not a NeoBERT"):
        NeoBERTForMaskedLM.from_pretrained(saved)


def test_a_hub_id_is_read_from_the_cache_whose_links_are_its_own(saved, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    cache = tmp_path / "cache/models--org--name"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs/main").write_text("0" * 40)
    (cache / "blobs").mkdir()
    (cache / "snapshots" / ("0" * 40)).mkdir(parents=True)
    for file in saved.iterdir():
        shutil.copy(file, cache / "blobs" / file.name)
        (cache / "snapshots" / ("0" * 40) / file.name).symlink_to(f"../../blobs/{file.name}")
    out = build(BuildArguments(model="org/name", tokenizer=str(saved), out=str(tmp_path / "hub")))
    assert (out / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()
    assert ModelCard.load(out / CARD).data.base_model == "org/name"


# ---------------------------------------------------------------------------------------- foreign code


@pytest.fixture
def evil(tmp_path):
    """A place whose code leaves a file behind, in the form of an `auto_map` that names it."""
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil/code.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast as P\nclass T(P): pass\n"
    )
    return f"{tmp_path / 'evil'}--code.T"


def test_a_foreign_tokenizer_neither_runs_nor_is_published(saved, evil, tmp_path):
    """The oracle is a clean process with the line of the card: it shows that the poisoned folder runs the foreign code."""
    file = saved / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"auto_map": {"AutoTokenizer": [None, evil]}}))
    out = build(BuildArguments(model=str(saved), out=str(tmp_path / "hub")))
    assert verify(out)["ok"]
    report = verify(saved)
    assert (
        not report["ok"] and "tokenizer_config.json names code that is not in the folder: auto_map" in report["error"]
    )
    script = (
        "import os, sys\nfrom transformers import AutoTokenizer\n"
        "for folder in sys.argv[1:]:\n"
        "    AutoTokenizer.from_pretrained(folder, trust_remote_code=True)\n"
        "    print(os.path.exists('ran'))"
    )
    command = [sys.executable, "-c", script, str(out), str(saved)]
    run = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"HF_HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert run.stdout.split() == ["False", "True"]


def test_a_folder_whose_config_names_no_code_is_explained(saved, monkeypatch):
    monkeypatch.setitem(
        sys.modules, "neobert_hf", sys.modules["neobert_hf"]
    )  # restored after the test: it becomes None
    config = json.loads((saved / "config.json").read_text())
    del config["auto_map"]
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match=r"config\.json names no code \(auto_map\); build the folder"):
        load_every_class(str(saved))


def test_a_target_that_ends_in_two_dots_is_the_folder_that_it_names(tmp_path, checkpoint, tokenizer):
    """Its last part is no name: a build would move the files of the folder below."""
    below = tmp_path / "project" / "below"
    below.mkdir(parents=True)
    (below / "thesis.txt").write_text("mine")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    out = str(below / "..")
    with pytest.raises(ValueError, match=r"thesis\.txt, which was not written by a build"):
        build(BuildArguments(model=str(checkpoint), tokenizer=str(tmp_path / "tokenizer"), out=out))
    build(BuildArguments(model=str(checkpoint), tokenizer=str(tmp_path / "tokenizer"), out=out, overwrite=True))
    assert (below / "thesis.txt").read_text() == "mine" and (tmp_path / "project" / "config.json").is_file()
