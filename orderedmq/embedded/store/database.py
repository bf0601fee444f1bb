"""A store's index, one SQLite file per directory: opening, transactions, mapping of errors.

Rules: a process opens a store once and shares it among its threads; each transaction has a connection for itself. A connection is never
used across a fork: a child that uses its parent's connection is refused. Errors of SQLite and the system are raised as StoreErrors.
Everything that was written is on the disk when ``write`` returns. Nothing here may open and close the index by itself, because that
would release SQLite's locks of this process.

This module is long because opening, transactions and the mapping of errors share the connections and the lock of one store.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, Final, NoReturn, TypeVar

from orderedmq.conditions import StoreCondition, StoreFullCondition
from orderedmq.embedded.store import schema, wal
from orderedmq.embedded.store.filesystem import (
    file_system,
    make_folder,
    missing_rights,
    refuse_other_files,
    sync_folder,
    usable,
)
from orderedmq.embedded.store.schema import FORMAT, SETTINGS, STORE_FORMAT, STORE_ID, TABLES, Setting
from orderedmq.embedded.store.segments import Segments
from orderedmq.embedded.store.store_file import FILE, File, file_at, not_the_same
from orderedmq.embedded.store.store_lock import StoreLock
from orderedmq.embedded.store.transaction import Transaction, damaged
from orderedmq.errors import StoreError, StoreFullError, no_store, stays_here
from orderedmq.ownership.lock import Instant

_NETWORK: Final = frozenset(
    (
        "nfs", "nfs4", "cifs", "smb", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "fuse.sshfs", "fuse.s3fs", "fuse.rclone",
        "fuse.glusterfs", "fuse.ceph-fuse", "fuse.gcsfuse", "fuse.juicefs",
    )
)  # fmt: skip
#: The index while it is made. It gets its name when it is complete.
_NEW: Final = f"{FILE}.new"
#: Seconds for which SQLite waits for another process, which is rare, because writers take turns and readers wait for nobody.
_PATIENCE: Final = 60.0
_READ_ONLY: Final = os.strerror(errno.EROFS)
_NO_DESCRIPTOR: Final = frozenset((errno.EMFILE, errno.ENFILE))
_NO_ROOM: Final = frozenset((errno.ENOSPC, errno.EFBIG, errno.EDQUOT))
#: What a read of a damaged index raises. The second one is for a damaged text in SQLite's own message.
UNREADABLE: Final = (sqlite3.Error, UnicodeDecodeError)
_PRAGMAS: Final = (
    "synchronous=FULL",
    # Damaged pages are noticed before their content is used, and no page is read through a map, where an unreadable sector is a signal.
    "cell_size_check=ON",
    "mmap_size=0",
    f"journal_size_limit={wal.LIMIT // 2}",
)

T = TypeVar("T")


class _Process:
    """The stores that one process has open."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.stores: dict[File, Store] = {}


class Store:
    """The index and the segments of one store in this process. Callers of ``open`` share it, and the last ``close`` closes it.

    A transaction raises StoreError REPLACED or MISSING at its end if the path no longer leads to the store's file.
    """

    #: By process number, because a child after a fork shares nothing with its parent.
    _processes: ClassVar[dict[int, _Process]] = {}

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pid = os.getpid()
        #: Identifies the store and its file. A copy of the store has another identity.
        self.identity = ""
        self._file: File | None = None
        #: How many acknowledged transactions the index lacks, which only a damaged store does.
        self.missing_transactions = 0
        #: When this process last applied the retention of all topics (`garbage.tidy`).
        self.retained: Instant | None = None
        self._users = 0
        self._lock: StoreLock | None = None
        #: Connections that no transaction uses, and how many are used. Guarded by ``_pool``.
        self._pool = threading.Lock()
        self._free: list[sqlite3.Connection] = []
        self._used = 0
        self._closed = False
        #: The size of the log in bytes from which the next write truncates it.
        self._long_log = wal.LIMIT
        #: The store's segment files, usable once the store is open.
        self.segments = Segments(lambda: self.path, "", self.require_here)

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
    def open(cls, path: Path, *, create: bool = False, damaged_too: bool = False) -> Store:
        """Open the store at ``path``, or share it if this process has it open.

        ``create``: create a missing store. ``damaged_too``: do not verify the index (for `check`, which lists all damage).

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
            store = cls._open_here(process, path)
            if store is None:
                store = cls(path)
                store._begin(create=create, verify=not damaged_too)
                assert store._file is not None, "the store was opened"
                process.stores[store._file] = store
            store._users += 1
            return store

    @classmethod
    def _open_here(cls, process: _Process, path: Path) -> Store | None:
        """Return the store that this process has open at ``path``, or None if it has none open there."""
        file = file_at(path)
        store = process.stores.get(file) if file is not None else None
        if store is not None and file_at(store.path) != file:
            # The store was moved, or the link by which it was opened leads elsewhere.
            store.path = path
        return store

    @classmethod
    def _process(cls) -> _Process:
        """Return this process's open stores. A child after a fork first closes the connections that it has from its parent.

        SQLite keeps the state of its locks per file in memory. A child that opened another connection beside its parent's would
        take no lock of its own. Closing them changes nothing for the parent, because record locks belong to the process.
        Raises StoreError IO if a thread of the parent was using a connection.
        """
        process = cls._processes.get(os.getpid())
        if process is None:
            for parent in list(cls._processes.values()):
                for store in parent.stores.values():
                    if store._used:
                        raise StoreError(
                            StoreCondition.IO,
                            f"the store at {store.path} cannot be opened in this process, which was forked while another thread was using "
                            "the store. Start processes another way (multiprocessing's spawn)",
                        )
                    while store._free:
                        store._free.pop().close()
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
            if self._users > 0 or self._closed:
                return
            if self._file is not None and process.stores.get(self._file) is self:
                del process.stores[self._file]
            with self._pool:
                self._closed = True
                ends = self._must_end()
        if ends:
            self._end()

    def _begin(self, *, create: bool, verify: bool) -> None:
        with self.errors_mapped("open"), contextlib.ExitStack() as stack:
            if create:
                make_folder(self.path)
            lock = StoreLock(self.path)
            stack.callback(lock.close)
            with lock.door(), contextlib.ExitStack() as unfinished:
                if create and not self.exists(self.path):
                    self._create()
                    lock.acknowledge(0, 0)
                alone = lock.enter()
                if alone:
                    wal.make_whole(self.path)
                before = file_at(self.path)
                _require_usable(self.path / FILE)
                connection = self._sqlite(FILE)
                unfinished.callback(connection.close)
                # Only a store's own file may be changed, and WAL mode is such a change.
                self._require_ours(connection)
                self._require_wal(connection)
                self.segments.store_id, last = self._recognise(connection, verify=verify)
                # If another store takes this one's place while it is opened, this is the former file, and the transaction notices it.
                file = before or file_at(self.path)
                if file is None:
                    raise not_the_same(self.path)
                if alone:
                    # SQLite ignores an error of this sync, by which the name of the log survives a loss of power.
                    sync_folder(self.path)
                    self.missing_transactions = max(0, lock.acknowledged(file[1]) - last)
                    if verify and self.missing_transactions:
                        raise damaged(self.path, f"its last {self.missing_transactions} transactions are missing")
                self._file, self.identity = file, f"{self.segments.store_id}-{file[1]:x}"
                unfinished.pop_all()
            stack.pop_all()
            self._lock, self._free = lock, [connection]

    def _create(self) -> None:
        """Make the files of a new store. Its index gets its name last, so a folder with an index has a complete store."""
        for name in (_NEW, f"{_NEW}-journal", f"{_NEW}-wal", f"{_NEW}-shm"):
            (self.path / name).unlink(missing_ok=True)
        os.close(os.open(self.path / _NEW, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with contextlib.closing(self._sqlite(_NEW)) as connection:
            # The file is synced once, when it is complete.
            connection.execute("PRAGMA journal_mode=MEMORY")
            connection.execute("PRAGMA synchronous=OFF")
            connection.execute("BEGIN")
            connection.execute(f"PRAGMA application_id={schema.APPLICATION}")
            connection.execute(f"PRAGMA user_version={FORMAT}")
            for table in TABLES.values():
                connection.execute(table.create())
            transaction = Transaction(connection, self.path, self.segments)
            transaction.put(Setting(STORE_FORMAT, FORMAT))
            transaction.put(Setting(STORE_ID, None, uuid.uuid4().hex))
            transaction.sign()
            connection.execute("COMMIT")
        _complete(self.path / _NEW)
        try:
            self.segments.folder.mkdir(mode=0o700, exist_ok=True)
            # Otherwise the name of the index could survive a loss of power, and that of the folder not.
            sync_folder(self.path)
            os.rename(self.path / _NEW, self.path / FILE)
            sync_folder(self.path)
        except OSError:
            # The system counts names as written after their sync has failed, so the next attempt must make them again.
            with contextlib.suppress(OSError):
                (self.path / FILE).unlink(missing_ok=True)
                self.segments.folder.rmdir()
            raise

    def _sqlite(self, name: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{(self.path / name).as_uri()}?mode=rw",
            uri=True,
            timeout=_PATIENCE,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
        return connection

    def _connect(self) -> sqlite3.Connection:
        connection = self._sqlite(FILE)
        try:
            self._require_wal(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _require_wal(self, connection: sqlite3.Connection) -> None:
        if connection.execute("PRAGMA journal_mode=WAL").fetchone() != ("wal",):
            # SQLite keeps the former mode, without an error, if it cannot write the file's first page.
            raise self._failed("open", "its index cannot be put into WAL mode. Try again")

    def _recognise(self, connection: sqlite3.Connection, *, verify: bool) -> tuple[str, int]:
        """Return a store's id and the number of its last transaction.

        With ``verify``: raises StoreError CORRUPT if SQLite's pages or the store's settings are damaged.
        """
        connection.execute("BEGIN")
        try:
            transaction = Transaction(connection, self.path, self.segments)
            identity, number = None, 0
            try:
                identity, number = transaction.get(SETTINGS, STORE_ID), transaction.number()
            except (StoreError, *UNREADABLE):
                if verify:
                    raise
            if verify:
                for finding in page_findings(connection, "quick_check(1)"):
                    raise damaged(self.path, finding)
            return (identity.text if identity is not None else None) or "", number
        finally:
            connection.rollback()

    def _require_ours(self, connection: sqlite3.Connection) -> None:
        """Require an index of this format. Raises StoreError NOT_A_STORE, OTHER_FORMAT or CORRUPT."""
        (application,), (version,) = (
            connection.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
        )
        if (application, version) == (schema.APPLICATION, FORMAT):
            return
        # The file's first page has no checksum, so its numbers count only if the sealed format does not contradict them.
        with contextlib.suppress(StoreError, *UNREADABLE):
            setting = Transaction(connection, self.path, self.segments).get(SETTINGS, STORE_FORMAT)
            if setting is not None and setting.number == FORMAT:
                application = version = None
        if application is None:
            raise damaged(self.path, "its first page does not say that it is a store of this format")
        if application != schema.APPLICATION:
            raise StoreError(
                StoreCondition.NOT_A_STORE, f"{self.path} has an {FILE} that is not this broker's. Choose another path"
            )
        raise other_format(self.path, version)

    # -- transactions ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection for one transaction."""
        self.require_own()
        with self._pool:
            if self._closed or self._lock is None:
                raise StoreError(StoreCondition.IO, f"the connection to the store at {self.path} was closed. Connect again")
            self._used += 1
            connection = self._free.pop() if self._free else None
        try:
            if connection is None:
                connection = self._connect()
            yield connection
        finally:
            with self._pool:
                if connection is not None:
                    if connection.in_transaction:
                        connection.rollback()
                    # Before the count, because a child that is forked in between must not miss the connection.
                    self._free.append(connection)
                self._used -= 1
                ends = self._must_end()
            if ends:
                self._end()

    def _must_end(self) -> bool:
        """Whether the store was closed and no transaction uses it any more."""
        return self._closed and not self._used

    def _end(self) -> None:
        """Close all connections of a closed store that no transaction uses any more."""
        lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.closing(lock), lock.door():
                for connection in self._free:
                    connection.close()
                self._free.clear()
                if not wal.size(self.path):
                    lock.forget_if_alone()

    @contextlib.contextmanager
    def read(self) -> Iterator[Transaction]:
        """Yield a transaction that reads one snapshot of the index. Do not keep it open while rows are processed.

        Reading a payload fails if its segment was deleted after the transaction began. `consult` handles that.
        """
        with self.errors_mapped("read"), self._connection() as connection:
            connection.execute("BEGIN")
            yield Transaction(connection, self.path, self.segments)
        self.require_here()

    @contextlib.contextmanager
    def inspected(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection that reads one snapshot of an index that may be damaged (for `check`)."""
        with self.errors_mapped("check"), self._connection() as connection:
            connection.execute("BEGIN")
            yield connection

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
                if txn.number() == number or txn.get(schema.SEGMENTS, missing) is not None:
                    raise raised

    @contextlib.contextmanager
    def write(self) -> Iterator[Transaction]:
        """Yield a write transaction. Only one runs at a time. At the end, all of its changes are on the disk, or none after an error."""
        committed, transaction = False, None
        try:
            with self.errors_mapped("write"), self._connection() as connection:
                assert self._lock is not None, "the store is open"
                assert self._file is not None, "the store is open"
                with self._lock.turn():
                    connection.execute("BEGIN IMMEDIATE")
                    transaction = Transaction(connection, self.path, self.segments)
                    yield transaction
                    number = transaction.sign()
                    connection.execute("COMMIT")
                    if number is not None:
                        self._lock.acknowledge(self._file[1], number)
                        self._shorten_log(connection)
            committed = True
        finally:
            if transaction is not None:
                transaction.end(committed=committed)
        # Refuse a write to a store that was moved or replaced, because it would be lost.
        self.require_here()

    def _shorten_log(self, connection: sqlite3.Connection) -> None:
        """Begin a long log anew, which SQLite does by itself only when no reader uses it."""
        size = wal.size(self.path)
        if size < self._long_log:
            return
        # An error does not matter, because the transaction is committed.
        with contextlib.suppress(sqlite3.Error):
            connection.execute(f"PRAGMA busy_timeout={wal.PATIENCE}")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.execute(f"PRAGMA busy_timeout={_PATIENCE * 1000:.0f}")
        size = wal.size(self.path)
        # While a reader is stopped, a write must not wait for it each time.
        self._long_log = max(wal.LIMIT, 2 * size)

    def copy_index(self, folder: Path, look: Callable[[Transaction], object], target: Path) -> None:
        """Copy the index into the empty ``folder`` in ``target``. The copy is on the disk when this returns.

        ``look`` is called with a transaction that sees exactly the copied rows, while no other write runs.
        """
        with self.errors_mapped("copy", target), self._connection() as connection:
            assert self._lock is not None, "the store is open"
            with self._lock.turn():
                connection.execute("BEGIN")
                look(Transaction(connection, self.path, self.segments))
            os.close(os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            with contextlib.closing(sqlite3.connect(folder / FILE, isolation_level=None)) as copy:
                connection.backup(copy)

    def last_change(self) -> int:
        """Return a number that grows with every write of any process. Reading it costs very little."""
        with self.read() as txn:
            return txn.number()

    @contextlib.contextmanager
    def errors_mapped(self, what: str, target: Path | None = None) -> Iterator[None]:
        """Raise errors of SQLite and the system as StoreErrors. ``what``: the attempted action, for the message.

        ``target``: the folder that is written to, if it is not the store's. It is the one that may be full or lack rights.
        """
        self.require_own()
        written = target or self.path
        try:
            yield
        except sqlite3.ProgrammingError:
            # A mistake of this package, not of the file.
            raise
        except UNREADABLE as error:
            raise self._mapped(error, what, written) from error
        except OSError as error:
            if error.errno == errno.ENOENT:
                # The file may be missing because another store has taken this one's place.
                self.require_here()
            raise self._system_error(error, what, written) from error

    def _mapped(self, error: Exception, what: str, written: Path) -> StoreError:
        name = getattr(error, "sqlite_errorname", "")
        match name.split("_")[1:2]:
            case ["FULL"]:
                return _no_room(written, error)
            case ["NOTADB"]:
                return StoreError(
                    StoreCondition.NOT_A_STORE,
                    f"{self.path} has an {FILE} that is not a store or whose first page is damaged ({error}). Choose another path, or "
                    "restore the store from a copy",
                )
            case ["IOERR" | "CANTOPEN" | "READONLY" | "PERM" | "AUTH"]:
                # The file may be missing because another store has taken this one's place.
                self.require_here()
                # SQLite does not say which error of the system it met.
                cause = self._cause(written)
                if cause is not None:
                    return self._system_error(cause, what, written)
                if name == "SQLITE_IOERR_SHMSIZE":
                    # The memory that processes share is a file, which could not grow a moment ago.
                    return _no_room(written, error)
                if not name.startswith("SQLITE_READONLY"):
                    return self._failed(what, f"{error} ({name})")
            case ["BUSY" | "LOCKED" | "INTERRUPT" | "PROTOCOL" | "NOMEM"]:
                return self._failed(what, f"{error} ({name}). Try again")
        # Everything else means that a page has another content than SQLite wrote: a missing table, a text that is not UTF-8, a first page
        # that says that the file must not be written.
        return damaged(self.path, str(error))

    def _cause(self, folder: Path) -> OSError | None:
        """Return the error that a write into ``folder`` raises, of as many bytes and as far from a file's beginning as the index's."""
        try:
            place = max(wal.size(self.path), os.stat(self.path / FILE).st_size if self.exists(self.path) else 0)
            with tempfile.TemporaryFile(dir=folder) as file:
                os.pwrite(file.fileno(), bytes(64 * 1024), place)
                os.fsync(file.fileno())
            for name in (FILE, wal.NAME, f"{FILE}-shm"):
                _require_usable(folder / name)
        except OSError as error:
            return error
        return None

    def _system_error(self, cause: OSError, what: str, written: Path) -> StoreError:
        if cause.errno in _NO_ROOM:
            return _no_room(written, cause)
        if isinstance(cause, PermissionError) or cause.errno == errno.EROFS:
            return _no_permission(written, cause)
        if cause.errno in _NO_DESCRIPTOR:
            return self._failed(what, f"{cause}. Allow more open files (ulimit -n)")
        return self._failed(what, str(cause))

    def _failed(self, what: str, why: str) -> StoreError:
        return StoreError(StoreCondition.IO, f"the store at {self.path} failed to {what}: {why}")


def _require_usable(file: Path) -> None:
    """Require the rights to read and change a file, if it exists, because SQLite would open it for reading. Raises PermissionError."""
    if file.exists() and not usable(file):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))


def _complete(file: Path) -> None:
    """Put a new index into WAL mode, and sync it.

    SQLite would do this by ``journal_mode``, which keeps the former mode without an error if the disk is full. The versions for
    writing and reading are the bytes 18 and 19 of the file (sqlite.org/fileformat2.html), and 2 means WAL.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, b"\x02\x02", 18)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def page_findings(connection: sqlite3.Connection, pragma: str) -> Iterator[str]:
    """Yield what SQLite's own check ``pragma`` says about damaged pages, line by line. Raises sqlite3.Error if it cannot go on."""
    for (text,) in connection.execute(f"PRAGMA {pragma}"):
        yield from (line for line in text.splitlines() if line != "ok" and not line.startswith("***"))


def other_format(path: Path, version: int) -> StoreError:
    remedy = "Upgrade orderedmq" if version > FORMAT else "Use the version that made it, or make a new store at another path"
    return StoreError(
        StoreCondition.OTHER_FORMAT,
        f"the store at {path} has format {version}, but this version of orderedmq has format {FORMAT}. {remedy}",
    )


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
