"""The computation of the demo's job, which depends on the order of each aircraft's events. Pure and columnar.

Each departure is compared with the previous landing of the same aircraft, to find how long the aircraft was away from New York
(including the flight back, which is not in the data), and how much of the departure's delay it brought along. So the state has the
last event of each aircraft.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from orderedmq.schema import concat_batches

Floats = npt.NDArray[np.float64]

#: The least delay in minutes with which a flight counts as late, as in the statistics of the airlines.
LATE: Final = 15.0
#: The fields that are read from an event.
_EVENT: Final = pa.schema(
    [
        ("id", pa.string()),
        ("type", pa.string()),
        ("flight", pa.string()),
        ("tailnum", pa.string()),
        ("actual", pa.timestamp("s", tz="UTC")),
        ("delay", pa.int64()),
    ]
)
#: The state of an aircraft: its last event, the number of its departures, and its current chain of delays.
_KNOWN: Final = pa.schema(
    [
        ("tailnum", pa.string()),
        ("left", pa.bool_()),
        ("minute", pa.float64()),
        ("delay", pa.float64()),
        ("leg", pa.float64()),
        ("chain", pa.float64()),
        ("chain_minutes", pa.float64()),
    ]
)


def follow(known: bytes | None, bodies: pa.Array) -> tuple[bytes, pa.RecordBatch]:
    """Process events in the order in which they happened. Return the new state, and one message for each event.

    A message has the fields of its event, and leg (departures so far), turnaround (minutes since the landing), carried (minutes of delay
    brought along from the landing), chain and chain_minutes (departures in a row that were late because of carried minutes, and the sum
    of these minutes), and gained (minutes of delay recovered during the flight).
    """
    events = read(bodies, _EVENT)
    before = _KNOWN.empty_table().to_batches() if known is None else list(pa.ipc.open_stream(known))
    old = concat_batches(before) if before else pa.RecordBatch.from_pylist([], _KNOWN)
    first_event = old.num_rows
    tails = pa.concat_arrays([old["tailnum"], events["tailnum"]]).dictionary_encode()
    codes = tails.indices.to_numpy()
    # Sort so that each aircraft's rows are its state and then its events in order.
    order = np.argsort(codes, kind="stable")
    codes = codes[order]
    rows = np.arange(len(codes))
    begins = np.ones(len(codes), dtype=bool)
    begins[1:] = codes[1:] != codes[:-1]
    is_known = order < first_event

    def joined(name: str, new: Any) -> Any:
        return np.concatenate((_floats(old[name]), new))[order]

    left = np.concatenate((_booleans(old["left"]), _booleans(pc.equal(events["type"], "departure"))))[order]
    minute = joined("minute", _floats(events["actual"].cast(pa.int64())) // 60)
    delay = joined("delay", _floats(events["delay"]))

    def previous(values: Floats) -> Floats:
        out = np.full(len(values), np.nan)
        out[1:] = values[:-1]
        out[begins] = np.nan
        return out

    departs = left & ~is_known
    landed_before = previous(np.where(left, np.nan, minute))
    turnaround = np.where(departs, minute - landed_before, np.nan)
    carried = np.where(departs & ~np.isnan(landed_before), np.maximum(np.minimum(previous(delay), delay), 0), np.nan)
    gained = np.where(~left & ~is_known, previous(np.where(left, delay, np.nan)) - delay, np.nan)
    # A departure that carried less than LATE minutes ends the chain. Comparisons with NaN are false.
    late = departs & (carried >= LATE)
    since = np.maximum.accumulate(np.where(begins | (departs & ~late), rows, 0))
    start = np.maximum.accumulate(np.where(begins, rows, 0))

    def summed(name: str, counts: Floats, origin: npt.NDArray[np.int64]) -> Floats:
        """Return the running sum of ``counts`` since ``origin``, beginning with the value in the state."""
        counts = np.where(is_known, joined(name, np.zeros(len(rows) - first_event)), counts)
        sums = np.cumsum(counts)
        out: Floats = sums - sums[origin] + counts[origin]
        return out

    leg = summed("leg", departs.astype(np.float64), start)
    chain = summed("chain", late.astype(np.float64), since)
    chain_minutes = summed("chain_minutes", np.where(late, carried, 0.0), since)

    ends = np.append(np.flatnonzero(begins)[1:] - 1, len(rows) - 1) if len(rows) else rows
    columns = [tails.dictionary.take(pa.array(codes[ends])), pa.array(left[ends])]
    columns += [pa.array(values[ends]) for values in (minute, delay, leg, chain, chain_minutes)]
    news = pa.BufferOutputStream()
    with pa.ipc.new_stream(news, _KNOWN) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=_KNOWN))

    back = np.argsort(order, kind="stable")[first_event:]
    added = {
        "leg": leg,
        "turnaround": turnaround,
        "carried": carried,
        "chain": chain,
        "chain_minutes": chain_minutes,
        "gained": gained,
    }
    return news.getvalue().to_pybytes(), _messages(events, {name: values[back] for name, values in added.items()})


def read(bodies: pa.Array, schema: pa.Schema) -> pa.RecordBatch:
    """Return the fields of ``schema`` from JSON objects that have one line each."""
    if not len(bodies):
        return pa.RecordBatch.from_pylist([], schema)
    text = pc.binary_join(pa.ListArray.from_arrays([0, len(bodies)], bodies), b"\n")[0].as_buffer()
    table = pyarrow.json.read_json(
        pa.BufferReader(text),
        # One block, so that no object is split and rows stay in order.
        read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=text.size + 1),
        parse_options=pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
    )
    return table.select(schema.names).combine_chunks().to_batches()[0]


def _messages(events: pa.RecordBatch, added: dict[str, Floats]) -> pa.RecordBatch:
    parts: list[Any] = []
    between = "{"
    for name in ("id", "type", "flight", "tailnum"):
        parts += [f'{between}"{name}":"', events[name]]
        between = '",'
    parts += [
        '","actual":"',
        events["actual"].cast(pa.timestamp("s")).cast(pa.string()),
        'Z","delay":',
        _number(events["delay"]),
    ]
    for name, values in added.items():
        parts += [f',"{name}":', _number(pa.array(values, from_pandas=True).cast(pa.int64()))]
    body = pc.binary_join_element_wise(*parts, "}", "").cast(pa.binary())
    return pa.RecordBatch.from_arrays([body, events["tailnum"]], names=["body", "sharding_key"])


def _number(column: pa.Array) -> pa.Array:
    return pc.fill_null(column.cast(pa.string()), "null")


def _floats(column: pa.Array) -> Floats:
    out: Floats = pc.fill_null(column.cast(pa.float64()), float("nan")).to_numpy(zero_copy_only=False)
    return out


def _booleans(column: pa.Array) -> npt.NDArray[np.bool_]:
    out: npt.NDArray[np.bool_] = column.to_numpy(zero_copy_only=False)
    return out
