/** The settings of a conversation, which the server keeps in its metadata: texts of at most 512 characters. */

const PIECE = 512;
const PIECES = 8;
export const MAX_SYSTEM = PIECE * PIECES;

/** At a temperature of 1 small models ramble. `max_tokens` 0 leaves the length to the server. */
export const NO_SETTINGS = Object.freeze({ system: "", temperature: 0.6, top_p: 1, max_tokens: 0, model: "", tools: [] });

export const PRESETS = [
  { name: "Balanced", temperature: 0.6, top_p: 1 },
  { name: "Precise", temperature: 0, top_p: 1 },
  { name: "Lively", temperature: 1, top_p: 0.95 },
];

export function settingsOf(metadata) {
  const pieces = Array.from({ length: PIECES }, (_, place) => metadata[`system.${place + 1}`] ?? "");
  return {
    system: pieces.join(""),
    temperature: within(metadata.temperature, 0, 2, NO_SETTINGS.temperature),
    top_p: within(metadata.top_p, 0.01, 1, NO_SETTINGS.top_p),
    max_tokens: Math.floor(within(metadata.max_tokens, 0, 1e9, 0)),
    model: metadata.model ?? "",
    tools: (metadata.tools ?? "").split(",").filter(Boolean),
  };
}

/** `before` may have entries of others, which stay. */
export function metadataOf({ system, temperature, top_p, max_tokens, model, tools }, before = {}) {
  const others = Object.entries(before).filter(([name]) => !/^(system\.[1-8]|temperature|top_p|max_tokens|model|tools)$/.test(name));
  const entries = [["temperature", temperature], ["top_p", top_p], ["max_tokens", max_tokens], ["model", model], ["tools", tools.join(",")]];
  const characters = Array.from(system); // not to cut one in two
  const pieces = Array.from({ length: PIECES }, (_, place) => [
    `system.${place + 1}`,
    characters.slice(place * PIECE, (place + 1) * PIECE).join(""),
  ]);
  const isSet = ([name, value]) => value !== "" && value !== NO_SETTINGS[name];
  return Object.fromEntries([...others, ...[...pieces, ...entries].filter(isSet).map(([name, value]) => [name, String(value)])]);
}

function within(text, least, most, otherwise) {
  const number = Number(text ?? NaN);
  return number >= least && number <= most ? number : otherwise;
}
