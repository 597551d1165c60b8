"""What Python imports when it starts a process of `trainkit launch`, before the script begins."""
