"""Another vocabulary: new rows are means of old ones, and pretraining continues."""

import json

import adapt_vocabulary as example
import numpy as np
import pretrain_mlm
import pytest
import torch
from conftest import SENTENCE, run_main
from huggingface_hub import ModelCard
from pretraining_runs import losses_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerFast

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.data.wordpiece import train_wordpiece
from neobert_hf.files.json_files import read_json_object
from neobert_hf.pretraining.vocabulary import adapt_vocabulary

DOMAIN = "foxes jumped quickly over lazier dogs and slept the reddest seas of warmth Ξ"
ROWS = ("model.encoder.weight", "decoder.weight", "decoder.bias")
NAMES = {f"{role}_token": f"<{role}>" for role in ("unk", "mask", "sep", "pad", "cls")}


@pytest.fixture(scope="module")
def new_tokenizer():
    return train_wordpiece([DOMAIN] * 20, vocab_size=120, model_max_length=64)


def longest_first(token, known):
    """The ids of a WordPiece split, by the definition of BERT's: the longest known piece first; None if there is no split."""
    prefix, rest, ids = ("##", token[2:], []) if token.startswith("##") else ("", token, [])
    while rest:
        length = next((n for n in range(len(rest), 0, -1) if prefix + rest[:n] in known), None)
        if length is None:
            return None
        ids.append(known[prefix + rest[:length]])
        prefix, rest = "##", rest[length:]
    return ids


def test_a_new_row_is_the_mean_of_its_old_pieces_and_all_else_stays(model, tokenizer, new_tokenizer):
    adapted = adapt_vocabulary(model, tokenizer, new_tokenizer)
    old, new = tokenizer.get_vocab(), new_tokenizer.get_vocab()
    split = {token: longest_first(token, old) for token in new if token not in old}
    assert sum(ids is not None and len(ids) > 1 for ids in split.values()) > 20
    assert any(token.startswith("##") and len(ids or ()) > 1 for token, ids in split.items())
    assert split["ξ"] is None and len(new.keys() & old.keys()) > 15
    for name in ROWS:
        before, after = model.state_dict()[name], adapted.state_dict()[name]
        assert len(after) == len(new)
        for token in new.keys() & old.keys() - {"[PAD]"}:
            assert torch.equal(after[new[token]], before[old[token]]), token
        for token, ids in split.items():
            if ids is not None:  # else the old tokenizer knows it neither as a word nor as a part
                wanted = np.mean([before[i].double().numpy() for i in ids], axis=0)
                np.testing.assert_allclose(after[new[token]].numpy(), wanted, rtol=1e-6, atol=1e-6)  # float32
        assert torch.equal(after[new["ξ"]], before[old["[UNK]"]])
    assert adapted.config.vocab_size == len(new) and model.config.vocab_size != len(new)

    before, after = model.state_dict(), adapted.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before if name not in ROWS)
    shared = sorted(old.keys() & new.keys() - {"[PAD]"})
    ids = [torch.tensor([[vocabulary[token] for token in shared]]) for vocabulary in (old, new)]
    with torch.no_grad():
        wanted, found = model(ids[0]).logits[..., ids[0][0]], adapted(ids[1]).logits[..., ids[1][0]]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)  # float32: a product of another width


def word_tokenizer(words):
    vocabulary = {token: i for i, token in enumerate([*words, *NAMES.values()])}
    inner = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, **NAMES)


def test_special_tokens_keep_their_role_and_the_padding_row_is_zero(model, tokenizer):
    new = word_tokenizer(["fox", "houses"])
    adapted = adapt_vocabulary(model, tokenizer, new)
    for role in NAMES:
        i, j = (x.convert_tokens_to_ids(getattr(x, role)) for x in (new, tokenizer))
        for name in ROWS:
            if (role, name) != ("pad_token", "model.encoder.weight"):
                assert torch.equal(adapted.state_dict()[name][i], model.state_dict()[name][j]), (role, name)
    assert adapted.config.pad_token_id == adapted.model.encoder.padding_idx == new.pad_token_id == 5
    assert not adapted.model.encoder.weight[5].any() and adapted.model.encoder.weight[0].any()
    ids, mask = torch.tensor([[0, 1, 5]]), torch.tensor([[1, 1, 0]])
    assert adapted(ids, mask).logits.shape == (1, 3, 7)


def test_a_byte_level_bpe_takes_the_rows_of_the_words_that_its_tokens_spell(model, tokenizer):
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    special = list(NAMES.values())
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    inner.train_from_iterator([SENTENCE] * 20, trainer)
    new = PreTrainedTokenizerFast(tokenizer_object=inner, **NAMES)
    adapted = adapt_vocabulary(model, tokenizer, new)
    for word in ("the", "old", "it"):
        i, j = new.convert_tokens_to_ids(f"Ġ{word}"), tokenizer.convert_tokens_to_ids(word)
        assert tokenizer.convert_ids_to_tokens(j) == word and new.convert_ids_to_tokens(i) == f"Ġ{word}"
        for name in ROWS:
            assert torch.equal(adapted.state_dict()[name][i], model.state_dict()[name][j])
    # the space alone has no text
    blank = adapted.decoder.weight[new.convert_tokens_to_ids("Ġ")]
    torch.testing.assert_close(blank, model.decoder.weight[: len(tokenizer)].mean(0), rtol=0, atol=1e-6)


def test_a_tokenizer_without_mask_is_refused(model, tokenizer):
    no_mask = word_tokenizer(["fox"])
    no_mask.mask_token = None
    with pytest.raises(ValueError, match="the new tokenizer has no mask_token"):
        adapt_vocabulary(model, tokenizer, no_mask)
    with pytest.raises(ValueError, match="the old tokenizer has no mask_token"):
        adapt_vocabulary(model, no_mask, tokenizer)


def arguments(corpus, source, folder, *more):
    options = {"init_from": source, "output_dir": folder, "train_files": corpus / "train.jsonl"}
    options |= {"validation_files": corpus / "held_out.jsonl", "vocab_size": 64, "max_length": 32, "row_tokens": 64}
    options |= {"tokens_per_step": 256, "max_steps": 12, "learning_rate": "3e-2", "logging_steps": 1, "save_steps": 6}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return [*words, "--mask_rate", 0.4, 0.1, "--num_processes", 1, "--use_cpu", "--disable_tqdm", "true", *more]


@pytest.mark.slow
def test_the_example_adapts_and_trains_and_the_result_opens(corpus, published, tmp_path, monkeypatch):
    run_main(example, *arguments(corpus, published, tmp_path / "run", "--language", "de"))
    assert read_json_object(tmp_path / "run/start/training.json")["source"] is None  # no folder of this machine
    card = ModelCard.load(tmp_path / "run/README.md")
    assert card.data.language == ["de"] and "12" in card.text
    losses = losses_of(tmp_path / "run")
    assert losses[12] < losses[1] - 0.3
    for folder in (tmp_path / "run", tmp_path / "run/start"):
        model, tokenizer = AutoModelForMaskedLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert type(model) is NeoBERTForMaskedLM
        assert model.config.vocab_size == len(tokenizer) == 64 and tokenizer.mask_token == "[MASK]"
        assert model.config.max_position_embeddings == 64  # shorter documents do not shorten the context
        assert not model.model.encoder.weight[tokenizer.pad_token_id].any()
        found = model(**tokenizer(["the quick fox", "over"], padding=True, return_tensors="pt")).logits
        assert found.isfinite().all()
        saved = json.loads((folder / "tokenizer_config.json").read_text())
        assert saved["tokenizer_class"] == "PreTrainedTokenizerFast"
    recipe = ("--recipe", tmp_path / "run/recipe.yaml", "--report_to", "none", "--disable_tqdm", "true")
    for number, script in enumerate((pretrain_mlm, example)):  # the recorded recipe alone repeats the run
        run_main(script, *recipe, "--output_dir", tmp_path / f"again{number}")
        weights = [tmp_path / name / "model.safetensors" for name in ("run", f"again{number}")]
        assert weights[0].read_bytes() == weights[1].read_bytes()
    run_main(example, *arguments(corpus, published, tmp_path / "run", "--language", "de"))
    other = NeoBERTForMaskedLM.from_pretrained(published)
    other.decoder.bias.data[9] += 1
    other.save_pretrained(published)
    for more in (["--vocab_size", 60], []):
        with pytest.raises(SystemExit, match=r"run/start holds another model or tokenizer; give another output_dir"):
            run_main(example, *arguments(corpus, published, tmp_path / "run", *more))


def test_what_cannot_be_adapted_is_refused_on_one_line_and_leaves_no_model(corpus, published, bert, tmp_path):
    encoder = tmp_path / "encoder"
    NeoBERTForMaskedLM.from_pretrained(published).model.save_pretrained(encoder)
    AutoTokenizer.from_pretrained(published).save_pretrained(encoder)
    for source, words, *more in (
        (encoder, "has no decoder"),
        (bert, "this is a bert, not a NeoBERT"),
        (corpus, "corpus"),
        (published, "vocab_size=64 has no effect on the tokenizer", "--tokenizer_name", corpus / "tokenizer"),
    ):
        with pytest.raises(SystemExit, match=words) as caught:
            run_main(example, *arguments(corpus, source, tmp_path / "run", *more))
        assert "\n" not in str(caught.value)
        assert not list(tmp_path.glob("run/**/config.json"))
