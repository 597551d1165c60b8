"""Values in a run of Weights & Biases."""

from typing import Any

from typing_extensions import override

from trainkit.trackers.tracker import GeneralTracker, image_rows


class WandBTracker(GeneralTracker):
    """Writes to Weights & Biases, on the main process.

    Args:
        run_name: Name of the W&B project; None: what `wandb` chooses.
        **kwargs: Of `wandb.init`.
    """

    name = "wandb"

    def __init__(self, run_name: str | None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._options = kwargs
        self.run: Any = None

    @override
    def start(self) -> None:
        import wandb  # takes seconds

        self._wandb: Any = wandb
        self.tracker = self.run = wandb.init(project=self.run_name, **self._options)
        self.run_id = self.run.id  # by which another start goes on with the run

    @override
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values, allow_val_change=True)

    @override
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.run.log(values, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Note lists of images, by name."""
        images = {
            name: [self._wandb.Image(each) for each in list_] for name, list_ in values.items()
        }
        self.log(images, step=step, **kwargs)

    def log_image(self, name: str, image: Any, step: int | None = None) -> None:
        """Note an image [channels, height, width]."""
        rows = image_rows(image)
        self._show(name, self._wandb.Image(rows[..., 0] if rows.shape[2] == 1 else rows), step)

    def log_figure(self, name: str, figure: Any, step: int | None = None) -> None:
        """Note a figure of matplotlib, as an image."""
        import matplotlib.pyplot  # noqa: F401  # `wandb.Image` asks whether the figure is this

        self._show(name, self._wandb.Image(figure), step)

    def log_text(self, name: str, text: str, step: int | None = None) -> None:
        """Note a text, as a table of one row."""
        self._show(name, self._wandb.Table(columns=[name], data=[[text]]), step)

    def _show(self, name: str, value: Any, step: int | None) -> None:
        # Not as W&B's own step, which cannot go back to that of a checkpoint.
        self.run.log({name: value, "step": step})

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
        table = self._wandb.Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **kwargs)

    @override
    def finish(self) -> None:
        self.run.finish(exit_code=self.exit_code)
