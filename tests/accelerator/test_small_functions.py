"""The small functions of `accelerate.utils`, beside Accelerate's own."""

import copy
import importlib
import os
import pickle
import warnings
from collections import namedtuple
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import trainkit.accelerate_compat as accelerate
from tests.helpers.needs import late
from trainkit import Accelerator
from trainkit.errors import ConfigError

OURS = accelerate.utils
THEIRS: Any = late("accelerate.utils")
BOTH = [OURS, THEIRS]
Pair = namedtuple("Pair", "a b")

NESTING = {"x": torch.tensor([[1, 2], [3, 4]]), "y": [torch.ones(2, dtype=torch.bfloat16), "text"]}


def test_names_of_files_are_theirs() -> None:
    constants = importlib.import_module("accelerate.utils.constants")
    for name in vars(constants):
        if name.endswith("_NAME") and name in dir(OURS):
            assert getattr(OURS, name) == getattr(constants, name), name
    assert OURS.SAFE_WEIGHTS_INDEX_NAME == constants.SAFE_WEIGHTS_INDEX_NAME


def test_tensors_of_a_module_are_named_as_there() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].register_buffer("scratch", torch.ones(1), persistent=False)
    for options in ({}, {"recurse": True}, {"recurse": True, "include_buffers": False}):
        found = [dict(each.named_module_tensors(model, **options)) for each in BOTH]
        assert [*found[0]] == [*found[1]]
    for options in ({}, {"remove_non_persistent": True}):
        found = [dict(each.named_module_tensors(model[0], **options)) for each in BOTH]
        assert [*found[0]] == [*found[1]]
    OURS.clear_device_cache(garbage_collection=True)


def test_parameters_of_modules_are_found_as_there() -> None:
    theirs = importlib.import_module("accelerate.utils.fsdp_utils").get_parameters_from_modules
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    for modules in (None, [], [model[1]], list(model), r"1\..*", "0|1", "none"):
        ours = OURS.get_parameters_from_modules(modules, model, "cpu")
        assert ours == theirs(modules, model, "cpu")
    OURS.get_parameters_from_modules("0", model, "meta")
    assert [parameter.is_meta for parameter in model.parameters()] == [True, True, False, False]


@pytest.mark.parametrize("include_buffers", [False, True])
def test_modules_are_made_on_a_device_as_there(include_buffers: bool) -> None:
    places = []
    model = nn.Sequential()
    for library in (accelerate, importlib.import_module("accelerate")):
        with library.init_on_device(torch.device("meta"), include_buffers=include_buffers):
            model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            model[0].weight.requires_grad_(False)
        named = (*model.named_parameters(), *model.named_buffers())
        places.append([(name, each.device, each.requires_grad) for name, each in named])
    assert places[0] == places[1]
    with accelerate.init_on_device("meta", include_buffers=include_buffers):
        model[1].weight = model[1].bias
    assert model[1].weight is model[1].bias  # which Accelerate makes anew
    assert nn.Linear(1, 1).weight.device.type == "cpu"


def test_a_class_inside_of_a_module_is_found_by_its_name() -> None:
    theirs = importlib.import_module("accelerate.utils.fsdp_utils").get_module_class_from_name
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    for name in ("Sequential", "Linear", "Conv2d"):
        assert OURS.get_module_class_from_name(model, name) is theirs(model, name)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nestings_are_walked_as_there() -> None:
    ragged = torch.nested.nested_tensor([torch.ones(3), torch.ones(1)])
    assert OURS.listify(NESTING) == THEIRS.listify(NESTING)
    assert OURS.find_batch_size(NESTING) == THEIRS.find_batch_size(NESTING) == 2
    assert OURS.find_batch_size([[torch.ones(3, 1)]]) == 3
    for one in BOTH:
        assert one.honor_type(Pair(1, 2), (x + 1 for x in (1, 2))) == Pair(2, 3)
        doubled = one.recursively_apply(lambda x, by: x * by, {"a": (torch.ones(1), 3)}, 2)
        assert doubled == {"a": (torch.full((1,), 2.0), 3)}
        merged = one.merge_dicts({"a": {"b": 1}, "c": 2}, {"a": {"d": 3}})
        assert merged == {"a": {"b": 1, "d": 3}, "c": 2}
        with pytest.raises(TypeError):
            one.recursively_apply(torch.neg, [1], error_on_other_type=True)
        with pytest.raises(TypeError):
            one.find_batch_size("text")
        with pytest.raises(ValueError, match=r"batch size"):
            one.find_batch_size([])
        assert one.concatenate(["alone"]) == "alone"
        joined = one.concatenate([{"a": [Pair(torch.ones(1, 2), torch.ones(1))]}] * 2)
        assert [part.shape for part in joined["a"][0]] == [(2, 2), (2,)]
        with pytest.raises(TypeError):
            one.concatenate([{"a": torch.ones(1), "b": "text"}] * 2)
        with pytest.raises(RuntimeError):  # and is not filled up
            one.concatenate([torch.ones(1, 2), torch.ones(1, 3)])
        with pytest.warns(UserWarning, match="[Cc]annot pad nested tensors"):
            assert one.pad_across_processes(ragged) is ragged
    for library in (accelerate, importlib.import_module("accelerate")):
        accelerator: Any = library.Accelerator(cpu=True)
        pad = accelerator.pad_across_processes
        alone = accelerator.reduce({"ragged": ragged})["ragged"]
        assert alone.is_nested
        assert torch.equal(alone.to_padded_tensor(0), ragged.to_padded_tensor(0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert pad(ragged) is ragged
            padded = pad({"ragged": ragged, "plain": torch.ones(2)})
        assert padded["ragged"] is ragged
        assert torch.equal(padded["plain"], torch.ones(2))


def test_compiled_modules_and_enumerations_are_as_there() -> None:
    compiled = torch.compile(nn.Linear(1, 1), backend="eager")
    for one in BOTH:
        assert [one.is_compiled_module(each) for each in (compiled, nn.ReLU())] == [True, False]
    with pytest.raises(ValueError, match="swanlab"):
        Accelerator(cpu=True, log_with="swanlab")
    tracked = Accelerator(cpu=True, log_with=[OURS.LoggerType.WANDB])
    assert tracked.log_with == ["wandb"]
    dataclasses = importlib.import_module("accelerate.utils.dataclasses")
    for each in (OURS, dataclasses):
        assert each.LoggerType("wandb") is each.LoggerType.WANDB
        assert each.CustomDtype("int4") is each.CustomDtype.INT4


def test_a_file_of_the_launcher_is_read(tmp_path: Path) -> None:
    config = accelerate.commands.config
    assert str(config.default_config_file).endswith("trainkit/default_config.yaml")
    assert config.config_args.default_yaml_config_file == config.default_config_file
    file = accelerate.utils.write_basic_config(save_location=str(tmp_path / "own.yaml"))
    assert Path(str(file)).is_file()
    read = config.load_config_from_file(str(tmp_path / "own.yaml"))
    assert read.to_dict()["mixed_precision"] == read.mixed_precision == "no"


def test_the_environment_is_read_and_put_back_as_there(monkeypatch: Any) -> None:
    monkeypatch.setenv("KEPT", "1")
    for one in BOTH:
        with suppress(KeyError), one.patch_environment(kept=2, new="x"):
            assert (os.environ["KEPT"], os.environ["NEW"]) == ("2", "x")
            raise KeyError
        assert "NEW" not in os.environ
        with one.clear_environment():
            assert not os.environ
            os.environ["NEW"] = "y"
        assert os.environ["KEPT"] == "1"
        assert "NEW" not in os.environ
        assert [one.str_to_bool(word) for word in ("Yes", "off", "1", "F")] == [1, 0, 1, 0]
        with pytest.raises(ValueError, match="perhaps"):
            one.str_to_bool("perhaps")
        assert one.parse_flag_from_env("KEPT") is True
        assert one.parse_flag_from_env("ABSENT", True) is True
        assert one.parse_choice_from_env("ABSENT") == "no"
        assert one.get_int_from_env(["ABSENT", "KEPT"], 7) == 1
        assert one.get_int_from_env(["ABSENT"], 7) == 7


def test_outputs_become_fp32_and_the_model_is_as_before() -> None:
    half = {"a": (torch.ones(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.int64))}
    for one in BOTH:
        out = one.convert_to_fp32(half)["a"]
        assert [x.dtype for x in out] == [torch.float32, torch.int64]
        model = nn.Linear(2, 2, dtype=torch.bfloat16)
        setattr(model, "forward", one.convert_outputs_to_fp32(model.forward))  # noqa: B010
        assert model(torch.ones(1, 2, dtype=torch.bfloat16)).dtype == torch.float32
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    setattr(model, "forward", OURS.convert_outputs_to_fp32(model.forward))  # noqa: B010
    plain = OURS.extract_model_from_parallel(model, keep_fp32_wrapper=False)
    assert pickle.loads(pickle.dumps(plain))(torch.ones(1, 2).bfloat16()).dtype == torch.bfloat16


def test_an_object_is_saved_with_tied_tensors_once(tmp_path: Path) -> None:
    Accelerator(cpu=True)
    tensor = torch.ones(2)
    for one, name in zip(BOTH, ("ours", "theirs"), strict=True):
        one.save({"a": 1}, tmp_path / f"{name}.pt")
        assert torch.load(tmp_path / f"{name}.pt") == {"a": 1}
    with pytest.warns(UserWarning, match=r"\['b'\] share their memory"):
        OURS.save({"a": tensor, "b": tensor}, tmp_path / "tied", safe_serialization=True)
    assert {*load_file(tmp_path / "tied")} == {"a"}


def _on_two(path: str) -> None:
    accelerator = Accelerator()
    Path(path, f"{accelerator.process_index}-{accelerator.device}").touch()


def test_a_function_is_tried_on_two_processes_of_the_cpu(tmp_path: Path) -> None:
    accelerate.debug_launcher(_on_two, (str(tmp_path),))
    assert {path.name for path in tmp_path.iterdir()} == {"0-cpu", "1-cpu"}


# Models larger than memory.


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.norm(self.first(x)))
        return y


def test_sizes_and_ties_are_found_as_there() -> None:
    model, plain = _Tied(), nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    assert OURS.find_tied_parameters(model) == THEIRS.find_tied_parameters(model)
    for options in ({}, {"dtype": torch.float16}, {"buffers_only": True}):
        sizes = [dict(one.compute_module_sizes(plain, **options)) for one in BOTH]
        assert sizes[0] == sizes[1]
    special: Any = {"special_dtypes": {"0.weight": torch.int8}}
    sizes = [dict(one.compute_module_sizes(plain, **special)) for one in BOTH]
    assert sizes[0] == sizes[1]
    modeling = importlib.import_module("accelerate.utils.modeling")
    for dtype in (torch.float32, torch.bool, torch.bfloat16, torch.int8):
        assert OURS.dtype_byte_size(dtype) == modeling.dtype_byte_size(dtype)
    memory: dict[Any, Any] = {"cpu": "1GB", 0: 100}
    assert OURS.get_max_memory(memory) == THEIRS.get_max_memory(memory)
    assert OURS.get_max_memory()["cpu"] > 0
    memory |= {0: "0GB", "cpu": "10Mb"}
    assert OURS.get_max_memory(memory) == THEIRS.get_max_memory(memory) == {0: 0, "cpu": 1250000}
    for size in (0, 7, "1GiB", "2.5MB", "3Kb", "0KB", "1mib", "1Gib", "2gb"):
        found = OURS.convert_file_size_to_int(size)
        assert found == modeling.convert_file_size_to_int(size)
    for wrong in ("", "x", -1, "1"):
        for function in (OURS.convert_file_size_to_int, modeling.convert_file_size_to_int):
            with pytest.raises(ValueError, match="size"):
                function(wrong)
    places = OURS.infer_auto_device_map(plain, {"cpu": 50}, no_split_module_classes="Linear")
    assert places == {"0": "disk", "1": "disk"} or set(places.values()) <= {"cpu", "disk"}


@pytest.mark.parametrize("low_zero", [False, True])
@pytest.mark.parametrize("unsplit", [None, "TransformerEncoderLayer", ["Linear", "LayerNorm"]])
def test_memory_is_balanced_as_there(low_zero: bool, unsplit: Any) -> None:
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
    model = nn.Sequential(nn.Embedding(50, 8), layers, nn.Linear(8, 50), nn.BatchNorm1d(50))
    for memory in (
        {0: "1GB", 1: "1GB", "cpu": "1GB"}, {0: 5000, 1: 9000, 2: 20000}, {0: "1GB"}, {"cpu": 9},
        {0: 0, 1: 9000, 2: 9000},
    ):  # fmt: skip
        for dtype in (None, torch.float16):
            found, expected = (
                one.get_balanced_memory(model, dict(memory), unsplit, dtype, low_zero=low_zero)
                for one in BOTH
            )
            assert found == expected


def test_what_is_on_disk_is_saved_loaded_and_prepared(tmp_path: Path) -> None:
    model, x = _Tied().eval(), torch.rand(3, 4)
    accelerator = Accelerator(cpu=True)
    spread = accelerate.disk_offload(copy.deepcopy(model), tmp_path)
    state = accelerator.get_state_dict(spread)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    for safe, folder in ((True, tmp_path / "safe"), (False, tmp_path / "pickled")):
        accelerator.save_model(spread, folder, safe_serialization=safe)
        read = _Tied().eval()
        accelerate.load_checkpoint_in_model(read, folder)
        assert torch.equal(read(x), model(x))
    assert accelerator.prepare(spread) is spread
    assert torch.equal(spread(x), model(x))
    with pytest.raises(ConfigError, match="Load the model without `device_map`"):
        accelerator.prepare(torch.optim.SGD(spread.parameters()))
    other = _Tied().eval()
    accelerator.save_model(other, tmp_path / "other")
    accelerate.load_checkpoint_in_model(spread, tmp_path / "other")
    assert torch.equal(spread(x), other(x))
    setattr(spread, "is_loaded_in_8bit", True)  # noqa: B010
    with pytest.raises(ConfigError, match="CPU or disk offload"):
        Accelerator(cpu=True).prepare(spread)


def test_a_model_in_memory_is_spread_and_computes_the_same(tmp_path: Path) -> None:
    model, x = _Tied().eval(), torch.rand(3, 4)
    expected = model(x)
    on_disk = accelerate.disk_offload(copy.deepcopy(model), tmp_path)
    assert on_disk.first.weight.is_meta
    assert torch.equal(on_disk(x), expected)
    assert on_disk.hf_device_map == {"": "disk"}
    places = {"first": "cpu", "last": "cpu", "norm": "disk"}
    parted = accelerate.dispatch_model(copy.deepcopy(model), places, offload_dir=tmp_path)
    assert parted.norm.weight.is_meta
    assert not parted.first.weight.is_meta
    assert torch.equal(parted(x), expected)
    assert Accelerator(cpu=True).verify_device_map(parted)
    assert torch.equal(accelerate.cpu_offload(copy.deepcopy(model))(x), expected)
    other = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    empty = accelerate.dispatch_model(copy.deepcopy(model), "cpu", state_dict=other)
    assert not empty.first.weight.any()
    with pytest.raises(ConfigError, match="`offload_folder` is not given"):
        accelerate.dispatch_model(copy.deepcopy(model), "disk")


def test_models_take_turns_on_the_device() -> None:
    first, second, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.rand(3, 4)
    expected = second(first(x))
    first, hook = accelerate.cpu_offload_with_hook(first)
    second, last = accelerate.cpu_offload_with_hook(second, prev_module_hook=hook)
    assert isinstance(last, accelerate.hooks.UserCpuOffloadHook)
    assert torch.equal(second(first(x)), expected)
    last.offload()
    last.remove()
    hook.remove()
    assert torch.equal(second(first(x)), expected)
