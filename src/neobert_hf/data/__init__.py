"""Text, tokens and rows: corpus, tokenizing, documents, packing, collators. It imports no other subpackage."""

# How documents share the rows of a batch: packed rows keep documents apart, padded rows hold one document each, and in a
# concatenated row tokens attend to other documents.
BATCH_FORMATS = ("packed", "padded", "concatenated")
