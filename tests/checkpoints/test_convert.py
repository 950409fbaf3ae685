"""A conversion changes no bit, gives the numbers of the oracle, leaves its source alone, and leaves nothing if it fails."""

import json
import pickle
import shutil
from collections import OrderedDict

import numpy as np
import pytest
import torch
from conftest import Trap, change_config, contents, largest_file, run_main
from oracle import Oracle, split_gate_and_up, write_checkpoint
from safetensors.numpy import load_file, save_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, BertConfig

from neobert_cli import commands as neobert_cli
from neobert_hf.checkpoints import SavedModel, convert, examine
from neobert_hf.checkpoints.conversion import read_pickle

# What the fork's exporter writes into config.json, besides sizes.
FORK = {
    **{"rms_norm": True, "rope": True, "hidden_act": "swiglu", "dropout": 0.1, "flash_attention": True},
    **{"max_position_embeddings": 64, "auto_map": {"AutoConfig": "modeling_neobert.NeoBERTConfig"}},
}
IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture
def base(saved):
    folder = saved.with_name("base")
    shutil.copytree(saved, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.py"))
    return folder


@pytest.fixture
def fork(weights, tokenizer, tmp_path):
    """A folder as the fork exports it: gate and up separate, a decoder that equals the embedding, no bias."""
    folder = write_checkpoint(tmp_path / "fork", split_gate_and_up(tied(weights)), drop=("decoder.bias",), **FORK)
    tokenizer.save_pretrained(folder)
    return folder


def tied(weights):
    bias = np.zeros_like(weights["decoder.bias"])
    return {**weights, "decoder.weight": weights["model.encoder.weight"].copy(), "decoder.bias": bias}


def rewrite(folder, change, **settings):
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, **settings)
    return folder


def remove(name):
    return lambda tensors: {other: value for other, value in tensors.items() if other != name}


def assert_same_tensors(folder, expected):
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and np.array_equal(found[name], value), name


def assert_logits_of_the_oracle(folder, weights):
    """float64, so that only the order of summation differs."""
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float64).eval()
    oracle = Oracle(weights)
    with torch.no_grad():
        logits = model(IDS).logits[0].numpy()
    assert np.abs(logits - oracle.mlm_logits(oracle.encode(IDS[0].numpy())[2])).max() < 1e-10


@pytest.mark.compat
def test_gate_and_up_that_stand_apart_are_fused_and_nothing_else_changes(saved, tmp_path):
    (saved / "README.md").write_text("the card")
    split = shutil.copytree(saved, tmp_path / "split")
    tensors = split_gate_and_up(load_file(saved / "model.safetensors"))
    save_file(tensors, split / "model.safetensors")
    assert SavedModel(split).layout == "w1w2"
    printed = run_main(neobert_cli, "convert", split, tmp_path / "back")
    assert json.loads(printed) == {"folder": str(tmp_path / "back"), "from": "w1w2", "added": []}
    assert contents(tmp_path / "back").keys() == contents(saved).keys()
    for name, content in contents(saved).items():
        if "token" not in name and not name.endswith(".safetensors"):  # names of settings and tensors have no order
            assert (tmp_path / "back" / name).read_bytes() == content, name
    assert_same_tensors(tmp_path / "back", load_file(saved / "model.safetensors"))


@pytest.mark.compat
def test_an_export_of_the_fork_gives_the_logits_of_the_oracle_with_code_of_its_own(fork, weights, tmp_path):
    result = convert(fork, tmp_path / "out")
    assert (result["from"], result["added"]) == ("w1w2", ["decoder.bias: zeros"])
    assert_logits_of_the_oracle(tmp_path / "out", tied(weights))
    auto_map = json.loads((tmp_path / "out/config.json").read_text())["auto_map"]
    assert "AutoModelForMaskedLM" in auto_map and (tmp_path / "out/modeling_neobert.py").is_file()
    assert not examine(tmp_path / "out")["findings"]


@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": True}])
def test_a_decoder_that_is_left_out_is_the_embedding(fork, weights, tmp_path, settings):
    rewrite(fork, remove("decoder.weight"), **settings)
    assert len(convert(fork, tmp_path / "out")["added"]) == 2
    assert_logits_of_the_oracle(tmp_path / "out", tied(weights))


def test_a_decoder_that_the_published_layout_lost_is_not_made_from_the_embedding(saved, tmp_path):
    """Only the code of the fork ties the decoder when the config does not say so."""
    rewrite(saved, remove("decoder.weight"), tie_word_embeddings=None)
    assert_refused(ValueError, "lacks decoder of a NeoBERTForMaskedLM", saved, tmp_path / "out")


def test_bfloat16_shards_of_the_encoder_alone_keep_their_bits(checkpoint, tokenizer, tmp_path):
    encoder = AutoModel.from_pretrained(checkpoint, dtype=torch.bfloat16)
    encoder.save_pretrained(tmp_path / "saved", max_shard_size="10kB")
    tokenizer.save_pretrained(tmp_path / "saved")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 2
    convert(tmp_path / "saved", tmp_path / "out")
    again = AutoModel.from_pretrained(tmp_path / "out", dtype="auto")
    assert again.dtype == torch.bfloat16
    assert all(torch.equal(again.get_parameter(name), value) for name, value in encoder.named_parameters())


def pickled(folder, layout, weights):
    state = {name: torch.from_numpy(value) for name, value in weights.items()}
    if layout == "state_dict.pt of replicas":
        renamed = OrderedDict((f"module._orig_mod.{name}", value) for name, value in state.items())
        torch.save(renamed, folder / "state_dict.pt")
    elif layout == "pytorch_model.bin with a shared tensor":
        state["decoder.weight"] = state["model.encoder.weight"]
        torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    elif layout == "shards":
        names = sorted(state)
        torch.save({name: state[name] for name in names[:9]}, folder / "pytorch_model-00001-of-00002.bin")
        torch.save({name: state[name] for name in names[9:]}, folder / "pytorch_model-00002-of-00002.bin")


@pytest.mark.parametrize("layout", ["state_dict.pt of replicas", "pytorch_model.bin with a shared tensor", "shards"])
def test_pickled_weights_keep_their_bits(base, weights, tmp_path, layout):
    weights = {name: value for name, value in weights.items() if not name.startswith(("dense", "classifier"))}
    if "shared" in layout:
        weights = {**weights, "decoder.weight": weights["model.encoder.weight"]}
    pickled(base, layout, weights)
    convert(base, tmp_path / "out")
    assert_same_tensors(tmp_path / "out", weights)
    assert_logits_of_the_oracle(tmp_path / "out", weights)


@pytest.mark.compat
def test_the_base_gives_config_and_tokenizer_to_the_weights_of_a_training(base, weights, oracle, tmp_path):
    """The head of the weights decides the class and the number of labels."""
    (tmp_path / "step").mkdir()
    state = {name: torch.from_numpy(value) for name, value in weights.items() if not name.startswith("decoder")}
    torch.save(state, tmp_path / "step/state_dict.pt")
    run_main(neobert_cli, "convert", tmp_path / "step", tmp_path / "out", "--base", base)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float64).eval()
    expected = oracle.class_logits(oracle.encode(IDS[0].numpy())[2])
    with torch.no_grad():
        assert np.abs(model(IDS).logits[0].numpy() - expected).max() < 1e-10
    assert (tmp_path / "out/tokenizer.json").exists()


def assert_refused(error, message, source, out, **arguments):
    """The conversion raises the error in one line, and changes no file beside its source."""
    before = contents(out.parent)
    with pytest.raises(error, match=message) as caught:
        convert(source, out, **arguments)
    assert "\n" not in str(caught.value)
    assert contents(out.parent) == before and not out.exists()


def test_a_pickle_that_runs_code_is_refused_with_the_way_out(base, tmp_path):
    (base / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "sprung"), protocol=2))
    message = r"cannot be read with weights_only=True \(it holds objects of io.open\); download .*state_dict.pt"
    assert_refused(OSError, message, base, tmp_path / "out")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("content", [b"", b"not a pickle", {"weights": 1}, [1], {}])
def test_a_pickle_without_weights_is_refused(tmp_path, content):
    file = tmp_path / "state_dict.pt"
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    with pytest.raises(OSError, match="cannot be read with weights_only=True"):
        read_pickle(file)


def test_two_files_with_the_same_tensors_are_refused(base, weights, tmp_path):
    for name in ("state_dict.pt", "pytorch_model.bin"):
        pickled(base, "state_dict.pt of replicas", weights)
        (base / "state_dict.pt").rename(base / name)
    pickled(base, "state_dict.pt of replicas", weights)
    assert_refused(OSError, "and another file hold .*; move one of them away", base, tmp_path / "out")


def test_states_of_deepspeed_are_refused_with_its_script_that_merges_them(base, weights, tmp_path):
    state = {name: torch.from_numpy(value) for name, value in weights.items()}
    (base / "100").mkdir()
    torch.save({"module": state}, base / "100/mp_rank_00_model_states.pt")
    assert_refused(OSError, r"python zero_to_fp32.py \. MERGED --safe_serialization", base, tmp_path / "out")


def config(**values):
    return lambda folder: rewrite(folder, dict, **values)


def tensors(change, **values):
    return lambda folder: rewrite(folder, change, **values)


def without(name):
    return lambda folder: (folder / name).unlink()


POSITION = tensors(lambda found: found | {"model.position": np.zeros(3, np.float32)})
UNTIED = tensors(lambda found: found | {"decoder.weight": found["decoder.weight"] + 1}, tie_word_embeddings=True)
REFUSED = {  # what happens to a folder that can be converted, and the error
    "NeoDictaBERT": (config(encoder_init_range=0.02), "marks a NeoDictaBERT"),
    "another model": (lambda folder: BertConfig().save_pretrained(folder), "this is a bert, not"),
    "no rotation": (config(rope=False), "rope=False must be true"),
    "another activation": (config(hidden_act="gelu"), "'gelu' must be swiglu"),
    "a class of others": (config(architectures=["Bert"]), "no class of NeoBERT"),
    "no config": (without("config.json"), "holds no config.json.* as base"),
    "a damaged config": (lambda folder: (folder / "config.json").write_text("{"), "is not JSON in UTF-8"),
    "a list for a config": (lambda folder: (folder / "config.json").write_text("[]"), "is no JSON object"),
    "no tokenizer": (without("tokenizer.json"), "holds no tokenizer.* as base"),
    "a damaged tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer of .* cannot"),
    "more than a model": (lambda folder: (folder / "modules.json").write_text("[]"), "modules of sentence"),
    "blocks without end": (config(num_hidden_layers=10**9), "num_hidden_layers=1000000000, but its weights have 3"),
    "a lost tensor": (tensors(remove("model.layer_norm.weight")), "lacks model.layer_norm.weight; it is incomplete"),
    "a lost half": (tensors(remove("model.transformer_encoder.1.ffn.w2.weight")), "no ffn.w2 of its shape"),
    "an unknown tensor": (POSITION, r"holds unknown tensors: model.position"),
    "a decoder that is not tied": (UNTIED, "is not the embedding"),
    "no decoder": (tensors(remove("decoder.weight"), tie_word_embeddings=False), "lacks decoder"),
    "no embedding": (tensors(remove("model.encoder.weight"), tie_word_embeddings=True), "lacks model.encoder.weight"),
    "a link out of the folder": (lambda folder: (folder / "a.txt").symlink_to("/etc/hosts"), "outside its folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_source_that_is_wrong_is_refused_and_nothing_is_written(fork, tmp_path, case):
    damage, message = REFUSED[case]
    damage(fork)
    assert_refused((OSError, ValueError), message, fork, tmp_path / "out")


def test_the_target_may_neither_hold_files_nor_lie_in_the_source(saved, tmp_path):
    assert_refused(ValueError, "inside the source", saved, saved / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"out holds notes\.txt"):
        convert(saved, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("source", ["safetensors", "pickle"])
def test_a_full_disk_leaves_nothing(fork, tmp_path, source):
    if source == "pickle":
        state = {name: torch.from_numpy(value) for name, value in load_file(fork / "model.safetensors").items()}
        torch.save(state, fork / "state_dict.pt")
        (fork / "model.safetensors").unlink()
    with largest_file(20_000):
        assert_refused(OSError, "could not be converted|cannot be written", fork, tmp_path / "out")
