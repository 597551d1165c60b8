"""Say what the model is made of."""

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from trainkit.basics.config import check_whole
from trainkit.callbacks._support.model_table import describe_output, is_compiled, model_table
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import StepResult

__all__ = ["ModelSummary"]


class ModelSummary(Callback):
    """Prints modules, output shapes, parameters and sizes of the model, on the main process.

    The outputs are those of the first batch that the model sees in this fit: of an evaluation if
    there is one, which is tried out before the first step, else of training. It is watched, not
    run again, so that nothing of the training changes. A module that is not called has no output.
    A compiled model is shown at the start and without outputs, because watching would change how
    it is compiled.

    Under FSDP the parameters are those of the whole model, and a line says how much of it lies on
    this process. A model that was on the meta device has been filled by then.

    Args:
        depth: Levels of modules to show below the model, at least 0.
    """

    def __init__(self, depth: int = 3) -> None:
        check_whole("depth", depth, least=0)
        self.depth = depth
        self._outputs: dict[nn.Module, str] = {}
        self._watches: list[RemovableHandle] = []

    @override
    def on_fit_start(self, run: Run) -> None:
        self._outputs = {}
        if not run.is_main_process:
            return
        if is_compiled(run.module):
            print(model_table(run.module, self.depth, {}))
            return
        for module in run.module.modules():
            self._watches.append(module.register_forward_hook(self._note))
        last = run.module.register_forward_hook(lambda *_: self._show(run))
        self._watches.append(last)

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if self._watches:  # the step called parts of the model, not the whole
            self._show(run)

    @override
    def on_fit_end(self, run: Run) -> None:
        self._unwatch()

    def _note(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._outputs.setdefault(module, describe_output(output))

    def _show(self, run: Run) -> None:
        self._unwatch()
        print(model_table(run.module, self.depth, self._outputs))
        self._outputs = {}

    def _unwatch(self) -> None:
        for watch in self._watches:
            watch.remove()
        self._watches = []
