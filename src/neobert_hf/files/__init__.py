"""The ground floor, beside the model: rows of files, atomic writes, what a folder of other people may bring, WordPiece."""
