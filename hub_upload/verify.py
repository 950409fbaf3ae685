"""Verify a Hub folder in a clean process: every Auto class must load from the folder's code, without the installed package.

    python hub_upload/verify.py HUB_DIR

The last line of output is one line of JSON: `ok`, the classes, the Auto classes whose head has no weights in the folder, and a
summary of the output of the folder's own class, for comparison with the package. The exit status is 1 if `ok` is false.
"""

from neobert_hf.hub.verify import main

if __name__ == "__main__":
    main()
