// The search runs in a worker, which browsers refuse to pages that are opened from a disk.
// There, a hidden frame takes the worker's place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      this.inside.importScripts = (...urls) => Promise.all(urls.map((each) => this.load(each)));
      this.ready = this.load(url);
    }

    load(url) {
      return new Promise((loaded, failed) => {
        const script = this.inside.document.createElement("script");
        script.src = new URL(url, location.href).href;
        script.onload = loaded;
        script.onerror = failed;
        this.inside.document.head.append(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => {
        const event = new this.inside.MessageEvent("message", { data });
        this.inside.dispatchEvent(event);
      });
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
