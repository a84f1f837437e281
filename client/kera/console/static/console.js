// What of a page is live is asked for again, and put in the place of what was there. Without this, a page shows what
// was so when it was loaded.
"use strict";

const live = document.querySelector("[data-live]");

async function refresh() {
  if (document.hidden || live.contains(document.activeElement) || String(window.getSelection())) {
    return; // nobody looks, or somebody is at it
  }
  try {
    const answer = await fetch(window.location.href.split("#")[0], {
      cache: "no-store",
      credentials: "same-origin",
      headers: { "X-Kera-By-Itself": "1" },
    });
    if (answer.redirected) {
      window.location.reload(); // the session has ended
      return;
    }
    if (!answer.ok) {
      document.body.classList.add("stale");
      return;
    }
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const newer = page.getElementById(live.id);
    if (newer !== null) {
      live.replaceChildren(...newer.childNodes);
      document.body.classList.remove("stale");
    }
  } catch {
    document.body.classList.add("stale");
  }
}

async function keepFresh(seconds) {
  for (;;) {
    await new Promise((resume) => window.setTimeout(resume, seconds * 1000));
    await refresh();
  }
}

if (live !== null) {
  keepFresh(Number(live.dataset.live));
}
