"""Evaluation: masked language modelling, retrieval, MTEB."""
