"""`neobert ...`: the output of each command; an invalid command line, a damaged file or a full disk gives a one-line error."""

import errno
import inspect
import io
import json
import random
import re
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip(
    "sentence_transformers", reason="`neobert embed` needs sentence-transformers (pip install -e .[embed])"
)

from sentence_transformers import SentenceTransformer

import neobert_hf
from neobert_hf import NeoBERTForMaskedLM, cli
from neobert_hf.data.shards import Shards, most_processes
from neobert_hf.embeddings import memory
from neobert_hf.pretraining.arguments import CorpusArguments, PretrainingArguments
from neobert_hf.pretraining.trainer import training_rows


@pytest.fixture
def folder(checkpoint, tokenizer, tmp_path):
    NeoBERTForMaskedLM.from_pretrained(checkpoint).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def refuse(error):
    def raise_it(*arguments, **options):
        raise error

    return raise_it


def test_work_that_exceeds_the_memory_is_refused_at_the_start(folder, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("the quick brown fox\n" * 100)
    embed = ("embed", tmp_path / "a.txt", "-o", tmp_path / "out.npy", "--model", folder)
    monkeypatch.setattr(memory, "available_bytes", lambda: 1999)
    with pytest.raises(
        SystemExit, match=r"reading .*a.txt takes 0.0 GB or more, but 0.0 GB of memory are free; split the"
    ):
        run(monkeypatch, *embed)
    monkeypatch.setattr(memory, "available_bytes", lambda: 5000)
    with pytest.raises(SystemExit, match=r"embedding 100 texts, 64 at once takes .* choose a smaller --batch_size"):
        run(monkeypatch, *embed)
    assert not (tmp_path / "out.npy").exists()
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    run(monkeypatch, *embed)
    assert np.load(tmp_path / "out.npy").shape[0] == 100


@pytest.mark.parametrize("has_bf16", ["0", "1"])
def test_the_library_chooses_the_dtype_of_bf16_weights_and_keeps_other_dtypes(folder, monkeypatch, has_bf16):
    monkeypatch.setenv("NEOBERT_CPU_BF16", has_bf16)
    assert cli.embedding_model(neobert_hf.MINI_MODEL_PATH).dtype == (
        torch.bfloat16 if has_bf16 == "1" else torch.float32
    )
    assert cli.embedding_model(folder).dtype == torch.float32


def run(monkeypatch, *arguments, typed=""):
    monkeypatch.setattr(sys, "argv", ["neobert", *map(str, arguments)])
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    cli.main()


def test_embed_writes_a_vector_for_each_text_of_a_file(folder, tmp_path, monkeypatch):
    texts = ["the quick brown fox", "", "old sea"]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in texts))
    expected = SentenceTransformer(folder).encode(texts)
    run(monkeypatch, "embed", tmp_path / "texts.txt", "-o", tmp_path / "a.npy", "--model", folder)
    np.testing.assert_allclose(np.load(tmp_path / "a.npy"), expected, atol=1e-6)
    columns = ("--text_column", "body", "--normalize")
    run(monkeypatch, "embed", tmp_path / "rows.jsonl", *columns, "-o", tmp_path / "b.jsonl", "--model", folder)
    rows = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == texts
    vectors = np.array([row["embedding"] for row in rows])
    np.testing.assert_allclose(vectors, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-6)


def test_embed_counts_the_texts_that_are_longer_than_the_model_reads(folder, tmp_path, monkeypatch, capsys):
    model = SentenceTransformer(folder)
    model.max_seq_length = 6
    model.save_pretrained(str(tmp_path / "short"))
    (tmp_path / "texts.txt").write_text("the fox\nthe quick brown fox\nthe quick brown fox jumps\n")
    capsys.readouterr()
    run(monkeypatch, "embed", tmp_path / "texts.txt", "-o", tmp_path / "a.npy", "--model", tmp_path / "short")
    result = json.loads(capsys.readouterr().out)
    assert (result["texts"], result["max_seq_length"], result["truncated"]) == (3, 6, 1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b"fine\na\xffb\n", "a.txt is not UTF-8 in line 2"),
        ("a.jsonl", b'{"text": "a"}\n{"text": null}\n', "a.jsonl line 2: text is None"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ["a", "b"]}\n', "a.jsonl line 2: text is .*, a list"),
        ("a.jsonl", b'{"text": "a \\ud800"}\n', "a.jsonl line 1: text has the lone surrogate"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl line 2 is not JSON"),
        ("a.jsonl", b'{"body": "a"}\n', "text"),
        ("a.csv", b'text\nfine\n"cut', "a.csv line 3 is not CSV"),
        ("a.csv", b"text\nfine\na\xffb\n", "a.csv is not UTF-8 in line 3"),
        ("a.parquet", b"PAR1 and so on", "a.parquet cannot be read; it is damaged"),
        ("a.docx", b"x", "a.docx"),
    ],
)
def test_the_error_names_a_file_that_cannot_be_read_and_nothing_is_written(
    folder, tmp_path, monkeypatch, name, content, message
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit, match=f"neobert embed: .*{message}"):
        run(monkeypatch, "embed", tmp_path / name, "-o", tmp_path / "out.npy", "--model", folder)
    assert not (tmp_path / "out.npy").exists()


def test_an_interrupted_embed_says_that_it_keeps_nothing(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("the fox")
    monkeypatch.setattr(SentenceTransformer, "encode", refuse(KeyboardInterrupt()))
    with pytest.raises(SystemExit, match="130"):
        run(monkeypatch, "embed", tmp_path / "a.txt", "--model", folder, "-o", tmp_path / "out.npy")
    assert "out.npy is not written, and no embedding is kept" in capsys.readouterr().err
    assert not (tmp_path / "out.npy").exists()


def test_embed_refuses_a_sparse_model_and_writes_nothing(folder, tmp_path, monkeypatch):
    neobert_hf.sparse_encoder(folder).save_pretrained(str(tmp_path / "sparse"))
    (tmp_path / "a.txt").write_text("the fox")
    with pytest.raises(SystemExit, match="sparse holds a SparseEncoder"):
        run(monkeypatch, "embed", tmp_path / "a.txt", "--model", tmp_path / "sparse", "-o", tmp_path / "out.npy")
    assert not (tmp_path / "out.npy").exists()


def test_invalid_options_are_refused(folder, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a")
    embed = ("embed", tmp_path / "a.txt", "--model", folder)
    with pytest.raises(SystemExit, match="Prompt name 'nope' not found"):
        run(monkeypatch, *embed, "-o", tmp_path / "out.npy", "--prompt_name", "nope")
    with pytest.raises(SystemExit, match=r"the folder .* does not exist; create it"):
        run(monkeypatch, *embed, "-o", tmp_path / "nowhere/out.npy")
    (tmp_path / "folder.npy").mkdir()
    with pytest.raises(SystemExit, match=r"folder\.npy is a folder; name a file"):
        run(monkeypatch, *embed, "-o", tmp_path / "folder.npy")
    (tmp_path / "a.jsonl").write_text('{"text": "a", "id": 1}\n')
    with pytest.raises(SystemExit, match=r"a\.jsonl is also an input, whose other columns would be lost"):
        run(
            monkeypatch,
            "embed",
            tmp_path / "a.jsonl",
            "--model",
            folder,
            "-o",
            tmp_path / "../" / tmp_path.name / "a.jsonl",
        )
    assert (tmp_path / "a.jsonl").read_text() == '{"text": "a", "id": 1}\n'
    with pytest.raises(
        SystemExit, match=r"--model .*nowhere cannot be opened \(.*\); give an existing folder or a Hub id"
    ):
        run(monkeypatch, "embed", tmp_path / "a.txt", "--model", tmp_path / "nowhere", "-o", tmp_path / "out.npy")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["embed", "a.txt"], "neobert embed: error: Missing option '--output' / '-o'"),
        (["embed", "-o", "a.npy"], "neobert embed: error: Missing argument 'FILE'"),
        (
            ["embed", "a.txt", "-o", "a.bin"],
            "neobert embed: error: Invalid value for '--output': a.bin ends in none of .npy,",
        ),
        (["tokenize", "--output_dir", "a"], "neobert tokenize: error: Missing option '--tokenizer_name'"),
        (["tokenize", "--files"], "neobert tokenize: error: Option '--files' requires an argument"),
        (
            ["tokenize", "--output_dir", "a", "--tokenizer_name", "b"],
            "neobert tokenize: error: Invalid value for '--files' / '--dataset_name': give exactly one of them",
        ),
        (["embed", "--topk", "1"], "neobert embed: error: No such option: --topk"),
        (["serch"], "neobert: error: No such command 'serch'"),
        (["--nope"], "neobert: error: No such option: --nope"),
    ],
)
def test_an_invalid_command_line_ends_with_status_2_and_one_line(monkeypatch, capsys, tmp_path, argv, line):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, *argv)
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == "" and len(printed.err.splitlines()) == 1
    assert printed.err.startswith(line) and "--help` lists the arguments" in printed.err
    assert not list(tmp_path.iterdir())


def test_a_closed_pipe_ends_the_command_without_a_message():
    """As `neobert tokenize ... | head` closes it."""
    script = "from neobert_hf.runs.commands import run_command\n"
    script += "run_command('tool', lambda: [print(i, flush=True) for i in range(10**6)])"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "0\n"
    process.stdout.close()
    assert (process.wait(timeout=120), process.stderr.read()) == (141, "")


@pytest.mark.parametrize("held_out", [0, 5])
def test_pack_writes_the_plans_that_training_reads(tokenizer, tmp_path, monkeypatch, capsys, held_out):
    """Found by training under the same settings, so that it plans nothing again."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    words = ["the quick brown fox jumps over the lazy dog"] * 5
    texts = [" ".join(" ".join(words).split()[:length]) for length in (3, 9, 20, 31, 5, 12, 40, 8, 17, 26)]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    where = ("--tokenizer_name", tmp_path / "tokenizer", "--output_dir", tmp_path / "shards", "--sample_by", "line")
    run(monkeypatch, "tokenize", "--files", tmp_path / "texts.txt", *where, "--num_processes", 1)
    capsys.readouterr()
    shards = Shards(tmp_path / "shards")
    options = ("--row_tokens", 64, "--max_length", 32, "--longer_than", 0, 10, "--num_held_out", held_out, "--seed", 7)
    run(monkeypatch, "pack", tmp_path / "shards", *options)
    written = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    arguments = PretrainingArguments(
        str(tmp_path / "out"), phase=2, init_from="model", max_steps=2, row_tokens=64, tokens_per_step=64, max_length=32,
        mixture=[0.5, 0.5, 0.0], longer_than=[10, 20], seed=7, use_cpu=True, report_to="none",
    )  # fmt: skip
    train = shards.split(held_out, 7)[0] if held_out else shards
    parts = training_rows(train, arguments, None).parts
    assert [str(part.plan.folder) for part in parts[:2]] == [each["folder"] for each in written]
    assert len(list((tmp_path / "shards/plans").iterdir())) == 2
    assert [each["documents"] for each in written] == [len(train), len(train.longer_than(10).numbers)]


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["--n", "1", "2", "x"], ["--n", "1", "--n", "2", "--n", "x"]),
        (["--n", "-5", "30"], ["--n", "-5", "--n", "30"]),
        (["--n", "3", "-5", "-o", "x"], ["--n", "3", "--n", "-5", "-o", "x"]),
        (["--n", "-a.jsonl", "b", "--m", "c", "d"], ["--n", "-a.jsonl", "--n", "b", "--m", "c", "d"]),
        (["--n", "1", "2", "--", "x", "-y"], ["--n", "1", "--n", "2", "--", "x", "-y"]),
        (["x", "--m", "-1", "y"], ["x", "--m", "-1", "y"]),
    ],
)
def test_the_values_of_a_list_option_end_at_the_next_option_or_at_two_dashes(args, wanted):
    assert list(cli._repeated(args, {"--n"})) == wanted


def test_an_argument_that_follows_a_list_of_numbers_is_named_in_the_error(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "pack", "--longer_than", 0, 30, "my_shards")
    assert (
        "'my_shards' is not a whole number; put arguments without a name before the options" in capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        run(monkeypatch, "pack", "my_shards", "--longer-than", -5, 30)
    assert "greater than or equal to 0" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"my_shards holds no manifest\.json"):
        run(monkeypatch, "pack", "--longer_than", 0, 30, "--", "my_shards")


def test_pack_holds_out_as_many_documents_as_training():
    default = inspect.signature(cli.pack).parameters["num_held_out"].default
    assert default == CorpusArguments().num_held_out == 1000


def test_tokenize_reads_every_named_file(tokenizer, tmp_path, monkeypatch, capsys):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "a.csv").write_text("text\nthe quick fox\n")
    (tmp_path / "b.csv").write_text("text\nold sea\nthe dog\n")
    where = ("--tokenizer_name", tmp_path / "tokenizer", "--output_dir", tmp_path / "shards", "--num_processes", 1)
    run(monkeypatch, "tokenize", "--files", tmp_path / "a.csv", tmp_path / "b.csv", *where)
    assert json.loads(capsys.readouterr().out)["num_documents"] == 3


def test_the_command_without_arguments_shows_its_help_and_version_shows_the_version(monkeypatch, capsys):
    run(monkeypatch)
    alone = capsys.readouterr().out
    run(monkeypatch, "--help")
    assert capsys.readouterr().out == alone and all(f"  {command} " in alone for command in OPTIONS)
    run(monkeypatch, "--version")
    assert capsys.readouterr().out == f"neobert_hf {neobert_hf.__version__}\n"


@pytest.mark.parametrize(
    ("words", "candidates"),
    [
        ("neobert ", {"embed", "tokenize", "pack"}),
        ("neobert tokenize --long", {"--long_documents"}),
        ("neobert tokenize --sample_by ", {"line", "paragraph", "document"}),
    ],
)
def test_a_shell_completes_commands_options_and_choices(monkeypatch, capsys, words, candidates):
    """The test sets the variables that the completion script of bash sets."""
    monkeypatch.setenv("_NEOBERT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch)
    assert ended.value.code == 0 and set(capsys.readouterr().out.split()) == candidates


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("bad\nvalue"), "neobert embed: bad value"), (KeyboardInterrupt(), 130)]
)
def test_an_error_of_the_user_gives_one_line_and_ctrl_c_gives_status_130(tmp_path, monkeypatch, error, status):
    (tmp_path / "a.txt").write_text("a")
    monkeypatch.delenv("NEOBERT_TRACEBACK", raising=False)
    monkeypatch.setattr(cli, "embedding_model", refuse(error))
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "embed", tmp_path / "a.txt", "-o", tmp_path / "a.npy")
    assert ended.value.code == status


def test_neobert_traceback_shows_the_traceback_of_an_error(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a")
    monkeypatch.setenv("NEOBERT_TRACEBACK", "1")
    monkeypatch.setattr(cli, "embedding_model", refuse(ValueError("bad")))
    with pytest.raises(ValueError, match="bad"):
        run(monkeypatch, "embed", tmp_path / "a.txt", "-o", tmp_path / "a.npy")


OPTIONS = {
    "embed": ["--output", "--model", "--text_column", "--prompt_name", "--batch_size", "file"],
    "tokenize": [
        *(
            "--output_dir",
            "--tokenizer_name",
            "--files",
            "--dataset_name",
            "--dataset_config",
            "--split",
            "--text_column",
        ),
        *("--sample_by", "--max_length", "--long_documents", "--documents_per_shard", "--num_processes"),
    ],
    "pack": ["--row_tokens", "--max_length", "--longer_than", "--num_held_out", "--seed"],
}
BOUNDS = {
    "--batch_size": (1, 65_536),
    "--max_length": (1, 2_147_483_647),
    "--documents_per_shard": (1, 1_000_000),
    "--num_processes": (1, most_processes()),
    "--num_held_out": (0, 10_000_000),
    "--seed": (0, 4_294_967_295),
    "--row_tokens": (3, 1_073_741_824),
    "--longer_than": (0, 1_048_576),
    "pack --max_length": (3, 1_048_576),
}
REQUIRED = {"embed": ["a.txt", "-o", "a.npy"], "tokenize": ["--output_dir", "a", "--tokenizer_name", "b"]}
REQUIRED |= {"pack": ["a"]}
CASES = [(command, option) for command, options in OPTIONS.items() for option in options]


def bounds_of(command, option):
    """The bounds of a number, or None; the key of a bound that other commands do not share names its command."""
    return BOUNDS.get(f"{command} {option}", BOUNDS.get(option))


@pytest.mark.parametrize(("command", "option"), CASES)
def test_every_argument_refuses_values_out_of_its_bounds(monkeypatch, capsys, tmp_path, command, option):
    """Values: the empty string, numbers below and above the bounds, and an unknown choice."""
    monkeypatch.chdir(tmp_path)
    values = [""]
    if bounds := bounds_of(command, option):
        least, most = bounds
        values += [str(least - 1), str(most + 1), "1e3", str(1 << 70)]
    if option in ("--sample_by", "--long_documents"):
        values += ["nonsense"]
    for value in values:
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, command, *REQUIRED[command], *([option] if option.startswith("-") else []), value)
        (error,) = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2 and error.startswith(f"neobert {command}: error: Invalid value for '"), error
        assert option in error.lower()
        if bounds and value not in ("", "1e3"):
            assert str(most if int(value) > most else least) in error, error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", OPTIONS)
def test_the_help_of_a_command_names_every_argument_its_bounds_and_examples(monkeypatch, capsys, command):
    run(monkeypatch, command, "--help")
    text = capsys.readouterr().out
    told = " ".join(text.split())
    known = set(re.findall(r"^  (?:-\w, )?(--\w+)", text, re.MULTILINE)) - {"--help"}
    flags = {"--normalize"}  # options without a value
    assert known - flags == {option for option in OPTIONS[command] if option.startswith("-")}
    for option in OPTIONS[command]:
        bounds = bounds_of(command, option)
        assert not bounds or "{}<=x<={}".format(*bounds) in told
    assert text.split("Examples:")[1].count(f"neobert {command} ") >= 2 and "None" not in text


@pytest.mark.parametrize("reason", ["read-only", "full"])
def test_embed_refuses_a_folder_that_cannot_be_written_at_the_start(folder, tmp_path, monkeypatch, reason):
    """The test replaces the write; chmod would not stop root."""
    (tmp_path / "a.txt").write_text("a")
    code, message = {
        "read-only": (errno.EROFS, "Read-only file system: out.npy could not be written; no text was embedded"),
        "full": (errno.ENOSPC, "the disk is full: out.npy could not be written; no text was embedded"),
    }[reason]
    monkeypatch.setattr(cli.tempfile, "TemporaryFile", refuse(OSError(code, "Read-only file system")))
    monkeypatch.setattr(cli, "embedding_model", None)
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, "embed", tmp_path / "a.txt", "--model", folder, "-o", tmp_path / "out.npy")


@pytest.mark.parametrize("name", ["out.npy", "out.jsonl", "out.parquet"])
def test_a_disk_that_fills_during_the_write_leaves_the_earlier_file_and_no_partial_one(
    folder, tmp_path, monkeypatch, name
):
    """A limit on the size of files simulates a full disk."""
    words = random.Random(0).choices(
        ["the", "quick", "brown", "fox", "old", "sea"], k=8000
    )  # rows that do not compress
    (tmp_path / "a.txt").write_text("".join(f"{' '.join(words[i : i + 8])}\n" for i in range(0, 8000, 8)))
    (tmp_path / name).write_text("earlier")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        with pytest.raises(
            SystemExit, match=f"File too large: {name} could not be written; the previous content is unchanged"
        ):
            run(monkeypatch, "embed", tmp_path / "a.txt", "--model", folder, "-o", tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / name).read_text() == "earlier" and not list(tmp_path.glob("*.part"))


def test_embed_reads_csv_and_writes_parquet(folder, tmp_path, monkeypatch):
    """pandas reads the file: a column of texts and a column of vectors."""
    pandas = pytest.importorskip("pandas", reason="this test reads with pandas, which datasets installs")
    texts = ["the quick, brown fox", 'the "old" sea', "line\nbreak"]
    pandas.DataFrame({"number": range(3), "body": texts}).to_csv(tmp_path / "a.csv", index=False)
    expected = SentenceTransformer(folder).encode(texts)
    columns = ("--text_column", "body", "--model", folder)
    run(monkeypatch, "embed", tmp_path / "a.csv", *columns, "-o", tmp_path / "a.parquet")
    found = pandas.read_parquet(tmp_path / "a.parquet")
    assert list(found.columns) == ["text", "embedding"] and list(found["text"]) == texts
    vectors = np.stack(found["embedding"])
    assert vectors.dtype == expected.dtype
    np.testing.assert_allclose(vectors, expected, atol=1e-6)


def test_the_written_array_has_the_shape_and_dtype_of_the_model(folder, tmp_path, monkeypatch):
    """np.load reads the file, although embed writes it without np.save."""
    (tmp_path / "a.txt").write_text("the quick brown fox\nold sea\n")
    run(monkeypatch, "embed", tmp_path / "a.txt", "--model", folder, "-o", tmp_path / "a.npy")
    vectors, expected = (
        np.load(tmp_path / "a.npy"),
        SentenceTransformer(folder).encode(["the quick brown fox", "old sea"]),
    )
    assert vectors.dtype == expected.dtype and vectors.flags.c_contiguous
    np.testing.assert_allclose(vectors, expected, atol=1e-6)


def test_the_module_neobert_hf_cli_runs_as_a_command():
    done = subprocess.run([sys.executable, "-m", "neobert_hf.cli", "embed", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "FILE" in done.stdout and "--output" in done.stdout
