"""Against a local Hub: a push and a drop-in open the pull request that they print, send nothing else, and show no token."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import push
import pytest
import replacement
from building import build
from conftest import GOLDEN, run_main
from hub_server import LocalHub

ROOT = Path(__file__).parents[2]
TOKEN = "hf_" + "notARealTokenOfAnybody" * 2

# The published code in small: what it computes is wrong on purpose, so that no test passes by running it.
OLD_CODE = {
    "model.py": """
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from .rotary import precompute_freqs_cis
class NeoBERTConfig(PretrainedConfig):
    model_type = "neobert"
class NeoBERT(PreTrainedModel):
    config_class = NeoBERTConfig
    def __init__(self, config):
        raise RuntimeError("this is the old code")
NeoBERTLMHead = NeoBERTForSequenceClassification = NeoBERT
""",
    "rotary.py": "def precompute_freqs_cis(*args):\n    return float('nan')\n",
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A local Hub, which this process and its subprocesses use with a token; the cache is empty."""
    server = LocalHub(TOKEN)
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    template = f"{server.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    for module in (constants, huggingface_hub.file_download):  # the second in older versions
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home/hub"))
    environment = {"HF_ENDPOINT": server.endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
    for name, value in {**environment, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}.items():
        monkeypatch.setenv(name, value)
    # A session that was opened offline stays offline.
    close = getattr(huggingface_hub.utils, "reset_sessions", None) or huggingface_hub.close_session
    close()
    yield server
    close()
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def folder(checkpoint, tokenizer, tmp_path_factory):
    place = tmp_path_factory.mktemp("built")
    tokenizer.save_pretrained(place / "tokenizer")
    return build(checkpoint, place / "small", tokenizer=place / "tokenizer")


@pytest.fixture
def unverified(monkeypatch):
    """Skip the process that loads the folder, in a test of something else."""
    report = {"ok": True, "transformers": "5", "own": "AutoModelForMaskedLM", "classes": {"AutoModel": "NeoBERTModel"}}
    for module in (push, replacement):
        monkeypatch.setattr(module, "verify", lambda folder: report)


def published(kind, tokenizer, place):
    """The files of a repository as `chandar-lab/NeoBERT` has them: a golden checkpoint, a tokenizer, and the old code."""
    shutil.copytree(GOLDEN / kind, place / kind)
    tokenizer.save_pretrained(place / kind)
    settings = json.loads((place / kind / "tokenizer_config.json").read_text())
    names = ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "model_max_length")
    settings = {name: settings[name] for name in names} | {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    (place / kind / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, text in {**OLD_CODE, "README.md": "---\nlicense: mit\n---\n# NeoBERT\n"}.items():
        (place / kind / name).write_text(text)
    return {file.name: file.read_bytes() for file in (place / kind).iterdir()}


def clean_run(*arguments):
    """The errors against the golden tensors in a process without the package, or the error of that process."""
    command = [sys.executable, "-I", str(ROOT / "tests/loads_golden.py"), *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True)
    return json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else run.stderr


def commit_of(hub):
    header, *lines = (json.loads(line) for line in hub.sent("/commit/")[0].splitlines())
    return header["value"], {line["value"]["path"] for line in lines}


def test_a_dry_run_prints_the_files_and_asks_nobody(hub, folder, unverified):
    output = run_main(push, folder, "org/small")
    files = {name: int(size.replace(",", "")) for size, name in re.findall(r"^ +([\d,]+) bytes  (.+)$", output, re.M)}
    assert files == {file.name: file.stat().st_size for file in folder.iterdir()}
    assert 'AutoModelForMaskedLM.from_pretrained("org/small", revision="refs/pr/N"' in output
    assert "nothing was sent; --push opens this pull request" in output and not hub.requests


def test_a_name_in_the_folder_cannot_control_the_terminal(folder, monkeypatch):
    report = {"ok": True, "transformers": "5", "own": "Auto\x1b[2JModel", "classes": {"\x9b2JAuto": ""}}
    monkeypatch.setattr(push, "verify", lambda folder: report)
    output = run_main(push, folder, "org/small")
    assert not {"\x1b", "\x9b"} & set(output) and "AutoModel.from_pretrained" in output


def test_a_push_creates_the_repository_if_asked_and_opens_a_pull_request(hub, folder, unverified, tmp_path, capfd):
    with pytest.raises(SystemExit, match=r"Repository Not Found.* --create private creates a repository") as error:
        run_main(push, folder, "org/small", "--push")
    assert not hub.references and "\n" not in str(error.value)
    output = run_main(push, folder, "org/small", "--push", "--create", "private")
    assert f"opened {hub.endpoint}/org/small/discussions/1" in output
    wanted = json.loads(hub.sent("repos/create")[0])
    assert wanted.get("private") or wanted["visibility"] == "private"  # two versions of huggingface_hub
    sent = hub.files("org/small", "refs/pr/1")
    assert sent.keys() == {file.name for file in folder.iterdir()} | {".gitattributes"}
    assert all((folder / name).read_bytes() == sent[name] for name in sent.keys() - {".gitattributes"})
    header, _ = commit_of(hub)
    assert header["summary"] == "Upload small" and 'revision="refs/pr/N"' in header["description"]
    assert header["description"].strip() in output  # what was sent is what was printed
    assert hub.files("org/small").keys() == {".gitattributes"}  # main changes when its owner merges
    texts = [file.read_bytes().decode(errors="replace") for file in tmp_path.rglob("*") if file.is_file()]
    assert not any(TOKEN in text for text in (output, *capfd.readouterr(), *texts))


def test_files_that_the_repository_has_are_not_sent_again(hub, folder, unverified):
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    hub.put("org/small", files)
    output = run_main(push, folder, "org/small", "--push", "--create", "private")
    assert "org/small has these files already; no pull request was opened" in output
    assert not hub.sent("/commit/")
    hub.put("org/small", files | {"README.md": b"# Old\n"})
    run_main(push, folder, "org/small", "--push")
    assert commit_of(hub)[1] == {"README.md"}


def link_outside(copy):
    (copy.parent / "secret.txt").write_text("secret")
    (copy / "notes.txt").symlink_to(copy.parent / "secret.txt")


def foreign_code(copy):
    change_json(copy / "config.json", auto_map={"AutoModel": "other/place--model.NeoBERT"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("training_args.bin", "training_args.bin, which is no part of a published model"),
        ("models/checkpoint-5/model.safetensors", "is no part"),
        ("optimizer.safetensors", "is no part"),
        ("run.json", "is no part"),
        ("training.json", "is no part"),
        ("training_summary.json", "is no part"),
        (".env", "is no part"),
        (".git/config.json", "is no part"),
        ("onnx/.secret.json", "is no part"),
        ("notes.txt", "holds notes.txt, which has a token of the Hub in it"),
        (link_outside, r"notes\.txt refers to .*, outside its folder"),
        (foreign_code, "names foreign code"),
        (lambda copy: os.mkfifo(copy / "x.json"), "is a pipe"),
    ],
)
def test_a_folder_with_anything_else_is_refused_before_the_hub_is_asked(hub, folder, tmp_path, change, fault):
    copy = shutil.copytree(folder, tmp_path / "copy")
    if isinstance(change, str):
        (copy / change).parent.mkdir(exist_ok=True, parents=True)
        (copy / change).write_text(f"token: {TOKEN}")
    else:
        change(copy)
    with pytest.raises(SystemExit, match=fault) as error:
        run_main(push, copy, "org/small", "--push")
    assert not hub.requests and TOKEN not in str(error.value)


@pytest.mark.parametrize("is_reached", [True, False])
def test_a_hub_that_refuses_or_is_not_there_is_one_line_and_changes_nothing(
    hub, folder, unverified, is_reached, monkeypatch
):
    before = hub.put("org/small", {"README.md": b"# Old\n"})
    hub.token = "another"
    if not is_reached:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # huggingface_hub repeats some requests
    message = r"org/small: .*(401|[Cc]onnect).*; `hf auth login` saves a token.*/discussions lists the pull request"
    with pytest.raises(SystemExit, match=message) as error:
        run_main(push, folder, "org/small", "--push")
    assert "\n" not in str(error.value) and TOKEN not in str(error.value)
    assert hub.references["org/small"].keys() == {"main", before}


@pytest.mark.compat
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["masked_lm", "classifier"])
def test_after_a_drop_in_every_auto_class_agrees_with_the_golden_tensors(hub, kind, tokenizer, tmp_path):
    """The repository is read by its id from the local Hub, as a user reads it; so is a fine-tune that names its old code."""
    files = published(kind, tokenizer, tmp_path)
    hub.put("org/old", files)
    output = run_main(push, "--drop-in", "org/old", "--push")
    assert f"opened {hub.endpoint}/org/old/discussions/1" in output and TOKEN not in output

    sent, (header, paths) = hub.files("org/old", "refs/pr/1"), commit_of(hub)
    ours = {name for name in sent if name.endswith("_neobert.py")}
    assert paths == {"config.json", "model.py", "rotary.py"} | ours and "modeling_neobert.py" in ours
    assert all(sent[name] == files[name] for name in files.keys() - {"config.json", "model.py", "rotary.py"})
    assert "rotary.py" not in sent and hub.files("org/old") == files
    before, after = json.loads(files["config.json"]), json.loads(sent["config.json"])
    assert list(after) == list(before) and [name for name in before if before[name] != after[name]] == ["auto_map"]
    text = header["description"]
    assert "The rotary table is a buffer" in text and "xformers" not in text  # of which OLD_CODE has no trace
    assert str(tmp_path) not in text and "AutoModelForTokenClassification" in text
    errors = clean_run("org/old", "refs/pr/1")
    assert len(errors) == 6 and max(errors.values()) < 1e-4, errors  # float32, as in tests/model/test_golden.py
    if kind == "classifier":
        return
    snippet = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1].replace("refs/pr/N", "refs/pr/1")
    run = subprocess.run([sys.executable, "-I", "-c", snippet], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.startswith("tensor(") and "nan" not in run.stdout, run.stderr

    hub.put("org/old", sent)  # the owner merges
    fine_tune = shutil.copytree(GOLDEN / kind, tmp_path / "fine_tune")
    auto_map = {name: f"org/old--{reference}" for name, reference in before["auto_map"].items()}
    (fine_tune / "config.json").write_text(json.dumps(before | {"auto_map": auto_map}))
    errors = clean_run(fine_tune)
    assert len(errors) == 3 and max(errors.values()) < 1e-4, errors


@pytest.fixture
def copied(tokenizer, tmp_path):
    published("masked_lm", tokenizer, tmp_path)
    return tmp_path / "masked_lm"


def change_json(file, **values):
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **values}))


def test_replaced_code_that_is_replaced_again_does_not_change(copied):
    replacement.replace_code(copied, "org/old")
    once = {file.name: file.read_bytes() for file in copied.iterdir()}
    again = replacement.replace_code(copied, "org/old")
    assert once == {file.name: file.read_bytes() for file in copied.iterdir()}
    assert not again.aliases and not again.deleted and not again.new_classes


@pytest.mark.parametrize(
    ("name", "text", "kept"),
    [
        ("handler.py", "import numpy\nfrom rotary import precompute_freqs_cis\n", {"rotary.py"}),
        ("words.py", "from .model import NeoBERT\n", {"model.py", "rotary.py"}),
        ("other.json", '{"auto_map": {"AutoTokenizer": [null, "rotary.Tokenizer"]}}', {"rotary.py"}),
        ("other.json", '{"auto_map": {"A": ["org/old--model.Tokenizer", null]}}', {"model.py", "rotary.py"}),
        ("other.json", '{"a": "another/place--model.Tokenizer", "b": "model.safetensors"}', set()),
    ],
)
def test_old_code_that_another_file_names_stays_as_it_is(copied, name, text, kept):
    (copied / name).write_text(text)
    replaced = replacement.replace_code(copied, "org/old")
    same = {old for old, code in OLD_CODE.items() if (copied / old).exists() and (copied / old).read_text() == code}
    assert same == kept
    assert set(replaced.aliases) == {"model.py"} - kept and set(replaced.deleted) == {"rotary.py"} - kept
    assert (copied / name).read_text() == text


def test_code_that_stays_does_not_run_unless_this_is_asked_for(hub, tokenizer, tmp_path):
    files = published("masked_lm", tokenizer, tmp_path)
    words = f"from transformers import BertTokenizer\nopen({str(tmp_path / 'ran')!r}, 'w')\nclass Words(BertTokenizer): pass\n"
    settings = json.loads(files["tokenizer_config.json"]) | {"auto_map": {"AutoTokenizer": ["words.Words", None]}}
    hub.put("org/old", files | {"words.py": words.encode(), "tokenizer_config.json": json.dumps(settings).encode()})
    with pytest.raises(SystemExit, match=r"org/old keeps words\.py, code of its own .* add --trust-remote-code"):
        run_main(push, "--drop-in", "org/old")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"auto_map": {"AutoModel": "model.MyHead"}}, "names model.MyHead for AutoModel, a class that this package"),
        ({"model_type": "bert"}, "this is a bert, not a NeoBERT"),
        ({"encoder_init_range": 0.02}, "marks a NeoDictaBERT checkpoint"),
        ({"auto_map": ["model.NeoBERT"]}, "is not the config of a model"),
        (None, "org/old has no config.json at its root"),
    ],
)
def test_a_repository_in_another_layout_is_refused_before_a_file_changes(copied, values, message):
    if values is None:
        (copied / "config.json").unlink()
    else:
        change_json(copied / "config.json", **values)
    before = {file.name: file.read_bytes() for file in copied.iterdir()}
    with pytest.raises((ValueError, OSError), match=message):
        replacement.replace_code(copied, "org/old")
    assert before == {file.name: file.read_bytes() for file in copied.iterdir()}


@pytest.mark.slow
def test_weights_that_do_not_load_are_refused_and_nothing_is_sent(hub, tokenizer, tmp_path):
    files = published("masked_lm", tokenizer, tmp_path)
    hub.put("org/old", files | {"model.safetensors": files["model.safetensors"][:1000]})
    with pytest.raises(SystemExit, match=r"org/old does not load with the code of this package: .*; nothing was sent"):
        run_main(push, "--drop-in", "org/old", "--push")
    assert {method for method, _, _ in hub.requests} <= {"GET", "HEAD"}
    with pytest.raises(SystemExit, match="Repository Not Found") as error:
        run_main(push, "--drop-in", "org/none")
    assert "\n" not in str(error.value)
