/** Streams of the server, on several wires. */

import { Refusal, at, request } from "../../page/api.js";
import { Follower, isEnd } from "../../page/streams.js";

const RETRY_MS = 200;

/** POST JSON. Throws: Refusal; other errors mean a failed connection or an aborted `signal`. */
export const post = (path, body, options) => request("POST", path, body, options);

export async function create(body, signal) {
  return (await post("/v1/streams", body, { signal })).json();
}

/** Follow a stream to its end, and reconnect when the connection breaks.
 *
 * Calls `reader.token(fields)` once for each event, in order, and `reader.connected()` and `disconnected()`. Returns the
 * fields of the end, or null after an abort of `signal`. Throws: Refusal if the server does not have the stream. */
export function follow(stream, { token, connected, disconnected }, signal) {
  return new Promise((resolve, reject) => {
    const reader = { text: token, reasoning: token, connected, disconnected, ended: resolve, lost: reject };
    const follower = new Follower(stream.id, 0, reader, { longestPause_ms: RETRY_MS });
    const stop = () => (follower.close(), resolve(null));
    if (signal.aborted) stop();
    signal.addEventListener("abort", stop, { once: true });
  });
}

/** Stop a stream. Ignores errors: the stream then runs to its end. */
export function cancel(stream) {
  fetch(at(`/v1/streams/${stream.id}/cancel`), { method: "POST" }).catch(() => {});
}

/** Start several streams over one WebSocket: `bodies` by name. Calls `reader.token(name, fields)`, and returns when all
 * streams have ended. Throws: Refusal, also for a broken socket. */
export function together(bodies, reader, signal) {
  return new Promise((resolve, reject) => {
    const socket = new WebSocket(at("/v1/ws").replace("http", "ws"));
    const running = new Set(bodies.keys());
    signal.addEventListener("abort", () => (socket.close(), resolve()), { once: true });
    socket.onopen = () => {
      for (const [id, body] of bodies) socket.send(JSON.stringify({ type: "create", id, on_disconnect: "cancel", ...body }));
    };
    socket.onmessage = ({ data }) => {
      const { type, id, ...fields } = JSON.parse(data);
      if (type === "delta") reader.token(id, fields);
      else if (type === "refused" || type === "released") reject(new Refusal(0, fields.error));
      else if (isEnd(type)) running.delete(id);
      if (!running.size) (socket.close(), resolve());
    };
    socket.onclose = () => reject(new Refusal(0, { message: "The connection broke." }));
  });
}
