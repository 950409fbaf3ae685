"""Text, tokens and rows: corpus, shards, packing, collators. It imports no other room."""
