"""Write the metrics of a run to MLflow."""

from collections.abc import Mapping

from typing_extensions import override

from trainkit.basics.config import checked
from trainkit.basics.packages import require
from trainkit.callbacks._support.run_facts import run_facts
from trainkit.callbacks.logger import ServiceLogger
from trainkit.trackers.mlflow import SMALLER, MLflowTracker
from trainkit.training.run import Run

__all__ = ["MLflowLogger"]


class MLflowLogger(ServiceLogger):
    """Writes logged values as `train/<name>` and evaluations under their own names.

    Hyperparameters are the parameters of the MLflow run, with dots in the names of nested ones;
    configuration, versions and command are its tags, as `trainkit.run.model`. A fit that is
    resumed from a checkpoint goes on in the same MLflow run; steps that were trained twice are
    there twice, with the same values. A fit that raises ends it as FAILED, one that a signal ends
    as KILLED. What a server that is away does not take is written when it is back. Only the main
    process writes.

    It needs the package `mlflow`, or `mlflow-skinny` with `sqlalchemy` and `alembic`, which is
    imported when a fit starts. `mlflow.start_run(run_id=logger.run_id)` adds what is your own.

    Args:
        experiment: Name of the experiment, made where it is missing; None: that of the
            environment variable `MLFLOW_EXPERIMENT_NAME`, else "Default".
        tracking_uri: Such as "http://host:5000" or "sqlite:///mlflow.db"; None: what `mlflow`
            chooses, by the variable `MLFLOW_TRACKING_URI`.
        run_name: Name of a new run.
        tags: Texts by name.

    Raises:
        ConfigError: `mlflow` is not installed; when a fit starts, that it cannot be used.
    """

    @checked
    def __init__(
        self,
        experiment: str | None = None,
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        require("mlflow", "`MLflowLogger`", SMALLER)
        self.experiment = experiment
        self.tracking_uri = tracking_uri
        self.run_name = run_name
        self.tags = dict(tags or {})

    @override
    def _make_tracker(self, run: Run) -> MLflowTracker:
        return MLflowTracker(
            self.experiment,
            tracking_uri=self.tracking_uri,
            run_id=self.run_id,
            run_name=self.run_name,
            tags={**self.tags, "trainkit": run_facts(run)},
        )
