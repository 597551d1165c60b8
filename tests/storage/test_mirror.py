"""Runs whose output directory is the address of a storage: nothing acknowledged is lost."""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.helpers.ranks import RanksError, run_ranks
from tests.helpers.s3 import S3
from tests.storage.toys import STEPS, At, start, train
from trainkit import ConfigError, Trainer
from trainkit.callbacks import JSONLLogger
from trainkit.storage import objects
from trainkit.storage.lease import Lease
from trainkit.storage.objects import Objects, StorageError


def _equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


def _plain(tmp_path: Path) -> list[torch.Tensor]:
    """Return what a training into a folder comes to."""
    ((_, weights),) = run_ranks(1, train, str(tmp_path / "plain"), tmp_path)
    found: list[torch.Tensor] = weights
    return found


def _steps(s3: S3, run: str) -> set[str]:
    """Return the checkpoints of which a storage has all or a part."""
    return {name.split("/")[2] for name in s3.names(f"{run}/checkpoints/")}


def test_storage_has_what_the_folder_has(s3: S3, tmp_path: Path) -> None:
    ((came_from, _),) = run_ranks(1, train, "s3://bucket/whole", tmp_path / "a")
    folder = tmp_path / "a/s3/bucket/whole"
    here = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }
    assert came_from is None
    assert {"metrics.jsonl", "metrics.events.jsonl", "journal.txt"} < here.keys()
    assert {name.removeprefix("whole/") for name in s3.names("whole/")} == here.keys()
    assert {name: s3.read(f"whole/{name}") for name in here} == here
    assert _steps(s3, "whole") == {f"step-{STEPS:08d}"}
    order = [each for each in s3.requests() if each.startswith("PUT whole/checkpoints")]
    manifests = [index for index, each in enumerate(order) if each.endswith("manifest.json")]
    for begin, end in zip([0, *(m + 1 for m in manifests)], manifests, strict=False):
        assert len({each.split("/")[2] for each in order[begin : end + 1]}) <= 2  # with one cut


@pytest.mark.e2e
@pytest.mark.parametrize("after", [0, 3, 6, 9])
def test_a_run_killed_in_an_upload_goes_on_elsewhere_bit_equal(
    s3: S3, tmp_path: Path, after: int
) -> None:
    run = f"killed-{after}"
    process, gate = start(f"s3://bucket/{run}", tmp_path / "a", prints=tmp_path / "log")
    s3.fault(match=f"(PUT|DELETE) {run}/(?!.train)", after=after, kill=process.pid)
    gate.set()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL, (tmp_path / "log").read_text()
    ((_, weights),) = run_ranks(1, train, f"s3://bucket/{run}", tmp_path / "b")
    assert _equal(weights, _plain(tmp_path))
    assert _steps(s3, run) == {f"step-{STEPS:08d}"}
    mine, plain = tmp_path / "b/s3/bucket" / run / "metrics.jsonl", tmp_path / "plain/metrics.jsonl"
    without_time = partial(re.sub, r'"time/seconds": [^,}]+', "")
    assert without_time(mine.read_text()) == without_time(plain.read_text())


@pytest.mark.e2e
def test_two_processes_go_on_elsewhere(s3: S3, tmp_path: Path) -> None:
    def stop() -> None:
        raise KeyError("stopped")

    with pytest.raises(RanksError, match="stopped"):
        run_ranks(2, train, "s3://bucket/two", tmp_path / "a", At(3, stop))
    found = run_ranks(2, train, "s3://bucket/two", tmp_path / "b")
    assert [came_from for came_from, _ in found] == [2, 2]
    whole = run_ranks(2, train, str(tmp_path / "plain"), tmp_path)
    assert _equal(found[0][1], whole[0][1])


@pytest.mark.e2e
def test_a_storage_that_fails_ends_no_training(
    s3: S3, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    s3.fault(match="PUT down/(checkpoints|metrics)", status=403, code="AccessDenied")
    ((_, weights),) = run_ranks(1, train, "s3://bucket/down", tmp_path / "a")
    said = capfd.readouterr().out
    assert said.count("nothing is uploaded for now: `s3://bucket/down/") == 1
    assert "AccessDenied" in said or "403" in said
    assert "WARNING: `s3://bucket/down` lacks what" in said
    assert not _steps(s3, "down")
    assert _equal(weights, _plain(tmp_path))
    s3.fault()  # the same machine uploads what it has
    ((came_from, weights),) = run_ranks(1, train, "s3://bucket/down", tmp_path / "a")
    assert came_from == STEPS
    assert _steps(s3, "down") == {f"step-{STEPS:08d}"}


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("status", "code", "is_said"),
    [
        (500, "InternalError", False),  # which the library asks again
        (503, "SlowDown", False),
        (403, "QuotaExceeded", True),  # a full bucket, as Ceph tells it
        (403, "RequestTimeTooSkewed", True),
    ],
)
def test_a_storage_that_fails_for_a_while_gets_all(
    s3: S3, tmp_path: Path, capfd: pytest.CaptureFixture[str], status: int, code: str, is_said: bool
) -> None:
    run = f"busy-{code}"
    s3.fault(match=f"PUT {run}/(?!.train)", after=3, times=2, status=status, code=code)
    run_ranks(1, train, f"s3://bucket/{run}", tmp_path / "a")
    assert f"{run}/checkpoints/step-{STEPS:08d}/manifest.json" in s3.names(run)
    said = capfd.readouterr().out
    assert ("nothing is uploaded for now" in said) is is_said
    assert (f"<Code>{code}</Code>" in said) is is_said


@pytest.mark.e2e
def test_credentials_that_end_in_a_training_are_told(
    s3: S3, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def end() -> None:
        s3.fault(match=".*", status=403, code="ExpiredToken")
        time.sleep(1.2 * float(os.environ["TRAINKIT_STORAGE_LEASE"]))

    ((_, weights),) = run_ranks(1, train, "s3://bucket/ended", tmp_path / "a", At(3, end))
    said = capfd.readouterr().out
    assert said.count("nothing is uploaded for now: `s3://bucket/ended") == 1
    assert "ExpiredToken" in said.partition("nothing is uploaded for now")[2]
    assert _equal(weights, _plain(tmp_path))
    s3.fault()
    run_ranks(1, train, "s3://bucket/ended", tmp_path / "a")
    assert f"step-{STEPS:08d}" in _steps(s3, "ended")


@pytest.mark.e2e
def test_what_was_cut_by_a_full_bucket_does_not_keep_it_full(s3: S3, tmp_path: Path) -> None:
    def bytes_of(place: str) -> int:
        return sum(len(s3.read(name)) for name in s3.names(place))

    run_ranks(1, train, "s3://bucket/size", tmp_path / "a")
    size = bytes_of(f"size/checkpoints/step-{STEPS:08d}/")
    s3.fault(room=int(1.9 * size))  # for the first, and a part of the second

    def make_room() -> None:
        cut = bytes_of(f"full/checkpoints/step-{STEPS - 2:08d}/")
        assert size > cut > 5000
        s3.fault(room=bytes_of("full/") + size - cut // 2)

    waits = partial(time.sleep, 2.0)
    actions: dict[int, Callable[[], None]] = {3: waits, 5: waits, STEPS: make_room}
    callbacks = [At(step, action) for step, action in actions.items()]
    for step, each in zip(actions, callbacks, strict=True):
        each.name = f"at-{step}"
    run_ranks(1, train, "s3://bucket/full", tmp_path / "b", *callbacks)
    assert _steps(s3, "full") == {f"step-{STEPS:08d}"}


@pytest.mark.e2e
def test_a_connection_that_is_reset_costs_nothing(s3: S3, tmp_path: Path) -> None:
    s3.fault(match="(PUT|GET|HEAD|DELETE) reset", after=2, times=2, reset=True)
    run_ranks(1, train, "s3://bucket/reset", tmp_path / "a")
    assert f"reset/checkpoints/step-{STEPS:08d}/manifest.json" in s3.names("reset")


@pytest.mark.e2e
def test_a_connection_that_hangs_is_given_up_and_tried_again(s3: S3, tmp_path: Path) -> None:
    def there(rank: int) -> None:
        objects._REQUEST = timedelta(seconds=2)  # not two minutes
        s3.fault(match="PUT hangs/checkpoints/.*/model", times=1, hang=600)
        train(rank, "s3://bucket/hangs", tmp_path / "a")
        objects._RETRY = {"max_retries": 0, "retry_timeout": timedelta()}
        s3.fault(match="PUT hangs/file", hang=600)
        with pytest.raises(StorageError, match=r"`s3://bucket/hangs/file` .*: no answer in 2 s\."):
            Objects("s3://bucket/hangs").write("file", b"")

    s3.requests()
    run_ranks(1, there)
    assert f"hangs/checkpoints/step-{STEPS:08d}/manifest.json" in s3.names("hangs")
    asked = [each for each in s3.requests() if each.endswith("model.safetensors")]
    assert any(asked.count(each) == 2 for each in asked)  # the one that hung


@pytest.mark.e2e
def test_a_storage_that_fails_at_the_end_gets_all(s3: S3, tmp_path: Path) -> None:
    def fail() -> None:
        s3.fault(match="PUT end/(checkpoints|metrics|journal)", times=3, status=403)

    run_ranks(1, train, "s3://bucket/end", tmp_path / "a", At(STEPS, fail))
    assert f"end/checkpoints/step-{STEPS:08d}/manifest.json" in s3.names("end")


@pytest.mark.e2e
def test_a_list_that_comes_late_costs_no_checkpoint(s3: S3, tmp_path: Path) -> None:
    run_ranks(1, train, "s3://bucket/late", tmp_path / "a")
    before = {name: s3.read(name) for name in s3.names("late/checkpoints/")}
    s3.fault(match="GET $", hide=".*/(manifest.json|model.safetensors)")
    ((came_from, _),) = run_ranks(1, train, "s3://bucket/late", tmp_path / "b")
    assert came_from == STEPS
    s3.fault()
    assert {name: s3.read(name) for name in s3.names("late/checkpoints/")} == before


@pytest.mark.e2e
def test_what_is_cut_on_its_way_is_sent_again(
    s3: S3, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    s3.fault(match="PUT way/checkpoints/.*/model.safetensors", times=1, cut=True)
    run_ranks(1, train, "s3://bucket/way", tmp_path / "a")
    assert "was cut or changed on its way" in capfd.readouterr().out
    name = f"checkpoints/step-{STEPS:08d}/model.safetensors"
    here = tmp_path / "a/s3/bucket/way" / name
    assert s3.read(f"way/{name}") == here.read_bytes()


def test_large_files_travel_in_parts_compared_by_the_digests_of_the_store(
    s3: S3, tmp_path: Path
) -> None:
    sent, back = tmp_path / "sent", tmp_path / "back"
    sent.write_bytes(os.urandom(35 << 20))

    def there(rank: int) -> None:
        objects = Objects("s3://bucket/large")
        objects.put_file("file", sent)
        s3.fault(match="GET", status=403)  # nothing was read back for it, and nothing is now
        objects.put_file("file", sent)
        s3.fault()
        objects.fetch("file", back)

    s3.requests()
    run_ranks(1, there)
    assert back.read_bytes() == sent.read_bytes()
    assert sum(each == "PUT large/file" for each in s3.requests()) == 6  # three parts, twice


def test_wrong_credentials_are_told_before_the_first_step(s3: S3, tmp_path: Path) -> None:
    s3.fault(match=".*", status=403, code="InvalidAccessKeyId")
    with pytest.raises(RanksError, match=r"`s3://bucket/secret\S*` cannot be reached or refuses: "):
        run_ranks(1, train, "s3://bucket/secret", tmp_path / "a")


@pytest.mark.e2e
def test_what_was_cut_in_storage_is_passed_over(
    s3: S3, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(1, train, "s3://bucket/cut", tmp_path / "a", keep_last=3)
    newest = f"cut/checkpoints/step-{STEPS:08d}"
    s3.write(f"{newest}/model.safetensors", s3.read(f"{newest}/model.safetensors")[:-1])
    before = f"cut/checkpoints/step-{STEPS - 2:08d}/optimizer.safetensors"
    content = s3.read(before)
    s3.write(before, content[:-1] + bytes([content[-1] ^ 1]))
    ((came_from, weights),) = run_ranks(1, train, "s3://bucket/cut", tmp_path / "b", keep_last=3)
    assert came_from == STEPS - 4
    said = capfd.readouterr().out
    assert f"Skipped: `s3://bucket/cut/checkpoints/step-{STEPS:08d}` is broken" in said
    assert f"Skipped: `s3://bucket/cut/checkpoints/step-{STEPS - 2:08d}` is broken" in said
    assert _equal(weights, _plain(tmp_path))


def test_a_new_training_is_refused_where_storage_holds_another(s3: S3, tmp_path: Path) -> None:
    run_ranks(1, train, "s3://bucket/taken", tmp_path / "a")
    with pytest.raises(RanksError, match="but a new training was asked for"):
        run_ranks(1, train, "s3://bucket/taken", tmp_path / "b", resume=None)


@pytest.mark.e2e
@pytest.mark.parametrize("is_output", [True, False])
def test_a_folder_left_from_an_earlier_training_of_an_address_is_no_part_of_it(
    s3: S3, tmp_path: Path, is_output: bool
) -> None:
    run_ranks(1, train, "s3://bucket/again", tmp_path / "a")
    for name in s3.names("again/"):
        s3.remove(name)
    run_ranks(1, train, "s3://bucket/again", tmp_path / "b")  # as long, or longer, or shorter
    goes_on = "s3://bucket/again" if is_output else str(tmp_path / "next")
    resume = "auto" if is_output else f"s3://bucket/again/checkpoints/step-{STEPS:08d}"
    with pytest.raises(RanksError, match="hold checkpoints of two different trainings"):
        run_ranks(1, train, goes_on, tmp_path / "a", resume=resume)
    shutil.rmtree(tmp_path / "a/s3/bucket/again")
    ((came_from, _),) = run_ranks(1, train, goes_on, tmp_path / "a", resume=resume)
    assert came_from == STEPS


@pytest.mark.e2e
def test_another_runs_checkpoint_under_the_same_name_is_left_alone(
    s3: S3, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(1, train, "s3://bucket/other", tmp_path / "a", keep_last=3)
    theirs = {name: s3.read(name) for name in s3.names("other/checkpoints/")}

    def appear() -> None:
        for name, content in theirs.items():
            s3.write(name.replace("other/", "mine/"), content)

    run_ranks(1, train, "s3://bucket/mine", tmp_path / "b", At(1, appear))
    assert {n.replace("mine/", "other/"): s3.read(n) for n in s3.names("mine/checkpoints/")} == (
        theirs
    )
    assert "holds another checkpoint than" in capfd.readouterr().out


@pytest.mark.e2e
def test_the_second_writer_is_refused(s3: S3, tmp_path: Path) -> None:
    process, gate = start(
        "s3://bucket/both", tmp_path / "a", At(1, partial(time.sleep, 600)), prints=tmp_path / "log"
    )
    try:
        gate.set()
        while not s3.names("both/.trainkit-lock"):
            time.sleep(0.1)
        with pytest.raises(RanksError, match="`s3://bucket/both` is written to by process"):
            run_ranks(1, train, "s3://bucket/both", tmp_path / "b")
    finally:
        process.kill()
        process.join()
    run_ranks(1, train, "s3://bucket/both", tmp_path / "c")  # the holder is dead


@pytest.mark.e2e
def test_a_lost_lease_ends_the_run_before_it_overwrites_anything(s3: S3, tmp_path: Path) -> None:
    def lose() -> None:
        s3.fault(match="PUT lost/.trainkit-lock", status=403)  # nothing is renewed any more
        time.sleep(1.2 * float(os.environ["TRAINKIT_STORAGE_LEASE"]))
        s3.write("lost/.trainkit-lock", b'{"token": "another", "pid": 7, "host": "there"}')
        s3.requests()
        s3.fault()
        time.sleep(float(os.environ["TRAINKIT_STORAGE_LEASE"]))

    with pytest.raises(RanksError, match="taken over by process 7 on host there"):
        run_ranks(1, train, "s3://bucket/lost", tmp_path / "a", At(3, lose))
    written = [each for each in s3.requests() if each.startswith(("PUT", "DELETE"))]
    assert {each.rpartition("/")[2] for each in written} <= {".trainkit-lock"}
    assert b"another" in s3.read("lost/.trainkit-lock")


@pytest.mark.e2e
@pytest.mark.parametrize("clock", ["monotonic", "time", "clock_gettime"])
def test_a_lease_ends_by_the_clock_that_goes_on(s3: S3, tmp_path: Path, clock: str) -> None:
    """As after a machine has slept: it tells that by one of its clocks, or by none but the time."""

    def there(rank: int) -> list[bool]:
        held = Lease(Objects(f"s3://bucket/{clock}"), tmp_path)
        held.acquire(print)
        found, real = [held.may_write()], getattr(time, clock)
        setattr(time, clock, lambda *which: real(*which) + 600)
        found.append(held.may_write())
        while not held.may_write():  # until it was renewed
            real_sleep(0.1)
        setattr(time, clock, real)  # and back, which is no news
        found.append(held.may_write())
        s3.fault(match="PUT .*lock", status=403, code="NoMore")
        real_sleep(1.2 * float(os.environ["TRAINKIT_STORAGE_LEASE"]))
        with pytest.raises(
            StorageError, match=r"before that is known\. `s3://.*<Code>NoMore</Code>"
        ):
            held.require()
        return [*found, held.may_write()]

    real_sleep = time.sleep
    assert run_ranks(1, there) == [[True, False, True, False]]


@pytest.mark.e2e
def test_each_run_has_a_folder_that_storage_has_not(s3: S3, tmp_path: Path) -> None:
    for machine in "ab":
        run_ranks(1, train, "s3://bucket/many", tmp_path / machine, resume=None, new_run=True)
    runs = {name.split("/")[1] for name in s3.names("many/")}
    assert len(runs) == 2
    ((came_from, _),) = run_ranks(
        1, train, "s3://bucket/many", tmp_path / "c", resume="must", new_run=True
    )
    assert came_from == STEPS


@pytest.mark.parametrize("address", ["s3://", "gs://b/../c", "hdfs://b/run"])
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"addresses of storages look like `s3://bucket/run`"):
        Trainer(max_steps=1, output_dir=address)


def test_addresses_of_hugging_face_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"without conditions.*`https://s3.hf.co/NAMESPACE`"):
        Trainer(max_steps=1, output_dir="hf://buckets/me/bucket/run")


def test_what_nothing_mirrors_is_no_address() -> None:
    with pytest.raises(ConfigError, match="nothing brings there what is written"):
        JSONLLogger("s3://bucket/run/metrics.jsonl")


def test_without_its_library_one_sentence_names_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainkit.basics.packages.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package `obstore`.*pip install obstore"):
        Trainer(max_steps=1, output_dir="s3://bucket/run")
