"""`neobert ...`: the output of each command; an invalid command line, a damaged file or a full disk gives a one-line error."""

import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import run_main

import neobert_hf
from neobert_cli import commands as neobert_cli
from neobert_cli.parser import Parser
from neobert_hf.pretraining import CorpusArguments, PretrainingArguments
from neobert_hf.runs import CommandParser

COMMANDS = [command.__name__.replace("_", "-") for command in neobert_cli.COMMANDS]


def run(*arguments):
    return run_main(neobert_cli, *arguments)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["embed", "a.txt"], "neobert embed: error: the following arguments are required: --output/-o"),
        (["embed", "-o", "a.npy"], "neobert embed: error: the following arguments are required: FILE"),
        (["tokenize", "--output_dir", "a", "--tokenizer_name", "b"],
         "neobert tokenize: error: one of the arguments --files --dataset_name is required"),
        (["tokenize", "--output_dir", "a", "--tokenizer_name", "b", "--files", "c", "--sample_by", "page"],
         "neobert tokenize: error: argument --sample_by: invalid choice: 'page'"),
        (["embed", "a", "--ouptut", "b"], "neobert embed: error: unknown argument --ouptut; did you mean --output?"),
        (["embed", "a", "b", "-o", "b", "-x"], "neobert embed: error: unrecognized arguments: -x"),
        (["serach", "--top_k", "3"], "neobert: error: unknown command serach; did you mean search?"),
        (["finetune_classifier"], "neobert: error: unknown command finetune_classifier; did you mean finetune-classifier?"),
        (["nothing"], "neobert: error: unknown command nothing; `neobert --help` lists the commands"),
        (["--nope"], "neobert: error: unknown argument --nope"),
    ],
)  # fmt: skip
def test_an_invalid_command_line_ends_with_status_2_and_one_line(monkeypatch, capsys, tmp_path, argv, line):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run(*argv)
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == "" and len(printed.err.splitlines()) == 1
    assert printed.err.startswith(line) and re.search(r"--help`? lists the (arguments|commands)$", printed.err)
    assert not list(tmp_path.iterdir())


def test_ctrl_c_during_the_imports_ends_the_command_without_a_traceback():
    script = "import signal; from neobert_cli import commands as neobert_cli\n"
    # tests in the background ignore it
    script += "signal.signal(signal.SIGINT, signal.default_int_handler)\nneobert_cli.main()"
    command = [sys.executable, "-X", "importtime", "-c", script, "embed", __file__, "-o", "a.npy"]
    environment = {**os.environ, "PYTHONPATH": str(Path(neobert_cli.__file__).parents[1])}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        while "| torch." not in (line := " ".join(process.stderr.readline().split())):
            assert line.startswith("import time:")
        process.send_signal(signal.SIGINT)
        lines = process.stderr.read().splitlines()
    assert process.returncode == 130 and not [line for line in lines if not line.startswith("import time:")]


def test_help_does_not_wait_for_the_imports():
    command = [sys.executable, "-X", "importtime", "-m", "neobert_cli", "finetune-classifier", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert "--label_separator TEXT" in done.stdout
    assert not re.search(r"\b(neobert_hf|transformers|torch)$", done.stderr, re.MULTILINE)


def test_the_command_without_arguments_shows_its_help_and_version_shows_the_version():
    alone = run()
    assert run("--help") == alone
    assert all(re.search(rf"^ +{command} .*\w", alone, re.MULTILINE) for command in [*COMMANDS, *neobert_cli.SCRIPTS])
    assert run("--version") == f"neobert_hf {neobert_hf.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_examples_and_a_text_for_each_argument(command):
    text = run(command, "--help")
    assert text.count(f"neobert {command} ") >= 2 and "None" not in text and "()" not in text
    parser = Parser()
    getattr(neobert_cli, command.replace("-", "_"))(parser)
    assert all(action.help for action in parser._actions)


@pytest.mark.parametrize(
    ("words", "candidates"),
    [
        ("neobert ", {*COMMANDS, *neobert_cli.SCRIPTS, "--help", "--version", "-h"}),
        ("neobert finetune-classifier --text_columns a b --trai", {"--train_file"}),
        ("neobert finetune-tagger --train_file tic", {"tickets.conll"}),
        ("neobert tokenize --exec", {"--executor"}),
        ("neobert tokenize --sample_by ", {"line", "paragraph", "document"}),
    ],
)
def test_a_shell_completes_commands_options_and_choices(words, candidates, tmp_path):
    """The test sets the variables that the completion script of bash sets."""
    environment = os.environ | {"_ARGCOMPLETE": "1", "COMP_LINE": words, "COMP_POINT": str(len(words))}
    environment |= {"_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer")}
    (tmp_path / "tickets.conll").touch()
    subprocess.run([sys.executable, neobert_cli.__file__], env=environment, check=True, cwd=tmp_path)
    assert {word.strip() for word in (tmp_path / "answer").read_text().split("\n")} == candidates


NO_FOLDER = "is no folder; give an existing folder, or an id on the Hub such as org/name"
NO_COLUMN = "no column 'team' among text, label; name it by --text_columns, --label_column or --label_columns"
MISTAKES = [  # that are refused before torch is imported, and the line
    ("finetune-classifier --train_file none.csv", "No such file or folder: 'none.csv'"),
    ("finetune-classifier --train_file a.csv --label_column team", f"a.csv, line 2: {NO_COLUMN}"),
    ("finetune-classifier --train_file a.xlsx", "a.xlsx has the suffix '.xlsx'; save it as CSV"),
    ("finetune-classifier --train_file=a.csv --model_name_or_path modle", f"modle {NO_FOLDER}"),
    ("finetune-qa --train_file a.csv --model_name_or_path org/none", "org/none cannot be downloaded"),
    ("train-reranker --train_files a.csv --output_dir taken", "taken holds notes.txt; choose a new or empty folder"),
    ("finetune-tagger --train_file a.csv --resume_from_checkpoint b", "--resume_from_checkpoint=b is no folder; give"),
    ("pretrain-mlm --train_files folder/*.txt --use_cpu", "No such file or folder: 'folder/*.txt'"),
    ("pretrain-mlm --tokenizer_name tokneizer", f"tokneizer {NO_FOLDER}"),
    ("embed none.txt -o a.npy", "No such file or folder: 'none.txt'"),
    ("export modle out", f"modle {NO_FOLDER}"),
    ("serve taken --port 70000", "the port 70000 is not between 0 and 65535"),
    ("finetune-qa", "give --train_file or --dataset_name to train"),
    ("finetune-tagger --test_file a.csv --max_seq_length 9999", "--max_seq_length=9999 is more than the 512 positions"),
    ("finetune-classifier --lerning_rate 1", "error: unknown argument --lerning_rate; did you mean --learning_rate?"),
    (
        "finetune-qa --no_fp16 --save-steps 2 --wieght_decay 1",
        "error: unknown argument --wieght_decay; did you mean --w",
    ),
    ("finetune-classifier --weight_decay x", "error: argument --weight_decay: invalid float value: 'x'"),
    ("pretrain-mlm --bf16 maybe", "error: argument --bf16: 'maybe' is neither true nor false"),
]


@pytest.mark.parametrize(("words", "line"), MISTAKES)
def test_a_mistake_ends_with_one_line_before_torch_is_imported(words, line, tmp_path):
    for name, content in {"a.csv": "text,label\na,b\n", "a.xlsx": "", "taken/notes.txt": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    script = "import atexit, sys\natexit.register(lambda: print('torch' in sys.modules))\n"
    script += "from neobert_cli.commands import main; main()"
    options = {"cwd": tmp_path, "env": {**os.environ, "HF_HUB_OFFLINE": "1"}, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", script, *words.split()], **options, check=False)
    status = 2 if line.startswith("error: ") else 1
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "False\n", 1)
    assert done.stderr.startswith(f"neobert {words.split()[0]}: {line}")


def test_a_command_tells_the_next_one_as_it_can_be_pasted(capsys, monkeypatch, tmp_path):
    """From text to a training, whose arguments exist; after an export to the server, and after a conversion to the doctor."""
    monkeypatch.chdir(tmp_path)
    Path("my text.txt").write_text("the quick fox\nold sea and the dog\n")

    def told(*words):
        printed = run(*words)
        *_, last = capsys.readouterr().err.splitlines() or [""]
        return shlex.split(last)[1:], printed

    words, _ = told("train-tokenizer", "--files", "my text.txt", "--sample_by", "line", "--output_dir", "my tokenizer")
    words, printed = told(*words, "--workers", 1, "--json")
    found = vars(CommandParser([CorpusArguments, PretrainingArguments]).parse_args(words[1:]))
    assert words[0] == "pretrain-mlm" and found["documents_dir"] == json.loads(printed)["folder"] == "runs/documents"

    monkeypatch.setattr(neobert_hf.export, "export_model", lambda task, **options: {"task": task, "files": {}})
    monkeypatch.setattr(importlib.import_module("neobert_hf.checkpoints.conversion"), "convert", lambda **options: {})
    Path("a").mkdir()
    export, convert = ["export", "a", "my b", "--task"], ["convert", "a", "my b"]
    assert told(*export, "text-classification")[0] == ["serve", "my b"] and told(*convert)[0] == ["doctor", "my b"]
    for words in ([*export, "token-classification", "--to", "gguf"], [*export, "fill-mask"]):
        assert told(*words)[0] == []  # no command reads such a folder


@pytest.mark.parametrize(
    ("content", "changes", "line"),
    [
        ("a b", ("--vocab_size", 6), "vocab_size=6 is out of bounds; choose "),
        ("a b", ("--output_dir", "."), ". holds a.txt; choose a new or empty folder"),
        ("a b", ("--files", "none.txt"), "No such file or folder: 'none.txt'"),
        ("", (), "a.txt holds no document; give a source with text"),
        ("\x01\x02", (), "the texts hold no word"),
    ],
)
def test_train_tokenizer_refuses_in_one_line_and_writes_nothing(tmp_path, monkeypatch, content, changes, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(SystemExit) as ended:
        run("train-tokenizer", "--files", "a.txt", "--output_dir", "out", *changes)
    assert line in ended.value.code and "\n" not in ended.value.code
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]
