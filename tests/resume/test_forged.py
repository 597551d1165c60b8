"""A checkpoint that was not written by a run is refused whole, or resumed legally (rule 29)."""

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from tests.helpers.toys import toy_dataset
from trainkit import CheckpointError, Trainer
from trainkit.callbacks import EMA, Checkpoint, EarlyStopping, Evaluation
from trainkit.precision import FP16

HEAD = b'{"manifest_xxh3_128": "'
SAMPLE = 45  # every so many cases are in the default run
STARTED: list[tuple[nn.Module, list[torch.Tensor]]] = []
"""The model of the latest fit, and what it held before."""


def fit(folder: Path, resume: Any, steps: int = 6) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    evaluation = Evaluation(every_n_steps=2)
    stopping = EarlyStopping("eval/loss", patience=90, mode="min")
    saving = Checkpoint(every_n_steps=3, keep_last=None)
    trainer = Trainer(
        max_steps=steps,
        callbacks=[evaluation, stopping, EMA(0.5), saving],
        output_dir=folder,
        precision=FP16(init_scale=256.0),
        log_every_n_steps=4,
    )
    STARTED[:] = [(model, [tensor.clone() for tensor in model.state_dict().values()])]
    trainer.fit(
        model,
        (DataLoader(toy_dataset(32), 4, shuffle=True), DataLoader(toy_dataset(8), 4)),
        optimizer=partial(AdamW, lr=1e-2),
        lr_scheduler=lambda o: LambdaLR(o, lambda step: 1 / (1 + 0.1 * step)),
        loss_fn=nn.CrossEntropyLoss(),
        resume=resume,
        schedule=None if resume is None else "keep",
    )
    return model, trainer.run


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    fit(folder, None)
    return folder


def sign(folder: Path) -> None:
    """Write the digests and sizes that the files have now."""
    path = folder / "manifest.json"
    body = json.loads(path.read_bytes())
    body.pop("manifest_xxh3_128")
    for name in body["files"]:
        data = (folder / name).read_bytes()
        digest = xxhash.xxh3_128_hexdigest(data)
        body["files"][name] = {"bytes": len(data), "xxh3_128": digest}
    sign_body(path, body)


def packed(folder: Path) -> dict[str, bytes]:
    """Return the content of the files that are packed into one, by name."""
    listed = json.loads((folder / "manifest.json").read_bytes())["files"]
    return {
        name: (folder / info["pack"]).read_bytes()[info["begin"] :][: info["bytes"]]
        for name, info in listed.items()
        if "pack" in info
    }


def unpack(folder: Path) -> None:
    """Let each packed file be one of the folder, as it was in older versions of the format."""
    for name, content in packed(folder).items():
        (folder / name).write_bytes(content)
    sign(folder)
    (folder / "processes.bin").unlink(missing_ok=True)


def sign_body(path: Path, body: Any) -> None:
    rest = json.dumps(body, indent=1).encode().removeprefix(b"{\n") + b"\n"
    path.write_bytes(HEAD + xxhash.xxh3_128_hexdigest(rest).encode() + b'",\n' + rest)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where values stand; of long lists and of nodes of the codec only the beginning."""
    if path:
        yield path
    if isinstance(node, dict):
        for key, value in node.items():
            yield from places(value, (*path, key))
    elif isinstance(node, list):
        for index, value in enumerate(node[:2]):
            yield from places(value, (*path, index))


CHANGES: dict[str, Any] = {
    "removed": None,
    "null": lambda old: None,
    "text": lambda old: "x" if not isinstance(old, str) else 5,
    "negative": lambda old: -7,
    "huge": lambda old: {"$int": hex(10**30)},
    "nested": lambda old: {"inner": [old]},
    "list": lambda old: [old],
    "true": lambda old: True,
    "nan": lambda old: {"$float": "nan"},
}


def changed(tree: Any, path: tuple[Any, ...], how: str) -> Any:
    tree = json.loads(json.dumps(tree))
    place = tree
    for key in path[:-1]:
        place = place[key]
    if how == "removed":
        del place[path[-1]]
    elif how == "extra":
        if not isinstance(place[path[-1]], dict):
            return None
        place[path[-1]]["one more"] = 1
    else:
        place[path[-1]] = CHANGES[how](place[path[-1]])
    return tree


def json_cases(folder: Path) -> Iterator[tuple[str, tuple[Any, ...], str]]:
    for name in ("trainer.json", "optimizer.json", "process-00000.json", "manifest.json"):
        tree = json.loads((folder / name).read_bytes())
        for path in places(tree):
            if name == "manifest.json" and path[0] in ("files", "manifest_xxh3_128"):
                continue
            for how in (*CHANGES, "extra"):
                yield name, path, how


def tensor_cases(folder: Path) -> Iterator[tuple[str, tuple[Any, ...], str]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                for how in ("dtype", "int", "shape", "flat", "name", "gone"):
                    yield file.name, (name,), how


def change_tensor(path: Path, name: str, how: str) -> None:
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    tensor = tensors.pop(name)
    if how == "name":
        tensors[f"{name}_"] = tensor
    elif how == "dtype":
        tensors[name] = tensor.double()
    elif how == "int":
        tensors[name] = tensor.to(torch.int32)
    elif how == "shape":
        tensors[name] = torch.cat([tensor.reshape(-1)] * 2)
    elif how == "flat":
        tensors[name] = tensor.reshape(1, 1, -1)
    save_file(tensors, path, metadata)


def cases(folder: Path) -> list[tuple[str, tuple[Any, ...], str]]:
    return [*json_cases(folder), *tensor_cases(folder)]


def forge(folder: Path, case: tuple[str, tuple[Any, ...], str]) -> bool:
    """Change a checkpoint and sign it; return whether that could be done."""
    name, path, how = case
    if name.endswith(".safetensors"):
        change_tensor(folder / name, path[0], how)
        sign(folder)
        return True
    tree = changed(json.loads((folder / name).read_bytes()), path, how)
    if tree is None:
        return False
    if name == "manifest.json":
        tree.pop("manifest_xxh3_128")
        sign_body(folder / name, tree)
        return True
    (folder / name).write_text(json.dumps(tree))
    sign(folder)
    return True


def resume(folder: Path, how: Any) -> str:
    """Return what became of a resume; raises AssertionError where that is not allowed."""
    refused: CheckpointError | None = None
    try:
        fit(folder, how, steps=7)
    except CheckpointError as error:
        refused = error
    if refused is None:
        return "resumed"
    model, before = STARTED[-1]
    after = model.state_dict().values()
    assert all(map(torch.equal, before, after)), f"the model has changed: {refused}"
    assert refused.path is not None, f"names no file: {refused}"
    return "refused"


def run_cases(original: Path, tmp_path: Path, chosen: list[Any]) -> dict[str, int]:
    outcomes: dict[str, int] = {}
    failures = []
    for number, case in enumerate(chosen):
        folder = tmp_path / str(number)
        shutil.copytree(original, folder)
        newest = folder / "checkpoints" / "step-00000006"
        if not forge(newest, case):
            continue
        try:
            outcome = resume(folder, newest)
            if outcome == "refused" and number % 5 == 0:
                resume(folder, "auto")
        except Exception as error:  # each is a finding
            outcome = "wrong"
            failures.append(f"{case}: {type(error).__name__}: {error}"[:300])
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        shutil.rmtree(folder)
    assert not failures, f"{len(failures)} of {len(chosen)}:\n" + "\n".join(failures)
    return outcomes


def test_forged_checkpoints_are_refused_before_anything_changes(
    original: Path, tmp_path: Path
) -> None:
    every = cases(original / "checkpoints" / "step-00000006")
    outcomes = run_cases(original, tmp_path, every[::SAMPLE])
    assert outcomes["refused"] > outcomes["resumed"]


@pytest.mark.slow
def test_no_forged_checkpoint_is_half_applied(original: Path, tmp_path: Path) -> None:
    every = cases(original / "checkpoints" / "step-00000006")
    assert len(every) >= 2 * 780
    outcomes = run_cases(original, tmp_path, every[::2])
    assert outcomes["refused"] > outcomes["resumed"]


def test_auto_goes_back_to_the_checkpoint_before(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(original, folder)
    newest = folder / "checkpoints" / "step-00000006"
    assert forge(newest, ("trainer.json", ("counters", "epoch"), "null"))
    _, run = fit(folder, "auto")
    assert run.checkpoints.resumed_from == 3
    assert "`trainer.json`: `counters.epoch` must be a whole number" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["optimizer", "dtype"])
def test_auto_does_not_take_another_run_for_a_broken_one(
    what: str, original: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(original, folder)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    trainer = Trainer(
        max_steps=6,
        callbacks=[Checkpoint()],
        output_dir=folder,
        precision=FP16(init_scale=256.0),
    )
    with pytest.raises(CheckpointError, match=f"(?s)does not fit.*{what}"):
        trainer.fit(
            model.double() if what == "dtype" else model,
            DataLoader(toy_dataset(32), 4, shuffle=True),
            optimizer=partial(AdamW if what == "dtype" else torch.optim.SGD, lr=1e-2),
            lr_scheduler=lambda o: LambdaLR(o, lambda step: 1 / (1 + 0.1 * step)),
            loss_fn=nn.CrossEntropyLoss(),
            resume="auto",
        )
