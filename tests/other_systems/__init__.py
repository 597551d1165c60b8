"""What is not there on Windows and macOS, taken away from processes on Linux."""
