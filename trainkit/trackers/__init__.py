"""Where the values of a run go: one class for each format or service, for both faces."""
