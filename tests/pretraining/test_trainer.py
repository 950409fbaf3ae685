"""Training under Trainer: accumulation and packing change nothing, checkpoints load, streams and evaluation work."""

import pytest
import torch
from transformers import Trainer, TrainingArguments, set_seed

import neobert_hf
from neobert_hf.pretraining.trainer import predicted_tokens


def arguments(folder, **changes):
    """A step is the gradient times a constant."""
    defaults = dict(output_dir=str(folder), use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True)
    defaults |= dict(learning_rate=0.05, lr_scheduler_type="constant", optim="sgd", max_grad_norm=1e9)
    defaults |= dict(logging_steps=1, max_steps=1)
    return TrainingArguments(**{**defaults, **changes})


def collate_masked(rows):
    """Pad rows whose labels are already set, so that every run sees the same masks."""
    pad = torch.nn.utils.rnn.pad_sequence
    names = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: pad([torch.tensor(row[name]) for row in rows], batch_first=True, padding_value=fill)
        for name, fill in names.items()
    }


@pytest.fixture
def masked_rows():
    """Eight documents with different numbers of labels, so that the mean of batch means differs from the overall mean."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(8):
        ids = torch.randint(5, 96, (3 + 2 * i,), generator=generator)
        labels = torch.where(torch.arange(len(ids)) <= i, ids, -100)
        rows.append({"input_ids": ids.tolist(), "attention_mask": [1] * len(ids), "labels": labels.tolist()})
    return rows


def train_once(model_class, config, rows, folder, batch, accumulation):
    set_seed(0)
    model = model_class(config)
    training = arguments(folder, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation)
    trainer = Trainer(model, training, train_dataset=rows, data_collator=collate)
    trainer.train()
    return trainer.state.log_history[0]["loss"], {name: p.detach().clone() for name, p in model.named_parameters()}


def collate(rows):
    if isinstance(rows[0]["labels"], list):
        return collate_masked(rows)
    labels = torch.tensor([row["labels"] for row in rows])
    return {**collate_masked([{**row, "labels": row["input_ids"]} for row in rows]), "labels": labels}


@pytest.mark.slow
@pytest.mark.parametrize("head", ["masked", "tokens", "classes", "regression"])
def test_batch_and_accumulation_give_the_same_step(tiny_config, masked_rows, tmp_path, head):
    tiny_config.classifier_dropout = 0.0
    if head == "masked":
        model_class, rows = neobert_hf.NeoBERTForMaskedLM, masked_rows
    elif head == "tokens":
        model_class = neobert_hf.NeoBERTForTokenClassification
        rows = [{**row, "labels": [x if x == -100 else x % 2 for x in row["labels"]]} for row in masked_rows]
    else:
        model_class = neobert_hf.NeoBERTForSequenceClassification
        tiny_config.num_labels = 2 if head == "classes" else 1
        rows = [{**row, "labels": i % 2 if head == "classes" else i / 3} for i, row in enumerate(masked_rows)]
    runs = [train_once(model_class, tiny_config, rows, tmp_path, *shape) for shape in ((8, 1), (4, 2), (2, 4), (1, 8))]
    loss, parameters = runs[0]
    for other_loss, other_parameters in runs[1:]:
        assert abs(float(other_loss) - float(loss)) < 1e-4  # some versions log four digits
        for name, parameter in parameters.items():
            # the step is 0.05 times the gradient, so this is 1e-5 on the gradient
            found = other_parameters[name]
            torch.testing.assert_close(found, parameter, rtol=0, atol=5e-7, msg=lambda m, n=name: f"{n}: {m}")


def test_predictions_under_sparse_prediction_have_the_shape_of_the_labels(tiny_config, tokenizer, tmp_path):
    """Tensors that several processes gather for `compute_metrics` must have one shape; Trainer pads the labels to one shape."""
    tiny_config.sparse_prediction = True
    model = neobert_hf.NeoBERTForMaskedLM(tiny_config)
    texts = ["the quick brown fox jumps", "a dog sleeps by the sea"] * 4
    rows = [{"input_ids": ids} for ids in tokenizer(texts)["input_ids"]]
    collator, seen = neobert_hf.PackedMLMCollator(tokenizer, batch_format="padded", seed=0, mlm_probability=0.5), []
    options = {"compute_metrics": lambda results: seen.append(results) or {}, "eval_dataset": rows}
    options["preprocess_logits_for_metrics"] = predicted_tokens
    Trainer(model, arguments(tmp_path, per_device_eval_batch_size=4), collator, **options).evaluate()
    ((predictions, labels),) = seen
    collator = neobert_hf.PackedMLMCollator(tokenizer, batch_format="padded", seed=0, mlm_probability=0.5)
    assert predictions.shape == labels.shape
    model.config.sparse_prediction = False
    for start in (0, 4):
        batch = collator(rows[start : start + 4])
        with torch.no_grad():
            wanted = model(**batch).logits.argmax(-1).where(batch["labels"] != -100, -100)
        found = torch.from_numpy(predictions[start : start + 4])[:, : wanted.shape[1]]
        assert torch.equal(found, wanted)
        # Trainer pads to the longest row of all processes
        padded = torch.nn.functional.pad(batch["labels"], (0, 3), value=-100)
        logits = model(**batch).logits[batch["labels"] != -100]
        assert torch.equal(predicted_tokens(logits, padded)[:, :-3], wanted)
