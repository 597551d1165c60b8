"""`import trainkit.accelerate_compat as accelerate`: modules and names, and what is not there."""

import copy
import importlib
import os
import pickle
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainkit.accelerate_compat as accelerate
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import ROOT, run_program
from trainkit import Accelerator, PartialState
from trainkit.accelerate_compat import names
from trainkit.errors import ConfigError, DistributedError

REFUSED = [name for text in names.REFUSED.values() for name in text.split()]

SCRIPT = """
import accelerate
from accelerate import Accelerator, DistributedType
from accelerate.utils import set_seed
import helper

assert accelerate.__version__ >= "0.16.0"
accelerator = Accelerator(cpu=True)
if accelerator.distributed_type == DistributedType.XLA:
    raise SystemExit("on a TPU?")
set_seed(0)
print(type(accelerator).__module__, helper.LOGGER, __file__, __name__, __import__("sys").argv[1:])
"""


@pytest.mark.parametrize("name", sorted(names.MODULES))
def test_the_modules_of_accelerate_are_there(name: str) -> None:
    module = importlib.import_module(f"trainkit.accelerate_compat.{name}")
    assert module.set_seed is names.find("set_seed")
    package, _, last = f"trainkit.accelerate_compat.{name}".rpartition(".")
    if last != "tqdm":  # a function, there as well
        assert getattr(importlib.import_module(package), last) is module


def test_every_name_is_found() -> None:
    for name in names.known():
        value = getattr(accelerate.utils, name)
        assert value is not None
        assert isinstance(value, str | list | int) or value.__doc__, name


@pytest.mark.parametrize("module", ["", ".utils"])
def test_a_star_that_would_import_nothing_is_refused(module: str) -> None:
    with pytest.raises(ImportError, match="would import nothing"):
        exec(f"from trainkit.accelerate_compat{module} import *")


def test_every_name_is_one_of_accelerate() -> None:
    pytest.importorskip("accelerate.utils")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        where = names.MODULES - {"utils.rich"}  # which needs another package
        modules = [importlib.import_module(f"accelerate.{name}") for name in sorted(where)]
        modules.append(importlib.import_module("accelerate"))
    invented = [
        name
        for name in names.known()
        if name not in names.PUBLIC and not any(hasattr(module, name) for module in modules)
    ]
    # DeepSpeed and Megatron-LM give some of theirs only where they are installed.
    assert not [name for name in invented if "DeepSpeed" not in name and "Megatron" not in name]


@pytest.mark.parametrize("name", REFUSED)
def test_every_refused_name_can_be_imported_and_says_what_to_do(name: str) -> None:
    thing = getattr(accelerate, name)
    if name in names.PUBLIC:
        pytest.skip("it has come")
    assert thing is getattr(accelerate.utils, name)
    assert not isinstance(3, thing)
    with pytest.raises(ConfigError, match=rf"`{name}` cannot be used: .* `?\w+"):
        thing(model=1)
    with pytest.raises(AttributeError, match=f"`{name}` cannot be used"):
        _ = thing.MEMBER


@pytest.mark.parametrize(
    "line",
    [
        "from trainkit.accelerate_compat.utils import set_sed",
        "from trainkit.accelerate_compat import set_sed",
        "import trainkit.accelerate_compat.set_sed",
        "import trainkit.accelerate_compat as accelerate; accelerate.utils.set_sed",
    ],
)
def test_a_name_that_is_not_there_names_the_nearest(line: str) -> None:
    with pytest.raises((ImportError, AttributeError), match=r"set_sed` is not .* `set_seed`\?"):
        exec(line, {})


def test_a_name_that_is_not_there_can_be_asked_for() -> None:
    assert not hasattr(accelerate, "Foo")
    assert not hasattr(accelerate.utils, "Foo")
    assert "Accelerator" in dir(accelerate)
    assert "set_seed" in dir(accelerate.utils)


def test_what_is_available_is_what_accelerate_finds() -> None:
    theirs = pytest.importorskip("accelerate.utils.imports")
    known = [name for name in names.known() if name.endswith("_available")]
    ours = {name: bool(getattr(accelerate.utils, name)()) for name in known}
    # It needs a variable besides, and what trainkit does not drive is not available to it.
    for name in ("is_rich_available", "is_fp8_available", "is_pippy_available"):
        del ours[name]
    assert ours == {name: bool(getattr(theirs, name)()) for name in ours}
    assert accelerate.utils.is_torch_version(">=", "2.0")
    assert not accelerate.utils.compare_versions("torch", "<", "2.0")
    with pytest.raises(ConfigError, match="must be one of <, <=, ==, !=, >=, >"):
        accelerate.utils.is_torch_version("~", "2.0")


def test_wrong_arguments_are_named() -> None:
    utils, model = accelerate.utils, nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    with pytest.raises(ConfigError, match="`main_process_only=True` by name"):
        utils.tqdm(True, [1])
    with pytest.raises(ConfigError, match=r"has no parameter or buffer `0\.wait`"):
        utils.set_module_tensor_to_device(model, "0.wait", "cpu")
    with pytest.raises(ConfigError, match=r"`value` has the shape \(1,\)"):
        utils.set_module_tensor_to_device(model, "0.bias", "cpu", torch.ones(1))


# States.


def test_the_newest_accelerator_is_meant() -> None:
    state = accelerate.state
    state.AcceleratorState._reset_state()
    state.GradientState._reset_state()
    assert not state.is_initialized()
    assert state.GradientState().sync_gradients
    with pytest.raises(ConfigError, match="Make one first, or use `PartialState"):
        state.AcceleratorState()
    first = Accelerator(cpu=True)
    second = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3)
    assert state.is_initialized()
    assert state.AcceleratorState() is second.state
    assert state.GradientState() is second.gradient_state
    assert state.GradientState().num_steps == 3
    state.AcceleratorState._reset_state()
    assert (first.state.mixed_precision, second.state.mixed_precision) == ("no", "bf16")


class _Outputs(dict[str, torch.Tensor]):
    def __getattr__(self, name: str) -> torch.Tensor:
        return self[name]  # a KeyError for what it has not, as in many scripts


class _Answering(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return _Outputs(logits=super().forward(x))


def test_outputs_whose_keys_are_attributes_come_in_fp32() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    outputs = accelerator.prepare(_Answering(2, 2))(torch.rand(3, 2))
    assert type(outputs) is _Outputs
    assert outputs.logits.dtype == torch.float32


def test_autocast_can_be_switched_off() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.native_amp = False
    model = accelerator.prepare(nn.Linear(2, 2))
    x = torch.rand(3, 2)
    assert torch.equal(model(x), nn.functional.linear(x, model.weight, model.bias))
    with accelerator.autocast():
        assert (x @ x.T).dtype == torch.float32


def _asked(rank: int) -> Any:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    sent = [pickle.dumps(each) for each in (accelerator, PartialState())]
    assert sent == [pickle.dumps(each) for each in (accelerator, PartialState())]
    assert pickle.loads(sent[0]) is accelerator.state
    assert copy.deepcopy(accelerator) is accelerator
    child = os.fork()  # as a worker of `datasets` is
    if child == 0:
        try:
            there, small = (pickle.loads(each) for each in sent)
            _ask(there, small, str(accelerator.state), str(PartialState()), rank)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _ask(there: Any, small: Any, text: str, small_text: str, rank: int) -> None:
    with pytest.raises(DistributedError, match="a copy of what another process made"):
        there.gather(torch.ones(1))
    with pytest.raises(DistributedError, match="a copy"):
        small.wait_for_everyone()
    with there.split_between_processes([1, 2, 3]) as part:
        assert part == [[1, 2], [3]][rank]
    assert (there.num_processes, there.process_index, there.mixed_precision) == (2, rank, "bf16")
    assert (str(there.state), str(small)) == (text, small_text)


def test_a_pickled_accelerator_can_be_asked_and_is_no_member() -> None:
    assert run_ranks(2, _asked) == [0, 0]


def test_arguments_for_what_is_not_driven_must_be_none() -> None:
    Accelerator(cpu=True, deepspeed_plugin=None, parallelism_config=None, megatron_lm_plugin=None)
    with pytest.raises(ConfigError, match="`deepspeed_plugin` is a `dict`, but must be a"):
        Accelerator(cpu=True, deepspeed_plugin={"a": 1})
    with pytest.raises(ConfigError, match="`megatron_lm_plugin` must be None"):
        Accelerator(cpu=True, megatron_lm_plugin=1)  # type: ignore[arg-type]


# Scripts as they are.


@pytest.mark.e2e
@pytest.mark.usefixtures("warm_programs")
def test_a_script_runs_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "helper.py").write_text(
        "from accelerate.logging import get_logger\nLOGGER = type(get_logger('x')).__module__\n"
    )
    said = run_program("-m", "trainkit.accelerate_compat", str(script), "--lr", "1").strip()
    expected = f"trainkit.accelerator.accelerator trainkit.accelerator.logging {script} __main__ "
    assert said == f"{expected}['--lr', '1']"
    assert script.read_text() == SCRIPT
    script.write_text("from accelerate import (\n")
    for arguments, told in (
        ([str(script)], f'File "{script}", line 1'),
        ([str(tmp_path / "none.py")], "there is no script"),
        ([], "usage: "),
    ):
        ended = subprocess.run(
            [sys.executable, "-m", "trainkit.accelerate_compat", *arguments],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ended.returncode == 1
        assert told in ended.stderr
