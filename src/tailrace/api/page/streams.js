/** Follows streams of /v1/streams to their end, through whatever happens to the connection. */

import { Refusal, call, pause } from "/page/api.js";

const ENDS = ["done", "cancelled", "error", "interrupted"];
const SILENCE_MS = 30_000; // three heartbeats, which EventSource does not show: the connection may be dead
const PAUSE_MS = 1000;
const LONGEST_PAUSE_MS = 15_000;

export const isEnd = (status) => ENDS.includes(status);
export const seqOf = (eventId) => Number(eventId.slice(eventId.lastIndexOf("-") + 1));
export const pathOf = (streamId) => `/v1/streams/${streamId}`;

/** Tells `reader`, from behind event `seq` on, until it is closed or has told the end: `text(fields)` and
 * `reasoning(fields)` for each event, once and in order; `connected()` and `disconnected()`; and last either
 * `ended(state)` or `lost(refusal)`. */
export class Follower {
  #reader;
  #path;
  #seq;
  #source = null;
  #watchdog = 0;
  #pause_ms = PAUSE_MS;
  #isClosed = false;

  constructor(streamId, seq, reader) {
    this.#path = pathOf(streamId);
    this.#seq = seq;
    this.#reader = reader;
    this.#open();
  }

  close() {
    this.#isClosed = true;
    this.#source?.close();
    clearTimeout(this.#watchdog);
  }

  /** The network may be another one: do not wait for the old connection to be given up. */
  refresh() {
    if (!this.#isClosed) this.#open();
  }

  #open() {
    this.#source?.close();
    // A new EventSource cannot send a Last-Event-ID. One that reconnects does, and that wins.
    const source = new EventSource(`${this.#path}/events?after=${this.#seq}`);
    this.#source = source;
    source.onopen = () => this.#reader.connected();
    source.onmessage = (event) => this.#take("text", event);
    source.addEventListener("reasoning", (event) => this.#take("reasoning", event));
    for (const status of ENDS) {
      source.addEventListener(status, (event) => {
        // EventSource tells of its own troubles under the name of one of our ends; only ours has data.
        if (event.data === undefined) this.#break();
        else this.#end(JSON.parse(event.data));
      });
    }
    this.#watch();
  }

  #take(kind, event) {
    this.#seq = seqOf(event.lastEventId);
    this.#pause_ms = PAUSE_MS;
    this.#watch();
    this.#reader[kind](JSON.parse(event.data));
  }

  #end(state) {
    this.close();
    this.#reader.ended(state);
  }

  #watch() {
    clearTimeout(this.#watchdog);
    this.#watchdog = setTimeout(() => this.#open(), SILENCE_MS);
  }

  #break() {
    if (this.#isClosed) return;
    this.#reader.disconnected();
    if (this.#source.readyState === EventSource.CLOSED) this.#recover(); // else it tries again by itself
  }

  /** The browser has given up on the stream: find out why, and go on if there is something to go on with. */
  async #recover() {
    clearTimeout(this.#watchdog);
    while (!this.#isClosed) {
      try {
        const state = await call("GET", this.#path);
        if (this.#isClosed) return;
        if (isEnd(state.status) && seqOf(state.last_event_id) <= this.#seq) {
          this.#end(state);
          return;
        }
        await this.#rest();
        if (!this.#isClosed) this.#open();
        return;
      } catch (error) {
        if (error instanceof Refusal && error.status < 500 && error.status !== 429) {
          if (this.#isClosed) return;
          this.close();
          this.#reader.lost(error);
          return;
        }
        await this.#rest();
      }
    }
  }

  async #rest() {
    await pause(this.#pause_ms);
    this.#pause_ms = Math.min(2 * this.#pause_ms, LONGEST_PAUSE_MS);
  }
}
