"""The command `trainkit`; a command imports torch only where it needs it."""
