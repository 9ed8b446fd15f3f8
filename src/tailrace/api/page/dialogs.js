/** Settings of a conversation, the list of shortcuts, and signing in. */

import { useEffect, useRef, useState } from "./lib/preact-hooks.js";
import { signal } from "./lib/signals.js";
import { at, explain } from "./api.js";
import { html } from "./html.js";
import { MAX_SYSTEM, NO_SETTINGS, PRESETS } from "./settings.js";
import { keep, recall } from "./storage.js";
import { servers } from "./tools.js";
import { changeSettings, fail, isSignedOut, openId, settings, signIn } from "./store.js";

export const dialog = signal(""); // settings, shortcuts, or none

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
