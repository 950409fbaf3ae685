"""Pretraining: recipes, arguments, rows, trainer, and `pretrain`, which puts them together."""
