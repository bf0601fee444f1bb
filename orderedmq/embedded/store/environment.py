"""One LMDB environment per directory and process: opening, transactions, mapping of errors.

Rules: an environment is opened once per process and shared, because LMDB breaks if an environment is opened twice. An environment is
never used across a fork: a child that uses its parent's connection is refused, and its own connection opens an environment of its own.
Errors of LMDB and the system are raised as StoreErrors. Values are valid only inside their transaction, so they are copied. Everything that
was written is on the disk when ``write`` returns.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn, TypeVar

import lmdb

from orderedmq.conditions import StoreCondition, StoreFullCondition
from orderedmq.embedded.store import formats, layout, verify
from orderedmq.embedded.store.filesystem import file_system, locked, make_folder, missing_rights, refuse_other_files
from orderedmq.embedded.store.resize_lock import ResizeLock
from orderedmq.embedded.store.segments import Segments
from orderedmq.embedded.store.store_file import File, file_at, not_the_same
from orderedmq.embedded.store.transaction import Transaction, damaged
from orderedmq.errors import StoreError, StoreFullError, map_full, no_store, stays_here
from orderedmq.ownership.lock import Instant

#: Bytes of address space, not of disk space: the file grows as it is written.
MAP_SIZE: Final = 1 << 40
MAX_READERS: Final = 1024
#: Bytes by which a full map grows, so that deletions and renewals remain possible.
SPARE: Final = 4 * 1024 * 1024
#: After this many writes, a process clears the slots of killed readers, because these slots keep freed pages from being reused.
CLEAR_READERS: Final = 256
_NETWORK: Final = frozenset(
    (
        "nfs", "nfs4", "cifs", "smb", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "fuse.sshfs", "fuse.s3fs", "fuse.rclone",
        "fuse.glusterfs", "fuse.ceph-fuse", "fuse.gcsfuse", "fuse.juicefs",
    )
)  # fmt: skip
_FULL: Final = ("No space left on device", "File too large", "Disk quota exceeded")
#: lmdb also reports this error after a partial write, which is the first sign of a full disk.
_SHORT: Final = "Input/output error"
_LITTLE: Final = 64 * 1024 * 1024
_READ_ONLY: Final = os.strerror(errno.EROFS)
_DENIED: Final = (os.strerror(errno.EACCES), os.strerror(errno.EPERM), _READ_ONLY)
#: LMDB's error if another process holds the reader's lock of this process's number.
_SAME_NUMBER: Final = os.strerror(errno.EAGAIN)
_TWO_CONTAINERS: Final = (
    "a process in another container uses it under the same process number, by which LMDB tells readers apart. Run all processes that use a "
    "store in one container, or let the containers share process numbers (docker run --pid, or shareProcessNamespace in Kubernetes)"
)
_NO_DESCRIPTOR: Final = frozenset((errno.EMFILE, errno.ENFILE))
_NO_ROOM: Final = frozenset((errno.ENOSPC, errno.EFBIG, errno.EDQUOT))

#: The errors by which LMDB reports damaged pages. NotFoundError means that a database is missing.
_DAMAGED: Final = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.CursorFullError,
    lmdb.PageFullError,
    lmdb.IncompatibleError,
    lmdb.NotFoundError,
    lmdb.BadValsizeError,
    lmdb.KeyExistsError,
)

T = TypeVar("T")


class _Process:
    """The stores that one process has open."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.stores: dict[File, Store] = {}


class Store:
    """The environment of one store in this process. Callers of ``open`` share it, and the last ``close`` closes it.

    A transaction raises StoreError REPLACED or MISSING at its end if the path no longer leads to the store's file.
    """

    #: By process number, because a child after a fork shares nothing with its parent.
    _processes: ClassVar[dict[int, _Process]] = {}

    def __init__(self, path: Path, map_size: int) -> None:
        self.path = path
        self._pid = os.getpid()
        self.map_size = map_size
        #: Identifies the store and its file. A copy of the store has another identity.
        self.identity = ""
        #: The store's file; None until the store is opened for the first time.
        self._file: File | None = None
        #: When this process last applied the retention of all topics (`garbage.tidy`).
        self.retained: Instant | None = None
        self._users = 0
        self._writes = 0
        self._closed = False
        #: Whether LMDB failed to write a meta page, and that page has not been overwritten since.
        self._meta_is_stale = False
        self._env: Any = None
        self._handles: dict[str, Any] = {}
        #: The store's segment files, usable once the store is open.
        self.segments = Segments(lambda: self.path, "", self.require_here)
        #: Held while the environment is opened or closed. An error while it is opened closes it, so the lock is reentrant.
        self._opening = threading.RLock()
        self._resize_lock = ResizeLock()

    def __reduce__(self) -> NoReturn:
        raise stays_here(self.path)

    # -- opening -----------------------------------------------------------------------------------------------------------

    @staticmethod
    def exists(path: Path) -> bool:
        """Whether ``path`` has a store's file. Raises PermissionError if a directory on the path cannot be entered."""
        return file_at(path) is not None

    @classmethod
    def require_there(cls, path: Path) -> None:
        """Require a store at ``path``. Raises StoreError MISSING if there is none, PERMISSION if the path cannot be read."""
        try:
            there = cls.exists(path)
        except PermissionError as error:
            raise _no_permission(path, error) from error
        if not there:
            raise no_store(path)

    @classmethod
    def open(cls, path: Path, *, map_size: int | None = None, create: bool = False) -> Store:
        """Open the store at ``path``, or share it if this process has it open. A missing store is created if ``create`` is true.

        Raises StoreError MISSING, NOT_EMPTY, PLATFORM, NETWORK_FILE_SYSTEM, PERMISSION, OTHER_FORMAT, NOT_A_STORE, CORRUPT,
        REPLACED or IO, or StoreFullError.
        """
        if sys.platform == "win32":
            why = "the embedded broker does not run on Windows. Use Linux, macOS, or WSL with a Linux path"
            raise StoreError(StoreCondition.PLATFORM, why)
        kind = file_system(path)
        if kind in _NETWORK:
            why = f"{path} is on a {kind} file system, where memory maps and locks are not safe. Use a local disk for the store"
            raise StoreError(StoreCondition.NETWORK_FILE_SYSTEM, why)
        try:
            if create and not cls.exists(path):
                refuse_other_files(path)
        except PermissionError as error:
            raise _no_permission(path, error) from error
        if not create:
            cls.require_there(path)
        process = cls._process()
        with process.guard:
            store = cls._open_here(path)
            if store is None:
                store = cls(path, map_size or MAP_SIZE)
                store._environment(create=create)
                assert store._file is not None, "the store was opened"
                process.stores[store._file] = store
            store._users += 1
            return store

    @classmethod
    @contextlib.contextmanager
    def held(cls, path: Path) -> Iterator[int]:
        """Yield the newest snapshot's transaction number, and keep LMDB from overwriting that snapshot until the block ends.

        Raises StoreError NOT_A_STORE, CORRUPT, PERMISSION or IO.
        """
        # The guard keeps other threads from opening the environment at the same time, because a process may open it only once.
        process = cls._process()
        with process.guard, contextlib.ExitStack() as stack:
            file = file_at(path)
            store = process.stores.get(file) if file is not None else None
            stack.enter_context((store or cls(path, MAP_SIZE)).errors_mapped("open"))
            env = store._env if store is not None else None
            if env is None:
                env = stack.enter_context(contextlib.closing(cls(path, MAP_SIZE)._lmdb(False)))
            with env.begin() as txn:
                yield txn.id()

    @classmethod
    def _open_here(cls, path: Path) -> Store | None:
        """Return the store that this process has open at ``path``, or None if it has none open there."""
        file = file_at(path)
        store = cls._process().stores.get(file) if file is not None else None
        if store is not None:
            if file_at(store.path) != file:
                # The store was moved, or the link by which it was opened leads elsewhere.
                store.path = path
            store._environment()
        return store

    @classmethod
    def _process(cls) -> _Process:
        """Return this process's open stores. A child drops its parent's environments, because LMDB refuses to open a file twice."""
        process = cls._processes.get(os.getpid())
        if process is None:
            for parent in list(cls._processes.values()):
                for store in parent.stores.values():
                    store._env, store._handles = None, {}
            process = cls._processes.setdefault(os.getpid(), _Process())
        return process

    @property
    def is_own(self) -> bool:
        """Whether this process has opened the store. False in a child after a fork."""
        return self._pid == os.getpid()

    def require_own(self) -> None:
        """Raises OptionError UNSUPPORTED in a child after a fork."""
        if not self.is_own:
            raise stays_here(self.path)

    def require_here(self) -> None:
        """Require that the path still leads to the store's file. Raises StoreError REPLACED or MISSING."""
        try:
            file = file_at(self.path)
        except OSError:
            # A directory on the path cannot be entered at the moment, so assume that it still leads to the file.
            return
        if self._file not in (None, file):
            raise not_the_same(self.path)

    def close(self) -> None:
        self.require_own()
        process = self._process()
        with process.guard:
            self._users -= 1
            if self._users <= 0:
                self._closed = True
                if self._file is not None and process.stores.get(self._file) is self:
                    del process.stores[self._file]
                self._drop()

    def _drop(self) -> None:
        # Until the environment is closed, other threads wait, because LMDB refuses to open it a second time.
        with self._opening:
            env, self._env, self._handles = self._env, None, {}
            if env is not None:
                env.close()

    def _drop_if_dead(self, env: Any) -> None:
        """Drop an environment that LMDB has made unusable, as LMDB does after failing to write a meta page."""
        try:
            env.begin().abort()
        except lmdb.PanicError:
            self._drop()
            self._meta_is_stale = True
        except lmdb.Error:
            # Another thread may have closed the environment. Any other error is raised again at the next use.
            pass

    def _write_over_stale_meta(self) -> None:
        """Commit a transaction without changes, which overwrites the meta page whose write has failed.

        LMDB has put the number of an earlier transaction into that page, next to the roots of the failed transaction. LMDB never reads
        these roots. But the page looks as if a bit of its number had changed, so `verify.require_sound` would refuse the store.
        """
        with contextlib.closing(self._lmdb(False)) as env:
            handles = {name: env.open_db(name.encode(), create=False) for name in layout.DATABASES}
            with env.begin(write=True) as txn:
                Transaction(txn, handles, self.path, self.segments).sign(always=True)
        self._meta_is_stale = False

    def _environment(self, *, create: bool = False) -> tuple[Any, dict[str, Any]]:
        self.require_own()
        env, handles = self._env, self._handles
        if env is not None:
            return env, handles
        with self._opening, self.errors_mapped("open"), contextlib.ExitStack() as stack:
            if self._closed:
                raise StoreError(StoreCondition.IO, f"the connection to the store at {self.path} was closed. Connect again")
            if self._env is None:
                if create:
                    make_folder(self.path)
                    # Only one process at a time makes the files of a new store, because it removes them if it fails.
                    stack.enter_context(locked(self.path))
                verify.require_metas(self.path)
                if self._meta_is_stale:
                    self._write_over_stale_meta()
                before = file_at(self.path)
                env = self._lmdb(create)
                try:
                    env.reader_check()
                    verify.require_sound(self.path, env)
                    handles, store_id = formats.prepare(env, self.path, self.segments, create)
                    self.segments.store_id = store_id
                    # If another store takes this one's place while it is opened, this is the former file, and the transaction notices it.
                    self._recognise(before or file_at(self.path), store_id)
                except BaseException:
                    env.close()
                    raise
                self._env, self._handles = env, handles
            return self._env, self._handles

    def _recognise(self, file: File | None, store_id: str) -> None:
        """Remember the file and the identity. Raises StoreError REPLACED or MISSING if the store was opened before and was another one."""
        identity = store_id if file is None else f"{store_id}-{file[1]:x}"
        if file is None or self.identity not in ("", identity):
            raise not_the_same(self.path)
        self._file, self.identity = file, identity

    def _lmdb(self, create: bool) -> Any:
        try:
            return lmdb.open(
                str(self.path),
                map_size=self.map_size,
                max_dbs=len(layout.DATABASES),
                max_readers=MAX_READERS,
                mode=0o600,
                create=create,
                # Without readahead, random access does not read the pages around an entry.
                readahead=False,
                meminit=False,
            )
        except (lmdb.InvalidError, lmdb.VersionMismatchError) as error:
            raise self._no_store(error) from error
        except lmdb.Error as error:
            if "data format" in str(error):
                raise self._no_store(error) from error
            if "already open in this process" not in str(error):
                raise
            raise StoreError(
                StoreCondition.IO,
                f"the store at {self.path} cannot be opened in this process, which was forked while another thread was using the store. "
                "Start processes another way (multiprocessing's spawn)",
            ) from error

    def _no_store(self, error: Exception) -> StoreError:
        return StoreError(
            StoreCondition.NOT_A_STORE,
            f"{self.path} has a data.mdb that is not an LMDB file or whose first pages are damaged ({error}). Choose another path, or "
            "restore the store from a copy",
        )

    # -- transactions ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def read(self) -> Iterator[Transaction]:
        """Yield a transaction that reads one snapshot of the entries. Do not keep it open while rows are processed.

        Reading a payload fails if its segment was deleted after the transaction began. `consult` handles that.
        """
        env, handles = self._environment()
        with self.errors_mapped("read"), self._transaction(env, write=False) as txn:
            yield Transaction(txn, handles, self.path, self.segments)
        self.require_here()

    def consult(self, work: Callable[[Transaction], T]) -> T:
        """Return the result of ``work`` on a read transaction. If a segment was deleted during ``work``, retry with a newer snapshot.

        Raises StoreError CORRUPT if the newest snapshot needs a segment that is missing.
        """
        while True:
            with self.read() as txn:
                number = txn.number()
                try:
                    return work(txn)
                except StoreError as error:
                    missing, raised = txn.missing, error
            if missing is None:
                raise raised
            with self.read() as txn:
                if txn.number() == number or txn.get("segments", missing) is not None:
                    raise raised

    @contextlib.contextmanager
    def write(self) -> Iterator[Transaction]:
        """Yield a write transaction. Only one runs at a time. At the end, all of its changes are on the disk, or none after an error."""
        env, handles = self._environment()
        committed, transaction = False, None
        try:
            with self.errors_mapped("write"), self._transaction(env, write=True) as txn:
                transaction = Transaction(txn, handles, self.path, self.segments)
                yield transaction
                transaction.sign()
            committed = True
        finally:
            if transaction is not None:
                transaction.end(committed=committed)
            if not committed:
                self._drop_if_dead(env)
        # Refuse a write to a store that was moved or replaced, because it would be lost.
        self.require_here()

    def write_even_if_full(self, work: Callable[[Transaction], T]) -> T:
        """Run a write that must succeed even if the map is full (a renewal, a deletion). In that case the map grows by SPARE."""
        try:
            with self.write() as txn:
                return work(txn)
        except StoreFullError as error:
            if not isinstance(error.__cause__, lmdb.MapFullError):
                raise
        env, _ = self._environment()
        with self.errors_mapped("grow"), self._resize_lock.exclusive():
            env.set_mapsize(env.info()["map_size"] + SPARE)
        with self.write() as txn:
            return work(txn)

    def write_deletion(self, work: Callable[[Transaction], T]) -> T:
        """Run a write that deletes, then a small write, because only the second write after a deletion can reuse its freed pages."""
        out = self.write_even_if_full(work)
        # Ignore an error of the small write, because the deletion is already done.
        with contextlib.suppress(StoreError):
            self.write_even_if_full(lambda txn: txn.take_number("freed"))
        return out

    def copy_entries(self, folder: Path, look: Callable[[Transaction], object], target: Path) -> None:
        """Copy all entries into a new ``data.mdb`` in the empty ``folder`` in ``target``. The copy is on the disk when this returns.

        ``look`` is called with a transaction that sees exactly these entries, while no other write runs.
        """
        env, handles = self._environment()
        with self.errors_mapped("copy", target), contextlib.ExitStack() as stack:
            with self._transaction(env, write=True) as txn:
                # The resize lock is taken only now, because beginning the transaction may have to resize the map.
                stack.enter_context(self._resize_lock.shared())
                snapshot = stack.enter_context(env.begin())
                look(Transaction(txn, handles, self.path, self.segments))
            env.copy(str(folder), compact=True, txn=snapshot)
            (folder / "data.mdb").chmod(0o600)
            with contextlib.closing(lmdb.open(str(folder), map_size=self.map_size, max_dbs=len(handles), mode=0o600)) as copy:
                names = {name: copy.open_db(name.encode(), create=False) for name in handles}
                # The copy's transaction numbers differ from the store's, and both of its snapshots must name them (verify.py).
                for _ in range(2):
                    with copy.begin(write=True) as txn:
                        Transaction(txn, names, folder, self.segments).sign(always=True)

    @contextlib.contextmanager
    def _transaction(self, env: Any, *, write: bool) -> Iterator[Any]:
        if write:
            self._writes += 1
            if self._writes % CLEAR_READERS == 0:
                env.reader_check()
        for again in (True, False):
            with self._resize_lock.shared():
                try:
                    txn = env.begin(write=write)
                except (lmdb.MapResizedError, lmdb.ReadersFullError):
                    if not again:
                        raise
                else:
                    with txn:
                        yield txn
                    return
            # Either killed readers hold all slots, or another process with a larger map has written beyond this process's map.
            env.reader_check()
            with self._resize_lock.exclusive():
                env.set_mapsize(0)

    def last_change(self) -> int:
        """Return a number that grows with every write of any process. Reading it costs very little.

        It is the number of the newest snapshot. ``env.info()`` is not used, because it counts a write already before the write's fsync,
        while readers still see the earlier state. A reader would take that state for the new one.
        """
        with self.read() as txn:
            return txn.number()

    @contextlib.contextmanager
    def errors_mapped(self, what: str, target: Path | None = None) -> Iterator[None]:
        """Raise errors of LMDB and the system as StoreErrors. ``what``: the attempted action, for the message.

        ``target``: the folder that is written to, if it is not the store's. It is the one that may be full or lack rights.
        """
        self.require_own()
        written = target or self.path
        try:
            yield
        except lmdb.MapFullError as error:
            raise map_full(self.path, self.map_size) from error
        except (lmdb.PanicError, lmdb.BadTxnError) as error:
            # LMDB makes an environment unusable after a failed write of its meta page. A new environment works once the cause is gone.
            self._meta_is_stale = self._meta_is_stale or isinstance(error, lmdb.PanicError)
            self._drop()
            raise self._failed(f"{what} and was closed", f"{error}. Try again") from error
        except _DAMAGED as error:
            raise damaged(self.path, str(error)) from error
        except lmdb.ReadonlyError as error:
            raise _no_permission(written, error) from error
        except lmdb.Error as error:
            text = str(error)
            if any(reason in text for reason in _FULL) or (_SHORT in text and _little_room(written)):
                raise _no_room(written, error) from error
            if _SAME_NUMBER in text:
                raise self._failed(what, _TWO_CONTAINERS) from error
            if any(reason in text for reason in _DENIED):
                raise _no_permission(written, error) from error
            raise self._failed(what, text) from error
        except PermissionError as error:
            raise _no_permission(written, error) from error
        except OSError as error:
            if error.errno == errno.ENOENT:
                # The file may be missing because another store has taken this one's place.
                self.require_here()
            if error.errno in _NO_ROOM:
                raise _no_room(written, error) from error
            if error.errno == errno.EROFS:
                raise _no_permission(written, error) from error
            if error.errno in _NO_DESCRIPTOR:
                raise self._failed(what, f"{error}. Allow more open files (ulimit -n)") from error
            raise self._failed(what, str(error)) from error

    def _failed(self, what: str, why: str) -> StoreError:
        return StoreError(StoreCondition.IO, f"the store at {self.path} failed to {what}: {why}")


def _little_room(path: Path) -> bool:
    """Whether less than 64 MiB are left on the disk of ``path`` or below this process's limit on file sizes."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    disk = os.statvfs(path)
    free = disk.f_bavail * disk.f_frsize
    file = path / "data.mdb"
    if limit != resource.RLIM_INFINITY:
        free = min(free, limit - (file.stat().st_size if file.exists() else 0))
    return free < _LITTLE


def _no_room(path: Path, error: Exception) -> StoreFullError:
    why = f"there is no room on the disk of the store at {path} ({error}), and nothing was changed. Make room and try again"
    return StoreFullError(StoreFullCondition.FULL, why)


def _no_permission(path: Path, error: Exception) -> StoreError:
    if _READ_ONLY in str(error):
        remedy = "the store's file system is read-only. Mount it writable. If a disk error made it read-only, repair the disk first (see dmesg)"
    else:
        remedy = missing_rights(path)
    why = f"this process has no permission to use the store at {path} ({error}), and nothing was changed: {remedy}"
    return StoreError(StoreCondition.PERMISSION, why)
