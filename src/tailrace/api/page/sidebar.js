/** The list of conversations. */

import { useEffect, useRef, useState } from "./lib/preact-hooks.js";
import { signal } from "./lib/signals.js";
import { at } from "./api.js";
import { html } from "./html.js";
import {
  account, conversations, fail, go, hasMore, importFiles, isAdmin, loadList, openId, remove, rename, search, signOut,
} from "./store.js";

const SEARCH_MS = 250;

export const isSidebarOpen = signal(matchMedia("(width >= 60rem)").matches);
const isNarrow = () => !matchMedia("(width >= 60rem)").matches;

export function toggleSidebar() {
  isSidebarOpen.value = !isSidebarOpen.value;
}

export function focusSearch() {
  isSidebarOpen.value = true;
  requestAnimationFrame(() => document.getElementById("search")?.focus());
}

export function show(id) {
  if (isNarrow()) isSidebarOpen.value = false;
  go(id);
}

export function Sidebar() {
  const timer = useRef(0);
  const find = (event) => {
    search.value = event.target.value;
    clearTimeout(timer.current);
    timer.current = setTimeout(() => loadList().catch(fail), SEARCH_MS);
  };
  if (!isSidebarOpen.value) return null;
  return html`
    <nav id="sidebar" aria-label="Conversations">
      <div class="row">
        <button id="new" type="button" class="primary" onClick=${() => show("")}>New chat</button>
        <button type="button" class="quiet" id="close-sidebar" aria-label="Hide the list" onClick=${toggleSidebar}>✕</button>
      </div>
      <input id="search" type="search" placeholder="Search" aria-label="Search conversations" value=${search.value} onInput=${find} />
      <ul id="conversations">
        ${conversations.value.map((one) => html`<${Entry} key=${one.id} one=${one} />`)}
        ${conversations.value.length === 0 && html`<li class="none">${search.value ? "Nothing found." : "No conversations yet."}</li>`}
        ${hasMore.value && html`<li><button type="button" class="quiet" onClick=${() => loadList({ isMore: true }).catch(fail)}>More</button></li>`}
      </ul>
      <${Foot} />
    </nav>
    <div id="shade" onClick=${toggleSidebar}></div>
  `;
}

function Entry({ one }) {
  const [state, setState] = useState("");
  const field = useRef();
  useEffect(() => {
    if (state === "rename") field.current.select();
  }, [state]);
  const isOpen = one.id === openId.value;
  const save = async (event) => {
    event.preventDefault();
    const title = field.current.value.trim();
    setState("");
    if (title && title !== one.title) await rename(one.id, title).catch(fail);
  };
  if (state === "rename") {
    const onKeyDown = (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      setState("");
    };
    return html`<li>
      <form onSubmit=${save}>
        <input ref=${field} aria-label="Title" maxlength="200" value=${one.title} onKeyDown=${onKeyDown} onBlur=${() => setState("")} />
      </form>
    </li>`;
  }
  if (state === "delete") {
    return html`<li>
      <div class="sure" role="group" aria-label="Delete ${one.title}?">
        <span>Delete?</span>
        <button type="button" class="danger" ref=${(button) => button?.focus()} onClick=${() => remove(one.id).catch(fail)}>Delete</button>
        <button type="button" class="quiet" onClick=${() => setState("")}>Cancel</button>
      </div>
    </li>`;
  }
  const name = one.title || "Untitled";
  return html`<li class=${isOpen ? "open" : ""}>
    <a href="#${one.id}" aria-current=${isOpen ? "page" : undefined} title=${name} onClick=${() => isNarrow() && toggleSidebar()}>${name}</a>
    <button type="button" class="quiet" aria-label="Rename ${name}" onClick=${() => setState("rename")}>✎</button>
    <button type="button" class="quiet" aria-label="Delete ${name}" onClick=${() => setState("delete")}>✕</button>
  </li>`;
}

function Foot() {
  const files = useRef();
  const take = async () => {
    await importFiles(files.current.files).catch(fail);
    files.current.value = "";
  };
  return html`
    <footer>
      <div class="row">
        <a class="button quiet" href=${at("/v1/conversations/export")} download="conversations.json">Export all</a>
        <button type="button" class="quiet" onClick=${() => files.current.click()}>Import</button>
        <input ref=${files} type="file" accept=".json,application/json" multiple hidden onChange=${take} />
      </div>
      ${isAdmin.value && html`<div class="row"><a class="button quiet" href=${at("/admin")}>Administration</a></div>`}
      ${account.value?.key_id &&
      html`<div class="row"><span class="owner">${account.value.owner}</span><button type="button" class="quiet" onClick=${signOut}>Sign out</button></div>`}
    </footer>
  `;
}
