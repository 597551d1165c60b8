"""What is served between two windows, in this order: log, evaluate, stop (DESIGN 2.5)."""

from trainkit.callback import Callback, CallbackList
from trainkit.evaluation import evaluate_run, rehearse
from trainkit.run import Run

__all__ = ["begin", "finish", "serve"]


def begin(run: Run) -> None:
    """Say what cannot work before any work is lost."""
    run.check_agreement()
    run.expected_figures = rehearse(run)
    if run.lr_schedule is not None:
        run.lr_schedule.check(run.expected_figures)


def serve(run: Run, callbacks: CallbackList) -> None:
    """Serve what is due after a window, or after an epoch."""
    requests = run.requests
    if run.vote is not None:
        requests.read_vote(run.vote, run.accelerator.processes)
    stops = requests.stop is not None
    if run.logs and (run.is_log_step or stops) and run.state.step != run.last_logged_step:
        _write_log(run, callbacks)
    if requests.evaluation or (stops and run.lacks_last_evaluation):
        evaluate_run(run, callbacks)
    if run.vote is not None:
        requests.start_vote(run.vote)
    if requests.stop is not None:
        run.stop_reason = requests.stop


def finish(run: Run, callbacks: CallbackList) -> None:
    """Serve what was asked for while the last window was served."""
    run.phase = "end"
    if run.vote is not None:
        run.requests.read_vote(run.vote, run.accelerator.processes)
    asked = run.requests.evaluation and run.last_evaluated_attempt != run.state.attempts
    if asked or run.lacks_last_evaluation:
        evaluate_run(run, callbacks)
    if run.logs:
        _write_log(run, callbacks)
    run.strategy.share_buffers(run.module)


def _write_log(run: Run, callbacks: CallbackList) -> None:
    """Reduce the figures since the last log, and hand them to the callbacks if there are any."""
    run.last_logged_step = run.state.step
    values = run.sums.reduce(run.accelerator.processes)
    if values:
        callbacks.emit(Callback.on_log, run, values)
