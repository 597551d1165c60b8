"""How callbacks write numbers for people."""

from collections.abc import Iterable, Mapping

from trainkit.basics.formatting import count


def every(number: int, noun: str) -> str:
    """Return how often something comes, such as `every step` or `every 2 steps`."""
    return f"every {noun if number == 1 else count(number, noun)}"


def by_loader(values: Mapping[str, float], loaders: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return the metrics of an evaluation by what stands before them: "eval", or "eval/<loader>".

    Loaders without a name are the last.
    """
    groups, rest = {}, dict(values)
    for label in (f"eval/{loader}" for loader in loaders if loader):
        names = [name for name in values if name.startswith(f"{label}/")]
        groups[label] = {name.removeprefix(f"{label}/"): rest.pop(name) for name in names}
    groups["eval"] = {name.removeprefix("eval/"): value for name, value in rest.items()}
    return {label: own for label, own in groups.items() if own}


def values_by_loader(values: Mapping[str, float], loaders: Iterable[str]) -> list[str]:
    """Return the metrics of an evaluation, in a line for each loader that has a name."""
    lines = []
    for label, own in by_loader(values, loaders).items():
        start, prefix = ("", "eval/") if label == "eval" else (f"{label}: ", "")
        lines.append(start + ", ".join(f"{prefix}{n} {value:.4g}" for n, value in own.items()))
    return lines
