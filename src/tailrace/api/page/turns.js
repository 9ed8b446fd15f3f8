/** Questions and answers, as they stand below each other. */

import { useEffect, useLayoutEffect, useRef, useState } from "./lib/preact-hooks.js";
import { html } from "./html.js";
import { MarkdownView } from "./markdown.js";
import { unwatchSight, watchSight } from "./frames.js";
import { ToolCalls } from "./tools.js";
import { answerCalls, ask, asking, factsOf, imagePath, imagesOf, isBusy, live, models, showBranch, textOf, tree } from "./store.js";

const COPIED_MS = 1500;
const LONG = 4000; // characters of an answer from which on it is not kept as nodes out of sight

export function Turns() {
  const { branch } = tree.value;
  const question = asking.value;
  const place = question && branch.findIndex(({ id }) => id === question.parentId);
  const shown = question ? branch.slice(0, place + 1) : branch;
  return html`
    ${shown.map((item, index) => html`<${Item} key=${item.id} item=${item} isLast=${index === shown.length - 1} />`)}
    ${question && html`<${Asking} question=${question} />`}
    <${ToolCalls} answer=${answerCalls} isBusy=${isBusy.value} />
  `;
}

function Item({ item, isLast }) {
  if (item.type !== "message") return html`<${Tool} item=${item} />`;
  if (item.role === "assistant") return html`<${Answer} item=${item} isLast=${isLast} />`;
  return html`<${Question} item=${item} isLast=${isLast} />`;
}

function Asking({ question }) {
  const isReached = question.state.value !== "unreachable";
  return html`
    ${question.text !== null &&
    html`<article class="question" aria-label="You">
      ${question.pictures.length > 0
        ? html`<div class="images">${question.pictures.map(({ key, name, thumb }) => html`<img key=${key} src=${thumb} alt=${name} />`)}</div>`
        : html`<${Images} ids=${question.images ?? []} />`}
      ${question.text && html`<p dir="auto">${question.text}</p>`}
    </article>`}
    <article class="answer" aria-label="Answer" aria-busy="true" data-mood="waiting">
      <div class="text"></div>
      <footer><p class="state">${isReached ? stateOfModel(question) : "The server cannot be reached. Trying again…"}</p></footer>
    </article>
  `;
}

function stateOfModel(question) {
  if (question.state.value !== "sending") return question.state.value; // of its images
  const name = question.modelId ?? question.settings.model;
  const wanted = models.value.find(({ id }) => id === name) ?? models.value[0];
  return wanted && ["unloaded", "loading"].includes(wanted.state) ? "The model is being loaded…" : "Sending…";
}

function Tool({ item }) {
  const title = item.type === "function_call" ? `Call of ${item.name}` : "Result of the tool";
  return html`<details class="aside"><summary>${title}</summary><p dir="auto">${textOf(item)}</p></details>`;
}

/** The images of a message; each leads to the file. */
function Images({ ids, remove }) {
  if (!ids.length) return null;
  const nameOf = (place) => (ids.length > 1 ? `image ${place + 1} of ${ids.length}` : "image");
  return html`
    <div class="images">
      ${ids.map(
        (id, place) => html`<span key=${id}>
          <a href=${imagePath(id)} target="_blank" rel="noopener" aria-label="Open ${nameOf(place)}">
            <img src=${imagePath(id)} alt="Your ${nameOf(place)}" decoding="async" />
          </a>
          ${remove && html`<button type="button" aria-label="Remove ${nameOf(place)}" onClick=${() => remove(id)}>✕</button>`}
        </span>`,
      )}
    </div>
  `;
}

function Question({ item, isLast }) {
  const [isEdited, setEdited] = useState(false);
  if (item.role !== "user") {
    return html`<details class="aside"><summary>System prompt</summary><p dir="auto">${textOf(item)}</p></details>`;
  }
  if (isEdited) return html`<${Edit} item=${item} close=${() => setEdited(false)} />`;
  return html`
    <article class="question" aria-label="You">
      <${Images} ids=${imagesOf(item)} />
      ${(textOf(item) || !imagesOf(item).length) && html`<p dir="auto">${textOf(item)}</p>`}
      <footer>
        <${Branches} item=${item} />
        <button type="button" class="quiet edit" disabled=${isBusy.value} onClick=${() => setEdited(true)}>Edit</button>
        ${isLast && !isBusy.value && html`<button type="button" class="quiet again" onClick=${() => ask(item.id)}>Answer</button>`}
      </footer>
    </article>
  `;
}

function Edit({ item, close }) {
  const field = useRef();
  const [images, setImages] = useState(imagesOf(item));
  useLayoutEffect(() => {
    field.current.focus();
    field.current.setSelectionRange(field.current.value.length, field.current.value.length);
  }, []);
  const submit = async (event) => {
    event.preventDefault();
    const text = field.current.value.trim();
    close();
    if (text || images.length) await ask(item.parent_id, text, { images });
  };
  const onKeyDown = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      close();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  return html`
    <form class="edit-question" onSubmit=${submit}>
      <${Images} ids=${images} remove=${(id) => setImages(images.filter((one) => one !== id))} />
      <textarea ref=${field} aria-label="Edit your message" rows="3" dir="auto" onKeyDown=${onKeyDown}>${textOf(item)}</textarea>
      <footer>
        <button type="button" class="quiet" onClick=${close}>Cancel</button>
        <button type="submit" class="primary">Send</button>
      </footer>
    </form>
  `;
}

/** "2 / 3", and the way to the others. */
function Branches({ item }) {
  const all = tree.value.siblings(item);
  if (all.length < 2) return null;
  const place = all.indexOf(item);
  const to = (step) => () => showBranch(all[place + step]);
  return html`
    <span class="branches" role="group" aria-label="Versions">
      <button type="button" class="quiet" aria-label="Previous version" disabled=${place === 0} onClick=${to(-1)}>‹</button>
      <span>${place + 1} / ${all.length}</span>
      <button type="button" class="quiet" aria-label="Next version" disabled=${place === all.length - 1} onClick=${to(1)}>›</button>
    </span>
  `;
}

function Answer({ item, isLast }) {
  const answer = live.value.get(item.stream_id);
  const isRunning = item.status === "in_progress" && (answer ? answer.phase.value !== "over" : true);
  const facts = item.status === "in_progress" && answer ? answer.facts.value : factsOf(item);
  const mood = isRunning ? (answer?.phase.value === "writing" ? "running" : "waiting") : isFailed(item, facts) ? "failed" : "ended";
  return html`
    <article class="answer" aria-label="Answer" aria-busy=${isRunning} data-mood=${mood}>
      <${Reasoning} item=${item} answer=${answer} />
      <${Text} item=${item} answer=${answer} />
      <footer>
        <p class="state">${isRunning ? html`<${Progress} answer=${answer} />` : summary(item, facts)}</p>
        ${!isRunning && html`<${Actions} item=${item} isLast=${isLast} facts=${facts} />`}
      </footer>
    </article>
  `;
}

function Progress({ answer }) {
  if (!answer) return "Waiting…";
  if (!answer.isConnected.value) return "Connection lost. Reconnecting…";
  const ahead = answer.numAhead.value;
  const read = answer.progress.value;
  return {
    waiting: read ? `Reading the prompt: ${Math.floor((100 * read.processed) / read.total)} %…` : "Reading your message…",
    queued: ahead ? `In the queue, ${ahead} ahead of you…` : "In the queue, you are next…",
    thinking: "Thinking…",
    writing: "",
    stopping: "Stopping…",
    over: "",
  }[answer.phase.value];
}

/** What a model has thought before it answered, folded away. */
function Reasoning({ item, answer }) {
  const isThinking = answer?.phase.value === "thinking";
  if (!isThinking && !answer?.reasoning && !item.reasoning) return null;
  const seconds = answer?.thought_s.value ?? factsOf(item)?.thought_s;
  const title = isThinking ? "Thinking…" : seconds ? `Thought for ${Math.max(1, Math.round(seconds))} s` : "Reasoning";
  return html`<details class="aside reasoning"><summary>${title}</summary><${Thoughts} item=${item} answer=${answer} /></details>`;
}

function Thoughts({ item, answer }) {
  const box = useRef();
  useLayoutEffect(() => {
    box.current.textContent = answer?.reasoning || item.reasoning || "";
    if (!answer) return undefined;
    const view = { text() {}, reasoning: (more) => box.current.append(more) };
    answer.views.add(view);
    return () => answer.views.delete(view);
  }, [answer, item.reasoning]);
  return html`<p dir="auto" ref=${box}></p>`;
}

/** The answer's text. What is far out of sight, and long, is one text node: it costs nothing, and can still be found. */
function Text({ item, answer }) {
  const box = useRef();
  const shown = useRef({ text: "", view: null, isFolded: false });

  useLayoutEffect(() => {
    const state = shown.current;
    const isRunning = item.status === "in_progress" && answer;
    const whole = isRunning ? answer.text : textOf(item);
    if (!state.view || !whole.startsWith(state.text)) {
      box.current.replaceChildren();
      Object.assign(state, { text: "", view: new MarkdownView(box.current), isFolded: false });
    }
    const write = (more) => {
      state.view.append(more);
      state.text += more;
    };
    if (whole.length > state.text.length) write(whole.slice(state.text.length));
    if (!isRunning) {
      state.view.end();
      return undefined;
    }
    const view = { text: write, reasoning() {} };
    answer.views.add(view);
    return () => answer.views.delete(view);
  }, [answer, item.status, item.id]);

  useEffect(() => {
    if (item.status === "in_progress" || textOf(item).length < LONG) return undefined;
    const element = box.current;
    watchSight(element, (isInSight) => fold(shown.current, element, textOf(item), !isInSight));
    return () => unwatchSight(element);
  }, [item.status, item.id]);

  return html`<div class="text" ref=${box}></div>`;
}

function fold(state, element, text, isFolded) {
  if (isFolded === state.isFolded) return;
  state.isFolded = isFolded;
  if (isFolded) {
    element.style.height = `${element.offsetHeight}px`;
    element.replaceChildren(document.createTextNode(text));
    return;
  }
  element.replaceChildren();
  state.view = new MarkdownView(element);
  state.view.append(text);
  state.view.end();
  element.style.height = "";
}

function Actions({ item, isLast, facts }) {
  const [isCopied, setCopied] = useState(false);
  const others = models.value.length > 1 ? models.value.filter(({ id }) => id !== facts?.model) : [];
  const copy = async () => {
    await navigator.clipboard.writeText(textOf(item));
    setCopied(true);
    setTimeout(() => setCopied(false), COPIED_MS);
  };
  const again = (modelId) => ask(item.parent_id, null, { modelId });
  const isCut = item.status === "incomplete" && textOf(item).trim() !== "" && isLast;
  return html`
    <span class="actions">
      <${Branches} item=${item} />
      ${navigator.clipboard && html`<button type="button" class="quiet copy" onClick=${copy}>${isCopied ? "Copied" : "Copy"}</button>`}
      ${isCut && html`<button type="button" class="quiet continue" disabled=${isBusy.value} onClick=${() => ask(item.id)}>Continue</button>`}
      <button type="button" class="quiet again" disabled=${isBusy.value} onClick=${() => again(null)}>
        ${isFailed(item, facts) ? "Try again" : "Regenerate"}
      </button>
      ${others.length > 0 &&
      html`<select
        class="quiet" aria-label="Regenerate with another model" disabled=${isBusy.value} value=""
        onChange=${(event) => event.target.value && again(event.target.value)}
      >
        <option value="">with…</option>
        ${others.map(({ id }) => html`<option value=${id}>${id}</option>`)}
      </select>`}
    </span>
  `;
}

const isFailed = (item, facts) => ["error", "interrupted", "lost"].includes(facts?.status) || (item.status === "in_progress" && facts?.status === undefined);

/** What a finished answer has to tell of itself. */
export function summary(item, facts) {
  if (!facts) return item.status === "completed" ? "" : "Not complete";
  const parts = [];
  const ending = ENDINGS[facts.status]?.(facts);
  if (ending) parts.push(ending);
  if (facts.status === "done" && facts.finish === "length") parts.push("Reached the length limit");
  if (models.value.length > 1 && facts.model) parts.push(facts.model);
  if (facts.first_token_s != null) parts.push(`${seconds(facts.first_token_s)} to the first token`);
  const rate = facts.tokens_per_s ?? (facts.num_completion_tokens - 1) / (facts.total_s - facts.first_token_s);
  if (rate > 0 && facts.total_s - facts.first_token_s >= 0.2) parts.push(`${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`);
  const count = facts.num_completion_tokens;
  if (count) parts.push(`${count} token${count === 1 ? "" : "s"}`);
  if (facts.num_prompt_tokens) parts.push(`${facts.num_prompt_tokens} in the prompt`);
  return parts.join(" · ");
}

/** For errors that this page has not seen itself: the server records their codes only. */
const REASONS = {
  diverged: "After a failure, the engine gave a different answer, so this one could not continue.",
  engine_error: "The engine failed.",
  engine_stalled: "The engine made no progress.",
  engine_unavailable: "The engine stopped and did not restart in time.",
  internal_error: "An error in the server; its log has the details.",
  journal_damaged: "The stored answer is damaged.",
  journal_unavailable: "The server could not store the answer.",
  key_revoked: "The key of this request was revoked.",
  log_full: "The server's disk is full.",
  poison_request: "This message makes the engine crash.",
  queue_timeout: "The model was too busy to begin in time.",
  request_refused: "The engine refused this message.",
  sequence_failed: "The engine could not give this answer.",
};

const ENDINGS = {
  cancelled: () => "Stopped",
  error: (facts) => `Failed: ${facts.reason ?? REASONS[facts.finish] ?? `${facts.finish}.`}`,
  interrupted: () => "Interrupted: the server was shut down",
  lost: (facts) => facts.reason ?? "Lost when the server stopped",
};

const seconds = (s) => (s < 1 ? `${Math.max(0, Math.round(s * 1000))} ms` : `${s.toFixed(1)} s`);
