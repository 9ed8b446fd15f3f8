/** A block of code: text that grows, in chunks of lines. Only the last chunk is read again for each line that comes. One that is
 * complete never changes, and is coloured while it is in sight; what is out of sight is one text node. */

import hljs from "./lib/highlight.js";
import { watchSight } from "./frames.js";

const FEW_LINES = 12; // from which on an empty line ends a chunk
const MOST_LINES = 60;
const MOST_CHARACTERS = 8000; // of a chunk
const LONGEST_LINE = 2000; // that is coloured
const COPIED_MS = 1500;

const LANGUAGES = new Set([
  "bash", "c", "cpp", "css", "diff", "go", "java", "javascript", "json", "markdown", "python", "rust", "sql",
  "typescript", "xml", "yaml",
]);
const ALIASES = {
  "c++": "cpp", cc: "cpp", h: "c", hpp: "cpp", console: "bash", sh: "bash", shell: "bash", zsh: "bash", golang: "go",
  html: "xml", svg: "xml", js: "javascript", jsx: "javascript", mjs: "javascript", jsonc: "json", md: "markdown",
  patch: "diff", py: "python", python3: "python", rs: "rust", scss: "css", ts: "typescript", tsx: "typescript",
  yml: "yaml",
};

hljs.configure({ throwUnescapedHTML: true });
const loading = new Map();

/** Resolves to whether the language is known. */
function load(language) {
  if (!LANGUAGES.has(language)) return Promise.resolve(false);
  if (!loading.has(language)) {
    const loaded = import(`./lib/language-${language}.js`).then(
      ({ default: grammar }) => (hljs.registerLanguage(language, grammar), true),
      () => (loading.delete(language), false),
    );
    loading.set(language, loaded);
  }
  return loading.get(language);
}

export class CodeBlock {
  #frame = document.createElement("figure");
  #code = document.createElement("code");
  #name = document.createElement("span");
  #language = "";
  #isKnown = false;
  #chunks = [];
  #open = null; // {element, text, tail}: the last line is in the text node `tail`
  #lines = 0; // of the open chunk
  #scanned = 0; // characters of it that were looked at

  constructor(parent) {
    this.#frame.className = "code";
    const caption = document.createElement("figcaption");
    const copy = document.createElement("button");
    copy.type = "button";
    copy.className = "quiet";
    copy.textContent = "Copy";
    copy.hidden = !navigator.clipboard; // pages that are neither from this machine nor encrypted have none
    copy.ariaLabel = "Copy code";
    copy.addEventListener("click", () => this.#copy(copy));
    caption.append(this.#name, copy);
    const scroll = document.createElement("pre");
    scroll.tabIndex = 0; // long lines are scrolled with the keyboard, too
    scroll.ariaLabel = "Code";
    scroll.role = "region";
    scroll.append(this.#code);
    this.#frame.append(caption, scroll);
    parent.append(this.#frame);
    this.#begin("");
  }

  setLanguage(given) {
    const name = given.trim().split(/[\s{,:]/, 1)[0].toLowerCase();
    this.#language = ALIASES[name] ?? name;
    this.#name.textContent = name.slice(0, 30);
    load(this.#language).then((isKnown) => {
      this.#isKnown = isKnown;
      if (!isKnown) return;
      for (const chunk of this.#chunks) this.#paint(chunk);
      if (!this.#chunks.includes(this.#open)) this.#paintOpen();
    });
  }

  append(text) {
    this.#open.text += text;
    this.#open.tail.appendData(text);
    while (this.#seal());
    if (this.#isKnown && text.includes("\n")) this.#paintOpen();
  }

  end() {
    this.#complete(this.#open);
  }

  /** End the open chunk where that can be done. Returns whether there may be more to end. */
  #seal() {
    const { text } = this.#open;
    let cut = 0;
    while (this.#scanned < text.length) {
      const line = text.indexOf("\n", this.#scanned);
      if (line < 0) break;
      const isEmpty = text[line + 1] === "\n";
      this.#scanned = line + 1;
      this.#lines += 1;
      if ((isEmpty && this.#lines >= FEW_LINES && this.#isWhole(text.slice(0, line))) || this.#lines >= MOST_LINES) {
        cut = line + 1;
        break;
      }
    }
    if (!cut && text.length > MOST_CHARACTERS) cut = text.lastIndexOf("\n") + 1 || MOST_CHARACTERS;
    if (!cut) return false;
    const done = this.#open;
    done.text = text.slice(0, cut);
    this.#complete(done);
    this.#begin(text.slice(cut));
    return true;
  }

  /** Whether nothing goes on behind it, such as a comment. */
  #isWhole(text) {
    return !this.#isKnown || !hljs.highlight(text, { language: this.#language })._top.parent;
  }

  #begin(text) {
    const element = document.createElement("span");
    element.className = "chunk";
    const tail = document.createTextNode(text);
    element.append(tail);
    this.#code.append(element);
    this.#open = { element, text, tail, isInSight: false, isPainted: null };
    this.#lines = this.#scanned = 0;
  }

  /** What grows is at the end of an answer, where readers look. */
  #paintOpen() {
    const { element, text } = this.#open;
    const end = text.lastIndexOf("\n") + 1;
    this.#open.tail = document.createTextNode(text.slice(end));
    element.replaceChildren(...this.#coloured(text.slice(0, end)), this.#open.tail);
    this.#open.isInSight = true;
  }

  #complete(chunk) {
    this.#chunks.push(chunk);
    this.#paint(chunk);
    watchSight(chunk.element, (isInSight) => {
      chunk.isInSight = isInSight;
      this.#paint(chunk);
    });
  }

  #paint(chunk) {
    const wanted = chunk.isInSight && this.#isKnown;
    if (wanted === chunk.isPainted) return;
    chunk.isPainted = wanted;
    const text = chunk.text.replace(/\n$/, ""); // the line ends with its block
    chunk.element.replaceChildren(...(wanted ? this.#coloured(text) : [document.createTextNode(text)]));
  }

  #coloured(text) {
    if (text.split("\n").some((line) => line.length > LONGEST_LINE)) return [document.createTextNode(text)];
    return hljs.highlight(text, { language: this.#language })._emitter.root.children.map(nodeOf);
  }

  async #copy(button) {
    await navigator.clipboard.writeText([...this.#chunks, this.#open].filter(unique).map(({ text }) => text).join(""));
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), COPIED_MS);
  }
}

const unique = (one, place, all) => all.indexOf(one) === place;

/** The library's tree of tokens as nodes: its HTML is not used. */
function nodeOf(token) {
  if (typeof token === "string") return document.createTextNode(token);
  const element = document.createElement("span");
  if (token.scope) element.className = `hl-${token.scope.split(/[.:]/, 1)[0]}`;
  element.append(...token.children.map(nodeOf));
  return element;
}
