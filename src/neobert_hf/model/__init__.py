"""The model: the files that ship to the Hub. They import no other part of the package."""
