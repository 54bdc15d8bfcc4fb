// Search in pages that are opened as files, for which browsers start no worker: its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<script>var postMessage = message => parent.postMessage(message, "*");<\/script><script src="${url}"><\/script>`;
      this.ready = new Promise(ready => frame.addEventListener("load", () => ready(frame.contentWindow)));
      addEventListener("message", event => {
        if (event.source === frame.contentWindow) this.dispatchEvent(new MessageEvent("message", {data: event.data}));
      });
      document.body.append(frame);
    }

    postMessage(message) {
      this.ready.then(frame => frame.dispatchEvent(new MessageEvent("message", {data: message})));
    }
  };
}
