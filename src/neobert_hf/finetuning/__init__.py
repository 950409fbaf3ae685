"""What the fine-tuning scripts share: metrics, reports, and predictions in files."""
