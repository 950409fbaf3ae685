"""Short English texts without code: sentences of docstrings, paragraphs of package descriptions, and WordNet."""

import re
from pathlib import Path

# Markup of descriptions in Markdown and reStructuredText, with what replaces it, in order of application.
MARKUP = [
    (re.compile(r"```.*?(```|\Z)|~~~.*?(~~~|\Z)|<!--.*?-->", re.DOTALL), "\n\n"),  # blocks of code, comments
    (re.compile(r"^([ \t]*)\.\. .*(\n(\1[ \t]+.*|[ \t]*))*$", re.MULTILINE), "\n\n"),  # directives with their body
    (re.compile(r"^([ \t]*)(.*)::[ \t]*$(\n(\1[ \t]+.*|[ \t]*))*", re.MULTILINE), r"\2.\n\n"),  # literal blocks
    (re.compile(r"!\[[^\]]*\](\([^)]*\)|\[[^\]]*\])"), " "),  # images
    (re.compile(r"\[([^\]\[]*)\](\([^)]*\)|\[[^\]]*\])"), r"\1"),  # links, of which the text remains
    (re.compile(r"`([^`<]*?)\s*<[^>`]*>`_{0,2}"), r"\1"),
    (re.compile(r"\[\s*\]"), " "),  # links around images
    (re.compile(r":[a-z:]+:`~?([^`]*)`"), r"\1"),  # roles
    (re.compile(r"</?[A-Za-z][^>]*>"), " "),
    (re.compile(r"\*\*|``?|\|\w[^|\n]*\|_{0,2}"), ""),
    (re.compile(r"^[ \t]*([-*+•]|\d+[.)])[ \t]+", re.MULTILINE), "\n\n"),  # each item of a list is a paragraph
    (re.compile(r"^[ \t]*(#+.*|([-=~^*#_+.\"'])\2{2,}[ \t]*)$", re.MULTILINE), "\n\n"),  # headings, rulers
    (re.compile(r"^[ \t]*[|>].*$", re.MULTILINE), "\n\n"),  # tables, quotations
]
MOST_CHARACTERS = 1000  # of a text


def paragraphs(description: str) -> list[str]:
    """Return the paragraphs of prose in the long description of a package, each on one line and without markup."""
    for pattern, replacement in MARKUP:
        description = pattern.sub(replacement, description)
    found = [" ".join(each.split()) for each in re.split(r"\n\s*\n", description)]
    return [
        text
        for text in found
        if len(text.split()) >= 6
        and len(text) <= MOST_CHARACTERS
        and _is_prose(text, 0.6)
        and not re.search(r"#\d|@\w", text)  # lists of changes and their authors
    ]


def sentences(text: str) -> list[str]:
    """Return the well-formed sentences of a docstring, each on one line.

    A sentence begins with a capital letter, ends with a full stop, a question mark or an exclamation mark, has 5 to 40 words and
    consists of letters and spaces for the most part. It does not extend over several paragraphs, nor begin with a heading such
    as "Returns:".
    """
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        for each in re.split(r"(?<=[.!?])\s+", paragraph):
            sentence = " ".join(each.split())
            is_sentence = 5 <= len(sentence.split()) <= 40 and sentence[0].isupper() and sentence[-1] in ".!?"
            if is_sentence and _is_prose(sentence.replace(" ", ""), 0.85) and not re.search(r"^\w+:|---|===", sentence):
                found.append(sentence)
    return found


def wordnet_texts(folder: Path) -> list[str]:
    """Return glosses of 3 words or more and example sentences of 4 words or more from WordNet's files `data.*`."""
    found = []
    for file in sorted(folder.glob("data.*")):
        for line in file.read_text("latin-1").splitlines():
            if line.startswith(" ") or "| " not in line:  # the licence
                continue
            gloss = line.split("| ", 1)[1]
            definition = " ".join(re.sub(r'[;,]?\s*"[^"]*"?', "", gloss).split()).strip(" ;:,")
            examples = [" ".join(each.split()) for each in re.findall(r'"([^"]+)"', gloss)]
            found += [definition] * (len(definition.split()) >= 3) + [
                each for each in examples if len(each.split()) >= 4
            ]
    return found


def _is_prose(text: str, share: float) -> bool:
    return ">>>" not in text and sum(character.isalpha() for character in text) > share * len(text)
