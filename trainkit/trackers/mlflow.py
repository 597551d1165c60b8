"""Values in a run of MLflow."""

import json
import os
import posixpath
import random
import re
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any

from typing_extensions import override

from trainkit.basics import rng
from trainkit.basics.hparams import flat
from trainkit.errors import ConfigError
from trainkit.trackers.tracker import GeneralTracker, image_rows

SMALLER = ", or the smaller `pip install mlflow-skinny sqlalchemy alembic`"
MOST, MOST_METRICS = 100, 1000  # parameters or tags, and metrics, that MLflow takes at once
LONGEST_NAME = 250  # characters
PATIENCE_SECONDS = 300.0  # between two trials; `mlflow` itself tries for minutes each time


class MLflowTracker(GeneralTracker):
    """Writes to MLflow, on the main process; which run `mlflow` calls active does not matter.

    What MLflow allows in no name becomes `_`. Values that are not numbers are left out, with a
    warning. What a server that is away does not take is written when it is back.

    Args:
        experiment_name: Name of the experiment, and the rest as for `callbacks.MLflowLogger`.
        logging_dir: Where an experiment that is made here keeps its artifacts.
        run_id: A run to go on with; where it is not there any more a new one, with a warning.
        nested_run: Whether a new run stands below the one that `mlflow` calls active.
        tags: By name, or the same as JSON.
        description: A text about the run.
    """

    name = "mlflow"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | Path | None = None,
        run_id: str | None = None,
        tags: Mapping[str, Any] | str | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
        *,
        tracking_uri: str | None = None,
    ) -> None:
        super().__init__()
        name = experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        self.experiment_name = name or "Default"
        self.tracking_uri = tracking_uri
        self.run_id = run_id
        self.run_name = run_name
        self.tags = dict(json.loads(tags) if isinstance(tags, str) else tags or {})
        if description is not None:
            self.tags["mlflow.note.content"] = description
        self.logging_dir = None if logging_dir is None else str(logging_dir)
        self.nested_run = nested_run
        self.client: Any = None
        self._errors: tuple[type[Exception], ...] = (OSError,)
        self._waiting: list[Any] = []
        self._try_again = 0.0  # on the clock of time.monotonic

    @property
    def active_run(self) -> Any:
        """The run of MLflow, as it is now."""
        return self.client.get_run(self.run_id)

    tracker = active_run

    @override
    def start(self) -> None:
        from mlflow import MlflowClient, active_run  # takes seconds
        from mlflow.entities import RunTag
        from mlflow.exceptions import MlflowException

        self._errors = (OSError, MlflowException)
        try:
            self.client = MlflowClient(self.tracking_uri)
            if self.run_id is None or not self._goes_on():
                with rng.preserved():
                    random.seed()  # it draws a name, which would be that of each run of this seed
                    parent = active_run() if self.nested_run else None
                    above = {"mlflow.parentRunId": parent.info.run_id} if parent else None
                    name = self.run_name
                    run = self.client.create_run(self._experiment(), tags=above, run_name=name)
                self.run_id = run.info.run_id
            self._note(tags=[RunTag(*tag) for tag in _texts(self.tags).items()])
        except (*self._errors, ImportError) as error:
            raise ConfigError(
                f"{self._called} cannot use MLflow at `{self.tracking_uri or 'its default place'}`:"
                f" {error} Start its server, or pass another `tracking_uri`; for a database run "
                "`pip install sqlalchemy alembic`."
            ) from error

    @override
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        from mlflow.entities import Param
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

        kept, given = self.active_run.data.params, _texts(values)
        for name in [name for name, text in given.items() if len(text) > MAX_PARAM_VAL_LENGTH]:
            self._warn(f"leaves out `{name}`, longer than {MAX_PARAM_VAL_LENGTH} characters")
            del given[name]
        if changed := [f"`{name}`" for name in given if kept.get(name, given[name]) != given[name]]:
            self._warn(f"keeps the first value of {', '.join(changed)}, which MLflow never changes")
        self._note(params=[Param(*each) for each in given.items() if each[0] not in kept])

    @override
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        numbers: dict[str, float] = {}
        for name, value in values.items():
            number = value.item() if hasattr(value, "item") else value
            if isinstance(number, Real):
                numbers[_name(name)] = float(number)
            else:
                self._warn(f"leaves out `{name}`, as MLflow takes only numbers")
        if kwargs.keys() - {"timestamp"}:
            self._pass_on(numbers, step=step, **kwargs)
            return
        from mlflow.entities import Metric

        now = kwargs.get("timestamp") or int(time.time() * 1000)
        self._waiting += [Metric(*entry, now, step or 0) for entry in numbers.items()]
        if time.monotonic() >= self._try_again:
            self._send()

    def _pass_on(self, numbers: dict[str, float], **options: Any) -> None:
        """Write values at once by `mlflow.log_metrics`, which knows more options."""
        import mlflow

        if self.tracking_uri is not None:
            raise ConfigError(
                f"{self._called} has a `tracking_uri`, and `mlflow.log_metrics`, which takes "
                f"{sorted(options)}, none. Call `mlflow.set_tracking_uri` in its place."
            )
        try:
            mlflow.log_metrics(numbers, run_id=self.run_id, **options)
        except self._errors as error:
            self._warn(f"cannot write {', '.join(numbers)} to MLflow: {error}")

    def log_image(self, name: str, image: Any, step: int | None = None) -> None:
        """Note an image [channels, height, width]."""
        rows = image_rows(image)
        self._keep("log_image", rows[..., 0] if rows.shape[2] == 1 else rows, name, step, "png")

    def log_figure(
        self, name: Any, figure: Any = None, step: int | None = None, artifact_file: str = ""
    ) -> None:
        """Note a figure of matplotlib, as an image; or, as Accelerate, `(figure, file)`."""
        if isinstance(name, str):
            self._keep("log_figure", figure, name, step, "png")
        else:
            self._put("log_figure", name, artifact_file or figure)

    def log_artifact(self, local_path: str | Path, artifact_path: str | None = None) -> None:
        """Note a file, in a folder of the run's artifacts."""
        self._put("log_artifact", str(local_path), artifact_path)

    def log_artifacts(self, local_dir: str | Path, artifact_path: str | None = None) -> None:
        """Note all files of a folder."""
        self._put("log_artifacts", str(local_dir), artifact_path)

    def log_text(self, name: str, text: str, step: int | None = None) -> None:
        """Note a text."""
        self._keep("log_text", text, name, step, "txt")

    def _keep(self, call: str, value: Any, name: str, step: int | None, ending: str) -> None:
        """Write an artifact, named by its step: a resume writes over those that it makes again."""
        self._put(call, value, f"{_name(name)}/step-{step or 0:08d}.{ending}")

    def _put(self, call: str, value: Any, path: str | None) -> None:
        try:
            getattr(self.client, call)(self.run_id, value, path)
        except self._errors as error:
            self._warn(f"cannot write `{path or value}` to MLflow: {error}")

    @override
    def finish(self) -> None:
        self._send({0: "FINISHED", 1: "FAILED"}.get(self.exit_code, "KILLED"))
        if self._waiting:
            self._warn(f"has lost the last {len(self._waiting)} values")

    def _goes_on(self) -> bool:
        """Take up the run again; returns whether it is there."""
        try:
            self.client.update_run(self.run_id, status="RUNNING")
        except self._errors as error:
            self._warn(f"finds no run {self.run_id} to go on with, and begins a new one: {error}")
            return False
        return True

    def _experiment(self) -> str:
        if (experiment := self.client.get_experiment_by_name(self.experiment_name)) is None:
            with suppress(*self._errors):  # another process may just have made it
                self.client.create_experiment(self.experiment_name, self.logging_dir)
            experiment = self.client.get_experiment_by_name(self.experiment_name)
        return str(experiment.experiment_id)

    def _note(self, **values: list[Any]) -> None:
        for kind, items in values.items():
            for at in range(0, len(items), MOST):
                self.client.log_batch(self.run_id, **{kind: items[at : at + MOST]})

    def _send(self, status: str | None = None) -> None:
        """Write what waits, and an end; a server that is away is not asked again for a while."""
        try:
            while self._waiting:
                self.client.log_batch(self.run_id, metrics=self._waiting[:MOST_METRICS])
                del self._waiting[:MOST_METRICS]
            if status is not None:
                self.client.set_terminated(self.run_id, status)
        except self._errors as error:
            self._try_again = time.monotonic() + PATIENCE_SECONDS
            self._warn(f"cannot write to MLflow, and keeps its values until that works: {error}")

    def _warn(self, what: str) -> None:
        warnings.warn(f"{self._called} {what}. Training goes on.", stacklevel=4)


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {_name(name): str(value) for name, value in flat(values).items()}


def _name(name: str) -> str:
    """Return a name as MLflow takes it: of few characters, and in the form of a path."""
    return posixpath.normpath(re.sub(r"[^\w./ :-]", "_", name)).lstrip("./")[:LONGEST_NAME] or "_"
