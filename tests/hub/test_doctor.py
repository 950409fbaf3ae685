"""`neobert doctor` names each kind of damage, and finds nothing in good checkpoints. It runs nothing and changes nothing."""

import contextlib
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import GOLDEN
from oracle import CONFIG, random_weights, split_gate_and_up, write_checkpoint
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

import neobert_cli
import neobert_hf
from neobert_hf import AUTO_CLASSES, NeoBERTForMaskedLM, NeoBERTForSequenceClassification
from neobert_hf.files.trust import read_json
from neobert_hf.hub.doctor import examine
from neobert_hf.hub.layouts import read_header
from neobert_hf.hub.stored_numbers import odd_values
from neobert_hf.model import modeling_neobert

BLOCK = "model.transformer_encoder.1"


@pytest.fixture(scope="module")
def good(checkpoint, tokenizer, tmp_path_factory):
    """The tiny masked language model as this library saves it: weights, config, code, tokenizer."""
    folder = tmp_path_factory.mktemp("good") / "model"
    NeoBERTForMaskedLM.from_pretrained(checkpoint).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def codes(report, severity="error"):
    return {finding["code"] for finding in report["findings"] if finding["severity"] == severity}


def content(folder):
    """Names, bytes and times of all files."""
    return {
        str(file): (file.read_bytes(), file.stat().st_mtime_ns) for file in sorted(folder.rglob("*")) if file.is_file()
    }


# --- The zoo: each function breaks a copy of the good folder ------------------------------------------------------------


def weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors) or tensors, folder / "model.safetensors", metadata={"format": "pt"})


def settings(folder, name="config.json", drop=(), **changes):
    stored = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({key: stored[key] for key in stored if key not in drop} | changes))


def put(name, value):
    """A function that writes a number into a tensor."""

    def change(tensors):
        tensors[name].flat[7] = value

    return lambda folder: weights(folder, change)


def tie(folder):
    """As the fork pszemraj/NeoBERT exports: separate gate and up, no own decoder."""
    weights(folder, lambda tensors: {k: v for k, v in split_gate_and_up(tensors).items() if "decoder" not in k})
    settings(folder, tie_word_embeddings=True)


def without(*names):
    return lambda folder: weights(folder, lambda tensors: {k: v for k, v in tensors.items() if k not in names})


def add_classifier(folder, rows):
    head = {"classifier.weight": np.ones((rows, 32), np.float32), "classifier.bias": np.ones(rows, np.float32)}
    weights(folder, lambda tensors: tensors | head)


def truncate_an_adapter(folder):
    truncate(folder)
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")


def pickled(name):
    def change(folder):
        torch.save({"a": torch.zeros(2)}, folder / name)
        (folder / "model.safetensors").unlink()

    return change


def deepspeed(folder):
    (folder / "model.safetensors").unlink()
    (folder / "global_step3").mkdir()
    (folder / "latest").write_text("global_step3")
    torch.save({"module": {}}, folder / "global_step3/mp_rank_00_model_states.pt")


def truncate(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def flip_a_bit_of_an_exponent(folder):
    tensors = load_file(folder / "model.safetensors")
    start = (folder / "model.safetensors").read_bytes().index(tensors[f"{BLOCK}.wo.weight"].tobytes())
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.seek(start + 4 * 9 + 3)
        byte = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte[0] ^ 0x40]))  # the highest bit of the exponent of a number below 2


def index(weight_map_of):
    """Shards whose index a function changes."""

    def change(folder):
        model = NeoBERTForMaskedLM.from_pretrained(folder)
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="20kB")
        file = folder / "model.safetensors.index.json"
        stored = json.loads(file.read_text())
        weight_map_of(folder, stored["weight_map"])
        file.write_text(json.dumps(stored))

    return change


def lose_a_shard(folder, weight_map):
    (folder / sorted(set(weight_map.values()))[1]).unlink()


def leave_the_folder(folder, weight_map):
    shutil.copy(folder / weight_map["decoder.bias"], folder.parent / "outside.safetensors")
    weight_map["decoder.bias"] = "../outside.safetensors"


def link_outside(folder):
    (folder.parent / "secret").write_text("token")
    (folder / "chat_template.jinja").symlink_to(folder.parent / "secret")


def write_published_code(folder):
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
    settings(folder, auto_map={"AutoConfig": "model.NeoBERTConfig", "AutoModel": "model.NeoBERT"})


def replace_tokenizer(num_tokens):
    def change(folder):
        vocabulary = json.loads((folder / "tokenizer.json").read_text())
        words = {f"word{i}": 5 + i for i in range(num_tokens)}
        vocabulary["model"]["vocab"] = dict(list(vocabulary["model"]["vocab"].items())[:5]) | words
        (folder / "tokenizer.json").write_text(json.dumps(vocabulary))

    return change


def embed_and(break_it):
    """A folder of sentence-transformers, broken."""

    def change(folder):
        whole = folder.parent / "whole"
        neobert_hf.sentence_transformer(str(folder)).save_pretrained(str(whole))
        shutil.rmtree(folder)
        whole.rename(folder)
        break_it(folder)

    return change


def put_pooling_outside(folder):
    modules = json.loads((folder / "modules.json").read_text())
    shutil.copytree(folder / modules[1]["path"], folder.parent / "pooling")
    modules[1]["path"] = "../pooling"
    (folder / "modules.json").write_text(json.dumps(modules))


def name_foreign_module(folder):
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["type"] = "somebody.pooling.Pooling"
    (folder / "modules.json").write_text(json.dumps(modules))


WO = f"{BLOCK}.wo.weight"
ZOO = {
    # layouts
    "gate and up apart": (lambda folder: weights(folder, split_gate_and_up), {"w1w2"}),
    "an export of the fork": (tie, {"w1w2", "tied-decoder"}),
    "a decoder that is there and said to be tied": (
        lambda folder: settings(folder, tie_word_embeddings=True),
        {"tied-decoder"},
    ),
    "a decoder without bias": (without("decoder.bias"), {"tied-decoder"}),
    "pickled weights": (pickled("pytorch_model.bin"), {"pickle"}),
    "weights of the published training": (pickled("state_dict.pt"), {"pickle"}),
    "states of DeepSpeed": (deepspeed, {"deepspeed"}),
    "NeoDictaBERT": (lambda folder: settings(folder, encoder_init_range=0.02), {"neodictabert"}),
    "tensors of another model": (
        lambda folder: save_file({"bert.embeddings": np.ones((2, 2), np.float32)}, folder / "model.safetensors"),
        {"other-tensors"},
    ),
    # tensors
    "a missing tensor": (without(WO), {"tensors-missing"}),
    "a missing last block": (
        lambda folder: weights(folder, lambda t: {k: v for k, v in t.items() if "encoder.2." not in k}),
        {"config-mismatch"},
    ),
    "another number of classes": (
        lambda folder: settings(folder, architectures=["NeoBERTForTokenClassification"]) or add_classifier(folder, 7),
        {"shape"},
    ),
    "no head": (without("decoder.weight", "decoder.bias"), {"tensors-missing"}),
    "half a head": (without("decoder.weight"), {"tensors-missing"}),
    "a tensor of an odd shape": (lambda f: weights(f, lambda t: t.update({WO: t[WO][:-1].copy()})), {"shape"}),
    "a tensor under two names": (
        lambda f: weights(f, lambda t: t.update({WO.removeprefix("model."): t[WO] + 1})),
        {"weights-unreadable"},
    ),
    "names of a wrapper": (lambda f: weights(f, lambda t: {f"module.{k}": v for k, v in t.items()}), {"prefix"}),
    "integers": (lambda f: weights(f, lambda t: t.update({WO: t[WO].astype(np.int8)})), {"dtype"}),
    # numbers
    "NaN": (put(WO, np.nan), {"nan"}),
    "infinity": (put(WO, -np.inf), {"infinity"}),
    "a flipped bit": (flip_a_bit_of_an_exponent, {"huge"}),
    # files
    "a pipe in the place of a config": (
        lambda f: (f / "config.json").unlink() or os.mkfifo(f / "config.json"),
        {"config-missing", "link"},
    ),
    "a config that is nested too deep": (
        lambda folder: (folder / "config.json").write_text('{"a":' + "[" * 200_000),
        {"config-unreadable"},
    ),
    "a number of blocks that takes for ever": (
        lambda f: (
            settings(f, num_hidden_layers=10**9)
            or weights(f, lambda t: {k.replace("encoder.2.", "encoder.99999999999."): v for k, v in t.items()})
        ),
        {"config-mismatch", "tensors-missing"},
    ),
    "a truncated file": (truncate, {"weights-unreadable"}),
    "a truncated adapter": (truncate_an_adapter, {"weights-unreadable"}),
    "an empty file": (lambda folder: (folder / "model.safetensors").write_bytes(b""), {"weights-unreadable"}),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), {"weights-unreadable"}),
    "a missing shard": (index(lose_a_shard), {"weights-unreadable"}),
    "shards without their index": (
        lambda f: index(lambda *_: None)(f) or (f / "model.safetensors.index.json").unlink(),
        {"weights-unreadable"},
    ),
    "a link to nothing": (
        lambda f: (f / "model.safetensors").unlink() or (f / "model.safetensors").symlink_to("../blobs/lost"),
        {"link", "weights-unreadable"},
    ),
    "an index that leaves the folder": (index(leave_the_folder), {"weights-unreadable"}),
    "a link out of the folder": (link_outside, {"link"}),
    # config
    "no config": (lambda folder: (folder / "config.json").unlink(), {"config-missing"}),
    "half a config": (
        lambda folder: (folder / "config.json").write_text('{"model_type":'),
        {"config-unreadable"},
    ),
    "another model type": (lambda f: settings(f, model_type="bert", hidden_size=64, dim_head=16), {"other-model"}),
    "a wrong value": (lambda folder: settings(folder, norm_eps=-1), {"config-invalid"}),
    "another vocabulary": (lambda folder: settings(folder, vocab_size=97), {"config-mismatch"}),
    "another width": (lambda folder: settings(folder, hidden_size=64, dim_head=16), {"config-mismatch"}),
    "another SwiGLU width": (lambda folder: settings(folder, intermediate_size=128), {"config-mismatch"}),
    "weights elsewhere": (lambda folder: settings(folder, transformers_weights="x.safetensors"), {"weights-elsewhere"}),
    # code
    "the published code": (write_published_code, {"rotary-buffer"}),
    "code of another repository": (
        lambda folder: settings(folder, auto_map={"AutoModel": "somebody/repository--code.Model"}),
        {"foreign-code"},
    ),
    "a pipeline of a third party": (
        lambda folder: settings(folder, custom_pipelines={"mine": {"impl": "somebody/repository--code.Pipeline"}}),
        {"foreign-code"},
    ),
    "code without one of its files": (lambda f: (f / "losses_neobert.py").unlink(), {"code-incomplete"}),
    "half a file of code": (lambda f: (f / "losses_neobert.py").write_text("def f("), {"code-damaged"}),
    # tokenizer
    "a tokenizer of another model": (replace_tokenizer(400), {"tokenizer-vocabulary"}),
    "half a tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), {"tokenizer-damaged"}),
    "a tokenizer without its vocabulary": (lambda f: (f / "tokenizer.json").unlink(), {"tokenizer-missing"}),
    # embedding models
    "NaN in an embedding model": (embed_and(put(WO.removeprefix("model."), np.nan)), {"nan"}),
    "a module outside": (embed_and(put_pooling_outside), {"module-outside"}),
    "a missing module": (embed_and(lambda folder: shutil.rmtree(folder / "1_Pooling")), {"module-missing"}),
    "a module of a third party": (embed_and(name_foreign_module), {"foreign-code"}),
}


@pytest.mark.parametrize("name", ZOO)
def test_each_damage_is_found_and_nothing_else_and_the_folder_is_unchanged(good, tmp_path, name):
    break_it, expected = ZOO[name]
    shutil.copytree(good, tmp_path / "model")
    break_it(tmp_path / "model")
    before = content(tmp_path)
    report = examine(tmp_path / "model")
    assert codes(report) == expected, report["findings"]
    assert not report["is_clean"] and content(tmp_path) == before
    for finding in report["findings"]:
        assert finding["where"] and len(finding["meaning"]) > 20 and len(finding["mend"]) > 10
        assert "\n" not in finding["meaning"] + finding["mend"]


# --- Good checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("auto_class", [name for name in AUTO_CLASSES if name != "AutoConfig"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_is_found_in_what_this_version_of_transformers_saves(
    checkpoint, tokenizer, tmp_path, auto_class, dtype
):
    model = AUTO_CLASSES[auto_class].from_pretrained(checkpoint, dtype=dtype)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    report = examine(tmp_path)
    assert report["findings"] == [] and report["is_clean"] and report["layout"] == "published"
    assert report["num_parameters"] == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.compat
def test_nothing_is_found_in_the_mini_model_and_in_folders_of_sentence_transformers(good, tmp_path):
    pytest.importorskip("sentence_transformers", reason="it saves the folder (pip install -e .[embed])")
    neobert_hf.sentence_transformer(str(good), normalize=True).save_pretrained(str(tmp_path))
    for folder in (tmp_path, neobert_hf.MINI_MODEL_PATH):
        assert examine(folder)["findings"] == []


@pytest.mark.parametrize("name", ["masked_lm", "classifier"])
def test_the_published_layout_has_only_remarks_on_what_is_not_in_the_folder(name):
    report = examine(GOLDEN / name)
    assert report["is_clean"] and codes(report, "remark") == {"code-missing", "tokenizer-missing"}


def test_nothing_is_found_in_a_build_in_shards_a_quantized_model_and_an_adapter(good, checkpoint, tokenizer, tmp_path):
    from neobert_hf.hub.build import BuildArguments, build

    built = build(BuildArguments(model=str(good), out=str(tmp_path / "built")))
    NeoBERTForMaskedLM.from_pretrained(good).save_pretrained(tmp_path / "shards", max_shard_size="20kB")
    shutil.copytree(good, tmp_path / "quantized")
    settings(tmp_path / "quantized", quantization_config={"quant_method": "torchao"})
    weights(tmp_path / "quantized", lambda t: {k: v.astype(np.int8) if "w12" in k else v for k, v in t.items()})
    (tmp_path / "adapter").mkdir()
    save_file(
        {"base_model.model.model.wo.lora_A.weight": np.ones((2, 2), np.float32)},
        tmp_path / "adapter/adapter_model.safetensors",
    )
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    tokenizer.save_pretrained(tmp_path / "shards")
    layouts = {}
    for folder in (built, *(tmp_path / name for name in ("shards", "quantized", "adapter"))):
        report = examine(folder)
        assert report["findings"] == [], report["findings"]
        layouts[folder.name] = report["layout"]
    assert layouts["adapter"] == "adapter"


def test_remarks_leave_a_folder_clean(good, tmp_path):
    shutil.copytree(good, tmp_path / "model")
    torch.save({}, tmp_path / "model/training_args.bin")
    with (tmp_path / "model/modeling_neobert.py").open("a") as code:
        code.write("# edited\n")
    settings(tmp_path / "model", "tokenizer_config.json", tokenizer_class="TokenizersBackend")
    weights(tmp_path / "model", lambda tensors: tensors | {"model.freqs_cis": np.ones((2, 2), np.float32)})
    report = examine(tmp_path / "model")
    assert report["is_clean"]
    assert codes(report, "remark") == {"pickle", "code-differs", "tokenizer-class", "tensors-unknown"}


# --- Numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("value", "kind"), [("nan", "nan"), ("inf", "infinity"), ("-inf", "infinity"), ("-3e6", "huge"), ("9e4", None)]
)
@pytest.mark.parametrize(
    "place", [0, 262_144, 300_000]
)  # the first and the last number, and the first of the second part
def test_one_odd_number_is_found_at_each_place_in_each_type(tmp_path, dtype, value, kind, place):
    tensor = torch.randn(300_001).to(dtype)
    tensor[place] = float(value)
    if dtype == torch.float16 and abs(float(value)) > 65504:  # becomes infinity
        kind = kind if kind == "nan" else "infinity"
    safetensors.torch.save_file({"a": tensor, "b": torch.tensor([float("nan")])}, tmp_path / "x.safetensors")
    assert odd_values(read_header(tmp_path / "x.safetensors")["a"]) == ({kind} if kind else set())


def test_an_empty_tensor_and_all_odd_numbers_together(tmp_path):

    odd = np.array([np.nan, np.inf, 1e30], np.float32)
    save_file({"a": odd, "b": np.zeros((0, 3), np.float32), "c": odd[2:]}, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    assert [odd_values(header[name]) for name in "abc"] == [{"nan", "infinity"}, set(), {"huge"}]


# --- Fine-tunes with a corrupted rotary table --------------------------------------------------------------------------


def fine_tune(base, folder, table=None, weight_decay=0.0, dtype=torch.float32):
    """Train all weights for some steps; `table` replaces the rotary table, as memory that nobody initialised does."""
    with pytest.MonkeyPatch.context() as patch:
        if table is not None:
            right = modeling_neobert.rotary_table
            patch.setattr(modeling_neobert, "rotary_table", lambda *arguments: table(right(*arguments)))
        model = NeoBERTForSequenceClassification.from_pretrained(base, num_labels=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=weight_decay)
        for _ in range(10):
            ids = torch.randint(5, 90, (8, 12))
            model.train()(input_ids=ids, labels=ids[:, 0] % 2).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.to(dtype).save_pretrained(folder)


@pytest.mark.parametrize(
    ("garbage", "weight_decay", "dtype"),
    [(0.0, 0.0, torch.float32), (1e-38, 0.1, torch.float32), (0.0, 0.1, torch.bfloat16)],
)
def test_a_fine_tune_without_positions_is_known_by_the_rows_of_q_and_k(good, tmp_path, garbage, weight_decay, dtype):
    """A table near zero makes all scores equal, so that the gradients of q and k vanish; weight decay scales these rows."""
    fine_tune(good, tmp_path / "damaged", lambda table: torch.full_like(table, garbage), weight_decay, dtype)
    fine_tune(good, tmp_path / "right", None, weight_decay, dtype)
    if weight_decay == 0:
        files = (good / "model.safetensors", tmp_path / "damaged/model.safetensors")
        before, after = (load_file(file)[f"{BLOCK}.qkv.weight"].reshape(4, 3, 8, 32) for file in files)
        assert np.array_equal(before[:, :2], after[:, :2]) and not np.array_equal(before[:, 2], after[:, 2])
    assert codes(examine(tmp_path / "damaged", base=good)) == {"corrupted-rotary"}
    assert not codes(examine(tmp_path / "right", base=good))
    assert not codes(examine(tmp_path / "damaged"))  # without the base model nobody can know
    assert not codes(examine(good, base=good))


@pytest.mark.parametrize("share, expected", [(0.02, {"corrupted-rotary"}), (0.2, set())])
def test_q_and_k_that_change_a_fifth_as_much_as_v_are_trained(good, tmp_path, share, expected):
    """Relative changes of 0.1 in v, in directions that no scaling explains, and a share of them in q and k."""
    shutil.copytree(good, tmp_path / "model")
    rng = np.random.default_rng(0)

    def change(tensors):
        for name in [name for name in tensors if name.endswith("qkv.weight")]:
            rows = tensors[name].reshape(4, 3, -1)
            noise = rng.standard_normal(rows.shape).astype(np.float32) * rows.std()
            rows += noise * np.array([share, share, 1], np.float32)[:, None] * 0.1

    weights(tmp_path / "model", change)
    assert codes(examine(tmp_path / "model", base=good)) == expected


def test_a_comparison_that_is_not_possible_is_named(good, tmp_path):
    shutil.copytree(good, tmp_path / "model")
    pickled("pytorch_model.bin")(tmp_path / "model")
    assert codes(examine(tmp_path / "model", base=good), "remark") == {"not-compared"}


def test_another_base_model_is_refused_in_one_line(good, tmp_path):
    config = CONFIG | {"hidden_size": 16, "dim_head": 4}
    other = write_checkpoint(tmp_path / "other", random_weights(config=config), config=config)
    with pytest.raises(
        ValueError, match=r"the base model .*other has no model\.transformer_encoder\.0\.qkv\.weight of the shape"
    ):
        examine(good, base=other)


# --- The command -------------------------------------------------------------------------------------------------------


def run(*arguments):
    """Run the command in this process; returns its status or its line of error, and its output."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", ["neobert", "doctor", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            neobert_cli.main()
    return ended.value.code, printed.getvalue()


def test_the_command_prints_findings_as_text_or_json_and_its_status_says_whether_there_is_an_error(good, tmp_path):
    shutil.copytree(good, tmp_path / "model")
    put(WO, np.nan)(tmp_path / "model")
    weights(tmp_path / "model", lambda tensors: tensors | {"\x1b[31mred\n": np.ones(1, np.float32)})
    status, text = run(tmp_path / "model")
    assert status == 1 and "\x1b" not in text  # a name cannot control the terminal
    assert text.splitlines()[0] == f"error nan: model.safetensors: {WO}"
    assert "remark tensors-unknown: \\x1b[31mred\\n" in text.splitlines()
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
    settings(folder, "tokenizer_config.json", tokenizer_class="TokenizersBackend")  # as transformers 5 does
    (finding,) = (each for each in examine(folder)["findings"] if each["code"] == "tokenizer-class")
    subprocess.run(finding["mend"], shell=True, check=True)
    assert read_json(folder / "tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "tokenizer-class" not in codes(examine(folder), "remark")
    texts = ["the [MASK] fox", "", "Old HTTPServer"]
    assert AutoTokenizer.from_pretrained(folder)(texts) == AutoTokenizer.from_pretrained(good)(texts)


def test_a_mend_can_be_pasted_into_a_shell(good, tmp_path):
    folder = tmp_path / "my model"
    shutil.copytree(good, folder)
    weights(folder, split_gate_and_up)
    (finding,) = examine(folder)["findings"]
    assert shlex.split(finding["mend"]) == ["neobert", "convert", str(folder), "NEW_FOLDER"]


def test_an_architecture_of_another_model_is_a_remark(good, tmp_path):
    shutil.copytree(good, tmp_path / "model")
    settings(tmp_path / "model", architectures=["BertModel"])
    assert codes(examine(tmp_path / "model"), "remark") == {"architecture"}


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("org/nothing", "neobert doctor: org/nothing cannot be downloaded"),
        ("../nothing", "neobert doctor: ../nothing does not exist; give an existing folder, or an id"),
        (".", "neobert doctor: . holds no weights; give a folder with"),
    ],
)
def test_a_source_that_cannot_be_read_is_an_error_in_one_line(tmp_path, monkeypatch, source, line):
    monkeypatch.chdir(tmp_path)
    message, text = run(source)
    assert not text and message.startswith(line) and "\n" not in message


SCRIPT = """
import neobert_cli, re, sys
sys.argv = ["neobert", "doctor", sys.argv[1]]
try:
    neobert_cli.main()
finally:
    loaded = [name for name in ("torch", "neobert_hf.embeddings") if sys.modules.get(name)]
    print(loaded, *re.findall(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_command_examines_a_gigabyte_in_less_than_300_mb_and_without_torch(tmp_path):
    """The last number of the file is NaN, so the whole file is read."""
    width = 1 << 18
    header = {"model.encoder.weight": {"dtype": "F32", "shape": [1000, width], "data_offsets": [0, 4000 * width]}}
    header = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.seek(4000 * width - 4, os.SEEK_CUR)  # a hole, which takes no disk
        stream.write(np.float32("nan").tobytes())
    (tmp_path / "config.json").write_text(
        json.dumps(CONFIG | {"hidden_size": width, "vocab_size": 1000, "dim_head": width // 4})
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(neobert_cli.__file__).parent)}
    options = {"env": environment, "capture_output": True, "text": True}
    process = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], **options)
    assert process.returncode == 1 and "error nan: " in process.stdout and not process.stderr
    loaded, _, peak_kb = process.stdout.splitlines()[-1].rpartition(" ")
    assert loaded == "[]" and int(peak_kb) < 300_000
