"""Whatever is done to a run, it ends right or with an error that explains: make test-adversary.

ADVERSARY_SEED draws the cases again, ADVERSARY_SHARE draws a share of them, ADVERSARY_ONLY="masks flags" runs some families and
"masks 17" one case, and ADVERSARY_JSON names a file for the table.
"""

import os
import secrets
import time
from pathlib import Path

import pytest
import torch
from adversary.damage import DAMAGE
from adversary.flags import FLAGS
from adversary.kills import KILLS
from adversary.machinery import failures, run_family, table, to_json
from adversary.masks import MASKS
from adversary.ranks import RANKS
from adversary.writes import WRITES

FAMILIES = {family.name: family for family in (MASKS, FLAGS, KILLS, DAMAGE, WRITES, RANKS)}
pytestmark = pytest.mark.adversary


@pytest.fixture(scope="module")
def ledger(request):
    """The seed and the verdicts of all families; the table is printed at the end."""
    torch.set_num_threads(1)  # and no thread runs when a case forks
    seed, begin, verdicts = os.environ.get("ADVERSARY_SEED") or secrets.token_hex(4), time.monotonic(), []
    yield seed, verdicts
    seconds = time.monotonic() - begin
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\nADVERSARY_SEED={seed}, {seconds:.0f} s\n\n{table(verdicts)}")
    if "ADVERSARY_JSON" in os.environ:
        Path(os.environ["ADVERSARY_JSON"]).write_text(to_json(verdicts, seed, seconds) + "\n")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_case_ends_right_or_with_an_error_that_explains(name, ledger, tmp_path):
    seed, verdicts = ledger
    only = os.environ.get("ADVERSARY_ONLY", name).split()
    if name not in only:
        pytest.skip(f"ADVERSARY_ONLY={' '.join(only)}")
    share, number = float(os.environ.get("ADVERSARY_SHARE", 1)), int(only[-1]) if only[-1].isdigit() else None
    found = list(run_family(FAMILIES[name], seed, tmp_path, share, number))
    verdicts += sorted(found, key=lambda verdict: verdict.number)
    failed = failures(found)
    assert not failed, f"ADVERSARY_SEED={seed}, {len(failed)} of {len(found)} failed:\n" + "\n".join(failed)
