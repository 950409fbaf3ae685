"""Random interruptions, damage and values: every run gives the right result or an error that explains (make test-adversary).

Environment variables: ADVERSARY_SEED reproduces the cases of an earlier run; ADVERSARY_SHARE sets the share of the cases to run;
ADVERSARY_ONLY selects families ("masks kills") or a single case ("masks 17"); ADVERSARY_JSON names a file for the table.
"""

import json
import os
import secrets
import time
from pathlib import Path

import pytest
import torch
from adversary.damage import DAMAGE
from adversary.interruptions import KILLS, WRITES
from adversary.labels import LABELS
from adversary.machinery import FAILED, report, run_family
from adversary.masks import MASKS
from adversary.tokenizers import TOKENIZERS
from adversary.workbench import Workbench
from adversary.writers import WRITERS
from tabulate import tabulate

ALL = (MASKS, LABELS, TOKENIZERS, WRITERS, KILLS, DAMAGE, WRITES)
FAMILIES = {family.name: family for family in ALL}
pytestmark = pytest.mark.adversary


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    torch.set_num_threads(1)  # no other thread may run during a fork
    return Workbench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def ledger(request):
    seed, begin, verdicts = os.environ.get("ADVERSARY_SEED") or secrets.token_hex(4), time.monotonic(), []
    yield seed, verdicts
    found = report(verdicts, seed, time.monotonic() - begin)
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\nADVERSARY_SEED={seed}, {found['seconds']} s\n\n{tabulate(found['rows'], 'keys', 'github')}")
    if "ADVERSARY_JSON" in os.environ:
        Path(os.environ["ADVERSARY_JSON"]).write_text(json.dumps(found, indent=1) + "\n")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_case_gives_the_right_result_or_an_error_that_explains(name, bench, ledger, tmp_path):
    seed, verdicts = ledger
    only = os.environ.get("ADVERSARY_ONLY", name).split()
    if name not in only:
        pytest.skip(f"ADVERSARY_ONLY={' '.join(only)}")
    share, number = float(os.environ.get("ADVERSARY_SHARE", 1)), int(only[-1]) if only[-1].isdigit() else None
    found = sorted(run_family(FAMILIES[name], bench, seed, tmp_path, share, number), key=lambda verdict: verdict.number)
    verdicts += found
    failed = [f"{name} {v.number} ({v.kind}): {v.note}" for v in found if v.result == FAILED]
    about = f"ADVERSARY_SEED={seed}, {len(failed)} of {len(found)} failed, TMP={tmp_path}"
    assert not failed, "\n".join([about, *failed])
