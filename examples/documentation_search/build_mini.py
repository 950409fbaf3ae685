"""Write the small model of the package: bf16 weights with decoder, tokenizer, and a card with its measured results.

    python hub_upload/build_mini.py --stages runs/mini-distilled runs/mini-paired --corpus runs/documentation

`make mini` trains the stages first. The last one ships, or the mean of several. The figures on the card are measured on the
packages that the corpus holds out.
"""

import json
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from huggingface_hub import ModelCard, ModelCardData
from sentence_transformers import SentenceTransformer
from tabulate import tabulate
from tqdm.auto import tqdm
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..allocator import tune_allocator
from ..data.collators import PackedMLMCollator
from ..data.files import file_hash, saving, write_json
from ..data.origins import load_tokenizer
from ..data.wordpiece import PreTrainedTokenizerFast
from ..embeddings.distillation import TEACHER, open_teacher
from ..embeddings.models import inverse_document_frequencies, partial_whitening, sentence_transformer
from ..embeddings.training_sets import read_pairs
from ..evaluation.masked_lm import bigram_accuracy, masked_accuracy, unigram_accuracy
from ..evaluation.pseudo_perplexity import MaskedText, masked_losses, positions_to_mask, pseudo_perplexity, unmasked_ids
from ..evaluation.retrieval import pairs_evaluator
from ..model.machine_neobert import best_dtype
from ..pretraining.depth import with_more_blocks
from ..runs.commands import Bounds, CommandParser, run_command
from ..runs.folders import RUN, SUMMARY
from ..runs.manifests import read_json_object
from .build import markdown, move_files

LARGEST_MB = 24
MASKED_DOCUMENTS = 1000
# differ in files of one architecture, and the depth between stages
UNLIKE_IN_CONFIG = {"_name_or_path", "auto_map", "dtype", "num_hidden_layers", "transformers_version"}
QUESTIONS = "train_questions.jsonl"
SOURCES = "sources.json"
HELD_OUT = "held_out_packages.jsonl"
HELD_OUT_ENTRIES = "held_out.jsonl"
WEIGHTS = "model.safetensors"
PARTS = {"stages", "sources", "measured", "averaged"}  # keys of a summary that this module wrote
OLDER_PARTS = (
    {"stages", "sources", "measured", "num_averaged"},  # when the last stages were averaged
    {"stages", "sources", "measured"},  # before models were averaged
    {"pretraining", "contrastive", "measured"},  # before the model had a decoder
)
SHOWN_SOURCES = 12
NUM_WHITENED = 10_000  # texts; a covariance of width 256 needs no more
TEACHERS = {TEACHER: "sentence-transformers/all-MiniLM-L6-v2"}  # ids on the Hub of teachers in Python packages
CORPUS_FILES = ("train.jsonl", "train_texts.jsonl", "train_documents.jsonl", HELD_OUT_ENTRIES, SOURCES)
CORPUS_FILES += (HELD_OUT, "held_out_packages_pairs.jsonl")

CARD = Path(__file__).with_name("mini_card_template.md")


@dataclass
class MiniArguments:
    """Sources and target of the build."""

    stages: list[str] = field(
        metadata={
            "help": "Folders that examples/distill_embeddings.py has written, in order of training. A folder of this command is "
            "one more, the mean that it holds. If it comes first, the stages in it have their numbers too."
        }
    )
    corpus: str = field(metadata={"help": "Folder that `neobert documentation` has written."})
    averaged: Annotated[list[int], Bounds(1, 1000)] = field(
        default_factory=list,
        metadata={
            "help": "Numbers of stages, from 1, whose mean of parameters ships; one given twice counts twice. Default: the last."
        },
    )
    out: str = field(default="src/neobert_hf/mini", metadata={"help": "Folder to write."})
    max_seq_length: Annotated[int | None, Bounds(3, 1 << 20)] = field(
        default=None,
        metadata={
            "help": "Length in tokens to which embeddings truncate texts. Default: that of the last averaged stage."
        },
    )
    teacher: str = field(default=TEACHER, metadata={"help": "Teacher of the stages, for comparison."})
    max_length: Annotated[int, Bounds(4, 1 << 20)] = field(
        default=256, metadata={"help": "Length in tokens to which held-out documents are truncated."}
    )
    num_pseudo: Annotated[int, Bounds(1)] = field(
        default=100, metadata={"help": "Number of documents for the pseudo-perplexity."}
    )


def texts_of(corpus: str, name: str, most: int | None = None) -> list[str]:
    """Return the first texts of a file of the corpus; all of them by default."""
    return [json.loads(line)["text"] for line in Path(corpus, name).read_text("utf-8").splitlines()[:most]]


def masked_batches(documents: list[list[int]], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, torch.Tensor]]:
    """Return tokenized documents in packed batches of 32, each time with the same masks."""
    collator = PackedMLMCollator(tokenizer, seed=0)
    return [collator([{"input_ids": ids} for ids in documents[i : i + 32]]) for i in range(0, len(documents), 32)]


def masked_accuracies(
    model: PreTrainedModel,
    training: list[list[int]],
    batches: list[dict[str, torch.Tensor]],
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, float]:
    """Return the masked-token accuracy of the model, and of two baselines that count tokens of the training data."""
    special = tokenizer.all_special_ids
    return {
        "most frequent token": unigram_accuracy(training, batches, special),
        "bigram model (the more confident neighbour)": bigram_accuracy(training, batches, special),
        "mini NeoBERT": masked_accuracy(model, batches),
    }


def measure_masks(folder: Path, tokenizer: PreTrainedTokenizerBase, arguments: MiniArguments) -> dict:
    """Measure masked-token accuracy on documents that are held out, and pseudo-perplexity on those of held-out packages.

    `masked_accuracy` is of the packages that are held out, `masked_accuracy_entries` of the held-out entries of the other
    packages. A corpus that is written again holds out other entries, so a stage that learned from an earlier corpus may have
    read some of them.
    """
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=best_dtype()).eval()
    texts = [texts_of(arguments.corpus, "train.jsonl")]
    texts += [texts_of(arguments.corpus, name, MASKED_DOCUMENTS) for name in (HELD_OUT, HELD_OUT_ENTRIES)]
    training, held_out, entries = (
        tokenizer(each, truncation=True, max_length=arguments.max_length)["input_ids"] for each in texts
    )
    documents = sorted(held_out[: arguments.num_pseudo], key=len)
    texts = (MaskedText(ids, positions_to_mask(ids, unmasked_ids(tokenizer))) for ids in documents)
    losses = masked_losses(model, tokenizer.mask_token_id, texts)
    values = [pseudo_perplexity(each) for each in tqdm(losses, "pseudo-perplexity", len(documents), unit=" documents")]
    return {
        "num_held_out": len(held_out),
        "num_held_out_entries": len(entries),
        "max_length": arguments.max_length,
        "masked_accuracy": masked_accuracies(model, training, masked_batches(held_out, tokenizer), tokenizer),
        "masked_accuracy_entries": masked_accuracies(model, training, masked_batches(entries, tokenizer), tokenizer),
        "pseudo_perplexity": statistics.median(values),
        "num_pseudo": len(values),
    }


def measure_embeddings(folder: Path, arguments: MiniArguments) -> dict:
    """Measure retrieval on packages outside the training data, beside the teacher, and embedding speed."""
    model = SentenceTransformer(str(folder), model_kwargs={"dtype": best_dtype()})
    pairs = read_pairs(Path(arguments.corpus, "held_out_packages_pairs.jsonl"))
    evaluator = pairs_evaluator(pairs, "held_out")
    teacher = open_teacher(arguments.teacher, model.max_seq_length, best_dtype())
    found = {}
    for name, each in {"mini NeoBERT": model, f"{teacher_name(arguments.teacher)}, its teacher": teacher}.items():
        scores = evaluator(each)
        found[name] = {key: scores[f"held_out_cosine_{key}"] for key in ("recall@1", "recall@10", "mrr@10", "ndcg@10")}
    texts = pairs[pairs.column_names[1]][:2000]
    num_tokens = sum(map(len, model.tokenizer(list(texts), truncation=True)["input_ids"]))
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        model.encode(list(texts), batch_size=64)
        seconds.append(time.perf_counter() - started)
    return {
        "num_pairs": len(pairs),
        "retrieval": found,
        "max_seq_length": model.max_seq_length,
        "tokens_per_s": num_tokens / statistics.median(seconds),
    }


def teacher_name(teacher: str) -> str:
    """Return the name of a teacher for people."""
    return Path(TEACHERS.get(teacher, teacher)).name


def teacher_link(teacher: str) -> str:
    """Return the name of a teacher with a link to its card, licence and size if they are known."""
    if teacher not in TEACHERS:
        return markdown(teacher_name(teacher))
    link = f"[{teacher_name(teacher)}](https://huggingface.co/{TEACHERS[teacher]})"
    return f"{link} (Apache 2.0), which has 22.7 million parameters"


def start_of(folder: str, earlier: list[str | None]) -> str | None:
    """Return from what a stage began: "stage 4", "a new model", or the name of another model; None if its folder has no run.json.

    Args:
        folder: Folder of the stage.
        earlier: Folders of the stages before it. One of them is the start if its weights have the hash that run.json names.
    """
    if not Path(folder, RUN).is_file():
        return None
    run = read_json_object(Path(folder, RUN))
    name = run["arguments"]["model_name_or_path"]
    if name is None:
        return "a new model"
    hash_of_start = run["sha256"].get(str(Path(name, WEIGHTS)))
    for number, each in enumerate(earlier, 1):
        if each and (file := Path(each, WEIGHTS)).is_file() and file_hash(file) == hash_of_start:
            return f"stage {number}"
    return Path(name).name


def read_stages(arguments: MiniArguments) -> tuple[list[dict], list[str | None]]:
    """Return the summaries of the stages, each with what it began from (`start_of`), and their folders.

    A folder that this module wrote is one more stage, the mean in it. If it comes first, the stages of its training precede this
    mean, and their folders are None.

    Raises:
        ValueError: A folder holds no stage of a distillation, a stage had another teacher, or a build has other stages than those
            before it.
    """
    stages, folders = [], []
    for folder in arguments.stages:
        try:
            summary = json.loads(Path(folder, SUMMARY).read_text("utf-8"))
            is_build = set(summary) == PARTS
            if is_build and stages and summary["stages"] != stages:
                raise ValueError(
                    f"it holds a mean of {len(summary['stages'])} stages, which are not those before it; "
                    "give its stages before it, or give it first"
                )
            if is_build:
                added = [*(summary["stages"] if not stages else ()), {"averaged": summary["averaged"]}]
            else:
                added = [summary | {"begins_from": start_of(folder, folders)}]
            folders += [*[None] * (len(added) - 1), folder]
            stages += added
            for number, each in enumerate(added, len(stages) - len(added) + 1):
                stage_text(number, each)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{folder} is no stage ({type(error).__name__}: {error}); give folders that examples/distill_embeddings.py has "
                "written"
            ) from error
        for each in added:
            if each.get("teacher", arguments.teacher) != arguments.teacher:
                raise ValueError(
                    f"the teacher of {folder} was {each['teacher']}, not {arguments.teacher}; give --teacher {each['teacher']}"
                )
    return stages, folders


def check_corpus(corpus: str) -> None:
    """Raise FileNotFoundError if a file of the corpus is missing."""
    if missing := [name for name in CORPUS_FILES if not Path(corpus, name).is_file()]:
        raise FileNotFoundError(
            f"{corpus} has no {', '.join(missing)}; write it by neobert documentation with --held_out_packages"
        )


def held_out_packages(corpus: str) -> str:
    """Return the names of the packages that were held out entirely."""
    lines = Path(corpus, HELD_OUT).read_text("utf-8").splitlines()
    return " and ".join(sorted({json.loads(line)["package"] for line in lines}))


def check_out(out: Path) -> None:
    """Raise ValueError if the folder holds anything other than a model that this module wrote."""
    if not out.exists() or not any(out.iterdir()):
        return
    try:
        is_ours = set(json.loads((out / SUMMARY).read_text("utf-8"))) in (PARTS, *OLDER_PARTS)
    except (OSError, ValueError, TypeError):
        is_ours = False
    if not is_ours:
        raise ValueError(
            f"{out} holds files that this command did not write; choose another folder, nothing was written"
        )


def corpus_texts(corpus: str) -> Iterator[str]:
    """Yield the texts that the model learned from: short ones and documents."""
    for name in ("train_texts.jsonl", "train_documents.jsonl"):
        with Path(corpus, name).open(encoding="utf-8") as lines:
            yield from (json.loads(line)["text"] for line in lines)


def mean_model(folders: list[str]) -> PreTrainedModel:
    """Return a masked language model in bf16 whose parameters are the mean of those of several models.

    The mean of a model and of its continuation on other data keeps most of what each has learned (arXiv 2109.01903); that of
    several continuations is often better than each (arXiv 2203.05482). A model with fewer blocks than the last one enters as a
    stage with `--num_hidden_layers` would begin from it.

    Raises:
        ValueError: A folder holds no decoder, a model is deeper than a later one, or the models differ otherwise in configuration
            or vocabulary.
    """
    models, forms = [], []
    for folder in folders:
        model, info = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        if missing := sorted(info["missing_keys"]):
            raise ValueError(f"{folder} has no {', '.join(missing)}; give a folder of examples/distill_embeddings.py")
        config = {name: value for name, value in model.config.to_dict().items() if name not in UNLIKE_IN_CONFIG}
        forms.append((config, AutoTokenizer.from_pretrained(folder).get_vocab()))
        if forms[-1] != forms[0]:
            raise ValueError(
                f"{folder} and {folders[0]} have different configurations or vocabularies; average stages of one "
                "training"
            )
        models.append(model)
    depths = [model.config.num_hidden_layers for model in models]
    if depths != sorted(depths):
        raise ValueError(
            f"{', '.join(folders)} have {', '.join(map(str, depths))} layers; give the stages in order of training"
        )
    depth = depths[-1]
    models = [each if each.config.num_hidden_layers == depth else with_more_blocks(each, depth) for each in models]
    states = [each.state_dict() for each in models]
    mean = {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}
    models[-1].load_state_dict(mean)
    return models[-1].to(torch.bfloat16)


def write_model(
    folders: list[str], texts: Iterable[str], out: Path, max_seq_length: int | None = None
) -> SentenceTransformer:
    """Save embedding model and decoder in bf16 into an empty folder, without the code, which is part of the package.

    The files have half the size, and the config declares float32: stock calls then load, embed and train in float32.

    A linear map whitens the token vectors in part, and their mean weighs each token by its inverse document frequency. The stages
    train the plain mean: 300 more steps with the weights gave no better model (docs/mini_training.md).

    Args:
        folders: Folders of the stages whose mean ships.
        texts: Texts to count tokens in. The map is computed from the embeddings of a sample of them.
        out: Folder to write.
        max_seq_length: Length in tokens to which embeddings truncate texts; by default that of the last folder.

    Returns:
        The embedding model.

    Raises:
        ValueError: As of `mean_model` and `partial_whitening`.
    """
    language_model, folder, texts = mean_model(folders), folders[-1], list(texts)
    tokenizer = load_tokenizer(folder)
    weights = inverse_document_frequencies(tokenizer, texts, tokenizer.model_max_length)
    options = dict(token_weights=weights, max_seq_length=max_seq_length)
    with tempfile.TemporaryDirectory() as mean:
        language_model.save_pretrained(mean)
        tokenizer.save_pretrained(mean)
        model = sentence_transformer(mean, **options, model_kwargs={"dtype": best_dtype()})
        sample = np.random.default_rng(0).permutation(len(texts))[:NUM_WHITENED]
        projection = partial_whitening(model.encode([texts[i] for i in sample]))
        bf16 = {"dtype": torch.bfloat16}
        model = sentence_transformer(mean, **options, projection=projection, model_kwargs=bf16)
        model.save_pretrained(str(out), create_model_card=False)
    language_model.save_pretrained(out)  # replaces config and weights by those with the decoder
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    tokenizer.backend_tokenizer.no_truncation()  # the last call's, not the model's length, which tokenizer_config.json has
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.save_pretrained(out)  # under a class name that every version knows
    for file in out.glob("*_neobert.py"):
        file.unlink()
    config = json.loads((out / "config.json").read_text("utf-8"))
    config.pop("auto_map", None)
    config["dtype"] = "float32"
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    for file in out.rglob("*.safetensors"):
        file.chmod(0o644)
    return SentenceTransformer(str(out))


def remove_older_modules(out: Path) -> None:
    """Remove the folders of modules that `modules.json` does not name: an earlier build had them."""
    named = {module["path"] for module in json.loads((out / "modules.json").read_text("utf-8"))}
    for folder in out.glob("[0-9]_*"):  # names that sentence-transformers gives
        if folder.name not in named:
            shutil.rmtree(folder)


def folder_megabytes(folder: Path) -> float:
    """Return the size of all files, in MB."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def build(arguments: MiniArguments) -> dict:
    """Measure the model, write the folder, and return its size and the figures.

    Raises:
        ValueError: The folder holds other files, a stage is none or has no decoder, or the model is too large to ship.
        OSError: A file cannot be read or written.
    """
    tune_allocator()
    out = Path(arguments.out)
    check_out(out)
    stages, folders = read_stages(arguments)
    averaged = sorted(arguments.averaged) or [len(stages)]
    if outside := sorted(set(averaged) - {number for number, folder in enumerate(folders, 1) if folder}):
        raise ValueError(
            f"averaged has {', '.join(map(str, outside))}, but --stages has no folders of these numbers; it has "
            + ", ".join(f"{number} ({folder})" for number, folder in enumerate(folders, 1) if folder)
        )
    check_corpus(arguments.corpus)
    sources = json.loads(Path(arguments.corpus, SOURCES).read_text("utf-8"))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as beside:
        partial = Path(beside, out.name)
        with saving(out):
            used = [folders[number - 1] for number in averaged]
            model = write_model(used, corpus_texts(arguments.corpus), partial, arguments.max_seq_length)
            size = folder_megabytes(partial)
            if size > LARGEST_MB:
                raise ValueError(
                    f"{out} would take {size:.1f} MB, but at most {LARGEST_MB} MB may ship; train a smaller model"
                )
            write_json(partial / SOURCES, sources)
        figures = {**measure_masks(partial, model.tokenizer, arguments), **measure_embeddings(partial, arguments)}
        figures["dtype"] = str(best_dtype()).removeprefix("torch.")
        figures["machine"] = f"{torch.get_num_threads()} CPU threads, torch {torch.__version__}"
        figures["num_parameters"] = sum(p.numel() for p in AutoModelForMaskedLM.from_pretrained(partial).parameters())
        figures["megabytes"] = round(size, 1)
        summary = {"num_" + name: len(sources[name]) for name in ("sources", "unavailable")}
        asked = Path(arguments.corpus, QUESTIONS)
        summary["num_questions"] = len(asked.read_text("utf-8").splitlines()) if asked.exists() else 0
        summary["num_characters"] = sum(source["num_characters"] for source in sources["sources"])
        written = {"stages": stages, "sources": summary, "measured": figures, "averaged": averaged}
        assert set(written) == PARTS
        with saving(out):
            write_card(model, partial, written, sources, held_out_packages(arguments.corpus))
        write_json(partial / SUMMARY, written)
        move_files(partial, out, last="config.json")
        remove_older_modules(out)
    return {"out": str(out), **figures}


def stage_text(number: int, summary: dict) -> str:
    """Describe a stage of the training, the first of which has number 1, or a mean of stages, in a list item.

    The summary may come from other people: each value is formatted as a number, or escaped.
    """
    if set(summary) == {"averaged"}:
        return f"{number}. The mean of the parameters after {listed(summary['averaged'])}."
    negatives, muon = summary["num_mined_negatives"], summary["muon_learning_rate"]
    start = summary.get("begins_from")
    expected = (None, "a new model" if number == 1 else f"stage {number - 1}")
    return (
        f"{number}. "
        + (f"From {markdown(start)}: " if start not in expected else "")
        + f"{summary['steps']:,} steps of about {summary['tokens_per_batch']:,} tokens from {summary['num_rows']:,} rows"
        + (f", and hard negatives that the teacher mined ({negatives:,} for each pair)" if negatives else "")
        + (
            f"; from this stage on the model has {depth:,} layers"
            if (depth := summary.get("num_hidden_layers"))
            else ""
        )
        + f"; peak learning rate {summary['learning_rate']:g} of AdamW"
        + (f" and {muon:g} of Muon" if muon else "")
        + f". Share of the steps with masked texts: {summary['masked_share']:.0%}"
        + (f", with pairs: {summary['pair_share']:.0%}" if "pair_share" in summary else "")  # older runs: by size
        + ". Weights of the losses: distillation 1, "
        f"contrastive {summary['contrastive_weight']:g} at temperature {summary['temperature']:g}, masked language "
        f"{summary['mlm_weight']:g}. Texts truncated to {summary['max_seq_length']:,} tokens"
        + (f", for the teacher to {short:,}" if (short := summary.get("teacher_max_seq_length")) else "")
        + f". Seed {summary['seed']:d}."
    )


def listed(numbers: list[int]) -> str:
    """Return stages in words, with their weights in a mean: "stages 3 (weight 2), 5 and 6"."""
    *first, last = (
        f"{number:d} (weight {count})" if count > 1 else f"{number:d}" for number, count in Counter(numbers).items()
    )
    return f"stages {', '.join(first)} and {last}" if first else f"stage {last.split()[0]}"


def averaged_text(numbers: list[int], num_stages: int) -> str:
    """Say which stages ship, and how often each counts in the mean; "" if it is the last one."""
    if len(set(numbers)) == 1:
        return "" if numbers[0] == num_stages else f" The model that ships is that after stage {numbers[0]}."
    return f" The model that ships is the mean of the parameters after {listed(numbers)}."


def masked_table(figures: dict) -> str:
    """Return the masked-token accuracies of `measure_masks` as a Markdown table."""
    entries = figures["masked_accuracy_entries"]
    rows = [[name, share, entries[name]] for name, share in figures["masked_accuracy"].items()]
    heads = ["model", "packages that are held out", "entries that are held out"]
    return tabulate(rows, headers=heads, tablefmt="github", floatfmt=".1%")


def cell(value: str | int) -> str | int:
    """Return a value for a cell of a table; a package's metadata is text of other people."""
    return markdown(value) if isinstance(value, str) else value


def write_card(model: SentenceTransformer, out: Path, written: dict, sources: dict, packages: str) -> None:
    """Render the card from the figures, the training summaries and the sources."""
    figures, config = written["measured"], model[0].config
    largest = sorted(sources["sources"], key=lambda source: -source["num_characters"])[:SHOWN_SOURCES]
    columns = ("name", "version", "licence", "num_texts", "num_characters")
    missing = ", ".join(f"{each}" for each in sources["unavailable"])
    tables = dict(headers="keys", tablefmt="github")
    card = ModelCard.from_template(
        ModelCardData(
            license="mit",
            library_name="sentence-transformers",
            pipeline_tag="sentence-similarity",
            tags=["neobert", "sentence-transformers", "fill-mask"],
        ),
        template_path=str(CARD),
        shape=f"{config.num_hidden_layers} layers of width {config.hidden_size}",
        num_parameters=f"{figures['num_parameters'] / 1e6:.1f} million",
        megabytes=f"{figures['megabytes']:.0f}",
        teacher=teacher_link(written["stages"][0]["teacher"]),
        num_pairs=f"{figures['num_pairs']:,}",
        packages=markdown(packages),
        retrieval=tabulate(
            [{"model": markdown(name), **scores} for name, scores in figures["retrieval"].items()],
            floatfmt=".3f",
            **tables,
        ),
        masked=masked_table(figures),
        num_documents=f"{figures['num_held_out']:,}",
        num_entries=f"{figures['num_held_out_entries']:,}",
        max_length=figures["max_length"],
        max_seq_length=figures["max_seq_length"],
        pseudo_perplexity=f"{figures['pseudo_perplexity']:.1f}",
        num_pseudo=figures["num_pseudo"],
        speed=f"{figures['tokens_per_s']:,.0f}",
        machine=figures["machine"],
        dtype=figures["dtype"],
        num_whitened=f"{NUM_WHITENED:,}",
        training="\n".join(stage_text(number, stage) for number, stage in enumerate(written["stages"], 1)),
        averaged=averaged_text(written["averaged"], len(written["stages"])),
        questions=f" A language model wrote {num:,} everyday questions to entries of these sources, which the model learned "
        "too (`hub_upload/mini_questions.tsv` in the repository)."
        if (num := written["sources"]["num_questions"])
        else "",
        num_sources=written["sources"]["num_sources"],
        num_characters=f"{written['sources']['num_characters'] / 1e6:.0f}",
        unavailable=f" These could not be had, so the model learned nothing from them: {markdown(missing)}."
        if missing
        else "",
        sources=tabulate([{name: cell(source[name]) for name in columns} for source in largest], intfmt=",", **tables),
    )
    card.save(out / "README.md")


def main() -> None:
    """Build the folder and print the figures."""
    parser = CommandParser(MiniArguments, prog="build_mini.py", description=MiniArguments.__doc__)
    print(json.dumps(run_command(parser.prog, build, *parser.parse_args_into_dataclasses())))


if __name__ == "__main__":
    main()
