"""Settings of the whole test run."""

# The folder is the package trainkit.callbacks; under its own name it refuses to be imported.
collect_ignore = ["callbacks"]
