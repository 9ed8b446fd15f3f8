/** What a link shows, live. The secret is behind the # of the address, which browsers send to no server. */

import { isFinal, pause, request } from "./api.js";
import { LONGEST_PAUSE_MS, SILENCE_MS, events } from "./streams.js";

const PAUSE_MS = 500; // before the first new try, then twice as long each time
const REASONS = {
  done: "",
  revoked: "This link was revoked.",
  expired: "This link has expired.",
  deleted: "This was deleted.",
};

const list = document.getElementById("messages");
const line = document.getElementById("state");
const shown = new Map(); // by the number of the message: {box, body, text, role, view}

/** Markdown where the server has the libraries for it, else the text as it is. */
const markdown = await import("./markdown.js").catch(() => null);

/** Show what a message has become. */
function write(message, text, { isWhole }) {
  const isLonger = text.startsWith(message.text);
  const added = isLonger ? text.slice(message.text.length) : text;
  message.text = text;
  if (message.role === "user" || markdown === null) {
    message.body.textContent = text;
    return;
  }
  if (!isLonger || !message.view) {
    message.body.replaceChildren();
    message.view = new markdown.MarkdownView(message.body);
    message.view.append(text);
  } else if (added) message.view.append(added);
  if (isWhole) message.view.end();
}

function take({ title, items }) {
  document.title = title || "Shared conversation";
  document.getElementById("title").textContent = document.title;
  const numbers = new Set(items.map(({ id }) => id));
  for (const [id, { box }] of shown) {
    if (numbers.has(id)) continue;
    box.remove();
    shown.delete(id);
  }
  for (const { id, role, text, is_running: isRunning } of items) {
    let message = shown.get(id);
    if (!message) {
      const box = document.createElement("article");
      const body = document.createElement("div");
      box.dataset.role = role;
      box.setAttribute("aria-label", role === "user" ? "Question" : "Answer");
      if (markdown === null) body.className = "plain";
      box.append(body);
      message = { box, body, role, text: "", view: null };
      shown.set(id, message);
    }
    message.box.setAttribute("aria-busy", isRunning);
    if (text !== undefined) write(message, text, { isWhole: !isRunning });
    list.append(message.box); // in the order of the branch
  }
}

function add({ id, text }) {
  const message = shown.get(id);
  if (message) write(message, message.text + text, { isWhole: false });
}

/** Read once. Returns whether there is nothing more to read. Throws: Refusal, or what `fetch` throws. */
async function read(token) {
  const connection = new AbortController();
  let watchdog = setTimeout(() => connection.abort(), SILENCE_MS);
  try {
    const answer = await request("GET", "/v1/shared", undefined, {
      headers: { "x-tailrace-share": token }, signal: connection.signal,
    });
    const alive = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => connection.abort(), SILENCE_MS);
    };
    for await (const { name, data } of events(answer, alive)) {
      const fields = JSON.parse(data);
      if (name === "state") {
        line.textContent = "";
        take(fields);
      } else if (name === "text") add(fields);
      else if (name === "end") {
        if (!(fields.reason in REASONS)) return false; // the server is in trouble
        close(REASONS[fields.reason], { isGone: fields.reason !== "done" });
        return true;
      }
    }
    return false;
  } finally {
    clearTimeout(watchdog);
  }
}

function close(text, { isGone }) {
  if (isGone) list.replaceChildren();
  for (const message of shown.values()) {
    message.box.setAttribute("aria-busy", false);
    message.view?.end();
  }
  line.textContent = text;
}

let pause_ms = PAUSE_MS;
const token = location.hash.slice(1);
addEventListener("hashchange", () => location.reload());
for (;;) {
  const begun_ms = performance.now();
  try {
    if (await read(token)) break;
  } catch (error) {
    if (isFinal(error)) {
      close("This link is not valid any more.", { isGone: true });
      break;
    }
  }
  line.textContent = "The connection was lost. Trying again…";
  if (performance.now() - begun_ms > SILENCE_MS) pause_ms = PAUSE_MS;
  await pause(pause_ms);
  pause_ms = Math.min(2 * pause_ms, LONGEST_PAUSE_MS);
}
