/** Where chats are kept: in the browser's storage, one place for each tab.
 *
 * A place is locked by the tab that uses it: tabs cannot overwrite each other's chats. A reloaded tab finds its own
 * again; the only tab takes up the chat used last; a further one begins anew, a duplicated one with a copy. A chat is
 * `{exchanges: [{question, answer}], from}`: what stands before `from` is no longer sent to the model.
 */

const PREFIX = "tailrace.chat.1."; // counts the shapes that a chat has had
const OWN = "tailrace.place"; // in the tab's own storage
const KEPT = 20; // chats that no tab shows
const TITLE = 60; // characters
const RELOAD_MS = 500; // for the page before a reload to let go of its lock

export class Place {
  #name;

  constructor(name) {
    this.#name = name;
  }

  load() {
    const chat = read(this.#name);
    return Array.isArray(chat?.exchanges) ? chat : empty();
  }

  /** Text and position of an answer are kept together, so that it always goes on exactly behind what is there. */
  save(chat) {
    try {
      if (chat.exchanges.length) localStorage.setItem(this.#name, JSON.stringify({ ...chat, used_ms: Date.now() }));
      else localStorage.removeItem(this.#name);
    } catch {
      // Full or forbidden: the chat lives as long as the page.
    }
  }
}

/** The place of this tab, and the chat that it begins with. */
export async function findPlace() {
  const own = attempt(() => sessionStorage.getItem(OWN));
  let name = own ?? ((await held())?.length === 0 ? places()[0] : null) ?? fresh();
  let chat = new Place(name).load();
  if (!(await lock(name, own ? RELOAD_MS : 0))) {
    if (!own) chat = empty();
    name = fresh();
    await lock(name, 0);
  }
  attempt(() => sessionStorage.setItem(OWN, name));
  prune(name);
  return { place: new Place(name), chat };
}

const unsaved = new Map(); // chats that were put away where storage is full or forbidden: kept as long as the page

/** Keep a chat that this tab shows no longer. */
export function putAway(chat) {
  const name = fresh();
  const kept = { ...chat, used_ms: Date.now() };
  if (!attempt(() => (localStorage.setItem(name, JSON.stringify(kept)), true))) unsaved.set(name, kept);
}

/** Chats that no tab shows, the last used first: `{name, title}`. */
export async function earlier() {
  const inUse = new Set([attempt(() => sessionStorage.getItem(OWN)), ...((await held()) ?? [])]);
  return [...unsaved.keys(), ...places()].filter((name) => !inUse.has(name)).map((name) => {
    const question = (unsaved.get(name) ?? read(name))?.exchanges?.[0]?.question ?? "";
    return { name, title: question.length > TITLE ? `${question.slice(0, TITLE)}…` : question };
  });
}

/** Such a chat, from now on this tab's alone. */
export function take(name) {
  const chat = unsaved.get(name) ?? new Place(name).load();
  unsaved.delete(name);
  attempt(() => localStorage.removeItem(name));
  return chat;
}

export function randomName() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export const empty = () => ({ exchanges: [], from: 0 });
const fresh = () => PREFIX + randomName();

/** Held for as long as the page lives. Pages that are not from this machine and not encrypted have no locks. */
function lock(name, patience_ms) {
  if (!navigator.locks) return true;
  return new Promise((resolve) => {
    const options = patience_ms ? { signal: AbortSignal.timeout(patience_ms) } : { ifAvailable: true };
    const hold = (held) => {
      resolve(held !== null);
      return held && new Promise(() => {});
    };
    navigator.locks.request(name, options, hold).catch(() => resolve(false));
  });
}

async function held() {
  const locks = await navigator.locks?.query();
  return locks?.held.map((lock) => lock.name).filter((name) => name.startsWith(PREFIX));
}

/** Those in which there is something, the last used first. */
function places() {
  const names = attempt(() => Object.keys(localStorage).filter((name) => name.startsWith(PREFIX))) ?? [];
  const used = new Map(names.map((name) => [name, read(name)?.used_ms ?? 0]));
  return names.sort((one, other) => used.get(other) - used.get(one));
}

async function prune(own) {
  const inUse = new Set([own, ...(await held() ?? [])]);
  const unused = places().filter((name) => !inUse.has(name));
  for (const name of unused.slice(KEPT)) attempt(() => localStorage.removeItem(name));
}

function read(name) {
  return attempt(() => JSON.parse(localStorage.getItem(name)));
}

/** Storage may be refused altogether. */
function attempt(act) {
  try {
    return act();
  } catch {
    return null;
  }
}
