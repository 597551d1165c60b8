"""Values in a run of Trackio."""

from typing import Any

from typing_extensions import override

from trainkit.basics import rng
from trainkit.basics.packages import require
from trainkit.trackers.tracker import GeneralTracker, has_one


class TrackioTracker(GeneralTracker):
    """Writes to Trackio, on the main process: locally, or where `trackio.init` is told to.

    In a `Trainer` it is `Logger(TrackioTracker("digits", name="first", resume="allow"))`: with a
    name and `resume="allow"` a fit that is resumed goes on in the same run there; steps that were
    trained twice are there twice.

    Args:
        run_name: Name of the Trackio project.
        **kwargs: Of `trackio.init`, such as `name`, `space_id`, `resume`.

    Raises:
        ConfigError: `trackio` is not installed.
    """

    name = "trackio"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        require("trackio", "`TrackioTracker`")
        self.run_name = run_name
        self._options = kwargs
        self.run: Any = None

    @override
    def start(self) -> None:
        import trackio  # takes seconds

        with rng.preserved():  # it draws a name
            self.tracker = self.run = trackio.init(project=self.run_name, **self._options)

    @override
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values)

    @override
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        plain = {name: value.item() if has_one(value) else value for name, value in values.items()}
        self.run.log(plain, step=step, **kwargs)

    @override
    def finish(self) -> None:
        self.run.finish()
