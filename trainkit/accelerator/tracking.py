"""Trackers: where the values of a loop of the user's own go."""

import os
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainkit.accelerator.settings import ProjectConfiguration
from trainkit.basics.lock import RunLock
from trainkit.basics.outputs import address_of, check_folder
from trainkit.basics.packages import require
from trainkit.basics.written_files import claim
from trainkit.distributed import Processes, run_on_main
from trainkit.distributed.shared_folder import check_shared
from trainkit.errors import ConfigError
from trainkit.trackers.files import CSVTracker, FileTracker, JSONLTracker
from trainkit.trackers.mlflow import MLflowTracker
from trainkit.trackers.tensorboard import TensorBoardTracker
from trainkit.trackers.tracker import GeneralTracker
from trainkit.trackers.trackio import TrackioTracker
from trainkit.trackers.wandb import WandBTracker

_KINDS: tuple[Any, ...] = (
    TensorBoardTracker, JSONLTracker, CSVTracker, WandBTracker, MLflowTracker,
    TrackioTracker,
)  # fmt: skip
KINDS = {kind.name: kind for kind in _KINDS}
WRITERS = [kind.name for kind in _KINDS if kind.requires_logging_directory]
"""Those that "all" means."""


def register_tracker_class(tracker_class: Any) -> None:
    """Let `log_with` name trackers of a class by its `name`.

    Args:
        tracker_class: A class over `GeneralTracker`. It is called with the name of the run, the
            folder of logs where `requires_logging_directory` is true, and its `init_kwargs`.
    """
    is_kind = isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)
    kinds = {*tracker_class.__mro__} - {GeneralTracker} if is_kind else ()
    says = any("requires_logging_directory" in vars(kind) for kind in kinds)
    if not says or not tracker_class.name:
        raise ConfigError(
            "`tracker_class` must be a class over `GeneralTracker` that has a `name`, and a "
            f"`requires_logging_directory` of False or True, but is {tracker_class!r}."
        )
    if KINDS.get(tracker_class.name, tracker_class) is not tracker_class:
        warnings.warn(
            f"`{tracker_class.__name__}` takes the place of the tracker {tracker_class.name!r}.",
            stacklevel=2,
        )
    KINDS[tracker_class.name] = tracker_class


class Trackers:
    """The trackers of an `Accelerator`.

    Args:
        wanted: What `log_with` names: a name, "all", a tracker, or a list of these.
        processes: The processes of the job; most trackers are at work on the main one only.
    """

    def __init__(self, wanted: Any, project: ProjectConfiguration, processes: Processes) -> None:
        self.at_work: list[GeneralTracker] = []
        """Those that have started, on this process."""
        self.wanted = _checked(wanted, project.logging_dir)
        """Names of trackers, and trackers, that are to start."""
        self._project = project
        self._processes = processes
        self._locks: list[RunLock] = []  # of the files that are written, while they are
        if given := project.folder("project_dir"):
            owner, folder = "`Accelerator(project_dir=...)`", Path(given)
            run_on_main(processes, lambda: check_folder(folder, owner))
            if project.automatic_checkpoint_naming and address_of(folder) is None:
                check_shared(processes, folder, owner)

    def start(
        self, run_name: str, config: Mapping[str, Any] | None, options: Mapping[str, Any]
    ) -> None:
        """Start the trackers, those of the main process only there.

        Raises:
            ConfigError: A tracker lacks its folder, or two write to one place.
        """
        logging_dir = self._project.folder("logging_dir")
        made: list[GeneralTracker] = []
        for entry in _checked(self.wanted, logging_dir):
            if isinstance(entry, GeneralTracker):
                made.append(entry)
                continue
            name, needs_folder = run_name, KINDS[entry].requires_logging_directory
            given = {**options.get(entry, {})}
            if entry == "mlflow":  # what `mlflow run` says goes first
                name = os.environ.get("MLFLOW_EXPERIMENT_NAME", name)
                said = {key: os.environ.get(f"MLFLOW_{key.upper()}") for key in ("run_id", "tags")}
                given |= {key: value for key, value in said.items() if value}
            made.append(KINDS[entry](name, *((logging_dir,) if needs_folder else ()), **given))
        is_main = self._processes.is_main  # which scripts let call this alone
        if is_main and logging_dir and any(each.requires_logging_directory for each in made):
            check_folder(Path(logging_dir) / run_name, "`init_trackers`")
        taken: dict[Path, str] = {}
        for number, tracker in enumerate(made):
            if tracker.place is not None:
                claim(taken, tracker.place, f"`log_with[{number}]`")
        starting = [each for each in made if is_main or not each.main_process_only]
        # Programs may write events of TensorBoard side by side: each has a file of its own.
        for path in (each.path for each in starting if isinstance(each, FileTracker)):
            advice = "give `init_trackers` another name"
            self._locks.append(RunLock.shared(path.parent, path.name, advice=advice))
        self.at_work = starting
        for tracker in self.at_work:
            tracker.start()
            if config is not None:
                tracker.store_init_configuration(dict(config))
                if isinstance(tracker, TensorBoardTracker):
                    _write_yaml(tracker.logging_dir / str(time.time()), dict(config))

    def find(self, name: str, *, unwrap: bool) -> Any:
        """Return a tracker, or what its library calls its run; a blank one without any."""
        for tracker in self.at_work:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if not self._processes.is_main or not self.at_work:
            return GeneralTracker(_blank=True)
        known = ", ".join(tracker.name for tracker in self.at_work) or "none"
        raise ConfigError(
            f"There is no tracker {name!r}, but {known}. Name it in `log_with`, and call "
            "`init_trackers` first."
        )

    def finish(self) -> None:
        for tracker in self.at_work:
            tracker.finish()
        self.at_work.clear()
        self._locks.clear()


def _write_yaml(folder: Path, values: dict[str, Any]) -> None:
    """Write settings where Accelerate leaves them beside those in TensorBoard's own file."""
    with suppress(ImportError):  # no package that TensorBoard needs
        import yaml

        folder.mkdir(parents=True)
        (folder / "hparams.yml").write_text(yaml.dump(values), "utf-8")


def _checked(wanted: Any, logging_dir: str | Path | None) -> list[Any]:
    """Return what `log_with` names, each once: names of trackers, and trackers."""
    entries = wanted if isinstance(wanted, list | tuple) else [wanted]
    names: list[Any] = [getattr(each, "value", each) for each in entries if each is not None]
    if "all" in names:
        names = [*WRITERS, *(name for name in names if isinstance(name, GeneralTracker))]
    for name in names:
        if not isinstance(name, GeneralTracker) and name not in KINDS:
            raise ConfigError(
                f"`log_with` must be one of {', '.join(sorted(KINDS))}, all, or a "
                f"`GeneralTracker`, but is {name!r}. Write a `GeneralTracker` around the library."
            )
        if name in KINDS and KINDS[name] in _KINDS and name not in WRITERS:
            require(name, f'`log_with="{name}"`', ", or log with tensorboard, jsonl or csv")
    for name in names if logging_dir is None else ():
        if name in KINDS and KINDS[name].requires_logging_directory:
            raise ConfigError(
                f"Logging with `{name}` requires a `logging_dir`: it writes files. Pass "
                "`Accelerator(project_dir=...)`."
            )
    return [name for index, name in enumerate(names) if name not in names[:index]]
