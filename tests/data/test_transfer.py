"""Batches on their way to the device (rule 18)."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.data.toys import CPU, Noisy, Place, Stream, loader_of
from trainkit import Accelerator
from trainkit.basics.device import can_pin, default_kind
from trainkit.data import training_loader
from trainkit.data.transfer import transfer_for


def test_on_the_cpu_nothing_is_touched() -> None:
    batches = iter([{"x": torch.arange(3)}])
    transfer = transfer_for(CPU)
    assert transfer.ahead(batches) is batches
    batch = object()
    assert transfer.finish(transfer.start(batch)) is batch


def test_other_devices_get_the_batch_when_it_is_due() -> None:
    moved = transfer_for(torch.device("meta"))
    (batch,) = moved.ahead(iter([{"x": torch.arange(3), "text": ["a"]}]))
    assert batch["x"].device.type == "meta"
    assert batch["text"] == ["a"]


def test_an_error_of_the_fetch_ahead_waits_for_its_turn() -> None:
    def batches() -> Iterator[Any]:
        yield torch.arange(3)
        yield None
        raise ValueError("bad")

    ahead = transfer_for(torch.device("meta")).ahead(batches())
    assert next(ahead).shape == (3,)
    assert next(ahead) is None
    with pytest.raises(ValueError, match="bad"):
        next(ahead)


def keep_busy(cycles: int) -> None:
    """Let the device fall behind the host, where it can."""
    if default_kind() == "cuda":
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pin", [False, True])
def test_an_accelerator_gets_the_same_batches(workers: int, pin: bool) -> None:
    place: Any = Place()
    device = torch.device(default_kind())
    loader = loader_of(Noisy(40), batch_size=3, shuffle=True, num_workers=workers, pin_memory=pin)
    expected = list(training_loader(loader, processes=place, device=CPU, seed=7))
    found = []
    for batch in training_loader(loader, processes=place, device=device, seed=7):
        assert batch.device.type == device.type
        keep_busy(1_000_000)
        found.append(batch * 1)
        del batch
    assert all(torch.equal(a, b.cpu()) for a, b in zip(expected, found, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_a_loop_moves_itself_are_pinned_where_its_loader_says(workers: int) -> None:
    accelerator = Accelerator(device_placement=False)
    if not can_pin(accelerator.device):
        pytest.skip("this accelerator has no pinned memory")
    for pin in (True, False):
        for dataset in (Noisy(8), Stream(8)):
            given = loader_of(dataset, batch_size=4, num_workers=workers, pin_memory=pin)
            loader = accelerator.prepare(given)
            assert loader.device == CPU
            assert {(b.device, b.is_pinned()) for b in loader} == {(CPU, pin)}
    moved = accelerator.prepare_data_loader(loader_of(Noisy(8), batch_size=4), True)
    assert {b.device for b in moved} == {moved.device} == {accelerator.device}


@pytest.mark.gpu
def test_memory_of_a_batch_is_not_reused_while_it_is_read() -> None:
    transfer = transfer_for(torch.device(default_kind()))
    sources = [torch.full((1 << 20,), float(i)) for i in range(20)]
    sums = []
    for batch in transfer.ahead(iter(sources)):
        keep_busy(10_000_000)
        sums.append(batch.sum())
        del batch
    assert [float(s) for s in sums] == [float(i << 20) for i in range(20)]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("kind", ["sparse", "rows of a sparse matrix", "nested"])
def test_tensors_that_are_made_of_others_arrive_too(kind: str) -> None:
    """torch tells a sparse tensor of no stream that reads it."""
    device, dense = torch.device(default_kind()), torch.eye(4)
    if kind == "nested":
        rows = [torch.ones(2), torch.arange(3.0)]
        made = torch.nested.nested_tensor(rows, layout=torch.jagged)
    else:
        made = dense.to_sparse() if kind == "sparse" else dense.to_sparse_csr()
    try:
        made.to(device)
    except (RuntimeError, NotImplementedError):
        pytest.skip(f"this accelerator has no tensors that are {kind}")
    (found,) = transfer_for(device).ahead(iter([{"x": made, "y": dense}]))
    assert (found["x"].device.type, found["x"].layout) == (device.type, made.layout)
    if kind == "nested" or device.type == "cuda":  # others make sparse rows, and read none
        assert torch.equal(found["x"].cpu().values(), made.values())
    assert torch.equal(found["y"].cpu(), dense)


def test_whether_memory_can_be_pinned_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def empty(*size: int, pin_memory: bool) -> None:
        tries.append(*size)
        raise RuntimeError("this machine cannot")

    monkeypatch.setattr(torch, "empty", empty)
    assert [can_pin(torch.device("cuda:7")) for _ in range(3)] == [False] * 3
    assert len(tries) <= 1  # none where another test was told so of this kind
