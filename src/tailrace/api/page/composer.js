/** Where one writes, and what the model still has room for. */

import { useEffect, useLayoutEffect, useRef } from "./lib/preact-hooks.js";
import { computed, signal } from "./lib/signals.js";
import { html } from "./html.js";
import { keep, recall } from "./storage.js";
import { MOST, addFiles, imagesIn, isPreparing, pictures, removePicture } from "./pictures.js";
import { alarm, ask, factsOf, isBusy, model, note, openId, seesImages, stop, tree, unsentText } from "./store.js";

const draft = signal("");
const SAVE_MS = 300;
const LONG = 10_000; // characters; for a million of them, Chromium takes seconds to find the direction
const RIGHT_TO_LEFT = /^[^\p{L}]*[\p{Script=Arabic}\p{Script=Hebrew}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u;
let saving = 0;
let draftOf = null; // the conversation whose draft it is
const kept = new Map(); // images of other drafts, by conversation

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
  if (draftOf !== null) kept.set(draftOf, pictures.value);
  draftOf = id;
  draft.value = recall(`draft.${id}`) ?? "";
  pictures.value = kept.get(id) ?? [];
  kept.delete(id);
}

/** The images of a draft, which may not be shown any more when a file is ready. */
const draftWith = (id) => ({
  get images() {
    return draftOf === id ? pictures.value : (kept.get(id) ?? []);
  },
  set images(images) {
    if (draftOf === id) pictures.value = images;
    else kept.set(id, images);
  },
});

const whyBlind = () => `${model.value?.id ?? "This model"} does not read images.`;

/** Add images to the question, unless the model cannot read them. */
async function attach(files) {
  if (!files.length) return;
  const id = openId.value;
  alarm.value = seesImages.value ? "" : whyBlind();
  if (!seesImages.value) return;
  const fault = await addFiles(files, draftWith(id));
  if (id === openId.value) alarm.value = fault;
}

/** Files that are dropped anywhere on the page belong to the question. */
export function takeDrop(event) {
  if (!event.dataTransfer?.types.includes("Files")) return;
  event.preventDefault(); // otherwise the browser would leave the page and show the file
  if (event.type === "drop") attach(imagesIn(event.dataTransfer.files));
}

async function submit(event) {
  event?.preventDefault();
  const text = draft.value;
  const images = pictures.value;
  if (isBusy.value || isPreparing.value || !(text.trim() || images.length)) return;
  if (images.length && !seesImages.value) {
    alarm.value = `${whyBlind()} Remove them, or choose another model.`;
    return;
  }
  const id = openId.value;
  change("");
  pictures.value = [];
  save();
  const isTaken = await ask(tree.value.last?.id ?? null, text, { pictures: images });
  draftOf = openId.value; // a new conversation has its id now
  if (isTaken || (openId.value !== id && id !== "")) return;
  change([text, draft.value].filter(Boolean).join("\n\n"));
  pictures.value = [...images, ...pictures.value];
}

function directionOf(text) {
  if (text.length < LONG) return "auto";
  return RIGHT_TO_LEFT.test(text.slice(0, 1_000)) ? "rtl" : "ltr";
}

export function Composer() {
  const field = useRef();
  useEffect(() => showDraft(openId.value), [openId.value]);
  useEffect(() => {
    if (!unsentText.value) return;
    change(unsentText.value);
    unsentText.value = "";
  }, [unsentText.value]);
  useLayoutEffect(() => {
    field.current.style.height = "auto";
    field.current.style.height = `${field.current.scrollHeight}px`;
  }, [draft.value]);
  const onKeyDown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    submit(event);
  };
  const onPaste = (event) => {
    const files = imagesIn(event.clipboardData?.files);
    if (!files.length) return;
    event.preventDefault();
    attach(files);
  };
  return html`
    <form id="composer" onSubmit=${submit}>
      <div id="over">
        <div id="note" role="status">${note.value}</div>
        <div id="alarm" role="alert">${alarm.value}</div>
      </div>
      ${pictures.value.length > 0 && html`<${Pictures} />`}
      <div id="field">
        <${Attach} />
        <label class="unseen" for="question">Your message</label>
        <textarea
          id="question" ref=${field} rows="1" placeholder="Write a message" enterkeyhint="send" dir=${directionOf(draft.value)}
          value=${draft.value} onInput=${(event) => change(event.target.value)} onKeyDown=${onKeyDown}
          onPaste=${onPaste}
        ></textarea>
        ${isBusy.value
          ? html`<button id="stop" type="button" aria-label="Stop" key="stop" onClick=${stop}>
              <svg viewBox="0 0 20 20" aria-hidden="true"><rect x="5.5" y="5.5" width="9" height="9" rx="2" /></svg>
            </button>`
          : html`<button id="send" type="submit" aria-label="Send" key="send" disabled=${isPreparing.value || !(draft.value.trim() || pictures.value.length)}>
              <svg viewBox="0 0 20 20" aria-hidden="true"><path d="M10 16V4.5M4.8 9.7 10 4.5l5.2 5.2" /></svg>
            </button>`}
      </div>
      <${Gauge} />
    </form>
  `;
}

function Attach() {
  const files = useRef();
  const isFull = pictures.value.length >= MOST;
  const why = !seesImages.value ? whyBlind() : isFull ? `A message can have at most ${MOST} images.` : "";
  const take = async () => {
    await attach(imagesIn(files.current.files));
    files.current.value = "";
    focusComposer();
  };
  return html`
    <button
      id="attach" type="button" class="quiet" aria-label="Attach images" aria-describedby=${why ? "why-not" : undefined} title=${why || "Attach images"}
      aria-disabled=${why !== ""} onClick=${() => (why ? (alarm.value = why) : files.current.click())}
    >
      <svg viewBox="0 0 20 20" aria-hidden="true"><path d="m16.5 9-6.6 6.6a3.9 3.9 0 0 1-5.5-5.5l7-7a2.6 2.6 0 0 1 3.7 3.7l-6.8 6.8a1.3 1.3 0 0 1-1.9-1.9L12.5 6" /></svg>
    </button>
    <input ref=${files} id="files" type="file" accept="image/png,image/jpeg,image/webp,image/gif" multiple hidden onChange=${take} />
    ${why && html`<span id="why-not" class="unseen">${why}</span>`}
  `;
}

/** The images of the question, each with a button that removes it. */
function Pictures() {
  const remove = (key) => {
    removePicture(key);
    focusComposer();
  };
  return html`
    <ul id="pictures" aria-label="Images to send" aria-live="polite">
      ${pictures.value.map(
        ({ key, name, thumb }) => html`<li key=${key}>
          <img src=${thumb} alt=${name} />
          <button type="button" aria-label="Remove ${name}" onClick=${() => remove(key)}>✕</button>
        </li>`,
      )}
    </ul>
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
