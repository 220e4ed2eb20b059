// Pages that are opened as files may not start workers, and the search is one. There its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise(resolve => {
        const script = frame.contentDocument.createElement("script");
        script.src = new URL(url, location.href);
        script.onload = resolve;
        frame.contentDocument.body.appendChild(script);
      });
    }
    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
