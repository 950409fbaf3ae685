"""The command `neobert`, beside the package neobert_hf, whose import takes seconds."""

is_checking = (
    False  # the command checks its words first; then `neobert_hf` registers its model only when it is asked to
)
