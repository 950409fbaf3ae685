"""Embeddings: models, contrastive training, its data and instructions."""
