/** The page of an operator: models, running streams, owners, keys, recent errors. */

import { render } from "./lib/preact.js";
import { signal } from "./lib/signals.js";
import { at, call, explain } from "./api.js";
import { SignIn } from "./dialogs.js";
import { html } from "./html.js";
import { account, isSignedOut } from "./store.js";

const REFRESH_MS = 2000;
const NEEDED = { models: "/v1/admin/models", streams: "/v1/admin/streams", errors: "/v1/admin/errors" };
const OPTIONAL = { usage: "/v1/usage", keys: "/v1/admin/keys" }; // a server without keys has none

const found = signal(null); // the rows of each, by name; null until all of them are here
const alarm = signal(""); // why the rows are not new
const failure = signal(""); // of the last action
const busy = signal(new Set()); // what is being done, by its path and body

async function load() {
  if (isSignedOut.value) return;
  try {
    account.value ??= await call("GET", "/v1/session");
    const needed = Object.entries(NEEDED).map(async ([name, path]) => [name, (await call("GET", path)).data]);
    const optional = Object.entries(OPTIONAL).map(async ([name, path]) => [name, await rowsOr(path)]);
    found.value = Object.fromEntries(await Promise.all([...needed, ...optional]));
    alarm.value = "";
  } catch (error) {
    if (!isSignedOut.value) alarm.value = explain(error);
  }
}

const rowsOr = (path) =>
  call("GET", path).then(
    ({ data }) => data,
    (error) => {
      if (error.status === 400 || error.status === 404) return []; // the server has none
      throw error;
    },
  );

async function act(path, body) {
  const name = path + JSON.stringify(body ?? null);
  busy.value = new Set([...busy.value, name]);
  failure.value = "";
  try {
    await call("POST", path, body, { wait_ms: 600_000 }); // a large model takes minutes to load
    await load();
  } catch (error) {
    failure.value = explain(error);
  }
  busy.value = new Set([...busy.value].filter((one) => one !== name));
}

function Act({ label, path, body, children }) {
  const isBusy = busy.value.has(path + JSON.stringify(body ?? null));
  return html`<button type="button" aria-label=${label} disabled=${isBusy} onClick=${() => act(path, body)}>${children}</button>`;
}

function App() {
  if (isSignedOut.value) return html`<${SignIn} />`;
  return html`
    <main id="admin">
      <header>
        <h1>Administration</h1>
        <a href=${at("/")}>Chat</a>
        <a href=${at("/docs")}>Routes</a>
        ${account.value?.key_id && html`<span class="owner">${account.value.owner}</span>`}
      </header>
      <p id="alarm" role="alert">${failure.value || alarm.value}</p>
      ${found.value && html`<${Models} /><${Streams} /><${Owners} /><${Keys} /><${Errors} />`}
    </main>
  `;
}

/** A table of rows, of which each is a list of cells. Columns whose name begins with ">" have numbers. */
function Rows({ title, columns, rows, none }) {
  const kind = (place) => (columns[place].startsWith(">") ? "number" : columns[place] === "Message" ? "message" : undefined);
  return html`
    <section aria-label=${title}>
      <h2>${title}</h2>
      ${rows.length === 0
        ? html`<p class="none">${none}</p>`
        : html`<table>
            <thead><tr>${columns.map((name, place) => html`<th scope="col" class=${kind(place)}>${name.replace(">", "")}</th>`)}</tr></thead>
            <tbody>
              ${rows.map(
                ({ key, cells }) => html`<tr key=${key}>
                  ${cells.map((cell, place) => (place ? html`<td class=${kind(place)}>${cell}</td>` : html`<th scope="row">${cell}</th>`))}
                </tr>`,
              )}
            </tbody>
          </table>`}
    </section>
  `;
}

const count = (number) => (number ?? 0).toLocaleString("en");
const when = (seconds) => new Date(seconds * 1000).toISOString().replace("T", " ").slice(0, 19);
const ago = (seconds) => `${Math.max(0, Math.round(Date.now() / 1000 - seconds))} s`;

function Models() {
  const rows = found.value.models.map((one) => ({
    key: one.id,
    cells: [
      one.id,
      one.is_loaded
        ? html`<${Act} label="Unload ${one.id}" path="/v1/admin/models/unload" body=${{ model: one.id }}>Unload<//>`
        : html`<${Act} label="Load ${one.id}" path="/v1/admin/models/load" body=${{ model: one.id }}>Load<//>`,
      one.engine, one.state, count(one.num_running), count(one.num_waiting), `${Math.round(100 * one.kv_usage)} %`,
      `${count(Math.round(one.memory_bytes / 2 ** 20))} MB`, count(one.num_restarts),
    ],
  }));
  const columns = ["Model", "Do", "Engine", "State", ">Running", ">Waiting", ">KV cache", ">Memory", ">Engines lost"];
  return html`<${Rows} title="Models" columns=${columns} rows=${rows} none="There are no models." />`;
}

function Streams() {
  const rows = found.value.streams.map((one) => ({
    key: one.id,
    cells: [
      one.id,
      html`<${Act} label="Stop the stream ${one.id}" path="/v1/admin/streams/${one.id}/cancel">Stop<//>`,
      one.owner, one.model, one.wire, one.is_suspended ? "suspended" : one.status, ago(one.created),
      count(one.num_readers), count(one.prompt_tokens), count(one.completion_tokens),
    ],
  }));
  const columns = ["Stream", "Do", "Owner", "Model", "Wire", "State", ">Age", ">Readers", ">Prompt", ">Tokens"];
  return html`<${Rows} title="Running streams" columns=${columns} rows=${rows} none="No stream runs." />`;
}

function Owners() {
  const { usage, streams, keys } = found.value;
  const known = [...new Set([...usage, ...keys, ...streams].map(({ owner }) => owner))].sort();
  const rows = known.map((owner) => {
    const used = usage.find((one) => one.owner === owner);
    const of = (list) => list.filter((one) => one.owner === owner && !one.revoked_s).length;
    return {
      key: owner,
      cells: [
        owner, count(of(keys)), count(of(streams)), count(used?.num_requests), count(used?.num_refused),
        count(used?.num_prompt_tokens), count(used?.num_completion_tokens),
      ],
    };
  });
  const columns = ["Owner", ">Keys", ">Running", ">Requests this month", ">Refused", ">Prompt tokens", ">Answer tokens"];
  return html`<${Rows} title="Owners" columns=${columns} rows=${rows} none="Nobody has used this server." />`;
}

function Keys() {
  const now_s = Date.now() / 1000;
  const state = (key) => (key.revoked_s ? "revoked" : key.expires_s && key.expires_s < now_s ? "expired" : "valid");
  const rows = found.value.keys.map((key) => ({
    key: key.id,
    cells: [key.id, key.owner, key.name, key.scopes.join(", "), when(key.created_s), key.expires_s ? when(key.expires_s) : "never", state(key)],
  }));
  const columns = ["Key", "Owner", "Name", "Scopes", "Created (UTC)", "Expires", "State"];
  return html`<${Rows} title="Keys" columns=${columns} rows=${rows} none="There are no keys: every client has access." />`;
}

function Errors() {
  const rows = found.value.errors.map((one, place) => ({
    key: `${one.at} ${place}`,
    cells: [when(one.at), one.code, one.message, one.owner, one.model, one.stream_id ?? "refused"],
  }));
  const columns = ["Time (UTC)", "Code", "Message", "Owner", "Model", "Stream"];
  return html`<${Rows} title="Recent errors" columns=${columns} rows=${rows} none="There were none since the server started." />`;
}

const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
async function refresh() {
  if (document.visibilityState === "visible") await load();
  setTimeout(refresh, REFRESH_MS);
}
await refresh();
document.body.classList.add("ready");
