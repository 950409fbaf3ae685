"""English texts: paragraphs without markup, well-formed sentences, and WordNet's glosses and examples."""

import pytest

from neobert_hf.demo.english import paragraphs, sentences, wordnet_texts

SENTENCE = "A tool reads tables from text files and writes reports"


@pytest.mark.parametrize(
    "description",
    [
        f"# Title\n\n{SENTENCE}\n\n```python\nimport tool\ntool.read('all the tables that there are')\n```\n",
        f"Title\n=====\n\n{SENTENCE}\n\n.. code-block:: python\n\n    import tool and read all the tables here\n\n",
        f"{SENTENCE}\n\n.. image:: https://example.org/a.svg\n   :target: https://example.org/some/page of words and words\n",
        f"[![build status of the tool](https://example.org/a.svg)](https://example.org)\n\n{SENTENCE}",
        f"<p align='center'><img src='a.png' alt='six words of text in here'></p>\n\n{SENTENCE}",
        f"| a table | of words | that has | some rows |\n|---|---|---|---|\n\n{SENTENCE}",
        "**A tool** reads [tables](https://example.org) from `text files` and\nwrites reports",
        "A `tool <https://example.org>`_ reads :py:class:`tables` from ``text files`` and writes reports",
        f"* {SENTENCE}\n* Fixed the reader of tables by @someone in #123 at last\n* short item",
        f"{SENTENCE}\n\n>>> tool.read(all, the, tables, that, there, are)",
        f"<!-- a comment that nobody reads because it is\n\nhidden in the source -->\n{SENTENCE}",
    ],
)
def test_a_description_has_paragraphs_without_markup_and_code(description):
    assert paragraphs(description) == [SENTENCE]


def test_the_text_after_a_directive_is_kept():
    note = ".. note::\n   This is the body of a note with words."
    description = f"{note}\n\n{SENTENCE}\n\nUse it like this::\n\n    a b c d e f g\n\n{SENTENCE}."
    assert paragraphs(description)[0] == SENTENCE and paragraphs(description)[-1] == f"{SENTENCE}."


def test_only_complete_sentences_of_prose_are_chosen():
    text = """The function returns a copy of the table. it begins with a small letter here.

    Parameters
    ----------
    x : array of numbers with a shape
        The values that are copied to
        the new table. Short one. >>> Some code of five words here.

    Returns: the new table with all values. Is the sentence after it found? No full stop at the end of it"""
    assert sentences(text) == ["The function returns a copy of the table.", "Is the sentence after it found?"]


def test_wordnet_gives_glosses_and_examples_without_the_licence(tmp_path):
    (tmp_path / "data.noun").write_text(
        "  1 This software and database is provided under the | following license.  \n"
        '00001740 03 n 01 entity 0 000 | that which is perceived; "the entity of my mind"; "short one"  \n'
        "00001930 03 n 01 thing 0 000 | two words  \n"
    )
    (tmp_path / "index.noun").write_text("entity n 1 0 1 1 00001740 | not a gloss of this file\n")
    assert wordnet_texts(tmp_path) == ["that which is perceived", "the entity of my mind"]
    assert wordnet_texts(tmp_path / "missing") == []
