"""Benchmarks: the published forward gives the published logits, the ceiling's arithmetic holds, and every script runs."""

import copy
import importlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pretraining
import pretraining_peers as peers
import provenance
import pytest
import ragged
import runtimes
import serving
import torch
import transformers
from conftest import run_main
from harness import Ceiling, docstrings
from published import PublishedMaskedLM
from ragged import log_normal_lengths

from neobert_hf import AUTO_CLASSES, MINI_MODEL_PATH, PackedMLMCollator
from neobert_hf.runs import machine

ROOT = Path(__file__).parents[2]
OPTIONS = {
    "agreement": "--num_hidden_layers 1 --lengths 9 4",
    "throughput": "--num_layers 1 --models ours published bert-base --lengths 16 24 --num_rounds 1 --max_tokens 48 "
    "--dtype float32",
    "ragged": "--num_layers 1 --models ours published --batch 3 --train_batch 2 --max_length 40 --num_rounds 1 --dtype float32",
    "memory": "--num_layers 1 --models ours --lengths 24 --batches 1 --train_batch 2 --train_length 40 --dtype float32",
    "cpu_kernels": "--num_tokens 16 --dtypes float32 --num_rounds 1",
    "packing_plan": "--num_documents 2000 --documents_per_task 100 --num_read 3",
    "pretraining": "--config num_hidden_layers=1 --num_steps 1 --num_rounds 1 --row_tokens 64 --tokens_per_step 64 "
    "--max_length 32 --dtype float32",
    "pretraining_peers": "--corpus corpus --folder runs --num_steps 1 --tokens_per_step 64 --max_length 32 --num_documents 200 "
    "--num_held_out 10 --learning_rates 1e-3 --seeds 0",
    "finetuning_speed": f"--data_dir glue --tasks cola --models {MINI_MODEL_PATH} --num_steps 1 --num_rounds 1 --batch_size 2",
    "adapters": "--shapes mini --batch 2 --length 8 --rank 2 --num_rounds 1",
    "finetuning": "--tasks cola --seeds 0 --ways tf-idf",
    "adapting": "--package tqdm --vocab_size 300 --num_held_out 4 --num_steps 1 --eval_steps 1 --tokens_per_step 256",
    "few_examples": "--models mini --sizes 4 --seeds 0 --num_test 4",
    "gpu_fast_path": "--device cpu --num_layers 1 --max_tokens 32 --num_rounds 1",
    "drop_in": f"--versions {transformers.__version__}",
    "roofline": "",
    "runtimes": f"--folder files --model {MINI_MODEL_PATH} --num_rounds 1 "
    f"--num_threads {torch.get_num_threads()} --paths sdpa packed copy-int8 exported onnx onnx-int8",
    "embeddings": "--packages tqdm --num_pairs 4 --max_lengths 16 --num_rounds 1 --stsb glue",
    "hybrid_search": "--pairs pairs.csv",
    "serving": "--models mini --num_clients 2 --lengths 16 --num_rounds 1",
}


def test_the_published_forward_gives_the_logits_of_the_published_model(reference):
    folder, _, expected = reference
    loaded = AUTO_CLASSES["AutoModelForMaskedLM"].from_pretrained(folder)
    published = PublishedMaskedLM(loaded.config).eval()
    published.load_state_dict(loaded.state_dict())
    ids, mask = expected["input_ids"], expected["attention_mask"].bool()
    right_padded = mask[:, 0]  # the published model counts positions from the first column
    with torch.no_grad():
        logits = published(ids, expected["attention_mask"])
    real = mask & right_padded[:, None]
    torch.testing.assert_close(logits[real], expected["mlm_logits"][real].float(), rtol=1e-4, atol=1e-4)


def test_the_ceiling_counts_all_matrix_products_of_the_model():
    ceiling = Ceiling(torch.float32, "cpu", num_layers=2)
    # the published shape: 198.2 M weights in 28 blocks; attention costs 86 kFLOP per token and per token of length
    assert ceiling.flops_per_token * 14 == pytest.approx(2 * 198.2e6, rel=1e-3)
    assert ceiling.attention_flops * 14 == pytest.approx(86e3, rel=1e-2)
    no_attention, some = (ceiling.tokens_per_s(100, 0.5, length) for length in (0, 4096))
    assert no_attention == 200
    assert some == pytest.approx(200 * 396.4e6 / (396.4e6 + 86e3 * 4096), rel=1e-2)


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks/results").rglob("*.json")), ids=lambda file: file.stem)
def test_a_result_names_no_folder_of_a_machine(file):
    assert not re.search(r"(?<![\w.])/(?:tmp|home|root|work|Users)/", file.read_text("utf-8"))


@pytest.mark.parametrize("count", [8, 32, 256])
def test_log_normal_lengths_have_the_documented_mean(count):
    lengths = log_normal_lengths(count, 512, torch.Generator().manual_seed(0))
    assert max(lengths) == 512 and min(lengths) >= 8
    assert sum(lengths) / count == pytest.approx(128, rel=0.02)


def test_packing_gives_each_real_token_its_states(tmp_path):
    (tmp_path / "model").symlink_to(MINI_MODEL_PATH)
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1], [0, 1, 0, 0]])
    batches = {"": {"input_ids": torch.arange(5, 17).view(3, 4), "attention_mask": mask}}
    with torch.inference_mode():
        wanted = {"": runtimes.in_torch(runtimes.load(tmp_path, dtype=torch.float64))(batches[""])}
        compared = runtimes.compare(runtimes.packed(tmp_path), batches, wanted)
    assert compared["error"] < 1e-5 and compared["cosine"] > 1 - 1e-9  # float32


def test_the_error_of_a_runtime_is_that_of_its_worst_real_token():
    batch = {"attention_mask": torch.tensor([[1, 1], [1, 0]])}
    wanted = torch.tensor([[[3.0, 4.0], [0.0, 8.0]], [[1.0, 0.0], [5.0, 5.0]]]).double()
    states = torch.tensor([[[3.0, 4.0], [0.0, 6.0]], [[1.0, 1.0], [-99.0, 0.0]]])  # the last one is padding
    compared = runtimes.compare(lambda batch: states, {"": batch}, {"": wanted})
    assert compared == pytest.approx({"error": 2 / 8, "cosine": 0.5**0.5})


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_every_script_has_a_help_and_prints_json_in_its_last_line(name, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    if name == "serving":
        monkeypatch.setattr(serving, "SECONDS", 0)
    if name == "pretraining_peers":
        Path("corpus").symlink_to(request.getfixturevalue("corpus"))
        monkeypatch.setattr(peers, "in_new_process", lambda function, *arguments: function(*arguments))
    if name == "embeddings":
        for needed in ("bm25s", "Stemmer"):
            pytest.importorskip(needed, reason="benchmarks/embeddings.py compares with BM25 (pip install -e .[bench])")
    if name == "hybrid_search":
        pytest.importorskip("bm25s", reason="neobert search needs it (pip install -e .[embed])")
        Path("pairs.csv").write_text("question,document\nopen a file,open() opens a file.\n,sleep() waits.\n")
    for module in (ragged, pretraining, runtimes, serving):
        monkeypatch.setattr(module, "docstrings", lambda: docstrings("tqdm"))
    for stem in ("train", "dev"):
        Path("glue/CoLA").mkdir(parents=True, exist_ok=True)
        Path("glue/SST-2").mkdir(parents=True, exist_ok=True)
        Path("glue/CoLA", f"{stem}.tsv").write_text("a\t1\t\tIt sleeps.\na\t0\t*\tIt sleep.\n" * 4)
        Path("glue/SST-2", f"{stem}.tsv").write_text("sentence\tlabel\n" + "good\t1\nbad\t0\n" * 4)
    Path("glue/dev.csv").write_text("".join(f"a\tb\tc\td\t{i}\tIt sleeps.\tIt sleeps {i} times.\n" for i in range(4)))
    script = importlib.import_module(name)
    assert Path(script.__file__).read_text("utf-8").endswith('if __name__ == "__main__":\n    main()\n')
    assert "--json" in run_main(script, "--help")
    printed = run_main(script, *OPTIONS[name].split(), "--json", "result.json")
    last = json.loads(printed.strip().splitlines()[-1])
    assert last == json.loads((tmp_path / "result.json").read_text())
    assert "|" in (tmp_path / "result.md").read_text() and (tmp_path / "result.md").read_text() in printed
    assert last["benchmark"] == name and last["rows"] and last["versions"]["torch"] == torch.__version__


def test_a_runtime_that_is_not_installed_is_named_before_a_file_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(runtimes, "find_spec", lambda package: package == "torch")
    with pytest.raises(SystemExit, match="openvino is not installed"):
        run_main(runtimes, "--paths", "sdpa", "openvino", "--folder", str(tmp_path / "files"))
    assert not any(tmp_path.iterdir())


@pytest.fixture
def peer_arguments(corpus, tmp_path):
    sizes = dict(tokens_per_step=64, max_length=32, num_documents=200, num_held_out=20)
    return SimpleNamespace(corpus=str(corpus), folder=str(tmp_path / "runs"), **sizes)


@pytest.mark.slow
def test_the_three_models_have_equal_numbers_of_parameters_within_two_percent(tokenizer):
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens([f"token{i}" for i in range(4096 - len(tokenizer))])
    assert len(larger) == 4096
    sizes = [peers.num_parameters(peers.build(name, larger, 256)) for name in peers.SHAPES]
    counts = [size["parameters"] for size in sizes]
    assert max(counts) <= 1.02 * min(counts) and min(counts) > 5e6
    # NeoBERT's output matrix is its own; BERT has positions and two segments beside the tokens
    outside = [size["parameters"] - size["in_blocks"] for size in sizes]
    assert outside == [2 * 4096 * 256, (4096 + 256 + 2) * 256, 4096 * 256]


@pytest.mark.slow
def test_every_arm_trains_the_same_sizes_and_predicts_the_same_tokens(peer_arguments, monkeypatch):
    seen, original = [], peers.held_out_losses
    monkeypatch.setattr(peers, "held_out_losses", lambda *args: seen.append(original(*args)) or seen[-1])
    settings = peers.prepare(peer_arguments)
    results = [peers.train_and_evaluate(*arm, 1e-3, 2, seed, settings) for seed, arm in enumerate(peers.ARMS)]
    assert results[0]["parameters"] == results[1]["parameters"]  # of `pretrain` and of `build`
    assert [result["tokens"] for result in results[1:]] == [128] * 3 and 100 < results[0]["tokens"] <= 128
    assert all(found["num_masked"] == seen[0]["num_masked"] for found in seen)
    assert 0.1 < results[0]["num_predicted"] / sum(seen[0]["num_tokens"]) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", peers.SHAPES)
def test_held_out_figures_are_those_of_each_document_alone(name, peer_arguments, tokenizer):
    """The expected figures are computed document by document, without padding, with the masks of the collator."""
    file = Path(peers.prepare(peer_arguments)["folder"], "held_out.jsonl")
    torch.manual_seed(0)
    model = peers.build(name, tokenizer, 32).eval()
    collator, losses, is_right = PackedMLMCollator(tokenizer, 0.15), [], []
    for number, line in enumerate(file.read_text().splitlines()):
        ids = tokenizer(json.loads(line)["text"], truncation=True, max_length=32)["input_ids"]
        row = collator([{"input_ids": ids, "mask_seed": number}])
        with torch.no_grad():
            logits = model(input_ids=row["input_ids"]).logits[0].double().numpy()
        for place in (row["labels"][0] != -100).nonzero().flatten().tolist():
            losses.append(np.log(np.exp(logits[place]).sum()) - logits[place, ids[place]])
            is_right.append(logits[place].argmax() == ids[place])
    expected = {"loss": np.mean(losses), "accuracy": np.mean(is_right), "num_predicted": len(losses)}
    assert peers.held_out_figures(model, tokenizer, file, 32) == pytest.approx(expected, rel=1e-5) and len(losses) > 40


def test_blocks_of_the_stock_recipe_are_the_concatenated_documents(peer_arguments, tokenizer):
    folder = Path(peers.prepare(peer_arguments)["folder"])
    texts = [json.loads(line)["text"] for line in (folder / "train.jsonl").read_text().splitlines()]
    ids = [number for text in texts for number in tokenizer(text)["input_ids"]]
    blocks = peers.load_from_disk(folder / "blocks")["input_ids"]
    assert len(texts) == 200 and [*blocks] == [ids[i : i + 32] for i in range(0, len(ids) - 31, 32)]


@pytest.mark.parametrize("flags, instructions", [("avx2", "AVX2 only"), ("avx512f", "AVX2 only (its AVX-512 hidden)")])
def test_provenance_names_processor_and_instructions_of_torch(tmp_path, monkeypatch, flags, instructions):
    """As of a virtual machine of a cloud, whose name lacks the generation, with ATEN_CPU_CAPABILITY=avx2."""
    file = tmp_path / "cpuinfo"
    file.write_text(f"cpu family\t: 25\nmodel\t: 17\nmodel name\t: AMD EPYC\nflags\t: fpu {flags}\n\nmodel name\t: B\n")
    for module in (machine, provenance):
        monkeypatch.setattr(module, "Path", lambda _: file)
    monkeypatch.setattr(machine, "has_bf16_instructions", lambda: False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    found = provenance.provenance()
    assert (found["processor"], found["instructions"]) == ("AMD EPYC, fourth generation", instructions)
