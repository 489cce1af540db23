// Makes one element equal to another by changing only what differs, so that focus, selection, scroll positions and open
// details survive an update. Rows and cards are matched by `id` or `data-key`, everything else by position.

const key = (node) => (node.nodeType === Node.ELEMENT_NODE ? node.id || node.dataset?.key : undefined);

export function morph(old, wanted) {
  if (old.isEqualNode(wanted)) return;
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== wanted.data) old.data = wanted.data;
    return;
  }
  morphAttributes(old, wanted);
  // a pressed copy button keeps its confirmation for a while
  if (!old.classList.contains("copy")) morphChildren(old, wanted);
}

// an update must not undo what the visitor did to an element
const kept = (element, name) =>
  (name === "open" && element.localName === "details") || (name === "hidden" && element.classList.contains("copy"));

function morphAttributes(old, wanted) {
  for (const { name, value } of wanted.attributes) {
    if (!kept(old, name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  for (const { name } of [...old.attributes]) {
    if (!kept(old, name) && !wanted.hasAttribute(name)) old.removeAttribute(name);
  }
}

function morphChildren(old, wanted) {
  const keyed = new Map([...old.children].filter(key).map((child) => [key(child), child]));
  let at = old.firstChild;
  for (const child of [...wanted.childNodes]) {
    let match = key(child) ? keyed.get(key(child)) : at;
    if (!match || match.nodeName !== child.nodeName || key(match) !== key(child)) match = undefined;
    if (match) {
      if (match === at) at = at.nextSibling;
      else old.insertBefore(match, at);
      morph(match, child);
    } else {
      old.insertBefore(document.importNode(child, true), at);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}
