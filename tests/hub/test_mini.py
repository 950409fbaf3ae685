"""The model inside the package is small and complete, and its card states the measured results."""

import hashlib
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline

pytest.importorskip(
    "sentence_transformers", reason="the mini model embeds by sentence-transformers (pip install -e .[embed])"
)

from sentence_transformers import SentenceTransformer

import neobert_hf
from neobert_hf import NeoBERTForMaskedLM, sentence_transformer
from neobert_hf.embeddings.distillation import TEACHER
from neobert_hf.embeddings.models import partial_whitening
from neobert_hf.hub import mini
from neobert_hf.hub.mini import MiniArguments, check_out, write_card, write_model

FOLDER = Path(neobert_hf.MINI_MODEL_PATH)


def test_embedding_model_and_masked_model_load_completely_from_one_folder_of_at_most_24_megabytes():
    for auto_class in (AutoModel, AutoModelForMaskedLM):
        model, loading = auto_class.from_pretrained(FOLDER, output_loading_info=True)
        assert not loading["missing_keys"] and not loading["mismatched_keys"]
        assert not set(loading["unexpected_keys"]) - {"decoder.weight", "decoder.bias"}
    assert sum(file.stat().st_size for file in FOLDER.rglob("*")) <= 24e6
    assert len(AutoTokenizer.from_pretrained(FOLDER)) == model.config.vocab_size


@pytest.mark.compat
def test_stock_calls_load_the_bf16_weights_in_float32():
    """In bf16 `.numpy()` would refuse the states, and training would round each step away."""
    assert {each.dtype for each in load_file(FOLDER / "model.safetensors").values()} == {torch.bfloat16}
    sentences = SentenceTransformer(str(FOLDER))
    models = [each.from_pretrained(FOLDER) for each in (AutoModel, AutoModelForSequenceClassification)]
    models += [pipeline(task, str(FOLDER)).model for task in ("fill-mask", "feature-extraction")]
    for model in (*models, sentences, sentence_transformer(str(FOLDER))):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert models[0](torch.tensor([[2, 100, 3]])).last_hidden_state.detach().numpy().dtype == np.float32
    assert sentences.encode("a", output_value="token_embeddings").numpy().dtype == np.float32


def test_the_model_fills_masks_in_documentation():
    """Its accuracy on held-out documents is on the card, and a test below reads it; here a person can judge the words."""
    fill = pipeline("fill-mask", str(FOLDER), top_k=10)
    sentences = {
        "Return a new [MASK] of the given shape and type, filled with zeros.": "array",
        "If the file does not [MASK], FileNotFoundError is raised.": "exist",
        "Convert a string to a floating point [MASK].": "number",
        "Returns True if the two objects are [MASK], otherwise False.": "equal",
    }
    found = [answer in {each["token_str"] for each in fill(text)} for text, answer in sentences.items()]
    assert sum(found) >= 3


def test_identifiers_are_words_for_the_shipped_tokenizer_in_every_version_of_transformers():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert tokenizer.tokenize("HTTPServer") == tokenizer.tokenize("http server")
    assert tokenizer.tokenize("IntervalArray.get_file") == tokenizer.tokenize("interval array . get _ file")
    assert json.loads((FOLDER / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_the_model_finds_answers_in_other_words():
    answers = {
        "remove the last element": "list.pop(index=-1)\nIf the list is empty, IndexError is raised.",
        "how many rows and columns are there": "DataFrame.shape\nA tuple with the dimensions of the frame.",
        "open a network connection": "socket.connect(address)\nThe format of address depends on the address family.",
        "wait for some seconds": "time.sleep(secs)\nThe argument may be a floating point number.",
        "write an object to a file": "json.dump(obj, fp)\nSerialize to a stream.",
    }
    model = SentenceTransformer(neobert_hf.MINI_MODEL_PATH)
    found = model.similarity(model.encode(list(answers)), model.encode(list(answers.values()))).argmax(1)
    assert (found.numpy() == np.arange(len(answers))).sum() >= 4


def test_the_card_states_the_measured_results_and_no_local_paths():
    card, summary = (FOLDER / "README.md").read_text("utf-8"), (FOLDER / "training_summary.json").read_text("utf-8")
    measured = json.loads(summary)["measured"]
    accuracy, retrieval = measured["masked_accuracy"], measured["retrieval"]
    assert accuracy["mini NeoBERT"] >= 0.33 > accuracy["bigram model (the more confident neighbour)"]
    assert retrieval["mini NeoBERT"]["recall@10"] >= 0.97 * retrieval["all-MiniLM-L6-v2, its teacher"]["recall@10"]
    assert all(
        f" {share:.1%} |" in card for share in [*accuracy.values(), *measured["masked_accuracy_entries"].values()]
    )
    assert all(f" {value:.3f} |" in card for scores in retrieval.values() for value in scores.values())
    for text in (card, summary, (FOLDER / "config.json").read_text("utf-8")):
        assert "auto_map" not in text and "runs/" not in text and "/home" not in text


@pytest.mark.parametrize(
    "on_card, in_table", [("mini NeoBERT", "mini"), ("all-MiniLM-L6-v2, its teacher", "all-MiniLM-L6-v2")]
)
def test_the_card_and_the_table_beside_the_teacher_have_the_same_figures_at_the_same_length(on_card, in_table):
    measured = json.loads((FOLDER / "training_summary.json").read_text("utf-8"))["measured"]
    rows = json.loads((FOLDER.parents[2] / "benchmarks/results/embeddings_cpu_float32.json").read_text("utf-8"))["rows"]
    wanted = {"model": in_table, "max_length": measured["max_seq_length"], "questions": "as they are"}
    (row,) = [{name.lower(): value for name, value in each.items()} for each in rows if wanted.items() <= each.items()]
    found = measured["retrieval"][on_card]
    # on another processor up to 3 of 3,471 queries may find another document
    assert {name: row[name] for name in found} == pytest.approx(found, abs=1e-3)


def test_the_evaluation_on_the_card_is_that_of_the_shipped_weights():
    from neobert_hf.embeddings.models import hash_of_weights
    from neobert_hf.evaluation.pseudo_perplexity import load_masked_model

    result = json.loads((FOLDER.parents[2] / "benchmarks/results/evaluation_cpu_float32.json").read_text("utf-8"))
    assert result["weights"] == hash_of_weights(load_masked_model(str(FOLDER)))
    card = (FOLDER / "README.md").read_text("utf-8")
    assert all(f"{task['mean']:.1f} ± {task['standard_deviation']:.1f}" in card for task in result["glue"])


def test_an_installed_package_has_every_file_of_the_model(tmp_path):
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=FOLDER.parents[2], check=True, capture_output=True)
    built = {file.relative_to(tmp_path / "neobert_hf/mini") for file in (tmp_path / "neobert_hf/mini").rglob("*.*")}
    assert built == {file.relative_to(FOLDER) for file in FOLDER.rglob("*.*")}


def test_a_build_replaces_nothing_but_an_earlier_build(tmp_path):
    """With `--out src/neobert_hf`, one level too high, the build must not touch the model's source."""
    check_out(FOLDER)
    check_out(tmp_path / "new")
    source = tmp_path / "modeling_neobert.py"
    source.write_text("the model's source")
    with pytest.raises(ValueError, match="holds files that this command did not write"):
        check_out(tmp_path)
    with pytest.raises(ValueError, match="holds files that this command did not write"):
        check_out(FOLDER.parent)
    assert source.read_text() == "the model's source"


@pytest.mark.parametrize(
    "parts",
    [
        ("stages", "sources", "measured", "num_averaged"),
        ("stages", "sources", "measured"),
        ("pretraining", "contrastive", "measured"),
    ],
)
def test_a_build_may_replace_a_mini_model_of_an_earlier_version(tmp_path, parts):
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "training_summary.json").write_text(json.dumps(dict.fromkeys(parts)))
    check_out(tmp_path)


@pytest.fixture
def stage(tmp_path, tokenizer, tiny_config):
    """A folder as examples/distill_embeddings.py writes it: embedding model, decoder, tokenizer."""
    folder = tmp_path / "stage"
    language_model = NeoBERTForMaskedLM(tiny_config)
    language_model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sentence_transformer(str(folder), max_seq_length=16).save_pretrained(str(folder))
    language_model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts():
    """More texts than the tiny model has dimensions, of which each has "the" and one in three "fox"."""
    words = ["quick", "brown", "jumps", "over", "dog", "lazy", "warm", "red", "house", "sea"]
    words += ["and", "then", "it", "sleeps", "in", "a", "by", "old", "q", "w", "f", "j"]
    rng = np.random.default_rng(2)
    return [" ".join(["the", *["fox"] * (i % 3 == 0), *rng.choice(words, rng.integers(1, 9))]) for i in range(300)]


def test_the_written_folder_embeds_and_fills_masks_without_code_and_under_a_tokenizer_class_of_every_version(
    stage, texts, tmp_path
):
    write_model([str(stage)], texts, tmp_path / "out")
    model = SentenceTransformer(str(tmp_path / "out"))
    assert {each.dtype for each in load_file(tmp_path / "out/model.safetensors").values()} == {torch.bfloat16}
    assert model.dtype == torch.float32 and model.max_seq_length == 16
    plain = SentenceTransformer(str(stage), model_kwargs={"dtype": torch.bfloat16}).float()  # the same rounded weights
    states = plain.encode("the fox", output_value="token_embeddings").numpy()  # [CLS] the fox [SEP]
    weights = [math.log(301 / (count + 0.5)) for count in (300, 300, 100, 300)]  # of 300 texts
    projection = load_file(tmp_path / "out/1_Dense/model.safetensors")["linear.weight"].float().numpy()
    expected = np.average(states, axis=0, weights=weights) @ projection
    # the folder has the weights in bfloat16, whose rounding changes each by at most 2^-9
    np.testing.assert_allclose(model.encode("the fox"), expected, atol=2e-3 * np.abs(states).max())
    assert len(pipeline("fill-mask", str(tmp_path / "out"))("the [MASK]")) == 5
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "auto_map" not in config and not list((tmp_path / "out").glob("*.py"))
    written = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert model.tokenizer.tokenize("theFox") == model.tokenizer.tokenize("the fox")
    saved = json.loads((tmp_path / "out/tokenizer.json").read_text())
    assert saved["truncation"] is None and saved["padding"] is None


def test_the_embeddings_of_the_written_folder_are_whitened_in_part(stage, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(mini, "best_dtype", lambda: torch.float32)
    write_model([str(stage)], texts, tmp_path / "out")
    weights = json.loads((tmp_path / "out/2_WordWeights/config.json").read_text())["word_weights"]
    expected = partial_whitening(sentence_transformer(str(tmp_path / "out"), token_weights=weights).encode(texts))
    found = load_file(tmp_path / "out/1_Dense/model.safetensors")["linear.weight"]
    torch.testing.assert_close(found, torch.tensor(expected).bfloat16(), atol=1e-4, rtol=2**-7)  # one step of bf16


def test_the_mean_of_the_parameters_of_several_stages_ships(stage, texts, tiny_config, tmp_path):
    folders, states = [], []
    for seed in (0, 1, 2):
        torch.manual_seed(seed)
        shutil.copytree(stage, folder := tmp_path / f"stage-{seed}")
        model = NeoBERTForMaskedLM(tiny_config)
        model.save_pretrained(folder)
        folders.append(str(folder))
        states.append(model.state_dict())
    config = json.loads((folder / "config.json").read_text())
    del config["auto_map"]  # a stage that was saved without its code
    (folder / "config.json").write_text(json.dumps(config))
    write_model(folders, texts, tmp_path / "out")
    shipped = load_file(tmp_path / "out/model.safetensors")
    assert set(shipped) == set(states[0])
    for name, found in shipped.items():
        expected = torch.stack([state[name] for state in states]).mean(0)
        torch.testing.assert_close(
            found, expected.bfloat16(), atol=0, rtol=2**-7
        )  # one step of bf16: two orders of a sum


@pytest.fixture
def shallow_and_deep(stage, tiny_config, tmp_path):
    """Folders of one stage, and of two later ones with half as many blocks more."""
    folders = []
    for depth in (4, 6, 6):
        tiny_config.num_hidden_layers = depth
        torch.manual_seed(len(folders))
        shutil.copytree(stage, folder := tmp_path / f"stage-{len(folders)}")
        NeoBERTForMaskedLM(tiny_config).save_pretrained(folder)
        folders.append(str(folder))
    return folders


def test_a_stage_with_fewer_blocks_enters_the_mean_as_the_start_of_the_deeper_ones(shallow_and_deep, texts, tmp_path):
    write_model(shallow_and_deep, texts, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["num_hidden_layers"] == 6
    shallow, *deep = (load_file(f"{folder}/model.safetensors") for folder in shallow_and_deep)
    blocks = "model.transformer_encoder."
    for name, found in load_file(tmp_path / "out/model.safetensors").items():
        first = shallow.get(name)
        if name.startswith(blocks):
            number, part = name.removeprefix(blocks).split(".", 1)
            first = shallow[f"{blocks}{(0, 0, 1, 2, 2, 3)[int(number)]}.{part}"]
            if number in "14" and part in ("wo.weight", "ffn.w3.weight"):
                first = torch.zeros_like(first)  # the new blocks begin without effect
        expected = torch.stack([first, *(state[name] for state in deep)]).mean(0).bfloat16()
        torch.testing.assert_close(found, expected, atol=0, rtol=2**-7)  # one step of bf16: two orders of a sum
    assert len(pipeline("fill-mask", str(tmp_path / "out"))("the [MASK]")) == 5


def test_a_shallow_stage_after_a_deeper_one_has_no_mean_with_it(shallow_and_deep):
    with pytest.raises(ValueError, match="have 6, 6, 4 layers; give the stages in order of training"):
        mini.mean_model(shallow_and_deep[::-1])


def test_stages_of_different_architectures_or_vocabularies_have_no_mean(stage, tiny_config, tmp_path):
    message = "have different configurations or vocabularies; average stages of one training"
    shutil.copytree(stage, other := tmp_path / "other")
    tiny_config.num_attention_heads //= 2
    NeoBERTForMaskedLM(tiny_config).save_pretrained(other)
    with pytest.raises(ValueError, match=message):
        mini.mean_model([str(stage), str(other)])
    shutil.copytree(stage, words := tmp_path / "words")
    tokenizer = json.loads((words / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["the"], vocab["fox"] = vocab["fox"], vocab["the"]
    (words / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=message):
        mini.mean_model([str(stage), str(words)])


def test_the_last_stage_ships_or_the_mean_of_those_whose_numbers_are_given(stage, corpus, tmp_path, monkeypatch):
    (stage / "training_summary.json").write_text(json.dumps(STAGE))
    averaged = []

    def write_model(folders, *_):
        averaged.append([Path(folder).name for folder in folders])
        raise KeyError

    monkeypatch.setattr(mini, "write_model", write_model)
    folders = [str(shutil.copytree(stage, tmp_path / name)) for name in "abc"]
    for numbers in ([], [3, 2], [1, 3, 1]):
        with pytest.raises(KeyError):
            mini.build(MiniArguments(stages=folders, corpus=str(corpus), averaged=numbers, out=f"{tmp_path}/out"))
    assert averaged == [["c"], ["b", "c"], ["a", "a", "c"]]


def test_a_stage_names_its_start_if_this_is_not_the_stage_before(stage, tmp_path):
    """Stages that differ in the seed only begin from the same one."""
    folders = [str(shutil.copytree(stage, tmp_path / name)) for name in "abcdefg"]
    starts = [None, folders[0], folders[1], folders[1], "runs/other", None]
    for folder, start in zip(folders, starts):
        weights = Path(folder, "model.safetensors")
        weights.write_bytes(Path(folder).name.encode())  # not read as weights
        hashes = {"runs/texts.jsonl": "0" * 64}
        if start is not None:
            content = Path(start, "model.safetensors").read_bytes() if start in folders else b"other"
            hashes[f"{start}/model.safetensors"] = hashlib.sha256(content).hexdigest()
        run = {"arguments": {"model_name_or_path": start}, "sha256": hashes}
        Path(folder, "run.json").write_text(json.dumps(run))
    for folder in folders:  # the last one has no run.json
        Path(folder, "training_summary.json").write_text(json.dumps(STAGE))
    stages, _ = mini.read_stages(MiniArguments(stages=folders, corpus=""))
    texts = [mini.stage_text(number, each).partition("1,000 steps")[0] for number, each in enumerate(stages, 1)]
    assert texts == ["1. ", "2. ", "3. ", "4. From stage 2: ", "5. From other: ", "6. From a new model: ", "7. "]


@pytest.fixture
def build_and_stage(stage, tmp_path):
    """Folders of a build from two stages, and of a stage that began from it."""
    build, later = (shutil.copytree(stage, tmp_path / name) for name in ("build", "later"))
    written = {
        "stages": [STAGE, STAGE | {"begins_from": "stage 1"}],
        "sources": {},
        "measured": {},
        "averaged": [1, 1, 2],
    }
    (build / "training_summary.json").write_text(json.dumps(written))
    (later / "training_summary.json").write_text(json.dumps(STAGE))
    weights = hashlib.sha256((build / "model.safetensors").read_bytes()).hexdigest()
    run = {"arguments": {"model_name_or_path": "mini"}, "sha256": {"mini/model.safetensors": weights}}
    (later / "run.json").write_text(json.dumps(run))
    return [str(build), str(later)]


def test_a_training_that_continues_a_build_has_its_stages_its_mean_and_the_new_ones(build_and_stage):
    stages, folders = mini.read_stages(MiniArguments(stages=build_and_stage, corpus=""))
    texts = [mini.stage_text(number, each) for number, each in enumerate(stages, 1)]
    assert [text.partition("1,000 steps")[0] for text in texts] == [
        "1. ",
        "2. ",
        "3. The mean of the parameters after stages 1 (weight 2) and 2.",
        "4. ",  # from stage 3, the one before
    ]
    assert stages[-1]["begins_from"] == "stage 3"
    assert folders == [None, None, *build_and_stage]


def test_a_build_behind_stages_that_are_not_its_own_is_refused(build_and_stage):
    with pytest.raises(ValueError, match=r"build is no stage .*a mean of 2 stages, which are not those before it"):
        mini.read_stages(MiniArguments(stages=build_and_stage[::-1], corpus=""))


def test_a_build_behind_its_own_stages_is_their_mean_and_all_have_folders(build_and_stage, stage, tmp_path):
    build, later = build_and_stage
    second = shutil.copytree(stage, tmp_path / "second")
    stages, folders = mini.read_stages(MiniArguments(stages=build_and_stage, corpus=""))
    written = {"stages": stages, "sources": {}, "measured": {}, "averaged": [3, 4]}
    (second / "training_summary.json").write_text(json.dumps(written))
    found, found_folders = mini.read_stages(MiniArguments(stages=[build, later, str(second)], corpus=""))
    assert found == [*stages, {"averaged": [3, 4]}] and found_folders == [*folders, str(second)]
    alone, alone_folders = mini.read_stages(MiniArguments(stages=[str(second)], corpus=""))
    assert alone == found and alone_folders == [None] * 4 + [str(second)]


def test_the_embeddings_of_a_build_truncate_texts_to_the_given_length(stage, texts, tmp_path):
    assert write_model([str(stage)], texts, tmp_path / "out", 9).max_seq_length == 9
    assert (
        SentenceTransformer(str(tmp_path / "out")).encode("the fox " * 9, output_value="token_embeddings").shape[0] == 9
    )


def test_the_mean_can_have_the_model_of_a_build_but_not_the_stages_in_it(
    build_and_stage, corpus, tmp_path, monkeypatch
):
    averaged = []
    monkeypatch.setattr(mini, "write_model", lambda folders, *_: averaged.extend(folders) or 1 / 0)
    options = dict(stages=build_and_stage, corpus=str(corpus), out=f"{tmp_path}/out")
    with pytest.raises(ZeroDivisionError):
        mini.build(MiniArguments(averaged=[4, 3], **options))
    assert averaged == build_and_stage
    with pytest.raises(
        ValueError, match=r"averaged has 2, but --stages has no folders of these numbers; it has 3 \(.*build\)"
    ):
        mini.build(MiniArguments(averaged=[2, 4], **options))


@pytest.mark.parametrize(
    "teachers, said", [({}, "128 tokens."), ({"teacher_max_seq_length": 64}, "128 tokens, for the teacher to 64.")]
)
def test_the_card_says_at_which_length_student_and_teacher_truncate_texts(teachers, said):
    assert f"Texts truncated to {said} Seed" in mini.stage_text(1, STAGE | {"max_seq_length": 128} | teachers)


@pytest.mark.parametrize("run", ["[]", "{}", '{"arguments": {"model_name_or_path": "a"}, "sha256": null}', "{"])
def test_a_stage_whose_run_json_is_damaged_is_refused(stage, run):
    (stage / "training_summary.json").write_text(json.dumps(STAGE))
    (stage / "run.json").write_text(run)
    with pytest.raises(ValueError, match="stage is no stage"):
        mini.read_stages(MiniArguments(stages=[str(stage)], corpus=""))


def test_masks_are_measured_on_packages_and_on_entries_that_are_held_out(stage, corpus, tokenizer, monkeypatch):
    lines = [json.dumps({"text": text}) for text in ("the quick fox", "a brown dog", "the lazy dog", "the fox")]
    (corpus / "held_out_packages.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(mini, "MASKED_DOCUMENTS", 3)
    seen = []
    monkeypatch.setattr(mini, "masked_accuracy", lambda model, batches: seen.extend(batches) or 0.5)
    measured = mini.measure_masks(stage, tokenizer, MiniArguments(stages=[], corpus=str(corpus), num_pseudo=1))
    assert (measured["num_held_out"], measured["num_held_out_entries"]) == (3, 1)
    for batch, texts in zip(seen, (["the quick fox", "a brown dog", "the lazy dog"], ["the fox"]), strict=True):
        tokens = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])[0].tolist()
        assert tokens == [each for text in texts for each in tokenizer(text)["input_ids"]]


@pytest.mark.parametrize("number", [-1, 0, 2])
def test_an_averaged_stage_that_is_none_is_refused(stage, corpus, tmp_path, number):
    (stage / "training_summary.json").write_text(json.dumps(STAGE))
    message = rf"averaged has {number}, but --stages has no folders of these numbers; it has 1 \(.*stage\)"
    with pytest.raises(ValueError, match=message):
        mini.build(MiniArguments(stages=[str(stage)], corpus=str(corpus), averaged=[1, number], out=f"{tmp_path}/out"))


@pytest.mark.parametrize(
    "numbers, words",
    [
        ([3], ""),
        ([3, 3], ""),
        ([2], "that after stage 2."),
        ([1, 1, 3], "the mean of the parameters after stages 1 (weight 2) and 3."),
    ],
)
def test_the_card_says_which_of_three_stages_ship(numbers, words):
    assert mini.averaged_text(numbers, 3) == (words and f" The model that ships is {words}")


def test_module_folders_of_an_earlier_build_are_removed_and_nothing_else(tmp_path):
    for name in ("1_Pooling", "1_WordWeights", "2_Pooling", "other"):
        (tmp_path / name).mkdir()
    modules = [{"path": ""}, {"path": "1_WordWeights"}, {"path": "2_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    mini.remove_older_modules(tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {"1_WordWeights", "2_Pooling", "other", "modules.json"}


def test_a_stage_without_decoder_is_refused(stage, tmp_path):
    AutoModel.from_pretrained(stage).save_pretrained(stage)
    with pytest.raises(ValueError, match=r"has no decoder"):
        write_model([str(stage)], ["the fox"], tmp_path / "out")


STAGE = dict(steps=1000, batch_size=8, num_rows=5000, learning_rate=1e-3, num_mined_negatives=2, contrastive_weight=0.2)
STAGE |= dict(temperature=0.07, mlm_weight=0.1, max_seq_length=128, tokens_per_batch=4096, muon_learning_rate=2e-3)
STAGE |= dict(masked_share=0.45, seed=42, teacher=TEACHER)


@pytest.fixture
def corpus(tmp_path):
    """A folder with the files of a corpus."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in mini.CORPUS_FILES:
        (folder / name).write_text(json.dumps({"text": "the fox"}))
    return folder


@pytest.mark.parametrize(
    "summary, message",
    [
        (None, "stage is no stage .FileNotFoundError.*; give folders that examples/distill_embeddings.py has written"),
        ({"pretraining": {}, "measured": {}}, "stage is no stage .KeyError"),
        (
            STAGE | {"teacher": "other/teacher"},
            "the teacher of .*stage was other/teacher, not .*; give --teacher other/",
        ),
    ],
)
def test_a_folder_that_is_no_stage_of_this_teacher_is_refused_before_the_measurements(
    stage, corpus, tmp_path, monkeypatch, summary, message
):
    monkeypatch.setattr(mini, "write_model", lambda *_: pytest.fail("the build has begun"))
    if summary is not None:
        (stage / "training_summary.json").write_text(json.dumps(summary))
    with pytest.raises(ValueError, match=message):
        mini.build(MiniArguments(stages=[str(stage)], corpus=str(corpus), out=f"{tmp_path}/out"))


def test_a_corpus_without_held_out_packages_is_refused_before_the_measurements(stage, corpus, tmp_path):
    (stage / "training_summary.json").write_text(json.dumps(STAGE))
    (corpus / "held_out_packages_pairs.jsonl").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"has no held_out_packages_pairs\.jsonl; write it by neobert documentation"
    ):
        mini.build(MiniArguments(stages=[str(stage)], corpus=str(corpus), out=f"{tmp_path}/out"))


def test_a_model_above_the_limit_is_refused_and_nothing_is_written(stage, corpus, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(mini, "LARGEST_MB", 0.01)
    (corpus / "train_texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    before = set(tmp_path.iterdir())
    (stage / "training_summary.json").write_text(json.dumps(STAGE))
    with pytest.raises(ValueError, match=r"but at most 0\.01 MB may ship"):
        mini.build(MiniArguments(stages=[str(stage)], corpus=str(corpus), out=f"{tmp_path}/out"))
    assert set(tmp_path.iterdir()) == before


def test_the_card_names_every_stage_source_and_missing_package(stage, tmp_path):
    source = {"name": "wn", "version": "1", "licence": "MIT <b>|", "num_texts": 1200, "num_characters": 3_000_000}
    scores = {"mini NeoBERT": {"recall@10": 0.8123}}
    figures = dict(num_parameters=7.4e6, megabytes=15.2, num_pairs=3468, retrieval=scores, masked_accuracy={"x": 0.456})
    figures |= dict(masked_accuracy_entries={"x": 0.567}, num_held_out=1000, num_held_out_entries=900)
    figures |= dict(max_length=256, max_seq_length=128, pseudo_perplexity=12.34, num_pseudo=100)
    figures |= dict(tokens_per_s=70000.0, machine="2 CPU threads", dtype="float32")
    written = {
        "stages": [STAGE | {"num_mined_negatives": 0}, STAGE | {"num_hidden_layers": 6}],
        "sources": {"num_sources": 1, "num_characters": 3_000_000, "num_questions": 1234},
        "measured": figures,
        "averaged": [1, 1, 2],
    }
    sources = {"sources": [source], "unavailable": ["django"]}
    write_card(SentenceTransformer(str(stage)), tmp_path, written, sources, "pandas and networkx")
    card = (tmp_path / "README.md").read_text()
    for words in (
        "0.812 |",
        "45.6% |",
        "56.7% |",
        "on 900 docstrings of the other packages",
        "1. 1,000 steps of about 4,096 tokens",
        "2. 1,000 steps of about 4,096 tokens",
        "0.002 of Muon",
        "45%",
        "(2 for each pair); from this stage on the model has 6 layers",
        "The model that ships is the mean of the parameters after stages 1 (weight 2) and 2.",
        "A language model wrote 1,234 everyday questions",
        "inverse document frequency",
        "partial whitening",
        "at most 10,000 texts and documents",
        "float32, texts for embeddings",
        "| wn ",
        r"MIT &lt;b&gt;\| ",
        "django",
        "12.3",
        "[all-MiniLM-L6-v2](https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2) (Apache 2.0), which has 22.7",
    ):
        assert words in card
    assert "{{" not in card and "7.4 million parameters" in card
    written |= {"stages": [STAGE | {"teacher": "runs/my_teacher"}], "averaged": [1]}
    written["sources"]["num_questions"] = 0
    write_card(SentenceTransformer(str(stage)), tmp_path, written, sources, "pandas and networkx")
    card = (tmp_path / "README.md").read_text()
    assert "learned the embeddings of my\\_teacher, by distillation" in card and "MiniLM" not in card
    assert "trains them again. The stages train" in card and "questions" not in card


HOSTILE = "<script>alert(1)</script> | [x](y)"


@pytest.mark.parametrize("name", [*STAGE, "num_hidden_layers", "pair_share", "teacher_max_seq_length", "begins_from"])
def test_no_value_of_a_summary_brings_markup_into_the_card(stage, name):
    """A summary is a file of other people if their stage is in the mean; a value that should be a number is refused."""
    (stage / "training_summary.json").write_text(json.dumps(STAGE | {name: HOSTILE}))
    teacher = HOSTILE if name == "teacher" else TEACHER
    try:
        ((summary,), _) = mini.read_stages(MiniArguments(stages=[str(stage)], corpus="", teacher=teacher))
    except ValueError as error:
        assert "stage is no stage" in str(error)
        return
    text = mini.stage_text(1, summary | {"begins_from": HOSTILE}) + mini.teacher_link(summary["teacher"])
    assert "<script>" not in text and "](y)" not in text


def test_numbers_of_averaged_stages_are_numbers(stage):
    (stage / "training_summary.json").write_text(json.dumps({**{key: {} for key in mini.PARTS}, "averaged": [HOSTILE]}))
    with pytest.raises(ValueError, match="stage is no stage"):
        mini.read_stages(MiniArguments(stages=[str(stage)], corpus=""))
