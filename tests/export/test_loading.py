"""`load_checkpoint_in_model` and `load_checkpoint_and_dispatch`, with good and bad input."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.checkpoint.toys import save_alone
from tests.export.toys import TOKENS, gpt2, tied
from tests.helpers.needs import needs_transformers
from tests.helpers.ranks import run_ranks
from trainkit.checkpoint import CheckpointStore
from trainkit.distributed import Processes
from trainkit.errors import CheckpointError, ConfigError
from trainkit.export import (
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    save_model,
)
from trainkit.large_models.devices import infer_auto_device_map


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Return a folder with the export of a tied model, in several files."""
    save_model(tied(), tmp_path / "export", max_shard_size="700B")
    return tmp_path / "export"


def empty() -> Any:
    with init_empty_weights():
        return tied(1)


def equal(model: Any) -> bool:
    return torch.equal(model(TOKENS), tied()(TOKENS))


def sources(tmp_path: Path) -> dict[str, Path]:
    """Return all kinds of sources of the same weights."""
    model = tied()
    save_model(model, tmp_path / "one")
    save_model(model, tmp_path / "many", max_shard_size="700B")
    save_model(model, tmp_path / "bin", safe_serialization=False)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    torch.save(model.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    checkpoint = save_alone(CheckpointStore(tmp_path), 1, {"model": model.state_dict()})
    return {
        "folder": tmp_path / "one",
        "file": tmp_path / "one" / "model.safetensors",
        "folder of many": tmp_path / "many",
        "index": tmp_path / "many" / "model.safetensors.index.json",
        "bin": tmp_path / "bin",
        "torch": tmp_path / "state.pt",
        "legacy": tmp_path / "old.pt",
        "checkpoint": checkpoint,
    }


def test_every_source_fills_real_and_empty_models(tmp_path: Path) -> None:
    for name, path in sources(tmp_path).items():
        for model in (tied(1), empty()):
            assert load_checkpoint_in_model(model, path, strict=True) == ([], []), name
            assert equal(model), name
            assert model.head.weight is model.embedding.weight
            assert all(p.requires_grad and p.is_leaf for p in model.parameters())


def test_what_accelerate_takes_is_taken(export: Path, tmp_path: Path) -> None:
    index = export / "model.safetensors.index.json"
    index.write_text(json.dumps(json.loads(index.read_text())["weight_map"]))  # as older ones are
    index.rename(export / "weight_map.index.json")
    model = empty()
    load_checkpoint_in_model(model, export, offload_state_dict=True)
    assert equal(model)
    with pytest.raises(CheckpointError, match="Copy it here from its address first"):
        load_checkpoint_in_model(model, "s3://bucket/model")


def test_a_real_model_is_filled_in_place(export: Path) -> None:
    model = tied(1)
    before = dict(model.named_parameters())
    load_checkpoint_in_model(model, str(export), device_map="cpu")
    assert all(p is before[name] for name, p in model.named_parameters())


def test_the_model_does_not_depend_on_the_file_afterwards(export: Path) -> None:
    model = empty()
    load_checkpoint_in_model(model, export)
    for path in export.iterdir():
        path.write_bytes(b"")
    assert equal(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "torch.bfloat16"])
def test_floating_tensors_are_converted(export: Path, dtype: Any) -> None:
    for model in (tied(1), empty()):
        load_checkpoint_in_model(model, export, dtype=dtype)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert torch.equal(model.head.weight, tied().head.weight.bfloat16())
        assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()
    half = tied(1).half()
    load_checkpoint_in_model(half, export)
    assert half.head.weight.dtype is torch.float16
    with pytest.raises(ConfigError, match="`dtype` must be a dtype of torch or its name"):
        load_checkpoint_in_model(tied(), export, dtype="float31")


def test_names_that_do_not_meet_are_returned_and_told(tmp_path: Path) -> None:
    state = tied().state_dict()
    del state["head.weight"], state["blocks.1.bias"]
    save_file({**state, "extra": torch.ones(2)}, tmp_path / "model.safetensors")
    model = tied(1)
    with pytest.warns(UserWarning, match="loaded in part") as caught:
        keys = load_checkpoint_in_model(model, tmp_path)
    assert keys.missing_keys == ["blocks.1.bias"]
    assert keys.unexpected_keys == ["extra"]
    assert "`blocks.1.bias`" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert torch.equal(model.embedding.weight, tied().embedding.weight)
    assert torch.equal(model.blocks[1].bias, tied(1).blocks[1].bias)  # type: ignore[arg-type]


def test_all_that_does_not_fit_is_in_one_error(tmp_path: Path) -> None:
    state = tied().state_dict()
    del state["head.weight"], state["blocks.1.bias"]
    state["blocks.0.weight"], state["scale"] = torch.ones(2, 3), torch.ones(1)
    save_file({**state, "extra": torch.ones(2)}, tmp_path / "model.safetensors")
    model = tied(1)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint_in_model(model, tmp_path, strict=True)
    text = str(caught.value)
    assert "`blocks.0.weight`: [2, 3] in the file, [6, 6] in the model" in text
    assert "`scale`: [1] in the file, [] in the model" in text
    assert "does not hold:\n  - `blocks.1.bias`" in text
    assert "no place for:\n  - `extra`" in text
    with pytest.raises(CheckpointError, match="Shapes differ"):
        load_checkpoint_in_model(model, tmp_path)  # a shape is never passed over
    assert torch.equal(model(TOKENS), tied(1)(TOKENS))  # nothing was loaded


def test_an_index_that_names_a_missing_file(export: Path) -> None:
    (export / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"missing: `model-00002-of-00003\.safetensors`"):
        load_checkpoint_in_model(tied(), export)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": {"scale": "../model.safetensors"}}',
        '{"weight_map": {"scale": 5}}',
    ],
)
def test_a_broken_index(export: Path, content: str) -> None:
    (export / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"The index `.*` is broken"):
        load_checkpoint_in_model(tied(), export)


def test_an_index_that_promises_too_much(export: Path) -> None:
    index = export / "model.safetensors.index.json"
    body = json.loads(index.read_text())
    body["weight_map"]["ghost"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match="do not hold: `ghost`"):
        load_checkpoint_in_model(tied(), export)


def test_places_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        load_checkpoint_in_model(tied(), tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"none of `model\.safetensors`.*notes\.txt"):
        load_checkpoint_in_model(tied(), tmp_path)
    with pytest.raises(CheckpointError, match="is no file of weights"):
        load_checkpoint_in_model(tied(), tmp_path / "notes.txt")
    for name in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"nonsense")
        with pytest.raises(CheckpointError, match=name):
            load_checkpoint_in_model(tied(), tmp_path / name)


def test_sparse_tensors_are_checked_before_they_are_used(tmp_path: Path) -> None:
    model, path, size = nn.Module(), tmp_path / "state.pt", (3,)
    model.register_buffer("graph", torch.ones(size).to_sparse())
    torch.save({"graph": torch.arange(3.0).to_sparse()}, path)
    load_checkpoint_in_model(model, path, strict=True)
    assert model.get_buffer("graph").to_dense().tolist() == [0, 1, 2]
    outside, one = torch.tensor([[1 << 30]]), torch.ones(1)
    torch.save({"graph": torch.sparse_coo_tensor(outside, one, size, check_invariants=False)}, path)
    with pytest.raises(CheckpointError, match=r"state\.pt` is refused"):
        load_checkpoint_in_model(model, path, strict=True)


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "model.safetensors"])
@pytest.mark.parametrize("way", ["zip", "legacy", "raw"])
def test_a_planted_pickle_never_runs(tmp_path: Path, name: str, way: str) -> None:
    marker, file = tmp_path / "ran", tmp_path / name
    state = {"scale": torch.tensor(1.0), "payload": Payload(marker)}
    if way == "raw":
        file.write_bytes(pickle.dumps(state))
    else:
        torch.save(state, file, _use_new_zipfile_serialization=way == "zip")
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint_in_model(tied(), file)
    assert name in str(caught.value)
    assert "weights_only" not in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize(
    "device_map",
    [
        {"": "disk"},
        {"embedding": "cpu", "": "disk"},
        {"blocks": "disk", "": "cpu"},
        {"blocks.0": "cpu", "blocks": "disk", "embedding": "disk", "head": "disk", "scale": "cpu"},
    ],
)
def test_modules_on_disk_come_for_their_forward(
    export: Path, tmp_path: Path, device_map: Any
) -> None:
    for model in (tied(1), empty()):
        folder = tmp_path / "offloaded" / "here"
        load_checkpoint_in_model(model, export, device_map, offload_folder=folder, strict=True)
        for _ in range(2):
            assert equal(model)
            assert model.blocks[2].weight.is_meta
        with pytest.raises(RuntimeError, match="Expected tensor for argument"):
            model(TOKENS.float())  # what fails gives up its tensors too
        assert model.blocks[2].weight.is_meta


def test_a_module_that_uses_its_childrens_tensors_itself(tmp_path: Path) -> None:
    class Borrower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.linear(x, self.inner.weight)
            result: torch.Tensor = self.attention(x, x, x)[0]
            return result

    model = Borrower()
    save_model(model, tmp_path / "export")
    x = torch.randn(2, 3, 4)
    with init_empty_weights():
        other = Borrower()
    found = load_checkpoint_and_dispatch(
        other,
        tmp_path / "export",
        device_map={"": "disk"},
        offload_folder=tmp_path / "offloaded",
        preload_module_classes=["Borrower"],
    )
    # Torch takes a shorter way where nothing needs a gradient.
    torch.testing.assert_close(found(x), model(x))
    assert other.attention.out_proj.weight.is_meta


@pytest.mark.parametrize(
    ("device_map", "match"),
    [
        ({"blocks": "cpu"}, "no place to 3 tensors"),
        ({"": "gpu0"}, "a place is a device such as"),
        ({"": 1.5}, "a place is a device such as"),
        ("auto", "is for `load_checkpoint_and_dispatch`"),
        ({"": "disk"}, "`offload_folder` is not given"),
    ],
)
def test_maps_that_cannot_be(export: Path, device_map: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load_checkpoint_in_model(empty(), export, device_map)


def test_auto_fills_devices_in_order() -> None:
    model = empty()  # bytes: embedding 264, blocks 168 each, head shared, scale 4
    total = 264 + 4 + 3 * 168
    assert infer_auto_device_map(model, max_memory={"cpu": total}) == {"": "cpu"}
    assert infer_auto_device_map(model, max_memory={"cpu": 4}) == {
        "scale": "cpu",
        "embedding": "disk",
        "blocks": "disk",
        "head": "disk",
    }
    assert infer_auto_device_map(model, max_memory={"cpu": 264 + 4 + 170}) == {
        "scale": "cpu",
        "embedding": "cpu",
        "blocks.0": "cpu",
        "blocks.1": "disk",
        "blocks.2": "disk",
        "head": "cpu",  # tied to the embedding
    }
    whole = infer_auto_device_map(
        model, max_memory={"cpu": 264 + 4 + 170}, no_split_module_classes=["ModuleList"]
    )
    assert whole == {"scale": "cpu", "embedding": "cpu", "blocks": "disk", "head": "cpu"}
    halved = infer_auto_device_map(model, max_memory={"cpu": total // 2}, dtype=torch.float16)
    assert halved == {"": "cpu"}


def test_auto_dispatch(export: Path, tmp_path: Path) -> None:
    model = load_checkpoint_and_dispatch(empty(), export, device_map="auto")
    assert equal(model)
    model = load_checkpoint_and_dispatch(
        empty(), export, "auto", {"cpu": "500B"}, offload_folder=tmp_path / "offloaded"
    )
    assert equal(model)
    assert model.blocks[2].weight.is_meta  # type: ignore[index, union-attr]
    assert not model.embedding.weight.is_meta  # type: ignore[union-attr]


@needs_transformers
def test_a_model_of_transformers_is_dispatched(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    model = gpt2()
    save_model(model, tmp_path / "export")
    with init_empty_weights():
        other: Any = GPT2LMHeadModel(model.config)
    assert all(p.is_meta for p in other.parameters())
    assert other.lm_head.weight is other.transformer.wte.weight
    load_checkpoint_and_dispatch(
        other.eval(),
        tmp_path / "export",
        device_map="auto",
        max_memory={"cpu": "4kB"},
        offload_folder=tmp_path / "offloaded",
        strict=True,
    )
    assert torch.equal(other(TOKENS).logits, model(TOKENS).logits)
    assert {p.is_meta for p in other.parameters()} == {True, False}


def test_empty_weights() -> None:
    with init_empty_weights():
        model = tied()
        assert not torch.ones(2).is_meta
    assert all(p.is_meta and p.requires_grad for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    assert model.head.weight is model.embedding.weight
    with init_empty_weights(include_buffers=True):
        model = tied()
    assert all(t.is_meta for t in model.state_dict().values())
    assert model.mask.is_meta
    with pytest.raises(RuntimeError, match="boom"), init_empty_weights():
        raise RuntimeError("boom")
    assert not any(p.is_meta for p in tied().parameters())


def _load_sharded(rank: int, folder: str) -> bool:
    Processes.start()
    model = tied(1)
    fully_shard(model)
    load_checkpoint_in_model(model, folder, strict=True)
    return equal(model)


def test_a_sharded_model_is_filled(export: Path) -> None:
    assert run_ranks(2, _load_sharded, str(export)) == [True, True]
