"""Pretraining: recipes, arguments, trainer, runs."""
