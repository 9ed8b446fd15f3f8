/** The page: a list of conversations, and the one that is open. */

import { render } from "./lib/preact.js";
import { useEffect, useRef } from "./lib/preact-hooks.js";
import { effect } from "./lib/signals.js";
import { Composer, focusComposer, takeDrop } from "./composer.js";
import { Dialogs, SignIn, dialog } from "./dialogs.js";
import { html } from "./html.js";
import { listenToKeys } from "./keys.js";
import { isAtBottom, keepAtBottom, toBottom } from "./scrolling.js";
import { Sidebar, isSidebarOpen, toggleSidebar } from "./sidebar.js";
import {
  account, ask, asking, changeSettings, conversation, fail, isBusy, isLoading, isSignedOut, live, loadList, loadModels, model,
  models, openId, refresh, running, start, tree,
} from "./store.js";
import { Turns } from "./turns.js";

const REFRESH_MS = 3000;
const MODELS_MS = 5000;
const SETTLED_TICKS = 6; // where all models are loaded
const EXAMPLES = ["Why do rivers bend?", "Tell me a story about a lighthouse.", "Write a haiku about water."];

function App() {
  if (isSignedOut.value) return html`<${SignIn} />`;
  return html`
    <${Sidebar} />
    <div id="page">
      <${Header} />
      <${Chat} />
      ${!isAtBottom.value && html`<button id="latest" type="button" onClick=${toBottom}>To the latest text</button>`}
      <${Composer} />
    </div>
    <${Dialogs} />
    <${Announcer} />
  `;
}

function Header() {
  return html`
    <header id="top" class=${isBusy.value ? "busy" : ""}>
      <button type="button" class="quiet" id="menu" aria-label="Conversations" aria-expanded=${isSidebarOpen.value} onClick=${toggleSidebar}>☰</button>
      <h1>${conversation.value?.title || "tailrace"}</h1>
      <${ModelPicker} />
      ${openId.value &&
      html`<button type="button" class="quiet" id="share" aria-label="Share this conversation" onClick=${() => (dialog.value = "share")}>
        <svg viewBox="0 0 20 20" aria-hidden="true"><path d="M10 12V3m-3 3 3-3 3 3M5 10v6h10v-6" /></svg>
      </button>`}
      <button type="button" class="quiet" id="settings" aria-label="Settings of this conversation" onClick=${() => (dialog.value = "settings")}>
        <svg viewBox="0 0 20 20" aria-hidden="true"><path d="M3 6h8m4 0h2M3 14h2m4 0h8" /><circle cx="13" cy="6" r="2" /><circle cx="7" cy="14" r="2" /></svg>
      </button>
      <button type="button" class="quiet" id="help" aria-label="Keys" onClick=${() => (dialog.value = "shortcuts")}>?</button>
    </header>
  `;
}

const STATES = { unloaded: "not loaded", loading: "loading…", engine: "starting again", draining: "shutting down", journal: "disk trouble" };

function ModelPicker() {
  const chosen = model.value;
  if (!chosen) return null;
  const state = STATES[chosen.state];
  const named = ({ id, state: its }) => (STATES[its] ? `${id} (${STATES[its]})` : id);
  const choose = (event) => changeSettings({ model: event.target.value }).catch(fail);
  return html`
    <span id="model" data-state=${chosen.state}>
      ${models.value.length > 1
        ? html`<select aria-label="Model" value=${chosen.id} onChange=${choose}>
            ${models.value.map((one) => html`<option value=${one.id}>${named(one)}</option>`)}
          </select>`
        : html`<span class="name">${chosen.id}</span>${state && html`<span class="load">${state}</span>`}`}
    </span>
  `;
}

function Chat() {
  const box = useRef();
  const content = useRef();
  useEffect(() => keepAtBottom(box.current, content.current), []);
  const isEmpty = !isLoading.value && tree.value.branch.length === 0 && asking.value === null;
  return html`
    <main id="chat" ref=${box} tabindex="-1">
      <div id="turns" ref=${content} role="log" aria-live="off" aria-label="Conversation">
        ${isEmpty ? html`<${Welcome} />` : html`<${Turns} />`}
      </div>
    </main>
  `;
}

function Welcome() {
  return html`
    <section id="welcome">
      <h2>What would you like to know?</h2>
      <p>The server writes the answer. If you close the page or lose the network, it continues.</p>
      <div id="examples">
        ${EXAMPLES.map((text) => html`<button type="button" disabled=${isBusy.value} onClick=${() => ask(null, text)}>${text}</button>`)}
      </div>
    </section>
  `;
}

/** Says how an answer stands to screen readers. Its text is there to be read, and is not read out token by token. */
function Announcer() {
  const awaited = useRef(""); // the conversation in which an answer was on its way
  const phase = asking.value ? "sending" : running.value?.phase.value;
  const phrases = { sending: "", waiting: "Waiting for the answer.", queued: "In the queue.", thinking: "Thinking.", writing: "The answer is coming.", stopping: "Stopping." };
  const isOver = phase === undefined || phase === "over";
  if (!isOver) awaited.current = openId.value;
  const text = isOver ? (awaited.current && awaited.current === openId.value ? "End of the answer." : "") : phrases[phase];
  return html`<div id="announcer" class="unseen" aria-live="polite">${text}</div>`;
}

for (const kind of ["dragover", "drop"]) addEventListener(kind, (event) => !isSignedOut.value && takeDrop(event));

function watchTime() {
  setInterval(() => document.visibilityState === "visible" && refresh(), REFRESH_MS);
  let ticks = 0;
  setInterval(() => {
    ticks += 1;
    const isSettled = models.value.every(({ state }) => state === "ready") && ticks % SETTLED_TICKS;
    if (document.visibilityState === "visible" && account.value && !isSettled) loadModels().catch(() => {});
  }, MODELS_MS);
  // A lid was opened, a network is there again: do not wait for old connections to be given up.
  const wake = () => {
    for (const answer of live.value.values()) if (!answer.isConnected.value) answer.refresh();
    if (account.value) {
      refresh();
      loadList().catch(() => {});
    }
  };
  addEventListener("online", wake);
  addEventListener("focus", wake);
  document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && wake());
  addEventListener("pageshow", (event) => event.persisted && location.reload()); // its streams were closed meanwhile
}

effect(() => {
  document.title = conversation.value?.title || "tailrace";
});
effect(() => {
  if (openId.value !== null && asking.value !== undefined) requestAnimationFrame(toBottom); // whatever is shown anew, its end
});

const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
listenToKeys();
watchTime();
await start();
if (matchMedia("(hover: hover)").matches && !isSignedOut.value) focusComposer(); // no keyboard over a phone's page
document.body.classList.add("ready");
