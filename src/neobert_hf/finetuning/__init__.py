"""Fine-tuning: labelled rows of users, and what the scripts share: metrics, reports, and predictions in files."""
