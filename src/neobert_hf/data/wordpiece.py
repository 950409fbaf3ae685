"""A WordPiece tokenizer like BERT's, trained on text of one's own with the `tokenizers` library; and what any tokenizer is."""

import hashlib
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertTokenizerFast, PreTrainedTokenizerFast

SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
LEAST_TOKENS = len(SPECIAL_TOKENS) + 1
MOST_TOKENS = 1_000_000  # of a vocabulary; its trainer asks for memory for all of them at the start


def train_wordpiece(texts: Iterable[str], vocab_size: int, model_max_length: int = 4096) -> BertTokenizerFast:
    """Train an uncased WordPiece tokenizer; `[PAD]` gets id 0, as NeoBERT expects.

    Args:
        texts: Training text.
        vocab_size: Number of tokens, the five special ones included, 6 to 1,000,000; fewer come out if the text does not hold as
            many.
        model_max_length: Where the tokenizer truncates, in tokens.

    Raises:
        ValueError: An argument is out of bounds, or the characters of the text alone need more tokens than `vocab_size`.
    """
    check_vocab_size(vocab_size)
    if model_max_length < 1:
        raise ValueError(f"model_max_length={model_max_length} leaves no token; give at least 1")
    tokenizer = Tokenizer(models.WordPiece(unk_token=SPECIAL_TOKENS["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS.values()), limit_alphabet=300, show_progress=True
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (num_tokens := tokenizer.get_vocab_size()) > vocab_size:
        raise ValueError(f"vocab_size={vocab_size} is too small: the characters of this text alone need {num_tokens}")
    ids = {name: tokenizer.token_to_id(token) for name, token in SPECIAL_TOKENS.items()}
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", ids["sep_token"]), ("[CLS]", ids["cls_token"]))
    return BertTokenizerFast(  # saved under a class name that transformers 4 and 5 both know
        tokenizer_object=tokenizer,
        model_max_length=model_max_length,
        model_input_names=["input_ids", "attention_mask"],
        **SPECIAL_TOKENS,
    )


def check_vocab_size(vocab_size: int) -> None:
    """Raise ValueError for what no vocabulary can have."""
    if not LEAST_TOKENS <= vocab_size <= MOST_TOKENS:
        raise ValueError(f"vocab_size={vocab_size} is not from {LEAST_TOKENS} to {MOST_TOKENS}")


def tokenizer_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """SHA-256 of everything that decides which ids a tokenizer gives; where it truncates and pads does not count."""
    return hashlib.sha256(plain_tokenizer(tokenizer).to_str().encode()).hexdigest()


def plain_tokenizer(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """A copy of what tokenizes inside, which neither truncates nor pads."""
    plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    plain.no_truncation()
    plain.no_padding()
    return plain
