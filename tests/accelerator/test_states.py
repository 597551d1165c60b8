"""`save_state` and `load_state`: whole or not at all, and exact."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.accelerator.behaviours import forget
from tests.accelerator.toys import Noisy, Stream, bits, numbers, prepared, small
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from tests.helpers.toys import Registered
from tests.resume.test_forged import sign, unpack
from trainkit import (
    Accelerator,
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMissing,
    ConfigError,
    DataLoaderConfiguration,
    ProjectConfiguration,
    set_seed,
)
from trainkit.checkpoint import CheckpointStore

ROOT = Path(__file__).resolve().parents[2]
SIZES = [1, 2]


def _train(
    rank: int, folder: Path, stop: int | None, data: str, precision: str, stateful: bool
) -> Any:
    """Train for two epochs, perhaps until `stop`; resume where there is a state."""
    set_seed(4)
    config = DataLoaderConfiguration(use_stateful_dataloader=stateful)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=2,
        dataloader_config=config,
    )
    source = {"numbers": numbers(22), "noisy": Noisy()}.get(data)
    workers = {"num_workers": 2} if data == "noisy" else {}
    model, optimizer, schedule, loader = prepared(accelerator, source, **workers)
    done, log = 0, []
    if (folder / "state").exists():
        accelerator.load_state(folder / "state")
        done = int((folder / "done").read_text())
    for epoch in range(done // len(loader), 2):
        skip = done - epoch * len(loader)
        skips = not stateful and skip > 0
        for batch in accelerator.skip_first_batches(loader, skip) if skips else loader:
            value = batch[-1].float().reshape(-1, 1)
            with accelerator.accumulate(model):
                accelerator.backward(model(value).pow(2).mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            log.append((batch[0].flatten().tolist(), value.flatten().tolist()))
            done += 1
            if done == stop:
                accelerator.save_state(folder / "state")
                if rank == 0:
                    (folder / "done").write_text(str(done))
                accelerator.wait_for_everyone()
                return log
    return log, bits(accelerator.unwrap_model(model)), schedule.get_last_lr()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("data", "precision", "stateful"),
    with_few(
        [("numbers", "fp16", True)],
        [("numbers", "no", False), ("numbers", "fp16", True), ("noisy", "bf16", False)],
    ),
)
def test_a_resumed_training_is_the_same_training(
    size: int, data: str, precision: str, stateful: bool, tmp_path: Path
) -> None:
    options = (data, precision, stateful)
    for stop in (2, 3):
        folder = tmp_path / str(stop)
        folder.mkdir()
        whole = run_ranks(size, _train, folder, None, *options)
        first = run_ranks(size, _train, folder, stop, *options)
        rest = run_ranks(size, _train, folder, None, *options)
        for rank in range(size):
            log, weights, rates = rest[rank]
            assert (first[rank] + log, weights, rates) == whole[rank]


def _stream(rank: int, folder: Path) -> Any:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Stream(15), 2))
    whole = [batch.flatten().tolist() for batch in loader]
    fewer = [b.flatten().tolist() for b in accelerator.skip_first_batches(loader, 2)]
    gathered = [accelerator.gather_for_metrics(batch).flatten().tolist() for batch in loader]
    assert fewer == whole[2:]
    return [value for values in gathered for value in values]


@pytest.mark.e2e
@pytest.mark.parametrize("size", SIZES)
def test_streams_are_shared_out_and_skipped(size: int, tmp_path: Path) -> None:
    assert run_ranks(size, _stream, tmp_path) == [list(map(float, range(15)))] * size


def _project(folder: Path, **options: Any) -> Accelerator:
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, **options)
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(nn.Linear(1, 1))
    return accelerator


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_states_are_numbered_and_the_oldest_go(tmp_path: Path) -> None:
    accelerator = _project(tmp_path, total_limit=2)
    paths = [accelerator.save_state() for _ in range(12)]
    assert paths[-1] == str(tmp_path / "checkpoints" / "checkpoint_11")
    assert _names(tmp_path) == ["checkpoint_10", "checkpoint_11"]
    assert accelerator.save_iteration == 12


def test_a_torn_state_is_passed_over_and_frees_no_good_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator = _project(tmp_path, total_limit=1)
    accelerator.save_state()
    (tmp_path / "checkpoints" / "checkpoint_1").mkdir()  # as a save that was killed leaves it
    again = _project(tmp_path, total_limit=1)
    again.load_state()
    assert "skipped" in capsys.readouterr().out
    assert again.save_iteration == 1
    again.save_state()
    assert _names(tmp_path) == ["checkpoint_1"]


def test_a_new_training_does_not_overwrite_the_states_of_an_old_one(tmp_path: Path) -> None:
    _project(tmp_path).save_state()
    with pytest.raises(ConfigError, match=r"Call `load_state\(\)` to go on from it"):
        _project(tmp_path).save_state()
    continued = _project(tmp_path)
    continued.load_state()
    assert Path(continued.save_state()).name == "checkpoint_1"


def _rolls_back(rank: int, project: Path) -> list[float]:
    """Return the values of the states that loads have taken, each in a program of its own."""

    def program() -> tuple[Accelerator, nn.Linear]:
        settings = ProjectConfiguration(project, automatic_checkpoint_naming=True)
        accelerator, model = Accelerator(cpu=True, project_config=settings), nn.Linear(1, 1)
        accelerator.prepare(model)
        return accelerator, model

    def save(value: float) -> str:
        torch.nn.init.constant_(model.weight, value)
        return Path(accelerator.save_state()).name

    def loaded(name: str | None) -> float:
        accelerator.load_state(name and project / "checkpoints" / name)
        return model.weight.item()

    accelerator, model = program()
    for value in range(4):
        save(value)
    found = [loaded("checkpoint_1")]
    assert save(11) == "checkpoint_4"
    assert save(12) == "checkpoint_5"
    accelerator.end_training()
    for broken in ("checkpoint_5", "checkpoint_4"):  # then the one that it came from
        accelerator, model = program()
        found.append(loaded(None))
        accelerator.wait_for_everyone()
        if rank == 0:
            _break(project / "checkpoints" / broken)
        accelerator.wait_for_everyone()
    accelerator, model = program()
    found.append(loaded(None))
    found.append(loaded("checkpoint_3"))  # back to what was left
    assert save(14) == "checkpoint_6"
    found.append(loaded(None))
    return found


@pytest.mark.e2e
@pytest.mark.parametrize("size", SIZES)
def test_a_rollback_overwrites_nothing_and_leaves_its_branch(
    size: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_ranks(size, _rolls_back, tmp_path) == [[1, 12, 11, 1, 3, 14]] * size
    assert len(_names(tmp_path)) == 7
    told = [line for line in capfd.readouterr().out.splitlines() if "another branch" in line]
    assert "`checkpoint_2` to `checkpoint_3` left as another branch" in told[0]
    assert "the next state is `checkpoint_4`" in told[0]


def test_of_a_branch_that_was_left_the_states_go_first(tmp_path: Path) -> None:
    accelerator = _project(tmp_path, total_limit=3)
    for _ in range(3):
        accelerator.save_state()
    accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_0")
    left = []
    for _ in range(4):
        accelerator.save_state()
        left.append([int(name[-1]) for name in _names(tmp_path)])
    assert left == [[0, 2, 3], [0, 3, 4], [3, 4, 5], [4, 5, 6]]


def _break(folder: Path) -> None:
    (file,) = folder.rglob("model.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_state_that_could_not_be_loaded_continues_nothing(tmp_path: Path) -> None:
    old = _project(tmp_path)
    folders = [Path(old.save_state()) for _ in range(3)]
    _break(folders[0])
    accelerator = _project(tmp_path)
    with pytest.raises(CheckpointError, match="its content has changed"):
        accelerator.load_state(folders[0])
    before = sorted(folders[1].rglob("*"))
    with pytest.raises(ConfigError, match="a state of an earlier training"):
        accelerator.save_state()
    assert sorted(folders[1].rglob("*")) == before


def test_hooks_see_no_state_that_is_broken(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))
    folder = Path(accelerator.save_state(tmp_path / "state"))
    _break(folder)
    seen: list[str] = []
    accelerator.register_load_state_pre_hook(lambda models, path: seen.append(path))
    with pytest.raises(CheckpointError, match="its content has changed"):
        accelerator.load_state(folder)
    assert not seen


def test_a_broken_state_is_never_loaded(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    folder = Path(accelerator.save_state(tmp_path / "state"))
    _break(folder)
    before = bits(model)
    with pytest.raises(CheckpointError, match=r"`model\.safetensors`: its content has changed"):
        accelerator.load_state(folder)
    assert bits(model) == before


def test_loading_nothing_says_what_to_do(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigError, match="`load_state` needs a folder"):
        accelerator.load_state()
    with pytest.raises(ConfigError, match="`save_state` needs a folder"):
        accelerator.save_state()
    with pytest.raises(CheckpointMissing, match="holds no state that `save_state` has completed"):
        accelerator.load_state(tmp_path / "nowhere")
    with pytest.raises(CheckpointMissing, match="holds no state that `save_state` has completed"):
        _project(tmp_path).load_state()


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 1))
    accelerator.save_state(tmp_path / "state")
    other = Accelerator(cpu=True)
    model = other.prepare(nn.Linear(1, 1))
    before = bits(model)
    with pytest.raises(CheckpointError, match=r"model.*`weight` \[1, 2\] in the checkpoint"):
        other.load_state(tmp_path / "state")
    other.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(CheckpointError, match="it lacks \\['optimizer'\\]"):
        other.load_state(tmp_path / "state")
    assert bits(model) == before


@pytest.mark.parametrize("side", ["accelerate", "trainkit"])
def test_a_model_is_loaded_alone_where_nothing_else_is_prepared(
    side: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As scripts do it that fine-tune: the optimizer is the new one's."""
    library = pytest.importorskip(side)
    forget(side)
    accelerator = library.Accelerator(cpu=True)
    model, optimizer, schedule, loader = prepared(accelerator, numbers(8))
    for (batch,) in loader:
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        schedule.step()
    accelerator.save_state(tmp_path / "state")
    trained = bits(model)
    group = optimizer.param_groups[0]
    group["lr"], before = 0.125, schedule.get_last_lr()
    nn.init.zeros_(model[0].weight)
    accelerator._optimizers = accelerator._schedulers = []
    accelerator.load_state(tmp_path / "state")
    assert bits(model) == trained
    assert (group["lr"], schedule.get_last_lr()) == (0.125, before)
    if side == "trainkit":
        said = capsys.readouterr().out
        for kind in ("optimizer", "scheduler"):
            assert f"no {kind} is prepared: what the state has of any {kind} is left out." in said
        alone = Accelerator(cpu=True)
        other = alone.prepare(small())
        alone.load_state(tmp_path / "state")
        assert bits(other) == trained
    forget(side)


def test_registered_objects_are_saved_without_pickle(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    counter = Registered()
    accelerator.register_for_checkpointing(counter)
    counter.value = {"a": (1, torch.ones(2))}
    accelerator.save_state(tmp_path / "state")
    counter.value = None
    accelerator.load_state(tmp_path / "state")
    assert counter.value["a"][0] == 1
    assert torch.equal(counter.value["a"][1], torch.ones(2))
    assert not list(tmp_path.rglob("*.pkl"))
    counter.value = object()
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0\.value"):
        accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")  # the earlier one is still there
    with pytest.raises(ConfigError, match="Item at index 0, a `dict`: it cannot"):
        accelerator.register_for_checkpointing({})


def test_hooks_may_save_and_load_the_weights_themselves(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        (Path(folder) / "own.txt").write_text(str(models[0].weight.item()))
        weights.pop()

    def load(models: list[Any], folder: str) -> None:
        with torch.no_grad():
            models.pop().weight.fill_(float((Path(folder) / "own.txt").read_text()))

    handles = [
        accelerator.register_save_state_pre_hook(save),
        accelerator.register_load_state_pre_hook(load),
    ]
    with torch.no_grad():
        model.weight.fill_(3.0)
    folder = Path(accelerator.save_state(tmp_path / "state"))
    assert not list(folder.rglob("model.safetensors"))
    with torch.no_grad():
        model.weight.fill_(0.0)
    accelerator.load_state(folder)
    assert model.weight.item() == 3.0
    for handle in handles:
        handle.remove()
    accelerator.save_state(folder)
    assert list(folder.rglob("model.safetensors"))


def _one_of_two(rank: int, folder: Path) -> float:
    accelerator = Accelerator(cpu=True)
    shuffled = DataLoader(numbers(8), 2, shuffle=True)
    model, loader = accelerator.prepare(nn.Linear(1, 1), shuffled)
    if accelerator.num_processes == 1:
        with torch.no_grad():
            model.weight.fill_(5.0)
        for _ in loader:
            accelerator.save_state(folder)
            break
    else:
        accelerator.load_state(folder)
    seen = [value for (batch,) in loader for value in accelerator.gather_for_metrics(batch)]
    assert sorted(map(float, seen)) == list(map(float, range(8)))
    inner: Any = accelerator.unwrap_model(model)
    return float(inner.weight.item())


def test_the_number_of_processes_may_change(tmp_path: Path) -> None:
    assert run_ranks(1, _one_of_two, tmp_path / "state") == [5.0]
    assert run_ranks(2, _one_of_two, tmp_path / "state") == [5.0, 5.0]


def _numbered(rank: int, folder: Path, batch_size: int, data: str, stop: int | None) -> list[float]:
    """Return the samples of a pass up to `stop`, or of what is left of it, and of the next one."""
    set_seed(3)
    config = DataLoaderConfiguration(
        dispatch_batches=data.startswith("dispatched"), use_stateful_dataloader=stop is None
    )
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    source: Any = Stream(22) if data.endswith("stream") else numbers(22)
    options: Any = {"shuffle": True} if data.endswith("shuffled") else {}
    if data == "generator":
        options = {"shuffle": True, "generator": torch.Generator().manual_seed(5)}
    loader = accelerator.prepare(DataLoader(source, batch_size, **options))
    if stop is None:
        accelerator.load_state(folder)
    seen = []
    for count, batch in enumerate(loader, 1):
        values = batch[0] if isinstance(batch, list) else batch
        seen += accelerator.gather_for_metrics(values).flatten().tolist()
        if count == stop:
            accelerator.save_state(folder)
    return seen


@pytest.mark.parametrize(
    ("data", "before", "after"),
    with_few(
        [("shuffled", 1, 2)],
        [
            ("plain", 2, 1),
            ("shuffled", 1, 2),
            ("shuffled", 2, 1),
            ("shuffled", 2, 3),
            ("generator", 3, 1),
            ("stream", 1, 2),
            ("stream", 3, 2),
            ("dispatched-shuffled", 2, 1),
            ("dispatched-shuffled", 3, 2),
            ("dispatched-stream", 2, 3),
        ],
    ),
)
def test_another_number_of_processes_goes_on_with_what_is_left(
    data: str, before: int, after: int, tmp_path: Path
) -> None:
    """The same global batch: 6 samples."""
    folder = tmp_path / "state"
    whole = run_ranks(before, _numbered, folder, 6 // before, data, 2)[0]
    assert sorted(whole) == [float(number) for number in range(22)]
    rest = run_ranks(after, _numbered, folder, 6 // after, data, None)
    assert rest == [whole[12:]] * after


@pytest.mark.e2e
def test_a_pass_that_cannot_go_on_elsewhere_begins_anew_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(1, _numbered, tmp_path, 6, "shuffled", 2)
    first = run_ranks(2, _numbered, tmp_path, 6, "shuffled", None)[0]
    assert sorted(first) == [float(number) for number in range(22)]
    said = capfd.readouterr().out
    assert "the loader 0 begins a new pass: samples of a global batch: 6 in the checkpoint" in said


SAVING = """
    import sys
    import torch
    from torch import nn
    from trainkit import Accelerator, ProjectConfiguration

    project = ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = accelerator.prepare(nn.Linear(256, 256))
    if len(sys.argv) > 2:
        accelerator.load_state()
        print(int(model.bias[0].item()))
        sys.exit()
    for number in range(10**6):
        with torch.no_grad():
            model.bias.fill_(number)
        accelerator.save_state()
        print(number, flush=True)
"""


@pytest.mark.e2e
@pytest.mark.usefixtures("warm_programs")
def test_a_kill_while_saving_loses_no_acknowledged_state(tmp_path: Path) -> None:
    """Accelerate removes the old state first: with `total_limit=1` a kill leaves nothing."""
    script = tmp_path / "saving.py"
    script.write_text(textwrap.dedent(SAVING))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(tmp_path / "project")]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    acknowledged = [process.stdout.readline() for _ in range(20)][-1]
    process.send_signal(signal.SIGKILL)
    acknowledged = (process.stdout.read().splitlines() or [acknowledged])[-1]
    process.stdout.close()
    process.wait()
    result = subprocess.run(
        [*command, "load"], env=environment, capture_output=True, text=True, check=True
    )
    assert int(result.stdout.splitlines()[-1]) >= int(acknowledged)
    good = [f for f in (tmp_path / "project" / "checkpoints").iterdir() if _is_good(f)]
    assert good


def _is_good(folder: Path) -> bool:
    return CheckpointStore(folder).newest_valid(lambda text: None) is not None


def _ordered(folder: Path, sampler: Any, batch_size: int, stop: int | None) -> list[int]:
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)
    )
    options: Any = {"shuffle": True} if sampler == "shuffle" else {"sampler": sampler}
    loader = accelerator.prepare(DataLoader(range(24), batch_size, **options))  # type: ignore[arg-type]
    seen: list[int] = []
    if stop is None:
        accelerator.load_state(folder)
    for count, batch in enumerate(loader, 1):
        seen += batch.tolist()
        if count == stop:
            accelerator.save_state(folder)
            break
    return seen


@pytest.mark.parametrize(
    ("before", "after", "size", "words"),
    [
        ("shuffle", None, 4, "sampler: RandomSampler in the checkpoint, SequentialSampler now"),
        (list(range(24)), list(range(23, -1, -1)), 4, "the sampler gives another order"),
        (None, None, 2, "samples of a global batch: 4 in the checkpoint, 2 now"),
    ],
)
def test_a_pass_does_not_go_on_in_another_order(
    before: Any, after: Any, size: int, words: str, tmp_path: Path
) -> None:
    first = _ordered(tmp_path, before, 4, 3)
    with pytest.raises(CheckpointError, match=words):
        _ordered(tmp_path, after, size, None)
    assert sorted(first + _ordered(tmp_path, before, 4, None)) == list(range(24))


@pytest.mark.parametrize(
    ("file", "keys", "value", "words"),
    [
        ("loop.json", ("accumulation", "count"), None, "accumulation.count"),
        ("loop.json", ("schedulers", 0, "last_epoch"), "x", "schedulers.0.last_epoch"),
        ("loop.json", ("loaders",), {}, "`loaders` must be a list"),
        ("optimizer.json", ("groups", 0, "params", 0), 3, "groups.0.params.0"),
        ("optimizer.json", ("groups", 0, "lr"), "fast", "groups.0.lr"),
        ("process-00000.json", ("python",), [1], "python"),
        ("process-00000.json", ("torch",), None, "torch"),
        ("process-00000.json", ("loaders", 0, "batches"), -1, "loaders.0.batches"),
    ],
)
def test_a_forged_state_changes_nothing(
    file: str, keys: tuple[Any, ...], value: Any, words: str, tmp_path: Path
) -> None:
    accelerator = Accelerator(cpu=True)
    model, _, _, loader = prepared(accelerator, numbers(22))
    for _ in loader:
        accelerator.save_state(tmp_path)
        break
    (folder,) = tmp_path.glob("step-*")
    tree = place = json.loads((folder / file).read_bytes())
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    (folder / file).write_text(json.dumps(tree))
    sign(folder)
    before = bits(model)
    with pytest.raises(CheckpointCorrupt, match=rf"`{file}`.*{words}"):
        accelerator.load_state(tmp_path)
    assert bits(model) == before


def test_a_model_that_is_no_dict_is_refused_where_entries_may_be_left_out(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = prepared(accelerator, numbers(4))[0]
    accelerator.save_state(tmp_path)
    (folder,) = tmp_path.glob("step-*")
    body = json.loads((folder / "manifest.json").read_bytes())
    body["files"] |= {"model.json": {}}
    (folder / "manifest.json").write_text(json.dumps(body))
    (folder / "model.json").write_text('{"$int": "0x1"}')
    sign(folder)
    before = bits(model)
    with pytest.raises(CheckpointCorrupt, match=r"`model\.json`.*must be a dict"):
        accelerator.load_state(tmp_path, strict=False)
    assert bits(model) == before


def _goes_back(rank: int, folder: Path, part: str, given: bool, hook: bool) -> Any:
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model, registered = nn.Linear(1, 1), Registered()
    accelerator.prepare(model)
    accelerator.register_for_checkpointing(registered)
    seen: list[str] = []
    if hook:
        accelerator.register_load_state_pre_hook(lambda models, path: seen.append(Path(path).name))
    newest = ""
    for value in range(3):
        registered.value = value
        torch.nn.init.constant_(model.weight, value)
        newest = accelerator.save_state()
    if rank == 0:
        (manifest,) = Path(newest).rglob("manifest.json")
        unpack(manifest.parent)
        file = manifest.with_name(f"{part}.json")
        tree = json.loads(file.read_text())
        file.write_text(json.dumps(tree | {"torch": None}))
        sign(file.parent)
    accelerator.wait_for_everyone()
    registered.value = 9
    try:
        accelerator.load_state(newest if given else None)
    except CheckpointCorrupt as error:
        return str(error), registered.value, seen
    saved = accelerator.save_state()
    return registered.value, model.weight.item(), Path(saved).name, seen


@pytest.mark.parametrize(("size", "part"), [(1, "process-00000"), (2, "process-00001")])
def test_loading_the_newest_goes_back_to_the_one_before(
    size: int, part: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = run_ranks(size, _goes_back, tmp_path, part, False, False)
    assert found == [(1, 1.0, "checkpoint_3", [])] * size
    told = [line for line in capfd.readouterr().out.splitlines() if "skipped" in line]
    assert ["checkpoint_2" in line and f"`{part}.json`" in line for line in told] == [True]


@pytest.mark.e2e
@pytest.mark.parametrize(("given", "hook"), [(True, False), (False, True)])
def test_where_there_is_no_choice_a_forged_state_raises(
    given: bool, hook: bool, tmp_path: Path
) -> None:
    text, value, seen = run_ranks(1, _goes_back, tmp_path, "process-00000", given, hook)[0]
    assert "`process-00000.json`: `torch`" in text
    assert (value, seen) == (9, ["checkpoint_2"] * hook)


def test_a_state_of_a_last_batch_is_one_of_a_pass_that_is_over(tmp_path: Path) -> None:
    """As in Accelerate: loops that count epochs by `steps // len(loader)` go on with the next."""

    def passes(stop: bool) -> list[list[int]]:
        set_seed(4)
        config = DataLoaderConfiguration(use_stateful_dataloader=True)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        loader = accelerator.prepare(DataLoader(range(8), 2, shuffle=True))  # type: ignore[arg-type]
        found: list[list[int]] = []
        if stop:
            accelerator.load_state(tmp_path)
        for _ in range(len(found), 3 - stop):
            found.append([])
            for batch in loader:
                found[-1] += batch.tolist()
                if len(found) == 1 and len(found[0]) == 8 and not stop:
                    accelerator.save_state(tmp_path)
        return found

    whole = passes(False)
    assert passes(True) == whole[1:]


def test_sparse_gradients_of_an_open_window_are_saved(tmp_path: Path) -> None:
    def train(numbers: range, *, load: bool = False, save: bool = False) -> torch.Tensor:
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
        table = nn.Embedding(10, 4, sparse=True)
        model, optimizer = accelerator.prepare(table, torch.optim.SparseAdam(table.parameters()))
        if load:
            accelerator.load_state(tmp_path / "state")
        for number in numbers:
            with accelerator.accumulate(model):
                rows = torch.tensor([number, 9, number % 3, 9])
                accelerator.backward(model(rows).square().sum())
                optimizer.step()
                optimizer.zero_grad()
        if save:
            accelerator.save_state(tmp_path / "state")
        return table.weight.detach()

    whole = train(range(6))
    train(range(2), save=True)
    assert torch.equal(train(range(2, 6), load=True), whole)


def test_gradients_of_a_window_that_the_loop_counts_are_saved(tmp_path: Path) -> None:
    def train(numbers: range, *, load: bool = False, save: bool = False) -> torch.Tensor:
        torch.manual_seed(0)
        accelerator, line = Accelerator(cpu=True), nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(line, torch.optim.Adam(line.parameters()))
        if load:
            accelerator.load_state(tmp_path / "state")
        for number in numbers:
            accelerator.backward(model(torch.full((4,), 1.0 + number)).square().sum() / 3)
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        if save:
            accelerator.save_state(tmp_path / "state")
        return line.weight.detach()

    whole = train(range(6))
    train(range(2), save=True)
    assert torch.equal(train(range(2, 5), load=True, save=True), train(range(5)))
    assert torch.equal(train(range(5, 6), load=True), whole)


def test_gradients_of_one_optimizer_are_saved_while_another_makes_its_steps(
    tmp_path: Path,
) -> None:
    def train(numbers: range, *, load: bool = False, save: bool = False) -> list[list[float]]:
        torch.manual_seed(0)
        accelerator, rare, often = Accelerator(cpu=True), nn.Linear(4, 1), nn.Linear(4, 1)
        one, two, slow, fast = accelerator.prepare(
            rare, often, *(torch.optim.Adam(each.parameters()) for each in (rare, often))
        )
        if load:
            accelerator.load_state(tmp_path / "state")
        for number in numbers:
            sample = torch.full((4,), 1.0 + number)
            accelerator.backward(one(sample).square().sum() / 3)
            if number % 3 == 2:
                slow.step()
                slow.zero_grad()
            accelerator.backward(two(sample).square().sum())
            fast.step()
            fast.zero_grad()
        if save:
            accelerator.save_state(tmp_path / "state")
        return [each.weight.detach().flatten().tolist() for each in (rare, often)]

    train(range(2), save=True)
    assert train(range(2, 6), load=True) == train(range(6))
