/** The server's JSON. */

const ASK_MS = 20_000;
const ROOT = new URL("..", import.meta.url); // of the server: a proxy may serve it below a path

/** The address of a path of the server. */
export const at = (path) => new URL(path.slice(1), ROOT).href;

/** The server was reached, and it said no. */
export class Refusal extends Error {
  constructor(status, error, retryAfter) {
    super(error.message ?? `The server answered with status ${status}.`);
    this.status = status;
    this.code = error.code;
    this.param = error.param;
    this.retryAfter = retryAfter;
  }

  /** What a person can read. */
  get text() {
    return this.retryAfter ? `${this.message} Try again in ${this.retryAfter} s.` : this.message;
  }
}

let onSignedOut = () => {};

/** Have this called whenever the server wants a key, or does not know the session any more. */
export function whenSignedOut(call) {
  onSignedOut = call;
}

/** The server's response. `body` is text or a file, or becomes JSON. Throws: Refusal; anything else means that the server
 * was not reached, or that `signal` ended it. */
export async function request(method, path, body, { headers = {}, signal } = {}) {
  const isFile = body instanceof Blob;
  const isReady = isFile || typeof body === "string";
  const answer = await fetch(at(path), {
    method,
    headers: { ...(body !== undefined && { "content-type": isFile ? body.type : "application/json" }), ...headers },
    body: isReady ? body : body && JSON.stringify(body),
    cache: "no-store",
    signal,
  });
  if (answer.ok) return answer;
  if (answer.status === 401 && !headers.authorization) onSignedOut();
  const refused = await answer.json().catch(() => ({}));
  throw new Refusal(answer.status, refused.error ?? {}, answer.headers.get("retry-after"));
}

/** The JSON of a response that comes within `wait_ms`. Throws: as `request`. */
export async function call(method, path, body, { headers = {}, wait_ms = ASK_MS } = {}) {
  const signal = AbortSignal.timeout(wait_ms);
  return (await request(method, path, body, { headers: { accept: "application/json", ...headers }, signal })).json();
}

/** Whether the server would refuse the same request again. */
export const isFinal = (error) => error instanceof Refusal && error.status < 500 && error.status !== 429;
export const explain = (error) => (error instanceof Refusal ? error.text : "The server cannot be reached.");

/** Wait, unless or until somebody wants to stop. */
export function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    const hurry = () => (clearTimeout(timer), resolve());
    if (signal?.aborted) hurry();
    signal?.addEventListener("abort", hurry, { once: true });
  });
}

export function randomName() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
