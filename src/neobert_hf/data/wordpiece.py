"""Training of a BERT-style WordPiece tokenizer with the `tokenizers` library, and the hash that identifies a tokenizer."""

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
MOST_TOKENS = 1_000_000  # the trainer allocates memory for the whole vocabulary at the start


def train_wordpiece(texts: Iterable[str], vocab_size: int, model_max_length: int = 4096) -> BertTokenizerFast:
    """Train an uncased WordPiece tokenizer; `[PAD]` gets id 0, as NeoBERT expects.

    Args:
        texts: Training texts.
        vocab_size: Maximum number of tokens, including the five special tokens, 6 to 1,000,000; a small text gives fewer.
        model_max_length: Length in tokens at which the tokenizer truncates.

    Raises:
        ValueError: An argument is out of bounds, or the characters of the text alone need more tokens than `vocab_size`.
    """
    check_vocab_size(vocab_size)
    if model_max_length < 1:
        raise ValueError(f"model_max_length={model_max_length} leaves no token; choose at least 1")
    tokenizer = Tokenizer(models.WordPiece(unk_token=SPECIAL_TOKENS["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS.values()), limit_alphabet=300, show_progress=True
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (num_tokens := tokenizer.get_vocab_size()) > vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size} is too small for the characters of this text; choose at least {num_tokens}"
        )
    ids = {name: tokenizer.token_to_id(token) for name, token in SPECIAL_TOKENS.items()}
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", ids["sep_token"]), ("[CLS]", ids["cls_token"]))
    return BertTokenizerFast(  # transformers 4 and 5 both know the class name under which it is saved
        tokenizer_object=tokenizer,
        model_max_length=model_max_length,
        model_input_names=["input_ids", "attention_mask"],
        **SPECIAL_TOKENS,
    )


def check_vocab_size(vocab_size: int) -> None:
    """Raise ValueError if a vocabulary cannot have this size."""
    if not LEAST_TOKENS <= vocab_size <= MOST_TOKENS:
        raise ValueError(f"vocab_size={vocab_size} is out of bounds; choose {LEAST_TOKENS} to {MOST_TOKENS}")


def tokenizer_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the SHA-256 of everything that decides the token ids; truncation and padding settings do not count."""
    return hashlib.sha256(plain_tokenizer(tokenizer).to_str().encode()).hexdigest()


def plain_tokenizer(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """Return a copy of the inner `tokenizers` tokenizer without truncation and padding."""
    plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    plain.no_truncation()
    plain.no_padding()
    return plain
