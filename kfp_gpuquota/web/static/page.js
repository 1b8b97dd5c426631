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
let swapping = false; // an element that is replaced loses the focus, and gets it back

function parsed(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content;
}

function swap(target, change) {
  const focused = document.activeElement;
  const focus = target.contains(focused) ? focused.id || focused.getAttribute("href") : "";
  const ticked = new Set([...target.querySelectorAll("input[name=job]:checked")].map((box) => box.value));
  swapping = true;
  const kept = change();
  swapping = false;
  for (const box of kept.querySelectorAll?.("input[name=job]") ?? []) box.checked = ticked.has(box.value);
  if (focus && !document.activeElement?.id && kept) {
    const again = document.getElementById(focus) || kept.querySelector(`[href="${CSS.escape(focus)}"]`);
    again?.focus({ preventScroll: true });
  }
  showAges(kept);
  const canvas = reading && document.getElementById(reading.id);
  if (canvas && kept.contains?.(canvas)) readChart(canvas, reading);
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
  else if (html) location.reload(); // the page has a part more than when it was loaded: a group of nodes
}

function receive(event) {
  after = event.lastEventId;
  const message = JSON.parse(event.data);
  for (const [id, html] of Object.entries(message.lists)) refill(id, html);
  for (const [id, html] of Object.entries(message.parts)) replace(id, html);
  showNews();
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

// Ages are by the server's clock; a browser's may be wrong.
const ahead = Number(document.body.dataset.now || Date.now() / 1000) - Date.now() / 1000;

function showAges(root) {
  for (const element of root.querySelectorAll("[data-since]")) {
    const text = age(Date.now() / 1000 + ahead - Number(element.dataset.since));
    const words = "ago" in element.dataset ? `${text} ago` : text;
    if (element.localName === "time") element.title ||= element.textContent;
    if (element.textContent !== words) element.textContent = words;
  }
}

// The values of a chart under the pointer, or where the arrow keys have gone to. `reading` outlives a chart that is
// replaced while it is looked at.
let reading = null;

function readChart(canvas, at) {
  const lines = [...canvas.querySelectorAll("path[data-values]")].map((line) => ({
    name: line.dataset.name,
    xs: line.dataset.x.split(" ").map(Number),
    at: line.dataset.at.split(" "),
    values: line.dataset.values.split(" "),
  }));
  const first = lines[0];
  if (!first) return;
  const near = (xs, x) => xs.reduce((best, one, i) => (Math.abs(one - x) < Math.abs(xs[best] - x) ? i : best), 0);
  const index = typeof at === "number" ? near(first.xs, at) : Math.min(first.xs.length - 1, Math.max(0, at.index));
  const x = first.xs[index];
  const where = canvas.dataset.axis === "step" ? `step ${Number(first.at[index]).toLocaleString("en")}` : age(first.at[index]);
  const shown = lines.map((line) => `${words(line.values[near(line.xs, x)])}${line.name && ` ${line.name}`}`);
  const [cursor, output] = [canvas.querySelector(".cursor"), canvas.querySelector(".reading")];
  cursor.hidden = output.hidden = false;
  cursor.style.left = `${x / 6}%`;
  output.style.left = x < 300 ? `${x / 6}%` : "auto";
  output.style.right = x < 300 ? "auto" : `${100 - x / 6}%`;
  output.textContent = `${where}: ${shown.join("\n")}`;
  reading = { id: canvas.id, index };
}

function words(value) {
  return value === "nan" ? "no number" : value.replace("e+", "e").replace("e-0", "e-");
}

function unread() {
  const canvas = reading && document.getElementById(reading.id);
  reading = null;
  for (const part of canvas?.querySelectorAll(".cursor, .reading") ?? []) part.hidden = true;
}

function leaveChart(event) {
  if (!swapping && event.target.id === reading?.id) unread();
}

function point(event) {
  const canvas = event.target.closest?.(".canvas");
  if (!canvas) return reading && document.activeElement?.id !== reading.id && unread();
  if (reading && reading.id !== canvas.id) unread();
  const { left, width } = canvas.getBoundingClientRect();
  readChart(canvas, ((event.clientX - left) / width) * 600);
}

function stepInChart(event) {
  const canvas = event.target.closest?.(".canvas");
  const index = reading?.id === canvas?.id ? reading?.index ?? Infinity : Infinity;
  const to = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: Infinity }[event.key];
  if (!canvas || to === undefined) return;
  event.preventDefault();
  readChart(canvas, { index: index === Infinity && event.key === "ArrowLeft" ? Infinity : to });
}

// Notifications of followed jobs, while a page that shows them is open. This browser's storage has, by the job's uid, the
// last state that its user was shown, and the end of the first expected start of a wait.
const FOLLOWED = "gpuquota-followed";
const NEWS = {
  Running: "started",
  Unused: "does not use its GPUs",
  Pending: "was preempted",
  Suspended: "was suspended",
  Succeeded: "succeeded",
  Failed: "failed",
  Cancelled: "was cancelled",
};
const FINAL = new Set(["Succeeded", "Failed", "Cancelled"]);
const followButton = document.getElementById("follow");

function followed() {
  try {
    return JSON.parse(localStorage.getItem(FOLLOWED)) ?? {};
  } catch {
    return {};
  }
}

function newsOf(uid) {
  return document.querySelector(`[data-news="${CSS.escape(uid)}"]`);
}

// Returns whether this browser stores what is followed: some store nothing of any site.
function remember(all) {
  try {
    localStorage.setItem(FOLLOWED, JSON.stringify(all));
  } catch {
    return false;
  }
  const follows = Boolean(all[followButton?.dataset.uid]);
  followButton?.setAttribute("aria-pressed", follows);
  if (followButton) followButton.textContent = follows ? "Do not notify me" : "Notify me";
  return true;
}

async function toggleFollowed() {
  const [all, uid] = [followed(), followButton.dataset.uid];
  if (all[uid]) delete all[uid];
  else if ((await Notification.requestPermission()) === "granted") {
    const { state, latest } = newsOf(uid)?.dataset ?? {};
    if (state) all[uid] = { state, latest };
  } else notice.textContent = "The browser shows no notifications of this site: allow them in its settings.";
  remember(all);
}

function notify(shown, what) {
  const { news, name, text, href } = shown.dataset;
  try {
    const made = new Notification(`${name} ${what}`, { body: text, tag: `${news} ${what}` });
    made.addEventListener("click", () => (window.focus(), location.assign(href)));
  } catch {
    notice.textContent = `${name} ${what}`; // a browser of a phone, which needs more than a page for them
  }
}

function showNews() {
  const all = followed();
  const before = JSON.stringify(all);
  for (const shown of document.querySelectorAll("[data-news]")) {
    const known = all[shown.dataset.news];
    const { news, state, latest } = shown.dataset;
    if (!known || !NEWS[state]) continue; // it starts or stops
    if (state !== known.state) {
      const resumed = state === "Pending" && !["Running", "Unused"].includes(known.state);
      if (!resumed && !(state === "Running" && known.state === "Unused")) notify(shown, NEWS[state]);
      if (FINAL.has(state)) delete all[news];
      else all[news] = { state, latest };
    } else if (state === "Pending") {
      known.latest ??= latest;
      if (!known.late && Date.now() / 1000 + ahead > Number(known.latest)) {
        known.late = true;
        notify(shown, "waits longer than expected");
      }
    }
  }
  if (JSON.stringify(all) !== before) remember(all);
}

if (followButton && "Notification" in window && remember(followed())) {
  followButton.hidden = false;
  followButton.addEventListener("click", toggleFollowed);
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
document.addEventListener("keydown", stepInChart);
document.addEventListener("pointermove", point);
document.addEventListener("focusout", leaveChart);
// A page that nobody looks at gets no changes, unless it shows a followed job.
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) open();
  else if (!Object.keys(followed()).some(newsOf)) close();
});
if (log) log.scrollTop = log.scrollHeight;
showAges(document);
showNews();
setInterval(() => (showAges(document), showNews()), 1000);
open();
