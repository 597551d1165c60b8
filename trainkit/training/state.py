"""The counters of a training, equal on all processes at every hook."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from trainkit.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class TrainState:
    """How far a training is (rules 1, 2)."""

    step: int = 0
    """Updates applied."""

    skipped_steps: int = 0
    """Windows that ended without an update."""

    consecutive_skips: int = 0
    """Skipped windows since the last update."""

    epoch: int = 0
    """Epochs completed; the number of the current one, counted from 0."""

    epoch_samples: int = 0
    """Samples consumed in the current epoch, all processes together: the data position."""

    samples_seen: int = 0
    """Samples consumed since the start, all processes together, repeats excluded."""

    @property
    def attempts(self) -> int:
        """Windows that were completed, applied or skipped."""
        return self.step + self.skipped_steps

    def state_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take the counters back; the names must be exactly those of `state_dict`."""
        names = {field.name for field in fields(self)}
        if set(state) != names:
            raise ConfigError(
                f"`state` must have exactly the keys {sorted(names)}, but has {sorted(state)}."
            )
        for name in names:
            setattr(self, name, state[name])
