"""`python -m trainkit.cli` is the command `trainkit`."""

import sys

from trainkit.lazy import what_to_install


def start() -> int:
    """Run the command; where a package that all needs is missing, say what to install."""
    try:
        from trainkit.cli.main import main  # also this needs a package

        return main()
    except ModuleNotFoundError as error:
        if (text := what_to_install(error)) is None:
            raise
        print(text, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(start())
