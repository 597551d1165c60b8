"""`save_state` and `load_state`: when, where, and which processes (rules 22, 28)."""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.hooks import RemovableHandle

from trainkit.accelerator.state_contents import StateContents, part_name
from trainkit.accelerator.state_directory import StateDirectory
from trainkit.accelerator.zero_loop import LoopDeepSpeed
from trainkit.checkpoint.checkpoint import open_share
from trainkit.checkpoint.training_state import versions
from trainkit.distributed import (
    Processes,
    check_called_by_all,
    only_this_process,
    run_on_all,
    run_on_all_or_main,
)
from trainkit.errors import ConfigError
from trainkit.storage.machines import on_this_machine
from trainkit.types import Stateful

Hook = Callable[..., Any]


class StateSaver:
    """Saves and loads all that was prepared and registered."""

    def __init__(self, contents: StateContents, directory: StateDirectory) -> None:
        self._contents = contents
        self._directory = directory
        self._processes = contents.processes
        self._before_save: OrderedDict[int, Hook] = OrderedDict()
        self._before_load: OrderedDict[int, Hook] = OrderedDict()
        self._has_warned = False

    def register(self, objects: Sequence[Any]) -> None:
        """Save and load more objects with every state."""
        wrong = [
            f"Item at index {index}, a `{type(thing).__name__}`"
            for index, thing in enumerate(objects)
            if not isinstance(thing, Stateful)
        ]
        if wrong:
            raise ConfigError(
                f"{'; '.join(wrong)}: it cannot be registered for checkpointing, as it has no "
                "`state_dict` and `load_state_dict`. Give it both."
            )
        self._contents.registry.objects.extend(objects)

    def before_save(self, hook: Hook) -> RemovableHandle:
        """Call `hook(models, weights, folder)` before each save, on every process."""
        return _register(self._before_save, hook)

    def before_load(self, hook: Hook) -> RemovableHandle:
        """Call `hook(models, folder)` before each load, on every process."""
        return _register(self._before_load, hook)

    def save(self, output_dir: Any, checks: bool) -> Path:
        """Save the state; return its folder. For an exact resume every process must call it.

        Where process 0 calls it alone, the state lacks what only other processes know: their
        random streams. That is said once.

        Raises:
            ConfigError: There is no folder; or process 0 is alone, inside a window.
            CheckpointError: It failed on some process; an earlier state is untouched.
            DistributedError: The models are sharded, or process 0 is among those that do not call;
                or the processes do not hold the same, where that is to be looked at.
        """
        strategy = self._contents.strategy
        needs_all = strategy.sharded or isinstance(strategy, LoopDeepSpeed)
        folder = run_on_all_or_main(
            self._processes,
            "save_state",
            lambda: self._save(output_dir, checks=checks),
            None if needs_all else lambda: self._save_alone(output_dir),
            key="" if output_dir is None else str(output_dir),
        )
        self._directory.saved(Path(folder))
        return Path(folder)

    def load(self, input_dir: Any, report: Callable[[str], None], strict: bool = True) -> None:
        """Load a state. Every process must call it.

        Nothing changes before all of it is known to be good and to fit. Without `input_dir` the
        state before a broken one is taken; but not once a hook has seen it.

        Raises:
            DistributedError: Some process does not call it.
            CheckpointError: There is none, or it is broken, or does not fit; on all processes.
        """
        check_called_by_all(self._processes, "load_state")
        contents, directory = self._contents, self._directory
        models = contents.models()
        if self._before_load:  # a hook may load what it finds
            world = self._processes.world
            folder, path, _ = directory.load(
                input_dir, lambda path: open_share(path, world).verify_rest(), report
            )
            left = list(models.values())  # to be loaded here
            for hook in self._before_load.values():
                hook(left, str(folder))
            models = {name: model for name, model in models.items() if model in left}
            with on_this_machine(path, self._processes) as (here, _):
                loaded = run_on_all(self._processes, lambda: contents.read(here, models, strict))
        else:
            folder, path, loaded = directory.load(
                input_dir, lambda path: contents.read(path, models, strict), report
            )
        contents.apply(loaded, models)
        for line in loaded.news:
            report(f"trainkit: `{path}`: {line}")
        directory.continue_from(folder, report)

    def release(self) -> None:
        """Let other programs save to the project."""
        self._directory.release()

    def _save(self, output_dir: Any, *, checks: bool) -> str:
        if checks:
            self._contents.check_replicas()
        folder = self._directory.for_saving(output_dir, self._processes)
        self._commit(folder, self._contents.of_all(lambda: self._weights(folder)), self._processes)
        return str(folder)

    def _save_alone(self, output_dir: Any) -> str:
        """Save on process 0 what it has; nothing here may wait for other processes."""
        if self._contents.is_open:
            raise ConfigError(
                "`save_state` was called by process 0 alone, inside a window: the gradients that "
                "other processes have accumulated would be lost. Call it on every process, or "
                "`if accelerator.sync_gradients:`."
            )
        alone = only_this_process(self._processes)
        folder = self._directory.for_saving(output_dir, alone)
        self._commit(folder, self._contents.of_main(lambda: self._weights(folder)), alone)
        if self._processes.size > 1 and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "`save_state` was called by process 0 alone: the states lack the random streams "
                "of the other processes, and a resume gives them new ones. For an exact resume "
                "call it on every process, outside of `if accelerator.is_main_process:`.",
                stacklevel=2,
            )
        return str(folder)

    def _commit(self, folder: Path, parts: dict[str, Any], processes: Processes) -> None:
        metadata = {
            "models": len(self._contents.registry.models),
            "versions": versions(),
            "processes": self._processes.size,
        }
        self._directory.commit(folder, parts, metadata, processes)

    def _weights(self, folder: Path) -> dict[str, Any]:
        """Return the states of the models by their parts, as the hooks have left them."""
        models = list(self._contents.models().values())
        weights: list[Any] = [model.state_dict() for model in models]
        for hook in self._before_save.values():
            hook(models, weights, str(folder))
        return {part_name("model", index): state for index, state in enumerate(weights)}


def warn_of_options(name: str, options: Mapping[str, Any]) -> None:
    """Say that arguments which Accelerate gives to DeepSpeed do nothing."""
    warnings.warn(
        f"`{name}({'=..., '.join(options)}=...)` has no effect: Accelerate gives such arguments to "
        "DeepSpeed. Leave them out.",
        stacklevel=3,
    )


def _register(hooks: "OrderedDict[int, Hook]", hook: Hook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
