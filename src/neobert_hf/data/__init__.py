"""Text, tokens and rows: corpus, tokenizing, documents, packing, collators. It imports no other subpackage."""
