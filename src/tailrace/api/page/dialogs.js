/** Settings of a conversation, the list of shortcuts, and signing in. */

import { useEffect, useRef, useState } from "./lib/preact-hooks.js";
import { signal } from "./lib/signals.js";
import { at, call, explain } from "./api.js";
import { html } from "./html.js";
import { MAX_SYSTEM, NO_SETTINGS, PRESETS } from "./settings.js";
import { keep, recall } from "./storage.js";
import { servers } from "./tools.js";
import { changeSettings, fail, isSignedOut, openId, settings, signIn } from "./store.js";

export const dialog = signal(""); // settings, shortcuts, share, or none

const presets = signal(recall("presets") ?? []); // this browser's own

function Dialog({ title, children }) {
  const box = useRef();
  useEffect(() => {
    box.current.showModal();
  }, []);
  const close = (event) => {
    if (event.target === box.current) dialog.value = ""; // the shade around it
  };
  return html`
    <dialog ref=${box} aria-label=${title} onClose=${() => (dialog.value = "")} onClick=${close}>
      <header>
        <h2>${title}</h2>
        <button type="button" class="quiet" aria-label="Close" onClick=${() => (dialog.value = "")}>✕</button>
      </header>
      ${children}
    </dialog>
  `;
}

export function Dialogs() {
  if (dialog.value === "settings") return html`<${Settings} />`;
  if (dialog.value === "shortcuts") return html`<${Shortcuts} />`;
  if (dialog.value === "share") return html`<${Share} />`;
  return null;
}

function Settings() {
  const [values, setValues] = useState(settings.value);
  const [name, setName] = useState("");
  const set = (changed) => setValues({ ...values, ...changed });
  const all = [...PRESETS, ...presets.value];
  const isOn = (preset) => Object.entries(preset).every(([key, value]) => key === "name" || values[key] === value);
  const number = (key) => (event) => set({ [key]: event.target.value === "" ? NO_SETTINGS[key] : Number(event.target.value) });
  const toggle = (label) => (event) =>
    set({ tools: [...values.tools.filter((one) => one !== label), ...(event.target.checked ? [label] : [])] });
  const apply = ({ name: _, ...preset }) => set(preset);
  const save = (event) => {
    event.preventDefault();
    dialog.value = "";
    changeSettings(values).catch(fail);
  };
  const savePreset = () => {
    const { model, tools, ...kept } = values;
    const mine = presets.value.filter((preset) => preset.name !== name.trim());
    presets.value = [...mine, { name: name.trim(), ...kept }];
    keep("presets", presets.value);
    setName("");
  };
  const forget = (preset) => {
    presets.value = presets.value.filter((one) => one !== preset);
    keep("presets", presets.value);
  };
  return html`
    <${Dialog} title="This conversation">
      <form onSubmit=${save}>
        <div class="presets" role="group" aria-label="Presets">
          ${all.map(
            (preset) => html`<span>
              <button type="button" aria-pressed=${isOn(preset)} onClick=${() => apply(preset)}>${preset.name}</button>
              ${presets.value.includes(preset) &&
              html`<button type="button" class="quiet" aria-label="Delete the preset ${preset.name}" onClick=${() => forget(preset)}>✕</button>`}
            </span>`,
          )}
        </div>
        <label>System prompt
          <textarea rows="4" dir="auto" maxlength=${MAX_SYSTEM} placeholder="Instructions for every answer"
            value=${values.system} onInput=${(event) => set({ system: event.target.value })}></textarea>
        </label>
        <div class="numbers">
          <label>Temperature <input type="number" min="0" max="2" step="0.05" value=${values.temperature} onInput=${number("temperature")} /></label>
          <label>Top p <input type="number" min="0.01" max="1" step="0.01" value=${values.top_p} onInput=${number("top_p")} /></label>
          <label>Longest answer <input type="number" min="0" step="1" placeholder="tokens" value=${values.max_tokens || ""} onInput=${number("max_tokens")} /></label>
        </div>
        ${servers.value.length > 0 &&
        html`<fieldset class="tools">
          <legend>Tools that the model may use</legend>
          ${servers.value.map(
            (label) => html`<label><input type="checkbox" checked=${values.tools.includes(label)} onChange=${toggle(label)} /> ${label}</label>`,
          )}
        </fieldset>`}
        <div class="row">
          <input aria-label="Name of a new preset" placeholder="Name of a preset" maxlength="40" value=${name} onInput=${(event) => setName(event.target.value)} />
          <button type="button" disabled=${!name.trim()} onClick=${savePreset}>Save as preset</button>
        </div>
        <footer>
          ${openId.value && html`<a class="button" href=${at(`/v1/conversations/${openId.value}/export`)} download="conversation.json">Export</a>`}
          <button type="submit" class="primary">Save</button>
        </footer>
      </form>
    <//>
  `;
}

const LIFETIMES = [[3600, "1 hour"], [86_400, "1 day"], [7 * 86_400, "7 days"], [30 * 86_400, "30 days"]];

/** Links that show this conversation to whoever has them. */
function Share() {
  const [links, setLinks] = useState([]);
  const [lifetime_s, setLifetime] = useState(7 * 86_400);
  const [copied, setCopied] = useState("");
  const load = async () => {
    const { data } = await call("GET", "/v1/shares");
    setLinks(data.filter((link) => link.conversation_id === openId.value));
  };
  useEffect(() => {
    load().catch(fail);
  }, []);
  const make = async (event) => {
    event.preventDefault();
    await call("POST", "/v1/shares", { conversation_id: openId.value, expires_in_s: lifetime_s });
    await load();
  };
  const copy = async (link) => {
    await navigator.clipboard?.writeText(addressOf(link));
    setCopied(link.id);
  };
  const revoke = async (link) => {
    await call("DELETE", `/v1/shares/${link.id}`);
    await load();
  };
  return html`
    <${Dialog} title="Share this conversation">
      <form onSubmit=${(event) => make(event).catch(fail)}>
        <p>Whoever has a link reads the questions and answers of this conversation, also new ones, until the link ends. It shows no name, and allows nothing else.</p>
        <ul class="links">
          ${links.map(
            (link) => html`<li key=${link.id}>
              <label>Until ${new Date(link.expires_at * 1000).toLocaleString()}
                <input readonly value=${addressOf(link)} onFocus=${(event) => event.target.select()} />
              </label>
              <button type="button" onClick=${() => copy(link).catch(fail)}>${copied === link.id ? "Copied" : "Copy"}</button>
              <button type="button" class="danger" onClick=${() => revoke(link).catch(fail)}>Revoke</button>
            </li>`,
          )}
        </ul>
        <footer>
          <label>It ends after
            <select value=${lifetime_s} onChange=${(event) => setLifetime(Number(event.target.value))}>
              ${LIFETIMES.map(([value, name]) => html`<option value=${value}>${name}</option>`)}
            </select>
          </label>
          <button type="submit" class="primary">Make a link</button>
        </footer>
      </form>
    <//>
  `;
}

/** The page knows its own address; the server's path may lack what a proxy put before it. */
const addressOf = (link) => `${at("/share")}${link.path.slice(link.path.indexOf("#"))}`;

export const SHORTCUTS = [
  ["Enter", "Send"],
  ["Shift Enter", "New line"],
  ["Esc", "Stop the answer; close what is open"],
  ["↑", "In an empty field: edit the last message"],
  ["Ctrl K", "Search conversations"],
  ["Ctrl Shift O", "New chat"],
  ["Ctrl B", "Show or hide the list"],
  ["Alt ↑, Alt ↓", "Previous conversation, next conversation"],
  ["/", "Write a message"],
  ["R", "Regenerate the last answer"],
  ["C", "Copy the last answer"],
  ["[, ]", "Previous version, next version of the last answer"],
  ["S", "Settings of the conversation"],
  ["?", "This list"],
];

function Shortcuts() {
  return html`
    <${Dialog} title="Keys">
      <dl class="keys">
        ${SHORTCUTS.map(([keys, what]) => html`<div><dt><kbd>${keys}</kbd></dt><dd>${what}</dd></div>`)}
      </dl>
      <p>Single letters work outside of text fields. On a Mac, use ⌘ for Ctrl.</p>
    <//>
  `;
}

export function SignIn() {
  const field = useRef();
  const [wrong, setWrong] = useState("");
  useEffect(() => field.current.focus(), []);
  const submit = async (event) => {
    event.preventDefault();
    const key = field.current.value.trim();
    if (!key) return;
    try {
      await signIn(key);
    } catch (error) {
      field.current?.select();
      setWrong(error.status === 401 ? "This key is not valid on this server." : explain(error));
    }
  };
  if (!isSignedOut.value) return null;
  return html`
    <main id="sign-in">
      <form onSubmit=${submit}>
        <img src=${at("/page/icon.svg")} alt="" width="48" height="48" />
        <h1>Sign in</h1>
        <p>This server needs a key. Its operator creates one with <code>tailrace keys create</code>.</p>
        <label>Key <input ref=${field} type="password" autocomplete="current-password" required aria-describedby="wrong" /></label>
        <p id="wrong" role="alert">${wrong}</p>
        <button type="submit" class="primary">Sign in</button>
      </form>
    </main>
  `;
}
