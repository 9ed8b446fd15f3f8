/** Templates: html`<p>${text}</p>` makes what preact draws. Texts in it are texts, never markup. */

import htm from "/page/lib/htm.js";
import { h } from "/page/lib/preact.js";

export const html = htm.bind(h);
