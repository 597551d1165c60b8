"""What a checkpoint holds of a run, and how a run goes on from one."""
