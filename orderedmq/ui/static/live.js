"use strict";
// Fetches the live part of a page again while the page is visible, and counts down times. Pages are complete without this script.
(() => {
  const part = document.getElementById("live");
  if (part === null) return;
  const state = document.getElementById("state");
  // Milliseconds after which a state that the broker has not confirmed is called old, and after which an answer is no longer awaited.
  const OLD = 10000;
  let tag = part.dataset.tag, skew = 0, timer = 0, confirmed = Date.now();

  // The look is "" (live), "old" or "bad".
  function say(text, look) {
    if (state.textContent !== text) state.textContent = text;
    state.className = `state ${look}`.trim();
  }

  function asOf() {
    return `State of ${new Date(confirmed + skew).toISOString().slice(11, 19)} UTC`;
  }

  // Existing nodes are kept and changed, so that the user's selections and focus survive. Rows are matched by their ids.
  function change(here, next) {
    for (const { name, value } of [...next.attributes]) {
      if (here.getAttribute(name) !== value) here.setAttribute(name, value);
    }
    for (const { name } of [...here.attributes]) {
      if (!next.hasAttribute(name)) here.removeAttribute(name);
    }
    const known = new Map();
    for (const child of here.children) if (child.id) known.set(child.id, child);
    let place = here.firstChild;
    for (const wanted of [...next.childNodes]) {
      const like = (one) => one.nodeName === wanted.nodeName && (one.id || "") === (wanted.id || "");
      let found = wanted.id ? known.get(wanted.id) : place;
      // Remove the nodes before the matching node instead of moving that node, because a moved node loses the focus.
      if (!wanted.id) while (found && !like(found)) found = found.id ? null : found.nextSibling;
      if (!found || !like(found)) {
        here.insertBefore(wanted, place);
        continue;
      }
      while (!wanted.id && place !== found) {
        const gone = place;
        place = place.nextSibling;
        gone.remove();
      }
      if (found === place) place = place.nextSibling;
      else here.insertBefore(found, place);
      if (found.nodeType === Node.ELEMENT_NODE) change(found, wanted);
      else if (found.nodeValue !== wanted.nodeValue) found.nodeValue = wanted.nodeValue;
    }
    while (place) {
      const gone = place;
      place = place.nextSibling;
      gone.remove();
    }
  }

  function show(text) {
    const focused = document.activeElement;
    const next = document.createElement("div");
    next.replaceChildren(...new DOMParser().parseFromString(text, "text/html").body.childNodes);
    for (const { name, value } of part.attributes) next.setAttribute(name, value);
    change(part, next);
    if (focused !== document.activeElement && focused && focused.isConnected) focused.focus({ preventScroll: true });
    count();
  }

  function left(seconds) {
    if (seconds < 60) return `${Math.ceil(seconds)} s`;
    if (seconds < 7200) return `${Math.round(seconds / 60)} m`;
    return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
  }

  function count() {
    const now = Date.now() + skew;
    for (const one of part.querySelectorAll("time[data-until]")) {
      const text = left(Math.max(0, (Number(one.dataset.until) - now) / 1000));
      if (one.textContent !== text) one.textContent = text;
    }
    if (Date.now() - confirmed > OLD && state.textContent === "live") say(asOf(), "old");
  }

  function selecting() {
    const chosen = getSelection();
    return chosen !== null && !chosen.isCollapsed && part.contains(chosen.anchorNode);
  }

  async function refresh() {
    clearTimeout(timer);
    let wait = 2000;
    if (document.hidden) return;
    try {
      const asked = { headers: { "If-None-Match": tag }, cache: "no-store", redirect: "error", signal: AbortSignal.timeout(OLD) };
      const answer = await fetch(part.dataset.live, asked);
      if (answer.status === 401) return location.reload();
      if (answer.status === 200 || answer.status === 304) {
        skew = Number(answer.headers.get("x-now")) - Date.now();
        wait = Number(answer.headers.get("x-next")) + 20;
        const text = answer.status === 200 ? await answer.text() : "";
        if (text && selecting()) say(`${asOf()}, because text is selected`, "old");
        else {
          if (text) {
            show(text);
            tag = answer.headers.get("etag");
          }
          confirmed = Date.now() - Number(answer.headers.get("x-age"));
          if (Date.now() - confirmed > OLD) say(asOf(), "old");
          else say("live", "");
        }
      } else say(`Not live. ${asOf()}: ${await answer.text()}`, "bad");
    } catch {
      say(`Not live. ${asOf()}: orderedmq ui does not answer`, "bad");
    }
    timer = setTimeout(refresh, Math.min(Math.max(wait, 200), 60000));
  }

  document.addEventListener("visibilitychange", refresh);
  setInterval(count, 1000);
  timer = setTimeout(refresh, 300);
})();
