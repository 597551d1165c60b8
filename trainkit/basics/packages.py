"""Packages that only some parts of trainkit need; all others work without them."""

from importlib.util import find_spec

from trainkit.errors import ConfigError


def require(package: str, user: str, instead: str = "", module: str = "") -> None:
    """Raise ConfigError where a package is not installed; nothing is imported.

    Args:
        package: As pip calls it.
        user: What needs it; the sentence begins with it.
        instead: What else may be done, such as ", or leave out `--png`".
        module: As Python calls it; by default as pip does, without "py" in front.
    """
    if find_spec(module or package.removeprefix("py")) is None:
        raise ConfigError(
            f"{user} needs the package `{package}`, which is not installed. Run `pip install "
            f"{package}`{instead}."
        )
