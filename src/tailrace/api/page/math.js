/** Formulas as MathML. A library parses them; only elements, attributes and styles of these lists become nodes. A formula that
 * it does not understand, or that is too long, stays text. */

import { nextFrame } from "./frames.js";

const NAMESPACE = "http://www.w3.org/1998/Math/MathML";
const LONGEST = 2000; // characters
const DEEPEST = 60; // of elements in elements
const MOST_NODES = 3000;
const ELEMENTS = new Set([
  "math", "menclose", "mfrac", "mi", "mmultiscripts", "mn", "mo", "mover", "mpadded", "mphantom", "mprescripts", "mroot", "mrow",
  "mspace", "msqrt", "mstyle", "msub", "msubsup", "msup", "mtable", "mtd", "mtext", "mtr", "munder", "munderover",
]);
const ATTRIBUTES = new Set([
  "accent", "accentunder", "columnalign", "columnspan", "depth", "display", "displaystyle", "fence", "form", "height", "largeop",
  "linethickness", "lspace", "mathvariant", "maxsize", "minsize", "movablelimits", "notation", "rowspan", "rspace", "scriptlevel",
  "separator", "stretchy", "symmetric", "voffset", "width",
]);
const STYLES = new Set([
  "border", "borderBottom", "borderLeft", "borderRight", "borderTop", "paddingLeft", "paddingRight", "textAlign",
]);
const VALUE = /^[\w.%+ -]{1,60}$/;
const OPTIONS = { throwOnError: true, trust: false, maxExpand: 300, maxSize: [20, 200], wrap: "none" };

let loading = null;

/** Show the formula in an element whose text it is, soon. `isBlock`: on a line of its own. */
export async function showMath(element, isBlock) {
  const text = element.textContent;
  if (text.length > LONGEST) return;
  loading ??= import("./lib/temml.js");
  const { default: temml } = await loading.catch(() => ((loading = null), {}));
  if (temml) nextFrame(() => replace(element, text, isBlock, temml));
}

function replace(element, text, isBlock, temml) {
  try {
    const tree = temml.__renderToMathMLTree(text, { ...OPTIONS, displayMode: isBlock, macros: {} });
    const made = new Copy().nodesOf(tree, 0);
    element.replaceChildren(...made);
    element.classList.add("shown");
  } catch {
    // It stays text.
  }
}

class Copy {
  #count = 0;

  /** Throws: RangeError where the tree is too large. */
  nodesOf(part, depth) {
    this.#count += 1;
    if (depth > DEEPEST || this.#count > MOST_NODES) throw new RangeError();
    if (part.text !== undefined) return [document.createTextNode(part.text)];
    const children = part.children.flatMap((child) => this.nodesOf(child, depth + 1));
    if (!ELEMENTS.has(part.type)) return children;
    const element = document.createElementNS(NAMESPACE, part.type);
    for (const [name, value] of Object.entries(part.attributes)) {
      if (ATTRIBUTES.has(name) && VALUE.test(value)) element.setAttribute(name, value);
    }
    for (const [name, value] of Object.entries(part.style)) {
      if (STYLES.has(name) && VALUE.test(value)) element.style[name] = value;
    }
    element.append(...children);
    return [element];
  }
}
