"""The command `neobert`, beside the package neobert_hf, whose import takes seconds."""
