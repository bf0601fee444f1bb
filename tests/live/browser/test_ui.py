"""The web page in a real Chromium: live hand-overs, a replay by keyboard, refusals, narrow and dark screens, no outside requests."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from orderedmq.ui.shared_look import SharedLook
from tests.live.browser.conftest import Browser
from tests.ui_site import GROUP, Served, Shop, rows, served
from tests.waits import until

#: A member of the group that locks all queues when it can, then prints its client id, and renews the locks every 5 s until killed.
MEMBER: Final = """
import sys, time, orderedmq
from orderedmq.ownership.lock import LockToken
from orderedmq.ownership.membership import Subscription
with orderedmq.connect(sys.argv[1]) as broker:
    client = broker.groups.join(sys.argv[2])
    queues, told = broker.log.queues("orders"), False
    while True:
        broker.groups.heartbeat("billing", client, Subscription("shared", "orders", "averagely"))
        found = broker.groups.lock("billing", client, queues)
        if not told and all(isinstance(one, LockToken) for one in found.values()):
            print(client.client_id, flush=True)
            told = True
        time.sleep(5 if told else 0.05)
"""
#: Pages that together show everything in the test shop.
PAGES: Final = (
    "/", f"/groups/{GROUP}", f"/groups/{GROUP}/parked", f"/groups/{GROUP}/dead", f"/groups/{GROUP}/seek?to=latest&parked=keep&force=yes",
    "/topics", "/topics/orders", "/topics/orders/messages?key=x", "/topics/orders/message?queue=0&offset=6", "/groups/none",
)  # fmt: skip
#: JavaScript that returns the lowest contrast of a visible text to its background (WCAG 2.2, 1.4.3), and that text.
CONTRAST: Final = """
const parse = text => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
const light = ([r, g, b]) => [r, g, b].map(c => { c /= 255; return c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4; })
  .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
let worst = [99, ""];
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const text = walk.currentNode.nodeValue.trim(), element = walk.currentNode.parentElement;
  if (!text || !element.checkVisibility() || element.closest(".hidden, .skip, datalist, option, noscript, script")) continue;
  let behind = element;
  while (behind && parse(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
  const style = getComputedStyle(element);
  const colours = [style.color, getComputedStyle(behind ?? document.body).backgroundColor];
  const [a, b] = colours.map(parse).map(light);
  const contrast = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  if (contrast < worst[0]) worst = [contrast, text.slice(0, 60) + " " + colours];
}
return worst;
"""
#: JavaScript that returns the size in pixels of the smallest text, which in a drawing is scaled with the drawing, and that text.
SMALLEST: Final = """
let least = [99, ""];
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const text = walk.currentNode.nodeValue.trim(), element = walk.currentNode.parentElement;
  if (!text || !element.checkVisibility() || element.closest(".hidden, noscript, script")) continue;
  const size = parseFloat(getComputedStyle(element).fontSize) * (element.getScreenCTM?.().a ?? 1);
  if (size < least[0]) least = [size, text.slice(0, 60)];
}
return least;
"""

#: JavaScript that returns what is left of the column of values on a narrow screen, where each cell has its label in front.
ASTRAY: Final = """
return [...document.querySelectorAll("td > *")].filter(part => part.checkVisibility())
  .filter(part => part.getBoundingClientRect().left < part.parentElement.getBoundingClientRect().left + 100)
  .map(part => part.textContent);
"""

#: JavaScript that counts the queues whose owner, as shown on the page, contains the argument.
OWNED: Final = (
    "return [...document.querySelectorAll('td.owner')].filter(cell => cell.textContent.includes(arguments[0])).length"
)


@contextmanager
def member(store: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", MEMBER, str(store), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    """Wait until a member has all queues, and return its client id."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    made = Shop(tmp_path_factory.mktemp("shop") / "store")
    with made.broker:
        made.park(0, 3, "ValueError: " + "no stock of a very long name " * 8)
        made.park(1, 5)
        made.give_up(0, 1, "y")
        made.broker.log.append({made.queues[0]: rows([b"w" * 400], "a-key-without-a-space-" * 8)})
        yield made


@pytest.fixture(scope="module")
def site(shop: Shop) -> Iterator[Served]:
    with served(shop.broker, allow_changes=True) as site:
        yield site


def words(browser: Browser) -> str:
    return " ".join(str(browser.run("return document.body.innerText")).split())


def shown(browser: Browser, text: str, timeout: float = 30) -> None:
    until(lambda: text in words(browser), f"the page has {text!r}", timeout)


def press(browser: Browser, *keys: str) -> None:
    ActionChains(browser.driver).send_keys(*keys).perform()


def tab_to(browser: Browser, condition: str) -> None:
    """Press Tab until the focused element ``e`` fulfils a JavaScript condition."""
    for _ in range(80):
        if browser.run(f"const e = document.activeElement; return {condition}"):
            return
        press(browser, Keys.TAB)
    raise AssertionError(f"Tab never reaches an element with {condition}")


@pytest.mark.nightly
def test_pages_fit_360_pixels_and_can_be_read_in_the_dark_and_in_the_light(browser: Browser, site: Served) -> None:
    wide: dict[str, Any] = {}
    faint: dict[str, Any] = {}
    small: dict[str, Any] = {}
    astray: dict[str, Any] = {}
    browser.command("Emulation.setDeviceMetricsOverride", width=360, height=800, deviceScaleFactor=1, mobile=False)
    for page in PAGES:
        browser.driver.get(site.url + page)
        if (width := browser.run("return document.documentElement.scrollWidth")) > 360:
            wide[page] = width
        if parts := browser.run(ASTRAY):
            astray[page] = parts
        size, text = browser.run(SMALLEST)
        if size < 11:
            small[page] = (round(size, 1), text)
        for scheme in ("dark", "light"):
            browser.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            least, text = browser.run(CONTRAST)
            if least < 4.5:
                faint[f"{page}, {scheme}"] = (round(least, 2), text)
    assert browser.run("return matchMedia('(prefers-color-scheme: light)').matches")
    browser.command("Emulation.setEmulatedMedia", features=[])
    browser.command("Emulation.clearDeviceMetricsOverride")
    assert (wide, faint, small, astray) == ({}, {}, {}, {})


@pytest.mark.nightly
def test_a_replay_goes_through_by_keyboard_alone(browser: Browser, shop: Shop, site: Served) -> None:
    browser.driver.get(site.url)
    press(browser, Keys.TAB)
    assert browser.run("return document.activeElement.textContent") == "Skip to the content"
    assert browser.run("return document.activeElement.getBoundingClientRect().left >= 0"), (
        "the skip link must be visible when it has the focus"
    )
    press(browser, Keys.ENTER)
    tab_to(browser, "e.textContent === 'billing' && e.closest('#dead-billing') !== null")
    assert browser.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    press(browser, Keys.ENTER)
    shown(browser, "Dead letters of billing")
    tab_to(browser, "e.type === 'checkbox' && e.name === 'offset'")
    press(browser, Keys.SPACE)
    tab_to(browser, "e.textContent === 'Replay chosen'")
    end = sum(at.max_offset for at in shop.broker.log.bounds(shop.queues).values())
    press(browser, Keys.ENTER)
    shown(browser, "Replayed 1 dead letter: 1 to orders")
    assert sum(at.max_offset for at in shop.broker.log.bounds(shop.queues).values()) == end + 1


@pytest.mark.holds("web page guarded")
def test_a_change_without_permission_is_refused(browser: Browser, shop: Shop) -> None:
    """The page has no buttons for changes, and a form that is sent anyway changes nothing."""
    with served(shop.broker) as site:
        browser.driver.get(f"{site.url}/groups/{GROUP}/dead")
        # The form that selects letters only loads another page, so it does not use POST.
        assert browser.driver.find_elements(By.CSS_SELECTOR, "form[method=post i]") == []
        before = shop.broker.log.change()
        browser.run(
            """const form = document.createElement("form");
            form.method = "post"; form.action = arguments[0];
            for (const [name, value] of [["all", "yes"], ["mark", arguments[1]]]) {
              const field = document.createElement("input"); field.name = name; field.value = value; form.append(field);
            }
            document.body.append(form); form.submit();""",
            f"/groups/{GROUP}/dead/replay",
            site.rules.mark,
        )
        shown(browser, "this page is read-only. Start orderedmq ui with --allow-changes")
        assert shop.broker.log.change() == before


def wait_for_member(shop: Shop, name: str) -> None:
    """Wait until a member has joined. The member repeatedly asks for the locks, but is refused."""
    until(lambda: name in [one.member.owner for one in shop.broker.admin.members(GROUP)])


def wait_for_owner(browser: Browser, name: str) -> float:
    """Wait until the page shows a member as the owner of all queues. Return the seconds this took."""
    begun = time.monotonic()
    until(lambda: browser.run(OWNED, name) == 4, "all queues have their new owner", 30)
    return time.monotonic() - begun


def assert_counts_down(browser: Browser) -> None:
    seen: set[str] = set()

    def three() -> bool:
        seen.add(browser.run("return document.querySelector('td time').textContent"))
        return len(seen) >= 3

    until(three, "the remaining life of a lock counts down", 30)


@pytest.mark.holds("web page live")
@pytest.mark.nightly
def test_a_hand_over_is_seen_within_two_seconds_and_locks_count_down(browser: Browser, shop: Shop, site: Served) -> None:
    shop.leave()
    took: list[float] = []
    with ExitStack() as members:
        owner = members.enter_context(member(shop.store, "query-a"))
        said(owner)
        browser.driver.get(f"{site.url}/groups/{GROUP}")
        shown(browser, f"-{owner.pid} 4 orders shared")
        # The focused element must keep the focus through every refresh.
        tab_to(browser, "e.textContent === 'orders/2'")
        # A busy machine may delay a single hand-over, so the fastest of three counts.
        for name in ("query-b", "query-c", "query-d"):
            successor = members.enter_context(member(shop.store, name))
            wait_for_member(shop, name)
            owner.kill()
            said(successor)
            took.append(wait_for_owner(browser, name))
            change = rf"orders/0, orders/1, orders/2, orders/3: query-\w+@\S+ → {name}@"
            assert re.search(change, words(browser)), words(browser)
            owner = successor
            if took[-1] < 2:
                break
        assert min(took) < 2, took
        assert_counts_down(browser)
    assert browser.run("return document.activeElement.textContent") == "orders/2"


@pytest.mark.holds("web page live")
def test_no_request_leaves_the_machine_and_nothing_is_blocked(browser: Browser, site: Served) -> None:
    browser.complaints()
    for page in PAGES[:-1]:
        browser.driver.get(site.url + page)
        if page in ("/", f"/groups/{GROUP}"):
            until(lambda: browser.run("return document.getElementById('state').textContent") == "live")
    found = browser.note_requests()
    assert len(found) > 30
    # The browser's own pages have chrome: addresses.
    assert {urlsplit(url).hostname for url in found if not url.startswith(("data:", "chrome:", "chrome-untrusted:"))} == {
        "127.0.0.1"
    }
    assert any("/live/groups/" in url for url in found)
    assert browser.complaints() == []


def state_of(browser: Browser) -> tuple[str, str]:
    """Return the class of the sign that says whether the page is live, and its text."""
    return tuple(browser.run("const e = document.getElementById('state'); return [e.className, e.textContent]"))


@pytest.mark.holds("web page live")
def test_a_page_that_is_not_live_says_so(browser: Browser, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(shop.broker) as site:
        browser.driver.get(f"{site.url}/groups/{GROUP}")
        until(lambda: state_of(browser) == ("state", "live"), timeout=30)
        with monkeypatch.context() as patch:
            # The thread that reads the broker has not come back for a minute.
            patch.setattr(SharedLook, "age", 60.0)
            until(lambda: re.fullmatch(r"State of \d\d:\d\d:\d\d UTC", state_of(browser)[1]), timeout=30)
            assert state_of(browser)[0] == "state old"
        until(lambda: state_of(browser) == ("state", "live"), timeout=30)
    until(lambda: state_of(browser)[0] == "state bad", timeout=30)
    assert state_of(browser)[1].startswith("Not live. State of ")
    browser.run("scrollTo(0, document.body.scrollHeight)")
    assert browser.run("return document.getElementById('state').getBoundingClientRect().top >= 0"), "it must stay in view"


@pytest.mark.holds("web page live")
@pytest.mark.nightly
def test_a_page_whose_server_does_not_answer_says_so(browser: Browser, site: Served) -> None:
    browser.driver.get(f"{site.url}/groups/{GROUP}")
    until(lambda: state_of(browser) == ("state", "live"), timeout=30)
    network = {"offline": False, "downloadThroughput": -1, "uploadThroughput": -1}
    browser.command("Network.enable")
    browser.command("Network.emulateNetworkConditions", latency=3_600_000, **network)
    until(lambda: state_of(browser)[0] == "state bad", timeout=30)
    browser.command("Network.emulateNetworkConditions", latency=0, **network)
    until(lambda: state_of(browser) == ("state", "live"), timeout=30)
