"""The jobs as scripts, and as commands of `neobert`: after an installation, the package `neobert_hf.examples`."""
