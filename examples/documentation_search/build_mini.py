"""Means of models, and the mini model from the last of them: token weights, partial whitening, measurements and a card."""

import io
import json
import re
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from depth import with_more_blocks
from distillation import open_teacher
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from masked_accuracy import bigram_accuracy, masked_accuracy
from sentence_transformers import SentenceTransformer
from tabulate import tabulate
from token_weights import inverse_document_frequencies, partial_whitening, weighted_sentence_transformer
from transformers import AutoTokenizer

from neobert_hf import NeoBERTForMaskedLM, best_dtype
from neobert_hf.embeddings import pairs_evaluator
from neobert_hf.pretraining import PackedMLMCollator

CARD = Path(__file__).with_name("mini_card.md")
NUM_WHITENED = 10_000  # texts; a covariance of width 256 needs no more
NUM_MASKED = 1000  # held-out documents
MASKED_LENGTH = 256  # tokens to which they are truncated
ON_CARD = ("max_steps", "tokens_per_batch", "learning_rate", "masked_share", "pair_share", "max_seq_length")


def write_mean(folders: list[Path], out: Path) -> None:
    """Write a masked language model in bf16 whose parameters are the mean of those of several models.

    The mean of a model and of its continuation on other data keeps most of what both have learned (arXiv 2109.01903). The mean of
    several continuations is often better than any of them (arXiv 2203.05482). A model with fewer blocks than the others first
    gets the blocks that it would get as the start of a deeper stage.
    """
    models = [NeoBERTForMaskedLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]
    depth = max(model.config.num_hidden_layers for model in models)
    models = [model if model.config.num_hidden_layers == depth else with_more_blocks(model, depth) for model in models]
    states = [model.state_dict() for model in models]
    mean = {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}
    models[-1].load_state_dict(mean)
    models[-1].to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(folders[-1]).save_pretrained(out)


def write_model(mean: Path, texts: list[str], out: Path, max_seq_length: int) -> SentenceTransformer:
    """Write the folder that ships: embedding model, decoder and code. The network has bf16, what follows it float32.

    The config declares float32: stock calls then load, embed and train in float32. The mean of the token vectors weighs
    each token by its inverse document frequency, and a linear map whitens the mean in part.

    Args:
        mean: Folder of a masked language model.
        texts: Texts to count tokens in. The map is computed from the embeddings of a sample of them.
        out: Folder to write.
        max_seq_length: Length in tokens at which embeddings truncate texts.

    Returns:
        The embedding model.
    """
    tokenizer = AutoTokenizer.from_pretrained(mean)
    weights = inverse_document_frequencies(tokenizer, texts, tokenizer.model_max_length)
    sample = np.random.default_rng(0).permutation(len(texts))[:NUM_WHITENED]
    model = weighted_sentence_transformer(str(mean), weights, None, max_seq_length, best_dtype())
    projection = partial_whitening(model.encode([texts[i] for i in sample]))
    model = weighted_sentence_transformer(str(mean), weights, projection, max_seq_length)
    model.tokenizer.backend_tokenizer.no_truncation()  # that of the last call; tokenizer_config.json has max_seq_length
    model.tokenizer.backend_tokenizer.no_padding()
    model.save_pretrained(str(out), create_model_card=False)
    # the same network with its decoder
    NeoBERTForMaskedLM.from_pretrained(mean, dtype=torch.bfloat16).save_pretrained(out)
    config = json.loads((out / "config.json").read_text("utf-8")) | {"dtype": "float32"}
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    return SentenceTransformer(str(out))


def measure(model: SentenceTransformer, folder: Path, corpus: Path, teachers: dict[str, SentenceTransformer]) -> dict:
    """Return masked-token accuracy, and retrieval beside the teacher of a name, on what the corpus holds out.

    `masked_accuracy` is of the packages that are held out, `masked_accuracy_entries` of the held-out entries of the others.
    """
    language_model = NeoBERTForMaskedLM.from_pretrained(folder, dtype=best_dtype()).eval()
    training, packages, entries = (
        model.tokenizer(texts_of(corpus, name), truncation=True, max_length=MASKED_LENGTH)["input_ids"]
        for name in ("train", "held_out_packages", "held_out")
    )
    packages, entries = packages[:NUM_MASKED], entries[:NUM_MASKED]

    def accuracies(documents: list[list[int]]) -> dict[str, float]:
        collator = PackedMLMCollator(model.tokenizer, seed=0)
        parts = (documents[i : i + 32] for i in range(0, len(documents), 32))
        batches = [collator([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in part]) for part in parts]
        bigram = bigram_accuracy(training, batches, model.tokenizer.all_special_ids)
        found = masked_accuracy(language_model, batches)
        return {"bigram model (the more confident neighbour)": bigram, "mini NeoBERT": found}

    pairs = rows_of(corpus, "held_out_packages_pairs")
    evaluator = pairs_evaluator(Dataset.from_list(pairs), "held_out")
    metrics, retrieval = ("recall@1", "recall@10", "mrr@10", "ndcg@10"), {}
    for name, embedder in {"mini NeoBERT": model, **teachers}.items():
        scores = evaluator(embedder)
        retrieval[name] = {metric: scores[f"held_out_cosine_{metric}"] for metric in metrics}
    return {
        "num_held_out": len(packages),
        "num_held_out_entries": len(entries),
        "max_length": MASKED_LENGTH,
        "masked_accuracy": accuracies(packages),
        "masked_accuracy_entries": accuracies(entries),
        "num_pairs": len(pairs),
        "retrieval": retrieval,
        "max_seq_length": model.max_seq_length,
        "dtype": str(best_dtype()).removeprefix("torch."),
        "machine": f"{torch.get_num_threads()} CPU threads, torch {torch.__version__}",
        "num_parameters": sum(parameter.numel() for parameter in language_model.parameters()),
    }


def rows_of(corpus: Path, name: str) -> list[dict]:
    """Return the rows of a file of the corpus."""
    return [json.loads(line) for line in (corpus / f"{name}.jsonl").read_text("utf-8").splitlines()]


def texts_of(corpus: Path, name: str) -> list[str]:
    """Return the column `text` of a file of the corpus."""
    return [row["text"] for row in rows_of(corpus, name)]


def write_card(out: Path, model: SentenceTransformer, summary: dict, sources: list[dict], recipe: dict) -> None:
    """Write the model card from the measurements, the stages, the sources and the recipe."""
    measured, config = summary["measured"], model[0].config
    retrieval = [{"model": name, **scores} for name, scores in measured["retrieval"].items()]
    entries = measured["masked_accuracy_entries"]
    masked = [
        {"model": name, "held-out packages": share, "held-out entries": entries[name]}
        for name, share in measured["masked_accuracy"].items()
    ]
    stages = []
    for stage in summary["stages"]:
        starts = ", ".join(stage.get("mean") or [stage["start"] or "a new model"])
        settings = {name.replace("_", " "): stage.get(name) for name in ON_CARD}
        stages.append({"stage": stage["name"], "begins from, or mean of": starts, **settings})
    packages = " and ".join(recipe["corpus"]["held_out_packages"])
    scores = {name: round(value, 4) for name, value in retrieval[0].items() if name != "model"}
    results = [
        EvalResult("sentence-similarity", "unknown", f"docstrings of {packages}", *each) for each in scores.items()
    ]
    data = ModelCardData(
        language="en",
        license="mit",
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        tags=["neobert", "sentence-transformers", "fill-mask"],
        model_name="Mini NeoBERT",
        eval_results=results,
    )
    values = dict(
        shape=f"{config.num_hidden_layers} layers of width {config.hidden_size}",
        intermediate_size=config.intermediate_size,
        swiglu_width=config.swiglu_width,
        megabytes=round(sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) / 1e6),
        packages=packages,
        teacher=recipe["teacher_on_card"],
        retrieval_table=tabulate(retrieval, headers="keys", tablefmt="github", floatfmt=".3f"),
        masked_table=tabulate(masked, headers="keys", tablefmt="github", floatfmt=".1%"),
        stages_table=tabulate(stages, headers="keys", tablefmt="github"),
        num_whitened=NUM_WHITENED,
        num_sources=len(sources),
        num_characters=sum(source["num_characters"] for source in sources),
        python=json.dumps,
        **measured,
    )
    output = example_output(ModelCard.from_template(data, str(CARD), model_id=str(out), **values).text)
    ModelCard.from_template(data, str(CARD), model_id="mini", output=output, **values).save(out / "README.md")


def example_output(card: str) -> str:
    """Run the first block of Python of our card, and return what it prints."""
    (code, *_) = re.findall(r"^```python\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "card", "exec"), {})
    return printed.getvalue().strip()


def build(mean: Path, stages: list[dict], recipe: dict, corpus: Path, out: Path) -> dict:
    """Write the mini model from the last mean, with its card and the sources of its training data; return measurements."""
    texts = texts_of(corpus, "train_texts") + texts_of(corpus, "train_documents")
    model = write_model(mean, texts, out, recipe["max_seq_length"])
    teacher = open_teacher(recipe["teacher"]["name"], recipe["max_seq_length"])
    teachers = {f"{recipe['teacher_on_card'].split('/')[1]}, its teacher": teacher}
    summary = {"stages": stages, "measured": measure(model, out, corpus, teachers)}
    shutil.copy(corpus / "sources.json", out)
    sources = json.loads((out / "sources.json").read_text("utf-8"))["sources"]
    write_card(out, model, summary, sources, recipe)
    (out / "training_summary.json").write_text(json.dumps(summary, indent=1), "utf-8")
    return summary["measured"]
