// Search where the pages are opened from files: there a page may start no worker, so a hidden frame
// runs the script that a worker would, and messages go to and fro between the two windows.
"use strict";

class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);
    const inside = this.frame.contentWindow;
    this.listen = (event) => {
      if (event.source !== inside) return;
      const message = new MessageEvent("message", {data: event.data});
      this.dispatchEvent(message);
      if (this.onmessage) this.onmessage(message);
    };
    window.addEventListener("message", this.listen);
    // What a worker's script expects to find.
    inside.postMessage = (data) => window.dispatchEvent(new MessageEvent("message", {data, source: inside}));
    inside.importScripts = async (...urls) => {
      for (const each of urls) await FrameWorker.load(inside.document, each);
    };
    this.ready = FrameWorker.load(inside.document, url);
  }

  static load(page, url) {
    return new Promise((done, failed) => {
      const script = page.createElement("script");
      script.src = url;
      script.onload = done;
      script.onerror = failed;
      page.body.append(script);
    });
  }

  postMessage(data) {
    const message = new MessageEvent("message", {data: structuredClone(data)});
    this.ready.then(() => this.frame.contentWindow.dispatchEvent(message));
  }

  terminate() {
    window.removeEventListener("message", this.listen);
    this.frame.remove();
  }
}

window.IFrameWorker = FrameWorker; // the search asks for this name
if (location.protocol === "file:") window.Worker = FrameWorker;
