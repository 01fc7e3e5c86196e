"use strict";
// What a person sees of a file: {numSeen, pixelsOf}. The server reports numSeen images for the file; pixelsOf(index)
// promises one as an ImageBitmap, or null if the browser cannot draw it. An Error has a sentence for the person.
const THUMBNAIL_SIDE = 208;  // in pixels, for screens with two in each of the style's
const MAX_KEPT_PAGES = 100;  // of a PDF, some hundred kilobytes each

const OPENERS = { image: openImage, pdf: openPdf, video: openVideo };
const UNSEEN = { numSeen: 1, pixelsOf: async () => null };

async function openImage(file) {
  // A format that only the server can read is sent, too, and shown by its name.
  const pixels = await createImageBitmap(file).catch(() => null);
  return { numSeen: 1, pixelsOf: async () => pixels };
}

// The server draws the pages, as it does for the model: each when it is first looked at. Later looks find its PNG here.
async function openPdf(file) {
  const kept = new Map();  // promises by index, the one looked at last at the end
  const pageOf = (index) => {
    const page = kept.get(index) ?? drawnPage(file, index + 1);
    kept.delete(index);
    kept.set(index, page);
    page.catch(() => kept.delete(index));
    if (kept.size > MAX_KEPT_PAGES) kept.delete(kept.keys().next().value);
    return page;
  };
  const { numPages } = await pageOf(0);
  return { numSeen: numPages, pixelsOf: async (index) => createImageBitmap((await pageOf(index)).png) };
}

async function drawnPage(file, number) {
  const request = { method: "POST", headers: { ...headers(), "Content-Type": "application/pdf" }, body: file };
  const response = await fetch(`pdf_pages/${number}`, request).catch(() => { throw new Error(UNREACHED); });
  if (!response.ok) throw new Error(await sentence(response));
  return { png: await response.blob(), numPages: Number(response.headers.get("x-saccade-num-pages")) };
}

// Its first frame stands for a video, if the browser knows the codec.
async function openVideo(file) {
  const url = URL.createObjectURL(file);
  const video = Object.assign(document.createElement("video"), { muted: true, preload: "auto", src: url });
  const isLoaded = await new Promise((done) => {
    Object.assign(video, { onloadeddata: () => done(true), onerror: () => done(false) });
  });
  const pixels = isLoaded ? await createImageBitmap(video).catch(() => null) : null;
  URL.revokeObjectURL(url);
  return { numSeen: 1, pixelsOf: async () => pixels };
}

// Returns a data: URL, since the policy allows no other images.
function thumbnailOf(pixels) {
  if (!pixels) return "";
  const scale = Math.min(1, THUMBNAIL_SIDE / Math.max(pixels.width, pixels.height));
  const [width, height] = [pixels.width, pixels.height].map((side) => Math.max(1, Math.round(side * scale)));
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(pixels, 0, 0, width, height);
  return canvas.toDataURL();
}
