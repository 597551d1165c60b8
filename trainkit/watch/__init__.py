"""Watches the processes of a job, and ends all where one of them fails or stands still."""
