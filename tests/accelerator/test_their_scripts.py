"""The scripts by which Accelerate tests itself, function by function, under trainkit.

They are those that the installed package carries, with nothing changed but the import. `CASES` is
what is run, on one and two processes; `DIFFERENT` what trainkit does otherwise, and what it says;
`LEFT_OUT` what is not run, and why. A function that is in none of them fails the test.
"""

import ast
import importlib.util
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, default_collate

from tests.accelerator import regression
from tests.accelerator.behaviours import start_apart
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few

_SPEC = importlib.util.find_spec("accelerate")
_PLACES = (_SPEC.submodule_search_locations if _SPEC else None) or [""]
SCRIPTS = Path(next(iter(_PLACES))) / "test_utils" / "scripts"
pytestmark = pytest.mark.skipif(not SCRIPTS.is_dir(), reason="Accelerate is not installed")

SEVERAL = (2,)
ALL = (1, 2)
FLAGS = (False, True)


def _with_accelerator(name: str) -> Callable[[Any], Any]:
    return lambda script: getattr(script, name)(script.Accelerator())


def _with(name: str, **options: Any) -> Callable[[Any], Any]:
    return lambda script: getattr(script, name)(**options)


def _with_state(name: str) -> Callable[[Any], Any]:
    return lambda script: getattr(script, name)(script.PartialState())


def _whole_windows(name: str, **options: bool) -> Callable[[Any], Any]:
    """Call it with so much data that every window is full."""

    def call(script: Any) -> None:
        function = getattr(script, name)
        names, given = function.__globals__, script.RegressionDataset
        names["RegressionDataset"] = lambda length: given(length=64)
        try:
            function(**options)
        finally:
            names["RegressionDataset"] = given

    return call


def _data_loader(kind: str) -> Callable[[Any], Any]:
    def call(script: Any) -> None:
        data = script.DummyDataset()
        sampler = BatchSampler(RandomSampler(data), batch_size=4, drop_last=False)
        kinds: dict[str, dict[str, Any]] = {
            "in order": {"batch_size": 4},
            "shuffled": {"batch_size": 4, "shuffle": True},
            "batch sampler": {"batch_sampler": sampler},
            "whole batches": {
                "sampler": sampler,
                "batch_size": None,
                "collate_fn": default_collate,
            },
        }
        script.test_data_loader(DataLoader(data, **kinds[kind]), script.create_accelerator())

    return call


def _metrics(length: int, **options: bool) -> Callable[[Any], Any]:
    def call(script: Any) -> None:
        config = script.DataLoaderConfiguration(**options)
        script.test_torch_metrics(script.Accelerator(dataloader_config=config), length)

    return call


def _dataset(script: Any) -> None:
    from datasets import Dataset

    script.test_split_between_processes_dataset(Dataset)


# By script: what is called, how it is called, and on how many processes.
CASES: dict[str, dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]]] = {
    "test_sync": {
        "test_dataloader_break": (_with("test_dataloader_break"), ALL),
        "test_noop_sync": (_with_accelerator("test_noop_sync"), (1,)),
        "test_distributed_sync": (_with_accelerator("test_distributed_sync"), SEVERAL),
        "test_distributed_sync_multiple_fwd": (
            _with_accelerator("test_distributed_sync_multiple_fwd"),
            SEVERAL,
        ),
        **{
            f"{name}{how}({split}, {dispatch}, {each})": (
                make(name, split_batches=split, dispatch_batches=dispatch, sync_each_batch=each),
                SEVERAL,
            )
            for name in (
                "test_gradient_accumulation",
                "test_gradient_accumulation_with_opt_and_scheduler",
            )
            for how, make in (("", _with), (" in whole windows", _whole_windows))
            for split in FLAGS
            for dispatch in FLAGS
            for each in FLAGS
        },
    },
    "test_ops": {
        name: (_with_state(name), ALL)
        for name in (
            "test_gather",
            "test_gather_object",
            "test_gather_non_contiguous",
            "test_broadcast",
            "test_pad_across_processes",
            "test_reduce_sum",
            "test_reduce_mean",
            "test_reduce_max",
            "test_copy_tensor_to_devices",
        )
    },
    "test_script": {
        **{
            name: (_with(name), ALL)
            for name in (
                "init_state_check",
                "process_execution_check",
                "test_split_between_processes_list",
                "test_split_between_processes_nested_dict",
                "test_split_between_processes_tensor",
                "test_split_between_processes_evenly",
                "rng_sync_check",
                "dl_preparation_check",
                "central_dl_preparation_check",
                "custom_sampler_check",
                "check_seedable_sampler",
                "check_seedable_sampler_with_data_seed",
                "test_trigger",
            )
        },
        "test_split_between_processes_dataset": (_dataset, ALL),
        "check_seedable_sampler_in_batch_sampler_shard": (
            _with("check_seedable_sampler_in_batch_sampler_shard"),
            SEVERAL,
        ),
        "training_check(False)": (_with("training_check", use_seedable_sampler=False), ALL),
        "training_check(True)": (_with("training_check", use_seedable_sampler=True), ALL),
    },
    "test_distributed_data_loop": {
        **{
            name: (_with(name), SEVERAL)
            for name in (
                "test_default_ensures_even_batch_sizes",
                "test_can_disable_even_batches",
                "test_can_join_uneven_inputs",
                "test_join_can_override_even_batches",
                "test_join_can_override_for_mixed_type_dataloaders",
                "test_join_raises_warning_for_iterable_when_overriding_even_batches",
                "test_pickle_accelerator",
            )
        },
        **{
            f"test_data_loader({kind})": (_data_loader(kind), SEVERAL)
            for kind in ("in order", "shuffled", "batch sampler", "whole batches")
        },
        "test_stateful_dataloader": (_with_accelerator("test_stateful_dataloader"), SEVERAL),
    },
    "external_deps/test_metrics": {
        **{
            f"test_torch_metrics({split}, {dispatch})": (
                _metrics(99, split_batches=split, dispatch_batches=dispatch),
                ALL,
            )
            for split in FLAGS
            for dispatch in FLAGS
        },
        "test_torch_metrics(512)": (_metrics(512), ALL),
        "test_gather_for_metrics_drop_last": (_with("test_gather_for_metrics_drop_last"), ALL),
    },
}

# Names begin so: a part of what is said, and why it is otherwise.
DIFFERENT: dict[str, tuple[str, str]] = {
    "test_sync.test_gradient_accumulation(": (
        "Gradients not in sync when they should be",
        "the last window of an epoch counts as every other one; whole windows pass",
    ),
    "test_sync.test_gradient_accumulation_with_opt_and_scheduler(": (
        "Gradients not in sync when they should be",
        "as above",
    ),
    "test_script.check_seedable_sampler_in_batch_sampler_shard": (
        "has no attribute 'batch_sampler'",
        "the batch sampler of a prepared loader is the user's own",
    ),
    **dict.fromkeys(
        (
            "test_distributed_data_loop.test_join_can_override_even_batches",
            "test_distributed_data_loop.test_join_can_override_for_mixed_type_dataloaders",
        ),
        ("Error", "`even_batches` stands at the loader: the sampler is the user's own"),
    ),
}

LEFT_OUT = {
    "test_cli": "starts the command line of Accelerate",
    "test_merge_weights": "merges shards of FSDP's own files, which trainkit does not write",
    "test_notebook": "`tests/accelerator/test_notebook.py` does the same",
    "test_ddp_comm_hook": "its reference needs GPUs; `communication_hooks` in "
    "`further_behaviours.py` compares the hooks on CPUs",
    "test_checkpointing": "downloads a model; `image_classification` of `accelerate_scripts`",
    "test_performance": "downloads a model; `text_classification` of `accelerate_scripts`",
    "test_peak_memory_usage": "downloads a model, and measures GPUs",
    "test_ds_alst_ulysses_sp": "DeepSpeed",
    "test_ds_multiple_model": "DeepSpeed",
    "test_zero3_integration": "DeepSpeed",
    "test_pippy": "pipelines of GPUs",
    "test_metrics.test_mrpc": "downloads a model",
    "test_metrics.test_gather_for_metrics_with_iterable_dataset": "reads Accelerate's logger, "
    "and asks for the class of its loader",
    "test_metrics.test_gather_for_metrics_with_non_tensor_objects_iterable_dataset": "as above",
    "test_ops.test_op_checker": "`state.debug`; with it each process of Accelerate raises where "
    "shapes differ",
    "test_script.test_reinstantiated_state": "`_reset_state` leaves an `Accelerator` as it is",
    "test_distributed_data_loop.test_stateful_dataloader_save_state": "gives each process a folder "
    "of its own; with one of all it passes, and `test_states.py` shows the same resumes",
    "test_distributed_data_loop.test_join_raises_warning_for_non_ddp_distributed": "sets the "
    "kind of job by hand",
    "test_sync.check_model_parameters": "is called by others",
}


class _Absent:
    """Stands for a name that trainkit does not have, until something is done with it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NameError(f"{self._name} is not there")

    def __getattr__(self, name: str) -> Any:
        raise NameError(f"{self._name}.{name} is not there")


def load(path: Path) -> SimpleNamespace:
    """Return what a script defines, with Accelerate's names from trainkit."""
    tree = ast.parse(path.read_text())
    namespace: dict[str, Any] = {"__name__": path.stem}
    kept = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "accelerate":
            place = (node.module or "").replace("accelerate", "trainkit.accelerate_compat", 1)
            for alias in node.names:
                namespace[alias.asname or alias.name] = _imported(place, alias.name)
        elif not _is_heavy(node):
            kept.append(node)
    exec(compile(ast.Module(kept, []), str(path), "exec"), namespace)
    return SimpleNamespace(**namespace)


def _imported(place: str, name: str) -> Any:
    if name in regression.__all__:  # what only these scripts use, trainkit does not have
        return getattr(regression, name)
    found: dict[str, Any] = {}
    try:
        exec(f"from {place} import {name}", found)
    except ImportError:
        return _Absent(name)
    return found[name]


def _is_heavy(node: ast.stmt) -> bool:
    """Return whether a statement imports what takes seconds, for what is left out here."""
    heavy = {"datasets", "evaluate", "transformers"}
    if isinstance(node, ast.Import):
        return any(alias.name in heavy for alias in node.names)
    return isinstance(node, ast.ImportFrom) and node.module in heavy


def _run(rank: int, folder: Path) -> dict[str, str]:
    """Return what each case comes to on this process."""
    warnings.simplefilter("ignore")
    start_apart(rank)
    os.chdir(folder)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    outcomes = {}
    for name, cases in CASES.items():
        script = load(SCRIPTS / f"{name}.py")
        for case, (call, sizes) in cases.items():
            if size not in sizes:
                continue
            try:
                call(script)
                outcomes[f"{script.__name__}.{case}"] = "passes"
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                outcomes[f"{script.__name__}.{case}"] = text
    return outcomes


@pytest.mark.parametrize("size", with_few([1], ALL))
def test_their_scripts_pass_or_differ_as_is_said(size: int, tmp_path: Path) -> None:
    pytest.importorskip("trainkit.accelerate_compat")
    wrong = []
    for outcomes in run_ranks(size, _run, tmp_path):
        for case, outcome in outcomes.items():
            words = [said for name, (said, _) in DIFFERENT.items() if case.startswith(name)]
            expected = words[0] if words else "passes"
            if expected not in outcome:
                wrong.append(f"{case}: {outcome[:300]}")
    assert not wrong, "\n".join(wrong)


def test_every_function_of_theirs_is_in_a_table() -> None:
    missing = []
    for path in sorted(SCRIPTS.rglob("test_*.py")):
        run = CASES.get(path.relative_to(SCRIPTS).with_suffix("").as_posix(), {})
        known = {f"{path.stem}.{case.split('(')[0]}" for case in run} | set(LEFT_OUT)
        for node in ast.parse(path.read_text()).body:
            name = getattr(node, "name", "_")
            is_test = isinstance(node, ast.FunctionDef) and ("test" in name or "check" in name)
            if is_test and name[0] != "_" and not {path.stem, f"{path.stem}.{name}"} & known:
                missing.append(f"{path.stem}.{name}")
    assert not missing
