"""Which steps are followed by a log."""

from trainkit.training.run import Run


def log_follows(run: Run) -> bool:
    """Return whether a log follows the step that has just ended; ask in `on_step_end`.

    A log that a request to stop brings about is not known yet.
    """
    return run.logging.is_read and (run.is_log_step or run.state.step == run.planned_steps)


def log_is_next(run: Run) -> bool:
    """Return whether a log follows the step under way; ask before its update."""
    step = run.state.step + 1
    is_due = step % run.config.log_every_n_steps == 0 or step == run.planned_steps
    return run.logging.is_read and is_due
