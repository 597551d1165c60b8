"""Checkpoints and environments that want to run code are refused, and run none."""

import gzip
import io
import os
import pickle
import shutil
import stat
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import nn
from torch.utils.data import DataLoader

from tests.checkpoint.test_format import FILES, open_with_files
from tests.checkpoint.toys import save_alone
from tests.helpers.toys import toy_dataset, toy_model
from trainkit import CheckpointError, ConfigError, Trainer
from trainkit.callbacks import Checkpoint, JSONLLogger
from trainkit.checkpoint import CheckpointStore
from trainkit.checkpoint.format import strict_json, tensor_file
from trainkit.checkpoint.format.manifest import FileInfo, Manifest, read_manifest
from trainkit.checkpoint.io.reading import open_directory, open_file
from trainkit.cli.main import main
from trainkit.distributed.world import World
from trainkit.errors import CheckpointCorrupt

ROOT = Path(__file__).resolve().parents[2]


class Payload:
    """Runs `function(*arguments)` where it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.reduced


def _zip(data: bytes, name: str = "archive/data.pkl") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, data)
    return buffer.getvalue()


def _tar(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("pickle")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def _saved(value: Any, *, is_zip: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=is_zip)
    return buffer.getvalue()


def _array(value: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([value], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def _safetensors(metadata: dict[str, str], data: bytes = b"") -> bytes:
    pieces = {"x": tensor_file.Piece("U8", (len(data),), lambda: memoryview(data))}
    header = tensor_file.encode_header(pieces, metadata)
    return b"".join(bytes(chunk) for chunk in tensor_file.chunks(pieces, header))


def payloads(marker: Path) -> dict[str, bytes]:
    """Return files of many kinds that make `marker` where they are believed."""
    touch = Payload(os.mkdir, str(marker))
    plain = pickle.dumps(touch)
    source = f"__import__('os').mkdir({str(marker)!r})"
    inner = Payload(torch.storage._load_from_bytes, _saved(touch))
    yaml = f'!!python/object/apply:os.mkdir ["{marker}"]'
    return {
        "pickle": plain,
        "protocol 0": pickle.dumps(touch, 0),
        "eval": pickle.dumps(Payload(eval, source)),
        "system": pickle.dumps(Payload(os.system, f"mkdir '{marker}'")),
        "nested in a storage": pickle.dumps(inner),
        "zip": _zip(plain),
        "torch": _saved(touch),
        "legacy torch": _saved(touch, is_zip=False),
        "tar": _tar(plain),
        "gzip": gzip.compress(plain),
        "numpy": _array(touch),
        "yaml": yaml.encode(),
        "json": f'{{"__reduce__": ["eval", {strict_json.dump(source).decode()}]}}'.encode(),
        "json of a default": b'{"$defaultdict": ["eval", [["1", 2]]]}',
        "safetensors and zip": _safetensors({"format": "pt"}) + _zip(plain),
        "safetensors of a pickle": _safetensors({"container": source}, plain),
        "nothing": b"",
    }


def train(folder: Path, model: nn.Module, resume: str | Path | None) -> None:
    Trainer(max_epochs=1, output_dir=folder, callbacks=[Checkpoint(), JSONLLogger()]).fit(
        model,
        DataLoader(toy_dataset(8), 4, shuffle=True),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.AdamW, lr=0.1),
        resume=resume,
    )


def list_again(folder: Path, name: str) -> None:
    """Give a file of a checkpoint the size and digest that it has now, in the manifest too."""
    old = read_manifest(folder)
    data = (folder / name).read_bytes()
    own = FileInfo(bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data))
    values = {field: getattr(old, field) for field in Manifest.__slots__}
    new = Manifest(**values | {"files": {**old.files, name: own}})
    (folder / "manifest.json").write_bytes(new.encode())


def test_believed_payloads_would_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    made = payloads(marker)
    readers: dict[str, Callable[[bytes], Any]] = {
        "pickle": pickle.loads,
        "eval": pickle.loads,
        "nested in a storage": pickle.loads,
        "torch": lambda data: torch.load(io.BytesIO(data), weights_only=False),
        "numpy": lambda data: np.load(io.BytesIO(data), allow_pickle=True),
    }
    for name, reader in readers.items():
        reader(made[name])
        assert marker.exists(), name
        marker.rmdir()


def test_a_payload_in_any_file_of_a_checkpoint_never_runs(tmp_path: Path) -> None:
    good, marker, cases = tmp_path / "good", tmp_path / "marker", 0
    train(good, toy_model(), None)
    (step,) = (good / "checkpoints").iterdir()
    names = sorted(file.name for file in step.iterdir())
    assert {"manifest.json", "model.safetensors", "trainer.json"} <= set(names)
    model = toy_model(seed=5)
    before = [p.detach().clone() for p in model.parameters()]
    for name in names:
        for kind, data in payloads(marker).items():
            folder = tmp_path / "bad"
            shutil.copytree(good, folder)
            bad = folder / "checkpoints" / step.name
            (bad / name).write_bytes(data)
            if name != "manifest.json" and cases % 2:
                list_again(bad, name)  # an attacker who can compute digests
            with pytest.raises((CheckpointError, ConfigError)):
                train(folder, model, bad)
            assert not marker.exists(), (name, kind)
            assert all(map(torch.equal, before, model.parameters())), (name, kind)
            shutil.rmtree(folder)
            cases += 1
    assert cases > 80


@pytest.mark.parametrize("name", [n for n in payloads(Path("x")) if "safetensors" not in n])
def test_a_payload_with_a_right_digest_is_not_read_as_a_part(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    store = CheckpointStore(tmp_path / "checkpoints")
    path = save_alone(store, 1, {"model": {"w": torch.ones(2)}, "other": [1, "a"]})
    for file, part in (("model.safetensors", "model"), ("other.json", "other")):
        before = (path / file).read_bytes()
        (path / file).write_bytes(payloads(marker)[name])
        list_again(path, file)
        if (name, part) != ("json", "other"):  # which is only a dict there
            with pytest.raises(CheckpointCorrupt, match=file):
                store.open(path).read(part)
        (path / file).write_bytes(before)
        list_again(path, file)
    assert not marker.exists()


def test_a_manifest_with_a_byte_order_mark_or_of_any_size_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = save_alone(store, 1)
    manifest = path / "manifest.json"
    content = manifest.read_bytes()
    for change in (b"\xef\xbb\xbf" + content, content.decode().encode("utf-16"), content * 2):
        manifest.write_bytes(change)
        with pytest.raises(CheckpointCorrupt, match=r"`manifest\.json`"):
            store.open(path)
    with manifest.open("wb") as file:
        file.truncate(1 << 40)
    start = time.monotonic()
    with pytest.raises(CheckpointCorrupt, match="more than the limit"):
        store.open(path)
    assert time.monotonic() - start < 60.0  # a terabyte takes longer


def test_a_million_entries_are_refused_by_their_bytes_alone(tmp_path: Path) -> None:
    entry = FILES[1:-1] + b", "
    with pytest.raises(CheckpointCorrupt, match="more than the limit"):
        open_with_files(b"{" + entry * 1_000_000 + FILES[1:], tmp_path)


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFCHR, stat.S_IFSOCK])
def test_what_is_no_ordinary_file_is_not_opened(kind: int, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = save_alone(store, 1)
    for name in ("model.safetensors", "manifest.json"):
        (path / name).unlink()
        try:
            os.mknod(path / name, kind | 0o600, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root makes devices")
        with pytest.raises(CheckpointCorrupt, match=f"`{name}` is not an ordinary file"):
            store.open(path)


def test_a_header_that_is_one_byte_too_long_is_not_read(tmp_path: Path) -> None:
    size = tensor_file.LARGEST_HEADER + 1
    with (tmp_path / "x.safetensors").open("wb") as sparse:
        sparse.write(size.to_bytes(8, "little"))
        sparse.truncate(size + 100)
    with (
        open_directory(tmp_path) as directory,
        open_file(directory, "x.safetensors", tmp_path) as file,
        pytest.raises(CheckpointCorrupt, match=f"cannot have {size} bytes"),
    ):
        tensor_file.read_header(file)


def exchange(path: Path, versions: list[bytes], stop: threading.Event) -> None:
    fresh = path.parent.with_name("fresh")
    turn = 0
    while not stop.is_set():
        turn += 1
        fresh.write_bytes(versions[turn % 2])
        fresh.rename(path)


@pytest.mark.parametrize("tries", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_what_is_read_is_what_was_verified_whoever_exchanges_files(
    tries: int, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    parts = [{"model": {"w": torch.full((999,), float(step))}} for step in (1, 2)]
    path, other = (save_alone(store, step, parts[step - 1]) for step in (1, 2))
    file = path / "model.safetensors"
    versions = [file.read_bytes(), (other / file.name).read_bytes()]
    checkpoint = store.open(path)
    stop = threading.Event()
    thread = threading.Thread(target=exchange, args=(file, versions, stop))
    thread.start()
    good = 0
    try:
        for _ in range(tries):
            try:
                state = checkpoint.read("model")
            except CheckpointCorrupt:
                continue
            good += 1
            assert state["w"].eq(1.0).all()
    finally:
        stop.set()
        thread.join()
    assert 0 < good < tries


ERRORS: list[type[BaseException]] = [
    kind
    for kind in (*Exception.__subclasses__(), KeyError, IndexError, FileNotFoundError, UnicodeError,
                 OverflowError, RecursionError, PermissionError, NotImplementedError)
    if kind.__module__ == "builtins" and kind.__name__ != "ExceptionGroup"
]  # fmt: skip


@pytest.mark.parametrize("kind", ERRORS)
def test_whatever_the_reader_raises_nothing_else_is_tried(
    kind: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "marker"
    store = CheckpointStore(tmp_path / "checkpoints")
    checkpoint = store.open(save_alone(store, 1, {"model": {"w": torch.ones(2)}, "other": [1]}))
    calls: list[str] = []

    def fail(*_: Any) -> None:
        calls.append("read")
        raise kind("planted")

    # What a laxer attempt could use.
    for lax in ("torch.load", "pickle.load", "pickle.loads", "safetensors.torch.load_file"):
        monkeypatch.setattr(lax, lambda *_, **__: marker.touch())
    monkeypatch.setattr(tensor_file, "read_header", fail)
    monkeypatch.setattr(strict_json, "parse", fail)
    for part in ("model", "other"):
        with pytest.raises((CheckpointCorrupt, kind)):
            checkpoint.read(part)
    assert calls == ["read", "read"]
    assert not marker.exists()


HOSTILE_TEXTS = ["1; touch marker", "$(touch marker)", "`touch marker`", "__import__('os')", "../x"]


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_text_from_outside_is_only_text(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        with pytest.raises(ConfigError, match=f"`{name}` must be a whole number"):
            World.from_env({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", name: text})
    for command in ("ls", "verify", "show"):
        assert main(["checkpoint", command, text]) == 1
    capsys.readouterr()
    store = CheckpointStore(tmp_path / "checkpoints")
    path = save_alone(store, 1, run_id=text, metrics={text: 1.0})
    assert main(["checkpoint", "show", str(path)]) == 0
    assert store.open(path).manifest.run_id == text
    assert sorted(file.name for file in tmp_path.iterdir()) == ["checkpoints"]


def test_the_environment_of_a_scheduler_is_not_obeyed(tmp_path: Path) -> None:
    """A planted `json.py` beside the checkpoint is not imported, and no shell sees a variable."""
    checkpoints = tmp_path / "checkpoints"
    path = save_alone(CheckpointStore(checkpoints), 1)
    for name in ("json.py", "xxhash.py", "torch.py", "pickle.py"):
        (path.parent / name).write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\n")
    script = tmp_path / "bin" / "trainkit"
    script.parent.mkdir()
    script.write_text("import sys\nfrom trainkit.cli.main import main\nsys.exit(main())\n")
    names = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "MASTER_ADDR", "HOSTNAME", "COLUMNS")
    hostile = dict.fromkeys(names, f"$(touch {tmp_path}/marker); touch {tmp_path}/marker")
    environment = {**os.environ, **hostile, "PYTHONPATH": str(ROOT)}
    for command in (["verify", str(checkpoints)], ["show", str(path)], ["ls", str(checkpoints)]):
        subprocess.run(
            [sys.executable, str(script), "checkpoint", *command],
            cwd=checkpoints, env=environment, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    assert not (tmp_path / "marker").exists()
