"""What a folder of a model holds: read once from its files, compared, and then asked. All that opens a folder asks here.

No weights are read but those of a head. Neither torch nor transformers is imported before a folder with weights is compared, so
that `OnnxModel` runs where they are not installed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files.json_files import read_json
from ..files.messages import first_of
from ..files.terminal import printable
from .trust import NAMES, check_links, check_source, foreign_settings, holds_tokenizer, resolve

if TYPE_CHECKING:
    from ..model.configuration_neobert import NeoBERTConfig
    from .network import StoredTensor

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"
SETTINGS = "config_sentence_transformers.json"  # of a model, beside modules.json
ADAPTER = "adapter_config.json"
BASE_FILE = "base.json"  # beside an adapter, of which PEFT itself keeps only the name of the base model
# Names of pickled weights, of PyTorch and of the published training code; and of the states of DeepSpeed.
PICKLE = re.compile(r"(state_dict|.*model.*)\.(bin|pt|pth|ckpt)")
DEEPSPEED = "*_model_states.pt"
GRAPHS = ("onnx/*.onnx", "openvino/*.xml", "*.gguf")
OF_EXPORT = ("config.json", "tokenizer.json", "tokenizer_config.json")
SMALL_HEADS = ("dense.", "classifier.", "qa_outputs.")  # a decoder has the numbers of the whole vocabulary
CONTEXTUAL = "contextual_neobert"  # the model type of contextual embedding models
# The kinds of models: by the end of the name of an architecture, and by the class of sentence-transformers. Another architecture
# is an encoder. A CrossEncoder gives a score or classes.
KINDS = {
    "ForMaskedLM": "masked words",
    "LMHead": "masked words",
    "ForSequenceClassification": "classes",
    "ForTokenClassification": "tags",
    "ForQuestionAnswering": "spans",
    "ForMultipleChoice": "choices",
}
LIBRARY_KINDS = {
    "SentenceTransformer": "vector",
    "CrossEncoder": "score",
    "SparseEncoder": "sparse",
    "MultiVectorEncoder": "multi-vector",
}
# Of cross-encoders, by their activation.
SCORE_TYPES = {
    "Identity": "regression",
    "Sigmoid": "multi_label_classification",
    "Softmax": "single_label_classification",
}


class SavedModel:
    """A folder of a model, or a Hub id, whose data files are downloaded. The constructor reads; `check` compares.

    Args:
        source: Folder or Hub id.
        revision: Branch, tag or commit on the Hub.
        more: Patterns of further files to download, as of `resolve`.

    Attributes:
        source: As it was given, for messages.
        folder: The folder.
        graph: The first file of an exported folder; None for a folder with weights.
        adapter: Content of adapter_config.json; empty for a model.
        settings: What sentence-transformers says of the model; empty for a model alone.
        modules: Path and type of the modules of sentence-transformers; none for a model alone.
        main: Folder of the encoder.
        config: Content of its config.json; empty if there is none.
        files: The files that hold the weights.
        tensors: The tensors, by their published names if the network is a NeoBERT; empty for pickles.

    Raises:
        ValueError: It is neither a folder nor an id, a link leaves it, a JSON file is damaged, or a tensor is there twice.
        OSError: The repository cannot be reached, weights are damaged or missing, or there are two sets of them.
    """

    def __init__(self, source: str | Path, revision: str | None = None, more: Iterable[str] = ()):
        self.source = str(source)
        self.folder = resolve(source, more, revision)
        self.graph = self._find_graph()
        if self.graph is None:
            check_links(self.folder)
        self.adapter = read_object(self.folder / ADAPTER)
        self.settings = read_object(self.folder / SETTINGS)
        self.modules = read_modules(self.folder)
        self.main = self.folder
        for part in self.parts[:1]:
            for place in (*part.glob("document_0_*"), part):  # of a Router
                if place.resolve().is_relative_to(self.folder.resolve()) and (place / "config.json").is_file():
                    self.main = place
        self.config = read_object(self.main / "config.json")
        self.files: tuple[Path, ...] = ()
        self.tensors: dict[str, StoredTensor] = {}
        if self.graph is None:
            self._read_weights()

    def _find_graph(self) -> Path | None:
        if any(self.folder.glob("*.safetensors*")) or find_pickles(self.folder):
            return None
        return next((file for pattern in GRAPHS for file in sorted(self.folder.glob(pattern))), None)

    def _read_weights(self) -> None:
        from ..model.weight_files_neobert import canonical_name, check_names
        from .network import read_header

        self.files = weight_files(self.main)
        if self.is_adapter:
            self.files = tuple(self.folder.glob("adapter_model.safetensors"))
        stored = [tensor for file in self.files for tensor in read_header(file).values()]
        is_own = any("transformer_encoder." in tensor.name for tensor in stored) and not self.is_adapter
        if is_own:
            check_names((tensor.name, str(tensor.file)) for tensor in stored)
        self.tensors = {canonical_name(tensor.name) if is_own else tensor.name: tensor for tensor in stored}
        if not self.files:
            self.files = find_pickles(self.main)

    # What the folder is

    @property
    def is_adapter(self) -> bool:
        """Whether it is an adapter of PEFT, whose base model is elsewhere."""
        return (self.folder / ADAPTER).is_file()

    @property
    def base(self) -> str:
        """Folder or id of the base model of an adapter.

        Raises:
            ValueError: adapter_config.json names none.
        """
        base = self.adapter.get("base_model_name_or_path")
        if isinstance(base, str) and base:
            return base
        file = self.folder / ADAPTER
        raise ValueError(
            f"{file} names no base_model_name_or_path; save the adapter again, or name its base model there"
        )

    @property
    def layout(self) -> str:
        """How the weights are stored.

        - `published`: gate and up fused as `ffn.w12`, as in `chandar-lab/NeoBERT` and in all that this library writes;
        - `w1w2`: gate `ffn.w1`, up `ffn.w2` and output `ffn.w3`, as in the fork `pszemraj/NeoBERT`, and in xformers with unpacked
          weights;
        - `neodictabert`: another model of the type "neobert";
        - `contextual`: a contextual embedding model;
        - `pickle`; `adapter`; `exported`; `other`: tensors of another model, or none.
        """
        if self.is_adapter:
            return "adapter"
        if self.graph:
            return "exported"
        if self.files and not self.tensors:
            return "pickle"
        if "encoder_init_range" in self.config:  # of the keys in config.json, only NeoDictaBERT has this one
            return "neodictabert"
        if any(".ffn.w1." in name for name in self.tensors):
            return "w1w2"
        if not any(".ffn.w12." in name for name in self.tensors):
            return "other"
        return "contextual" if self.config.get("model_type") == CONTEXTUAL else "published"

    @property
    def architecture(self) -> str:
        """Name of the class that config.json names first; empty if it names none."""
        names = self.config.get("architectures") or [""]
        return str(names[0])

    @property
    def head(self) -> str:
        """Kind of the network alone, by its architecture; an adapter is one of classes."""
        if self.is_adapter:
            return "classes"
        return kind_of(self.architecture)

    @property
    def library(self) -> str | None:
        """Name of the class of sentence-transformers that saved the folder; None for a model alone."""
        if self.settings.get("model_type"):
            return self.settings["model_type"]
        if (self.folder / "modules.json").is_file():  # older versions name no class
            return "SentenceTransformer"
        return "CrossEncoder" if self.activation else None

    @property
    def activation(self) -> str | None:
        """What a cross-encoder computes of its logits, such as "Sigmoid"; None if the folder does not say it.

        sentence-transformers 6 writes it to a file of its own, 4 and 5 into config.json, and 3 there under another name.
        """
        places = (self.settings, self.config.get("sentence_transformers"))
        named = [place.get("activation_fn") for place in places if isinstance(place, dict)]
        named.append(self.config.get("sbert_ce_default_activation_function"))
        return next((str(name).rpartition(".")[2] for name in named if name), None)

    @property
    def is_chain(self) -> bool:
        """Whether modules of sentence-transformers compute something of the outputs of the network."""
        return len(self.modules) > (self.library == "CrossEncoder")

    @property
    def kind(self) -> str:
        """What the model gives: one of the values of `KINDS` and `LIBRARY_KINDS`, or "encoder"."""
        kind = LIBRARY_KINDS.get(self.library or "", self.head)
        if kind == "score" and len(self.labels) != 1:
            return "classes"
        if kind == "classes" and not self.is_adapter and len(self.labels) == 1 and not self.config.get("problem_type"):
            return "score"
        return kind

    @cached_property
    def last_settings(self) -> dict[str, Any]:
        """Settings of the last module of sentence-transformers."""
        return read_object(self.parts[-1] / "config.json") if self.is_chain else {}

    @cached_property
    def record(self) -> dict[str, Any]:
        """What names the classes: config.json, or the record of an adapter."""
        if not self.is_adapter:
            return self.config
        file = self.folder / BASE_FILE
        if not file.is_file():
            remedy = "give the folder of an adapter that save_adapter has written"
            raise FileNotFoundError(f"{self.source} has no {BASE_FILE}; {remedy}")
        return read_object(file)

    @cached_property
    def labels(self) -> list[str]:
        """Names of the classes in the order of the logits; LABEL_0 and LABEL_1 if the folder names none, as in transformers."""
        names = self.record.get("id2label") or {}
        count = self.record.get("num_labels") or len(names) or 2
        if self.library == "CrossEncoder":  # of which the last module may be the head
            count = self.last_settings.get("out_features", count)
        return [names.get(str(i), f"LABEL_{i}") for i in range(count)]

    @property
    def problem_type(self) -> str:
        """What the classes are, as in transformers."""
        named = self.record.get("problem_type")
        return named or ("regression" if len(self.labels) == 1 else "single_label_classification")

    @cached_property
    def score_type(self) -> str:
        """The problem type by which logits become scores, as in the pipelines of transformers and in sentence-transformers.

        "regression" leaves them, "multi_label_classification" takes the sigmoid, "single_label_classification" the softmax.

        Raises:
            ValueError: A cross-encoder has another activation.
        """
        is_single = len(self.labels) == 1
        named = self.record.get("problem_type") or "single_label_classification"
        if self.graph is None and self.library == "CrossEncoder":
            named = self._score_type_of_pairs(is_single)
        if is_single and named != "regression":
            return "multi_label_classification"
        return named

    def _score_type_of_pairs(self, is_single: bool) -> str:
        types = {"None": "regression", **SCORE_TYPES}
        if is_single:
            types |= {"None": "multi_label_classification"}
            types.pop("Softmax")  # whose score is 1
        name = str(self.activation)
        if name in types:
            return types[name]
        raise ValueError(
            f"{self.source} makes scores of logits by {printable(name)}, which config.json cannot say; set activation_fn in "
            f"{SETTINGS} to torch.nn.Identity, and apply {printable(name)} to the results"
        )

    @property
    def label_type(self) -> str | None:
        """Type of the labels of the training, "int", "float" or "bool"; None for texts."""
        return self.record.get("label_type")

    # What must agree

    def check(self) -> SavedModel:
        """Refuse what would be opened as something else than was saved; return the same object. A head may be missing.

        Raises:
            ValueError: The folder is an export, a JSON file names code of another place, a module is missing, or weights and
                config.json do not agree.
            OSError: Weights are missing, or are pickles.
        """
        if self.graph:
            found = f"{self.source} is an export of a model ({self.graph.relative_to(self.folder)}), which torch does not read"
            raise ValueError(f"{found}; give the folder that was exported, or open it by OnnxModel or `neobert serve`")
        self._check_modules()
        if self.is_adapter:
            check_source(self.base)
            return self
        if not self.files:
            self._check_missing()
        if self.files and not self.tensors:
            self._refuse_pickle(self.files[0])
        self._check_network()
        return self

    def check_export(self) -> SavedModel:
        """Refuse an exported folder that lacks a file; return the same object.

        Raises:
            FileNotFoundError: It lacks a file.
        """
        for name in OF_EXPORT:
            if not (self.folder / name).is_file():
                raise FileNotFoundError(
                    f"{self.source} lacks {name}, which `neobert export` writes; export the model again"
                )
        return self

    def check_model(self) -> SavedModel:
        """As `check`; also refuse an adapter."""
        if self.is_adapter:
            merge = "open_adapter(MODEL_CLASS, FOLDER).merge_and_unload().save_pretrained(OUT)"
            raise ValueError(
                f"{self.source} holds an adapter; merge it into its model, and give the folder of that: {merge}"
            )
        return self.check()

    def check_neobert(self) -> SavedModel:
        """As `check_model`; also refuse another network."""
        self.check_model()
        kind = self.config.get("model_type")
        if kind != "neobert":
            raise ValueError(f"{self.source} has the model type {kind}, not neobert; choose a NeoBERT checkpoint")
        return self

    def check_head(self, kind: str | None = None) -> None:
        """Refuse a model whose head is missing, has another shape than config.json says, or is not finite.

        The numbers of a decoder, which has those of the whole vocabulary, are not read.

        Args:
            kind: Kind of the network; by default its own.

        Raises:
            ValueError: As said.
        """
        from .network import check_finite, lost_layers, read_header

        if kind is None and self.is_chain:
            file = self.parts[-1] / WEIGHTS
            tensors = read_header(file) if file.is_file() else {}
            return check_finite(tensors, self.source)
        kind = kind or self.head
        if kind == "encoder" or self.is_adapter or not self.tensors:
            return None
        if self.shape is not None:
            lost = lost_layers(self.shape, self.tensors, kind)
            names = [name for name in self.tensors if name.startswith(SMALL_HEADS)]
        else:
            names = [name for name, tensor in self.tensors.items() if tensor.shape[:1] == (len(self.labels),)]
            has_matrix = any(len(self.tensors[name].shape) == 2 for name in names)
            lost = [] if has_matrix or kind not in ("classes", "tags", "spans") else ["a layer of its outputs"]
        if lost:
            raise ValueError(
                f"{self.source} lacks {first_of(lost)} in the shapes of config.json, so they would be random: the head for "
                f"{kind} was never trained, or config.json is that of another model; correct it, or download the model again"
            )
        return check_finite({name: self.tensors[name] for name in names}, self.source)

    def load_tokenizer(self) -> Any:
        """Load the tokenizer, as `tokenizer.load_tokenizer` does."""
        from .tokenizer import load_tokenizer

        place = self.source if self.main == self.folder else str(self.main)
        return load_tokenizer(place, self.config.get("vocab_size"))

    @property
    def parts(self) -> list[Path]:
        """Folders of the modules of sentence-transformers."""
        return [self.folder / path for path, _ in self.modules]

    @property
    def has_tokenizer(self) -> bool:
        """Whether it holds the files of a tokenizer."""
        return holds_tokenizer(self.main)

    def _check_modules(self) -> None:
        """Refuse what sentence-transformers would call or unpickle. It calls each activation that begins with "torch."."""
        if self.library not in (None, *LIBRARY_KINDS):
            name = printable(str(self.library))
            raise ValueError(f"{self.source} holds a {name}, which is not one of {', '.join(LIBRARY_KINDS)}")
        kinds = [kind for _, kind in self.modules]
        for part, kind in zip(self.parts, kinds):
            if not part.resolve().is_relative_to(self.folder.resolve()):
                found = f"modules.json of {self.source} names the module {str(part)!r}, outside its folder"
                raise ValueError(f"{found}; correct it")
            if not part.is_dir() and not kind.endswith(".Normalize"):  # it has no file, and git keeps no empty folder
                raise ValueError(f"{self.source} lacks the module {part.name}, which modules.json names; copy it there")
        folders = {self.folder, *self.parts}
        if any(kind.endswith((".Router", ".Asym")) for kind in kinds):  # it has modules in further folders
            folders |= {part for part in self.folder.rglob("*") if part.is_dir()}
        for folder in sorted(folders):
            if self.library:
                self._check_settings(folder)
            for file in find_pickles(folder):
                if not any(folder.glob("*.safetensors*")):
                    self._refuse_pickle(file)

    def _check_settings(self, folder: Path) -> None:
        files = folder.glob("*.json") if folder == self.folder else folder.rglob("*.json")
        for file in sorted(files):
            for key, value in foreign_settings(file):
                if key in NAMES:  # without trust_remote_code, no loader runs the others
                    found = f"{file.relative_to(self.folder)} of {self.source} names {json.dumps(value)} as {key}"
                    rule = "which is no code of sentence-transformers or torch.nn"
                    remedy = "remove it, or save the model with their modules only"
                    raise ValueError(f"{found}, {rule}; {remedy}")

    def _refuse_pickle(self, file: Path) -> None:
        if not Path(self.source).is_dir():  # the loader of an id decides, which may have cached it
            return
        raise ValueError(
            f"{file} is a pickle, which is not opened; `neobert convert` writes a model alone as safetensors; if you trust "
            "another one, open it with its own library, and save it with save_pretrained"
        )

    def _check_missing(self) -> None:
        has_none = self.modules and not self.config  # such as a table of words
        if has_none or not Path(self.source).is_dir():  # pickles of an id are not downloaded
            return
        found = f"{self.source} holds no weights"
        if any(self.folder.rglob(DEEPSPEED)):
            script = "python zero_to_fp32.py . MERGED --safe_serialization"
            raise OSError(f"{found}, but states of DeepSpeed; merge them by the script that it writes there: {script}")
        raise OSError(f"{found}; give a folder with {WEIGHTS}, or with {INDEX} and its files")

    def _check_network(self) -> None:
        """Compare the encoder with config.json."""
        is_own = any("transformer_encoder." in name for name in self.tensors)
        kind = self.config.get("model_type")
        if not is_own and kind != "neobert":
            return
        if not self.config:
            raise ValueError(
                f"{self.source} has no config.json, so nothing knows its shape; copy that of the same model"
            )
        if kind is None:
            raise ValueError(f'config.json of {self.source} has no model_type; add "model_type": "neobert"')
        if not is_own and self.tensors:
            raise ValueError(
                f"{self.source}: no tensor has a name of NeoBERT, so all weights would be random; choose a NeoBERT"
            )
        if kind == "neobert":
            self._check_neobert()
        elif kind in types_of_transformers():  # the type of a variant is its own
            found = f"config.json of {self.source} has the model_type {kind!r}, and its weights are those of a NeoBERT"
            raise ValueError(f"{found}; correct config.json, or download the model again")

    def _check_neobert(self) -> None:
        from ..model.weight_files_neobert import check_weight_files
        from .network import check_encoder

        config = self.shape
        check_weight_files(self.main, {})
        convert = f"write the published layout: neobert convert {self.source} OUT"
        if self.layout == "w1w2":
            raise ValueError(f"{self.source} has gate and up as separate tensors ffn.w1 and ffn.w2; {convert}")
        for name, tensor in self.tensors.items():
            if tensor.name not in (name, name.removeprefix("model."), f"model.{name}"):
                raise ValueError(f"{self.source} has names of a wrapper, such as {tensor.name}; {convert}")
        if config is not None:
            check_encoder(config, self.tensors, self.source)

    @cached_property
    def shape(self) -> NeoBERTConfig | None:
        """The checked config of a NeoBERT; None if the tensors are not its own: of another network, quantized, or missing.

        Raises:
            ValueError: A value is refused.
        """
        if self.config.get("model_type") != "neobert":
            return None
        from ..model.configuration_neobert import NeoBERTConfig

        config = NeoBERTConfig.from_dict(self.config)
        if not self.tensors or self.config.get("quantization_config"):
            return None
        return config


def kind_of(architecture: str) -> str:
    """Return the kind of a model alone by the name of its class."""
    return next((kind for end, kind in KINDS.items() if architecture.endswith(end)), "encoder")


def read_object(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file, empty if there is none.

    Raises:
        ValueError: It is damaged, or holds something else than an object.
    """
    content = read_json(file) if file.is_file() else {}
    if not isinstance(content, dict):
        raise ValueError(f"{file} is no JSON object; save or download the model again")
    return content


def read_modules(folder: Path) -> list[tuple[str, str]]:
    """Return path and type of the modules of a model of sentence-transformers; none for a model alone.

    Raises:
        ValueError: modules.json is damaged.
    """
    file = folder / "modules.json"
    content = read_json(file) if file.is_file() else []
    try:
        if isinstance(content, list):
            return [(module["path"] + "", module["type"] + "") for module in content]
    except (TypeError, KeyError):
        pass
    raise ValueError(f"{file} is no list of modules with path and type; save or download the model again")


def find_pickles(folder: Path) -> tuple[Path, ...]:
    """Return the pickled weights of a folder."""
    found = [file for file in sorted(folder.glob("*")) if PICKLE.fullmatch(file.name) and file.is_file()]
    return tuple(file for file in found if not file.match(DEEPSPEED))


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files that transformers reads: the single file, otherwise those of the index.

    Raises:
        OSError: There are both, the index is damaged or names a file that is missing or outside the folder, or it is missing.
    """
    from ..model.weight_files_neobert import read_index

    single = folder / WEIGHTS
    index = folder / INDEX
    shards = sorted(folder.glob(SHARDS))
    if single.is_file() and (shards or index.is_file()):
        other = shards[0].name if shards else INDEX
        raise OSError(f"{folder} holds two sets of weights, {WEIGHTS} and {other}; move one of them away")
    if single.is_file():
        return (single,)
    names = sorted(set(read_index(index).values())) if index.is_file() else []
    for name in names:
        if not (folder / name).is_file():
            raise OSError(f"{index} names {name}, which is missing; download or copy the checkpoint again")
    return tuple(folder / name for name in names)


def types_of_transformers() -> Iterable[str]:
    """Return the model types that transformers itself has."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return CONFIG_MAPPING_NAMES
