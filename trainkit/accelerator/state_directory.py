"""Where `save_state` writes, where `load_state` reads, and which folders stay."""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trainkit.accelerator.settings import ProjectConfiguration
from trainkit.basics.lock import RunLock
from trainkit.basics.outputs import absolute, address_of, fetched, unwritable
from trainkit.checkpoint import CheckpointStore, KeepPolicy, rotate
from trainkit.checkpoint.candidates import first_verified
from trainkit.checkpoint.format.names import MANIFEST
from trainkit.checkpoint.io.files import remove_tree
from trainkit.checkpoint.listing import broken_folders
from trainkit.distributed import Processes, run_on_main
from trainkit.distributed.collectives import gather_on_main
from trainkit.errors import CheckpointError, CheckpointMissing, ConfigError
from trainkit.storage.addresses import forget, send_logs, send_state
from trainkit.storage.machines import courier, on_this_machine

T = TypeVar("T")

_NUMBERED = re.compile(r"checkpoint_(\d+)")
_NONE = -1


class StateDirectory:
    """The folder of saved states.

    A state is a checkpoint of trainkit inside its folder: it is committed at once or not at all,
    and an earlier one in the same folder goes only after that (rules 24, 27).

    Args:
        project: Tells the folder and how many states stay.
    """

    def __init__(self, project: ProjectConfiguration, processes: Processes) -> None:
        self._project = project
        self._processes = processes
        self._follows = _NONE  # the number of the state that the next one comes after
        self._project_dir: Any = None  # what the lock was taken for
        self._lock: RunLock | None = None  # of the project, where states are numbered in it

    def for_saving(self, output_dir: Any, processes: Processes) -> Path:
        """Return the folder that the next state is saved to; it exists on return.

        Args:
            processes: Those that save. The first of them chooses the number.

        Raises:
            ConfigError: There is no folder, or it holds the state of another training.
        """
        return Path(run_on_main(processes, lambda: str(self._make(output_dir))))

    def commit(
        self, folder: Path, parts: dict[str, Any], metadata: dict[str, Any], processes: Processes
    ) -> None:
        """Commit `parts`, then delete the previous state of this folder."""
        store, lock = CheckpointStore(folder), RunLock(folder)

        def begin() -> tuple[int, bool]:
            lock.acquire()
            store.clean()
            saved = store.checkpoints()
            return saved[-1].step + 1 if saved else 0, address_of(folder) is not None

        def keep_last() -> None:
            rotate(store, KeepPolicy(keep_last=1))

        try:
            step, is_stored = run_on_main(processes, begin)
            store.save(
                step,
                parts,
                metadata={**metadata, "follows": self._follows},
                agree=partial(gather_on_main, processes),
                courier=courier(processes, folder) if is_stored else None,
            )
            run_on_main(processes, keep_last)
        finally:
            lock.release()
        if is_stored:
            run_on_main(processes, partial(send_state, folder))
        if self._project.automatic_checkpoint_naming:
            run_on_main(processes, self._drop_oldest)

    def saved(self, folder: Path) -> None:
        """Number the next state after one that was saved."""
        number = _NUMBERED.fullmatch(folder.name)
        if self._project.automatic_checkpoint_naming and number is not None:
            self._follows = int(number[1])
            self._project.iteration = self._follows + 1

    def load(
        self, input_dir: Any, read: Callable[[Path], T], report: Callable[[str], None]
    ) -> tuple[Path, Path, T]:
        """Return the folder of a state, that of the checkpoint inside it, and what was read.

        Args:
            input_dir: What the user said; by default the newest state that is whole.
            report: Told of each state that is passed over.
        """

        def read_here(state: tuple[str, str]) -> T:
            with on_this_machine(Path(state[1]), self._processes) as (here, _):
                return read(here)

        verified = first_verified(
            self._processes,
            self._states(input_dir, report),
            read_here,
            None if input_dir is not None else lambda why: report(f"trainkit: skipped: {why}"),
        )
        assert verified is not None  # an error where there is none
        (folder, path), state = verified
        return Path(folder), Path(path), state

    def release(self) -> None:
        """Let other programs save to the project; its logs go to its address, if it has one."""
        self._lock = None
        folders = {self._project.folder(name) for name in ("project_dir", "logging_dir")}
        for folder in folders if self._processes.is_main else ():
            if folder is not None:
                send_logs(Path(folder))

    def continue_from(self, folder: Path, report: Callable[[str], None]) -> None:
        """Save the next state after one that has been loaded, under a number that is free.

        Every process must call it; `report` is told which states it leaves behind.
        """
        number, project = _NUMBERED.fullmatch(folder.name), self._project
        if number is None or not project.automatic_checkpoint_naming or not project.project_dir:
            return
        loaded = int(number[1])

        def look() -> tuple[bool, list[int]]:
            states = self._automatic()
            return folder.resolve().parent == states.resolve(), [*_states_in(states)]

        is_own, numbers = run_on_main(self._processes, look)
        self._follows = loaded if is_own else _NONE
        project.iteration = max([loaded, *numbers]) + 1
        if later := [number for number in numbers if is_own and number > loaded]:
            last = f" to `checkpoint_{later[-1]}`" if len(later) > 1 else ""
            report(
                f"trainkit: `checkpoint_{loaded}` was loaded, and `checkpoint_{later[0]}`{last} "
                f"left as another branch: the next state is `checkpoint_{project.iteration}`, and "
                "once it is there `load_state()` takes nothing of that branch by itself."
            )

    def _make(self, output_dir: Any) -> Path:
        numbered = self._project.automatic_checkpoint_naming
        if output_dir is None and not numbered:
            raise ConfigError(
                "`save_state` needs a folder. Pass `output_dir`, or "
                "`ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)`."
            )
        automatic = f"checkpoint_{self._project.iteration}"
        folder = (
            self._automatic(saves=True) / automatic
            if numbered
            else absolute(output_dir, "output_dir", stored=True)
        )
        if numbered and _is_state(folder):
            raise ConfigError(
                f"`{folder}` holds a state of an earlier training. Call `load_state()` to go on "
                "from it, or choose another `project_dir`."
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(folder, error, "Pass another folder") from error
        return folder

    def _automatic(self, *, saves: bool = False) -> Path:
        """Return the folder of numbered states, of which other programs save none from now on.

        Once something was saved it is the same folder, wherever a link on its path leads then.
        """
        given = self._project.folder("project_dir")
        if given is None:
            raise ConfigError(
                "`automatic_checkpoint_naming` needs a folder. Pass `project_dir` too."
            )
        if given != self._project_dir:
            self._project_dir, self._lock = given, None
        project = self._lock.directory if self._lock else Path(given)
        if saves:
            advice = "give each program a `project_dir` of its own"
            self._lock = RunLock.shared(project, advice=advice)
            self._lock.check()
            project = self._lock.directory
        return project / "checkpoints"

    def _drop_oldest(self) -> None:
        limit = self._project.total_limit
        if limit is None:
            return
        states, branch = _states_in(self._automatic()), {*_branch(self._automatic())}
        # A branch that was left goes first.
        folders = sorted(states.values(), key=lambda folder: folder in branch)
        for folder in folders[: max(0, len(folders) - limit)]:
            remove_tree(folder)
            if address_of(folder) is not None:
                forget(folder)

    def _states(self, input_dir: Any, report: Callable[[str], None]) -> Iterator[tuple[str, str]]:
        """Yield the folders of states, the newest first, and of the checkpoints inside them.

        Reading a checkpoint verifies it.
        """
        if input_dir is not None:
            where = fetched(absolute(input_dir, "input_dir", stored=True))
            folders: Iterable[Path] = [where]
        elif self._project.automatic_checkpoint_naming:
            where = fetched(self._automatic())
            folders = _branch(where)
        else:
            raise ConfigError(
                "`load_state` needs a folder. Pass `input_dir`, or use "
                "`ProjectConfiguration(automatic_checkpoint_naming=True)`."
            )
        has_state = False
        for folder in folders:
            if (folder / MANIFEST).exists():  # of a checkpoint itself
                has_state = True
                yield str(folder), str(folder)
            for _, error in broken_folders(folder):
                has_state = True
                report(f"trainkit: skipped: {error}")
            entries = CheckpointStore(folder).checkpoints()
            if not entries:
                report(f"trainkit: skipped: `{folder}` holds no state that was completed.")
            for entry in reversed(entries):
                has_state = True
                yield str(folder), str(entry.path)
        if has_state:
            raise CheckpointError(
                f"`{where}` holds no state that verifies. Give a folder that `save_state` returned "
                "and that is whole.",
                path=where,
            )
        raise CheckpointMissing(
            f"`{where}` holds no state that `save_state` has completed. Give a folder that it "
            "returned; a program that begins afresh then, also after a kill in its first save, "
            "catches `CheckpointMissing`.",
            path=where,
        )


def _numbered(directory: Path) -> dict[int, Path]:
    """Return the folders that are named by their number, by number."""
    paths = directory.iterdir() if directory.is_dir() else ()
    matches = [(_NUMBERED.fullmatch(path.name), path) for path in paths]
    return dict(sorted((int(match[1]), path) for match, path in matches if match and path.is_dir()))


def _states_in(directory: Path) -> dict[int, Path]:
    """Return those with a state that was committed; a save that was stopped leaves others."""
    return {number: path for number, path in _numbered(directory).items() if _is_state(path)}


def _branch(directory: Path) -> Iterator[Path]:
    """Yield the numbered folders of the newest state and of those that it came from."""
    follows: Any = None  # not known of states of older versions: the one before
    for number, folder in reversed(_numbered(directory).items()):
        if not isinstance(follows, int) or number <= follows:
            yield folder
            if entries := CheckpointStore(folder).checkpoints():
                follows = entries[-1].manifest.metadata.get("follows")


def _is_state(folder: Path) -> bool:
    return bool(CheckpointStore(folder).checkpoints())
