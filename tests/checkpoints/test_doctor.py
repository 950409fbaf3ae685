"""`neobert doctor` names each kind of damage, and finds nothing in good checkpoints. It runs nothing and changes nothing."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from building import build
from conftest import GOLDEN
from oracle import CONFIG, random_weights, split_gate_and_up, write_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import neobert_hf
from neobert_cli import commands as neobert_cli
from neobert_hf import AUTO_CLASSES, NeoBERTForMaskedLM, NeoBERTForSequenceClassification
from neobert_hf.checkpoints import examine
from neobert_hf.checkpoints.doctor import odd_values
from neobert_hf.checkpoints.network import read_header
from neobert_hf.model import modeling_neobert

BLOCK = "model.transformer_encoder.1"
WO = f"{BLOCK}.wo.weight"


@pytest.fixture
def good(folder):
    return Path(folder)


def codes(report, severity="error"):
    return {finding["code"] for finding in report["findings"] if finding["severity"] == severity}


def content(folder):
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file): (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


def all_of(*changes):
    return lambda folder: [change(folder) for change in changes]


def weights(change):
    """Change the tensors, by name; `change` returns others, or changes them itself."""

    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        save_file(change(tensors) or tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def put(name, value):
    return weights(lambda tensors: tensors[name].view(-1)[7:8].fill_(value) and None)


def without(*words):
    return weights(lambda tensors: {k: v for k, v in tensors.items() if not any(word in k for word in words)})


def changed(change, name="config.json"):
    def damage(folder):
        stored = json.loads((folder / name).read_text())
        change(stored)
        (folder / name).write_text(json.dumps(stored))

    return damage


def config(**values):
    return changed(lambda stored: stored.update(values))


def tokenizer_class(name):
    return changed(lambda stored: stored.update(tokenizer_class=name), "tokenizer_config.json")


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def remove(name):
    return lambda folder: shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()


def link(name, target):
    return lambda folder: (folder / name).symlink_to(target)


def pipe(name):
    def damage(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        os.mkfifo(folder / name)

    return damage


def truncate(folder):
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size // 2)


def truncate_an_adapter(folder):
    truncate(folder)
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')


def pickled(name):
    def damage(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        torch.save({"a": torch.zeros(2)}, folder / name)
        (folder / "model.safetensors").unlink()

    return damage


def flip_a_bit(folder):
    """The highest bit of the exponent of a number below 2."""
    numbers = load_file(folder / "model.safetensors")[WO]
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[content.index(numbers.numpy().tobytes()) + 4 * 9 + 3] ^= 0x40
    (folder / "model.safetensors").write_bytes(content)


def shards(change=lambda folder, weight_map: None):
    def damage(folder):
        model = NeoBERTForMaskedLM.from_pretrained(folder)
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="20kB")
        changed(lambda stored: change(folder, stored["weight_map"]), "model.safetensors.index.json")(folder)

    return damage


def put_nan_in_a_subfolder(folder, weight_map):
    (folder / "parts").mkdir()
    shard = weight_map["decoder.weight"]
    tensors = load_file(folder / shard)
    tensors["decoder.weight"][3, 3] = torch.nan
    save_file(tensors, folder / "parts/last.safetensors", metadata={"format": "pt"})
    (folder / shard).unlink()
    weight_map |= {name: "parts/last.safetensors" for name, file in weight_map.items() if file == shard}


def leave_the_folder(folder, weight_map):
    shutil.copy(folder / weight_map["decoder.bias"], folder.parent / "outside.safetensors")
    weight_map["decoder.bias"] = "../outside.safetensors"


def published_code(folder):
    """The published code in outline: it computes the rotary table in `__init__`, as a buffer that is not saved."""
    for file in folder.glob("*.py"):
        file.unlink()
    (folder / "rotary.py").write_text("def precompute_freqs_cis(width, length):\n    return None\n")
    (folder / "model.py").write_text(
        "from torch import nn\nfrom transformers import PretrainedConfig, PreTrainedModel\n"
        "from .rotary import precompute_freqs_cis\n\n"
        "class NeoBERTConfig(PretrainedConfig):\n    model_type = 'neobert'\n\n"
        "class NeoBERT(PreTrainedModel):\n    def __init__(self, config):\n        super().__init__(config)\n"
        "        freqs_cis = precompute_freqs_cis(config.dim_head, config.max_length)\n"
        "        self.register_buffer('freqs_cis', freqs_cis, persistent=False)\n\n"
        "    def _init_weights(self, module):\n        module.weight.data.uniform_(-0.02, 0.02)\n"
    )
    config(auto_map={"AutoConfig": "model.NeoBERTConfig", "AutoModel": "model.NeoBERT"})(folder)


def vocabulary(change):
    return changed(lambda stored: change(stored["model"]["vocab"]), "tokenizer.json")


def embedding(*changes):
    def damage(folder):
        whole = folder.parent / "whole"
        neobert_hf.sentence_transformer(str(folder)).save_pretrained(str(whole))
        shutil.rmtree(folder)
        whole.rename(folder)
        all_of(*changes)(folder)

    return damage


def put_pooling_outside(folder):
    shutil.copytree(folder / "1_Pooling", folder.parent / "pooling")
    changed(lambda modules: modules[1].update(path="../pooling"), "modules.json")(folder)


def half_of_the_words(words):
    for word in list(words)[5:60]:
        del words[word]


INTEGERS = weights(lambda tensors: tensors.update({WO: tensors[WO].to(torch.int8)}))
TWICE = weights(lambda tensors: tensors.update({WO.removeprefix("model."): tensors[WO] + 1}))
FAR = weights(lambda tensors: {k.replace("encoder.2.", "encoder.99999999999."): v for k, v in tensors.items()})
EXPORTED = all_of(lambda folder: (folder / "onnx").mkdir(), write("onnx/model.onnx", ""))
DAMAGE = {  # what happens to a good folder, the errors that are found, separated by spaces; what they say
    "gate and up apart": (weights(split_gate_and_up), "refused: gate and up as separate tensors"),
    "an export of the fork": (all_of(weights(split_gate_and_up), without("decoder"), config(tie_word_embeddings=True)),
     "refused: the decoder of NeoBERT"),
    "a decoder that is there and said to be tied": (config(tie_word_embeddings=True),
     "refused: tie_word_embeddings=True"),
    "a decoder without bias": (without("decoder.bias"), "refused: lacks decoder"),
    "pickled weights": (pickled("pytorch_model.bin"), "refused: is a pickle, which"),
    "weights of the published training": (pickled("state_dict.pt"), "refused: is a pickle, which"),
    "states of DeepSpeed": (all_of(pickled("global_step3/mp_rank_00_model_states.pt"), write("latest", "global_step3")),
     "refused: python zero_to_fp32.py"),
    "NeoDictaBERT": (config(encoder_init_range=0.02), "refused: NeoDictaBERT"),
    "tensors of another model": (weights(lambda tensors: {"bert.embeddings": torch.ones(2, 2)}),
     "refused: no tensor has a name of NeoBERT"),
    # tensors
    "a missing tensor": (without(WO), "refused: lacks model.transformer_encoder.1.wo"),
    "half a head": (without("decoder.weight"), "refused: lacks decoder"),
    "a tensor of an odd shape": (weights(lambda tensors: tensors.update({WO: tensors[WO][:-1]})),
     "refused: of the shape (31, 32), where config.json gives (32, 32)"),
    "a tensor under two names": (TWICE, "refused: is the same tensor as"),
    "names of a wrapper": (weights(lambda tensors: {f"module.{k}": v for k, v in tensors.items()}),
     "refused: neobert convert"),
    "integers": (INTEGERS, "refused: weights of the type I8"),
    # numbers
    "NaN": (put(WO, torch.nan), "nan"),
    "NaN in a shard in a subfolder": (shards(put_nan_in_a_subfolder), "nan"),
    "infinity": (put(WO, -torch.inf), "infinity"),
    "a flipped bit": (flip_a_bit, "huge"),
    # files
    "a pipe in the place of a config": (all_of(remove("config.json"), pipe("config.json")),
     "refused: is a pipe, a socket or a device"),
    "a pipe in a subfolder": (pipe("sub/x.json"), "refused: is a pipe"),
    "a pipe in the place of a shard": (
        shards(lambda folder, files: (folder / files["decoder.bias"]).unlink() or pipe(files["decoder.bias"])(folder)),
        "refused: is a pipe, a socket or a device",
    ),
    "a number of blocks that takes for ever": (all_of(config(num_hidden_layers=10**9), FAR),
     "refused: num_hidden_layers=1000000000"),
    "a truncated file": (truncate, "refused: it is truncated or damaged"),
    "a truncated adapter": (truncate_an_adapter, "refused: it is truncated or damaged"),
    "an empty file beside an exported graph": (all_of(EXPORTED, write("model.safetensors", "")),
     "refused: it is truncated or damaged"),
    "an empty file": (write("model.safetensors", ""), "refused: it is truncated or damaged"),
    "no weights": (remove("model.safetensors"), "refused: holds no weights"),
    "a missing shard": (shards(lambda folder, files: remove(sorted(files.values())[-1])(folder)),
     "refused: which is missing"),
    "shards without their index": (all_of(shards(), remove("model.safetensors.index.json")),
     "refused: with model.safetensors.index.json and its files"),
    "a tensor that its shard lacks": (shards(lambda folder, files: weights_of_shard(folder / files[WO], WO)),
     "refused: lacks model.transformer_encoder.1.wo"),
    "a link to nothing": (all_of(remove("model.safetensors"), link("model.safetensors", "../blobs/lost")),
     "refused: blobs/lost"),
    "a dead link among the settings of a module": (
     embedding(remove("1_Pooling/config.json"), link("1_Pooling/config.json", "../../lost")), "refused: outside its folder"),
    "a pickle beside an exported graph": (all_of(EXPORTED, pickled("pytorch_model.bin")), "refused: is a pickle, which"),
    "a config without a model type": (changed(lambda stored: stored.pop("model_type")), "refused: has no model_type"),
    "an index that leaves the folder": (shards(leave_the_folder), "refused: only .safetensors files inside its folder"),
    "a link out of the folder": (link("chat_template.jinja", "/etc/hosts"), "refused: outside its folder"),
    # config
    "no quantization, and a missing tensor": (all_of(config(quantization_config=None), without(WO)),
     "refused: lacks model.transformer_encoder.1.wo"),
    "an empty quantization, and integers": (all_of(config(quantization_config={}), INTEGERS),
     "refused: weights of the type I8"),
    "a quantization that is a list": (config(quantization_config=[]), "refused: quantization_config=[] must be"),
    "a dtype that is a list": (config(dtype=[]), "refused"),
    "no config": (remove("config.json"), "refused: has no config.json"),
    "half a config": (write("config.json", '{"model_type":'), "refused: is not JSON"),
    "a config that is nested too deep": (write("config.json", '{"a":' + "[" * 200_000), "refused: is not JSON"),
    "a wrong value": (config(norm_eps=-1), "refused: norm_eps=-1 must be a positive number"),
    "another vocabulary": (config(vocab_size=97), "refused: of the shape (96, 32), where config.json gives (97, 32)"),
    "another SwiGLU width": (config(intermediate_size=128), "refused: ffn.w12.weight of the shape"),
    "weights elsewhere": (config(transformers_weights="x.safetensors"), "refused: transformers_weights"),
    "half a tokenizer config": (write("tokenizer_config.json", "{"), "refused: is not JSON"),
    # code
    "the published code": (published_code, "rotary-buffer"),
    "code of another repository": (config(auto_map={"AutoModel": "somebody/repository--code.Model"}), "foreign-code"),
    "code without one of its files": (remove("losses_neobert.py"), "code-damaged: imports losses_neobert.py"),
    "half a file of code": (write("losses_neobert.py", "def f("), "code-damaged"),
    # tokenizer
    "a tokenizer of another model": (vocabulary(lambda words: words.update({f"word{i}": 96 + i for i in range(9)})),
     "refused: and the largest id is 104"),
    "a tokenizer of half the words": (vocabulary(half_of_the_words), "refused: but the model has 96"),
    "two words with one id": (vocabulary(lambda words: words.update(fox=words["the"])), "tokenizer-vocabulary"),
    "no post-processor": (changed(lambda stored: stored.update(post_processor=None), "tokenizer.json"), "tokenizer-ends"),
    # the good one splits identifiers; the class of BERT does not
    "the class of another tokenizer": (tokenizer_class("BertTokenizerFast"), "tokenizer-ids"),
    "the class of another tokenizer in the config": (
     all_of(remove("tokenizer_config.json"), config(tokenizer_class="BertTokenizer")), "tokenizer-ids"),
    "a class that cannot read the tokenizer": (tokenizer_class("T5TokenizerFast"), "refused: cannot be read"),
    "half a tokenizer": (write("tokenizer.json", "{}"), "refused: cannot be read"),
    "a tokenizer without its vocabulary": (remove("tokenizer.json"), "tokenizer-missing"),
    # embedding models
    "NaN in an embedding model": (embedding(put(WO.removeprefix("model."), torch.nan)), "nan"),
    "a pickled module": (embedding(lambda folder: torch.save({}, folder / "1_Pooling/pytorch_model.bin")),
     "refused: is a pickle, which"),
    "settings that are a list": (embedding(write("config_sentence_transformers.json", "[]")),
     "refused: is no JSON object"),
    "an adapter without its base": (write("adapter_config.json", "{}"), "refused: names no base_model_name_or_path"),
    "an adapter of a base that was moved": (
        write("adapter_config.json", '{"task_type": "SEQ_CLS", "base_model_name_or_path": "runs/../no"}'),
        "refused: runs/../no is no folder",
    ),
    "no list of modules": (embedding(write("modules.json", "[1]")), "refused: modules.json is no list"),
    "a module outside": (embedding(put_pooling_outside), "refused: outside its folder"),
    "a missing module": (embedding(remove("1_Pooling")), "refused: lacks the module 1_Pooling"),
}  # fmt: skip


def weights_of_shard(file, name):
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors or {"model.layer_norm.other": torch.ones(2)}, file, metadata={"format": "pt"})


@pytest.mark.parametrize("name", DAMAGE)
def test_each_damage_is_found_and_nothing_else_and_the_folder_is_unchanged(good, tmp_path, name):
    damage, expected = DAMAGE[name]
    expected, _, words = expected.partition(": ")
    shutil.copytree(good, tmp_path / "model")
    damage(tmp_path / "model")
    before = content(tmp_path)
    report = examine(tmp_path / "model")
    assert codes(report) == set(expected.split()), report["findings"]
    assert not report["is_clean"] and content(tmp_path) == before
    assert words in str([[*finding.values()] for finding in report["findings"]])
    for finding in report["findings"]:
        assert finding["where"] and len(finding["meaning"]) > 20 and len(finding["mend"]) > 8
        assert "\n" not in finding["meaning"] + finding["mend"]


@pytest.mark.compat
@pytest.mark.parametrize("auto_class", [name for name in AUTO_CLASSES if name != "AutoConfig"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_found_in_what_this_transformers_saves(checkpoint, tokenizer, tmp_path, auto_class, dtype):
    model = AUTO_CLASSES[auto_class].from_pretrained(checkpoint, dtype=dtype)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    report = examine(tmp_path)
    assert report["findings"] == [] and report["is_clean"] and report["layout"] == "published"
    assert report["num_parameters"] == sum(parameter.numel() for parameter in model.parameters())


ADAPTERS = {  # head, options of PEFT's LoraConfig beside the matrices
    "plain": ("SequenceClassification", {"task_type": "SEQ_CLS"}),
    "without a task": ("SequenceClassification", {}),
    "the wrong layer": ("SequenceClassification", {"task_type": "SEQ_CLS", "modules_to_save": ["model.layer_norm"]}),
    "matrices of the head": ("SequenceClassification", {"task_type": "SEQ_CLS", "target_modules": "all-linear"}),
    "whole": ("SequenceClassification", {"task_type": "SEQ_CLS", "modules_to_save": ["dense", "classifier"]}),
    "tags": ("TokenClassification", {"task_type": "TOKEN_CLS"}),
    "answers without a task": ("QuestionAnswering", {}),
    "the head of its base": ("MaskedLM", {}),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_lacks_the_layers_that_are_random_again_at_each_opening(good, tmp_path, name):
    import peft

    head, options = ADAPTERS[name]
    start, folder = getattr(neobert_hf, f"NeoBERTFor{head}").from_pretrained, tmp_path / "adapter"
    config = peft.LoraConfig(**{"target_modules": ["qkv"]} | options)
    peft.get_peft_model(start(good), config).save_pretrained(folder)
    first, second = (peft.PeftModel.from_pretrained(start(good), folder).state_dict() for _ in range(2))
    random = {key for key, values in first.items() if key.endswith("weight") and not values.equal(second[key])}
    lacking = {key.split(".")[2] for key in random if "original_module" not in key}
    report = examine(folder)
    found = {(finding["code"], finding["where"]) for finding in report["findings"]}
    assert found == {("adapter-lacks", layer) for layer in lacking} and report["layout"] == "adapter"
    assert bool(lacking) == (name not in ("whole", "tags", "the head of its base"))


@pytest.mark.compat
def test_nothing_is_found_in_the_mini_model_and_in_folders_of_sentence_transformers(good, tmp_path):
    neobert_hf.sentence_transformer(str(good), normalize=True).save_pretrained(str(tmp_path))
    for folder in (tmp_path, neobert_hf.MINI_MODEL_PATH):
        assert examine(folder)["findings"] == []


@pytest.mark.parametrize("name", ["masked_lm", "classifier"])
def test_the_published_layout_has_only_remarks_on_what_is_not_in_the_folder(name):
    report = examine(GOLDEN / name)
    assert report["is_clean"] and codes(report, "remark") == {"code-missing", "tokenizer-missing"}


def test_nothing_is_found_in_a_build_in_shards_a_contextual_and_a_quantized_model(good, tokenizer, tmp_path):
    build(good, tmp_path / "published")
    NeoBERTForMaskedLM.from_pretrained(good).save_pretrained(tmp_path / "published in shards", max_shard_size="20kB")
    tokenizer.save_pretrained(tmp_path / "published in shards")
    changes = {
        "contextual": config(model_type="contextual_neobert"),
        "published and quantized": all_of(config(quantization_config={"quant_method": "torchao"}), INTEGERS),
        "published without a tokenizer class": remove("tokenizer_config.json"),
        "published by Trainer": lambda folder: torch.save({}, folder / "training_args.bin"),
    }
    for name, change in changes.items():
        change(shutil.copytree(good, tmp_path / name))
    for folder in tmp_path.iterdir():
        report = examine(folder)
        assert report["findings"] == [] and report["layout"] == folder.name.split()[0], report["findings"]


def test_remarks_leave_a_folder_clean(good, tmp_path):
    shutil.copytree(good, tmp_path / "model")
    with (tmp_path / "model/modeling_neobert.py").open("a") as code:
        code.write("# edited\n")
    tokenizer_class("TokenizersBackend")(tmp_path / "model")
    weights(lambda tensors: tensors | {"model.freqs_cis": torch.ones(2, 2)})(tmp_path / "model")
    config(architectures=["BertModel"])(tmp_path / "model")
    # files that no loader reads
    save_file({"a": torch.tensor([torch.nan])}, tmp_path / "model/older.safetensors")
    report = examine(tmp_path / "model")
    assert report["is_clean"]
    assert codes(report, "remark") == {"code-differs", "tokenizer-class", "tensors-unknown", "nan", "architecture"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "value, kind", {"nan": "nan", "inf": "infinity", "-inf": "infinity", "-3e6": "huge", "9e4": 0}.items()
)
@pytest.mark.parametrize("place", [0, 7, 10])  # the first and the last number, and the first of the second part
def test_one_odd_number_is_found_at_each_place_in_each_type(tmp_path, monkeypatch, dtype, value, kind, place):
    monkeypatch.setattr("neobert_hf.checkpoints.doctor.PART", 7)
    tensor = torch.randn(11).to(dtype)
    tensor[place] = float(value)
    if dtype == torch.float16 and abs(float(value)) > 65504:
        kind = "infinity"
    save_file({"a": tensor, "b": torch.tensor([float("nan")])}, tmp_path / "x.safetensors")
    assert odd_values(read_header(tmp_path / "x.safetensors")["a"]) == ({kind} if kind else set())


def test_an_empty_tensor_and_all_odd_numbers_together(tmp_path):
    odd = torch.tensor([torch.nan, torch.inf, 1e30])
    save_file({"a": odd, "b": torch.zeros(0, 3), "c": odd[2:].clone()}, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    assert [odd_values(header[name]) for name in "abc"] == [{"nan", "infinity", "huge"}, set(), {"huge"}]


UPPER = r"encoder\.[12]\.|layer_norm|dense|classifier"  # the lowest block stays as it is


def fine_tune(base, folder, table=None, weight_decay=0.0, dtype=torch.float32, rate=1e-3, names=""):
    """Train weights of these names for some steps; `table` replaces the rotary table, as memory that nobody initialised does."""
    with pytest.MonkeyPatch.context() as patch:
        if table is not None:
            right = modeling_neobert.rotary_table
            patch.setattr(modeling_neobert, "rotary_table", lambda *arguments: table(right(*arguments)))
        model = NeoBERTForSequenceClassification.from_pretrained(base, num_labels=2)
        trained = [parameter for name, parameter in model.named_parameters() if re.search(names, name)]
        optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=weight_decay)
        for _ in range(10):
            ids = torch.randint(5, 90, (8, 12))
            model.train()(input_ids=ids, labels=ids[:, 0] % 2).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.to(dtype).save_pretrained(folder)


@pytest.mark.parametrize(
    ("garbage", "weight_decay", "dtype", "rate", "names"),
    [
        (0.0, 0.0, torch.float32, 1e-3, ""),
        (1e-38, 0.1, torch.float32, 1e-3, ""),
        (0.0, 0.1, torch.bfloat16, 1e-3, ""),
        (0.0, 0.0, torch.float32, 1e-3, UPPER),
        (0.0, 0.0, torch.bfloat16, 1e-5, ""),
        (0.0, 0.01, torch.bfloat16, 1e-5, UPPER),
        (0.0, 0.01, torch.float16, 1e-6, UPPER),
    ],
)
def test_a_fine_tune_without_positions_is_known_by_q_and_k(good, tmp_path, garbage, weight_decay, dtype, rate, names):
    """A table near zero makes all scores equal, so that the gradients of q and k vanish; weight decay scales these rows."""
    options = dict(weight_decay=weight_decay, dtype=dtype, rate=rate, names=names)
    fine_tune(good, tmp_path / "damaged", lambda table: torch.full_like(table, garbage), **options)
    fine_tune(good, tmp_path / "right", None, **options)
    if weight_decay == 0 and dtype == torch.float32:
        files = (good / "model.safetensors", tmp_path / "damaged/model.safetensors")
        before, after = (load_file(file)[f"{BLOCK}.qkv.weight"].reshape(4, 3, 8, 32) for file in files)
        assert before[:, :2].equal(after[:, :2]) and not before[:, 2].equal(after[:, 2])
    assert codes(examine(tmp_path / "damaged", base=good)) == {"corrupted-rotary"}
    assert not codes(examine(tmp_path / "right", base=good))
    assert not codes(examine(tmp_path / "damaged"))  # without the base model nobody can know
    assert not codes(examine(good, base=good))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", ["classifier", r"ffn|classifier", r"wo\.|classifier"])
def test_a_fine_tune_that_leaves_q_k_and_v_as_they_are_is_sound(good, tmp_path, names, dtype):
    fine_tune(good, tmp_path / "model", dtype=dtype, names=names)
    assert not codes(examine(tmp_path / "model", base=good))


@pytest.mark.parametrize("share, expected", [(0.02, {"corrupted-rotary"}), (0.2, set())])
def test_q_and_k_that_change_a_fifth_as_much_as_v_are_trained(good, tmp_path, share, expected):
    """Relative changes of 0.1 in v, in directions that no scaling explains, and a share of them in q and k."""
    shutil.copytree(good, tmp_path / "model")

    def change(tensors):
        for name in [name for name in tensors if name.endswith("qkv.weight")]:
            rows = tensors[name].view(4, 3, -1)
            rows += torch.randn_like(rows) * rows.std() * torch.tensor([share, share, 1])[:, None] * 0.1

    weights(change)(tmp_path / "model")
    assert codes(examine(tmp_path / "model", base=good)) == expected


def test_a_comparison_that_is_not_possible_is_named(good, tmp_path):
    shutil.copytree(good, tmp_path / "model")
    pickled("pytorch_model.bin")(tmp_path / "model")
    assert codes(examine(tmp_path / "model", base=good), "remark") == {"not-compared"}


def test_another_base_model_is_refused_in_one_line(good, tmp_path):
    config = CONFIG | {"hidden_size": 16, "dim_head": 4}
    other = write_checkpoint(tmp_path / "other", random_weights(config=config), config=config)
    with pytest.raises(ValueError, match=r"the base model .*other has no model\.transformer_encoder\.0\.qkv\.weight"):
        examine(good, base=other)


def run(*arguments):
    """Run the command in this process; returns its status or its line of error, and its output."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", ["neobert", "doctor", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            neobert_cli.main()
    return ended.value.code, printed.getvalue()


def test_the_command_prints_findings_as_text_or_json_and_its_status_says_whether_there_is_an_error(good, tmp_path):
    shutil.copytree(good, tmp_path / "model")
    put(WO, torch.nan)(tmp_path / "model")
    weights(lambda tensors: tensors | {"\x1b[31mred\n": torch.ones(1)})(tmp_path / "model")
    status, text = run(tmp_path / "model")
    assert status == 1 and "\x1b" not in text  # a name cannot control the terminal
    assert text.splitlines()[0] == f"error nan: model.safetensors: {WO}"
    assert "remark tensors-unknown: red " in text.splitlines()
    assert text.splitlines()[-1].startswith(f"{tmp_path / 'model'}: 1 error, 1 remark; layout published, 23 tensors, ")
    status, text = run(tmp_path / "model", "--json")
    report = json.loads(text)
    assert status == 1 and not report["is_clean"]
    assert [set(finding) for finding in report["findings"]] == [{"severity", "code", "where", "meaning", "mend"}] * 2
    status, text = run(good)
    assert status == 0 and len(text.splitlines()) == 1 and "nothing found; layout published" in text


def test_the_class_of_transformers_5_is_mended_by_one_command(good, tmp_path):
    folder = shutil.copytree(good, tmp_path / "a name with spaces")
    AutoTokenizer.from_pretrained(good).save_pretrained(folder)
    tokenizer_class("TokenizersBackend")(folder)  # as transformers 5 does
    (finding,) = (each for each in examine(folder)["findings"] if each["code"] == "tokenizer-class")
    subprocess.run(finding["mend"], shell=True, check=True)
    assert "tokenizer-class" not in codes(examine(folder), "remark")
    texts = ["the [MASK] fox", "", "Old HTTPServer"]
    assert AutoTokenizer.from_pretrained(folder)(texts) == AutoTokenizer.from_pretrained(good)(texts)


def test_a_mend_can_be_pasted_into_a_shell(good, tmp_path):
    folder = shutil.copytree(good, tmp_path / "my model")
    weights(split_gate_and_up)(folder)
    (finding,) = examine(folder)["findings"]
    assert shlex.split(finding["mend"]) == ["neobert", "convert", str(folder), "NEW_FOLDER"]


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("org/nothing", "neobert doctor: org/nothing cannot be downloaded"),
        ("../nothing", "neobert doctor: ../nothing is no folder; give an existing folder, or an id"),
        (".", "neobert doctor: . holds no weights; give a folder with"),
    ],
)
def test_a_source_that_cannot_be_read_is_an_error_in_one_line(tmp_path, monkeypatch, source, line):
    monkeypatch.chdir(tmp_path)
    message, text = run(source)
    assert not text and message.startswith(line) and "\n" not in message
