"""`pretrain`: one run of a recipe, from text to a saved model, with exact resume."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from transformers import (
    AutoModelForMaskedLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.integrations import unset_hf_deepspeed_config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..checkpoints.tokenizer import load_tokenizer
from ..data.wordpiece import tokenizer_hash
from ..files.json_files import read_json
from ..files.messages import first_of, say
from ..files.output import saving
from ..model.checkpoint_neobert import check_model_type
from ..model.configuration_neobert import NeoBERTConfig
from ..model.modeling_neobert import NeoBERTForMaskedLM
from ..runs.progress import without_bars
from ..runs.resume import RUN, SUMMARY, lock_run, train_or_resume
from .arguments import CorpusArguments, PretrainingArguments, record_of
from .collators import PackedMLMCollator
from .optimizers import (
    MakeOptimizer,
    Schedule,
    muon,
    name_of,
    names_with_decay,
    trainable_parameters,
)
from .recipes import Recipe
from .run_rows import RunRows, open_text
from .summary import as_yaml, write_summary
from .trainer import PretrainingTrainer

logger = logging.get_logger(__name__)

HELD_OUT = "masked accuracy {eval_masked_accuracy:.4f}; of the token {token!r} alone {eval_trivial_masked_accuracy:.4f}"
TRAINED = "{steps:,} steps in {training_seconds:,.0f} s: {num_tokens:,} tokens, {tokens_per_s:,.0f} in a second, loss {loss:.4f}"
# A variant of the model: a class, or a function from the config to a model.
ModelOrClass = type[PreTrainedModel] | Callable[[PretrainedConfig], PreTrainedModel]


def pretrain(
    data: CorpusArguments,
    training: PretrainingArguments,
    *,
    model: ModelOrClass | None = None,
    optimizer: MakeOptimizer | None = None,
    schedule: Schedule | None = None,
) -> PretrainingTrainer:
    """Train a model by a recipe, evaluate it on held-out text, and save it with a summary in `training.output_dir`.

    After an interruption, the same call resumes exactly. The output folder is locked against
    other runs.

    Args:
        data: Text, tokenizer and held-out documents.
        training: Recipe and training arguments.
        model: Class for masked language modelling, made with its own `config_class`; or, in phase 1 only, a function from the
            config of a NeoBERT to a model. None takes the recipe's model. A resume needs the same.
        optimizer: A function from the parameters by name to an optimizer; None takes the recipe's optimizer.
        schedule: A function from the number of an optimizer step, from 0, to a share of the peak learning rate, which is that of
            the groups of the optimizer; None takes the recipe's schedule.

    Returns:
        The trainer, which holds the trained model.

    Raises:
        ValueError: An argument is wrong, the folder belongs to another run, or another run writes to it; the optimizer leaves out
            a parameter.
        OSError: A file cannot be read or written.
        FloatingPointError: The loss or the gradient was not finite.
    """
    with lock_run(training.output_dir):
        return _pretrain(data, training, training.to_recipe(), model, optimizer, schedule)


def _pretrain(data, training, recipe, variant, optimizer, schedule):
    given = {"model": variant, "optimizer": optimizer, "schedule": schedule}
    functions = {name: name_of(function) for name, function in given.items() if function is not None}
    if optimizer is not None:
        training.refuse_optim("a function that makes the optimizer")
    record = record_of(data, training, functions)
    set_seed(training.seed)
    run = {name: first_of(value) if isinstance(value, list) else value for name, value in record["run"].items()}
    say(f"recipe {training.recipe}, phase {training.phase}:\n{as_yaml(record | {'run': run})}")
    tokenizer = load_tokenizer(data.tokenizer_name or recipe.tokenizer)
    rows = open_text(data, training, tokenizer)
    if tokenizer.mask_token is None or tokenizer.pad_token is None:  # LLaMA's, of m3; text is tokenized without them
        tokenizer.add_special_tokens({"mask_token": "[MASK]", "pad_token": "[PAD]"})
    with without_bars():
        model = make_model(recipe, training, tokenizer, variant)
    optimizer = optimizer or optimizer_of(recipe, model)
    run = identity(training, model, tokenizer, rows) | functions
    if training.phase == 2:
        draws_held_out = not data.streaming and not data.validation_files
        check_start(training.init_from, model, len(tokenizer), run, draws_held_out)

    def make_trainer(checkpoint):  # makes packing plans, so a run that is refused makes none
        train_dataset, eval_dataset = rows.pack()
        return PretrainingTrainer(
            model,
            training,
            recipe=recipe,
            optimizer=optimizer,
            schedule=schedule,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=make_collator(recipe, tokenizer),
            processing_class=tokenizer,
        )

    trainer = train_or_resume(make_trainer, training, run)
    finish(trainer, run, record)
    return trainer


def make_model(
    recipe: Recipe, training: PretrainingArguments, tokenizer: PreTrainedTokenizerBase, variant: ModelOrClass | None
) -> PreTrainedModel:
    """Return the model that the training starts with: in phase 1 a new one, in phase 2 that of phase 1."""
    unset_hf_deepspeed_config()  # ZeRO-3 would draw other initial weights; it shards the model when the training starts
    if training.phase == 1:
        model = build_model(recipe, tokenizer, training.config_overrides, variant)
    else:
        model = load_model(training.init_from, variant)
        if isinstance(model.config, NeoBERTConfig):  # others have as many positions as they were made with
            model.config.max_position_embeddings = max(training.max_length, model.config.max_position_embeddings)
            model.config.sparse_prediction = True
    if variant is not None:
        check_variant(model, recipe)
    return model


def build_model(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    config_overrides: str = "",
    variant: ModelOrClass | None = None,
) -> PreTrainedModel:
    """Build the recipe's model with randomly initialized weights.

    Args:
        recipe: Sets architecture, shape and context length.
        tokenizer: Sets vocabulary size and padding token.
        config_overrides: Changes to the config, such as "hidden_size=256,num_hidden_layers=6".
        variant: As `model` of `pretrain`.

    Raises:
        ValueError: An override names no field of the config, or a field that is no number.
    """
    config_class = getattr(variant, "config_class", NeoBERTConfig)
    if recipe.architecture != "neobert":
        if variant is not None:
            raise ValueError(f"architecture={recipe.architecture!r} and model are both given; give one of them")
        config_class = CONFIG_MAPPING[recipe.architecture]
    values = dict(recipe.config, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    values["max_position_embeddings"] = recipe.max_length
    if issubclass(config_class, NeoBERTConfig):
        values["sparse_prediction"] = True
    else:  # position ids of RoBERTa start at pad_token_id + 1
        values["max_position_embeddings"] += tokenizer.pad_token_id + 1
    config = config_class(**values)
    if config_overrides:
        try:
            config.update_from_string(config_overrides)
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"config_overrides={config_overrides!r}: {error}") from error
        config = type(config).from_dict(config.to_dict())  # validates the combination
    if variant is None:
        return AutoModelForMaskedLM.from_config(config)
    return variant(config)


def check_variant(model: PreTrainedModel, recipe: Recipe) -> None:
    """Raise ValueError if the saved folder of a model would load as another model, or if it reads documents of a row together."""
    made_by = type(model)
    if made_by.__module__ == "__main__":
        raise ValueError(
            f"model={made_by.__name__} is defined in the script itself, whose code cannot be saved beside the weights; define "
            "it in another file and import it"
        )
    if isinstance(model, NeoBERTForMaskedLM):
        check_model_type(model, is_stock=made_by is NeoBERTForMaskedLM)
    elif recipe.batch_format == "packed":
        raise ValueError(
            f"model={made_by.__name__} is no NeoBERT and may not keep packed documents apart; choose batch_format='padded'"
        )
    with torch.device("meta"):
        again = made_by(model.config)
    if list(map(type, model.modules())) != list(map(type, again.modules())):
        raise ValueError(
            f"model is a {made_by.__name__} with modules that {made_by.__name__}(config) does not have, so its saved folder "
            "would load as another model; write a subclass that makes these modules"
        )


def load_model(init_from: str, variant: ModelOrClass | None = None) -> PreTrainedModel:
    """Load the model of phase 1 in float32.

    Args:
        init_from: Folder or Hub id.
        variant: As `model` of `pretrain`, but no function.

    Raises:
        ValueError: The variant is a function, or no Auto class knows the folder's model.
    """
    if variant is None:
        kind = PretrainedConfig.get_config_dict(init_from)[0].get("model_type")
        if kind is not None and kind not in CONFIG_MAPPING:
            raise ValueError(f"{init_from} holds a {kind}, whose class is not known here; give it as model=")
        return AutoModelForMaskedLM.from_pretrained(init_from, dtype=torch.float32)
    if not isinstance(variant, type):
        raise ValueError(f"model={name_of(variant)} is a function, which makes new weights; phase 2 needs a class")
    return variant.from_pretrained(init_from, dtype=torch.float32)  # type: ignore[attr-defined]  # of a model


def optimizer_of(recipe: Recipe, model: PreTrainedModel) -> MakeOptimizer | None:
    """Return the function that makes the recipe's optimizer; None for AdamW, which Trainer makes."""
    if recipe.optimizer == "adamw":
        return None
    decayed = names_with_decay(model, recipe.decay_norms_and_embeddings)
    return partial(
        muon,
        lr=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        betas=(recipe.adam_beta1, recipe.adam_beta2),
        eps=recipe.adam_epsilon,
        head_dim=getattr(model.config, "head_dim", None),
        no_decay=trainable_parameters(model).keys() - set(decayed),
    )


def check_start(init_from: str, model: PreTrainedModel, num_tokens: int, run: dict, draws_held_out: bool) -> None:
    """Check that phase 2 continues the model of phase 1, and holds out only documents that phase 1 held out.

    Args:
        init_from: Folder of the model of phase 1, or of one of its checkpoints, or an id on the Hub.
        model: This model.
        num_tokens: Vocabulary size of the tokenizer of phase 2.
        run: Identity of the run of phase 2.
        draws_held_out: Whether phase 2 evaluates on documents of its training text.

    Raises:
        ValueError: The architecture or the tokenizer is another, or phase 1 may have trained on documents that are held out here.
    """
    folder = Path(init_from)
    folders = [folder]
    if folder.name.startswith(PREFIX_CHECKPOINT_DIR):
        folders.append(folder.parent)
    files = [path / name for path in folders for name in (RUN, SUMMARY)]
    file = next((file for file in files if file.is_file()), None)
    first = {} if file is None else read_json(file)
    fault = f"phase 2 cannot start from {init_from}"
    config = model.config
    if "model" not in run and config.model_type != run["recipe"]["architecture"]:
        raise ValueError(f"{fault}: its architecture is {config.model_type}; give the recipe of phase 1")
    is_same_tokenizer = first.get("tokenizer_sha256") in (None, run["tokenizer_sha256"])
    if num_tokens > config.vocab_size or not is_same_tokenizer:
        raise ValueError(
            f"{fault}: its tokenizer is another, with {config.vocab_size} tokens, and this one has {num_tokens}; give the "
            "tokenizer_name of phase 1"
        )
    if not draws_held_out:
        return
    if file is None:
        logger.warning(
            f"{init_from} holds no {RUN}: its training may have used the documents that are held out here; give "
            "validation_files to evaluate on other text"
        )
        return
    held_out = first.get("held_out", {})
    is_same_text = all(first.get(name) == run[name] for name in ("seed", "data"))
    if not is_same_text or held_out.get("files") or held_out.get("num_held_out", 0) < run["held_out"]["num_held_out"]:
        raise ValueError(
            f"{fault}: its training may have used the documents that are held out here; give validation_files, or the text, "
            "seed and num_held_out of phase 1"
        )


def identity(
    training: PretrainingArguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: RunRows,
) -> dict:
    """Return everything that decides the weights of a run, in plain types; a resume compares it with `run.json`."""
    recipe = asdict(training.to_recipe())
    for name in ("corpus", "text_column", "tokenizer"):
        del recipe[name]
    config = model.config.to_diff_dict()
    for name in ("auto_map", "transformers_version"):
        config.pop(name, None)
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")  # by accelerate launch --mixed_precision
    if training.bf16:
        precision = "bf16"
    elif training.fp16:
        precision = "fp16"
    run = {
        "recipe": recipe,
        "phase": training.phase,
        "init_from": training.init_from,
        "config": config,
        "tokenizer_sha256": tokenizer_hash(tokenizer),
        "seed": training.seed,
        "precision": precision,
        "optim": training.optim.value,
        "optim_args": training.optim_args,
        **rows.identity,
    }
    if training.deepspeed_plugin is not None:  # its checkpoints hold the optimizer's state in files of their own
        run["zero_stage"] = training.deepspeed_plugin.zero_stage
    return json.loads(json.dumps(run))  # as it is read from the file


def make_collator(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PackedMLMCollator:
    """Return the collator with the masks and the batch format of a recipe."""
    is_packed = recipe.batch_format == "packed"
    return PackedMLMCollator(
        tokenizer,
        recipe.mask_rate[0],
        recipe.mask_replace_prob,
        recipe.random_replace_prob,
        recipe.batch_format,
        return_flash_attn_kwargs=is_packed,
        trust_boundaries=is_packed,  # the GPU does not wait for checks of positions and labels
    )


def finish(trainer: PretrainingTrainer, run: dict, record: dict) -> None:
    """Evaluate, save the model and the summary, and tell the figures."""
    metrics = {}
    if trainer.eval_dataset is not None:
        metrics = trainer.evaluate()
    trainer.model.config.sparse_prediction = False
    if trainer.is_fsdp_enabled:  # one file, even if checkpoints are sharded
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    with saving(Path(trainer.args.output_dir)), without_bars():
        trainer.save_model()
    if not trainer.is_world_process_zero():
        return
    held_out = {name: value for name, value in metrics.items() if name.startswith("eval_")}
    summary = write_summary(trainer, run, held_out, record)
    if metrics:
        token = trainer.processing_class.decode([trainer.most_frequent])
        say(HELD_OUT.format(**metrics, token=token))
    say(TRAINED.format(**summary))
