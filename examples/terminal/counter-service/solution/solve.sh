#!/bin/bash
set -e
cat > /app/service.py <<'PY'
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LOG = "/app/counts.log"
lock = threading.Lock()
counters = {}
if os.path.exists(LOG):
    for line in open(LOG):
        if line.endswith("\n"):
            counters[line.strip()] = counters.get(line.strip(), 0) + 1
log = open(LOG, "a")


class Handler(BaseHTTPRequestHandler):
    def answer(self, method):
        _, _, name = self.path.partition("/count/")
        if not name or not self.path.startswith("/count/"):
            return self.send_error(404)
        with lock:
            if method == "POST":
                log.write(name + "\n")
                log.flush()
                os.fsync(log.fileno())
                counters[name] = counters.get(name, 0) + 1
            text = str(counters.get(name, 0)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):
        self.answer("GET")

    def do_POST(self):
        self.answer("POST")

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    allow_reuse_address = True
    request_queue_size = 64


server = Server(("127.0.0.1", 8080), Handler)
with open("/app/service.pid.new", "w") as file:
    file.write(str(os.getpid()))
os.replace("/app/service.pid.new", "/app/service.pid")
server.serve_forever()
PY
cat > /app/start.sh <<'SH'
#!/bin/bash
answers() { (exec 3<> /dev/tcp/127.0.0.1/8080) 2> /dev/null; }
answers && exit 0
rm -f /app/service.pid
setsid python3 /app/service.py > /dev/null 2>&1 < /dev/null &
for _ in {1..90}; do
    if answers && [[ -s /app/service.pid ]]; then exit 0; fi
    sleep 0.1
done
exit 1
SH
bash /app/start.sh
