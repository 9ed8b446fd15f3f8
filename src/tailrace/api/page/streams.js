/** tailrace's own wire, /v1/streams: create, follow to the end, cancel. */

const ENDS = ["done", "cancelled", "error", "interrupted"];
const ASK_MS = 20_000; // for an answer that is not a stream
const SILENCE_MS = 30_000; // three heartbeats, which EventSource does not show: the connection may be dead
const PAUSE_MS = 1000;
const KEY = "tailrace-key";
const LONGEST_PAUSE_MS = 15_000;

/** The server was reached, and it said no. */
export class Refusal extends Error {
  constructor(status, error, retryAfter) {
    super(error.message ?? `The server answered with status ${status}.`);
    this.status = status;
    this.code = error.code;
    this.param = error.param;
    this.retryAfter = retryAfter;
  }
}

/** JSON of the server. Asks the user for a key where the server needs one; it is kept until the tab is closed.
 *
 * Throws: Refusal; anything else means that the server was not reached. */
export async function call(method, path, body, headers = {}) {
  const key = sessionStorage.getItem(KEY);
  try {
    return await send(method, path, body, { ...headers, ...(key && { authorization: `Bearer ${key}` }) });
  } catch (error) {
    if (!(error instanceof Refusal) || error.status !== 401) throw error;
    if (sessionStorage.getItem(KEY) === key) {
      const given = window.prompt(key ? "This key is not valid. Another key:" : "This server needs a key:")?.trim();
      if (!given) throw error;
      sessionStorage.setItem(KEY, given);
    }
    return call(method, path, body, headers);
  }
}

async function send(method, path, body, headers) {
  const answer = await fetch(path, {
    method,
    headers: { accept: "application/json", ...(body && { "content-type": "application/json" }), ...headers },
    body: body && JSON.stringify(body),
    cache: "no-store",
    signal: AbortSignal.timeout(ASK_MS),
  });
  if (answer.ok) return answer.json();
  const refused = await answer.json().catch(() => ({}));
  throw new Refusal(answer.status, refused.error ?? {}, answer.headers.get("retry-after"));
}

/** Safe to repeat: with the same key it is the same stream. */
export function create(body, key) {
  return call("POST", "/v1/streams", body, { "idempotency-key": key });
}

/** Wait, unless or until somebody wants to stop. */
export function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    const hurry = () => (clearTimeout(timer), resolve());
    if (signal?.aborted) hurry();
    signal?.addEventListener("abort", hurry, { once: true });
  });
}

/** Follows a stream from behind event `seq`, through whatever happens to the connection.
 *
 * Tells `reader`, until it is closed or has told the end: `delta(fields, seq)` for each event, once and in order;
 * `connected()` and `disconnected()`; and last either `ended(status, fields, seq)` or `lost(refusal)`.
 */
export class Follower {
  #reader;
  #stream;
  #seq;
  #source = null;
  #watchdog = 0;
  #pause_ms = PAUSE_MS;
  #isClosed = false;

  constructor(stream, seq, reader) {
    this.#stream = stream;
    this.#seq = seq;
    this.#reader = reader;
    this.#open();
  }

  close() {
    this.#isClosed = true;
    this.#source?.close();
    clearTimeout(this.#watchdog);
  }

  #open() {
    this.#source?.close();
    if (sessionStorage.getItem(KEY)) this.#openWithTicket();
    else this.#follow("");
  }

  /** An EventSource cannot send a key. */
  async #openWithTicket() {
    this.#watch();
    try {
      const { ticket } = await call("POST", "/v1/tickets", { stream_id: this.#stream.events_url.split("/").at(-2) });
      if (!this.#isClosed) this.#follow(`&ticket=${ticket}`);
    } catch {
      if (!this.#isClosed) this.#recover(); // finds out why
    }
  }

  #follow(ticket) {
    // A new EventSource cannot send a Last-Event-ID. One that reconnects does, and that wins.
    const source = new EventSource(`${this.#stream.events_url}?after=${this.#seq}${ticket}`);
    this.#source = source;
    source.onopen = () => this.#reader.connected();
    source.onmessage = (event) => this.#take(event);
    for (const status of ENDS) {
      source.addEventListener(status, (event) => {
        // EventSource tells of its own troubles under the name of one of our ends; only ours has data.
        if (event.data === undefined) this.#break();
        else this.#end(status, event);
      });
    }
    this.#watch();
  }

  #take(event) {
    this.#seq = seqOf(event.lastEventId);
    this.#pause_ms = PAUSE_MS;
    this.#watch();
    this.#reader.delta(JSON.parse(event.data), this.#seq);
  }

  #end(status, event) {
    this.close();
    this.#reader.ended(status, JSON.parse(event.data), seqOf(event.lastEventId));
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
        const state = await call("GET", this.#stream.events_url.replace(/\/events$/, ""));
        if (this.#isClosed) return;
        if (ENDS.includes(state.status) && seqOf(state.last_event_id) <= this.#seq) {
          this.close();
          this.#reader.ended(state.status, state, this.#seq);
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

function seqOf(eventId) {
  return Number(eventId.slice(eventId.lastIndexOf("-") + 1));
}
