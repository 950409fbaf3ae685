"""Pretraining: corpus, tokenizing, documents, packing, collators; recipes, arguments, rows, trainer, and `pretrain`."""
