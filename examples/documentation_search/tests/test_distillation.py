"""Distillation: the teacher's vectors and their directions, and the losses against their formulas."""

import distillation
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import SENTENCE
from datasets import Dataset, DatasetDict
from distillation import (
    DistillationLoss,
    DistillationTrainer,
    MaskedTextLoss,
    TeacherVectors,
    fitted_directions,
    main_directions,
    open_student,
    open_teacher,
    set_token_embeddings,
)
from sentence_transformers import SentenceTransformer

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM, NeoBERTModel
from neobert_hf.embeddings.contrastive import ContrastiveTrainingArguments

WORDS = SENTENCE.split()
TEXTS = [" ".join(np.random.default_rng(i).choice(WORDS, 4)) for i in range(40)]


def save(model_class, width, tokenizer, folder):
    torch.manual_seed(width)
    shape = dict(hidden_size=width, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48)
    model_class(NeoBERTConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def teacher(tokenizer, tmp_path):
    return open_teacher(save(NeoBERTModel, 48, tokenizer, tmp_path / "teacher"), 32)


@pytest.fixture
def student(tokenizer, tmp_path):
    return open_student(save(NeoBERTForMaskedLM, 32, tokenizer, tmp_path / "student"), 64)


def targets(number):
    return F.normalize(torch.randn(number, 32, generator=torch.Generator().manual_seed(0)), dim=-1)


def test_vectors_are_those_of_the_teacher_and_made_once_also_after_an_interruption(teacher, tmp_path, monkeypatch):
    expected = teacher.encode(TEXTS, normalize_embeddings=True)
    monkeypatch.setattr(distillation, "TEXTS_AT_ONCE", 8)
    encode, embedded = SentenceTransformer.encode, []

    def counted(self, texts, **options):
        if len(embedded) == 16:
            raise KeyboardInterrupt
        embedded.extend(texts)
        return encode(self, texts, **options)

    monkeypatch.setattr(SentenceTransformer, "encode", counted)
    with pytest.raises(KeyboardInterrupt):
        TeacherVectors(teacher, tmp_path / "kept").encode(TEXTS)
    embedded.append("the interruption")
    found = TeacherVectors(teacher, tmp_path / "kept").encode([*TEXTS, *TEXTS[:5]])
    again = TeacherVectors(teacher, tmp_path / "kept").encode([TEXTS[3], "another text", TEXTS[0]])
    bf16 = 2**-7 if teacher.dtype == torch.bfloat16 else 0  # other batches, other roundings
    np.testing.assert_allclose(found, np.concatenate([expected, expected[:5]]), atol=5e-4 + bf16)  # kept in float16
    np.testing.assert_array_equal(again[[0, 2]], found[[3, 0]])
    assert sorted(embedded) == sorted({*TEXTS, "another text", "the interruption"})


def test_directions_keep_the_inner_products_as_well_as_any_of_this_width_can():
    """Eckart and Young: the error of the Gram matrix is the root of the sum of the squares of the dropped eigenvalues."""
    vectors = np.random.default_rng(0).normal(size=(50, 12)) * np.linspace(3, 0.1, 12) + 1.0
    directions = main_directions(vectors, 5)
    np.testing.assert_allclose(directions.T @ directions, np.eye(5), atol=1e-5)
    error = np.linalg.norm(vectors @ vectors.T - (vectors @ directions) @ (vectors @ directions).T)
    eigenvalues = np.sort(np.linalg.eigvalsh(vectors @ vectors.T))[::-1]
    assert error == pytest.approx(np.sqrt((eigenvalues[5:12] ** 2).sum()), rel=1e-4)


def test_fitted_directions_are_those_from_which_a_student_learned():
    generator = np.random.default_rng(0)
    teacher = np.linalg.qr(generator.standard_normal((500, 12)))[0]  # the same variance in each direction
    directions = np.linalg.qr(generator.standard_normal((12, 5)))[0]
    student = teacher @ directions
    np.testing.assert_allclose(fitted_directions(student, teacher), directions, atol=1e-5)
    noisy = student + 0.3 * student.std() * generator.standard_normal(student.shape)
    fitted = fitted_directions(noisy, teacher)
    np.testing.assert_allclose(fitted.T @ fitted, np.eye(5), atol=1e-5)
    assert (noisy * (teacher @ fitted)).sum() >= (noisy * (teacher @ directions)).sum()
    assert ((fitted - directions) ** 2).sum() < 0.01 * 5  # 0.3 of the length in noise, over 500 texts in 12 dimensions


def test_a_student_of_another_teacher_has_no_directions():
    student, teacher = (np.random.default_rng(width).standard_normal((500, width)) for width in (5, 12))
    with pytest.raises(ValueError, match=r"mean cosine of 0\.\d+, below 0\.5, .* it did not learn from this teacher"):
        fitted_directions(student, teacher)


def test_token_embeddings_have_the_neighbours_that_the_teacher_gives_the_tokens(teacher, tokenizer, student, tmp_path):
    _, model = student
    tokens = [token.removeprefix("##") for token in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]
    vectors = teacher.encode(tokens, normalize_embeddings=True)
    centred = vectors - vectors.mean(0)
    set_token_embeddings(model, tokenizer, TeacherVectors(teacher, tmp_path / "kept"), main_directions(centred, 32))
    table = model.model.encoder.weight.detach().numpy()
    assert not table[tokenizer.pad_token_id].any()
    assert table[1:].std() == pytest.approx(model.config.embedding_init_range, rel=0.1)
    ours, theirs = (x[1:] / np.linalg.norm(x[1:], axis=1, keepdims=True) for x in (table, centred))
    assert np.corrcoef((ours @ ours.T).ravel(), (theirs @ theirs.T).ravel())[0, 1] > 0.98  # 32 of 48 directions


def test_the_loss_is_one_minus_the_cosine_plus_the_papers_contrastive_loss(student):
    model, questions, answers = student[0], TEXTS[:3], TEXTS[3:6]
    losses = DistillationLoss(model, 0.3)([model.tokenize(texts) for texts in (questions, answers)], targets(3))
    q, a = (F.normalize(model.encode(texts, convert_to_tensor=True), dim=-1) for texts in (questions, answers))
    torch.testing.assert_close(losses["distillation"], (1 - (q * targets(3)).sum(1)).mean(), atol=1e-5, rtol=0)
    ranking = F.cross_entropy(q @ a.T / 0.07, torch.arange(3))  # temperature of the paper, appendix D.2
    torch.testing.assert_close(losses["contrastive"], 0.3 * ranking, atol=1e-5, rtol=0)
    assert set(DistillationLoss(model, 0.3)([model.tokenize(questions)], targets(3))) == {"distillation"}


def test_masked_texts_learn_the_masked_tokens_and_the_vector_of_the_whole_text_in_one_forward(student):
    model, language_model = student
    loss, features = MaskedTextLoss(model, language_model, weight=0.5), model.tokenize(TEXTS[:8])
    torch.manual_seed(3)
    found = loss([features], targets(8))
    torch.manual_seed(3)
    lengths = features["attention_mask"].sum(1)
    row = loss.masks([{"input_ids": ids[:n]} for ids, n in zip(features["input_ids"], lengths)])
    logits = language_model(row["input_ids"], position_ids=row["position_ids"]).logits
    expected = F.cross_entropy(logits[row["labels"] != -100], row["labels"][row["labels"] != -100])
    torch.testing.assert_close(found["masked_lm"], 0.5 * expected, atol=1e-5, rtol=0)
    masked = torch.zeros_like(features["input_ids"])
    for line, document in zip(masked, row["input_ids"][0].split(lengths.tolist())):
        line[: len(document)] = document
    vectors = model({**features, "input_ids": masked})["sentence_embedding"]
    distance = (1 - F.cosine_similarity(vectors, targets(8))).mean()
    torch.testing.assert_close(found["distillation"], distance, atol=1e-5, rtol=0)
    found["masked_lm"].backward()
    assert language_model.decoder.weight.grad.abs().sum() > 0
    assert all(parameter.grad is not None for parameter in model.parameters())  # the encoder is shared


def test_batches_of_short_and_of_long_texts_have_equally_many_tokens(student, tmp_path):
    model, language_model = student
    sets = {"short": ["the fox"] * 64, "long": ["the quick brown fox jumps over the lazy dog"] * 64}
    sets = {name: Dataset.from_dict({"text": texts, "label": [[1.0] * 32] * 64}) for name, texts in sets.items()}
    options = dict(use_cpu=True, max_steps=2, report_to="none", batch_sampler="batch_sampler")
    training = ContrastiveTrainingArguments(str(tmp_path), **options)
    options = dict(train_dataset=DatasetDict(sets), loss=DistillationLoss(model, 0.1), language_model=language_model)
    trainer = DistillationTrainer(model, training, **options, tokens_per_batch=96)
    for rows in sets.values():
        batch = next(iter(trainer.get_batch_sampler(rows, 7, drop_last=True)))
        tokens = model.tokenize([rows[i]["text"] for i in batch])["attention_mask"].sum()
        assert 0.8 * 96 <= tokens <= 1.2 * 96
