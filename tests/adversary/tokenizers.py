"""Tokenizers with the class of BERT: the ids are those of tokenizer.json, or doctor says that they are not."""

import json
import random
from pathlib import Path

from adversary.machinery import EXPLAINED, RIGHT, Failed, Family
from adversary.workbench import Workbench
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from neobert_hf import NeoBERTConfig, NeoBERTModel
from neobert_hf.checkpoints import examine

WORDS = ["open", "Open", "OPEN", "file", "Datei", "fenêtre", "Größe", "東京", "ﬁlter"]
WORDS += ["readLine", "HTTPServer", "float32", "x_y", "don't", "3.14", "--", ";"]
NAMES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]


def prepare(bench: Workbench) -> tuple[list, None]:
    """60 cases: each kind of tokenizer, in folders that name BERT's class."""
    return [(kind, named) for kind in KINDS for named in NAMED for _ in range(6)], None


def case(kind: str, named: str, rng: random.Random, folder: Path, _) -> str:
    special = NAMES[0] if kind == "BERT's own" else rng.choice(NAMES)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 9))) for _ in range(200)]
    own = KINDS[kind](rng, special, texts)
    ends = [(name, own.token_to_id(name)) for name in special[2:4]]
    own.post_processor = processors.TemplateProcessing(f"{special[2]} $A {special[3]}", special_tokens=ends)
    own.save(str(folder / "tokenizer.json"))
    shape = dict(vocab_size=own.get_vocab_size(), hidden_size=32, num_attention_heads=2, max_position_embeddings=77)
    NeoBERTModel(NeoBERTConfig(**shape, num_hidden_layers=1, intermediate_size=48)).save_pretrained(folder)
    write(folder / named, {"tokenizer_class": rng.choice(("BertTokenizer", "BertTokenizerFast"))})
    expected = [encoding.ids for encoding in own.encode_batch(texts)]
    found = findings(folder)
    check_bert_class(kind, found, has_ids(folder, texts, expected))
    if found != {"tokenizer-ids"}:
        return EXPLAINED if found else RIGHT
    write(folder / named, {"tokenizer_class": None})
    if findings(folder) or ids_of(folder, texts) != expected:
        raise Failed(f"wrong ids of a {kind} without a class; doctor finds {findings(folder) or 'nothing'}")
    return EXPLAINED


def check_bert_class(kind: str, found: set[str], is_right: bool) -> None:
    """BERT's class gives other ids exactly if doctor says so."""
    if not is_right and not found:
        raise Failed(f"silently wrong: BERT's class gives other ids than a {kind}, and doctor finds nothing")
    if found and is_right and kind == "BERT's own":  # in transformers 5.0, its class is cased by default
        raise Failed(f"doctor finds {found} in a tokenizer of BERT")


def findings(folder: Path) -> set[str]:
    return {finding["code"] for finding in examine(folder)["findings"]} & {"tokenizer-ids", "refused"}


def has_ids(folder: Path, texts: list[str], expected: list[list[int]]) -> bool:
    try:
        return ids_of(folder, texts) == expected
    except Exception:  # of another model's tokenizer, in any class
        return False


def ids_of(folder: Path, texts: list[str]) -> list[list[int]]:
    return AutoTokenizer.from_pretrained(folder)(texts, verbose=False)["input_ids"]


def write(file: Path, settings: dict) -> None:
    content = (json.loads(file.read_text()) if file.exists() else {}) | settings
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def train(own: Tokenizer, trainer, texts: list[str]) -> Tokenizer:
    own.train_from_iterator(texts, trainer)
    return own


def wordpiece(special: list[str], texts: list[str], normalizer, pre_tokenizer) -> Tokenizer:
    own = Tokenizer(models.WordPiece(unk_token=special[1]))
    own.normalizer, own.pre_tokenizer = normalizer, pre_tokenizer
    return train(own, trainers.WordPieceTrainer(vocab_size=150, special_tokens=special, show_progress=False), texts)


def cased(rng: random.Random, special: list[str], texts: list[str]) -> Tokenizer:
    normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=rng.choice((None, False, True)))
    return wordpiece(special, texts, normalizer, pre_tokenizers.BertPreTokenizer())


def uncased(rng: random.Random, special: list[str], texts: list[str]) -> Tokenizer:
    """The tokenizer of BERT, for which its class is right."""
    return wordpiece(special, texts, normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer())


def byte_level(rng: random.Random, special: list[str], texts: list[str]) -> Tokenizer:
    own = Tokenizer(models.BPE(unk_token=special[1]))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=rng.random() < 0.5)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = dict(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    return train(own, trainers.BpeTrainer(**options), texts)


def unigram(rng: random.Random, special: list[str], texts: list[str]) -> Tokenizer:
    own = Tokenizer(models.Unigram())
    own.normalizer = rng.choice((normalizers.NFKC(), normalizers.NFC(), normalizers.Lowercase()))
    own.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=rng.choice(("always", "first", "never")))
    options = dict(vocab_size=120, special_tokens=special, unk_token=special[1], show_progress=False)
    return train(own, trainers.UnigramTrainer(**options), texts)


def own_normalizer(rng: random.Random, special: list[str], texts: list[str]) -> Tokenizer:
    splits = normalizers.Replace(Regex("(?<=[a-z])(?=[A-Z])"), " "), normalizers.Replace("3", "three")
    normalizer = normalizers.Sequence([*splits, normalizers.NFD(), normalizers.Lowercase()])
    splitter = rng.choice((pre_tokenizers.WhitespaceSplit(), pre_tokenizers.BertPreTokenizer()))
    return wordpiece(special, texts, normalizer, splitter)


KINDS = {"cased WordPiece": cased, "BERT's own": uncased, "byte-level BPE": byte_level, "Unigram": unigram}
KINDS["WordPiece with its own normalizer"] = own_normalizer
NAMED = ("tokenizer_config.json", "config.json")
TOKENIZERS = Family("tokenizers", prepare, case)
