/** What this browser keeps: drafts, presets, a question that may not have been heard. Nothing secret, nothing of answers.
 * Storage may be full or refused; then it lasts as long as the page. */

const PREFIX = "tailrace.page.2."; // counts the shapes that it has had
const unsaved = new Map();

export function recall(name) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name)) ?? unsaved.get(name) ?? null;
  } catch {
    return unsaved.get(name) ?? null;
  }
}

/** null forgets it. */
export function keep(name, value) {
  unsaved.delete(name);
  try {
    if (value === null) localStorage.removeItem(PREFIX + name);
    else localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    if (value !== null) unsaved.set(name, value);
  }
}

/** In the tab's own storage: another tab must not ask it, too. */
export function keepQuestion(question) {
  try {
    if (question === null) sessionStorage.removeItem(`${PREFIX}question`);
    else sessionStorage.setItem(`${PREFIX}question`, JSON.stringify(question));
  } catch {
    // It is lost with the page.
  }
}

export function recallQuestion() {
  try {
    return JSON.parse(sessionStorage.getItem(`${PREFIX}question`));
  } catch {
    return null;
  }
}
