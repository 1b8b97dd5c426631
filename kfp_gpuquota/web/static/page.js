// Keeps a page live: replaces elements by what the server sends, and shows ages and logs as they grow.
// Without this module a page shows everything as it was when it was loaded.

const RETRY_MS = 2000;
const LOG_CHARACTERS = 1_000_000;
const connection = document.getElementById("connection");
const notice = document.getElementById("notice");
const log = document.getElementById("log");
let after = document.body.dataset.after;
let offset = log?.dataset.follow;
let stream = null;
let retry = 0;

function parsed(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content;
}

function swap(target, change) {
  const focused = document.activeElement;
  const focus = target.contains(focused) ? focused.id || focused.getAttribute("href") : "";
  const kept = change();
  if (focus && !document.activeElement?.id && kept) {
    const again = document.getElementById(focus) || kept.querySelector(`[href="${CSS.escape(focus)}"]`);
    again?.focus({ preventScroll: true });
  }
  showAges(kept);
}

function replace(id, html) {
  const old = document.getElementById(id);
  if (!old) return;
  swap(old, () => {
    const fresh = parsed(html).firstElementChild;
    old.replaceWith(fresh);
    return fresh;
  });
}

function refill(id, html) {
  const list = document.getElementById(id);
  if (list) swap(list, () => (list.replaceChildren(parsed(html)), list));
  else location.reload(); // the page has a part more than when it was loaded: a group of nodes
}

function receive(event) {
  after = event.lastEventId;
  const message = JSON.parse(event.data);
  for (const [id, html] of Object.entries(message.lists)) refill(id, html);
  for (const [id, html] of Object.entries(message.parts)) replace(id, html);
}

function append(event) {
  offset = event.lastEventId;
  const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 40;
  log.append(JSON.parse(event.data));
  if (log.textContent.length > 2 * LOG_CHARACTERS) log.textContent = log.textContent.slice(-LOG_CHARACTERS);
  if (atEnd) log.scrollTop = log.scrollHeight;
  document.getElementById("log-empty")?.remove();
}

function state(words, kind) {
  connection.textContent = words;
  connection.dataset.state = kind;
}

function open() {
  close();
  if (after === undefined && offset === undefined) return;
  const address = new URL(location.href);
  address.hash = "";
  address.searchParams.set("after", offset ?? after);
  stream = new EventSource(address);
  stream.addEventListener("open", () => state("live", "live"));
  stream.addEventListener("page", receive);
  stream.addEventListener("log", append);
  stream.addEventListener("end", () => (close(), state("ended", "ended")));
  stream.addEventListener("error", () => {
    state(document.body.dataset.ifLost, "lost");
    // A browser tries again by itself after a lost connection, and not after a refusal.
    if (stream?.readyState === EventSource.CLOSED) retry = setTimeout(open, RETRY_MS);
  });
}

function close() {
  clearTimeout(retry);
  stream?.close();
  stream = null;
}

function age(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s}s`;
  if (s < 3600) return `${Math.floor(s / 60)}m`;
  if (s < 172800) return `${Math.floor(s / 3600)}h ${Math.floor((s % 3600) / 60)}m`;
  return `${Math.floor(s / 86400)}d ${Math.floor((s % 86400) / 3600)}h`;
}

function showAges(root) {
  for (const element of root.querySelectorAll("time[data-since]")) {
    const text = age(Date.now() / 1000 - Number(element.dataset.since));
    element.title ||= element.textContent;
    if (element.textContent !== text) element.textContent = text;
  }
}

async function act(event) {
  const form = event.target;
  if (!form.matches("form[data-act]")) return;
  event.preventDefault();
  const button = event.submitter;
  const address = button?.getAttribute("formaction") || form.action;
  notice.textContent = "";
  const answer = await fetch(address, {
    method: "POST",
    body: new URLSearchParams(new FormData(form)),
    headers: { Accept: "text/plain" },
  }).catch(() => null);
  if (!answer?.ok) notice.textContent = answer ? await answer.text() : "The cluster does not answer.";
  else if (button?.dataset.leave) location.assign(button.dataset.leave);
  else form.closest("details")?.removeAttribute("open");
}

// Arrow keys go from tile to tile of the map, which may have thousands.
function step(event) {
  const tile = event.target.closest?.("[data-tiles] > a");
  if (!tile) return;
  const { left, top } = tile.getBoundingClientRect();
  const below = (one) => Math.sign(one.getBoundingClientRect().top - top);
  const near = (one) => Math.abs(one.getBoundingClientRect().left - left);
  const row = (next, sign) => {
    let found = null;
    for (let one = tile[next]; one && (!found || below(one) === below(found)); one = one[next]) {
      if (below(one) === sign && (!found || near(one) < near(found))) found = one;
    }
    return found;
  };
  const to = {
    ArrowRight: () => tile.nextElementSibling,
    ArrowLeft: () => tile.previousElementSibling,
    ArrowDown: () => row("nextElementSibling", 1),
    ArrowUp: () => row("previousElementSibling", -1),
    Home: () => tile.parentElement.firstElementChild,
    End: () => tile.parentElement.lastElementChild,
  }[event.key];
  if (!to) return;
  event.preventDefault();
  to()?.focus();
}

document.addEventListener("submit", act);
document.addEventListener("keydown", step);
document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
if (log) log.scrollTop = log.scrollHeight;
showAges(document);
setInterval(() => showAges(document), 1000);
open();
