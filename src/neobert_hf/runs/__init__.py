"""What every training and evaluation shares: arguments, one-line errors, run folders, checkpoints, resume."""
