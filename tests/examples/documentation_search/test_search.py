"""The index of the documentation: ranking, reranking, the cache of vectors, and errors for invalid input."""

import dataclasses
import errno
import math
import multiprocessing
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

pytest.importorskip("sentence_transformers", reason="search embeds by sentence-transformers (pip install -e .[embed])")

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW, Dense, StaticEmbedding

from neobert_hf import NeoBERTForMaskedLM, contextual_sentence_transformer, sentence_transformer
from neobert_hf.data import arrays as cache
from neobert_hf.demo import documentation, search
from neobert_hf.demo.documentation import Entry, collect_documentation, first_sentence
from neobert_hf.demo.ranking import WordIndex
from neobert_hf.demo.search import DocumentationIndex, views
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
    cosines = {
        entry: max(found.model.encode(views(entry), normalize_embeddings=True) @ vector) for entry in found.entries
    }
    scores = {entry: cosine + 0.01 * math.log2(1 + entry.mentions) for entry, cosine in cosines.items()}
    hits = found.search(question, top_k=4)
    assert [hit.entry for hit in hits] == sorted(scores, key=scores.get, reverse=True)[:4]
    np.testing.assert_allclose([hit.score for hit in hits], [scores[hit.entry] for hit in hits], atol=1e-5)
    best = hits[0].entry
    assert f"({cosines[best]:.2f} cosine)" in str(hits[0])  # only entries of the standard library have mentions
    assert str(hits[0]).startswith(best.public_name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Store a\n  file.  Then more.\n\nEnd.", ["Store a file.", "Then more.\n\nEnd."]),
        ("One sentence", ["One sentence"]),
        (" ", [""]),
    ],
)
def test_an_entry_has_a_view_of_its_first_sentence_and_one_of_the_rest(text, expected):
    name = "ftplib FTP stor Binary file"
    found = views(Entry("ftplib", "ftplib.FTP.storBinary_file", "(x)", text))
    assert found == [f"{name}\n{part}" if part else name for part in expected]


@pytest.mark.parametrize(("num_candidates", "num_read"), [(0, 64), (1, 100)])
def test_the_vector_of_a_long_text_is_that_of_its_first_64_tokens_or_of_all_if_tokens_rerank(
    folder, tmp_path, monkeypatch, num_candidates, num_read
):
    entries = [Entry("p", "fox", "", "quick fox " * count, "p", "fox") for count in (10, 60)]
    monkeypatch.setattr(search, "collect_documentation", lambda *arguments, **options: entries)
    model = sentence_transformer(folder, max_seq_length=100)
    found = DocumentationIndex(model, ["p"], num_candidates, show_progress=False, cache_dir=tmp_path / "cache")
    assert model.max_seq_length == 100  # questions are read as before
    reader = sentence_transformer(folder, max_seq_length=num_read)
    texts = [views(entry)[0] for entry in entries]
    np.testing.assert_allclose(found.vectors, reader.encode(texts, normalize_embeddings=True), atol=1e-5)


def test_an_entry_without_a_docstring_is_found_by_its_name_and_says_so(folder, tmp_path, monkeypatch):
    entries = [
        Entry("csv", "csv.BrownFox", "", "", "csv", "BrownFox"),
        Entry("csv", "csv.dog", "(x)", "", "csv", "dog"),
        Entry("csv", "csv.cat", "", "Sleep all day.", "csv", "cat"),
    ]
    rows = [dataclasses.astuple(entry) for entry in entries]
    monkeypatch.setattr(documentation, "_run_reader", lambda job: rows)
    assert collect_documentation(False, ["python"], None) == entries[2:] == documentation._standard_library(None)
    assert documentation.training_pairs(entries[:2]) == []
    found = DocumentationIndex(sentence_transformer(folder), ["python"], show_progress=False, cache_dir=tmp_path)
    assert found.entries == entries  # empty texts are no duplicates
    hit = found.search("csv Brown Fox", top_k=1)[0]
    assert str(hit) == "csv.BrownFox\n    (no docstring)\n    from csv import BrownFox    (1.00 cosine)"


def test_a_failure_while_texts_are_embedded_leaves_the_maximum_length_of_the_model(folder, tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    model = sentence_transformer(folder, max_seq_length=100)
    monkeypatch.setattr(model, "encode_document", interrupted)
    with pytest.raises(KeyboardInterrupt):
        DocumentationIndex(model, ["tqdm"], show_progress=False, cache_dir=tmp_path / "cache")
    assert model.max_seq_length == 100


def test_of_two_entries_that_resemble_a_question_alike_the_one_that_more_modules_mention_comes_first(
    folder, tmp_path, monkeypatch
):
    """The vectors are equal, so that only the mentions differ; a clearly nearer entry stays first."""
    mentions = [0, 3, 1023, 1]
    entries = [Entry("p", f"p.f{i}", "", "the quick fox", "p", f"f{i}", each) for i, each in enumerate(mentions)]
    monkeypatch.setattr(search, "collect_documentation", lambda *arguments, **options: entries)
    monkeypatch.setattr(search, "views", lambda entry: ["the quick fox"])
    found = index(folder, tmp_path / "cache")
    hits = found.search("fox", top_k=4)
    assert [hit.entry.mentions for hit in hits] == [1023, 3, 1, 0]
    cosine = f"{hits[3].score:.2f} cosine"
    assert [hit.meaning for hit in hits] == [
        f"{cosine}, mentioned in 1023 modules",
        f"{cosine}, mentioned in 3 modules",
        f"{cosine}, mentioned in 1 module",
        cosine,
    ]
    np.testing.assert_allclose(hits[0].score - hits[3].score, 0.1, atol=1e-6)  # ten doublings
    found.vectors[0] = found.model.encode("fox", normalize_embeddings=True)  # the entry without mentions
    assert found.search("fox", top_k=1)[0].entry.mentions == 0


def test_candidates_are_reranked_by_the_mean_maximum_cosine_of_the_query_tokens(folder, tmp_path, monkeypatch):
    """ColBERT (arXiv 2004.12832), equation 3, divided by the number of query tokens; only candidates are reranked."""
    question, kept = "the quick brown fox", tmp_path / "cache"
    candidates = index(folder, kept).search(question, top_k=7)
    found = index(folder, kept, num_candidates=7)

    def tokens(text):
        rows = found.model.encode(text, output_value="token_embeddings").double().numpy()
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    scores = {}
    for hit in candidates:
        of_entry = np.concatenate([tokens(text) for text in views(hit.entry)])
        cosine = (tokens(question) @ of_entry.T).max(1).mean()
        scores[hit.entry.name] = cosine + 0.01 * math.log2(1 + hit.entry.mentions)
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
    contextual = contextual_sentence_transformer(folder, context_size=4)
    with pytest.raises(ValueError, match=r"num_candidates=5: .* has no token vectors"):
        DocumentationIndex(contextual, ["tqdm"], num_candidates=5)


def test_token_vectors_wider_than_the_embedding_are_kept(folder, tmp_path, caplog):
    model = sentence_transformer(folder)
    model = SentenceTransformer(modules=[*model, Dense(model.get_embedding_dimension(), 8)])
    options = dict(show_progress=False, cache_dir=tmp_path / "cache", num_candidates=3)
    first, again = (DocumentationIndex(model, ["tqdm"], **options) for _ in range(2))
    assert first.vectors.shape[1] == 8 and first.tokens.values.shape[1] == model[0].get_embedding_dimension()
    np.testing.assert_array_equal(first.tokens.values, again.tokens.values)
    assert "recomputed" not in caplog.text


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
    with caplog.at_level("WARNING", logger="neobert_hf.data.arrays"):
        assert len(index(folder, kept).search("the quick brown fox")) == 5
    assert f"cannot write the folder {kept}" in caplog.text and "HF_HOME has the cache" in caplog.text
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
    with caplog.at_level("WARNING", logger="neobert_hf.data.arrays"):
        again = index(folder, tmp_path / "cache", num_candidates=3)
    assert f"{file} is damaged and will be recomputed" in caplog.text
    np.testing.assert_array_equal(again.vectors, first.vectors)
    monkeypatch.setattr(DocumentationIndex, "_embed", None)
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
    with caplog.at_level("WARNING", logger="neobert_hf.data.arrays"):
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


def test_the_free_memory_has_a_plausible_value():
    free = memory.available_bytes()
    if free is None:
        pytest.skip("neither /proc/meminfo nor psutil gives the free memory on this machine")
    num_bytes = 10**8
    assert num_bytes < free < 2**50


def test_a_kernel_without_memavailable_gives_the_free_memory_of_psutil_or_none(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal:  16000 kB\nMemFree:  8000 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    fake = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=10**6))
    monkeypatch.setitem(sys.modules, "psutil", fake)
    assert memory.available_bytes() == 10**6
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert memory.available_bytes() is None


def test_the_functions_also_refuse_numbers_out_of_bounds(folder, tmp_path):
    with pytest.raises(ValueError, match="batch_size=0 is too small"):
        index(folder, tmp_path / "cache", batch_size=0)
    with pytest.raises(ValueError, match="top_k=0 is too small"):
        index(folder, tmp_path / "cache").search("fox", top_k=0)


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


@pytest.mark.parametrize("num_candidates", [0, 4])
def test_the_hybrid_search_fuses_its_ranking_with_one_by_words(folder, tmp_path, monkeypatch, num_candidates):
    """The sums come from the ranks of two searches of the same entries: by embeddings, and by words alone."""
    kept, question = tmp_path / "cache", "close the bar and update the time"
    plain = index(folder, kept, num_candidates=num_candidates)
    by_meaning = [hit.entry for hit in plain.search(question, top_k=4)]
    cosine = [hit.entry for hit in index(folder, kept).search(question, top_k=len(plain.entries))]
    by_meaning += [entry for entry in cosine if entry not in by_meaning]
    scores = WordIndex([entry.full_text for entry in plain.entries]).scores(question)
    by_words = [plain.entries[i] for i in np.argsort(-scores, kind="stable") if scores[i] > 0]
    sums = {entry: 1 / (61 + by_meaning.index(entry)) for entry in plain.entries}
    sums |= {entry: sums[entry] + 1 / (61 + rank) for rank, entry in enumerate(by_words)}
    monkeypatch.setattr(
        SentenceTransformer, "encode_document", None
    )  # the vectors of the search without words serve both
    hits = index(folder, kept, num_candidates=num_candidates, hybrid=True).search(question, top_k=4)
    best = sorted(sums.values(), reverse=True)[:4]
    np.testing.assert_allclose([hit.score for hit in hits], best)
    np.testing.assert_allclose([sums[hit.entry] for hit in hits], best)
    assert hits[0].meaning == (
        f"rank {by_meaning.index(hits[0].entry) + 1} by meaning, {by_words.index(hits[0].entry) + 1} by words"
    )


def test_the_hybrid_search_needs_no_common_word_and_refuses_what_is_no_text(folder, tmp_path):
    found = index(folder, tmp_path / "cache", hybrid=True)
    hits = found.search("zzyzx the", top_k=3)
    assert [hit.entry for hit in hits] == [
        hit.entry for hit in index(folder, tmp_path / "cache").search("zzyzx the", 3)
    ]
    assert hits[2].meaning == "rank 3 by meaning, no word in common"
    assert len(found.search("", top_k=2)) == 2
    for question in (None, "lone \ud800"):
        with pytest.raises(ValueError, match="text"):
            found.search(question)


def test_the_progress_bar_counts_texts_with_and_without_reranking(folder, tmp_path, capsys):
    for number in (0, 3):
        options = dict(num_candidates=number, cache_dir=tmp_path / "cache")
        made = DocumentationIndex(sentence_transformer(folder), ["tqdm"], **options)
        shown = capsys.readouterr().err
        num_texts = sum(len(views(entry)) for entry in made.entries)
        assert f"embedding: 100%|██████████| {num_texts}/{num_texts} [" in shown
        assert " texts/s]" in shown and "Batches" not in shown


def test_a_model_without_transformer_can_be_searched(tokenizer, tmp_path):
    module = StaticEmbedding(tokenizer.backend_tokenizer, embedding_dim=8)
    found = DocumentationIndex(SentenceTransformer(modules=[module]), ["tqdm"], show_progress=False, cache_dir=tmp_path)
    assert len(found.search("the fox", top_k=2)) == 2


def test_an_answer_has_no_control_characters():
    entry = Entry("shop", "shop.clear", "(x='\x1b')", "Write \x1b[2J to\x07 the terminal.", "shop", "clear")
    assert search.Hit(1.0, entry, "1.00 cosine").describe(80).splitlines() == [
        "shop.clear(x=' ')",
        "    Write [2J to the terminal.",
        "    from shop import clear    (1.00 cosine)",
    ]


def test_private_names_are_not_searched(folder, tmp_path):
    names = [entry.public_name for entry in index(folder, tmp_path / "cache").entries]
    assert "tqdm.tqdm" in names and not [name for name in names if "._" in name]


STATEMENTS = """
import inspect
failed = []
for line, qualname in {cases!r}:
    scope = {{}}
    try:
        exec(line, scope)
        first, *rest = qualname.split(".")
        found = scope[first] if first else None
        for name in rest:  # enum.property has no value on the class
            found = inspect.getattr_static(found, name)
    except BaseException as error:
        failed.append((line, qualname, repr(error)))
print(failed)
"""


def test_the_import_lines_of_the_standard_library_run_and_give_the_object():
    entries = collect_documentation(False, ["python"])
    lines = [(search.import_line(entry), entry) for entry in entries]
    assert [entry.name for line, entry in lines if line == "language topic"][:1] == ["assert"]
    assert {"len", "str.join", "ValueError"} <= {entry.name for line, entry in lines if line == "built in"}
    known = {entry.name: line for line, entry in lines}
    assert known["os.path.join"] == "from os.path import join" and known["os.path"] == "import os.path"
    assert known["datetime.datetime.now"] == "from datetime import datetime"
    cases = [(line, entry.qualname) for line, entry in lines if line.startswith(("import ", "from "))]
    assert len(cases) > 5000
    script = STATEMENTS.format(cases=random.Random(0).sample(cases, 200))
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=os.path.dirname(sys.executable), timeout=170)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("name", ["builtins", "a.b"])
def test_the_import_line_of_a_method_gives_its_class(name):
    entry = Entry("a", "x", "", "Text.", name, "Outer.Inner.method")
    assert search.import_line(entry) == ("built in" if name == "builtins" else "from a.b import Outer")
