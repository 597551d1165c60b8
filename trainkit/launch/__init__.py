"""`trainkit launch`: starting a job on one machine or more, and looking after it until its end."""
