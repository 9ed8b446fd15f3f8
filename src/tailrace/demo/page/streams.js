/** Streams of the server, on several wires. */

import { Refusal, pause, refusalOf } from "/page/api.js";
import { isEnd } from "/page/streams.js";

const RETRY_MS = 200;

/** POST JSON. Throws: Refusal; other errors mean a failed connection or an aborted `signal`. */
export async function post(path, body, { signal, headers = {} } = {}) {
  const answer = await fetch(path, {
    method: "POST",
    headers: { "content-type": "application/json", ...headers },
    body: JSON.stringify(body),
    cache: "no-store",
    signal,
  });
  if (answer.ok) return answer;
  throw await refusalOf(answer);
}

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

/** The server-sent events of a response as `{name, data, id}`. Drops an incomplete last event. */
export async function* events(answer) {
  let rest = "";
  for await (const { text } of pieces(answer)) {
    rest += text;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = { name: "message", data: "", id: "" };
      for (const line of block.split("\n")) {
        const [, field, value] = /^(\w+): ?(.*)$/.exec(line) ?? [];
        if (field === "event") event.name = value;
        else if (field === "data") event.data += value;
        else if (field === "id") event.id = value;
      }
      if (event.data) yield event;
    }
  }
}

export async function create(body, signal) {
  return (await post("/v1/streams", body, { signal })).json();
}

/** Follow a stream to its end, and reconnect when the connection breaks.
 *
 * Calls `reader.token(fields)` once for each event, in order, and `reader.connected()` and `disconnected()`. Returns
 * `{status, fields}`, or null after an abort of `signal`. Throws: Refusal if the server does not have the stream. */
export async function follow(stream, reader, signal) {
  let last = "";
  while (!signal.aborted) {
    try {
      const answer = await fetch(stream.events_url, {
        headers: last ? { "last-event-id": last } : {},
        cache: "no-store",
        signal,
      });
      if (answer.status === 404 || answer.status === 410) {
        throw new Refusal(answer.status, { message: "The server no longer knows this stream." });
      }
      if (answer.ok) {
        reader.connected?.();
        for await (const { name, data, id } of events(answer)) {
          last = id;
          if (isEnd(name)) return { status: name, fields: JSON.parse(data) };
          reader.token(JSON.parse(data));
        }
      }
    } catch (error) {
      if (error instanceof Refusal) throw error;
    }
    if (signal.aborted) break;
    reader.disconnected?.();
    await pause(RETRY_MS, signal);
  }
  return null;
}

/** Stop a stream. Ignores errors: the stream then runs to its end. */
export function cancel(stream) {
  fetch(stream.cancel_url, { method: "POST" }).catch(() => {});
}

/** Start several streams over one WebSocket: `bodies` by name. Calls `reader.token(name, fields)`, and returns when all
 * streams have ended. Throws: Refusal, also for a broken socket. */
export function together(bodies, reader, signal) {
  return new Promise((resolve, reject) => {
    const socket = new WebSocket(`${location.origin.replace("http", "ws")}/v1/ws`);
    const running = new Set(bodies.keys());
    signal.addEventListener("abort", () => (socket.close(), resolve()), { once: true });
    socket.onopen = () => {
      for (const [id, body] of bodies) socket.send(JSON.stringify({ type: "create", id, on_disconnect: "cancel", ...body }));
    };
    socket.onmessage = ({ data }) => {
      const { type, id, ...fields } = JSON.parse(data);
      if (type === "delta") reader.token(id, fields);
      else if (type === "refused") reject(new Refusal(0, fields.error));
      else if (isEnd(type)) running.delete(id);
      if (!running.size) (socket.close(), resolve());
    };
    socket.onclose = () => reject(new Refusal(0, { message: "The connection broke." }));
  });
}
