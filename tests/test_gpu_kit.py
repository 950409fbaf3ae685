"""What a GPU runs, tested without one: the stages of benchmarks/gpu.sh, the name of the card, and the expected figures."""

import importlib
import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import card
import harness
import pytest
import roofline
import torch
from conftest import run_main
from result_tables import RESULTS
from torch.utils._python_dispatch import TorchDispatchMode

from neobert_hf import NeoBERTConfig, NeoBERTModel

ROOT = Path(__file__).parents[1]
# In place of Python: it records its arguments, and fails where they contain FAIL.
RECORDER = """#!/usr/bin/env bash
[ "$1" = benchmarks/card.py ] && exec echo tesla_t4 float16 8192 32 4
printf '%s\\n' "$*" >> "$CALLS"
[[ "$*" == *"$FAIL"* ]] && echo "out of luck" && exit 3
exit 0
"""


def run_kit(folder, fail="nothing", **variables):
    """Run gpu.sh with the recorder; its exit status, its last lines, and the calls."""
    (folder / "python").write_text(RECORDER)
    (folder / "python").chmod(0o755)
    paths = {"PYTHON": folder / "python", "CALLS": folder / "calls", "RESULTS": folder / "results"}
    environment = {**os.environ, **{name: str(path) for name, path in paths.items()}, "FAIL": fail, **variables}
    options = {"env": environment, "capture_output": True, "text": True}
    kit = subprocess.run([ROOT / "benchmarks/gpu.sh"], **options, check=False)
    return kit.returncode, kit.stdout.strip().splitlines(), (folder / "calls").read_text().splitlines()


class Parsed(Exception):
    """Ends a script after its command line was read."""


def test_every_stage_calls_a_script_with_arguments_that_it_knows(tmp_path, monkeypatch):
    status, lines, calls = run_kit(tmp_path)
    assert status == 0 and [line.split(":")[0] for line in lines[-6:]] == [
        *("tests", "throughput", "ragged", "memory", "compiled", "results")
    ]
    tests, *benchmarks, comparison = (call.split() for call in calls)
    assert tests == ["-m", "pytest", "-q", "-m", "gpu", "tests/test_gpu.py"] and (ROOT / tests[-1]).exists()
    assert comparison == ["benchmarks/roofline.py", "--measured", str(tmp_path / "results")]
    files = []
    for script, *given in benchmarks:
        module, parsed = importlib.import_module(Path(script).stem), []

        def read(*args, parsed=parsed, **options):
            parsed.append(harness.read_arguments(*args, **options))
            raise Parsed

        monkeypatch.setattr(module, "read_arguments", read)
        with pytest.raises(Parsed):
            run_main(module, *given)
        (found,) = parsed
        models = getattr(found, "models", [])
        assert (found.device, found.dtype) == ("cuda", "float16") and set(models) <= set(harness.MODELS)
        files.append(Path(found.json).name)
    assert files == [f"{name}_float16.json" for name in ("throughput", "ragged", "memory", "throughput_compiled")]


def test_a_stage_that_fails_does_not_lose_the_others(tmp_path):
    status, lines, calls = run_kit(tmp_path, fail="ragged.py")
    assert status == 1 and len(calls) == 6
    log = tmp_path / "results/ragged.log"
    assert log.read_text() == "out of luck\n" and list(log.parent.glob("*.log")) == [log]
    assert lines[-4].startswith("ragged: FAILED (3) after") and lines[-4].endswith(f"see {log}")
    assert all(": done in" in lines[i] for i in (-6, -5, -3, -2))


def test_a_stage_without_time_is_named(tmp_path):
    status, lines, calls = run_kit(tmp_path, BUDGET="0")
    assert status == 1 and lines[-6:-1] == [
        f"{name}: not run, no time left" for name in ("tests", "throughput", "ragged", "memory", "compiled")
    ]
    assert [call.split()[0] for call in calls] == ["benchmarks/roofline.py"]


def test_every_card_has_a_folder_of_its_own():
    names = {card.card_name(name) for name in roofline.CARDS}
    assert len(names) == len(roofline.CARDS) and all(name.isidentifier() for name in names)
    assert card.card_name("NVIDIA A100-SXM4-40GB") == "nvidia_a100_sxm4_40gb"


def test_without_a_gpu_or_a_package_one_line_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^No GPU: torch [^\n]+ finds none\.[^\n]+PYTHON=\.\.\.$"):
        card.main()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(card, "find_spec", lambda name: None if name == "datasets" else name)
    with pytest.raises(SystemExit, match=r'^datasets: missing in [^\n]+; pip install -e "\.\[train,embed\]" pytest$'):
        card.main()


@pytest.mark.parametrize(
    ("name", "capability", "gib", "printed"),
    [
        ("Tesla T4", (7, 5), 15, "tesla_t4 float16 8192 32 4"),
        ("NVIDIA H100 80GB HBM3", (9, 0), 79, "nvidia_h100_80gb_hbm3 bfloat16 65536 256 16"),
    ],
)
def test_dtype_and_sizes_follow_from_the_card(name, capability, gib, printed, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    properties = type("Properties", (), {"total_memory": gib * 2**30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    card.main()
    assert capsys.readouterr().out == printed + "\n"
    monkeypatch.setenv("DTYPE", "int8")
    with pytest.raises(SystemExit, match="DTYPE=int8 is not bfloat16, float16 or float32"):
        card.main()


# ---------------------------------------------------------------------------------------- expected figures


def test_the_operations_are_those_of_the_ceiling():
    products, attention = roofline.flops_per_token(NeoBERTConfig())
    ceiling = harness.Ceiling(torch.float32, "cpu", num_layers=1)
    assert products == 28 * ceiling.flops_per_token and attention == 28 * ceiling.attention_flops


class Moved(TorchDispatchMode):
    """Counts the kernels of a forward, and the bytes that they read and write."""

    def __init__(self):
        super().__init__()
        self.kernels, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not function.is_view and "view" not in function.name():
            name = function.name().removeprefix("aten::").partition(".")[0]
            self.kernels[name] += 1
            tensors = [x for x in (*args, result) if isinstance(x, torch.Tensor) and x.ndim > 1]
            self.bytes[name] += sum(x.numel() * x.element_size() for x in tensors)
        return result


def test_the_bytes_and_kernels_are_those_of_a_block():
    """What a second block adds. A CPU has no fused norm and copies no values, so norms and the copy are left out."""
    num_tokens, counted = 2048, []  # so many that SDPA runs once
    small = dict(hidden_size=128, num_attention_heads=2, intermediate_size=384, vocab_size=10)
    for num_layers in (1, 2):
        config = NeoBERTConfig(**small, num_hidden_layers=num_layers, attn_implementation="sdpa")
        model = NeoBERTModel(config).bfloat16()  # training mode: the standard operations
        for block in model.transformer_encoder:
            block.attention_norm = block.ffn_norm = torch.nn.Identity()
        with Moved() as moved:
            model(torch.full((1, num_tokens), 5))
        counted.append(moved)
    kernels, moved = counted[1].kernels - counted[0].kernels, counted[1].bytes - counted[0].bytes
    assert kernels.pop("mm") == 4 and moved.pop("mm")
    norms, attention, copy = 2, 1, 1
    assert kernels.total() == roofline.LAUNCHES["bfloat16"] / 28 - 4 - norms - attention - copy, kernels
    left_out = config.hidden_size * (norms * (2 + 2) + 4) - 32 * 8  # the table of 32 rotations is read and not counted
    one = NeoBERTConfig(**small, num_hidden_layers=1)
    expected = roofline.bytes_per_token("ours", "bfloat16", num_tokens, one) - left_out
    assert moved.total() == num_tokens * expected, moved


def read_result(name):
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def test_the_stored_figures_are_those_of_the_model():
    """If it fails: python benchmarks/roofline.py --json benchmarks/results/roofline.json."""
    stored = read_result("roofline")
    computed = json.loads(run_main(roofline).strip().splitlines()[-1])
    for key in ("rows", "check", "factors", "launches", "one_text_ms"):
        assert stored[key] == pytest.approx(computed[key]) if key == "factors" else stored[key] == computed[key]


def test_the_model_agrees_with_the_measured_h200():
    """5 % for the model as loaded and its products, which gave the two factors; 20 % for what they were not fitted on."""
    rows = read_result("roofline")["check"]
    assert len(rows) == 17
    for row in rows:
        bound = 0.05 if row["model"] in ("ours", "ceiling") else 0.2
        assert abs(row["share_of_expected"] - 1) <= bound, row


def test_a_run_that_is_too_slow_or_too_fast_is_called_wrong(tmp_path):
    """The H200 once ran rotary positions in real arithmetic, three quarters as fast; its results are stored."""
    slow = read_result("throughput_gpu_bfloat16_compiled")
    verdicts = {(row["model"], row["length"]): row["verdict"] for row in roofline.compare(slow)}
    assert verdicts["ours", 512] == "WRONG: too slow" and verdicts["ours-compiled", 512] == "as expected"
    right = read_result("throughput_gpu_bfloat16")
    assert {row["verdict"] for row in roofline.compare(right)} == {"as expected"}
    for row in right["rows"]:
        row["tokens_per_s"] *= 4
    assert "WRONG: more operations than the data sheet allows" in [row["verdict"] for row in roofline.compare(right)]

    one_text = {**right["rows"][0], "length": 16, "milliseconds": 40.0}
    (tmp_path / "throughput_bfloat16.json").write_text(json.dumps({**right, "rows": [one_text]}))
    printed = run_main(roofline, "--measured", tmp_path)
    assert "One text of 16 tokens: 40 ms; expected 9 to 18 ms: WRONG: too slow." in printed


def test_nothing_is_expected_of_an_unknown_card_or_dtype(tmp_path):
    result = read_result("throughput_gpu_bfloat16")
    file = tmp_path / "throughput_bfloat16.json"
    file.write_text(json.dumps({**result, "gpu": "NVIDIA L4"}))
    assert run_main(roofline, "--measured", tmp_path).startswith(
        "NVIDIA L4: no expected figures, they exist for Tesla T4,"
    )
    file.write_text(json.dumps({**result, "settings": {**result["settings"], "dtype": "float32"}}))
    assert "the expected figures are those of bfloat16" in run_main(roofline, "--measured", tmp_path)
    file.unlink()
    with pytest.raises(SystemExit, match="that stage did not end"):
        run_main(roofline, "--measured", tmp_path)
