"""Takes the picture of the web page in the README: ``make ui-picture`` writes docs/ui.png.

It sends real flights to eight queues. Two members of a group consume them, one of them too slowly. One message becomes a dead letter and
a key is parked. At the end one member is killed, and the other takes over its queues. The picture is what Chromium then shows.
``--seconds`` sets how long the members work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Final

import pyarrow as pa
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

import orderedmq
from orderedmq.demo.flights import events

PICTURE: Final = Path(__file__).resolve().parent / "ui.png"
GROUP: Final = "turnaround"
QUEUES: Final = 8
#: Flights sent per second, and flights that each member consumes per second.
SENT: Final = 400
TAKEN: Final = {"turnaround-1": 190, "turnaround-2": 330}
SIZE: Final = (1180, 1080)

#: A member. Arguments after the store: its name, its first and last queue, messages per second, and seconds until it takes all queues.
MEMBER: Final = """
import sys, time, orderedmq
import pyarrow as pa
from dataclasses import replace
from orderedmq.rows.dead_letters import dead_letter_properties
from orderedmq.ownership.lock import LockToken
from orderedmq.ownership.membership import Subscription
from orderedmq.parking import Parking, Ticket
from orderedmq.schema import PRODUCER_SCHEMA
path, name, first, last, speed, alone = *sys.argv[1:3], *map(int, sys.argv[3:])
with orderedmq.connect(path) as broker:
    client = replace(broker.groups.join(name), name=name)
    queues, begun, turn, tokens = broker.log.queues("flights"), time.monotonic(), 0, {}
    while True:
        if turn % 8 == 0:
            broker.groups.heartbeat("turnaround", client, Subscription("shared", "flights", "averagely"))
            wanted = queues if time.monotonic() > begun + alone else queues[first : last + 1]
            found = broker.groups.lock("turnaround", client, wanted)
            tokens = {queue: one for queue, one in found.items() if isinstance(one, LockToken)}
        offsets = broker.groups.offsets("turnaround", list(tokens))
        ends = broker.log.bounds(list(tokens))
        step = speed // 4 // max(1, len(tokens))
        if turn == 60:
            queue, offset = min(tokens), offsets.get(min(tokens), 0)
            error = "KeyError: 'tailnum N14228 is not in the fleet'"
            row = broker.log.pull(queue, offset, 1, 1 << 20, ("body", "sharding_key", "message_id")).to_pylist()[0]
            noted = dead_letter_properties(queue, offset, message_id=row.pop("message_id"), reconsume_times=16, error=error, properties={})
            letter = pa.RecordBatch.from_pylist([{**row, "properties": list(noted.items())}], schema=PRODUCER_SCHEMA)
            broker.groups.dead_letter(tokens[queue], letter, [offset])
            due = int(time.time() * 1000) + 600_000
            broker.groups.park(tokens[queue], [Parking(queue, offset + 1, Ticket(offset + 1, 4, 2, due, "TimeoutError: fleet service"))])
        broker.groups.commit({tokens[queue]: min(at.max_offset, offsets.get(queue, 0) + step) for queue, at in ends.items()})
        turn += 1
        time.sleep(0.25)
"""


def take(folder: Path, seconds: float, out: Path) -> None:
    """Fill a store, run the members, and write the picture."""
    store = folder / "omq"
    with orderedmq.connect(store) as broker:
        broker.admin.create_topic("flights", QUEUES, retention_seconds=7 * 86400)
        flights = events(round(SENT * seconds * 1.5))
        producer = orderedmq.Producer(broker.log, "flights")
        members: list[subprocess.Popen[bytes]] = [
            subprocess.Popen(
                [sys.executable, "-c", MEMBER, str(store), name, *map(str, (first, first + 3, speed, round(seconds)))]
            )
            for first, (name, speed) in zip((0, 4), TAKEN.items(), strict=True)
        ]
        command = [sys.executable, "-m", "orderedmq", "--path", str(store), "ui", "--no-open", "--port", "0", "--json"]
        page = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert page.stdout is not None
        url = f"{json.loads(page.stdout.readline())['url']}"
        try:
            _send(producer, flights, seconds, url)
            members[1].kill()
            members[1].wait()
            _send(producer, flights.slice(round(SENT * seconds)), 12, url)
            driver = _chromium(folder)
            try:
                driver.get(f"{url}groups/{GROUP}")
                # Wait until the page's script runs.
                while driver.execute_script("return document.getElementById('state').textContent") != "live":
                    time.sleep(0.1)
                out.write_bytes(driver.get_screenshot_as_png())
            finally:
                driver.quit()
        finally:
            for member in members:
                member.kill()
                member.wait()
            page.kill()
            page.wait()


def _send(producer: orderedmq.Producer, flights: pa.RecordBatch, seconds: float, url: str) -> None:
    """Send flights for a while, in waves like real traffic, and look at the page, because its history consists of looks."""
    begun, sent = time.monotonic(), 0
    while (now := time.monotonic() - begun) < seconds:
        wave = 1.0 + 0.5 * (int(now / 20) % 2)
        count = round(SENT / 4 * wave / 1.25)
        producer.send(flights.slice(sent % max(1, flights.num_rows - count), count))
        sent += count
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}live/groups/{GROUP}") as part:
            part.read()
        time.sleep(0.25)


def _chromium(folder: Path) -> Chrome:
    options = ChromeOptions()
    found = shutil.which("chromium")
    if found is not None:
        options.binary_location = found
    size = f"--window-size={SIZE[0]},{SIZE[1]}"
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1.5", size):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={folder / 'chromium'}")
    return Chrome(options=options, service=Service(shutil.which("chromedriver")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300, help="how long the members work (default: 300)")
    parser.add_argument("--out", type=Path, default=PICTURE, help=f"file of the picture (default: {PICTURE.name})")
    given = parser.parse_args()
    # Not a random name, because the picture shows it.
    folder = Path(tempfile.gettempdir()) / "orderedmq-demo"
    folder.mkdir()
    try:
        take(folder, given.seconds, given.out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.write(f"{given.out}\n")


if __name__ == "__main__":
    main()
