"""Ranking by words, and reciprocal rank fusion."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neobert_hf.demo.ranking import WordIndex, ranking, reciprocal_rank_fusion, words_of


def test_fusion_equals_an_example_computed_by_hand():
    """Text 0: 1/61 + 1/62 = 123/3782. Text 2: 1/63 + 1/61 = 124/3843. Text 1: 1/62. Text 3: 1/63."""
    fused = reciprocal_rank_fusion([[0, 1, 2], [2, 0, 3]])
    assert [number for number, _ in fused] == [0, 2, 1, 3]
    assert [score for _, score in fused] == pytest.approx([123 / 3782, 124 / 3843, 1 / 62, 1 / 63], rel=1e-12)
    assert reciprocal_rank_fusion([[7, 8], [8, 7]], k=1) == [(7, 1 / 2 + 1 / 3), (8, 1 / 3 + 1 / 2)]
    assert reciprocal_rank_fusion([[], [5]]) == [(5, 1 / 61)]


WHOLE = st.lists(st.integers(-1000, 1000), min_size=8, max_size=8)


@given(WHOLE, WHOLE, st.integers(-40, 40), st.integers(-40, 40))
def test_the_fused_order_does_not_depend_on_the_scale_of_the_scores(first, second, scale, other):
    """Powers of two scale a number without rounding."""
    first, second = np.array(first, float), np.array(second, float)

    def fused(a, b):
        return reciprocal_rank_fusion([ranking(a), ranking(b, above=0)])

    assert fused(first * 2.0**scale, second * 2.0**other) == fused(first, second)


@given(WHOLE)
def test_a_ranking_sorts_by_score_keeps_ties_in_order_and_cuts_at_its_bound(scores):
    expected = sorted((i for i, score in enumerate(scores) if score > 0), key=lambda i: -scores[i])
    assert ranking(np.array(scores), above=0).tolist() == expected


def test_identifiers_are_split_into_words():
    assert words_of("os.path.readLine_now") == "os path read Line now"


def test_texts_that_share_rarer_words_with_the_question_score_higher():
    words = WordIndex(["json.loadFile reads text", "text and text", "image of a cat", "a cat of text"])
    scores = words.scores("how do I load a json_file")
    assert scores.argmax() == 0 and scores[0] > 0 and not scores[1:].any()
    assert ranking(words.scores("cat"), above=0).tolist() == [2, 3]


@pytest.mark.parametrize("question", ["", "the of and", "zzyzx", "!!"])
def test_a_question_without_a_known_word_scores_nothing(question):
    assert not WordIndex(["one text", "another"]).scores(question).any()
    assert WordIndex(["the", ""]).scores(question).tolist() == [0, 0]


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bm25s", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs the package bm25s; install it: pip install -e '.\[hybrid\]'"):
        WordIndex(["text"])
