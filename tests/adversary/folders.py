"""Folders of other people, and wrong folders: a build is right or explained, loses nothing and runs no foreign code."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from adversary.machinery import RIGHT, Failed, Family, explained, fork_case
from adversary.workbench import Workbench, files_of, weights_of

from neobert_hf import MINI_MODEL_PATH
from neobert_hf.checkpoints.verify import verify

SECRET = "a secret of this machine"


def prepare(bench: Workbench) -> tuple[list, Workbench]:
    """28 cases; each spoils a copy of a model, or the folder that a build would write to."""
    assert bench.references
    return [(kind, spoil) for kind, (spoil, count) in KINDS.items() for _ in range(count)], bench


def case(_, spoil: Callable, rng: random.Random, folder: Path, bench: Workbench) -> str:
    """Spoil a folder, build from it, and verify what was built."""
    theirs, out, ran = folder / "theirs", folder / "out", folder / "ran"
    shutil.copytree(bench.references["the build for the Hub"].folder, theirs)
    (folder / "evil").mkdir()
    (folder / "evil/code.py").write_text(f"open({str(ran)!r}, 'w')\nclass Tokenizer: pass\n")
    (folder / "secret").write_text(SECRET)
    source = spoil(rng, theirs, out) or theirs
    before = files_of(out)
    outcome = fork_case(bench.hub(out, model=source), folder / "log")
    if spoil is foreign_code:
        verify(theirs)
    report = None if outcome.status else verify(out)
    if ran.exists():
        raise Failed("foreign code ran")
    if outcome.status:
        if files_of(out) != before:
            raise Failed(f"lost: a build that failed changed its folder; {outcome.message}")
        return explained(outcome)
    if before:
        raise Failed("lost: the build replaced a folder that it did not write")
    if any(SECRET.encode() in file.read_bytes() for file in out.rglob("*.*")):
        raise Failed("the secret is published")
    if not report["ok"] or weights_of(out) != weights_of(theirs):
        raise Failed(f"silently wrong: {report}")
    return RIGHT


# ---------------------------------------------------------------------------------------- what may be wrong


def foreign_code(rng: random.Random, theirs: Path, out: Path) -> None:
    """Name code of another place in one to three JSON files."""
    place = f"{theirs.with_name('evil')}--code.Tokenizer"
    for _ in range(rng.randint(1, 3)):
        file = theirs / rng.choice(
            ("config.json", "tokenizer_config.json", "processor_config.json", "more/config.json")
        )
        file.parent.mkdir(exist_ok=True)
        names = ("AutoConfig", "AutoModel", "AutoModelForMaskedLM", "AutoTokenizer", "AutoProcessor")
        settings = rng.choice(
            (
                {
                    "auto_map": {
                        name: rng.choice((place, [None, place], [place, None])) for name in rng.sample(names, 2)
                    }
                },
                {"auto_map": [None, place]},
                {"custom_pipelines": {"fill-mask": {"impl": place, "pt": ["AutoModelForMaskedLM"]}}},
                {"attn_implementation": "other/kernel"},
                {"a_key_of_the_future": place},
            )
        )
        content = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(content | settings))


def foreign_module(rng: random.Random, theirs: Path, out: Path) -> None:
    """Make an embedding model whose modules name a class or a callable of another place, or a pipe that nobody fills."""
    name = rng.choice((f"{theirs.with_name('evil')}--code.Tokenizer", "code.Tokenizer", "os.getcwd"))
    kind = rng.choice(("Router", "Asym", "Dense", "WordEmbeddings", "CrossEncoder", "pipe"))
    last = "Dense" if kind in ("CrossEncoder", "pipe") else kind
    chain = ("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Module", last)
    modules = [{"path": path, "type": f"sentence_transformers.models.{each}"} for path, each in chain]
    types, dense = {"a": "sentence_transformers.models.Dense", "b": name}, {"in_features": 32, "out_features": 8}
    files = {
        "modules.json": [{"idx": i, "name": str(i), **module} for i, module in enumerate(modules)],
        "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
    }
    config = json.loads((theirs / "config.json").read_text())
    files |= {
        "Router": {"2_Module/router_config.json": {"types": types, "structure": {"query": ["b"]}, "parameters": {}}},
        "Asym": {"2_Module/config.json": {"types": types, "structure": {"query": ["b"]}}},
        "Dense": {"2_Module/config.json": dense | {"activation_function": name}},
        "WordEmbeddings": {"2_Module/wordembedding_config.json": {"tokenizer_class": name, "max_seq_length": 9}},
        "CrossEncoder": {
            "2_Module/config.json": dense,
            "config.json": config | {"sentence_transformers": {"activation_fn": name}},
        },
        "pipe": {"2_Module/config.json": dense},
    }[kind]
    for file, content in files.items():
        (theirs / file).parent.mkdir(exist_ok=True)
        (theirs / file).write_text(json.dumps(content))
    if kind == "pipe":
        os.mkfifo(theirs / rng.choice(("1_Pooling/more.json", "a.json", "deep.index.json", "notes.txt")))
    report = verify(theirs)
    if report["ok"] or not ("names foreign code" in report["error"] or "is a pipe" in report["error"]):
        raise Failed(f"verify does not refuse {kind} with {name}: {report}")


def link(rng: random.Random, theirs: Path, out: Path) -> None:
    """Replace a file by a link, most often to a place outside the folder."""
    names = ("chat_template.jinja", "additional_chat_templates/more.jinja", "vocab.txt", "tokenizer.json", "notes.md")
    file = theirs / rng.choice((*names, "model.safetensors"))
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to(rng.choice((theirs.with_name("secret"), theirs.parent, theirs / "README.md")))


def other_tokenizer(rng: random.Random, theirs: Path, out: Path) -> None:
    """Remove files of the tokenizer, or take those of another model."""
    for file in theirs.glob("*token*"):
        if rng.random() < 0.7:
            file.unlink()
    if rng.random() < 0.5:
        shutil.copy(Path(MINI_MODEL_PATH, "tokenizer.json"), theirs)


def wrong_target(rng: random.Random, theirs: Path, out: Path) -> None:
    """Write to a folder with a trained model, with a part of it, or with other files."""
    shutil.copytree(theirs, out)
    for file in list(out.iterdir()):
        if rng.random() < 0.3:
            file.unlink()
    (out / rng.choice(("thesis.txt", "config.json", "model.safetensors", "modules.json"))).write_text("years of work")


def wrong_source(rng: random.Random, theirs: Path, out: Path) -> Path | None:
    """Give a folder that is no NeoBERT or more than one, a file, or a folder that does not exist."""
    config = json.loads((theirs / "config.json").read_text())
    for name, change in rng.choice(
        (
            [("modules.json", [])],
            [("adapter_config.json", {"base_model_name_or_path": str(theirs.with_name("evil"))})],
            [("config.json", config | {"model_type": rng.choice(("bert", "modernbert", "none"))})],
            [("config.json", config | {"architectures": ["BertModel"]})],
            [],
        )
    ):
        (theirs / name).write_text(json.dumps(change))
        return None
    return rng.choice((theirs / "model.safetensors", theirs / "nothing", theirs.with_name("nothing"), Path("a/b/c")))


KINDS = {
    "foreign code in a folder to publish": (foreign_code, 5),
    "modules of other people in a folder to publish": (foreign_module, 12),
    "links in a folder to publish": (link, 3),
    "tokenizers that are not the model's": (other_tokenizer, 2),
    "builds into other folders": (wrong_target, 3),
    "builds from other folders": (wrong_source, 3),
}
FOLDERS = Family("folders", prepare, case)
