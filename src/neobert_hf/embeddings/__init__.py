"""Embeddings: models, contrastive training, training data, instructions."""
