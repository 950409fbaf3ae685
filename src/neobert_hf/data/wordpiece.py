"""Training of an uncased WordPiece tokenizer with the `tokenizers` library, and the hash that identifies a tokenizer."""

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ..files.output import new_folder
from .lengths import plain_tokenizer

SPECIAL_TOKENS = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
MAX_TOKENS = 1_000_000  # the trainer allocates memory for the whole vocabulary at the start
MAX_CHARACTERS = 300  # size of the alphabet; texts with rarer characters get the token [UNK]
MAX_WORDS = 500_000  # the trainer learns from the most frequent words; each takes about 1 kB of memory
REPEATED = 10_000  # characters of a text that repeats a word for the trainer

# The ends of words inside an identifier, as empty matches: IntervalArray, HTTPServer, float32, b64encode. [0-9], since \d means
# other characters in JavaScript.
WORD_ENDS = "(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|(?<=[A-Za-z]{2})(?=[0-9])|(?<=[0-9])(?=[A-Za-z]{2})"
DIVIDER = "[-=~*#^_+]{4,}"  # underlines of headings and borders of tables, else one token for each character

# A part of the pre-tokenizer's work, faster. Words with punctuation outside of ASCII stay whole; it splits them.
WORDS = re.compile("[^ !-/:-@[-`{-~]+|[!-/:-@[-`{-~]")


class PreTrainedTokenizerFast(transformers.PreTrainedTokenizerFast):
    """The class of the same name in transformers, saved under this name.

    transformers 5 saves its own class as "TokenizersBackend", which transformers 4 refuses. Both load "PreTrainedTokenizerFast".
    """

    can_save_slow_tokenizer = False  # there is none; with True, transformers 5 removes "Fast" from the saved name


def train_wordpiece(texts: Iterable[str], vocab_size: int, model_max_length: int = 4096) -> PreTrainedTokenizerFast:
    """Train an uncased WordPiece tokenizer; `[PAD]` gets id 0, as NeoBERT expects.

    The tokenizer splits identifiers into words before it lowercases them: "IntervalArray" gives the tokens of "interval array",
    and "float32" those of "float 32". A divider, such as a row of hyphens, gives three tokens. The same texts in the same order
    give the same tokenizer.

    The result consists of standard parts of `tokenizers`, so that transformers 4 and 5, tokenizers and transformers.js load it
    from `tokenizer.json`. It is no `BertTokenizer`: transformers 5 makes the normalizer of that class itself, and the split would
    be lost. llama.cpp normalizes the text of BERT models itself and would not split identifiers.

    The texts are read once and not kept. Memory is that of their different words.

    Args:
        texts: Training texts.
        vocab_size: Maximum number of tokens, including the five special tokens; a small text gives fewer.
        model_max_length: Length in tokens at which the tokenizer truncates.

    Raises:
        ValueError: The texts have no word, `vocab_size` is above 1,000,000, or the characters of the text alone need more tokens.
    """
    special_tokens = list(SPECIAL_TOKENS.values())
    splits = [normalizers.Replace(Regex(WORD_ENDS), " "), normalizers.Replace(Regex(DIVIDER), "---")]
    normalizer = normalizers.Sequence([*splits, normalizers.BertNormalizer()])
    counts = Counter(word for text in texts for word in WORDS.findall(normalizer.normalize_str(text)))
    if not counts:
        raise ValueError("the texts hold no word, only white space; give text to learn from")
    alphabet = _alphabet(counts)
    words = dict(counts.most_common(MAX_WORDS))

    # The trainer breaks ties between pairs by the ids of their tokens, and gives ids to the "##x" of single characters x in the
    # order of a hash table, another one in each process. So a first training finds them, and the second gets them in order.
    found = _train(words, len(special_tokens) + 1, special_tokens, alphabet)
    characters = sorted(found.keys() - {*special_tokens})
    num_tokens = len(special_tokens) + len(characters)
    if not num_tokens <= vocab_size <= MAX_TOKENS:
        raise ValueError(
            f"vocab_size={vocab_size} is out of bounds; choose {num_tokens} for the characters of this text, to {MAX_TOKENS:,}"
        )
    show_progress = sys.stderr.isatty()  # else the library prints blank lines to stdout
    vocab = _train(_repeated(words), vocab_size, special_tokens + characters, alphabet, show_progress)

    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=SPECIAL_TOKENS["unk_token"]))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    sep, cls = SPECIAL_TOKENS["sep_token"], SPECIAL_TOKENS["cls_token"]
    tokenizer.post_processor = processors.BertProcessing((sep, vocab[sep]), (cls, vocab[cls]))
    options = {"model_max_length": model_max_length, "model_input_names": ["input_ids", "attention_mask"]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options, **SPECIAL_TOKENS)


def write_wordpiece(
    texts: Iterable[str], folder: str | Path, vocab_size: int, model_max_length: int = 4096
) -> PreTrainedTokenizerFast:
    """Write the tokenizer of `train_wordpiece`, whose other arguments and errors it has, to a folder.

    Args:
        folder: Folder to write, new or empty. It appears when it is complete.

    Raises:
        OSError: The folder is not empty, or a file cannot be written.
    """
    with new_folder(Path(folder)) as built:
        tokenizer = train_wordpiece(texts, vocab_size, model_max_length)
        tokenizer.save_pretrained(built)
    return tokenizer


def _alphabet(words: dict[str, int]) -> list[str]:
    """Return the most frequent characters in order; the trainer's own choice among equally frequent ones is random."""
    counts = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    by_frequency = sorted((-count, character) for character, count in counts.items() if not character.isspace())
    return sorted(character for _, character in by_frequency[:MAX_CHARACTERS])


def _repeated(words: dict[str, int]) -> Iterator[str]:
    """Yield texts that hold each word as many times as it was counted: the trainer takes texts, no counts."""
    for word, count in words.items():
        most = max(1, REPEATED // len(word))
        for start in range(0, count, most):
            yield f"{word} " * min(most, count - start)


def _train(texts, vocab_size, first_tokens, alphabet, show_progress=False) -> dict[str, int]:
    """Return the vocabulary of normalized texts; `first_tokens` get the first ids."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=SPECIAL_TOKENS["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=first_tokens,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.get_vocab()


def tokenizer_hash(tokenizer: transformers.PreTrainedTokenizerFast | Tokenizer) -> str:
    """Return the SHA-256 of everything that decides the token ids; truncation and padding settings do not count."""
    return hashlib.sha256(plain_tokenizer(tokenizer).to_str().encode()).hexdigest()
