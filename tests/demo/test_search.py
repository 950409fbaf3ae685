"""`neobert search` and `neobert embed`: ranking, reranking, the cache of vectors, and errors for invalid input."""

import errno
import io
import json
import multiprocessing
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

pytest.importorskip("sentence_transformers", reason="search embeds by sentence-transformers (pip install -e .[embed])")

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW

import neobert_hf
from neobert_hf import NeoBERTForMaskedLM, cli, sentence_transformer
from neobert_hf.demo import cache, search
from neobert_hf.demo.documentation import first_sentence
from neobert_hf.demo.search import DocumentationIndex
from neobert_hf.embeddings import memory


@pytest.fixture
def folder(checkpoint, tokenizer, tmp_path):
    NeoBERTForMaskedLM.from_pretrained(checkpoint).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def index(folder, kept, **options):
    return DocumentationIndex(sentence_transformer(folder), ["tqdm"], show_progress=False, cache_dir=kept, **options)


def test_the_nearest_entries_come_first(folder, tmp_path):
    found = index(folder, tmp_path / "cache")
    assert len(found.entries) > 50 and {entry.package for entry in found.entries} == {"tqdm"}
    question = "the quick brown fox"
    vector = found.model.encode(question, normalize_embeddings=True)
    expected = np.argsort(
        -(found.model.encode([e.full_text for e in found.entries], normalize_embeddings=True) @ vector)
    )
    hits = found.search(question, top_k=4)
    assert [hit.entry for hit in hits] == [found.entries[i] for i in expected[:4]]
    assert str(hits[0]).startswith(f"{hits[0].score:.2f}  {hits[0].entry.name}")


def test_candidates_are_reranked_by_the_mean_maximum_cosine_of_the_query_tokens(folder, tmp_path, monkeypatch):
    """ColBERT (arXiv 2004.12832), equation 3, divided by the number of query tokens; only candidates are reranked."""
    question, kept = "the quick brown fox", tmp_path / "cache"
    candidates = index(folder, kept).search(question, top_k=7)
    found = index(folder, kept, num_candidates=7)

    def tokens(text):
        rows = found.model.encode(text, output_value="token_embeddings").double().numpy()
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    scores = {hit.entry.name: (tokens(question) @ tokens(hit.entry.full_text).T).max(1).mean() for hit in candidates}
    hits = found.search(question, top_k=3)
    rounding = 3e-3  # 8 bits: 16 numbers of up to 1, each with an error of at most 1 / 254 and a third of it on average
    np.testing.assert_allclose([hit.score for hit in hits], [scores[hit.entry.name] for hit in hits], atol=rounding)
    best = sorted(scores.values(), reverse=True)[:3]
    np.testing.assert_allclose([scores[hit.entry.name] for hit in hits], best, atol=2 * rounding)
    monkeypatch.setattr(search, "KEPT_TOKEN_BYTES", 1)
    anew = index(folder, tmp_path / "other", num_candidates=7)
    again = anew.search(question, top_k=3)
    assert anew.tokens is None and [hit.entry for hit in again] == [hit.entry for hit in hits]
    np.testing.assert_allclose([hit.score for hit in again], [hit.score for hit in hits], atol=1e-5)
    with pytest.raises(ValueError, match="num_candidates=-1 is below 0"):
        index(folder, kept, num_candidates=-1)
    with pytest.raises(ValueError, match="num_candidates=5: BoW has no token vectors"):
        DocumentationIndex(SentenceTransformer(modules=[BoW(["fox"])]), ["tqdm"], num_candidates=5)


def test_vectors_are_cached_separately_for_each_model(folder, tmp_path, monkeypatch):
    first = index(folder, tmp_path / "cache").vectors
    other = sentence_transformer(folder, pooling="cls")
    changed = DocumentationIndex(other, ["tqdm"], show_progress=False, cache_dir=tmp_path / "cache").vectors
    assert not np.allclose(changed, first) and len(list((tmp_path / "cache").glob("vectors-*"))) == 2
    monkeypatch.setattr(SentenceTransformer, "encode_document", None)
    np.testing.assert_array_equal(index(folder, tmp_path / "cache").vectors, first)


@pytest.mark.parametrize("reason", ["a file in its place", "no permission", "full"])
def test_a_cache_that_cannot_be_written_causes_a_warning_and_does_not_change_answers(
    folder, tmp_path, caplog, monkeypatch, reason
):
    kept = tmp_path / "cache"
    if reason == "a file in its place":
        kept.write_text("a file, where a folder should be")
    elif reason == "no permission":  # chmod would not stop root
        monkeypatch.setattr(Path, "mkdir", refuse(PermissionError(errno.EACCES, "Permission denied")))
    else:
        monkeypatch.setattr(cache, "save_file", refuse(OSError(errno.ENOSPC, "No space left on device")))
    with caplog.at_level("WARNING", logger="neobert_hf.demo.cache"):
        assert len(index(folder, kept).search("the quick brown fox")) == 5
    assert f"cannot write the cache folder {kept}" in caplog.text and "set HF_HOME to a writable" in caplog.text
    assert not kept.is_dir() or not list(kept.iterdir())


def refuse(error):
    def raise_it(*arguments, **options):
        raise error

    return raise_it


DAMAGES = ["cut", "a byte", "empty", "zeros", "shuffled rows", "another width", "fewer rows", "another file's place"]
DAMAGES += ["an older format", "no safetensors"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cached_vectors_are_recomputed_with_a_warning(folder, tmp_path, caplog, monkeypatch, damage):
    first = index(folder, tmp_path / "cache", num_candidates=3)
    (file,) = (tmp_path / "cache").glob("vectors-tokens-*")
    content = file.read_bytes()
    if damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "a byte":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage in ("no safetensors", "empty"):
        file.write_bytes(b"[]" if damage == "no safetensors" else b"")
    elif damage in ("zeros", "shuffled rows"):  # valid safetensors with unchanged metadata
        arrays = load_file(file)
        arrays["vectors"] = arrays["vectors"][::-1].copy() if damage == "shuffled rows" else arrays["vectors"] * 0
        with safe_open(file, framework="numpy") as stored:
            metadata = stored.metadata()
        save_file(arrays, file, metadata=metadata)
    elif damage == "another file's place":
        assert cache.save_arrays(file.with_stem("vectors-tokens-of-others"), load_file(file))
        file.with_stem("vectors-tokens-of-others").replace(file)
    elif damage in ("another width", "fewer rows"):
        cut = np.s_[:, 1:] if damage == "another width" else np.s_[1:]
        arrays = {"vectors": first.vectors[cut], "values": first.tokens.values}
        assert cache.save_arrays(file, arrays | {"scales": first.tokens.scales, "starts": first.tokens.starts})
    else:
        save_file({"vectors": first.vectors}, file, metadata={"format": "0"})
    with caplog.at_level("WARNING", logger="neobert_hf.demo.cache"):
        again = index(folder, tmp_path / "cache", num_candidates=3)
    assert f"{file} is damaged and will be recomputed" in caplog.text
    np.testing.assert_array_equal(again.vectors, first.vectors)
    monkeypatch.setattr(DocumentationIndex, "_embed_entries", None)
    np.testing.assert_array_equal(
        index(folder, tmp_path / "cache", num_candidates=3).tokens.values, first.tokens.values
    )


def test_concurrent_writers_leave_one_complete_file_and_nothing_else(tmp_path):
    """Each writes to its own temporary file: the last writer wins, and no reader sees a partial file."""
    arrays = {"a": np.arange(200_000)}
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: cache.save_arrays(tmp_path / "one.safetensors", arrays), range(40)))
    assert [file.name for file in tmp_path.iterdir()] == ["one.safetensors"]
    loaded = cache.load_arrays(tmp_path / "one.safetensors", {"a": (np.int64, (None,))})
    np.testing.assert_array_equal(loaded["a"], arrays["a"])


def save_often(file):
    for _ in range(30):
        assert cache.save_arrays(file, {"a": np.arange(100_000)})


def test_a_reader_never_sees_a_partial_file_of_concurrent_writers(tmp_path, caplog):
    file, expected = tmp_path / "one.safetensors", {"a": (np.int64, (100_000,))}
    processes = [multiprocessing.get_context("fork").Process(target=save_often, args=(file,)) for _ in range(3)]
    for each in processes:
        each.start()
    num_read = 0
    with caplog.at_level("WARNING", logger="neobert_hf.demo.cache"):
        while any(each.is_alive() for each in processes):
            found = cache.load_arrays(file, expected)
            if found is not None:
                np.testing.assert_array_equal(found["a"], np.arange(100_000))
                num_read += 1
    assert num_read and not caplog.text and [each.exitcode for each in processes] == [0] * 3
    assert [each.name for each in tmp_path.iterdir()] == ["one.safetensors"]


def test_an_interrupted_write_leaves_no_partial_file_in_the_cache(tmp_path, monkeypatch):
    save = cache.save_file

    def interrupted(arrays, file, metadata):
        save(arrays, file, metadata=metadata)
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.save_arrays(tmp_path / "one.safetensors", {"a": np.arange(9)})
    assert not list(tmp_path.iterdir())


def test_work_that_exceeds_the_memory_is_refused_at_the_start(folder, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("the quick brown fox\n" * 100)
    embed = ("embed", tmp_path / "a.txt", "-o", tmp_path / "out.npy", "--model", folder)
    monkeypatch.setattr(memory, "available_bytes", lambda: 1999)
    with pytest.raises(
        SystemExit, match=r"reading .*a.txt takes 0.0 GB or more, but 0.0 GB of memory are free; split the"
    ):
        run(monkeypatch, *embed)
    monkeypatch.setattr(memory, "available_bytes", lambda: 5000)
    with pytest.raises(SystemExit, match=r"embedding 100 texts, 64 at once takes .* take a smaller --batch_size"):
        run(monkeypatch, *embed)
    assert not (tmp_path / "out.npy").exists()
    with pytest.raises(ValueError, match=r"embedding \d+ entries, 64 at once takes .* choose fewer packages"):
        index(folder, tmp_path / "cache")
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    run(monkeypatch, *embed)
    assert np.load(tmp_path / "out.npy").shape[0] == 100


def test_the_free_memory_has_a_plausible_value():
    free = memory.available_bytes()
    if free is None:
        pytest.skip("neither /proc/meminfo nor psutil gives the free memory on this machine")
    num_bytes = 10**8
    assert num_bytes < free < 2**50


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


def test_questions_are_read_from_the_command_line_or_from_standard_input(folder, monkeypatch, capsys):
    run(monkeypatch, "search", "--package", "tqdm", "a bar of progress", "--model", folder, "--top_k", 2)
    asked = capsys.readouterr().out.splitlines()
    assert asked[1] == "a bar of progress" and asked[2].split()[0].replace(".", "").isdigit() and len(asked) == 6
    run(monkeypatch, "search", "--package", "tqdm", "--model", folder, "--top_k", 2, typed="a bar of progress\n")
    assert capsys.readouterr().out.splitlines()[2:6] == asked[2:6]


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
        ("a.docx", b"x", "a.docx"),
    ],
)
def test_the_error_names_a_file_that_cannot_be_embedded_and_nothing_is_written(
    folder, tmp_path, monkeypatch, name, content, message
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit, match=f"neobert embed: .*{message}"):
        run(monkeypatch, "embed", tmp_path / name, "-o", tmp_path / "out.npy", "--model", folder)
    assert not (tmp_path / "out.npy").exists()


def test_invalid_options_are_refused(folder, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a")
    embed = ("embed", tmp_path / "a.txt", "--model", folder)
    with pytest.raises(SystemExit, match=r"neither .npy nor .jsonl"):
        run(monkeypatch, *embed, "-o", tmp_path / "out.bin")
    with pytest.raises(SystemExit, match="Prompt name 'nope' not found"):
        run(monkeypatch, *embed, "-o", tmp_path / "out.npy", "--prompt_name", "nope")
    with pytest.raises(SystemExit, match="name a file of texts"):
        run(monkeypatch, "embed", "-o", tmp_path / "out.npy", "--model", folder)
    with pytest.raises(SystemExit, match="there is no folder"):
        run(monkeypatch, *embed, "-o", tmp_path / "nowhere/out.npy")
    (tmp_path / "folder.npy").mkdir()
    with pytest.raises(SystemExit, match=r"folder\.npy is a folder; name a file"):
        run(monkeypatch, *embed, "-o", tmp_path / "folder.npy")
    with pytest.raises(SystemExit, match=r"packages=\['tqdm', ''\] has no name or an empty name"):
        run(monkeypatch, "search", "a", "--package", "tqdm,", "--model", folder)
    with pytest.raises(SystemExit, match="no documentation found for no_such_package"):
        run(monkeypatch, "search", "a", "--package", "no_such_package", "--model", folder)


OPTIONS = {
    "search": ["--package", "--model", "--top_k", "--num_candidates", "--batch_size", "question"],
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
    "documentation": ["--output_dir", "--num_held_out", "--held_out_packages", "--vocab_size", "--seed"],
}
BOUNDS = {
    "--top_k": "at least 1, at most 65,536",
    "--num_candidates": "at least 0, at most 65,536",
    "--batch_size": "at least 1, at most 65,536",
    "--max_length": "at least 1, at most 2,147,483,647",
    "--documents_per_shard": "at least 1, at most 1,000,000",
    "--num_processes": "at least 1, at most",
    "--num_held_out": "at least 0, at most 10,000,000",
    "--vocab_size": "at least 6, at most 1,000,000",
    "--seed": "at least 0, at most 4,294,967,295",
}
REQUIRED = {"search": [], "embed": ["-o", "a.npy"], "tokenize": ["--output_dir", "a", "--tokenizer_name", "b"]}
REQUIRED["documentation"] = ["--output_dir", "a"]
CASES = [(command, option) for command, options in OPTIONS.items() for option in options]


@pytest.mark.parametrize(("command", "option"), CASES)
def test_every_argument_refuses_values_out_of_its_bounds(monkeypatch, capsys, tmp_path, command, option):
    """The values are the empty string, numbers below and above the bounds, and an unknown choice."""
    monkeypatch.chdir(tmp_path)
    values = [""]
    if option in BOUNDS:
        values += [str(int(BOUNDS[option].split()[2][:-1]) - 1), str(10**12), "1e3", str(1 << 70)]
    if option in ("--sample_by", "--long_documents"):
        values += ["nonsense"]
    for value in values:
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, command, *REQUIRED[command], *([option] if option.startswith("-") else []), value)
        error = capsys.readouterr().err.splitlines()[-1]
        assert ended.value.code == 2 and error.startswith(f"neobert {command}: error: argument"), error
        assert option in error and (option not in BOUNDS or value in ("", "1e3") or BOUNDS[option] in error), error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", OPTIONS)
def test_the_help_of_a_command_names_every_argument_and_its_bounds(monkeypatch, capsys, command):
    with pytest.raises(SystemExit):
        run(monkeypatch, command, "--help")
    told = " ".join(capsys.readouterr().out.split())
    known = {word.strip("[],") for word in told.split() if word.startswith(("--", "[--"))}
    assert {option for option in OPTIONS[command] if option.startswith("-")} <= known
    assert not {option for option in known if option in BOUNDS} - set(OPTIONS[command])
    for option in OPTIONS[command]:
        assert option not in BOUNDS or BOUNDS[option] in told


def test_the_functions_also_refuse_numbers_out_of_bounds(folder, tmp_path):
    with pytest.raises(ValueError, match="batch_size=0 is too small"):
        index(folder, tmp_path / "cache", batch_size=0)
    with pytest.raises(ValueError, match="top_k=0 is too small"):
        index(folder, tmp_path / "cache").search("fox", top_k=0)


@pytest.mark.parametrize("reason", ["read-only", "full"])
def test_embed_refuses_a_folder_that_cannot_be_written_at_the_start(folder, tmp_path, monkeypatch, reason):
    """The test replaces the write; chmod would not stop root."""
    (tmp_path / "a.txt").write_text("a")
    code, message = {
        "read-only": (errno.EROFS, "Read-only file system: out.npy could not be written; nothing was begun"),
        "full": (errno.ENOSPC, "the disk is full: out.npy could not be written; nothing was begun"),
    }[reason]
    monkeypatch.setattr(cli.tempfile, "TemporaryFile", refuse(OSError(code, "Read-only file system")))
    monkeypatch.setattr(cli, "embedding_model", None)
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, "embed", tmp_path / "a.txt", "--model", folder, "-o", tmp_path / "out.npy")


@pytest.mark.parametrize("name", ["out.npy", "out.jsonl"])
def test_a_disk_that_fills_during_the_write_leaves_the_earlier_file_and_no_partial_one(
    folder, tmp_path, monkeypatch, name
):
    """A limit on the file size simulates a full disk."""
    (tmp_path / "a.txt").write_text("the quick brown fox\n" * 1000)
    (tmp_path / name).write_text("earlier")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        with pytest.raises(
            SystemExit, match=f"File too large: {name} could not be written; the previous content is un"
        ):
            run(monkeypatch, "embed", tmp_path / "a.txt", "--model", folder, "-o", tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / name).read_text() == "earlier" and not list(tmp_path.glob("*.part"))


def test_the_written_array_has_the_shape_and_dtype_of_the_model(folder, tmp_path, monkeypatch):
    """The command writes the .npy file without np.save; np.load must read it."""
    (tmp_path / "a.txt").write_text("the quick brown fox\nold sea\n")
    run(monkeypatch, "embed", tmp_path / "a.txt", "--model", folder, "-o", tmp_path / "a.npy")
    vectors, expected = (
        np.load(tmp_path / "a.npy"),
        SentenceTransformer(folder).encode(["the quick brown fox", "old sea"]),
    )
    assert vectors.dtype == expected.dtype and vectors.flags.c_contiguous
    np.testing.assert_allclose(vectors, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "sentence", "rest"),
    [
        ("Open a file.  Then read it.\n\nMore.", "Open a file.", "Then read it.\n\nMore."),
        ("Return x\nor y\n\nArgs: z.", "Return x or y", "Args: z."),
        ("See http://a.b/c for e.g. more? Yes.", "See http://a.b/c for e.g.", "more? Yes."),
        ("No end", "No end", ""),
    ],
)
def test_the_first_sentence_ends_at_its_full_stop_or_with_the_paragraph(text, sentence, rest):
    assert first_sentence(text) == (sentence, rest)


def test_the_search_command_has_a_help_text():
    done = subprocess.run([sys.executable, "-m", "neobert_hf.cli", "search", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "question" in done.stdout and "--package" in done.stdout
