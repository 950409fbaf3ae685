"""Verify a Hub folder in a clean process: every Auto class loads from its own code, with the package out of reach.

    python hub_upload/verify.py HUB_DIR

The last line of output is one line of JSON: `ok`, the classes, those whose head the folder does not hold, and a summary of
the output of the folder's own class, which the same weights must give with the package. Exit status 1 if not `ok`.
"""

from neobert_hf.hub.verify import main

if __name__ == "__main__":
    main()
