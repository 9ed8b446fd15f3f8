/** Follows streams of /v1/streams to their end, through whatever happens to the connection. */

import { call, isFinal, pause, request } from "./api.js";

const ENDS = ["done", "cancelled", "error", "interrupted"];
export const SILENCE_MS = 30_000; // three heartbeats: the connection may be dead
const PAUSE_MS = 200; // before the first new try, then twice as long each time
export const LONGEST_PAUSE_MS = 15_000;

export const isEnd = (status) => ENDS.includes(status);
export const seqOf = (eventId) => Number(eventId.slice(eventId.lastIndexOf("-") + 1));
export const pathOf = (streamId) => `/v1/streams/${streamId}`;

/** The chunks of a response as `{text, bytes}`. Throws if the connection breaks. */
export async function* pieces(answer) {
  const decoder = new TextDecoder();
  const reader = answer.body.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield { text: decoder.decode(value, { stream: true }), bytes: value.byteLength };
  }
}

/** The server-sent events of a response as `{name, data, id}`. Drops an incomplete last event. Calls `onChunk` for each
 * chunk, also for heartbeats, which are no events. Throws: as `pieces`. */
export async function* events(answer, onChunk = () => {}) {
  let rest = "";
  for await (const { text } of pieces(answer)) {
    onChunk();
    rest += text;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = { name: "message", data: "", id: "" };
      for (const line of block.split("\n")) {
        if (line.startsWith("event: ")) event.name = line.slice(7);
        else if (line.startsWith("data: ")) event.data += line.slice(6);
        else if (line.startsWith("id: ")) event.id = line.slice(4);
      }
      if (event.data) yield event;
    }
  }
}

/** Reads a stream after event `seq`, and connects again whenever the connection breaks, until it is closed or has ended.
 *
 * Calls methods of `reader`: `text(fields)` and `reasoning(fields)` for each event, once and in order; `connected()` and
 * `disconnected()`; and last either `ended(state)` or `lost(refusal)`. Waits `longestPause_ms` at most between two tries. */
export class Follower {
  #reader;
  #path;
  #seq;
  #connection = new AbortController();
  #watchdog = 0;
  #pause_ms = PAUSE_MS;
  #longestPause_ms;
  #isClosed = false;

  constructor(streamId, seq, reader, { longestPause_ms = LONGEST_PAUSE_MS } = {}) {
    this.#path = pathOf(streamId);
    this.#seq = seq;
    this.#reader = reader;
    this.#longestPause_ms = longestPause_ms;
    this.#follow();
  }

  close() {
    this.#isClosed = true;
    clearTimeout(this.#watchdog);
    this.#connection.abort();
  }

  /** The network may be another one: connect again now. */
  refresh() {
    this.#connection.abort();
  }

  async #follow() {
    while (!this.#isClosed) {
      this.#connection = new AbortController();
      const { signal } = this.#connection;
      try {
        await this.#read(signal);
      } catch (error) {
        if (isFinal(error)) this.#finish("lost", error);
      }
      if (this.#isClosed || signal.aborted) continue;
      this.#tell("disconnected");
      await pause(this.#pause_ms * (0.5 + Math.random() / 2), signal); // so that not all pages return at once
      this.#pause_ms = Math.min(2 * this.#pause_ms, this.#longestPause_ms);
    }
  }

  /** Read the events of one connection. */
  async #read(signal) {
    this.#watch();
    const answer = await request("GET", `${this.#path}/events?after=${this.#seq}`, undefined, { signal });
    this.#tell("connected");
    if (answer.status === 204) return this.#finish("ended", await call("GET", this.#path)); // there are no more events
    for await (const { name, data, id } of events(answer, () => this.#watch())) {
      if (this.#isClosed) return;
      if (name === "released") return; // the stream goes on elsewhere, or later
      const fields = JSON.parse(data);
      if (isEnd(name)) this.#finish("ended", fields);
      else this.#take(name === "reasoning" ? "reasoning" : "text", seqOf(id), fields);
    }
  }

  #take(kind, seq, fields) {
    this.#seq = seq;
    this.#pause_ms = PAUSE_MS;
    this.#tell(kind, fields);
  }

  #finish(how, argument) {
    if (this.#isClosed) return;
    this.close();
    this.#tell(how, argument);
  }

  /** An error of the reader is not one of the connection. */
  #tell(what, ...args) {
    try {
      this.#reader[what]?.(...args);
    } catch (error) {
      reportError(error);
    }
  }

  #watch() {
    clearTimeout(this.#watchdog);
    if (!this.#isClosed) this.#watchdog = setTimeout(() => this.#connection.abort(), SILENCE_MS);
  }
}
