"""Trackers: where the values of a loop of the user's own go."""

import importlib.util
import json
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typing_extensions import override

from trainkit.accelerator.settings import ProjectConfiguration
from trainkit.distributed import Processes, run_on_main
from trainkit.distributed.shared_folder import check_shared
from trainkit.errors import ConfigError
from trainkit.formatting import json_value
from trainkit.outputs import Lines, absolute, check_folder

__all__ = ["GeneralTracker", "JSONLTracker", "TensorBoardTracker", "Trackers", "WandBTracker"]


class GeneralTracker:
    """The interface of trackers; one of your own sets `name` and writes the methods.

    Args:
        _blank: Makes one that does nothing, for processes that do not track.
    """

    name: str = ""
    requires_logging_directory: bool = False
    main_process_only: bool = True

    def __init__(self, _blank: bool = False) -> None:
        self._blank = _blank

    @property
    def tracker(self) -> Any:
        """What the tracking library calls its run."""
        return None

    def start(self) -> None:
        """Begin; called by `init_trackers`."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Note the settings of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Note values of a step."""

    def finish(self) -> None:
        """Write what is left and end."""


class TensorBoardTracker(GeneralTracker):
    """Writes event files for TensorBoard under `<logging_dir>/<run_name>`.

    Args:
        run_name: Name of the run.
        logging_dir: Folder of all runs.
        **kwargs: Of `torch.utils.tensorboard.SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | Path, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = absolute(logging_dir, "logging_dir") / run_name
        self._options = kwargs
        self.writer: Any = None
        self._fails = False

    @property
    @override
    def tracker(self) -> Any:
        return self.writer

    @override
    def start(self) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # takes seconds

        self.writer = SummaryWriter(str(self.logging_dir), **self._options)

    @override
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer.add_hparams(
            {key: value for key, value in values.items() if isinstance(value, int | float | str)},
            metric_dict={},
        )
        _write_settings(self.logging_dir, values)
        self.writer.flush()

    @override
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        with self._lasting():
            for name, value in values.items():
                if isinstance(value, str):
                    self.writer.add_text(name, value, global_step=step, **kwargs)
                elif isinstance(value, Mapping):
                    self.writer.add_scalars(name, dict(value), global_step=step, **kwargs)
                else:
                    self.writer.add_scalar(name, value, global_step=step, **kwargs)
            self.writer.flush()

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Note batches of images, by name; arguments are those of `SummaryWriter.add_images`."""
        with self._lasting():
            for name, images in values.items():
                self.writer.add_images(name, images, global_step=step, **kwargs)

    @override
    def finish(self) -> None:
        with self._lasting():
            self.writer.close()

    @contextmanager
    def _lasting(self) -> Iterator[None]:
        """Warn once, and go on, where the event file cannot be written any more."""
        try:
            yield
        except OSError as error:
            if not self._fails:
                self._fails = True
                warnings.warn(
                    f"The tracker {self.name!r} cannot write: {error}. Training goes on, and "
                    "nothing more is written there.",
                    stacklevel=4,
                )


class WandBTracker(GeneralTracker):
    """Writes to Weights & Biases, on the main process.

    Args:
        run_name: Name of the W&B project.
        **kwargs: Of `wandb.init`.
    """

    name = "wandb"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._options = kwargs
        self.run: Any = None

    @property
    @override
    def tracker(self) -> Any:
        return self.run

    @override
    def start(self) -> None:
        import wandb  # takes seconds

        self.run = wandb.init(project=self.run_name, **self._options)

    @override
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values, allow_val_change=True)

    @override
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.run.log(values, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Note lists of images, by name."""
        import wandb

        images = {name: [wandb.Image(each) for each in list_] for name, list_ in values.items()}
        self.log(images, step=step, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[Any] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Note a table, from its columns and rows or from a data frame."""
        import wandb

        table = wandb.Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **kwargs)

    @override
    def finish(self) -> None:
        self.run.finish()


class JSONLTracker(GeneralTracker):
    """Writes one JSON object a line to `<logging_dir>/<run_name>/metrics.jsonl`.

    Values that are not finite are the texts "NaN", "Infinity" and "-Infinity".

    Args:
        run_name: Name of the run.
        logging_dir: Folder of all runs.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | Path) -> None:
        super().__init__()
        self.path = absolute(logging_dir, "logging_dir") / run_name / "metrics.jsonl"
        self._file: Lines | None = None
        self._start = time.monotonic()

    @property
    @override
    def tracker(self) -> Any:
        return self._file

    @override
    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = Lines(self.path, f"The tracker {self.name!r}")

    @override
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        _write_settings(self.path.parent, values)

    @override
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        if self._file is None:
            raise ConfigError("The tracker has ended. Log before `end_training`.")
        seconds = round(time.monotonic() - self._start, 3)
        plain = {name: v.item() if hasattr(v, "item") else v for name, v in values.items()}
        line = {"step": step, "time/seconds": seconds, **plain}
        self._file.write(json.dumps(json_value(line), allow_nan=False))

    @override
    def finish(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


WRITERS: dict[str, type[TensorBoardTracker] | type[JSONLTracker]] = {
    "tensorboard": TensorBoardTracker,
    "jsonl": JSONLTracker,
}
"""Trackers that write files: those that "all" means."""


class Trackers:
    """The trackers of an `Accelerator`.

    Args:
        wanted: What `log_with` names: a name, "all", a tracker, or a list of these.
        project: Where logs go.
        processes: The processes of the job; most trackers are at work on the main one only.

    Raises:
        ConfigError: A name is not known, or its library is not there.
    """

    def __init__(self, wanted: Any, project: ProjectConfiguration, processes: Processes) -> None:
        self.at_work: list[GeneralTracker] = []
        """Those that have started, on this process."""
        self._wanted = _checked(wanted)
        self._project = project
        self._processes = processes
        if project.project_dir is not None:
            owner = "`Accelerator(project_dir=...)`"
            self._try_out(project.project_dir, owner)
            if project.automatic_checkpoint_naming:
                check_shared(processes, Path(project.project_dir), owner)

    def start(
        self, run_name: str, config: Mapping[str, Any] | None, options: Mapping[str, Any]
    ) -> None:
        """Start the trackers, those of the main process only there.

        Args:
            run_name: Name of the run.
            config: Settings of the run, to be noted.
            options: Arguments of trackers by their names.

        Raises:
            ConfigError: A tracker lacks its folder; on all processes.
        """
        place = self._project.logging_dir
        made = _make_trackers(self._wanted, run_name, place, options)
        if place is not None and any(each.requires_logging_directory for each in made):
            self._try_out(Path(place) / run_name, "`init_trackers`")
        is_main = self._processes.is_main
        self.at_work = [each for each in made if is_main or not each.main_process_only]
        for tracker in self.at_work:
            tracker.start()
            if config is not None:
                tracker.store_init_configuration(dict(config))

    def find(self, name: str, *, unwrap: bool) -> Any:
        """Return a tracker, or what its library calls its run; a blank one on other processes."""
        for tracker in self.at_work:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if not self._processes.is_main:
            return GeneralTracker(_blank=True)
        known = ", ".join(tracker.name for tracker in self.at_work) or "none"
        raise ConfigError(
            f"There is no tracker {name!r}, but {known}. Name it in `log_with`, and call "
            "`init_trackers` first."
        )

    def finish(self) -> None:
        """End all trackers."""
        for tracker in self.at_work:
            tracker.finish()
        self.at_work.clear()

    def _try_out(self, folder: str | Path, owner: str) -> None:
        """Raise, on all processes, where the main process cannot write to a folder."""
        run_on_main(self._processes, lambda: check_folder(Path(folder), owner))


def _make_trackers(
    wanted: Sequence[Any],
    run_name: str,
    logging_dir: str | Path | None,
    options: Mapping[str, Mapping[str, Any]],
) -> list[GeneralTracker]:
    """Return the trackers that `log_with` names; they have not started."""
    made: list[GeneralTracker] = []
    for entry in wanted:
        if isinstance(entry, GeneralTracker):
            made.append(entry)
        elif entry == WandBTracker.name:
            made.append(WandBTracker(run_name, **options.get(entry, {})))
        elif logging_dir is None:
            raise ConfigError(
                f"The tracker {entry!r} writes files. Pass `Accelerator(project_dir=...)`."
            )
        else:
            made.append(WRITERS[entry](run_name, logging_dir, **options.get(entry, {})))
    return made


def _checked(wanted: Any) -> list[Any]:
    """Return what `log_with` names, each once: names of trackers, and trackers."""
    entries = wanted if isinstance(wanted, list | tuple) else [wanted]
    names = [getattr(entry, "value", entry) for entry in entries if entry is not None]
    if "all" in names:
        names = [*WRITERS, *(name for name in names if isinstance(name, GeneralTracker))]
    known = (*WRITERS, WandBTracker.name)
    for name in names:
        if not isinstance(name, GeneralTracker) and name not in known:
            raise ConfigError(
                f"`log_with` must be one of {', '.join(sorted(known))}, all, or a "
                f"`GeneralTracker`, but is {name!r}. Write a `GeneralTracker` around the library."
            )
    if WandBTracker.name in names and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            '`log_with="wandb"` needs the package `wandb`, which is not installed. Run `pip '
            "install wandb`, or log with tensorboard or jsonl."
        )
    return [name for place, name in enumerate(names) if name not in names[:place]]


def _write_settings(folder: Path, values: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dict(values), indent=1, default=str)
    (folder / "hparams.json").write_text(text + "\n", encoding="utf-8")
