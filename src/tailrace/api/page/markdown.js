/** Markdown as nodes, written as it comes. It only ever appends: a token costs what it weighs, and not what stands before.
 *
 * What a model writes becomes text nodes, and elements of this list. Links lead to the web or to mail, and nowhere else; a
 * picture is a link, since to load it would tell another host what was said here.
 */

import * as smd from "./lib/streaming-markdown.js";
import { CodeBlock } from "./code.js";
import { nextFrame } from "./frames.js";
import { showMath } from "./math.js";

const PIECE = 400; // characters between two looks at the clock
const DEEPEST = 20; // of blocks in blocks; the parser counts on no more than 24
const MAX_LINK = 2000;
const MOST_CHARACTERS = 10_000; // of one paragraph
const MOST_CELLS = 50; // of a row
const LONGEST_DOUBT = 2500; // characters that the parser may keep back: it looks at all of them again with each further one
const LITERAL = new Set([
  smd.CODE_BLOCK, smd.CODE_FENCE, smd.CODE_INLINE, smd.RAW_URL, smd.MAYBE_URL, smd.EQUATION_BLOCK, smd.EQUATION_INLINE,
]); // in which no character has a meaning

const TAGS = {
  [smd.PARAGRAPH]: "p", [smd.BLOCKQUOTE]: "blockquote", [smd.LINE_BREAK]: "br", [smd.RULE]: "hr",
  [smd.HEADING_1]: "h3", [smd.HEADING_2]: "h4", [smd.HEADING_3]: "h5", [smd.HEADING_4]: "h6", [smd.HEADING_5]: "h6",
  [smd.HEADING_6]: "h6", [smd.ITALIC_AST]: "em", [smd.ITALIC_UND]: "em", [smd.STRONG_AST]: "strong",
  [smd.STRONG_UND]: "strong", [smd.STRIKE]: "s", [smd.CODE_INLINE]: "code", [smd.LINK]: "a", [smd.RAW_URL]: "a",
  [smd.IMAGE]: "a", [smd.LIST_UNORDERED]: "ul", [smd.LIST_ORDERED]: "ol", [smd.LIST_ITEM]: "li",
  [smd.EQUATION_BLOCK]: "code", [smd.EQUATION_INLINE]: "code",
};
const DIRECTED = ["p", "blockquote", "h3", "h4", "h5", "h6", "li", "th", "td"];

/** Writes into `root` what is appended, a little in each frame, however much comes at once. When all is there and the end
 * was told, the root's `data-is-whole` is true. */
export class MarkdownView {
  #parser;
  #target;
  #root;
  #pending = "";
  #before = ""; // the last character that the parser has
  #hasEnded = false;
  #isDue = false;

  constructor(root) {
    this.#root = root;
    this.#root.dataset.isWhole = false;
    this.#target = new Target(root);
    this.#parser = smd.parser({
      data: this.#target,
      add_token: (target, token) => target.open(token),
      end_token: (target) => target.close(),
      add_text: (target, text) => target.write(text),
      set_attr: (target, name, value) => target.set(name, value),
    });
  }

  append(text) {
    this.#pending += text.replaceAll("\r", "");
    this.#schedule();
  }

  /** No more text comes: what the parser has kept back is shown. */
  end() {
    this.#hasEnded = true;
    this.#schedule();
  }

  #schedule() {
    if (this.#isDue) return;
    this.#isDue = true;
    nextFrame((until_ms) => this.#work(until_ms));
  }

  #work(until_ms) {
    this.#isDue = false;
    let start = 0;
    let isWaiting = false; // for the characters behind the last ones
    while (start < this.#pending.length && performance.now() < until_ms) {
      const end = Math.min(start + PIECE, this.#pending.length);
      const isLast = this.#hasEnded && end === this.#pending.length;
      const taken = this.#feed(this.#pending.slice(start, end), isLast);
      start += taken;
      isWaiting = !taken;
      if (isWaiting) break;
    }
    this.#pending = this.#pending.slice(start);
    if (this.#pending && (this.#hasEnded || !isWaiting)) this.#schedule();
    else if (this.#hasEnded) {
      smd.parser_end(this.#parser);
      this.#target.finish();
      this.#root.dataset.isWhole = true;
    }
  }

  /** Give the parser a piece. Returns how much it has: the last characters may have to wait for the one behind them. */
  #feed(piece, isLast) {
    let from = 0;
    for (const { index, 0: found } of piece.matchAll(/[_\]]|\\\[|\$\$|[\\$]$/g)) {
      if (index + found.length === piece.length && !isLast) {
        this.#write(piece.slice(from, index));
        return index;
      }
      this.#write(piece.slice(from, index));
      from = index + found.length;
      const next = piece[from] ?? "";
      if (found === "\\[" || (found === "$$" && (this.#before === "" || this.#before === "\n"))) {
        // The parser knows formulas of several lines only.
        this.#write(this.#isLiteral() || next === "\n" ? found : `${found}\n`);
      } else if (found !== "_" && found !== "]") this.#write(found);
      else if (found === "_") this.#write(this.#isLiteral() || !isWord(this.#before) || !isWord(next) ? "_" : "\\_");
      else {
        if (next !== "(" && (this.#parser.token === smd.LINK || this.#parser.token === smd.IMAGE)) this.#target.closeBracket();
        this.#write("]");
      }
    }
    this.#write(piece.slice(from));
    return piece.length;
  }

  #write(text) {
    if (!text) return;
    if (this.#parser.pending.length > LONGEST_DOUBT) smd.parser_write(this.#parser, "\n");
    smd.parser_write(this.#parser, text);
    this.#before = text.at(-1);
  }

  #isLiteral() {
    const { token, tokens, len, pending } = this.#parser;
    return LITERAL.has(token) || LITERAL.has(tokens[len]) || pending.startsWith("](") || pending.startsWith("`");
  }
}

const isWord = (character) => /[\p{L}\p{N}]/u.test(character);

/** The path of open elements. What is nested too deeply goes into the deepest one that is allowed. */
class Target {
  #path;
  #tooDeep = 0;
  #counted = null; // the paragraph that `#length` is of
  #length = 0;
  #brackets = new WeakSet(); // elements whose text has its closing bracket, and no address behind it
  #refused = new WeakSet();

  constructor(root) {
    this.#path = [root];
  }

  get #top() {
    return this.#path.at(-1);
  }

  open(token) {
    if (this.#path.length > DEEPEST || this.#tooDeep) this.#tooDeep += 1;
    else this.#path.push(this.#make(token));
  }

  close() {
    if (this.#tooDeep) this.#tooDeep -= 1;
    else if (this.#path.length > 1) this.#finish(this.#path.pop());
  }

  /** The link or picture that is open has a `]`, and no address follows. */
  closeBracket() {
    if (!this.#tooDeep) this.#brackets.add(this.#top);
  }

  write(text) {
    if (this.#path.length === 2 && this.#top.localName === "p") this.#cut(text.length);
    if (this.#top instanceof CodeBlock) this.#top.append(text);
    else if (this.#top.lastChild?.nodeType === Node.TEXT_NODE) this.#top.lastChild.appendData(text);
    else this.#top.append(text);
  }

  set(name, value) {
    if (this.#tooDeep) return;
    if (name === smd.LANG && this.#top instanceof CodeBlock) this.#top.setLanguage(value);
    if ((name === smd.HREF || name === smd.SRC) && !setLink(this.#top, value)) this.#refused.add(this.#top);
    if (name === smd.CHECKED) this.#top.checked = true;
    if (name === smd.START && /^[0-9]{1,9}$/.test(value)) this.#top.start = Number(value);
  }

  finish() {
    this.#tooDeep = 0;
    while (this.#path.length > 1) this.close();
  }

  /** A paragraph is laid out as a whole whenever it grows: one without an end goes on in another. */
  #cut(length) {
    this.#length = this.#top === this.#counted ? this.#length + length : length;
    this.#counted = this.#top;
    if (this.#length < MOST_CHARACTERS) return;
    const next = document.createElement("p");
    next.dir = "auto";
    next.className = "continued";
    this.#path.pop().after(next);
    this.#path.push(next);
  }

  /** What leads nowhere is no link. */
  #finish(element) {
    if (element instanceof CodeBlock) element.end();
    else if (element.className === "math") showMath(element, element.dataset.isBlock === "true");
    else if (element.localName === "a" && !element.href) {
      const isPlain = !this.#refused.has(element); // brackets, with no address behind them
      if (isPlain) element.prepend(element.dataset.isPicture ? "![" : "[");
      if (isPlain && this.#brackets.has(element)) element.append("]");
      element.replaceWith(...element.childNodes);
    }
  }

  #make(token) {
    const parent = this.#top;
    if (token === smd.CODE_BLOCK || token === smd.CODE_FENCE) return new CodeBlock(parent);
    if (token === smd.TABLE) return makeTable(parent);
    if (token === smd.TABLE_ROW) return makeRow(parent);
    if (token === smd.TABLE_CELL && parent.cells.length >= MOST_CELLS) return parent.lastElementChild;
    const element = document.createElement(TAGS[token] ?? (token === smd.CHECKBOX ? "input" : cellOf(parent)));
    if (token === smd.CHECKBOX) Object.assign(element, { type: "checkbox", disabled: true, ariaLabel: "Task" });
    if (token === smd.IMAGE) element.dataset.isPicture = true;
    if (token === smd.EQUATION_BLOCK || token === smd.EQUATION_INLINE) {
      element.className = "math";
      element.dataset.isBlock = token === smd.EQUATION_BLOCK;
      if (token === smd.EQUATION_BLOCK) Object.assign(element, { tabIndex: 0, role: "region", ariaLabel: "Formula" }); // may be wide
    }
    if (DIRECTED.includes(element.localName)) element.dir = "auto";
    parent.append(element);
    return element;
  }
}

/** Of a table's rows the first is its head. Long tables are cut into parts: browsers lay out a table as a whole. */
const ROWS = 40;

function makeTable(parent) {
  const frame = document.createElement("div");
  frame.className = "table";
  frame.tabIndex = 0; // wide ones are scrolled with the keyboard, too
  frame.role = "region";
  frame.ariaLabel = "Table";
  const table = document.createElement("table");
  frame.append(table);
  parent.append(frame);
  return table;
}

function makeRow(table) {
  const frame = table.parentNode;
  let part = frame.lastElementChild;
  if (!part.tHead) return part.createTHead().insertRow();
  if (part.tBodies[0]?.rows.length >= ROWS) part = continueTable(part);
  return (part.tBodies[0] ?? part.createTBody()).insertRow();
}

/** Another table below, with the same columns. Screen readers hear the head again. */
function continueTable(before) {
  const widths = Array.from(before.tHead.rows[0].cells, (cell) => cell.getBoundingClientRect().width);
  const part = document.createElement("table");
  const head = part.createTHead();
  head.className = "unseen";
  head.append(before.tHead.rows[0].cloneNode(true));
  const columns = document.createElement("colgroup");
  for (const width of widths) {
    const column = document.createElement("col");
    column.style.width = `${width}px`;
    columns.append(column);
  }
  part.prepend(columns);
  part.style.tableLayout = "fixed";
  part.style.width = `${widths.reduce((sum, width) => sum + width, 0)}px`;
  before.after(part);
  return part;
}

const cellOf = (row) => (row.parentNode?.localName === "thead" ? "th" : "td");

/** Returns whether the address is one that may be followed. */
function setLink(element, given) {
  const address = given.trim().split(/\s/, 1)[0].replace(/^<|>$/g, ""); // a title may stand behind it
  if (address.length > MAX_LINK || !URL.canParse(address)) return false;
  const url = new URL(address);
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return false;
  element.href = url.href;
  element.target = "_blank";
  element.rel = "noopener noreferrer nofollow";
  element.title = url.href; // where it leads, whatever its text says
  return true;
}
