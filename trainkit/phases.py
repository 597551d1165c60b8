"""What is served between two windows, in this order: log, evaluate, stop (DESIGN 2.5)."""

from trainkit.callback import Callback, CallbackList
from trainkit.evaluation import evaluate_run
from trainkit.run import Run

__all__ = ["finish", "serve"]


def serve(run: Run, callbacks: CallbackList) -> None:
    """Serve what is due after a window, or after an epoch."""
    requests = run.requests
    if run.vote is not None:
        requests.exchange(run.vote, run.accelerator.processes)
    if run.logs and (run.is_log_step or requests.stop is not None):
        _write_log(run, callbacks)
    if requests.evaluation or (requests.stop is not None and run.lacks_last_evaluation):
        evaluate_run(run, callbacks)
    if requests.stop is not None:
        run.stop_reason = requests.stop


def finish(run: Run, callbacks: CallbackList) -> None:
    """Serve what was asked for while the last window was served."""
    run.phase = "end"
    if run.vote is not None:
        run.requests.drain(run.vote, run.accelerator.processes)
    if run.logs:
        _write_log(run, callbacks)
    if run.requests.evaluation or run.lacks_last_evaluation:
        evaluate_run(run, callbacks)


def _write_log(run: Run, callbacks: CallbackList) -> None:
    """Reduce the figures since the last log, if any, and hand them to the callbacks."""
    if run.state.step == run.last_logged_step:
        return
    run.last_logged_step = run.state.step
    values = run.sums.reduce(run.accelerator.processes)
    callbacks.emit(Callback.on_log, run, values)
