"""Error of a full-size NeoBERT against the NumPy oracle of the tests, in every dtype.

    python benchmarks/agreement.py --json benchmarks/results/agreement.json

The weights are random, initialised as in the paper. `--scale` multiplies the linear weights of the blocks, so that attention is
far from uniform. So this measures the code, not a checkpoint. An error is the largest error of the logits over their largest
value, on documents of `--lengths` tokens.
"""

import sys
from pathlib import Path

import torch
from harness import finish, read_arguments
from tqdm.auto import tqdm
from transformers import set_seed

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from oracle import Oracle


@torch.no_grad()
def measure(arguments) -> list[dict]:
    """Return one row of errors for each dtype."""
    set_seed(arguments.seed)
    config = NeoBERTConfig(num_hidden_layers=arguments.num_hidden_layers)
    model = NeoBERTForMaskedLM(config).eval()
    for name, parameter in model.model.transformer_encoder.named_parameters():
        if "norm" not in name:
            parameter.mul_(arguments.scale)
    documents = [torch.randint(5, config.vocab_size, (n,)) for n in arguments.lengths]
    packed = {
        "input_ids": torch.cat(documents)[None],
        "cu_seq_lens_q": torch.tensor([0, *arguments.lengths]).cumsum(0).int(),
    }
    pad = torch.nn.utils.rnn.pad_sequence
    padded = {
        "input_ids": pad(documents, batch_first=True),
        "attention_mask": pad([torch.ones_like(document) for document in documents], batch_first=True),
    }
    is_real = padded["attention_mask"].bool()

    oracle = Oracle({name: value.numpy() for name, value in model.state_dict().items()}, config.to_dict())
    encoded = [oracle.encode(document.numpy())[2] for document in tqdm(documents, desc="oracle", unit=" documents")]
    wanted = torch.cat([torch.from_numpy(oracle.mlm_logits(states)) for states in encoded])

    weights = {name: value.clone() for name, value in model.state_dict().items()}
    rows = []
    for dtype in tqdm((torch.float64, torch.float32, torch.bfloat16, torch.float16), desc="model", unit=" dtypes"):
        model = model.to(dtype)
        model.load_state_dict(weights)  # from float32 each time
        logits = {"packed": model(**packed).logits[0], "padded": model(**padded).logits[is_real]}
        logits["one by one"] = torch.cat([model(document[None]).logits[0] for document in documents])
        model.config.unpad_inputs = False
        logits["padding kept"] = model(**padded).logits[is_real]
        model.config.unpad_inputs = True
        model.set_attn_implementation("eager")
        logits["eager"] = model(**padded).logits[is_real]
        model.set_attn_implementation("auto")
        row = {"dtype": str(dtype).removeprefix("torch.")}
        for way, actual in logits.items():
            row[way] = ((actual.double() - wanted).abs().max() / wanted.abs().max()).item()
        rows.append(row)
    return rows


def main():
    """Measure, print the table, and end with one line of JSON."""
    arguments = read_arguments(__doc__, num_hidden_layers=28, lengths=[512, 37, 128, 3], scale=3.0, seed=0)
    rows = measure(arguments)
    finish("agreement", rows, arguments)


if __name__ == "__main__":
    main()
