"""The paper's pretraining recipe as data, with its schedules of the learning rate and of the mask rate.

A `Recipe` holds every value that the paper or the authors' code fixes. Where they disagree, the recipe `paper` follows the paper
and the recipe `code` follows the code. The paper's ablations are files in `examples/paper/recipes`.
"""

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import yaml

from .collators import BATCH_FORMATS

CHOICES = {
    "optimizer": ("adamw", "muon"),
    "schedule": ("paper", "code", "linear", "constant", "wsd"),
    "batch_format": BATCH_FORMATS,
    "architecture": ("neobert", "roberta-prelayernorm"),
}
KINDS: dict = {float: (float, int), tuple: (list,), "mask_rate": (list, float, int)}  # of the values in a YAML file
FLOOR = 0.1  # share of the peak learning rate at which the cosine ends


@dataclass(frozen=True)
class Recipe:
    """How one model is pretrained; `PretrainingArguments` has an argument for each value, with its meaning.

    Attributes:
        optimizer: "adamw", or "muon": Muon for the matrices of the blocks and AdamW for the rest (see `muon`).
        schedule: "paper" and "code" warm up, follow a cosine to a tenth of the peak and stay there; "linear" warms up and
            decays to zero; "constant" stays at a tenth of the peak (phase 2); "wsd" warms up, stays at the peak until
            `decay_from`, and decays to zero with 1 - sqrt, as ModernBERT does.
        weight_decay: Weight decay of AdamW and Muon; 0 gives Adam.
        decay_norms_and_embeddings: Apply weight decay to every parameter, as the authors' code did for the published model;
            the paper names no exception. False excludes norms, biases and embeddings.
        mask_rate: Share of the tokens that the model predicts. Several values follow one another, as in mmBERT: 0.3, 0.15, 0.05.
        mask_rate_shares: Shares of the steps of several values of `mask_rate`; empty for equal shares.
        random_replace_prob: Share of the tokens to predict that become a random token. Those that are neither this nor `[MASK]`
            stay unchanged.
        batch_format: "packed" rows keep documents apart, "padded" rows hold one document each, "concatenated" rows let tokens
            attend to other documents (M6, which the paper rejects).
        mixture: Three shares of the steps: steps that draw from all documents, from documents longer than the first length of
            `longer_than`, and from documents longer than the second.
        architecture: "neobert", or "roberta-prelayernorm" of transformers for M0.
        config: Changes to the defaults of the architecture's config.
        corpus: Hub id of the default text dataset; `text_column` is its text column.
        tokenizer: Hub id of the default tokenizer.

    Source: paper, section 3 and Table 2; appendix B for the ablations. "wsd": ModernBERT, arXiv 2412.13663; its decay is
        that of arXiv 2405.18392. Falling mask rates: mmBERT, arXiv 2509.06888.
    """

    optimizer: str = "adamw"
    learning_rate: float = 6e-4
    schedule: str = "paper"
    warmup_steps: int = 2_000
    decay_until: int = 900_000
    decay_from: int = 900_000
    max_steps: int = 1_000_000
    weight_decay: float = 0.1
    decay_norms_and_embeddings: bool = True
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    tokens_per_step: int = 2_097_152  # 8 GPUs x 32 sequences x 8 accumulation steps x 1,024 tokens
    max_length: int = 1_024
    mask_rate: tuple[float, ...] = (0.2,)
    mask_rate_shares: tuple[float, ...] = ()
    mask_replace_prob: float = 1.0
    random_replace_prob: float = 0.0
    batch_format: str = "packed"
    mixture: tuple[float, float, float] = (1.0, 0.0, 0.0)
    longer_than: tuple[int, int] = (1_024, 2_048)
    architecture: str = "neobert"
    config: dict = field(default_factory=dict)
    corpus: str = "tiiuae/falcon-refinedweb"
    text_column: str = "content"
    tokenizer: str = "google-bert/bert-base-uncased"

    def __post_init__(self):
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}")
        if isinstance(self.mask_rate, int | float):
            object.__setattr__(self, "mask_rate", (self.mask_rate,))
        for name in ("mask_rate", "mask_rate_shares", "mixture", "longer_than"):  # YAML and the command line give lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        rates, shares = self.mask_rate, self.mask_rate_shares
        if not rates or min(rates) <= 0 or max(rates) > 1:
            raise ValueError(f"mask_rate={rates} is not above 0 and at most 1; the paper's is 0.2")
        if shares and not _are_shares(shares, len(rates)):
            raise ValueError(f"mask_rate_shares={shares} must sum to 1, with a share for each of mask_rate={rates}")
        if self.max_length < 3:
            raise ValueError(f"max_length={self.max_length} leaves no token beside [CLS] and [SEP]; give 3 or more")
        if not _are_shares(self.mixture, len(self.longer_than) + 1):
            raise ValueError(
                f"mixture={self.mixture} must sum to 1, with a share for each of longer_than={self.longer_than}"
            )
        self._check_schedule()
        if self.batch_format == "packed" and self.architecture != "neobert":
            raise ValueError(
                f"architecture={self.architecture!r} cannot keep packed documents apart; choose batch_format='padded'"
            )

    def _check_schedule(self):
        corner = "decay_from" if self.schedule == "wsd" else "decay_until"
        if not 0 <= self.warmup_steps <= getattr(self, corner) <= self.max_steps or not self.max_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps}, {corner}={getattr(self, corner)} and max_steps={self.max_steps} must "
                "be in ascending order, and max_steps at least 1"
            )

    def replace(self, **changes) -> "Recipe":
        """Return a copy with other values; a new `max_steps` scales the corners of the schedule unless they are given."""
        scale = changes.get("max_steps", self.max_steps) / self.max_steps
        for name in ("warmup_steps", "decay_until", "decay_from"):
            changes.setdefault(name, round(getattr(self, name) * scale))
        return replace(self, **changes)

    def learning_rate_factor(self, step: int) -> float:
        """Return the share of the peak learning rate at an optimizer step, counted from 0.

        The paper gives only the corners of the schedule, and "paper" meets them exactly. The authors' code starts the warmup at
        1e-4 of the peak and divides the phase of the cosine by the step at which it ends, not by its duration.

        Source: paper, section 3.3, Optimization; "code" is the authors' scheduler.
        """
        warmup = self.warmup_steps
        if self.schedule == "constant":
            return FLOOR
        if step < warmup:
            share = step / warmup
            if self.schedule == "code":
                return 1e-4 + (1 - 1e-4) * share
            return share
        if self.schedule == "linear":
            return max(self.max_steps - step, 0) / max(self.max_steps - warmup, 1)
        if self.schedule == "wsd":
            done = max(step - self.decay_from, 0) / max(self.max_steps - self.decay_from, 1)
            return 1 - math.sqrt(min(done, 1))
        if step >= self.decay_until:
            return FLOOR
        duration = self.decay_until
        if self.schedule == "paper":
            duration -= warmup
        return FLOOR + (1 - FLOOR) / 2 * (1 + math.cos(math.pi * (step - warmup) / duration))

    def mask_rate_at(self, step: int) -> float:
        """Return the share of the tokens that the model predicts at an optimizer step, counted from 0."""
        num = len(self.mask_rate)
        shares = self.mask_rate_shares or [1 / num] * num
        for place, rate in enumerate(self.mask_rate):
            # rounded, since 3 x 1/3 of the steps are not all of them
            if step < round(sum(shares[: place + 1]) * self.max_steps):
                return rate
        return self.mask_rate[-1]

    def second_phase(self) -> "Recipe":
        """Return phase 2 of this recipe: longer documents, drawn more often, at a constant low learning rate.

        Source: paper, section 3.2, Sequence Length; 50,000 steps after 1,000,000 steps of the first phase.
        """
        steps = max(self.max_steps // 20, 1)
        return replace(
            self,
            schedule="constant",
            warmup_steps=0,
            decay_until=0,
            decay_from=round(steps * self.decay_from / self.max_steps),
            mask_rate=self.mask_rate[-1:],
            mask_rate_shares=(),
            max_steps=steps,
            max_length=4 * self.max_length,
            mixture=(0.2, 0.4, 0.4),
        )


def _are_shares(values, number):
    return len(values) == number and min(values) >= 0 and math.isclose(sum(values), 1)


RECIPES = {
    "paper": Recipe(),
    "code": Recipe(learning_rate=1e-4, weight_decay=0.01, schedule="code"),
}


def load_recipe(name: str) -> Recipe:
    """Return the recipe with this name, or that of a YAML file, which holds the values that differ from the recipe `paper`.

    Raises:
        ValueError: As `read_recipe`.
    """
    return read_recipe(name)[0]


def read_recipe(name: str) -> tuple[Recipe, dict, dict]:
    """Return a recipe as `load_recipe`, the values that its file holds, and the other arguments of the run that has written it.

    Raises:
        ValueError: There is no such recipe or file, or the file holds another value than those of a recipe.
    """
    if name in RECIPES:
        return RECIPES[name], {}, {}
    if not name.endswith((".yaml", ".yml")):
        raise ValueError(
            f"recipe={name!r} is not one of {', '.join(RECIPES)}, and no YAML file; recipe.yaml of a run is one"
        )
    try:
        values = yaml.safe_load(Path(name).read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"recipe={name!r} cannot be read: {error}") from error
    defaults = asdict(Recipe())
    run = values.pop("run", {}) if isinstance(values, dict) else None
    if not isinstance(run, dict) or values.keys() - defaults.keys():
        raise ValueError(
            f"{name} must hold values by name, such as max_length: 512; the names are {', '.join(defaults)}"
        )
    for key, value in values.items():
        kind = type(defaults[key])
        kinds = KINDS.get(key) or KINDS.get(kind, (kind,))
        if type(value) not in kinds:
            raise ValueError(
                f"{name}: {key}={value!r} is a {type(value).__name__}, not a {kind.__name__} (0.0001, not 1e-4)"
            )
        if kind is float:
            values[key] = float(value)
    return Recipe(**values), values, run
