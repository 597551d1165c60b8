"""What `save_model` writes, and that it never leaves half of it under a final name."""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from tests.export.toys import TOKENS, Tied, gpt2, read_export, tied
from tests.helpers.needs import needs_transformers
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from trainkit.checkpoint.io import files
from trainkit.distributed import Processes
from trainkit.errors import CheckpointError, ConfigError
from trainkit.export import load_checkpoint_in_model, save_model
from trainkit.export.layout import parse_size


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500MB", 5 * 10**8), ("1GiB", 2**30), ("1.5 kb", 1500), (7, 7)],
)
def test_sizes(text: Any, size: int) -> None:
    assert parse_size(text, "max_shard_size") == size


@pytest.mark.parametrize("text", ["", "5", "GB", "-1GB", "5XB", "0GB", 0, -3, True, None, 2.5])
def test_what_is_no_size_is_told(text: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='`max_shard_size` must be a size such as "5GB"'):
        save_model(tied(), tmp_path / "m", max_shard_size=text)
    assert not (tmp_path / "m").exists()


def test_one_file_holds_each_tensor_once(tmp_path: Path) -> None:
    model = tied()
    save_model(model, tmp_path / "a" / "m")
    assert names(tmp_path / "a" / "m") == ["model.safetensors"]
    found = read_export(tmp_path / "a" / "m")
    expected = model.state_dict()
    del expected["head.weight"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_wrappers_leave_no_trace(tmp_path: Path) -> None:
    model = tied()
    save_model(model, tmp_path / "plain")
    wrapped = tied()
    wrapped.blocks[1] = checkpoint_wrapper(wrapped.blocks[1])
    wrapped.blocks[2] = torch.compile(wrapped.blocks[2], backend="eager")  # type: ignore[assignment]
    compiled: Any = torch.compile(wrapped, backend="eager")
    save_model(nn.DataParallel(compiled), tmp_path / "wrapped")
    plain, found = read_export(tmp_path / "plain"), read_export(tmp_path / "wrapped")
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_a_module_called_module_keeps_its_name(tmp_path: Path) -> None:
    save_model(nn.ModuleDict({"module": nn.Linear(2, 2)}), tmp_path)
    assert set(read_export(tmp_path)) == {"module.weight", "module.bias"}


@pytest.mark.parametrize("limit", [400, 600, "1kB", "2KB"])
def test_files_stay_below_the_limit(tmp_path: Path, limit: Any) -> None:
    model = nn.Sequential(*(nn.Linear(5, 5, bias=i % 2 == 0) for i in range(12)))
    model[3].half()
    save_model(model, tmp_path, max_shard_size=limit)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    for number, path in enumerate(shards, 1):
        assert path.name == f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        assert path.stat().st_size <= parse_size(limit, "")
    found, expected = read_export(tmp_path), model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_tensor_above_the_limit_has_a_file_of_its_own(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="`1.weight` alone has 40000 bytes"):
        save_model(
            nn.Sequential(nn.Linear(3, 3), nn.Linear(100, 100), nn.Linear(3, 3)),
            tmp_path,
            max_shard_size="1kB",
        )
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("*.safetensors"))]
    assert sorted(sizes)[-2] <= 1000 < sorted(sizes)[-1]
    assert len(read_export(tmp_path)) == 6


def test_torch_files_on_request(tmp_path: Path) -> None:
    save_model(tied(), tmp_path, safe_serialization=False)
    assert names(tmp_path) == ["pytorch_model.bin"]
    save_model(tied(), tmp_path, safe_serialization=False, max_shard_size="4kB")
    assert "pytorch_model.bin.index.json" in names(tmp_path)
    assert "pytorch_model.bin" not in names(tmp_path)
    other = tied(1)
    load_checkpoint_in_model(other, tmp_path, strict=True)
    assert torch.equal(other(TOKENS), tied()(TOKENS))


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("odd", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ConfigError, match=r"`odd` is a tensor of dtype torch\.complex128"):
        save_model(model, tmp_path / "m")
    with pytest.raises(ConfigError, match="`weight`, `bias` of the model have no values"):
        save_model(nn.Linear(2, 2, device="meta"), tmp_path / "m")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        save_model(nn.Linear(2, 2), tmp_path / "file")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a checkpoint, which an export would break"):
        save_model(nn.Linear(2, 2), tmp_path / "c")
    assert names(tmp_path / "c") == ["manifest.json"]


def test_a_failure_leaves_the_earlier_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tied(), tmp_path)

    def full(descriptor: int, data: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_model(tied(1), tmp_path)
    assert names(tmp_path) == ["model.safetensors"]
    assert torch.equal(read_export(tmp_path)["scale"], torch.tensor(2.0))


# The sizes of an earlier and a later export: one file, or the same or other numbers of files.
CHANGES = [("5GB", "5GB"), ("5GB", "700B"), ("700B", "5GB"), ("700B", "700B"), ("700B", "400B")]


@pytest.mark.parametrize(("before", "after"), with_few(CHANGES[2:3], CHANGES))
def test_a_crash_at_any_moment_mixes_nothing(tmp_path: Path, before: str, after: str) -> None:
    def export(folder: Path, value: float, size: str) -> None:
        model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(6)))
        for parameter in model.parameters():
            nn.init.constant_(parameter, value)
        save_model(model, folder, max_shard_size=size)

    outcomes = []
    for moment in range(1000):
        folder = tmp_path / str(moment)
        export(folder, 1.0, before)
        crashed = _crashing(moment, lambda folder=folder: export(folder, 2.0, after))
        outcomes.append(_values_in(folder))
        export(folder, 3.0, after)  # nothing that was left is in the way
        assert _values_in(folder) == {3.0}
        assert not [name for name in names(folder) if name.startswith(".")]
        if not crashed:
            break
    assert set(map(tuple, outcomes)) <= {(1.0,), (2.0,), ()}
    assert outcomes[0] == {1.0}
    assert outcomes[-1] == {2.0}
    switches = sum(one != two for one, two in pairwise(outcomes))
    assert switches == (2 if before == after == "700B" else 1), outcomes


def _crashing(moment: int, action: Any) -> bool:
    """Run `action` in a fork that dies before its file operation number `moment`."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] != 0
    count = 0

    def counted(real: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal count
            if count == moment:
                os._exit(1)
            count += 1
            return real(*args)

        return call

    for name in ("rename", "remove_tree", "remove_directory", "sync_directory", "write_file"):
        setattr(files, name, counted(getattr(files, name)))
    action()
    os._exit(0)


def _values_in(folder: Path) -> set[float]:
    """Return the values that a reader finds: none where there is no entry."""
    if not {"model.safetensors", "model.safetensors.index.json"} & set(names(folder)):
        return set()
    if (folder / "model.safetensors").exists():  # what `from_pretrained` looks for first
        from safetensors.torch import load_file

        found = load_file(folder / "model.safetensors")
    else:
        found = read_export(folder)
    assert len(found) == 12
    return {float(value) for tensor in found.values() for value in tensor.flatten()}


@needs_transformers
def test_a_model_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModel, AutoModelForCausalLM, BertConfig, BertForMaskedLM

    model = gpt2()
    for limit in ("5GB", "2kB"):
        save_model(model, tmp_path / limit, max_shard_size=limit)
        assert {"config.json", "generation_config.json"} <= set(names(tmp_path / limit))
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / limit)
        assert type(loaded).__name__ == "GPT2LMHeadModel"
        assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
        inner = AutoModel.from_pretrained(tmp_path / limit)
        hidden = model.transformer(TOKENS).last_hidden_state
        assert torch.equal(inner(TOKENS).last_hidden_state, hidden)
    config = BertConfig(
        vocab_size=17,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
    )
    bert: Any = BertForMaskedLM(config)
    bert.eval()
    save_model(bert, tmp_path / "bert")
    again = BertForMaskedLM.from_pretrained(tmp_path / "bert")
    assert torch.equal(again(TOKENS).logits, bert(TOKENS).logits)


def _sharded(rank: int, folder: str, make: Any, blocks: Any, **options: Any) -> list[str]:
    processes = Processes.start()
    model = make()
    for block in blocks(model):
        fully_shard(block)
    fully_shard(model)
    with torch.no_grad():
        model(TOKENS)  # some shards may now be whole
    save_model(model, folder, processes=processes, **options)
    return sorted(os.listdir(folder)) if rank == 0 else []


def _blocks_of_gpt2(model: Any) -> Any:
    return list(model.transformer.h)


def _blocks_of_tied(model: Tied) -> Any:
    return list(model.blocks)


@pytest.mark.e2e
@needs_transformers
def test_a_sharded_model_of_transformers_loads_with_equal_logits(tmp_path: Path) -> None:
    from transformers import AutoModel, AutoModelForCausalLM

    run_ranks(2, _sharded, str(tmp_path), gpt2, _blocks_of_gpt2, max_shard_size="2kB")
    assert all(path.stat().st_size <= 2000 for path in tmp_path.glob("*.safetensors"))
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert '"GPT2LMHeadModel"' in (tmp_path / "config.json").read_text()
    model = gpt2()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    inner = AutoModel.from_pretrained(tmp_path)
    hidden = model.transformer(TOKENS).last_hidden_state
    assert torch.equal(inner(TOKENS).last_hidden_state, hidden)


@pytest.mark.e2e
@pytest.mark.parametrize("safe", [True, False])
def test_a_sharded_model_is_written_as_an_unsharded_one(tmp_path: Path, safe: bool) -> None:
    options: Any = {"max_shard_size": "700B" if safe else "4kB", "safe_serialization": safe}
    save_model(tied(), tmp_path / "plain", **options)
    run_ranks(3, _sharded, str(tmp_path / "sharded"), tied, _blocks_of_tied, **options)
    assert names(tmp_path / "plain") == names(tmp_path / "sharded")
    for name in names(tmp_path / "plain"):
        if safe:
            contents = [(tmp_path / kind / name).read_bytes() for kind in ("plain", "sharded")]
            assert contents[0] == contents[1]
    other = tied(1)
    load_checkpoint_in_model(other, tmp_path / "sharded", strict=True)
    assert torch.equal(other(TOKENS), tied()(TOKENS))


def _full_disk(rank: int, folder: str) -> str:
    processes = Processes.start()
    model = tied()
    fully_shard(model)
    real, left = files.write, [3]

    def write(descriptor: int, data: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        real(descriptor, data)

    files.write = write
    try:
        save_model(model, folder, processes=processes, max_shard_size="700B")
    except CheckpointError as error:
        return str(error)
    finally:
        files.write = real
    return ""


def test_all_processes_learn_of_a_full_disk(tmp_path: Path) -> None:
    told = run_ranks(2, _full_disk, str(tmp_path / "m"))
    assert all("No space left on device" in text for text in told)
    assert names(tmp_path / "m") == []


def _ddp(rank: int, folder: str) -> None:
    processes = Processes.start()
    model = nn.parallel.DistributedDataParallel(tied())
    save_model(model, folder, processes=processes)


def test_a_replicated_model_is_written_by_process_0(tmp_path: Path) -> None:
    run_ranks(2, _ddp, str(tmp_path / "ddp"))
    save_model(tied(), tmp_path / "plain")
    contents = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("ddp", "plain")]
    assert contents[0] == contents[1]
