/** The tools of MCP servers: which there are, the response that calls them now, and what it wants to be allowed. */

import { computed, signal } from "./lib/signals.js";
import { html } from "./html.js";
import { call, isFinal, pause, request } from "./api.js";
import { events } from "./streams.js";

const PAUSE_MS = 1000;
const ENDS = ["response.completed", "response.incomplete", "response.failed"];

export const servers = signal([]); // the labels of those that this key may use
export const response = signal(null); // {id, state, asks, isOver, error}: of the open conversation, or null
export const isCalling = computed(() => response.value !== null && !response.value.isOver);

let connection = new AbortController();

export async function loadServers() {
  const listed = await call("GET", "/v1/mcp/servers").catch(() => ({ data: [] })); // a server without them
  servers.value = listed.data.map(({ label }) => label);
}

/** The tools of a request. What only reads is called at once, all else only if it is allowed. */
export const toolsOf = (labels) =>
  labels.map((label) => ({ type: "mcp", server_label: label, require_approval: { never: { read_only: true } } }));

export function forgetResponse() {
  connection.abort();
  response.value = null;
}

/** Follow a response to its end, through whatever happens to the connection. Calls `onChange` when the conversation has
 * more items. Returns when it has the first ones. */
export function followResponse(id, onChange) {
  connection.abort();
  connection = new AbortController();
  const { signal: closed } = connection;
  response.value = { id, state: "", asks: [], isOver: false };
  return new Promise((begun) => follow(id, closed, () => (onChange(), begun())).finally(begun));
}

async function follow(id, closed, onChange) {
  let numSeen = 0;
  const change = (more) => {
    if (!closed.aborted) response.value = { ...response.value, ...more };
  };
  while (!closed.aborted) {
    try {
      const after = numSeen ? `&starting_after=${numSeen - 1}` : "";
      const answer = await request("GET", `/v1/responses/${id}?stream=true${after}`, undefined, { signal: closed });
      for await (const { data } of events(answer)) {
        if (closed.aborted) return;
        const event = JSON.parse(data);
        if (event.sequence_number < numSeen) continue;
        numSeen = event.sequence_number + 1;
        if (ENDS.includes(event.type)) {
          const asks = event.response.output.filter(({ type }) => type === "mcp_approval_request");
          change({ state: "", asks, isOver: true, error: event.response.error?.message ?? "" });
          onChange();
          return;
        }
        take(event, change, onChange);
      }
    } catch (error) {
      if (isFinal(error)) {
        change({ isOver: true, asks: [] }); // it is not kept any more
        return;
      }
    }
    await pause(PAUSE_MS, closed);
  }
}

function take({ type, item }, change, onChange) {
  const isCall = item?.type === "mcp_call";
  if (type === "response.output_item.added") {
    if (isCall) change({ state: `Calling ${item.server_label}: ${item.name}…` });
    else if (item.type !== "mcp_list_tools") onChange();
  } else if (type === "response.output_item.done" && isCall) {
    change({ state: "" });
    onChange();
  }
}

export function stopResponse() {
  if (isCalling.value) call("POST", `/v1/responses/${response.value.id}/cancel`, {}).catch(() => {});
}

// Characters that cannot be seen, or change the order of others: a tool could hide with them what it is called with.
const HIDDEN = /([\p{C}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}\u2800]|(?! )\p{Zs})/u;

/** A text of somebody else, exactly as it is: hidden characters are shown by their numbers. */
function Exactly({ text }) {
  const code = (one) => `\\u{${one.codePointAt(0).toString(16)}}`;
  return html`<bdi>${text.split(HIDDEN).map((part, place) => (place % 2 ? html`<mark>${code(part)}</mark>` : part))}</bdi>`;
}

/** What the response does, and what it wants to be allowed. `answer` gets the approvals, as items. */
export function ToolCalls({ answer, isBusy }) {
  const now = response.value;
  if (!now) return null;
  const all = (approve) => answer(now.asks.map(({ id }) => ({ type: "mcp_approval_response", approval_request_id: id, approve })));
  return html`
    ${now.state && html`<p class="state" role="status">${now.state}</p>`}
    ${now.error && html`<p class="state" role="alert">Failed: ${now.error}</p>`}
    ${now.asks.length > 0 &&
    html`<article class="approvals" aria-label="Calls to allow">
      <p>The model wants to call:</p>
      <ul>
        ${now.asks.map(({ id, server_label, name, arguments: given }) => html`<li key=${id}><b>${server_label}: <${Exactly} text=${name} /></b> <code><${Exactly} text=${given} /></code></li>`)}
      </ul>
      <footer>
        <button type="button" class="primary" disabled=${isBusy} onClick=${() => all(true)}>Allow</button>
        <button type="button" class="quiet" disabled=${isBusy} onClick=${() => all(false)}>Do not allow</button>
      </footer>
    </article>`}
  `;
}
