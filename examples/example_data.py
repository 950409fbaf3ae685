"""Write the small files that the documentation uses: tickets.csv, forty support tickets with their teams, and new_tickets.csv.

neobert example-data
neobert example-data folder
"""

from pathlib import Path

from neobert_cli.parser import Parser
from neobert_hf.files import run_command
from neobert_hf.files.messages import say_next

DATA = Path(__file__).with_name("data")


def write(folder: str) -> None:
    """Write the files that the folder does not have; another file is not replaced."""
    contents = {Path(folder, file.name): file.read_bytes() for file in sorted(DATA.iterdir())}
    for file, content in contents.items():
        if file.exists() and (file.is_dir() or file.read_bytes() != content):
            raise FileExistsError(f"{file} is another file; give another folder")
    for file, content in contents.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        print(f"wrote {file}")
    words = ["--train_file", Path(folder, "tickets.csv"), "--text_columns", "ticket", "--label_column", "team"]
    say_next(["neobert", "finetune-classifier", *words, "--output_dir", "runs/tickets"])


def main() -> None:
    """Read the command line, and write."""
    parser = Parser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=".", metavar="FOLDER", help="Folder to write.")
    run_command(parser.prog, write, parser.parse_args().folder)


if __name__ == "__main__":
    main()
