"""`register`: the Auto classes of transformers know the model."""

from importlib.util import find_spec


def register() -> None:
    """Register the model with the Auto classes, if torch is installed. The import of the package does it, but not a command."""
    if find_spec("torch") is None:
        return
    import transformers

    from ..model.configuration_neobert import NeoBERTConfig
    from ..model.modeling_neobert import AUTO_CLASSES
    from .tokenizer import FolderTokenizer

    for auto_class, of_class in AUTO_CLASSES.items():
        key = NeoBERTConfig.model_type if auto_class == "AutoConfig" else NeoBERTConfig
        getattr(transformers, auto_class).register(key, of_class, exist_ok=True)
    transformers.AutoTokenizer.register(NeoBERTConfig, fast_tokenizer_class=FolderTokenizer, exist_ok=True)
