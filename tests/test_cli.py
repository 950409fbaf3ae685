"""`neobert ...`: the output of each command; an invalid command line, a damaged file or a full disk gives a one-line error."""

import ast
import errno
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("sentence_transformers", reason="neobert embed needs it (pip install -e .[embed])")

from conftest import largest_file, run_main
from sentence_transformers import SentenceTransformer

import neobert_cli
import neobert_hf
from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.embeddings import memory, vector_files

COMMANDS = [command.__name__ for command in neobert_cli.COMMANDS]


def run(*arguments):
    return run_main(neobert_cli, *arguments)


@pytest.fixture
def folder(checkpoint, tokenizer, tmp_path):
    NeoBERTForMaskedLM.from_pretrained(checkpoint).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def refuse(error):
    def raise_it(*arguments, **options):
        raise error

    return raise_it


# --- The command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["embed", "a.txt"], "neobert embed: error: the following arguments are required: --output/-o"),
        (["embed", "-o", "a.npy"], "neobert embed: error: the following arguments are required: FILE"),
        (["embed", "", "-o", "a.npy"], "neobert embed: error: an argument is an empty string"),
        (["tokenize", "--files"], "neobert tokenize: error: argument --files: expected at least one argument"),
        (
            ["tokenize", "--output_dir", "a", "--tokenizer_name", "b"],
            "neobert tokenize: error: one of the arguments --files --dataset_name is required",
        ),
        (["tokenize", "--output_dir", "a", "--tokenizer_name", "b", "--files", "c", "--sample_by", "page"],
         "neobert tokenize: error: argument --sample_by: invalid choice: 'page'"),
        (["embed", "a", "--batch_size", "1.5"], "neobert embed: error: argument --batch_size: invalid int value: '1.5'"),
        (["embed", "a", "--ouptut", "b"], "neobert embed: error: unknown argument --ouptut; did you mean --output?"),
        (["embed", "a", "-o", "b", "--text-column=9"],
         "neobert embed: error: unknown argument --text-column; did you mean --text_column?"),
        (["embed", "a", "b", "-o", "b", "-x"], "neobert embed: error: unknown argument -x"),
        (["tokenise"], "neobert: error: argument COMMAND: invalid choice: 'tokenise' (choose from"),
        (["--nope"], "neobert: error: unknown argument --nope"),
        (["--versoin"], "neobert: error: unknown argument --versoin; did you mean --version?"),
    ],
)  # fmt: skip
def test_an_invalid_command_line_ends_with_status_2_and_one_line(monkeypatch, capsys, tmp_path, argv, line):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run(*argv)
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == "" and len(printed.err.splitlines()) == 1
    assert printed.err.startswith(line) and "--help` lists the arguments" in printed.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("bad\nvalue"), "neobert embed: bad value"), (KeyboardInterrupt(), 130)]
)
def test_an_error_of_the_user_gives_one_line_and_ctrl_c_gives_status_130(monkeypatch, error, status):
    monkeypatch.delenv("NEOBERT_TRACEBACK", raising=False)
    monkeypatch.setattr(vector_files, "embed_files", refuse(error))
    with pytest.raises(SystemExit) as ended:
        run("embed", "a.txt", "-o", "a.npy")
    assert ended.value.code == status


def test_neobert_traceback_shows_the_traceback_of_an_error(monkeypatch):
    monkeypatch.setenv("NEOBERT_TRACEBACK", "1")
    monkeypatch.setattr(vector_files, "embed_files", refuse(ValueError("bad")))
    with pytest.raises(ValueError, match="bad"):
        run("embed", "a.txt", "-o", "a.npy")


def test_the_command_without_arguments_shows_its_help_and_version_shows_the_version():
    alone = run()
    assert run("--help") == alone and all(f"    {command} " in alone for command in COMMANDS)
    assert run("--version") == f"neobert_hf {neobert_hf.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_examples_and_a_text_for_each_argument(command):
    text = run(command, "--help")
    assert text.count(f"neobert {command} ") >= 2 and "None" not in text and "()" not in text
    parser = neobert_cli.Parser()
    getattr(neobert_cli, command)(parser)
    assert all(action.help for action in parser._actions)


def test_help_does_not_import_the_package():
    """The package takes seconds to import, so the module has no import of it outside of the commands."""
    tree = ast.parse(Path(neobert_cli.__file__).read_text("utf-8"))
    imported = {name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert imported <= set(sys.stdlib_module_names) | {"collections.abc"}
    script = f"{neobert_cli.__file__}"
    done = subprocess.run([sys.executable, "-X", "importtime", script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "COMMAND" in done.stdout
    assert not re.search(r"\b(neobert_hf|transformers|torch)$", done.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "candidates"),
    [
        ("neobert ", {*COMMANDS, "--help", "--version", "-h"}),
        ("neobert tokenize --exec", {"--executor", "--executor_options"}),
        ("neobert tokenize --sample_by ", {"line", "paragraph", "document"}),
    ],
)
def test_a_shell_completes_commands_options_and_choices(words, candidates, tmp_path):
    """The test sets the variables that the completion script of bash sets."""
    pytest.importorskip("argcomplete", reason="completion needs argcomplete, a dependency of this package")
    environment = os.environ | {"_ARGCOMPLETE": "1", "COMP_LINE": words, "COMP_POINT": str(len(words))}
    environment |= {"_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer")}
    subprocess.run([sys.executable, neobert_cli.__file__], env=environment, check=True)
    assert {word.strip() for word in (tmp_path / "answer").read_text().split("\n")} == candidates


# --- embed ------------------------------------------------------------------------------------------------------------


def test_work_that_exceeds_the_memory_is_refused_at_the_start(folder, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("the quick brown fox\n" * 100)
    embed = ("embed", tmp_path / "a.txt", "-o", tmp_path / "out.npy", "--model", folder)
    monkeypatch.setattr(memory, "available_bytes", lambda: 1999)
    with pytest.raises(
        SystemExit, match=r"reading .*a.txt takes 0.0 GB or more, but 0.0 GB of memory are free; split the"
    ):
        run(*embed)
    monkeypatch.setattr(memory, "available_bytes", lambda: 5000)
    with pytest.raises(SystemExit, match=r"embedding 100 texts, 64 at once takes .* choose a smaller batch size"):
        run(*embed)
    assert not (tmp_path / "out.npy").exists()
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    run(*embed)
    assert np.load(tmp_path / "out.npy").shape[0] == 100


@pytest.mark.parametrize("has_bf16", ["0", "1"])
def test_the_library_chooses_the_dtype_of_bf16_weights_and_keeps_other_dtypes(folder, monkeypatch, has_bf16):
    monkeypatch.setenv("NEOBERT_CPU_BF16", has_bf16)
    expected = torch.bfloat16 if has_bf16 == "1" else torch.float32
    assert vector_files.open_for_inference(neobert_hf.MINI_MODEL_PATH).dtype == expected
    assert vector_files.open_for_inference(folder).dtype == torch.float32


def read_npy(file):
    return None, np.load(file)


def read_jsonl(file):
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row["text"] for row in rows], np.array([row["embedding"] for row in rows], np.float32)


def read_parquet(file):
    pandas = pytest.importorskip("pandas", reason="this test reads with pandas, which datasets installs")
    rows = pandas.read_parquet(file)
    return list(rows["text"]), np.stack(rows["embedding"])


TEXTS = ["the quick, brown fox", "", 'the "old" sea']


@pytest.mark.parametrize("read", [read_npy, read_jsonl, read_parquet])
@pytest.mark.parametrize("ending", ["txt", "jsonl", "csv"])
def test_embed_writes_a_vector_for_each_text_of_a_file(folder, tmp_path, ending, read):
    """Other libraries read the file: the texts in their order, and the vectors of SentenceTransformer."""
    source, output = tmp_path / f"a.{ending}", tmp_path / f"out.{read.__name__.removeprefix('read_')}"
    quoted = [f'"{text.replace(chr(34), chr(34) * 2)}"' for text in TEXTS]
    content = {"txt": TEXTS, "jsonl": [json.dumps({"body": text}) for text in TEXTS], "csv": ["body", *quoted]}
    source.write_text("\n".join(content[ending]))
    columns = () if ending == "txt" else ("--text_column", "body", "--normalize")
    result = json.loads(run("embed", source, *columns, "-o", output, "--model", folder))
    texts, vectors = read(output)
    expected = SentenceTransformer(folder).encode(TEXTS, normalize_embeddings=bool(columns))
    assert texts in (None, TEXTS) and vectors.dtype == expected.dtype
    np.testing.assert_allclose(vectors, expected, atol=1e-6)  # float32; batches of one order
    assert (result["texts"], result["dimension"]) == vectors.shape


def test_embed_counts_the_texts_that_are_longer_than_the_model_reads(folder, tmp_path):
    model = SentenceTransformer(folder)
    model.max_seq_length = 6
    model.save_pretrained(str(tmp_path / "short"))
    (tmp_path / "texts.txt").write_text("the fox\nthe quick brown fox\nthe quick brown fox jumps\n")
    result = run("embed", tmp_path / "texts.txt", "-o", tmp_path / "a.npy", "--model", tmp_path / "short")
    result = json.loads(result.splitlines()[-1])
    assert (result["texts"], result["max_seq_length"], result["truncated"]) == (3, 6, 1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt: no text"),
        ("a.txt", b"fine\na\xffb\n", "a.txt, line 2 is not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": null}\n', "a.jsonl, line 2: text is None"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl, line 2: this is not JSON"),
        ("a.jsonl", b'{"body": "a"}\n', "a.jsonl, line 1: no column 'text'"),
        ("a.parquet", b"PAR1 and so on", "a.parquet cannot be read; it is damaged"),
        ("a.docx", b"x", "a.docx"),
    ],
)
def test_the_error_names_a_file_that_cannot_be_read_and_nothing_is_written(folder, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit, match=f"neobert embed: .*{message}"):
        run("embed", tmp_path / name, "-o", tmp_path / "out.npy", "--model", folder)
    assert not (tmp_path / "out.npy").exists()


def test_an_interrupted_embed_embeds_only_what_is_missing(folder, tmp_path, monkeypatch, capsys):
    """The output equals that of an uninterrupted command, and nothing else remains."""
    texts = [f"the fox {number}" for number in range(10)]
    (tmp_path / "a.txt").write_text("\n".join(texts))
    embed = ("embed", tmp_path / "a.txt", "--model", folder, "--normalize", "-o", tmp_path / "out.npy")
    encode, embedded = SentenceTransformer.encode, []

    def interrupted(self, block, **options):
        if len(embedded) == 6:
            raise KeyboardInterrupt
        embedded.extend(block)
        return encode(self, block, **options)

    monkeypatch.setattr(vector_files, "BLOCK", 3)
    monkeypatch.setattr(SentenceTransformer, "encode", interrupted)
    with pytest.raises(SystemExit, match="130"):
        run(*embed)
    assert "interrupted: 6 of 10 texts are embedded; the same command continues" in capsys.readouterr().err
    assert embedded == texts[:6] and not (tmp_path / "out.npy").exists()
    embedded.clear()
    run(*embed)
    assert embedded == texts[6:]
    monkeypatch.setattr(SentenceTransformer, "encode", encode)
    expected = SentenceTransformer(folder).encode(texts, normalize_embeddings=True)
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, atol=1e-6)  # float32, other batches
    assert {file.name for file in tmp_path.iterdir()} == {"a.txt", "model", "out.npy"}


def test_embed_reads_folders_and_patterns_and_truncates_at_the_given_length(folder, tmp_path):
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    for name, content in {
        "b.txt": "the fox\n",
        "sub/a.csv": "text\nold sea\n",
        "c.jsonl": '{"text": "warm"}\n',
    }.items():
        (data / name).write_text(content)
    (data / "notes.md").write_text("no texts in lines")
    for words, expected in [
        ((data,), ["the fox", "warm", "old sea"]),
        ((data / "*.txt", data / "sub"), ["the fox", "old sea"]),
    ]:
        run("embed", *words, "-o", tmp_path / "out.jsonl", "--model", folder)
        assert read_jsonl(tmp_path / "out.jsonl")[0] == expected
    (tmp_path / "long.txt").write_text("the quick brown fox jumps\nthe quick lazy dog\n")
    vectors = []
    for length in (4, 64):  # [CLS] the quick [SEP]
        result = run(
            "embed", tmp_path / "long.txt", "-o", tmp_path / "a.npy", "--model", folder, "--max_length", length
        )
        vectors.append(np.load(tmp_path / "a.npy"))
        assert json.loads(result)["truncated"] == (2 if length == 4 else 0)
    (short, other), (long, _) = vectors
    assert np.array_equal(short, other) and not np.allclose(short, long)


def test_embed_refuses_models_and_outputs_that_it_cannot_use(folder, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "a.jsonl").write_text('{"text": "a", "id": 1}\n')
    (tmp_path / "folder.npy").mkdir()
    neobert_hf.sparse_encoder(folder).save_pretrained(str(tmp_path / "sparse"))
    text, model, output = ("embed", tmp_path / "a.txt"), ("--model", folder), ("-o", tmp_path / "out.npy")
    for command, message in [
        ((*text, *model, *output, "--prompt_name", "nope"), "Prompt name 'nope' not found"),
        ((*text, *model, *output, "--max_length", "2"), "max_length=2 leaves no token beside"),
        (("embed", tmp_path / "no.txt", *model, *output), "^neobert embed: .*No such file or folder: '.*no.txt'$"),
        (("embed", tmp_path / "*.csv", *model, *output), r"^neobert embed: .*No such file or folder: '.*\*.csv'$"),
        (
            (*text, *model, "-o", tmp_path / "nowhere/out.npy"),
            "No such file or directory: out.npy could not be written",
        ),
        ((*text, *model, "-o", tmp_path / "folder.npy"), r"folder\.npy is a folder; name a file"),
        ((*text, *model, "-o", tmp_path / "a.bin"), r"a\.bin ends in none of \.npy, \.jsonl, \.parquet; choose one"),
        (
            (*text, *output, "--model", tmp_path / "no"),
            r"/no cannot be opened \(.*\); give an existing folder or a Hub",
        ),
        ((*text, *output, "--model", tmp_path / "sparse"), "sparse holds a SparseEncoder"),
        (
            ("embed", tmp_path / "a.jsonl", *model, "-o", tmp_path / ".." / tmp_path.name / "a.jsonl"),
            "is also an input",
        ),
    ]:
        with pytest.raises(SystemExit, match=message):
            run(*command)
        assert not (tmp_path / "out.npy").exists()
    assert (tmp_path / "a.jsonl").read_text() == '{"text": "a", "id": 1}\n'


@pytest.mark.parametrize("reason", ["read-only", "full"])
def test_embed_refuses_a_folder_that_cannot_be_written_at_the_start(folder, tmp_path, monkeypatch, reason):
    """The test replaces the write; chmod would not stop root."""
    (tmp_path / "a.txt").write_text("a")
    code, message = {
        "read-only": (errno.EROFS, "Read-only file system: out.npy could not be written; no text was embedded"),
        "full": (errno.ENOSPC, "the disk is full: out.npy could not be written; no text was embedded"),
    }[reason]
    monkeypatch.setattr(vector_files.tempfile, "TemporaryFile", refuse(OSError(code, "Read-only file system")))
    monkeypatch.setattr(vector_files, "open_for_inference", None)
    with pytest.raises(SystemExit, match=message):
        run("embed", tmp_path / "a.txt", "--model", folder, "-o", tmp_path / "out.npy")


@pytest.mark.parametrize("name", ["out.npy", "out.jsonl", "out.parquet"])
def test_a_full_disk_leaves_the_earlier_file_and_the_vectors_and_no_partial_output(folder, tmp_path, monkeypatch, name):
    """A limit on the size of files simulates a full disk: first while texts are embedded, then while the output is written."""
    words = random.Random(0).choices(["the", "quick", "brown", "fox", "old", "sea"], k=8000)
    # rows that do not compress
    (tmp_path / "a.txt").write_text("".join(f"{' '.join(words[i : i + 8])}\n" for i in range(0, 8000, 8)))
    (tmp_path / name).write_text("earlier")
    embed = ("embed", tmp_path / "a.txt", "--model", folder, "-o", tmp_path / name)
    with largest_file(30_000), pytest.raises(SystemExit, match=f"{name}.vectors, which keeps vectors, cannot be used"):
        run(*embed)
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(vector_files, "writing", refuse(KeyboardInterrupt()))
        run(*embed)
    written = f"File too large: {name} could not be written; the previous content is unchanged"
    with largest_file(30_000), pytest.raises(SystemExit, match=written):
        run(*embed)
    assert (tmp_path / name).read_text() == "earlier" and not list(tmp_path.glob("*.part"))
    with monkeypatch.context() as patch:
        patch.setattr(SentenceTransformer, "encode", refuse(AssertionError("a text is embedded again")))
        run(*embed)
    assert {file.name for file in tmp_path.iterdir()} == {"a.txt", "model", name}


# --- tokenize ---------------------------------------------------------------------------------------------------------


def test_tokenize_reads_every_named_file(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "a.csv").write_text("text\nthe quick fox\n")
    (tmp_path / "b.csv").write_text("text\nold sea\nthe dog\n")
    where = ("--tokenizer_name", tmp_path / "tokenizer", "--output_dir", tmp_path / "documents", "--workers", 1)
    (tmp_path / "c.csv").write_text("text\nthe lazy dog\n")
    files = ("--files", tmp_path / "a.csv", tmp_path / "b.csv", "--files", tmp_path / "c.csv")
    assert json.loads(run("tokenize", *files, *where))["num_documents"] == 4
