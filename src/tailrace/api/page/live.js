/** Answers that are on their way: each is followed once, whoever shows it. */

import { signal } from "./lib/signals.js";
import { Refusal, call, pause } from "./api.js";
import { Follower, isEnd, pathOf, seqOf } from "./streams.js";

const LOOK_MS = 1000;

const LOST = {
  unknown_stream: "The server no longer knows this answer.",
  stream_expired: "The server no longer keeps this answer: its time is over.",
};

/** `prefix` is what the answer goes on from. `asked_ms` is when this page asked for it, and `model` whom; null if it did not.
 *
 * Calls `events.connected()`, `events.disconnected()` and, at the end, `events.ended(answer)`. Views are told
 * `text(more)` and `reasoning(more)`. */
export class LiveAnswer {
  phase = signal("waiting"); // then "queued", "thinking", "writing", "stopping", "over"
  numAhead = signal(0);
  progress = signal(null); // while a long prompt is read: `{total, processed}`
  isConnected = signal(true);
  thought_s = signal(null);
  facts = signal({}); // as a conversation's tree tells them, and `reason` where it failed
  text;
  reasoning = "";
  views = new Set();
  #streamId;
  #events;
  #follower = null;
  #asked_ms;
  #model;
  #first_ms = null;
  #firstTokens = 0;
  #tokens = 0;
  #thinking_ms = null;
  #finish = "";

  constructor(streamId, { prefix = "", asked_ms = null, model = null, events }) {
    this.#streamId = streamId;
    this.text = prefix;
    this.#asked_ms = asked_ms;
    this.#model = model;
    this.#events = events;
    this.#begin();
  }

  get streamId() {
    return this.#streamId;
  }

  close() {
    this.#follower?.close();
    this.#follower = { close() {}, refresh() {} };
  }

  refresh() {
    this.#follower?.refresh();
  }

  /** Not being heard is no failure: it is said again with the next connection. */
  stop() {
    if (this.phase.value === "over") return;
    this.phase.value = "stopping";
    call("POST", `${pathOf(this.#streamId)}/cancel`, {}).catch(() => {});
  }

  async #begin() {
    let seq = 0;
    if (this.#asked_ms === null) {
      // Somebody else asked, or this page before it was loaded again: what is there comes in one piece.
      const state = await this.#look();
      if (this.#follower || !state) return;
      this.#model = state.model;
      this.#show("reasoning", state.reasoning ?? "");
      this.#show("text", state.text);
      seq = seqOf(state.last_event_id);
      if (isEnd(state.status)) {
        this.#end(state);
        return;
      }
    }
    this.#follower = new Follower(this.#streamId, seq, {
      connected: () => {
        this.isConnected.value = true;
        if (this.phase.value === "stopping") this.stop(); // it may not have been heard
        this.#events.connected(this);
      },
      disconnected: () => {
        this.isConnected.value = false;
        this.#asked_ms = null; // its pace is no longer the model's
        this.#events.disconnected(this);
      },
      text: (fields) => this.#take("text", "writing", fields),
      reasoning: (fields) => this.#take("reasoning", "thinking", fields),
      ended: (state) => this.#end(state),
      lost: (refusal) => this.#end({ status: "lost", error: { message: LOST[refusal.code] ?? refusal.message } }),
    });
    this.#watchQueue();
  }

  async #look() {
    while (!this.#follower) {
      try {
        return await call("GET", pathOf(this.#streamId));
      } catch (error) {
        if (error instanceof Refusal && error.status < 500) {
          this.#end({ status: "lost", error: { message: LOST[error.code] ?? error.message } });
          return null;
        }
        this.isConnected.value = false;
        await pause(LOOK_MS);
      }
    }
    return null;
  }

  /** Until the first token: how many are in front, and how much of the prompt is read. */
  async #watchQueue() {
    while (["waiting", "queued"].includes(this.phase.value)) {
      await pause(LOOK_MS);
      const state = await call("GET", pathOf(this.#streamId)).catch(() => null);
      if (!state || !["waiting", "queued"].includes(this.phase.value)) continue;
      this.phase.value = state.status === "queued" ? "queued" : "waiting";
      this.numAhead.value = state.num_ahead ?? 0;
      this.progress.value = state.prompt_progress ?? null;
    }
  }

  #take(kind, phase, fields) {
    const now_ms = performance.now();
    if (this.#first_ms === null) {
      this.#first_ms = now_ms;
      this.#firstTokens = fields.token_ids.length;
    }
    this.#tokens += fields.token_ids.length;
    if (fields.finish_reason) this.#finish = fields.finish_reason;
    if (kind === "reasoning") this.#thinking_ms ??= now_ms;
    else if (this.#thinking_ms !== null && this.thought_s.value === null)
      this.thought_s.value = (now_ms - this.#thinking_ms) / 1000;
    if (this.phase.value !== "stopping" && this.phase.value !== phase) this.phase.value = phase;
    this.#show(kind, fields.text);
  }

  #show(kind, more) {
    if (!more) return;
    this[kind] += more;
    for (const view of this.views) view[kind](more);
  }

  #end(state) {
    this.close();
    const now_ms = performance.now();
    const facts = { status: state.status, finish: this.#finish || state.error?.code || state.status };
    if (this.#model) facts.model = this.#model;
    if (state.error) facts.reason = state.error.message;
    if (this.thought_s.value !== null) facts.thought_s = this.thought_s.value;
    if (state.usage) {
      facts.num_prompt_tokens = state.usage.prompt_tokens;
      facts.num_completion_tokens = state.usage.completion_tokens;
    }
    if (this.#asked_ms !== null && this.#first_ms !== null) {
      facts.first_token_s = (this.#first_ms - this.#asked_ms) / 1000;
      facts.tokens_per_s = ((this.#tokens - this.#firstTokens) * 1000) / (now_ms - this.#first_ms);
      facts.total_s = (now_ms - this.#asked_ms) / 1000;
    }
    this.facts.value = facts;
    this.phase.value = "over";
    this.#events.ended(this);
  }
}
