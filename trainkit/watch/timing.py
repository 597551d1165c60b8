"""All times of the watch, in seconds: what is noticed when.

| what happens | noticed | ended by |
|---|---|---|
| a process ends, however | at once: the kernel closes its connection | `GRACE` at most |
| its collective breaks before that is heard of | | `EXPLAIN` |
| a process is stopped, on the machine of process 0 | after `STOPPED` | `ANSWER` |
| a process is frozen, or stopped where nobody can look | after `SILENT` | `ANSWER` |
| a run makes no progress | after the limits of `Watchdog` | `ANSWER` |
| processes wait in different collectives | after `WAITS` and two times `TICK` | `ANSWER` |
| a machine is gone | after `UNREACHABLE` | `GRACE` at most |

The launchers of several machines have a limit of their own for a machine, in `launch/link.py`.
"""

# How often the thread looks.
TICK = 5.0  # without a run
PAUSE = 0.5  # beside one
ALERT = 0.1  # when something has happened
LONGEST_PAUSE = 6.0  # that counts: in a longer one this process did not run, but slept

# Connections.
CONNECT = 20.0
SEND = 0.3  # one message: a process that is stopped must not hold up the others
BEAT = 3.0  # between two signs of life
STRANGER = 5.0  # in which a caller must say the word
REST = 0.01  # in which nobody is let in, where there is no room for more
UNREACHABLE = 40  # after which the kernel gives up a connection: nothing is acknowledged

# Silence of a process that nobody has asked anything.
STOPPED = 40.0  # after which one that the kernel does not run is frozen
SILENT = 300.0  # after which another one is: it may only hold the interpreter lock

# Silence of a process in a job that stands still.
SURE = 1.0  # after which one is frozen that is stopped, or has used a processor for `OWN` meanwhile
OWN = 1.0
ANSWER = 10.0  # after which any other one is, if nobody else has said anything meanwhile either
LOST = 20.0  # after which it does not matter what is not known
WAITS = 15.0  # of process 0 in one collective, before it asks where the others are

# The end. Who hears of a failure may be about to raise the same error, agreed by all; then it
# leaves by itself. It gets `GRACE`, or more where the machine is too busy to run it.
GRACE, GRACE_OF_CPU, LONGEST_GRACE = 2.0, 0.3, 20.0
EXPLAIN = 2.5  # from an error of a collective until it is known who is lost
CLEAN_UP = 30.0  # for a process that has failed itself
