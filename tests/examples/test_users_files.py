"""Files as people have them, each through the script of its job: it works, or says in one line what to do."""

import csv
import importlib
import json

import pytest
from conftest import run_main

SHORT = ["--max_steps", "2", "--report_to", "none", "--use_cpu"]
TEXTS = {
    "Störung": "Die Lampe\r\nflackert; seit gestern „{}“",
    "Rechnung": "Die Rechnung für Stück {} ist falsch, oder?",
}


def write(file, text, encoding="utf-8"):
    file.write_bytes(text.encode(encoding))
    return file


def json_lines(file, rows):
    return write(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def tickets(number=24):
    """Texts and classes, in turns."""
    return [(text.format(i), label) for i in range(number // 2) for label, text in TEXTS.items()]


def run(script, *options):
    """Run a script of examples/, or a command of `neobert`."""
    module = "neobert_cli" if script in ("embed", "search") else script
    return run_main(importlib.import_module(module), *([script] if module != script else []), *options)


def refusal(capsys, script, *options):
    """The only line of a command that ends with status 1 or 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        run(script, *options)
    lines = capsys.readouterr().err.splitlines()
    if isinstance(end.value.code, str):  # Python prints it, and ends with status 1
        lines += end.value.code.splitlines()
    else:
        assert end.value.code in (1, 2)
    assert len(lines) == 1, lines
    return lines[0]
