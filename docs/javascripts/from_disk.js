// A page that was opened from a disk may not start a worker from a file, only from text. So the search
// gets its worker from search/worker.js, which docs/site_hooks.py writes.
if (location.protocol === "file:") {
  const source = new URL("../search/worker.js", document.currentScript.src)
  document.write(`<script src="${source}"></script>`)
  window.Worker = class extends Worker {
    constructor() {
      super(URL.createObjectURL(new Blob([__worker])))
    }
  }
}
