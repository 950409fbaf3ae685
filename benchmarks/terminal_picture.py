"""Draw what a command shows in a terminal into an SVG file, for the pages.

python benchmarks/terminal_picture.py docs/_static/search.svg "neobert search docs 'How do I resume a training?'" --folder .
"""

import argparse
import io
import os
import re
import subprocess
from pathlib import Path

from rich.console import Console
from rich.text import Text


def screen_of(command: str, folder: str, width: int) -> str:
    """Run a command in a terminal of its own, and return the lines that stay, with their colours."""
    environment = {**os.environ, "COLUMNS": str(width), "TERM": "xterm-256color"}
    run = ["script", "--quiet", "--return", "--command", command, "/dev/null"]
    done = subprocess.run(run, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in done.stdout.split("\n")]  # a progress bar ends as it is
    return "\n".join(line.replace("\x1b[K", "") for line in lines).strip("\n")


def draw(command: str, screen: str, file: Path, width: int) -> None:
    """Write the picture; its font is one of the reader's machine."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {command}", style="bold"), Text.from_ansi(screen), sep="\n", soft_wrap=False)
    svg = console.export_svg(title="")
    file.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code, ", ""), "utf-8")


def main() -> None:
    """Read the command line, run, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="SVG file to write.")
    parser.add_argument("command", help="Command, as bash takes it.")
    parser.add_argument("--folder", default=".", help="Folder in which it runs.")
    parser.add_argument("--width", type=int, default=100, help="Width of the terminal in characters.")
    options = parser.parse_args()
    draw(options.command, screen_of(options.command, options.folder, options.width), options.file, options.width)


if __name__ == "__main__":
    main()
