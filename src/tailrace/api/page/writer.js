/** Text of a model as nodes: paragraphs, fenced code and inline code, written as it comes.
 *
 * Only ever appends, so that a token costs what it weighs and not what stands before it. What a model writes becomes
 * text nodes and nothing else. What cannot be told yet (half a fence) waits, at most a line's beginning.
 */

const MAY_OPEN = /^ {0,3}(`{0,2}|`{3,}[^`]*)$/;
const OPENS = /^ {0,3}(`{3,})[^`]*$/;
const MAY_CLOSE = /^ {0,3}`* *$/;
const LONGEST_HEAD = 120; // a fence with the name of a language is shorter

export class Writer {
  #root;
  #block = null; // the <p> or the <code> that is written to
  #node = null; // the text node at its end
  #buffer = ""; // for #node
  #head = ""; // of a line that may be a fence
  #atHead = true;
  #fence = 0; // length of the one that is open
  #newlines = 0; // since the last visible character
  #ticks = 0; // of a run that is not over
  #inline = null; // the inline <code> that is open
  #inlineTicks = 0;

  constructor(root) {
    this.#root = root;
  }

  append(text) {
    for (const character of text.replaceAll("\r", "")) this.#take(character);
    this.#flush();
  }

  /** No more text comes: what waited is shown. */
  end() {
    const closes = this.#fence && this.#closes();
    if (!closes) this.#release();
    this.#endRun();
    this.#endParagraph();
  }

  #take(character) {
    if (!this.#atHead) {
      this.#write(character);
      return;
    }
    if (character === "\n") {
      this.#endHead();
      return;
    }
    this.#head += character;
    const isOpen = (this.#fence ? MAY_CLOSE : MAY_OPEN).test(this.#head) && this.#head.length < LONGEST_HEAD;
    if (!isOpen) this.#release();
  }

  /** A whole line may be a fence. */
  #endHead() {
    const opening = !this.#fence && OPENS.exec(this.#head);
    if (opening) {
      this.#head = "";
      this.#endRun();
      this.#openCode(opening[1].length);
    } else if (this.#fence && this.#closes()) {
      this.#head = "";
      this.#fence = 0;
      this.#leaveBlock();
    } else {
      if (this.#fence || this.#head.trim()) this.#release();
      this.#head = "";
      this.#write("\n");
    }
  }

  #closes() {
    return this.#head.trim().length >= this.#fence && /^ {0,3}`+ *$/.test(this.#head);
  }

  /** The line is none: what was kept back is text. */
  #release() {
    const head = this.#head;
    this.#head = "";
    this.#atHead = false;
    for (const character of head) this.#write(character);
  }

  #write(character) {
    if (character === "\n") this.#atHead = true;
    if (this.#fence) this.#writeCode(character);
    else if (character === "`") this.#ticks += 1;
    else {
      this.#endRun();
      this.#writeProse(character);
    }
  }

  #writeCode(character) {
    // A line break is written with the line behind it: the last one belongs to the fence.
    if (character === "\n") this.#newlines += 1;
    else this.#put("\n".repeat(this.#takeNewlines()) + character);
  }

  #writeProse(character) {
    if (character === "\n") {
      this.#newlines += 1;
    } else if (this.#root.firstChild || character.trim()) { // nothing begins with space
      this.#startProse();
      this.#put(character);
    }
  }

  /** Paragraph and line are those that the next character belongs to. */
  #startProse() {
    const newlines = this.#takeNewlines();
    if (newlines > 1) this.#endParagraph();
    if (!this.#block) this.#openParagraph();
    else if (newlines === 1) this.#put("\n");
  }

  /** A run of backticks is over: it opens inline code, closes it, or is text. */
  #endRun() {
    const ticks = this.#ticks;
    if (!ticks) return;
    this.#ticks = 0;
    this.#startProse();
    if (!this.#inline) {
      this.#inline = document.createElement("code");
      this.#inlineTicks = ticks;
      this.#into(this.#inline);
      this.#block.append(this.#inline);
    } else if (ticks === this.#inlineTicks) {
      this.#into(this.#inline.parentNode);
      this.#inline = null;
    } else {
      this.#put("`".repeat(ticks));
    }
  }

  #openParagraph() {
    this.#block = document.createElement("p");
    this.#block.dir = "auto";
    this.#root.append(this.#block);
    this.#into(this.#block);
  }

  #endParagraph() {
    this.#flush();
    // What was never closed is no code.
    this.#inline?.replaceWith("`".repeat(this.#inlineTicks), ...this.#inline.childNodes);
    this.#leaveBlock();
  }

  #openCode(ticks) {
    this.#endParagraph();
    const frame = document.createElement("pre");
    frame.tabIndex = 0; // long lines are scrolled with the keyboard, too
    this.#block = document.createElement("code");
    frame.append(this.#block);
    this.#root.append(frame);
    this.#into(this.#block);
    this.#fence = ticks;
  }

  #leaveBlock() {
    this.#flush();
    this.#block = this.#node = this.#inline = null;
    this.#newlines = 0;
    this.#atHead = true;
  }

  #takeNewlines() {
    const newlines = this.#newlines;
    this.#newlines = 0;
    return newlines;
  }

  #put(text) {
    this.#buffer += text;
  }

  #into(element) {
    this.#flush();
    this.#node = document.createTextNode("");
    element.append(this.#node);
  }

  #flush() {
    if (this.#buffer) this.#node.appendData(this.#buffer);
    this.#buffer = "";
  }
}
