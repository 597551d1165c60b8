"""A run that is killed at random moments ends as if nothing had happened (rules 24, 30).

`benchmarks/kill.py` has the long version.
"""

import random
from pathlib import Path

import pytest

from tests.helpers.tiers import with_few
from tests.system.features import KINDS, draw
from tests.system.harness import running
from tests.system.toys import Saving, Settings, read_outcome
from tests.system.trials import (
    Report,
    reference,
    survive_kills,
    survive_stop,
    whole_run,
)
from trainkit.training.run_parts import Internals

KILLED = [
    (Settings(), Saving()),
    (Settings(workers=2, accumulation=3), Saving(every_n_steps=2, keep_last=3)),
    (Settings(precision="fp16", workers=2), Saving(background=True)),
    (Settings(precision="bf16"), Saving(every_n_steps=1, background=True, keep_last=3)),
    (Settings(size=2), Saving(every_n_steps=2)),
    (Settings(size=2, precision="fp16", workers=2), Saving(every_n_steps=2, background=True)),
    (Settings(size=3, accumulation=3), Saving(every_n_steps=1)),
    (Settings(size=2, strategy="fsdp"), Saving(every_n_steps=2, background=True)),
    (Settings(gallery=True, precision="fp16"), Saving(every_n_steps=1)),
    (Settings(gallery=True, size=2, accumulation=3), Saving(every_n_steps=1)),
    (Settings(policy="max_cycle", accumulation=3, workers=1), Saving(every_n_steps=1)),
]

STOPPED = [
    (Settings(samples=17, accumulation=2, workers=1), Saving(every_n_steps=2)),
    (Settings(precision="fp16", persistent=True, workers=2), Saving(every_n_steps=4)),
    (Settings(size=2, samples=19, optimizer="fused", scheduler="cycle"), Saving(every_n_steps=1)),
    (Settings(size=2, strategy="fsdp", precision="fp16"), Saving(every_n_steps=1)),
    (Settings(size=3, strategy="fsdp", optimizer="fused"), Saving(every_n_steps=2)),
    (Settings(size=3, shuffle=False, drop_last=True, optimizer="sgd"), Saving(every_n_steps=1)),
    (Settings(gallery=True, batch_size=3), Saving(every_n_steps=2)),
    (Settings(gallery=True, size=2, strategy="fsdp"), Saving(every_n_steps=1)),
]


ALIKE = (0, 3, 4, 5, 6, 8)  # all that they are made of is in the others
CASES = with_few([2], [case for case in range(len(KILLED)) if case not in ALIKE])
CASES += [pytest.param(case, marks=pytest.mark.slow) for case in ALIKE]


SELDOM = [pytest.param(case, marks=pytest.mark.slow) for case in (0, 5)]


@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_ends_as_if_it_had_not_been(case: int, tmp_path: Path) -> None:
    report = survive_kills(*KILLED[case], tmp_path, random.Random(case))
    assert report.problems == []


FEW = ("optimizers in turns", "stream of datasets, shuffled", "own loop")  # others take minutes
FEATURES = [pytest.param(kind, marks=[] if kind in FEW else pytest.mark.slow) for kind in KINDS]


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore")  # of the packages that read what was logged
@pytest.mark.parametrize("kind", FEATURES)
def test_a_killed_program_of_any_kind_ends_as_if_it_had_not_been(kind: str, tmp_path: Path) -> None:
    mix = draw(KINDS.index(kind), KINDS)
    report = survive_kills(mix, mix.saving, tmp_path, random.Random(kind), most_kills=2)
    assert report.problems == []


@pytest.mark.e2e
@pytest.mark.parametrize("case", [1, 2, 3, 4, 6, 7, *SELDOM])
def test_a_run_stopped_in_mid_epoch_ends_as_if_it_had_not_been(case: int, tmp_path: Path) -> None:
    report = survive_stop(*STOPPED[case], tmp_path, random.Random(case))
    assert report.problems == []


@pytest.mark.e2e
@pytest.mark.parametrize("settings", [Settings(), Settings(max_epochs=None, max_steps=20)])
def test_resuming_a_run_that_is_complete_trains_no_further(
    settings: Settings, tmp_path: Path
) -> None:
    expected = reference(settings, tmp_path / "reference")
    folder = tmp_path / "twice"
    body = whole_run(settings, Saving())
    for _ in range(2):
        with running(1, folder, lambda *rank: body(folder, *rank)) as job:
            assert job.wait(), job.log()
        assert job.codes == {0: 0}, job.log()
    assert read_outcome(folder, 1) == expected.outcome


@pytest.mark.e2e
def test_the_check_notices_a_random_state_that_is_not_restored(tmp_path: Path) -> None:
    settings, saving = Settings(), Saving(every_n_steps=2)
    reference(settings, tmp_path / "reference")
    kinds = [forgetful_stop(settings, saving, tmp_path / str(seed), seed) for seed in range(2)]
    assert any("different" in text for report in kinds for text in report.problems)


def forgetful_stop(settings: Settings, saving: Saving, folder: Path, seed: int) -> Report:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Internals, "restore_streams", lambda internals, device: None)
        return survive_stop(settings, saving, folder, random.Random(seed))
