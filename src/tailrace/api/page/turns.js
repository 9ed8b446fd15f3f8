/** How questions and answers look. */

import { Writer } from "/page/writer.js";

const COPIED_MS = 1500;
const SPEAK_MS = 2000;
const MEASURABLE_MS = 200; // an answer that came in less has no pace: it was ready, or came in one piece

const template = (name) => document.getElementById(name).content.firstElementChild.cloneNode(true);

export function showQuestion(text) {
  const element = template("question-turn");
  element.firstElementChild.textContent = text;
  return element;
}

/** An answer, and below it a line that says how it stands. */
export class AnswerView {
  element = template("answer-turn");
  #writer = new Writer(this.element.querySelector(".text"));
  #state = this.element.querySelector(".state");
  #pending = "";
  #frame = 0;

  constructor(answer, again) {
    const copy = this.element.querySelector(".copy");
    copy.hidden = !navigator.clipboard; // pages that are neither from this machine nor encrypted have none
    copy.addEventListener("click", () => copyText(answer.text, copy));
    this.element.querySelector(".again").addEventListener("click", again);
    this.write(answer.text);
    this.#flush();
  }

  /** Shown once a frame, however many tokens that is. */
  write(text) {
    this.#pending += text;
    this.#frame ||= requestAnimationFrame(() => this.#flush());
  }

  /** `mood`: "waiting", "running", "ended" or "failed". */
  say(text, mood) {
    this.#state.textContent = text;
    this.element.dataset.mood = mood;
    this.element.ariaBusy = mood === "waiting" || mood === "running";
  }

  end() {
    this.#flush();
    this.#writer.end();
  }

  #flush() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.#writer.append(this.#pending);
    this.#pending = "";
  }
}

async function copyText(text, button) {
  await navigator.clipboard.writeText(text);
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), COPIED_MS);
}

/** Reads a growing text to screen readers, in phrases: they would stumble over tokens. */
export class Announcer {
  #element;
  #pending = "";
  #timer = 0;

  constructor(element) {
    this.#element = element;
  }

  add(text) {
    this.#pending += text;
    this.#timer ||= setTimeout(() => this.#speak(this.#pending.search(/\S*$/)), SPEAK_MS);
  }

  /** Whatever is left, and this. */
  finish(text) {
    this.#pending += `\n${text}`;
    this.#speak(this.#pending.length);
  }

  #speak(length) {
    clearTimeout(this.#timer);
    this.#timer = 0;
    const phrase = document.createElement("p");
    phrase.textContent = this.#pending.slice(0, length);
    this.#pending = this.#pending.slice(length);
    while (this.#element.childElementCount > 2) this.#element.firstChild.remove();
    if (phrase.textContent.trim()) this.#element.append(phrase);
  }
}

/** What a finished answer has to tell of itself. */
export function summary(answer) {
  const parts = [];
  const ending = ENDINGS[answer.status]?.(answer);
  if (ending) parts.push(ending);
  if (answer.status === "done" && answer.isCut) parts.push("Cut off at its greatest length");
  if (!answer.wasResumed && answer.first_ms) {
    parts.push(`${seconds(answer.first_ms - answer.asked_ms)} to the first token`);
    const took_ms = answer.last_ms - answer.first_ms;
    const rate = ((answer.tokens - answer.firstTokens) / took_ms) * 1000;
    if (took_ms >= MEASURABLE_MS && rate > 0) parts.push(`${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`);
  }
  if (answer.tokens) parts.push(`${answer.tokens} token${answer.tokens === 1 ? "" : "s"}`);
  return parts.join(" · ");
}

const ENDINGS = {
  cancelled: (answer) => (answer.isStopping ? "Stopped" : "Stopped, though not from this page"),
  error: (answer) => `Failed: ${answer.reason}`,
  interrupted: () => "Interrupted: the server was shut down",
  lost: (answer) => answer.reason,
};

function seconds(ms) {
  return ms < 1000 ? `${Math.max(0, Math.round(ms))} ms` : `${(ms / 1000).toFixed(1)} s`;
}
