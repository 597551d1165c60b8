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
    if run.logs and run.is_log_step and run.state.step != run.last_logged_step:
        _write_log(run, callbacks)
    if requests.evaluation:
        evaluate_run(run, callbacks)
    if requests.stop is not None:
        run.stop_reason = requests.stop


def finish(run: Run, callbacks: CallbackList) -> None:
    """Serve what the last window left open."""
    run.phase = "end"
    if run.vote is not None:
        run.requests.drain(run.vote, run.accelerator.processes)
    if run.logs and run.state.step != run.last_logged_step:
        _write_log(run, callbacks)
    missing = run.evaluates_end and run.last_evaluated_attempt != run.state.attempts
    if run.requests.evaluation or missing:
        evaluate_run(run, callbacks)


def _write_log(run: Run, callbacks: CallbackList) -> None:
    """Reduce the figures since the last log and hand them to the callbacks."""
    run.last_logged_step = run.state.step
    values = run.sums.reduce(run.accelerator.processes)
    callbacks.emit(Callback.on_log, run, values)
