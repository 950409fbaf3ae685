"""The tables of the pages, from the code and from benchmarks/results/*.json; `render_tables.py` writes them."""
