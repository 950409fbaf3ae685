"""Folders of other people: their links, their settings, and tokenizers that are not the model's."""

import json
import os
import shutil
from fnmatch import fnmatch

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, BertTokenizerFast, Trainer, TrainingArguments
from verifying import check_own_code

from neobert_hf import NeoBERTForMaskedLM, sentence_transformer
from neobert_hf.checkpoints.tokenizer import keep_known_settings, load_tokenizer
from neobert_hf.checkpoints.trust import DATA_FILES, check_links, check_source, resolve

FOREIGN = {  # settings by which a loader runs code of another place, by the file that holds them
    "config.json": {
        **{"auto_map": {"AutoModel": "other/place--model.Model"}, "attn_implementation": "other/kernel"},
        "custom_pipelines": {"search": {"impl": "other/place--search.Search"}},
    },
    "tokenizer_config.json": {"auto_map": {"AutoTokenizer": [None, "other/place--tokenizer.Tokenizer"]}},
}


def add_to(file, settings):
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | settings))


@pytest.fixture
def theirs(tiny_config, tokenizer, tmp_path):
    NeoBERTForMaskedLM(tiny_config).save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    for name, settings in FOREIGN.items():
        add_to(tmp_path / "theirs" / name, settings)
    return tmp_path / "theirs"


def assert_own(folder):
    """The folder names no foreign code, and the tokenizer is complete."""
    check_own_code(folder)
    assert "other/" not in "".join(file.read_text() for file in folder.glob("*config.json"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("the [MASK]") == ["the", "[MASK]"] and 52 <= tokenizer.model_max_length <= 64
    assert set(tokenizer("the fox")) == {"input_ids", "attention_mask"}


def test_an_embedding_model_and_a_fine_tuned_model_are_saved_without_foreign_settings(theirs, tmp_path):
    """The second as the scripts do: `load_tokenizer`, the model's class and a stock Trainer."""
    sentence_transformer(str(theirs)).save_pretrained(str(tmp_path / "dense"))
    assert_own(tmp_path / "dense")
    model, run = NeoBERTForMaskedLM.from_pretrained(theirs), TrainingArguments(str(tmp_path / "run"), use_cpu=True)
    Trainer(model, run, processing_class=load_tokenizer(str(theirs))).save_model()
    assert_own(tmp_path / "run")


def test_a_config_loses_and_names_the_settings_that_its_class_does_not_declare(tiny_config, caplog):
    declared = tiny_config.to_dict()
    tiny_config.auto_map, tiny_config.code_in_the_future = {"AutoModel": "other/place--a.B"}, "other/place"
    assert keep_known_settings(tiny_config, "org/name") is tiny_config
    assert tiny_config.to_dict() == declared
    assert "org/name has settings unknown to this library, which are not saved: code_in_the_future" in caplog.text


def test_settings_that_a_tokenizer_declares_are_kept(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Fox", "fox"]))
    BertTokenizerFast.from_pretrained(tmp_path, do_lower_case=False).save_pretrained(tmp_path)
    load_tokenizer(str(tmp_path)).save_pretrained(tmp_path / "again")
    assert load_tokenizer(str(tmp_path / "again")).tokenize("Fox fox") == ["Fox", "fox"]


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/a.jinja", "vocab.txt", "folder"])
def test_a_link_that_leaves_the_folder_is_refused(theirs, tmp_path, name):
    (tmp_path / "secret").write_text("token")
    (theirs / name).parent.mkdir(exist_ok=True)
    (theirs / name).symlink_to(tmp_path if name == "folder" else "../" * name.count("/") + "../secret")
    for read in (load_tokenizer, check_source):
        with pytest.raises(ValueError, match=rf"{name} refers to .*, outside its folder"):
            read(str(theirs))


def test_links_inside_a_folder_and_those_of_the_cache_are_accepted(theirs, tokenizer, tmp_path):
    (theirs / "vocab.txt").symlink_to("tokenizer.json")
    check_source(theirs)
    blobs, snapshot = tmp_path / "models--org--name/blobs", tmp_path / "models--org--name/snapshots/0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(theirs.iterdir()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert len(load_tokenizer(str(snapshot))) == len(tokenizer)
    (blobs / "secret").symlink_to(tmp_path)
    (snapshot / "more.json").symlink_to("../../blobs/secret")
    with pytest.raises(ValueError, match=r"more\.json refers to"):
        check_source(snapshot)


@pytest.mark.parametrize("key", ["vocab_file", "entity_vocab_file"])
def test_a_file_outside_the_folder_is_refused_under_any_key_of_the_tokenizer(theirs, tmp_path, key):
    """transformers 4.57 opens the file that tokenizer_config.json names, and each line of it becomes a token."""
    (tmp_path / "secret").write_text("token")
    for value in (str(tmp_path / "secret"), "../secret"):
        add_to(theirs / "tokenizer_config.json", {key: value})
        with pytest.raises(ValueError, match=r"tokenizer_config\.json refers to .*secret, outside its folder"):
            load_tokenizer(str(theirs))
    for value in ("tokenizer_config.json", "/a/machine/that/saved/it/vocab.txt"):
        add_to(theirs / "tokenizer_config.json", {key: value})
        check_links(theirs)


def test_a_folder_without_tokenizer_files_is_refused(theirs):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (theirs / name).unlink()
    with pytest.raises(ValueError, match="theirs holds no tokenizer"):
        load_tokenizer(str(theirs))
    with pytest.raises(ValueError, match="has 5 special tokens and no word; its files are missing"):
        sentence_transformer(str(theirs))


@pytest.mark.parametrize("vocab_size", [40, 400])
def test_the_tokenizer_of_another_model_is_refused(theirs, tokenizer, tiny_config, vocab_size):
    tiny_config.vocab_size = vocab_size
    NeoBERTForMaskedLM(tiny_config).save_pretrained(theirs)
    for read in (load_tokenizer, sentence_transformer):
        with pytest.raises(ValueError, match=rf"has {len(tokenizer)} tokens, but the model has {vocab_size}"):
            read(str(theirs))


def cased(special):
    """Cased words, some of which are not ASCII."""
    own = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*special, "Fox", "fox", *"éÉ"])}, special[1]))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return own


def byte_level(special):
    own = Tokenizer(models.BPE({x: i for i, x in enumerate([*special, *pre_tokenizers.ByteLevel.alphabet()])}, []))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # transformers 4 sets it to False
    return own


def unigram(special):
    own = Tokenizer(models.Unigram([(word, -1.0) for word in [*special, *"▁Foxfé"]], unk_id=1))
    own.normalizer, own.pre_tokenizer = normalizers.Replace("É", "f"), pre_tokenizers.Metaspace()
    return own


@pytest.mark.compat
@pytest.mark.parametrize(
    "special", [["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]]
)
@pytest.mark.parametrize("make", [cased, byte_level, unigram])
@pytest.mark.parametrize("settings", [None, {}, {"model_max_length": 5}])
def test_a_tokenizer_without_a_class_is_that_of_its_file(make, special, settings, tiny_config, tmp_path):
    own = make(special)
    own.add_special_tokens(special)
    own.post_processor = processors.BertProcessing((special[3], 3), (special[2], 2))
    own.save(str(tmp_path / "tokenizer.json"))
    tiny_config.vocab_size = own.get_vocab_size()
    tiny_config.save_pretrained(tmp_path)
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    load_tokenizer(str(tmp_path)).save_pretrained(tmp_path / "again")
    for tokenizer in (AutoTokenizer.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path / "again")):
        texts = ["Fox fox É é", f"fox {special[4]}", "IntervalArray, \t 3.14"]
        assert tokenizer(texts)["input_ids"] == [encoding.ids for encoding in own.encode_batch(texts)]
        ids = [getattr(tokenizer, f"{name}_token_id") for name in ("pad", "unk", "cls", "sep", "mask")]
        assert ids == [0, 1, 2, 3, 4]
        assert tokenizer.model_max_length == (5 if settings else 64)
        assert tokenizer(["fox", "fox fox fox"], padding=True)["input_ids"][0][-1] == 0


@pytest.mark.compat
def test_a_vocabulary_without_tokenizer_json_is_that_of_bert(tiny_config, tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "fox", "##es"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "config.json").write_text('{"model_type": "neobert", "max_length": 77, "vocab_size": 7}')
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer("foxes [MASK]", "fox")["input_ids"] == [2, 5, 6, 4, 3, 5, 3]
    assert tokenizer.model_max_length == 77 and tokenizer.pad_token_id == 0


@pytest.mark.parametrize("name", ["runs/no/such", "./no_such", "../no_such", "/no/such", "src/no_such"])
def test_a_folder_that_does_not_exist_is_named_without_a_rule_about_repositories(name, tmp_path, monkeypatch):
    (tmp_path / "src").mkdir()
    monkeypatch.chdir(tmp_path)
    for read in (load_tokenizer, check_source, resolve):
        with pytest.raises(ValueError, match=f"^{name} is no folder; give an existing folder, or an id on the Hub"):
            read(name)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^file is no folder"):
        check_source("file")


@pytest.mark.parametrize(
    "file, settings",
    [
        *((file, {key: value}) for file, settings in FOREIGN.items() for key, value in settings.items()),
        ("processor_config.json", {"auto_map": {"AutoProcessor": "other/place--a.B"}}),
        ("deep/config.json", {"text_config": [{"auto_map": ["other--place.a.B", None]}]}),
        *(("config.json", {"auto_map": {"A": name}}) for name in ("/elsewhere/a.B", "../a.B", "no_file.B", "own.B.C")),
        ("config.json", {"deep": {"_attn_implementation_internal": {"text": "other/kernel"}}}),
        ("modules.json", {"0": {"type": "other_package.Module"}}),
        ("modules.json", {"0": {"type": "sentence_transformers_other.Module"}}),
        ("router_config.json", {"types": {"a": "sentence_transformers.a.B", "b": "other/p--a.B"}, "structure": {}}),
        ("deep/config.json", {"types": {"a": "other_package.Module"}, "structure": {"query": ["a"]}}),  # of Asym
        ("deep/config.json", {"in_features": 8, "activation_function": "os.getcwd"}),  # of Dense
        ("deep/config.json", {"activation_function": "torch.hub.load"}),
        ("config.json", {"sentence_transformers": {"activation_fn": "builtins.exit"}}),  # of CrossEncoder
        ("config.json", {"sbert_ce_default_activation_function": "other_package.activation"}),
        ("deep/wordembedding_config.json", {"tokenizer_class": "other_package.Tokenizer"}),
        ("adapter_config.json", {"base_model_name_or_path": "other/place"}),
    ],
)
def test_code_of_another_place_is_found_in_every_file(tmp_path, file, settings):
    (tmp_path / "deep").mkdir()
    (tmp_path / "tokenizer.json").write_text(json.dumps({"vocab": {"auto_map": 7, "custom_pipelines": 8, "--": 9}}))
    (tmp_path / "own.py").touch()
    check_own_code(tmp_path)
    (tmp_path / file).write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=rf"{os.path.basename(file)} names foreign code|holds an adapter"):
        check_own_code(tmp_path)


def test_names_of_torch_and_sentence_transformers_and_plain_words_are_accepted(tmp_path):
    settings = {
        "own.py": "code of the folder itself",
        "more.json": {"auto_map": {"AutoTokenizer": [None, "own.Tokenizer"]}, "_attn_implementation": "sdpa"},
        "modules.json": [{"type": f"sentence_transformers.{name}"} for name in ("models.Dense", "base.modules.Router")],
        "router_config.json": {"types": {"query_0": "sentence_transformers.sentence_transformer.modules.Pooling"}},
        "config.json": {"activation_function": "gelu", "sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"}},
        "dense_config.json": {"activation_function": "torch.nn.modules.activation.Tanh"},
        "tokenizer.json": {"model": {"type": "WordPiece", "vocab": {"type": 1, "types": 2, "activation_fn": 3}}},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "types": None},
        "eval.json": {"type": "application/vnd.api+json", "dataset": {"type": "mteb/stsb.en"}, "types": ["PER", "a.b"]},
        "reranker.json": {"activation_fn": "gelu", "sbert_ce_default_activation_function": None},
    }
    for name, content in settings.items():
        (tmp_path / name).write_text(json.dumps(content))
    check_own_code(tmp_path)


@pytest.mark.parametrize("name", ["x.json", "sub/x.json", "tokenizer.json", "notes.txt"])
def test_a_pipe_in_a_folder_is_refused_and_never_read(theirs, name):
    """Reading it would wait for ever."""
    file = theirs / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    for read in (check_own_code, check_links, check_source, lambda each: load_tokenizer(str(each))):
        with pytest.raises(ValueError, match=rf"{name} is a pipe, a socket or a device, not a regular file; remove it"):
            read(theirs)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"model": {"type": "Nothing"}}'])
def test_a_damaged_tokenizer_is_an_error_that_names_its_folder(theirs, content):
    (theirs / "tokenizer.json").write_text(content)
    with pytest.raises(OSError, match=f"the tokenizer of {theirs} cannot be read"):
        load_tokenizer(str(theirs))


def test_neither_code_nor_pickles_of_an_id_are_downloaded(tmp_path):
    for name in ("modeling_neobert.py", "pytorch_model.bin", "model.pt", "training_args.pkl", "model.ckpt", "a.npy"):
        assert not any(fnmatch(name, pattern) for pattern in DATA_FILES)
    assert resolve(tmp_path) == tmp_path
