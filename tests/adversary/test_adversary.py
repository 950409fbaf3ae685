"""Random interruptions, damage and values: every run gives the right result or an error that explains (make test-adversary).

Environment variables: ADVERSARY_SEED reproduces the cases of an earlier run; ADVERSARY_SHARE sets the share of the cases to run;
ADVERSARY_ONLY selects families ("masks flags") or a single case ("masks 17"); ADVERSARY_JSON names a file for the table.
"""

import os
import secrets
import time
from pathlib import Path

import pytest
import torch
from adversary.contexts import CONTEXTS
from adversary.damage import DAMAGE
from adversary.flags import FLAGS
from adversary.folders import FOLDERS
from adversary.kills import KILLS
from adversary.machinery import Failed, Family, failures, run_family, table, to_json
from adversary.masks import MASKS
from adversary.ranks import RANKS
from adversary.writes import WRITES

FAMILIES = {family.name: family for family in (MASKS, CONTEXTS, FLAGS, FOLDERS, KILLS, DAMAGE, WRITES, RANKS)}
pytestmark = pytest.mark.adversary


@pytest.fixture(scope="module")
def ledger(request):
    """The seed and the verdicts of all families; the fixture prints the table at the end."""
    torch.set_num_threads(1)  # no other thread may run during a fork
    seed, begin, verdicts = os.environ.get("ADVERSARY_SEED") or secrets.token_hex(4), time.monotonic(), []
    yield seed, verdicts
    seconds = time.monotonic() - begin
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\nADVERSARY_SEED={seed}, {seconds:.0f} s\n\n{table(verdicts)}")
    if "ADVERSARY_JSON" in os.environ:
        Path(os.environ["ADVERSARY_JSON"]).write_text(to_json(verdicts, seed, seconds) + "\n")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_case_gives_the_right_result_or_an_error_that_explains(name, ledger, tmp_path):
    seed, verdicts = ledger
    only = os.environ.get("ADVERSARY_ONLY", name).split()
    if name not in only:
        pytest.skip(f"ADVERSARY_ONLY={' '.join(only)}")
    share, number = float(os.environ.get("ADVERSARY_SHARE", 1)), int(only[-1]) if only[-1].isdigit() else None
    found = list(run_family(FAMILIES[name], seed, tmp_path, share, number))
    verdicts += sorted(found, key=lambda verdict: verdict.number)
    failed = failures(found)
    assert not failed, f"ADVERSARY_SEED={seed}, {len(failed)} of {len(found)} failed, TMP={tmp_path}:\n" + "\n".join(
        failed
    )


def test_a_note_does_not_name_the_temporary_folder(tmp_path):
    def fail(kind, subject, rng, folder, shared):
        raise Failed(f"{folder}/out and {shared}/model differ")

    family = Family("notes", lambda folder: ([("failure", None)], folder / "bench"), fail)
    verdicts = list(run_family(family, "0", tmp_path))
    assert [verdict.note for verdict in verdicts] == ["TMP/case-0/out and TMP/bench/model differ"]
    assert str(tmp_path) not in to_json(verdicts, "0", 1.0)
