"""Whatever is done to the files of a checkpoint is found before a byte of it is used."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoint.toys import RUN, parts_of, save_alone
from trainkit.checkpoint import CheckpointStore
from trainkit.checkpoint.format.tensor_location import ShardRegion, StoredTensor
from trainkit.checkpoint.io.reading import HashedFile
from trainkit.errors import CheckpointCorrupt, CheckpointError

Damage = Callable[[Path, Path, random.Random], str]
"""Damages a file of a checkpoint, given another checkpoint; returns the name to be reported."""


def _bytes(change: Callable[[bytearray, random.Random], bytes | bytearray]) -> Damage:
    """Return what rewrites a file's content; it must change it."""

    def damage(file: Path, _: Path, chance: random.Random) -> str:
        old = file.read_bytes()
        new = bytes(change(bytearray(old), chance))
        file.write_bytes(new if new != old else new + b"\0")
        return file.name

    return damage


def _flip(data: bytearray, chance: random.Random, bits: int = 1) -> bytearray:
    for _ in range(bits):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return data


def _zero(data: bytearray, chance: random.Random) -> bytearray:
    begin = chance.randrange(len(data))
    data[begin : begin + 512] = bytes(len(data[begin : begin + 512]))
    return data


def _swap_blocks(data: bytearray, chance: random.Random) -> bytearray:
    size = min(4096, len(data) // 2)
    begin = chance.randrange(len(data) - 2 * size + 1)
    middle, end = begin + size, begin + 2 * size
    data[begin:middle], data[middle:end] = data[middle:end], data[begin:middle]
    return data


def _truncate(data: bytearray, chance: random.Random) -> bytearray:
    return data[: chance.randrange(1, len(data))]


def _append(data: bytearray, chance: random.Random) -> bytes:
    return bytes(data) + chance.randbytes(chance.randint(1, 64))


def _insert(data: bytearray, chance: random.Random) -> bytes:
    place = chance.randrange(len(data))
    return bytes(data[:place]) + chance.randbytes(1) + bytes(data[place:])


def _edit_number(data: bytearray, chance: random.Random) -> bytearray:
    digits = [index for index, byte in enumerate(data) if chr(byte).isdigit()]
    if digits:
        place = chance.choice(digits)
        data[place] = ord("0") + (data[place] - ord("0") + chance.randint(1, 9)) % 10
    return data


def _delete(file: Path, _: Path, __: random.Random) -> str:
    file.unlink()
    return file.name


def _rename(file: Path, _: Path, chance: random.Random) -> str:
    file.rename(file.with_name(f"{file.stem}-{chance.randrange(1000)}{file.suffix}"))
    return file.stem  # of the old name or of the new one


def _add(file: Path, _: Path, chance: random.Random) -> str:
    extra = file.with_name(f"extra-{chance.randrange(1000)}.json")
    extra.write_text("{}")
    return extra.name


def _replace_by_sibling(file: Path, _: Path, chance: random.Random) -> str:
    sibling = chance.choice([other for other in file.parent.iterdir() if other != file])
    shutil.copy(sibling, file)
    return file.name


def _take_from_other_step(file: Path, other: Path, _: random.Random) -> str:
    shutil.copy(other / file.name, file)
    # The manifest of another step describes other files.
    return "" if file.name == "manifest.json" else file.name


def _link(file: Path, other: Path, _: random.Random) -> str:
    file.unlink()
    file.symlink_to(other / file.name)
    return file.name


def _pipe(file: Path, _: Path, __: random.Random) -> str:
    file.unlink()
    os.mkfifo(file)
    return file.name


def _folder(file: Path, _: Path, __: random.Random) -> str:
    file.unlink()
    file.mkdir()
    return file.name


KINDS: dict[str, Damage] = {
    "one bit": _bytes(_flip),
    "eight bits": _bytes(lambda data, chance: _flip(data, chance, 8)),
    "512 bytes zeroed": _bytes(_zero),
    "blocks swapped": _bytes(_swap_blocks),
    "cut": _bytes(_truncate),
    "empty": _bytes(lambda data, _: b""),
    "bytes appended": _bytes(_append),
    "byte inserted": _bytes(_insert),
    "a digit edited": _bytes(_edit_number),
    "all zero": _bytes(lambda data, _: bytes(len(data))),
    "noise": _bytes(lambda data, chance: chance.randbytes(len(data))),
    "deleted": _delete,
    "renamed": _rename,
    "file added": _add,
    "copy of a sibling": _replace_by_sibling,
    "from another step": _take_from_other_step,
    "link": _link,
    "pipe": _pipe,
    "folder": _folder,
}


def _parts(step: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(step)
    # All files differ between steps and from each other.
    return {
        "model": {"w": torch.randn(40, 40, generator=generator), "b": torch.randn(3)},
        "counters": {"step": step, "text": "x" * 50},
        "mixed": {"t": torch.full((9,), step), "n": [1, step]},
        "sharded": {"w": StoredTensor("w", "F32", (step, 7), _SHARDS[step])},
        "shard-0": {"w": torch.randn(1, 7, generator=generator)},
        "shard-1": {"w": torch.randn(step - 1, 7, generator=generator)},
    }


_SHARDS = {
    1: (("shard-0", ShardRegion((0, 0), (1, 7))),),
    2: (("shard-0", ShardRegion((0, 0), (1, 7))), ("shard-1", ShardRegion((1, 0), (1, 7)))),
}


def _campaign(tmp_path: Path, kind: str, mutations: int) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    good, victim = save_alone(store, 1, _parts(1)), save_alone(store, 2, _parts(2))
    saved = tmp_path / "saved"
    victim.rename(saved)
    for seed in range(mutations):
        chance = random.Random(f"{kind} {seed}")
        shutil.copytree(saved, victim)
        file = chance.choice(sorted(victim.iterdir()))
        name = KINDS[kind](file, good, chance)
        with pytest.raises(CheckpointError) as caught:
            store.open(victim)
        assert name in str(caught.value), (seed, name, caught.value)
        assert f"`{caught.value.file}`" in str(caught.value)
        if seed % 50 == 0:
            reports: list[str] = []
            newest = store.newest_valid(reports.append)
            assert newest is not None
            assert newest.path == good
            assert len(reports) == 1
        shutil.rmtree(victim)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_found_and_the_file_named(kind: str, tmp_path: Path) -> None:
    _campaign(tmp_path, kind, 40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_found_in_two_thousand_mutations(kind: str, tmp_path: Path) -> None:
    _campaign(tmp_path, kind, 2000)


def test_without_digests_damage_would_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HashedFile, "check_digest", lambda file, expected: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        _campaign(tmp_path, "one bit", 40)


def test_a_file_that_changes_after_verification_is_not_read(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    checkpoint = store.open(save_alone(store, 1))
    for file in checkpoint.path.iterdir():
        if file.name != "manifest.json":
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
    for part in checkpoint.names():
        with pytest.raises(CheckpointCorrupt):
            checkpoint.read(part)


def test_files_that_are_exchanged_while_they_are_read_give_one_or_an_error(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = save_alone(store, 1)
    other = save_alone(store, 2) / "model.safetensors"
    checkpoint = store.open(path)
    mine = path / "model.safetensors"
    versions = [mine.read_bytes(), other.read_bytes()]
    wrong = 0
    for turn in range(200):
        fresh = path.with_name("fresh")
        fresh.write_bytes(versions[turn % 2])
        fresh.rename(mine)
        try:
            state = checkpoint.read("model")
        except CheckpointCorrupt:
            wrong += 1
            continue
        assert torch.equal(state["weight"], parts_of(1)["model"]["weight"])
    assert wrong == 100


def test_a_checkpoint_of_a_newer_format_is_refused_with_its_version(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = save_alone(store, 1)
    manifest = store.checkpoints()[0].manifest
    newer = {name: getattr(manifest, name) for name in manifest.__slots__} | {"format_version": 9}
    (path / "manifest.json").write_bytes(type(manifest)(**newer).encode())
    with pytest.raises(CheckpointError, match=r"version 9 .* reads up to 4\. Install a newer"):
        store.open(path)
    with pytest.raises(CheckpointError, match=r"Saving step 1 failed: .* version 9"):
        save_alone(store, 1)
    assert store.newest_valid(lambda text: None) is None


def test_a_link_in_the_place_of_a_checkpoint_is_neither_listed_nor_opened_nor_removed(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    outside = save_alone(CheckpointStore(tmp_path / "outside"), 7)
    inside = save_alone(store, 7)
    entry = store.checkpoints()[0]
    shutil.rmtree(inside)
    inside.symlink_to(outside)
    assert store.checkpoints() == []
    with pytest.raises(CheckpointCorrupt, match="is a link"):
        store.open(inside)
    with pytest.raises(CheckpointError, match="is not a folder in"):
        store.remove(entry)
    assert store.open(outside).manifest.run_id == RUN


def test_cleaning_removes_links_and_not_what_they_lead_to(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    for name in (".tmp-1-x", ".trash-1-x"):
        (store.directory / name / "inner").mkdir(parents=True)
        (store.directory / name / "inner" / "link").symlink_to(outside)
        (store.directory / name / "link").symlink_to(outside / "file")
    (store.directory / ".tmp-link").symlink_to(outside)
    store.clean()
    assert list(store.directory.iterdir()) == []
    assert (outside / "file").exists()
