// Keeps an open page up to date. Without this script the pages work, and are as old as their loading.
"use strict";

(() => {
  const source = document.body.dataset.live;
  const content = document.getElementById("content");
  const place = document.querySelector(".liveness");
  if (!source || !content || !place || !window.EventSource) return;

  const status = document.getElementById("liveness");
  const trouble = document.getElementById("trouble");
  const button = document.getElementById("pause");
  let stream = null;
  let paused = false;

  const show = (state, text) => {
    place.className = "liveness " + state;
    if (status.textContent !== text) status.textContent = text;
  };

  const warn = (text) => {
    if (trouble.textContent.endsWith(text) && Boolean(text) === Boolean(trouble.firstChild)) return;
    trouble.replaceChildren();
    if (!text) return;
    const line = document.createElement("p");
    const title = document.createElement("b");
    line.className = "notice bad";
    title.textContent = "Not up to date.";
    line.append(title, " " + text);
    trouble.append(line);
  };

  const same = (a, b) =>
    a.nodeType === b.nodeType && a.nodeName === b.nodeName && (a.id || "") === (b.id || "");

  // In front of an element that is found again, all that is not found again is gone, too.
  const isGone = (node, wanted, found) =>
    node.id
      ? !wanted.has(node.id)
      : Boolean(found) || (node.nodeType === Node.TEXT_NODE && !node.data.trim());

  // Makes the children of one element those of another. What is the same stays, with its focus,
  // its selection and its place; rows are found again by their ids.
  const update = (old, fresh) => {
    const known = new Map();
    for (const child of old.children) if (child.id) known.set(child.id, child);
    const wanted = new Set(Array.from(fresh.children, (child) => child.id));
    let at = old.firstChild;
    for (const next of [...fresh.childNodes]) {
      const found = next.id ? known.get(next.id) : null;
      // What is gone is taken out first, because an element that is moved loses the focus.
      while (at && next.nodeType === Node.ELEMENT_NODE && isGone(at, wanted, found)) {
        const gone = at;
        at = at.nextSibling;
        gone.remove();
      }
      if (found && found !== at && found.nodeName === next.nodeName) {
        old.insertBefore(found, at);
        at = found;
      }
      if (at && same(at, next)) {
        if (at.nodeType === Node.ELEMENT_NODE) {
          if (!at.isEqualNode(next)) renew(at, next);
        } else if (at.data !== next.data) {
          at.data = next.data;
        }
        at = at.nextSibling;
      } else {
        old.insertBefore(next, at);
      }
    }
    while (at) {
      const gone = at;
      at = at.nextSibling;
      gone.remove();
    }
  };

  const renew = (old, fresh) => {
    for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of fresh.attributes)
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    // A form that is being filled in stays as it is.
    if (old.nodeName !== "FORM") update(old, fresh);
  };

  const open = () => {
    if (stream || paused || document.hidden) return;
    show("", "Connecting");
    stream = new EventSource(source);
    stream.addEventListener("main", (event) => {
      const fresh = new DOMParser().parseFromString(JSON.parse(event.data), "text/html");
      update(content, fresh.body);
      warn("");
      show("live", "Live");
    });
    stream.addEventListener("trouble", (event) => {
      warn(JSON.parse(event.data));
      show("broken", "Not up to date");
    });
    stream.addEventListener("over", () => {
      close();
      const next = encodeURIComponent(location.pathname + location.search);
      location.assign(document.body.dataset.signIn + "?next=" + next);
    });
    stream.onerror = () => {
      show("broken", "Not live: the console cannot be reached");
      if (stream && stream.readyState === EventSource.CLOSED) {
        // The server refused the stream, for example after a restart: try again later.
        close();
        setTimeout(open, 5000);
      }
    };
  };

  const close = () => {
    if (stream) stream.close();
    stream = null;
  };

  button.addEventListener("click", () => {
    paused = !paused;
    button.textContent = paused ? "Continue" : "Pause";
    if (paused) {
      close();
      show("", "Paused");
    } else {
      open();
    }
  });
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", open);

  place.hidden = false;
  open();
})();
