/** Images for a question: chosen, made small enough, and shown before they are sent. */

import { signal } from "./lib/signals.js";

export const MOST = 16; // images of a question
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const LONGEST_PX = 1568; // of a side: models scale larger images down themselves
const SMALL_BYTES = 1_000_000; // smaller files are sent as they are
const MOST_BYTES = 60_000_000; // of a file that a browser is asked to decode
const THUMB_PX = 192;
const QUALITY = 0.9;

/** Those of the question that is being written: `{key, name, blob, thumb}`. */
export const pictures = signal([]);
export const isPreparing = signal(false);

let numbered = 0;

export const imagesIn = (files) => Array.from(files ?? []).filter(({ type }) => type.startsWith("image/"));

/** Add files to a draft, one after the other, also if it is not shown any more. `its` gets or sets its images. Returns why
 * some were not added, or "". */
export async function addFiles(files, its) {
  const faults = [];
  isPreparing.value = true;
  try {
    for (const file of files) {
      if (its.images.length >= MOST) {
        faults.push(`A message can have at most ${MOST} images.`);
        break;
      }
      try {
        const made = await prepare(file);
        its.images = [...its.images, made];
      } catch (error) {
        if (!(error instanceof Unusable)) reportError(error);
        faults.push(`${nameOf(file)} cannot be used: ${error instanceof Unusable ? error.message : "it is damaged."}`);
      }
    }
  } finally {
    isPreparing.value = false;
  }
  return faults.join(" ");
}

export function removePicture(key) {
  pictures.value = pictures.value.filter((one) => one.key !== key);
}

class Unusable extends Error {}

const nameOf = (file) => file.name || "The image";

/** Throws: Unusable. */
async function prepare(file) {
  if (!TYPES.includes(file.type)) throw new Unusable("it is none of PNG, JPEG, WebP or GIF.");
  if (file.size > MOST_BYTES) throw new Unusable("it is too large.");
  const bitmap = await createImageBitmap(file, { imageOrientation: "from-image" }).catch(() => {
    throw new Unusable("it is damaged.");
  });
  try {
    const thumb = draw(bitmap, THUMB_PX).toDataURL("image/jpeg", QUALITY);
    const isSmall = file.size <= SMALL_BYTES && Math.max(bitmap.width, bitmap.height) <= LONGEST_PX;
    const blob = isSmall ? file : await shrink(bitmap, file.type);
    numbered += 1;
    return { key: `p${numbered}`, name: file.name || `Image ${numbered}`, blob, thumb };
  } finally {
    bitmap.close();
  }
}

/** A drawing stays a PNG, whose lines are sharp, unless that is large. */
async function shrink(bitmap, type) {
  const canvas = draw(bitmap, LONGEST_PX);
  const encode = (kind) => new Promise((resolve) => canvas.toBlob(resolve, kind, QUALITY));
  const sharp = type === "image/jpeg" ? null : await encode("image/png");
  const blob = sharp && sharp.size <= SMALL_BYTES ? sharp : await encode("image/jpeg");
  if (!blob) throw new Unusable("it has too many pixels.");
  return blob;
}

function draw(bitmap, most_px) {
  const scale = Math.min(1, most_px / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // JPEG has no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas;
}
