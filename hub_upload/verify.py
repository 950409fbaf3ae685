"""Verify a Hub folder in a clean process: every Auto class must load from the folder's code, without the installed package.

    python hub_upload/verify.py HUB_DIR

Nothing is loaded if a file names code of another place. The last line of output is one line of JSON: `ok`, the classes, the
Auto classes whose head has no weights in the folder (`new_heads`), the folder's own Auto class (`own`), and a summary of its
output, for comparison with the output of the package. A folder of sentence-transformers is opened by its own class too
(`embedding`). The exit status is 1 if `ok` is false.
"""

import argparse
import json

from verifying import verify


def main() -> None:
    """Verify the folder and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="Folder that hub_upload/build.py has written.")
    report = verify(parser.parse_args().folder)
    print(json.dumps(report))
    raise SystemExit(not report["ok"])


if __name__ == "__main__":
    main()
