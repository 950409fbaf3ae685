"""Another vocabulary for a trained model: a new token begins as the mean of the tokens that the old tokenizer gives for it."""

import copy
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers.models import WordPiece
from transformers import PreTrainedTokenizerFast

from ..checkpoints.record import write_record
from ..checkpoints.tokenizer import load_tokenizer
from ..data.wordpiece import SPECIAL_TOKENS, tokenizer_hash, train_wordpiece
from ..files.output import new_folder
from ..model.modeling_neobert import NeoBERTForMaskedLM
from ..runs.progress import without_bars
from ..runs.resume import take_folder
from .arguments import CorpusArguments, PretrainingArguments
from .corpus import open_corpus


def adapt_vocabulary(
    model: NeoBERTForMaskedLM, old: PreTrainedTokenizerFast, new: PreTrainedTokenizerFast
) -> NeoBERTForMaskedLM:
    """Return a copy of a model with the vocabulary of another tokenizer.

    A new token's rows of the embedding and of the decoder, and its bias, are the means over its old tokens (see `old_tokens`).
    The embedding of the padding token is zero. All other weights are unchanged.

    Args:
        model: The model; it is not changed.
        old: Its tokenizer.
        new: The tokenizer of the copy.

    Raises:
        ValueError: A tokenizer has no mask or padding token.
    """
    for name, tokenizer in {"old": old, "new": new}.items():
        if tokenizer.mask_token is None or tokenizer.pad_token is None:
            raise ValueError(
                f"the {name} tokenizer has no mask_token or no pad_token, which pretraining needs; add it by add_special_tokens"
            )
    tokens = old_tokens(old, new)
    ids = torch.tensor(list(itertools.chain.from_iterable(tokens)))
    starts = torch.tensor([0, *map(len, tokens)]).cumsum(0)[:-1]

    config = copy.deepcopy(model.config)
    config.vocab_size = len(tokens)
    config.pad_token_id = new.pad_token_id
    weights = {name: weight.cpu() for name, weight in model.state_dict().items()}
    for name in ("model.encoder.weight", "decoder.weight", "decoder.bias"):
        rows = weights[name].view(model.config.vocab_size, -1)
        weights[name] = F.embedding_bag(ids, rows, starts, mode="mean").view(len(tokens), *weights[name].shape[1:])
    weights["model.encoder.weight"][new.pad_token_id] = 0
    adapted = NeoBERTForMaskedLM(config).to(model.dtype)
    adapted.load_state_dict(weights)
    return adapted.train(model.training)


def old_tokens(old: PreTrainedTokenizerFast, new: PreTrainedTokenizerFast) -> list[list[int]]:
    """Return, for each id of the new tokenizer, the ids of the old one that mean the same.

    These are: for a special token the one of the same role; for a token that both have, this token; for any other, the tokens
    that the old tokenizer gives for its text. A token without text means all old tokens.
    """
    known, vocabulary = old.get_vocab(), new.get_vocab()
    for role in SPECIAL_TOKENS:
        of_old, of_new = getattr(old, role), getattr(new, role)
        if of_old and of_new:
            known[of_new] = known[of_old]
    everything = list(range(len(old)))
    found = [everything] * (max(vocabulary.values()) + 1)
    for token, i in vocabulary.items():
        if token in known:
            found[i] = [known[token]]
        else:
            found[i] = _split(token, old, new) or everything
    return found


def _split(token: str, old: PreTrainedTokenizerFast, new: PreTrainedTokenizerFast) -> list[int]:
    """The ids of the old tokenizer for the text of a new token."""
    of_old, of_new = old.backend_tokenizer, new.backend_tokenizer.model
    if not isinstance(of_new, WordPiece):
        return old(new.convert_tokens_to_string([token]), add_special_tokens=False)["input_ids"]
    text = token.removeprefix(of_new.continuing_subword_prefix)
    if text != token and isinstance(of_old.model, WordPiece):
        # The old WordPiece finds "##ing" as the begin of a word that is spelled so, and splits "##ings" into "##ing" and "##s".
        part = of_old.normalizer.normalize_str(text) if of_old.normalizer else text
        pieces = of_old.model.tokenize(of_old.model.continuing_subword_prefix + part)
        ids = [piece.id for piece in pieces]
        if old.unk_token_id not in ids:
            return ids
    return old(text, add_special_tokens=False)["input_ids"]


def write_adapted_model(
    source: str, data: CorpusArguments, training: PretrainingArguments, vocab_size: int | None = None
) -> str:
    """Write a model with a new vocabulary to the folder `start` of `training.output_dir`, for `pretrain` to continue.

    The tokenizer is `data.tokenizer_name`, or without a name a new WordPiece tokenizer of the training text. A folder `start`
    with the same content stays as it is, so a run can be resumed.

    Args:
        source: Folder or Hub id of a masked language model with its tokenizer.
        data: The text, and the tokenizer if it is given.
        training: The output folder.
        vocab_size: Number of tokens of a new tokenizer; None takes that of the old one.

    Returns:
        The folder.

    Raises:
        ValueError: The source has no decoder, or `start` holds another model; or as `adapt_vocabulary`.
        OSError: A file cannot be read or written.
    """
    if data.tokenizer_name and vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size} has no effect on the tokenizer {data.tokenizer_name}; give one of them"
        )
    folder = Path(training.output_dir, "start")
    old = load_tokenizer(source)
    with without_bars():
        model = NeoBERTForMaskedLM.from_pretrained(source, dtype=torch.float32)
    if "decoder" in model.new_layers:
        raise ValueError(f"{source} has no decoder, so it predicts no tokens; give a masked language model")
    if data.tokenizer_name:
        new = load_tokenizer(data.tokenizer_name)
    else:
        texts = open_corpus(data, training.to_recipe(), data.train_files)
        new = train_wordpiece(texts, vocab_size or len(old), model.config.max_position_embeddings)
    adapted = adapt_vocabulary(model, old, new)
    if folder.exists():
        kept = NeoBERTForMaskedLM.from_pretrained(folder).state_dict()
        is_same = tokenizer_hash(load_tokenizer(str(folder))) == tokenizer_hash(new)
        for name, value in adapted.state_dict().items():
            is_same = is_same and torch.equal(kept[name], value)
        if not is_same:
            raise ValueError(f"{folder} holds another model or tokenizer; give another output_dir, or remove it")
        return str(folder)
    with take_folder(folder.parent), new_folder(folder) as part:
        adapted.save_pretrained(part)
        new.save_pretrained(part)
        write_record(part, training, source=source, rows={}, settings={}, remark="The vocabulary is new.")
    return str(folder)
