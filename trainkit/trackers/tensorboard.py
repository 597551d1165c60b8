"""Values as event files for TensorBoard."""

import time
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from numbers import Number
from pathlib import Path
from typing import Any

from typing_extensions import override

from trainkit.basics.hparams import flat
from trainkit.basics.outputs import absolute
from trainkit.basics.packages import require
from trainkit.basics.written_files import giving_up
from trainkit.trackers.tracker import GeneralTracker, has_one, image_rows


class TensorBoardTracker(GeneralTracker):
    """Writes event files for TensorBoard under `<logging_dir>/<run_name>`.

    Settings come on its page HPARAMS, beside the values of the run.

    Args:
        run_name: Name of the run.
        logging_dir: Folder of all runs.
        **kwargs: Of `torch.utils.tensorboard.SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | Path, **kwargs: Any) -> None:
        super().__init__()
        require("tensorboard", '`log_with="tensorboard"`', ", or log with jsonl")
        self.run_name = run_name
        self.logging_dir = self.place = absolute(logging_dir, "logging_dir") / run_name
        self._options = kwargs
        self.writer: Any = None
        self._fails = False

    @override
    def start(self) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # takes seconds

        self.tracker = self.writer = SummaryWriter(str(self.logging_dir), **self._options)
        if (step := self._options.get("purge_step")) is not None:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog

            # TensorBoard takes the first start that it sees in a folder for that of the run, and
            # only at a second one leaves out what came after its step.
            start = SessionLog(status=SessionLog.START)
            self.writer.file_writer.add_event(Event(session_log=start), step)

    def begin_file(self, suffix: str) -> None:
        """Go on in a new event file, unless the name of the present one ends in `suffix`."""
        if self.writer.filename_suffix != suffix:
            with self._lasting():
                self.writer.close()
            self.writer.filename_suffix = suffix  # of the file that it opens for the next event

    @override
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import metadata
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

        # No `Experiment`, as `add_hparams` writes one: TensorBoard takes the names in the first
        # that it finds for those of all runs. Without any it collects them, and the metrics.
        start = SessionStartInfo(start_time_secs=time.time())
        for name, value in flat(values).items():
            kind = "bool" if isinstance(value, bool) else "number"
            if not isinstance(value, int | float):
                kind, value = "string", str(value)
            setattr(start.hparams[name], f"{kind}_value", value)
        about = metadata.create_summary_metadata(HParamsPluginData(session_start_info=start))
        note = Summary.Value(tag=metadata.SESSION_START_INFO_TAG, metadata=about)
        note.tensor.CopyFrom(metadata.NULL_TENSOR)
        self.writer.file_writer.add_summary(Summary(value=[note]))
        self.writer.flush()

    @override
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        with self._lasting():
            for name, value in values.items():
                if isinstance(value, str):
                    self.writer.add_text(name, value, global_step=step, **kwargs)
                elif isinstance(value, Mapping):
                    self.writer.add_scalars(name, dict(value), global_step=step, **kwargs)
                elif isinstance(value, Number) or has_one(value):
                    self.writer.add_scalar(name, value, global_step=step, **kwargs)
                elif value is not None:  # a figure that is not there yet
                    warnings.warn(
                        f"The tracker {self.name!r} left out {name!r}, a `{type(value).__name__}`: "
                        "it takes numbers, texts and dicts of numbers. Log one of these.",
                        stacklevel=3,
                    )
            self.writer.flush()

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Note batches of images, by name; arguments are those of `SummaryWriter.add_images`."""
        with self._lasting():
            for name, images in values.items():
                self.writer.add_images(name, images, global_step=step, **kwargs)

    def log_image(self, name: str, image: Any, step: int | None = None) -> None:
        """Note an image [channels, height, width]."""
        require("pillow", "An image in TensorBoard", module="PIL")
        rows = image_rows(image)
        with self._lasting():
            self.writer.add_image(name, rows, global_step=step, dataformats="HWC")
            self.writer.flush()

    def log_figure(self, name: str, figure: Any, step: int | None = None) -> None:
        """Note a figure of matplotlib, which stays open."""
        with self._lasting():
            self.writer.add_figure(name, figure, global_step=step, close=False)
            self.writer.flush()

    def log_text(self, name: str, text: str, step: int | None = None) -> None:
        """Note a text, in Markdown."""
        self.log({name: text}, step)

    @override
    def finish(self) -> None:
        with self._lasting():
            self.writer.close()

    def _lasting(self) -> AbstractContextManager[None]:
        """Return a context that warns once, and goes on, where the file cannot be written."""
        return suppress(OSError) if self._fails else giving_up(self._called, self._fail)

    def _fail(self) -> None:
        self._fails = True  # the thread of the writer has ended: nothing more comes into its file
