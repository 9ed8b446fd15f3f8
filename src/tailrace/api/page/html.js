/** Templates: html`<p>${text}</p>` makes what preact draws. Texts in it are texts, never markup. */

import htm from "./lib/htm.js";
import { h } from "./lib/preact.js";

export const html = htm.bind(h);
