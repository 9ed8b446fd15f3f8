/** Where one writes, and what the model still has room for. */

import { useEffect, useLayoutEffect, useRef } from "./lib/preact-hooks.js";
import { computed, signal } from "./lib/signals.js";
import { html } from "./html.js";
import { keep, recall } from "./storage.js";
import { alarm, ask, factsOf, isBusy, model, note, openId, stop, tree } from "./store.js";

const draft = signal("");
const SAVE_MS = 300;
const LONG = 10_000; // characters; for a million of them, Chromium takes seconds to find the direction
const RIGHT_TO_LEFT = /^[^\p{L}]*[\p{Script=Arabic}\p{Script=Hebrew}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u;
let saving = 0;
let draftOf = null; // the conversation whose draft it is

export function focusComposer() {
  document.getElementById("question")?.focus();
}

function save() {
  clearTimeout(saving);
  saving = 0;
  if (draftOf !== null) keep(`draft.${draftOf}`, draft.value || null);
}

function change(text) {
  draft.value = text;
  saving ||= setTimeout(save, SAVE_MS);
}

addEventListener("pagehide", save);

/** Each conversation has a draft of its own. */
function showDraft(id) {
  if (draftOf === id) return;
  save();
  draftOf = id;
  draft.value = recall(`draft.${id}`) ?? "";
}

async function submit(event) {
  event?.preventDefault();
  const text = draft.value;
  if (isBusy.value || !text.trim()) return;
  const id = openId.value;
  change("");
  save();
  const isTaken = await ask(tree.value.last?.id ?? null, text);
  draftOf = openId.value; // a new conversation has its id now
  if (!isTaken && (openId.value === id || id === "")) change([text, draft.value].filter(Boolean).join("\n\n"));
}

function directionOf(text) {
  if (text.length < LONG) return "auto";
  return RIGHT_TO_LEFT.test(text.slice(0, 1_000)) ? "rtl" : "ltr";
}

export function Composer() {
  const field = useRef();
  useEffect(() => showDraft(openId.value), [openId.value]);
  useLayoutEffect(() => {
    field.current.style.height = "auto";
    field.current.style.height = `${field.current.scrollHeight}px`;
  }, [draft.value]);
  const onKeyDown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    submit(event);
  };
  return html`
    <form id="composer" onSubmit=${submit}>
      <div id="over">
        <div id="note" role="status">${note.value}</div>
        <div id="alarm" role="alert">${alarm.value}</div>
      </div>
      <div id="field">
        <label class="unseen" for="question">Your message</label>
        <textarea
          id="question" ref=${field} rows="1" placeholder="Write a message" enterkeyhint="send" dir=${directionOf(draft.value)}
          value=${draft.value} onInput=${(event) => change(event.target.value)} onKeyDown=${onKeyDown}
        ></textarea>
        ${isBusy.value
          ? html`<button id="stop" type="button" aria-label="Stop" key="stop" onClick=${stop}>
              <svg viewBox="0 0 20 20" aria-hidden="true"><rect x="5.5" y="5.5" width="9" height="9" rx="2" /></svg>
            </button>`
          : html`<button id="send" type="submit" aria-label="Send" key="send" disabled=${!draft.value.trim()}>
              <svg viewBox="0 0 20 20" aria-hidden="true"><path d="M10 16V4.5M4.8 9.7 10 4.5l5.2 5.2" /></svg>
            </button>`}
      </div>
      <${Gauge} />
    </form>
  `;
}

/** Tokens that the open branch takes, as counted with its last answer. */
const used = computed(() => {
  const facts = tree.value.branch.filter(({ stream_id }) => stream_id).map(factsOf).findLast((one) => one?.num_prompt_tokens);
  return facts ? facts.num_prompt_tokens + (facts.num_completion_tokens ?? 0) : 0;
});

function Gauge() {
  const room = model.value?.max_model_len;
  if (!room) return html`<p id="hint"></p>`;
  const share = used.value / room;
  const counted = used.value ? `${used.value.toLocaleString("en")} of ` : ""; // unknown until the first answer has ended
  const told = `${counted}${room.toLocaleString("en")} tokens`;
  const state = share >= 1 ? "full: start a new conversation" : share > 0.85 ? "nearly full" : "";
  return html`
    <p id="hint" class=${share > 0.85 ? "low" : ""}>
      <meter id="gauge" min="0" max=${room} high=${0.85 * room} value=${used.value} aria-label="Context used">${told}</meter>
      <span>${told}${state && ` · ${state}`}</span>
      <span class="tip">Models make mistakes. ? shows all keys.</span>
    </p>
  `;
}
