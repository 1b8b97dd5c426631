// Inside Kubeflow's central dashboard: shows the namespace that is selected there.
// The dashboard and the pages in its frame exchange messages {type, value}: a page says that it is connected, and the
// dashboard answers with the namespace now, and again each time that another one is selected.

const CONNECTED = "iframe-connected";
const SELECTED = "namespace-selected";
const ALL = "all-namespaces";

function show(namespace) {
  const address = new URL(location.href);
  address.searchParams.delete("project");
  if (namespace) address.searchParams.set("namespace", namespace);
  else address.searchParams.delete("namespace");
  if (address.href !== location.href) location.replace(address);
}

function receive(event) {
  // A page of another origin must not choose what is shown.
  if (event.source !== window.parent || event.origin !== location.origin) return;
  if (event.data?.type === SELECTED && typeof event.data.value === "string") show(event.data.value);
  else if (event.data?.type === ALL) show("");
}

// A job has one namespace, so a selection changes only the lists.
if (window.parent !== window && !location.pathname.includes("/jobs/")) {
  window.addEventListener("message", receive);
  window.parent.postMessage({ type: CONNECTED }, location.origin);
}
