"""The folder of a run, mirrored to an address while training goes on."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from trainkit.basics.lock import RunLock
from trainkit.basics.outputs import address_of
from trainkit.checkpoint.format.manifest import Manifest
from trainkit.checkpoint.format.names import CHECKPOINTS, WEIGHTS
from trainkit.checkpoint.listing import Entry
from trainkit.checkpoint.retention import Retention, best_of, rotate
from trainkit.checkpoint.store import CheckpointStore
from trainkit.errors import CheckpointError
from trainkit.storage.copies import ForeignCheckpoint, Remote, State, checkpoints_in, files_in
from trainkit.storage.lease import Lease, lease_seconds
from trainkit.storage.objects import Objects, StorageError

_PAUSE, _RETRY = 300.0, 30.0  # seconds until files are looked at again; after a failure
_TRIES_AT_END = 4  # a third of a lease apart, in which it is renewed
_PLACES = (CHECKPOINTS, WEIGHTS)


class Mirror:
    """Mirrors a run's folder to its address; process 0 has one, and a thread of it uploads.

    A checkpoint is committed in the folder first, as ever. Training never waits for an upload: one
    under way is kept in the folder beside what retention keeps, until it has ended. What cannot be
    uploaded is said once, and tried again.

    Args:
        lock: That of the folder, held.
        say: Prints a line.
    """

    def __init__(self, lock: RunLock, say: Callable[[str], None]) -> None:
        address = address_of(lock.directory)
        assert address is not None
        self._folder, self._lock, self._say = lock.directory, lock, say
        objects = Objects(address)
        self._address = address
        self._lease = Lease(objects, self._folder)
        self._lease.acquire(say)
        try:
            self._remote = Remote(objects)
            self._remote.left = {n for n in self._remote.left if n.rpartition("/")[0] in _PLACES}
            for name in sorted(self._remote.left):
                self._remote.remove(name)
            self._fetch()
        except BaseException:
            self._lease.release()
            raise
        self._sent: dict[str, State] = {}  # other files, as they were then
        self._kept: dict[str, tuple[CheckpointStore, Retention, frozenset[int]]] = {}
        self._foreign: set[str] = set()
        self._under_way = ""  # the checkpoint that is uploaded now
        self._failed = False
        self._ends = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="trainkit-mirror", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise CheckpointError where folder or address are no longer the run's."""
        self._lock.check()
        self._lease.check()

    def committed(
        self, store: CheckpointStore, policy: Retention, more: frozenset[int]
    ) -> frozenset[int]:
        """Hear of a new checkpoint; return the steps that must stay in the folder for now."""
        self._kept[store.directory.name] = store, policy, more
        self._wake.set()
        parent, _, name = self._under_way.rpartition("/")
        checkpoints = store.checkpoints() if parent == store.directory.name else []
        return frozenset(entry.step for entry in checkpoints if entry.path.name == name)

    def wait_for(self, checkpoint: Path) -> None:
        """Wait until a checkpoint, if it is of the folder, is at the address for other machines."""
        if not checkpoint.is_relative_to(self._folder):
            return
        name = checkpoint.relative_to(self._folder).as_posix()
        self._wake.set()
        while name not in self._remote.checkpoints:
            if self._failed or name in self._foreign or not self._thread.is_alive():
                raise StorageError(
                    f"`{self._address}/{name}` is not uploaded, and other machines of this job "
                    "need it. See to the storage, and start the job again."
                )
            time.sleep(0.1)

    def release(self) -> None:
        """Upload what is left, and give the address back; waits for it."""
        self._ends = True
        self._wake.set()
        self._thread.join()
        self._lease.release()

    def _fetch(self) -> None:
        """Bring what a resume needs of the address and the folder lacks."""
        remote, store = self._remote, CheckpointStore(self._folder / CHECKPOINTS)
        store.clean()
        remote.check_runs(self._folder)
        resumable = [
            (name, manifest)
            for name, manifest in remote.newest_first()
            if name.startswith(f"{CHECKPOINTS}/") and manifest.is_resumable
        ]
        here = store.newest_valid(self._say) if resumable else None
        is_newer = False
        for name, manifest in resumable:
            if here is not None and manifest.age <= here.manifest.age:
                break
            if self._bring(name):
                is_newer = True
                if manifest.is_finite:  # else one from which a run goes on is needed, too
                    break
        remote.fetch_others(self._folder, replaces=is_newer)
        for entry in best_of([self._entry(*each) for each in remote.checkpoints.items()])[1]:
            if not entry.path.exists():
                self._bring(entry.path.relative_to(self._folder).as_posix())

    def _bring(self, name: str) -> bool:
        """Bring a checkpoint; return whether it verifies."""
        self._say(f"trainkit: fetching `{self._address}/{name}`.")
        try:
            self._remote.fetch(name, self._folder)
        except StorageError:
            raise
        except CheckpointError as error:
            self._say(f"Skipped: {error}")
            return False
        return True

    def _entry(self, name: str, manifest: Manifest) -> Entry:
        return Entry(self._folder / name, manifest.step, manifest)

    def _go_on(self) -> None:
        tries = _TRIES_AT_END
        while True:
            ends = self._ends
            tries -= ends
            self._wake.clear()
            try:
                self._send_all(ends=ends)
            except Exception as error:
                gives_up = ends and (not tries or not isinstance(error, StorageError))
                self._tell(error, gives_up=gives_up)
                if gives_up:
                    return
            else:
                if self._failed:
                    self._say(f"trainkit: `{self._address}` has all of the run again.")
                self._failed = False
                if ends:
                    return
            if ends:
                time.sleep(lease_seconds() / 3)
            elif not self._ends:
                self._wake.wait(_RETRY if self._failed else _PAUSE)

    def _tell(self, error: Exception, *, gives_up: bool) -> None:
        lacks = sorted(checkpoints_in(self._folder).keys() - self._remote.checkpoints.keys())
        if gives_up:
            self._say(
                f"trainkit: WARNING: `{self._address}` lacks what `{self._folder}` holds, "
                f"{', '.join(lacks) or 'the last files'}: {error} Start the program here again "
                "to upload it, or copy the folder."
            )
        elif not self._failed:
            self._say(
                f"trainkit: nothing is uploaded for now: {error} Training goes on, its checkpoints "
                f"are in `{self._folder}`, and the upload is tried again."
            )
        self._failed = True

    def _send_all(self, *, ends: bool) -> None:
        """Upload what has changed, then remove what retention gives up; at the end here, too."""
        for cut in self._remote.left - checkpoints_in(self._folder).keys():
            self._lease.require()  # what a full bucket has cut makes room for a newer one
            self._remote.remove(cut)
        # Logs before checkpoints: whoever resumes from one must find all lines before it.
        self._send_files()
        while name := self._newest_missing():
            self._send_files()
            self._under_way = name
            try:
                self._remote.send(name, self._folder, self._lease.require)
            except FileNotFoundError:
                continue  # retention was faster
            except ForeignCheckpoint as error:
                self._foreign.add(name)
                self._say(f"trainkit: {error}")
            finally:
                self._under_way = ""
        for kept in self._kept.values() if ends else ():
            rotate(*kept)  # of what was under way when that was its turn
        for name in {*self._outdated(), *self._remote.left}:
            self._lease.require()
            self._remote.remove(name)

    def _newest_missing(self) -> str | None:
        known = self._remote.checkpoints.keys() | self._foreign
        here = [(manifest.age, name) for name, manifest in checkpoints_in(self._folder).items()]
        return max((each for each in here if each[1] not in known), default=(0, None))[1]

    def _send_files(self) -> None:
        for name, state in files_in(self._folder).items():
            if self._sent.get(name) != state:
                self._lease.require()
                try:
                    self._remote.objects.put_file(name, self._folder / name)
                except FileNotFoundError:
                    continue
                self._sent[name] = state

    def _outdated(self) -> list[str]:
        """Return the checkpoints there that neither the folder nor retention keeps."""
        gone = []
        for folder, (store, policy, more) in [*self._kept.items()]:
            here = store.checkpoints()
            own = [
                self._entry(name, manifest)
                for name, manifest in self._remote.newest_first()[::-1]
                if name.rpartition("/")[0] == folder and here
                if manifest.run_id == here[-1].manifest.run_id
            ]
            finite = [entry for entry in own if entry.manifest.is_finite]
            newest = {entry.step for entry in (*own[-1:], *finite[-1:])}
            kept = policy.keep(own) | more | store.pinned() | newest
            held = {entry.path for entry in here}
            gone += [e.path for e in own if e.step not in kept and e.path not in held]
        return [path.relative_to(self._folder).as_posix() for path in gone]
